"""What ``test_objective_parallel`` runs as one of its ranks: one step a layout, every loss term.

python objective_parallel_checks.py POLICY OUT.json LAYOUTS.json
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conftest import make_sample, run_config

from agent_rl.trainer.megatron import MegatronTrainer

TERMS: dict[str, Any] = {
    "loss": "gspo",
    "clip_low": 1.0,  # no clipping: a ratio at its bound may fall either way by rounding
    "clip_high": 9.0,
    "correction": "mis",
    "correction_low": 0.85,
    "kl_weight": 0.3,
    "entropy_weight": 0.2,
    "router_consistency_weight": 0.7,
    "num_mini_steps": 2,
}
LENGTHS = (40, 21, 9, 33, 17, 12, 28, 15)


def step(policy: Path, layout: dict[str, Any]) -> dict[str, Any]:
    trainer = MegatronTrainer(
        run_config(
            trainer={"micro_batch_tokens": 96, **layout},
            algorithm=TERMS,
            # A large eps: the update is smooth in the gradient, zero included.
            optim={"lr": 1e-2, "eps": 1e-2, "clip_grad": 0.0},
        ),
        policy,
    )
    rng = np.random.default_rng(0)
    samples = [
        make_sample(trainer.row_layout, n, rng, name=f"sample-{i}") for i, n in enumerate(LENGTHS)
    ]
    scores = trainer.score(samples, "r3")
    samples = [
        dataclasses.replace(s, rollout_logprobs=score.logprobs + np.float32(0.02) * s.loss_mask)
        for s, score in zip(samples, scores, strict=True)
    ]
    before = trainer.publish_weights()
    metrics = trainer.step(samples)
    after = trainer.publish_weights()
    trainer.close()
    moved = {
        name: (after[name] - before[name]).double().flatten()[:64].tolist()
        for name in sorted(after)
    }
    return {"metrics": metrics, "moved": moved}


def main() -> None:
    torch.set_num_threads(1)
    policy, out, layouts = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    results = {
        name: step(policy, layout) for name, layout in json.loads(layouts.read_text()).items()
    }
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


main()
