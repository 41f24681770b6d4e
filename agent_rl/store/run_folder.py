"""The folder of one run: what lies where, who may write to it, and what a resume keeps.

``<run_root>/<name>/``: ``config.yaml``, ``metrics.jsonl``, ``tensorboard/``,
``trajectories/step-000012.parquet``, ``checkpoints/step-000010/``, ``plots/``, ``summary.json``.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson
from filelock import FileLock

from agent_rl.config.reading import dump_config, load_resolved
from agent_rl.config.schema import RunConfig
from agent_rl.config.suggestions import command_line
from agent_rl.errors import AgentRLError
from agent_rl.store.file_lock import try_lock


class RunFolderError(AgentRLError):
    """The run folder is in use, holds another run, cannot be made, or is not a run folder."""


class RunExistsError(RunFolderError):
    """The name is taken."""


class RunFolder:
    """Owns a run folder while open: a second process is refused, a killed one leaves no lock."""

    def __init__(self, path: Path, lock: FileLock) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """Make the folder of a new run; an existing run of the same name is never overwritten."""
        path = Path(config.run_root) / config.name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(config, error) from error
        try:
            path.mkdir()
        except FileExistsError as error:
            resume = command_line("agent-rl", "train", "--resume", path)
            raise RunExistsError(
                f"{path} already holds a run: resume it with {resume}; or give another name "
                "(name=...)"
            ) from error
        except OSError as error:
            raise _unwritable(config, error) from error
        folder = cls(path, _take_lock(path))
        write_aside(folder.config_file, dump_config(config).encode())
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, RunConfig]:
        """Open an existing run; return it and the config it was started with."""
        if not (path / "config.yaml").is_file():
            raise RunFolderError(f"{path} is no run folder: expected config.yaml in it")
        folder = cls(path, _take_lock(path))
        return folder, load_resolved(folder.config_file)

    @property
    def config_file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def summary_file(self) -> Path:
        return self.path / "summary.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    def trajectories_file(self, step: int) -> Path:
        return self.path / "trajectories" / f"step-{step:06d}.parquet"

    def forget_after(self, step: int) -> None:
        """Drop metrics and trajectories of steps after ``step``: a resumed run does them again."""
        kept = [row for row in read_metrics(self.metrics_file) if int(row["step"]) <= step]
        if self.metrics_file.exists():
            write_aside(self.metrics_file, b"".join(orjson.dumps(row) + b"\n" for row in kept))
        for file in (self.path / "trajectories").glob("step-*.parquet"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_aside(self.summary_file, orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n")

    def has_begun(self) -> bool:
        """Return True once the run has left something that a resume would need."""
        left = (self.metrics_file, self.checkpoints, self.path / "evaluation-before.json")
        return any(path.exists() for path in left)

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._lock.release()


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a ``metrics.jsonl``; a last line torn by a kill is left out."""
    if not file.exists():
        return []
    rows: list[dict[str, Any]] = []
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        try:
            if line:
                rows.append(orjson.loads(line))
        except orjson.JSONDecodeError as error:
            if number != len(lines) - 1:
                raise RunFolderError(f"{file} line {number + 1} is damaged: {error}") from error
    return rows


def write_aside(file: Path, data: bytes) -> None:
    """Replace ``file`` as a whole: a kill leaves the old or the new content, never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as handle:
            handle.write(data)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


def _take_lock(path: Path) -> FileLock:
    lock = try_lock(path / ".lock")
    if lock is None:
        raise RunFolderError(f"{path} is in use by another process: wait for it or stop it")
    return lock


def _unwritable(config: RunConfig, error: OSError) -> RunFolderError:
    return RunFolderError(
        f"run_root cannot take a run: got={config.run_root} ({error}) expected a folder that can be"
        " made and written to; give another one (run_root=...)"
    )
