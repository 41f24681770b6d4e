"""From a step's samples to this rank's micro-batches: plan, then the one layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_rl.config.objective import Reduction
from agent_rl.config.schema import TrainerConfig
from agent_rl.trainer import parallel
from agent_rl.trainer.assignment import Plan, needs_equal_shapes, plan_micro_batches
from agent_rl.trainer.batch import MicroBatch, fed_tokens, lay_out
from agent_rl.trainer.grid import Part, packed_grid, padded_grid
from agent_rl.types import TrainSample
from routing_cache import RowLayout

# isort: split
from megatron.core import parallel_state

_ALIGNMENT = 8  # whole widths are multiples of it: fewer distinct shapes to allocate for


@dataclass(frozen=True)
class MicroBatcher:
    """Layout of micro-batches on one rank. Every rank plans for all and takes its own."""

    layout: RowLayout
    layers: tuple[int, ...]  # global numbers of this rank's MoE layers
    token_budget: int
    packed: bool
    part: Part
    rank: int  # among the data-parallel ones
    num_ranks: int
    equal_shapes: bool  # see plan.needs_equal_shapes
    multiple_of: int  # micro-batches of a mini-batch: an interleaved pipeline fills its stages

    @classmethod
    def of_this_rank(
        cls, config: TrainerConfig, layout: RowLayout, layers: tuple[int, ...]
    ) -> MicroBatcher:
        """Megatron's groups must exist."""
        return cls(
            layout=layout,
            layers=layers,
            token_budget=config.micro_batch_tokens,
            packed=config.packed,
            part=parallel.own_part(config),
            rank=parallel_state.get_data_parallel_rank(),
            num_ranks=parallel_state.get_data_parallel_world_size(),
            equal_shapes=needs_equal_shapes(config),
            multiple_of=config.pipeline_parallel if config.virtual_pipeline > 1 else 1,
        )

    def batches(
        self,
        samples: Sequence[TrainSample],
        indices: Sequence[int],
        *,
        first_index: int,
        use_rows: bool,
        reduction: Reduction = "token",
        longest: int = 1,
    ) -> list[MicroBatch]:
        """Return this rank's micro-batches of ``samples[i] for i in indices``.

        Numbered from ``first_index``; the last three keywords are those of ``lay_out``. Raises
        ``ReplayError`` for rows that are damaged or of another model.
        """
        lengths = [fed_tokens(samples[i]) for i in indices]
        plan = self._plan(lengths)
        shape = self._shape(plan, lengths)
        return [
            lay_out(
                samples,
                [indices[i] for i in chosen],
                index=first_index + offset,
                layout=self.layout,
                layers=self.layers,
                part=self.part,
                packed=self.packed,
                alignment=_ALIGNMENT,
                at_least=shape,
                use_rows=use_rows,
                reduction=reduction,
                longest=longest,
            )
            for offset, chosen in enumerate(plan[self.rank])
        ]

    def _plan(self, lengths: Sequence[int]) -> Plan:
        return plan_micro_batches(
            lengths,
            token_budget=self.token_budget,
            alignment=1 if self.packed else math.lcm(_ALIGNMENT, self.part.divisor),
            num_ranks=self.num_ranks,
            multiple_of=self.multiple_of,
            packed=self.packed,
        )

    def _shape(self, plan: Plan, lengths: Sequence[int]) -> tuple[int, int]:
        """(rows, whole width) that every micro-batch is filled up to."""
        if not self.equal_shapes:
            return 1, 1
        make = packed_grid if self.packed else padded_grid
        grids = [
            make([lengths[i] for i in chosen], self.part, alignment=_ALIGNMENT)
            for batches in plan
            for chosen in batches
        ]
        widest = max(grid.width for grid in grids) * self.part.cp_size
        return max(grid.num_rows for grid in grids), widest
