"""``agent-rl train``."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import orjson
from rich.console import Console
from rich.table import Table

from agent_rl.commands.terminal import make_console
from agent_rl.config.reading import dump_config, load_config
from agent_rl.config.rules.training import check_training, refuse
from agent_rl.config.schema import RunConfig
from agent_rl.config.suggestions import command_line
from agent_rl.errors import ConfigError
from agent_rl.metrics.display import clock, make_display
from agent_rl.metrics.summary import Summary
from agent_rl.run.interrupt import Interrupted, run_interruptible
from agent_rl.run.resume import MAY_CHANGE
from agent_rl.store.run_folder import (
    RunExistsError,
    RunFolder,
    RunFolderError,
    read_metrics,
    write_aside,
)
from agent_rl.trainer.checkpoint import NO_ROOM, CheckpointStore

_LIVE_ALONE = "  of a few samples, live routers"  # where the engine's rows are not known


def train_command(
    config_path: Path | None,
    overrides: Sequence[str],
    resume: Path | None,
    *,
    other_tasks: bool = False,
) -> None:
    """Start or resume a run, show it, and print what came out.

    A resumed run has its configuration; ``overrides`` may change how it is carried out, and
    ``other_tasks`` lets it go on although its tasks are others by now.
    """
    console = make_console()
    if resume is not None and config_path is not None and "=" in str(config_path):
        config_path, overrides = None, [str(config_path), *overrides]
    if (config_path is None) == (resume is None):
        raise ConfigError(["train: expected either a configuration file or --resume RUN_FOLDER"])
    if resume is not None:
        folder, config = _resumed(resume, overrides)
    else:
        assert config_path is not None
        config = load_config(config_path, overrides)
        refuse(check_training(config))
        folder, config = _new_run(config)
    if (finished := finished_summary(folder, config)) is not None:
        folder.close()
        console.print(
            f"{folder.path} is complete: its {finished.steps} steps are done, nothing to resume",
            soft_wrap=True,
        )
        _show(console, finished, folder)
        return
    from agent_rl.run.training_run import run_training

    try:
        with _disk_full_as_error(folder.path), make_display(console) as display:
            summary = run_interruptible(
                run_training(config, folder, display, other_tasks=other_tasks)
            )
    except (Interrupted, KeyboardInterrupt):  # the second kind is a second Ctrl-C
        if folder.has_begun():
            console.print(f"stopped; continue with: {_resume_line(folder.path)}", soft_wrap=True)
        raise
    finally:
        folder.close()
        if resume is None and not folder.has_begun():
            shutil.rmtree(folder.path, ignore_errors=True)  # nothing came of it: free the name
    _show(console, summary, folder)


@contextmanager
def _disk_full_as_error(run: Path) -> Iterator[None]:
    """Within: no room for metrics, trajectories or plots is told in one line."""
    try:
        yield
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        raise RunFolderError(
            f"no space left ({error}): got={shutil.disk_usage(run).free} bytes free in {run} "
            f"expected=more; free some and continue with: {_resume_line(run)}"
        ) from error


def _resume_line(run: Path) -> str:
    return command_line("agent-rl", "train", "--resume", run)


def _resumed(path: Path, overrides: Sequence[str]) -> tuple[RunFolder, RunConfig]:
    """Open a run again; what ``overrides`` change stays changed."""
    keys = [text.partition("=")[0] for text in overrides]
    if refused := [k for k in keys if k != "train.steps" and not MAY_CHANGE.fullmatch(k)]:
        raise ConfigError([_refusal(path, key) for key in refused])
    folder, config = RunFolder.open(path)
    if not overrides:
        return folder, config
    try:
        config = load_config(folder.config_file, overrides)
        _require_steps_done(folder, config)
        write_aside(folder.config_file, dump_config(config).encode())
    except BaseException:
        folder.close()
        raise
    return folder, config


def _require_steps_done(folder: RunFolder, config: RunConfig) -> None:
    done = len(read_metrics(folder.metrics_file))
    if config.train.steps < done:
        raise ConfigError(
            [
                f"override: train.steps: got {config.train.steps}, expected at least the {done} "
                f"steps that {folder.path} has done"
            ]
        )


def _refusal(path: Path, key: str) -> str:
    text = (
        f"override: {key}: a resumed run cannot change it; expected trainer.* (not dtype), "
        "train.steps, train.save_every, train.keep_last or train.max_wall_s"
    )
    steps = CheckpointStore(path / "checkpoints").steps()
    if not steps:
        return text
    newest = path / "checkpoints" / f"step-{steps[-1]:08d}"
    words = ("agent-rl", "train", path / "config.yaml", f"policy.path={newest}", f"{key}=VALUE")
    return (
        f"{text}; to train on with another value, start a new run from its weights (the "
        f"optimizer starts afresh): {command_line(*words)}"
    )


def finished_summary(folder: RunFolder, config: RunConfig) -> Summary | None:
    """The summary of a run that did all of its steps; None while something is left to do."""
    try:
        summary = Summary.from_json(orjson.loads(folder.summary_file.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None  # not there yet, or damaged: it is written again
    return summary if summary.completed and summary.steps == config.train.steps else None


def _new_run(config: RunConfig) -> tuple[RunFolder, RunConfig]:
    """Open a folder nobody has: ``name``, or ``name-2``, ``name-3`` … when it is taken."""
    number = 1
    while True:
        name = config.name if number == 1 else f"{config.name}-{number}"
        named = replace(config, name=name)
        try:
            return RunFolder.create(named), named
        except RunExistsError:
            number += 1


def _show(console: Console, summary: Summary, folder: RunFolder) -> None:
    table = Table(title=f"{summary.name}: {summary.steps} steps", title_justify="left")
    table.add_column("")
    table.add_column("value", justify="right")
    low, high = summary.resolve_rate_after_low, summary.resolve_rate_after_high
    rows = [
        ("held-out resolve rate before", f"{summary.resolve_rate_before:.3f}"),
        ("held-out resolve rate after", f"{summary.resolve_rate_after:.3f}"),
        ("  95 % interval", f"{low:.3f} to {high:.3f}"),
        ("held-out episodes", str(summary.num_heldout)),
        ("training time", clock(summary.train_wall_s)),
        ("trained tokens replayed", f"{summary.replayed_fraction:.2%}"),
        ("mean k3 KL(rollout ‖ old policy)", f"{summary.kl_mean:.2e}"),
        *_replay_rows(summary),
        *_staleness_rows(summary),
        ("largest F(2)", f"{summary.f2_max:.2e}"),
        ("steps with an alarm", str(summary.num_alarms)),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print(f"curves:      {folder.plots / 'run.png'}", soft_wrap=True)
    console.print(f"summary:     {folder.summary_file}", soft_wrap=True)
    console.print(f"policy:      {folder.checkpoints} (newest)", soft_wrap=True)
    rollout = command_line("agent-rl", "rollout", folder.path, "--task", 0)
    console.print(f"read an episode: {rollout}", soft_wrap=True)


def _staleness_rows(summary: Summary) -> list[tuple[str, str]]:
    """Say that rollouts were of older weights, which is part of the KL above."""
    behind = summary.staleness_mean
    return [("  rollouts behind, weight versions", f"{behind:.2f}")] if behind > 0 else []


def _replay_rows(summary: Summary) -> list[tuple[str, str]]:
    """Say what replay is worth, on the same samples; nothing where the run did not measure it."""
    live = "  of the same samples, live routers" if summary.kl_replay_mean > 0 else _LIVE_ALONE
    rows = (
        ("  of a few samples, replayed", summary.kl_replay_mean),
        (live, summary.kl_no_replay_mean),
    )
    return [(name, f"{value:.2e}") for name, value in rows if value > 0]
