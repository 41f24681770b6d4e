"""Diffs and their reader against real git."""

from __future__ import annotations

import subprocess
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envs.errors import PatchError
from envs.patches.apply import apply_patch, touched_paths
from envs.patches.diff import diff_trees

Tree = dict[str, bytes]


def git_apply(tree: Tree, patch: bytes) -> Tree | None:
    """What real git makes of it; None when it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        for path, data in tree.items():
            target = Path(folder, path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        done = subprocess.run(
            ["git", "apply", "--whitespace=nowarn", "-"],
            input=patch,
            cwd=folder,
            capture_output=True,
            check=False,
            env={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "GIT_CEILING_DIRECTORIES": "/",
                "HOME": folder,
            },
        )
        if done.returncode:
            return None
        files = [p for p in Path(folder).rglob("*") if p.is_file()]
        return {str(p.relative_to(folder)): p.read_bytes() for p in files}


CASES: dict[str, tuple[Tree, Tree]] = {
    "one line": ({"a": b"1\n2\n3\n"}, {"a": b"1\n9\n3\n"}),
    "only line": ({"a": b"1\n"}, {"a": b"2\n"}),
    "new file": ({"a": b"1\n"}, {"a": b"1\n", "d/e/f": b"x\ny\n"}),
    "new empty file": ({"a": b"1\n"}, {"a": b"1\n", "b": b""}),
    "deleted file": ({"a": b"1\n", "b": b"x\ny\n"}, {"a": b"1\n"}),
    "deleted empty file": ({"a": b"1\n", "b": b""}, {"a": b"1\n"}),
    "emptied file": ({"a": b"1\n2\n"}, {"a": b""}),
    "filled file": ({"a": b""}, {"a": b"1\n2\n"}),
    "newline lost": ({"a": b"1\n2\n"}, {"a": b"1\n2"}),
    "newline won": ({"a": b"1\n2"}, {"a": b"1\n2\n"}),
    "no newline either side": ({"a": b"1\n2"}, {"a": b"0\n2"}),
    "no newline, last line changed": ({"a": b"1\n2"}, {"a": b"1\n3"}),
    "appended after no newline": ({"a": b"1"}, {"a": b"1\n2"}),
    "windows line ends": ({"a": b"1\r\n2\r\n3\r\n"}, {"a": b"1\r\n9\r\n3\r\n"}),
    "line ends changed": ({"a": b"1\r\n2\r\n"}, {"a": b"1\n2\r\n"}),
    "lone carriage returns": ({"a": b"1\r2\r3\n4\n"}, {"a": b"1\r2\r9\n4\n"}),
    "not UTF-8": ({"a": b"caf\xe9\n\xff\n"}, {"a": b"caf\xe8\n\xff\n"}),
    "empty last context line": ({"a": b"1\n2\n\n"}, {"a": b"9\n2\n\n"}),
    "trailing blanks": ({"a": b"1 \n\t\n2\n"}, {"a": b"1 \n\t\n3 \n"}),
    "form feeds and line separators": ({"a": b"1\x0c\x85\n2\n"}, {"a": b"1\x0c\x85\n3\x0b\n"}),
    "two hunks": ({"a": b"".join(b"%d\n" % i for i in range(40))},
                  {"a": b"".join(b"%d\n" % (i if i not in (3, 30) else -i) for i in range(40))}),
    "insert at both ends": ({"a": b"1\n2\n"}, {"a": b"0\n1\n2\n3\n"}),
    "looks like a patch": ({"a": b"--- a/x\n+++ b/x\n@@ -1 +1 @@\n"},
                           {"a": b"--- a/x\n-+++ b/x\n"}),
    "space in the name": ({"a b/c d": b"1\n"}, {"a b/c d": b"2\n"}),
    "odd names": ({'q"uote': b"1\n", "t\tab": b"1\n", "b\\s": b"1\n", "é": b"1\n"},
                  {'q"uote': b"2\n", "t\tab": b"2\n", "b\\s": b"2\n", "é": b"2\n", "n\nl": b"3\n"}),
    "files swap": ({"a": b"1\n", "b": b"2\n"}, {"a": b"2\n", "b": b"1\n"}),
    "a file becomes a folder's file": ({"a": b"1\n", "c": b"1\n"}, {"b/a": b"1\n", "c": b"1\n"}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_git_and_the_reader_agree(name: str) -> None:
    base, current = CASES[name]
    diff = diff_trees(base, current)
    assert diff.skipped == ()
    assert diff.patch.endswith(b"\n")
    assert apply_patch(base, diff.patch) == current
    assert git_apply(base, diff.patch) == current


def test_nothing_changed_is_an_empty_patch() -> None:
    assert diff_trees({"a": b"1\n"}, {"a": b"1\n"}).patch == b""
    with pytest.raises(PatchError, match="empty"):
        apply_patch({"a": b"1\n"}, b"")


def test_binary_and_large_files_are_left_out_and_named() -> None:
    base = {"a": b"1\n", "pic": b"\0\1"}
    current = {"a": b"2\n", "pic": b"\0\2", "new": b"x\0", "big": b"x" * (1 << 20) + b"\n"}
    diff = diff_trees(base, current)
    assert diff.skipped == (("big", "too large"), ("new", "binary"), ("pic", "binary"))
    assert touched_paths(diff.patch) == ("a",)
    assert git_apply(base, diff.patch) == {"a": b"2\n", "pic": b"\0\1"}


def test_a_small_edit_of_a_long_file_is_cheap() -> None:
    lines = [b"x = 1\n"] * 20_000
    before = b"".join(lines)
    lines[10_000] = b"x = 2\n"
    patch = diff_trees({"a": before}, {"a": b"".join(lines)}).patch
    assert patch.count(b"\n") == 4 + 8
    assert apply_patch({"a": before}, patch) == {"a": b"".join(lines)}


texts = st.lists(
    st.sampled_from([b"a\n", b"b\n", b"\n", b" \n", b"c\r\n", b"\xff\n", b"-x\n", b"+\n"]),
    max_size=14,
).map(b"".join)
contents = st.builds(
    lambda text, tail: text + tail, texts, st.sampled_from([b"", b"", b"end", b"\\"])
)
trees = st.dictionaries(st.sampled_from(["a", "b", "d/c"]), contents, max_size=3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees, trees)
def test_any_two_trees(base: Tree, current: Tree) -> None:
    patch = diff_trees(base, current).patch
    if patch:
        assert apply_patch(base, patch) == current
        assert git_apply(base, patch) == current
    else:
        assert base == current


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(contents, contents, st.data())
def test_on_another_tree_both_find_the_same_place_or_none(
    before: bytes, after: bytes, data: st.DataObject
) -> None:
    """The file has moved on since the patch was made: lines put in, taken out or repeated."""
    patch = diff_trees({"a": before}, {"a": after}).patch
    if not patch:
        return
    lines = before.split(b"\n")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines)))
        if data.draw(st.booleans()):
            lines[at:at] = [data.draw(st.sampled_from([b"a", b"b", b"", b"z"]))]
        else:
            del lines[at : at + 1]
    moved = {"a": b"\n".join(lines)}
    result = ours(moved, patch)
    # Git matches a last line without newline to an inner one and glues the next to it; we refuse.
    if result is not None or b"\\ No newline" not in patch:
        assert result == git_apply(moved, patch)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(contents, contents, st.data())
def test_a_damaged_patch_is_never_taken_where_git_refuses(
    before: bytes, after: bytes, data: st.DataObject
) -> None:
    patch = diff_trees({"a": before}, {"a": after}).patch
    if not patch:
        return
    at = data.draw(st.integers(0, len(patch) - 1))
    damaged = {
        "cut": patch[:at],
        "hole": patch[:at] + patch[at + 1 :],
        "flip": patch[:at] + bytes([patch[at] ^ 3]) + patch[at + 1 :],
        "twice": patch[:at] + patch[at : at + 9] + patch[at:],
        "stripped": patch.strip(),
    }[data.draw(st.sampled_from(["cut", "hole", "flip", "twice", "stripped"]))]
    result = ours({"a": before}, damaged)
    if result is not None:
        assert git_apply({"a": before}, damaged) == result


def ours(tree: Tree, patch: bytes) -> Tree | None:
    try:
        return apply_patch(tree, patch)
    except PatchError:
        return None


NEW = b"new file mode 100644\n--- /dev/null\n"
ONE = b"diff --git a/a b/a\n--- a/a\n+++ b/a\n@@ -1 +1 @@\n-1\n+2\n"
REFUSED: dict[str, bytes] = {
    "words around it": b"Here is my patch:\n" + ONE,
    "words behind it": ONE + b"done\n",
    "no header": ONE.split(b"\n", 1)[1],
    "outside": ONE.replace(b"a/a b/a", b"a/../a b/../a").replace(b" a/a\n", b" a/../a\n"),
    "absolute": ONE.replace(b"a/a b/a", b"a//etc/x b//etc/x"),
    "git's own folder": ONE.replace(b"a/a b/a", b"a/.git/config b/.git/config"),
    "two names": ONE.replace(b"b/a\n---", b"b/b\n---"),
    "other file lines": ONE.replace(b"+++ b/a", b"+++ b/b"),
    "rename": b"diff --git a/a b/b\nsimilarity index 100%\nrename from a\nrename to b\n",
    "mode": b"diff --git a/a b/a\nold mode 100644\nnew mode 100755\n",
    "link": b"diff --git a/l b/l\n"
    + NEW.replace(b"100644", b"120000")
    + b"+++ b/l\n@@ -0,0 +1 @@\n+/etc\n",
    "binary": b"diff --git a/a b/a\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIc$@\n",
    "stripped": ONE[:-1],
    "too short": ONE.replace(b"-1 +1", b"-1,2 +1,2"),
    "too long": ONE + b" 3\n",
    "same file twice": ONE + ONE,
    "exists already": b"diff --git a/a b/a\n" + NEW + b"+++ b/a\n@@ -0,0 +1 @@\n+1\n",
    "absent": ONE.replace(b"a/a", b"a/z").replace(b"b/a", b"b/z"),
    "other content": ONE.replace(b"-1\n", b"-7\n"),
    "leaves lines": b"diff --git a/b b/b\ndeleted file mode 100644\n"
    + b"--- a/b\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
    "below a file": b"diff --git a/a/b b/a/b\n" + NEW + b"+++ b/a/b\n@@ -0,0 +1 @@\n+1\n",
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_a_whole(name: str) -> None:
    tree = {"a": b"1\n", "b": b"x\ny\n"}
    with pytest.raises(PatchError):
        apply_patch(tree, REFUSED[name])
    assert tree == {"a": b"1\n", "b": b"x\ny\n"}
    assert apply_patch(tree, ONE) == {"a": b"2\n", "b": b"x\ny\n"}


def test_one_bad_file_spoils_the_whole_patch() -> None:
    second = ONE.replace(b"a/a", b"a/b").replace(b"b/a", b"b/b")
    assert ours({"a": b"1\n", "b": b"x\n"}, ONE + second) is None
    assert git_apply({"a": b"1\n", "b": b"x\n"}, ONE + second) is None


def test_between_two_equally_near_places_the_later_is_taken_as_git_does() -> None:
    lines = b"".join(b"%s\n" % line for line in (b"a", b"a", b"a", b"b") * 2 + (b"a",) * 3)
    hunk = b"@@ -3,7 +3,7 @@\n a\n a\n a\n-b\n+c\n a\n a\n a\n"
    patch = b"diff --git a/a b/a\n--- a/a\n+++ b/a\n" + hunk
    result = ours({"a": lines}, patch)
    assert result is not None
    assert result["a"].split() == [b"a"] * 3 + [b"b"] + [b"a"] * 3 + [b"c"] + [b"a"] * 3
    assert git_apply({"a": lines}, patch) == result


def test_no_content_makes_the_diff_slow() -> None:
    """Files of equal lines are the worst case of a plain longest-match diff."""
    for before, after in (
        (b"a\n" * 9000, b"b\n" + b"a\n" * 8000 + b"b\n"),
        (b"a\nb\n" * 4000, b"b\nb\na\n" * 3000),
        (b"\n" * 100_000, b"x\n" * 80_000),
    ):
        started = time.process_time()
        patch = diff_trees({"a": before}, {"a": after}).patch
        assert time.process_time() - started < 5
        assert apply_patch({"a": before}, patch) == {"a": after}
