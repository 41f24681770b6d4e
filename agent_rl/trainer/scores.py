"""Scores of samples, taken back from every rank's layout to each sample's own token order.

Axis letters: T tokens of a sample, N sampled tokens, V vocabulary, L MoE layers, K experts per
token, M tokens that one rank's routers saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from agent_rl.trainer import logprobs
from agent_rl.trainer.batch import MicroBatch, fed_tokens, row_dtype
from agent_rl.types import TrainSample
from routing_cache import RowLayout


@dataclass(frozen=True)
class SampleScore:
    """Log-probs of one sample under the trainer's current weights, at the config's temperature."""

    logprobs: np.ndarray  # [T] float32, 0 where not sampled
    full_logprobs: np.ndarray | None  # [N, V] float32 of the N sampled tokens, in order
    # [T-1, L, K] what the live routers chose, or would have, in the rows' narrow dtype
    live_experts: np.ndarray | None


@dataclass(frozen=True)
class ScoredTokens:
    """One rank's knowledge of the sampled tokens of one micro-batch; ``[N]`` each."""

    samples: np.ndarray  # positions in the step's sample list
    targets: np.ndarray  # positions of the sampled tokens in their sample
    logprobs: np.ndarray
    full: np.ndarray | None  # [N, V]


@dataclass(frozen=True)
class RoutedTokens:
    """The live choice of one rank's routers for one micro-batch."""

    layers: tuple[int, ...]  # global numbers
    samples: np.ndarray  # [M]
    positions: np.ndarray  # [M]
    experts: np.ndarray  # [L, M, K]


def scored_tokens(batch: MicroBatch, scaled: torch.Tensor, *, full_logits: bool) -> ScoredTokens:
    """From the sampled tokens' logits over temperature, ``[N, V / tensor_parallel]``."""
    mask = batch.loss_mask
    values = logprobs.token_logprobs(scaled, batch.labels[mask].to(scaled.device))
    return ScoredTokens(
        samples=np.asarray(batch.samples, dtype=np.int64)[batch.sequence_ids[mask].numpy()],
        targets=batch.position_ids[mask].numpy() + 1,
        logprobs=values.cpu().numpy(),
        full=logprobs.full_logprobs(scaled).cpu().numpy() if full_logits else None,
    )


def routed_tokens(batch: MicroBatch, live: torch.Tensor, layers: tuple[int, ...]) -> RoutedTokens:
    """From ``live [L, S' * B, K]`` in Megatron's token order."""
    sequences, positions = batch.routed(batch.sequence_ids), batch.routed(batch.position_ids)
    real = sequences >= 0
    return RoutedTokens(
        layers=layers,
        samples=np.asarray(batch.samples, dtype=np.int64)[sequences[real].numpy()],
        positions=positions[real].numpy(),
        experts=live[:, real.to(live.device)].cpu().numpy(),
    )


def assemble_scores(
    samples: Sequence[TrainSample],
    scored: Sequence[ScoredTokens],
    routed: Sequence[RoutedTokens],
    layout: RowLayout,
) -> list[SampleScore]:
    """Every sample's scores from what all ranks know; without ``routed`` no live choice."""
    values = [np.zeros(len(sample.token_ids), dtype=np.float32) for sample in samples]
    width = next((part.full.shape[1] for part in scored if part.full is not None), None)
    full = [
        None if width is None else np.zeros((_num_targets(s), width), np.float32) for s in samples
    ]
    for part in scored:
        for i in np.unique(part.samples):
            own = part.samples == i
            targets = part.targets[own]
            values[i][targets] = part.logprobs[own]
            if part.full is not None:
                order = np.cumsum(np.asarray(samples[i].loss_mask[1:], dtype=bool)) - 1
                full[i][order[targets - 1]] = part.full[own]
    shape = (layout.num_moe_layers, layout.moe_top_k)
    dtype = row_dtype(layout.num_experts)
    live = [np.zeros((fed_tokens(s), *shape), dtype) if routed else None for s in samples]
    for part in routed:
        slots = np.array([layout.moe_layers.index(layer) for layer in part.layers], np.int64)
        for i in np.unique(part.samples):
            own = part.samples == i
            live[i][np.ix_(part.positions[own], slots)] = part.experts[:, own].swapaxes(0, 1)
    return [SampleScore(*found) for found in zip(values, full, live, strict=True)]


def _num_targets(sample: TrainSample) -> int:
    return int(np.asarray(sample.loss_mask[1:], dtype=bool).sum())
