"""The source of ``eval``, ``rollout``, ``bench`` and ``export``: a run, checkpoint or config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from agent_rl.config.reading import load_config
from agent_rl.config.schema import RunConfig
from agent_rl.errors import CheckpointError, ConfigError
from agent_rl.model.policies import policy_folder
from agent_rl.trainer.checkpoint import MANIFEST, CheckpointStore, damage
from agent_rl.trainer.checkpoint_reading import CheckpointGoneError, held

_T = TypeVar("_T")


@dataclass(frozen=True)
class PolicySource:
    """A configuration and the policy to play it with."""

    config: RunConfig
    policy: Path
    description: str


@contextmanager
def open_source(
    path: Path, overrides: Sequence[str], console: Console, step: int | None = None
) -> Iterator[PolicySource]:
    """A run's checkpoint (the newest verified, or that of ``step``), or a config's own policy.

    The policy's files stay until the block ends, also when the run goes on and removes the
    checkpoint. Raises ``CheckpointError`` for a step that is absent or damaged, ``ConfigError``
    otherwise.
    """
    if not path.exists():
        raise ConfigError(
            [f"{path}: no such file or folder (expected a run folder or a YAML config)"]
        )
    if path.is_dir() and not (path / "config.yaml").is_file():
        raise ConfigError([f"{path}: no run folder: expected config.yaml in it, or a YAML config"])
    if not path.is_dir():
        config = load_config(path, overrides)
        yield PolicySource(config, policy_folder(config.policy.path), config.policy.path)
        return
    config = load_config(path / "config.yaml", overrides)
    with ExitStack() as stack:
        policy = from_checkpoint(path, step, console, lambda c: stack.enter_context(held(c)))
        number = int(policy.name.split("-")[1])  # step-N, or .replaced-N-PID
        yield PolicySource(config, policy, f"{path}, step {number}")


def from_checkpoint(
    source: Path, step: int | None, console: Console, take: Callable[[Path], _T]
) -> _T:
    """Return what ``take`` makes of a checkpoint of ``source``, see :func:`find_checkpoint`.

    ``take`` raises ``CheckpointGoneError`` when a run that goes on has removed the checkpoint in
    the meantime; then the newer one is taken, unless this very one was asked for.
    """
    while True:
        checkpoint = find_checkpoint(source, step, console)
        try:
            return take(checkpoint)
        except CheckpointGoneError as error:
            if step is not None or checkpoint == source:
                raise
            console.print(f"{error}; taking the newest again", style="yellow", soft_wrap=True)


def find_checkpoint(source: Path, step: int | None, console: Console) -> Path:
    """``source`` if it is a checkpoint, else that of ``step`` or the newest verified of a run.

    Says which newer ones were passed over. Raises ``CheckpointError``.
    """
    store = CheckpointStore(source / "checkpoints")
    if step is None and (source / MANIFEST).is_file():
        chosen = source
    elif step is not None:
        chosen = source / "checkpoints" / f"step-{step:08d}"
    else:
        found = store.latest()
        if found is None:
            raise CheckpointError(
                f"{source} has no checkpoint yet: got=none expected=a run folder with at least one"
            )
        for skipped in found.skipped:
            console.print(
                f"{skipped.name} not used: {skipped.reason}", style="yellow", soft_wrap=True
            )
        return found.folder
    reason = damage(chosen) if chosen.is_dir() else "no such checkpoint"
    if reason is not None:
        known = store.steps()
        raise CheckpointError(f"{chosen} cannot be used: got={reason} expected=one of {known}")
    return chosen
