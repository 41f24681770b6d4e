"""Generated repair tasks (``tasks.kind=repair``), played in sandboxes of this machine."""

from __future__ import annotations

from agent_rl.config.schema import AgentConfig, RunConfig, TasksConfig
from agent_rl.tasks.task_kind import Environments, TaskSets, tool_prompts
from envs.actions import FORMATS, Prompts
from envs.actions.grammars.function_calls import FunctionCallGrammar
from envs.actions.tool_specs import WORKSPACE_TOOLS
from envs.grading.case_runner import CaseRunner
from envs.grading.memo_runner import MemoRunner
from envs.sandbox.choose import choose
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.limits import SandboxLimits
from envs.sandbox.pool import SandboxPool
from envs.swe import SweEnv
from envs.tasks import repair


def load_tasks(config: TasksConfig) -> TaskSets:
    """Generate the tasks of both sides."""
    train = repair.take(config.seed, "train", config.num_train, config.bugs)
    heldout = repair.take(config.seed, config.heldout_split, config.num_heldout, config.bugs)
    return TaskSets([task.to_task() for task in train], [task.to_task() for task in heldout])


def open_environments(config: RunConfig) -> Environments:
    """Start the pool of sandboxes."""
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
    grammar = _grammar(config.agent)
    return Environments(
        lambda task: SweEnv(task, runner, grammar=grammar), shared.clear, pool.close, spec.kind
    )


def episode_prompts(config: RunConfig, issue: str = "") -> Prompts:
    """Return the configured prompts with the tools of the work folder."""
    return tool_prompts(config, issue, WORKSPACE_TOOLS, "the work folder")


def _grammar(agent: AgentConfig) -> FunctionCallGrammar | None:
    """Return function calls for models with a chat template; None is the compact grammar."""
    if agent.renderer == "compact":
        return None
    return FunctionCallGrammar(FORMATS[agent.action_format]())
