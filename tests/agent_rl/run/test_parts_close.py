"""Whatever raises while a run is taken down, everything that it holds is given back."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from loop_fakes import FakeTrainer

from agent_rl.config.schema import RunConfig
from agent_rl.engines.scripted import ScriptedGenerator
from agent_rl.errors import EngineError, TrainerError
from agent_rl.loop import LoopParts
from agent_rl.rollout.chat import CompactRenderer
from agent_rl.rollout.compact_tokenizer import build_compact_tokenizer
from agent_rl.run.parts import Assembly, Rollout
from agent_rl.tasks import Environments
from agent_rl.tasks.curriculum import Curriculum
from envs.base import Env, Task
from routing_cache import RoutingCache


class Engine(ScriptedGenerator):
    async def aclose(self) -> None:
        raise EngineError("the server does not stop")


class Trainer(FakeTrainer):
    def close(self) -> None:
        raise TrainerError("a rank does not end")


def no_env(task: Task) -> Env:
    raise AssertionError("nothing is played here")


def test_sandboxes_are_closed_when_engine_and_trainer_do_not() -> None:
    closed: list[str] = []
    engine = Engine(lambda request, turn: np.array([1], np.int32))
    environments = Environments(no_env, lambda: None, lambda: closed.append("sandboxes"), "none")
    renderer = CompactRenderer(build_compact_tokenizer(["a . b"]), 16)
    routing, config = RoutingCache(engine.row_layout), RunConfig()
    rollout = Rollout(config, engine, routing, renderer, environments, ThreadPoolExecutor(1))
    loop = LoopParts(
        config=config,
        curriculum=Curriculum([], 1, seed=0),
        collect=rollout.collector(group_size=1, temperature=1.0),
        engine=engine,
        trainer=Trainer(),
        routing=routing,
    )
    with pytest.raises(EngineError) as caught:
        asyncio.run(Assembly(rollout, loop, []).aclose())
    assert isinstance(caught.value.__context__, TrainerError)
    assert closed == ["sandboxes"]
    with pytest.raises(RuntimeError):
        rollout.executor.submit(print)
    quiet = replace(rollout, engine=ScriptedGenerator(lambda r, t: np.array([1], np.int32)))
    asyncio.run(quiet.aclose())
    assert closed == ["sandboxes"] * 2
