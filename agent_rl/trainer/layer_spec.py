"""Layers that the model is built of: Transformer Engine's, or the portable ones of ``layers``.

Transformer Engine needs a CUDA device: fused norms, grouped matrix products for the experts, its
own attention kernels. Router and dispatcher are Megatron's in both, so replay is the same code;
the fused router, which takes no recorded experts, stays off in both.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from agent_rl.errors import ConfigError
from agent_rl.trainer import cpu_backend  # noqa: F401  # before megatron: quiet import
from agent_rl.trainer.latent_attention import SpecifiedAttention
from agent_rl.trainer.layers import portable_block_spec

# isort: split
from megatron.core.extensions import transformer_engine as te_extension
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

Implementation = Literal["local", "transformer_engine"]  # as Megatron calls them


def implementation(wanted: Literal["auto", "portable", "transformer_engine"]) -> Implementation:
    """Decide ``trainer.layer_spec``; ``auto`` is Transformer Engine where it can run.

    Raises ``ConfigError`` when it is asked for and cannot.
    """
    if wanted == "portable":
        return "local"
    problems = _te_problems()
    if wanted == "transformer_engine" and problems:
        raise ConfigError(
            [
                f"trainer.layer_spec: got transformer_engine, expected {problem}; "
                "or set trainer.layer_spec=portable"
                for problem in problems
            ]
        )
    return "local" if problems else "transformer_engine"


def _te_problems() -> list[str]:
    problems = []
    if not te_extension.HAVE_TE:
        problems.append("the package transformer-engine (pip install transformer-engine[pytorch])")
    elif te_extension.TEColumnParallelGroupedLinear is None:
        problems.append("transformer-engine 1.9 or later, which has grouped matrix products")
    if not torch.cuda.is_available():
        problems.append("a CUDA device")
    return problems


def block_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Layers of one model chunk of this rank, as ``config.transformer_impl`` says."""
    if config.transformer_impl == "transformer_engine":
        return _te_block_spec(config, vp_stage)
    return portable_block_spec(config, vp_stage)


def _te_block_spec(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    pattern = config.moe_layer_freq
    assert isinstance(pattern, list)
    first = get_transformer_layer_offset(config, vp_stage)
    flags = pattern[first : first + get_num_layers_to_build(config, vp_stage)]
    norm: Any = te_extension.TENorm
    specs = {is_moe: _te_layer_spec(config, is_moe=bool(is_moe)) for is_moe in set(flags)}
    return TransformerBlockSubmodules(
        layer_specs=[specs[is_moe] for is_moe in flags], layer_norm=norm
    )


def _te_layer_spec(config: TransformerConfig, *, is_moe: bool) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if is_moe else None,
        moe_grouped_gemm=True,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )
    if config.multi_latent_attention:
        layer: Any = spec.submodules
        layer.self_attention.module = SpecifiedAttention
    return spec
