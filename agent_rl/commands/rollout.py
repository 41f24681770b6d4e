"""``agent-rl rollout``: one episode, for reading."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from agent_rl.commands.source import PolicySource, open_source
from agent_rl.commands.terminal import make_console
from agent_rl.errors import ConfigError
from agent_rl.rollout.agent import run_trajectory
from agent_rl.run.interrupt import run_interruptible
from agent_rl.run.parts import Rollout, assemble_rollout
from agent_rl.tasks.kinds import load_tasks
from agent_rl.types import Trajectory
from envs.base import Task
from envs.tasks.write_repository import write_repository


def rollout_command(
    path: Path, overrides: Sequence[str], number: int, seed: int, export: Path | None
) -> None:
    """Play held-out task ``number`` once and show everything about it."""
    console = make_console()
    with open_source(path, overrides, console) as source:
        heldout = load_tasks(source.config.tasks).heldout
        if not 0 <= number < len(heldout):
            raise ConfigError([f"--task: got {number}, expected 0 to {len(heldout) - 1}"])
        task = heldout[number]
        if export is not None and not task.files:
            raise ConfigError([f"--export: got a task whose files are in an image: {task.task_id}"])
        if export is not None:
            commit = write_repository(task, export, hidden_tests=True)
            console.print(f"{export}: commit {commit[:12]}, with the hidden tests", soft_wrap=True)
        run_interruptible(_play(console, source, task, seed))


async def _play(console: Console, source: PolicySource, task: Task, seed: int) -> None:
    rollout = assemble_rollout(source.config, source.policy)
    try:
        (task,) = rollout.environments.admit([task])
        trajectory = await run_trajectory(
            rollout.environments.make(task),
            rollout.engine,
            rollout.routing,
            rollout.renderer,
            source.config.agent,
            group_id="rollout",
            member=0,
            seed=seed,
            executor=rollout.executor,
            temperature=source.config.eval.temperature,
        )
        _show(console, source, task, trajectory, rollout)
    finally:
        await rollout.aclose()


def _show(
    console: Console, source: PolicySource, task: Task, trajectory: Trajectory, rollout: Rollout
) -> None:
    title = Text.assemble((task.task_id, "bold"), f"  policy: {source.description}")
    console.print(title, soft_wrap=True)
    console.print(Panel(task.issue, title="issue", title_align="left"), highlight=False)
    if task.focus_path:
        focus = task.files[task.focus_path].decode(errors="replace")
        console.print(
            Panel(Syntax(focus, "python"), title=Text(task.focus_path), title_align="left")
        )
    for number, turn in enumerate(trajectory.turns, 1):
        console.print(Text.assemble((f"turn {number}", "bold cyan"), f"  {turn.action}"))
        if turn.observation:
            console.print(turn.observation, style="dim", highlight=False)
    patch = trajectory.patch.decode(errors="replace") or "(no change)"
    console.print(Panel(Syntax(patch, "diff"), title="patch", title_align="left"))
    console.print(_facts(trajectory, rollout))


def _facts(trajectory: Trajectory, rollout: Rollout) -> Table:
    table = Table(show_header=False)
    reward = "none" if trajectory.reward is None else f"{trajectory.reward:g}"
    table.add_row("reward", reward)
    table.add_row("ended", f"{trajectory.status}, {trajectory.stop_reason}")
    if trajectory.error:
        table.add_row("error", trajectory.error)
    for key, value in trajectory.details.items():
        table.add_row(key.replace("_", " "), str(value))
    tokens = f"{trajectory.num_tokens}, {trajectory.num_sampled} sampled"
    table.add_row("tokens", tokens)
    requested = ", ".join(str(turn.rows_requested) for turn in trajectory.turns)
    table.add_row("rows fetched per turn", requested)
    for branch in trajectory.branches:
        if branch.routed_experts is not None:
            _, present = branch.routed_experts.gather()
            table.add_row("routing rows", f"{int(present.sum())} of {len(present) - 1}")
    stats = rollout.routing.stats()
    table.add_row("routing cache", f"{stats.held_bytes:,} bytes, {stats.rows_bad} bad rows")
    return table
