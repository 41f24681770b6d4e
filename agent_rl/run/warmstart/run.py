"""The whole warm start: demonstrations, vocabulary, two stages, a Hugging Face folder."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import Qwen3MoeForCausalLM
from transformers.utils import logging as hf_logging

from agent_rl.rollout.compact_tokenizer import CompactTokenizer, build_compact_tokenizer
from agent_rl.run.warmstart.data import demo_texts, encode_demo, make_demos
from agent_rl.run.warmstart.train import StageConfig, TinyMoEShape, build_tiny_moe, train_stage
from envs.tasks.repair_demos import DemoSkill

# Words that only the environment says, and rarely: they must not become <unk>.
_ENVIRONMENT_WORDS = (
    "bad tool line error timeout pass fail got want ok . "
    "NameError TypeError ValueError IndexError AttributeError ZeroDivisionError SyntaxError "
    "IndentationError RecursionError MemoryError UnboundLocalError OverflowError KeyError"
)


@dataclass(frozen=True)
class WarmstartConfig:
    """The recipe that made the shipped policy; ``num_demos`` is for each stage."""

    seed: int = 0
    num_demos: int = 40_000
    num_threads: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"  # of the weights as written
    shape: TinyMoEShape = field(default_factory=TinyMoEShape)
    skills: tuple[DemoSkill, DemoSkill] = (
        DemoSkill(right_line=0.80, right_code=0.55),
        DemoSkill(right_line=0.82, right_code=0.62),
    )
    stages: tuple[StageConfig, StageConfig] = (
        StageConfig(epochs=3.0, lr=4e-3),
        StageConfig(epochs=2.3, lr=3e-3),
    )


Report = Callable[[int, int, int, float, float], None]


def warmstart(config: WarmstartConfig, folder: Path, report: Report) -> dict[str, float]:
    """Train and write the policy below ``folder``; returns what is worth recording.

    ``report(stage, step, num_steps, action_loss, tokens_per_s)``.
    """
    torch.set_num_threads(config.num_threads)
    torch.manual_seed(config.seed)
    started = time.monotonic()
    record: dict[str, float] = {"seed": float(config.seed)}
    model: Qwen3MoeForCausalLM | None = None
    tokenizer: CompactTokenizer | None = None
    for number, (skill, stage) in enumerate(zip(config.skills, config.stages, strict=True), 1):
        demos = make_demos(config.num_demos, config.seed * 1000 + number, skill)
        record[f"stage{number}_demo_solved"] = sum(d.solved for d in demos) / len(demos)
        if model is None or tokenizer is None:
            texts = [*demo_texts(demos), *[_ENVIRONMENT_WORDS] * 5]
            tokenizer = build_compact_tokenizer(texts, min_count=5)
            model = build_tiny_moe(config.shape, tokenizer.vocab_size, config.seed)
        rows = [encode_demo(tokenizer, demo) for demo in demos]
        train_stage(
            model,
            rows,
            stage,
            pad_id=tokenizer.pad_id,
            seed=config.seed + number,
            report=lambda *values, n=number: report(n, *values),
        )
    assert model is not None
    assert tokenizer is not None
    record["num_parameters"] = float(sum(p.numel() for p in model.parameters()))
    record["wall_s"] = round(time.monotonic() - started, 1)
    model.generation_config.eos_token_id = tokenizer.end_id
    model.generation_config.pad_token_id = tokenizer.pad_id
    save_quietly(model.to(getattr(torch, config.dtype)), folder)
    tokenizer.save(folder)
    (folder / "warmstart.json").write_text(
        json.dumps({"recipe": asdict(config), "record": record}, indent=2) + "\n"
    )
    return record


def save_quietly(model: Qwen3MoeForCausalLM, folder: Path) -> None:
    """Write ``model`` below ``folder`` (made if absent) without transformers' own progress bar."""
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()
