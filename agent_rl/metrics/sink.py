"""Destinations of metrics: ``metrics.jsonl`` for programs, TensorBoard for people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Self

import orjson
from torch.utils.tensorboard import SummaryWriter


class MetricsSink:
    """Appends one JSON object per step and mirrors its numbers to TensorBoard."""

    def __init__(self, jsonl: Path, tensorboard: Path) -> None:
        self._file = jsonl.open("ab")
        self._writer = SummaryWriter(str(tensorboard))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._file.write(orjson.dumps({"step": step, **metrics}) + b"\n")
        self._file.flush()
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
