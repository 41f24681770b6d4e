"""Log-probabilities of sampled tokens under ``softmax(logits / temperature)``.

The same convention as the engine's: temperature divides the logits, nothing is truncated.
Axis letters: B sequences, S positions, V vocabulary, N sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import
from agent_rl.trainer.batch import MicroBatch

# isort: split
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    vocab_parallel_cross_entropy,
)

# Rows normalised at a time: over 150,000 entries each, whole copies would be tens of gigabytes.
_ROWS = 1024


def sampled_logits(logits: torch.Tensor, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """Float32 logits over temperature at the positions that predict sampled tokens, ``[N, V]``.

    ``logits`` is ``[B, S, V / tensor_parallel]``. Only these rows are ever normalised.
    """
    chosen = logits[batch.loss_mask.to(logits.device)].float()
    return chosen if temperature == 1.0 else chosen / temperature


def token_logprobs(scaled: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """``log softmax(scaled)[label]``, ``[N]``, from ``[N, V / tensor_parallel]``."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        # In place on its input, hence the clone.
        return -vocab_parallel_cross_entropy(scaled.clone(), labels)
    parts = zip(scaled.split(_ROWS), labels.unsqueeze(-1).split(_ROWS), strict=True)
    return torch.cat([part.log_softmax(dim=-1).gather(-1, own) for part, own in parts]).squeeze(-1)


def entropy(scaled: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of each row, ``[N]``; differentiable."""
    return torch.cat([_entropy(full_logprobs(part)) for part in scaled.split(_ROWS)])


def _entropy(full: torch.Tensor) -> torch.Tensor:
    return -(full.exp() * full).sum(dim=-1)


def full_logprobs(scaled: torch.Tensor) -> torch.Tensor:
    """All log-probs ``[N, V]``, gathered over the tensor-parallel group."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        scaled = gather_from_tensor_model_parallel_region(scaled)
    return scaled.log_softmax(dim=-1)


def sampled(batch: MicroBatch, field: Callable[[MicroBatch], torch.Tensor]) -> torch.Tensor:
    """A ``[B, S]`` field of the batch at sampled tokens, ``[N]``."""
    return field(batch)[batch.loss_mask]
