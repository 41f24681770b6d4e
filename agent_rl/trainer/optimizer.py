"""Megatron's optimizer and schedule, and their state by Hugging Face parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_rl.config import OptimConfig
from agent_rl.errors import CheckpointError
from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import
from agent_rl.trainer.weights import ParamMap, Tensors, export_like

# isort: split
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer step: gradient norm before clipping, and the learning rate it used."""

    grad_norm: float
    lr: float


class PolicyOptimizer:
    """AdamW through Megatron (float32, or float32 master weights over bfloat16) with its schedule.

    ``total_steps`` counts optimizer steps of the whole run; the decay ends there.
    """

    def __init__(
        self,
        config: OptimConfig,
        model: DistributedDataParallel,
        maps: Sequence[ParamMap],
        *,
        dtype: torch.dtype,
        total_steps: int,
    ) -> None:
        self._maps = list(maps)
        self._optimizer: MegatronOptimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                min_lr=min(config.min_lr, config.lr),
                adam_beta1=config.beta1,
                adam_beta2=config.beta2,
                adam_eps=config.eps,
                weight_decay=config.weight_decay,
                # Infinity never clips, and still has the norm computed.
                clip_grad=config.clip_grad if config.clip_grad > 0 else float("inf"),
                bf16=dtype == torch.bfloat16,
                params_dtype=dtype,
            ),
            [model],
        )
        warmup = config.warmup_steps
        self._schedule = OptimizerParamScheduler(
            self._optimizer,
            # The first of W warm-up steps runs at lr / W, not at 0.
            init_lr=config.lr / warmup if warmup else config.lr,
            max_lr=config.lr,
            min_lr=min(config.min_lr, config.lr),
            lr_warmup_steps=warmup,
            lr_decay_steps=max(total_steps, warmup + 1),
            lr_decay_style=config.decay,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    @property
    def num_steps(self) -> int:
        """Optimizer steps taken, over resumes."""
        return self._schedule.num_steps

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self._optimizer.scale_loss(loss)

    def step(self) -> UpdateReport:
        """Clip, update the weights, advance the schedule."""
        optimizer: Any = self._optimizer
        lr = float(optimizer.param_groups[0]["lr"])
        _, grad_norm, _ = optimizer.step()
        self._schedule.step(increment=1)
        return UpdateReport(grad_norm=float(grad_norm), lr=lr)

    def export_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """State by kind and Hugging Face name: both moments, and ``master`` under bfloat16.

        Collective over the model-parallel groups. Empty before the first step.
        """
        inner = self._inner_states()
        states = {}
        if inner and all(len(state) for state in inner.values()):
            states = {
                kind: export_like(self._maps, lambda p, kind=kind: inner[_held(p)][kind])
                for kind in MOMENTS
            }
        if any(_held(m.parameter) is not m.parameter for m in self._maps):
            states["master"] = export_like(self._maps, lambda p: _held(p).detach())
        return states

    @torch.no_grad()
    def load_state(self, states: Mapping[str, Tensors], num_steps: int) -> None:
        """Restore what ``export_state`` gave, and the schedule's position.

        Raises ``CheckpointError`` when a moment or the master weights are absent.
        """
        for m in self._maps:
            held = _held(m.parameter)
            if held is not m.parameter:
                held.copy_(m.to_local(_kind(states, "master")))
        for state_of in self._inner_optimizers():
            state_of.state.clear()
        if num_steps:
            self._load_moments(states, num_steps)
        self._schedule.num_steps = num_steps
        self._schedule.step(increment=0)

    def _load_moments(self, states: Mapping[str, Tensors], num_steps: int) -> None:
        inner = self._inner_states()
        for m in self._maps:
            state = inner[_held(m.parameter)]
            # torch's AdamW keeps its step count as a float32 tensor on the CPU.
            state["step"] = torch.tensor(float(num_steps), dtype=torch.float32)
            for kind in MOMENTS:
                local = m.to_local(_kind(states, kind))
                state[kind] = local.to(device=m.parameter.device, dtype=torch.float32).clone(
                    memory_format=torch.contiguous_format
                )

    def _inner_optimizers(self) -> list[torch.optim.Optimizer]:
        chained = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        return [one.optimizer for one in chained if one.optimizer is not None]

    def _inner_states(self) -> dict[torch.Tensor, dict[str, Any]]:
        return {
            parameter: inner.state[parameter]
            for inner in self._inner_optimizers()
            for group in inner.param_groups
            for parameter in group["params"]
        }


def _held(parameter: torch.nn.Parameter) -> torch.Tensor:
    """The tensor the optimizer updates: the float32 master of a bfloat16 parameter, or itself."""
    master = getattr(parameter, "main_param", None)
    return parameter if master is None else master


def _kind(states: Mapping[str, Tensors], kind: str) -> Tensors:
    if kind not in states:
        raise CheckpointError(
            f"optimizer state is incomplete: got={sorted(states)} expected={kind}"
        )
    return states[kind]
