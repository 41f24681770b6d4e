"""The report of one step, summed up over its micro-batches and, if need be, over its ranks.

Every rank collects sums, counts and maxima of the tokens it saw; ``reduce`` adds them up before
``metrics`` divides. No rank ever averages averages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from agent_rl.metrics.alarm import f2_alarm
from agent_rl.metrics.mismatch import TAUS, f_tau_name
from agent_rl.trainer.batch import MicroBatch
from agent_rl.trainer.ingest import Coverage
from agent_rl.trainer.losses import LossInputs, LossOutput
from agent_rl.trainer.optimizer import UpdateReport
from agent_rl.trainer.router_replay import ConsistencySums
from agent_rl.trainer.routing_counts import RoutingCounts
from agent_rl.types import TrainSample

Sums = dict[str, NDArray[np.float64]]  # scalars, and one vector per layer; keys may differ by rank
Reduce = Callable[[Sums], Sums]


class StepTotals:
    """Collects one step; ``metrics`` turns it into names and floats.

    ``layers`` are the global numbers of this rank's MoE layers, for the per-layer names.

    What ``reduce`` must do with the three parts:

    - ``tokens``: add over the data- and context-parallel ranks of the last pipeline stage, which
      alone has them; tensor-parallel ranks hold the same and are not added. The other stages then
      take the last one's.
    - ``routers``: add over data- and context-parallel ranks, and over tensor-parallel ones where
      sequence parallelism splits the tokens; every pipeline stage brings keys of its own layers,
      so the union over stages is complete.
    - ``maxima``: the largest over all ranks.

    Gradient norm, learning rate, coverage and staleness are the same on every rank already.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self._layers = layers
        self._shared: dict[str, float] = {}
        self._updates: list[UpdateReport] = []
        self.tokens: Sums = {}
        self.routers: Sums = {}
        self.maxima: dict[str, float] = {"ratio_max": 0.0}
        self.empty_mini_batches = 0

    def add_samples(
        self, samples: Sequence[TrainSample], coverage: Coverage, weight_version: int
    ) -> None:
        oldest = [min(s.weight_versions, default=weight_version) for s in samples]
        self._shared |= {
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
        rollout = batch.rollout_logprobs[batch.loss_mask].double()
        gap = old.double().cpu() - rollout
        values = {"tokens": torch.ones_like(gap), "kl_k3_rollout_old": torch.expm1(gap) - gap}
        values |= {"abs_logprob_gap": gap.abs(), "entropy": entropy.double().cpu()}
        for tau in TAUS:
            # As in ``f_tau``: what is not a number is beyond every bound.
            values[f_tau_name(tau)] = (~(gap.abs() <= np.log(tau))).double()
        _add(self.tokens, {f"old/{name}": v.sum() for name, v in values.items()})

    def add_routing(self, counts: RoutingCounts) -> None:
        """Add the agreement of live routers and rows; ``tokens_with_flip`` is over all layers."""
        found: dict[str, torch.Tensor] = {}
        for slot, layer in enumerate(counts.layers):
            found[f"flips/{layer}"] = counts.flips[slot]
            found[f"tokens/{layer}"] = torch.tensor(counts.tokens)
            found[f"load/{layer}"] = counts.load[slot]
        if counts.layers:  # a key of its own for every stage: they all count the same tokens
            found[f"with_flip/{counts.layers[0]}"] = torch.tensor(counts.tokens_with_flip)
        _add(self.routers, found)

    def add_consistency(self, sums: ConsistencySums) -> None:
        """Add the router-consistency term of the updates; nothing where it is off."""
        for slot, layer in enumerate(self._layers):
            if float(sums.weights[slot]):
                found = {"value": sums.values[slot], "weight": sums.weights[slot]}
                _add(self.routers, {f"consistency_{k}/{layer}": v for k, v in found.items()})

    def add_loss(
        self, loss: torch.Tensor, units: torch.Tensor, inputs: LossInputs, out: LossOutput
    ) -> None:
        """Add one micro-batch of an update: summed loss, its units, per-token ``[N]`` details."""
        gap = (inputs.logprobs.detach() - inputs.old_logprobs).double()
        found = {"loss": loss, "units": units, "tokens": torch.tensor(out.ratio.numel())}
        found |= {
            "clip_fraction": out.clipped.sum(),
            "kl_k3_old_new": (torch.expm1(gap) - gap).sum(),
        }
        found |= {f"detail/{name}": value.double().sum() for name, value in out.details.items()}
        _add(self.tokens, {f"update/{name}": value for name, value in found.items()})
        if out.ratio.numel():
            largest = float(gap.abs().max().exp())
            self.maxima["ratio_max"] = max(self.maxima["ratio_max"], largest)

    def add_update(self, report: UpdateReport) -> None:
        self._updates.append(report)

    def reduce(
        self,
        tokens: Reduce,
        routers: Reduce,
        maxima: Callable[[dict[str, float]], dict[str, float]],
    ) -> None:
        """Replace this rank's sums by those of all ranks: see the class."""
        self.tokens, self.routers = tokens(self.tokens), routers(self.routers)
        self.maxima = maxima(self.maxima)

    def metrics(self) -> dict[str, float]:
        """Return all metrics; ``ratio_max`` is the largest of w and 1/w of the updates' tokens."""
        out = dict(self._shared)
        norms = [update.grad_norm for update in self._updates] or [0.0]
        out |= {"grad_norm": float(np.mean(norms)), "grad_norm_max": float(np.max(norms))}
        out["lr"] = self._updates[-1].lr if self._updates else 0.0
        out["empty_mini_batches"] = float(self.empty_mini_batches)
        out |= self.maxima
        return out | self._update_metrics() | self._old_metrics() | self._router_metrics()

    def _update_metrics(self) -> dict[str, float]:
        found = _named(self.tokens, "update/")
        count, units = max(1.0, found.get("tokens", 0.0)), max(1.0, found.get("units", 0.0))
        out = {"loss": found.get("loss", 0.0) / units}
        for name in ("clip_fraction", "kl_k3_old_new"):
            out[name] = found.get(name, 0.0) / count
        return out | {k: v / count for k, v in _named(self.tokens, "update/detail/").items()}

    def _old_metrics(self) -> dict[str, float]:
        found = _named(self.tokens, "old/")
        if not found:
            return {}
        count = max(1.0, found.pop("tokens"))
        out = {name: value / count for name, value in found.items()}
        return out | {"alarm_f2": float(f2_alarm(out["f_2"]))}

    def _router_metrics(self) -> dict[str, float]:
        """Return rates by layer and over all; nothing where no row was replayed."""
        out: dict[str, float] = {}
        tokens, flips = _named(self.routers, "tokens/"), _named(self.routers, "flips/")
        rates = {layer: flips[layer] / n for layer, n in _by_layer(tokens) if n}
        if rates:
            out["router_flip_rate"] = float(np.mean(list(rates.values())))
            out |= {f"router_flip_rate/layer_{layer}": rate for layer, rate in rates.items()}
            some = max(_named(self.routers, "with_flip/").values())
            out["tokens_with_flip"] = some / max(tokens.values())
        values = _named(self.routers, "consistency_value/")
        weights = _named(self.routers, "consistency_weight/")
        if weights:
            terms = [values[layer] / weight for layer, weight in weights.items()]
            out["router_consistency"] = float(np.mean(terms))
        loads = [load for name, load in self.routers.items() if name.startswith("load/")]
        if loads:
            load = np.stack(loads)
            peaks = load.max(axis=1) / load.mean(axis=1).clip(min=1e-12)
            out["expert_load_max"] = float(peaks.mean())
            out["experts_idle"] = float((load == 0).sum())
        return out


def _add(sums: Sums, found: Mapping[str, torch.Tensor]) -> None:
    for name, value in found.items():
        number = value.detach().double().cpu().numpy()
        sums[name] = sums[name] + number if name in sums else number


def _named(sums: Sums, prefix: str) -> dict[str, float]:
    """Scalars whose name is ``prefix`` and one further part, by that part."""
    return {
        name.removeprefix(prefix): float(value)
        for name, value in sums.items()
        if name.startswith(prefix) and "/" not in name.removeprefix(prefix)
    }


def _by_layer(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: int(item[0]))


def add_sums(parts: Sequence[Sums]) -> Sums:
    """Return the sum of several ranks' parts; a key that a rank lacks counts as 0."""
    total: Counter[str] = Counter()
    for part in parts:
        for name, value in part.items():
            total[name] = total[name] + value  # type: ignore[assignment]
    return dict(total)  # type: ignore[arg-type]
