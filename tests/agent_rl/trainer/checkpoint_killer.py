"""Dies at every file operation of a save in turn; run by ``test_checkpoint``.

Usage: FOLDER KEEP_LAST STEP. Prints a line for each: the newest step that verifies, and the newest
one after another save.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from agent_rl.trainer.checkpoint import CheckpointStore

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir")


def fill(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"x" * 1000)
    (folder / "sub").mkdir()
    (folder / "sub" / "b.bin").write_bytes(b"y" * 5000)


def die_at(number: int) -> None:
    """End this process before its file operation of that number, as a kill would."""
    seen = 0

    def count(event: str, arguments: object) -> None:
        nonlocal seen
        if event in OPERATIONS:
            if seen == number:
                os._exit(9)
            seen += 1

    sys.addaudithook(count)


def trial(root: Path, keep_last: int, step: int, number: int) -> bool:
    """Whether the save came to its end."""
    store = CheckpointStore(root, keep_last=keep_last)
    for earlier in (1, 2, 3):
        store.save(earlier, fill)
    child = os.fork()
    if not child:
        die_at(number)
        store.save(step, fill)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    found = store.latest()
    assert found is not None
    assert found.skipped == ()
    store.save(5, fill)
    after = store.latest()
    assert after is not None
    print(found.step, after.step, *sorted(path.name for path in root.iterdir()))
    return status == 0


root, keep_last, step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
number = 0
while not trial(root / str(number), keep_last, step, number):
    number += 1
