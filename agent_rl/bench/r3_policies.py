"""The evidence for R3 on three shipped policies that differ in their routing alone.

``bench_moe32`` (32 experts, top-4) is what is judged, ``bench_moe8`` (8 experts, top-2) a coarse
router, ``bench_dense`` the control: one expert that every token takes, so that nothing can flip and
what is left is the arithmetic of the engine. A float32 engine is the zero control. Depth, width,
attention, data and the feed-forward units that a token uses are the same; the dense policy has as
many *active* parameters as the others, not as many in all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from agent_rl.bench.r3 import Measurement, Played, measure, to_json
from agent_rl.bench.r3_update import UpdateRows, measure_update
from agent_rl.config.schema import AgentConfig, PolicyConfig, RunConfig
from agent_rl.model.policies import policy_folder

JUDGED, CONTROL = "moe32", "dense"
_LOW = ("bfloat16", "fp8_simulated")
ENGINES: Mapping[str, tuple[str, ...]] = {
    JUDGED: (*_LOW, "float32"),
    "moe8": _LOW,
    CONTROL: (*_LOW, "float32"),
}


@dataclass(frozen=True)
class Evidence:
    """Measurements by policy, and the trainer's own two passes on the judged one."""

    measured: Mapping[str, Sequence[Measurement]]
    update: UpdateRows

    def of(self, policy: str, engine_dtype: str, replay: str) -> Measurement:
        return next(
            m
            for m in self.measured[policy]
            if (m.row.engine_dtype, m.row.replay) == (engine_dtype, replay)
        )


def bench_config(policy: str) -> RunConfig:
    """Held-out tasks, eight turns, temperature 1, float32 trainer."""
    return RunConfig(
        name=f"bench-{policy}",
        policy=PolicyConfig(path=f"builtin:bench_{policy}"),
        agent=AgentConfig(max_turns=8, max_tokens=256),
    )


async def measure_policies(
    *, min_tokens: int = 10_000, report: Callable[[str], None] = lambda text: None
) -> Evidence:
    """Play and score every policy with every engine of ``ENGINES``."""
    measured: dict[str, list[Measurement]] = {}
    kept: dict[str, Sequence[Played]] = {}
    for policy, dtypes in ENGINES.items():
        config = bench_config(policy)
        measured[policy] = await measure(
            config,
            policy_folder(config.policy.path),
            engine_dtypes=dtypes,
            min_tokens=min_tokens,
            report=lambda text, name=policy: report(f"{name}: {text}"),
            keep=kept.__setitem__ if policy == JUDGED else _forget,
        )
    report(f"{JUDGED}: one update")
    config = bench_config(JUDGED)
    # The rows' weight version is the trainer's: a fresh trainer of the same weights takes them.
    update = measure_update(config, policy_folder(config.policy.path), kept["bfloat16"])
    return Evidence(measured, update)


def _forget(engine_dtype: str, played: Sequence[Played]) -> None:
    """Only the judged policy's trajectories are needed again."""


def evidence_json(evidence: Evidence) -> dict[str, float]:
    """Flat keys: first those of the judged policy with a bfloat16 engine, then everything.

    ``kl_r3_over_off`` is the bar (at most 0.5); ``kl_r3_over_dense`` says how near replay comes to
    a model without a router. Keys of one measurement: ``<policy>_<engine>_<mode>_<figure>``.
    """
    flat: dict[str, float] = {}
    for mode in ("off", "r2", "r3", "r3_tis"):
        row = evidence.of(JUDGED, "bfloat16", mode).row
        flat |= {
            f"flip_rate_{mode}": row.flip_rate,
            f"kl_{mode}": row.kl_exact,
            f"k3_{mode}": row.kl_k3,
            f"f2_{mode}": row.f_2,
        }
    flat["tokens_with_flip_off"] = evidence.of(JUDGED, "bfloat16", "off").row.tokens_with_flip
    flat["tis_truncated_off"] = evidence.of(JUDGED, "bfloat16", "off").row.tis_truncated
    flat["tis_truncated_r3"] = evidence.of(JUDGED, "bfloat16", "r3").row.tis_truncated
    dense = evidence.of(CONTROL, "bfloat16", "off").row
    flat |= {"kl_dense": dense.kl_exact, "k3_dense": dense.kl_k3, "f2_dense": dense.f_2}
    flat["kl_float32_engine"] = evidence.of(JUDGED, "float32", "off").row.kl_exact
    flat["kl_r3_over_off"] = flat["kl_r3"] / flat["kl_off"]
    flat["kl_r3_over_dense"] = flat["kl_r3"] / flat["kl_dense"]
    flat |= asdict(evidence.update)
    for policy, measured in evidence.measured.items():
        rows = to_json([m.row for m in measured])
        flat |= {f"{policy}_{name}": value for name, value in rows.items()}
    return flat
