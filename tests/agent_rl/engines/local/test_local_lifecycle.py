"""Weights, cancelling, limits and failures: every caller gets an answer or a clear error."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from local_helpers import MakeFolder, ask, build_model, log_softmax, prompt, reference, with_engine
from safetensors.torch import load_file

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.local import LocalEngine
from agent_rl.errors import CapacityError, EngineError
from agent_rl.types import GenerateRequest


def test_new_weights_change_the_answers_and_flush_prefixes_and_rows(
    folder: Path, make_folder: MakeFolder
) -> None:
    other, model = make_folder(seed=5), build_model(5)

    async def work(engine: LocalEngine) -> None:
        old = await engine.generate(ask("s", prompt(1), max_new_tokens=4))
        await engine.load_weights(load_file(other / "model.safetensors"), 3)
        assert (engine.weight_version, engine.num_sessions) == (3, 0)
        longer = np.concatenate([prompt(1), old.token_ids, prompt(2, 4)])
        new = await engine.generate(ask("s", longer, start=0))
        assert (old.weight_versions, new.weight_versions) == ((0,), (3,))
        assert new.cached_tokens == 0
        whole = np.concatenate([longer, new.token_ids])
        logits, rows = reference(model, whole)
        np.testing.assert_array_equal(new.routed_experts, rows[:-1])
        wanted = log_softmax(logits)[np.arange(len(longer) - 1, len(whole) - 1), new.token_ids]
        np.testing.assert_allclose(new.logprobs, wanted, atol=1e-5)

    with_engine(folder, work)


def test_weights_by_module_names_serve_too(folder: Path) -> None:
    weights = dict(build_model(5).state_dict())
    assert any(name.endswith("experts.gate_up_proj") for name in weights)
    assert not any(".experts.0." in name for name in weights)

    async def work(engine: LocalEngine) -> None:
        await engine.load_weights(weights, 1)
        reply = await engine.generate(ask("s", prompt(1)))
        rows = reference(build_model(5), np.concatenate([prompt(1), reply.token_ids]))[1]
        np.testing.assert_array_equal(reply.routed_experts, rows[:-1])

    with_engine(folder, work)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "expert"])
def test_weights_that_do_not_fit_are_refused_and_change_nothing(folder: Path, fault: str) -> None:
    weights = {k: v + 1 for k, v in load_file(folder / "model.safetensors").items()}
    if fault == "missing":
        del weights["model.layers.1.mlp.gate.weight"]
    elif fault == "expert":
        del weights["model.layers.1.mlp.experts.5.up_proj.weight"]
    elif fault == "unknown":
        weights["model.layers.9.mlp.gate.weight"] = torch.zeros(1)
    else:
        weights["model.norm.weight"] = torch.zeros(31)

    async def work(engine: LocalEngine) -> None:
        before = await engine.generate(ask("s", prompt(1)))
        with pytest.raises(EngineError, match="weights do not fit"):
            await engine.load_weights(weights, 1)
        assert engine.weight_version == 0
        await engine.end_session("s")
        after = await engine.generate(ask("s", prompt(1)))
        np.testing.assert_array_equal(before.logprobs, after.logprobs)

    with_engine(folder, work)


def test_weights_are_refused_while_a_request_runs(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")

    async def work(engine: LocalEngine) -> None:
        call = asyncio.create_task(engine.generate(ask("s", prompt(1), max_new_tokens=64, stop=())))
        await asyncio.sleep(0)
        for pause in (0.0, 0.02):  # waiting, then computing
            await asyncio.sleep(pause)
            if not call.done():
                with pytest.raises(EngineError, match="1 running"):
                    await engine.load_weights(weights, 1)
        assert len((await call).token_ids) == 64
        await engine.load_weights(weights, 1)
        assert engine.weight_version == 1

    with_engine(folder, work)


def test_requests_are_refused_while_weights_load(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")

    async def work(engine: LocalEngine) -> None:
        loading = asyncio.create_task(engine.load_weights(weights, 1))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="while weights are loading"):
            await engine.generate(ask("s", prompt(1)))
        await loading
        assert (await engine.generate(ask("s", prompt(1)))).weight_versions == (1,)

    with_engine(folder, work)


@pytest.mark.parametrize("pause", [0.0, 0.03])
def test_cancelling_frees_the_slot_and_lets_the_others_finish(folder: Path, pause: float) -> None:
    weights = load_file(folder / "model.safetensors")

    async def work(engine: LocalEngine) -> None:
        calls = {
            name: asyncio.create_task(
                engine.generate(ask(name, prompt(1), max_new_tokens=80, stop=()))
            )
            for name in ("gone", "stays")
        }
        await asyncio.sleep(pause)
        calls["gone"].cancel()
        with pytest.raises(asyncio.CancelledError):
            await calls["gone"]
        await engine.end_session("gone")  # as the agent does at once
        again = await engine.generate(ask("gone", prompt(3), max_new_tokens=2))
        assert again.cached_tokens == 0
        assert len((await calls["stays"]).token_ids) == 80
        assert engine.num_sessions == 2
        await engine.load_weights(weights, 1)  # nothing counts as running

    with_engine(folder, work)


def test_weights_may_load_right_after_the_last_request_was_cancelled(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        call = asyncio.create_task(engine.generate(ask("s", prompt(1), max_new_tokens=80, stop=())))
        await asyncio.sleep(0.02)
        call.cancel()
        await asyncio.wait({call})
        await engine.load_weights(load_file(folder / "model.safetensors"), 1)
        assert engine.num_sessions == 0

    with_engine(folder, work)


@pytest.mark.parametrize(
    ("request_", "error", "match"),
    [
        (ask("s", prompt(1, 90), max_new_tokens=7), CapacityError, r"90 prompt tokens \+ 7"),
        (ask("s", prompt(1, 0)), EngineError, "0 prompt tokens"),
        (ask("s", prompt(1), max_new_tokens=0), EngineError, "max_new_tokens=0"),
        (ask("s", prompt(1), temperature=-1.0), EngineError, r"temperature=-1\.0"),
        (ask("s", prompt(1), start=13), EngineError, r"got 13, expected 0\.\.12"),
        (ask("s", prompt(1), start=-1), EngineError, "got -1"),
        (ask("s", np.array([1, 64], np.int32)), EngineError, r"got 1\.\.64, expected 0\.\.63"),
    ],
)
def test_requests_that_cannot_be_served_say_why(
    folder: Path, request_: GenerateRequest, error: type[EngineError], match: str
) -> None:
    async def work(engine: LocalEngine) -> None:
        with pytest.raises(error, match=match):
            await engine.generate(request_)
        fits = await engine.generate(ask("s", prompt(1, 90), max_new_tokens=6, stop=()))
        assert len(fits.token_ids) == 6

    with_engine(folder, work)


def test_one_request_a_session_at_a_time(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        first = asyncio.create_task(engine.generate(ask("s", prompt(1))))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="busy"):
            await engine.generate(ask("s", prompt(1)))
        with pytest.raises(EngineError, match="still running"):
            await engine.end_session("s")
        await first
        await engine.end_session("s")
        await engine.end_session("never seen")
        assert engine.num_sessions == 0

    with_engine(folder, work)


def test_an_engine_without_capture_refuses_to_pretend(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        with pytest.raises(EngineError, match="does not capture"):
            await engine.generate(ask("s", prompt(1)))
        reply = await engine.generate(ask("s", prompt(1), start=None))
        assert reply.routed_experts is None

    with_engine(folder, work, capture_routing=False)


def test_a_failing_worker_reaches_every_caller_and_later_ones(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        # A prompt that passes the checks and breaks the forward: an id array of another rank.
        broken = replace(ask("bad", prompt(1)), token_ids=np.ones((3, 2), np.int32))
        requests = [ask("a", prompt(1)), broken, ask("c", prompt(2))]
        results = await asyncio.gather(
            *[engine.generate(r) for r in requests], return_exceptions=True
        )
        for result in results:
            assert isinstance(result, EngineError)
            assert result.__cause__ is not None
        with pytest.raises(EngineError, match="takes no requests"):
            await engine.generate(ask("d", prompt(1)))

    with_engine(folder, work)


def test_closing_fails_what_still_runs(folder: Path) -> None:
    async def work(engine: LocalEngine) -> None:
        call = asyncio.create_task(engine.generate(ask("s", prompt(1), max_new_tokens=80, stop=())))
        await asyncio.sleep(0.01)
        await engine.aclose()
        with pytest.raises(EngineError, match="closed"):
            await call
        await engine.aclose()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(ask("s", prompt(1)))

    with_engine(folder, work)


def test_one_engine_serves_one_event_loop_after_another(folder: Path) -> None:
    engine = LocalEngine(folder, EngineConfig(dtype="float32", max_sessions=4), max_tokens=96)

    async def abandoned() -> None:
        call = engine.generate(ask("s", prompt(1), max_new_tokens=80, stop=()))
        asyncio.get_running_loop().call_later(0.02, asyncio.current_task().cancel)  # type: ignore[union-attr]
        await call

    async def whole() -> list[int]:
        reply = await engine.generate(ask("s", prompt(1)))
        return [reply.cached_tokens, *reply.token_ids.tolist()]

    first = asyncio.run(whole())
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(abandoned())
    second = asyncio.run(whole())
    assert (first[0], second[0]) == (0, 0)
    assert first == second
    asyncio.run(engine.aclose())


def test_worker_threads_leave_the_callers_setting_alone(folder: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:

        async def work(engine: LocalEngine) -> int:
            await engine.generate(ask("s", prompt(1)))
            return torch.get_num_threads()

        assert with_engine(folder, work, num_threads=1) == 2
    finally:
        torch.set_num_threads(before)


def test_other_models_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"expected a folder with config\.json"):
        LocalEngine(tmp_path)
    text = (folder / "config.json").read_text().replace('"qwen3_moe"', '"llama"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(EngineError, match="got model_type='llama'"):
        LocalEngine(tmp_path)
