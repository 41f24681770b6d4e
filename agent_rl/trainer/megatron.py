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
from typing import Literal

import numpy as np
import torch

from agent_rl.config.objective import replays_rows
from agent_rl.config.schema import RunConfig
from agent_rl.errors import TrainerError
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import FolderTensors
from agent_rl.trainer import collectives, logprobs, parallel
from agent_rl.trainer.batch import MicroBatch
from agent_rl.trainer.ingest import check_samples, verify_samples
from agent_rl.trainer.losses import LossInputs, TotalLoss
from agent_rl.trainer.micro_batches import MicroBatcher
from agent_rl.trainer.model import DTYPES, build_chunks, transformer_config, wrap_model
from agent_rl.trainer.optimizer import PolicyOptimizer
from agent_rl.trainer.param_maps import param_maps
from agent_rl.trainer.pipeline import Pipeline, ScheduleLoss
from agent_rl.trainer.reference_policy import ReferencePolicy
from agent_rl.trainer.router_replay import RouterReplay
from agent_rl.trainer.scores import (
    RoutedTokens,
    SampleScore,
    ScoredTokens,
    assemble_scores,
    routed_tokens,
    scored_tokens,
)
from agent_rl.trainer.sharded import load_trainer, open_trainer, save_trainer
from agent_rl.trainer.step_metrics import StepTotals
from agent_rl.trainer.weights import export_weights, load_weights
from agent_rl.types import TrainSample
from routing_cache import RowLayout

ReplayMode = Literal["off", "r2", "r3", "mixed"]


@dataclass(frozen=True)
class _MiniBatch:
    """The share of one optimizer step."""

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
        self._loss = TotalLoss(config.algorithm)
        self._temperature = config.sampling.temperature or 1.0  # 0 is greedy, reported at 1
        self._shape = read_shape(model_path)
        transformer = transformer_config(self._shape, config.trainer)
        chunks = build_chunks(self._shape, transformer)
        self._maps = [m for chunk in chunks for m in param_maps(chunk, self._shape)]
        load_weights(self._maps, FolderTensors(model_path))
        spread = config.trainer.distributed_optimizer
        wrapped = [wrap_model(c, transformer, distributed_optimizer=spread) for c in chunks]
        self._optimizer = PolicyOptimizer(
            config.optim,
            wrapped,
            self._maps,
            dtype=DTYPES[config.trainer.dtype],
            total_steps=config.train.steps * config.algorithm.num_mini_steps,
            distributed=spread,
        )
        self._replay = RouterReplay(
            wrapped,
            num_experts=self._shape.num_experts,
            recompute=config.trainer.recompute != "none",
            consistency_weight=config.algorithm.router_consistency_weight,
            num_moe_layers=len(self._shape.moe_layers),
        )
        # Of the configured policy, also in a resumed run: ``load`` comes later.
        self._reference = ReferencePolicy(wrapped) if self._loss.needs_reference else None
        self._pipeline = Pipeline(wrapped, self._replay)
        self._pipeline.use_gradients(self._optimizer.scale_loss)
        self._micro_batches = MicroBatcher.of_this_rank(
            config.trainer, self.row_layout, self._replay.layers
        )
        self._weight_version = 0
        self._is_torn = False

    @property
    def is_torn(self) -> bool:
        """True while the weights are between two versions: something failed while they moved."""
        return self._is_torn

    @property
    def weight_version(self) -> int:
        return self._weight_version

    @property
    def row_layout(self) -> RowLayout:
        """Layer map and expert counts that samples' rows must have."""
        return self._shape.row_layout

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Take one RL step over ``samples``; returns metrics and raises ``weight_version`` by one.

        Raises ``ReplayError`` before any weight moves when rows are damaged, stale or, in strict
        mode, missing; ``TrainerError`` when loss or gradient are not finite. After a failure behind
        the first mini-step the trainer takes nothing but ``load``.
        """
        self._require_whole()
        if not samples:
            raise TrainerError("no samples to train on: got=0 expected=at least one")
        mode = self._config.routing.replay
        with _threads(self._config.trainer.num_threads), self._replay.step():
            with collectives.failing_together():
                coverage = check_samples(samples, self._config.routing, self._weight_version)
                minis = self._plan(samples, mode)
            every = [batch for mini in minis for batch in mini.batches]
            totals = StepTotals(self._replay.layers)
            totals.add_samples(samples, coverage, self._weight_version)
            old: Mapping[int, torch.Tensor] = {}
            if self._loss.needs_old:
                old = self._old_logprobs(every, mode, totals)
            ref = self._reference_logprobs(every)
            for mini in minis:
                self._update(mini, old, ref, totals)
            totals.add_consistency(self._replay.consistency)
        self._weight_version, self._is_torn = self._weight_version + 1, False
        collectives.reduce_totals(totals)
        return totals.metrics()

    def score(
        self,
        samples: Sequence[TrainSample],
        replay: Literal["off", "r3"],
        *,
        full_logits: bool = False,
        live_routing: bool = False,
    ) -> list[SampleScore]:
        """Score samples under the current weights, without moving them.

        ``replay="r3"`` uses the samples' rows (tokens without one are routed live), ``"off"`` the
        live routers. ``full_logits`` adds the whole distribution at every sampled token,
        ``live_routing`` the choice of the live routers at every fed token. Raises ``ReplayError``
        when rows and tokens do not belong together.
        """
        self._require_whole()
        scored: list[ScoredTokens] = []
        routed: list[RoutedTokens] = []
        with _threads(self._config.trainer.num_threads), self._replay.step():
            with collectives.failing_together():
                verify_samples(samples)
                batches = self._lay_out(samples, range(len(samples)), replay, first_index=0)

            def take(batch: MicroBatch, scaled: torch.Tensor) -> None:
                scored.append(scored_tokens(batch, scaled, full_logits=full_logits))

            self._forward_only(batches, take, record=live_routing)
            if live_routing:
                layers = self._replay.layers
                routed = [routed_tokens(b, self._replay.recorded(b.index), layers) for b in batches]
        if not parallel.reports_outputs():
            scored = []
        every = collectives.gather((scored, routed))
        return assemble_scores(
            samples,
            [tokens for part, _ in every for tokens in part],
            [tokens for _, part in every for tokens in part],
            self.row_layout,
        )

    def publish_weights(self) -> dict[str, torch.Tensor]:
        """Hugging Face parameter name → CPU float32 copy, experts fused."""
        self._require_whole()
        return export_weights(self._maps)

    def save(self, folder: Path) -> None:
        """Write a model folder that also holds optimizer, schedule and RNG state. Collective.

        Every rank writes its own files. Exact for float32 and bfloat16: a run resumed from it
        continues bit-identically.
        """
        self._require_whole()
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

        Raises ``CheckpointError``, before anything changes, when it is not a trainer's, of another
        model or precision, or incomplete.
        """
        dtype = self._config.trainer.dtype
        saved = open_trainer(folder, self._maps, self._optimizer, shape=self._shape, dtype=dtype)
        self._is_torn = True
        self._weight_version = load_trainer(saved, self._maps, self._optimizer)
        self._is_torn = False

    def _require_whole(self) -> None:
        if self._is_torn:
            raise TrainerError(
                "a step or a load failed while the weights moved: got=weights between two versions "
                "expected=those of one; load a checkpoint, as 'agent-rl train --resume' does"
            )

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
        """Make this data-parallel rank's micro-batches; hand their rows to replay."""
        uses = replays_rows(mode)
        batches = self._micro_batches.batches(
            samples,
            indices,
            first_index=first_index,
            use_rows=uses,
            reduction=self._loss.objective.reduction,
            longest=self._config.agent.max_tokens,
        )
        for batch in batches:
            self._replay.put(batch.index, batch.table(replay=uses))
        return batches

    def _old_logprobs(
        self, batches: Sequence[MicroBatch], mode: ReplayMode, totals: StepTotals
    ) -> dict[int, torch.Tensor]:
        """Return old-policy log-probs ``[N]`` by micro-batch; r2 keeps the routing for replay."""
        old: dict[int, torch.Tensor] = {}

        def take(batch: MicroBatch, scaled: torch.Tensor) -> None:
            labels = batch.labels[batch.loss_mask].to(scaled.device)
            old[batch.index] = logprobs.token_logprobs(scaled, labels)
            totals.add_old(batch, old[batch.index].cpu(), logprobs.entropy(scaled).cpu())

        self._forward_only(batches, take, record=mode == "r2", count=True)
        totals.add_routing(collectives.join_stages(self._replay.counts, self._pipeline.device))
        if mode == "r2":
            for batch in batches:
                self._replay.replay_recorded(batch.index)
        return old

    def _reference_logprobs(self, batches: Sequence[MicroBatch]) -> dict[int, torch.Tensor]:
        """Return the reference's log-probs ``[N]`` by micro-batch, its own routers choosing."""
        ref: dict[int, torch.Tensor] = {}
        if self._reference is None:
            return ref

        def take(batch: MicroBatch, scaled: torch.Tensor) -> None:
            labels = batch.labels[batch.loss_mask].to(scaled.device)
            ref[batch.index] = logprobs.token_logprobs(scaled, labels)

        with self._reference.active():
            self._forward_only(batches, take, live=True)
        return ref

    def _update(
        self,
        mini: _MiniBatch,
        old: Mapping[int, torch.Tensor],
        ref: Mapping[int, torch.Tensor],
        totals: StepTotals,
    ) -> None:
        """Take one optimizer step over one mini-batch; none when nothing in it is trained."""
        if not mini.has_targets:
            totals.empty_mini_batches += 1
            return
        self._pipeline.zero_gradients()
        self._optimizer.zero_grad()
        loss = partial(self._loss_of, old, ref, totals)
        self._pipeline.run(mini.batches, loss, forward_only=False)
        self._pipeline.require_finite_gradients()
        self._is_torn = True
        totals.add_update(self._optimizer.step())

    def _loss_of(
        self,
        old: Mapping[int, torch.Tensor],
        ref: Mapping[int, torch.Tensor],
        totals: StepTotals,
        batch: MicroBatch,
        output: torch.Tensor,
    ) -> ScheduleLoss:
        """Return the summed weighted loss and its units, by which Megatron divides the gradient."""
        scaled = logprobs.sampled_logits(output, batch, self._temperature)
        mask, device = batch.loss_mask, scaled.device
        current = logprobs.token_logprobs(scaled, batch.labels[mask].to(device))
        inputs = LossInputs(
            logprobs=current,
            old_logprobs=old.get(batch.index, current.detach()),
            rollout_logprobs=batch.rollout_logprobs[mask].to(device),
            advantages=batch.advantages[mask].to(device),
            sequences=batch.sequence_ids[mask].to(device),
            num_sequences=len(batch.samples),
            sum_over_ranks=parallel.sum_over_context,
            ref_logprobs=ref.get(batch.index),
            entropy=logprobs.entropy(scaled) if self._loss.needs_entropy else None,
        )
        out = self._loss(inputs)
        loss = (out.per_token * batch.weights[mask].to(device)).sum()
        units = batch.units.sum()
        totals.add_loss(loss.detach(), units, inputs, out)
        return loss, units.to(device=device, dtype=torch.int32), {}

    # --- running the model ------------------------------------------------------------------

    @torch.no_grad()
    def _forward_only(
        self,
        batches: Sequence[MicroBatch],
        take: Callable[[MicroBatch, torch.Tensor], None],
        *,
        record: bool = False,
        count: bool = False,
        live: bool = False,
    ) -> None:
        """Hand the scaled logits ``[N, V]`` of every micro-batch to ``take``, one at a time."""

        def take_logits(batch: MicroBatch, output: torch.Tensor) -> ScheduleLoss:
            take(batch, logprobs.sampled_logits(output, batch, self._temperature))
            return output.new_zeros(()), torch.zeros((), dtype=torch.int32), {}

        options = {"record": record, "count": count, "live": live}
        self._pipeline.run(batches, take_logits, forward_only=True, options=options)


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """torch's thread count is process-wide: the engine's setting comes back afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
