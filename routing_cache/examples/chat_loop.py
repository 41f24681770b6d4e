"""A plain multi-turn chat loop against an SGLang-style server, asking for suffix rows only.

Run it against a real server by passing ``generate`` a function that posts to ``/generate``; run as
a script it talks to a small stand-in that answers in SGLang's form.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from routing_cache import RoutingCache, RowLayout, RowsLease
from routing_cache.payloads import read_sglang

Request = dict[str, object]
Generate = Callable[[Request], Mapping[str, object]]


def chat(
    cache: RoutingCache,
    generate: Generate,
    prompt_ids: list[int],
    observations: list[list[int]],
    *,
    weight_version: int,
) -> RowsLease:
    """One turn for the prompt and one for each observation; returns the rows of all of it."""
    with cache.session(weight_version, engine="sglang") as session:
        tokens = list(prompt_ids)
        for turn, observation in enumerate([[], *observations]):
            tokens += observation
            session.adopt(np.array(tokens, np.int32))
            reply = generate(
                {
                    "input_ids": tokens,
                    "sampling_params": {"temperature": 1.0, "max_new_tokens": 16},
                    "return_logprob": True,
                    "return_routed_experts": True,
                    "routed_experts_start_len": session.num_rows,
                }
            )
            sampled = sampled_ids(reply)
            read = read_sglang(
                reply,
                cache.layout,
                num_tokens=len(tokens) + len(sampled),
                requested_start=session.num_rows,
            )
            session.record(
                np.array(sampled, np.int32),
                read.rows,
                start=read.start,
                weight_version=weight_version,
                num_prefill=len(tokens) - read.start,
                turn=turn,
            )
            tokens += sampled
        return session.lease()


def sampled_ids(reply: Mapping[str, object]) -> list[int]:
    ids = reply["output_ids"]
    assert isinstance(ids, list)
    return [int(token) for token in ids]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]


class StandInServer:
    """Answers like SGLang with one dense layer in front; a row depends on its token only."""

    def __init__(self, layout: RowLayout, seed: int = 0) -> None:
        self._layout = layout
        self._table = np.random.default_rng(seed).random((1000, layout.num_moe_layers, 8))
        self._rng = np.random.default_rng(seed + 1)
        self.rows_sent = 0

    def rows(self, tokens: list[int]) -> NDArray[np.int32]:
        """Rows that the router chooses for ``tokens``. [T, L, K]"""
        order = np.argsort(self._table[np.array(tokens, np.int64) % 1000], axis=2)
        return order[:, :, : self._layout.moe_top_k].astype(np.int32)

    def generate(self, request: Request) -> Mapping[str, object]:
        prompt, start = request["input_ids"], request["routed_experts_start_len"]
        assert isinstance(prompt, list)
        assert isinstance(start, int)
        known = [int(token) for token in prompt]  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        sampled = self._rng.integers(0, 1000, 16).tolist()
        rows = self.rows([*known, *sampled])[start:-1]  # the last sampled token is not fed
        dense = np.zeros_like(rows[:, :1])
        self.rows_sent += len(rows)
        data = np.concatenate([dense, rows], axis=1).astype("<i4").tobytes()
        return {
            "output_ids": sampled,
            "meta_info": {"routed_experts": base64.b64encode(data).decode()},
        }


def main() -> None:
    layout = RowLayout(num_hidden_layers=3, moe_layers=(1, 2), num_experts=8, moe_top_k=2)
    cache = RoutingCache(layout, budget_bytes=64 << 20)
    server = StandInServer(layout)
    leases = [
        chat(cache, server.generate, list(range(40)), [[7, 8, 9]] * 4, weight_version=1)
        for _ in range(4)
    ]
    for lease in leases:
        rows, present = lease.gather()
        print(f"{lease.num_tokens} tokens, {present.sum()} rows of shape {rows.shape[1:]}")
    stats = cache.stats()
    print(f"rows sent {server.rows_sent}, prompt rows found in the tree {stats.rows_reused}")


if __name__ == "__main__":
    main()
