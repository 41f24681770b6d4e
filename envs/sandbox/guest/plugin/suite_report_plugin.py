"""A pytest plugin that reports exact test names and outcomes on a descriptor, one JSON line each.

Nothing is read from the terminal summary, where names are cut, coloured and easily imitated.
"""

from __future__ import annotations

import json
import os
from typing import Any

_fd = int(os.environ.pop("SUITE_REPORT_FD"))
os.set_inheritable(_fd, False)


def _write(**record: object) -> None:
    data = json.dumps(record).encode() + b"\n"
    while data:
        data = data[os.write(_fd, data) :]


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(id=report.nodeid, when="collect", outcome="failed", xfail=False)


def pytest_runtest_logreport(report: Any) -> None:
    xfail = hasattr(report, "wasxfail")
    _write(id=report.nodeid, when=report.when, outcome=report.outcome, xfail=xfail)


def pytest_sessionfinish(exitstatus: int) -> None:
    _write(finish=int(exitstatus))
