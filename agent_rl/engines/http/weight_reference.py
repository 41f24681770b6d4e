"""Log-probs that a server must give after a weight update, computed from the same weights here.

Version tags and flushed caches do not show that the weights themselves arrived: a server may keep
a packed copy of the old ones, or read new ones in the wrong form, and go on sampling without a
word. Comparing the log-probs of one short prompt shows it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agent_rl.engines.local.hf_model import load_state
from agent_rl.protocols import Weights
from agent_rl.types import Floats, TokenIds


class TransformersReference:
    """Scores with transformers on the CPU, float32. For models that fit there twice over.

    Args:
        folder: Hugging Face folder of the model's shape.
    """

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()

    def score(self, weights: Weights, token_ids: TokenIds) -> Floats:
        """Return the log-probs ``[T-1]`` of tokens 1..T-1 at temperature 1 under ``weights``."""
        load_state(self._model, weights)
        ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64))
        with torch.inference_mode():
            logprobs = torch.log_softmax(self._model(ids[None]).logits[0].float(), dim=-1)
        return logprobs[:-1].gather(1, ids[1:, None]).squeeze(1).numpy()
