"""Rollout routing replay inside Megatron: recorded expert sets in place of the router's top-k.

The routers' hooks (``router_hooks``) know their *global layer number*, and rows are looked up by
(micro-batch, layer), so any order and any number of reads gives the same rows. Everything after
the choice stays Megatron's code: the gate is computed from the live logits of the chosen experts
under the model's own scoring rule (arXiv 2510.11370, eq. 5), be it softmax before or after top-k
or sigmoid with a selection bias, which never enters the weights.

Which micro-batch a backward pass belongs to is learnt from autograd: a hook on the model's output
fires before anything is recomputed, whatever the schedule's order.

Axis letters: L MoE layers of this rank, N local tokens in Megatron's order (position-major),
K experts per token, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from agent_rl.errors import ReplayError
from agent_rl.trainer.losses.router_consistency import (
    live_distribution,
    to_recorded_distributions,
    to_recorded_sets,
)
from agent_rl.trainer.router_hooks import BiasHook, LayerHook, TermHook, routers_of
from agent_rl.trainer.routing_counts import RoutingCounter, RoutingCounts


@dataclass(frozen=True)
class ReplayTable:
    """Orders to the routers of this rank for one micro-batch.

    A token is *fixed* when it has a recorded row or is padding; every other token is routed live.
    """

    rows: torch.Tensor  # [L, N, K] uint8 or int16; K distinct ids in range also where not fixed
    present: torch.Tensor  # [N] bool: a recorded row, to be replayed
    padding: torch.Tensor  # [N] bool: not a token of any sample
    weights: torch.Tensor | None = None  # [N] float32: a token's share of the consistency term
    # [L, N, E] log-probabilities of the rollout's routers, from an engine that reports them
    distributions: torch.Tensor | None = None

    def to(self, device: torch.device) -> ReplayTable:
        """The same on another device and no wider; ``distributions`` stay, a layer is read once."""
        return replace(
            self,
            rows=self.rows.to(device),
            present=self.present.to(device),
            padding=self.padding.to(device),
            weights=None if self.weights is None else self.weights.to(device),
        )


@dataclass(frozen=True)
class ConsistencySums:
    """The consistency term over the updates' tokens: ``sum(values) / sum(weights)`` by layer."""

    values: torch.Tensor  # [L] float64
    weights: torch.Tensor  # [L] float64


class RouterReplay:
    """Drives the routers of one rank's model chunks. One instance a model.

    Mutating methods: ``put``, ``replay_recorded``, ``forward``, ``bind_backward``, ``clear``.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        *,
        num_experts: int,
        recompute: bool,
        consistency_weight: float = 0.0,
        num_moe_layers: int | None = None,
    ) -> None:
        """``consistency_weight`` adds the term of ``losses.router_consistency`` to the updates,
        a mean over ``num_moe_layers``: those of the whole model (None: they are all here)."""
        self._routers = routers_of(chunks)
        self.layers = tuple(sorted(self._routers))  # global 0-based numbers on this rank
        self._slot = {layer: slot for slot, layer in enumerate(self.layers)}
        self._num_experts = num_experts
        self._recompute = recompute
        self._consistency_weight = consistency_weight
        self._num_moe_layers = num_moe_layers or len(self.layers)
        self._handles: list[Any] = []
        for layer, router in self._routers.items():
            router.router_replay = LayerHook(self, layer)
            router._apply_expert_bias = BiasHook(self, router)
            if consistency_weight:
                self._handles.append(router.register_forward_hook(TermHook(self, layer)))
        self.clear()

    def detach(self) -> None:
        """Give the routers back to Megatron."""
        for router in self._routers.values():
            router.router_replay = None
            del router._apply_expert_bias  # the class's own shows again
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def clear(self) -> None:
        """Forget every table, recording and count."""
        self._tables: dict[int, ReplayTable] = {}
        self._recorded: dict[tuple[int, int], torch.Tensor] = {}
        self._latched: dict[tuple[int, int], torch.Tensor] = {}
        self._current: int | None = None
        self._all_fixed = False  # of the current micro-batch: the live choice is not needed
        self._moved: tuple[int, ReplayTable] | None = None  # the last one read, on its device
        self._in_backward = self._recording = self._counting = False
        self._training = self._live = False
        self._terms: dict[int, torch.Tensor] = {}
        self._consistency: dict[int, torch.Tensor] = {}  # by layer: (value, weight), on the device
        self._counter = RoutingCounter(self.layers, self._num_experts)

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
        self._moved = None
        self._latched = {key: v for key, v in self._latched.items() if key[0] != micro_batch}

    @contextlib.contextmanager
    def forward(
        self,
        micro_batch: int,
        *,
        record: bool = False,
        count: bool = False,
        train: bool = False,
        live: bool = False,
    ) -> Iterator[None]:
        """The model's forward of one micro-batch.

        ``record`` keeps the live choice for ``recorded``; ``count`` compares it with the rows.
        ``train`` is the forward of an update: it carries the consistency term. ``live`` replays
        nothing, whatever the table holds; padding still goes where the table sends it.
        """
        if micro_batch not in self._tables:
            raise ReplayError(
                f"no rows for micro-batch: got={micro_batch} expected={sorted(self._tables)}"
            )
        self._recording, self._counting = record, count
        if count:
            table = self._tables[micro_batch]
            self._counter.begin(micro_batch, table.present & ~table.padding)
        self._training, self._live = train, live
        self._enter(micro_batch, in_backward=False)
        try:
            yield
        finally:
            self._current, self._recording, self._counting = None, False, False
            self._training = self._live = False

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
            self._enter(micro_batch, in_backward=True)

        output.grad_fn.register_prehook(enter)

    def _enter(self, micro_batch: int, *, in_backward: bool) -> None:
        """Reads are of this micro-batch from now on."""
        self._current, self._in_backward = micro_batch, in_backward
        table = self._tables[micro_batch]
        # Asked here, where the table is on the CPU: on the device it would cost a wait per layer.
        fixed = table.padding if self._live else table.present | table.padding
        self._all_fixed = bool(fixed.all())

    def _table(self, device: torch.device) -> ReplayTable:
        """Return the current table on the routers' device: one copy per pass, still narrow."""
        assert self._current is not None
        if self._moved is None or self._moved[0] != self._current:
            self._moved = self._current, self._tables[self._current].to(device)
        return self._moved[1]

    def recorded(self, micro_batch: int) -> torch.Tensor:
        """Live choices of a forward with ``record=True``: ``[L, N, K]`` in the rows' dtype."""
        if not self.layers:  # a pipeline stage of dense layers
            return self._tables[micro_batch].rows
        return torch.stack([self._recorded[micro_batch, layer] for layer in self.layers])

    def replay_recorded(self, micro_batch: int) -> None:
        """Make what ``record=True`` saw the rows of later forwards (R2); padding keeps its rows."""
        table = self._tables[micro_batch]
        live = self.recorded(micro_batch).to(device=table.rows.device, dtype=table.rows.dtype)
        rows = torch.where(table.padding[None, :, None], table.rows, live)
        self.put(micro_batch, replace(table, rows=rows, present=~table.padding))

    @property
    def counts(self) -> RoutingCounts:
        """Totals over this rank's forwards with ``count=True`` since the last ``clear``."""
        return self._counter.counts

    def choose(
        self, layer: int, scores: torch.Tensor, live_top_k: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor | None:
        """Expert ids ``[N, K]`` int64 for this read, or None to leave the choice to Megatron."""
        if self._current is None:
            return None
        table = self._table(scores.device)
        key = (self._current, layer)
        if scores.shape[0] != table.present.shape[0]:
            raise ReplayError(
                f"layer {layer}, micro-batch {self._current}: rows and tokens do not line up, "
                f"got={scores.shape[0]} tokens expected={table.present.shape[0]}"
            )
        if self._in_backward and key in self._latched:
            return self._latched[key].to(torch.int64)
        rows = table.rows[self._slot[layer]].to(torch.int64)
        if self._all_fixed and not (self._recording or self._counting):
            return rows
        live = live_top_k(scores.detach())
        if self._recording:
            self._recorded[key] = live.to(table.rows.dtype)  # an eighth of the ids' int64
        fixed = table.padding if self._live else table.present | table.padding
        chosen = rows if self._all_fixed else torch.where(fixed.unsqueeze(1), rows, live)
        if self._counting:
            self._counter.add(
                self._current,
                self._slot[layer],
                chosen=chosen,
                live=live,
                replayed=table.present & ~table.padding,
                padding=table.padding,
            )
        if self._recompute and not (self._all_fixed or self._in_backward or self._live):
            # A recomputed tie could fall the other way: what the forward chose stays chosen.
            self._latched[key] = chosen.to(table.rows.dtype)
        return chosen

    @property
    def consistency(self) -> ConsistencySums:
        """Totals of the consistency term over the updates since the last ``clear``."""
        nothing = torch.zeros(2, dtype=torch.float64)
        sums = [self._consistency.get(layer, nothing).double().cpu() for layer in self.layers]
        values, weights = torch.stack(sums).T if sums else torch.zeros(2, 0, dtype=torch.float64)
        return ConsistencySums(values, weights)

    def note_consistency(self, layer: int, scores: torch.Tensor) -> None:
        """Compute this layer's term from ``scores [N, E]``; ``take_term`` picks it up."""
        if not self._consistency_weight or self._current is None:
            return
        if not (self._training or self._in_backward):
            return
        table, slot = self._table(scores.device), self._slot[layer]
        if table.weights is None:
            raise ReplayError(
                f"micro-batch {self._current}: no token weights for the router-consistency term, "
                "got=None expected=[N] float32"
            )
        config = self._routers[layer].config
        live = live_distribution(
            scores,
            config.moe_router_score_function,
            self._routers[layer].expert_bias,
            is_logit=config.moe_router_score_function == "softmax"
            and not config.moe_router_pre_softmax,
        )
        if table.distributions is None:
            rows = table.rows[slot].to(torch.int64)
            terms = to_recorded_sets(live, rows)
        else:
            terms = to_recorded_distributions(live, table.distributions[slot].to(scores.device))
        weights = table.weights * (table.present & ~table.padding)
        value = (weights * terms).sum()
        if not self._in_backward:
            found = torch.stack([value.detach(), weights.sum()]).double()
            self._consistency[layer] = found + self._consistency.get(layer, 0)
        self._terms[layer] = value * (self._consistency_weight / self._num_moe_layers)

    def take_term(self, layer: int) -> torch.Tensor | None:
        """Return, once, the term that ``note_consistency`` left for this layer's router."""
        return self._terms.pop(layer, None)

    def count_for_bias(self, router: Any, routing_map: torch.Tensor) -> None:
        """Add an update's real tokens ``[N, E]`` to what Megatron moves the selection bias by.

        Megatron's own count takes in padding. A recomputed forward counts once, as it does there;
        forward-only passes and forwards outside a step count nothing.
        """
        if self._current is None or not torch.is_grad_enabled():
            return
        real = ~self._table(routing_map.device).padding
        router.local_tokens_per_expert += (routing_map & real.unsqueeze(1)).sum(dim=0)
