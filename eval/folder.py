"""The folder of an evaluation: its files, its one writer, and the run that it belongs to.

``config.yaml``, ``run.json``; for each sample ``samples/<n>/`` with ``predictions.jsonl``,
``episodes/``, ``grades/`` and the harness's own ``harness/``; ``report.json`` and ``html/``.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict
from pathlib import Path

import yaml

from agent_rl.run.resume import leaves
from agent_rl.store.file_lock import try_lock
from agent_rl.store.run_folder import write_aside
from agent_rl.view.record import EpisodeRecord, RecordError, load_record, save_record
from eval.config import SuiteConfig
from eval.errors import RunMismatchError
from eval.predictions import Prediction, read_predictions

# What a resumed run may change: how fast it goes, how it is judged, and how many tries there are.
_FREE = (
    "run_root",
    "samples",
    "num_workers",
    "max_consecutive_failures",
    "grading",
    "container.allow_emulation",
)


class EvalFolder:
    """Owns the folder while open: a second process is refused, a killed one leaves no lock."""

    def __init__(self, path: Path) -> None:
        """Open or create. Raises RunMismatchError when another process uses it."""
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        lock = try_lock(path / ".lock")
        if lock is None:
            raise RunMismatchError(f"{path} is in use by another process: wait for it or stop it")
        self._lock = lock

    def __enter__(self) -> EvalFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. Idempotent."""
        self._lock.release()

    def bind(self, config: SuiteConfig) -> bool:
        """Make this the folder of ``config``; return whether it already was.

        Raises RunMismatchError naming the keys in which a run that is there differs.
        """
        file = self.path / "config.yaml"
        wanted = json.loads(json.dumps(asdict(config)))  # tuples as the lists that YAML gives back
        if not file.is_file():
            write_aside(file, yaml.safe_dump(wanted, sort_keys=False).encode())
            return False
        held = dict(leaves(yaml.safe_load(file.read_text(encoding="utf-8"))))
        asked = dict(leaves(wanted))
        differing = [
            f"{key}: got {asked.get(key)!r}, the run has {held.get(key)!r}"
            for key in sorted(held.keys() | asked.keys())
            if held.get(key) != asked.get(key) and not key.startswith(_FREE)
        ]
        if differing:
            raise RunMismatchError(
                f"{self.path} holds another run: {'; '.join(differing)}. Resume it with the same"
                " configuration, or give another name (name=...)"
            )
        return True

    @property
    def run_id(self) -> str:
        """Name of the run's containers; made once."""
        file = self.path / "run.json"
        if not file.is_file():
            write_aside(file, json.dumps({"run_id": f"eval-{uuid.uuid4().hex[:12]}"}).encode())
        return str(json.loads(file.read_text())["run_id"])

    def sample(self, number: int) -> Path:
        return self.path / "samples" / str(number)

    def predictions_file(self, sample: int) -> Path:
        return self.sample(sample) / "predictions.jsonl"

    def predictions(self, sample: int) -> dict[str, Prediction]:
        """Return the predictions made so far, by instance. Raises PredictionsError."""
        file = self.predictions_file(sample)
        return read_predictions(file) if file.is_file() else {}

    def grades(self, sample: int) -> Path:
        return self.sample(sample) / "grades"

    def harness(self, sample: int) -> Path:
        return self.sample(sample) / "harness"

    def save_episode(self, record: EpisodeRecord) -> None:
        save_record(self._episode_file(record.sample, record.task_id), record)

    def episode(self, sample: int, instance_id: str) -> EpisodeRecord | None:
        """Return an episode's record; None where there is none, or it was cut short."""
        try:
            return load_record(self._episode_file(sample, instance_id))
        except RecordError:
            return None

    def _episode_file(self, sample: int, instance_id: str) -> Path:
        return self.sample(sample) / "episodes" / f"{instance_id}.json"
