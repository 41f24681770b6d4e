"""Scripts that take the future out of a repository's history and prove that it is gone.

Data sets check a repository out at the commit before the fix but often ship the fix with it: on a
branch, a tag, a remote, in the stash, a reflog or as an unreachable object. Deleting those one by
one misses some, so the object store is made anew from what the base commit reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from envs.base import Sandbox
from envs.errors import InfrastructureError, TaskError

_TIMEOUT_S = 600.0

# The repository's own configuration is left behind, so nothing of the machine's may stand in.
_CLEAN = """
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_NO_REPLACE_OBJECTS=1 GIT_OPTIONAL_LOCKS=0 GIT_TERMINAL_PROMPT=0 LC_ALL=C
git_dir_of() {
  if [ -d "$1/.git" ]; then echo "$1/.git"; return; fi
  (cd "$1" && cd "$(sed -n 's/^gitdir: //p' .git)" && pwd -P)
}
"""

_SCRUB = (
    "set -eu"
    + _CLEAN
    + r"""
scrub() {
  local tree=$1 commit old new copy key value gitdir
  old=$(git_dir_of "$tree")
  commit=$(git --git-dir="$old" rev-parse --verify --quiet "$2^{commit}")
  new=$(mktemp -d "$tree/.git-new.XXXXXX")
  git init --quiet --bare --template= "$new"
  [ ! -f "$old/shallow" ] || cp "$old/shallow" "$new/shallow"
  echo "$commit" |
    git --git-dir="$old" pack-objects --revs --quiet "$new/objects/pack/pack" >/dev/null
  for key in core.filemode core.symlinks core.ignorecase core.autocrlf core.eol; do
    if value=$(git --git-dir="$old" config --get "$key"); then
      git --git-dir="$new" config "$key" "$value"
    fi
  done
  git --git-dir="$new" symbolic-ref HEAD refs/heads/main
  git --git-dir="$new" update-ref refs/heads/main "$commit"  # still bare: no reflog is written
  git --git-dir="$new" config core.bare false
  git --git-dir="$new" read-tree "$commit"
  # A linked work tree is a second checkout, possibly of the fix.
  for gitdir in "$old"/worktrees/*/gitdir; do
    [ -f "$gitdir" ] || continue
    copy=$(dirname "$(cat "$gitdir")")
    [ "$copy" = "$tree" ] || [ ! -f "$copy/.git" ] || rm -rf "$copy"
  done
  rm -rf "$old" "$tree/.git"
  mv "$new" "$tree/.git"
  git --git-dir="$tree/.git" --work-tree="$tree" update-index -q --refresh >/dev/null 2>&1 || true
}
# Innermost first: the store of a submodule lies inside that of its parent.
find "$1" -mindepth 2 -name .git -prune -print | sort -r | while IFS= read -r found; do
  scrub "$(dirname "$found")" HEAD || rm -rf "$found"
done
scrub "$1" "$2"
git --git-dir="$1/.git" rev-parse HEAD
"""
)

_PROBE = (
    "set -u"
    + _CLEAN
    + r"""
repository=$1 base=$2; shift 2
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
problem() { printf 'problem: %s\n' "$*"; }
check_store() {
  local store=$1 tip id name
  tip=$(git --git-dir="$store" rev-parse --verify --quiet "$2^{commit}") ||
    { problem "$store: $2 cannot be read"; return; }
  git --git-dir="$store" for-each-ref --format='%(refname) %(objectname)' |
    while read -r name id; do [ "$id" = "$tip" ] || problem "$store: $name leads to $id"; done
  for name in ORIG_HEAD FETCH_HEAD MERGE_HEAD CHERRY_PICK_HEAD REVERT_HEAD REBASE_HEAD AUTO_MERGE \
    BISECT_LOG rebase-merge rebase-apply worktrees modules rr-cache lost-found \
    objects/info/alternates objects/info/http-alternates; do
    [ ! -e "$store/$name" ] || problem "$store: $name exists"
  done
  find "$store/logs" -type f -size +0 2>/dev/null |
    while read -r name; do problem "reflog $name"; done
  find "$store/hooks" -type f ! -name '*.sample' 2>/dev/null |
    while read -r name; do problem "hook $name"; done
  git --git-dir="$store" config --get-regexp '^(remote|include|includeif|alias|filter)\.' |
    while read -r name; do problem "$store: setting $name"; done
  git --git-dir="$store" cat-file --batch-all-objects --batch-check='%(objectname)' |
    sort >"$work/all"
  git --git-dir="$store" rev-list --objects "$tip" | cut -d' ' -f1 | sort -u >"$work/reachable"
  comm -23 "$work/all" "$work/reachable" | head -n 5 |
    while read -r id; do problem "$store: object $id is not part of the base's history"; done
}
check_store "$repository/.git" "$base"
head=$(git --git-dir="$repository/.git" rev-parse HEAD)
[ "$head" = "$(git --git-dir="$repository/.git" rev-parse "$base^{commit}")" ] ||
  problem "HEAD is $head"
find "$repository" -mindepth 2 -name .git -prune -print | while IFS= read -r found; do
  check_store "$found" HEAD
done
# Another copy of this project anywhere else would hold its future as well. Folders that are often
# mounts are named, because mounts are not entered: /proc, or a whole machine, may lie behind one.
{
  echo "$repository/.git/HEAD"
  find / /tmp /var/tmp /home /root /opt /srv /mnt /dev/shm "$repository" \
    -xdev -path "$work" -prune -o -type f -name HEAD -print 2>/dev/null
} | sort -u | while IFS= read -r found; do
    store=$(dirname "$found")
    [ -d "$store/objects" ] && [ -d "$store/refs" ] || continue
    for id in "$@"; do
      git --git-dir="$store" cat-file -e "$id" 2>/dev/null &&
        problem "$store: the fix $id is readable"
    done
    [ "$store" = "$repository/.git" ] && continue
    git --git-dir="$store" cat-file -e "$head" 2>/dev/null &&
      problem "$store is a copy of the project"
done
echo done
"""
)


class HistoryLeakError(TaskError):
    """A fix that can still be read from a repository; the task is refused."""


@dataclass(frozen=True)
class HistoryReport:
    """The findings of the probe. ``problems`` is empty for a clean repository."""

    base: str  # full id of the commit that the history ends with
    problems: tuple[str, ...] = ()

    @property
    def clean(self) -> bool:
        return not self.problems


def scrub_history(sandbox: Sandbox, repository: str, base: str = "HEAD") -> str:
    """Rebuild the repository, and those nested in it, from what ``base`` reaches.

    Refs, remotes, reflogs, stash, hooks, alternates, linked work trees and every object that is not
    an ancestor's are gone; the work tree stays as it is, and HEAD is a branch ``main`` at ``base``.
    Returns the full id of ``base``. Raises TaskError when git cannot do it.
    """
    argv = ["bash", "-c", _SCRUB, "bash", repository, base]
    result = sandbox.exec(argv, timeout_s=_TIMEOUT_S)
    lines = result.output.decode("ascii", "replace").split()
    if result.exit_code != 0 or not lines:
        raise TaskError(
            f"the history of {repository} cannot be rebuilt: got exit code {result.exit_code},"
            f" output {result.output[-400:]!r} expected=a git repository that holds {base}"
        )
    return lines[-1]


def probe_history(
    sandbox: Sandbox, repository: str, base: str, forbidden: Sequence[str] = ()
) -> HistoryReport:
    """Look for anything that leads past ``base``; changes nothing.

    ``forbidden`` are ids of commits or blobs of the fix, which no repository in the sandbox may
    hold. Whether the network is off is the sandbox's matter.
    """
    argv = ["bash", "-c", _PROBE, "bash", repository, base, *forbidden]
    result = sandbox.exec(argv, timeout_s=_TIMEOUT_S)
    lines = result.output.decode("utf-8", "replace").splitlines()
    if result.timed_out:
        raise InfrastructureError(f"the history probe of {repository} ran into its time limit")
    problems = [line.removeprefix("problem: ") for line in lines if line.startswith("problem: ")]
    if not lines or lines[-1] != "done":
        problems.append(f"the probe broke off: {result.output[-400:]!r}")
    return HistoryReport(base, tuple(problems))


def hide_future(
    sandbox: Sandbox, repository: str, base: str = "HEAD", forbidden: Sequence[str] = ()
) -> HistoryReport:
    """Scrub, then probe. Raises HistoryLeakError when the probe finds anything."""
    report = probe_history(sandbox, repository, scrub_history(sandbox, repository, base), forbidden)
    if not report.clean:
        raise HistoryLeakError(
            f"the history of {repository} leads past the base commit {report.base}:"
            f" got={list(report.problems)} expected=nothing; the task is not safe to use"
        )
    return report
