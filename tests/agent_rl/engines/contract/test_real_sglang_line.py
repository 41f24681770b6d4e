"""A real SGLang server whose answers get lost or damaged on the way. Only where it is asked for."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path

import httpx
import numpy as np
import orjson
import pytest
from conftest import Policies, StartServer, deployment
from contract_cases import UnderTest, ask, prompt_of
from fake_sglang import Fault, change_meta, hang_up, too_late

from agent_rl.engines.http.http_engine import HttpEngine
from agent_rl.engines.http.server_fleet import DIALECTS
from agent_rl.engines.http.transport import HttpTransport
from agent_rl.errors import EngineReplyError, EngineUnavailableError


class BadLine(httpx.AsyncBaseTransport):
    """The network, with what happens to the answers of ``/generate``: one fault an answer."""

    def __init__(self) -> None:
        self._network = httpx.AsyncHTTPTransport()
        self.faults: list[Fault | None] = []
        self.seen: list[dict[str, object]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await self._network.handle_async_request(request)
        if request.url.path != "/generate":
            return response
        answer = orjson.loads(await response.aread())
        self.seen.append(answer)
        fault = self.faults.pop(0) if self.faults else None
        return httpx.Response(response.status_code, json=answer if fault is None else fault(answer))

    async def aclose(self) -> None:
        await self._network.aclose()


def cut_rows(num_bytes: int) -> Fault:
    def fault(answer: dict[str, object]) -> dict[str, object]:
        rows = base64.b64decode(answer["meta_info"]["routed_experts"])
        return change_meta(routed_experts=base64.b64encode(rows[num_bytes:]).decode())(answer)

    return fault


@pytest.mark.sglang
def test_nothing_is_lost_or_mixed_up_on_a_bad_line(
    policies: Policies, tmp_path: Path, start_server: StartServer
) -> None:
    """Real answers of a real server: lost, late, a row short, and with another request's rows."""
    url = start_server("sglang").process.spec.url  # starts an event loop of its own
    row_bytes = policies.model.layout.num_hidden_layers * policies.model.layout.moe_top_k * 4

    async def scenario() -> None:
        line = BadLine()
        server = DIALECTS["sglang"].connect(HttpTransport(url, wire=line), policies.model)
        engine = await HttpEngine.connect(
            server,
            policies.model,
            deployment("sglang", policies, tmp_path),
            name="sglang",
        )
        loaded = dict(policies.reference_before.model.named_parameters())
        await engine.load_weights({name: p.detach() for name, p in loaded.items()}, 1)
        under_test = UnderTest(
            engine, policies.reference_before, policies.reference_after, True, block_size=1
        )
        other = await engine.generate(ask(prompt_of(60, seed=90), session="other", new=12))
        assert other.routed_experts is not None
        foreign = base64.b64decode(line.seen[-1]["meta_info"]["routed_experts"])
        prompt, have = prompt_of(30, seed=91), 0

        async def turn(fault: Fault | None) -> None:
            """One turn of a conversation; on failure nothing has changed and it may be repeated."""
            nonlocal prompt, have
            line.faults = [fault]
            done = await engine.generate(ask(prompt, session="own", start=have, new=12))
            under_test.check(prompt, done)
            have = len(prompt) + len(done.token_ids) - 1
            prompt = np.concatenate([prompt, done.token_ids, prompt_of(1, seed=92)])

        await turn(None)
        await turn(hang_up)  # asked again by the engine itself: nothing of the answer was seen
        assert engine.stats.resends == 1
        with pytest.raises(EngineUnavailableError):
            await turn(too_late)
        await turn(None)
        with pytest.raises(EngineReplyError, match="byte count"):
            await turn(cut_rows(row_bytes))
        await turn(None)
        rows_asked = len(prompt) + 12 - have  # from the row before the suffix on
        stolen = base64.b64encode(foreign[-rows_asked * row_bytes :]).decode()
        with pytest.raises(EngineReplyError, match="not of this conversation"):
            await turn(change_meta(routed_experts=stolen))
        await turn(None)
        assert engine.stats.bad_replies == 2
        await engine.aclose()

    asyncio.run(scenario())
