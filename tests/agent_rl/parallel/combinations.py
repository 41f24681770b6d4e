"""Every parallel layout that is checked, by the number of processes it takes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Combination:
    """Trainer keys that differ from the defaults."""

    name: str
    processes: int
    trainer: dict[str, Any]
    family: str = "qwen3_moe"
    faults: bool = False  # try what only some ranks notice, too
    modes: bool = False  # try the replay modes besides r3, too

    def settings(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


TP = {"tensor_parallel": 2, "sequence_parallel": True}
EP = {"expert_parallel": 2}
EP_GATHER = {"expert_parallel": 2, "token_dispatcher": "allgather"}
PP = {"pipeline_parallel": 2}
VPP = {"pipeline_parallel": 2, "virtual_pipeline": 2}
CP = {"context_parallel": 2}
SHARDED = {"distributed_optimizer": True}

ONE = {"one process": {}}
TWO: dict[str, dict[str, Any]] = {
    "DP": {},
    "DP, distributed optimizer": SHARDED,
    "TP+SP": TP,
    "TP+SP, experts on the same ranks (alltoall)": TP | EP,
    "TP+SP, experts on the same ranks (allgather)": TP | EP_GATHER,
    "EP alltoall": EP,
    "EP allgather": EP_GATHER,
    "EP alltoall, distributed optimizer": EP | SHARDED,
    "PP 1F1B": PP,
    "PP interleaved": VPP,
    "CP zigzag": CP,
    "CP, experts on the same ranks (alltoall)": CP | EP,
}
FOUR: dict[str, dict[str, Any]] = {
    "TP x EP alltoall": TP | EP,
    "TP x EP allgather": TP | EP_GATHER,
    "TP x EP, distributed optimizer": TP | EP | SHARDED,
    "TP x PP": TP | PP,
    "TP x CP": TP | CP,
    "EP x PP": EP | PP,
    "EP x PP interleaved": EP | VPP,
    "EP x CP": EP | CP,
    "PP x CP": PP | CP,
    "PP interleaved x CP": VPP | CP,
    "PP x DP, distributed optimizer": PP | SHARDED,
    "CP x DP, distributed optimizer": CP | SHARDED,
}


# Latent attention has projections of its own and shared experts a path of their own: what splits
# either, and what hands their gradients on, is checked with DeepSeek-V3 too.
LATENT_TWO = {
    name: TWO[name]
    for name in (
        "TP+SP",
        "TP+SP, experts on the same ranks (alltoall)",
        "EP alltoall",
        "PP 1F1B",
        "CP zigzag",
    )
}
LATENT_FOUR = {
    name: FOUR[name]
    for name in (
        "TP x EP alltoall",
        "TP x EP, distributed optimizer",
        "TP x PP",
        "TP x CP",
    )
}


def _crossed(
    layouts: dict[str, dict[str, Any]],
    processes: int,
    recomputes: tuple[str, ...],
    family: str = "qwen3_moe",
) -> list[Combination]:
    title = "" if family == "qwen3_moe" else f"{family}: "
    return [
        Combination(
            f"{title}{name}, {'packed' if packed else 'padded'}, recompute {recompute}",
            processes,
            {**settings, "packed": packed, "recompute": recompute},
            family,
            faults=recompute == "none" and not packed,
            modes=recompute == "full" and packed,
        )
        for name, settings in layouts.items()
        for packed in (False, True)
        for recompute in recomputes
    ]


COMBINATIONS = [
    *_crossed(ONE, 1, ("none", "selective", "full")),
    *_crossed(TWO, 2, ("none", "selective", "full")),
    *_crossed(FOUR, 4, ("none", "full")),
    *_crossed(ONE, 1, ("none", "full"), "deepseek_v3"),
    *_crossed(LATENT_TWO, 2, ("none", "selective", "full"), "deepseek_v3"),
    *_crossed(LATENT_FOUR, 4, ("none", "full"), "deepseek_v3"),
]

# What every run of the suite checks: one of each kind, packed where that is harder.
_QUICK = (
    "TP+SP, packed, recompute full",
    "EP alltoall, padded, recompute none",
    "PP 1F1B, packed, recompute full",
    "PP interleaved, padded, recompute none",
    "CP zigzag, packed, recompute none",
    "deepseek_v3: TP+SP, packed, recompute full",
)
QUICK = [combination for combination in COMBINATIONS if combination.name in _QUICK]
