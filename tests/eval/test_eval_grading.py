"""Grading once: resume, changed patches and rows, damaged files, kills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from eval_rows import make_prediction, make_row

from envs.tasks.swebench import SweBenchRow
from eval.errors import PredictionsError
from eval.grading import NOT_TEXT, GradeStore, grade_predictions, known_grade
from eval.harness import Progress, row_digest
from eval.outcomes import Outcome
from eval.predictions import Prediction, patch_text
from eval.verdicts import Grade


@dataclass
class ScriptedHarness:
    """Verdicts by patch text; remembers what it was asked and can stop half-way."""

    verdicts: dict[str, Outcome]
    stop_after: int = 10**6
    asked: list[str] = field(default_factory=list)
    kept: dict[str, tuple[str, str, Grade]] = field(default_factory=dict)

    def run(
        self,
        rows: Sequence[SweBenchRow],
        predictions: Sequence[Prediction],
        progress: Progress | None = None,
    ) -> None:
        for number, (row, prediction) in enumerate(zip(rows, predictions, strict=True)):
            if number >= self.stop_after:
                raise KeyboardInterrupt
            self.asked.append(row.instance_id)
            grade = Grade(self.verdicts[prediction.patch], test_log="log \udce9")
            self.kept[row.instance_id] = (prediction.digest, row_digest(row), grade)

    def read(self, row: SweBenchRow, prediction: Prediction) -> Grade | None:
        digest, of_row, grade = self.kept.get(row.instance_id, ("", "", None))
        return grade if (digest, of_row) == (prediction.digest, row_digest(row)) else None

    def forget(self, prediction: Prediction) -> None:
        self.kept.pop(prediction.instance_id, None)


VERDICTS = {
    "good\n": Outcome.RESOLVED,
    "bad\n": Outcome.UNRESOLVED,
    "noapply\n": Outcome.DOES_NOT_APPLY,
    "slow\n": Outcome.TIMEOUT,
    "pull\n": Outcome.INFRASTRUCTURE,
}
ROWS = [make_row(number) for number in range(7)]
PREDICTIONS = {
    prediction.instance_id: prediction
    for prediction in (
        *(make_prediction(number, patch) for number, patch in enumerate(VERDICTS)),
        make_prediction(5, ""),
    )
}


def test_every_prediction_gets_one_outcome_and_absent_ones_none(tmp_path: Path) -> None:
    grades = grade_predictions(ROWS, PREDICTIONS, ScriptedHarness(VERDICTS), GradeStore(tmp_path))
    assert [grades[row.instance_id].outcome for row in ROWS[:6]] == [
        *VERDICTS.values(),
        Outcome.EMPTY_PATCH,
    ]
    assert ROWS[6].instance_id not in grades


def test_resume_redoes_infrastructure_failures_only(tmp_path: Path) -> None:
    harness, store = ScriptedHarness(VERDICTS), GradeStore(tmp_path)
    first = grade_predictions(ROWS, PREDICTIONS, harness, store)
    harness.asked.clear()
    assert grade_predictions(ROWS, PREDICTIONS, harness, store) == first
    assert harness.asked == ["local__calc-4"]
    harness.asked.clear()
    grade_predictions(ROWS, PREDICTIONS, harness, store, redo_timeouts=True)
    assert harness.asked == ["local__calc-3", "local__calc-4"]


def test_a_changed_patch_is_graded_again(tmp_path: Path) -> None:
    harness, store = ScriptedHarness(VERDICTS), GradeStore(tmp_path)
    grade_predictions(ROWS, PREDICTIONS, harness, store)
    harness.asked.clear()
    changed = {**PREDICTIONS, "local__calc-1": make_prediction(1, "good\n")}
    grades = grade_predictions(ROWS, changed, harness, store)
    assert grades["local__calc-1"].outcome is Outcome.RESOLVED
    assert harness.asked == ["local__calc-1", "local__calc-4"]


def test_a_changed_row_is_graded_again(tmp_path: Path) -> None:
    harness, store = ScriptedHarness(VERDICTS), GradeStore(tmp_path)
    grade_predictions(ROWS, PREDICTIONS, harness, store)
    harness.asked.clear()
    rows = [make_row(0, FAIL_TO_PASS=["t.py::test_other"]), *ROWS[1:]]
    grade_predictions(rows, PREDICTIONS, harness, store)
    assert harness.asked == ["local__calc-0", "local__calc-4"]


@pytest.mark.parametrize("damage", [b"", b'{"patch"', b"[]", b"null", b"\xff"])
def test_a_damaged_grade_is_made_again(tmp_path: Path, damage: bytes) -> None:
    harness, store = ScriptedHarness(VERDICTS), GradeStore(tmp_path)
    grade_predictions(ROWS[:2], {k: PREDICTIONS[k] for k in list(PREDICTIONS)[:2]}, harness, store)
    harness.kept.clear()
    harness.asked.clear()
    (tmp_path / "local__calc-0.json").write_bytes(damage)
    grade_predictions(ROWS[:2], {k: PREDICTIONS[k] for k in list(PREDICTIONS)[:2]}, harness, store)
    assert harness.asked == ["local__calc-0"]


def test_what_a_killed_run_had_graded_is_not_graded_again(tmp_path: Path) -> None:
    harness, store = ScriptedHarness(VERDICTS, stop_after=2), GradeStore(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        grade_predictions(ROWS, PREDICTIONS, harness, store)
    assert not list(tmp_path.iterdir())
    harness.stop_after = 10**6
    grades = grade_predictions(ROWS, PREDICTIONS, harness, store)
    assert harness.asked == [f"local__calc-{n}" for n in (0, 1, 2, 3, 4)]
    assert len(grades) == 6


def test_predictions_of_another_data_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PredictionsError, match="not in the data set: got=\\['local__calc-9'\\]"):
        grade_predictions(
            ROWS,
            {"local__calc-9": make_prediction(9)},
            ScriptedHarness(VERDICTS),
            GradeStore(tmp_path),
        )


def test_a_patch_that_is_no_text_is_told_before_grading(tmp_path: Path) -> None:
    prediction = make_prediction(0, patch_text(b"+caf\xe9\n"))
    grade = known_grade(ROWS[0], prediction, GradeStore(tmp_path))
    assert grade == Grade(Outcome.DOES_NOT_APPLY, NOT_TEXT)
