"""Run folders: never overwritten, never shared, and a kill leaves nothing half-written."""

import subprocess
import sys
from pathlib import Path

import pytest

from agent_rl.config.schema import RunConfig
from agent_rl.store.run_folder import RunFolder, RunFolderError, read_metrics, write_aside


def _config(root: Path) -> RunConfig:
    return RunConfig(name="a", run_root=str(root))


def test_create_then_open_gives_the_config_back(tmp_path: Path) -> None:
    RunFolder.create(_config(tmp_path)).close()
    folder, config = RunFolder.open(tmp_path / "a")
    assert config == _config(tmp_path)
    folder.close()


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    RunFolder.create(_config(tmp_path)).close()
    with pytest.raises(RunFolderError, match="already holds a run"):
        RunFolder.create(_config(tmp_path))


def test_a_second_process_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    folder = RunFolder.create(_config(tmp_path))
    code = (
        "import sys; from pathlib import Path\n"
        "from agent_rl.store.run_folder import RunFolder, RunFolderError\n"
        "try: RunFolder.open(Path(sys.argv[1]))\n"
        "except RunFolderError as error: print(error)\n"
    )

    def attempt() -> str:
        command = [sys.executable, "-c", code, str(folder.path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "in use by another process" in attempt()
    folder.close()
    assert attempt() == ""


def test_a_killed_owner_leaves_a_lock_file_that_blocks_nobody(tmp_path: Path) -> None:
    RunFolder.create(_config(tmp_path)).close()
    code = (
        "import sys, time; from pathlib import Path\n"
        "from agent_rl.store.run_folder import RunFolder\n"
        "folder = RunFolder.open(Path(sys.argv[1])); print('held', flush=True); time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline() == "held\n"
            with pytest.raises(RunFolderError, match="/a is in use by another process: wait"):
                RunFolder.open(tmp_path / "a")
        finally:
            owner.kill()
    assert (tmp_path / "a" / ".lock").exists()
    RunFolder.open(tmp_path / "a")[0].close()


@pytest.mark.parametrize("below", ["file", "file/deeper", "/proc/nobody-writes-here"])
def test_a_run_root_that_cannot_hold_folders_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("x")
    root = tmp_path / below
    with pytest.raises(RunFolderError, match=rf"run_root .*got={root} .*expected a folder"):
        RunFolder.create(_config(root))


def test_a_folder_without_config_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="no run folder"):
        RunFolder.open(tmp_path)


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step":1}\n{"step":2}\n{"step":3,"rew')
    assert [row["step"] for row in read_metrics(file)] == [1, 2]


def test_a_damaged_line_in_the_middle_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step":1}\n{"st\n{"step":3}\n')
    with pytest.raises(RunFolderError, match="line 2 is damaged"):
        read_metrics(file)


def test_forget_after_drops_later_steps(tmp_path: Path) -> None:
    folder = RunFolder.create(_config(tmp_path))
    folder.metrics_file.write_bytes(b'{"step":1}\n{"step":2}\n{"step":3}\n{"step"')
    for step in (2, 3, 10):
        write_aside(folder.trajectories_file(step), b"x")
    folder.forget_after(2)
    assert [row["step"] for row in read_metrics(folder.metrics_file)] == [1, 2]
    left = sorted(file.name for file in (folder.path / "trajectories").iterdir())
    assert left == ["step-000002.parquet"]
    folder.close()


def test_write_aside_keeps_the_old_content_when_it_fails(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    write_aside(file, b"old")
    with pytest.raises(TypeError):
        write_aside(file, "text")  # pyright: ignore[reportArgumentType]
    assert file.read_bytes() == b"old"
    assert [f.name for f in tmp_path.iterdir()] == ["a.json"]
