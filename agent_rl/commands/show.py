"""``agent-rl show``: a run's episodes as pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agent_rl.commands.terminal import make_console
from agent_rl.config.reading import load_resolved
from agent_rl.config.schema import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.model.policies import policy_folder
from agent_rl.store.run_folder import RunFolderError
from agent_rl.view.run_pages import Decode, steps_with_trajectories, write_run_pages


def show_command(run: Path, out: Path | None, steps: Sequence[int]) -> None:
    """Write the pages of some steps (the newest when none is named) and say where.

    Raises ``RunFolderError``, ``NoTrajectoriesError``.
    """
    if not (run / "config.yaml").is_file():
        raise RunFolderError(f"{run} is no run folder: expected config.yaml in it")
    console = make_console()
    config = load_resolved(run / "config.yaml")
    try:
        decode = _decoder(config)
    except ConfigError as error:  # the run was moved here without its policy
        console.print(f"prompts are left out: {error}", soft_wrap=True)
        decode = None
    known = steps_with_trajectories(run)
    index = write_run_pages(run, out or run / "pages", steps=steps or known[-1:], decode=decode)
    console.print(f"pages: {index}", soft_wrap=True)
    if known and not steps:
        console.print(f"of step {known[-1]}; others: --step, {known[0]} to {known[-1]}")


def _decoder(config: RunConfig) -> Decode:
    """Token ids as the policy's own text. Raises ``ConfigError`` when the policy is not here."""
    folder = policy_folder(config.policy.path)
    if config.agent.renderer == "compact":
        from agent_rl.rollout.compact_tokenizer import CompactTokenizer

        return CompactTokenizer.load(folder).decode
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    return lambda ids: str(tokenizer.decode(list(ids)))
