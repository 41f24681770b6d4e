"""A pytest plugin that reports exact test names and outcomes, one JSON line each.

Nothing is read from the terminal summary, where names are cut, coloured and easily imitated. The
last line says that the session ended by itself and how; without it the run broke off. Lines go to
``SUITE_REPORT``: the number of an open descriptor, or a path whose last part marks every line.

It runs under the Python of whatever image a task has, so its syntax is an old one.
"""

import json
import os
from typing import Any

_target = os.environ.pop("SUITE_REPORT", "")
_is_path = _target.startswith("/")
_nonce = os.path.basename(_target) if _is_path else ""
if _target and not _is_path:
    os.set_inheritable(int(_target), False)


def _write(name: str, when: str, outcome: Any, xfail: bool) -> None:
    if not _target:
        return  # a pytest that the tests themselves have started
    data = json.dumps([_nonce, [name, when, outcome, xfail]]).encode() + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    fd = os.open(_target, flags, 0o600) if _is_path else int(_target)
    try:
        while data:
            data = data[os.write(fd, data) :]
    finally:
        if _is_path:
            os.close(fd)


def pytest_collectreport(report: Any) -> None:
    if report.failed:
        _write(report.nodeid, "collect", "failed", False)


def pytest_runtest_logreport(report: Any) -> None:
    _write(report.nodeid, report.when, report.outcome, hasattr(report, "wasxfail"))


def pytest_sessionfinish(exitstatus: int) -> None:
    _write("", "finish", int(exitstatus), False)
