"""Output that is not text, cut inside a character or on one stream only; writers that go on."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from envs.actions.observation import model_view
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.worker_sandbox import WorkerSandbox


@pytest.fixture(scope="module", params=("bubblewrap", "unshare"))
def box(request: pytest.FixtureRequest) -> Iterator[WorkerSandbox]:
    box = WorkerSandbox(SandboxSpec(request.param))
    yield box
    box.close()


def sh(box: WorkerSandbox, command: str, timeout_s: float = 20.0, cap: int = 64 << 10):
    return box.exec(["bash", "-c", command], timeout_s=timeout_s, output_cap_bytes=cap)


def test_what_only_stderr_says_is_seen(box: WorkerSandbox) -> None:
    assert sh(box, "echo trouble >&2; exit 2").output == b"trouble\n"


def test_random_bytes_arrive_as_they_are(box: WorkerSandbox) -> None:
    result = sh(box, "head -c 100 /dev/urandom | tee raw")
    assert len(result.output) == 100
    assert result.output == box.read("raw")
    assert isinstance(model_view(result.output, 1000), str)


def test_a_character_cut_at_the_cap_is_marked_and_not_fatal(box: WorkerSandbox) -> None:
    """Two-byte characters and a cap of odd halves: head and tail both end inside one."""
    result = sh(box, "for i in $(seq 1000); do printf '\\xc3\\xa9'; done", cap=1002)
    assert result.truncated
    assert result.output.startswith("é".encode() * 250 + b"\xc3")
    assert result.output.endswith(b"\xa9" + "é".encode() * 250)
    shown = model_view(result.output, 5000)
    assert shown.startswith("é" * 250 + "\N{REPLACEMENT CHARACTER}")
    assert "[... 998 bytes left out ...]" in shown


def test_a_writer_stops_with_the_command_that_timed_out(box: WorkerSandbox) -> None:
    """What a later step or the grader reads must not go on growing."""
    result = sh(box, "(setsid bash -c 'while :; do echo x >> grows; done' &) ; sleep 300", 0.5)
    assert (result.timed_out, result.exit_code) == (True, None)
    size = len(box.read("grows"))
    time.sleep(0.2)
    assert size > 0
    assert len(box.read("grows")) == size
