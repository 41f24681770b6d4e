"""A parameter's state in Megatron's optimizers, read and written in the parameter's shape.

Plain optimizers keep whole tensors. The distributed one keeps a run of each flattened parameter
on every data-parallel rank, none where another rank has all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import

# isort: split
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
MASTER = "master"

State = Mapping[str, torch.Tensor]  # kind -> float32 of the parameter's shape


class ParameterState(Protocol):
    """The optimizer's state of one parameter."""

    def read(self) -> dict[str, torch.Tensor]:
        """The moments, if a step was taken, and ``master`` where there is one."""
        ...

    def write(self, state: State, num_steps: int) -> None: ...

    def clear(self) -> None: ...


def states_of(
    optimizer: MegatronOptimizer, parameters: Sequence[torch.Tensor], *, with_masters: bool
) -> dict[torch.Tensor, ParameterState]:
    """The state of every parameter, wherever the optimizer keeps it."""
    states: dict[torch.Tensor, ParameterState] = {}
    chained: Any = optimizer
    for one in getattr(chained, "chained_optimizers", [chained]):
        if isinstance(one, DistributedOptimizer):
            mine = {p for buffer in one.buffers for p in buffer.params}
            states |= {p: _Spread(one, p, with_masters) for p in parameters if p in mine}
        elif one.optimizer is not None:
            mine = {p for group in one.optimizer.param_groups for p in group["params"]}
            states |= {p: _Whole(one.optimizer, p) for p in parameters if _main(p) in mine}
    return states


def set_num_steps(optimizer: MegatronOptimizer, num_steps: int) -> None:
    """Set the number of steps where it is counted by group of parameters, as in the fused Adam."""
    chained: Any = optimizer
    for one in getattr(chained, "chained_optimizers", [chained]):
        if one.optimizer is None or isinstance(one.optimizer, torch.optim.Adam):
            continue  # torch's, AdamW among them, counts by parameter
        for group in one.optimizer.param_groups:
            group["step"] = num_steps


def _main(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor the optimizer updates: the float32 master of a bfloat16 parameter, or itself."""
    master = getattr(parameter, "main_param", None)
    return parameter if master is None else master


class _Whole:
    def __init__(self, inner: torch.optim.Optimizer, parameter: torch.Tensor) -> None:
        self._inner, self._parameter = inner, parameter

    def read(self) -> dict[str, torch.Tensor]:
        main = _main(self._parameter)
        state = self._inner.state[main]
        found = {kind: state[kind] for kind in MOMENTS if kind in state}
        if main is not self._parameter:
            found[MASTER] = main.detach()
        return found

    def write(self, state: State, num_steps: int) -> None:
        main = _main(self._parameter)
        if MASTER in state:
            main.copy_(state[MASTER])
        if num_steps:
            self._inner.state[main] = _moments(state, main.device) | {"step": _steps(num_steps)}

    def clear(self) -> None:
        self._inner.state.pop(_main(self._parameter), None)


class _Spread:
    """A run of the flattened parameter on this rank; ``read`` is collective."""

    def __init__(self, owner: Any, parameter: torch.Tensor, with_masters: bool) -> None:
        self._owner, self._parameter, self._with_masters = owner, parameter, with_masters
        self._group = owner.data_parallel_group

    @property
    def _run(self) -> tuple[torch.Tensor, slice] | None:
        """The optimizer's tensor and which part of the flattened parameter it is."""
        index = self._owner.model_param_group_index_map.get(self._parameter)
        if index is None:
            return None
        group, position = index
        main = self._owner.optimizer.param_groups[group]["params"][position]
        span = self._owner._get_model_param_range_map(self._parameter)["param"]  # no public way
        return main, slice(span.start, span.end)

    def read(self) -> dict[str, torch.Tensor]:
        pieces: dict[str, torch.Tensor] = {}
        if self._run is not None:
            main = self._run[0]
            state = self._owner.optimizer.state[main]
            pieces = {kind: state[kind] for kind in MOMENTS if kind in state}
            if self._with_masters:
                pieces[MASTER] = main.detach()
        # A rank without a run of this parameter takes part under the same kinds.
        known: list[list[str]] = [[] for _ in range(self._group.size())]
        dist.all_gather_object(known, sorted(pieces), group=self._group)
        return {
            kind: self._joined(pieces.get(kind)) for kind in sorted({k for ks in known for k in ks})
        }

    def _joined(self, piece: torch.Tensor | None) -> torch.Tensor:
        whole = torch.zeros(
            self._parameter.numel(), dtype=torch.float32, device=self._parameter.device
        )
        if piece is not None and self._run is not None:
            whole[self._run[1]] = piece.flatten()
        dist.all_reduce(whole, group=self._group)
        return whole.view(self._parameter.shape)

    def write(self, state: State, num_steps: int) -> None:
        if self._run is None:
            return
        main, span = self._run
        mine = {kind: tensor.flatten()[span] for kind, tensor in state.items()}
        if MASTER in mine:
            main.copy_(mine[MASTER])
        elif main.data_ptr() != self._parameter.data_ptr():
            main.copy_(self._parameter.detach().flatten()[span])
        if num_steps:
            self._owner.optimizer.state[main] = _moments(mine, main.device) | {
                "step": _steps(num_steps)
            }

    def clear(self) -> None:
        if self._run is not None:
            self._owner.optimizer.state.pop(self._run[0], None)


def _moments(state: State, device: torch.device) -> dict[str, torch.Tensor]:
    return {
        kind: state[kind].to(device=device, dtype=torch.float32).clone(
            memory_format=torch.contiguous_format
        )
        for kind in MOMENTS
    }  # fmt: skip


def _steps(num_steps: int) -> torch.Tensor:
    # torch's AdamW keeps its step count as a float32 tensor on the CPU.
    return torch.tensor(float(num_steps), dtype=torch.float32)
