"""A trainer that saves until something stops it; run by ``test_checkpoint_faults``.

Usage: POLICY ROOT [LIMIT_BYTES]. Saves step 1, says so, then saves step 2 under a file size limit
if one is given, else for ever, each time as another step.
"""

from __future__ import annotations

import itertools
import resource
import sys
from pathlib import Path

import numpy as np
import torch
from conftest import make_sample, run_config

from agent_rl.errors import CheckpointError
from agent_rl.trainer.checkpoint import CheckpointStore
from agent_rl.trainer.megatron import MegatronTrainer

torch.set_num_threads(1)
policy, root = Path(sys.argv[1]), Path(sys.argv[2])
trainer = MegatronTrainer(run_config(), policy)
rng = np.random.default_rng(0)
trainer.step([make_sample(trainer.row_layout, 12, rng)])
store = CheckpointStore(root, keep_last=3)
store.save(1, trainer.save)
print("saved 1", flush=True)
if len(sys.argv) > 3:
    for limit in sys.argv[3].split(","):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), resource.RLIM_INFINITY))
        try:
            store.save(2, trainer.save)
        except CheckpointError as error:
            print(f"{limit}: {error}", flush=True)
        else:
            print(f"{limit}: saved", flush=True)
else:
    for step in itertools.count(2):
        store.save(step, trainer.save)
