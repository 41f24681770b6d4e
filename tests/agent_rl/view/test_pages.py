"""Pages: everything of an episode is there, nothing of it is markup, records survive."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from agent_rl.view import EpisodeRecord, TurnRecord, Verdict, episode_page, index_page
from agent_rl.view.pages import IndexEntry
from agent_rl.view.record import RecordError, load_record, record_of_row, save_record

NASTY = "<script>alert(1)</script> \"'& </pre></details> caf\udce9 \x00"
VOID = {"meta", "br"}


class Outline(HTMLParser):
    """Element names, whether they are balanced, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.text = ""
        self.links: list[str | None] = []
        self.attributes: set[str] = set()
        self.balanced = True
        self.feed(page)
        self.balanced &= not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links += [value for name, value in attrs if name == "href"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        self.balanced &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def make_record(text: str = NASTY) -> EpisodeRecord:
    turn = TurnRecord(text, text, 10, 5, 1.25, 0.5, malformed=True, reasoning=text)
    return EpisodeRecord(
        f"task {text}", 0, text, "completed", text, text, text, (turn,), f"+{text}\n-x\n@@ @@",
        (text,), text, 3.0, 0.5,
    )  # fmt: skip


def test_text_of_an_agent_is_never_markup() -> None:
    page = episode_page(make_record(), Verdict(NASTY, NASTY, NASTY), back='x"><script>')
    outline = Outline(page)
    assert outline.balanced
    assert "script" not in outline.names
    assert outline.text.count("<script>alert(1)</script>") >= 12
    assert "default-src 'none'" in page
    assert "caf\N{REPLACEMENT CHARACTER}" in page
    page.encode()  # nothing in it that cannot be written


BREAKOUT = """'"><script>x</script><img src=x onerror='x' title="{{ 7*7 }}">{% raw %}"""


def with_every_text_replaced(value: Any) -> Any:
    """Put BREAKOUT into every text field, those of nested records and tuples too."""
    if isinstance(value, str):
        return BREAKOUT
    if isinstance(value, tuple):
        return tuple(with_every_text_replaced(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        texts = {f.name: with_every_text_replaced(getattr(value, f.name)) for f in fields(value)}
        return replace(value, **texts)
    return value


def test_quotes_and_tags_in_any_field_add_no_element_and_no_attribute() -> None:
    plain = IndexEntry("a.html", make_record("x"), Verdict("failed", "why", "log"))
    hostile = with_every_text_replaced(plain)
    table = [("T", ("a", "b"), [("u", "v")])]
    hostile_table = [(BREAKOUT, (BREAKOUT, BREAKOUT), [(BREAKOUT, BREAKOUT)])]
    for before, after in (
        (
            episode_page(plain.record, plain.verdict, back="i"),
            episode_page(hostile.record, hostile.verdict, back=BREAKOUT),
        ),
        (
            index_page("t", [("f", "v")], table, [plain]),
            index_page(BREAKOUT, [(BREAKOUT, BREAKOUT)], hostile_table, [hostile]),
        ),
    ):
        outline, expected = Outline(after), Outline(before)
        assert outline.balanced
        assert (outline.names, outline.attributes) == (expected.names, expected.attributes)
        assert BREAKOUT in outline.links
        assert outline.text.count(BREAKOUT) >= 6
        assert BREAKOUT not in after


def test_a_page_shows_prompt_turns_reply_patch_and_log() -> None:
    record = EpisodeRecord(
        "t", 0, "model", "completed", "submit", "SYS", "USER",
        (TurnRecord("ACT", "REPLY"), TurnRecord("ACT2", "REPLY2")), "+added\n", ("x.bin: binary",),
    )  # fmt: skip
    page = episode_page(record, Verdict("unresolved", "WHY", "LOG"))
    places = [page.index(f">{w}<") for w in ("SYS", "USER", "ACT", "REPLY", "ACT2", "REPLY2")]
    assert places == sorted(places)
    assert page.index('class="added">+added') < page.index("x.bin: binary") < page.index("LOG")
    empty = episode_page(EpisodeRecord("t", 0, "m", "failed", "s", "", ""), Verdict("not run"))
    assert "The patch is empty" in empty
    assert Outline(empty).balanced


def test_a_turn_without_a_reply_shows_none() -> None:
    turns = (TurnRecord("view", "one line"), TurnRecord("submit", ""))
    page = episode_page(EpisodeRecord("t", 0, "m", "c", "s", "", "", turns), Verdict("resolved"))
    assert page.count('<details class="reply"') == 1
    assert "1 line, 8 characters" in page


def test_long_replies_start_folded_and_are_whole() -> None:
    record = EpisodeRecord("t", 0, "m", "c", "s", "", "", (TurnRecord("a", "y" * 50_000),))
    page = episode_page(record, Verdict("resolved"))
    assert '<details class="reply"><summary>' in page
    assert "y" * 50_000 in page


def test_the_index_links_every_episode() -> None:
    entry = IndexEntry('a".html', make_record(), Verdict("resolved", NASTY))
    page = index_page(NASTY, [("fact", NASTY)], [("T", ("a", "b"), [["1", "x"]])], [entry] * 3)
    outline = Outline(page)
    assert outline.balanced
    assert "script" not in outline.names
    assert outline.links == ['a".html'] * 3
    assert '<td class="num">1</td>' in page


def test_records_survive_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "episode.json"
    save_record(file, make_record())
    assert load_record(file) == make_record()
    whole = file.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"[]", b'{"turns": []}'):
        file.write_bytes(damaged)
        with pytest.raises(RecordError, match="is no episode"):
            load_record(file)


def test_a_training_trajectory_reads_as_a_record() -> None:
    turn = {
        "prompt_end": 3, "completion_end": 5, "action": "view", "observation": "1 x",
        "seconds_generate": 1.0, "seconds_environment": 0.5,
    }  # fmt: skip
    row = {
        "task_id": "t", "member": 2, "status": "completed", "stop_reason": "submit", "reward": 1.0,
        "error": "", "patch": b"+\xe9\n", "token_ids": [7, 8, 9, 1, 2], "turns": [turn],
        "weight_versions": [3, 4],
    }  # fmt: skip
    record = record_of_row(row, lambda ids: " ".join(map(str, ids)))
    assert (record.user_prompt, record.reward, record.sample) == ("7 8 9", 1.0, 2)
    assert (record.turns[0].completion_tokens, record.seconds) == (2, 1.5)
    assert record.patch.encode("utf-8", "surrogateescape") == b"+\xe9\n"
    assert record.model == "policy, weights 3, 4"
