"""What the step would look like without replay, measured on a few of its samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent_rl.metrics.mismatch import abs_gap, f_tau, k3
from agent_rl.protocols import Trainer
from agent_rl.types import TrainSample

_MAX_SAMPLES = 64


def without_replay(trainer: Trainer, samples: Sequence[TrainSample]) -> dict[str, float]:
    """Mismatch of rollout and old policy with live routing, named as the replayed ones with
    ``_no_replay`` behind. Costs one forward of at most 64 samples."""
    chosen = samples[:_MAX_SAMPLES]
    pairs = list(zip(chosen, trainer.score(chosen, "off"), strict=True))
    rollout = np.concatenate([s.rollout_logprobs[s.loss_mask] for s, _ in pairs])
    train = np.concatenate([score.logprobs[s.loss_mask] for s, score in pairs])
    return {
        "kl_k3_no_replay": k3(rollout, train),
        "abs_logprob_gap_no_replay": abs_gap(rollout, train),
        "f_2_no_replay": f_tau(rollout, train, 2.0),
    }
