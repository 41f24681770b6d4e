"""A host on the private daemon. Tests that use it fail, and do not skip, where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from r2e_specimens import BASE_IMAGE

from envs.sandbox.docker.docker_errors import DockerError
from envs.sandbox.docker.docker_py import DockerPyEngine
from envs.sandbox.docker.host import DockerHost, HostLimits

PRIVATE_SOCKET = "unix:///opt/agent-rl-docker/docker.sock"
LIMITS = HostLimits(disk_floor_bytes=1 << 30)
DOCKER_URL = os.environ.get("DOCKER_HOST", PRIVATE_SOCKET)


def connect() -> DockerPyEngine:
    try:
        return DockerPyEngine(DOCKER_URL)
    except DockerError as error:
        pytest.fail(f"no container engine at {DOCKER_URL}; run scripts/docker/start.sh: {error}")


@pytest.fixture(scope="session")
def docker_host() -> Iterator[DockerHost]:
    host = DockerHost(connect(), run_id="tests", limits=LIMITS)
    host.clean_up()
    assert host.engine.find_image(BASE_IMAGE), "make it by scripts/docker/base_image.sh"
    yield host
    host.close()
