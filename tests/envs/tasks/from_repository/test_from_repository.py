"""Making tasks from a repository: what is read, which bugs become tasks, what is written."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from envs.errors import TaskError
from envs.grading.suite import Failure, SuiteReport, TestStatus
from envs.patches.apply import apply_patch
from envs.tasks.from_repository import MakeOptions, load_tasks, make_tasks
from envs.tasks.from_repository.issue import write_issue
from envs.tasks.from_repository.make import find_tasks
from envs.tasks.from_repository.repository import Repository, read_repository
from envs.tasks.from_repository.requirements import requirements
from envs.tasks.from_repository.rows import r2e_name
from envs.tasks.from_repository.store import load_made_tasks, write_folder
from envs.tasks.from_repository.validate import Validator

FILES = {
    "calc/__init__.py": (
        b"def clamp(x, low, high):\n"
        b'    """Between low and high."""\n'
        b"    if x < low:\n        return low\n"
        b"    if x > high:\n        return high\n"
        b"    return x\n\n\n"
        b"def unused(x):\n    return x + 1\n\n\n"
        b"def spin(n):\n    return n - n\n"
    ),
    "tests/test_calc.py": (
        b"from calc import clamp\n\n\n"
        b"def test_low():\n    assert clamp(0, 1, 3) == 1\n\n\n"
        b"def test_high():\n    assert clamp(9, 1, 3) == 3\n\n\n"
        b"def test_inside():\n    assert clamp(2, 1, 3) == 2\n"
    ),
    "tests/test_spin.py": b"from calc import spin\n\n\ndef test_spin():\n    assert spin(3) == 0\n",
    "tests/data.txt": b"data\n",
    "setup.cfg": b"[metadata]\nname = calc\n",
}


def sdist(path: Path, files: Mapping[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{path.name.removesuffix('.tar.gz')}/{name}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
    return path


class ScriptedRunner:
    """Statuses by the content of ``calc/__init__.py``; the correct one passes everywhere."""

    names = (
        "tests/test_calc.py::test_low",
        "tests/test_calc.py::test_high",
        "tests/test_calc.py::test_inside",
        "tests/test_spin.py::test_spin",
    )

    def __init__(self, reports: Mapping[bytes, SuiteReport | None] | None = None) -> None:
        self.reports = dict(reports or {})
        self.runs = 0

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        self.runs += 1
        asked = [name for name in self.names if name.partition("::")[0] in test_files]
        scripted = self.reports.get(files["calc/__init__.py"])
        return scripted or SuiteReport(dict.fromkeys(asked, "PASSED"))


def report(complete: bool = True, kind: str = "failed", **changes: TestStatus) -> SuiteReport:
    statuses: dict[str, TestStatus] = dict.fromkeys(ScriptedRunner.names, "PASSED")
    for name in statuses:
        statuses[name] = changes.get(name.rpartition("test_")[2], "PASSED")
    bad = any(status in ("FAILED", "ERROR") for status in statuses.values())
    failure = Failure("x", kind) if bad or not complete else None  # type: ignore[arg-type]
    return SuiteReport(statuses, failure, complete)


@pytest.mark.parametrize("suffix", [".tar.gz", ""])
def test_sdists_and_folders_read_alike(tmp_path: Path, suffix: str) -> None:
    if suffix:
        source = sdist(tmp_path / "Calc_Tools-1.2.tar.gz", FILES)
    else:
        source = tmp_path / "Calc_Tools-1.2"
        for name, data in {**FILES, ".git/config": b"", "calc/__pycache__/x.pyc": b""}.items():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes(data)
    found = read_repository(source)
    assert (found.name, found.version) == ("calc-tools", "1.2")
    assert dict(found.files) == dict(sorted(FILES.items()))
    assert found.sources == ("calc/__init__.py",)
    assert found.test_files == ("tests/test_calc.py", "tests/test_spin.py")
    assert found.test_support == ("tests/data.txt",)


@pytest.mark.parametrize(
    ("name", "declared", "title"),
    [
        ("calc", b'[project]\nname = "calc"\nversion = "2.0.1"\n', "calc 2.0.1"),
        ("calc-1.2", b'[project]\nversion = "9"\n', "calc 1.2"),  # an sdist's name is its version
        ("calc", b'[project]\nname = "calc"\ndynamic = ["version"]\n', "calc"),
        ("calc", b"[project]\nversion = 3\n", "calc"),
        ("calc", b"project = 1\n", "calc"),
        ("calc", b"not toml \xff", "calc"),
        ("calc", b"", "calc"),
    ],
)
def test_the_version_is_the_names_or_the_projects_or_none(
    tmp_path: Path, name: str, declared: bytes, title: str
) -> None:
    for path, data in {**FILES, "pyproject.toml": declared}.items():
        (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / path).write_bytes(data)
    repository = read_repository(tmp_path / name)
    assert repository.title == title
    issue = write_issue(repository.title, ("tests/test_calc.py::test_low",), FILES, b"")
    assert issue.startswith(f"{title}: wrong result\n")


def test_unusable_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="expected a folder or an sdist"):
        read_repository(tmp_path / "absent.tar.gz")
    with pytest.raises(TaskError, match="has no tests"):
        read_repository(sdist(tmp_path / "a-1.tar.gz", {"a.py": b""}))
    with pytest.raises(TaskError, match="no Python source"):
        read_repository(sdist(tmp_path / "b-1.tar.gz", {"test_b.py": b""}))
    with pytest.raises(TaskError, match="outside itself"):
        read_repository(sdist(tmp_path / "c-1.tar.gz", {"../../evil.py": b""}))


def test_what_images_need_is_what_is_imported_and_installed() -> None:
    files = {
        **FILES,
        "src/own/__init__.py": b"import calc, own\nfrom . import yaml\n",
        "tests/test_more.py": b"import os, numpy.linalg\ntry:\n    import absent\nexcept E: pass\n",
        "broken.py": b"import (",
    }
    needed = requirements(Repository("calc", "1", files))
    assert [line.partition("==")[0] for line in needed] == ["numpy", "pytest"]


VERDICTS: dict[str, tuple[SuiteReport, str | None]] = {
    "kept": (report(low="FAILED"), None),
    "unnoticed": (report(), "no_test_fails"),
    "hangs": (report(complete=False, kind="timeout"), "hangs"),
    "dies": (report(complete=False, kind="crash"), "run_broke_off"),
    "all fail": (
        report(low="FAILED", high="FAILED", inside="ERROR", spin="FAILED"),
        "too_many_fail",
    ),
    "skips": (report(low="FAILED", high="SKIPPED"), "other_tests"),
    "loses a test": (SuiteReport({ScriptedRunner.names[0]: "FAILED"}), "other_tests"),
}


@pytest.mark.parametrize("case", sorted(VERDICTS))
def test_the_repositorys_own_tests_decide(case: str) -> None:
    outcome, refusal = VERDICTS[case]
    repository = Repository("calc", "1", FILES)
    options = MakeOptions(max_tried=1, num_workers=1, kinds=("negation", "condition"))
    recorder = RecordingRunner()
    assert find_tasks(repository, recorder, options).tried == 1
    mutated = next(seen for seen in recorder.seen if seen != FILES["calc/__init__.py"])
    made = find_tasks(repository, ScriptedRunner({mutated: outcome}), options)
    assert (made.kept, dict(made.refused)) == ((1, {}) if refusal is None else (0, {refusal: 1}))


class RecordingRunner(ScriptedRunner):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes] = []

    def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
        self.seen.append(files["calc/__init__.py"])
        return super().run(files, test_files)


def test_a_failure_that_the_fix_does_not_cure_is_no_task() -> None:
    class Flaky(ScriptedRunner):
        def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
            late = self.runs >= 2  # the correct tree passed twice, then its tests begin to fail
            self.runs += 1
            return report(low="FAILED") if late else report()

    options = MakeOptions(max_tried=3, num_workers=1)
    made = find_tasks(Repository("calc", "1", FILES), Flaky(), options)
    assert made.refused == {"fix_does_not_restore": 3}


def test_unsteady_or_failing_test_files_are_left_out_with_the_reason() -> None:
    class Unsteady(ScriptedRunner):
        def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
            self.runs += 1
            return report(low="FAILED" if self.runs == 2 else "PASSED", spin="FAILED")

    with pytest.raises(TaskError, match="no test file of calc can be used"):
        Validator(Repository("calc", "1", FILES), Unsteady())

    class Failing(ScriptedRunner):
        def run(self, files: Mapping[str, bytes], test_files: Mapping[str, bytes]) -> SuiteReport:
            return report(spin="FAILED")

    left_out = Validator(Repository("calc", "1", FILES), Failing()).baseline.left_out
    assert left_out == {
        "tests/test_spin.py": "1 tests do not pass, first tests/test_spin.py::test_spin"
    }


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of the small package, validated by real pytest in a real sandbox."""
    folder = tmp_path_factory.mktemp("made")
    source = sdist(folder / "calc-1.0.tar.gz", FILES)
    kinds = ("dropped_guard", "integer", "returned_value")
    options = MakeOptions(
        cpu_s=20, max_tried=5, max_per_function=3, kinds=kinds, base_image="base:1"
    )
    make_tasks(source, folder / "out", options)
    return folder / "out"


@pytest.mark.slow
def test_every_bug_tried_is_kept_or_refused_for_a_reason(made: Path) -> None:
    summary = json.loads((made / "report.json").read_text())
    assert summary["kept"] + sum(summary["refused"].values()) == summary["tried"] == 5
    assert summary["refused"]["no_test_fails"] >= 1  # nothing tests ``unused``
    assert summary["kept"] >= 2
    assert summary["num_tests"] == 4
    needed = (made / "requirements.txt").read_text()
    assert needed.startswith("pytest==")
    assert (made / "base" / "requirements.txt").read_text() == needed
    assert "FROM python:3." in (made / "base" / "Dockerfile").read_text()


@pytest.mark.slow
def test_the_rows_say_the_same_and_hide_the_fix(made: Path) -> None:
    tasks = load_made_tasks(made)
    swebench = [json.loads(line) for line in (made / "swebench.jsonl").read_text().splitlines()]
    r2e = [json.loads(line) for line in (made / "r2e_gym.jsonl").read_text().splitlines()]
    assert len(tasks) == len(swebench) == len(r2e)
    for task, classic, gym in zip(tasks, swebench, r2e, strict=True):
        assert (
            apply_patch(task.base_files, task.solution)["calc/__init__.py"]
            == (FILES["calc/__init__.py"])
        )
        assert set(classic["FAIL_TO_PASS"]) == set(task.failing)
        assert len(classic["FAIL_TO_PASS"]) + len(classic["PASS_TO_PASS"]) == 4
        restored = apply_patch(task.base_files, classic["test_patch"].encode())
        assert all(restored[path] == FILES[path] for path in task.hidden)
        assert not set(task.hidden) & set(task.base_files)
        assert json.loads(gym["expected_output_json"]) == {
            r2e_name(name): "PASSED" for name in task.expected
        }
        assert classic["image"] == gym["docker_image"]
        assert "E   " in classic["problem_statement"]


@pytest.mark.slow
def test_the_images_repository_holds_one_commit_without_the_fix(made: Path, tmp_path: Path) -> None:
    (task, *_) = load_made_tasks(made)
    (row, *_) = [json.loads(line) for line in (made / "swebench.jsonl").read_text().splitlines()]
    with tarfile.open(made / "images" / task.task_id / "testbed.tar") as tar:
        tar.extractall(tmp_path, filter="data")

    def git(*arguments: str) -> str:
        argv = ["git", "-c", "safe.directory=*", "-C", str(tmp_path), *arguments]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout

    assert git("rev-list", "--all", "--reflog").split() == [row["base_commit"]]
    assert git("status", "--porcelain") == ""
    assert (tmp_path / task.path).read_bytes() == task.content


@pytest.mark.slow
def test_loaded_tasks_are_what_was_made_and_damage_is_noticed(made: Path, tmp_path: Path) -> None:
    (first, *_) = load_tasks(made)
    assert first.metadata["test_runner"] == "pytest"
    assert first.hidden_files
    repository = read_repository(made / "repository.tar.gz")
    write_folder(tmp_path, repository, load_made_tasks(made)[:1], "base:1")
    assert load_tasks(tmp_path) == [first]
    file = tmp_path / "tasks.jsonl"
    file.write_text(file.read_text().replace("low", "lov"))
    with pytest.raises(TaskError, match="was changed"):
        load_tasks(tmp_path)
