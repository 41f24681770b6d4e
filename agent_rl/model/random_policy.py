"""A random tiny MoE with a tokenizer, as a Hugging Face folder: for checks and benchmarks.

Its routing is close to uniform and every token is likely, so a check of rows, log-probs and
weights sees all experts, which a trained policy would not show.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch

from agent_rl.rollout.compact_tokenizer import build_compact_tokenizer
from agent_rl.run.warmstart.train import TinyMoEShape, build_tiny_moe

_NUMBERS = " ".join(str(number) for number in range(192))
_EMBEDDING_STD = 0.15  # spreads the logits of a unit-norm state over about e^±2


def write_random_policy(folder: Path, *, seed: int = 0, shape: TinyMoEShape | None = None) -> Path:
    """Write config, float32 weights and tokenizer below ``folder`` and return it.

    The same seed and shape give the same weights on every machine: they are drawn by numpy, whose
    streams are fixed, not by torch. The vocabulary has about 200 entries.
    """
    tokenizer = build_compact_tokenizer([_NUMBERS])
    model = build_tiny_moe(shape or TinyMoEShape(), tokenizer.vocab_size, seed)
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() == 1:
                continue  # norms stay at one
            std = _EMBEDDING_STD if "embed" in name else 1 / math.sqrt(parameter.shape[-1])
            values = rng.standard_normal(tuple(parameter.shape), dtype=np.float32)
            parameter.copy_(torch.from_numpy(values * np.float32(std)))
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder
