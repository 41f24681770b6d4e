"""What the fleet makes of its ranks' answers: who is believed, and when all are stopped."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config.schema import RunConfig, TrainerConfig
from agent_rl.errors import CheckpointError, ConfigError, ReplayError, TrainerError
from agent_rl.trainer.workers.messages import Done, Failed, Load, Publish, Request, Save, Step
from agent_rl.trainer.workers.sample_block import SampleBlock
from agent_rl.trainer.workers.trainer_fleet import TrainerFleet
from agent_rl.trainer.workers.worker_group import Answered, Event, Lost, SeenAlive
from agent_rl.types import TrainSample

Script = Callable[[Request], Sequence[Event]]


def all_done(request: Request) -> list[Event]:
    value = {"loss": 0.5} if isinstance(request, Step) else None
    weights = {"w": 1} if isinstance(request, Publish) else None
    return [Answered(0, Done(value, 4), weights), Answered(1, Done(None, 4))]


@dataclass
class ScriptedWorkers:
    """Two ranks that start well, then answer every request as ``script`` says."""

    folder: Path
    script: Script = all_done
    requests: list[Request] = field(default_factory=list)
    events: list[Event] = field(
        default_factory=lambda: [Answered(r, Done(None, 3)) for r in (1, 0)]
    )
    num_ranks: int = 2
    killed: int = 0
    left: int = 0

    def send(self, request: Request, samples: SampleBlock | None = None) -> None:
        assert not self.killed
        assert (samples is not None) == isinstance(request, Step)
        self.requests.append(request)
        self.events += self.script(request)

    def poll(self, timeout_s: float) -> list[Event]:
        events, self.events = self.events[:1], self.events[1:]
        return events

    def log_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.log"

    def kill(self) -> None:
        self.killed += 1

    def shut_down(self, grace_s: float) -> None:
        self.left += 1


def fleet(workers: ScriptedWorkers, timeout_s: float = 60.0, grace_s: float = 30.0) -> TrainerFleet:
    settings = TrainerConfig(worker_timeout_s=timeout_s)
    return TrainerFleet(RunConfig(trainer=settings), workers, grace_s=grace_s)


SAMPLE = TrainSample(
    sample_id="g/0",
    token_ids=np.arange(3, dtype=np.int32),
    loss_mask=np.array([False, True, True]),
    rollout_logprobs=np.zeros(3, np.float32),
    advantages=np.ones(3, np.float32),
    weight_versions=(0,),
)


def failed(rank: int, error: Exception, *, is_ours: bool = True) -> Answered:
    return Answered(rank, Failed(error, "trace", is_ours))


def test_every_rank_is_asked_and_rank_0_answers(tmp_path: Path) -> None:
    workers = ScriptedWorkers(tmp_path)
    trainer = fleet(workers)
    assert trainer.weight_version == 3
    metrics = trainer.step([SAMPLE])
    assert metrics["loss"] == 0.5
    assert metrics["transfer_bytes"] == trainer.last_transfer.message_bytes > 0
    assert trainer.weight_version == 4
    assert trainer.publish_weights() == {"w": 1}
    trainer.save(tmp_path / "a")
    trainer.load(Path("b"))
    assert workers.requests[1:] == [Publish(), Save(tmp_path / "a"), Load(Path("b").absolute())]
    trainer.close()
    trainer.close()
    assert (workers.left, workers.killed) == (1, 0)


def test_no_samples_cost_no_request(tmp_path: Path) -> None:
    workers = ScriptedWorkers(tmp_path)
    trainer = fleet(workers)
    with pytest.raises(TrainerError, match="no samples"):
        trainer.step([])
    assert trainer.score([], "off") == []
    assert workers.requests == []


def test_an_error_of_all_ranks_keeps_its_class_and_the_ranks(tmp_path: Path) -> None:
    workers = ScriptedWorkers(
        tmp_path, lambda _: [failed(r, ReplayError("rows are stale")) for r in (1, 0)]
    )
    trainer = fleet(workers)
    with pytest.raises(ReplayError, match=r"^trainer rank 1: rows are stale$"):
        trainer.step([SAMPLE])
    assert workers.killed == 0
    workers.script = all_done
    assert trainer.step([SAMPLE])["loss"] == 0.5


def test_an_error_of_one_rank_alone_stops_them_all(tmp_path: Path) -> None:
    """The other has taken the step: their weights differ from here on."""
    workers = ScriptedWorkers(
        tmp_path, lambda _: [Answered(0, Done({}, 4)), failed(1, TrainerError("not finite"))]
    )
    trainer = fleet(workers)
    with pytest.raises(TrainerError, match="trainer rank 1: not finite"):
        trainer.step([SAMPLE])
    assert workers.killed == 1
    with pytest.raises(TrainerError, match="workers are gone: rank 1 failed during step"):
        trainer.publish_weights()


ASK: dict[str, Callable[[TrainerFleet, Path], object]] = {
    "step": lambda trainer, _: trainer.step([SAMPLE]),
    "save": lambda trainer, folder: trainer.save(folder),
    "load": lambda trainer, folder: trainer.load(folder),
    "publish": lambda trainer, _: trainer.publish_weights(),
}


@pytest.mark.parametrize("name", ASK)
def test_a_rank_that_waits_for_a_failed_one_is_not_waited_for(tmp_path: Path, name: str) -> None:
    """It is in an exchange that the other has left, and would take the next one for it."""
    workers = ScriptedWorkers(tmp_path, lambda _: [failed(1, TrainerError("no more memory"))])
    trainer = fleet(workers, grace_s=0.05)
    with pytest.raises(TrainerError, match="trainer rank 1: no more memory"):
        ASK[name](trainer, tmp_path)
    assert workers.killed == 1
    with pytest.raises(TrainerError, match=f"workers are gone: rank 1 failed during {name}"):
        trainer.publish_weights()


def test_a_full_disk_on_rank_0_stays_what_it_is_and_stops_nobody(tmp_path: Path) -> None:
    workers = ScriptedWorkers(
        tmp_path,
        lambda _: [failed(0, OSError(errno.ENOSPC, "No space left")), Answered(1, Done(None, 3))],
    )
    trainer = fleet(workers)
    with pytest.raises(OSError, match="No space left") as caught:
        trainer.save(tmp_path)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.__notes__ == ["raised in trainer rank 0"]
    assert workers.killed == 0


def test_ranks_that_loaded_different_things_are_stopped(tmp_path: Path) -> None:
    workers = ScriptedWorkers(
        tmp_path, lambda _: [failed(0, CheckpointError("cut short")), Answered(1, Done(None, 3))]
    )
    trainer = fleet(workers)
    with pytest.raises(CheckpointError, match="trainer rank 0: cut short"):
        trainer.load(tmp_path)
    assert workers.killed == 1


def test_a_surprise_stops_them_all_and_shows_the_log(tmp_path: Path) -> None:
    (tmp_path / "rank-0.log").write_text("x" * 9000 + "\nthe last words\n")
    crash = TrainerError("RuntimeError: out of memory")
    workers = ScriptedWorkers(tmp_path, lambda _: [failed(r, crash, is_ours=False) for r in (0, 1)])
    with pytest.raises(TrainerError) as caught:
        fleet(workers).step([SAMPLE])
    text = str(caught.value)
    assert text.startswith("trainer rank 0 failed during step, all ranks were stopped: RuntimeErr")
    assert text.endswith("the last words")
    assert len(text) < 2600
    assert workers.killed == 1


def test_the_rank_that_died_is_named_and_not_the_one_that_noticed(tmp_path: Path) -> None:
    broken = failed(0, TrainerError("RuntimeError: connection closed by peer"), is_ours=False)
    workers = ScriptedWorkers(tmp_path, lambda _: [broken, Lost(1, "process 7 ended by SIGKILL")])
    trainer = fleet(workers)
    with pytest.raises(TrainerError, match=r"trainer rank 1 is gone during step, .*SIGKILL"):
        trainer.step([SAMPLE])
    assert workers.killed == 1
    trainer.close()
    assert (workers.left, workers.killed) == (0, 1)


def test_a_silent_rank_is_named_after_the_time_out(tmp_path: Path) -> None:
    workers = ScriptedWorkers(tmp_path, lambda _: [Answered(1, Done(None, 4)), *[SeenAlive(1)] * 3])
    with pytest.raises(TrainerError, match=r"rank 0 hangs during step.*worker_timeout_s=0\.05"):
        fleet(workers, timeout_s=0.05).step([SAMPLE])
    assert workers.killed == 1


def test_a_start_that_fails_leaves_nothing_running(tmp_path: Path) -> None:
    workers = ScriptedWorkers(tmp_path)
    workers.events = [failed(r, ConfigError(["trainer: no"])) for r in (0, 1)]
    with pytest.raises(ConfigError, match="trainer: no"):
        fleet(workers)
    assert workers.killed >= 1


def test_an_interrupt_in_the_middle_of_a_step_stops_the_ranks(tmp_path: Path) -> None:
    def interrupted(request: Request) -> list[Event]:
        raise KeyboardInterrupt

    workers = ScriptedWorkers(tmp_path, interrupted)
    trainer = fleet(workers)
    with pytest.raises(KeyboardInterrupt):
        trainer.step([SAMPLE])
    assert workers.killed == 1
    with pytest.raises(TrainerError, match="workers are gone: KeyboardInterrupt during step"):
        trainer.step([SAMPLE])
