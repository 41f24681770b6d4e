"""Check that the trainer computes what it should on this machine's device, and what replay costs.

``agent-rl doctor --gpu`` runs it on a GPU, a test runs it small on a CPU: the checks know only
the device that Megatron uses here. A random Qwen3-MoE is built twice, in Megatron under each layer
spec that works here and in transformers, and both are made to use the same random experts.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F

from agent_rl.bench.random_steps import Report, random_samples, step_config, time_rounds
from agent_rl.config.schema import TrainerConfig
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

LayerSpec = Literal["portable", "transformer_engine"]

# Largest relative difference from transformers in float32. Transformer Engine multiplies float32
# matrices in TF32, which keeps 10 bits of each factor.
TOLERANCE: dict[LayerSpec, float] = {"portable": 1e-4, "transformer_engine": 2e-2}
MAX_STEP_RATIO = 1.05  # step with replay over step without


@dataclass(frozen=True)
class Size:
    """Sizes of the checks."""

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
    """Return the layer specs that work here."""
    if implementation("auto") == "transformer_engine":
        return ["portable", "transformer_engine"]
    return ["portable"]


def check_trainer(
    size: Size = GPU_SIZE,
    *,
    report: Report = lambda text: None,
    make_replay: Callable[..., RouterReplay] = RouterReplay,
) -> list[Check]:
    """Check replay, gradients and speed under every layer spec that works here.

    A check that fails has the verdict ``missing``; a ratio above the bar is a ``warning``.
    ``make_replay`` is what is checked; a test puts a broken one there.
    """
    parallel.initialize(TrainerConfig(), seed=0)
    checks: list[Check] = []
    with tempfile.TemporaryDirectory(prefix="trainer-check-") as work:
        exact = write_random_policy(Path(work) / "exact", shape=size.exact)
        timed = write_random_policy(Path(work) / "timed", shape=size.timed)
        for spec in layer_specs():
            report(f"{spec}: replay and gradients")
            pair = _Pair(exact, spec, size, make_replay)
            checks += [_own_choice(pair), *_forced_choice(pair)]
            pair.replay.detach()
            report(f"{spec}: {size.num_rounds} rounds of steps with and without replay")
            checks.append(_speed(timed, spec, size))
    return checks


class _Pair:
    """One model in Megatron and in transformers, float32, and random experts for every token."""

    def __init__(
        self, folder: Path, spec: LayerSpec, size: Size, make_replay: Callable[..., RouterReplay]
    ) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_float32_matmul_precision("highest")
        shape = read_shape(folder)
        self.spec: LayerSpec = spec
        self.model = build_model(shape, transformer_config(shape, TrainerConfig(layer_spec=spec)))
        self.maps = param_maps(self.model, shape)
        load_weights(self.maps, FolderTensors(folder))
        self.replay = make_replay([self.model], num_experts=shape.num_experts, recompute=False)
        device = self.maps[0].parameters[0].device
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.other: torch.nn.Module = loaded.to(device)
        generator = torch.Generator().manual_seed(0)
        batch = (size.num_sequences, size.length)
        self.ids = torch.randint(0, shape.vocab_size, batch, generator=generator).to(device)
        noise = torch.rand(*batch, shape.num_layers, shape.num_experts, generator=generator)
        chosen = noise.argsort(dim=-1)[..., : shape.moe_top_k]  # [B, S, L, K]
        self.by_sequence = chosen.permute(2, 0, 1, 3).flatten(1, 2)  # [L, N, K], transformers
        self.by_position = chosen.permute(2, 1, 0, 3).flatten(1, 2)  # [L, N, K], Megatron

    def logits(self, micro_batch: int, **mode: bool) -> torch.Tensor:
        positions = torch.arange(self.ids.shape[1], device=self.ids.device).expand_as(self.ids)
        with self.replay.forward(micro_batch, **mode), cpu_backend.quiet():
            return self.model(self.ids, positions, None)

    def put(self, micro_batch: int, rows: torch.Tensor, *, present: bool = True) -> None:
        """Give Megatron ``rows`` for every token, or for none of them."""
        real = torch.full((rows.shape[1],), present)
        self.replay.put(micro_batch, ReplayTable(rows, real, torch.zeros_like(real)))

    def force_transformers(self) -> None:
        """Have its routers choose the random rows; gates stay those of its live logits."""
        gates = [m for name, m in self.other.named_modules() if name.endswith("mlp.gate")]
        for gate, rows in zip(gates, self.by_sequence.to(self.ids.device), strict=True):
            gate.register_forward_hook(partial(_forced, rows))


def _forced(rows: torch.Tensor, module: Any, args: Any, out: Any) -> tuple[torch.Tensor, ...]:
    """Replace a router's output, ``(logits, gates, experts)``; top-k gates sum to 1."""
    picked = out[0].float().softmax(-1).gather(1, rows)
    return out[0], (picked / picked.sum(-1, keepdim=True)).to(out[1].dtype), rows


def _own_choice(pair: _Pair) -> Check:
    """Replaying what the routers choose anyway changes no more than a repeated forward does."""
    with torch.no_grad():
        pair.put(0, pair.by_position, present=False)
        live = pair.logits(0, record=True)
        again = pair.logits(0)
        pair.put(1, pair.replay.recorded(0))
        replayed = pair.logits(1)
    own, moved = _relative(again, live), _relative(replayed, live)
    return _judged(
        f"{pair.spec}: replay of the own choice",
        moved <= 4 * own,
        f"off by {moved:.1e}; a repeated forward by {own:.1e}",
    )


def _forced_choice(pair: _Pair) -> Iterator[Check]:
    """Recorded experts, live gates: values and every gradient against transformers."""
    spec, limit = pair.spec, TOLERANCE[pair.spec]
    pair.force_transformers()
    pair.put(2, pair.by_position)
    ours, theirs = pair.logits(2), pair.other(pair.ids).logits
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
    """Return ``|ours - theirs| / |theirs|``, Euclidean; infinite where it is no number."""
    ours, theirs = ours.detach().double(), theirs.detach().double()
    off = (ours - theirs).norm()
    relative = float(off / theirs.norm()) if off else 0.0
    return relative if math.isfinite(relative) else math.inf  # a NaN would be larger than nothing


def _judged(name: str, passed: bool, detail: str) -> Check:
    advice = "" if passed else "training here is not to be trusted; report it with this table"
    return Check(name, "ok" if passed else "missing", detail, advice)


def _speed(folder: Path, spec: LayerSpec, size: Size) -> Check:
    """Compare the seconds of steps with and without replay, over rounds of both."""
    longest = 8 * size.length
    settings = TrainerConfig(
        dtype=size.timed_dtype,
        layer_spec=spec,
        micro_batch_tokens=size.num_sequences * longest,
    )
    off, r3 = (
        MegatronTrainer(step_config(mode, longest, settings), folder) for mode in ("off", "r3")
    )
    try:
        lengths, rng = [longest] * size.num_sequences, np.random.default_rng(0)
        samples = random_samples(off, read_shape(folder).vocab_size, lengths, rng)
        steps = {
            "off": lambda: (off.step(samples), _wait()),
            "r3": lambda: (r3.step(samples), _wait()),
        }
        _, wall = time_rounds(steps, size.num_rounds)
    finally:
        off.close()
        r3.close()
    ratio = statistics.median(a / b for a, b in zip(wall["r3"], wall["off"], strict=True))
    speed = size.num_sequences * (longest - 1) / wall["r3"][-1]
    detail = (
        f"with replay / without {ratio:.3f} (bar {MAX_STEP_RATIO}), "
        f"{speed:,.0f} tokens/s, {size.timed_dtype}"
    )
    return Check(f"{spec}: step", "ok" if ratio <= MAX_STEP_RATIO else "warning", detail)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
