"""One step under every parallel layout equals one process: gradients, rows, metrics, faults."""

from __future__ import annotations

import pytest
from combinations import COMBINATIONS, QUICK, Combination
from launch_ranks import Launcher, Results
from parallel_data import LENGTHS

from agent_rl.trainer.assignment import plan_micro_batches

GRADIENT_ERROR = 1e-5  # relative, float32
LOGPROB_ERROR = 1e-5  # nats
# An update is read off weights in float32: a change of 1e-4 in a weight of 0.2 keeps four digits.
UPDATE_ERROR = 1e-3


def by_name(combination: Combination) -> str:
    return combination.name


def check(combination: Combination, found: dict, alone: dict) -> None:
    assert found["exact_export"]
    assert found["gradient_error"] <= GRADIENT_ERROR, found["worst"]
    assert found["logprob_error"] <= LOGPROB_ERROR
    assert found["mass_error"] <= 1e-5
    assert found["live_differs"] == 0
    assert found["update_error"] <= UPDATE_ERROR
    assert found["marker_ok"], found["examples"]
    assert found["wrong_sets"] == 0
    assert found["replayed_fraction"] == 1.0
    # Padding a router sees at once is even to within the last row and its sequence's.
    assert found["padding_calls"] > 0
    assert found["padding_excess"] <= 2 * found["padding_calls"]
    assert found["ranks_agree"]
    for which in ("metrics", "second_metrics"):
        assert found[which] == pytest.approx(alone[which], rel=1e-3, abs=1e-5)
    if combination.faults:
        check_faults(found, alone)
    if combination.modes:
        check_modes(found, alone)


def check_faults(found: dict, alone: dict) -> None:
    """Every rank raises what one of them found, nothing moves, and the next step is taken."""
    assert not found["moved_by_a_fault"]
    for damage, endless in found["fault_messages"]:
        assert damage.startswith("ReplayError: sample sample-1: 1 damaged rows, first at token 27")
        assert endless.startswith("TrainerError: the gradient is not finite")
    for few, expected in zip(found["few_metrics"], alone["few_metrics"], strict=True):
        assert few == pytest.approx(expected, rel=1e-3, abs=1e-5)


def check_modes(found: dict, alone: dict) -> None:
    for mode, fraction in (("off", 0.0), ("r2", 1.0), ("mixed", 0.8)):
        assert found["mode_errors"][mode] <= GRADIENT_ERROR, mode
        metrics = found["mode_metrics"][mode]
        assert metrics == pytest.approx(alone["mode_metrics"][mode], rel=1e-3, abs=1e-5)
        assert metrics["replayed_fraction"] == pytest.approx(fraction, abs=0.02)


@pytest.mark.slow
@pytest.mark.megatron
def test_a_layout_of_each_kind_equals_one_process(
    quick_results: Results, launcher: Launcher
) -> None:
    """One test, so that workers that share the suite do not each start the ranks."""
    for combination in QUICK:
        alone = launcher.one_process(combination.family)
        check(combination, quick_results[combination.name], alone)


@pytest.mark.parallel
@pytest.mark.parametrize("combination", COMBINATIONS, ids=by_name)
def test_every_layout_equals_one_process(
    combination: Combination, all_results: Results, launcher: Launcher
) -> None:
    check(combination, all_results[combination.name], launcher.one_process(combination.family))


def test_several_micro_batches_are_in_flight() -> None:
    """What the results are worth for pipelines: even four data-parallel ranks have two each."""
    lengths = [length - 1 for length in LENGTHS]
    for num_ranks, least in ((1, 3), (2, 2)):
        for packed in (False, True):
            plan = plan_micro_batches(
                lengths, token_budget=64, alignment=8, num_ranks=num_ranks, packed=packed
            )
            assert min(sum(1 for batch in batches if batch) for batches in plan) >= least
