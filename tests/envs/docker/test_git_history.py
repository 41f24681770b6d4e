"""The fix cannot be read from the history, wherever it was left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from git_boxes import KINDS, empty, git_box, on_docker, sh

from envs.base import Sandbox
from envs.errors import TaskError
from envs.patches.git_history import HistoryLeakError, hide_future, probe_history, scrub_history

BASE_AND_FIX = """
git init -q -b dev; printf 'x = 1\\n' > a.py; mkdir d; echo old > d/b
git add -A; git commit -qm older
echo 1 > c; git add -A; git commit -qm base; git rev-parse HEAD > /tmp/base
printf 'x = 2\\n' > a.py; git commit -qam fix; git rev-parse HEAD > /tmp/fix
git rev-parse HEAD:a.py > /tmp/blob
"""
# Each leaves the fix in one place and the work tree at the base.
PLACES = {
    "branch": "git branch later; git checkout -q $(cat /tmp/base)",
    "current branch ahead": "git checkout -q $(cat /tmp/base)",
    "tag": "git tag v2; git checkout -q -B dev $(cat /tmp/base)",
    "annotated tag": "git tag -a -m v2 v2; git checkout -q -B dev $(cat /tmp/base)",
    "remote branch": "git update-ref refs/remotes/origin/main HEAD; git remote add origin x:y;"
    " git checkout -q -B dev $(cat /tmp/base)",
    "stash": "git checkout -q -B dev $(cat /tmp/base); printf 'x = 2\\n' > a.py; git stash -q",
    "reflog": "git reset -q --hard $(cat /tmp/base)",
    "ORIG_HEAD": "git reset -q --hard $(cat /tmp/base); git reflog expire --expire=now --all",
    "FETCH_HEAD": "git reset -q --hard $(cat /tmp/base); cp /tmp/fix .git/FETCH_HEAD",
    "packed refs": "git branch later; git pack-refs --all; git checkout -q -B dev $(cat /tmp/base)",
    "linked work tree": "git worktree add -q /tmp/linked; git checkout -q -B dev $(cat /tmp/base)",
    "loose unreachable object": "git reset -q --hard $(cat /tmp/base); rm -rf .git/logs;"
    " rm -f .git/ORIG_HEAD",
    "packed unreachable object": "git gc -q; git reset -q --hard $(cat /tmp/base);"
    " rm -rf .git/logs; rm -f .git/ORIG_HEAD",
    "note": "git notes add -m 'x = 2' $(cat /tmp/base); git reset -q --hard $(cat /tmp/base)",
    "replace ref": "git reset -q --hard $(cat /tmp/base);"
    " git replace $(cat /tmp/base)~1 $(cat /tmp/fix)",
    "custom ref": "git update-ref refs/hidden/x HEAD; git reset -q --hard $(cat /tmp/base)",
    "alternates": "git clone -q --bare . /tmp/alt.git; git reset -q --hard $(cat /tmp/base);"
    " echo /tmp/alt.git/objects > .git/objects/info/alternates; rm -rf .git/objects/??",
    "bisect and rebase state": "mkdir .git/rebase-merge; cp /tmp/fix .git/rebase-merge/onto;"
    " cp /tmp/fix .git/REBASE_HEAD; git reset -q --hard $(cat /tmp/base)",
}


@pytest.fixture(scope="module", params=KINDS)
def shared_box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with git_box(request.param, request) as sandbox:
        yield sandbox


@pytest.fixture
def box(shared_box: Sandbox) -> Sandbox:
    return empty(shared_box)


EVERYWHERE = ("tag", "stash", "packed refs", "linked work tree", "loose unreachable object")


@pytest.mark.parametrize(
    ("shared_box", "place"), on_docker(PLACES, EVERYWHERE), indirect=["shared_box"]
)
def test_the_fix_is_gone_from(box: Sandbox, place: str) -> None:
    sh(box, BASE_AND_FIX + PLACES[place])
    base, fix, blob = sh(box, "cat /tmp/base /tmp/fix /tmp/blob").split()
    before = sh(box, "git status --porcelain; cat a.py c d/b")
    assert not probe_history(box, box.workspace, base, [fix, blob]).clean, "nothing to hide"
    scrubbed = scrub_history(box, box.workspace, base)
    sh(box, "rm -rf /tmp/alt.git")
    report = probe_history(box, box.workspace, scrubbed, [fix, blob])
    assert report.problems == ()
    assert scrubbed == base
    for name in (fix, blob):
        assert (
            sh(box, f"git cat-file -e {name} 2>/dev/null && echo readable || echo gone") == "gone"
        )
    assert sh(box, "git log --all --format=%s; git stash list; git reflog") == "base\nolder"
    assert sh(box, "git status --porcelain; cat a.py c d/b") == before
    assert sh(box, "ls /tmp/linked 2>/dev/null || true") == ""
    sh(box, "echo more >> a.py; git diff --stat | grep -q a.py; git commit -qam work; git fsck")


def test_a_commit_that_the_agent_may_read_stays(box: Sandbox) -> None:
    sh(box, BASE_AND_FIX + PLACES["branch"])
    base = sh(box, "cat /tmp/base")
    hide_future(box, box.workspace, base)
    assert sh(box, "git show HEAD~1:a.py; git blame -s c | wc -l") == "x = 1\n1"


def test_nested_repositories_are_cut_too(box: Sandbox) -> None:
    sh(box, BASE_AND_FIX + PLACES["branch"])
    inner = "git init -q in; cd in; echo 1 > s; git add -A; git commit -qm s1; echo 2 > s;"
    sh(box, f"{inner} git commit -qam s2; git checkout -q HEAD~1")
    hide_future(box, box.workspace, sh(box, "cat /tmp/base"))
    assert sh(box, "git -C in log --all --format=%s; cat in/s") == "s1\n1"


def test_another_copy_of_the_project_is_found_and_refused(box: Sandbox) -> None:
    sh(box, BASE_AND_FIX + "git clone -q --bare . /tmp/copy.git;" + PLACES["current branch ahead"])
    base, fix = sh(box, "cat /tmp/base /tmp/fix").split()
    with pytest.raises(HistoryLeakError, match=r"copy\.git.*is readable"):
        hide_future(box, box.workspace, base, [fix])
    with pytest.raises(HistoryLeakError, match="is a copy of the project"):
        hide_future(box, box.workspace, base)


def test_a_fix_that_is_part_of_the_base_is_refused(box: Sandbox) -> None:
    sh(box, BASE_AND_FIX + "git checkout -q $(cat /tmp/base)")
    with pytest.raises(HistoryLeakError, match="is readable"):
        hide_future(box, box.workspace, sh(box, "cat /tmp/fix"), [sh(box, "cat /tmp/fix")])


@pytest.mark.parametrize(
    "trap",
    [
        "git config alias.x '!sh'; git config remote.o.url u",
        "printf '#!/bin/sh\\n' > .git/hooks/post-checkout",
        "git update-ref refs/notes/n HEAD~1",
        "git hash-object -w --stdin < /etc/passwd",
    ],
    ids=["settings", "hook", "ref to an older commit", "stray blob"],
)
def test_the_probe_alone_sees(box: Sandbox, trap: str) -> None:
    sh(box, BASE_AND_FIX + PLACES["branch"])
    base = scrub_history(box, box.workspace, sh(box, "cat /tmp/base"))
    assert probe_history(box, box.workspace, base).clean
    sh(box, f"mkdir -p .git/hooks; {trap}")
    assert not probe_history(box, box.workspace, base).clean


def test_no_repository_is_a_task_error(box: Sandbox) -> None:
    with pytest.raises(TaskError, match="cannot be rebuilt"):
        scrub_history(box, box.workspace)
    sh(box, "git init -q .")
    with pytest.raises(TaskError, match="cannot be rebuilt"):
        scrub_history(box, box.workspace)
    assert not probe_history(box, box.workspace, "HEAD").clean
