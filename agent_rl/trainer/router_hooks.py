"""Hooks that are put into Megatron's routers, and the search for those.

Megatron's router hands its top-k to an object it finds in ``router.router_replay``. Megatron's
own such object sits in a process-wide list, is told from outside which of two actions to take,
and pops rows from a list in arrival order: recompute, pipeline order or a second model in the
process then read the wrong rows. The objects here know their layer and ask their owner, who knows
the micro-batch.

Axis letters: N local tokens, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from agent_rl.errors import ReplayError
from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import

# isort: split
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class HookOwner(Protocol):
    """Decides for the routers of one rank; layers are global 0-based numbers."""

    def choose(
        self, layer: int, scores: torch.Tensor, live_top_k: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Expert ids ``[N, K]`` int64 for ``scores [N, E]``; None leaves it to Megatron."""
        ...

    def note_consistency(self, layer: int, scores: torch.Tensor) -> None:
        """Compute what ``take_term`` gives, from the same scores."""
        ...

    def take_term(self, layer: int) -> torch.Tensor | None:
        """The scalar that this layer adds to the loss, once."""
        ...

    def count_for_bias(self, router: Any, routing_map: torch.Tensor) -> None:
        """Count the tokens ``[N, E]`` that the selection bias is moved by."""
        ...


class LayerHook:
    """Stand-in for the top-k of Megatron's ``topk_routing_with_score_function``."""

    def __init__(self, owner: HookOwner, layer: int) -> None:
        self._owner, self._layer = owner, layer

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: TopK,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores, ids) ``[N, K]`` of the chosen experts, differentiable in ``scores [N, E]``."""

        # Without gradients Megatron 0.19.2 does not sort: last bits of the gates would differ.
        @torch.enable_grad()
        def top_k(of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return default_compute_topk(of, topk, num_groups, group_topk)

        def live_top_k(detached: torch.Tensor) -> torch.Tensor:
            return top_k(detached)[1]

        self._owner.note_consistency(self._layer, scores)
        ids = self._owner.choose(self._layer, scores, live_top_k)
        if ids is None:
            return top_k(scores)
        return scores.gather(1, ids), ids


class TermHook:
    """Lets a router's gates carry its consistency term to backward, as Megatron's own losses do.

    The schedule gives the term the scale of the main loss, which Megatron then divides by all loss
    units, so that the term is a mean over trained tokens like every other part of the loss.
    """

    def __init__(self, owner: HookOwner, layer: int) -> None:
        self._owner, self._layer = owner, layer

    def __call__(self, router: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> Any:
        term = self._owner.take_term(self._layer)
        if term is None or not torch.is_grad_enabled():
            return None
        gates, routing_map = output
        return MoEAuxLossAutoScaler.apply(gates, term), routing_map


class BiasHook:
    """In place of a router's method of the same call."""

    def __init__(self, owner: HookOwner, router: Any) -> None:
        self._owner, self._router = owner, router

    def __call__(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        if self._router.enable_expert_bias:
            self._owner.count_for_bias(self._router, routing_map)


def routers_of(chunks: Sequence[torch.nn.Module]) -> dict[int, Any]:
    """The model's own routers by global 0-based layer number.

    Raises ``ReplayError`` for a router whose top-k cannot be replaced.
    """
    routers: dict[int, Any] = {}
    for chunk in chunks:
        for module in chunk.modules():
            if not isinstance(module, TopKRouter):
                continue
            layer = int(module.layer_number) - 1  # type: ignore[arg-type]
            if module.config.moe_router_fusion or module.routing_type == "sinkhorn":
                raise ReplayError(
                    f"layer {layer}: the fused and the sinkhorn router ignore replay, "
                    f"got=fusion {module.config.moe_router_fusion}, {module.routing_type!r} "
                    "expected=moe_router_fusion off and another routing type"
                )
            if layer in routers:
                raise ReplayError(f"two routers claim layer {layer}")
            routers[layer] = module
    return routers
