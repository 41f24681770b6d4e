"""Does replay keep training stable? Runs the cells, skips finished ones, sums up what there is.

``<folder>/<cell>/`` is an ordinary run folder. A cell is finished when it has a ``summary.json``,
or a ``failure.json`` that says how its training broke. A cell that was interrupted continues from
its checkpoint or starts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Self

import orjson

from agent_rl.errors import AgentRLError, TrainerError
from agent_rl.store.run_folder import RunFolder, write_aside
from agent_rl.study.cells import Cell, Matrix, Setting
from agent_rl.study.outcome import Outcome, read_outcome

Report = Callable[[str], None]
RunCell = Callable[[Cell, Setting, Path], None]


def run_study(
    folder: Path,
    setting: Setting,
    matrix: Matrix,
    *,
    report: Report,
    run_cell: RunCell | None = None,
    done: Callable[[Sequence[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Run every unfinished cell of ``matrix`` below ``folder``; outcomes of its finished ones.

    ``done`` is called after each cell with what is there so far. Raises ``AgentRLError`` when the
    folder holds a study of another setting.
    """
    _claim(folder, setting)
    todo = matrix.cells()
    for number, cell in enumerate(todo, 1):
        known = read_outcome(cell, folder / cell.name)
        if known is None:
            report(f"{number} of {len(todo)}: {cell.name}")
            (run_cell or train_cell)(cell, setting, folder)
            known = read_outcome(cell, folder / cell.name)
            assert known is not None
            done(outcomes(folder, matrix))
        report(
            f"{cell.name}: held-out {known.before:.3f} to {known.after:.3f}, "
            f"KL {known.kl_last:.1e}, F(2) {known.f2_max:.1e}"
            + (", collapsed" if known.collapsed else "")
        )
    return outcomes(folder, matrix)


def outcomes(folder: Path, matrix: Matrix) -> list[Outcome]:
    """Of the cells that have finished."""
    read = (read_outcome(cell, folder / cell.name) for cell in matrix.cells())
    return [outcome for outcome in read if outcome is not None]


def train_cell(cell: Cell, setting: Setting, folder: Path) -> None:
    """Run one cell to its end; a loss or gradient that is not finite is its outcome."""
    from agent_rl.run.training_run import run_training

    config = cell.config(setting, folder)
    path = folder / cell.name
    run = RunFolder.open(path)[0] if (path / "config.yaml").is_file() else RunFolder.create(config)
    try:
        asyncio.run(run_training(config, run, _Silent()))
    except TrainerError as error:
        write_aside(path / "failure.json", orjson.dumps({"error": str(error)}) + b"\n")
    finally:
        run.close()


def _claim(folder: Path, setting: Setting) -> None:
    """Note the setting, or check that it is the one noted."""
    file = folder / "setting.json"
    wanted = orjson.dumps(asdict(setting), option=orjson.OPT_INDENT_2) + b"\n"
    if not file.is_file():
        write_aside(file, wanted)
    elif file.read_bytes() != wanted:
        raise AgentRLError(
            f"{folder} holds a study of another setting: got={asdict(setting)} "
            f"expected={orjson.loads(file.read_bytes())}; take another folder"
        )


class _Silent:
    """A display that shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def activity(self, what: str, done: int, total: int) -> None: ...

    def step_done(self, step: int, num_steps: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...
