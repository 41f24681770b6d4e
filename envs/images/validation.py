"""Verdicts on tasks, good or bad, remembered across runs."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from envs.errors import TaskError, TaskTimeoutError
from envs.images.grading import ImageGrader, Validation
from envs.images.task import ImageTask

_FORMAT = 2  # goes up when the grader's rules change
_Json = dict[str, str | list[str] | None]


@dataclass(frozen=True)
class ValidationCache:
    """Verdicts in ``folder``, one small JSON file per task, named by everything that decides."""

    folder: Path

    def check(self, task: ImageTask, grader: ImageGrader, image_id: str) -> Validation:
        """Return the verdict of ``grader.check``, from the cache where nothing has changed.

        Raises TaskError, remembered too; TaskTimeoutError and InfrastructureError, never
        remembered.
        """
        path = self.folder / f"{_key(task, image_id)}.json"
        if path.is_file():
            return _read(json.loads(path.read_text()))
        try:
            validation = grader.check(task)
        except TaskTimeoutError:
            raise  # another machine, or this one at another time, may be fast enough
        except TaskError as error:
            self._write(path, {"refused": str(error)})
            raise
        controls = None if validation.controls is None else sorted(validation.controls)
        content: _Json = {
            "means": sorted(validation.gold_means),
            "controls": controls,
            "failing": sorted(validation.failing),
        }
        self._write(path, content)
        return validation

    def _write(self, path: Path, content: _Json) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(content))
        temporary.replace(path)


def _read(content: _Json) -> Validation:
    refused = content.get("refused")
    if isinstance(refused, str):
        raise TaskError(refused)
    controls = content.get("controls")
    return Validation(
        _names(content.get("means")),
        _names(controls) if isinstance(controls, list) else None,
        _names(content.get("failing")),
    )


def _names(value: str | list[str] | None) -> frozenset[str]:
    return frozenset(value) if isinstance(value, list) else frozenset()


def _key(task: ImageTask, image_id: str) -> str:
    plan = task.plan
    files = {path: hashlib.sha256(data).hexdigest() for path, data in plan.files.items()}
    decisive = [
        _FORMAT, task.task_id, image_id, sorted(task.expected.items()), task.exact,
        hashlib.sha256(task.solution).hexdigest(), list(plan.command), list(plan.judged_paths),
        sorted(files.items()), sorted(plan.links.items()), plan.names, plan.plugin,
        sorted(plan.environment.items()), sorted(task.protected),
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()[:32]
