"""What ``test_sharded_checkpoints`` runs on two ranks: save, continue and load under layouts.

Writes below its folder, from rank 0, for every layout: ``checkpoint``, ``grad_norms.json``, what
the trainer held when it saved (``saved.pt``) and one step later (``continued.pt``), and the same
of a trainer that loaded another one's (``loaded-SOURCE.pt``, ``continued-SOURCE.pt``). Below
``latent`` the same of a policy with latent attention, under tensor parallelism.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from conftest import make_sample, run_config

from agent_rl.model.config_json import read_shape
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.types import TrainSample

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "spread": {"distributed_optimizer": True},
    "expert": {"expert_parallel": 2},
    "tensor": {"tensor_parallel": 2, "sequence_parallel": True},
    "pipeline": {"pipeline_parallel": 2},
    "bfloat16": {"expert_parallel": 2, "dtype": "bfloat16", "distributed_optimizer": True},
}


def samples_of(policy: Path, seed: int) -> list[TrainSample]:
    layout, rng = read_shape(policy).row_layout, np.random.default_rng(seed)
    return [make_sample(layout, n, rng, name=f"sample-{n}") for n in (9, 12, 14, 16)]


def trainer_of(policy: Path, layout: str) -> MegatronTrainer:
    # Rows of step 1 are those of version 0: staleness is not what is tested.
    return MegatronTrainer(
        run_config(trainer=LAYOUTS[layout], routing={"max_staleness": 9}), policy
    )


def held(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name, whole. Collective."""
    found = {f"weights/{n}": t for n, t in trainer.publish_weights().items()}
    stages: list[dict[str, torch.Tensor]] = [{} for _ in range(dist.get_world_size())]
    mine: dict[str, torch.Tensor] = {}
    for m in trainer._maps:
        if m.trained:
            for kind, local in trainer._optimizer.state_of(m).items():
                mine |= {f"{kind}/{n}": t.clone().contiguous() for n, t in m.gather(local).items()}
    dist.all_gather_object(stages, mine)
    for stage in stages:
        found |= stage
    return found


def save_and_continue(policy: Path, folder: Path, layout: str, keep: bool) -> None:
    """Two steps, a checkpoint, and the step after it."""
    trainer = trainer_of(policy, layout)
    norms = [trainer.step(samples_of(policy, step))["grad_norm"] for step in range(2)]
    if keep:
        (folder / "checkpoint").mkdir(parents=True)
        (folder / "grad_norms.json").write_text(json.dumps(norms))
    barrier()
    trainer.save(folder / "checkpoint")
    keep_state(trainer, folder / "saved.pt", keep)
    trainer.step(samples_of(policy, 2))
    keep_state(trainer, folder / "continued.pt", keep)
    trainer.close()


def load_and_continue(policy: Path, root: Path, layout: str, source: str, keep: bool) -> None:
    trainer = trainer_of(policy, layout)
    trainer.load(root / source / "checkpoint")
    keep_state(trainer, root / layout / f"loaded-{source}.pt", keep)
    trainer.step(samples_of(policy, 2))
    keep_state(trainer, root / layout / f"continued-{source}.pt", keep)
    trainer.close()


def keep_state(trainer: MegatronTrainer, path: Path, keep: bool) -> None:
    state = held(trainer)
    if keep:
        torch.save(state, path)


def barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def main(policy: Path, latent: Path, root: Path) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    keep = dist.get_rank() == 0
    two_ranks = [name for name in LAYOUTS if name != "one"]
    for layout in two_ranks:
        save_and_continue(policy, root / layout, layout, keep)
    for layout in two_ranks:
        own = layout if layout == "bfloat16" else "one"
        for source in dict.fromkeys((layout, own)):
            load_and_continue(policy, root, layout, source, keep)
    load_and_continue(policy, root, "tensor", "expert", keep)
    load_and_continue(policy, root, "expert", "pipeline", keep)
    save_and_continue(latent, root / "latent" / "tensor", "tensor", keep)
    load_and_continue(latent, root / "latent", "tensor", "one", keep)
    barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:]))
