"""What the official harness left, read: every way it says "error", told apart; and its process.

The process is a stand-in that takes the harness's arguments and writes the files it would write.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from eval_rows import make_prediction, make_row

from eval.config import GradingConfig
from eval.docker_command import foreign_images
from eval.errors import HarnessError
from eval.harness import OfficialHarness, check_harness
from eval.outcomes import Outcome
from eval.verdicts import Grade

STAND_IN = f"""\
#!/bin/sh
''':'
exec "{sys.executable}" "$0" "$@"  # no interpreter line may hold a path with a space
'''
import json, pathlib, sys, time
arguments = sys.argv[3:]
value = lambda name: arguments[arguments.index(name) + 1]
rows = {{row["instance_id"]: row for row in json.load(open(value("--dataset_name")))}}
for line in open(value("--predictions_path")):
    p = json.loads(line)
    model = p["model_name_or_path"].replace("/", "__")
    folder = pathlib.Path("logs/run_evaluation", value("--run_id"), model, p["instance_id"])
    if (folder / "report.json").exists():
        continue
    folder.mkdir(parents=True, exist_ok=True)
    with open("graded.txt", "a") as note:
        note.write(p["instance_id"] + "\\n")
    (folder / "run_instance.log").write_text("Container started\\n")
    if "die" in p["model_patch"]:
        sys.exit(7)
    if "sleep" in p["model_patch"]:
        pathlib.Path("sleeping").touch()
        time.sleep(600)
    if "noapply" in p["model_patch"]:
        (folder / "run_instance.log").write_text("E: >>>>> Patch Apply Failed:\\nerror: a.py: no")
        continue
    status = {{"FAIL_TO_PASS": {{"success": ["t"], "failure": []}}}}
    report = {{"resolved": True, "tests_status": status}}
    (folder / "report.json").write_text(json.dumps({{p["instance_id"]: report}}))
"""
FAKE_DOCKER = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/docker.log"
case "$1" in
  ps) echo "sweb.eval.local__calc-1.run-9"; echo "sweb.eval.local__calc-1.run-91x"; echo "other" ;;
  version) case "$3" in *Arch*) echo arm64 ;; *) echo 20.10 ;; esac ;;
  images) echo "a:1"; echo "b:1"; echo "other:1" ;;
  image) echo arm64; echo amd64 ;;
esac
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a stand-in for the harness's interpreter and one for docker."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in (("python-harness", STAND_IN), ("docker", FAKE_DOCKER)):
        (folder / name).write_text(text)
        (folder / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def make_harness(tmp_path: Path, programs: Path) -> OfficialHarness:
    options = GradingConfig(python=str(programs / "python-harness"), num_workers=1, timeout_s=5)
    return OfficialHarness(tmp_path / "harness", "run-9", options)


def log_folder(tmp_path: Path, number: int = 1) -> Path:
    root = tmp_path / "harness" / "logs" / "run_evaluation" / "run-9"
    return root / "org__model" / f"local__calc-{number}"


def test_a_run_gives_verdicts_bound_to_patch_and_row(tmp_path: Path, programs: Path) -> None:
    harness = make_harness(tmp_path, programs)
    rows = [make_row(1), make_row(2)]
    predictions = [make_prediction(1), make_prediction(2, "noapply\n")]
    seen: list[tuple[int, int]] = []
    harness.run(rows, predictions, lambda done, total: seen.append((done, total)))
    assert seen[0] == (0, 2)
    assert harness.read(rows[0], predictions[0]) == Grade(Outcome.RESOLVED, "", 1, 0)
    assert harness.read(rows[1], predictions[1]) == Grade(Outcome.DOES_NOT_APPLY, "error: a.py: no")
    assert harness.read(rows[0], make_prediction(1, "another\n")) is None
    changed = make_row(1, FAIL_TO_PASS=["t.py::test_b"])
    assert harness.read(changed, predictions[0]) is None
    assert harness.read(make_row(3), make_prediction(3)) is None


def write_logs(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("report.json", "run_instance.log", "test_output.txt"):
        (folder / name).unlink(missing_ok=True)
        key = name.partition(".")[0]
        if key in files:
            (folder / name).write_text(files[key])


def test_errors_of_the_harness_are_told_apart(tmp_path: Path, programs: Path) -> None:
    harness, row, prediction = make_harness(tmp_path, programs), make_row(1), make_prediction(1)
    harness.run([row], [prediction])
    folder = log_folder(tmp_path)

    def read(**files: str) -> Grade | None:
        write_logs(folder, **files)
        return harness.read(row, prediction)

    def report(**fields: object) -> str:
        return json.dumps({"local__calc-1": fields})

    assert read() is None
    timed_out = read(
        run_instance="EvaluationError: Test timed out after 5 seconds.",
        test_output="...\n\nTimeout error: 5 seconds exceeded.",
    )
    assert timed_out is not None
    assert (timed_out.outcome, timed_out.reason) == (
        Outcome.TIMEOUT,
        "Test timed out after 5 seconds",
    )
    pull = read(run_instance="Error creating container for x: 429 Too Many Requests\nTraceback")
    assert pull is not None
    assert pull.outcome is Outcome.INFRASTRUCTURE
    assert "429" in pull.reason
    torn = read(report='{"local__calc-1": {"resol', run_instance="started")
    assert torn is not None
    assert torn.outcome is Outcome.INFRASTRUCTURE  # cut in half: to be done again
    silent = read(report=report(resolved=False, infra_failure=False), run_instance="x")
    assert silent is not None
    assert silent.outcome is Outcome.UNRESOLVED
    memory = read(
        report=report(resolved=False, infra_failure=True, infra_failure_reason="out_of_memory"),
        run_instance="x",
    )
    assert memory == Grade(Outcome.INFRASTRUCTURE, "out_of_memory")
    tests = {
        "FAIL_TO_PASS": {"success": ["a"], "failure": ["b"]},
        "PASS_TO_PASS": {"success": [], "failure": ["c"]},
    }
    failed = read(report=report(resolved=False, tests_status=tests), run_instance="x")
    assert failed == Grade(Outcome.UNRESOLVED, "fails 2: b, c", 1, 2)


def test_only_this_runs_containers_are_removed(tmp_path: Path, programs: Path) -> None:
    make_harness(tmp_path, programs).remove_containers()
    removed = [
        line for line in (programs / "docker.log").read_text().splitlines() if line[:2] == "rm"
    ]
    assert removed == ["rm --force --volumes sweb.eval.local__calc-1.run-9"]


def test_images_that_would_be_emulated_are_found(programs: Path) -> None:
    assert foreign_images(["b:1", "a:1", "a:1", "to-be-pulled:1"]) == ["b:1"]
    assert foreign_images(["to-be-pulled:1"]) == []


def test_a_harness_that_breaks_off_is_an_error_and_keeps_what_it_did(
    tmp_path: Path, programs: Path
) -> None:
    harness = make_harness(tmp_path, programs)
    rows, predictions = [make_row(1), make_row(2)], [make_prediction(1), make_prediction(2, "die")]
    with pytest.raises(HarnessError, match="ended with 7"):
        harness.run(rows, predictions)
    kept = harness.read(rows[0], predictions[0])
    assert kept is not None
    assert kept.outcome is Outcome.RESOLVED


def test_the_harness_dies_with_the_process_that_started_it(tmp_path: Path, programs: Path) -> None:
    """Killed without a chance to clean up: nothing goes on grading behind a resumed run's back."""
    folder = tmp_path / "harness"
    code = textwrap.dedent(
        f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from eval_rows import make_prediction, make_row
        from eval.config import GradingConfig
        from eval.harness import OfficialHarness
        from pathlib import Path
        options = GradingConfig(python={sys.executable!r}, num_workers=1, timeout_s=5)
        harness = OfficialHarness(Path({str(folder)!r}), "run-9", options)
        harness.run([make_row(1)], [make_prediction(1, "sleep")])
        """
    )
    # the real child process, with a package of the harness's name that only sleeps
    package = tmp_path / "site" / "swebench" / "harness"
    package.mkdir(parents=True)
    for folder_of_package in (package, package.parent):
        (folder_of_package / "__init__.py").touch()
    (package / "run_evaluation.py").write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "time.sleep(600)\n"
    )
    sites = f"{tmp_path / 'site'}:{Path(__file__).parents[2]}"
    (tmp_path / "wrapper").write_text(
        f'#!/bin/sh\nexec env "PYTHONPATH={sites}" "{sys.executable}" "$@"\n'
    )
    (tmp_path / "wrapper").chmod(stat.S_IRWXU)
    code = code.replace(repr(sys.executable), repr(str(tmp_path / "wrapper")))
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": sites})
    try:
        child = _wait_for_pid(folder / "pid")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 20
    while _is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _is_running(child)


def _wait_for_pid(file: Path) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.is_file() and file.read_text():
            return int(file.read_text())
        time.sleep(0.05)
    raise AssertionError("the child did not start")


def _is_running(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def test_what_is_missing_is_said_before_anything_starts(programs: Path) -> None:
    with pytest.raises(HarnessError, match="no such Python"):
        check_harness(GradingConfig(python="/nowhere/python"))
    bare = GradingConfig(python="/usr/bin/python3")
    if Path(bare.python).exists():
        with pytest.raises(HarnessError, match="not installed"):
            check_harness(bare)
    (programs / "docker").write_text("#!/bin/sh\necho 'Cannot connect' >&2; exit 1\n")
    with pytest.raises(HarnessError, match="Cannot connect"):
        OfficialHarness(Path("x"), "run-9", GradingConfig()).remove_containers()
