"""``agent-rl export``: a checkpoint's model as a folder of its own."""

from __future__ import annotations

from pathlib import Path

from agent_rl.commands.source import from_checkpoint
from agent_rl.commands.terminal import make_console
from agent_rl.errors import ConfigError

DTYPES = ("float32", "bfloat16")


def export_command(source: Path, folder: Path, step: int | None, dtype: str | None) -> None:
    """Verify a checkpoint and write its model; raises when either cannot be done.

    The run may go on meanwhile: when it removes the newest checkpoint, the newer one is taken.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError([f"--dtype: got {dtype}, expected one of {', '.join(DTYPES)}"])
    console = make_console()
    from agent_rl.trainer.checkpoint_export import export_model

    def export(checkpoint: Path) -> None:
        num_bytes = export_model(checkpoint, folder, dtype=dtype)
        console.print(f"{checkpoint} → {folder}: {num_bytes:,} bytes of weights", soft_wrap=True)

    from_checkpoint(source, step, console, export)
