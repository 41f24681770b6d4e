"""One contract, every engine: embedded, recorded servers, and real ones where asked for."""

from __future__ import annotations

import asyncio

import pytest
from conftest import REAL, RECORD, RECORDINGS, OpenEngine
from contract_cases import CASES

RECORDED = [f"recorded-{kind}" for kind in ("sglang", "vllm")]
ENGINES = ["local", *([] if RECORD else RECORDED), *(f"real-{kind}" for kind in REAL)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("engine", ENGINES)
def test_contract(engine: str, case: str, open_engine: OpenEngine) -> None:
    opening = open_engine(engine, case)  # a server starts here, outside of any event loop

    async def run() -> None:
        async with opening as under_test:
            await CASES[case](under_test)

    asyncio.run(run())


@pytest.mark.parametrize("engine", ENGINES[1:] and RECORDED)
def test_the_recordings_cover_the_contract(engine: str) -> None:
    from wires import load_recording

    if RECORD:
        return
    kind = engine.removeprefix("recorded-")
    assert set(load_recording(RECORDINGS / f"{kind}.json.gz")) == set(CASES)
