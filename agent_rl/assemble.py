"""From a configuration to the parts of a run: one plain dict for each kind of part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent_rl.config import RunConfig, TasksConfig
from agent_rl.curriculum import Curriculum
from agent_rl.loop import LoopParts
from agent_rl.policies import policy_folder
from agent_rl.protocols import Generator, Trainer
from agent_rl.rollout.chat import CompactRenderer, Renderer
from agent_rl.rollout.compact_tokenizer import CompactTokenizer
from agent_rl.rollout.group import CollectProgress, GroupCollector
from agent_rl.types import Group
from envs.base import Env, Task
from envs.case_runner import CaseRunner
from envs.memo_runner import MemoRunner
from envs.sandbox.choose import choose
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.limits import SandboxLimits
from envs.sandbox.pool import SandboxPool
from envs.swe import SweEnv
from envs.tasks import repair
from routing_cache import RoutingCache

OnProgress = Callable[[int, int], None]  # trajectories finished, in total


@dataclass(frozen=True)
class TaskSets:
    """Disjoint tasks to train on and to measure on."""

    train: Sequence[Task]
    heldout: Sequence[Task]


@dataclass(frozen=True)
class Environments:
    """Makes environments; owns the sandboxes that they share."""

    make: Callable[[Task], Env]
    begin_batch: Callable[[], None]  # what may be shared between episodes ends here
    close: Callable[[], None]
    sandbox_kind: str


@dataclass(frozen=True)
class BatchCollector:
    """Collects one batch of groups at a time; environments share nothing across batches."""

    groups: GroupCollector
    environments: Environments

    async def __call__(self, tasks: Sequence[Task], step: int) -> list[Group]:
        self.environments.begin_batch()
        return await self.groups(tasks, step)


@dataclass(frozen=True)
class Rollout:
    """What plays episodes: an engine, a cache, a renderer and environments."""

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
        await self.engine.aclose()
        self.executor.shutdown(wait=True)
        self.environments.close()


@dataclass(frozen=True)
class Assembly:
    """All parts of a training run."""

    rollout: Rollout
    loop: LoopParts
    heldout: Sequence[Task]

    def routing_metrics(self) -> dict[str, float]:
        """What the cache holds, as metrics."""
        stats = self.loop.routing.stats()
        return {
            "routing_held_bytes": float(stats.held_bytes),
            "routing_disagreements": float(stats.disagreements.differing),
            "routing_bad_rows": float(stats.rows_bad),
        }

    async def aclose(self) -> None:
        self.loop.trainer.close()
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
    tasks = TASK_SOURCES[config.tasks.kind](config.tasks)
    rollout = assemble_rollout(config)
    trainer = TRAINERS[config.trainer.kind](config, policy_folder(config.policy.path))
    algorithm = config.algorithm
    loop = LoopParts(
        config=config,
        curriculum=Curriculum(tasks.train, algorithm.groups_per_step, config.seed),
        collect=rollout.collector(
            group_size=algorithm.group_size,
            temperature=config.sampling.temperature,
            on_progress=on_rollout,
        ),
        engine=rollout.engine,
        trainer=trainer,
        routing=rollout.routing,
    )
    return Assembly(rollout, loop, tasks.heldout[: config.eval.num_tasks])


def assemble_rollout(config: RunConfig, policy: Path | None = None) -> Rollout:
    """Engine, cache, renderer and environments; ``policy`` in place of the configured one."""
    folder = policy or policy_folder(config.policy.path)
    environments = ENVIRONMENTS[config.tasks.kind](config)
    engine = ENGINES[config.engine.kind](config, folder)
    routing = RoutingCache(
        engine.row_layout,
        conflict_policy=config.routing.conflict_policy,
        budget_bytes=config.routing.budget_bytes,
    )
    renderer = RENDERERS[config.agent.renderer](config, folder)
    executor = ThreadPoolExecutor(config.sandbox.num_workers, thread_name_prefix="environment")
    return Rollout(config, engine, routing, renderer, environments, executor)


def _repair_tasks(config: TasksConfig) -> TaskSets:
    train = repair.take(config.seed, "train", config.num_train)
    heldout = repair.take(config.seed, config.heldout_split, config.num_heldout)
    return TaskSets([task.to_task() for task in train], [task.to_task() for task in heldout])


def _repair_environments(config: RunConfig) -> Environments:
    settings = config.sandbox
    limits = SandboxLimits(
        memory_bytes=settings.memory_bytes,
        max_processes=settings.max_processes,
        max_file_bytes=settings.max_file_bytes,
        cpu_s=settings.cpu_s,
    )
    spec = choose(SandboxSpec(settings.kind, limits), allow_unsafe=settings.allow_unsafe)
    pool = SandboxPool(spec, settings.num_workers)
    pool.warm_up()
    cases = CaseRunner(
        pool, timeout_s=settings.timeout_s, output_cap_bytes=settings.output_cap_bytes
    )
    shared = MemoRunner(cases)
    runner = shared if settings.share_identical_runs else cases
    return Environments(lambda task: SweEnv(task, runner), shared.clear, pool.close, spec.kind)


def _local_engine(config: RunConfig, folder: Path) -> Generator:
    from agent_rl.engines.local import LocalEngine

    return LocalEngine(
        folder,
        dtype=config.engine.dtype,
        max_sessions=config.engine.max_sessions,
        max_tokens=config.agent.max_tokens,
        num_threads=config.engine.num_threads,
        capture_routing=config.engine.capture_routing,
    )


def _served_engine(config: RunConfig, folder: Path) -> Generator:
    from agent_rl.engines.server_fleet import ServerFleet, fleet_spec

    return ServerFleet(fleet_spec(config, folder))


def _megatron_trainer(config: RunConfig, folder: Path) -> Trainer:
    from agent_rl.trainer.megatron import MegatronTrainer

    return MegatronTrainer(config, folder)


def _compact_renderer(config: RunConfig, folder: Path) -> Renderer:
    return CompactRenderer(CompactTokenizer.load(folder), config.agent.max_observation_tokens)


TASK_SOURCES: dict[str, Callable[[TasksConfig], TaskSets]] = {"repair": _repair_tasks}
ENVIRONMENTS: dict[str, Callable[[RunConfig], Environments]] = {"repair": _repair_environments}
ENGINES: dict[str, Callable[[RunConfig, Path], Generator]] = {
    "local": _local_engine,
    "sglang": _served_engine,
    "vllm": _served_engine,
}
TRAINERS: dict[str, Callable[[RunConfig, Path], Trainer]] = {"megatron": _megatron_trainer}
RENDERERS: dict[str, Callable[[RunConfig, Path], Renderer]] = {"compact": _compact_renderer}
