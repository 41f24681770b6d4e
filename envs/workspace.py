"""The tree that an agent works on: in memory until a command needs it in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from envs.base import ExecResult, Sandbox
from envs.errors import InfrastructureError, WorkspaceError
from envs.paths import clean_path
from envs.sandbox.archives import pack

StartSandbox = Callable[[], Sandbox]
MAX_FILE_BYTES = 4 << 20
MAX_TREE_BYTES = 32 << 20  # in memory; in a sandbox its own limits hold
MAX_FILES = 4000
_FILL_TIMEOUT_S = 120.0


class Workspace:
    """Files by relative path. Small tasks never leave memory; the first ``exec`` moves the tree.

    Example:
        >>> workspace = Workspace({"a.py": b"x = 1\\n"})
        >>> workspace.write("a.py", b"x = 2\\n")
    """

    def __init__(self, files: Mapping[str, bytes], start: StartSandbox | None = None) -> None:
        """Set up; ``start`` makes the sandbox for ``exec``; without it there are no commands."""
        self._files = dict(files)
        self._start = start
        self._sandbox: Sandbox | None = None

    def read(self, path: str) -> bytes:
        """Return a file's content. Raises WorkspaceError when there is no such plain file."""
        path = clean_path(path)
        if self._sandbox is not None:
            return self._sandbox.read(path)
        if path not in self._files:
            raise WorkspaceError(f"no such file: got={path!r} expected one of the tree")
        return self._files[path]

    def write(self, path: str, data: bytes) -> None:
        """Create or replace a file. Raises WorkspaceError."""
        path = clean_path(path)
        if len(data) > MAX_FILE_BYTES:
            raise WorkspaceError(
                f"{path!r} is too large: got={len(data)} expected at most {MAX_FILE_BYTES} bytes"
            )
        if self._sandbox is not None:
            self._sandbox.write(path, data)
            return
        if path not in self._files and len(self._files) >= MAX_FILES:
            raise WorkspaceError(f"too many files: got={len(self._files)} expected<{MAX_FILES}")
        total = sum(map(len, self._files.values())) + len(data)
        if total > MAX_TREE_BYTES:
            raise WorkspaceError(f"too much data: got={total} expected<={MAX_TREE_BYTES} bytes")
        if any(o.startswith(f"{path}/") or path.startswith(f"{o}/") for o in self._files):
            raise WorkspaceError(f"{path!r} is a folder, or lies below a file")
        self._files[path] = data

    def snapshot(self) -> dict[str, bytes]:
        """Return every plain file as it is now."""
        return dict(self._files) if self._sandbox is None else self._sandbox.snapshot()

    def exec(self, argv: Sequence[str], *, timeout_s: float, output_cap_bytes: int) -> ExecResult:
        """Run a command in the work folder. Raises WorkspaceError, InfrastructureError."""
        if self._start is None:
            raise WorkspaceError("this task has no shell: got=a command expected=another tool")
        if self._sandbox is None:
            sandbox = self._start()
            try:
                _fill(sandbox, self._files)
            except BaseException:
                sandbox.close()
                raise
            self._sandbox = sandbox
        return self._sandbox.exec(argv, timeout_s=timeout_s, output_cap_bytes=output_cap_bytes)

    def close(self) -> None:
        if self._sandbox is not None:
            self._sandbox.close()
            self._sandbox = None


def _fill(sandbox: Sandbox, files: Mapping[str, bytes]) -> None:
    """Copy a whole tree in one command."""
    argv = ["tar", "--extract", "--no-same-owner", "--file=-"]
    result = sandbox.exec(argv, timeout_s=_FILL_TIMEOUT_S, stdin=pack(files))
    if result.exit_code != 0:
        raise InfrastructureError(
            f"the tree could not be copied into the sandbox: got={result.output[-300:]!r}"
            f" exit code {result.exit_code}, expected 0"
        )
