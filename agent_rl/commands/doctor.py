"""``agent-rl doctor``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agent_rl.commands.terminal import make_console
from agent_rl.config.reading import load_config, top_level_keys
from agent_rl.doctor.check import Check
from agent_rl.doctor.checks import check_config, check_machine

CheckNeeds = Callable[[Path, Sequence[str]], list[Check]]  # configuration, overrides
_COLOURS = {"ok": "green", "warning": "yellow", "missing": "red"}


def doctor_command(
    config_path: Path | None, overrides: Sequence[str], check: CheckNeeds | None = None
) -> None:
    """Print every check; exit 1 when something that is needed is missing.

    ``check`` finds what the configuration needs; None: it is one of a training run.
    """
    console = make_console()
    checks = check_machine()
    console.print(_table("this machine", checks))
    if config_path is not None:
        needs = (check or _training_needs)(config_path, overrides)
        console.print(_table(str(config_path), needs))
        if not top_level_keys(config_path):
            note = f"note: {config_path} has no keys: all defaults"
            console.print(note, style="yellow", soft_wrap=True)
        checks += needs
    missing = [check.name for check in checks if check.verdict == "missing"]
    if missing:
        console.print(f"missing: {', '.join(missing)}", style="red")
        sys.exit(1)
    console.print("ready" if config_path else "ready: agent-rl train configs/repair_tiny.yaml")


def _training_needs(config_path: Path, overrides: Sequence[str]) -> list[Check]:
    # A policy or a program that is not here is a finding, not a faulty configuration.
    return check_config(load_config(config_path, overrides, on_this_machine=False))


def gpu_doctor_command(*, has_device: bool | None = None) -> None:
    """Check the trainer on this machine's GPU and print what was found; exit 1 unless all is well.

    ``has_device`` None asks torch.
    """
    console = make_console()
    if has_device is None:
        import torch

        has_device = torch.cuda.is_available()
    if not has_device:
        console.print(
            "no CUDA device: nothing to check. Everything runs on CPU here; on a machine with a "
            "GPU install a CUDA build of torch (and transformer-engine for its faster layers).",
            style="red",
        )
        sys.exit(1)
    from agent_rl.doctor.trainer_check import check_trainer

    with console.status("checking the trainer") as status:
        checks = check_trainer(report=lambda text: status.update(escape(text)))
    console.print(_table("the trainer on this GPU", checks))
    failed = [check.name for check in checks if check.verdict == "missing"]
    if failed:
        console.print(f"failed: {', '.join(failed)}", style="red")
        sys.exit(1)
    console.print("replay is exact and gradients are right on this device")


def _table(title: str, checks: Sequence[Check]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("what", "verdict", "detail", "advice"):
        table.add_column(column, overflow="fold")
    for check in checks:
        verdict = Text(check.verdict, _COLOURS[check.verdict])
        table.add_row(check.name, verdict, check.detail, check.advice)
    return table
