"""The word-level tokenizer: splitting, round trips, and text that imitates a marker."""

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from agent_rl.errors import ConfigError
from agent_rl.rollout.compact_tokenizer import (
    SPECIAL_TOKENS,
    WORD_PATTERN,
    CompactTokenizer,
    build_compact_tokenizer,
)

CODE = "def f_1(a, b):\n    if a != 10:\n        return b // 2\n    a += 345\n"


def test_words_numbers_and_operators_are_single_tokens() -> None:
    tokenizer = build_compact_tokenizer([CODE])
    ids = tokenizer.encode(CODE)
    assert ids.dtype == np.int32
    words = tokenizer.decode(ids).split(" ")
    assert words == re.findall(WORD_PATTERN, CODE)
    assert {"f_1", "!=", "//", "+=", "345", "\n"} <= set(words)


def test_vocabulary_is_markers_then_sorted_words() -> None:
    tokenizer = build_compact_tokenizer(["b a a", "c"], min_count=1)
    assert tokenizer.decode(range(tokenizer.vocab_size)).split(" ") == [*SPECIAL_TOKENS, *"abc"]
    assert build_compact_tokenizer(["b a a"], min_count=2).vocab_size == len(SPECIAL_TOKENS) + 1


def test_unknown_words_become_unk() -> None:
    tokenizer = build_compact_tokenizer(["a"])
    assert tokenizer.encode("a zebra a").tolist()[1] == tokenizer.unk_id


@pytest.mark.parametrize("marker", SPECIAL_TOKENS)
def test_text_cannot_spell_a_marker(marker: str) -> None:
    tokenizer = build_compact_tokenizer(["< > end obs user pad unk assistant a"])
    ids = tokenizer.encode(f"a {marker} a")
    assert ids.min() >= len(SPECIAL_TOKENS)
    assert len(ids) == 5


def test_saved_tokenizer_loads_equal_and_still_ignores_markers(tmp_path: Path) -> None:
    tokenizer = build_compact_tokenizer([CODE, "< end >"])
    tokenizer.save(tmp_path / "model")
    loaded = CompactTokenizer.load(tmp_path / "model")
    assert loaded.vocab_size == tokenizer.vocab_size
    text = CODE + " <end>"
    np.testing.assert_array_equal(loaded.encode(text), tokenizer.encode(text))
    assert loaded.end_id not in loaded.encode(text)


def test_absent_file_and_foreign_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected tokenizer\.json"):
        CompactTokenizer.load(tmp_path)
    foreign = Tokenizer(models.WordLevel({"<unk>": 0, "<end>": 1}, unk_token="<unk>"))
    with pytest.raises(ConfigError, match=r"<user>.*expected"):
        CompactTokenizer(foreign)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="abc_ 012\n+-=/<>!%.é", max_size=40))
def test_split_equals_the_pattern(text: str) -> None:
    tokenizer = build_compact_tokenizer([text])
    assert tokenizer.encode(text).size == len(re.findall(WORD_PATTERN, text))
    again = tokenizer.decode(tokenizer.encode(text))
    np.testing.assert_array_equal(tokenizer.encode(again), tokenizer.encode(text))
