"""What one step reports, summed up over its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from agent_rl.metrics.mismatch import abs_gap, f_taus, k3
from agent_rl.trainer.batch import MicroBatch
from agent_rl.trainer.ingest import Coverage
from agent_rl.trainer.loss import LossInputs, LossOutput
from agent_rl.trainer.optimizer import UpdateReport
from agent_rl.trainer.router_replay import RoutingCounts
from agent_rl.types import TrainSample


class StepTotals:
    """Collects one step; ``metrics`` turns it into names and floats.

    ``layers`` are the global numbers of this rank's MoE layers, for the per-layer names.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._metrics: dict[str, float] = {}
        self._rollout: list[torch.Tensor] = []
        self._old: list[torch.Tensor] = []
        self._entropy: list[torch.Tensor] = []
        self._loss_sum = 0.0
        self._units = self._tokens = self._clipped = 0
        self._ratio_max = 0.0
        self._kl_sum = 0.0
        self._updates: list[UpdateReport] = []
        self.empty_mini_batches = 0

    def add_samples(
        self, samples: Sequence[TrainSample], coverage: Coverage, weight_version: int
    ) -> None:
        oldest = [min(s.weight_versions, default=weight_version) for s in samples]
        self._metrics |= {
            "num_samples": float(len(samples)),
            "num_tokens": float(coverage.trained),
            "num_fed_tokens": float(coverage.fed),
            "replayed_fraction": coverage.replayed_fraction,
            "missing_fraction": coverage.missing_fraction,
            "staleness": weight_version - float(np.mean(oldest)),
            "staleness_max": float(weight_version - min(oldest)),
        }

    def add_old(self, batch: MicroBatch, old: torch.Tensor, entropy: torch.Tensor) -> None:
        """Old-policy log-probs and entropies ``[N]`` of a micro-batch's sampled tokens."""
        self._rollout.append(batch.rollout_logprobs[batch.loss_mask])
        self._old.append(old)
        self._entropy.append(entropy)

    def add_routing(self, counts: RoutingCounts) -> None:
        """Agreement of live routers and rows; nothing where no row was replayed."""
        if counts.tokens:
            rates = (counts.flips.double() / counts.tokens).tolist()
            self._metrics["router_flip_rate"] = float(np.mean(rates))
            for layer, rate in zip(self._layers, rates, strict=True):
                self._metrics[f"router_flip_rate/layer_{layer}"] = rate
            self._metrics["tokens_with_flip"] = counts.tokens_with_flip / counts.tokens
        if counts.load is not None:
            load = counts.load.double()
            self._metrics["expert_load_max"] = float(
                (load.amax(dim=1) / load.mean(dim=1).clamp(min=1e-12)).mean()
            )
            self._metrics["experts_idle"] = float((load == 0).sum())

    def add_loss(
        self, loss: torch.Tensor, units: torch.Tensor, inputs: LossInputs, out: LossOutput
    ) -> None:
        """One micro-batch of an update: summed loss, its units, per-token ``[N]`` details."""
        self._loss_sum += float(loss)
        self._units += int(units)
        self._tokens += out.ratio.numel()
        self._clipped += int(out.clipped.sum())
        if out.ratio.numel():
            gap = inputs.logprobs.detach() - inputs.old_logprobs
            self._kl_sum += float((torch.expm1(gap) - gap).sum())
            self._ratio_max = max(self._ratio_max, float(gap.abs().max().exp()))

    def add_update(self, report: UpdateReport) -> None:
        self._updates.append(report)

    def metrics(self) -> dict[str, float]:
        """``ratio_max`` is the largest of w and 1/w over the updates' tokens."""
        out = dict(self._metrics)
        out["loss"] = self._loss_sum / max(1, self._units)
        out["grad_norm"] = float(np.mean([u.grad_norm for u in self._updates] or [0.0]))
        out["grad_norm_max"] = float(np.max([u.grad_norm for u in self._updates] or [0.0]))
        out["lr"] = self._updates[-1].lr if self._updates else 0.0
        out["clip_fraction"] = self._clipped / max(1, self._tokens)
        out["kl_k3_old_new"] = self._kl_sum / max(1, self._tokens)
        out["ratio_max"] = self._ratio_max
        out["empty_mini_batches"] = float(self.empty_mini_batches)
        if self._old:
            rollout, old = torch.cat(self._rollout).numpy(), torch.cat(self._old).numpy()
            out["kl_k3_rollout_old"] = k3(rollout, old)
            out["abs_logprob_gap"] = abs_gap(rollout, old)
            out |= f_taus(rollout, old)
            entropies = torch.cat(self._entropy)
            out["entropy"] = float(entropies.mean()) if entropies.numel() else 0.0
        return out
