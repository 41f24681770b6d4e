"""Source of the pytest plugin that reports outcomes to a file of its own, one JSON line each.

Nothing printed counts, so text that looks like a summary does not either. The last line says that
the session ended by itself and how; without it the run broke off.
"""

from __future__ import annotations

PLUGIN_NAME = "agent_rl_report"
PATH_VARIABLE = "AGENT_RL_REPORT"

SOURCE = b"""
import json
import os

_path = os.environ.pop("AGENT_RL_REPORT", "")
_nonce = os.path.basename(_path)


def _write(record):
    line = json.dumps([_nonce, record]) + "\\n"
    fd = os.open(_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)


def pytest_runtest_logreport(report):
    if _path:
        _write([report.nodeid, report.when, report.outcome, hasattr(report, "wasxfail")])


def pytest_collectreport(report):
    if _path and report.failed:
        _write([report.nodeid, "collect", "failed", False])


def pytest_sessionfinish(session, exitstatus):
    if _path:
        _write(["", "finish", int(exitstatus), False])
"""
