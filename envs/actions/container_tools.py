"""R2E-Gym's tools and a bare shell over a container: calls in, replies out."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from envs.actions.calls import ToolCall
from envs.actions.edits import (
    RefusedEditError,
    check_lines,
    insert_lines,
    replace_once,
    to_bytes,
    to_text,
)
from envs.actions.observation import command_reply, head_and_tail, model_view, unicode_only
from envs.errors import WorkspaceError
from envs.sandbox.docker.docker_sandbox import DockerSandbox

_MAX_VIEW_BYTES = 4 << 20
_SNIPPET_LINES = 4
_CONTENTS = frozenset({"file_text", "old_str", "new_str"})  # the arguments that are no words


@dataclass(frozen=True)
class ToolSettings:
    """Limits of one call: what it may cost and show."""

    command_timeout_s: float = 90.0
    output_cap_bytes: int = 256 << 10
    max_chars: int = 16_000
    max_search_hits: int = 200


class ContainerTools:
    """The tools of ``tool_specs.R2E_TOOLS`` and ``SHELL_TOOLS``; keeps what ``undo_edit`` needs."""

    def __init__(self, sandbox: DockerSandbox, settings: ToolSettings) -> None:
        self._sandbox, self._settings = sandbox, settings
        self._history: dict[str, list[bytes | None]] = {}
        self._tools: Mapping[str, Callable[[ToolCall], str]] = {
            "execute_bash": lambda call: self._shell(call.text("cmd")),
            "bash": lambda call: self._shell(call.text("command")),
            "search": self._search,
            "file_editor": self._file_editor,
        }

    def run(self, call: ToolCall) -> str:
        """Carry out one call. Raises InfrastructureError; what the agent did wrong is a reply."""
        try:
            _check_text(call)
            return self._tools[call.name](call)
        except (WorkspaceError, RefusedEditError) as error:
            return f"ERROR: {error}"

    def _shell(self, command: str) -> str:
        result = self._sandbox.run_shell(
            command,
            timeout_s=self._settings.command_timeout_s,
            output_cap_bytes=self._settings.output_cap_bytes,
        )
        return command_reply(result, self._settings.max_chars)

    def _search(self, call: ToolCall) -> str:
        path = self._relative(call.text("path", self._sandbox.workspace))
        limit = self._settings.max_search_hits
        script = (
            f"grep -rnIF --exclude-dir=.git -m {limit} -e {shlex.quote(call.text('search_term'))}"
            f" -- {shlex.quote(path or '.')} 2>/dev/null | head -n {limit + 1}"
        )
        result = self._sandbox.exec(
            ["bash", "-c", script],
            timeout_s=self._settings.command_timeout_s,
            output_cap_bytes=self._settings.output_cap_bytes,
        )
        lines = result.output.splitlines()
        text = model_view(b"\n".join(lines[:limit]), self._settings.max_chars)
        if not lines:
            return "no match"
        return f"{text}\n[… more matches …]" if len(lines) > limit else text

    def _file_editor(self, call: ToolCall) -> str:
        path = self._relative(call.text("path"))
        match call.text("command"):
            case "view":
                return self._view(path, call)
            case "create":
                return self._create(path, call.text("file_text"))
            case "str_replace":
                return self._replace(path, call.text("old_str"), call.text("new_str"))
            case "insert":
                return self._insert(path, call)
            case _:
                return self._undo(path)

    def _view(self, path: str, call: ToolCall) -> str:
        listing = self._sandbox.exec(
            [
                "bash",
                "-c",
                'cd -- "$1" && find . -maxdepth 2 -not -path "*/.*" | sort',
                "bash",
                path or ".",
            ],
            timeout_s=self._settings.command_timeout_s,
        )
        if listing.exit_code == 0:
            return model_view(listing.output, self._settings.max_chars)
        lines = to_text(self._content(path)).split("\n")
        view_range = call.arguments.get("view_range")
        first, last = (
            view_range if isinstance(view_range, tuple) and len(view_range) == 2 else (1, -1)
        )
        last = len(lines) if last == -1 else last
        check_lines(first, last, len(lines))
        return head_and_tail(_numbered(lines, first, last), self._settings.max_chars)

    def _create(self, path: str, text: str) -> str:
        try:
            self._sandbox.read(path)
        except WorkspaceError:
            self._write(path, None, to_bytes(text))
            return f"created {path}"
        return f"ERROR: {path} exists; use str_replace to edit it"

    def _replace(self, path: str, old: str, new: str) -> str:
        before = self._content(path)
        rule = f"old_str must occur exactly once in {path}"
        after = replace_once(before, to_bytes(old), to_bytes(new), rule)
        self._write(path, before, after)
        first = before[: before.index(to_bytes(old))].count(b"\n") + 1
        return _edited(after, first, first + new.count("\n"))

    def _insert(self, path: str, call: ToolCall) -> str:
        before, new = self._content(path), call.text("new_str")
        after = insert_lines(before, call.arguments.get("insert_line"), to_bytes(new))
        self._write(path, before, after)
        first = call.number("insert_line", 0) + 1
        return _edited(after, first, first + new.count("\n"))

    def _undo(self, path: str) -> str:
        versions = self._history.get(path)
        if not versions:
            return f"ERROR: {path} has no edit to undo"
        before = versions.pop()
        if before is None:
            self._sandbox.delete(path)
        else:
            self._sandbox.write(path, before)
        return f"undid the last edit of {path}"

    def _write(self, path: str, before: bytes | None, after: bytes) -> None:
        self._sandbox.write(path, after)
        self._history.setdefault(path, []).append(before)

    def _content(self, path: str) -> bytes:
        content = self._sandbox.read(path)
        if len(content) > _MAX_VIEW_BYTES:
            raise WorkspaceError(
                f"{path} is too large: got={len(content)} expected<={_MAX_VIEW_BYTES}"
            )
        return content

    def _relative(self, path: str) -> str:
        """Take the work folder off an absolute path, which is what models write."""
        workspace = self._sandbox.workspace
        full = posixpath.normpath(posixpath.join(workspace, path))
        if full != workspace and not full.startswith(f"{workspace}/"):
            raise WorkspaceError(
                f"path is outside the work folder: got={path!r} expected={workspace}/…"
            )
        return full[len(workspace) :].lstrip("/")


def _numbered(lines: list[str], first: int, last: int) -> str:
    shown = (f"{number:6}\t{lines[number - 1]}" for number in range(first, last + 1))
    return unicode_only("\n".join(shown))


def _check_text(call: ToolCall) -> None:
    """Raise WorkspaceError for text that no command or file can hold: JSON can spell it."""
    for name, value in call.arguments.items():
        if not isinstance(value, str):
            continue
        try:
            value.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as error:
            raise WorkspaceError(
                f"{name} is no text: got={value[:80]!a} expected=Unicode"
            ) from error
        if "\0" in value and name not in _CONTENTS:
            raise WorkspaceError(f"{name} cannot hold a NUL byte: got={value[:80]!a}")


def _edited(content: bytes, first: int, last: int) -> str:
    """Return the reply to an edit: the changed lines and some around them."""
    lines = to_text(content).split("\n")
    shown = max(1, first - _SNIPPET_LINES), min(len(lines), last + _SNIPPET_LINES)
    return "edited\n" + _numbered(lines, *shown)
