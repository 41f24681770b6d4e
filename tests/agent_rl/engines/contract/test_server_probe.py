"""Servers that are refused before they are used, by their flags and by their answers."""

from __future__ import annotations

import httpx
import numpy as np
import pytest
from fake_sglang import (
    MODEL,
    FakeSGLang,
    Fault,
    change_meta,
    change_rows,
    true_rows,
)
from http_engine_helpers import FAST, ask, connect, ids, run

from agent_rl.engines.http.transport import HttpTransport
from agent_rl.engines.sglang import SGLangServer
from agent_rl.engines.vllm import VLLMServer
from agent_rl.errors import (
    EngineError,
    EngineSetupError,
)


class Page(httpx.AsyncBaseTransport):
    """What answers at a mistyped address."""

    def __init__(self, response: httpx.Response) -> None:
        self._response = response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return self._response


@pytest.mark.parametrize("text", ["<html></html>", "[]", '{"vllm_config": 1}', "{}"])
def test_what_is_no_engine_is_told_by_its_address(text: str) -> None:
    async def scenario() -> None:
        wire = Page(httpx.Response(200, text=text))
        for server in (
            SGLangServer(HttpTransport("http://other", FAST, wire), MODEL),
            VLLMServer(HttpTransport("http://other", FAST, wire), MODEL),
        ):
            with pytest.raises(EngineError, match=r"http://other|SGLang names no context length"):
                await server.facts()

    run(scenario)


HAZARDS = {
    "enable_hierarchical_cache": True,
    "speculative_algorithm": "EAGLE",
    "disaggregation_mode": "decode",
    "chunked_prefill_size": -1,
    "disable_radix_cache": True,
    "enable_return_routed_experts": False,
}


@pytest.mark.parametrize("flag", HAZARDS)
def test_an_unsafe_server_is_refused_with_what_to_change(flag: str) -> None:
    async def scenario() -> None:
        fake = FakeSGLang(info={flag: HAZARDS[flag]})
        with pytest.raises(EngineSetupError, match=flag.replace("_", "-").removeprefix("enable-")):
            await connect(fake)
        assert "/generate" not in fake.log
        engine = await connect(fake, capture_routing=False)  # without replay it may be used
        assert (await engine.generate(ask(ids(9), start=None))).routed_experts is None

    run(scenario)


PROBE_FAULTS: dict[str, tuple[list[Fault | None], str]] = {
    "the start index is ignored": (
        [None, change_rows(lambda rows: np.concatenate([true_rows(ids(16, 3), 0), rows]))],
        "start index is ignored",
    ),
    "always the same experts": (
        [change_rows(lambda rows: np.broadcast_to([[0, 0], [1, 2], [1, 2]], rows.shape))] * 2,
        "same 2 experts",
    ),
    "a dead head": (
        [change_meta(output_token_logprobs=[[-4.6, 1, None]] * 4)] * 2,
        "output head is dead",
    ),
    "all zeros": ([change_rows(np.zeros_like)] * 2, "repeated or out-of-range"),
}


@pytest.mark.parametrize("what", PROBE_FAULTS)
def test_the_probe_believes_answers_not_flags(what: str) -> None:
    faults, message = PROBE_FAULTS[what]

    async def scenario() -> None:
        with pytest.raises(EngineSetupError, match=message):
            await connect(FakeSGLang(faults=list(faults)))

    run(scenario)
