"""Keys of the objective: what is refused, what is only advised against."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args, get_type_hints

import pytest

from agent_rl.config.objective import (
    CORRECTION_BOUNDS,
    DEFAULTS,
    advice,
    correction_bounds,
    objective,
)
from agent_rl.config.reading import config_from_dict
from agent_rl.config.rules import check_rules
from agent_rl.config.schema import (
    AlgorithmConfig,
    EngineConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)
from agent_rl.errors import ConfigError
from agent_rl.trainer.advantage import ADVANTAGES
from agent_rl.trainer.losses import LOSSES
from agent_rl.trainer.losses.correction import CORRECTIONS


def faults(routing: dict[str, object] | None = None, **algorithm: object) -> list[str]:
    try:
        config = config_from_dict({"algorithm": algorithm, "routing": routing or {}})
    except ConfigError as error:
        return [problem.split(": ")[1] for problem in error.problems]
    return [key for key, _ in check_rules(config)]


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"])
@pytest.mark.parametrize("replay", ["off", "r2", "r3", "mixed"])
def test_every_loss_goes_with_every_replay_mode(loss: str, replay: str) -> None:
    """But for one: what the old-policy pass chose cannot be replayed where there is none."""
    refused = (loss, replay) == ("sft", "r2")
    assert faults({"replay": replay}, loss=loss) == ["routing.replay"] * refused


def test_the_configuration_names_what_there_is() -> None:
    """A loss, an advantage or a correction is a dict entry; the schema lists the same names."""
    hints = get_type_hints(AlgorithmConfig)
    assert set(get_args(hints["loss"])) == set(LOSSES) == set(DEFAULTS)
    assert set(get_args(get_args(hints["advantage"])[0])) == set(ADVANTAGES)
    assert set(get_args(hints["correction"])) == {"none", *CORRECTIONS}
    assert set(CORRECTIONS) == set(CORRECTION_BOUNDS)


@pytest.mark.parametrize(
    ("loss", "advantage", "reduction", "bounds", "overlong", "rounds"),
    [
        ("grpo", "grpo", "token", (0.2, 0.28), 0.0, 0),
        ("dr_grpo", "dr_grpo", "constant", (0.2, 0.2), 0.0, 0),  # arXiv 2503.20783
        ("dapo", "grpo", "token", (0.2, 0.28), 0.2, 2),  # arXiv 2503.14476, 4.1: 4,096 of 20,480
        ("gspo", "grpo", "sequence", (3e-4, 4e-4), 0.0, 0),  # arXiv 2507.18071, 5.1
        ("cispo", "grpo", "token", (1.0, 4.0), 0.0, 0),  # arXiv 2506.13585: no lower bound
        ("sft", "grpo", "token", (0.0, 0.0), 0.0, 0),
    ],
)
def test_a_loss_alone_brings_the_published_rest_of_its_algorithm(
    loss: str,
    advantage: str,
    reduction: str,
    bounds: tuple[float, float],
    overlong: float,
    rounds: int,
) -> None:
    own = objective(AlgorithmConfig(loss=loss))  # type: ignore[arg-type]
    assert (own.advantage, own.reduction) == (advantage, reduction)
    assert (own.clip_low, own.clip_high) == bounds
    assert (own.overlong_fraction, own.dynamic_sampling_rounds) == (overlong, rounds)


def test_corrections_have_the_published_bounds() -> None:
    """TIS and masked sequences from 2 on, IcePop outside 0.5 to 5."""
    published = {"tis": (0.0, 2.0), "icepop": (0.5, 5.0), "mis": (0.0, 2.0)}
    assert published == CORRECTION_BOUNDS


@pytest.mark.parametrize(
    ("algorithm", "key"),
    [
        ({"clip_low": 1.5}, "clip_low"),
        ({"clip_low": -0.1}, "clip_low"),
        ({"clip_high": -0.1}, "clip_high"),
        ({"overlong_fraction": 1.1}, "overlong_fraction"),
        ({"dynamic_sampling_rounds": -1}, "dynamic_sampling_rounds"),
        ({"kl_weight": -1.0}, "kl_weight"),
        ({"entropy_weight": -1.0}, "entropy_weight"),
        ({"router_consistency_weight": -0.5}, "router_consistency_weight"),
        # keys that the chosen setting would ignore
        ({"loss": "sft", "clip_high": 0.2}, "clip_high"),
        ({"loss": "sft", "correction": "tis"}, "correction"),
        ({"correction_high": 2.0}, "correction_high"),
        ({"correction_low": 0.5}, "correction_low"),
        ({"correction": "tis", "correction_low": 0.5}, "correction_low"),
        ({"correction": "icepop", "correction_low": 5.0}, "correction_high"),
        ({"correction": "mis", "correction_high": 0.0}, "correction_high"),
    ],
)
def test_what_is_out_of_range_or_would_be_ignored_is_refused(
    algorithm: dict[str, object], key: str
) -> None:
    assert faults(**algorithm) == [f"algorithm.{key}"]


@pytest.mark.parametrize("replay", ["off", "r2"])
def test_router_consistency_needs_recorded_rows(replay: str) -> None:
    wanted = ["algorithm.router_consistency_weight"]
    assert faults({"replay": replay}, router_consistency_weight=0.5) == wanted


@pytest.mark.parametrize(("replay", "refused"), [("mixed", 1), ("r3", 1), ("r2", 0), ("off", 0)])
def test_modes_that_replay_rows_need_capture(replay: str, refused: int) -> None:
    config = RunConfig(
        engine=EngineConfig(capture_routing=False),
        routing=RoutingConfig(replay=replay),  # type: ignore[arg-type]
    )
    assert [key for key, _ in check_rules(config)] == ["engine.capture_routing"] * refused


def test_bounds_of_a_correction_are_its_own_unless_set() -> None:
    for name, bounds in CORRECTION_BOUNDS.items():
        config = AlgorithmConfig(correction=name)  # type: ignore[arg-type]
        assert correction_bounds(config) == bounds
    low = AlgorithmConfig(correction="icepop", correction_low=0.9)
    assert correction_bounds(low) == (0.9, 5.0)


@pytest.mark.parametrize(
    ("replay", "correction", "warned"),
    [("r3", "tis", 1), ("mixed", "tis", 1), ("off", "tis", 0), ("r2", "tis", 0), ("r3", "mis", 0)],
)
def test_replay_with_truncated_importance_sampling_is_advised_against(
    replay: str, correction: str, warned: int
) -> None:
    config = RunConfig(
        algorithm=AlgorithmConfig(correction=correction),  # type: ignore[arg-type]
        routing=RoutingConfig(replay=replay),  # type: ignore[arg-type]
    )
    said = advice(config)
    assert len(said) == warned
    assert all("1.69" in text and "algorithm.correction=none" in text for text in said)
    # Beside an update the rollout is of older weights, which replay does not take away.
    assert advice(replace(config, train=TrainConfig(overlap_rollout=True))) == []


@pytest.mark.parametrize(
    ("replay", "max_staleness", "broken"),
    [("r3", 0, True), ("mixed", 0, True), ("r3", 1, False), ("off", 0, False), ("r2", 0, False)],
)
def test_rows_of_a_rollout_beside_the_update_may_be_one_version_old(
    replay: str, max_staleness: int, broken: bool
) -> None:
    config = RunConfig(
        routing=RoutingConfig(replay=replay, max_staleness=max_staleness),  # type: ignore[arg-type]
        train=TrainConfig(overlap_rollout=True),
    )
    assert [key for key, _ in check_rules(config)] == ["routing.max_staleness"] * broken
