"""Rules of tasks, sandboxes, containers and rendering."""

from __future__ import annotations

from collections.abc import Iterator

from agent_rl.config.rules.fault import Fault, Rule, untouched
from agent_rl.config.schema import CHAT_TEMPLATE, IMAGES, MODULE, REPAIR, ROWS, RunConfig
from envs.actions import load_prompts
from envs.errors import TaskError
from envs.sandbox.docker.options import check_network


def _unread(config: RunConfig) -> Iterator[Fault]:
    """Hold to their defaults what only other kinds of tasks read."""
    tasks = config.tasks
    if tasks.kind != "repair":
        yield from untouched("tasks", tasks, REPAIR)
    if tasks.kind != "module":
        yield from untouched("tasks", tasks, MODULE)
    if tasks.kind == "repair":
        yield from untouched("images", config.images, IMAGES, all_but=())
        yield from untouched("tasks", tasks, ROWS)
        yield from untouched("agent", config.agent, IMAGES)
    elif tasks.kind != "module":
        used = ("kind", "num_workers")
        yield from untouched("sandbox", config.sandbox, "other kinds; see images", all_but=used)


def _without_images(config: RunConfig) -> Iterator[Fault]:
    if config.tasks.kind == "module" and not config.tasks.module:
        yield "tasks.module", "got nothing, expected a module of your own (tasks.kind=module)"
    if config.tasks.kind != "repair":
        return
    if config.sandbox.kind == "docker":
        yield "sandbox.kind", "got docker, expected a kind that tasks.kind=repair can use: auto"
    if config.tasks.bugs == "syntax" and config.agent.renderer == "compact":
        yield (
            "tasks.bugs",
            "got syntax, expected token with agent.renderer=compact, whose vocabulary lacks "
            "the words of other bugs",
        )


def _rows(config: RunConfig) -> Iterator[Fault]:
    """Give tasks with images their rows, containers and a chat template."""
    tasks, agent = config.tasks, config.agent
    if tasks.kind in ("repair", "module"):
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
    if agent.renderer != "chat_template":
        yield (
            "agent.renderer",
            f"got {agent.renderer}, expected chat_template for tasks.kind={tasks.kind}",
        )
    if (agent.action_format == "bash_block") != (agent.tools == "shell"):
        needed = "shell" if agent.action_format == "bash_block" else "r2e"
        yield (
            "agent.tools",
            f"got {agent.tools}, expected {needed} with agent.action_format={agent.action_format}",
        )


def _template(config: RunConfig) -> Iterator[Fault]:
    if config.agent.renderer == "compact":
        yield from untouched("agent", config.agent, CHAT_TEMPLATE)
    try:
        load_prompts(config.agent.prompts)
    except TaskError as error:
        yield "agent.prompts", str(error)


def _containers(config: RunConfig) -> Iterator[Fault]:
    images = config.images
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


def _sandbox(config: RunConfig) -> Iterator[Fault]:
    if config.sandbox.kind == "process" and not config.sandbox.allow_unsafe:
        yield (
            "sandbox.kind",
            "got process, which isolates nothing: expected bubblewrap, unshare or auto, "
            "or sandbox.allow_unsafe=true to accept that the policy's code runs as you",
        )


TASK_RULES: tuple[Rule, ...] = (_sandbox, _unread, _without_images, _rows, _template, _containers)
