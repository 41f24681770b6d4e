"""Distance of the live router from the recorded routing, as a term of the loss.

``λ · D(recorded ‖ live)``, summed over the trained tokens with a recorded row and over the MoE
layers, divided like the rest of the loss by all trained tokens (or sequences) and by the layers: a
token without a row adds nothing. ``router_replay`` computes it inside the routers and hands it to
backward the way Megatron does with its load-balancing losses, so it is exact under recompute,
micro-batching and pipeline parallelism: a layer's term lives on the rank that has the layer.

The term is this project's own: no paper and none of verl, slime, prime-rl, SkyRL and TRL has it.

Axis letters: N tokens that a router sees, E experts, K experts per token.
"""

from __future__ import annotations

import torch


def to_recorded_sets(live: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``-log Σ_{e in rows} p(e)``: how little of the live router's mass is on the recorded experts.

    ``live [N, E]`` are log-probabilities over the experts, ``rows [N, K]`` int64 ids; ``[N]``. It
    is the smallest KL(q ‖ live) of any distribution q on the recorded set, so it asks for the set
    and leaves the gates free.
    """
    return -live.gather(1, rows).logsumexp(dim=1)


def to_recorded_distributions(live: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """``KL(recorded ‖ live)`` of log-probabilities ``[N, E]``; ``[N]``."""
    mass = recorded.exp()
    # 0 · log 0 is 0, whatever the live router says there.
    return torch.where(mass > 0, mass * (recorded - live), 0.0).sum(dim=1)


def live_distribution(
    scores: torch.Tensor, score_function: str, bias: torch.Tensor | None, *, is_logit: bool
) -> torch.Tensor:
    """Log-probabilities ``[N, E]`` of a router from what its top-k is taken of.

    ``scores [N, E]`` are logits (``is_logit``), softmax probabilities, or sigmoids to which a
    selection ``bias [E]`` was added: the bias steers load, it is no preference of the router's.
    """
    if is_logit:
        return scores.float().log_softmax(dim=1)
    values = scores.float()
    if score_function == "sigmoid" and bias is not None:
        values = values - bias
    values = values.clamp(min=torch.finfo(torch.float32).tiny)
    return values.log() - values.sum(dim=1, keepdim=True).log()
