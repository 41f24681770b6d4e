"""One rank: joins the process group, builds its trainer, carries requests out."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from agent_rl.errors import AgentRLError, TrainerError
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.trainer.workers.messages import (
    Close,
    Done,
    Failed,
    Load,
    Message,
    Publish,
    Reply,
    Save,
    Score,
    Start,
    Step,
    Value,
)
from agent_rl.trainer.workers.sample_block import decode_samples

Export = Callable[[dict[str, torch.Tensor]], None]  # hands the weights to the transport


class Rank:
    """Common part of a worker process and a Ray actor. Use it from one thread."""

    def __init__(self, start: Start) -> None:
        timeout = timedelta(seconds=start.config.trainer.worker_timeout_s)
        self._rank = start.rank
        if torch.cuda.is_available():
            torch.cuda.set_device(start.local_rank)
        host, port = start.store
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=store,
            rank=start.rank,
            world_size=start.num_ranks,
            timeout=timeout,
        )
        self._trainer = MegatronTrainer(start.config, start.model_path)

    @property
    def weight_version(self) -> int:
        return self._trainer.weight_version

    def handle(self, request: Message, block: memoryview | None, export: Export) -> Reply:
        """Carry ``request`` out; what it raises becomes the reply."""
        try:
            value = self._carry_out(request, block, export)
        except Exception as error:  # a rank's boundary: the driver raises it
            return failure(error, torn=self._trainer.is_torn)
        return Done(value if self._rank == 0 else None, self._trainer.weight_version)

    def _carry_out(self, request: Message, block: memoryview | None, export: Export) -> Value:
        trainer = self._trainer
        match request:
            case Step() if block is not None:
                return trainer.step(decode_samples(block))
            case Score(replay, live_routing) if block is not None:
                return trainer.score(decode_samples(block), replay, live_routing=live_routing)
            case Publish():
                weights = trainer.publish_weights()  # collective: every rank takes part
                if self._rank == 0:
                    export(weights)
            case Save(folder):
                trainer.save(folder)
            case Load(folder):
                trainer.load(folder)
            case Close():
                trainer.close()
                dist.destroy_process_group()
            case _:
                raise TrainerError(
                    f"a rank cannot carry this out: got={request!r} "
                    "expected=a request, with its samples where it needs them"
                )
        return None


def failure(error: Exception, *, torn: bool = False) -> Failed:
    """Return ``error`` as a reply; one that is not ours as text, since it may not unpickle.

    ``torn``: it came while the weights moved.
    """
    ours = isinstance(error, AgentRLError | OSError)
    carried = error if ours else TrainerError(f"{type(error).__name__}: {error}")
    return Failed(carried, traceback.format_exc(), is_ours=ours and not torn)
