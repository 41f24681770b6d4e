"""The tool box spoken to through an action format: function calls of large models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from envs.actions import tools as t
from envs.actions.base import ActionFormat, CallError, Parameter, ToolCall, ToolSpec
from envs.actions.grammar import Spoken
from envs.actions.observation import head_and_tail, model_view, unicode_only
from envs.base import ExecResult
from envs.grading.suite import SuiteReport

_PATH = Parameter("path", "The file, relative to the work folder.")
_TOOLS: dict[str, tuple[type[t.ToolCall], ToolSpec]] = {
    spec.name: (call, spec)
    for call, spec in (
        (
            t.View,
            ToolSpec(
                "view",
                "Show numbered lines of a file.",
                (
                    _PATH,
                    Parameter("start", "First line, from 1.", "integer", required=False),
                    Parameter("end", "Last line; 0 is the file's last.", "integer", False),
                ),
            ),
        ),
        (
            t.Search,
            ToolSpec(
                "search",
                "Find the lines that hold a text.",
                (
                    Parameter("text", "What to look for, literally."),
                    Parameter("path", "Only in paths that start so.", required=False),
                ),
            ),
        ),
        (
            t.ReplaceLines,
            ToolSpec(
                "replace_lines",
                "Put new text in the place of some lines.",
                (
                    _PATH,
                    Parameter("start", "First line to replace, from 1.", "integer"),
                    Parameter("end", "Last line to replace.", "integer"),
                    Parameter("text", "The new lines."),
                ),
            ),
        ),
        (
            t.Edit,
            ToolSpec(
                "edit",
                "Replace a text that occurs exactly once in a file.",
                (_PATH, Parameter("old", "The text."), Parameter("new", "What replaces it.")),
            ),
        ),
        (
            t.Create,
            ToolSpec("create", "Write a new file.", (_PATH, Parameter("text", "Its content."))),
        ),
        (
            t.Bash,
            ToolSpec(
                "bash",
                "Run a shell command in the work folder; nothing of it keeps running afterwards.",
                (Parameter("command", "The command."),),
            ),
        ),
        (t.RunTests, ToolSpec("test", "Run the visible tests.")),
        (t.Submit, ToolSpec("submit", "End the episode: the work folder is the answer.")),
    )
}
TOOL_SPECS: tuple[ToolSpec, ...] = tuple(spec for _, spec in _TOOLS.values())
_MAX_CHARS = 16_000


class ActionGrammar:
    """One parser in front of the tool box; holds no state beyond its format."""

    def __init__(self, action_format: ActionFormat, max_chars: int = _MAX_CHARS) -> None:
        """``max_chars`` limits what the model sees of one result."""
        self._format, self._max_chars = action_format, max_chars

    def read(self, action: str, tools: t.ToolBox) -> Spoken:
        del tools
        parsed = self._format.parse(action, TOOL_SPECS)

        def reply(results: Sequence[t.ToolResult]) -> str:
            texts = [self._show(result) for result in results]
            texts += ["not run: the episode is over"] * (len(parsed.calls) - len(texts))
            return unicode_only(self._format.results(parsed, texts))

        return Spoken(tuple(_typed(call) for call in parsed.calls), reply)

    def _show(self, result: t.ToolResult) -> str:
        match result:
            case t.Listing():
                text = unicode_only("\n".join(_listing(result))) or "nothing found"
            case t.Done():
                text = "ok"
            case t.Refused():
                text = unicode_only(f"error: {result.reason}")
            case t.Submitted():
                text = "submitted"
            case SuiteReport():
                return self._show_report(result)
            case ExecResult():
                return f"{model_view(result.output, self._max_chars)}\n[{_ending(result)}]"
        return head_and_tail(text, self._max_chars)

    def _show_report(self, report: SuiteReport) -> str:
        counts = Counter(report.statuses.values())
        summary = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        if report.passed:
            return f"all tests pass: {summary}"
        broken = "" if report.complete else " (the run broke off)"
        log = model_view(report.log, self._max_chars)
        return f"tests fail{broken}: {summary or 'none ran'}\n{log}"


def _typed(call: ToolCall | CallError) -> t.ToolCall:
    """The format has checked names and kinds of the arguments against ``TOOL_SPECS``."""
    if isinstance(call, CallError):
        return t.Invalid(call.message)
    kind, _ = _TOOLS[call.name]
    return kind(**call.arguments)  # pyright: ignore[reportArgumentType, reportCallIssue]


def _listing(listing: t.Listing) -> list[str]:
    several = len({path for path, _, _ in listing.lines}) > 1
    lines = [
        f"{path}:{number}: {text}" if several else f"{number}\t{text}"
        for path, number, text in listing.lines
    ]
    if listing.num_left_out:
        lines.append(f"[… {listing.num_left_out} lines left out …]")
    return lines


def _ending(result: ExecResult) -> str:
    if result.timed_out or result.cpu_exceeded:
        return f"killed after {result.seconds:.0f} s: time limit"
    if result.oom:
        return "killed: out of memory"
    return "killed" if result.exit_code is None else f"exit code {result.exit_code}"
