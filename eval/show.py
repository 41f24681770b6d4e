"""A report for people: a table on the terminal and pages to read."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agent_rl.store.run_folder import write_aside
from agent_rl.view.pages import IndexEntry, Verdict, episode_page, index_page
from agent_rl.view.record import EpisodeRecord
from eval.outcomes import Outcome
from eval.report import Report, Result
from eval.verdicts import Grade


def print_report(report: Report, console: Console) -> None:
    """Print counts, rates, repositories and costs."""
    title = Text.assemble((report.name, "bold"), f"  {report.model}  on {report.dataset}")
    console.print(title, highlight=False)
    table = Table(show_edge=False, pad_edge=False)
    for column in ("outcome", "samples", "share"):
        table.add_column(column, justify="left" if column == "outcome" else "right")
    total = report.counts.total
    for outcome, count in report.counts.by_outcome.items():
        table.add_row(outcome.label, str(count), _share(count, total))
    table.add_section()
    table.add_row("asked for", str(total), "")
    console.print(table)
    for name, value in _rates(report):
        console.print(f"{name:<12} {value}", highlight=False)
    repositories = Table(show_edge=False, pad_edge=False)
    for column in ("repository", "instances", "resolved"):
        repositories.add_column(column, justify="left" if column == "repository" else "right")
    for line in report.repositories():
        repositories.add_row(line.repo, str(line.num_instances), f"{line.resolved:g}")
    console.print(repositories)


def write_pages(
    folder: Path,
    report: Report,
    episodes: list[tuple[Result, EpisodeRecord | None, Grade | None]],
) -> Path:
    """Write ``index.html`` and a page for each episode; return the address of the index."""
    entries: list[IndexEntry] = []
    for result, record, grade in episodes:
        shown = record or _elsewhere(report, result)
        log = grade.test_log if grade is not None else ""
        verdict = Verdict(result.outcome.label, result.reason, log)
        name = f"{result.instance_id}.{result.sample}.html"
        page = episode_page(shown, verdict, back="index.html")
        write_aside(folder / name, page.encode("utf-8", "replace"))
        entries.append(IndexEntry(name, shown, verdict))
    counts = [[o.label, str(n), _share(n, report.counts.total)] for o, n in _counted(report)]
    counts.append(["asked for", str(report.counts.total), ""])
    lines = [
        [line.repo, str(line.num_instances), f"{line.resolved:g}"] for line in report.repositories()
    ]
    facts = [("model", report.model), ("data set", report.dataset)]
    facts += [("harness", report.harness)] if report.harness else []
    tables = [
        ("Outcomes", ("outcome", "samples", "share"), counts),
        ("Repositories", ("repository", "instances", "resolved"), lines),
    ]
    index = index_page(f"Evaluation {report.name}", [*facts, *_rates(report)], tables, entries)
    write_aside(folder / "index.html", index.encode("utf-8", "replace"))
    return folder / "index.html"


def _counted(report: Report) -> list[tuple[Outcome, int]]:
    return list(report.counts.by_outcome.items())


def _rates(report: Report) -> list[tuple[str, str]]:
    low, high = report.interval
    rates = [("Pass@1", f"{report.pass_at_1:.1%}  (95 % interval {low:.1%} to {high:.1%})")]
    for k in range(2, report.num_samples + 1):
        rates.append((f"Pass@{k}", f"{report.pass_at(k):.1%}"))
    means = report.means()
    if means["turns"]:
        rates += [
            ("turns", f"{means['turns']:.1f} per episode"),
            (
                "tokens",
                f"{means['completion_tokens']:,.0f} written, {means['prompt_tokens']:,.0f} read",
            ),
            ("seconds", f"{means['seconds']:,.1f} per episode"),
        ]
    return rates


def _elsewhere(report: Report, result: Result) -> EpisodeRecord:
    """Make a stand-in for an episode that was not played here."""
    played = "made elsewhere" if result.outcome is not Outcome.NOT_RUN else "not played"
    return EpisodeRecord(result.instance_id, result.sample, report.model, "absent", played, "", "")


def _share(count: int, total: int) -> str:
    return f"{count / total:.1%}" if total else ""
