"""Checkpoints are complete or not there; the newest verified one wins."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from agent_rl.errors import CheckpointError
from agent_rl.trainer.checkpoint import MANIFEST, CheckpointStore, damage


def fill(folder: Path, text: str = "x") -> None:
    (folder / "a.bin").write_bytes(text.encode() * 100)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.bin").write_bytes(b"y" * 5000)
    (folder / "empty").write_bytes(b"")


def test_steps_compare_as_numbers(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=5)
    for step in (9, 10, 100_000_000):
        store.save(step, fill)
    assert store.steps() == [9, 10, 100_000_000]
    found = store.latest()
    assert found is not None
    assert found.step == 100_000_000
    assert found.skipped == ()
    assert (found.folder / "sub" / "b.bin").read_bytes() == b"y" * 5000


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    for step in range(5):
        store.save(step, fill)
    assert store.steps() == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_nothing_saved_is_not_an_error(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "absent").latest() is None
    tmp_path.joinpath("notes.txt").write_text("not a checkpoint")
    assert CheckpointStore(tmp_path).latest() is None


@pytest.mark.parametrize("name", ["a.bin", "sub/b.bin", MANIFEST])
def test_a_file_short_by_one_byte_is_passed_over(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, fill)
    newest = store.save(2, fill)
    file = newest / name
    os.truncate(file, file.stat().st_size - 1)
    found = store.latest()
    assert found is not None
    assert found.step == 1
    assert [s.name for s in found.skipped] == ["step-00000002"]
    assert name in found.skipped[0].reason


def test_a_changed_byte_is_noticed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, fill)
    file = store.save(2, fill) / "sub" / "b.bin"
    file.write_bytes(b"y" * 4999 + b"z")
    found = store.latest()
    assert found is not None
    assert found.step == 1
    assert found.skipped[0].reason == "sub/b.bin: content does not match its digest"


@pytest.mark.parametrize("name", ["a.bin", "sub/b.bin", "empty", MANIFEST])
def test_a_missing_file_is_passed_over(tmp_path: Path, name: str) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, fill)
    (store.save(2, fill) / name).unlink()
    found = store.latest()
    assert found is not None
    assert (found.step, found.skipped[0].reason) == (1, f"{name} is missing")


@pytest.mark.parametrize("text", ["{}", "[]", '{"files": []}', '{"files": [{"path": "a"}]}', "1"])
def test_a_manifest_that_says_nothing_is_not_trusted(tmp_path: Path, text: str) -> None:
    folder = CheckpointStore(tmp_path).save(1, fill)
    (folder / MANIFEST).write_text(text)
    assert damage(folder) is not None


def test_none_to_trust_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (store.save(1, fill) / "a.bin").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000001: a\.bin is missing"):
        store.latest()


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_kill_after_each_file_leaves_the_last_checkpoint(tmp_path: Path, after: int) -> None:
    script = textwrap.dedent(
        f"""
        import os
        from pathlib import Path
        from agent_rl.trainer.checkpoint import CheckpointStore
        def write(folder):
            for i in range(3):
                (folder / f"{{i}}.bin").write_bytes(b"x" * 1000)
                if i == {after}:
                    os._exit(9)
        store = CheckpointStore(Path({str(tmp_path)!r}))
        store.save(1, lambda folder: (folder / "a").write_text("whole"))
        store.save(2, write)
        """
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 9
    store = CheckpointStore(tmp_path)
    found = store.latest()
    assert found is not None
    assert (found.step, found.skipped) == (1, ())
    assert any(p.name.startswith(".partial-") for p in tmp_path.iterdir())
    store.save(2, fill)  # the half-written one is swept away
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.save(3, fill)
    folder.rename(tmp_path / ".replaced-00000003-1")
    store.save(4, fill)
    assert store.steps() == [3, 4]


def test_a_kill_between_the_two_renames_is_seen_by_who_only_reads(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(3, fill).rename(tmp_path / ".replaced-00000003-1")
    found = store.latest()
    assert found is not None
    assert found.step == 3


@pytest.mark.parametrize(("keep_last", "step"), [(1, 3), (1, 4), (2, 3), (2, 4)])
def test_a_kill_at_any_file_operation_of_a_save_leaves_the_newest_whole_one(
    keep_last: int, step: int
) -> None:
    """Writing, publishing and removing older ones; a new step, and one that is there already."""
    killer = Path(__file__).with_name("checkpoint_killer.py")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:  # thousands of fsyncs
        command = [sys.executable, str(killer), memory, str(keep_last), str(step)]
        out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = [line.split() for line in out.splitlines()]
    assert len(lines) > 20
    newest = [int(line[0]) for line in lines]
    assert newest == sorted(newest)
    assert set(newest) == {3, step}
    kept = ["step-00000005"] if keep_last == 1 else ["", "step-00000005"]
    for before, after, *left in lines:
        assert after == "5"
        if keep_last == 2:
            kept[0] = f"step-{int(before):08d}"
        assert left == kept


def test_a_folder_under_another_steps_name_is_not_that_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, fill)
    store.save(2, fill).rename(tmp_path / "step-00000009")
    found = store.latest()
    assert found is not None
    assert (found.step, found.skipped[0].reason) == (1, f"{MANIFEST}: got=step 2 expected=step 9")


def test_a_file_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    """The kernel answers EIO for a process's memory at address 0, as for a bad sector."""
    store = CheckpointStore(tmp_path)
    store.save(1, fill)
    newest = store.save(2, fill)
    (newest / MANIFEST).unlink()
    (newest / MANIFEST).symlink_to("/proc/self/mem")
    found = store.latest()
    assert found is not None
    assert found.step == 1
    assert found.skipped[0].reason.startswith("cannot be read ([Errno 5]")


def test_a_full_disk_is_named_and_leaves_earlier_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, fill)

    def write(folder: Path) -> None:
        (folder / "a.bin").write_bytes(b"x" * 1000)
        with open("/dev/full", "wb") as full:
            full.write(b"x" * 100_000)

    words = (
        r"no space for the checkpoint of step 2 .* bytes free .* over the 1000 that were written"
    )
    with pytest.raises(CheckpointError, match=words) as caught:
        store.save(2, write)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failing_writer_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for error in (ValueError("broken"), KeyboardInterrupt()):

        def write(folder: Path, error: BaseException = error) -> None:
            fill(folder)
            raise error

        with pytest.raises(type(error)):
            store.save(1, write)
    assert list(tmp_path.iterdir()) == []


def test_an_empty_checkpoint_and_a_foreign_manifest_are_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="got=no files"):
        store.save(1, lambda folder: None)
    with pytest.raises(CheckpointError, match="the store's own file"):
        store.save(1, lambda folder: (folder / MANIFEST).write_text("{}"))
    assert store.steps() == []


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    store.save(1, lambda folder: fill(folder, "old"))
    folder = store.save(1, lambda folder: fill(folder, "new"))
    assert (folder / "a.bin").read_bytes() == b"new" * 100
    assert damage(folder) is None
    assert store.steps() == [1]


def test_going_back_never_removes_what_was_just_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    store.save(10, fill)
    store.save(5, fill)
    assert store.steps() == [5, 10]


def test_the_manifest_lists_sizes_and_digests(tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path).save(7, fill)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["step"] == 7
    assert {f["path"]: f["bytes"] for f in manifest["files"]} == {
        "a.bin": 100,
        "sub/b.bin": 5000,
        "empty": 0,
    }
    assert all(len(f["sha256"]) == 64 for f in manifest["files"])


def test_the_module_needs_no_torch() -> None:
    script = "import sys, agent_rl.trainer.checkpoint; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == "False"
