"""Checks of a completion: it covers what was asked, and its rows are this sequence's."""

from __future__ import annotations

import numpy as np

from agent_rl.errors import EngineError
from agent_rl.types import Completion, GenerateRequest, RoutedRows
from routing_cache import RowLayout
from routing_cache.agreement import MIN_SHARED, Agreement, compare_again
from routing_cache.row_check import expected_rows


def check_completion(request: GenerateRequest, completion: Completion) -> None:
    """Refuse a reply that does not cover exactly what was asked for.

    Rows must be those of ``[start, prompt + N - 1)``, or of more in front when the completion says
    so itself (see ``check_overlap``): nothing is padded, cut or shifted here. None at all pass only
    where the completion says that they were lost.

    Raises:
        EngineError: no token, log-probs of another length, or any other number of rows.
    """
    num_new = len(completion.token_ids)
    where = f"engine {completion.engine!r}, session {request.session_id!r}"
    if num_new == 0 or completion.finish_reason == "abort" or not completion.weight_versions:
        raise EngineError(
            f"{where}: got {num_new} tokens, finish_reason={completion.finish_reason!r}, "
            f"weight_versions={completion.weight_versions}; expected a whole completion"
        )
    if len(completion.logprobs) != num_new or not np.isfinite(completion.logprobs).all():
        raise EngineError(
            f"{where}: got {len(completion.logprobs)} log-probs for {num_new} tokens, or some "
            "not finite; expected one finite value per token"
        )
    start, rows = request.routed_experts_start, completion.routed_experts
    if start is None or (rows is None and completion.rows_lost):
        return
    if 0 <= completion.routed_experts_start < start:
        # A session that moved to another engine: its rows of the whole prompt come again.
        start = completion.routed_experts_start
    expected = expected_rows(len(request.token_ids) + num_new, start)
    got = None if rows is None else len(rows)
    if got != expected or completion.routed_experts_start != start:
        raise EngineError(
            f"{where}: routing rows do not cover the tokens: got {got} rows from "
            f"{completion.routed_experts_start}, expected {expected} from {start}; "
            "check that the engine captures routing and honours the start index"
        )


def check_overlap(
    stored: RoutedRows, num_stored: int, completion: Completion, layout: RowLayout
) -> Agreement:
    """Compare rows that came again with those that are stored: they must be of the same tokens.

    The number of rows only says how many came. A start that is stated wrong, or another request's
    rows, shows in the experts. What differs by rounding passes; the cache counts it.

    Args:
        stored: rows of the sequence so far; ``num_stored`` of them.
        completion: checked by ``check_completion``; its rows ``[R, L or hidden layers, K]``.

    Raises:
        EngineError: too few experts are the same although the same weights chose them.
    """
    start, rows = completion.routed_experts_start, completion.routed_experts
    if rows is None or start >= num_stored:
        return Agreement(0, 1.0, True)
    known, _ = stored.gather(start=start, stop=num_stored)
    found = compare_again(known, rows[: num_stored - start], layout)
    if not found.of_same_tokens and set(stored.weight_versions) == set(completion.weight_versions):
        raise EngineError(
            f"engine {completion.engine!r}: the rows from {start} to {num_stored} came again and "
            f"are of other tokens: got {found.shared:.0%} of the stored experts, expected at least "
            f"{MIN_SHARED:.0%}; it states another start than it used, or mixes up its requests"
        )
    return found
