"""What ``test_layer_spec`` runs with the stand-in for Transformer Engine on the path.

Prints, for a policy of every family, the parameters' names and shapes under Megatron's
Transformer Engine layers, and how far logits and weights are from transformers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from family_policies import load, write_family

from agent_rl.config.schema import TrainerConfig
from agent_rl.model.config_json import read_shape
from agent_rl.model.folders import FolderTensors
from agent_rl.trainer import cpu_backend, parallel
from agent_rl.trainer.model import build_model, transformer_config
from agent_rl.trainer.param_maps import param_maps
from agent_rl.trainer.weights import export_like, export_weights, load_weights

# Together they have every part: dense layers, biases, shared experts with and without a gate,
# latent attention.
FAMILIES = ("qwen3_moe, dense by list", "qwen2_moe", "deepseek_v3", "deepseek_v3, plain queries")


def measure(folder: Path) -> dict[str, object]:
    shape = read_shape(folder)
    config = transformer_config(shape, TrainerConfig(num_threads=1, layer_spec="portable"))
    config.transformer_impl, config.moe_grouped_gemm = "transformer_engine", True
    model = build_model(shape, config)
    maps = param_maps(model, shape)
    load_weights(maps, FolderTensors(folder))
    other = load(folder)
    ids = torch.randint(0, 200, (3, 24), generator=torch.Generator().manual_seed(1))
    with cpu_backend.quiet():
        ours = model(ids, torch.arange(24).expand(3, 24), None)
    theirs = other(ids).logits
    for logits in (ours, theirs):
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    grads, weights = export_like(maps, lambda p: p.grad), export_weights(maps)
    named = dict(other.named_parameters())
    return {
        "parameters": {name: list(p.shape) for name, p in model.named_parameters()},
        "logits": float((ours - theirs).detach().abs().max()),
        "gradients": max(
            float((grads[name] - p.grad).norm() / p.grad.norm()) for name, p in named.items()
        ),
        "exact": all(torch.equal(weights[name], p) for name, p in named.items()),
    }


def main() -> None:
    torch.set_num_threads(1)
    parallel.initialize(TrainerConfig(num_threads=1), seed=0)
    found = {}
    for name in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = measure(write_family(Path(folder), name))
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
