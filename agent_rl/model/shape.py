"""The numbers of a model that shape it, whatever its family calls them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from routing_cache import RowLayout


@dataclass(frozen=True)
class RouterRule:
    """The rule that turns router logits into gates.

    ``softmax``: over the chosen logits where ``normalise``, else over all before the choice.
    ``sigmoid``: scores of the chosen experts, divided by their sum, times ``scaling``; what the
    choice adds to them (``selection_bias``) never enters the gate.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    selection_bias: bool = False
    num_groups: int = 1  # experts come in groups; the choice is limited to topk_groups of them
    topk_groups: int = 1


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): widths of its projections."""

    q_rank: int | None  # None: queries are projected directly
    kv_rank: int
    nope_dim: int  # per head, without position
    rope_dim: int  # per head, rotated; keys share it
    v_dim: int


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of the rotary embedding (arXiv 2309.00071)."""

    factor: float
    original_positions: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float


@dataclass(frozen=True)
class HFNames:
    """Names of a family's parts, below ``model.layers.N.``.

    Parameters carry transformers' names, experts fused (``mlp.experts.gate_up_proj [E, 2I, H]``).
    ``folder_mlp`` and ``expert_parts`` are the names inside safetensors files, which hold one
    tensor per expert.
    """

    shared: str = "mlp.shared_experts."
    folder_mlp: str = "mlp."
    expert_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class ModelShape:
    """The sizes and rules of a model that the trainer builds it from."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dense_width: int
    expert_width: int
    num_experts: int
    moe_top_k: int
    moe_layers: tuple[int, ...]  # global 0-based numbers, ascending
    tie_embeddings: bool
    norm_eps: float
    rope_theta: float
    max_positions: int
    family: str = "qwen3_moe"
    router: RouterRule = RouterRule()
    names: HFNames = HFNames()
    qk_norm: bool = True  # per head
    qkv_bias: bool = False
    rotary_fraction: float = 1.0  # of head_dim
    latent: LatentAttention | None = None
    yarn: Yarn | None = None
    shared_width: int = 0  # of all shared experts together; 0 is none
    shared_gate: bool = False

    @property
    def norm_topk_prob(self) -> bool:
        return self.router.normalise

    @property
    def row_layout(self) -> RowLayout:
        return RowLayout(
            num_hidden_layers=self.num_layers,
            moe_layers=self.moe_layers,
            num_experts=self.num_experts,
            moe_top_k=self.moe_top_k,
        )
