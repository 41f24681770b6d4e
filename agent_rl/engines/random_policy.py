"""A randomly initialised tiny MoE with a tokenizer, as a Hugging Face folder: for engine checks.

Its routing is close to uniform and every token is likely, so a check of rows, log-probs and
weights sees all experts, which a trained policy would not show.
"""

from __future__ import annotations

from pathlib import Path

from agent_rl.rollout.compact_tokenizer import build_compact_tokenizer
from agent_rl.warmstart.train import TinyMoEShape, build_tiny_moe

_NUMBERS = " ".join(str(number) for number in range(192))


def write_random_policy(folder: Path, *, seed: int = 0, shape: TinyMoEShape | None = None) -> Path:
    """Write config, float32 weights and tokenizer below ``folder`` and return it.

    The same seed and shape give the same weights. The vocabulary has about 200 entries.
    """
    tokenizer = build_compact_tokenizer([_NUMBERS])
    model = build_tiny_moe(shape or TinyMoEShape(), tokenizer.vocab_size, seed)
    model.generation_config.eos_token_id = tokenizer.end_id
    model.generation_config.pad_token_id = tokenizer.pad_id
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder
