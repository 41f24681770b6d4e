"""Which sandbox is taken, and what is said when none works."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path

import pytest

from envs.errors import SandboxUnavailableError
from envs.sandbox.choose import choose_kind, probe
from envs.sandbox.limits import SandboxLimits

ROOT = Path(__file__).parents[3]


def test_auto_takes_bubblewrap_first() -> None:
    assert choose_kind("auto") == "bubblewrap"


@pytest.mark.parametrize("kind", ["bubblewrap", "unshare", "process"])
def test_every_kind_really_runs_something(kind: str) -> None:
    result = probe(kind)
    assert result.works, result.reason


def test_a_plain_process_must_be_allowed() -> None:
    with pytest.raises(SandboxUnavailableError, match="allow_unsafe=False"):
        choose_kind("process")
    assert choose_kind("process", allow_unsafe=True) == "process"


def test_an_unknown_kind_names_the_known_ones() -> None:
    with pytest.raises(SandboxUnavailableError, match=r"got='chroot'.*bubblewrap"):
        choose_kind("chroot")


def run_python(script: str, prefix: tuple[str, ...] = (), path: str | None = None) -> str:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    interpreter = "/usr/bin/python3" if prefix else sys.executable
    done = subprocess.run(
        [*prefix, interpreter, "-c", textwrap.dedent(script)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_any_tool_the_reasons_are_told(tmp_path: Path) -> None:
    script = """
        from envs.errors import SandboxUnavailableError
        from envs.sandbox.choose import choose_kind
        try:
            choose_kind("auto")
        except SandboxUnavailableError as error:
            print(error)
    """
    said = run_python(script, path=str(tmp_path))
    assert "bwrap is not installed" in said
    assert "unshare is not installed" in said


ORDINARY = """
    import os
    from envs.sandbox.launch import SandboxSpec
    from envs.sandbox.worker_sandbox import WorkerSandbox
    assert os.getuid() != 0
    for kind in ("bubblewrap", "unshare"):
        box = WorkerSandbox(SandboxSpec(kind))
        box.write("a", b"1")
        look = "cat a; echo; (sleep 50 &); ls /proc | grep -c ^[0-9]; unshare -U true || echo no"
        result = box.exec(["bash", "-c", look], timeout_s=10)
        network = box.exec(["bash", "-c", "echo > /dev/tcp/127.0.0.1/1"], timeout_s=10)
        late = box.exec(["bash", "-c", "setsid sleep 50 & sleep 50"], timeout_s=0.3)
        again = box.exec(["echo", "next"], timeout_s=10)
        print(kind, result.output.split(), network.exit_code, late.timed_out, again.output)
        box.close()
"""


def test_an_ordinary_user_gets_the_same_sandboxes() -> None:
    become = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    prefix = become if os.geteuid() == 0 else ()
    lines = run_python(ORDINARY, prefix).splitlines()
    assert [line.split()[0] for line in lines] == ["bubblewrap", "unshare"]
    for line in lines:
        assert "b'no'" in line
        assert line.endswith("1 True b'next\\n'")


@pytest.mark.parametrize("name", ["memory_bytes", "max_processes", "tmp_bytes"])
def test_limits_are_positive(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*got=0"):
        SandboxLimits(**{name: 0})


IN_TMP = """
    import sys
    from envs.sandbox.jobs_client import exec_job, exec_result
    from envs.sandbox.launch import SandboxSpec
    from envs.sandbox.pool import SandboxPool
    for kind in ("bubblewrap", "unshare"):
        pool = SandboxPool(SandboxSpec(kind, site_packages=True), 1)
        code = "import sys, inside; print(sys.prefix, inside.__file__)"
        job = exec_job(["python", "-c", code], timeout_s=20, output_cap_bytes=9999, fresh=True)
        print(exec_result(*pool.run(*job)).output.decode().strip())
        pool.close()
"""


def test_an_interpreter_below_tmp_stays_visible_in_fresh_jobs() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        venv.create(folder, with_pip=False)
        (packages,) = Path(folder).glob("lib/python*/site-packages")
        (packages / "inside.py").write_text("")
        done = subprocess.run(
            [f"{folder}/bin/python", "-c", textwrap.dedent(IN_TMP)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout.splitlines() == [f"{folder} {packages}/inside.py"] * 2, done.stderr
