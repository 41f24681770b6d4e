"""Probe that learns from a live server in which form it sends routing rows.

Three short greedy requests with sizes chosen so that no two forms give the same byte counts. What
is left standing must be a single form; otherwise the probe refuses, because a wrong guess shifts
every row without an error.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from routing_cache.errors import LayoutError, PayloadError
from routing_cache.layout import RowLayout
from routing_cache.payload_arrays import Dtype
from routing_cache.payloads import EngineForm
from routing_cache.row_check import check_rows

_DTYPES: tuple[Dtype, ...] = ("int32", "uint8", "uint16", "int16", "int8", "int64")
_SIGNED_TWINS = ("int8", "int16")
_NUM_NEW_TOKENS = 3
_NUM_EXTRA_TOKENS = 4


class ProbeRequest(NamedTuple):
    """Generate greedily from ``token_ids`` and return routing rows from ``start`` on."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    start: int


@dataclass(frozen=True)
class ProbeReply:
    """``payload``: the decoded base64 of SGLang (bytes, no shape), or vLLM's array."""

    new_token_ids: tuple[int, ...]
    payload: bytes | NDArray[np.integer]


def probe(
    ask: Callable[[ProbeRequest], ProbeReply], layout: RowLayout, token_ids: Sequence[int]
) -> EngineForm:
    """Probe a server through ``ask``.

    Args:
        token_ids: at least 11 ordinary token ids to build prompts from.

    Raises:
        PayloadError: no form, or more than one, explains what the server answered; or its rows
            are meaningless (all experts equal, ids out of range, rows that do not line up).
    """
    steps = _steps(layout, token_ids)
    request = next(steps)
    while True:
        try:
            request = steps.send(ask(request))
        except StopIteration as done:
            return done.value


async def probe_async(
    ask: Callable[[ProbeRequest], Awaitable[ProbeReply]],
    layout: RowLayout,
    token_ids: Sequence[int],
) -> EngineForm:
    """:func:`probe` for an asynchronous ``ask``."""
    steps = _steps(layout, token_ids)
    request = next(steps)
    while True:
        reply = await ask(request)
        try:
            request = steps.send(reply)
        except StopIteration as done:
            return done.value


class _Seen(NamedTuple):
    request: ProbeRequest
    reply: ProbeReply

    @property
    def num_tokens(self) -> int:
        return len(self.request.token_ids) + len(self.reply.new_token_ids)


def _steps(
    layout: RowLayout, token_ids: Sequence[int]
) -> Generator[ProbeRequest, ProbeReply, EngineForm]:
    ids = tuple(int(token) for token in token_ids)
    if len(ids) < 7 + _NUM_EXTRA_TOKENS:
        raise PayloadError("too few token ids to probe with", got=len(ids), expected="11 or more")
    first = ProbeRequest(ids[:7], _NUM_NEW_TOKENS, 0)
    seen = [_Seen(first, (yield first))]
    # The second turn: the last sampled token has no row yet, so its row is the first wanted.
    prompt = first.token_ids + seen[0].reply.new_token_ids + ids[7 : 7 + _NUM_EXTRA_TOKENS]
    start = seen[0].num_tokens - 1
    for request in (
        ProbeRequest(prompt, _NUM_NEW_TOKENS, start),
        ProbeRequest(prompt, _NUM_NEW_TOKENS, 0),
    ):
        seen.append(_Seen(request, (yield request)))
    forms = [form for form in _candidates(layout) if all(_explains(form, layout, s) for s in seen)]
    if len(forms) != 1:
        raise PayloadError(
            "the server's replies fit no known form"
            if not forms
            else "the server's replies fit more than one form",
            got=forms or [_describe(s) for s in seen],
            expected="exactly one",
            fix="check the layer map and moe_top_k against the served model, and that the server "
            "returns routed experts",
        )
    _check_alignment(forms[0], layout, seen[1], seen[2])
    return forms[0]


def _candidates(layout: RowLayout) -> list[EngineForm]:
    widths = sorted({layout.num_hidden_layers, layout.num_moe_layers})
    return [
        EngineForm(*choice) for choice in product(_DTYPES, widths, (True, False), (False, True))
    ]


def _rows_of(form: EngineForm, layout: RowLayout, seen: _Seen) -> NDArray[np.integer] | None:
    """Read the reply's array under ``form``; None where it cannot be of that form."""
    num_rows = form.num_rows(seen.num_tokens, seen.request.start)
    shape = (num_rows, form.num_layers, layout.moe_top_k)
    payload = seen.reply.payload
    if isinstance(payload, np.ndarray):
        return payload if payload.shape == shape and payload.dtype.name == form.dtype else None
    item = np.dtype(form.dtype).newbyteorder("<")
    if form.dtype in _SIGNED_TWINS:
        return None  # without a dtype the unsigned one of that width reads the same ids
    if len(payload) != int(np.prod(shape)) * item.itemsize:
        return None
    return np.frombuffer(payload, item).reshape(shape)


def _explains(form: EngineForm, layout: RowLayout, seen: _Seen) -> bool:
    array = _rows_of(form, layout, seen)
    if array is None:
        return False
    try:
        rows = layout.canonical(array)
    except LayoutError:
        return False
    fed = rows[: len(rows) - form.pads_last_row]
    # The same set for every token and layer is a constant, not a router; it would also line up
    # with itself at any start.
    sets = np.sort(fed, axis=2)
    varied = layout.num_experts == layout.moe_top_k or bool((sets != sets[:1, :1]).any())
    return varied and check_rows(fed, layout).all_good


def _check_alignment(form: EngineForm, layout: RowLayout, suffix: _Seen, full: _Seen) -> None:
    """Refuse a suffix that is not the full reply from the start index on, over the prompt."""
    part, whole = _rows_of(form, layout, suffix), _rows_of(form, layout, full)
    assert part is not None
    assert whole is not None
    start = form.start(suffix.request.start)
    count = len(suffix.request.token_ids) - start
    left = np.sort(layout.canonical(part[:count]), axis=2)
    right = np.sort(layout.canonical(whole[start : start + count]), axis=2)
    same = float((left == right).all(axis=2).mean())
    if same < 0.5:
        raise PayloadError(
            "the rows asked for from a start index are not the full reply's rows from there on",
            got=f"{same:.0%} of the sets equal",
            expected="the same prompt rows",
            fix="the server counts the start index differently; ask for full replies instead",
        )


def _describe(seen: _Seen) -> str:
    payload = seen.reply.payload
    size = f"{payload.dtype} {payload.shape}" if isinstance(payload, np.ndarray) else len(payload)
    return f"{seen.num_tokens} tokens from {seen.request.start}: {size}"
