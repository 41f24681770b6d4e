"""Rows by mode, flat keys, and what an update changes."""

from dataclasses import replace
from pathlib import Path

import bench_fakes
import numpy as np
import pytest

from agent_rl.bench.r3 import MODES, Measurement, MismatchRow, Played, score_modes
from agent_rl.bench.r3_plots import plot_f_tau, plot_scatter
from agent_rl.bench.r3_policies import ENGINES, Evidence, evidence_json
from agent_rl.bench.r3_update import UpdateRows, measure_update
from agent_rl.trainer.megatron import MegatronTrainer

ROW = MismatchRow(
    "bfloat16", "off", 100, 4e-4, 3e-4, 5e-4, 3e-4, 0.1, 0.01, 0.5, 0.1, 60, 0.1, 0.2, 0.0
)
UPDATE = UpdateRows(0.0, 0.0, 0.02, 0.0, 0.0)


def _measured(dtype: str, replay: str, kl: float) -> Measurement:
    rng = np.random.default_rng(0)
    rollout = -rng.random(100).astype(np.float32)
    train = rollout + 0.3 * rng.standard_normal(100).astype(np.float32)
    row = replace(ROW, engine_dtype=dtype, replay=replay, kl_exact=kl)
    return Measurement(row, rollout, np.minimum(train, 0))


def _evidence() -> Evidence:
    kls = {"off": 4e-4, "r2": 4e-4, "r3": 1e-4, "r3_tis": 1e-4}
    measured = {
        policy: [_measured(dtype, mode, kls[mode]) for dtype in dtypes for mode in MODES]
        for policy, dtypes in ENGINES.items()
    }
    return Evidence(measured, UPDATE)


def test_headline_keys_are_of_the_judged_policy_with_a_bfloat16_engine() -> None:
    flat = evidence_json(_evidence())
    for key in ("flip_rate_off", "kl_off", "kl_r3", "kl_dense", "f2_off", "f2_r3"):
        assert key in flat
    assert flat["kl_off"] == flat["moe32_bfloat16_off_kl_exact"]
    assert flat["kl_r2"] == flat["kl_off"]
    assert flat["kl_r3_over_off"] == pytest.approx(0.25)
    assert flat["update_flip_rate_off"] == 0.02
    assert all(isinstance(value, float | int) for value in flat.values())


def test_pictures_are_written(tmp_path: Path) -> None:
    for name, plot in (("scatter", plot_scatter), ("f_tau", plot_f_tau)):
        plot(_evidence(), tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def _played(trainer: MegatronTrainer, mode: str) -> list[Played]:
    """An engine that agrees with the trainer under ``mode``."""
    samples = bench_fakes.samples()
    scores = trainer.score(samples, "r3" if mode == "r3" else "off", full_logits=True)
    return [
        Played(replace(sample, rollout_logprobs=score.logprobs), score.full_logprobs, i % 2)
        for i, (sample, score) in enumerate(zip(samples, scores, strict=True))
        if score.full_logprobs is not None
    ]


def test_each_mode_scores_with_its_own_routing(tmp_path: Path) -> None:
    """The engine here routed as the rows say: with them the trainer agrees, without it cannot."""
    trainer = MegatronTrainer(bench_fakes.config(), bench_fakes.policy(tmp_path))
    rows = {m.row.replay: m.row for m in score_modes(trainer, "float32", _played(trainer, "r3"))}
    trainer.close()
    assert tuple(rows) == MODES
    assert rows["r3"].kl_exact < 1e-9 < 1e-3 < rows["off"].kl_exact
    assert rows["off"].kl_low <= rows["off"].kl_exact <= rows["off"].kl_high
    assert rows["r3"].flip_rate == 0 < rows["r3"].live_flip_rate
    assert rows["off"].flip_rate == rows["off"].live_flip_rate > 0.5
    assert rows["r2"].kl_exact == rows["off"].kl_exact
    assert rows["r3_tis"].tis_truncated == rows["r3"].tis_truncated == 0
    assert rows["off"].tis_truncated > 0


def test_an_update_flips_live_sets_and_no_replayed_one(tmp_path: Path) -> None:
    config, policy = bench_fakes.config(), bench_fakes.policy(tmp_path)
    config = replace(config, optim=replace(config.optim, lr=0.05))
    trainer = MegatronTrainer(config, policy)
    played = _played(trainer, "off")
    trainer.close()
    update = measure_update(config, policy, played)
    assert update.kl_train_train == 0
    assert update.kl_r2_update_old < 1e-9
    assert update.update_flip_rate_off > 0
    assert update.update_flip_rate_r2 == update.update_flip_rate_r3 == 0
