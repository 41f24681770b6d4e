"""Which layers are built, and the weight table of Transformer Engine's ones without a GPU.

Megatron's own Transformer Engine layers are built over a stand-in for the package
(``te_stub``): names and shapes are Megatron's, the arithmetic is plain torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from te_checks import FAMILIES

from agent_rl.errors import ConfigError
from agent_rl.trainer.layer_spec import implementation

pytestmark = pytest.mark.megatron

HERE = Path(__file__).parent
ATTENTION = "decoder.layers.1.self_attention."
MLP = "decoder.layers.1.mlp."


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What ``te_checks`` measured of every family."""
    shared = HERE.parents[1] / "shared"
    path = os.pathsep.join([str(HERE / "te_stub"), str(shared), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(HERE / "te_checks.py")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_transformer_engine_layers_carry_the_weights(found: dict[str, Any], name: str) -> None:
    measured = found[name]
    assert measured["logits"] <= 1e-5
    assert measured["gradients"] <= 1e-5
    assert measured["exact"]


@pytest.mark.slow
def test_norms_are_fused_and_experts_grouped(found: dict[str, Any]) -> None:
    qwen = found["qwen3_moe, dense by list"]["parameters"]
    assert qwen["decoder.layers.0.mlp.linear_fc1.layer_norm_weight"] == [64]
    assert qwen["decoder.layers.0.mlp.linear_fc1.weight"] == [2 * 96, 64]
    assert qwen[ATTENTION + "linear_qkv.layer_norm_weight"] == [64]
    assert qwen[ATTENTION + "linear_qkv.weight"] == [(4 + 2 + 2) * 16, 64]
    assert qwen["decoder.layers.1.pre_mlp_layernorm.weight"] == [64]
    assert [qwen[f"{MLP}experts.linear_fc1.weight{i}"] for i in range(16)] == [[2 * 32, 64]] * 16
    assert [qwen[f"{MLP}experts.linear_fc2.weight{i}"] for i in range(16)] == [[64, 32]] * 16
    assert not any("input_layernorm" in key for key in qwen)
    deep = found["deepseek_v3"]["parameters"]
    assert deep["decoder.layers.1.input_layernorm.weight"] == [64]
    assert deep[ATTENTION + "linear_q_up_proj.layer_norm_weight"] == [24]
    assert deep[ATTENTION + "linear_kv_up_proj.layer_norm_weight"] == [16]
    assert deep[ATTENTION + "linear_kv_down_proj.weight"] == [16 + 8, 64]
    assert deep[MLP + "shared_experts.linear_fc1.weight"] == [2 * 32, 64]


def test_portable_layers_are_always_there() -> None:
    assert implementation("portable") == "local"


def test_what_transformer_engine_lacks_is_named() -> None:
    """On a machine that has it all, asking for it and ``auto`` are the same."""
    if implementation("auto") == "transformer_engine":
        assert implementation("transformer_engine") == "transformer_engine"
        return
    with pytest.raises(ConfigError) as caught:
        implementation("transformer_engine")
    named = " ".join(caught.value.problems)
    assert all("trainer.layer_spec=portable" in problem for problem in caught.value.problems)
    assert ("a CUDA device" in named) == (not torch.cuda.is_available())
