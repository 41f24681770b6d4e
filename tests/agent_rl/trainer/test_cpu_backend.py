"""The device shim is silent, reversible, idempotent and touches Megatron's modules only."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from agent_rl.trainer import cpu_backend

# isort: split
from megatron.core.transformer.moe.router import TopKRouter

# In a process of its own, warnings as errors: installing cannot be undone for live models.
CHECKS = Path(__file__).with_name("cpu_backend_checks.py")


@pytest.mark.slow
def test_the_shim_in_a_fresh_process() -> None:
    out = subprocess.run(
        [sys.executable, "-W", "error", str(CHECKS)], check=False, capture_output=True, text=True
    )
    assert (out.returncode, out.stderr) == (0, "")
    assert out.stdout.split() == ["silent", "reversible", "sorts"]


def test_no_compiler_is_called_in_the_middle_of_a_step() -> None:
    cpu_backend.install()
    compiled = torch.compile(lambda x: x + 1)
    assert hasattr(compiled, "_torchdynamo_orig_callable")  # how a compiled function is known
    assert not hasattr(TopKRouter._apply_expert_bias, "_torchdynamo_orig_callable")
