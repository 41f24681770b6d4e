"""Rules of the loss, its corrections and what it trains on."""

from __future__ import annotations

from collections.abc import Iterator

from agent_rl.config.objective import correction_bounds, replays_rows
from agent_rl.config.rules.fault import Fault, Rule
from agent_rl.config.schema import RunConfig


def _replay(config: RunConfig) -> Iterator[Fault]:
    mode = config.routing.replay
    if replays_rows(mode) and not config.engine.capture_routing:
        yield (
            "engine.capture_routing",
            f"got false, expected true because routing.replay={mode} replays what the engine "
            "captures; capture it or set routing.replay=off",
        )
    if mode == "r2" and config.algorithm.loss == "sft":
        yield (
            "routing.replay",
            "got r2, expected off, r3 or mixed because algorithm.loss=sft scores no old policy: "
            "nothing would be recorded",
        )
    weight = config.algorithm.router_consistency_weight
    if weight > 0 and not replays_rows(mode):
        yield (
            "algorithm.router_consistency_weight",
            f"got {weight}, expected 0 because routing.replay={mode} hands the trainer no recorded "
            "routing to be consistent with; set routing.replay=r3 or mixed",
        )


def _objective(config: RunConfig) -> Iterator[Fault]:
    """Refuse what the chosen loss would ignore."""
    algorithm = config.algorithm
    if algorithm.loss != "sft":
        return
    for name, value in (("clip_low", algorithm.clip_low), ("clip_high", algorithm.clip_high)):
        if value is not None:
            yield f"algorithm.{name}", f"got {value}, expected null: loss=sft has no ratio"
    if algorithm.correction != "none":
        yield (
            "algorithm.correction",
            f"got {algorithm.correction}, expected none: loss=sft scores no old policy",
        )


def _correction(config: RunConfig) -> Iterator[Fault]:
    algorithm = config.algorithm
    given = {"low": algorithm.correction_low, "high": algorithm.correction_high}
    if algorithm.correction == "none":
        for name, value in given.items():
            if value is not None:
                yield (
                    f"algorithm.correction_{name}",
                    f"got {value}, expected null because algorithm.correction=none",
                )
        return
    if algorithm.correction == "tis" and algorithm.correction_low is not None:
        yield (
            "algorithm.correction_low",
            f"got {algorithm.correction_low}, expected null: tis truncates from above only",
        )
    low, high = correction_bounds(algorithm)
    if not 0 <= low < high:
        yield (
            "algorithm.correction_high",
            f"got {high}, expected a number above algorithm.correction_low ({low}), which is 0 or "
            "more",
        )


def _groups(config: RunConfig) -> Iterator[Fault]:
    group_size = config.algorithm.group_size
    if not 2 <= config.rollout.min_valid_members <= max(2, group_size):
        yield (
            "rollout.min_valid_members",
            f"got {config.rollout.min_valid_members}, "
            f"expected 2 to algorithm.group_size ({group_size})",
        )
    if config.algorithm.groups_per_step > config.tasks.num_train:
        yield (
            "algorithm.groups_per_step",
            f"got {config.algorithm.groups_per_step}, "
            f"expected at most tasks.num_train ({config.tasks.num_train})",
        )


def _optim(config: RunConfig) -> Iterator[Fault]:
    if config.optim.min_lr > config.optim.lr:
        yield (
            "optim.min_lr",
            f"got {config.optim.min_lr}, expected at most optim.lr ({config.optim.lr})",
        )


OBJECTIVE_RULES: tuple[Rule, ...] = (
    _replay,
    _objective,
    _correction,
    _groups,
    _optim,
)
