"""Two data-parallel ranks on this machine do what one process does, and die cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
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
    is_running,
    local_pids,
    start_pair,
)

from agent_rl.errors import ConfigError, TrainerError
from agent_rl.trainer.workers.start import start_trainer
from agent_rl.trainer.workers.trainer_fleet import TrainerFleet

pytestmark = [pytest.mark.slow, pytest.mark.megatron]


@pytest.fixture(scope="module")
def pair(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = start_pair(tmp_path_factory.mktemp("runs"), policy, num_processes=2)
    pids = local_pids(made.fleet)
    yield made
    made.fleet.close()
    made.inline.close()
    assert_gone(pids)


def test_two_ranks_are_one_trainer(pair: Pair, make_samples: MakeSamples, tmp_path: Path) -> None:
    """One after the other on the same ranks, which take seconds to start."""
    version = pair.fleet.weight_version
    batches = [make_samples(LENGTHS, seed=s, version=version + s) for s in range(2)]
    check_same_steps(pair, batches)
    version = pair.fleet.weight_version
    check_same_scores(pair, make_samples(LENGTHS, seed=5, version=version))
    check_refusal(pair, make_samples(LENGTHS, seed=6, version=version))
    check_checkpoint(pair, make_samples(LENGTHS, seed=7, version=version), tmp_path / "saved")


def test_a_rank_killed_in_a_step_ends_them_all_with_a_clear_error(
    policy: Path, make_samples: MakeSamples, tmp_path: Path
) -> None:
    trainer = start_trainer(config(tmp_path, num_processes=2), policy)
    assert isinstance(trainer, TrainerFleet)
    check_death_in_a_step(
        trainer,
        local_pids(trainer),
        make_samples(LENGTHS),
        r"trainer rank 1 is gone during step, all ranks were stopped: got=process \d+ was ended by "
        r"SIGKILL expected=an answer; .*--resume",
    )


def test_a_rank_that_is_not_scheduled_is_given_up_after_the_time_out(
    policy: Path, make_samples: MakeSamples, tmp_path: Path
) -> None:
    settings = config(tmp_path, launcher="local", num_processes=1, worker_timeout_s=8.0)
    trainer = start_trainer(settings, policy)
    assert isinstance(trainer, TrainerFleet)
    pids = local_pids(trainer)
    os.kill(pids[0], signal.SIGSTOP)
    with pytest.raises(TrainerError, match=r"rank 0 hangs during step.*worker_timeout_s=8"):
        trainer.step(make_samples(LENGTHS))
    assert_gone(pids)


StartDriver = Callable[[], tuple[subprocess.Popen[str], int]]


@pytest.fixture
def start_driver(policy: Path, tmp_path: Path) -> Iterator[StartDriver]:
    """``start_driver()``: a driver with one rank, and the id of the rank."""
    script = Path(__file__).with_name("driver_that_dies.py")
    drivers: list[subprocess.Popen[str]] = []

    def start() -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, str(script), str(tmp_path), str(policy)]
        drivers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert drivers[-1].stdout is not None
        return drivers[-1], int(drivers[-1].stdout.readline())

    yield start
    for driver in drivers:
        driver.kill()
        driver.communicate()


def test_a_rank_notices_that_its_driver_was_killed(
    start_driver: StartDriver, tmp_path: Path
) -> None:
    """The thread that started it is over, which is no reason to end."""
    driver, pid = start_driver()
    for number in (signal.SIGTERM, signal.SIGINT):  # as a scheduler sends to the whole job
        os.kill(pid, number)
    assert is_running(pid)
    driver.kill()
    assert_gone([pid])
    assert "the driver is gone" in (tmp_path / "run" / "workers" / "rank-0.log").read_text()


def test_a_stopped_rank_ends_with_its_driver(start_driver: StartDriver) -> None:
    """It cannot notice anything; left over it would hold its memory until the next reboot."""
    driver, pid = start_driver()
    os.kill(pid, signal.SIGSTOP)
    driver.kill()
    try:
        assert_gone([pid])
    finally:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)


def test_a_policy_that_cannot_be_built_is_reported_by_its_rank(tmp_path: Path) -> None:
    settings = config(tmp_path, launcher="local", num_processes=1)
    (tmp_path / "empty").mkdir()
    with pytest.raises((ConfigError, TrainerError, OSError)) as caught:
        start_trainer(settings, tmp_path / "empty")
    assert "config.json" in str(caught.value)
