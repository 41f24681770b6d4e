"""Self-contained HTML pages: no script, no network, every text escaped."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass

from agent_rl.view.record import EpisodeRecord, TurnRecord
from agent_rl.view.style import STYLE
from envs.actions.observation import unicode_only

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_OPEN_CHARS = 3000  # longer texts start folded
_NUMBER = re.compile(r"[\d,.]+%?")
_BADGES = {
    "resolved": "good",
    "completed": "good",
    "infrastructure": "warn",
    "timeout": "warn",
    "failed": "warn",
    "not run": "idle",
    "aborted": "idle",
}


@dataclass(frozen=True)
class Verdict:
    """The judgement of an episode. ``label`` is what the badge says."""

    label: str
    reason: str = ""
    test_log: str = ""


@dataclass(frozen=True)
class IndexEntry:
    """A line of the index: where the episode's page is and what to show of it."""

    href: str
    record: EpisodeRecord
    verdict: Verdict


def episode_page(record: EpisodeRecord, verdict: Verdict, back: str = "") -> str:
    """One episode from prompt to test log. ``back`` is the address of the index."""
    parts = [
        f'<p class="back"><a href="{_attribute(back)}">← all episodes</a></p>' if back else "",
        f"<h1>{_text(record.task_id)} {_badge(verdict.label)}</h1>",
        _facts(record, verdict),
        _prompts(record),
        "<h2 id=turns>Turns</h2>" if record.turns else "",
        *(_turn(number, turn) for number, turn in enumerate(record.turns, start=1)),
        "<h2 id=patch>Patch</h2>",
        _patch(record),
        "<h2 id=tests>Test log</h2>" if verdict.test_log else "",
        _folded("test output", verdict.test_log, "log") if verdict.test_log else "",
    ]
    return _page(f"{record.task_id}: {verdict.label}", parts)


def index_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
    entries: Sequence[IndexEntry],
) -> str:
    """Facts, tables (heading, columns, rows) and a line for each episode."""
    parts = [f"<h1>{_text(title)}</h1>", _definitions(facts)]
    for heading, columns, rows in tables:
        parts += [f"<h2>{_text(heading)}</h2>", _table(columns, [_cells(row) for row in rows])]
    if entries:
        columns = ("instance", "sample", "outcome", "stopped", "turns", "tokens", "seconds", "why")
        parts += ["<h2>Episodes</h2>", _table(columns, [_entry(entry) for entry in entries])]
    return _page(title, parts)


def _page(title: str, parts: Sequence[str]) -> str:
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style></head>\n"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _facts(record: EpisodeRecord, verdict: Verdict) -> str:
    facts = [
        ("model", record.model),
        ("stopped by", f"{record.stop_reason} ({record.status})"),
        ("turns", str(len(record.turns))),
        ("tokens", f"{record.completion_tokens:,} written, {record.prompt_tokens:,} read"),
        ("seconds", f"{record.seconds:,.1f}"),
    ]
    if record.reward is not None:
        facts.append(("reward", f"{record.reward:g}"))
    for name, value in (("why", verdict.reason), ("error", record.error)):
        if value:
            facts.append((name, value))
    links = '<p class="jump"><a href="#turns">turns</a> <a href="#patch">patch</a>'
    links += ' <a href="#tests">test log</a></p>' if verdict.test_log else "</p>"
    return _definitions(facts) + links


def _prompts(record: EpisodeRecord) -> str:
    parts = []
    if record.system_prompt:
        parts.append(_folded("system prompt", record.system_prompt, "prompt", is_open=False))
    if record.user_prompt:
        parts.append(_folded("task", record.user_prompt, "prompt"))
    return "\n".join(parts)


def _turn(number: int, turn: TurnRecord) -> str:
    cost = (
        f"{turn.completion_tokens} tokens · {turn.seconds_generate:.1f} s model"
        f" · {turn.seconds_environment:.1f} s tools"
    )
    mark = ' <span class="badge bad">malformed</span>' if turn.malformed else ""
    thinking = _folded("thinking", turn.reasoning, "prompt", False) if turn.reasoning else ""
    reply = _folded("reply", turn.observation, "reply") if turn.observation else ""
    return (
        f'<section class="turn" id="turn-{number}"><h3><a href="#turn-{number}">{number}</a>'
        f'{mark} <small>{cost}</small></h3>{thinking}\n<pre class="action">{_text(turn.action)}'
        f"</pre>\n{reply}</section>"
    )


def _patch(record: EpisodeRecord) -> str:
    notes = "".join(f"<li>{_text(note)}</li>" for note in record.notes)
    left_out = f'<p>Left out of the patch:</p><ul class="notes">{notes}</ul>' if notes else ""
    if not record.patch.strip():
        return f"<p>The patch is empty.</p>{left_out}"
    lines = "\n".join(_diff_line(line) for line in record.patch.split("\n"))
    return f'<pre class="diff">{lines}</pre>{left_out}'


def _diff_line(line: str) -> str:
    kind = ""
    if line.startswith(("diff --git", "--- ", "+++ ")):
        kind = "file"
    elif line.startswith("@@"):
        kind = "hunk"
    elif line.startswith("+"):
        kind = "added"
    elif line.startswith("-"):
        kind = "removed"
    return f'<span class="{kind}">{_text(line)}</span>' if kind else _text(line)


def _folded(name: str, text: str, kind: str, is_open: bool = True) -> str:
    state = " open" if is_open and len(text) <= _OPEN_CHARS else ""
    num_lines = text.count("\n") + 1
    size = f"{num_lines} line{'s' if num_lines > 1 else ''}, {len(text):,} characters"
    return (
        f'<details class="{kind}"{state}><summary>{name} <small>{size}</small></summary>'
        f"<pre>{_text(text)}</pre></details>"
    )


def _entry(entry: IndexEntry) -> list[str]:
    record = entry.record
    link = f'<a href="{_attribute(entry.href)}">{_text(record.task_id)}</a>'
    numbers = (str(len(record.turns)), f"{record.completion_tokens:,}", f"{record.seconds:,.1f}")
    why, ended = _text(entry.verdict.reason[:200]), _text(record.stop_reason)
    return [link, str(record.sample), _badge(entry.verdict.label), ended, *numbers, why]


def _definitions(facts: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts)
    return f"<dl>{rows}</dl>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Cells are HTML already. A column of numbers is set to the right."""
    kinds = [_column_kind([row[index] for row in rows]) for index in range(len(columns))]
    head = "".join(f"<th{k}>{_text(c)}</th>" for k, c in zip(kinds, columns, strict=True))
    lines: list[str] = []
    for row in rows:
        cells = "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True))
        lines.append(f"<tr>{cells}</tr>")
    inner = f"<thead><tr>{head}</tr></thead>\n<tbody>{chr(10).join(lines)}</tbody>"
    return f'<div class="wide"><table>{inner}</table></div>'


def _column_kind(cells: Sequence[str]) -> str:
    if all(not cell or _NUMBER.fullmatch(cell) for cell in cells):
        return ' class="num"' if any(cells) else ""
    return ' class="long"' if max(map(len, cells)) > 60 and "<" not in "".join(cells) else ""


def _cells(row: Sequence[str]) -> list[str]:
    return [_text(cell) for cell in row]


def _badge(label: str) -> str:
    return f'<span class="badge {_BADGES.get(label, "bad")}">{_text(label)}</span>'


def _text(text: str) -> str:
    """Escaped; bytes that were no text are shown as the replacement character."""
    return html.escape(unicode_only(text).replace("\0", "\N{SYMBOL FOR NULL}"), quote=False)


def _attribute(text: str) -> str:
    return html.escape(text, quote=True)
