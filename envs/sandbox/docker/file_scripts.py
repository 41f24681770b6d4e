"""Bash programs that read, write and delete one file without leaving the work folder.

``$1`` is the work folder, ``$2`` the file's path relative to it.
"""

from __future__ import annotations

import posixpath

from envs.base import ExecResult
from envs.errors import WorkspaceError

_OUTSIDE, _NOT_A_FILE = 91, 92

# Finds the file's real folder. The nearest folder that exists decides first, so that nothing is
# ever made on the other side of a link.
_LOCATE = f"""
cd -P -- "$1" || exit {_NOT_A_FILE}
root=$PWD path=$2 folder=.
case $path in */*) folder=${{path%/*}};; esac
existing=$folder
while [ ! -e "$existing" ]; do
  case $existing in */*) existing=${{existing%/*}};; *) existing=.;; esac
done
(cd -P -- "$existing" && case $PWD/ in "$root"/*) ;; *) exit 1;; esac) || exit {_OUTSIDE}
"""
_ENTER = f"""
cd -P -- "$folder" || exit {_NOT_A_FILE}
file=$PWD/${{path##*/}}
"""

READ = f"""{_LOCATE}{_ENTER}
[ -L "$file" ] && exit {_OUTSIDE}
[ -f "$file" ] || exit {_NOT_A_FILE}
exec cat -- "$file"
"""
WRITE = f"""{_LOCATE}
mkdir -p -- "$folder" || exit {_NOT_A_FILE}
{_ENTER}
[ -L "$file" ] && exit {_OUTSIDE}
[ ! -e "$file" ] || [ -f "$file" ] || exit {_NOT_A_FILE}
exec cat > "$file"
"""
DELETE = f"""{_LOCATE}{_ENTER}
[ -f "$file" ] || [ -L "$file" ] || exit {_NOT_A_FILE}
exec rm -f -- "$file"
"""


def check_relative(path: str) -> None:
    """Raise WorkspaceError for a path that leaves the work folder by its spelling."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts or "\0" in path or posixpath.normpath(path) == ".":
        raise WorkspaceError(
            f"path leads outside the work folder: got={path!r} expected=a relative path"
        )


def error(path: str, result: ExecResult) -> WorkspaceError:
    """Return the error that a program's exit code stands for."""
    why = {
        _OUTSIDE: "leads outside the work folder or is a link",
        _NOT_A_FILE: "is absent or not a plain file",
    }.get(result.exit_code or 0, f"cannot be accessed ({result.output[-200:]!r})")
    return WorkspaceError(f"path {why}: got={path!r} expected=a plain file below the work folder")
