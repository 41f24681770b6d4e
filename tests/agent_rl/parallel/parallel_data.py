"""One set of samples for all combinations, and the sizes of the policies that they go through.

Every token id is used once, so an id says which sample and position it is of, and every row is a
function of the id. 0 is the padding's id and no sample's.
"""

from __future__ import annotations

import numpy as np

from agent_rl.types import TrainSample
from routing_cache import ArrayRows, RowLayout

LENGTHS = (9, 30, 5, 17, 1, 12, 23, 2, 14, 26, 3, 20)
VOCABULARY = 256
EXPERTS = 8
LAYERS = 4
MOE_LAYERS = (1, 2, 3)  # the first layer is dense
LAYOUT = RowLayout(num_hidden_layers=LAYERS, moe_layers=MOE_LAYERS, num_experts=8, moe_top_k=2)


def row_of(token: int) -> np.ndarray:
    """The experts ``[L, K]`` recorded for a token: another set for its neighbours and layers."""
    first = (3 * token + np.arange(len(MOE_LAYERS))) % EXPERTS
    return np.stack([first, (first + 1 + token // EXPERTS % (EXPERTS - 1)) % EXPERTS], axis=1)


def make_samples(
    lengths: tuple[int, ...] = LENGTHS, *, version: int = 0, missing_every: int = 0
) -> list[TrainSample]:
    """``missing_every`` n: the rows of every n-th token id are missing."""
    rng = np.random.default_rng(3)
    samples, used = [], 1
    for number, length in enumerate(lengths):
        ids = np.arange(used, used + length, dtype=np.int32)
        used += length
        mask = rng.random(length) < 0.6
        mask[-1], mask[0] = True, False
        rows = np.stack([row_of(int(t)) for t in ids[:-1]]) if length > 1 else np.zeros((0, 3, 2))
        samples.append(
            TrainSample(
                sample_id=f"sample-{number}",
                token_ids=ids,
                loss_mask=mask,
                rollout_logprobs=np.where(mask, -rng.exponential(4.0, length), 0).astype(
                    np.float32
                ),
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                weight_versions=(version,),
                routed_experts=ArrayRows(
                    LAYOUT,
                    ids,
                    rows.astype(np.uint8),
                    ids[: len(rows)] % missing_every != 0 if missing_every else None,
                    weight_version=version,
                ),
            )
        )
    assert used <= VOCABULARY
    return samples
