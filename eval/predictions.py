"""Predictions: one patch per instance, as JSON lines that every SWE-bench tool reads and writes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from agent_rl.store.run_folder import write_aside
from eval.errors import PredictionsError


@dataclass(frozen=True)
class Prediction:
    """A patch as it will reach ``git apply``; bytes that are not UTF-8 are kept as surrogates."""

    instance_id: str
    model_name: str
    patch: str

    @property
    def is_empty(self) -> bool:
        return not self.patch.strip()

    @property
    def is_text(self) -> bool:
        """True when the harness can write it: it takes UTF-8 only."""
        return _encodes(self.patch)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.patch.encode("utf-8", "surrogateescape")).hexdigest()

    def to_json(self) -> str:
        return json.dumps(
            {
                "instance_id": self.instance_id,
                "model_name_or_path": self.model_name,
                "model_patch": self.patch,
            }
        )


def patch_text(patch: bytes) -> str:
    """Return patch bytes as text that comes back byte for byte, ended by a newline."""
    return end_with_newline(patch.decode("utf-8", "surrogateescape"))


def end_with_newline(patch: str) -> str:
    """Add the last newline where it is missing; an empty patch stays empty."""
    return patch if not patch or patch.endswith("\n") else f"{patch}\n"


def read_predictions(file: Path) -> dict[str, Prediction]:
    """Read predictions by instance id, from ``.jsonl``, or ``.json`` with a list or a mapping.

    A last JSON line torn by a kill is left out. Raises PredictionsError for anything else that is
    damaged, and for an instance that appears twice with different patches.
    """
    if not file.is_file():
        raise PredictionsError(f"no predictions: got={str(file)!r} expected a .jsonl or .json file")
    found: dict[str, Prediction] = {}
    for place, row in _rows(file):
        prediction = _prediction(row, f"{file} {place}")
        known = found.setdefault(prediction.instance_id, prediction)
        if known != prediction:
            raise PredictionsError(
                f"{file} {place}: {prediction.instance_id} appears twice with different patches;"
                " expected one prediction per instance (further samples go to files of their own)"
            )
    return found


def write_predictions(file: Path, predictions: Iterable[Prediction]) -> None:
    """Replace the file as a whole."""
    write_aside(file, "".join(f"{p.to_json()}\n" for p in predictions).encode())


def append_prediction(file: Path, prediction: Prediction) -> None:
    """Add one line and have it on disk before returning. A torn last line is cut off first."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("ab+") as handle:
        handle.seek(0)
        _end_last_line(handle)
        handle.write(f"{prediction.to_json()}\n".encode())
        handle.flush()
        os.fsync(handle.fileno())


def _end_last_line(handle: BinaryIO) -> None:
    """Complete a last line without a newline when it is whole, else cut it off."""
    content = handle.read()
    kept = content.rfind(b"\n") + 1
    if kept == len(content):
        return
    try:
        json.loads(content[kept:])
    except ValueError:
        handle.truncate(kept)
    else:
        handle.write(b"\n")


def _rows(file: Path) -> Iterable[tuple[str, object]]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        try:
            loaded = cast(object, json.loads(text))
        except ValueError as error:
            raise PredictionsError(f"{file} is not JSON: got={error}") from error
        if isinstance(loaded, dict):
            mapping = cast("Mapping[str, object]", loaded)
            return [(f"entry {key}", _with_id(key, value)) for key, value in mapping.items()]
        rows = cast("list[object]", loaded) if isinstance(loaded, list) else [loaded]
        return [(f"entry {number}", row) for number, row in enumerate(rows, start=1)]
    return _json_lines(file, text.split("\n"))


def _json_lines(file: Path, lines: list[str]) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((f"line {number}", json.loads(line)))
        except ValueError as error:
            if number != len(lines):  # the last line has no newline: it was torn
                raise PredictionsError(f"{file} line {number} is damaged: got={error}") from error
    return rows


def _with_id(key: str, value: object) -> object:
    """Read an entry of SWE-agent's form: an instance with its prediction or the bare patch."""
    if isinstance(value, str):
        return {"instance_id": key, "model_patch": value}
    if isinstance(value, dict):
        return {"instance_id": key, **cast("dict[str, object]", value)}
    return value


def _prediction(row: object, where: str) -> Prediction:
    if not isinstance(row, dict):
        raise PredictionsError(f"{where}: got={type(row).__name__} expected an object")
    fields = cast("Mapping[str, object]", row)
    instance_id, patch = fields.get("instance_id"), fields.get("model_patch")
    name = fields.get("model_name_or_path") or "unnamed"
    if not isinstance(instance_id, str) or not isinstance(name, str):
        raise PredictionsError(f"{where}: got={sorted(fields)} expected instance_id and model name")
    if patch is not None and not isinstance(patch, str):
        kind = type(patch).__name__
        raise PredictionsError(f"{where}: model_patch got={kind} expected text or null")
    return Prediction(instance_id, name, patch or "")


def _encodes(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
