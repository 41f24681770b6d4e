"""Self-contained HTML pages: no script, no network, every text escaped."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from agent_rl.view.record import EpisodeRecord
from envs.actions.observation import unicode_only

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
_DIFF_KINDS = {  # by the start of the line; the first that fits counts
    "diff --git": "file",
    "--- ": "file",
    "+++ ": "file",
    "@@": "hunk",
    "+": "added",
    "-": "removed",
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
    """Render one episode from prompt to test log. ``back`` is the address of the index."""
    facts = [
        ("model", record.model),
        ("stopped by", f"{record.stop_reason} ({record.status})"),
        ("turns", str(len(record.turns))),
        ("tokens", f"{record.completion_tokens:,} written, {record.prompt_tokens:,} read"),
        ("seconds", f"{record.seconds:,.1f}"),
        ("reward", "" if record.reward is None else f"{record.reward:g}"),
        ("why", verdict.reason),
        ("error", record.error),
    ]
    optional = ("reward", "why", "error")
    shown = [(name, value) for name, value in facts if value or name not in optional]
    title = f"{record.task_id}: {verdict.label}"
    return _render(
        "episode.html", title=title, facts=shown, record=record, verdict=verdict, back=back
    )


def index_page(
    title: str,
    facts: Sequence[tuple[str, str]],
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]],
    entries: Sequence[IndexEntry],
) -> str:
    """Render facts, tables (heading, columns, rows) and a line for each episode."""
    return _render("index.html", title=title, facts=facts, tables=tables, entries=entries)


def _render(template: str, **values: object) -> str:
    """Return the page; bytes that were no text are shown as the replacement character."""
    page = _TEMPLATES.get_template(template).render(values)
    return unicode_only(page).replace("\0", "\N{SYMBOL FOR NULL}")


def _column_kinds(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[Markup]:
    """Return a class attribute per column: numbers stand to the right, long texts wrap."""
    return [_column_kind([row[index] for row in rows]) for index in range(len(columns))]


def _column_kind(cells: Sequence[str]) -> Markup:
    if all(not cell or _NUMBER.fullmatch(cell) for cell in cells):
        return Markup(' class="num"' if any(cells) else "")
    return Markup(' class="long"' if max(map(len, cells)) > 60 else "")


def _diff_kind(line: str) -> str:
    return next((kind for start, kind in _DIFF_KINDS.items() if line.startswith(start)), "context")


_TEMPLATES = Environment(
    loader=PackageLoader("agent_rl.view"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters.update(
    badge_kind=lambda label: _BADGES.get(label, "bad"),
    column_kinds=_column_kinds,
    diff_kind=_diff_kind,
)
