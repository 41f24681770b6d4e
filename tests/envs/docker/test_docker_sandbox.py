"""What only containers have: a shell whose state lasts, limits by the engine, an agent as root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from docker_fixtures import DOCKER_URL, connect
from r2e_specimens import BASE_IMAGE, SMALL

from envs.errors import InfrastructureError
from envs.sandbox.docker.docker_errors import ImageMissingError
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.ownership import LABEL, RUN_LABEL

pytestmark = pytest.mark.docker
ROOT = Path(__file__).parents[3]


@pytest.fixture
def box(docker_host: DockerHost) -> Iterator[DockerSandbox]:
    sandbox = DockerSandbox.start(docker_host, BASE_IMAGE, SMALL)
    yield sandbox
    sandbox.close()


def test_the_shell_keeps_folder_environment_functions_and_umask(box: DockerSandbox) -> None:
    first = box.run_shell(
        'mkdir -p a; cd a; export X="it\'s\n2"; f() { echo f:$1; }; umask 027; exit 5', timeout_s=10
    )
    assert first.exit_code == 5
    second = box.run_shell('pwd; echo "$X"; f 1; umask; unset X', timeout_s=10)
    assert second.output == b"/testbed/a\nit's\n2\nf:1\n0027\n"
    assert box.run_shell('echo "[$X]"', timeout_s=10).output == b"[]\n"


def test_the_shells_state_outlives_a_timeout_and_a_killed_shell(box: DockerSandbox) -> None:
    box.run_shell("cd /tmp; export X=1", timeout_s=10)
    assert box.run_shell("cd /; sleep 60", timeout_s=0.5).timed_out
    box.run_shell("kill -9 -1", timeout_s=10)
    assert box.run_shell("pwd; echo $X", timeout_s=10).output == b"/tmp\n1\n"


def test_a_folder_that_was_removed_does_not_end_the_shell(box: DockerSandbox) -> None:
    box.run_shell("mkdir /tmp/gone; cd /tmp/gone; rm -rf /tmp/gone", timeout_s=10)
    assert box.run_shell("echo alive", timeout_s=10).output.endswith(b"alive\n")


def test_the_nonce_of_the_protocol_is_not_to_be_had(box: DockerSandbox) -> None:
    look = "declare -p; env; cat /proc/$PPID/environ /proc/$PPID/cmdline | tr '\\0' '\\n'"
    for output in (
        box.run_shell(look, timeout_s=10).output,
        box.exec(["bash", "-c", look], timeout_s=10).output,
    ):
        assert b"nonce=" not in output.replace(b"nonce=;", b"")
        assert not [word for word in output.split() if len(word) == 32 and word.isalnum()]


def test_markers_printed_by_a_command_change_nothing(box: DockerSandbox) -> None:
    forged = "printf '%s 0 0 0\\n' " + "a" * 32 + "; exit 9"
    result = box.exec(["bash", "-c", forged], timeout_s=10)
    assert result.exit_code == 9
    assert result.output == b"a" * 32 + b" 0 0 0\n"


def test_the_engine_tells_the_exit_code_of_a_trusted_command(box: DockerSandbox) -> None:
    result = box.exec_trusted(["sh", "-c", "echo 1; (sleep 300 &) ; exit 7"], timeout_s=20)
    assert (result.exit_code, result.output) == (7, b"1\n")
    late = box.exec_trusted(["sleep", "300"], timeout_s=1)
    assert (late.exit_code, late.timed_out) == (None, True)
    assert box.exec(["echo", "next"], timeout_s=10).output == b"next\n"
    assert docker_processes(box) <= 2


def docker_processes(box: DockerSandbox) -> int:
    return connect().count_processes(box.container_id)


def test_running_out_of_memory_is_told_from_other_failures(box: DockerSandbox) -> None:
    hog = "x = [bytearray(1 << 20) for _ in range(4000)]"
    assert box.exec(["python3", "-c", hog], timeout_s=60).oom
    assert not box.exec(["false"], timeout_s=10).oom


def test_writing_more_than_the_disk_limit_is_stopped(docker_host: DockerHost) -> None:
    small = replace(SMALL, disk_bytes=64 << 20)
    box = DockerSandbox.start(docker_host, BASE_IMAGE, small)
    try:
        write = "for i in $(seq 100); do head -c 16M /dev/zero > big$i; sleep 0.1; done; sleep 60"
        result = box.exec(["bash", "-c", write], timeout_s=60)
        assert result.exit_code == 137
        assert b"disk limit" in result.output
        assert not result.timed_out
        assert box.exec(["bash", "-c", "rm -f big*; echo next"], timeout_s=30).output == b"next\n"
    finally:
        box.close()


def test_a_single_file_has_a_limit(docker_host: DockerHost) -> None:
    box = DockerSandbox.start(docker_host, BASE_IMAGE, replace(SMALL, max_file_bytes=1 << 20))
    try:
        result = box.exec(
            ["bash", "-c", "head -c 3M /dev/zero > big; stat -c %s big"], timeout_s=10
        )
        assert b"1048576" in result.output
    finally:
        box.close()


def test_what_a_container_is_made_with(box: DockerSandbox, docker_host: DockerHost) -> None:
    import docker

    client = docker.DockerClient(base_url=DOCKER_URL)
    try:
        config = client.containers.get(box.container_id).attrs["HostConfig"]
    finally:
        client.close()
    assert config["NetworkMode"] == "none"
    assert config["Privileged"] is False
    assert not config["Binds"]
    assert config["Memory"] == config["MemorySwap"] == SMALL.memory_bytes
    assert config["PidsLimit"] == SMALL.max_processes
    assert config["NanoCpus"] == 2_000_000_000
    assert config["CapDrop"] == ["ALL"]
    assert config["SecurityOpt"] == ["no-new-privileges"]


def test_capabilities_and_user(docker_host: DockerHost) -> None:
    box = DockerSandbox.start(
        docker_host, BASE_IMAGE, replace(SMALL, user="1000:1000", workspace="/tmp/w")
    )
    try:
        look = "id -u; cat /etc/shadow; touch /etc/x; grep CapEff /proc/self/status"
        output = box.exec(["bash", "-c", look], timeout_s=10).output
        assert output.startswith(b"1000\n")
        assert output.count(b"Permission denied") == 2
        assert b"CapEff:\t0000000000000000" in output
        assert box.exec_trusted(["id", "-u"], timeout_s=10, user="root").output == b"0\n"
    finally:
        box.close()


def test_an_agent_that_destroys_its_container_gets_results_not_errors(box: DockerSandbox) -> None:
    wreck = "import shutil\nfor d in ('/usr/bin', '/bin', '/usr/sbin'): shutil.rmtree(d, True)"
    box.exec(["python3", "-c", wreck], timeout_s=60)
    for _ in range(2):
        assert box.exec(["echo", "x"], timeout_s=10).exit_code in (126, 127, 137)
        late = box.run_shell("while :; do :; done", timeout_s=1)
        assert late.exit_code != 0


def test_a_container_removed_by_somebody_else_is_infrastructure(box: DockerSandbox) -> None:
    connect().remove(box.container_id)
    with pytest.raises(InfrastructureError):
        box.exec(["echo", "x"], timeout_s=10)
    box.close()


def test_files_go_in_as_archives_and_come_out(box: DockerSandbox) -> None:
    box.put_files("/opt", {"tree/a": b"1", "tree/b/c": b"\0\xff"})
    assert box.get_files("/opt/tree") == {"tree/a": b"1", "tree/b/c": b"\0\xff"}
    with pytest.raises(FileNotFoundError):
        box.get_files("/opt/none")
    with pytest.raises(InfrastructureError, match="too large"):
        box.get_files("/usr/bin", max_bytes=1 << 20)


def test_an_image_that_does_not_exist_is_infrastructure(docker_host: DockerHost) -> None:
    with pytest.raises(ImageMissingError):
        DockerSandbox.start(docker_host, "agent-rl/none:1", SMALL)
    assert issubclass(ImageMissingError, InfrastructureError)


KILLED = """
    import os, sys, time
    sys.path.insert(0, {path!r})
    from docker_fixtures import connect
    from r2e_specimens import BASE_IMAGE, SMALL
    from envs.sandbox.docker.host import DockerHost
    from envs.sandbox.docker.docker_sandbox import DockerSandbox
    host = DockerHost(connect(), run_id="killed-run")
    boxes = [DockerSandbox.start(host, BASE_IMAGE, SMALL) for _ in range(3)]
    print("up", flush=True)
    boxes[0].exec(["sleep", "300"], timeout_s=300)
"""


@pytest.mark.slow
def test_a_killed_controller_leaves_nothing_after_the_next_start(docker_host: DockerHost) -> None:
    script = textwrap.dedent(KILLED.format(path=str(Path(__file__).parent)))
    process = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    again = DockerHost(connect(), run_id="killed-run")
    other = DockerHost(connect(), run_id="another-run")
    assert again.clean_up() == [], "the controller is still alive"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert other.clean_up() == [], "they belong to another run"
    assert len(again.clean_up()) == 3
    left = [c for c in again.engine.list_containers(LABEL) if c.labels[RUN_LABEL] == "killed-run"]
    assert left == []
    again.close()
    other.close()


def test_an_image_with_a_volume_leaves_no_volume(docker_host: DockerHost) -> None:
    import docker

    image = "agent-rl/test-volume:1"
    client = docker.DockerClient(base_url=DOCKER_URL)
    made = client.api.create_container(BASE_IMAGE, ["true"])
    client.api.commit(made["Id"], "agent-rl/test-volume", tag="1", changes=["VOLUME /data"])
    client.api.remove_container(made["Id"])
    try:
        engine = connect()
        before = engine.count_volumes()
        box = DockerSandbox.start(docker_host, image, SMALL)
        box.exec(["touch", "/data/x"], timeout_s=10)
        assert engine.count_volumes() == before + 1
        box.close()
        assert engine.count_volumes() == before
    finally:
        client.api.remove_image(image)
        client.close()


def test_an_engine_that_is_not_there_is_infrastructure(tmp_path: Path) -> None:
    from envs.sandbox.docker.docker_py import DockerPyEngine

    with pytest.raises(InfrastructureError, match="expected=a container engine that answers"):
        DockerPyEngine(f"unix://{tmp_path}/none.sock")
