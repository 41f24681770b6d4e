"""Containers never leak, whatever fails and whenever; other runs' containers are never touched."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from fake_engine import FakeEngine

from envs.errors import InfrastructureError
from envs.sandbox.docker.docker_errors import (
    DiskLowError,
    DockerError,
    ImageMissingError,
    TransientDockerError,
)
from envs.sandbox.docker.engine import ContainerSpec, ImageInfo
from envs.sandbox.docker.host import DockerHost, HostLimits
from envs.sandbox.docker.options import DockerOptions
from envs.sandbox.docker.ownership import (
    EXPIRES_LABEL,
    LABEL,
    OWNER_LABEL,
    RUN_LABEL,
    Owner,
    make_labels,
)
from envs.sandbox.docker.retry import Backoff

OPTIONS = DockerOptions()


def make_host(engine: FakeEngine, **changes: object) -> DockerHost:
    settings: dict[str, object] = {
        "run_id": "mine",
        "backoff": Backoff(attempts=3, sleep=lambda seconds: None),
        "free_bytes": lambda folder: 100 << 30,
    }
    return DockerHost(engine, **(settings | changes))  # pyright: ignore[reportArgumentType]


def dead_owner() -> Owner:
    """A process of this machine that has ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
    )
    with open(f"/proc/{process.pid}/stat") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    process.communicate()
    return replace(Owner.current(), pid=process.pid, start_ticks=ticks)


def plant(engine: FakeEngine, run_id: str, owner: Owner, expires_in_s: float = 3600) -> str:
    labels = make_labels(run_id, owner, time.time() + expires_in_s)
    container_id = engine.create(ContainerSpec("image", OPTIONS, labels))
    engine.start(container_id)
    return container_id


def test_labels_are_set_when_the_container_is_made() -> None:
    engine = FakeEngine()
    container_id = make_host(engine).start_container("image", OPTIONS)
    labels = engine.containers[container_id].labels
    assert labels[LABEL] == "1"
    assert labels[RUN_LABEL] == "mine"
    assert Owner.parse(labels[OWNER_LABEL]) == Owner.current()
    assert abs(float(labels[EXPIRES_LABEL]) - time.time() - OPTIONS.max_lifetime_s) < 60


@pytest.mark.parametrize(
    "failure", [DockerError("no"), TransientDockerError("busy"), KeyboardInterrupt()]
)
def test_a_failed_start_leaves_no_container_and_no_volume(failure: BaseException) -> None:
    engine = FakeEngine(failures={"start": [failure] * 3})
    host = make_host(engine)
    with pytest.raises(type(failure)):
        host.start_container("image", OPTIONS)
    assert engine.containers == {}
    assert engine.volumes == set()
    engine.failures = {}
    assert host.start_container("image", OPTIONS) in engine.running


def test_a_cancel_between_creating_and_recording_the_id_leaves_nothing() -> None:
    engine = FakeEngine(failures={"create:after": [KeyboardInterrupt()]})
    with pytest.raises(KeyboardInterrupt):
        make_host(engine).start_container("image", OPTIONS)
    assert engine.containers == {}


def test_a_lost_answer_to_create_is_cleaned_up_and_tried_again() -> None:
    engine = FakeEngine(failures={"create:after": [TransientDockerError("time-out"), None]})
    host = make_host(engine)
    kept = host.start_container("image", OPTIONS)
    assert list(engine.containers) == [kept], "the container of the lost answer stays behind"


def test_a_removal_that_fails_once_is_repeated() -> None:
    engine = FakeEngine()
    host = make_host(engine)
    container_id = host.start_container("image", OPTIONS)
    engine.failures = {"remove": [TransientDockerError("busy")]}
    host.remove(container_id)
    assert engine.containers == {}
    assert host.stuck == frozenset()


def test_a_removal_that_keeps_failing_is_said_and_repeated_later() -> None:
    engine = FakeEngine()
    host = make_host(engine)
    container_id = host.start_container("image", OPTIONS)
    engine.failures = {"remove": [DockerError("device busy")]}
    host.remove(container_id)
    assert host.stuck == {container_id}
    host.start_container("image", OPTIONS)
    assert host.stuck == frozenset()
    assert container_id not in engine.containers


def test_close_names_what_it_could_not_remove() -> None:
    engine = FakeEngine()
    host = make_host(engine)
    container_id = host.start_container("image", OPTIONS)
    engine.failures = {"remove": [DockerError("device busy")] * 9}
    with pytest.raises(DockerError, match=container_id):
        host.close()


def test_after_a_kill_the_next_start_of_the_run_removes_what_is_left() -> None:
    engine = FakeEngine()
    gone = dead_owner()
    for _ in range(3):
        plant(engine, "mine", gone)
    assert len(make_host(engine).clean_up()) == 3
    assert engine.containers == {}
    assert engine.volumes == set()


def test_containers_of_others_stay() -> None:
    engine = FakeEngine()
    alive, gone = Owner.current(), dead_owner()
    elsewhere = replace(gone, boot_id="another machine")
    other_namespace = replace(gone, pid_namespace="1")
    kept = [
        plant(engine, "mine", alive),
        plant(engine, "other", alive),
        plant(engine, "other", gone),
        plant(engine, "mine", elsewhere),
        plant(engine, "mine", other_namespace),
        engine.create(ContainerSpec("image", OPTIONS, {"somebody": "else"})),
        engine.create(ContainerSpec("image", OPTIONS, {LABEL: "1", RUN_LABEL: "mine"})),
    ]
    assert make_host(engine).clean_up() == []
    assert list(engine.containers) == kept
    assert make_host(engine).clean_up(dead_owners=True) == [kept[2]]


def test_a_container_past_its_own_lifetime_goes_whoever_made_it() -> None:
    engine = FakeEngine()
    plant(engine, "other", replace(dead_owner(), boot_id="another machine"), expires_in_s=-1)
    assert len(make_host(engine).clean_up()) == 1


def test_a_process_id_that_was_given_away_again_is_not_the_owner() -> None:
    reused = replace(Owner.current(), start_ticks=1)
    assert reused.liveness() == "dead"
    assert Owner.current().liveness() == "alive"


def test_a_low_disk_stops_new_work_before_anything_is_made() -> None:
    engine = FakeEngine()
    host = make_host(engine, free_bytes=lambda folder: 1 << 20)
    with pytest.raises(DiskLowError, match=r"got=1048576 bytes free.*expected>="):
        host.start_container("image", OPTIONS)
    assert "create" not in engine.calls
    assert issubclass(DiskLowError, InfrastructureError)


def test_no_room_left_while_creating_is_infrastructure_and_not_repeated() -> None:
    engine = FakeEngine(failures={"create": [DiskLowError("no space left on device")]})
    with pytest.raises(InfrastructureError):
        make_host(engine).start_container("image", OPTIONS)
    assert engine.calls.count("create") == 1
    assert engine.containers == {}


def test_an_overloaded_daemon_is_asked_again_with_growing_pauses() -> None:
    pauses: list[float] = []
    engine = FakeEngine(failures={"create": [TransientDockerError("503")] * 3})
    host = make_host(engine, backoff=Backoff(attempts=5, sleep=pauses.append))
    host.start_container("image", OPTIONS)
    assert len(pauses) == 3
    assert all(0.5 <= pause <= 30 for pause in pauses)
    assert pauses[2] >= 2.0


def test_back_off_ends_with_the_last_failure() -> None:
    engine = FakeEngine(failures={"create": [TransientDockerError("429")] * 9})
    with pytest.raises(TransientDockerError, match="429"):
        make_host(engine).start_container("image", OPTIONS)
    assert engine.calls.count("create") == 3


def test_images_that_are_here_are_not_pulled_and_missing_ones_are_all_named() -> None:
    engine = FakeEngine(images={"here": ImageInfo("1", "amd64")}, registry={"there"})
    host = make_host(engine)
    assert set(host.prepare_images(["here", "there", "here"])) == {"here", "there"}
    assert engine.calls.count("pull") == 1
    with pytest.raises(ImageMissingError, match=r"\['no:such', 'nor:this'\]"):
        host.prepare_images(["nor:this", "here", "no:such"])


def test_a_rate_limited_pull_is_repeated() -> None:
    engine = FakeEngine(registry={"there"}, failures={"pull": [TransientDockerError("429")]})
    assert "there" in make_host(engine).prepare_images(["there"])


def test_an_image_of_another_architecture_is_refused_unless_allowed() -> None:
    engine = FakeEngine(images={"arm": ImageInfo("1", "arm64")})
    with pytest.raises(DockerError, match="got=arm64 expected=amd64"):
        make_host(engine).prepare_images(["arm"])
    allowing = make_host(engine, limits=HostLimits(allow_emulation=True))
    assert "arm" in allowing.prepare_images(["arm"])


def test_starts_are_bounded_and_so_are_live_containers() -> None:
    now, most = 0, 0
    lock = threading.Lock()

    def on_call(name: str) -> None:
        nonlocal now, most
        if name != "create":
            return
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.01)
        with lock:
            now -= 1

    engine = FakeEngine(on_call=on_call)
    limits = HostLimits(max_containers=3, max_starting=2)
    host = make_host(engine, limits=limits)

    def episode(_: int) -> int:
        container_id = host.start_container("image", OPTIONS)
        alive = len(engine.containers)
        host.remove(container_id)
        return alive

    with ThreadPoolExecutor(8) as pool:
        alive = list(pool.map(episode, range(24)))
    assert most <= 2
    assert max(alive) <= 3
    assert engine.containers == {}
