"""From a configuration to the parts of a run: one plain dict for each kind of part."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from agent_rl.config.rules.training import refuse, too_few_tasks
from agent_rl.config.schema import RunConfig
from agent_rl.engines.configured import build_engine
from agent_rl.loop import LoopParts
from agent_rl.model.policies import policy_folder
from agent_rl.protocols import Generator, Trainer
from agent_rl.rollout.chat import CompactRenderer, Renderer
from agent_rl.rollout.compact_tokenizer import CompactTokenizer
from agent_rl.rollout.group import CollectProgress, GroupCollector
from agent_rl.tasks.curriculum import Curriculum
from agent_rl.tasks.kinds import Environments, episode_prompts, load_tasks, open_environments
from agent_rl.types import Group
from envs.base import Task
from routing_cache import RoutingCache

log = logging.getLogger(__name__)
OnProgress = Callable[[int, int], None]  # trajectories finished, in total


@runtime_checkable
class CountingEngine(Protocol):
    """An engine that counts what becomes of its requests."""

    def metrics(self) -> dict[str, float]:
        """Counters since the start, by name."""
        ...


@dataclass(frozen=True)
class BatchCollector:
    """Collects one batch of groups at a time; environments share nothing across batches."""

    groups: GroupCollector
    environments: Environments

    async def __call__(self, tasks: Sequence[Task], step: int, first_group: int = 0) -> list[Group]:
        self.environments.begin_batch()
        return await self.groups(tasks, step, first_group)


@dataclass(frozen=True)
class Rollout:
    """The parts that play episodes: an engine, a cache, a renderer and environments."""

    config: RunConfig
    engine: Generator
    routing: RoutingCache
    renderer: Renderer
    environments: Environments
    executor: ThreadPoolExecutor

    def collector(
        self,
        *,
        group_size: int,
        temperature: float,
        on_progress: OnProgress | None = None,
        generator: Generator | None = None,
    ) -> BatchCollector:
        """A collector of groups under the configuration's limits.

        ``generator`` takes the engine's place, to watch what it says.
        """

        def report(progress: CollectProgress) -> None:
            if on_progress is not None:
                on_progress(progress.num_finished, progress.num_total)

        groups = GroupCollector(
            generator=generator or self.engine,
            cache=self.routing if self.config.engine.capture_routing else None,
            renderer=self.renderer,
            agent=self.config.agent,
            rollout=self.config.rollout,
            group_size=group_size,
            make_env=self.environments.make,
            executor=self.executor,
            run_seed=self.config.seed,
            temperature=temperature,
            on_progress=report,
        )
        return BatchCollector(groups, self.environments)

    async def aclose(self) -> None:
        """Give back engine, threads and sandboxes: each, whatever closing another raises."""
        try:
            await self.engine.aclose()
        finally:
            self.executor.shutdown(wait=True)
            self.environments.close()


@dataclass(frozen=True)
class Assembly:
    """All parts of a training run."""

    rollout: Rollout
    loop: LoopParts
    heldout: Sequence[Task]

    def routing_metrics(self) -> dict[str, float]:
        """Return what the cache holds, as metrics."""
        stats = self.loop.routing.stats()
        return {
            "routing_held_bytes": float(stats.held_bytes),
            "routing_disagreements": float(stats.disagreements.differing),
            "routing_bad_rows": float(stats.rows_bad),
        }

    def engine_metrics(self) -> dict[str, float]:
        """Return the counts of served engines since the run's start; none for the embedded one."""
        engine = self.rollout.engine
        return engine.metrics() if isinstance(engine, CountingEngine) else {}

    async def aclose(self) -> None:
        """Give back trainer and rollout, as :meth:`Rollout.aclose` does."""
        try:
            self.loop.trainer.close()
        finally:
            await self.rollout.aclose()


async def collect_heldout(
    rollout: Rollout, heldout: Sequence[Task], on_progress: OnProgress | None = None
) -> list[Group]:
    """Play the held-out tasks with the engine's current weights; seeds do not depend on when."""
    settings = rollout.config.eval
    collector = rollout.collector(
        group_size=settings.samples_per_task,
        temperature=settings.temperature,
        on_progress=on_progress,
    )
    return await collector(heldout, step=0)


def assemble(config: RunConfig, *, on_rollout: OnProgress | None = None) -> Assembly:
    """Build everything ``config`` names. What was built is closed again when something fails."""
    tasks = load_tasks(config.tasks)
    rollout = assemble_rollout(config)
    with ExitStack() as on_failure:
        on_failure.callback(rollout.environments.close)
        on_failure.callback(rollout.executor.shutdown)
        train = rollout.environments.admit(tasks.train)
        heldout = rollout.environments.admit(tasks.heldout[: config.eval.num_tasks])
        refuse(too_few_tasks(config, len(train)))
        trainer = TRAINERS[config.trainer.kind](config, policy_folder(config.policy.path))
        on_failure.pop_all()
    loop = LoopParts(
        config=config,
        curriculum=Curriculum(train, config.algorithm.groups_per_step, config.seed),
        collect=rollout.collector(
            group_size=config.algorithm.group_size,
            temperature=config.sampling.temperature,
            on_progress=on_rollout,
        ),
        engine=rollout.engine,
        trainer=trainer,
        routing=rollout.routing,
    )
    return Assembly(rollout, loop, heldout)


def assemble_rollout(config: RunConfig, policy: Path | None = None) -> Rollout:
    """Engine, cache, renderer and environments; ``policy`` in place of the configured one."""
    folder = policy or policy_folder(config.policy.path)
    renderer = RENDERERS[config.agent.renderer](config, folder)
    environments = open_environments(config)
    with ExitStack() as on_failure:
        on_failure.callback(environments.close)
        engine = build_engine(config, folder)
        on_failure.pop_all()
    routing = RoutingCache(
        engine.row_layout,
        conflict_policy=config.routing.conflict_policy,
        budget_bytes=config.routing.budget_bytes,
    )
    executor = ThreadPoolExecutor(config.sandbox.num_workers, thread_name_prefix="environment")
    return Rollout(config, engine, routing, renderer, environments, executor)


def _megatron_trainer(config: RunConfig, folder: Path) -> Trainer:
    from agent_rl.trainer.workers.start import start_trainer

    return start_trainer(config, folder)


def _compact_renderer(config: RunConfig, folder: Path) -> Renderer:
    return CompactRenderer(CompactTokenizer.load(folder), config.agent.max_observation_tokens)


def _template_renderer(config: RunConfig, folder: Path) -> Renderer:
    from agent_rl.rollout.template import TemplateRenderer

    renderer = TemplateRenderer.load(
        folder,
        config.agent.max_observation_tokens,
        system_prompt=episode_prompts(config).system,
        write_user=lambda issue: episode_prompts(config, issue).user,
        observation_role=config.agent.observation_role,
        on_rewrite=config.agent.on_rewrite,
    )
    for rewrite in renderer.report.rewrites:
        log.warning("the chat template rewrites history; built append-only: %s", rewrite)
    return renderer


TRAINERS: dict[str, Callable[[RunConfig, Path], Trainer]] = {"megatron": _megatron_trainer}
RENDERERS: dict[str, Callable[[RunConfig, Path], Renderer]] = {
    "compact": _compact_renderer,
    "chat_template": _template_renderer,
}
