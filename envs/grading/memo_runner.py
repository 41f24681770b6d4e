"""A runner that runs identical tests once: siblings of a group often write the same code."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future

from envs.grading.suite import SuiteReport, SuiteRunner


class MemoRunner:
    """A runner that remembers reports until ``clear``: the caller sets the scope, such as a step.

    Thread-safe; a second identical run waits for the first instead of starting. Errors raised by
    a run reach everyone who waits for it and are not remembered.
    """

    def __init__(self, runner: SuiteRunner) -> None:
        self._runner = runner
        self._lock = threading.Lock()
        self._reports: dict[bytes, Future[SuiteReport]] = {}
        self.num_runs = 0
        self.num_shared = 0

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        key = _digest(files, test_files)
        with self._lock:
            future = self._reports.get(key)
            mine = future is None
            if future is None:
                future = self._reports[key] = Future()
                self.num_runs += 1
            else:
                self.num_shared += 1
        if not mine:
            return future.result()
        try:
            report = self._runner.run(files, test_files)
        except BaseException as error:
            with self._lock:
                self._reports.pop(key, None)
            future.set_exception(error)
            raise
        future.set_result(report)
        return report

    def clear(self) -> None:
        """Forget every report. Runs in progress still reach those who wait for them."""
        with self._lock:
            self._reports.clear()


def _digest(*trees: Mapping[str, bytes]) -> bytes:
    digest = hashlib.sha256()
    for tree in trees:
        digest.update(b"tree %d\n" % len(tree))
        for path in tree:  # order counts: it is the order of the statuses
            name = path.encode("utf-8", "surrogateescape")
            digest.update(b"%d %d\n" % (len(name), len(tree[path])) + name + tree[path])
    return digest.digest()
