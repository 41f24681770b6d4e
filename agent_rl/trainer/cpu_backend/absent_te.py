"""Transformer Engine that is not installed. 0.16.1 only, with CUDA too; 0.19.2 has both right."""

from __future__ import annotations

from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from agent_rl.trainer.cpu_backend.patches import Patches


def apply(patches: Patches) -> None:
    """Let the router and latent attention of 0.16.1 know that it is absent."""
    if not hasattr(moe_utils, "te_general_gemm"):
        # Read in the router's gating even without Transformer Engine.
        patches.set(moe_utils, "te_general_gemm", None)
    if not te_extension.HAVE_TE and multi_latent_attention.HAVE_TE:
        # A mock stands in for Transformer Engine, and is taken for the real one here.
        patches.set(multi_latent_attention, "HAVE_TE", False)
