"""Pages of a training run, from the trajectories it left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from agent_rl.errors import AgentRLError
from agent_rl.store.run_folder import write_aside
from agent_rl.store.trajectories import read_trajectories
from agent_rl.view.pages import IndexEntry, Verdict, episode_page, index_page
from agent_rl.view.record import EpisodeRecord, record_of_row

Decode = Callable[[Sequence[int]], str]


class NoTrajectoriesError(AgentRLError):
    """A folder holds no trajectories to show."""


def steps_with_trajectories(run: Path) -> list[int]:
    """Steps of a run whose trajectories are there, ascending."""
    return sorted(_files(run))


def write_run_pages(
    run: Path, out: Path, *, steps: Sequence[int] = (), decode: Decode | None = None
) -> Path:
    """Write ``index.html`` and a page for each branch of a trajectory; the address of the index.

    ``steps`` empty is all. ``decode`` turns prompt token ids into text. Raises
    NoTrajectoriesError.
    """
    files = _files(run)
    wanted = [step for step in sorted(files) if not steps or step in steps]
    if not wanted:
        raise NoTrajectoriesError(
            f"{run} has no trajectories of those steps: got={list(steps) or 'all'}"
            f" expected some of {sorted(files) or 'a run folder with trajectories/'}"
        )
    entries: list[IndexEntry] = []
    lines: list[list[str]] = []
    for step in wanted:
        rows = read_trajectories(files[step])
        whole = [row["reward"] for row in rows if row["branch"] == 0]
        rewards = [reward for reward in whole if reward is not None]
        mean = f"{sum(rewards) / len(rewards):.3f}" if rewards else ""
        lines.append([str(step), str(len(whole)), str(len(whole) - len(rewards)), mean])
        entries += [
            _write_episode(out, step, number, row, decode) for number, row in enumerate(rows)
        ]
    facts = [("run", run.name), ("steps", f"{wanted[0]} to {wanted[-1]}")]
    columns = ("step", "trajectories", "without reward", "mean reward")
    page = index_page(f"Run {run.name}", facts, [("Steps", columns, lines)], entries)
    write_aside(out / "index.html", page.encode("utf-8", "replace"))
    return out / "index.html"


def _files(run: Path) -> dict[int, Path]:
    return {int(f.stem.removeprefix("step-")): f for f in run.glob("trajectories/step-*.parquet")}


def _write_episode(
    out: Path, step: int, number: int, row: dict[str, Any], decode: Decode | None
) -> IndexEntry:
    record = record_of_row(row, decode)
    name = f"step-{step:06d}-{number:05d}.html"
    verdict = Verdict(_label(record), record.error or str(row["details"].get("grade", "")))
    page = episode_page(record, verdict, back="index.html")
    write_aside(out / name, page.encode("utf-8", "replace"))
    return IndexEntry(name, record, verdict)


def _label(record: EpisodeRecord) -> str:
    if record.reward is None:
        return record.status
    return "resolved" if record.reward > 0 else "unresolved"
