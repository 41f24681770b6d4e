"""The recipe of each shipped policy, by its folder name in ``assets``.

The three ``bench_*`` policies differ in routing and nothing else: depth, width, attention, data,
order and the 128 feed-forward units a token uses are the same. One expert that every token takes
has gate 1 and is a dense feed-forward layer: the control runs through the same code as the others,
and its router has nothing to choose.
"""

from __future__ import annotations

from agent_rl.run.warmstart.run import WarmstartConfig
from agent_rl.run.warmstart.train import StageConfig, TinyMoEShape


def _bench(num_experts: int, moe_top_k: int, expert_width: int) -> WarmstartConfig:
    """A short start: the router must be trained, the policy need not be good."""
    return WarmstartConfig(
        num_demos=20_000,
        dtype="bfloat16",
        shape=TinyMoEShape(
            num_layers=4,
            num_experts=num_experts,
            moe_top_k=moe_top_k,
            expert_width=expert_width,
        ),
        stages=(StageConfig(epochs=3.0, lr=4e-3), StageConfig(epochs=2.3, lr=3e-3)),
    )


RECIPES: dict[str, WarmstartConfig] = {
    "tiny_moe": WarmstartConfig(),
    "bench_moe32": _bench(num_experts=32, moe_top_k=4, expert_width=32),
    "bench_moe8": _bench(num_experts=8, moe_top_k=2, expert_width=64),
    "bench_dense": _bench(num_experts=1, moe_top_k=1, expert_width=128),
}
