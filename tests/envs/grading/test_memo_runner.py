"""Sharing identical runs: once each, within the caller's scope, errors not remembered."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from envs.errors import InfrastructureError
from envs.grading.memo_runner import MemoRunner
from envs.grading.suite import SuiteReport


class CountingRunner:
    """Counts its runs and, until released, keeps them waiting."""

    def __init__(self) -> None:
        self.runs: list[bytes] = []
        self.release = threading.Event()
        self.failing = False

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        self.runs.append(files["a"])
        self.release.wait(5)
        if self.failing:
            raise InfrastructureError("no disk")
        return SuiteReport({files["a"].decode(): "PASSED"})


def test_identical_runs_at_one_time_happen_once() -> None:
    inner = CountingRunner()
    memo = MemoRunner(inner)
    with ThreadPoolExecutor(8) as threads:
        futures = [threads.submit(memo.run, {"a": b"%d" % (i % 2)}, {}) for i in range(8)]
        inner.release.set()
        names = [next(iter(future.result().statuses)) for future in futures]
    assert names == ["0", "1"] * 4
    assert sorted(inner.runs) == [b"0", b"1"]
    assert (memo.num_runs, memo.num_shared) == (2, 6)


def test_what_differs_in_anything_is_run() -> None:
    inner = CountingRunner()
    inner.release.set()
    memo = MemoRunner(inner)
    for files, tests in (
        ({"a": b"1"}, {}),
        ({"a": b"1"}, {"t": b""}),
        ({"a": b"1", "t": b""}, {}),
        ({"a": b"1", "t": b"x"}, {}),
        ({"a": b"1t"}, {}),
    ):
        memo.run(files, tests)
    assert memo.num_shared == 0


def test_clear_ends_the_scope() -> None:
    inner = CountingRunner()
    inner.release.set()
    memo = MemoRunner(inner)
    memo.run({"a": b"1"}, {})
    memo.clear()
    memo.run({"a": b"1"}, {})
    assert inner.runs == [b"1", b"1"]


def test_errors_are_passed_on_and_not_remembered() -> None:
    inner = CountingRunner()
    inner.failing = True
    memo = MemoRunner(inner)
    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(memo.run, {"a": b"1"}, {}) for _ in range(2)]
        inner.release.set()
        for future in futures:
            with pytest.raises(InfrastructureError):
                future.result()
    inner.failing = False
    assert memo.run({"a": b"1"}, {}).passed
