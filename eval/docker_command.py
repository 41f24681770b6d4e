"""The ``docker`` command, by which the official harness's images and containers are seen."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence

from envs.tasks.swebench import SweBenchRow
from eval.config import SuiteConfig
from eval.errors import HarnessError


def docker(*arguments: str) -> str:
    """Run ``docker`` and return what it printed. Raises HarnessError."""
    try:
        done = subprocess.run(
            ["docker", *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"docker {arguments[0]} does not work: got={error}") from error
    if done.returncode != 0:
        raise HarnessError(
            f"docker {arguments[0]} failed: got={done.stderr.strip()[-300:]!r} expected a running"
            " daemon; set DOCKER_HOST to its socket"
        )
    return done.stdout


def check_docker() -> None:
    """Raise HarnessError unless the command reaches a daemon."""
    docker("version", "--format", "{{.Server.Version}}")


def local_images() -> frozenset[str]:
    """Return the names of the images that the daemon has. Raises HarnessError."""
    return frozenset(docker("images", "--format", "{{.Repository}}:{{.Tag}}").split())


def foreign_images(images: Iterable[str]) -> list[str]:
    """Return those of ``images`` that the daemon's machine can only emulate: so slowly that tests
    run into their time limits. Images that are not here are not looked at."""
    names = sorted(set(images) & local_images())
    if not names:
        return []
    machine = docker("version", "--format", "{{.Server.Arch}}").strip()
    listed = docker("image", "inspect", "--format", "{{.Architecture}}", *names).split()
    return [name for name, found in zip(names, listed, strict=True) if found not in ("", machine)]


def check_architecture(config: SuiteConfig, rows: Sequence[SweBenchRow]) -> str:
    """Return what the report says about emulation. Raises HarnessError unless it is allowed."""
    foreign = foreign_images(name for row in rows for name in row.images)
    if not foreign:
        return ""
    if not config.container.allow_emulation:
        raise HarnessError(
            f"{len(foreign)} images are for another architecture, first {foreign[0]}: emulated"
            " tests run into their time limits and would count as failures; grade on a machine of"
            " that architecture, or set container.allow_emulation to accept that"
        )
    return f", {len(foreign)} images emulated"
