"""The trainer on Megatron-core: one RL step is old log-probs, then the mini-steps, both replayed.

step(samples)
  ingest   digests, staleness, missing rows      nothing has moved yet: errors cost nothing
  plan     mini-batches → micro-batches          one layout for ids, masks, values and rows
  old      forward of every micro-batch          replayed; mismatch and router flips measured
  update   forward, backward, optimizer          the same rows again, once per mini-batch
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from agent_rl.config import RunConfig
from agent_rl.errors import TrainerError
from agent_rl.trainer import cpu_backend, logprobs, parallel
from agent_rl.trainer.batch import MicroBatch, fed_tokens, lay_out
from agent_rl.trainer.folders import FolderTensors
from agent_rl.trainer.ingest import check_samples, verify_samples
from agent_rl.trainer.loss import LOSSES, LossInputs
from agent_rl.trainer.model import DTYPES, build_model, transformer_config, wrap_model
from agent_rl.trainer.optimizer import PolicyOptimizer
from agent_rl.trainer.param_maps import param_maps
from agent_rl.trainer.plan import plan_micro_batches
from agent_rl.trainer.router_replay import RouterReplay
from agent_rl.trainer.scores import SampleScore, batch_scores
from agent_rl.trainer.shape import ModelShape
from agent_rl.trainer.sharded import load_trainer, save_trainer
from agent_rl.trainer.step_metrics import StepTotals
from agent_rl.trainer.weights import export_weights, load_weights
from agent_rl.types import TrainSample
from routing_cache import RowLayout

# isort: split
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

ReplayMode = Literal["off", "r2", "r3"]

# What Megatron's schedule takes: summed loss, int32 units it is divided by, values to report.
_ScheduleLoss = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]

_ALIGNMENT = 8  # padded widths are multiples of it: fewer distinct shapes to allocate for


@dataclass(frozen=True)
class _MiniBatch:
    """What one optimizer step trains."""

    batches: list[MicroBatch]  # of this data-parallel rank
    has_targets: bool  # of any rank: all ranks must agree whether to step, or one waits for ever


class MegatronTrainer:
    """GRPO with Rollout Routing Replay over a Qwen3-MoE folder; implements ``protocols.Trainer``.

    Example:
        >>> trainer = MegatronTrainer(config, Path("policies/tiny_moe"))
        >>> metrics = trainer.step(samples)
        >>> weights = trainer.publish_weights()
    """

    def __init__(self, config: RunConfig, model_path: Path) -> None:
        parallel.initialize(config.trainer, seed=config.seed)
        self._config = config
        self._model_path = model_path
        self._loss = LOSSES[config.algorithm.loss]
        self._temperature = config.sampling.temperature or 1.0  # 0 is greedy, reported at 1
        self._shape = ModelShape.from_folder(model_path)
        transformer = transformer_config(self._shape, config.trainer)
        model = build_model(self._shape, transformer)
        self._maps = param_maps(model, self._shape)
        load_weights(self._maps, FolderTensors(model_path))
        self._model = wrap_model(model, transformer)
        self._optimizer = PolicyOptimizer(
            config.optim,
            self._model,
            self._maps,
            dtype=DTYPES[config.trainer.dtype],
            total_steps=config.train.steps * config.algorithm.num_mini_steps,
        )
        transformer.grad_scale_func = self._optimizer.scale_loss
        transformer.no_sync_func = self._model.no_sync
        transformer.finalize_model_grads_func = finalize_model_grads
        self._replay = RouterReplay(
            [self._model],
            num_experts=self._shape.num_experts,
            recompute=config.trainer.recompute != "none",
        )
        self._weight_version = 0

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def row_layout(self) -> RowLayout:
        """Layer map and expert counts that samples' rows must have."""
        return self._shape.row_layout

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """One RL step over ``samples``; returns metrics and raises ``weight_version`` by one.

        Raises ``ReplayError`` before any weight moves when rows are damaged, stale or, in strict
        mode, missing; ``TrainerError`` when loss or gradient are not finite.
        """
        if not samples:
            raise TrainerError("no samples to train on: got=0 expected=at least one")
        mode = self._config.routing.replay
        with _threads(self._config.trainer.num_threads), self._replay.step():
            coverage = check_samples(samples, self._config.routing, self._weight_version)
            minis = self._plan(samples, mode)
            every = [batch for mini in minis for batch in mini.batches]
            totals = StepTotals(self._replay.layers)
            totals.add_samples(samples, coverage, self._weight_version)
            old: Mapping[int, torch.Tensor] = {}
            if self._loss.needs_old:
                old = self._old_logprobs(every, mode, totals)
            for mini in minis:
                self._update(mini, old, totals)
        self._weight_version += 1
        return totals.metrics()

    def score(
        self,
        samples: Sequence[TrainSample],
        replay: Literal["off", "r3"],
        full_logits: bool = False,
        live_routing: bool = False,
    ) -> list[SampleScore]:
        """Score samples under the current weights, without moving them.

        ``replay="r3"`` uses the samples' rows (tokens without one are routed live), ``"off"`` the
        live routers. ``full_logits`` adds the whole distribution at every sampled token,
        ``live_routing`` the choice of the live routers at every fed token. Raises ``ReplayError``
        when rows and tokens do not belong together.
        """
        scores: dict[int, SampleScore] = {}
        with _threads(self._config.trainer.num_threads), self._replay.step():
            verify_samples(samples)
            batches = self._lay_out(samples, range(len(samples)), replay, first_index=0)

            def take(batch: MicroBatch, scaled: torch.Tensor) -> None:
                live = self._replay.recorded(batch.index) if live_routing else None
                scores.update(batch_scores(batch, scaled, live, full_logits=full_logits))

            self._forward_only(batches, take, record=live_routing)
        return [scores[i] for i in range(len(samples))]

    def publish_weights(self) -> dict[str, torch.Tensor]:
        """Hugging Face parameter name → CPU float32 copy, experts fused."""
        return export_weights(self._maps)

    def save(self, folder: Path) -> None:
        """Write a model folder that also holds optimizer, schedule and RNG state. Collective.

        Every rank writes its own files. Exact for float32 and bfloat16: a run resumed from it
        continues bit-identically.
        """
        save_trainer(
            folder,
            self._maps,
            self._optimizer,
            names=self._shape.names,
            policy=self._model_path,
            weight_version=self._weight_version,
            dtype=self._config.trainer.dtype,
        )

    def load(self, folder: Path) -> None:
        """Continue from ``save``'s folder, also under another parallel layout.

        Raises ``CheckpointError`` when it is not a trainer's, or of another precision.
        """
        dtype = self._config.trainer.dtype
        self._weight_version = load_trainer(folder, self._maps, self._optimizer, dtype=dtype)

    def close(self) -> None:
        """Give the routers back. The process group stays, for the next trainer of the process."""
        self._replay.clear()
        self._replay.detach()

    # --- one step ---------------------------------------------------------------------------

    def _plan(self, samples: Sequence[TrainSample], mode: ReplayMode) -> list[_MiniBatch]:
        """Mini-batches of micro-batches; the split depends on seed and version alone."""
        order = np.random.default_rng([self._config.seed, self._weight_version])
        parts = np.array_split(
            order.permutation(len(samples)),
            min(len(samples), self._config.algorithm.num_mini_steps),
        )
        minis: list[_MiniBatch] = []
        for part in parts:
            first = sum(len(mini.batches) for mini in minis)
            batches = self._lay_out(samples, part.tolist(), mode, first_index=first)
            has_targets = any(bool(samples[i].loss_mask[1:].any()) for i in part)
            minis.append(_MiniBatch(batches, has_targets))
        return minis

    def _lay_out(
        self,
        samples: Sequence[TrainSample],
        indices: Sequence[int],
        mode: ReplayMode,
        *,
        first_index: int,
    ) -> list[MicroBatch]:
        """This data-parallel rank's micro-batches of some samples, their rows handed to replay."""
        plan = plan_micro_batches(
            [fed_tokens(samples[i]) for i in indices],
            token_budget=self._config.trainer.micro_batch_tokens,
            alignment=_ALIGNMENT,
            num_ranks=parallel_state.get_data_parallel_world_size(),
        )[parallel_state.get_data_parallel_rank()]
        batches = []
        for offset, chosen in enumerate(plan):
            batch = lay_out(
                samples,
                [indices[i] for i in chosen],
                index=first_index + offset,
                layout=self.row_layout,
                layers=self._replay.layers,
                alignment=_ALIGNMENT,
                reduction=self._config.algorithm.loss_reduction,
                use_rows=mode == "r3",
            )
            self._replay.put(batch.index, batch.table(replay=mode == "r3"))
            batches.append(batch)
        return batches

    def _old_logprobs(
        self, batches: Sequence[MicroBatch], mode: ReplayMode, totals: StepTotals
    ) -> dict[int, torch.Tensor]:
        """Old-policy log-probs ``[N]`` by micro-batch; under r2 its routing is kept for replay."""
        old: dict[int, torch.Tensor] = {}

        def take(batch: MicroBatch, scaled: torch.Tensor) -> None:
            labels = batch.labels[batch.loss_mask].to(scaled.device)
            old[batch.index] = logprobs.token_logprobs(scaled, labels)
            totals.add_old(batch, old[batch.index].cpu(), logprobs.entropy(scaled).cpu())

        self._forward_only(batches, take, record=mode == "r2", count=True)
        totals.add_routing(self._replay.counts)
        if mode == "r2":
            for batch in batches:
                self._replay.replay_recorded(batch.index)
        return old

    def _update(
        self, mini: _MiniBatch, old: Mapping[int, torch.Tensor], totals: StepTotals
    ) -> None:
        """One optimizer step over one mini-batch; none when nothing in it is trained."""
        if not mini.has_targets:
            totals.empty_mini_batches += 1
            return
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._run(mini.batches, partial(self._loss_of, old, totals), forward_only=False)
        self._require_finite()
        totals.add_update(self._optimizer.step())

    def _loss_of(
        self,
        old: Mapping[int, torch.Tensor],
        totals: StepTotals,
        batch: MicroBatch,
        output: torch.Tensor,
    ) -> _ScheduleLoss:
        """Summed weighted loss and its units; Megatron divides the gradient by all units."""
        scaled = logprobs.sampled_logits(output, batch, self._temperature)
        mask, device = batch.loss_mask, scaled.device
        current = logprobs.token_logprobs(scaled, batch.labels[mask].to(device))
        inputs = LossInputs(
            logprobs=current,
            old_logprobs=old.get(batch.index, current.detach()),
            advantages=batch.advantages[mask].to(device),
        )
        out = self._loss.function(inputs, self._config.algorithm)
        loss = (out.per_token * batch.weights[mask].to(device)).sum()
        units = batch.units.sum()
        totals.add_loss(loss.detach(), units, inputs, out)
        return loss, units.to(device=device, dtype=torch.int32), {}

    def _require_finite(self) -> None:
        model: Any = self._model
        for buffer in (*model.buffers, *model.expert_parallel_buffers):
            if not bool(buffer.grad_data.sum().isfinite()):
                raise TrainerError(
                    "the gradient is not finite, no weight was moved: got=nan or inf "
                    "expected=finite; look at ratio_max and abs_logprob_gap of the last step"
                )

    # --- running the model ------------------------------------------------------------------

    @torch.no_grad()
    def _forward_only(
        self,
        batches: Sequence[MicroBatch],
        take: Callable[[MicroBatch, torch.Tensor], None],
        *,
        record: bool = False,
        count: bool = False,
    ) -> None:
        """Hand the scaled logits ``[N, V]`` of every micro-batch to ``take``, one at a time."""

        def take_logits(batch: MicroBatch, output: torch.Tensor) -> _ScheduleLoss:
            take(batch, logprobs.sampled_logits(output, batch, self._temperature))
            return output.new_zeros(()), torch.zeros((), dtype=torch.int32), {}

        self._run(batches, take_logits, forward_only=True, record=record, count=count)

    def _run(
        self,
        batches: Sequence[MicroBatch],
        loss: Callable[[MicroBatch, torch.Tensor], _ScheduleLoss],
        *,
        forward_only: bool,
        record: bool = False,
        count: bool = False,
    ) -> None:
        """Drive Megatron's schedule; ``loss(batch, output)`` as its ``loss_func`` wants it."""

        device = self._maps[0].parameters[0].device

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module):
            batch = next(iterator)
            with self._replay.forward(batch.index, record=record, count=count):
                output = model(batch.token_ids.to(device), batch.position_ids.to(device), None)
            self._replay.bind_backward(output, batch.index)
            return output, partial(loss, batch)

        with cpu_backend.quiet():
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iter(batches),
                model=[self._model],
                num_microbatches=len(batches),
                seq_length=max(batch.token_ids.shape[1] for batch in batches),
                micro_batch_size=max(batch.token_ids.shape[0] for batch in batches),
                forward_only=forward_only,
            )


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch's thread count is process-wide: the engine's setting comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
