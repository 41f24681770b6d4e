"""The one layout: ids, masks, log-probs, advantages and routing rows of a micro-batch together.

A sample of T tokens feeds tokens 0..T-2: the last sampled token is never fed, so it needs no row.
At fed position p the logits predict token p+1 and the routers use row p. Every per-token value of
a *target* (loss mask, advantage, log-prob) therefore sits at the position that predicts it.

``grid`` says where a position lies on this rank; a rank reads only the layers of its pipeline
stage and the tokens of its context- and sequence-parallel part from a sample's rows.

Axis letters: B grid rows, S local columns, S' columns of this sequence-parallel rank, L MoE layers
of this rank, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agent_rl.config.objective import Reduction
from agent_rl.errors import ReplayError
from agent_rl.trainer.grid import Grid, Part, packed_grid, padded_grid
from agent_rl.trainer.router_replay import ReplayTable
from agent_rl.types import Mask, Rows, TrainSample
from routing_cache import RoutingCacheError, RowLayout, check_rows, spread_rows
from routing_cache.row_check import expected_rows

WHOLE = Part()
# Weights and units of a whole sequence [T-1]: a context-parallel rank lays out a part of them.
_Share = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class MicroBatch:
    """One forward of this rank. Tensors are on the CPU."""

    index: int  # its key in the replay tables, unique within a step
    samples: tuple[int, ...]  # positions in the step's sample list, one per sequence
    lengths: tuple[int, ...]  # fed tokens of each sequence, on all ranks together
    token_ids: torch.Tensor  # [B, S] int64, 0 on padding
    position_ids: torch.Tensor  # [B, S] int64, of the position in its sequence
    sequence_ids: torch.Tensor  # [B, S] int64: which of ``samples``; -1 on padding
    labels: torch.Tensor  # [B, S] int64, the next token
    loss_mask: torch.Tensor  # [B, S] bool, the label was sampled by the policy
    rollout_logprobs: torch.Tensor  # [B, S] float32 of the labels
    advantages: torch.Tensor  # [B, S] float32 of the labels
    weights: torch.Tensor  # [B, S] float32: what a token's loss is multiplied by
    units: torch.Tensor  # [B, S] int32: adds up to what the summed loss is divided by
    padding: torch.Tensor  # [B, S] bool
    rows: torch.Tensor  # [L, S', B, K] uint8 or int16, position-major like Megatron's tokens
    present: torch.Tensor  # [S', B] bool
    part: Part = WHOLE
    boundaries: tuple[int, ...] | None = None  # packed: where sequences begin, over all ranks

    @property
    def num_tokens(self) -> int:
        """Fed tokens of the whole micro-batch, padding left out."""
        return sum(self.lengths)

    def routed(self, field: torch.Tensor) -> torch.Tensor:
        """Return a ``[B, S]`` field at the tokens its routers see, in their order ``[N]``."""
        width = field.shape[1] // self.part.sp_size
        own = slice(self.part.sp_rank * width, (self.part.sp_rank + 1) * width)
        return field[:, own].T.flatten()

    def table(self, *, replay: bool) -> ReplayTable:
        """Return the orders to this rank's routers; ``replay=False`` routes live."""
        present = self.present.flatten()
        return ReplayTable(
            rows=self.rows.flatten(1, 2),
            present=present if replay else torch.zeros_like(present),
            padding=self.routed(self.padding),
            weights=self.routed(self.weights),
        )


def fed_tokens(sample: TrainSample) -> int:
    """Count the tokens of a sample that are fed forward: all but the last."""
    return max(0, expected_rows(len(sample.token_ids)))


def lay_out(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    *,
    index: int,
    layout: RowLayout,
    layers: Sequence[int] | None = None,
    part: Part = WHOLE,
    packed: bool = False,
    alignment: int = 1,
    at_least: tuple[int, int] = (1, 1),
    reduction: Reduction = "token",
    longest: int = 1,
    use_rows: bool = True,
) -> MicroBatch:
    """Lay this rank's part of ``samples[i] for i in indices`` out as one micro-batch.

    ``reduction`` and, for ``constant``, ``longest`` say what the loss is a mean over.
    ``layers`` are the global numbers of the MoE layers that this rank runs (None: all),
    ``at_least`` the (rows, width) over all ranks to fill up to. A label of token 0 has no position
    that predicts it and drops out. Padding is routed to K distinct experts that walk evenly over
    all of them; a missing row likewise, but stays marked missing.

    Raises ``ReplayError`` naming the sample when rows are of another shape than the model's, out
    of range, or repeat an expert.
    """
    chosen = [samples[i] for i in indices]
    lengths = tuple(fed_tokens(sample) for sample in chosen)
    make_grid = packed_grid if packed else padded_grid
    grid = make_grid(lengths, part, alignment=alignment, at_least=at_least)
    shares = [_loss_units(np.asarray(s.loss_mask[1:], bool), reduction, longest) for s in chosen]
    values = _Values.of(grid, chosen, shares)
    slots = tuple(
        layout.moe_layers.index(layer)
        for layer in (layout.moe_layers if layers is None else layers)
    )
    rows, present = _lay_out_rows(grid, chosen if use_rows else (), lengths, part, layout, slots)
    return MicroBatch(
        index=index,
        samples=tuple(indices),
        lengths=lengths,
        token_ids=torch.from_numpy(values.ids),
        position_ids=torch.from_numpy(values.positions),
        sequence_ids=torch.from_numpy(values.sequences),
        labels=torch.from_numpy(values.labels),
        loss_mask=torch.from_numpy(values.mask),
        rollout_logprobs=torch.from_numpy(values.rollout),
        advantages=torch.from_numpy(values.advantages),
        weights=torch.from_numpy(values.weights),
        units=torch.from_numpy(values.units),
        padding=torch.from_numpy(values.sequences < 0),
        rows=torch.from_numpy(rows),
        present=torch.from_numpy(present),
        part=part,
        boundaries=grid.boundaries,
    )


@dataclass
class _Values:
    """Arrays with one number per position, ``[B, S]`` each."""

    ids: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    labels: np.ndarray
    mask: np.ndarray
    rollout: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    units: np.ndarray

    @classmethod
    def of(cls, grid: Grid, samples: Sequence[TrainSample], shares: Sequence[_Share]) -> _Values:
        shape = (grid.num_rows, grid.width)
        ids, positions, labels = np.zeros((3, *shape), dtype=np.int64)
        sequences = np.full(shape, -1, dtype=np.int64)
        rollout, advantages, weights = np.zeros((3, *shape), dtype=np.float32)
        mask, units = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.int32)
        out = cls(ids, positions, sequences, labels, mask, rollout, advantages, weights, units)
        for span in grid.spans:
            columns = slice(span.column, span.column + span.stop - span.start)
            positions[span.row, columns] = np.arange(span.start, span.stop)
            if span.sequence >= len(samples):
                continue
            sample = samples[span.sequence]
            real = max(0, min(span.stop, fed_tokens(sample)) - span.start)
            here = (span.row, slice(span.column, span.column + real))
            fed, target = (
                slice(span.start, span.start + real),
                slice(span.start + 1, span.start + 1 + real),
            )
            chosen = np.asarray(sample.loss_mask[target], dtype=bool)
            sequences[here] = span.sequence
            ids[here], labels[here] = sample.token_ids[fed], sample.token_ids[target]
            mask[here] = chosen
            rollout[here] = np.where(chosen, sample.rollout_logprobs[target], 0.0)
            advantages[here] = np.where(chosen, sample.advantages[target], 0.0)
            weights[here], units[here] = (share[fed] for share in shares[span.sequence])
        return out


def _loss_units(mask: np.ndarray, reduction: Reduction, longest: int) -> _Share:
    """Return weights and units of one sequence ``[T-1]``; a unit is a token, or the sequence."""
    if reduction == "token":
        return mask.astype(np.float32), mask.astype(np.int32)
    weights = mask / (longest if reduction == "constant" else max(1, mask.sum()))
    units = np.zeros(len(mask), dtype=np.int32)
    if mask.any():
        units[mask.argmax()] = 1  # counted where its first label is, once over all ranks
    return weights.astype(np.float32), units


def row_dtype(num_experts: int) -> np.dtype:
    """Return the narrowest dtype that numpy and torch share for ids below ``num_experts``."""
    return np.dtype(np.uint8 if num_experts <= 256 else np.int16)


def _lay_out_rows(
    grid: Grid,
    samples: Sequence[TrainSample],
    lengths: Sequence[int],
    part: Part,
    layout: RowLayout,
    slots: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows ``[L, S', B, K]`` of this rank's layers and columns, and a mask of those present.

    Padding is numbered through over all sequences and ranks, so that it walks evenly over the
    experts whatever the shape and whoever holds it.
    """
    width, dtype = grid.width // part.sp_size, row_dtype(layout.num_experts)

    def spread(count: int, first: int) -> np.ndarray:
        made = spread_rows(count, layout, first=first, layers=slots)
        return made.astype(dtype, copy=False).swapaxes(0, 1)

    shape = (len(slots), width, grid.num_rows, layout.moe_top_k)
    rows = np.ascontiguousarray(spread(width * grid.num_rows, 0)).reshape(shape)
    present = np.zeros((width, grid.num_rows), dtype=bool)
    fed = [*lengths, *[0] * (len(grid.widths) - len(lengths))]
    pads_before = np.cumsum([0, *(w - n for w, n in zip(grid.widths, fed, strict=True))])
    for span in grid.spans_of(part):
        end = fed[span.sequence]
        real, pads = min(span.stop, end) - span.start, span.stop - max(span.start, end)
        if pads > 0:
            last = span.column + span.stop - span.start
            number = int(pads_before[span.sequence]) + max(span.start, end) - end
            rows[:, last - pads : last, span.row] = spread(pads, number)
        if real <= 0 or not samples or samples[span.sequence].routed_experts is None:
            continue
        got, have = _sample_rows(
            samples[span.sequence], span.start, span.start + real, slots, layout
        )
        here = slice(span.column, span.column + real)
        if have.all():  # indexing by a mask would copy all of them once more
            rows[:, here, span.row] = got.swapaxes(0, 1)
        else:
            rows[:, here, span.row][:, have] = got[have].swapaxes(0, 1)
        present[here, span.row] = have
    return rows, present


def _sample_rows(
    sample: TrainSample, start: int, stop: int, slots: tuple[int, ...], layout: RowLayout
) -> tuple[np.ndarray, np.ndarray]:
    """Return checked rows ``[stop - start, len(slots), K]`` and a mask of those present."""
    assert sample.routed_experts is not None
    every = len(slots) == len(layout.moe_layers)
    rows, present = sample.routed_experts.gather(
        layers=None if every else slots, start=start, stop=stop
    )
    expected = (stop - start, len(slots), layout.moe_top_k)
    if rows.shape != expected or present.shape != (stop - start,):
        raise ReplayError(
            f"sample {sample.sample_id}: rows of another model or length, "
            f"got={rows.shape} present={present.shape} {expected=}"
        )
    refuse_damage(sample, rows, present, layout, start=start, slots=slots)
    return rows.astype(row_dtype(layout.num_experts), copy=False), present


def refuse_damage(
    sample: TrainSample,
    rows: Rows,
    present: Mask,
    layout: RowLayout,
    *,
    start: int,
    slots: Sequence[int],
) -> None:
    """Refuse rows ``[T, L, K]`` from token ``start`` on that say they are present and are damaged.

    Raises ``ReplayError`` naming sample, token, global layer, ids and what they should be.
    """
    try:
        check = check_rows(rows, layout)
    except RoutingCacheError as error:
        raise ReplayError(f"sample {sample.sample_id}: {error}") from error
    if check.all_good:  # asked first: hardly ever is a row missing
        return
    masks = [mask for mask in (check.bad, check.missing) if mask is not None]
    damaged = present & np.logical_or.reduce(masks)
    if not damaged.any():
        return
    row = int(damaged.argmax())
    first = check_rows(rows[row : row + 1], layout).first_bad
    slot = 0 if first is None else first[1]  # marked missing in all layers, yet called present
    raise ReplayError(
        f"sample {sample.sample_id}: {int(damaged.sum())} damaged rows, first at "
        f"token {start + row}, layer {layout.moe_layers[slots[slot]]}: "
        f"got={rows[row, slot].tolist()} "
        f"expected={layout.moe_top_k} distinct ids below {layout.num_experts}"
    )
