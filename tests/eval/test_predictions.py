"""Prediction files: bytes kept, damage noticed, other tools' forms read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_rows import make_prediction

from eval.errors import PredictionsError
from eval.predictions import (
    Prediction,
    append_prediction,
    patch_text,
    read_predictions,
    write_predictions,
)


@pytest.mark.parametrize(
    "patch",
    [
        b"--- a\n+++ b\n@@ -1 +1 @@\n-x\n+y\n",
        b"@@ -1,3 +1,3 @@\n-a\r\n+b\r\n c\r\n \r\n",  # CRLF, last context line is blank
        b" \n \n",
        "+é\n".encode(),
        b"+\xe9 latin\n",
        b"+a\x00b\n",
        b"",
    ],
)
def test_patches_come_back_byte_for_byte(tmp_path: Path, patch: bytes) -> None:
    file = tmp_path / "predictions.jsonl"
    write_predictions(file, [Prediction("a", "m", patch_text(patch))])
    back = read_predictions(file)["a"].patch.encode("utf-8", "surrogateescape")
    assert back == patch


def test_only_a_missing_last_newline_is_added() -> None:
    assert patch_text(b"+a") == "+a\n"
    assert patch_text(b"+a\n\n") == "+a\n\n"
    assert patch_text(b" ") == " \n"


def test_what_the_harness_cannot_take_is_known() -> None:
    assert not Prediction("a", "m", patch_text(b"+\xe9\n")).is_text
    assert Prediction("a", "m", "+é\n").is_text
    assert Prediction("a", "m", " \n\n").is_empty


def test_a_torn_last_line_is_dropped_and_repaired(tmp_path: Path) -> None:
    file = tmp_path / "predictions.jsonl"
    append_prediction(file, make_prediction(1))
    append_prediction(file, make_prediction(2))
    whole = file.read_bytes()
    for cut in range(len(whole.splitlines(keepends=True)[0]) + 1, len(whole) + 1):
        file.write_bytes(whole[:cut])
        found = list(read_predictions(file))
        assert found == [f"local__calc-{n}" for n in ((1, 2) if cut >= len(whole) - 1 else (1,))]
        append_prediction(file, make_prediction(3))
        assert list(read_predictions(file)) == [*found, "local__calc-3"]


def test_damage_elsewhere_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"instance_id": \n' + make_prediction(1).to_json() + "\n")
    with pytest.raises(PredictionsError, match="line 1 is damaged"):
        read_predictions(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_patch": "x"}\n', "expected instance_id"),
        ('{"instance_id": "a", "model_patch": 3}\n', "model_patch got=int"),
        ("[1]\n", "got=list"),
        (
            '{"instance_id": "a", "model_patch": "x"}\n{"instance_id": "a", "model_patch": "y"}\n',
            "twice with different patches",
        ),
    ],
)
def test_unusable_lines_say_where_and_why(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    with pytest.raises(PredictionsError, match=message):
        read_predictions(file)


def test_other_tools_forms_are_read(tmp_path: Path) -> None:
    listed, mapped, bare = (tmp_path / f"{name}.json" for name in ("list", "map", "bare"))
    entry = {"instance_id": "a", "model_name_or_path": "m", "model_patch": "x"}
    listed.write_text(json.dumps([entry]))
    mapped.write_text(json.dumps({"a": {"model_name_or_path": "m", "model_patch": "x"}}))
    bare.write_text(json.dumps({"a": "x"}))
    assert read_predictions(listed) == read_predictions(mapped) == {"a": Prediction("a", "m", "x")}
    assert read_predictions(bare)["a"].patch == "x"
    bare.write_text(json.dumps([{**entry, "model_patch": None}]))
    assert read_predictions(bare)["a"].is_empty
