"""One episode as text for people: what was said and done, by whom, at what cost."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_rl.errors import AgentRLError
from agent_rl.store.run_folder import write_aside


class RecordError(AgentRLError):
    """An episode's file is absent, damaged or of another form."""


@dataclass(frozen=True)
class TurnRecord:
    """One completion and the reply. Tokens are those of the completion and of its prompt."""

    action: str
    observation: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds_generate: float = 0.0
    seconds_environment: float = 0.0
    malformed: bool = False
    reasoning: str = ""  # thinking that the endpoint gave apart from the text


@dataclass(frozen=True)
class EpisodeRecord:
    """Everything about one episode that a person reads. ``notes`` tell what the patch leaves out.

    ``status`` is that of a trajectory: completed, truncated, aborted or failed.
    """

    task_id: str
    sample: int
    model: str
    status: str
    stop_reason: str
    system_prompt: str
    user_prompt: str
    turns: tuple[TurnRecord, ...] = ()
    patch: str = ""
    notes: tuple[str, ...] = ()
    error: str = ""
    seconds: float = 0.0
    reward: float | None = None

    @property
    def completion_tokens(self) -> int:
        return sum(turn.completion_tokens for turn in self.turns)

    @property
    def prompt_tokens(self) -> int:
        """Tokens sent over all turns; what a cache saves is not subtracted."""
        return sum(turn.prompt_tokens for turn in self.turns)


def save_record(file: Path, record: EpisodeRecord) -> None:
    """Replace the file as a whole. Text that is not Unicode (stray bytes) is kept."""
    write_aside(file, json.dumps(asdict(record), indent=1).encode())


def load_record(file: Path) -> EpisodeRecord:
    """Read a file of :func:`save_record`. Raises RecordError."""
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        turns = tuple(TurnRecord(**turn) for turn in fields.pop("turns"))
        return EpisodeRecord(**{**fields, "turns": turns, "notes": tuple(fields["notes"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RecordError(f"{file} is no episode: got={error} expected a saved record") from error


def record_of_row(
    row: Mapping[str, Any], decode: Callable[[Sequence[int]], str] | None = None
) -> EpisodeRecord:
    """Make a record of a training trajectory, one row of ``store.trajectories``.

    ``decode`` turns the first prompt's token ids into text; without it the prompt stays empty.
    """
    starts = [turn["prompt_end"] for turn in row["turns"]]
    prompt = decode(row["token_ids"][: starts[0]]) if decode is not None and starts else ""
    turns = tuple(
        TurnRecord(
            action=turn["action"],
            observation=turn["observation"],
            prompt_tokens=turn["prompt_end"],
            completion_tokens=turn["completion_end"] - turn["prompt_end"],
            seconds_generate=turn["seconds_generate"],
            seconds_environment=turn["seconds_environment"],
        )
        for turn in row["turns"]
    )
    return EpisodeRecord(
        task_id=row["task_id"],
        sample=row["member"],
        model="policy, weights " + ", ".join(str(v) for v in row["weight_versions"] or ["?"]),
        status=row["status"],
        stop_reason=row["stop_reason"],
        system_prompt="",
        user_prompt=prompt,
        turns=turns,
        patch=bytes(row["patch"] or b"").decode("utf-8", "surrogateescape"),
        error=row["error"] or "",
        seconds=sum(turn.seconds_generate + turn.seconds_environment for turn in turns),
        reward=row["reward"],
    )
