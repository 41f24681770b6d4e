"""A sandbox with git for the git tests: bubblewrap always, Docker where its marker is selected."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from r2e_specimens import BASE_IMAGE, SMALL

from envs.base import Sandbox
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.limits import SandboxLimits
from envs.sandbox.worker_sandbox import WorkerSandbox

KINDS = ("bubblewrap", pytest.param("docker", marks=pytest.mark.docker))
Cases = dict[str, str]
_LIMITS = SandboxLimits(memory_bytes=1 << 30, max_file_bytes=64 << 20, tmp_bytes=256 << 20)
_IDENTITY = {
    "GIT_AUTHOR_NAME": "a",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "a",
    "GIT_COMMITTER_EMAIL": "a@example.org",
    "GIT_CONFIG_NOSYSTEM": "1",
    "HOME": "/tmp",
}


def on_docker(cases: Cases, everywhere: Sequence[str]) -> list[object]:
    """Every case with its sandbox: all on Docker, those of ``everywhere`` on bubblewrap too."""
    assert set(everywhere) <= set(cases)
    in_docker = [
        pytest.param("docker", case, marks=pytest.mark.docker, id=f"docker-{case}")
        for case in cases
    ]
    return [*(pytest.param("bubblewrap", c, id=f"bubblewrap-{c}") for c in everywhere), *in_docker]


def empty(box: Sandbox) -> Sandbox:
    """The same sandbox as if it were fresh."""
    sh(box, 'rm -rf .[!.]* *; for x in /tmp/*; do [ "$x" = "$PWD" ] || rm -rf "$x"; done')
    return box


@contextmanager
def git_box(kind: str, request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if kind == "docker":
        box: Sandbox = DockerSandbox.start(
            request.getfixturevalue("docker_host"), BASE_IMAGE, SMALL
        )
    else:
        box = WorkerSandbox(SandboxSpec(kind, _LIMITS))
    try:
        yield box
    finally:
        box.close()


def sh(box: Sandbox, script: str) -> str:
    """Run bash with ``-e``; what it prints."""
    result = box.exec(
        ["bash", "-ec", script], timeout_s=60, output_cap_bytes=8 << 20, env=_IDENTITY
    )
    assert result.exit_code == 0, result.output
    return result.output.decode("utf-8", "surrogateescape").strip()
