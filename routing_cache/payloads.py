"""Reading routing rows out of the replies of SGLang and vLLM.

The engines differ in field name, envelope, dtype, layer axis and in what they do with the start
index and the last row, and most replies carry no shape. Every decoder here works out from the
counts alone which interval a reply covers, and refuses when the counts allow more than one
reading; :mod:`routing_cache.probe` learns the form from a live server instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from routing_cache.errors import PayloadError, RowCountError
from routing_cache.layout import RowLayout, Rows
from routing_cache.payload_arrays import DEFAULT_MAX_BYTES, Dtype, decode_base64, vllm_array
from routing_cache.row_check import expected_rows


@dataclass(frozen=True)
class EngineForm:
    """Form of one server's replies; proven by :func:`routing_cache.probe.probe`."""

    dtype: Dtype
    num_layers: int  # width of the layer axis: all hidden layers or MoE layers
    honours_start: bool  # False: every reply holds all rows from 0
    pads_last_row: bool  # True: a row for the last sampled token, which was never fed

    def start(self, requested: int) -> int:
        """First row of a reply that was asked for from row ``requested`` on."""
        return requested if self.honours_start else 0

    def num_rows(self, num_tokens: int, requested_start: int) -> int:
        """Rows of a reply to a sequence of ``num_tokens``, a padded last one included."""
        return expected_rows(num_tokens, self.start(requested_start)) + self.pads_last_row


@dataclass(frozen=True)
class ReplyRows:
    """Canonical rows ``[R, L, K]`` of tokens ``[start, start + R)``.

    Ids out of range are still in there; :meth:`Session.record` judges the rows.
    """

    rows: Rows
    start: int


def resolve_start(num_rows: int, *, num_tokens: int, requested_start: int) -> int:
    """Tell the first row of a reply of ``num_rows`` rows from the counts alone.

    A sequence of ``num_tokens`` (prompt and completion) has one row fewer: the last sampled token
    was not fed. Servers that know the start index answer with the rest, others with everything.

    Raises:
        RowCountError: the count fits neither.
    """
    suffix, whole = expected_rows(num_tokens, requested_start), expected_rows(num_tokens)
    if num_rows == suffix:
        return requested_start
    if num_rows == whole:
        return 0
    raise RowCountError(
        "the reply holds neither the suffix nor the whole sequence",
        got=f"{num_rows} rows for {num_tokens} tokens",
        expected=f"{suffix} (from {requested_start}) or {whole} (from 0)",
        fix="treat the rows as missing (rows=None) or drop the sample; never pad into shape",
    )


def read_rows(
    array: NDArray[np.integer],
    layout: RowLayout,
    *,
    num_tokens: int,
    requested_start: int,
    form: EngineForm | None = None,
) -> ReplyRows:
    """Read an array ``[R, L or num_hidden_layers, K]``, such as vLLM's in-process output.

    Raises:
        LayoutError, RowCountError: the array is not the reply that was asked for.
    """
    block = layout.canonical(array)
    if form is not None:
        if array.shape[1] != form.num_layers:
            raise PayloadError(
                "the layer axis changed since the probe",
                got=array.shape[1],
                expected=form.num_layers,
            )
        start, expected = form.start(requested_start), form.num_rows(num_tokens, requested_start)
        if len(block) != expected:
            raise RowCountError(
                "the reply's rows do not fit the probed form", got=len(block), expected=expected
            )
        return ReplyRows(block[: expected_rows(num_tokens, start)], start)
    start = resolve_start(len(block), num_tokens=num_tokens, requested_start=requested_start)
    return ReplyRows(block, start)


def read_flat(
    data: bytes,
    layout: RowLayout,
    *,
    num_tokens: int,
    requested_start: int,
    dtype: Dtype = "int32",
    form: EngineForm | None = None,
) -> ReplyRows:
    """Read the rows of little-endian bytes without a shape: SGLang's ``meta_info.routed_experts``.

    Raises:
        PayloadError: no reading, or more than one, fits the byte count.
    """
    item = np.dtype(form.dtype if form is not None else dtype).newbyteorder("<")
    widths = sorted({layout.num_hidden_layers, layout.num_moe_layers})
    if form is not None:
        if form.num_layers not in widths:
            raise PayloadError(
                "the probed form is of another model", got=form.num_layers, expected=widths
            )
        widths = [form.num_layers]
    suffix, whole = expected_rows(num_tokens, requested_start), expected_rows(num_tokens)
    if not data and not suffix:
        # Nothing was fed that is not known already; no width can be told from no bytes.
        empty = np.empty((0, layout.num_moe_layers, layout.moe_top_k), layout.dtype)
        return ReplyRows(empty, requested_start)
    readings: list[tuple[int, int]] = []
    for width in widths:
        row_bytes = width * layout.moe_top_k * item.itemsize
        num_rows, rest = divmod(len(data), row_bytes)
        padded = 1 if form is not None and form.pads_last_row else 0
        if rest == 0 and num_rows - padded in (whole, suffix):
            readings.append((width, num_rows))
    if len(readings) != 1:
        raise PayloadError(
            "the byte count fits no reading of this reply"
            if not readings
            else "the byte count fits more than one reading of this reply",
            got=f"{len(data)} bytes for {num_tokens} tokens from row {requested_start}",
            expected=f"rows of {widths} layers x {layout.moe_top_k} {item.name}",
            fix="check the layer map, moe_top_k and the engine's dtype, or probe the server",
        )
    width, num_rows = readings[0]
    array = np.frombuffer(data, item).reshape(num_rows, width, layout.moe_top_k)
    return read_rows(
        array, layout, num_tokens=num_tokens, requested_start=requested_start, form=form
    )


def read_sglang(
    reply: Mapping[str, object],
    layout: RowLayout,
    *,
    num_tokens: int,
    requested_start: int,
    form: EngineForm | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> ReplyRows:
    """Read the rows of a reply of SGLang's ``/generate`` or one of its OpenAI endpoints.

    Args:
        reply: the parsed JSON (or the engine's own dict).
        num_tokens: prompt and completion tokens together.
        requested_start: what was sent as ``routed_experts_start_len``; 0 where it was not.

    Raises:
        PayloadError: the field is absent, ambiguous or no base64.
        RowCountError, LayoutError: its rows are not the ones asked for.
    """
    data = decode_base64(find_sglang_field(reply), max_bytes)
    return read_flat(
        data, layout, num_tokens=num_tokens, requested_start=requested_start, form=form
    )


def find_sglang_field(reply: Mapping[str, object]) -> str | bytes:
    """Find the base64 text in a reply of any SGLang endpoint.

    Raises:
        PayloadError: absent, or one value for several choices.
    """
    _check_reply(reply)
    choices = reply.get("choices")
    if isinstance(choices, Sequence) and len(cast("Sequence[object]", choices)) > 1:
        raise PayloadError(
            "one routed_experts value for several choices cannot be told apart",
            got=f"{len(cast('Sequence[object]', choices))} choices",
            expected="n=1 on the OpenAI endpoints; /generate supports n>1",
        )
    for holder in _holders(reply):
        value = holder.get("routed_experts")
        if isinstance(value, str | bytes):
            return value
    raise PayloadError(
        "the reply has no routed_experts",
        got=sorted(map(str, reply))[:12],
        expected="meta_info.routed_experts or sglext.routed_experts",
        fix="start SGLang with --enable-return-routed-experts and send "
        "return_routed_experts=true; a streamed reply has it in the last chunk only",
    )


def _check_reply(reply: object) -> None:
    if not isinstance(reply, Mapping):
        raise PayloadError(
            "a reply is a JSON object",
            got=type(reply).__name__,
            expected="one reply; a batch is a list of them",
        )


def _holders(reply: Mapping[str, object]) -> list[Mapping[str, object]]:
    """Every place where some SGLang endpoint puts its extra fields."""
    names = ("meta_info", "sglext", "sgl_ext")
    places: list[object] = [reply.get(name) for name in names]
    choices = reply.get("choices")
    if isinstance(choices, Sequence) and choices and isinstance(choices[0], Mapping):
        first = cast("Mapping[str, object]", choices[0])
        places += [first.get(name) for name in names] + [first]
    return [cast("Mapping[str, object]", p) for p in places if isinstance(p, Mapping)]


def read_vllm(
    reply: Mapping[str, object],
    layout: RowLayout,
    *,
    num_tokens: int,
    requested_start: int,
    form: EngineForm | None = None,
    max_bytes: int = DEFAULT_MAX_BYTES,
) -> ReplyRows:
    """Read a vLLM reply: one array, or ``prompt_routed_experts`` beside ``routed_experts``.

    A value is an array, a nested list, or base64 of an ``.npy`` file. Of an OpenAI reply pass the
    choice. Arrays of different widths are widened, never cast down.

    Raises:
        PayloadError, RowCountError, LayoutError: as :func:`read_sglang`.
    """
    array = vllm_reply_array(reply, layout, max_bytes)
    return read_rows(
        array, layout, num_tokens=num_tokens, requested_start=requested_start, form=form
    )


def vllm_reply_array(
    reply: Mapping[str, object], layout: RowLayout, max_bytes: int = DEFAULT_MAX_BYTES
) -> NDArray[np.integer]:
    """Join all rows of a vLLM reply into one array, prompt first, as a probe needs them.

    Raises:
        PayloadError, LayoutError: no rows, or parts that do not fit each other or the model.
    """
    _check_reply(reply)
    parts = [
        vllm_array(reply[name], max_bytes)
        for name in ("prompt_routed_experts", "routed_experts")
        if reply.get(name) is not None
    ]
    if not parts:
        raise PayloadError(
            "the reply has no routed_experts",
            got=sorted(map(str, reply))[:12],
            expected="routed_experts",
            fix="start vLLM with --enable-return-routed-experts",
        )
    return parts[0] if len(parts) == 1 else _join(parts, layout)


def _join(parts: list[NDArray[np.integer]], layout: RowLayout) -> NDArray[np.integer]:
    """Put arrays behind each other; each is checked in its own dtype before they meet."""
    widths = {part.shape[1:] for part in parts}
    if len(widths) > 1:
        raise PayloadError("prompt and generation rows differ in shape", got=sorted(widths))
    for part in parts:
        layout.select(part[:0])
        layout.require_room(part.dtype)
    return np.concatenate(parts)


def merge_disaggregated(
    prefill: NDArray[np.integer] | None,
    decode: NDArray[np.integer],
    layout: RowLayout,
    *,
    num_prefill_rows: int,
) -> Rows:
    """Join the rows of a prefill/decode-disaggregated reply, ``[len(decode), L, K]``.

    The decode node received the prompt's KV and never ran it, so its first ``num_prefill_rows``
    rows mean nothing: they come from the prefill node, or are missing, never zero.

    Raises:
        RowCountError: the prefill node's rows do not cover the prompt.
    """
    merged = layout.canonical(decode).copy()
    if not 0 <= num_prefill_rows <= len(merged):
        raise RowCountError(
            "the decode reply is shorter than the prompt",
            got=len(merged),
            expected=f"at least {num_prefill_rows}",
        )
    if prefill is None:
        merged[:num_prefill_rows] = layout.missing
        return merged
    rows = layout.canonical(prefill)
    if len(rows) != num_prefill_rows:
        raise RowCountError(
            "the prefill rows do not cover the prompt", got=len(rows), expected=num_prefill_rows
        )
    merged[:num_prefill_rows] = rows
    return merged
