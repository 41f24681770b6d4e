"""Checkpoints that are either complete or not there.

A checkpoint is written aside, flushed to disk, described by ``manifest.json`` (sizes and SHA-256 of
every file, written last) and then renamed into place. A resume takes the newest one whose files
still match their manifest and says what it passed over. What is inside is the caller's business:
the ranks of a trainer each write their own files into the folder, before ``write`` returns.

    checkpoints/
      step-00000010/           complete: manifest.json is there
      .partial-00000011-4242/  being written, or left by a process that died
      .replaced-00000010-4242/ stands for step-00000010 until its new version has that name
      .doomed-00000009-4242/   being removed
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from agent_rl.errors import CheckpointError

MANIFEST = "manifest.json"
_NAME = re.compile(r"^step-(\d+)$")
_ASIDE = re.compile(r"^\.(partial|replaced|doomed)-(\d+)-\d+$")
_BLOCK_BYTES = 1 << 20
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an ``OSError``: the disk is full


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Found:
    """The newest verified checkpoint, and the newer ones that did not verify."""

    step: int
    folder: Path
    skipped: tuple[Skipped, ...]


class CheckpointStore:
    """Checkpoints of one run below ``root``; one writer at a time.

    Example:
        >>> store = CheckpointStore(run_dir / "checkpoints", keep_last=2)
        >>> store.save(10, lambda folder: trainer.save(folder))
        >>> found = store.latest()
    """

    def __init__(self, root: Path, *, keep_last: int = 2) -> None:
        if keep_last < 1:
            raise CheckpointError(f"keep_last: got={keep_last} expected=at least 1")
        self._root, self._keep_last = root, keep_last

    def save(self, step: int, write: Callable[[Path], object]) -> Path:
        """Have ``write`` fill an empty folder, then publish it as the checkpoint of ``step``.

        Of the older ones the last ``keep_last - 1`` whole ones are kept. Raises ``CheckpointError``
        when the disk is full or the folder stays empty; whatever ``write`` raises passes through.
        Either way the folder is removed and earlier checkpoints are untouched.
        """
        if not self._root.is_dir():
            self._root.mkdir(parents=True)
            sync(self._root.parent)
        self._remove_leftovers()
        aside = self._root / f".partial-{step:08d}-{os.getpid()}"
        aside.mkdir()
        try:
            write(aside)
            _seal(aside, step)
        except OSError as error:
            written = sum(p.stat().st_size for p in aside.rglob("*") if p.is_file())
            shutil.rmtree(aside, ignore_errors=True)
            if error.errno not in NO_ROOM:
                raise
            free = shutil.disk_usage(self._root).free
            raise CheckpointError(
                f"no space for the checkpoint of step {step} ({error}): got={free} bytes free in "
                f"{self._root} expected=well over the {written} that were written before it was "
                "full; free space or lower train.keep_last"
            ) from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        folder = self._publish(aside, step)
        self._prune(step)
        return folder

    def latest(self) -> Found | None:
        """The newest checkpoint that verifies; steps compare as numbers. None without any.

        Raises ``CheckpointError`` when there are checkpoints and none verifies.
        """
        skipped: list[Skipped] = []
        seen = sorted(self._complete(), reverse=True)
        for step, folder in seen:
            reason = damage(folder)
            if reason is None:
                return Found(step, folder, tuple(skipped))
            skipped.append(Skipped(folder.name, reason))
        if not all(folder.exists() for _, folder in seen):
            return self.latest()  # a run that is going on put a newer one in its place
        if skipped:
            listed = "; ".join(f"{s.name}: {s.reason}" for s in skipped)
            raise CheckpointError(
                f"no checkpoint in {self._root} can be trusted: got={listed} "
                "expected=one whose files match its manifest; remove them to start over"
            )
        return None

    def steps(self) -> list[int]:
        """Steps that have a folder, ascending, verified or not."""
        return sorted(step for step, _ in self._complete())

    def _complete(self) -> Iterator[tuple[int, Path]]:
        if not self._root.is_dir():
            return
        for folder in self._root.iterdir():
            match = _NAME.match(folder.name) or _ASIDE.match(folder.name)
            if match is None or not folder.is_dir():
                continue
            step = int(match.groups()[-1])
            if match.re is _NAME or (match[1] == "replaced" and not self._folder(step).exists()):
                yield step, folder  # the latter: a process died between the renames of _publish

    def _folder(self, step: int) -> Path:
        return self._root / f"step-{step:08d}"

    def _publish(self, aside: Path, step: int) -> Path:
        folder = self._folder(step)
        replaced = self._root / f".replaced-{step:08d}-{os.getpid()}"
        if folder.exists():  # of a run that was taken up again from an earlier step
            os.rename(folder, replaced)
        os.rename(aside, folder)
        sync(self._root)
        shutil.rmtree(replaced, ignore_errors=True)
        return folder

    def _prune(self, saved: int) -> None:
        """Remove the oldest, through a name nobody reads; never ``saved`` nor anything newer."""
        older = sorted((c for c in self._complete() if c[0] < saved), reverse=True)
        # One that lost a file must not push out one that can be resumed from. Its contents were
        # hashed when it was written; sizes are enough here.
        whole = [c for c in older if damage(c[1], contents=False) is None]
        kept = whole[: self._keep_last - 1]
        for step, folder in (c for c in older if c not in kept):
            doomed = self._root / f".doomed-{step:08d}-{os.getpid()}"
            os.rename(folder, doomed)
            shutil.rmtree(doomed, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Finish or undo what a process that died left behind."""
        for folder in list(self._root.iterdir()):
            match = _ASIDE.match(folder.name)
            if not match:
                continue
            home = self._folder(int(match[2]))
            if match[1] == "replaced" and not home.exists():
                os.rename(folder, home)  # died between the two renames of _publish
            else:
                shutil.rmtree(folder, ignore_errors=True)


def damage(folder: Path, *, contents: bool = True) -> str | None:
    """Return why the files of ``folder`` do not match its manifest, or None when they do.

    Without ``contents`` only names and sizes are compared.
    """
    try:
        return _damage(folder, contents)
    except OSError as error:  # a bad sector, a share that is gone
        return f"cannot be read ({error})"


def _damage(folder: Path, contents: bool) -> str | None:
    path, name = folder / MANIFEST, _NAME.match(folder.name)
    try:
        manifest = json.loads(path.read_text())
        step, files = int(manifest["step"]), manifest["files"]
        entries = [(str(f["path"]), int(f["bytes"]), str(f["sha256"])) for f in files]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    if name and int(name[1]) != step:  # a renamed folder: its data position would be wrong
        return f"{MANIFEST}: got=step {step} expected=step {int(name[1])}"
    if not entries:
        return f"{MANIFEST} lists no files"
    for name, size, _ in entries:
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name}: got={file.stat().st_size} bytes expected={size}"
    if contents:
        digests = _sha256([folder / name for name, _, _ in entries])
        for (name, _, expected), digest in zip(entries, digests, strict=True):
            if digest != expected:
                return f"{name}: content does not match its digest"
    return None


def _seal(folder: Path, step: int) -> None:
    """Flush every file, then write and flush the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    if not files:
        raise CheckpointError(f"checkpoint of step {step}: got=no files expected=at least one")
    if folder / MANIFEST in files:
        raise CheckpointError(f"checkpoint of step {step}: {MANIFEST} is the store's own file")
    for path in files:
        sync(path)
    entries = [
        {
            "path": path.relative_to(folder).as_posix(),
            "bytes": path.stat().st_size,
            "sha256": digest,
        }
        for path, digest in zip(files, _sha256(files), strict=True)
    ]
    for child in sorted(p for p in folder.rglob("*") if p.is_dir()):
        sync(child)
    manifest = folder / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": entries}, indent=1))
    sync(manifest)
    sync(folder)


def _sha256(paths: Sequence[Path]) -> list[str]:
    """Digests of files, several read at a time: hashing releases the interpreter."""
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return list(pool.map(_sha256_of, paths))


def _sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
