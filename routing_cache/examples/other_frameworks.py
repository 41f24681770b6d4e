"""Rows of a lease as the arrays that slime, miles, verl and prime-rl expect.

The frameworks keep rows dense, a copy for each sample: convert at the last moment and release the
lease afterwards. None of them knows a missing row, so the functions refuse one. The shapes are
those of the frameworks' sources in late 2026; they move, so compare before you rely on them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from routing_cache import RoutingCache, RowLayout, RowsLease, spread_rows
from routing_cache.layout import Rows


def complete_rows(lease: RowsLease) -> Rows:
    """Rows of all tokens but the last, ``[T-1, L, K]``; an error when one is missing."""
    rows, present = lease.gather(stop=lease.num_tokens - 1)
    if not present.all():
        raise ValueError(f"row {int(np.argmin(present))} is missing: drop the sample")
    return rows


def all_layers(rows: Rows, layout: RowLayout) -> Rows:
    """Rows with dense layers in the axis, zero as SGLang leaves them: ``[T, hidden layers, K]``."""
    dense = np.zeros((len(rows), layout.num_hidden_layers, layout.moe_top_k), rows.dtype)
    dense[:, list(layout.moe_layers)] = rows
    return dense


def for_slime(lease: RowsLease, layout: RowLayout) -> NDArray[np.int32]:
    """slime's and miles' ``sample.rollout_routed_experts``: int32 ``[T-1, hidden layers, K]``."""
    return all_layers(complete_rows(lease), layout).astype(np.int32)


def for_verl(
    lease: RowsLease, layout: RowLayout, *, num_prompt: int, max_prompt: int, max_response: int
) -> Rows:
    """verl's ``routed_experts``: ``[1, max_prompt + max_response, hidden layers, K]``.

    Prompts are padded on the left, responses on the right. Padding tokens, and the last token,
    which was not fed, get valid rows that spread over all experts, because the dispatcher counts
    K distinct ids for every token.
    """
    rows = complete_rows(lease)
    left = max_prompt - num_prompt
    right = max_prompt + max_response - left - len(rows)
    padding = spread_rows(left + right, layout)
    padded = np.concatenate([padding[:left], rows, padding[left:]])
    return all_layers(padded, layout)[None]


def for_prime_rl(lease: RowsLease) -> dict[str, object]:
    """prime-rl's transport: raw bytes beside shape and dtype; MoE layers only."""
    rows = complete_rows(lease)
    return {"data": rows.tobytes(), "shape": list(rows.shape), "dtype": rows.dtype.name}


def main() -> None:
    layout = RowLayout(num_hidden_layers=3, moe_layers=(1, 2), num_experts=8, moe_top_k=2)
    cache = RoutingCache(layout)
    rng = np.random.default_rng(0)
    rows = np.argsort(rng.random((9, 2, 8)), axis=2)[:, :, :2].astype(np.uint8)
    with cache.session(weight_version=1) as session:
        session.record(np.arange(10), rows, start=0, weight_version=1, num_prefill=6)
        lease = session.lease()
    with lease:
        slime = for_slime(lease, layout)
        verl = for_verl(lease, layout, num_prompt=6, max_prompt=8, max_response=8)
        prime = for_prime_rl(lease)
    print("slime, miles", slime.dtype, slime.shape)
    print("verl", verl.dtype, verl.shape)
    print("prime-rl", prime["dtype"], prime["shape"])


if __name__ == "__main__":
    main()
