"""One contract for every sandbox: the same tests on bubblewrap and on Docker."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from r2e_specimens import BASE_IMAGE, SMALL

from envs.base import ExecResult, Sandbox
from envs.errors import WorkspaceError
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.limits import SandboxLimits
from envs.sandbox.worker_sandbox import WorkerSandbox

pytestmark = pytest.mark.docker
KINDS = ("bubblewrap", "docker", "docker as a user")


@pytest.fixture(scope="module", params=KINDS)
def box(request: pytest.FixtureRequest, docker_host: DockerHost) -> Iterator[Sandbox]:
    sandbox = start(request.param, docker_host)
    yield sandbox
    sandbox.close()


def start(kind: str, host: DockerHost) -> Sandbox:
    if kind == "bubblewrap":
        return WorkerSandbox(SandboxSpec("bubblewrap", SandboxLimits(memory_bytes=512 << 20)))
    user = "" if kind == "docker" else "1000:1000"
    workspace = "/testbed" if kind == "docker" else "/tmp/work"
    options = SMALL.__class__(**{**vars(SMALL), "user": user, "workspace": workspace})
    return DockerSandbox.start(host, BASE_IMAGE, options)


def sh(box: Sandbox, command: str, timeout_s: float = 20.0, cap: int = 64 << 10) -> ExecResult:
    return box.exec(["bash", "-c", command], timeout_s=timeout_s, output_cap_bytes=cap)


def num_processes(box: Sandbox) -> int:
    """Processes inside, beside the ones that look."""
    return int(sh(box, "set -- /proc/[0-9]*; echo $#").output)


def test_output_and_exit_code(box: Sandbox) -> None:
    result = sh(box, "echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.timed_out, result.truncated) == (3, False, False)
    assert result.output.split() == [b"out", b"err"]


def test_a_signal_gives_its_number(box: Sandbox) -> None:
    assert sh(box, "kill -SEGV $$").exit_code == 139


def test_a_missing_program_is_the_agents_mistake(box: Sandbox) -> None:
    assert box.exec(["no-such-program"], timeout_s=5).exit_code == 127


def test_the_work_folder_is_where_commands_start(box: Sandbox) -> None:
    assert sh(box, "pwd").output.decode().strip() == box.workspace


def test_stdin_reaches_the_command_and_only_it(box: Sandbox) -> None:
    data = bytes(range(256)) * 40
    assert box.exec(["cat"], timeout_s=10, stdin=data).output == data
    assert box.exec(["cat"], timeout_s=10).output == b""
    assert box.exec(["true"], timeout_s=10, stdin=data).exit_code == 0
    assert sh(box, "read -r x; echo [$x]; cat; cat /proc/self/fd/0").output == b"[]\n"
    assert sh(box, "echo next").output == b"next\n"


def test_environment_and_folder_of_one_command(box: Sandbox) -> None:
    box.write("sub/x", b"")
    result = box.exec(
        ["bash", "-c", "echo $A; pwd"], timeout_s=5, cwd="sub", env={"A": "it's $HOME"}
    )
    assert result.output.decode().split("\n")[:2] == ["it's $HOME", f"{box.workspace}/sub"]
    assert sh(box, "echo [$A]").output == b"[]\n"


@pytest.mark.parametrize(
    "argument", ["", " ", "'", '"', "$(id)", "a\nb", "*", "\\", "-n", "caf\udce9", "日本"]
)
def test_arguments_arrive_as_they_are(box: Sandbox, argument: str) -> None:
    result = box.exec(["printf", "%s|", "x", argument], timeout_s=5)
    assert result.output == b"x|" + argument.encode("utf-8", "surrogateescape") + b"|"


@pytest.mark.parametrize(
    "command",
    [
        "sleep 300 & sleep 300",
        "trap '' TERM INT HUP; sleep 300; sleep 300",
        "setsid sh -c 'trap \"\" TERM HUP; sleep 300' & sleep 300",
        "(setsid setsid sleep 300 &) ; while :; do :; done",
        "(while :; do echo x >> grows; done) & sleep 300",
    ],
    ids=["background", "ignores TERM", "own session", "double fork", "writer"],
)
def test_a_timeout_ends_the_work_and_not_the_sandbox(box: Sandbox, command: str) -> None:
    quiet = num_processes(box)
    started = time.monotonic()
    result = sh(box, command, timeout_s=1.0)
    assert result.timed_out
    assert result.exit_code is None
    assert time.monotonic() - started < 30
    assert sh(box, "echo next").output == b"next\n"
    assert num_processes(box) <= quiet
    first = sh(box, "cat grows 2>/dev/null | wc -c").output
    time.sleep(0.05)
    assert sh(box, "cat grows 2>/dev/null | wc -c; rm -f grows").output == first


def test_a_command_that_exits_124_is_not_a_timeout(box: Sandbox) -> None:
    result = sh(box, "exit 124")
    assert (result.exit_code, result.timed_out) == (124, False)


def test_daemons_do_not_outlive_a_command_that_ends(box: Sandbox) -> None:
    quiet = num_processes(box)
    sh(box, "setsid sh -c 'trap \"\" TERM HUP; sleep 300' >/dev/null 2>&1 &")
    assert num_processes(box) <= quiet


def test_a_fork_bomb_ends(box: Sandbox) -> None:
    sh(box, "bomb() { bomb | bomb & }; bomb; sleep 300", timeout_s=2.0)
    assert sh(box, "echo next", timeout_s=60).output == b"next\n"
    assert num_processes(box) < 8


def test_too_much_memory_is_said_and_survived(box: Sandbox) -> None:
    hog = "x = [bytearray(1 << 20) for _ in range(4000)]"
    result = box.exec(["python3", "-c", hog], timeout_s=60)
    assert result.exit_code not in (0, None)
    assert sh(box, "echo next").output == b"next\n"


def test_three_gigabytes_of_output_do_not_fill_memory(box: Sandbox) -> None:
    result = sh(box, "yes | head -c 3000000000", timeout_s=5.0, cap=10_000)
    assert result.truncated
    assert 10_000 <= len(result.output) < 10_100
    assert b" bytes left out ...]" in result.output
    assert sh(box, "echo next").output == b"next\n"


def test_the_cap_keeps_both_ends(box: Sandbox) -> None:
    result = sh(box, "echo first; seq 10000; echo last", cap=1000)
    assert result.output.startswith(b"first\n")
    assert result.output.endswith(b"last\n")


@pytest.mark.parametrize(
    "command",
    ["printf 'caf\\xe9\\n'", "head -c 100 /dev/urandom | tee raw", "printf 'a\\0b'", "echo x >&2"],
)
def test_bytes_that_are_not_text_are_kept(box: Sandbox, command: str) -> None:
    wanted = {"p": b"caf\xe9\n", "a": b"a\0b", "e": b"x\n"}
    result = sh(box, command)
    if "urandom" in command:
        assert result.output == box.read("raw")
        assert len(result.output) == 100
    else:
        assert result.output == wanted["a" if "0b" in command else command[0]]


@pytest.mark.parametrize("data", [b"", b"x", b"\0\xff\r\n", b"no newline", bytes(300_000)])
def test_files_go_in_and_come_out_unchanged(box: Sandbox, data: bytes) -> None:
    box.write("deep/er/file", data)
    assert box.read("deep/er/file") == data
    box.write("deep/er/file", b"other")
    assert box.read("deep/er/file") == b"other"
    box.delete("deep/er/file")
    with pytest.raises(WorkspaceError):
        box.read("deep/er/file")


@pytest.mark.parametrize("path", ["absent", "a-folder", "../escape", "/etc/passwd", "link", "lf/x"])
def test_what_is_no_plain_file_below_the_folder_is_refused(box: Sandbox, path: str) -> None:
    sh(box, "mkdir -p a-folder; ln -sfn /etc/passwd link; ln -sfn /etc lf")
    with pytest.raises(WorkspaceError):
        box.read(path)
    if path != "absent":
        with pytest.raises(WorkspaceError):
            box.write(path, b"x")
    assert sh(box, "cat /etc/passwd | head -c 4").output == b"root"


def test_a_snapshot_has_plain_files_only(box: Sandbox) -> None:
    sh(box, "rm -rf ./* .git; mkdir .git d; echo 1 > .git/x; echo 2 > d/y; ln -s d/y l; mkfifo f")
    assert box.snapshot() == {"d/y": b"2\n"}


def test_another_thread_can_end_a_command(box: Sandbox) -> None:
    timer = threading.Timer(0.5, box.kill_all)
    timer.start()
    started = time.monotonic()
    result = sh(box, "sleep 300", timeout_s=60)
    timer.join()
    assert time.monotonic() - started < 30
    assert result.exit_code != 0
    assert sh(box, "echo next").output == b"next\n"


def test_there_is_no_network(box: Sandbox) -> None:
    code = "import socket; socket.create_connection(('1.1.1.1', 80), 2)"
    result = box.exec(["python3", "-c", code], timeout_s=20)
    assert b"unreachable" in result.output


def test_killing_everything_in_reach_is_the_agents_own_loss(box: Sandbox) -> None:
    for command in ("kill -9 -1", "kill 0", "kill -9 1", "kill -TERM 1", "kill -9 $PPID"):
        assert sh(box, command).exit_code is not None
        assert sh(box, "echo next").output == b"next\n"
