"""Many episodes: workers, what is on disk when, resume after a kill, giving up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from eval_fakes import FakeEnv, run_blocking
from eval_rows import make_row

from agent_rl.view.record import EpisodeRecord
from envs.actions import Prompts
from envs.tasks.swebench import SweBenchRow
from eval.config import AgentLoopConfig, SuiteConfig
from eval.errors import ModelError, RunMismatchError, TooManyFailuresError
from eval.folder import EvalFolder
from eval.generation import GenerationParts, generate
from eval.models import ScriptedChat
from eval.predictions import read_predictions

ROWS = [make_row(number) for number in range(6)]


class Recorder:
    """Makes environments and remembers for which instances; some fail the first time."""

    def __init__(self, fail_once: tuple[str, ...] = ()) -> None:
        self.made: list[str] = []
        self._fail_once = set(fail_once)

    def __call__(self, row: SweBenchRow) -> FakeEnv:
        self.made.append(row.instance_id)
        fails = row.instance_id in self._fail_once
        self._fail_once.discard(row.instance_id)
        return FakeEnv(f"+{row.instance_id}\n".encode(), fails_in="reset" if fails else "")


def run(folder: Path, recorder: Recorder, config: SuiteConfig, seen: list[str]) -> None:
    def on_episode(record: EpisodeRecord, done: int, total: int) -> None:
        seen.append(f"{record.task_id}/{record.sample} {record.status} {done}/{total}")

    with EvalFolder(folder) as opened, ThreadPoolExecutor(2) as executor:
        parts = GenerationParts(
            ScriptedChat({"*": ["look", "submit"]}),
            recorder,
            lambda row: Prompts("s", "u"),
            executor,
        )
        run_blocking(generate(config, opened, ROWS, parts, on_episode))


def test_every_sample_of_every_instance_is_played_once(tmp_path: Path) -> None:
    recorder, seen = Recorder(), list[str]()
    run(tmp_path, recorder, SuiteConfig(samples=2, num_workers=3), seen)
    assert sorted(recorder.made) == sorted([row.instance_id for row in ROWS] * 2)
    assert seen[-1].endswith("12/12")
    with EvalFolder(tmp_path) as folder:
        for sample in range(2):
            found = read_predictions(folder.predictions_file(sample))
            assert {p.patch for p in found.values()} == {f"+{row.instance_id}\n" for row in ROWS}
            record = folder.episode(sample, ROWS[0].instance_id)
            assert record is not None
            assert (record.sample, len(record.turns)) == (sample, 2)
    recorder.made.clear()
    run(tmp_path, recorder, SuiteConfig(samples=2), seen)
    assert recorder.made == []
    run(tmp_path, recorder, SuiteConfig(samples=3), seen)
    assert len(recorder.made) == 6


def test_failed_episodes_have_no_prediction_and_are_played_again(tmp_path: Path) -> None:
    recorder, seen = Recorder(fail_once=(ROWS[2].instance_id,)), list[str]()
    run(tmp_path, recorder, SuiteConfig(num_workers=1), seen)
    assert [line for line in seen if "failed" in line] == ["local__calc-2/0 failed 2/6"]
    with EvalFolder(tmp_path) as folder:
        assert ROWS[2].instance_id not in read_predictions(folder.predictions_file(0))
        record = folder.episode(0, ROWS[2].instance_id)
        assert record is not None
        assert record.error == "InfrastructureError: reset is broken"
    recorder.made.clear()
    run(tmp_path, recorder, SuiteConfig(num_workers=1), seen)
    assert recorder.made == [ROWS[2].instance_id]
    assert seen[-1] == "local__calc-2/0 completed 6/6"


def test_many_failures_in_a_row_stop_the_run(tmp_path: Path) -> None:
    recorder = Recorder(fail_once=tuple(row.instance_id for row in ROWS))
    config = SuiteConfig(num_workers=1, max_consecutive_failures=3)
    with pytest.raises(
        TooManyFailuresError, match=r"3 episodes in a row failed, .*reset is broken"
    ):
        run(tmp_path, recorder, config, [])
    assert len(recorder.made) == 3


def test_a_model_that_cannot_answer_is_known_before_anything_starts(tmp_path: Path) -> None:
    recorder = Recorder()
    with EvalFolder(tmp_path) as folder, ThreadPoolExecutor(1) as executor:
        parts = GenerationParts(ScriptedChat({}), recorder, lambda row: Prompts("", ""), executor)
        with pytest.raises(ModelError, match="the script is empty"):
            run_blocking(generate(SuiteConfig(), folder, ROWS, parts))
    assert recorder.made == []


def test_killed_half_way_and_resumed(tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import sys, time
        sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2])!r}]
        from pathlib import Path
        from test_generation import Recorder, run
        from eval.config import SuiteConfig
        class Slow(Recorder):
            def __call__(self, row):
                if len(self.made) == 3:
                    Path({str(tmp_path)!r}, "half").touch()
                    time.sleep(600)
                return super().__call__(row)
        run(Path({str(tmp_path)!r}), Slow(), SuiteConfig(num_workers=1), [])
        """
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "half").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(RunMismatchError, match="in use by another process"):
            EvalFolder(tmp_path)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    recorder, seen = Recorder(), list[str]()
    run(tmp_path, recorder, SuiteConfig(num_workers=1), seen)
    assert recorder.made == [row.instance_id for row in ROWS[3:]]
    assert len(read_predictions(tmp_path / "samples" / "0" / "predictions.jsonl")) == 6


def test_a_folder_of_another_run_is_refused_by_key(tmp_path: Path) -> None:
    with EvalFolder(tmp_path) as folder:
        assert not folder.bind(SuiteConfig())
        assert folder.bind(SuiteConfig(samples=4, num_workers=9))
        other = SuiteConfig(agent=AgentLoopConfig(max_turns=7, tools="shell"))
        with pytest.raises(
            RunMismatchError, match=r"agent.max_turns: got 7, the run has 100; agen"
        ):
            folder.bind(other)
        first = folder.run_id
    with EvalFolder(tmp_path) as folder:
        assert folder.run_id == first
