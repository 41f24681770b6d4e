"""The general path, the same on every kind: commands, files, deadlines, limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from envs.errors import InfrastructureError, SandboxFullError, WorkspaceError
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.limits import SandboxLimits
from envs.sandbox.worker_sandbox import WorkerSandbox

KINDS = ("bubblewrap", "unshare", "process")
ISOLATED = ("bubblewrap", "unshare")
# A command line that can be told apart from everything else on the machine.
NAP = "86399.25"


@pytest.fixture(scope="module", params=KINDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[WorkerSandbox]:
    box = WorkerSandbox(SandboxSpec(request.param))
    yield box
    box.close()


@pytest.fixture(scope="module", params=ISOLATED)
def isolated(request: pytest.FixtureRequest) -> Iterator[WorkerSandbox]:
    box = WorkerSandbox(SandboxSpec(request.param, SandboxLimits(memory_bytes=128 << 20)))
    yield box
    box.close()


def napping() -> list[str]:
    """Command lines of processes on this machine that hold the marked nap."""
    found: list[str] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if NAP.encode() in words:
                found.append(entry.name)
    return found


def sh(box: WorkerSandbox, command: str, timeout_s: float = 20.0, cap: int = 64 << 10):
    return box.exec(["bash", "-c", command], timeout_s=timeout_s, output_cap_bytes=cap)


def test_output_and_exit_code(sandbox: WorkerSandbox) -> None:
    result = sh(sandbox, "echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.timed_out, result.truncated) == (3, False, False)
    assert sorted(result.output.split()) == [b"err", b"out"]


def test_the_work_folder_lasts_and_processes_do_not(sandbox: WorkerSandbox) -> None:
    sh(sandbox, f"echo kept > kept.txt; sleep {NAP} & disown")
    assert napping() == []
    assert sh(sandbox, "cat kept.txt").output == b"kept\n"


@pytest.mark.parametrize(
    "command",
    [
        f"sleep {NAP} & sleep {NAP}",
        f"trap '' TERM INT HUP; sleep {NAP} & trap '' TERM; while :; do sleep {NAP}; done",
        f"setsid bash -c 'trap \"\" TERM HUP; sleep {NAP}' & sleep {NAP}",
        f"(setsid setsid sleep {NAP} &) ; sleep {NAP}",
    ],
    ids=["background", "ignores TERM", "own session", "double fork"],
)
def test_nothing_survives_a_timeout(sandbox: WorkerSandbox, command: str) -> None:
    result = sh(sandbox, command, timeout_s=0.4)
    assert result.timed_out
    assert result.exit_code is None
    assert napping() == []
    assert sh(sandbox, "echo next").output == b"next\n"


def test_a_command_that_exits_124_is_not_a_timeout(sandbox: WorkerSandbox) -> None:
    result = sh(sandbox, "exit 124")
    assert (result.exit_code, result.timed_out) == (124, False)


def test_death_by_signal_and_missing_programs(sandbox: WorkerSandbox) -> None:
    assert sh(sandbox, "kill -SEGV $$").exit_code == 128 + 11
    assert sandbox.exec(["no-such-program"], timeout_s=5).exit_code == 127
    assert sandbox.exec(["/etc"], timeout_s=5).exit_code == 126


def test_stdin_environment_and_folder(sandbox: WorkerSandbox) -> None:
    sandbox.write("inner/file", b"x")
    result = sandbox.exec(
        ["bash", "-c", 'cat; pwd; echo "$MARK"'],
        timeout_s=5,
        cwd="inner",
        env={"MARK": "here"},
        stdin=b"in\0put\n",
    )
    folder = f"{sandbox.workspace}/inner".encode()
    assert result.output == b"in\0put\n" + folder + b"\nhere\n"


@pytest.mark.parametrize("data", [bytes(range(256)), b"caf\xe9\n", b"\0\0", b""])
def test_bytes_come_back_as_they_are(sandbox: WorkerSandbox, data: bytes) -> None:
    sandbox.write("blob", data)
    assert sandbox.read("blob") == data
    assert sandbox.exec(["cat", "blob"], timeout_s=5).output == data


def test_the_cap_keeps_head_and_tail_and_says_so(sandbox: WorkerSandbox) -> None:
    result = sh(sandbox, "for i in $(seq 2000); do echo line $i; done", cap=1000)
    assert result.truncated
    assert result.output.startswith(b"line 1\n")
    assert result.output.endswith(b"line 2000\n")
    total = sum(len(f"line {i}\n") for i in range(1, 2001))
    assert f"[... {total - 1000} bytes left out ...]".encode() in result.output
    exact = sh(sandbox, "printf %1000s", cap=1000)
    assert (len(exact.output), exact.truncated) == (1000, False)


@pytest.mark.slow
def test_three_gigabytes_do_not_fill_the_memory() -> None:
    box = WorkerSandbox(SandboxSpec("bubblewrap"))
    before = peak_memory_kb()
    result = sh(box, "yes | head -c 3221225472", timeout_s=120, cap=64 << 10)
    box.close()
    assert result.truncated
    assert (result.exit_code, result.timed_out) == (0, False)
    assert b"[... 3221159936 bytes left out ...]" in result.output
    assert peak_memory_kb() - before < 20_000


def test_endless_output_ends_at_the_deadline(sandbox: WorkerSandbox) -> None:
    result = sh(sandbox, "yes", timeout_s=0.3, cap=1000)
    assert (result.truncated, result.timed_out) == (True, True)
    assert len(result.output) < 1100


def test_a_closed_pipe_ends_its_writer(sandbox: WorkerSandbox) -> None:
    assert sh(sandbox, "yes | head -n 1; echo ${PIPESTATUS[0]}").output == b"y\n141\n"


def peak_memory_kb() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1])
    raise AssertionError("no VmHWM")


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "", ".", ".git/config"])
def test_paths_that_lead_outside_are_refused(sandbox: WorkerSandbox, path: str) -> None:
    with pytest.raises(WorkspaceError):
        sandbox.read(path)
    with pytest.raises(WorkspaceError):
        sandbox.write(path, b"x")


def test_links_are_never_followed(sandbox: WorkerSandbox) -> None:
    sh(sandbox, "ln -s /etc/passwd link; ln -s / root; mkdir -p d; ln -s /etc d/etc; ln -s . here")
    for path in ("link", "root/etc/passwd", "d/etc/passwd", "here/link"):
        with pytest.raises(WorkspaceError):
            sandbox.read(path)
        with pytest.raises(WorkspaceError):
            sandbox.write(path, b"owned")
    assert not any(p.startswith(("root", "d/", "here")) for p in sandbox.snapshot())


def test_files_that_are_not_plain_are_refused(sandbox: WorkerSandbox) -> None:
    sh(sandbox, "mkfifo pipe; mkdir folder")
    for path in ("pipe", "folder", "absent"):
        with pytest.raises(WorkspaceError):
            sandbox.read(path)
    for path in ("pipe", "folder"):
        with pytest.raises(WorkspaceError):
            sandbox.write(path, b"x")
    assert "pipe" not in sandbox.snapshot()


def test_snapshot_write_and_delete(sandbox: WorkerSandbox) -> None:
    sh(sandbox, "rm -rf -- * ; mkdir -p a/b .git; echo 1 > a/b/c; echo 2 > .git/x; : > empty")
    sandbox.write("deep/er/file", b"3")
    sandbox.write("a/b/c", b"4")
    assert sandbox.snapshot() == {"a/b/c": b"4", "deep/er/file": b"3", "empty": b""}
    sandbox.delete("empty")
    with pytest.raises(WorkspaceError):
        sandbox.delete("empty")
    assert sorted(sandbox.snapshot()) == ["a/b/c", "deep/er/file"]


def test_kill_all_ends_a_command_from_another_thread(sandbox: WorkerSandbox) -> None:
    results = list[object]()
    thread = threading.Thread(
        target=lambda: results.append(sh(sandbox, f"sleep {NAP}", timeout_s=60))
    )
    started = time.monotonic()
    thread.start()
    wait_until(lambda: bool(napping()))
    sandbox.kill_all()
    thread.join(10)
    assert time.monotonic() - started < 20
    (result,) = results
    assert (result.exit_code, result.timed_out) == (None, False)  # pyright: ignore
    assert napping() == []
    sandbox.kill_all()  # nothing runs: no effect
    assert sh(sandbox, "echo alive").output == b"alive\n"


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def test_a_closed_sandbox_says_so() -> None:
    box = WorkerSandbox(SandboxSpec("process"))
    box.close()
    box.close()
    with pytest.raises(InfrastructureError, match="closed"):
        box.read("x")


# Isolation


def test_there_is_no_network(isolated: WorkerSandbox) -> None:
    code = "import socket; socket.create_connection(('1.1.1.1', 53), 2)"
    result = isolated.exec(["python", "-c", code], timeout_s=10)
    assert result.exit_code == 1
    assert b"unreachable" in result.output.lower()


def test_only_its_own_processes_are_visible(isolated: WorkerSandbox) -> None:
    pids = sh(isolated, "ls /proc | grep -E '^[0-9]+$' | sort -n").output.split()
    assert pids[0] == b"1"
    assert len(pids) <= 5


def test_no_privilege_can_be_had(isolated: WorkerSandbox) -> None:
    status = sh(isolated, "cat /proc/self/status").output.decode()
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert fields["NoNewPrivs"].strip() == "1"
    assert sh(isolated, "unshare --user --map-root-user true").exit_code != 0
    assert sh(isolated, "mount -t tmpfs x /tmp").exit_code != 0


def test_the_user_id_outside_is_not_root(isolated: WorkerSandbox) -> None:
    inside, outside, count = sh(isolated, "cat /proc/self/uid_map").output.split()
    assert (inside, count) == (b"0", b"1")
    assert outside != b"0"


def test_nothing_but_temporary_folders_is_writable(isolated: WorkerSandbox) -> None:
    folders = "/ /usr /dev /etc /root /home /run /var /var/tmp /opt /proc /proc/sys/kernel /sys"
    result = sh(isolated, f"for d in {folders}; do touch $d/x 2>/dev/null && echo $d; done")
    assert result.output == b""


def test_secrets_of_the_host_stay_out(isolated: WorkerSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret")
    assert sh(isolated, f"cat {tmp_path}/secret").exit_code != 0
    project = Path(__file__).parents[3]
    assert sh(isolated, f"cat {project}/pyproject.toml").exit_code != 0


def test_memory_is_limited(isolated: WorkerSandbox) -> None:
    result = isolated.exec(["python", "-c", "x = bytearray(1 << 30)"], timeout_s=20)
    assert result.exit_code == 1
    assert b"MemoryError" in result.output


def test_a_fork_bomb_ends_at_the_limit(isolated: WorkerSandbox) -> None:
    bomb = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    result = isolated.exec(["python", "-c", bomb], timeout_s=1.0)
    assert result.timed_out
    assert sh(isolated, "echo alive").output == b"alive\n"


def test_a_large_file_ends_at_the_limit(isolated: WorkerSandbox) -> None:
    result = sh(isolated, "head -c 20000000 /dev/zero > big; echo $?; stat -c %s big; rm big")
    assert result.output.split()[-1] == b"16777216"


def test_a_full_disk_is_the_machines_trouble() -> None:
    limits = SandboxLimits(tmp_bytes=1 << 20, max_file_bytes=8 << 20)
    box = WorkerSandbox(SandboxSpec("bubblewrap", limits))
    try:
        with pytest.raises(SandboxFullError, match="No space left"):
            box.write("big", bytes(2 << 20))
        assert "big" not in box.snapshot()
        box.write("small", b"x")
        assert box.read("small") == b"x"
    finally:
        box.close()


# An agent that makes trouble on purpose must not be able to pass it off as the machinery's


def test_a_command_cannot_forge_how_it_ended(isolated: WorkerSandbox) -> None:
    forge = """
for fd in $(seq 3 64); do echo '{"exit": 0}' 2>/dev/null >/proc/1/fd/$fd; done
for fd in $(seq 3 64); do echo '{"failure": "setup", "errno": 28, "message": ""}' >&$fd; done
exit 9"""
    assert sh(isolated, f"({forge}) 2>/dev/null").exit_code == 9


@pytest.mark.parametrize(
    "spoil",
    [
        "chmod 000 .",
        "chmod 000 /tmp",
        "cd /tmp; rm -rf workspace; ln -s /etc workspace",
        "cd /tmp; rm -rf workspace; echo file > workspace",
        "d=$(printf 'd%.0s' $(seq 60)); for i in $(seq 60); do mkdir $d; cd $d; done; echo > x",
        "for i in $(seq 200); do truncate -s 16M sparse$i; done",
        "echo x > secret; chmod 000 secret; mkdir closed; chmod 000 closed",
        "mkfifo pipe; python -c \"import socket; socket.socket(1).bind('socket')\"",
        "head -c 100M /dev/zero | split -b 8M; true",
        "i=0; while echo > f$i; do i=$((i+1)); [ $i -gt 19990 ] && break; done",
    ],
    ids=["closed folder", "closed parent", "link for the folder", "file for the folder", "deep",
         "holes", "unreadable", "special files", "full", "no inodes"],
)  # fmt: skip
def test_a_spoiled_work_folder_still_works_or_refuses(spoil: str) -> None:
    box = WorkerSandbox(SandboxSpec("bubblewrap"))
    try:
        sh(box, f"({spoil}) 2>/dev/null", timeout_s=60)
        assert sum(map(len, box.snapshot().values())) <= 64 << 20
        try:
            box.write("after", b"1")
            assert box.read("after") == b"1"
        except SandboxFullError:
            assert spoil.startswith(("head", "i=0"))
        assert sh(box, "echo alive").output == b"alive\n"
    finally:
        box.close()


def test_a_command_that_cannot_even_start_is_the_agents(sandbox: WorkerSandbox) -> None:
    for word in ("\ud800", "a\0b"):
        assert sandbox.exec(["echo", word], timeout_s=5).exit_code == 126
