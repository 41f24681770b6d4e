"""Pages that let a person read what an agent did."""

from __future__ import annotations

from agent_rl.view.pages import Verdict, episode_page, index_page
from agent_rl.view.record import EpisodeRecord, TurnRecord, load_record, save_record

__all__ = [
    "EpisodeRecord",
    "TurnRecord",
    "Verdict",
    "episode_page",
    "index_page",
    "load_record",
    "save_record",
]
