"""Rules between the keys of tasks, containers and rendering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from agent_rl.config.rules.fault import Fault, Rule, untouched
from agent_rl.config.schema import AgentConfig, ImagesConfig, RunConfig, SandboxConfig, TasksConfig
from agent_rl.tasks.images import ROWS
from envs.actions import load_prompts
from envs.errors import TaskError
from envs.sandbox.docker.options import check_network

_ROW_KEYS = ("rows", "rows_split", "heldout_fraction")
_TEMPLATE_KEYS = ("action_format", "prompts", "observation_role", "on_rewrite")


def _rows(config: RunConfig) -> Iterator[Fault]:
    """Tasks with images need containers and a chat template; the others must not set what is
    theirs, for nobody would read it."""
    tasks, agent = config.tasks, config.agent
    if tasks.kind == "module":
        if not tasks.module:
            yield "tasks.module", "got nothing, expected a module of your own (tasks.kind=module)"
        yield from untouched("tasks", tasks, TasksConfig(), "tasks.kind=repair", ("bugs",))
        return
    yield from untouched("tasks", tasks, TasksConfig(), "tasks.kind=module", ("module",))
    if tasks.kind == "repair":
        yield from untouched("images", config.images, ImagesConfig(), "tasks with images")
        yield from untouched("tasks", tasks, TasksConfig(), "tasks from rows", _ROW_KEYS)
        yield from untouched("agent", agent, AgentConfig(), "tasks with images", ("tools",))
        if config.sandbox.kind == "docker":
            yield "sandbox.kind", "got docker, expected a kind that tasks.kind=repair can use: auto"
        if tasks.bugs == "syntax" and agent.renderer == "compact":
            yield (
                "tasks.bugs",
                "got syntax, expected token with agent.renderer=compact, whose vocabulary lacks "
                "the words of other bugs",
            )
        return
    yield from untouched("tasks", tasks, TasksConfig(), "tasks.kind=repair", ("bugs",))
    if tasks.kind not in ROWS:
        return
    if not tasks.rows:
        yield "tasks.rows", "got nothing, expected a file of rows or the name of a data set"
    if not 0 < tasks.heldout_fraction < 0.5:
        yield (
            "tasks.heldout_fraction",
            f"got {tasks.heldout_fraction}, expected above 0 and below 0.5",
        )
    if config.sandbox.kind != "docker":
        yield (
            "sandbox.kind",
            f"got {config.sandbox.kind}, expected docker: the tasks are in container images",
        )
    defaults = replace(SandboxConfig(), kind=config.sandbox.kind)
    keys = [f.name for f in fields(defaults) if f.name != "num_workers"]
    yield from untouched("sandbox", config.sandbox, defaults, "other kinds; see images", keys)
    if agent.renderer != "chat_template":
        yield "agent.renderer", f"got {agent.renderer}, expected chat_template for tasks.kind"
    if (agent.action_format == "bash_block") != (agent.tools == "shell"):
        needed = "shell" if agent.action_format == "bash_block" else "r2e"
        yield (
            "agent.tools",
            f"got {agent.tools}, expected {needed} with agent.action_format={agent.action_format}",
        )


def _template(config: RunConfig) -> Iterator[Fault]:
    if config.agent.renderer == "compact":
        what = "agent.renderer=chat_template"
        yield from untouched("agent", config.agent, AgentConfig(), what, _TEMPLATE_KEYS)
    try:
        load_prompts(config.agent.prompts)
    except TaskError as error:
        yield "agent.prompts", str(error)


def _containers(config: RunConfig) -> Iterator[Fault]:
    images = config.images
    for name in (
        *("max_pulls", "max_containers", "max_starting", "memory_bytes", "cpus", "max_processes"),
        *("disk_bytes", "max_file_bytes", "shm_bytes", "command_timeout_s", "output_cap_bytes"),
        *("max_chars", "num_validating"),
    ):
        if getattr(images, name) <= 0:
            yield f"images.{name}", f"got {getattr(images, name)}, expected a number above 0"
    for name in ("disk_floor_bytes", "max_prepared"):
        if getattr(images, name) < 0:
            yield f"images.{name}", f"got {getattr(images, name)}, expected 0 or more"
    try:
        check_network(images.network)
    except ValueError as error:
        yield "images.network", str(error)
    # An episode and its grading each hold a container, the second after the first is gone.
    if images.max_containers < config.sandbox.num_workers and config.tasks.kind != "repair":
        yield (
            "images.max_containers",
            f"got {images.max_containers}, expected at least sandbox.num_workers "
            f"({config.sandbox.num_workers})",
        )


TASK_RULES: tuple[Rule, ...] = (_rows, _template, _containers)
