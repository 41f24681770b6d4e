"""``agent-rl export``: a checkpoint's model as a folder of its own."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.terminal import make_console
from agent_rl.trainer.checkpoint import MANIFEST, CheckpointStore, damage

DTYPES = ("float32", "bfloat16")


def export_command(source: Path, folder: Path, step: int | None, dtype: str | None) -> None:
    """Verify a checkpoint and write its model; raises when either cannot be done.

    The run may go on meanwhile: when it removes the newest checkpoint, the newer one is taken.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError([f"--dtype: got {dtype}, expected one of {', '.join(DTYPES)}"])
    console = make_console()
    from agent_rl.trainer.export import CheckpointGoneError, export_model

    while True:
        checkpoint = find_checkpoint(source, step, console)
        try:
            num_bytes = export_model(checkpoint, folder, dtype=dtype)
        except CheckpointGoneError as error:
            if step is not None or checkpoint == source:
                raise
            console.print(f"{error}; taking the newest again", style="yellow", soft_wrap=True)
        else:
            break
    console.print(f"{checkpoint} → {folder}: {num_bytes:,} bytes of weights", soft_wrap=True)


def find_checkpoint(source: Path, step: int | None, console: Console) -> Path:
    """``source`` if it is a checkpoint, else that of ``step`` or the newest verified of a run."""
    if step is None and (source / MANIFEST).is_file():
        chosen = source
    elif step is not None:
        chosen = source / "checkpoints" / f"step-{step:08d}"
    else:
        found = CheckpointStore(source / "checkpoints").latest()
        if found is None:
            raise CheckpointError(
                f"nothing to export: got={source} expected=a run folder with a checkpoint, "
                "or a checkpoint"
            )
        for skipped in found.skipped:
            console.print(
                f"{skipped.name} not used: {skipped.reason}", style="yellow", soft_wrap=True
            )
        return found.folder
    reason = damage(chosen)
    if reason is not None:
        known = CheckpointStore(source / "checkpoints").steps()
        raise CheckpointError(f"{chosen} cannot be used: got={reason} expected=one of {known}")
    return chosen
