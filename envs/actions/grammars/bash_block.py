"""Plain fenced bash blocks, for models without tool calls: one block is one command."""

from __future__ import annotations

import re
from collections.abc import Sequence

from envs.actions.calls import CallError, ParsedAction, ToolCall, ToolSpec
from envs.actions.grammars.action_format import no_call, visible_text
from envs.actions.grammars.checking import check_call, limit_calls

_OPEN = re.compile(r"^[ ]{0,3}```(?:bash|sh|shell)[ \t]*\r?\n", re.MULTILINE)
_CLOSE = re.compile(r"^[ ]{0,3}```[ \t]*\r?$", re.MULTILINE)


class BashBlock:
    """A format whose block goes to ``bash_tool``; the single word ``submit`` ends the episode.

    ``bash_tool`` and ``submit_tool`` are the names of those tools in the tool set, and
    ``argument`` the name of the command's parameter.
    """

    name = "bash_block"
    stop_strings = ()

    def __init__(
        self, bash_tool: str = "bash", submit_tool: str = "submit", argument: str = "command"
    ) -> None:
        self._bash, self._submit, self._argument = bash_tool, submit_tool, argument

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedAction:
        visible, unfinished = visible_text(text)
        calls: list[ToolCall | CallError] = []
        thought: list[str] = []
        position = 0
        while match := _OPEN.search(visible, position):
            thought.append(visible[position : match.start()])
            close = _CLOSE.search(visible, match.end())
            if close is None:
                calls.append(CallError(self._bash, "the bash block does not end with ```"))
                position = len(visible)
                break
            calls.append(self._call(visible[match.end() : close.start()], tools))
            position = close.end()
        thought.append(visible[position:])
        if not calls:
            calls.append(no_call("one ```bash block", unfinished))
        return ParsedAction(limit_calls(calls, 1), "".join(thought).strip())

    def _call(self, command: str, tools: Sequence[ToolSpec]) -> ToolCall | CallError:
        if command.strip() == "submit":
            return check_call(self._submit, {}, tools)
        if not command.strip():
            return CallError(self._bash, "the bash block is empty")
        return check_call(self._bash, {self._argument: command.removesuffix("\n")}, tools)

    def write(self, call: ToolCall) -> str:
        body = "submit" if call.name == self._submit else call.text(self._argument)
        return f"```bash\n{body}\n```"

    def describe(self, tools: Sequence[ToolSpec]) -> str:
        del tools  # a shell needs no list of tools
        return (
            "Answer with exactly one bash block a turn:\n```bash\nCOMMAND\n```\n"
            "When the work is done, the whole block is the one word submit:\n"
            "```bash\nsubmit\n```"
        )

    def results(self, parsed: ParsedAction, replies: Sequence[str]) -> str:
        del parsed
        return "\n\n".join(replies)
