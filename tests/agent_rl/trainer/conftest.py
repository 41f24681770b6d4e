"""Small policies, samples and configs for the trainer's tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fixture_types import MakePolicy, MakeSamples, MakeTrainer

from agent_rl.config.schema import (
    AlgorithmConfig,
    OptimConfig,
    RoutingConfig,
    RunConfig,
    SamplingConfig,
    TrainConfig,
    TrainerConfig,
)
from agent_rl.model.config_json import read_shape
from agent_rl.trainer import parallel
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.types import TrainSample
from routing_cache import ArrayRows, RowLayout


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Keep torch to one thread: the suite runs in parallel on few cores."""
    torch.set_num_threads(1)


def write_policy(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random Qwen3-MoE folder as transformers saves it; wide enough weights to route unevenly."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": 200,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**(settings | overrides)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.normal_(mean=1.0, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def make_policy(tmp_path_factory: pytest.TempPathFactory) -> MakePolicy:
    """Make policies by their overrides, each written once per session."""
    made: dict[str, Path] = {}

    def policy_with(**overrides: Any) -> Path:
        key = repr(sorted(overrides.items()))
        if key not in made:
            made[key] = write_policy(tmp_path_factory.mktemp("policy"), **overrides)
        return made[key]

    return policy_with


@pytest.fixture(scope="session")
def policy(make_policy: MakePolicy) -> Path:
    return make_policy()


@pytest.fixture
def process_group() -> None:
    """Set up Megatron's groups of a single process."""
    parallel.initialize(TrainerConfig(num_threads=1), seed=0)


def random_rows(layout: RowLayout, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw distinct experts for each row, ``[count, L, K]``."""
    noise = rng.random((count, len(layout.moe_layers), layout.num_experts))
    return np.argsort(noise, axis=-1)[..., : layout.moe_top_k].astype(np.uint8)


def make_sample(
    layout: RowLayout,
    length: int,
    rng: np.random.Generator,
    *,
    name: str = "s",
    vocab: int = 200,
    version: int = 0,
    missing: Sequence[int] = (),
    rows: np.ndarray | None = None,
) -> TrainSample:
    """One sample: the second half sampled with gaps, random rows except at ``missing``."""
    ids = rng.integers(0, vocab, length).astype(np.int32)
    mask = np.zeros(length, dtype=bool)
    mask[max(1, length // 2) :] = rng.random(length - max(1, length // 2)) < 0.8
    if length > 1:
        mask[-1] = True
    rows = random_rows(layout, max(0, length - 1), rng) if rows is None else rows
    present = np.ones(len(rows), dtype=bool)
    present[list(missing)] = False
    return TrainSample(
        sample_id=name,
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -rng.exponential(2.0, length), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        weight_versions=(version,),
        routed_experts=ArrayRows(layout, ids, rows, present, weight_version=version),
    )


@pytest.fixture
def make_samples(policy: Path) -> MakeSamples:
    """Samples for a policy folder: ``make_samples(lengths, seed=..., folder=..., **sample)``."""

    def samples_of(
        lengths: Sequence[int], *, seed: int = 0, folder: Path | None = None, **sample: Any
    ) -> list[TrainSample]:
        layout, rng = read_shape(folder or policy).row_layout, np.random.default_rng(seed)
        return [
            make_sample(layout, n, rng, name=f"sample-{i}", **sample) for i, n in enumerate(lengths)
        ]

    return samples_of


def run_config(**sections: dict[str, Any]) -> RunConfig:
    """``run_config(trainer={"recompute": "full"})``: defaults with some keys replaced.

    Out of range too: a step that moves nothing (``lr`` 0) or clips nothing is taken apart here.
    """
    kinds = {
        "trainer": TrainerConfig(num_threads=1, micro_batch_tokens=256),
        "routing": RoutingConfig(),
        "algorithm": AlgorithmConfig(num_mini_steps=1),
        "optim": OptimConfig(lr=1e-3),
        "sampling": SamplingConfig(),
        "train": TrainConfig(steps=10),
    }
    for name, changes in sections.items():
        for key, value in changes.items():
            assert hasattr(kinds[name], key), key
            object.__setattr__(kinds[name], key, value)
    return RunConfig(**kinds)


@pytest.fixture
def make_trainer(policy: Path) -> Iterator[MakeTrainer]:
    """``make_trainer(folder=..., **sections)``; closed at the end of the test."""
    made: list[MegatronTrainer] = []

    def trainer_of(folder: Path | None = None, **sections: dict[str, Any]) -> MegatronTrainer:
        made.append(MegatronTrainer(run_config(**sections), folder or policy))
        return made[-1]

    yield trainer_of
    for trainer in made:
        trainer.close()
