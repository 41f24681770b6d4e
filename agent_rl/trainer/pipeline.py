"""Running micro-batches through this rank's model chunks under Megatron's schedules.

One chunk without pipeline parallelism or with a plain 1F1B one, several where the pipeline is
interleaved. Whatever order the schedule takes, every forward says which micro-batch it is of, and
every output carries that to its backward: the rows follow by (micro-batch, layer).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import torch

from agent_rl.errors import TrainerError
from agent_rl.trainer import collectives, cpu_backend
from agent_rl.trainer.batch import MicroBatch
from agent_rl.trainer.router_replay import RouterReplay

# isort: split
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

# What Megatron's schedule takes: summed loss, int32 units it is divided by, values to report.
ScheduleLoss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]
LossOf = Callable[[MicroBatch, torch.Tensor], ScheduleLoss]


class Pipeline:
    """This rank's chunks; ``run`` and the gradient methods are collective."""

    def __init__(self, chunks: Sequence[DistributedDataParallel], replay: RouterReplay) -> None:
        self.chunks, self._replay = tuple(chunks), replay
        self.device = next(chunks[0].parameters()).device

    def use_gradients(self, scale_loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Tell Megatron how gradients are scaled, withheld between micro-batches and reduced."""
        no_sync: Any = [chunk.no_sync for chunk in self.chunks]
        config: Any = get_model_config(self.chunks[0])
        config.grad_scale_func = scale_loss
        config.no_sync_func = no_sync if len(self.chunks) > 1 else no_sync[0]
        config.finalize_model_grads_func = finalize_model_grads

    def run(
        self,
        batches: Sequence[MicroBatch],
        loss: LossOf,
        *,
        forward_only: bool,
        options: Mapping[str, bool] | None = None,
    ) -> None:
        """All micro-batches forward and, unless ``forward_only``, backward.

        ``loss(batch, logits)`` is called on the last stage, ``[B, S, V / tensor_parallel]``;
        ``options`` are those of ``RouterReplay.forward``. Every rank of a data-parallel group has
        to bring the same number of micro-batches.
        """

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module):
            batch = next(iterator)
            with self._replay.forward(batch.index, train=not forward_only, **(options or {})):
                output = model(
                    batch.token_ids.to(self.device),
                    batch.position_ids.to(self.device),
                    None,
                    packed_seq_params=_packed_params(batch, self.device),
                )
            self._replay.bind_backward(output, batch.index)
            return output, partial(loss, batch)

        for alike in self._runs(batches):
            iterators = [iter(alike) for _ in self.chunks]
            rows, width = alike[0].token_ids.shape
            with cpu_backend.quiet():
                get_forward_backward_func()(
                    forward_step_func=forward_step,
                    data_iterator=iterators if len(iterators) > 1 else iterators[0],
                    model=list(self.chunks),
                    num_microbatches=len(alike),
                    # Only read where all micro-batches are alike: otherwise stages tell theirs.
                    seq_length=width * alike[0].part.cp_size,
                    micro_batch_size=rows,
                    forward_only=forward_only,
                )

    def _runs(self, batches: Sequence[MicroBatch]) -> list[list[MicroBatch]]:
        """Split into what one schedule takes: all, or where stages tell no shapes, one shape each.

        Mini-batches differ in theirs, and a forward-only pass may go over several of them.
        """
        config: Any = get_model_config(self.chunks[0])
        if config.variable_seq_lengths:
            return [list(batches)]
        return [list(run) for _, run in groupby(batches, key=lambda b: b.token_ids.shape)]

    def zero_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def require_finite_gradients(self) -> None:
        """Raises ``TrainerError`` on every rank when any rank's gradient is not finite."""
        chunks: Any = self.chunks  # Megatron shadows Module.buffers with its list
        finite = all(
            bool(buffer.grad_data.sum().isfinite())
            for chunk in chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        )
        if not collectives.all_true(finite, self.device):
            raise TrainerError(
                "the gradient is not finite, its optimizer step was not taken: got=nan or inf "
                "expected=finite; look at ratio_max and abs_logprob_gap of the last step"
            )


def _packed_params(batch: MicroBatch, device: torch.device) -> PackedSeqParams | None:
    if batch.boundaries is None:
        return None
    ends = torch.tensor(batch.boundaries, dtype=torch.int32, device=device)
    longest = max(stop - start for start, stop in pairwise(batch.boundaries))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
