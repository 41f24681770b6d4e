"""The table of what every combination showed."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from combinations import Combination
from launch_ranks import Results

_HEAD = """# Parallel layouts against one process

Written by `make test-parallel`; do not edit. Python {python},
Megatron-core {megatron}, torch {torch}.
Every row is one training step in float32 on gloo processes, with recorded experts that differ from
the routers' own choice, in several micro-batches. The policy has four layers, the first dense, and
eight experts of which two a token: a Qwen3-MoE with tied embeddings, or, where a row says so, a
DeepSeek-V3 with latent attention, YaRN, a shared expert and a selection bias.

- gradient error: largest over all parameters of |g - g'| / |g'|, g' from transformers' model in one
  process with the same experts forced on it; 1e-5 is the limit
- markers: every token that any router saw, in every pass and recompute, was told by its embedding;
  ok when each came exactly once a pass, with its own row's experts
- replayed: share of fed tokens whose routing was replayed
- flips with replay: (token, layer, pass) whose set was not the recorded one

| combination | processes | gradient error | markers | replayed | flips with replay |
|---|---|---|---|---|---|
"""


def write_table(path: Path, combinations: Sequence[Combination], results: Results) -> None:
    lines = []
    for combination in combinations:
        found = results[combination.name]
        lines.append(
            f"| {combination.name} | {combination.processes} | {found['gradient_error']:.1e} "
            f"| {'ok' if found['marker_ok'] else 'WRONG'} | {found['replayed_fraction']:.0%} "
            f"| {found['wrong_sets']} |"
        )
    head = _HEAD.format(
        python=platform.python_version(),
        megatron=version("megatron-core"),
        torch=version("torch").partition("+")[0],
    )
    path.write_text(head + "\n".join(lines) + "\n")
