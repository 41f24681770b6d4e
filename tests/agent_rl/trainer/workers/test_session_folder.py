"""Folders of killed processes go; those in use and those of others stay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from agent_rl.trainer.workers.session_folder import SessionFolder

OWNER = (
    "import sys, time; from pathlib import Path\n"
    "from agent_rl.trainer.workers.session_folder import SessionFolder\n"
    "folder = SessionFolder('kind-', Path(sys.argv[1])); (folder.path / 'file').write_text('x')\n"
    "print(folder.path, flush=True); time.sleep(600)"
)


def test_a_folder_goes_with_its_process(tmp_path: Path) -> None:
    folder = SessionFolder("kind-", tmp_path)
    (folder.path / "file").write_text("x")
    for _ in range(2):
        folder.remove()
        assert list(tmp_path.iterdir()) == []


def test_the_folder_of_a_killed_process_goes_with_the_next_one(tmp_path: Path) -> None:
    foreign = tmp_path / "kind-without-a-lock"
    foreign.mkdir()
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            left = Path(owner.stdout.readline().strip())
            while_used = SessionFolder("kind-", tmp_path)
            assert (left / "file").exists()
        finally:
            os.kill(owner.pid, signal.SIGKILL)
    after = SessionFolder("kind-", tmp_path)
    assert set(tmp_path.iterdir()) == {foreign, while_used.path, after.path}
    after.remove()
    while_used.remove()
