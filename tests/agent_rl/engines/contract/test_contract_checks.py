"""The comparison with transformers itself: it takes a tie either way, and nothing that is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from conftest import Policies
from contract_cases import Reference, UnderTest, prompt_of

from agent_rl.engines.local.local_engine import LocalEngine
from agent_rl.types import Completion, Rows

PROMPT, NEW = prompt_of(20, seed=1), prompt_of(6, seed=2)
WHOLE = np.concatenate([PROMPT, NEW])
FED = len(WHOLE) - 1
Row = np.ndarray  # [K]
FREE: Mapping[tuple[int, int], Row] = {}


def completion_of(reference: Reference, rows: Rows, start: int = 0) -> Completion:
    """What an engine that used these rows would answer when asked for those from ``start``."""
    _, logprobs = reference.forward(WHOLE[:-1], chosen=rows)
    return Completion(
        token_ids=NEW,
        logprobs=logprobs[np.arange(len(PROMPT) - 1, FED), NEW],
        finish_reason="length",
        routed_experts=rows[start:],
        routed_experts_start=start,
        weight_versions=(0,),
        cached_tokens=0,
    )


def own_rows(
    reference: Reference, forced: Mapping[tuple[int, int], Row] = FREE, num_live: int = 0
) -> np.ndarray:
    """What an engine would choose that chooses ``forced`` at some (token, layer).

    The first ``num_live`` tokens are left to the reference, and are -1 here.
    """
    num_layers, top_k = reference.row_shape
    chosen = np.full((FED, num_layers, top_k), -1)
    for _ in range(num_layers + 1):  # a layer follows from those before it
        logits, _ = reference.forward(WHOLE[:-1], chosen=chosen)
        chosen = np.argsort(-logits, axis=2, kind="stable")[..., :top_k]
        for place, row in forced.items():
            chosen[place] = row
        chosen[:num_live] = -1
    return chosen if num_live else chosen.astype(np.uint8)


def under_test(reference: Reference, *, keeps_order: bool = True) -> UnderTest:
    engine = LocalEngine.__new__(LocalEngine)  # never asked for anything
    return UnderTest(engine, reference, reference, keeps_order, block_size=1)


@pytest.fixture
def reference(policies: Policies) -> Reference:
    return policies.reference_before


def test_the_references_own_choice_passes_and_others_do_not(reference: Reference) -> None:
    right = own_rows(reference)
    under_test(reference).check(PROMPT, completion_of(reference, right))
    swapped, wrong, twice = right.copy(), right.copy(), right.copy()
    swapped[9, 2, [2, 3]] = swapped[9, 2, [3, 2]]
    wrong[9, 2, 3] = next(e for e in range(16) if e not in right[9, 2])
    twice[9, 2, 3] = twice[9, 2, 2]
    shifted = np.roll(right, 1, axis=0)
    for rows in (swapped, wrong, twice, shifted, right[:-1], right[:, :2]):
        with pytest.raises((AssertionError, IndexError, ValueError)):
            under_test(reference).check(
                PROMPT, replace(completion_of(reference, right), routed_experts=rows)
            )
    under_test(reference, keeps_order=False).check(PROMPT, completion_of(reference, swapped))
    with pytest.raises(AssertionError):
        under_test(reference, keeps_order=False).check(PROMPT, completion_of(reference, wrong))


def test_log_probs_of_other_experts_are_found(reference: Reference) -> None:
    right = own_rows(reference)
    other = right.copy()
    other[9, 1, 3] = next(e for e in range(16) if e not in right[9, 1])
    told = replace(completion_of(reference, other), routed_experts=right)
    with pytest.raises(AssertionError):
        under_test(reference).check(PROMPT, told)


def with_tie(policies: Policies) -> tuple[Reference, Row, Row]:
    """A reference, and two choices of token 9 in layer 0 whose last experts tie."""
    reference = Reference(policies.before)
    usual = own_rows(reference)[9, 0]
    in_set, outside = int(usual[-1]), next(e for e in range(16) if e not in usual)
    gate = next(m for n, m in reference.model.named_modules() if n.endswith("mlp.gate"))
    weight = gate.get_parameter("weight").data
    weight[outside] = weight[in_set]
    return reference, usual, np.where(usual == in_set, outside, usual)


def test_a_tie_may_be_decided_either_way_and_is_kept_for_the_next_turn(
    policies: Policies,
) -> None:
    reference, usual, tied = with_tie(policies)
    for row in (usual, tied):
        rows = own_rows(reference, {(9, 0): row})
        test = under_test(reference)
        test.check(PROMPT, completion_of(reference, rows))
        np.testing.assert_array_equal(test.known_rows(WHOLE[:-1], 0), rows)


def test_a_lost_cache_may_decide_a_tie_anew_and_nothing_else(policies: Policies) -> None:
    """Rows before ``start`` are not in the reply: those of the turn before, or the live ones."""
    start = 15
    reference, usual, tied = with_tie(policies)
    one, other = (own_rows(reference, {(9, 0): row}) for row in (usual, tied))
    live = own_rows(reference, num_live=start)
    assert not np.array_equal(one[start:], other[start:])  # or nothing below would depend on it
    for before, now in ((one, one), (other, other), (one, live), (other, live)):
        test = under_test(reference)
        test.known.update({(0, WHOLE[: at + 1].tobytes()): before[at] for at in range(start)})
        test.check(PROMPT, completion_of(reference, now, start))
    row = one[9, 1].copy()
    row[3] = next(e for e in range(16) if e not in row)
    wrong = own_rows(reference, {(9, 0): usual, (9, 1): row})
    test = under_test(reference)
    test.known.update({(0, WHOLE[: at + 1].tobytes()): one[at] for at in range(start)})
    with pytest.raises(AssertionError):  # what follows from an expert that nothing allows
        test.check(PROMPT, completion_of(reference, wrong, start))
