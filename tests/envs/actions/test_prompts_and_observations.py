"""Prompts as data and what the model sees of command output."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.actions import head_and_tail, load_prompts, model_view
from envs.errors import TaskError


def test_the_shipped_prompt_is_filled_once() -> None:
    prompts = load_prompts("swe").fill(
        {"tools": "TOOLS", "issue": "costs $5, see $HOME", "workspace": "/testbed"}
    )
    assert "TOOLS" in prompts.system
    assert "costs $5, see $HOME" in prompts.user  # text of an issue is never a hole


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("## system\nhello\n", "expected '## system' and '## user'"),
        ("## system\na\n## user\n$issu\n", "bad hole"),
        ("## system\na $ b\n## user\nx\n", "bad hole"),
    ],
)
def test_a_faulty_prompt_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "own.md"
    file.write_text(text)
    with pytest.raises(TaskError, match=message):
        load_prompts(str(file))


def test_an_unknown_prompt_names_the_ones_that_ship() -> None:
    with pytest.raises(TaskError, match=r"one of .*swe"):
        load_prompts("nope")


def test_long_output_keeps_head_and_tail_and_says_so() -> None:
    text = "".join(f"line {n}\n" for n in range(1000))
    shown = head_and_tail(text, 200)
    assert shown.startswith("line 0\n")
    assert shown.endswith("line 999\n")
    assert f"{len(text) - 200} characters left out" in shown
    assert head_and_tail("short", 200) == "short"
    assert head_and_tail("x" * 10, 4, head_share=1.0).startswith("xxxx\n[")


def test_bytes_that_are_not_text_are_shown_not_fatal() -> None:
    assert model_view(b"caf\xe9\n", 100) == "caf\N{REPLACEMENT CHARACTER}\n"
    assert model_view(b"a\x00b", 100) == "a\\x00b"
    assert model_view(b"\x1b[31mred\x1b[0m", 100) == "red"
    cut = "é".encode()[:1]
    assert model_view(b"x" + cut, 100) == "x\N{REPLACEMENT CHARACTER}"
