"""Counts that add up, rates and intervals checked against worked values, costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_rows import make_row

from agent_rl.view.record import EpisodeRecord, TurnRecord
from eval.outcomes import Counts, Outcome
from eval.report import Report, Result, check_sum, make_result
from eval.verdicts import Grade

SEVEN = list(Outcome)


def make_report(outcomes: list[list[Outcome]], repos: list[str] | None = None) -> Report:
    """``outcomes[instance][sample]``."""
    results = tuple(
        Result(f"i{number}", (repos or ["r"] * len(outcomes))[number], sample, outcome)
        for number, samples in enumerate(outcomes)
        for sample, outcome in enumerate(samples)
    )
    return Report("run", "m", "d", "h", len(outcomes), len(outcomes[0]), results)


def test_one_of_each_outcome_adds_up_to_seven() -> None:
    report = make_report([[outcome] for outcome in SEVEN])
    check_sum(report)
    assert set(report.counts.by_outcome.values()) == {1}
    assert report.counts.total == 7
    assert report.pass_at_1 == pytest.approx(1 / 7)  # the denominator is what was asked for


def test_a_missing_or_double_outcome_is_noticed() -> None:
    report = make_report([[Outcome.RESOLVED], [Outcome.NOT_RUN]])
    for results in (report.results[:1], (*report.results, report.results[0])):
        with pytest.raises(AssertionError, match="do not add up"):
            check_sum(Report("run", "m", "d", "h", 2, 1, results))


def test_wilson_interval_of_a_worked_example() -> None:
    report = make_report([[Outcome.RESOLVED]] * 3 + [[Outcome.UNRESOLVED]] * 7)
    low, high = report.interval
    assert (round(low, 4), round(high, 4)) == (0.1078, 0.6032)
    assert make_report([[Outcome.UNRESOLVED]] * 5).interval[0] == 0.0


def test_pass_at_k_is_the_unbiased_estimate() -> None:
    yes, no = Outcome.RESOLVED, Outcome.UNRESOLVED
    report = make_report([[yes, no, no, no], [yes, yes, no, no], [no, no, no, no]])
    assert report.pass_at_1 == report.pass_at(1) == pytest.approx((1 / 4 + 2 / 4 + 0) / 3)
    assert report.pass_at(2) == pytest.approx((3 / 6 + 5 / 6 + 0) / 3)
    assert report.pass_at(4) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="of 1 to 4 samples: got=5"):
        report.pass_at(5)


def test_repositories_have_their_own_lines() -> None:
    yes, no = Outcome.RESOLVED, Outcome.EMPTY_PATCH
    report = make_report([[yes, no], [yes, yes], [no, no]], ["a", "a", "b"])
    lines = {line.repo: (line.num_instances, line.resolved) for line in report.repositories()}
    assert lines == {"a": (2, 1.5), "b": (1, 0.0)}
    assert sum(line.counts.total for line in report.repositories()) == report.counts.total


def make_record(status: str) -> EpisodeRecord:
    turns = (TurnRecord("a", "o", 10, 2), TurnRecord("b", "p", 14, 3))
    return EpisodeRecord("local__calc-1", 0, "m", status, "submit", "", "", turns, seconds=4.0)


def test_a_grade_decides_and_without_one_the_episode() -> None:
    row = make_row(1)
    graded = make_result(row, 0, make_record("completed"), Grade(Outcome.TIMEOUT, "why"))
    assert (graded.outcome, graded.reason, graded.turns) == (Outcome.TIMEOUT, "why", 2)
    assert (graded.prompt_tokens, graded.completion_tokens, graded.seconds) == (24, 5, 4.0)
    assert make_result(row, 0, make_record("failed"), None).outcome is Outcome.INFRASTRUCTURE
    assert make_result(row, 0, make_record("completed"), None).reason == "not graded yet"
    assert make_result(row, 0, None, None).outcome is Outcome.NOT_RUN


def test_means_are_over_episodes_played_here() -> None:
    row = make_row(1)
    played = make_result(row, 0, make_record("completed"), Grade(Outcome.RESOLVED))
    absent = make_result(make_row(2), 0, None, None)
    report = Report("run", "m", "d", "h", 2, 1, (played, absent))
    assert report.means()["turns"] == 2
    assert Report("run", "m", "d", "h", 1, 1, (absent,)).means()["turns"] == 0


def test_the_json_holds_everything(tmp_path: Path) -> None:
    report = make_report([[outcome] for outcome in SEVEN])
    report.save(tmp_path / "report.json")
    content = json.loads((tmp_path / "report.json").read_text())
    assert sum(content["counts"].values()) == content["asked_for"] == len(content["results"]) == 7
    assert content["pass_at_k"] == {"1": pytest.approx(1 / 7)}
    assert Counts.of([Outcome(r["outcome"]) for r in content["results"]]) == report.counts
