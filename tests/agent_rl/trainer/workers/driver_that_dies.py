"""A driver for ``test_local_workers``: starts one rank, says its id, and waits to be killed.

python driver_that_dies.py FOLDER POLICY. The thread that starts the rank is over by then.
"""

import sys
import threading
import time
from pathlib import Path

from rank_cases import config, local_pids

from agent_rl.trainer.workers.start import start_trainer
from agent_rl.trainer.workers.trainer_fleet import TrainerFleet

folder, policy = (Path(argument) for argument in sys.argv[1:])
trainers: list[TrainerFleet] = []


def start() -> None:
    trainer = start_trainer(config(folder, launcher="local", num_processes=1), policy)
    assert isinstance(trainer, TrainerFleet)
    trainers.append(trainer)


starter = threading.Thread(target=start)
starter.start()
starter.join()
(trainer,) = trainers
assert trainer.publish_weights()  # the rank still answers
print(*local_pids(trainer), flush=True)
time.sleep(600)
