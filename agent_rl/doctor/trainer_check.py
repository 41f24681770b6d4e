"""Whether the trainer computes what it should on this machine's device, and what replay costs.

``agent-rl doctor --gpu`` runs it on a GPU, a test runs it small on a CPU: the checks know only
the device that Megatron uses here. A random Qwen3-MoE is built twice, in Megatron under each layer
spec that works here and in transformers, and both are made to use the same random experts.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from agent_rl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    OptimConfig,
    RoutingConfig,
    RunConfig,
    TrainerConfig,
)
from agent_rl.doctor.check import Check
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import FolderTensors
from agent_rl.model.random_policy import write_random_policy
from agent_rl.run.warmstart.train import TinyMoEShape
from agent_rl.trainer import cpu_backend, parallel
from agent_rl.trainer.layer_spec import implementation
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.trainer.model import build_model, transformer_config
from agent_rl.trainer.param_maps import param_maps
from agent_rl.trainer.router_replay import ReplayTable, RouterReplay
from agent_rl.trainer.weights import export_like, load_weights
from agent_rl.types import TrainSample
from routing_cache import ArrayRows

LayerSpec = Literal["portable", "transformer_engine"]
Report = Callable[[str], None]

# Largest relative difference from transformers in float32. Transformer Engine multiplies float32
# matrices in TF32, which keeps 10 bits of each factor.
TOLERANCE: dict[LayerSpec, float] = {"portable": 1e-4, "transformer_engine": 2e-2}
MAX_STEP_RATIO = 1.05  # step with replay over step without


@dataclass(frozen=True)
class Size:
    """How large the checks are."""

    exact: TinyMoEShape  # the model that is compared with transformers
    timed: TinyMoEShape  # the one whose steps are timed
    timed_dtype: Literal["float32", "bfloat16"]
    num_sequences: int
    length: int  # tokens of a sequence; the timed samples have eight times as many
    num_rounds: int


# Two to three minutes on one GPU, most of it start-up; about 20 GiB of its memory.
GPU_SIZE = Size(
    exact=TinyMoEShape(hidden_size=256, num_layers=4, num_heads=4, head_dim=64, expert_width=128),
    timed=TinyMoEShape(
        hidden_size=1024,
        num_layers=8,
        num_heads=16,
        head_dim=64,
        num_experts=64,
        moe_top_k=8,
        expert_width=512,
        max_positions=4096,
    ),
    timed_dtype="bfloat16",
    num_sequences=4,
    length=256,
    num_rounds=7,
)


def layer_specs() -> list[LayerSpec]:
    """The specs that work here."""
    if implementation("auto") == "transformer_engine":
        return ["portable", "transformer_engine"]
    return ["portable"]


def check_trainer(
    size: Size = GPU_SIZE,
    *,
    report: Report = lambda text: None,
    make_replay: Callable[..., RouterReplay] = RouterReplay,
) -> list[Check]:
    """Replay exactness, gradients and speed under every layer spec that works here.

    A check that fails has the verdict ``missing``; a ratio above the bar is a ``warning``.
    ``make_replay`` is what is checked; a test puts a broken one there.
    """
    parallel.initialize(TrainerConfig(), seed=0)
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="self-check-") as work, _full_float32():
        exact = write_random_policy(Path(work) / "exact", shape=size.exact)
        timed = write_random_policy(Path(work) / "timed", shape=size.timed)
        for spec in layer_specs():
            report(f"{spec}: replay and gradients")
            checks += _correctness(exact, spec, size, make_replay)
            report(f"{spec}: {size.num_rounds} rounds of steps with and without replay")
            checks.append(_speed(timed, spec, size))
    return checks


@contextlib.contextmanager
def _full_float32() -> Iterator[None]:
    """Within: float32 products keep all bits also on devices that would round the factors."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Pair:
    """One model in Megatron and in transformers, float32, and random experts for every token."""

    def __init__(self, folder: Path, spec: LayerSpec, size: Size) -> None:
        from transformers import AutoModelForCausalLM

        self.shape = read_shape(folder)
        config = transformer_config(self.shape, TrainerConfig(layer_spec=spec))
        self.model = build_model(self.shape, config)
        self.maps = param_maps(self.model, self.shape)
        load_weights(self.maps, FolderTensors(folder))
        self.device = self.maps[0].parameters[0].device
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.other: torch.nn.Module = loaded.to(self.device)
        generator = torch.Generator().manual_seed(0)
        batch = (size.num_sequences, size.length)
        ids = torch.randint(0, self.shape.vocab_size, batch, generator=generator)
        noise = torch.rand(
            *batch, self.shape.num_layers, self.shape.num_experts, generator=generator
        )
        self.ids = ids.to(self.device)
        self.rows = noise.argsort(dim=-1)[..., : self.shape.moe_top_k]  # [B, S, L, K]

    def logits(self) -> torch.Tensor:
        positions = torch.arange(self.ids.shape[1], device=self.device).expand_as(self.ids)
        with cpu_backend.quiet():
            return self.model(self.ids, positions, None)

    def in_order(self) -> torch.Tensor:
        """The random rows as Megatron sees tokens, position-major: ``[L, N, K]``."""
        return self.rows.permute(2, 1, 0, 3).flatten(1, 2)

    def force_transformers(self) -> None:
        """Have its routers choose the random rows; gates stay those of its live logits."""
        gates = [m for name, m in self.other.named_modules() if name.endswith("mlp.gate")]
        for layer, gate in enumerate(gates):
            chosen = self.rows[:, :, layer].flatten(0, 1).to(self.device)

            def forced(
                module: Any, args: Any, out: Any, chosen: torch.Tensor = chosen
            ) -> tuple[torch.Tensor, ...]:
                picked = out[0].float().softmax(-1).gather(1, chosen)
                normalised = picked / picked.sum(-1, keepdim=True)
                weights = normalised if self.shape.norm_topk_prob else picked
                return out[0], weights.to(out[1].dtype), chosen

            gate.register_forward_hook(forced)


def _correctness(
    folder: Path, spec: LayerSpec, size: Size, make_replay: Callable[..., RouterReplay]
) -> Iterator[Check]:
    pair = _Pair(folder, spec, size)
    replay = make_replay([pair.model], num_experts=pair.shape.num_experts, recompute=False)
    try:
        yield _own_choice(pair, replay, spec)
        yield from _forced_choice(pair, replay, spec)
    finally:
        replay.detach()


def _own_choice(pair: _Pair, replay: RouterReplay, spec: LayerSpec) -> Check:
    """Replaying what the routers choose anyway changes no more than a repeated forward does."""
    rows = pair.in_order()
    real = torch.ones(rows.shape[1], dtype=torch.bool)
    with torch.no_grad():
        replay.put(0, ReplayTable(rows, ~real, ~real))
        with replay.forward(0, record=True):
            live = pair.logits()
        with replay.forward(0):
            again = pair.logits()
        replay.put(1, ReplayTable(replay.recorded(0), real, ~real))
        with replay.forward(1):
            replayed = pair.logits()
    own, moved = _relative(again, live), _relative(replayed, live)
    return _judged(
        f"{spec}: replay of the own choice",
        moved <= 4 * own,
        f"off by {moved:.1e}; a repeated forward by {own:.1e}",
    )


def _forced_choice(pair: _Pair, replay: RouterReplay, spec: LayerSpec) -> Iterator[Check]:
    """Recorded experts, live gates: values and every gradient against transformers."""
    rows, limit = pair.in_order(), TOLERANCE[spec]
    real = torch.ones(rows.shape[1], dtype=torch.bool)
    pair.force_transformers()
    replay.put(2, ReplayTable(rows, real, ~real))
    with replay.forward(2):
        ours = pair.logits()
    theirs: torch.Tensor = pair.other(pair.ids).logits
    off = _relative(ours, theirs)
    yield _judged(
        f"{spec}: replayed experts are used", off <= limit, f"off by {off:.1e}, limit {limit:.0e}"
    )
    for logits in (ours, theirs):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), pair.ids[:, 1:].flatten()).backward()
    grads = export_like(pair.maps, _gradient)
    worst, name = max(
        (_relative(grads[name], _gradient(parameter).cpu()), name)
        for name, parameter in pair.other.named_parameters()
    )
    yield _judged(
        f"{spec}: gradients",
        worst <= limit,
        f"{len(grads)} tensors, at most off by {worst:.1e} ({name}), limit {limit:.0e}",
    )


def _gradient(parameter: torch.Tensor) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """``|ours - theirs| / |theirs|`` in the Euclidean norm; infinite where it is no number."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    off = (ours - theirs).norm()
    relative = float(off / theirs.norm()) if off else 0.0
    return relative if math.isfinite(relative) else math.inf  # a NaN would be larger than nothing


def _judged(name: str, passed: bool, detail: str) -> Check:
    advice = "" if passed else "training here is not to be trusted; report it with this table"
    return Check(name, "ok" if passed else "missing", detail, advice)


def _speed(folder: Path, spec: LayerSpec, size: Size) -> Check:
    """Steps in pairs, the order changing: a machine that is slow for a while is so for both."""
    modes: tuple[Literal["off", "r3"], ...] = ("off", "r3")
    longest = 8 * size.length
    trainers = {
        mode: MegatronTrainer(
            RunConfig(
                agent=AgentConfig(max_tokens=longest),
                routing=RoutingConfig(replay=mode, max_staleness=1_000_000),
                algorithm=AlgorithmConfig(num_mini_steps=1),
                optim=OptimConfig(lr=1e-8),
                trainer=TrainerConfig(
                    dtype=size.timed_dtype,
                    layer_spec=spec,
                    micro_batch_tokens=size.num_sequences * longest,
                ),
            ),
            folder,
        )
        for mode in modes
    }
    try:
        samples = _own_rows(trainers["off"], size.num_sequences, longest)
        ratios, seconds = [], dict.fromkeys(modes, 0.0)
        for number in range(size.num_rounds + 1):
            for mode in modes if number % 2 else reversed(modes):
                seconds[mode] = _step_seconds(trainers[mode], samples)
            if number:  # the first round warms up
                ratios.append(seconds["r3"] / seconds["off"])
    finally:
        for trainer in trainers.values():
            trainer.close()
    ratio = statistics.median(ratios)
    tokens = size.num_sequences * (longest - 1)
    detail = (
        f"with replay / without {ratio:.3f} (bar {MAX_STEP_RATIO}), "
        f"{tokens / seconds['r3']:,.0f} tokens/s, {size.timed_dtype}"
    )
    return Check(f"{spec}: step", "ok" if ratio <= MAX_STEP_RATIO else "warning", detail)


def _own_rows(trainer: MegatronTrainer, count: int, length: int) -> list[TrainSample]:
    """Random samples with the trainer's own routing: replay then computes what no replay does."""
    rng = np.random.default_rng(0)
    mask = np.arange(length) > 0
    samples = [
        TrainSample(
            sample_id=f"sample-{number}",
            token_ids=rng.integers(6, 190, length, dtype=np.int32),
            loss_mask=mask,
            rollout_logprobs=np.zeros(length, np.float32),
            advantages=np.where(mask, np.float32(1 - 2 * (number % 2)), np.float32(0)),
            weight_versions=(0,),
        )
        for number in range(count)
    ]
    layout, done = trainer.row_layout, []
    scores = trainer.score(samples, "off", live_routing=True)
    for sample, score in zip(samples, scores, strict=True):
        assert score.live_experts is not None
        rows = ArrayRows(layout, sample.token_ids, score.live_experts.astype(layout.dtype))
        done.append(replace(sample, rollout_logprobs=score.logprobs, routed_experts=rows))
    return done


def _step_seconds(trainer: MegatronTrainer, samples: Sequence[TrainSample]) -> float:
    _wait()
    started = time.perf_counter()
    trainer.step(samples)
    _wait()
    return time.perf_counter() - started


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
