"""A driver for ``test_local_workers``: starts one rank, says its id, and waits to be killed."""

import sys
import time
from pathlib import Path

from rank_cases import config, local_pids

from agent_rl.trainer.workers.fleet import TrainerFleet
from agent_rl.trainer.workers.start import start_trainer

folder, policy = (Path(argument) for argument in sys.argv[1:])
trainer = start_trainer(config(folder, launcher="local", num_processes=1), policy)
assert isinstance(trainer, TrainerFleet)
print(*local_pids(trainer), flush=True)
time.sleep(600)
