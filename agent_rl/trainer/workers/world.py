"""Number of trainer processes that a configuration asks for, and their launcher. No torch here."""

from __future__ import annotations

import math
from typing import Literal

from agent_rl.config.schema import TrainerConfig
from routing_cache import RowLayout

Launcher = Literal["inline", "local", "ray"]


def fewest_processes(trainer: TrainerConfig) -> int:
    """The smallest world that the parallel sizes divide; any multiple of it adds data parallel.

    Expert parallelism reuses the ranks of the others, so its size need only divide the ranks of
    one pipeline stage.
    """
    stage = trainer.tensor_parallel * trainer.context_parallel
    return trainer.pipeline_parallel * math.lcm(stage, trainer.expert_parallel)


def num_processes(trainer: TrainerConfig) -> int:
    """``trainer.num_processes``, or the fewest that the parallel sizes need where it is 0."""
    return trainer.num_processes or fewest_processes(trainer)


def launcher(trainer: TrainerConfig) -> Launcher:
    """``trainer.launcher`` with ``auto`` decided: in the driver where one process is enough."""
    if trainer.launcher == "auto":
        return "inline" if num_processes(trainer) == 1 else "local"
    return trainer.launcher


def chunk_blocks(layout: RowLayout, num_chunks: int) -> tuple[int, ...] | None:
    """L indices where the MoE layers of each pipeline chunk begin; None for a single chunk.

    A pipeline stage has one chunk, or as many as ``trainer.virtual_pipeline`` says. Rows packed in
    these blocks let a stage read its own layers and nothing else.
    """
    if num_chunks == 1:
        return None
    edges = [layout.num_hidden_layers * chunk // num_chunks for chunk in range(num_chunks)]
    starts = {sum(layer < edge for layer in layout.moe_layers) for edge in edges} | {0}
    return tuple(sorted(start for start in starts if start < layout.num_moe_layers))
