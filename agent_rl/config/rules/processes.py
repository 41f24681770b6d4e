"""Rules of parallel sizes and of the processes that hold them."""

from __future__ import annotations

from collections.abc import Iterator

from agent_rl.config.rules.fault import Fault, Rule
from agent_rl.config.schema import RunConfig
from agent_rl.trainer.workers.world import fewest_processes, num_processes


def _parallel(config: RunConfig) -> Iterator[Fault]:
    trainer = config.trainer
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        yield (
            "trainer.sequence_parallel",
            "got true, expected false when trainer.tensor_parallel is 1",
        )
    if trainer.tensor_parallel > 1 and not trainer.sequence_parallel:
        yield (
            "trainer.sequence_parallel",
            "got false, expected true when trainer.tensor_parallel is above 1: "
            "Megatron trains no MoE layer without it",
        )
    if trainer.virtual_pipeline > 1 and trainer.pipeline_parallel == 1:
        yield (
            "trainer.virtual_pipeline",
            f"got {trainer.virtual_pipeline}, expected 1 when trainer.pipeline_parallel is 1: "
            "there is no pipeline whose chunks could be interleaved",
        )


def _workers(config: RunConfig) -> Iterator[Fault]:
    trainer = config.trainer
    sizes = (
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.context_parallel,
        trainer.expert_parallel,
    )
    if min(sizes) <= 0 or trainer.num_processes < 0:
        return  # reported by another rule
    fewest = fewest_processes(trainer)
    if trainer.num_processes % fewest:
        yield (
            "trainer.num_processes",
            f"got {trainer.num_processes}, expected a multiple of {fewest}, which the parallel "
            "sizes need (0 takes the fewest)",
        )
    if trainer.launcher == "inline" and num_processes(trainer) > 1:
        yield (
            "trainer.launcher",
            f"got inline for {num_processes(trainer)} processes, expected local or ray: the "
            "driver is one process",
        )
    if trainer.ray_address != "local" and trainer.launcher != "ray":
        yield (
            "trainer.ray_address",
            f"got {trainer.ray_address!r}, which only trainer.launcher=ray reads: expected local",
        )


PROCESS_RULES: tuple[Rule, ...] = (
    _parallel,
    _workers,
)
