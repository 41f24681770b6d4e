"""Rollout routing replay inside Megatron: recorded expert sets in place of the router's top-k.

Megatron's router hands its top-k to an object it finds in ``router.router_replay``. Megatron's
own such object sits in a process-wide list, is told from outside which of two actions to take,
and pops rows from a list in arrival order: recompute, pipeline order or a second model in the
process then read the wrong rows. The object put there here knows its *global layer number* and
looks rows up by (micro-batch, layer), so any order and any number of reads gives the same rows.
Everything after the choice stays Megatron's code: the gate is computed from the live logits of
the chosen experts under the model's own scoring rule (arXiv 2510.11370, eq. 5), be it softmax
before or after top-k or sigmoid with a selection bias, which never enters the weights.

Which micro-batch a backward pass belongs to is learnt from autograd: a hook on the model's output
fires before anything is recomputed, whatever the schedule's order.

Axis letters: L MoE layers of this rank, N local tokens in Megatron's order (position-major),
K experts per token, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from agent_rl.errors import ReplayError
from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import

# isort: split
from megatron.core.transformer.moe.router import TopKRouter

TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ReplayTable:
    """What the routers of this rank do with one micro-batch.

    A token is *fixed* when it has a recorded row or is padding; every other token is routed live.
    """

    rows: torch.Tensor  # [L, N, K] uint8 or int16; K distinct ids in range also where not fixed
    present: torch.Tensor  # [N] bool: a recorded row, to be replayed
    padding: torch.Tensor  # [N] bool: not a token of any sample


@dataclass
class RoutingCounts:
    """Agreement of the live routers with the replayed rows, over real tokens with a row."""

    flips: torch.Tensor  # [L] int64: tokens whose live set differs
    tokens: int = 0
    tokens_with_flip: int = 0
    load: torch.Tensor | None = None  # [L, E] int64: tokens sent to each expert, padding left out


class RouterReplay:
    """Drives the routers of one rank's model chunks. One instance a model.

    Mutating methods: ``put``, ``replay_recorded``, ``forward``, ``bind_backward``, ``clear``.
    """

    def __init__(
        self, chunks: Sequence[torch.nn.Module], *, num_experts: int, recompute: bool
    ) -> None:
        self._routers = _routers_of(chunks)
        self.layers = tuple(sorted(self._routers))  # global 0-based numbers on this rank
        self._slot = {layer: slot for slot, layer in enumerate(self.layers)}
        self._num_experts = num_experts
        self._recompute = recompute
        for layer, router in self._routers.items():
            router.router_replay = _LayerHook(self, layer)
        self.clear()

    def detach(self) -> None:
        """Give the routers back to Megatron."""
        for router in self._routers.values():
            router.router_replay = None

    def clear(self) -> None:
        """Forget every table, recording and count."""
        self._tables: dict[int, ReplayTable] = {}
        self._recorded: dict[tuple[int, int], torch.Tensor] = {}
        self._latched: dict[tuple[int, int], torch.Tensor] = {}
        self._flipped: dict[int, torch.Tensor] = {}
        self._current: int | None = None
        self._in_backward = self._recording = self._counting = False
        self._counts = RoutingCounts(flips=torch.zeros(len(self.layers), dtype=torch.int64))

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One trainer step; what it left behind is cleared at its end, also after an exception."""
        self.clear()
        try:
            yield
        finally:
            self.clear()

    def put(self, micro_batch: int, table: ReplayTable) -> None:
        """Set the rows of a micro-batch; later reads see them.

        Raises ``ReplayError`` on a shape that is not ``[L, N, K]`` with masks ``[N]``.
        """
        num_layers, num_tokens, _ = table.rows.shape
        sizes = {num_tokens, table.present.shape[0], table.padding.shape[0]}
        if num_layers != len(self.layers) or len(sizes) != 1:
            raise ReplayError(
                f"replay table of micro-batch {micro_batch} does not fit: "
                f"got={num_layers} layers, {sorted(sizes)} tokens "
                f"expected={len(self.layers)} layers, one number of tokens"
            )
        self._tables[micro_batch] = table
        self._latched = {key: v for key, v in self._latched.items() if key[0] != micro_batch}

    @contextlib.contextmanager
    def forward(
        self, micro_batch: int, *, record: bool = False, count: bool = False
    ) -> Iterator[None]:
        """The model's forward of one micro-batch.

        ``record`` keeps the live choice for ``recorded``; ``count`` compares it with the rows.
        """
        if micro_batch not in self._tables:
            raise ReplayError(
                f"no rows for micro-batch: got={micro_batch} expected={sorted(self._tables)}"
            )
        self._current, self._in_backward = micro_batch, False
        self._recording, self._counting = record, count
        try:
            yield
        finally:
            self._current, self._recording, self._counting = None, False, False

    def bind_backward(self, output: torch.Tensor, micro_batch: int) -> None:
        """Make the backward of ``output`` read this micro-batch's rows when it recomputes."""
        if output.grad_fn is None:
            return

        def enter(*_: Any) -> None:
            if micro_batch not in self._tables:
                raise ReplayError(
                    f"backward of micro-batch {micro_batch} after its rows were cleared: "
                    "finish the backward inside the step"
                )
            self._current, self._in_backward = micro_batch, True

        output.grad_fn.register_prehook(enter)

    def recorded(self, micro_batch: int) -> torch.Tensor:
        """Live choices of a forward with ``record=True``: ``[L, N, K]`` int64."""
        return torch.stack([self._recorded[micro_batch, layer] for layer in self.layers])

    def replay_recorded(self, micro_batch: int) -> None:
        """Make what ``record=True`` saw the rows of later forwards (R2); padding keeps its rows."""
        table = self._tables[micro_batch]
        live = self.recorded(micro_batch).to(device=table.rows.device, dtype=table.rows.dtype)
        rows = torch.where(table.padding[None, :, None], table.rows, live)
        self.put(micro_batch, ReplayTable(rows, ~table.padding, table.padding))

    @property
    def counts(self) -> RoutingCounts:
        """Totals over the forwards with ``count=True`` since the last ``clear``."""
        self._counts.tokens_with_flip = sum(int(f.sum()) for f in self._flipped.values())
        return self._counts

    def choose(
        self, layer: int, scores: torch.Tensor, live_top_k: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Expert ids ``[N, K]`` int64 for this read, or None to leave the choice to Megatron."""
        if self._current is None:
            return None
        table = self._tables[self._current]
        key = (self._current, layer)
        if scores.shape[0] != table.present.shape[0]:
            raise ReplayError(
                f"layer {layer}, micro-batch {self._current}: rows and tokens do not line up, "
                f"got={scores.shape[0]} tokens expected={table.present.shape[0]}"
            )
        if self._in_backward and key in self._latched:
            return self._latched[key].to(device=scores.device, dtype=torch.int64)
        rows = table.rows[self._slot[layer]].to(device=scores.device, dtype=torch.int64)
        fixed = (table.present | table.padding).to(scores.device)
        all_fixed = bool(fixed.all())
        if all_fixed and not (self._recording or self._counting):
            return rows
        live = live_top_k(scores.detach())
        if self._recording:
            self._recorded[key] = live
        chosen = rows if all_fixed else torch.where(fixed.unsqueeze(1), rows, live)
        if self._counting:
            self._count(layer, table, chosen, live)
        if self._recompute and not all_fixed and not self._in_backward:
            # A recomputed tie could fall the other way: what the forward chose stays chosen.
            self._latched[key] = chosen
        return chosen

    def _count(
        self, layer: int, table: ReplayTable, chosen: torch.Tensor, live: torch.Tensor
    ) -> None:
        assert self._current is not None
        slot = self._slot[layer]
        present = (table.present & ~table.padding).to(chosen.device)
        flipped = (chosen.sort(dim=1).values != live.sort(dim=1).values).any(dim=1) & present
        self._counts.flips[slot] += int(flipped.sum())
        if self._current not in self._flipped:
            self._flipped[self._current] = torch.zeros_like(flipped)
            self._counts.tokens += int(present.sum())
        self._flipped[self._current] |= flipped
        if self._counts.load is None:
            self._counts.load = torch.zeros(len(self.layers), self._num_experts, dtype=torch.int64)
        real = chosen[~table.padding.to(chosen.device)].flatten()
        self._counts.load[slot] += torch.bincount(real, minlength=self._num_experts).cpu()


class _LayerHook:
    """What Megatron's ``topk_routing_with_score_function`` calls in place of its own top-k."""

    def __init__(self, owner: RouterReplay, layer: int) -> None:
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

        def live_top_k(detached: torch.Tensor) -> torch.Tensor:
            return default_compute_topk(detached, topk, num_groups, group_topk)[1]

        ids = self._owner.choose(self._layer, scores, live_top_k)
        if ids is None:
            return default_compute_topk(scores, topk, num_groups, group_topk)
        return scores.gather(1, ids), ids


def _routers_of(chunks: Sequence[torch.nn.Module]) -> dict[int, Any]:
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
