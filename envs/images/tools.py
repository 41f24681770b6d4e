"""R2E-Gym's tools and a bare shell, over a container."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from envs.actions.base import ToolCall
from envs.actions.observation import head_and_tail, model_view, unicode_only
from envs.base import ExecResult
from envs.errors import WorkspaceError
from envs.sandbox.docker.sandbox import DockerSandbox

_MAX_VIEW_BYTES = 4 << 20
_SNIPPET_LINES = 4
_CONTENTS = frozenset({"file_text", "old_str", "new_str"})  # the arguments that are no words


@dataclass(frozen=True)
class ToolSettings:
    """What one call may cost and show."""

    command_timeout_s: float = 90.0
    output_cap_bytes: int = 256 << 10
    max_chars: int = 16_000
    max_search_hits: int = 200


class ImageTools:
    """Carries out calls by name; keeps what ``undo_edit`` needs."""

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
        """The reply to a call. Raises InfrastructureError; what the agent did wrong is a reply."""
        try:
            _check_text(call)
            return self._tools[call.name](call)
        except WorkspaceError as error:
            return f"ERROR: {error}"

    def _shell(self, command: str) -> str:
        result = self._sandbox.run_shell(
            command,
            timeout_s=self._settings.command_timeout_s,
            output_cap_bytes=self._settings.output_cap_bytes,
        )
        return f"{model_view(result.output, self._settings.max_chars)}\n[{_ending(result)}]"

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
        lines = self._text(path).split("\n")
        view_range = call.arguments.get("view_range")
        first, last = (
            view_range if isinstance(view_range, tuple) and len(view_range) == 2 else (1, -1)
        )
        last = len(lines) if last == -1 else last
        if not 1 <= first <= last <= len(lines):
            return f"ERROR: no such lines: got={first}-{last} expected=1 to {len(lines)}"
        return head_and_tail(_numbered(lines, first, last), self._settings.max_chars)

    def _create(self, path: str, text: str) -> str:
        try:
            self._sandbox.read(path)
        except WorkspaceError:
            self._write(path, None, text)
            return f"created {path}"
        return f"ERROR: {path} exists; use str_replace to edit it"

    def _replace(self, path: str, old: str, new: str) -> str:
        text = self._text(path)
        count = text.count(old) if old else 0
        if count != 1:
            return f"ERROR: old_str must occur exactly once in {path}: got={count} expected=1"
        start = text[: text.index(old)].count("\n") + 1
        changed = text.replace(old, new)
        self._write(path, text, changed)
        return "edited\n" + _snippet(changed, start, start + new.count("\n"))

    def _insert(self, path: str, call: ToolCall) -> str:
        lines = self._text(path).split("\n")
        after = call.arguments.get("insert_line")
        if not isinstance(after, int) or not 0 <= after <= len(lines):
            return f"ERROR: insert_line got={after} expected=0 to {len(lines)}"
        new = call.text("new_str").split("\n")
        changed = "\n".join([*lines[:after], *new, *lines[after:]])
        self._write(path, "\n".join(lines), changed)
        return "edited\n" + _snippet(changed, after + 1, after + len(new))

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

    def _write(self, path: str, before: str | None, after: str) -> None:
        kept = None if before is None else before.encode("utf-8", "surrogateescape")
        self._sandbox.write(path, after.encode("utf-8", "surrogateescape"))
        self._history.setdefault(path, []).append(kept)

    def _text(self, path: str) -> str:
        data = self._sandbox.read(path)
        if len(data) > _MAX_VIEW_BYTES:
            raise WorkspaceError(
                f"{path} is too large: got={len(data)} expected<={_MAX_VIEW_BYTES}"
            )
        return data.decode("utf-8", "surrogateescape")

    def _relative(self, path: str) -> str:
        """Absolute paths of the work folder are what models write; others stay as they are."""
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
    """Raises WorkspaceError for text that no command or file can hold: JSON can spell it."""
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


def _snippet(text: str, first: int, last: int) -> str:
    lines = text.split("\n")
    return _numbered(lines, max(1, first - _SNIPPET_LINES), min(len(lines), last + _SNIPPET_LINES))


def _ending(result: ExecResult) -> str:
    if result.timed_out:
        return f"killed after {result.seconds:.0f} s: time limit"
    if result.oom:
        return "killed: out of memory"
    return "killed" if result.exit_code is None else f"exit code {result.exit_code}"
