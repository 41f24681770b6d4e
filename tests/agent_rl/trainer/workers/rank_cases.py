"""What must hold for real ranks, whoever started them: they do what one process does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from agent_rl.config.schema import AlgorithmConfig, OptimConfig, RunConfig, TrainerConfig
from agent_rl.errors import ReplayError, TrainerError
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.trainer.workers.local import LocalWorkers
from agent_rl.trainer.workers.start import start_trainer
from agent_rl.trainer.workers.trainer_fleet import TrainerFleet
from agent_rl.types import TrainSample

LENGTHS = (12, 20, 33, 40, 25, 18)
RELATIVE = 1e-5


def config(folder: Path, **trainer: object) -> RunConfig:
    """A run below ``folder``: two mini-steps a step, small micro-batches, float32."""
    settings = TrainerConfig(micro_batch_tokens=64, worker_timeout_s=120.0)
    return RunConfig(
        name="run",
        run_root=str(folder),
        trainer=replace(settings, **trainer),  # type: ignore[arg-type]
        algorithm=AlgorithmConfig(num_mini_steps=2),
        optim=OptimConfig(lr=1e-3),
    )


@dataclass(frozen=True)
class Pair:
    """Two trainers that start alike: over several ranks, and in this process."""

    fleet: TrainerFleet
    inline: MegatronTrainer
    policy: Path


def start_pair(folder: Path, policy: Path, **trainer: object) -> Pair:
    fleet = start_trainer(config(folder, **trainer), policy)
    assert isinstance(fleet, TrainerFleet)
    return Pair(fleet, MegatronTrainer(config(folder), policy), policy)


def check_same_steps(pair: Pair, steps: Sequence[Sequence[TrainSample]]) -> None:
    """Metrics, weights and version agree after every step."""
    for samples in steps:
        got, expected = pair.fleet.step(samples), pair.inline.step(samples)
        for name, value in expected.items():
            assert got[name] == pytest.approx(value, rel=RELATIVE, abs=1e-6), name
        assert pair.fleet.weight_version == pair.inline.weight_version
        weights, reference = pair.fleet.publish_weights(), pair.inline.publish_weights()
        assert weights.keys() == reference.keys()
        for name, tensor in reference.items():
            assert weights[name].dtype == tensor.dtype
            np.testing.assert_allclose(weights[name], tensor, rtol=RELATIVE, atol=1e-5)


def check_same_scores(pair: Pair, samples: Sequence[TrainSample]) -> None:
    for mode in ("off", "r3"):
        got = pair.fleet.score(samples, mode, live_routing=True)
        expected = pair.inline.score(samples, mode, live_routing=True)
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-5)
            assert ours.live_experts is not None
            assert ours.live_experts.shape == theirs.live_experts.shape


def check_checkpoint(pair: Pair, samples: Sequence[TrainSample], folder: Path) -> None:
    """Written by the ranks, read by one process and by the ranks again."""
    folder.mkdir()
    pair.fleet.save(folder)
    before = {name: t.clone() for name, t in pair.fleet.publish_weights().items()}
    version = pair.fleet.weight_version
    pair.fleet.step(samples)
    pair.inline.step(samples)
    assert pair.fleet.weight_version == version + 1
    for trainer in (pair.inline, pair.fleet):
        trainer.load(folder)
        assert trainer.weight_version == version
        for name, tensor in trainer.publish_weights().items():
            assert np.array_equal(tensor, before[name]), name
    check_same_steps(pair, [samples])


def check_refusal(pair: Pair, samples: Sequence[TrainSample]) -> None:
    """Rows of other weights are refused by every rank; all of them go on."""
    stale = pair.fleet.weight_version + 5
    with pytest.raises(ReplayError, match=r"^trainer rank \d: rows of 1 samples are of other"):
        pair.fleet.step([replace(samples[0], routed_experts=_OtherVersion.of(samples[0], stale))])
    check_same_scores(pair, samples)


class _OtherVersion:
    @staticmethod
    def of(sample: TrainSample, version: int) -> object:
        from routing_cache import ArrayRows

        assert sample.routed_experts is not None
        rows, _ = sample.routed_experts.gather(stop=len(sample.token_ids) - 1)
        return ArrayRows(
            sample.routed_experts.layout,  # type: ignore[attr-defined]
            sample.token_ids,
            rows,
            weight_version=version,
        )


def check_death_in_a_step(
    trainer: TrainerFleet, pids: Sequence[int], samples: Sequence[TrainSample], expected: str
) -> None:
    """``kill -9`` of the last rank while the others wait for it in the middle of a step."""
    os.kill(pids[-1], signal.SIGSTOP)  # it cannot finish before it is killed

    def kill_soon() -> None:
        time.sleep(1.0)
        os.kill(pids[-1], signal.SIGKILL)

    killer = threading.Thread(target=kill_soon)
    killer.start()
    started = time.monotonic()
    with pytest.raises(TrainerError, match=expected) as caught:
        trainer.step(samples)
    killer.join()
    assert time.monotonic() - started < 30
    assert "the end of " in str(caught.value) or "is empty" in str(caught.value)
    assert_gone(pids)
    with pytest.raises(TrainerError, match=r"workers are gone: rank \d is gone"):
        trainer.publish_weights()
    trainer.close()


def assert_gone(pids: Sequence[int], within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while left := [pid for pid in pids if is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def local_pids(trainer: TrainerFleet) -> list[int]:
    workers = trainer._workers
    assert isinstance(workers, LocalWorkers)
    return [workers.pid(rank) for rank in range(workers.num_ranks)]
