"""Engine and trainer speak of one sampling distribution: with equal weights every ratio is 1."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from fixture_types import MakeTrainer

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.local import LocalEngine
from agent_rl.types import Completion, GenerateRequest, SamplingParams, TrainSample
from routing_cache import RoutingCache

PROMPTS = [
    np.random.default_rng(seed).integers(8, 200, 10 + seed).astype(np.int32) for seed in (0, 1, 2)
]


def sampled(folder: Path, temperature: float) -> list[TrainSample]:
    """Three completions of the engine as train samples, log-probs and rows as it gave them."""

    async def work() -> list[Completion]:
        engine = LocalEngine(folder, EngineConfig(dtype="float32", max_sessions=4), max_tokens=96)
        try:
            sampling = SamplingParams(temperature, 24, (), seed=5)
            return [
                await engine.generate(GenerateRequest(str(i), prompt, sampling, 0))
                for i, prompt in enumerate(PROMPTS)
            ]
        finally:
            await engine.aclose()

    return [
        as_sample(folder, prompt, completion)
        for prompt, completion in zip(PROMPTS, asyncio.run(work()), strict=True)
    ]


def as_sample(folder: Path, prompt: np.ndarray, completion: Completion) -> TrainSample:
    from agent_rl.model.config_json import read_shape

    session = RoutingCache(read_shape(folder).row_layout).session(0)
    ids = np.concatenate([prompt, completion.token_ids]).astype(np.int32)
    session.record(
        ids,
        completion.routed_experts,
        start=completion.routed_experts_start,
        weight_version=completion.weight_versions[-1],
        num_prefill=len(prompt),
    )
    mask = np.arange(len(ids)) >= len(prompt)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[mask] = completion.logprobs
    return TrainSample("s", ids, mask, logprobs, mask.astype(np.float32), (0,), session.lease())


@pytest.mark.megatron
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_equal_weights_give_a_ratio_of_one(
    policy: Path, make_trainer: MakeTrainer, temperature: float
) -> None:
    samples = sampled(policy, temperature)
    trainer = make_trainer(sampling={"temperature": temperature}, optim={"lr": 0.0})
    for sample, score in zip(samples, trainer.score(samples, "r3"), strict=True):
        ratio = np.exp((score.logprobs - sample.rollout_logprobs)[sample.loss_mask])
        np.testing.assert_allclose(ratio, 1.0, atol=1e-4)
    metrics = trainer.step(samples)
    assert metrics["abs_logprob_gap"] < 1e-4
    assert metrics["kl_k3_rollout_old"] == pytest.approx(0.0, abs=1e-8)
    assert metrics["f_1_1"] == metrics["f_2"] == 0.0


@pytest.mark.megatron
def test_a_trainer_that_forgets_the_temperature_would_show(
    policy: Path, make_trainer: MakeTrainer
) -> None:
    samples = sampled(policy, 0.5)
    metrics = make_trainer(optim={"lr": 0.0}).step(samples)
    assert metrics["abs_logprob_gap"] > 0.1
    assert metrics["f_1_1"] > 0.3
