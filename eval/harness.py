"""Runs the official SWE-bench harness as a process of its own and reads what it left.

Nothing of the harness is replaced: verdicts are its ``report.json`` files. What it reports as an
"error" is told apart here, from its logs: a patch that does not apply, a time-out, or trouble with
the machinery.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from agent_rl.store.run_folder import write_aside
from envs.tasks.swebench import SweBenchRow
from eval.errors import HarnessError
from eval.outcomes import Outcome
from eval.predictions import Prediction, write_predictions

_APPLY_FAILED = ">>>>> Patch Apply Failed"
_TIMED_OUT = re.compile(
    r"Test timed out after \d+ seconds|^Timeout error: \d+ seconds", re.MULTILINE
)
_MODULE = "swebench.harness.run_evaluation"
_LOG_CHARS = 200_000
_POLL_S = 1.0


@dataclass(frozen=True)
class HarnessOptions:
    """Options of the harness. ``python`` may belong to another environment, for example one with
    swebench 4.x for classic rows; empty is this one."""

    python: str = ""
    max_workers: int = 4
    timeout_s: int = 1800
    extra_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grade:
    """The verdict on one prediction. ``test_log`` is the test output, cut in the middle."""

    outcome: Outcome
    reason: str = ""
    tests_passed: int = 0
    tests_failed: int = 0
    test_log: str = ""


Progress = Callable[[int, int], None]  # graded, of


class Harness(Protocol):
    """Grades predictions in a folder of its own."""

    def run(
        self,
        rows: Sequence[SweBenchRow],
        predictions: Sequence[Prediction],
        progress: Progress | None = None,
    ) -> None:
        """Grade predictions that have no verdict, one for each row. Raises HarnessError."""
        ...

    def read(self, row: SweBenchRow, prediction: Prediction) -> Grade | None:
        """The verdict on exactly this patch for exactly this row; None when there is none."""
        ...

    def forget(self, prediction: Prediction) -> None:
        """Drop a verdict, so that the next run makes it again."""
        ...


class OfficialHarness:
    """``swebench.harness.run_evaluation`` in ``folder``, under a run id of its own."""

    def __init__(self, folder: Path, run_id: str, options: HarnessOptions) -> None:
        self._folder, self._run_id, self._options = folder, run_id, options

    def run(
        self,
        rows: Sequence[SweBenchRow],
        predictions: Sequence[Prediction],
        progress: Progress | None = None,
    ) -> None:
        if not predictions:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self.remove_containers()
        dataset = json.dumps([dict(row.raw) for row in rows], default=_plain)
        write_aside(self._folder / "dataset.json", dataset.encode())
        write_predictions(self._folder / "predictions.jsonl", predictions)
        self._bind(rows, predictions)
        try:
            code = self._run_process(predictions, progress or (lambda done, total: None))
        finally:
            self.remove_containers()
        if code != 0:
            tail = _read(self._folder / "harness.log")[-2000:]
            raise HarnessError(f"the harness ended with {code}, expected 0; last words:\n{tail}")

    def _run_process(self, predictions: Sequence[Prediction], progress: Progress) -> int:
        with (self._folder / "harness.log").open("ab") as log:
            process = subprocess.Popen(
                self._argv(predictions),
                cwd=self._folder,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            while True:
                folders = [self._instance_folder(prediction) for prediction in predictions]
                done = sum((folder / "report.json").exists() for folder in folders)
                progress(done, len(predictions))
                try:
                    return process.wait(timeout=_POLL_S)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _bind(self, rows: Sequence[SweBenchRow], predictions: Sequence[Prediction]) -> None:
        """Write down what is about to be graded: verdicts found later are on exactly that."""
        bound = self._bound()
        for row, prediction in zip(rows, predictions, strict=True):
            bound[row.instance_id] = f"{prediction.digest} {row_digest(row)}"
        write_aside(self._folder / "inputs.json", json.dumps(bound, indent=1).encode())

    def _bound(self) -> dict[str, str]:
        try:
            return dict(json.loads(_read(self._folder / "inputs.json")))
        except ValueError:
            return {}

    def read(self, row: SweBenchRow, prediction: Prediction) -> Grade | None:
        folder = self._instance_folder(prediction)
        wanted = f"{prediction.digest} {row_digest(row)}"
        if self._bound().get(row.instance_id) != wanted:
            return None  # a verdict on another patch or row
        output = _read(folder / "test_output.txt")
        log = _read(folder / "run_instance.log")
        report = _read_report(folder / "report.json", prediction.instance_id)
        if report is not None:
            return _graded(report, output)
        if _APPLY_FAILED in log:
            reason = log.partition(_APPLY_FAILED)[2].strip(": \n").partition("\nTraceback")[0]
            return Grade(Outcome.DOES_NOT_APPLY, _short(reason))
        if match := _TIMED_OUT.search(f"{log}\n{output}"):
            return Grade(Outcome.TIMEOUT, match.group(0), test_log=_cut(output))
        if not log:
            return None
        return Grade(Outcome.INFRASTRUCTURE, _short(_last_error(log)), test_log=_cut(output))

    def forget(self, prediction: Prediction) -> None:
        shutil.rmtree(self._instance_folder(prediction), ignore_errors=True)

    def remove_containers(self) -> None:
        """Remove what a killed harness of this run left behind, and nothing else."""
        own = re.compile(rf"sweb\.eval\..+\.{re.escape(self._run_id)}(\.\d+)?")
        listed = _docker(
            "ps", "--all", "--format", "{{.Names}}", "--filter", f"name={self._run_id}"
        )
        names = [name for name in listed.split() if own.fullmatch(name)]
        if names:
            _docker("rm", "--force", "--volumes", *names)

    def _argv(self, predictions: Sequence[Prediction]) -> list[str]:
        main = str(Path(__file__).with_name("harness_main.py"))
        return [
            self._options.python or sys.executable, main, str(os.getpid()),
            "--dataset_name", "dataset.json", "--predictions_path", "predictions.jsonl",
            "--run_id", self._run_id, "--max_workers", str(self._options.max_workers),
            "--timeout", str(self._options.timeout_s), "--report_dir", "reports",
            *self._options.extra_arguments,
            "--instance_ids", *(p.instance_id for p in predictions),
        ]  # fmt: skip

    def _instance_folder(self, prediction: Prediction) -> Path:
        model = prediction.model_name.replace("/", "__")
        root = self._folder / "logs" / "run_evaluation" / self._run_id
        return root / model / prediction.instance_id


def row_digest(row: SweBenchRow) -> str:
    """Changes with anything that a verdict depends on."""
    decisive = [
        row.base_commit, row.test_patch, row.fail_to_pass, row.pass_to_pass,
        row.image, row.eval_script, row.log_parser,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def check_harness(options: HarnessOptions) -> str:
    """The harness's version. Raises HarnessError when it or the docker command cannot be used."""
    version = harness_version(options)
    check_docker()
    return version


def check_docker() -> None:
    """Check that the docker command reaches a daemon. Raises HarnessError."""
    _docker("version", "--format", "{{.Server.Version}}")


def harness_version(options: HarnessOptions) -> str:
    """The version of the harness. Raises HarnessError when its Python does not have it."""
    code = f"import importlib.metadata as m, importlib.util as u; assert u.find_spec('{_MODULE}');"
    argv = [options.python or sys.executable, "-c", f"{code} print(m.version('swebench'))"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
    except OSError as error:
        raise HarnessError(f"no such Python: got={argv[0]!r} ({error.strerror})") from error
    if done.returncode != 0:
        raise HarnessError(
            f"the harness is not installed for {argv[0]}: got={done.stderr.strip()[-300:]!r}"
            " expected swebench; install it with: .venv/bin/pip install -r"
            " requirements-eval.lock"
        )
    return done.stdout.strip()


def foreign_images(images: Iterable[str]) -> list[str]:
    """Those of the local ``images`` that the daemon's machine can only emulate, slowly enough for
    tests to run into their time limits. Images that are not here are not looked at."""
    names = sorted(set(images) & local_images())
    if not names:
        return []
    machine = _docker("version", "--format", "{{.Server.Arch}}").strip()
    listed = _docker("image", "inspect", "--format", "{{.Architecture}}", *names).split()
    return [name for name, found in zip(names, listed, strict=True) if found not in ("", machine)]


def local_images() -> frozenset[str]:
    """Names of the images that the daemon has. Raises HarnessError."""
    return frozenset(_docker("images", "--format", "{{.Repository}}:{{.Tag}}").split())


def _docker(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["docker", *arguments], capture_output=True, text=True, timeout=120, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HarnessError(f"docker {arguments[0]} does not work: got={error}") from error
    if done.returncode != 0:
        raise HarnessError(
            f"docker {arguments[0]} failed: got={done.stderr.strip()[-300:]!r} expected a running"
            " daemon; set DOCKER_HOST to its socket"
        )
    return done.stdout


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return kept | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "PYTHONUTF8": "1"}


def _graded(report: Mapping[str, object], output: str) -> Grade:
    tests = report.get("tests_status")
    groups = cast("Mapping[str, Mapping[str, list[str]]]", tests if isinstance(tests, dict) else {})
    wanted = [groups.get(name, {}) for name in ("FAIL_TO_PASS", "PASS_TO_PASS")]
    passed = sum(len(group.get("success", [])) for group in wanted)
    failed = [name for group in wanted for name in group.get("failure", [])]
    if report.get("resolved") is True:
        outcome, reason = Outcome.RESOLVED, ""
    elif report.get("infra_failure") is True:
        outcome, reason = Outcome.INFRASTRUCTURE, str(report.get("infra_failure_reason", ""))
    elif groups:
        outcome, reason = Outcome.UNRESOLVED, f"fails {len(failed)}: {', '.join(failed[:3])}"
    else:
        outcome, reason = Outcome.UNRESOLVED, "the test run gave no results that can be read"
    return Grade(outcome, _short(reason), passed, len(failed), _cut(output))


def _read_report(file: Path, instance_id: str) -> Mapping[str, object] | None:
    """The instance's part of a ``report.json``; None when absent, cut short or of another shape."""
    try:
        loaded = cast(object, json.loads(_read(file)))
    except ValueError:
        return None
    part = (
        cast("Mapping[str, object]", loaded).get(instance_id) if isinstance(loaded, dict) else None
    )
    usable = isinstance(part, dict) and isinstance(part.get("resolved"), bool)
    return cast("Mapping[str, object]", part) if usable else None


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def _last_error(log: str) -> str:
    lines: Iterable[str] = (line for line in log.splitlines() if "Error" in line or "error" in line)
    return list(lines)[-1] if "rror" in log else "the harness gave no verdict"


def _short(text: str) -> str:
    return text if len(text) <= 500 else f"{text[:500]}…"


def _cut(text: str) -> str:
    half = _LOG_CHARS // 2
    return text if len(text) <= _LOG_CHARS else f"{text[:half]}\n[… cut …]\n{text[-half:]}"


def _plain(value: object) -> object:
    """Rows from Parquet may hold dates and arrays."""
    to_list = getattr(value, "tolist", None)
    return to_list() if to_list else str(value)
