"""Grades of predictions, made by the harness once each: what is settled outlives a kill.

A grade is bound to the digests of its patch and of its row. It is made again when either changed,
when it was an infrastructure failure, and for time-outs on request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_rl.store.run_folder import write_aside
from envs.tasks.swebench import SweBenchRow
from eval.errors import PredictionsError
from eval.harness import Harness, Progress, row_digest
from eval.outcomes import Outcome
from eval.predictions import Prediction
from eval.verdicts import Grade

NOT_TEXT = "the patch is not UTF-8 text, which the harness cannot take"


@dataclass(frozen=True)
class GradeStore:
    """Grades as small files, ``<folder>/<instance>.json``."""

    folder: Path

    def load(self, row: SweBenchRow, prediction: Prediction) -> Grade | None:
        """Return the grade of exactly this patch and row; None without one that can be trusted."""
        file = self.folder / f"{row.instance_id}.json"
        try:
            stored: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            grade = Grade(**{**stored["grade"], "outcome": Outcome(stored["grade"]["outcome"])})
            bound = (stored["patch"], stored["row"]) == (prediction.digest, row_digest(row))
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return grade if bound else None

    def save(self, row: SweBenchRow, prediction: Prediction, grade: Grade) -> None:
        content = {"patch": prediction.digest, "row": row_digest(row), "grade": asdict(grade)}
        data = json.dumps(content, indent=1).encode("utf-8", "surrogateescape")
        write_aside(self.folder / f"{row.instance_id}.json", data)


def grade_predictions(
    rows: Sequence[SweBenchRow],
    predictions: Mapping[str, Prediction],
    harness: Harness,
    store: GradeStore,
    *,
    redo_timeouts: bool = False,
    progress: Progress | None = None,
) -> dict[str, Grade]:
    """Grade every row that has a prediction. Raises PredictionsError, HarnessError."""
    by_id = {row.instance_id: row for row in rows}
    unknown = sorted(set(predictions) - set(by_id))
    if unknown:
        raise PredictionsError(
            f"predictions for instances that are not in the data set: got={unknown[:5]}"
            f" ({len(unknown)} of {len(predictions)}), expected ids among its {len(by_id)} rows"
        )
    redo = {Outcome.INFRASTRUCTURE, *([Outcome.TIMEOUT] if redo_timeouts else [])}
    grades: dict[str, Grade] = {}
    open_rows: list[SweBenchRow] = []
    for row in rows:
        prediction = predictions.get(row.instance_id)
        if prediction is None:
            continue
        grade = known_grade(row, prediction, store)
        if grade is None or grade.outcome in redo:
            grade = _harvest(row, prediction, harness, store, redo)
        if grade is None:
            open_rows.append(row)
        else:
            grades[row.instance_id] = grade
    if open_rows:
        harness.run(open_rows, [predictions[row.instance_id] for row in open_rows], progress)
    for row in open_rows:
        prediction = predictions[row.instance_id]
        grade = harness.read(row, prediction) or Grade(
            Outcome.INFRASTRUCTURE, "the harness left no verdict"
        )
        store.save(row, prediction, grade)
        grades[row.instance_id] = grade
    return grades


def known_grade(row: SweBenchRow, prediction: Prediction, store: GradeStore) -> Grade | None:
    """Return the grade as far as it is known without running anything."""
    return _without_running(prediction) or store.load(row, prediction)


def _without_running(prediction: Prediction) -> Grade | None:
    if prediction.is_empty:
        return Grade(Outcome.EMPTY_PATCH)
    return None if prediction.is_text else Grade(Outcome.DOES_NOT_APPLY, NOT_TEXT)


def _harvest(
    row: SweBenchRow,
    prediction: Prediction,
    harness: Harness,
    store: GradeStore,
    redo: set[Outcome],
) -> Grade | None:
    """Take what a killed run had already graded; drop everything that cannot be used."""
    found = harness.read(row, prediction)
    if found is None or found.outcome in redo:
        harness.forget(prediction)
        return None
    store.save(row, prediction, found)
    return found
