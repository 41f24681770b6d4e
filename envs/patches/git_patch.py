"""The agent's patch: the difference from the work tree it was given to the one it left.

Taken with a repository of our own beside the agent's, so it does not matter whether the agent
committed, staged, stashed or deleted ``.git``, and its index is never touched. Attributes are
overridden: bytes come out as they are in the files, whatever ``.gitattributes`` asks for.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from envs.base import ExecResult, Sandbox
from envs.errors import PatchError

_TIMEOUT_S = 600.0
_LIST_CAP_BYTES = 32 << 20
_GITLINK, _LINK = "160000", "120000"
_NO_OBJECT = "0" * 40

_SETUP = """
set -eu
export GIT_DIR=$1 GIT_WORK_TREE=$2 LC_ALL=C GIT_OPTIONAL_LOCKS=0
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_NOSYSTEM=1
unset GIT_ATTR_SOURCE GIT_EXTERNAL_DIFF GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES
cd "$2"
"""
_TAKE = (
    _SETUP
    + r"""
rm -rf "$GIT_DIR"
(unset GIT_WORK_TREE && git init --quiet --bare --template= "$GIT_DIR")
mkdir -p "$GIT_DIR/info"
cat >"$GIT_DIR/info/attributes" <<'ATTRIBUTES'
* !diff !merge -text -filter -ident -working-tree-encoding !eol
ATTRIBUTES
cat >"$GIT_DIR/info/exclude" <<'EXCLUDE'
.venv/
__pycache__/
*.py[co]
.pytest_cache/
EXCLUDE
cat >"$GIT_DIR/config" <<'CONFIG'
[core]
  repositoryFormatVersion=0
  bare=false
  autocrlf=false
  fileMode=true
  symlinks=true
  quotePath=false
  fsmonitor=false
  hooksPath=/dev/null
  excludesFile=/dev/null
[gc]
  auto=0
CONFIG
{
  git ls-files -z --others --exclude-standard
  # Files that are tracked although they are ignored.
  GIT_DIR=$2/.git git ls-files -z 2>/dev/null || true
} >"$GIT_DIR/list"
grep -z '/$' "$GIT_DIR/list" >"$GIT_DIR/nested" || true
grep -zv '/$' "$GIT_DIR/list" | git update-index -z --add --remove --stdin 2>/dev/null
git write-tree
"""
)
# Changed and untracked files, each with its size and mode; a folder with a repository of its own is
# listed only when it is new.
_LIST = (
    _SETUP
    + r"""
# With its own time: files changed in the second in which it was written are compared by content.
cp -p "$GIT_DIR/index" "$GIT_DIR/index.now"
export GIT_INDEX_FILE=$GIT_DIR/index.now
git ls-files -z --modified --deleted
git ls-files -z --others --exclude-standard >"$GIT_DIR/list"
grep -zv '/$' "$GIT_DIR/list" || true
grep -z '/$' "$GIT_DIR/list" | while IFS= read -r -d '' folder; do
  grep -zqxF -- "$folder" "$GIT_DIR/nested" ||
    find "./$folder" -name .git -prune -o \( -type f -o -type l \) -printf '%P\0' |
    while IFS= read -r -d '' file; do printf '%s\0' "$folder$file"; done
done
"""
)
_SIZES = _SETUP + r"""xargs -0 -r stat --printf '%s %n\0' -- 2>/dev/null || true"""
_STAGE = (
    _SETUP
    + r"""
export GIT_INDEX_FILE=$GIT_DIR/index.now
git update-index -z --add --remove --replace --stdin 2>/dev/null
git diff-index --cached --no-renames --raw --numstat --no-abbrev -z "$3"
"""
)
# Restores dropped entries, writes the patch, and applies it to a clean tree: what comes out must be
# the tree that it was made from.
_WRITE = (
    _SETUP
    + r"""
export GIT_INDEX_FILE=$GIT_DIR/index.now
git update-index -z --index-info
git diff-index --cached -p --full-index --no-renames --no-ext-diff --no-textconv --no-color \
  --src-prefix=a/ --dst-prefix=b/ "$3" >"$GIT_DIR/patch"
want=$(git write-tree)
export GIT_INDEX_FILE=$GIT_DIR/index.check
rm -f "$GIT_INDEX_FILE"
git read-tree "$3"
[ ! -s "$GIT_DIR/patch" ] || git apply --cached --whitespace=nowarn "$GIT_DIR/patch" 2>/dev/null
[ "$(git write-tree)" = "$want" ] || exit 90
cat "$GIT_DIR/patch"
"""
)


@dataclass(frozen=True)
class Baseline:
    """The work tree as the agent got it."""

    repository: str  # absolute path inside the sandbox
    store: str  # our repository, outside the work tree
    tree: str


@dataclass(frozen=True)
class ExtractedPatch:
    """A patch that applies to the baseline. ``notes`` name what was left out, and why."""

    data: bytes
    files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        return not self.data


@dataclass(frozen=True)
class PatchLimits:
    """Sizes above which a file or the whole patch is no source change."""

    max_file_bytes: int = 1 << 20
    max_files: int = 2000
    max_patch_bytes: int = 4 << 20


@dataclass(frozen=True)
class _Change:
    old_mode: str
    new_mode: str
    old_id: str
    path: bytes
    binary: bool


def take_baseline(sandbox: Sandbox, repository: str, store: str = "/var/tmp/.base.git") -> Baseline:
    """Record the work tree; before the agent starts. Works without a ``.git`` too.

    Raises PatchError when the sandbox has no git or the store cannot be written.
    """
    result = _run(sandbox, _TAKE, (store, repository))
    _require(result, "the work tree cannot be recorded")
    return Baseline(repository, store, result.output.decode("ascii").split()[-1])


def extract_patch(
    sandbox: Sandbox, baseline: Baseline, limits: PatchLimits | None = None
) -> ExtractedPatch:
    """Extract the agent's changes, byte for byte, and check them by applying them to the baseline.

    Untracked files are included; ignored ones, and what Python and its tools leave, are not. Binary
    files, files above the size limit, links that lead outside and repositories inside the work tree
    are left out with a note. An empty patch is a result, not an error. Raises PatchError when the
    agent destroyed what is needed, or the patch is above the limits.
    """
    try:
        return _extract(sandbox, baseline, limits or PatchLimits())
    except (ValueError, IndexError) as error:
        # What runs in there is the agent's: its git may be anything.
        raise PatchError(f"the sandbox's git does not answer as git does: got={error}") from error


def _extract(sandbox: Sandbox, baseline: Baseline, limits: PatchLimits) -> ExtractedPatch:
    where = (baseline.store, baseline.repository)
    listed = _run(sandbox, _LIST, where)
    _require(listed, "changed files cannot be listed")
    paths = sorted({path for path in listed.output.split(b"\0") if path})
    if len(paths) > limits.max_files:
        raise PatchError(
            f"too many changed files: got={len(paths)} expected<={limits.max_files};"
            " build output that is not ignored is the usual cause"
        )
    sizes = _sizes(_run(sandbox, _SIZES, where, b"".join(path + b"\0" for path in paths)).output)
    large = [path for path in paths if sizes.get(path, 0) > limits.max_file_bytes]
    notes = [
        f"{_text(path)}: {sizes[path]} bytes are more than a source file has" for path in large
    ]
    kept = b"".join(path + b"\0" for path in paths if path not in set(large))
    staged = _run(sandbox, _STAGE, (*where, baseline.tree), kept)
    _require(staged, "changed files cannot be read")
    changes = _changes(staged.output)
    dropped = {
        change.path: why for change in changes if (why := _why_dropped(sandbox, baseline, change))
    }
    notes += [f"{_text(path)}: {why}" for path, why in dropped.items()]
    written = _run(
        sandbox,
        _WRITE,
        (*where, baseline.tree),
        b"".join(_index_entry(change) for change in changes if change.path in dropped),
        cap_bytes=limits.max_patch_bytes,
    )
    if written.truncated:
        raise PatchError(f"the patch is too large: expected<={limits.max_patch_bytes} bytes")
    _require(written, "the patch does not give back the tree it was made from")
    files = tuple(_text(change.path) for change in changes if change.path not in dropped)
    return ExtractedPatch(written.output, files, tuple(notes))


def _why_dropped(sandbox: Sandbox, baseline: Baseline, change: _Change) -> str:
    if _GITLINK in (change.old_mode, change.new_mode):
        return "a repository inside the work tree"
    if change.new_mode == _LINK:
        return _why_link_is_refused(sandbox, baseline, change.path)
    return "binary" if change.binary else ""


def _why_link_is_refused(sandbox: Sandbox, baseline: Baseline, path: bytes) -> str:
    full = f"{baseline.repository}/{_text(path)}"
    result = sandbox.exec(["readlink", "-n", "--", full], timeout_s=_TIMEOUT_S)
    target = _text(result.output)
    inside = posixpath.normpath(posixpath.join(posixpath.dirname(_text(path)), target))
    if target.startswith("/") or inside.split("/")[0] == "..":
        return f"a link that leads outside, to {target}"
    return ""


def _changes(output: bytes) -> list[_Change]:
    """Read ``--raw --numstat -z``: first every raw entry, then every count, in the same order."""
    fields = output.split(b"\0")[:-1]
    raw = [index for index, field in enumerate(fields) if field.startswith(b":")]
    counts = fields[2 * len(raw) :]
    changes: list[_Change] = []
    for index, count in zip(raw, counts, strict=True):
        old_mode, new_mode, old_id = fields[index][1:].decode("ascii").split()[:3]
        path = fields[index + 1]
        changes.append(_Change(old_mode, new_mode, old_id, path, count.startswith(b"-\t-\t")))
    return changes


def _index_entry(change: _Change) -> bytes:
    """Return the ``--index-info`` record that puts a path back to the baseline."""
    mode = "0" if change.old_id == _NO_OBJECT else change.old_mode
    return f"{mode} {change.old_id}\t".encode() + change.path + b"\0"


def _sizes(output: bytes) -> Mapping[bytes, int]:
    entries: Iterable[list[bytes]] = (
        entry.split(b" ", 1) for entry in output.split(b"\0") if entry
    )
    return {path: int(size) for size, path in entries}


def _run(
    sandbox: Sandbox,
    script: str,
    arguments: Sequence[str],
    stdin: bytes = b"",
    cap_bytes: int = _LIST_CAP_BYTES,
) -> ExecResult:
    argv = ["bash", "-c", script, "bash", *arguments]
    return sandbox.exec(argv, timeout_s=_TIMEOUT_S, output_cap_bytes=cap_bytes, stdin=stdin)


def _require(result: ExecResult, what: str) -> None:
    if result.exit_code != 0 or result.truncated:
        raise PatchError(
            f"{what}: got exit code {result.exit_code}, output {result.output[-300:]!r}"
            " expected=git in the sandbox and the recorded work tree intact"
        )


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
