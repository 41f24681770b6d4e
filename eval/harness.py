"""The official SWE-bench harness, run as a process of its own; nothing of it is replaced."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from agent_rl.store.run_folder import write_aside
from envs.tasks.swebench import SweBenchRow
from eval.config import GradingConfig
from eval.docker_command import check_docker, docker
from eval.errors import HarnessError
from eval.predictions import Prediction, write_predictions
from eval.verdicts import Grade, read_or_empty, read_verdict

_MODULE = "swebench.harness.run_evaluation"
_POLL_S = 1.0

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
        """Return the verdict on exactly this patch for exactly this row; None without one."""
        ...

    def forget(self, prediction: Prediction) -> None:
        """Drop a verdict, so that the next run makes it again."""
        ...


class OfficialHarness:
    """``swebench.harness.run_evaluation`` in ``folder``, under a run id of its own."""

    def __init__(self, folder: Path, run_id: str, options: GradingConfig) -> None:
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
            tail = read_or_empty(self._folder / "harness.log")[-2000:]
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
            return dict(json.loads(read_or_empty(self._folder / "inputs.json")))
        except ValueError:
            return {}

    def read(self, row: SweBenchRow, prediction: Prediction) -> Grade | None:
        folder = self._instance_folder(prediction)
        wanted = f"{prediction.digest} {row_digest(row)}"
        if self._bound().get(row.instance_id) != wanted:
            return None  # a verdict on another patch or row
        return read_verdict(folder, prediction.instance_id)

    def forget(self, prediction: Prediction) -> None:
        shutil.rmtree(self._instance_folder(prediction), ignore_errors=True)

    def remove_containers(self) -> None:
        """Remove what a killed harness of this run left behind, and nothing else."""
        own = re.compile(rf"sweb\.eval\..+\.{re.escape(self._run_id)}(\.\d+)?")
        listed = docker("ps", "--all", "--format", "{{.Names}}", "--filter", f"name={self._run_id}")
        names = [name for name in listed.split() if own.fullmatch(name)]
        if names:
            docker("rm", "--force", "--volumes", *names)

    def _argv(self, predictions: Sequence[Prediction]) -> list[str]:
        main = str(Path(__file__).with_name("harness_main.py"))
        return [
            self._options.python or sys.executable, main, str(os.getpid()),
            "--dataset_name", "dataset.json", "--predictions_path", "predictions.jsonl",
            "--run_id", self._run_id, "--max_workers", str(self._options.num_workers),
            "--timeout", str(self._options.timeout_s), "--report_dir", "reports",
            "--instance_ids", *(p.instance_id for p in predictions),
        ]  # fmt: skip

    def _instance_folder(self, prediction: Prediction) -> Path:
        model = prediction.model_name.replace("/", "__")
        root = self._folder / "logs" / "run_evaluation" / self._run_id
        return root / model / prediction.instance_id


def row_digest(row: SweBenchRow) -> str:
    """Return a digest that changes with anything that a verdict depends on."""
    decisive = [
        row.base_commit, row.test_patch, row.fail_to_pass, row.pass_to_pass,
        row.image, row.eval_script, row.log_parser,
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(decisive).encode()).hexdigest()


def check_harness(options: GradingConfig) -> str:
    """Return the harness's version. Raises HarnessError when it or docker cannot be used."""
    version = harness_version(options)
    check_docker()
    return version


def harness_version(options: GradingConfig) -> str:
    """Return the version of the harness. Raises HarnessError when its Python lacks it."""
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


def refuse_classic(rows: Sequence[SweBenchRow], version: str) -> None:
    """Raise HarnessError for rows that swebench ``version`` cannot grade."""
    classic = [row.instance_id for row in rows if row.form == "classic"]
    if classic and int(version.partition(".")[0]) >= 5:
        raise HarnessError(
            f"swebench {version} cannot grade classic rows: got {len(classic)} without eval_script,"
            f" first {classic[0]}; use the 5.x data set, or set grading.python to an interpreter"
            " with swebench 4.x. The predictions are kept"
        )


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return kept | {"PYTHONUNBUFFERED": "1", "TQDM_DISABLE": "1", "PYTHONUTF8": "1"}


def _plain(value: object) -> object:
    """Make JSON of the dates and arrays that rows from Parquet may hold."""
    to_list = getattr(value, "tolist", None)
    return to_list() if to_list else str(value)
