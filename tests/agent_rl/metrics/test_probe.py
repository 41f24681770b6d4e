"""The probe against arrays worked out by hand, and the alarm's levels."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from agent_rl.config.schema import RoutingConfig, RunConfig, TrainConfig
from agent_rl.metrics.alarm import alarm_text, ends_run, f2_alarm
from agent_rl.metrics.probe import probe_mismatch
from agent_rl.types import Floats, TrainSample
from routing_cache import ArrayRows, RowLayout

LAYOUT = RowLayout(num_hidden_layers=3, moe_layers=(0, 2), num_experts=4, moe_top_k=2)


@dataclass(frozen=True)
class Score:
    logprobs: Floats
    live_experts: np.ndarray | None


@dataclass
class NoisyTrainer:
    """Live log-probs are ``live`` off, alone ``alone`` more; the last layer flips on even ids."""

    live: float = 0.2
    alone: float = 0.0
    calls: list[tuple[str, list[str]]] = field(default_factory=list)

    def score(
        self, samples: Sequence[TrainSample], replay: str, *, live_routing: bool = False
    ) -> list[Score]:
        self.calls.append((replay, [s.sample_id for s in samples]))
        gap = self.live if replay == "off" else 0.0
        gap += 0.0 if live_routing or replay == "r3" else self.alone
        scores = []
        for sample in samples:
            rows = np.array([[[1, 0], [2, 3]]] * (len(sample.token_ids) - 1))
            if replay == "off":
                rows[sample.token_ids[:-1] % 2 == 0, 1] = [0, 1]
            values = np.where(sample.loss_mask, sample.rollout_logprobs + gap, 0)
            scores.append(Score(values.astype(np.float32), rows if live_routing else None))
        return scores


def sample(name: str, length: int = 9) -> TrainSample:
    ids = np.arange(length, dtype=np.int32)
    rows = np.array([[[0, 1], [2, 3]]] * (length - 1), np.uint8)
    present = np.arange(length - 1) != 0
    return TrainSample(
        sample_id=name,
        token_ids=ids,
        loss_mask=ids > 4,
        rollout_logprobs=np.where(ids > 4, -1.0, 0.0).astype(np.float32),
        advantages=np.ones(length, np.float32),
        weight_versions=(0,),
        routed_experts=ArrayRows(LAYOUT, ids, rows, present),
    )


def config(replay: str = "r3", count: int = 4) -> RunConfig:
    return RunConfig(
        routing=RoutingConfig(replay=replay),  # type: ignore[arg-type]
        train=TrainConfig(mismatch_samples=count),
    )


SAMPLES = [sample(f"s{i}") for i in range(10)]


def without_rows(whole: TrainSample) -> TrainSample:
    return dataclasses.replace(whole, routed_experts=None)


def test_with_and_without_replay_and_flips_on_present_rows() -> None:
    metrics = probe_mismatch(NoisyTrainer(), SAMPLES, config(), 1, LAYOUT.moe_layers)  # type: ignore[arg-type]
    assert metrics["abs_logprob_gap_no_replay"] == pytest.approx(0.2, rel=1e-5)
    assert metrics["kl_k3_no_replay"] == pytest.approx(np.expm1(0.2) - 0.2, rel=1e-4)
    assert (metrics["f_1_1_no_replay"], metrics["f_1_5_no_replay"]) == (1.0, 0.0)
    assert metrics["kl_k3_replay"] == metrics["kl_k3_self"] == metrics["logprob_gap_max_self"] == 0
    # Of fed tokens 0..7 the row of token 0 is missing; 2, 4 and 6 flip in the last MoE layer.
    assert metrics["router_flip_rate_no_replay/layer_0"] == 0.0
    assert metrics["router_flip_rate_no_replay/layer_2"] == pytest.approx(3 / 7)
    assert metrics["router_flip_rate_no_replay"] == pytest.approx(3 / 14)
    assert metrics["tokens_with_flip_no_replay"] == pytest.approx(3 / 7)


@pytest.mark.parametrize("mode", ["off", "r2", "r3", "mixed"])
def test_what_replay_is_worth_is_measured_whatever_the_run_replays(mode: str) -> None:
    metrics = probe_mismatch(NoisyTrainer(), SAMPLES, config(mode), 1, LAYOUT.moe_layers)  # type: ignore[arg-type]
    assert metrics["kl_k3_replay"] == 0.0 < metrics["kl_k3_no_replay"]
    assert metrics["router_flip_rate_replay/layer_2"] == 0.0
    assert metrics["router_flip_rate_replay"] == metrics["tokens_with_flip_replay"] == 0.0
    assert metrics["router_flip_rate_no_replay"] > 0.0


def test_the_trainer_against_itself_sees_other_micro_batches() -> None:
    trainer, bare = NoisyTrainer(alone=0.5), [without_rows(s) for s in SAMPLES]
    metrics = probe_mismatch(trainer, bare, config("off", 5), 1, (0, 2))  # type: ignore[arg-type]
    assert metrics["abs_logprob_gap_self"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["logprob_gap_max_self"] == pytest.approx(0.5, rel=1e-5)
    assert metrics["f_1_5_self"] == 1.0
    assert "kl_k3_replay" not in metrics
    (_, whole), (_, first), (_, second) = trainer.calls
    assert sorted(first + second) == sorted(whole)
    assert (len(whole), len(first), len(second)) == (5, 3, 2)


def test_the_samples_are_drawn_anew_each_step_and_alike_in_a_resumed_run() -> None:
    chosen = []
    for step in (1, 1, 2):
        trainer = NoisyTrainer()
        probe_mismatch(trainer, SAMPLES, config(), step, (0, 2))  # type: ignore[arg-type]
        chosen.append(trainer.calls[0][1])
    assert chosen[0] == chosen[1] != chosen[2]
    assert len(set(chosen[0])) == 4


@pytest.mark.parametrize("count", [1, 16])
def test_fewer_samples_than_wanted_and_samples_without_rows(count: int) -> None:
    bare = [without_rows(s) for s in SAMPLES[:count]]
    metrics = probe_mismatch(NoisyTrainer(), bare, config("off"), 1, (0, 2))  # type: ignore[arg-type]
    assert np.isfinite(list(metrics.values())).all()
    assert "router_flip_rate_no_replay" not in metrics


@pytest.mark.parametrize(
    ("f2", "level"), [(0.0, 0), (0.0499, 0), (0.05, 1), (0.0999, 1), (0.1, 2), (1.0, 2)]
)
def test_alarm_levels(f2: float, level: int) -> None:
    assert f2_alarm(f2) == level
    text = alarm_text(7, {"f_2": f2, "alarm_f2": float(level), "replayed_fraction": 1.0})
    assert text.startswith(("", "warning: step 7", "ALARM: step 7")[level])
    assert bool(text) == bool(level)
    assert alarm_text(7, {}) == ""  # a step that trained nothing
    assert ends_run({"f_2": f2, "alarm_f2": float(level)}, True) == (level == 2)
    assert not ends_run({"f_2": f2, "alarm_f2": float(level)}, False)
    assert not ends_run({}, True)
