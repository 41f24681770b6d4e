"""The patch says what the agent did: all of it, byte for byte, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from git_boxes import KINDS, empty, git_box, on_docker, sh

from envs.base import Sandbox
from envs.errors import PatchError
from envs.patches.git_patch import (
    Baseline,
    ExtractedPatch,
    PatchLimits,
    extract_patch,
    take_baseline,
)

TREE = """
git init -q -b main
printf 'def f():\\n    return 1\\n' > a.py; printf 'x\\r\\ny\\r\\nz\\r\\n' > crlf.py
printf 'one\\ntwo\\n\\n' > tail.py; printf 'no newline' > open.py
printf 'caf\\xe9 1\\nb\\n' > latin.py
printf '*.log\\nbuild/\\n' > .gitignore; echo keep > forced.log; mkdir pkg; echo 1 > pkg/m.py
printf '#!/bin/sh\\n' > run; echo old > gone.py
git add -A; git add -f forced.log; git commit -qm base
"""


@pytest.fixture(scope="module", params=KINDS)
def shared_box(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with git_box(request.param, request) as sandbox:
        yield sandbox


@pytest.fixture
def box(shared_box: Sandbox) -> Sandbox:
    return empty(shared_box)


@pytest.fixture
def baseline(box: Sandbox) -> Baseline:
    sh(box, TREE)
    return take_baseline(box, box.workspace, "/tmp/base.git")


CHANGES = {
    "edit in the middle": "sed -i 's/1/2/' a.py",
    "edit of the last line": "printf 'one\\ntwo\\n\\nthree' > tail.py",
    "last context line empty": "sed -i 's/one/ONE/' tail.py",
    "CRLF file": "sed -i 's/y/Y/' crlf.py",
    "no final newline": "printf 'changed' > open.py",
    "final newline added": "echo >> open.py",
    "bytes that are not UTF-8": "printf 'caf\\xe8 2\\nb\\n' > latin.py",
    "new file": "echo new > new.py",
    "new file deep": "mkdir -p d/e; printf 'x' > d/e/f.py",
    "empty new file": "touch pkg/__init__.py",
    "deletion": "rm gone.py",
    "rename": "git mv a.py b.py",
    "mode change": "chmod +x run",
    "tracked though ignored": "echo more >> forced.log",
    "file becomes folder": "rm gone.py; mkdir gone.py; echo 1 > gone.py/x.py",
    "folder becomes file": "rm -r pkg; echo 1 > pkg",
    "names with blanks and quotes": "echo 1 > 'a b\"c.py'; echo 2 > $'tab\\tnew.py'",
    "name that is not UTF-8": "echo 1 > $'caf\\xe9.py'",
    "link inside": "ln -s a.py link.py",
    "committed": "sed -i 's/1/2/' a.py; git commit -qam work; echo x > y.py; git add y.py;"
    " git commit -qm more",
    "staged": "sed -i 's/1/2/' a.py; git add a.py",
    "staged and changed back in part": "sed -i 's/1/2/' a.py; git add a.py; echo '# x' >> a.py",
    "on another branch": "git checkout -q -b side; sed -i 's/1/2/' a.py; git commit -qam side",
    "hidden from git": "sed -i 's/1/2/' a.py; git update-index --assume-unchanged a.py",
    "repository inside": "git init -q tool; echo 1 > tool/t.py",
    "a tracked folder made a repository": "git init -q pkg; echo 2 > pkg/m.py",
    "git's own folder gone": "sed -i 's/1/2/' a.py; cp -r .git /tmp/keep.git; rm -rf .git",
    "history orphaned": "git checkout -q --orphan fresh; sed -i 's/1/2/' a.py; git commit -qam x",
}


EVERYWHERE = (
    "last context line empty",
    "CRLF file",
    "bytes that are not UTF-8",
    "new file deep",
    "rename",
    "committed",
    "a tracked folder made a repository",
)


@pytest.mark.parametrize(
    ("shared_box", "change"), on_docker(CHANGES, EVERYWHERE), indirect=["shared_box"]
)
def test_a_patch_gives_back_the_work_tree(box: Sandbox, baseline: Baseline, change: str) -> None:
    sh(box, CHANGES[change])
    patch = extract_patch(box, baseline)
    assert not patch.empty
    assert patch.notes == ()
    assert patch.data.endswith(b"\n")
    sh(box, "[ -d .git ] || cp -r /tmp/keep.git .git; git checkout -q main 2>/dev/null || true")
    # Checking out may have moved the tree: play the change once more on the clean base.
    sh(
        box,
        "git reset -q --hard $(git rev-list --max-parents=0 --all | tail -n1); git clean -qffdx",
    )
    sh(box, "git show HEAD:forced.log > forced.log")
    box.write("patch.tmp", patch.data)
    sh(box, "mv patch.tmp /tmp/patch; git apply --whitespace=nowarn /tmp/patch")
    again = extract_patch(box, baseline)
    assert again.data == patch.data


def test_attributes_of_the_tree_change_no_byte(box: Sandbox, baseline: Baseline) -> None:
    sh(box, "printf '* text eol=crlf\\n*.py -diff\\n' > .gitattributes; sed -i 's/1/2/' a.py")
    patch = extract_patch(box, baseline)
    assert patch.files == (".gitattributes", "a.py")
    assert b"-    return 1\n+    return 2\n" in patch.data
    assert b"\r" not in patch.data


def test_taking_a_patch_leaves_the_agents_index_alone(box: Sandbox, baseline: Baseline) -> None:
    sh(box, "sed -i 's/1/2/' a.py; git add a.py; echo x > new.py; echo '#' >> a.py; rm gone.py")
    look = "git status --porcelain; git diff --cached | sha256sum; sha256sum .git/index"
    before = sh(box, look)
    extract_patch(box, baseline)
    assert sh(box, "sha256sum .git/index") == before.splitlines()[-1]
    assert sh(box, look).splitlines()[:-1] == before.splitlines()[:-1]


def test_nothing_done_is_an_empty_patch(box: Sandbox, baseline: Baseline) -> None:
    assert extract_patch(box, baseline) == ExtractedPatch(b"")
    sh(box, "touch a.py; mkdir build; echo 1 > build/x; echo 1 > some.log; mkfifo pipe")
    sh(
        box,
        "mkdir -p pkg/__pycache__ .venv/lib; echo 1 > pkg/__pycache__/m.pyc; echo 1 > .venv/lib/x",
    )
    assert extract_patch(box, baseline).empty


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ("printf 'a\\0b' > bin.dat", "bin.dat: binary"),
        ("printf 'a\\0b' > a.py", "a.py: binary"),
        ("head -c 3000000 /dev/zero | tr '\\0' x > big.txt", "big.txt: 3000000 bytes"),
        ("ln -sfn /etc/passwd out", "out: a link that leads outside, to /etc/passwd"),
        ("ln -sfn ../../etc out", "out: a link that leads outside"),
    ],
)
def test_what_is_no_source_is_left_out_with_a_note(
    box: Sandbox, baseline: Baseline, change: str, note: str
) -> None:
    sh(box, f"{change}; sed -i 's/y/Y/' crlf.py")
    patch = extract_patch(box, baseline)
    assert patch.files == ("crlf.py",)
    assert len(patch.notes) == 1
    assert patch.notes[0].startswith(note)
    only = sh(box, change + "; git checkout -q crlf.py; echo done")
    assert only == "done"
    assert extract_patch(box, baseline).empty


def test_an_untouched_submodule_or_clone_is_no_change(box: Sandbox) -> None:
    sh(box, TREE)
    sh(box, "git init -q dep; cd dep; echo 1 > x; git add x; git commit -qm d")
    baseline = take_baseline(box, box.workspace, "/tmp/base.git")
    sh(box, "cd dep; echo 2 > x; git commit -qam e")
    assert extract_patch(box, baseline).empty


def test_changes_that_were_there_before_the_agent_are_not_its_own(box: Sandbox) -> None:
    sh(box, TREE + "sed -i 's/1/9/' a.py; echo 1 > local.py")
    baseline = take_baseline(box, box.workspace, "/tmp/base.git")
    sh(box, "echo '# mine' >> a.py")
    patch = extract_patch(box, baseline)
    assert patch.files == ("a.py",)
    assert b"return 9" in patch.data
    assert b"-    return 1" not in patch.data


def test_a_tree_without_git_works_too(box: Sandbox) -> None:
    sh(box, "echo 1 > a.py")
    baseline = take_baseline(box, box.workspace, "/tmp/base.git")
    sh(box, "echo 2 > a.py")
    assert extract_patch(box, baseline).files == ("a.py",)


def test_the_whole_patch_has_a_limit(box: Sandbox, baseline: Baseline) -> None:
    sh(box, "for i in $(seq 30); do seq 500 > f$i.py; done")
    with pytest.raises(PatchError, match="too large"):
        extract_patch(box, baseline, PatchLimits(max_patch_bytes=10_000))
    with pytest.raises(PatchError, match=r"got=30 expected<=10"):
        extract_patch(box, baseline, PatchLimits(max_files=10))


def test_a_destroyed_store_is_a_patch_error(box: Sandbox, baseline: Baseline) -> None:
    sh(box, "rm -rf /tmp/base.git")
    with pytest.raises(PatchError):
        extract_patch(box, baseline)


def test_a_stripped_newline_is_why_bytes_are_kept(box: Sandbox, baseline: Baseline) -> None:
    sh(box, "sed -i 's/one/ONE/' tail.py")
    patch = extract_patch(box, baseline).data
    sh(box, "git checkout -q tail.py")
    for data, works in (
        (patch, "yes"),
        (patch.strip(), "no"),
        (patch.replace(b"\n", b"\r\n"), "no"),
    ):
        box.write("patch.tmp", data)
        check = "git apply --check patch.tmp 2>/dev/null && echo yes || echo no"
        assert sh(box, check) == works
