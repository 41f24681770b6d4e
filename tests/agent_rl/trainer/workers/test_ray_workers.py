"""Two data-parallel ranks as actors of a Ray that is started here, and taken away again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixture_types import MakeSamples
from rank_cases import (
    LENGTHS,
    Pair,
    assert_gone,
    check_checkpoint,
    check_death_in_a_step,
    check_refusal,
    check_same_scores,
    check_same_steps,
    config,
    start_pair,
)

from agent_rl.errors import ConfigError, TrainerError
from agent_rl.trainer.workers.start import start_trainer
from agent_rl.trainer.workers.trainer_fleet import TrainerFleet

pytestmark = [pytest.mark.slow, pytest.mark.megatron, pytest.mark.ray]


def actor_pids(trainer: TrainerFleet) -> list[int]:
    from agent_rl.trainer.workers.ray_workers import RayWorkers

    workers = trainer._workers
    assert isinstance(workers, RayWorkers)
    return [workers.pid(rank) for rank in range(workers.num_ranks)]


def children() -> list[int]:
    """Processes below this one, at any depth."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


@pytest.fixture
def pair(policy: Path, tmp_path: Path) -> Iterator[Pair]:
    """Of one test: all tests would share the Ray of this process, and its two CPUs."""
    handler = signal.getsignal(signal.SIGTERM)
    made = start_pair(tmp_path, policy, launcher="ray", num_processes=2)
    assert signal.getsignal(signal.SIGTERM) is handler
    started = children()
    assert len(started) > 2
    yield made
    made.fleet.close()
    made.inline.close()
    assert_gone(started)


def test_two_actors_are_one_trainer(pair: Pair, make_samples: MakeSamples, tmp_path: Path) -> None:
    check_same_steps(pair, [make_samples(LENGTHS, seed=s, version=s) for s in range(2)])
    check_same_scores(pair, make_samples(LENGTHS, seed=5, version=2))
    check_refusal(pair, make_samples(LENGTHS, seed=6, version=2))
    check_checkpoint(pair, make_samples(LENGTHS, seed=7, version=2), tmp_path / "saved")
    log = pair.fleet._workers.log_file(1)
    assert "rows of 1 samples are of other weights" in log.read_text()


def test_an_actor_killed_in_a_step_ends_them_all_with_a_clear_error(
    policy: Path, make_samples: MakeSamples, tmp_path: Path
) -> None:
    trainer = start_trainer(config(tmp_path, launcher="ray", num_processes=2), policy)
    assert isinstance(trainer, TrainerFleet)
    started = children()
    check_death_in_a_step(
        trainer,
        actor_pids(trainer),
        make_samples(LENGTHS),
        r"trainer rank 1 is gone during step, all ranks were stopped: got=process \d+ on [\d.]+: ",
    )
    assert_gone(started)


def test_an_actor_that_is_not_scheduled_is_given_up_after_the_time_out(
    policy: Path, make_samples: MakeSamples, tmp_path: Path
) -> None:
    settings = config(tmp_path, launcher="ray", num_processes=1, worker_timeout_s=10.0)
    trainer = start_trainer(settings, policy)
    assert isinstance(trainer, TrainerFleet)
    started, pids = children(), actor_pids(trainer)
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(TrainerError, match=r"rank 0 hangs during step.*worker_timeout_s=10"):
        trainer.step(make_samples(LENGTHS))
    assert_gone([*started, *pids])


def test_a_cluster_that_cannot_be_reached_is_named(policy: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, launcher="ray", num_processes=1, ray_address="127.0.0.1:1")
    with pytest.raises(TrainerError, match=r"Ray cannot be reached: .*refused.*=127\.0\.0\.1:1"):
        start_trainer(settings, policy)


def test_a_cluster_that_is_too_small_is_named(policy: Path, tmp_path: Path) -> None:
    import ray

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        settings = config(tmp_path, launcher="ray", num_processes=2, ray_address="auto")
        with pytest.raises(ConfigError, match=r"got 2 for a Ray cluster with .*CPU.* at most 1"):
            start_trainer(settings, policy)
        assert ray.is_initialized()  # it was here before
    finally:
        ray.shutdown()
