"""Supervised training of the tiny MoE on demonstrations, with the router kept balanced."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agent_rl.run.warmstart.data import DemoRow, length_sorted_batches


@dataclass(frozen=True)
class TinyMoEShape:
    """Size of the embedded policy (Qwen3-MoE: every layer is MoE)."""

    hidden_size: int = 64
    num_layers: int = 3
    num_heads: int = 2
    head_dim: int = 32
    num_experts: int = 32
    moe_top_k: int = 4
    expert_width: int = 32
    max_positions: int = 1024


@dataclass(frozen=True)
class StageConfig:
    """One pass of supervised training."""

    epochs: float
    lr: float
    batch_size: int = 64
    context_weight: float = 0.2  # weight of tokens that are not the policy's own
    balance_weight: float = (
        0.01  # load-balancing loss (Switch Transformer, arXiv 2101.03961, eq. 4)
    )
    warmup_steps: int = 100


def build_tiny_moe(shape: TinyMoEShape, vocab_size: int, seed: int) -> Qwen3MoeForCausalLM:
    """A randomly initialised policy whose signal keeps its scale through the residual stream."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.expert_width * shape.moe_top_k,
        moe_intermediate_size=shape.expert_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_heads,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.moe_top_k,
        norm_topk_prob=shape.moe_top_k > 1,  # of one chosen expert it would leave 1, not the gate
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=True,
        max_position_embeddings=shape.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    config.head_dim = shape.head_dim  # read by the model, not declared by the config class
    model = Qwen3MoeForCausalLM._from_config(
        config, experts_implementation="grouped_mm", attn_implementation="sdpa"
    )
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        std = 1 / math.sqrt(parameter.shape[-1])
        if "embed_tokens" in name:
            std = 0.08
        elif name.endswith("o_proj.weight"):
            std *= 0.5
        elif name.endswith("down_proj"):
            std = 0.5 / math.sqrt(shape.expert_width * shape.moe_top_k)
        torch.nn.init.normal_(parameter, std=std)
    return model


def train_stage(
    model: Qwen3MoeForCausalLM,
    rows: Sequence[DemoRow],
    stage: StageConfig,
    *,
    pad_id: int,
    seed: int,
    report: Callable[[int, int, float, float], None],
) -> None:
    """Train in place. ``report(step, num_steps, action_loss, tokens_per_s)`` every 100 steps."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    num_steps = int(stage.epochs * (len(rows) // stage.batch_size))
    losses: list[float] = []
    num_tokens, started = 0, time.monotonic()
    for step, batch in enumerate(_endless(rows, stage.batch_size, rng)):
        if step == num_steps:
            return
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * _schedule(step, num_steps, stage.warmup_steps)
        loss, action_loss, tokens = _batch_loss(model, batch, stage, pad_id)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(action_loss)
        num_tokens += tokens
        if step % 100 == 99 or step == num_steps - 1:
            rate = num_tokens / (time.monotonic() - started)
            report(step + 1, num_steps, float(np.mean(losses[-100:])), rate)


def _endless(
    rows: Sequence[DemoRow], batch_size: int, rng: random.Random
) -> Iterator[list[DemoRow]]:
    while True:
        yield from length_sorted_batches(rows, batch_size, rng)


def _schedule(step: int, num_steps: int, warmup_steps: int) -> float:
    """Linear warm-up, then a cosine from 1 to 0.05."""
    warmup = min(1.0, (step + 1) / warmup_steps)
    return warmup * (0.05 + 0.475 * (1 + math.cos(math.pi * step / num_steps)))


def _batch_loss(
    model: Qwen3MoeForCausalLM, batch: Sequence[DemoRow], stage: StageConfig, pad_id: int
) -> tuple[torch.Tensor, float, int]:
    longest = max(len(row.token_ids) for row in batch)
    width = -(-longest // 16) * 16 + 1  # few distinct shapes: kernels are cached per shape
    ids = torch.full((len(batch), width), pad_id, dtype=torch.long)
    action = torch.zeros((len(batch), width), dtype=torch.bool)
    real = torch.zeros((len(batch), width), dtype=torch.bool)
    for i, row in enumerate(batch):
        length = len(row.token_ids)
        ids[i, :length] = torch.from_numpy(row.token_ids.astype(np.int64))
        action[i, :length] = torch.from_numpy(row.is_action)
        real[i, :length] = True
    output = model(ids[:, :-1], output_router_logits=True, use_cache=False)
    target_real, target_action = real[:, 1:], action[:, 1:]
    losses = F.cross_entropy(
        output.logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none"
    ).view_as(target_real)
    weights = torch.where(target_action, 1.0, stage.context_weight) * target_real
    loss = (losses * weights).sum() / weights.sum()
    balance = _balance_loss(
        output.router_logits, real[:, :-1].flatten(), model.config.num_experts_per_tok
    )
    action_loss = float(losses.detach()[target_action].mean())
    return loss + stage.balance_weight * balance, action_loss, int(real.sum())


def _balance_loss(
    router_logits: Sequence[torch.Tensor], real: torch.Tensor, moe_top_k: int
) -> torch.Tensor:
    """``E * sum_e f_e * P_e`` averaged over layers, on real tokens only."""
    total = torch.zeros(())
    for logits in router_logits:
        probabilities = logits[real].float().softmax(-1)  # [T, E]
        num_experts = probabilities.shape[-1]
        chosen = probabilities.topk(moe_top_k, -1).indices.flatten()
        load = torch.bincount(chosen, minlength=num_experts).float() / chosen.numel()
        total = total + num_experts * (load * probabilities.mean(0)).sum()
    return total / len(router_logits)
