"""Prepared images are capped: the oldest go first, one that is in use stays."""

from __future__ import annotations

from pathlib import Path

from fake_engine import FakeEngine

from envs.images.environments import ImageEnvironments, ImageSettings
from envs.images.prepare import PREPARED_LABEL, remove_old_images
from envs.sandbox.docker.docker_errors import DockerError, TransientDockerError
from envs.sandbox.docker.engine import ImageInfo


def engine_with(number: int) -> FakeEngine:
    """``number`` prepared images, the first one the oldest, and one of somebody else."""
    engine = FakeEngine(images={"theirs:1": ImageInfo("sha256:x", "amd64")})
    for index in range(number):
        labels = {PREPARED_LABEL: "tree"}
        engine.images[f"prepared:{index}"] = ImageInfo(f"sha256:{index}", "amd64", labels)
    return engine


def test_the_oldest_are_removed_above_the_limit() -> None:
    engine = engine_with(5)
    assert remove_old_images(engine, 3) == ["prepared:1", "prepared:0"]
    assert sorted(engine.images) == ["prepared:2", "prepared:3", "prepared:4", "theirs:1"]
    assert remove_old_images(engine, 3) == []
    remove_old_images(engine, 0)
    assert list(engine.images) == ["theirs:1"]


def test_an_image_in_use_stays_and_does_not_stop_the_others() -> None:
    engine = engine_with(3)
    engine.failures["remove_image"] = [DockerError("a container uses it"), None, None]
    assert remove_old_images(engine, 0) == ["prepared:1", "prepared:0"]
    assert sorted(engine.images) == ["prepared:2", "theirs:1"]


def test_closing_removes_them_and_survives_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    engine = engine_with(2)
    settings = ImageSettings("run", tmp_path, max_prepared=1)
    ImageEnvironments(engine, settings).close()
    assert sorted(engine.images) == ["prepared:1", "theirs:1"]
    broken = engine_with(2)
    broken.failures["list_images"] = [TransientDockerError("gone")]
    ImageEnvironments(broken, settings).close()
    assert broken.closed
    assert len(broken.images) == 3
