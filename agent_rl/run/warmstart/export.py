"""From a run's checkpoint to a policy folder of another precision, to ship it.

python -m agent_rl.run.warmstart.export runs/bench_moe32 agent_rl/assets/bench_moe32
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from agent_rl.config.reading import load_resolved
from agent_rl.errors import CheckpointError
from agent_rl.model.policies import policy_folder
from agent_rl.trainer.checkpoint import CheckpointStore


def export_policy(run: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the newest checkpoint of ``run`` to ``folder`` with weights of ``dtype``.

    Everything but the weights comes from the policy that the run started from: its checkpoints
    leave out what only transformers reads. Raises ``CheckpointError`` when there is no checkpoint.
    """
    newest = CheckpointStore(run / "checkpoints").latest()
    if newest is None:
        raise CheckpointError(f"{run} has no checkpoint yet: got=none expected=at least one")
    folder.mkdir(parents=True, exist_ok=True)
    start = load_resolved(run / "config.yaml").policy.path
    for file in policy_folder(start).iterdir():
        if file.is_file() and file.suffix == ".json":
            shutil.copyfile(file, folder / file.name)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(newest.folder.glob("*.safetensors")):
        weights |= {name: t.to(dtype).contiguous() for name, t in load_file(file).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def main(arguments: Sequence[str]) -> None:
    """``RUN FOLDER``."""
    run, folder = arguments
    export_policy(Path(run), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
