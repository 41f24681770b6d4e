"""Megatron's optimizer and schedule, and their state by parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_rl.config.schema import OptimConfig
from agent_rl.trainer import cpu_backend
from agent_rl.trainer.optimizer_state import MASTER, MOMENTS, set_num_steps, states_of
from agent_rl.trainer.weights import ParamMap

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler


@dataclass(frozen=True)
class UpdateReport:
    """One optimizer step: gradient norm before clipping, and the learning rate it used."""

    grad_norm: float
    lr: float


def _count_experts_in_the_norm(optimizer: MegatronOptimizer) -> None:
    """Have every rank count the gradient of its experts in the norm that clips.

    Megatron leaves out what tensor-parallel ranks other than the first hold without sharing it
    out, and takes whole experts for such copies. They are not: each rank would clip by a norm of
    its own, and copies of one weight would drift apart.
    """
    chained: Any = optimizer
    for one in getattr(chained, "chained_optimizers", [chained]):
        groups = one.optimizer.param_groups if one.optimizer is not None else []
        if groups and all(group.get("is_expert_parallel", False) for group in groups):
            one.tp_group = parallel_state.get_expert_tensor_parallel_group()


class PolicyOptimizer:
    """AdamW through Megatron (float32, or float32 master weights over bfloat16) with its schedule.

    ``total_steps`` counts optimizer steps of the whole run; the decay ends there. ``distributed``
    splits state and master weights over the data-parallel ranks, as the chunks were wrapped.
    """

    @cpu_backend.quiet()
    def __init__(
        self,
        config: OptimConfig,
        chunks: Sequence[DistributedDataParallel],
        maps: Sequence[ParamMap],
        *,
        dtype: torch.dtype,
        total_steps: int,
        distributed: bool = False,
    ) -> None:
        self._maps = [m for m in maps if m.trained]
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
                use_distributed_optimizer=distributed,
            ),
            list(chunks),
        )
        _count_experts_in_the_norm(self._optimizer)
        self._has_masters = dtype == torch.bfloat16
        parameters = [parameter for m in self._maps for parameter in m.parameters]
        self._held = states_of(self._optimizer, parameters, with_masters=self._has_masters)
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
        with cpu_backend.quiet():
            _, grad_norm, _ = optimizer.step()
        self._schedule.step(increment=1)
        return UpdateReport(grad_norm=float(grad_norm), lr=lr)

    def state_of(self, param_map: ParamMap) -> dict[str, list[torch.Tensor]]:
        """By kind, a float32 tensor of the shape of each of the map's parameters.

        Both moments, none before the first step, and ``master`` under bfloat16. Collective over
        the data-parallel ranks where the optimizer's state is spread over them.
        """
        kinds: dict[str, list[torch.Tensor]] = {}
        for parameter in param_map.parameters:
            for kind, tensor in self._held[parameter].read().items():
                kinds.setdefault(kind, []).append(tensor)
        return kinds

    def kinds_of_state(self, num_steps: int) -> list[str]:
        """Name what ``state_of`` has, and ``load_state`` reads, after ``num_steps`` steps."""
        return [*(MOMENTS if num_steps else ()), *((MASTER,) if self._has_masters else ())]

    @torch.no_grad()
    def load_state(
        self, read: Callable[[str, ParamMap], list[torch.Tensor]], num_steps: int
    ) -> None:
        """Restore every parameter's state and the schedule's position.

        ``read(kind, param_map)`` gives what ``state_of`` gave.
        """
        kinds = self.kinds_of_state(num_steps)
        for held in self._held.values():
            held.clear()
        for m in self._maps:
            columns = {kind: read(kind, m) for kind in kinds}
            for i, parameter in enumerate(m.parameters):
                state = {kind: tensors[i] for kind, tensors in columns.items()}
                self._held[parameter].write(state, num_steps)
        set_num_steps(self._optimizer, num_steps)
        self._schedule.num_steps = num_steps
        self._schedule.step(increment=0)
