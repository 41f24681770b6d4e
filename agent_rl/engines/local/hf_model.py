"""A Hugging Face MoE checkpoint folder as a module, its routers and its weights by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from transformers.utils import logging as hf_logging

from agent_rl.engines.local.attention import SLOT_ATTENTION
from agent_rl.engines.local.experts import experts_name
from agent_rl.engines.local.quantize import QUANTIZATIONS, quantize
from agent_rl.errors import EngineError
from agent_rl.model.config_json import read_served_model
from routing_cache import RowLayout

# A simulated low precision rounds to it inside its products; everything else is bfloat16.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DTYPES |= dict.fromkeys(QUANTIZATIONS, torch.bfloat16)
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Keep transformers' progress bar off the terminal; its global switch is put back after."""
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()


def load_model(folder: Path, dtype: str) -> Qwen3MoeForCausalLM:
    """Load a Qwen3-MoE folder for inference on CPU, with our attention and expert products.

    ``dtype`` is a key of ``DTYPES``.

    Raises:
        EngineError: no such folder, or another architecture.
        ConfigError: a dense model, or no readable configuration.
    """
    if not (folder / "config.json").is_file():
        raise EngineError(f"no model: got {folder}, expected a folder with config.json")
    model_type = read_served_model(folder).model_type
    if model_type != "qwen3_moe":
        raise EngineError(
            f"the local engine cannot run this model: got model_type={model_type!r}, "
            "expected 'qwen3_moe'; use the sglang or vllm engine for others"
        )
    with _quiet_loading():
        model = Qwen3MoeForCausalLM.from_pretrained(
            folder,
            dtype=DTYPES[dtype],
            attn_implementation=SLOT_ATTENTION,
            experts_implementation=experts_name(dtype),
        )
    model = model.eval().requires_grad_(False)
    if dtype in QUANTIZATIONS:
        quantize(model, QUANTIZATIONS[dtype])
    return model


def routers(model: PreTrainedModel) -> dict[int, Qwen3MoeTopKRouter]:
    """Router modules by global layer number, ascending."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, Qwen3MoeTopKRouter):
            match = _LAYER.search(name)
            assert match is not None
            found[int(match.group(1))] = module
    return dict(sorted(found.items()))


def row_layout(model: PreTrainedModel) -> RowLayout:
    """Return the shape of this model's routing rows: MoE layers only, in global order."""
    layers = routers(model)
    if not layers:
        raise EngineError("the model has no MoE layer: got 0 routers, expected at least one")
    return RowLayout(
        num_hidden_layers=model.config.num_hidden_layers,
        moe_layers=tuple(layers),
        num_experts=model.config.num_experts,
        moe_top_k=model.config.num_experts_per_tok,
    )


def load_state(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy ``weights`` into ``model`` in place, converting dtype. Mutates only when all fit.

    Names are those of a checkpoint on disk (one tensor per expert) or of the module's own
    ``state_dict`` (all experts of a layer in one). A tied ``lm_head.weight`` may be left out.

    Raises:
        EngineError: a name is missing or unknown, or a shape differs; nothing was changed then.
    """
    targets = _targets(model, fused=any(n.endswith(".experts.gate_up_proj") for n in weights))
    optional = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    missing = sorted(targets.keys() - weights.keys() - optional)
    unknown = sorted(weights.keys() - targets.keys())
    shapes = [
        f"{name}: got {tuple(weights[name].shape)}, expected {tuple(view.shape)}"
        for name, view in targets.items()
        if name in weights and weights[name].shape != view.shape
    ]
    if missing or unknown or shapes:
        raise EngineError(
            f"weights do not fit the model: {len(missing)} missing {missing[:3]}, "
            f"{len(unknown)} unknown {unknown[:3]}, {len(shapes)} of another shape {shapes[:3]}; "
            "expected every parameter under its Hugging Face name"
        )
    with torch.no_grad():
        for name in targets.keys() & weights.keys():
            targets[name].copy_(weights[name])


def _targets(model: PreTrainedModel, *, fused: bool) -> dict[str, torch.Tensor]:
    """Writable views of every parameter by checkpoint name."""
    views: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=False).items():
        if fused or ".experts." not in name:
            views[name] = tensor
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert in range(tensor.shape[0]):
            if kind == "gate_up_proj":
                gate, up = tensor[expert].chunk(2, dim=0)
                views[f"{prefix}.{expert}.gate_proj.weight"] = gate
                views[f"{prefix}.{expert}.up_proj.weight"] = up
            else:
                views[f"{prefix}.{expert}.{kind}.weight"] = tensor[expert]
    return views
