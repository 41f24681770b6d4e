"""The one layout: ids, masks, log-probs, advantages and routing rows of a micro-batch together.

A sample of T tokens feeds tokens 0..T-2: the last sampled token is never fed, so it needs no row.
At fed position p the logits predict token p+1 and the routers use row p. Every per-token value of
a *target* (loss mask, advantage, log-prob) therefore sits at the position that predicts it.

Axis letters: B sequences, S padded positions, L MoE layers of this rank, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from agent_rl.errors import ReplayError
from agent_rl.trainer.router_replay import ReplayTable
from agent_rl.types import TrainSample
from routing_cache import RowLayout, spread_rows

Reduction = Literal["token", "sequence"]


@dataclass(frozen=True)
class MicroBatch:
    """One padded forward. Tensors are on the CPU; right padding."""

    index: int  # its key in the replay tables, unique within a step
    samples: tuple[int, ...]  # positions in the step's sample list, one a sequence
    lengths: tuple[int, ...]  # fed tokens of each sequence
    token_ids: torch.Tensor  # [B, S] int64, 0 on padding
    position_ids: torch.Tensor  # [B, S] int64
    labels: torch.Tensor  # [B, S] int64, the next token
    loss_mask: torch.Tensor  # [B, S] bool, the label was sampled by the policy
    rollout_logprobs: torch.Tensor  # [B, S] float32 of the labels
    advantages: torch.Tensor  # [B, S] float32 of the labels
    weights: torch.Tensor  # [B, S] float32: what a token's loss is multiplied by
    units: torch.Tensor  # [B, S] int32: adds up to what the summed loss is divided by
    padding: torch.Tensor  # [B, S] bool
    rows: torch.Tensor  # [L, S, B, K] uint8 or int16, position-major like Megatron's tokens
    present: torch.Tensor  # [S, B] bool

    @property
    def num_tokens(self) -> int:
        """Fed tokens, padding left out."""
        return sum(self.lengths)

    def table(self, *, replay: bool, sp_rank: int = 0, sp_size: int = 1) -> ReplayTable:
        """What the routers of one sequence-parallel rank see; ``replay=False`` routes live."""
        length = self.present.shape[0] // sp_size
        own = slice(sp_rank * length, (sp_rank + 1) * length)
        rows, present = self.rows[:, own], self.present[own]
        return ReplayTable(
            rows=rows.flatten(1, 2),
            present=present.flatten() if replay else torch.zeros(present.numel(), dtype=torch.bool),
            padding=self.padding.T[own].flatten(),
        )


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    token_budget: int,
    alignment: int = 1,
    num_ranks: int = 1,
    multiple_of: int = 1,
) -> list[list[tuple[int, ...]]]:
    """Which samples go into which micro-batch of which data-parallel rank.

    ``lengths`` are fed tokens. Samples are sorted by length so that little is padded, dealt to the
    ranks in turn, and packed while the padded size stays within ``token_budget``; a sample longer
    than that gets a micro-batch of its own. Every rank gets the same number of micro-batches, a
    multiple of ``multiple_of``: where samples run out they are empty, so that all ranks take the
    same collective steps.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    plan = [
        _pack(order[rank::num_ranks], lengths, token_budget, alignment) for rank in range(num_ranks)
    ]
    count = max([1, *(len(batches) for batches in plan)])
    count = math.ceil(count / multiple_of) * multiple_of
    return [batches + [()] * (count - len(batches)) for batches in plan]


def _pack(
    order: Sequence[int], lengths: Sequence[int], budget: int, alignment: int
) -> list[tuple[int, ...]]:
    batches: list[tuple[int, ...]] = []
    current: list[int] = []
    for i in order:  # longest first: the first one sets the padded width
        width = aligned(lengths[current[0]] if current else lengths[i], alignment)
        if current and width * (len(current) + 1) > budget:
            batches.append(tuple(current))
            current = []
        current.append(i)
    if current:
        batches.append(tuple(current))
    return batches


def aligned(length: int, alignment: int) -> int:
    """``length`` rounded up to a multiple of ``alignment``, at least one."""
    return max(1, math.ceil(length / alignment)) * alignment


def fed_tokens(sample: TrainSample) -> int:
    """Tokens of a sample that are fed forward: all but the last."""
    return max(0, len(sample.token_ids) - 1)


def lay_out(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    *,
    index: int,
    layout: RowLayout,
    layers: Sequence[int] | None = None,
    alignment: int = 1,
    reduction: Reduction = "token",
    use_rows: bool = True,
) -> MicroBatch:
    """Lay ``samples[i] for i in indices`` out as one padded micro-batch.

    ``layers`` are the global numbers of the MoE layers that this rank runs (None: all). A label
    of token 0 has no position that predicts it and drops out. Padding is routed to K distinct
    experts that walk evenly over all of them; a missing row likewise, but stays marked missing.

    Raises ``ReplayError`` naming the sample when rows are of another shape than the model's, out
    of range, or repeat an expert.
    """
    chosen = [samples[i] for i in indices]
    lengths = tuple(fed_tokens(sample) for sample in chosen)
    num, width = max(1, len(chosen)), aligned(max(lengths, default=0), alignment)
    slots = [layout.moe_layers.index(layer) for layer in layers or layout.moe_layers]
    ids, labels = np.zeros((2, num, width), dtype=np.int64)
    rollout, advantages, weights = np.zeros((3, num, width), dtype=np.float32)
    mask, units = np.zeros((num, width), dtype=bool), np.zeros((num, width), dtype=np.int32)
    padding = np.ones((num, width), dtype=bool)
    rows = spread_rows(width * num, layout)[:, slots].astype(row_dtype(layout.num_experts))
    rows = rows.reshape(width, num, len(slots), -1).transpose(2, 0, 1, 3).copy()  # [L, S, B, K]
    present = np.zeros((width, num), dtype=bool)
    for b, (sample, n) in enumerate(zip(chosen, lengths, strict=True)):
        ids[b, :n], labels[b, :n] = sample.token_ids[:n], sample.token_ids[1:]
        mask[b, :n], padding[b, :n] = sample.loss_mask[1:], False
        rollout[b, :n] = np.where(sample.loss_mask, sample.rollout_logprobs, 0.0)[1:]
        advantages[b, :n] = np.where(sample.loss_mask, sample.advantages, 0.0)[1:]
        weights[b], units[b] = _loss_units(mask[b], reduction)
        if use_rows and sample.routed_experts is not None and n:
            got, have = _sample_rows(sample, n, slots, layout)
            rows[:, :n, b][:, have] = got[have].swapaxes(0, 1)
            present[:n, b] = have
    return MicroBatch(
        index=index,
        samples=tuple(indices),
        lengths=lengths,
        token_ids=torch.from_numpy(ids),
        position_ids=torch.arange(width).expand(num, width),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(mask),
        rollout_logprobs=torch.from_numpy(rollout),
        advantages=torch.from_numpy(advantages),
        weights=torch.from_numpy(weights),
        units=torch.from_numpy(units),
        padding=torch.from_numpy(padding),
        rows=torch.from_numpy(rows),
        present=torch.from_numpy(present),
    )


def _loss_units(mask: np.ndarray, reduction: Reduction) -> tuple[np.ndarray, np.ndarray]:
    """Weights and units of one sequence ``[S]``: a unit is a token, or a whole sequence."""
    if reduction == "token":
        return mask.astype(np.float32), mask.astype(np.int32)
    weights = mask / max(1, mask.sum())
    units = np.zeros(len(mask), dtype=np.int32)
    if mask.any():
        units[mask.argmax()] = 1  # counted where its first label is, once over all ranks
    return weights.astype(np.float32), units


def row_dtype(num_experts: int) -> np.dtype:
    """Narrowest dtype that numpy and torch share for ids below ``num_experts``."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.int16)


def _sample_rows(
    sample: TrainSample, num_rows: int, slots: Sequence[int], layout: RowLayout
) -> tuple[np.ndarray, np.ndarray]:
    """Checked rows ``[num_rows, len(slots), K]`` and which are present ``[num_rows]``."""
    assert sample.routed_experts is not None
    every = len(slots) == len(layout.moe_layers)
    rows, present = sample.routed_experts.gather(
        layers=None if every else slots, start=0, stop=num_rows
    )
    expected = (num_rows, len(slots), layout.moe_top_k)
    if rows.shape != expected or present.shape != (num_rows,):
        raise ReplayError(
            f"sample {sample.sample_id}: rows of another model or length, "
            f"got={rows.shape} present={present.shape} {expected=}"
        )
    kept = rows[present].astype(np.int64)
    ordered = np.sort(kept, axis=-1)
    broken = (ordered[..., -1] >= layout.num_experts) | (ordered[..., 0] < 0)
    broken |= (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if broken.any():
        row, slot = (int(x[0]) for x in np.nonzero(broken))
        raise ReplayError(
            f"sample {sample.sample_id}: {int(broken.sum())} damaged rows, first at token "
            f"{int(np.flatnonzero(present)[row])}, layer {layout.moe_layers[slots[slot]]}: "
            f"got={kept[row, slot].tolist()} "
            f"expected={layout.moe_top_k} distinct ids below {layout.num_experts}"
        )
    return rows.astype(row_dtype(layout.num_experts)), present


def shard_context(batch: MicroBatch, cp_rank: int, cp_size: int) -> MicroBatch:
    """This context-parallel rank's zigzag part: chunks ``rank`` and ``2 * size - 1 - rank``.

    Lay out with an alignment that ``2 * cp_size`` (times the sequence-parallel size) divides.
    """
    if cp_size == 1:
        return batch
    width = batch.token_ids.shape[1]
    if width % (2 * cp_size):
        raise ValueError(f"padded width: got={width} expected=multiple of {2 * cp_size}")
    chunks = torch.arange(width).reshape(2 * cp_size, -1)
    own = torch.cat([chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]])
    names = ("token_ids", "position_ids", "labels", "loss_mask", "rollout_logprobs", "advantages")
    names += ("weights", "units", "padding")
    parts = {name: getattr(batch, name)[:, own] for name in names}
    lengths = tuple(int(n) for n in (~parts["padding"]).sum(dim=1))[: len(batch.lengths)]
    return replace(
        batch, lengths=lengths, rows=batch.rows[:, own], present=batch.present[own], **parts
    )
