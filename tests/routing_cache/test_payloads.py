"""Replies of SGLang and vLLM, and the probe that learns a server's form."""

import asyncio
import base64
import io
import json
import os
import tracemalloc
from dataclasses import dataclass, field

import numpy as np
import pytest
from cache_truth import TOY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from routing_cache import LayoutError, PayloadError, RoutingCache, RoutingCacheError, RowCountError
from routing_cache.payload_arrays import decode_base64, read_npy
from routing_cache.payloads import (
    EngineForm,
    read_flat,
    read_rows,
    read_sglang,
    read_vllm,
    vllm_reply_array,
)
from routing_cache.probe import ProbeReply, ProbeRequest, probe, probe_async

FUZZ = int(os.environ.get("ROUTING_CACHE_EXAMPLES", "0")) or 60


def model_rows(num_rows: int) -> np.ndarray:
    """Choices of a causal model: a function of the position. [R, L=3, K=2] int32"""
    p = np.arange(num_rows)[:, None, None]
    layer = np.arange(3)[None, :, None]
    return (p * 3 + layer * 2 + np.array([0, 1])) % 8


def all_layers(rows: np.ndarray) -> np.ndarray:
    """With the dense layer 0 in the axis, all zero as SGLang's buffers start."""
    return np.concatenate([np.zeros_like(rows[:, :1]), rows], axis=1)


def b64(rows: np.ndarray, dtype: str = "<i4") -> str:
    return base64.b64encode(rows.astype(dtype).tobytes()).decode()


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


class TestSglang:
    def generate(self, rows: np.ndarray) -> dict[str, object]:
        """The shape of a real ``/generate`` reply."""
        return {
            "text": "",
            "output_ids": [1, 2],
            "meta_info": {
                "id": "x",
                "finish_reason": {"type": "length", "length": 8},
                "prompt_tokens": 20,
                "completion_tokens": 8,
                "cached_tokens": 0,
                "weight_version": "default",
                "routed_experts": b64(all_layers(rows)),
            },
        }

    def test_a_full_generate_reply(self) -> None:
        reply = read_sglang(self.generate(model_rows(27)), TOY, num_tokens=28, requested_start=0)
        assert reply.start == 0
        np.testing.assert_array_equal(reply.rows, model_rows(27))
        assert reply.rows.dtype == np.uint8

    @pytest.mark.parametrize("honours", [True, False])
    def test_servers_that_know_the_start_index_and_older_ones_that_do_not(
        self, honours: bool
    ) -> None:
        rows = model_rows(27)[19 if honours else 0 :]
        reply = read_sglang(self.generate(rows), TOY, num_tokens=28, requested_start=19)
        assert reply.start == (19 if honours else 0)
        np.testing.assert_array_equal(reply.rows, model_rows(27)[reply.start :])

    @pytest.mark.parametrize("new_tokens", [0, 1])
    def test_one_or_no_new_token(self, new_tokens: int) -> None:
        """Twenty prompt tokens with max_new_tokens 1 and 0: twenty and nineteen rows."""
        rows = model_rows(19 + new_tokens)
        reply = read_sglang(self.generate(rows), TOY, num_tokens=20 + new_tokens, requested_start=0)
        assert len(reply.rows) == 19 + new_tokens

    @pytest.mark.parametrize("place", ["sglext", "choice", "sgl_ext"])
    def test_the_openai_endpoints(self, place: str) -> None:
        field_ = {"routed_experts": b64(all_layers(model_rows(27)))}
        reply: dict[str, object] = {"choices": [{"index": 0, "text": ""}]}
        if place == "sglext":
            reply["sglext"] = field_
        else:
            reply["choices"] = [
                {"index": 0, "text": "", place.replace("choice", "meta_info"): field_}
            ]
        read = read_sglang(reply, TOY, num_tokens=28, requested_start=0)
        np.testing.assert_array_equal(read.rows, model_rows(27))

    def test_one_value_for_two_choices_is_refused(self) -> None:
        reply = {"choices": [{}, {}], "sglext": {"routed_experts": b64(model_rows(27))}}
        with pytest.raises(PayloadError, match="several choices"):
            read_sglang(reply, TOY, num_tokens=28, requested_start=0)

    def test_an_absent_field_names_the_flag(self) -> None:
        for reply in ({"meta_info": {"id": "x"}}, {}, {"choices": []}, {"choices": [{}]}):
            with pytest.raises(PayloadError, match="--enable-return-routed-experts"):
                read_sglang(reply, TOY, num_tokens=28, requested_start=0)

    def test_rows_then_record(self) -> None:
        session = RoutingCache(TOY).session(1)
        reply = read_sglang(self.generate(model_rows(27)), TOY, num_tokens=28, requested_start=0)
        session.record(
            np.arange(28, dtype=np.int32),
            reply.rows,
            start=reply.start,
            weight_version=1,
            num_prefill=20,
        )
        np.testing.assert_array_equal(session.lease().gather()[0][:27], model_rows(27))


class TestFlat:
    def test_bytes_of_the_wrong_width_are_not_more_rows(self) -> None:
        """Six int32 values read as uint8 would give 24 ids."""
        rows = model_rows(1)
        data = rows.astype("<i4").tobytes()
        assert len(data) == 24
        read = read_flat(data, TOY, num_tokens=2, requested_start=0)
        np.testing.assert_array_equal(read.rows, rows)
        with pytest.raises(PayloadError, match="fits no reading"):
            read_flat(data, TOY, num_tokens=2, requested_start=0, dtype="uint8")

    def test_two_possible_readings_are_refused(self) -> None:
        """24 rows of 4 layers are as many bytes as 32 of 3: start 8 of 33 tokens fits both."""
        data = b"\0" * (24 * 4 * 2 * 4)
        with pytest.raises(PayloadError, match="more than one reading"):
            read_flat(data, TOY, num_tokens=33, requested_start=8)
        form = EngineForm("int32", 4, honours_start=True, pads_last_row=False)
        assert read_flat(data, TOY, num_tokens=33, requested_start=8, form=form).start == 8

    @pytest.mark.parametrize("size", [0, 1, 23, 25, 4 * 24])
    def test_other_sizes_are_refused(self, size: int) -> None:
        with pytest.raises(PayloadError):
            read_flat(b"\0" * size, TOY, num_tokens=2, requested_start=0)

    def test_a_padded_last_row_is_dropped_once_it_is_proven(self) -> None:
        form = EngineForm("uint8", 3, honours_start=True, pads_last_row=True)
        data = model_rows(9).astype(np.uint8).tobytes()
        read = read_flat(data, TOY, num_tokens=12, requested_start=3, form=form)
        assert read.start == 3
        np.testing.assert_array_equal(read.rows, model_rows(9)[:8])


class TestVllm:
    def test_the_array_of_the_offline_engine(self) -> None:
        reply = {"routed_experts": model_rows(27).astype(np.uint8)}
        read = read_vllm(reply, TOY, num_tokens=28, requested_start=0)
        np.testing.assert_array_equal(read.rows, model_rows(27))

    @pytest.mark.parametrize(
        "dtypes", [("int16", "int16"), ("uint8", "uint16"), ("uint8", "int16")]
    )
    @pytest.mark.parametrize("wrap", [npy, lambda a: a.tolist(), lambda a: a])
    def test_prompt_and_generation_apart(self, dtypes: tuple[str, str], wrap: object) -> None:
        rows = model_rows(27)
        reply = {
            "prompt_routed_experts": wrap(rows[:20].astype(dtypes[0])),  # type: ignore[operator]
            "routed_experts": wrap(rows[20:].astype(dtypes[1])),  # type: ignore[operator]
        }
        read = read_vllm(reply, TOY, num_tokens=28, requested_start=0)
        np.testing.assert_array_equal(read.rows, rows)

    def test_the_routers_single_npy(self) -> None:
        read = read_vllm(
            {"routed_experts": npy(model_rows(27).astype(np.uint16))},
            TOY,
            num_tokens=28,
            requested_start=0,
        )
        np.testing.assert_array_equal(read.rows, model_rows(27))

    def test_a_row_for_the_last_token_needs_a_probe(self) -> None:
        reply = {"routed_experts": model_rows(28).astype(np.uint8)}
        with pytest.raises(RowCountError):
            read_vllm(reply, TOY, num_tokens=28, requested_start=0)
        form = EngineForm("uint8", 3, honours_start=False, pads_last_row=True)
        read = read_vllm(reply, TOY, num_tokens=28, requested_start=0, form=form)
        assert len(read.rows) == 27

    def test_a_form_that_no_longer_fits_is_refused(self) -> None:
        form = EngineForm("uint8", 4, honours_start=False, pads_last_row=False)
        with pytest.raises(PayloadError, match="changed since the probe"):
            read_rows(model_rows(27), TOY, num_tokens=28, requested_start=0, form=form)
        with pytest.raises(RowCountError, match="probed form"):
            read_rows(all_layers(model_rows(26)), TOY, num_tokens=28, requested_start=0, form=form)

    @pytest.mark.parametrize(
        "value",
        [
            5,
            "!",
            "AAAA",
            [[1, 2], [3]],
            [[[1.5, 2.0]]],
            np.zeros((2, 2), np.uint8),
            [10**30],
            [["a"]],
            np.zeros((1, 3, 2), np.float32),
            np.array([[[True]]]),
        ],
    )
    def test_what_is_no_array_of_rows_is_refused(self, value: object) -> None:
        with pytest.raises(PayloadError):
            read_vllm({"routed_experts": value}, TOY, num_tokens=28, requested_start=0)

    def test_absent_mixed_and_wrapped(self) -> None:
        with pytest.raises(PayloadError, match="--enable-return-routed-experts"):
            read_vllm({"routed_experts": None}, TOY, num_tokens=28, requested_start=0)
        mixed = {
            "prompt_routed_experts": all_layers(model_rows(20)),
            "routed_experts": model_rows(7),
        }
        with pytest.raises(PayloadError, match="differ in shape"):
            read_vllm(mixed, TOY, num_tokens=28, requested_start=0)


class TestNpy:
    def test_objects_are_never_unpickled(self) -> None:
        file = io.BytesIO()
        np.save(file, np.array([{"a": 1}], object), allow_pickle=True)
        with pytest.raises(PayloadError):
            read_npy(file.getvalue())

    @pytest.mark.parametrize(
        "header",
        [
            "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 2, 2)}",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (-2, -2, 2)}",
            "{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}",
            "{'descr': '|u1', 'fortran_order': False, 'shape': (9999999999, 9999999999)}",
            "{'descr': '|u1', 'fortran_order': False}",
            "(" * 3000,
            "{'descr': 'no', 'fortran_order': False, 'shape': (8,)}",
        ],
    )
    def test_lying_headers(self, header: str) -> None:
        text = header.encode() + b"\n"
        data = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 8
        with pytest.raises(PayloadError):
            read_npy(data)

    def test_big_endian_arrays_are_read_right(self) -> None:
        file = io.BytesIO()
        np.save(file, model_rows(5).astype(">i2"))
        np.testing.assert_array_equal(read_npy(file.getvalue()), model_rows(5))


def test_a_payload_above_the_limit_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(PayloadError, match="suffix only"):
        decode_base64("A" * 4000, max_bytes=2000)
    with pytest.raises(PayloadError, match="no base64"):
        decode_base64("€€€€")
    with pytest.raises(PayloadError, match="no base64 text"):
        decode_base64({"a": 1})


REAL = [
    {"meta_info": {"routed_experts": b64(all_layers(model_rows(27)))}},
    {"choices": [{}], "sglext": {"routed_experts": b64(model_rows(27))}},
    {
        "prompt_routed_experts": npy(model_rows(20).astype(np.int16)),
        "routed_experts": npy(model_rows(7).astype(np.uint8)),
    },
    {"routed_experts": npy(model_rows(27).astype(np.uint16))},
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["routed_experts", "meta_info", "choices", "sglext", "prompt_routed_experts"]
            ),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=FUZZ, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_hostile_replies_give_the_packages_own_errors_or_canonical_rows(
    data: st.DataObject,
) -> None:
    if data.draw(st.booleans()):
        reply = data.draw(
            st.dictionaries(
                st.sampled_from(
                    ["routed_experts", "meta_info", "choices", "sglext", "prompt_routed_experts"]
                ),
                JSON,
            )
        )
    else:
        text = bytearray(json.dumps(data.draw(st.sampled_from(REAL))).encode())
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(20, len(text) - 1))
            text[place] = data.draw(st.integers(32, 126))
        try:
            reply = json.loads(text)
        except json.JSONDecodeError:
            return
    tracemalloc.start()
    for read in (read_sglang, read_vllm):
        try:
            rows = read(reply, TOY, num_tokens=28, requested_start=9, max_bytes=1 << 20)
        except RoutingCacheError:
            continue
        assert rows.rows.shape[1:] == (3, 2)
        assert rows.rows.dtype == np.uint8
        assert len(rows.rows) + rows.start == 27
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


@dataclass
class FakeServer:
    """Answers probe requests in one form; deterministic like a greedy engine."""

    form: EngineForm
    flat: bool = False
    zero: bool = False
    shifted: bool = False
    asked: list[ProbeRequest] = field(default_factory=list)

    def __call__(self, request: ProbeRequest) -> ProbeReply:
        self.asked.append(request)
        new = tuple(range(request.max_new_tokens))
        total = len(request.token_ids) + len(new)
        start = request.start if self.form.honours_start else 0
        rows = model_rows(total + 2)
        if self.shifted and request.start:
            rows = rows[2:]
        rows = rows[start : total - 1 + self.form.pads_last_row]
        if self.zero:
            rows = np.zeros_like(rows)
        if self.form.num_layers == 4:
            rows = all_layers(rows)
        array = rows.astype(self.form.dtype)
        return ProbeReply(new, array.tobytes() if self.flat else array)


FORMS = [
    EngineForm(dtype, layers, honours, pads)  # type: ignore[arg-type]
    for dtype in ("int32", "uint8", "int16", "uint16")
    for layers in (3, 4)
    for honours in (True, False)
    for pads in (True, False)
]
PROMPT = list(range(100, 111))


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_probe_finds_the_form_of_arrays(form: EngineForm) -> None:
    server = FakeServer(form)
    assert probe(server, TOY, PROMPT) == form
    assert [request.start for request in server.asked] == [0, 9, 0]


@pytest.mark.parametrize("form", [f for f in FORMS if f.dtype in ("int32", "uint8")], ids=str)
def test_the_probe_finds_the_form_of_bytes_without_a_shape(form: EngineForm) -> None:
    assert probe(FakeServer(form, flat=True), TOY, PROMPT) == form


def test_the_probe_reads_signed_ids_without_a_dtype_as_unsigned() -> None:
    """Ids in range read alike either way."""
    form = EngineForm("int16", 3, True, False)
    found = probe(FakeServer(form, flat=True), TOY, PROMPT)
    assert found == EngineForm("uint16", 3, True, False)


@pytest.mark.parametrize(
    ("server", "match"),
    [
        (FakeServer(EngineForm("int32", 4, True, False), zero=True), "no known form"),
        (FakeServer(EngineForm("int32", 4, True, False), shifted=True), "not the full reply"),
    ],
    ids=["all experts zero", "start counted differently"],
)
def test_the_probe_refuses_meaningless_rows(server: FakeServer, match: str) -> None:
    with pytest.raises(PayloadError, match=match):
        probe(server, TOY, PROMPT)


def test_the_probe_refuses_other_shapes_and_short_prompts() -> None:
    def wrong(request: ProbeRequest) -> ProbeReply:
        return ProbeReply((1, 2, 3), np.zeros((3, 5, 2), np.uint8))

    def narrow(request: ProbeRequest) -> ProbeReply:
        return ProbeReply((1, 2, 3), b"\0")

    for ask in (wrong, narrow):
        with pytest.raises(PayloadError, match="no known form"):
            probe(ask, TOY, PROMPT)
    with pytest.raises(PayloadError, match="too few"):
        probe(wrong, TOY, PROMPT[:5])


def test_the_probe_works_from_asyncio() -> None:
    form = EngineForm("uint8", 3, True, False)
    server = FakeServer(form)

    async def ask(request: ProbeRequest) -> ProbeReply:
        await asyncio.sleep(0)
        return server(request)

    assert asyncio.run(probe_async(ask, TOY, PROMPT)) == form


def test_a_split_reply_becomes_one_array_for_the_probe() -> None:
    rows = model_rows(9).astype(np.uint8)
    reply = {"prompt_routed_experts": npy(rows[:7]), "routed_experts": npy(rows[7:])}
    np.testing.assert_array_equal(vllm_reply_array(reply, TOY), rows)
    with pytest.raises(LayoutError):
        vllm_reply_array({"prompt_routed_experts": rows[:, :2], "routed_experts": rows[:, :2]}, TOY)
