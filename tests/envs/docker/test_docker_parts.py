"""Options, labels, frames, caps and the shell's protocol, without an engine."""

from __future__ import annotations

import struct
import time

import pytest
from docker import errors as docker_errors
from hypothesis import given
from hypothesis import strategies as st
from requests import Response

from envs.errors import WorkspaceError
from envs.sandbox.capture import CappedOutput
from envs.sandbox.docker import docker_py
from envs.sandbox.docker.channel import ShellChannel
from envs.sandbox.docker.docker_errors import (
    ContainerGoneError,
    DiskLowError,
    DockerError,
    ImageMissingError,
    TransientDockerError,
)
from envs.sandbox.docker.file_scripts import check_relative
from envs.sandbox.docker.frames import FrameReader
from envs.sandbox.docker.options import DockerOptions
from envs.sandbox.docker.ownership import Owner


@pytest.mark.parametrize(
    "network", ["host", "bridge", "default", "container:abc", "ns:/proc/1/ns/net"]
)
def test_networks_that_reach_the_host_are_refused(network: str) -> None:
    with pytest.raises(ValueError, match="network is refused"):
        DockerOptions(network=network)


@pytest.mark.parametrize("capability", ["SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "ALL", "MKNOD"])
def test_capabilities_beyond_a_plain_root_are_refused(capability: str) -> None:
    with pytest.raises(ValueError, match="capabilities are refused"):
        DockerOptions(capabilities=(capability,))


@pytest.mark.parametrize("name", ["privileged", "volumes", "mounts", "devices", "pid_mode"])
def test_what_opens_the_host_cannot_even_be_said(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        DockerOptions(**{name: True})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "changes", [{"memory_bytes": 0}, {"cpus": -1.0}, {"workspace": "testbed"}, {"workspace": "/"}]
)
def test_limits_and_folders_are_checked(changes: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got="):
        DockerOptions(**changes)  # pyright: ignore[reportArgumentType]


def test_an_owner_survives_its_label() -> None:
    owner = Owner.current()
    assert Owner.parse(str(owner)) == owner
    for damaged in ("", "a/b", "a/b/c/d", "a/b/1/2/3", f"{owner}x"):
        assert Owner.parse(damaged) is None


@given(
    st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=8),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_frames_come_out_whole_however_they_are_cut(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    data = b"".join(struct.pack(">BxxxI", s, len(payload)) + payload for s, payload in frames)
    reader, out, position, turn = FrameReader(), [], 0, 0
    while position < len(data):
        step = cuts[turn % len(cuts)]
        out += reader.feed(data[position : position + step])
        position, turn = position + step, turn + 1
    for stream in (1, 2):
        assert b"".join(part for s, part in out if s == stream) == b"".join(
            payload for s, payload in frames if s == stream
        )


@given(st.lists(st.binary(max_size=30), max_size=10), st.integers(0, 40))
def test_the_cap_keeps_both_ends_and_counts_the_rest(parts: list[bytes], cap: int) -> None:
    output = CappedOutput(cap)
    for part in parts:
        output.add(part)
    whole = b"".join(parts)
    assert output.truncated == (len(whole) > cap)
    if not output.truncated:
        assert output.value() == whole
        return
    head, _, tail = output.value().partition(
        b"\n[... %d bytes left out ...]\n" % (len(whole) - cap)
    )
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) + len(tail) == cap


class ScriptedStream:
    """Plays pieces of output; the nonce of the request can be put into them."""

    def __init__(self, *pieces: str | bytes) -> None:
        self._pieces = list(pieces)
        self.sent = b""
        self.closed = False

    def send(self, data: bytes) -> None:
        if self.closed:
            raise ContainerGoneError("closed")
        self.sent += data

    def receive(self, timeout_s: float) -> bytes | None:
        if not self._pieces:
            time.sleep(max(0.0, min(timeout_s, 0.05)))
            return None
        piece = self._pieces.pop(0)
        if isinstance(piece, bytes):
            return piece
        return piece.format(nonce=self.sent[:32].decode()).encode()

    def exit_code(self) -> int | None:
        return None

    def close(self) -> None:
        self.closed = True


def run(stream: ScriptedStream, seconds: float = 5.0, **kwargs: object):
    output = CappedOutput(1 << 16)
    channel = ShellChannel(stream)
    ending = channel.run("echo", output, deadline=time.monotonic() + seconds, **kwargs)  # pyright: ignore[reportArgumentType]
    return ending, output.value()


def test_a_request_frames_script_and_stdin_by_length() -> None:
    stream = ScriptedStream("{nonce} 0 0 0\n")
    run(stream, stdin=b"\0\xff\n")
    nonce, rest = stream.sent.split(b" ", 1)
    assert len(nonce) == 32
    assert rest == b"4 3\necho\0\xff\n"


@pytest.mark.parametrize(
    "pieces",
    [
        ("out{nonce} 3 1 0\n",),
        ("out", "{nonce}", " 3 1 0", "\n"),
        ("o", "ut{nonce} 3 ", "1 0\n"),
    ],
)
def test_the_status_is_found_however_the_stream_is_cut(pieces: tuple[str, ...]) -> None:
    ending, output = run(ScriptedStream(*pieces))
    assert (ending.how, ending.exit_code, ending.oom_kills, ending.left_behind) == (
        "ended",
        3,
        1,
        False,
    )
    assert output == b"out"


def test_the_nonce_itself_may_be_cut_anywhere() -> None:
    for cut in range(1, 32):
        stream = ScriptedStream()
        channel, output = ShellChannel(stream), CappedOutput(100)
        first = True

        def receive(timeout_s: float, stream: ScriptedStream = stream, cut: int = cut) -> bytes:
            nonlocal first
            nonce = stream.sent[:32]
            if first:
                first = False
                return b"text" + nonce[:cut]
            return nonce[cut:] + b" 0 0 0\n"

        stream.receive = receive  # pyright: ignore[reportAttributeAccessIssue]
        assert channel.run("x", output, deadline=time.monotonic() + 5).how == "ended"
        assert output.value() == b"text"


def test_markers_in_the_output_do_not_end_it() -> None:
    forged = "0 0 0\n" + "f" * 32 + " 0 0 0\n"
    ending, output = run(ScriptedStream(forged, "real{nonce} 7 0 0\n"))
    assert ending.exit_code == 7
    assert output == forged.encode() + b"real"


def test_a_stream_that_ends_or_is_out_of_step_is_closed() -> None:
    assert run(ScriptedStream("some", b""))[0].how == "closed"
    assert run(ScriptedStream("{nonce} what is this\n"))[0].how == "closed"
    closed = ScriptedStream()
    closed.closed = True
    assert run(closed)[0].how == "closed"


def test_a_flood_still_meets_its_deadline() -> None:
    class Flood(ScriptedStream):
        def receive(self, timeout_s: float) -> bytes | None:
            return b"y\n" * 1000

    started = time.monotonic()
    ending, output = run(Flood(), seconds=0.2)
    assert ending.how == "deadline"
    assert time.monotonic() - started < 30  # without its deadline it never ends
    assert len(output) < (1 << 16) + 100


def test_the_guard_can_stop_a_command() -> None:
    ending, _ = run(ScriptedStream(), may_go_on=lambda: False)
    assert ending.how == "deadline"


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a\0b", ".", "./"])
def test_paths_that_leave_the_folder_are_refused(path: str) -> None:
    with pytest.raises(WorkspaceError, match="leads outside"):
        check_relative(path)


def api_error(status: int, text: str) -> docker_errors.APIError:
    response = Response()
    response.status_code = status
    return docker_errors.APIError(text, response, text)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (api_error(429, "toomanyrequests: rate limit"), TransientDockerError),
        (api_error(500, "server error"), TransientDockerError),
        (api_error(503, "overloaded"), TransientDockerError),
        (api_error(500, "write /x: no space left on device"), DiskLowError),
        (api_error(500, "manifest unknown"), ImageMissingError),
        (api_error(404, "No such image: a:b"), ImageMissingError),
        (api_error(404, "No such container: c"), ContainerGoneError),
        (api_error(400, "bad parameter"), DockerError),
        (TimeoutError("timed out"), TransientDockerError),
        (OSError(28, "No space left on device"), DiskLowError),
    ],
)
def test_what_the_engine_says_becomes_the_right_error(
    error: Exception, kind: type[DockerError]
) -> None:
    with pytest.raises(DockerError) as caught, docker_py._translated("do it"):  # pyright: ignore[reportPrivateUsage]
        raise error
    assert type(caught.value) is kind
    assert "do it" in str(caught.value)
