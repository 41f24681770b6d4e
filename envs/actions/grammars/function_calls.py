"""The grammar of large models: the tools over a work tree, called through an action format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from envs.actions.grammars.action_format import ActionFormat, answer
from envs.actions.grammars.grammar import Spoken
from envs.actions.observation import command_reply, head_and_tail, model_view, unicode_only
from envs.actions.tool_specs import WORKSPACE_TOOLS
from envs.actions.workspace_tools import (
    Done,
    Listing,
    Refused,
    Submitted,
    ToolResult,
    WorkspaceTools,
)
from envs.base import ExecResult
from envs.grading.suite import SuiteReport

_MAX_CHARS = 16_000


class FunctionCallGrammar:
    """Function calls in front of the tools; holds no state beyond its format."""

    def __init__(self, action_format: ActionFormat, max_chars: int = _MAX_CHARS) -> None:
        """Set up; ``max_chars`` limits what the model sees of one result."""
        self._format, self._max_chars = action_format, max_chars

    def read(self, action: str, tools: WorkspaceTools) -> Spoken:
        del tools
        parsed = self._format.parse(action, WORKSPACE_TOOLS)

        def reply(results: Sequence[ToolResult]) -> str:
            return answer(self._format, parsed, [self._show(result) for result in results])

        return Spoken(parsed.calls, reply)

    def _show(self, result: ToolResult) -> str:
        match result:
            case Listing():
                text = unicode_only("\n".join(_listing(result))) or "nothing found"
            case Done():
                text = "ok"
            case Refused():
                text = unicode_only(f"error: {result.reason}")
            case Submitted():
                text = "submitted"
            case SuiteReport():
                return self._show_report(result)
            case ExecResult():
                return command_reply(result, self._max_chars)
        return head_and_tail(text, self._max_chars)

    def _show_report(self, report: SuiteReport) -> str:
        counts = Counter(report.statuses.values())
        summary = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
        if report.passed:
            return f"all tests pass: {summary}"
        broken = "" if report.complete else " (the run broke off)"
        log = model_view(report.log, self._max_chars)
        return f"tests fail{broken}: {summary or 'none ran'}\n{log}"


def _listing(listing: Listing) -> list[str]:
    several = len({path for path, _, _ in listing.lines}) > 1
    lines = [
        f"{path}:{number}: {text}" if several else f"{number}\t{text}"
        for path, number, text in listing.lines
    ]
    if listing.num_left_out:
        lines.append(f"[… {listing.num_left_out} lines left out …]")
    return lines
