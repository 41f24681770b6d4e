"""Runs of an image's official tests in a fresh container, also with wrong expectations."""

from __future__ import annotations

import hashlib
import posixpath
import random
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from envs.base import ExecResult
from envs.errors import InfrastructureError, PatchError, TaskError
from envs.grading import control
from envs.grading.plugin_report import PLUGIN, TARGET_VARIABLE, Outcomes, read_report
from envs.images.outcomes import read_printed
from envs.images.sections import Section
from envs.images.task import ImageTask, TestPlan
from envs.sandbox.docker.docker_errors import ArchiveTooLargeError
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions
from envs.sandbox.launch import GUEST_FOLDER

SETUP_TIMEOUT_S = 120.0
_LOG_CAP_BYTES = 1 << 20
_REPORT_CAP_BYTES = 16 << 20
_PLUGIN_FILE = GUEST_FOLDER / "plugin" / f"{PLUGIN}.py"
_PYTHON_CACHE = ("__pycache__", ".pytest_cache")


@dataclass(frozen=True)
class TestRun:
    """One run of the official tests."""

    __test__ = False

    result: ExecResult
    outcomes: Outcomes
    tests_changed: bool


@contextmanager
def grading_container(
    host: DockerHost, task: ImageTask, options: DockerOptions
) -> Generator[DockerSandbox]:
    """Start a fresh container of the task's own image, official test files in place."""
    sandbox = DockerSandbox.start(host, task.image, replace(options, workspace=task.repository))
    try:
        place_tests(sandbox, task.plan)
        yield sandbox
    finally:
        sandbox.close()


def apply_sections(sandbox: DockerSandbox, task: ImageTask, sections: Sequence[Section]) -> None:
    """Apply parts of a patch to the work tree. Raises PatchError when they do not fit."""
    argv = ["git", "apply", "--whitespace=nowarn", "-"]
    patch = b"".join(section.data for section in sections)
    env = {
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "GIT_CEILING_DIRECTORIES": posixpath.dirname(task.repository),
    }
    result = sandbox.exec(argv, timeout_s=SETUP_TIMEOUT_S, stdin=patch, env=env)
    if result.exit_code != 0:
        raise PatchError(f"it does not apply: {result.output[-300:].decode(errors='replace')}")


def place_tests(sandbox: DockerSandbox, plan: TestPlan) -> None:
    """Put official test files and links where the plan wants them."""
    for path in plan.files:
        _must(sandbox, ["mkdir", "-p", "--", posixpath.dirname(path)])
    if plan.files:
        sandbox.put_files("/", {path.lstrip("/"): data for path, data in plan.files.items()})
    for link, target in plan.links.items():
        _must(sandbox, ["ln", "-sfn", "--", target, link])


def run_tests(sandbox: DockerSandbox, plan: TestPlan) -> TestRun:
    """Run the plan's command once; what it leaves running is killed before its report is read."""
    before = _digest_tests(sandbox, plan)
    nonce = secrets.token_hex(16)
    folder = f"/tmp/.{secrets.token_hex(8)}"
    report = f"{folder}/{nonce}"
    env = dict(plan.environment)
    if plan.plugin:
        _must(sandbox, ["mkdir", "-p", folder])
        sandbox.put_files(folder, {_PLUGIN_FILE.name: _PLUGIN_FILE.read_bytes()})
        env |= {
            TARGET_VARIABLE: report,
            "PYTEST_ADDOPTS": f"-p {PLUGIN} -p no:cacheprovider",
            "PYTHONPATH": folder,
        }
    result = sandbox.exec_trusted(
        plan.command, timeout_s=plan.timeout_s, output_cap_bytes=_LOG_CAP_BYTES, env=env
    )
    changed = _has_changed(sandbox, plan, before)
    if not plan.plugin:
        return TestRun(result, read_printed(result.output, result.exit_code), changed)
    try:
        written = sandbox.get_files(report, _REPORT_CAP_BYTES).get(nonce, b"")
    except (FileNotFoundError, ArchiveTooLargeError):
        written = b""  # a report that the tests removed or flooded is none
    return TestRun(result, read_report(written, nonce, result.exit_code), changed)


def turn_tests_wrong(
    sandbox: DockerSandbox, plan: TestPlan, choose: control.Choose | None = None
) -> frozenset[str]:
    """Rewrite official test modules in place, see ``control``. Returns what was turned.

    When the choice hits no test at all, every test is turned.
    """
    rng = random.Random(secrets.randbits(64))
    turned: set[str] = set()
    for root in plan.judged_paths:
        modules = {
            name: control.turn_wrong(data, rng, choose)
            for name, data in _test_files(sandbox, root).items()
            if name.endswith(".py") and posixpath.basename(name) != "conftest.py"
        }
        rewritten = {name: module.source for name, module in modules.items() if module.turned}
        sandbox.put_files(posixpath.dirname(root), rewritten)
        turned.update(*(module.turned for module in modules.values()))
    if choose is not None and not turned:
        return turn_tests_wrong(sandbox, plan)
    return frozenset(turned)


def _has_changed(sandbox: DockerSandbox, plan: TestPlan, before: str) -> bool:
    """Tell whether the tests are others than before they ran.

    Code under test that removes or floods them changes them too: as infrastructure trouble it
    would let an agent choose which episodes count.
    """
    try:
        return _digest_tests(sandbox, plan) != before
    except (TaskError, ArchiveTooLargeError):
        return True


def _digest_tests(sandbox: DockerSandbox, plan: TestPlan) -> str:
    digest = hashlib.sha256()
    for root in plan.judged_paths:
        for name, data in sorted(_test_files(sandbox, root).items()):
            digest.update(f"{name} {len(data)} ".encode("utf-8", "surrogateescape") + data)
    return digest.hexdigest()


def _test_files(sandbox: DockerSandbox, root: str) -> Mapping[str, bytes]:
    try:
        files = sandbox.get_files(root)
    except FileNotFoundError as error:
        raise TaskError(f"the image lacks its tests: got no {root}") from error
    return {
        name: data
        for name, data in files.items()
        if not any(part in _PYTHON_CACHE for part in name.split("/"))
    }


def _must(sandbox: DockerSandbox, argv: Sequence[str]) -> None:
    result = sandbox.exec(argv, timeout_s=SETUP_TIMEOUT_S)
    if result.exit_code != 0:
        raise InfrastructureError(
            f"the grading container cannot be set up: got={result.output[-300:]!r} for {argv[0]}"
        )
