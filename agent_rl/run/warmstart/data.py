"""Demonstrations as token rows: what the policy imitates, and with which weight."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from agent_rl.rollout.compact_tokenizer import CompactTokenizer
from envs.tasks.repair import generate
from envs.tasks.repair_demos import Demo, DemoSkill, demonstrate


@dataclass(frozen=True)
class DemoRow:
    """One demonstration. ``is_action`` marks the tokens that the policy itself must produce."""

    token_ids: NDArray[np.int32]  # [T]
    is_action: NDArray[np.bool_]  # [T]


def make_demos(num_demos: int, seed: int, skill: DemoSkill) -> list[Demo]:
    """Demonstrations on training tasks only; a held-out function is never shown."""
    rng = random.Random(seed)
    return [demonstrate(task, rng, skill) for task in islice(generate(seed, "train"), num_demos)]


def demo_texts(demos: Sequence[Demo]) -> list[str]:
    """Every message, for building the vocabulary."""
    return [text for demo in demos for _, text in demo.messages]


def encode_demo(tokenizer: CompactTokenizer, demo: Demo) -> DemoRow:
    """``<role> text <end>`` for each message, as the compact renderer lays a trajectory out."""
    markers = {
        "user": tokenizer.user_id,
        "assistant": tokenizer.assistant_id,
        "obs": tokenizer.obs_id,
    }
    ids: list[int] = []
    is_action: list[bool] = []
    for role, text in demo.messages:
        block = [*tokenizer.encode(text).tolist(), tokenizer.end_id]
        ids += [markers[role], *block]
        is_action += [False, *([role == "assistant"] * len(block))]
    return DemoRow(np.array(ids, np.int32), np.array(is_action, np.bool_))


def length_sorted_batches(
    rows: Sequence[DemoRow], batch_size: int, rng: random.Random
) -> list[list[DemoRow]]:
    """Batches of similar length in random order; a remainder smaller than a batch is left out."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids) + rng.random() * 8)
    last = len(order) - batch_size + 1
    batches = [[rows[i] for i in order[b : b + batch_size]] for b in range(0, last, batch_size)]
    rng.shuffle(batches)
    return batches
