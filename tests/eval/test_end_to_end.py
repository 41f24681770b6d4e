"""The whole way with real containers and the official harness, killed twice on it and resumed.

The tests of this file build on one another's run, in order.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from eval_scripts import SCRIPT, WANTED
from swe_specimens import CALC, CRLF, PACK, SHAPES, SPECIMENS, STACK, Specimen, write_dataset

from envs.tasks.write_repository import commit_tree
from eval.outcomes import Counts, Outcome
from eval.predictions import Prediction, read_predictions, write_predictions

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
# an instance whose image nobody has: trouble of the machinery, whatever the model does
GHOST = replace(CALC, name="ghost")


@pytest.fixture(scope="module")
def run_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluation")
    for specimen in SPECIMENS.values():
        specimen.build()
    write_dataset(root / "rows.jsonl", [*SPECIMENS.values(), GHOST])
    script = {**SCRIPT, GHOST.instance_id: ["never asked"]}
    (root / "script.json").write_text(json.dumps(script))
    suite = {
        "name": "run",
        "run_root": str(root / "runs"),
        "num_workers": 2,
        "dataset": {"source": str(root / "rows.jsonl")},
        "model": {"kind": "scripted", "script": str(root / "script.json")},
        "agent": {"action_format": "bash_block", "tools": "shell"},
        "grading": {"num_workers": 3, "timeout_s": 30},
    }
    (root / "suite.yaml").write_text(yaml.safe_dump(suite))
    return root


def start(root: Path, *arguments: str) -> subprocess.Popen[bytes]:
    code = "from eval.cli import eval_app; eval_app()"
    argv = [sys.executable, "-c", code, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with (root / "run.log").open("ab") as log:
        return subprocess.Popen(argv, env=environment, stdout=log, stderr=log)


def finish(root: Path, *arguments: str) -> dict[str, Outcome]:
    """Run to the end; outcomes of sample 0."""
    assert start(root, *arguments).wait() == 0, (root / "run.log").read_text()[-3000:]
    name = arguments[arguments.index("--name") + 1] if "--name" in arguments else "run"
    report = json.loads((root / "runs" / name / "report.json").read_text())
    outcomes = {r["instance_id"]: Outcome(r["outcome"]) for r in report["results"]}
    assert sum(report["counts"].values()) == report["asked_for"] == len(outcomes)
    assert Counts.of(outcomes.values()).resolved == report["counts"]["resolved"]
    return outcomes


def kill_when(root: Path, reached: Callable[[], bool]) -> None:
    """Start, wait until it got so far, and kill it without a chance to clean up."""
    process = start(root, "run", str(root / "suite.yaml"))
    try:
        deadline = time.monotonic() + 500
        while not reached():
            assert process.poll() is None, (root / "run.log").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def containers_left(root: Path) -> list[str]:
    run_id = json.loads((root / "runs" / "run" / "run.json").read_text())["run_id"]
    argv = ["docker", "ps", "--all", "--no-trunc", "--format", "{{.Names}} {{.Labels}}"]
    listed = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if run_id in line]


def changed_since(folder: Path, before: dict[str, float]) -> set[str]:
    return {file.stem for file in folder.iterdir() if before.get(file.stem) != _stamp(file)}


def stamps(folder: Path) -> dict[str, float]:
    return {file.stem: _stamp(file) for file in folder.iterdir()}


def _stamp(file: Path) -> float:
    return file.stat().st_mtime_ns


def test_killed_while_generating_and_while_grading_then_resumed(run_root: Path) -> None:
    sample = run_root / "runs" / "run" / "samples" / "0"
    predictions = sample / "predictions.jsonl"
    kill_when(run_root, lambda: predictions.is_file() and len(read_predictions(predictions)) >= 4)
    played = read_predictions(predictions)
    first = stamps(sample / "episodes")
    assert len(played) < len(WANTED)
    kill_when(run_root, lambda: len(list((sample / "harness").rglob("report.json"))) >= 2)
    graded = {file.parent.name: _stamp(file) for file in sample.rglob("harness/**/report.json")}

    outcomes = finish(run_root, "run", str(run_root / "suite.yaml"))
    assert outcomes == {**WANTED, GHOST.instance_id: Outcome.INFRASTRUCTURE}
    assert not changed_since(sample / "episodes", first) & set(played)
    again = {file.parent.name: _stamp(file) for file in sample.rglob("harness/**/report.json")}
    assert {key: again[key] for key in graded} == graded  # nothing was graded twice
    assert containers_left(run_root) == []


def test_the_agent_could_not_read_the_fix(run_root: Path) -> None:
    for instance_id in (CALC.instance_id, CRLF.instance_id):
        file = run_root / "runs/run/samples/0/episodes" / f"{instance_id}.json"
        look, peek, *_ = json.loads(file.read_text())["turns"]
        assert "the fix" not in look["observation"]
        assert "unknown revision" in peek["observation"] or "bad revision" in peek["observation"]
        assert "\n1\n" in peek["observation"]  # one commit in all the objects


def test_patches_are_the_agents_changes_byte_for_byte(run_root: Path) -> None:
    found = read_predictions(run_root / "runs/run/samples/0/predictions.jsonl")
    crlf = found[CRLF.instance_id].patch
    assert "-    return y + 1\r\n+    return y\r\n \r\n \r\n # end\r\n" in crlf
    assert "data.bin" not in found[PACK.instance_id].patch  # binary: left out, with a note
    record = json.loads(
        (run_root / f"runs/run/samples/0/episodes/{PACK.instance_id}.json").read_text()
    )
    assert record["notes"] == ["data.bin: binary"]


def test_changed_patches_are_graded_again_and_nothing_else(run_root: Path) -> None:
    sample = run_root / "runs" / "run" / "samples" / "0"
    found = read_predictions(sample / "predictions.jsonl")
    without_data = (
        "diff --git a/data.bin b/data.bin\nindex 1111111..2222222 100644\n"
        "Binary files a/data.bin and b/data.bin differ\n"
    )
    changed = {
        CALC.instance_id: found[CALC.instance_id].patch.replace("calc.py", "nope.py"),
        PACK.instance_id: PACK.gold + without_data,
        SHAPES.instance_id: SHAPES.gold,
    }
    for key, patch in changed.items():
        found[key] = Prediction(key, "scripted", patch)
    write_predictions(sample / "predictions.jsonl", found.values())
    before = stamps(sample / "grades")
    outcomes = finish(run_root, "run", str(run_root / "suite.yaml"))
    assert outcomes[CALC.instance_id] is Outcome.DOES_NOT_APPLY
    # git apply refuses it all; the harness then falls back on patch, which skips the binary part
    assert outcomes[PACK.instance_id] is Outcome.RESOLVED
    assert outcomes[SHAPES.instance_id] is Outcome.RESOLVED
    assert changed_since(sample / "grades", before) == set(changed)
    assert containers_left(run_root) == []


def test_predictions_made_elsewhere(run_root: Path) -> None:
    """A stripped last newline, a binary hunk with its data, an empty patch, and some absent."""
    file = run_root / "elsewhere.jsonl"
    patches = {
        CRLF.instance_id: CRLF.gold.removesuffix("\n"),
        PACK.instance_id: _binary_patch(PACK),
        STACK.instance_id: "",
    }
    write_predictions(file, (Prediction(key, "x/y", patch) for key, patch in patches.items()))
    dataset = str(run_root / "rows.jsonl")
    where = ("--dataset", dataset, "--name", "elsewhere", "--root", str(run_root / "runs"))
    outcomes = finish(run_root, "grade", str(file), *where, "--workers", "2", "--timeout", "60")
    wanted = dict.fromkeys([*SPECIMENS, GHOST.instance_id], Outcome.NOT_RUN)
    wanted[CRLF.instance_id] = wanted[PACK.instance_id] = Outcome.RESOLVED
    wanted[STACK.instance_id] = Outcome.EMPTY_PATCH
    assert outcomes == wanted


def test_a_page_for_every_episode(run_root: Path) -> None:
    pages = run_root / "runs" / "run" / "html"
    index = (pages / "index.html").read_text()
    for instance_id in WANTED:
        assert f'href="{instance_id}.0.html"' in index
        assert instance_id in (pages / f"{instance_id}.0.html").read_text()
    assert "Test Output" in (pages / f"{SHAPES.instance_id}.0.html").read_text()


def _binary_patch(specimen: Specimen) -> str:
    """The gold patch with a change of a binary file, as ``git diff --binary`` writes it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        commit_tree(specimen.base_files, folder)
        for path, data in {**specimen.fix, "data.bin": b"\0\1\2" * 30}.items():
            (folder / path).write_bytes(data)
        argv = ["git", "-c", "safe.directory=*", "-C", name, "diff", "--binary"]
        patch = subprocess.run(argv, capture_output=True, check=True).stdout.decode()
    assert "GIT binary patch" in patch
    return patch
