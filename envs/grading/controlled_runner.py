"""A suite runner that believes a pass only after a run with wrong expectations has failed."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from dataclasses import replace

from envs.grading.control import Choose, draw_choice, function_of, turn_wrong
from envs.grading.suite import Failure, SuiteReport, SuiteRunner, TestStatus


class ControlledRunner:
    """Wraps a runner whose tests share a process with the code they judge.

    A run in which everything passes is repeated with all expectations turned wrong, and again with
    some of them (see ``envs.grading.control``). Tests that pass nevertheless are reported as
    failed: nobody can meet a wrong expectation honestly. Runs that fail anyway cost nothing more.
    """

    def __init__(self, runner: SuiteRunner) -> None:
        self._runner = runner

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        report = self._runner.run(files, test_files)
        if not report.passed:
            return report
        rng = random.Random(secrets.randbits(64))
        wrong, turned = _turn(test_files, rng, None)
        if not turned:
            return report
        forged = self._forged(files, wrong, turned)
        if not forged:
            wrong, turned = _turn_some(test_files, rng, turned)
            forged = self._forged(files, wrong, turned)
        return _refuse(report, forged) if forged else report

    def _forged(
        self, files: Mapping[str, bytes], wrong: Mapping[str, bytes], turned: frozenset[str]
    ) -> list[str]:
        statuses = self._runner.run(files, wrong).statuses
        return sorted(
            name
            for name, status in statuses.items()
            if status == "PASSED" and function_of(name) in turned
        )


def _turn(
    test_files: Mapping[str, bytes], rng: random.Random, choose: Choose | None
) -> tuple[dict[str, bytes], frozenset[str]]:
    modules = {path: turn_wrong(data, rng, choose) for path, data in test_files.items()}
    turned = frozenset[str]().union(*(module.turned for module in modules.values()))
    return {path: module.source for path, module in modules.items()}, turned


def _turn_some(
    test_files: Mapping[str, bytes], rng: random.Random, functions: frozenset[str]
) -> tuple[dict[str, bytes], frozenset[str]]:
    """Few of the tests, at least one."""
    one = rng.choice(sorted(functions))
    return _turn(test_files, rng, draw_choice(rng, always=[one]))


def _refuse(report: SuiteReport, forged: list[str]) -> SuiteReport:
    statuses: dict[str, TestStatus] = dict(report.statuses)
    for name in forged:
        statuses[name] = "FAILED"
    note = f"\npassed with wrong expectations: {', '.join(forged)}\n".encode()
    failure = Failure(forged[0], "failed")
    return replace(report, statuses=statuses, failure=failure, log=report.log + note)
