"""What one of several ranks runs: every combination of a job in turn, results from rank 0.

python rank_checks.py JOB.json RESULTS.json
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from parallel_data import EXPERTS, MOE_LAYERS, make_samples, row_of
from safetensors.torch import load_file, save_file

from agent_rl.config.schema import (
    AlgorithmConfig,
    OptimConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
    TrainerConfig,
)
from agent_rl.errors import ReplayError, TrainerError
from agent_rl.model.folders import read_folder
from agent_rl.trainer import collectives
from agent_rl.trainer.megatron import MegatronTrainer
from agent_rl.trainer.weights import export_like
from agent_rl.types import TrainSample

# isort: split
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

LR, EPS = 1e-2, 1e-2  # a large eps: the update is smooth in the gradient, zero included


def run_config(trainer: dict[str, Any], *, replay: Any = "r3", lr: float = LR) -> RunConfig:
    optim = OptimConfig(eps=EPS, clip_grad=1e9)
    object.__setattr__(optim, "lr", lr)  # 0 too, which a configuration refuses
    return RunConfig(
        trainer=TrainerConfig(num_threads=1, micro_batch_tokens=64, **trainer),
        routing=RoutingConfig(replay=replay, max_missing_fraction=1.0),
        algorithm=AlgorithmConfig(num_mini_steps=1),
        optim=optim,
        train=TrainConfig(steps=10),
    )


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    off, size = (got.double() - expected.double()).norm(), expected.double().norm()
    return float(off / size) if size else float(off)  # what nothing moves has a size of zero


# --- gradients, scores, metrics -----------------------------------------------------------------


def gradients(trainer: MegatronTrainer) -> dict[str, torch.Tensor]:
    """By Hugging Face name; the distributed optimizer leaves each rank a run of every one."""
    return export_like(trainer._maps, lambda p: _reduced(trainer, p))


def _reduced(trainer: MegatronTrainer, parameter: torch.Tensor) -> torch.Tensor:
    for one in getattr(trainer._optimizer._optimizer, "chained_optimizers", []):
        if not any(p is parameter for b in getattr(one, "buffers", []) for p in b.params):
            continue
        whole = torch.zeros(parameter.numel())
        if parameter in one.model_param_group_index_map:
            run = one._get_model_param_range_map(parameter)["param"]
            whole[run.start : run.end] = parameter.main_grad.flatten()[run.start : run.end]
        dist.all_reduce(whole, group=one.data_parallel_group)
        return whole.view(parameter.shape)
    return parameter.main_grad


def train(folder: Path, settings: dict[str, Any], reference: dict[str, torch.Tensor]) -> dict:
    """Scores, one step, gradients, new weights, a second step."""
    trainer = MegatronTrainer(run_config(settings), folder)
    samples = make_samples()
    before = trainer.publish_weights()
    scores = trainer.score(samples, "r3", full_logits=True, live_routing=True)
    held = read_folder(folder)
    exact = before.keys() == held.keys() and all(torch.equal(before[n], held[n]) for n in held)
    metrics = trainer.step(samples)
    found = gradients(trainer)
    errors = {name: relative(found[name], grad) for name, grad in part(reference, "grad/").items()}
    after = trainer.publish_weights()
    delta = {name: after[name] - before[name] for name in after}
    worst_update = 0.0
    for name, expected in part(reference, "delta/").items():
        worst_update = max(worst_update, relative(delta[name], expected))
    logprobs = np.concatenate(
        [s.logprobs[sample.loss_mask] for s, sample in zip(scores, samples, strict=True)]
    )
    summed = np.concatenate([np.exp(s.full_logprobs).sum(-1) for s in scores])
    live = np.concatenate([s.live_experts.reshape(-1) for s in scores])
    last = trainer.step(make_samples(version=1))
    out = {
        "exact_export": exact,
        "gradient_error": max(errors.values()),
        "worst": max(errors, key=lambda name: errors[name]),
        "update_error": worst_update,
        "logprob_error": float(np.abs(logprobs - reference["logprobs"].numpy()).max()),
        "mass_error": float(np.abs(summed - 1).max()),
        "live_differs": int((live != reference.get("live", torch.from_numpy(live)).numpy()).sum()),
        "metrics": metrics,
        "second_metrics": last,
    }
    if dist.get_world_size() == 1:
        out["tensors"] = {f"delta/{n}": t for n, t in delta.items()} | {
            "live": torch.from_numpy(live)
        }
    trainer.close()
    return out


def part(tensors: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}


def modes(folder: Path, settings: dict[str, Any], reference: dict[str, torch.Tensor]) -> dict:
    """The gradient without rows, with the old pass's, and with the live router's for some."""
    found: dict[str, Any] = {"mode_errors": {}, "mode_metrics": {}}
    tensors: dict[str, torch.Tensor] = {}
    for mode in ("off", "r2", "mixed"):
        trainer = MegatronTrainer(run_config(settings, replay=mode), folder)
        found["mode_metrics"][mode] = trainer.step(make_samples(missing_every=5))
        tensors |= {f"{mode}/{name}": tensor for name, tensor in gradients(trainer).items()}
        expected = part(reference, f"{mode}/")
        found["mode_errors"][mode] = max(
            (relative(tensors[f"{mode}/{name}"], tensor) for name, tensor in expected.items()),
            default=0.0,
        )
        trainer.close()
    return found | ({"mode_tensors": tensors} if dist.get_world_size() == 1 else {})


# --- markers ------------------------------------------------------------------------------------


class Watcher:
    """Which token each router saw, told by its embedding, and which experts it used for it."""

    def __init__(self, trainer: MegatronTrainer, table: torch.Tensor) -> None:
        self._table = table * torch.rsqrt(table.square().mean(-1, keepdim=True) + 1e-6)
        self.seen: Counter[tuple[int, int]] = Counter()
        self.wrong: list[str] = []
        self.padding_load = torch.zeros(EXPERTS, dtype=torch.int64)
        self.padding_calls = 0
        for chunk in trainer._pipeline.chunks:
            for module in chunk.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._look)

    def _look(self, router: Any, args: Any, output: Any) -> None:
        layer, hidden = router.layer_number - 1, args[0].detach().flatten(0, 1)
        tokens = (hidden @ self._table.T).argmax(dim=1)
        if not torch.allclose(hidden, self._table[tokens], atol=1e-3):
            self.wrong.append(f"layer {layer}: a router saw something that is no embedding")
        self.padding_calls += int(bool((tokens == 0).any()))
        for token, used in zip(tokens.tolist(), output[1], strict=True):
            experts = used.nonzero().flatten().tolist()
            if token == 0:
                self.padding_load += used.cpu()
                if len(experts) != 2:
                    self.wrong.append(f"layer {layer}: padding with experts {experts}")
                continue
            self.seen[layer, token] += 1
            expected = sorted(row_of(token)[MOE_LAYERS.index(layer)].tolist())
            if experts != expected:
                self.wrong.append(f"layer {layer}, token {token}: {experts} not {expected}")


def watch(folder: Path, settings: dict[str, Any]) -> dict:
    """One step of the transparent policy under the eyes of every router."""
    trainer = MegatronTrainer(run_config(settings, lr=0.0), folder)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].float()
    watcher, samples = Watcher(trainer, table), make_samples()
    metrics = trainer.step(samples)
    trainer.close()
    every = collectives.gather(
        (watcher.seen, watcher.wrong, watcher.padding_load, watcher.padding_calls)
    )
    seen = sum((part[0] for part in every), Counter())
    passes = 2 if settings.get("recompute", "none") == "none" else 3
    fed = {int(t) for sample in samples for t in sample.token_ids[:-1]}
    complete = seen == Counter({(layer, t): passes for layer in MOE_LAYERS for t in fed})
    wrong = [text for part in every for text in part[1]]
    load = sum(part[2] for part in every)
    return {
        "marker_ok": complete and not wrong,
        "wrong_sets": len(wrong),
        "examples": wrong[:3],
        "padding_excess": int(load.max() - load.min()),
        "padding_calls": sum(part[3] for part in every),
        "replayed_fraction": metrics["replayed_fraction"],
    }


# --- faults -------------------------------------------------------------------------------------


def faults(folder: Path, settings: dict[str, Any]) -> dict:
    """What only some ranks could notice: all of them must do the same, and none waits."""
    trainer = MegatronTrainer(run_config(settings), folder)
    # One sample and a token that trains nothing: most ranks have nothing at all to do.
    few = [trainer.step(make_samples((1, 9)))]
    before = trainer.publish_weights()
    damaged = make_samples(version=1)
    damaged[1] = dataclasses.replace(damaged[1], routed_experts=LateDamage(damaged[1]))
    endless = make_samples(version=1)
    # Each a number, which ingest lets pass; their sum is none.
    advantages = np.where(endless[1].loss_mask, 3e38, 0).astype(np.float32)
    endless[1] = dataclasses.replace(endless[1], advantages=advantages)
    messages = [_message_of(trainer, samples) for samples in (damaged, endless)]
    after = trainer.publish_weights()
    few.append(trainer.step(make_samples((1, 9), version=1)))
    trainer.close()
    return {
        "few_metrics": few,
        "fault_messages": collectives.gather(messages),
        "moved_by_a_fault": any(not torch.equal(before[n], after[n]) for n in before),
    }


def _message_of(trainer: MegatronTrainer, samples: list[TrainSample]) -> str:
    try:
        trainer.step(samples)
    except (ReplayError, TrainerError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


class LateDamage:
    """A sample's rows, damaged behind the checks: the last layer of the last but one token.

    One pipeline stage and one part of the sequence read it, on one data-parallel rank.
    """

    def __init__(self, sample: TrainSample) -> None:
        self._held: Any = sample.routed_experts
        self.num_tokens, self.weight_versions = len(sample.token_ids), sample.weight_versions

    def gather(self, *, layers=None, start: int = 0, stop: int | None = None):
        rows, present = self._held.gather(start=start, stop=stop)
        if start <= self.num_tokens - 3 < start + len(rows):
            rows[self.num_tokens - 3 - start, -1] = 7
        return rows if layers is None else rows[:, list(layers)], present

    def verify(self, token_ids) -> None: ...

    def release(self) -> None: ...


# --- running ------------------------------------------------------------------------------------


def examine(combination: dict, folder: Path) -> dict:
    settings, started = combination["trainer"], time.monotonic()
    policy, reference = folder / "policy", load_file(folder / "reference.safetensors")
    found = train(policy, settings, reference)
    found |= watch(folder / "transparent", settings)
    if combination["faults"]:
        found |= faults(policy, settings)
    if combination["modes"]:
        found |= modes(policy, settings, reference)
    agreed = collectives.gather((found["metrics"], found["second_metrics"]))
    found["ranks_agree"] = all(one == agreed[0] for one in agreed)
    return found | {"seconds": time.monotonic() - started}


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    results: dict[str, dict] = {}
    for combination in job["combinations"]:
        folder = Path(job["folder"]) / combination["family"]
        results[combination["name"]] = examine(combination, folder)
    if dist.get_rank() == 0:
        tensors: dict[str, torch.Tensor] = {}
        for found in results.values():
            tensors |= found.pop("tensors", {}) | found.pop("mode_tensors", {})
        save_file(tensors, sys.argv[2] + ".safetensors")
        Path(sys.argv[2]).write_text(json.dumps(results))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the others fail at once where a clean exit would leave them waiting
