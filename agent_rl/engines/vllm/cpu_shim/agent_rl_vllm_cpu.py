"""A vLLM plugin, run in each of its processes before the model is loaded."""
# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any


def register() -> None:
    """Let a weight update on CPU prepare the expert weights again.

    vLLM 0.30 packs expert weights for its CPU kernel when it first loads them, and on a reload
    skips that step because the kernel exists already: the kernel then reads plain weights as if
    they were packed, and the server samples from wrong logits without a word. Forgetting the
    kernel makes the reload take the path of the first load. Other backends are left alone.
    """
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    method = module.UnquantizedFusedMoEMethod
    set_up_once = method._setup_kernel

    def set_up_again(self: Any, layer: Any, w13: Any, w2: Any) -> None:
        if self.unquantized_backend == module.UnquantizedMoeBackend.CPU:
            self.moe_kernel = None
        set_up_once(self, layer, w13, w2)

    method._setup_kernel = set_up_again
