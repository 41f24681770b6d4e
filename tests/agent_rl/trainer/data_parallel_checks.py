"""What ``test_data_parallel_faults`` runs as one of two ranks; prints what the step did."""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from conftest import make_sample, run_config

from agent_rl.trainer.megatron import MegatronTrainer

torch.set_num_threads(1)
trainer = MegatronTrainer(run_config(), Path(sys.argv[1]))
rng = np.random.default_rng(0)
# Dealt by length: rank 0 gets the sample with targets, rank 1 the one of a single token.
samples = [make_sample(trainer.row_layout, n, rng, name=f"sample-{n}") for n in (1, 12)]
metrics = trainer.step(samples)
weights = sum(float(tensor.double().abs().sum()) for tensor in trainer.publish_weights().values())
print(json.dumps({"grad_norm": metrics["grad_norm"], "weights": weights}))
trainer.close()
torch.distributed.destroy_process_group()
