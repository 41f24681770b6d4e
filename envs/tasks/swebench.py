"""SWE-bench rows, classic and 5.x, as image tasks.

A classic row says what the problem is and which tests decide, and leaves image and test command to
the harness that comes with it. A 5.x row also has ``image``, ``eval_script``, ``log_parser`` and
``eval_type``, so it can be graded by itself. Official numbers come from the official harness
(package ``eval``); the plan here is for training rewards, which no printed text can forge.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from envs.base import Sandbox
from envs.errors import TaskError
from envs.images.task import IMAGE_PROTECTED, ImageTask, TestPlan
from envs.patches.apply import touched_paths
from envs.tasks.r2e_gym import load_rows as _load_any_rows

REPOSITORY = "/testbed"
TEST_TIMEOUT_S = 1800.0  # the harness's own
DATA_SETS: Mapping[str, str] = {
    "full": "SWE-bench/SWE-bench",
    "lite": "SWE-bench/SWE-bench_Lite",
    "verified": "SWE-bench/SWE-bench_Verified",
    "multilingual": "SWE-bench/SWE-bench_Multilingual",
}
_ALWAYS = ("instance_id", "repo", "base_commit", "problem_statement", "version")
_GRADED_ALONE = ("image", "eval_script", "log_parser", "eval_type")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*\Z")
_START, _END = ">>>>> Start Test Output", ">>>>> End Test Output"
_PYTEST_PARSERS = frozenset(
    f"parse_log_{name}"
    for name in (
        *("pytest", "pytest_options", "pytest_v2", "astroid", "flask", "marshmallow", "pvlib"),
        *("pyvista", "sqlfluff", "xarray", "pydicom", "requests", "pylint", "astropy", "scikit"),
        *("sphinx", "matplotlib", "seaborn"),
    )
)


@dataclass(frozen=True)
class SweBenchRow:
    """One instance. ``raw`` is the row as it was read, for the harness; the rest is checked.

    ``image``, ``eval_script`` and ``log_parser`` are empty in a classic row.
    """

    instance_id: str
    repo: str
    version: str
    base_commit: str
    problem_statement: str
    patch: str
    test_patch: str
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    image: str
    eval_script: str
    log_parser: str
    raw: Mapping[str, object]

    @property
    def form(self) -> Literal["classic", "5.x"]:
        return "5.x" if self.eval_script else "classic"

    @property
    def images(self) -> tuple[str, ...]:
        """Names that the image may have, the likeliest first."""
        if self.image:
            return (self.image,)
        key = self.instance_id.lower()
        remote = f"swebench/sweb.eval.x86_64.{key.replace('__', '_1776_')}:latest"
        return (f"sweb.eval.x86_64.{key}:latest", remote)


def load_rows(
    source: str, split: str = "test", instance_ids: Sequence[str] = ()
) -> list[SweBenchRow]:
    """Read rows: all, or those named, in file order.

    ``source`` is a ``.json``, ``.jsonl`` or ``.parquet`` file, a folder with ``<split>.parquet`` or
    ``<split>.jsonl``, or a data set by name (``verified``).

    Raises TaskError naming the row and what is wrong with it, or the ids that do not exist.
    """
    path = Path(source)
    if path.is_dir():
        options = [path / f"{split}{suffix}" for suffix in (".parquet", ".jsonl", ".json")]
        found = next((option for option in options if option.is_file()), None)
        if found is None:
            raise TaskError(f"no rows in {path}: expected one of {[o.name for o in options]}")
        path = found
    name = str(path) if path.exists() else DATA_SETS.get(source.lower(), source)
    rows = [read_row(row) for row in _load_any_rows(name, split)]
    ids = [row.instance_id for row in rows]
    twice = sorted({key for key in ids if ids.count(key) > 1}) if len(set(ids)) < len(ids) else []
    if twice:
        raise TaskError(f"{source}: instances appear twice: got={twice[:5]}")
    missing = sorted(set(instance_ids) - set(ids))
    if missing:
        raise TaskError(f"{source}: no such instances: got={missing[:5]} of {len(ids)} rows")
    return [row for row in rows if not instance_ids or row.instance_id in set(instance_ids)]


def read_row(row: Mapping[str, object]) -> SweBenchRow:
    """Check one row. Raises TaskError."""
    label = str(row.get("instance_id", "a row without instance_id"))
    missing = [key for key in _ALWAYS if not isinstance(row.get(key), str) or row[key] == ""]
    if missing:
        raise TaskError(f"{label} lacks fields: got={sorted(row)} expected also {missing}")
    if not _ID.match(label):
        raise TaskError(f"instance_id got={label!r} expected letters, digits, '_', '.' and '-'")
    alone = [key for key in _GRADED_ALONE if row.get(key)]
    if alone and len(alone) < len(_GRADED_ALONE):
        raise TaskError(f"{label}: got {alone} of the 5.x fields, expected all of {_GRADED_ALONE}")
    script = _text(row, "eval_script")
    if script and not (_START in script and _END in script):
        raise TaskError(f"{label}: eval_script has no markers {_START!r} and {_END!r}")
    return SweBenchRow(
        instance_id=label,
        repo=_text(row, "repo"),
        version=_text(row, "version"),
        base_commit=_text(row, "base_commit"),
        problem_statement=_text(row, "problem_statement"),
        patch=_text(row, "patch"),
        test_patch=_text(row, "test_patch"),
        fail_to_pass=_names(row, "FAIL_TO_PASS", label),
        pass_to_pass=_names(row, "PASS_TO_PASS", label),
        image=_text(row, "image"),
        eval_script=script,
        log_parser=_text(row, "log_parser"),
        raw=row,
    )


def choose_image(row: SweBenchRow, is_local: Callable[[str], bool]) -> str:
    """Return the image's name: one that is here already, else the one that can be pulled."""
    return next((name for name in row.images if is_local(name)), row.images[-1])


def agent_task(row: SweBenchRow, image: str) -> ImageTask:
    """Return the task as an agent gets it.

    Nothing in it can grade: the official harness does that.
    """
    return ImageTask(
        task_id=row.instance_id,
        issue=row.problem_statement.strip(),
        files={},
        focus_path="",
        visible_tests=(),
        hidden_files={},
        expected={},
        solution=row.patch.encode(),
        protected=IMAGE_PROTECTED,
        metadata={"source": "swebench", "repository": row.repo},
        image=image,
        repository=REPOSITORY,
        base=row.base_commit,
    )


def training_task(
    row: SweBenchRow, image: str, test_files: Mapping[str, bytes] | None = None
) -> ImageTask:
    """Return the task with a plan for training rewards: 5.x rows whose tests run under pytest.

    ``test_files`` (see ``official_test_files``) are the judged files by path in the repository;
    with them the grader can put them in place itself and repeat a passing run with wrong
    expectations. Names that the data set cut off inside their brackets cannot be matched exactly:
    those that must keep passing are left out (counted in ``metadata``), and a row that must repair
    one is refused. Raises TaskError.
    """
    if row.form == "classic":
        raise TaskError(f"{row.instance_id}: a classic row has no test command; use a 5.x row")
    if row.log_parser not in _PYTEST_PARSERS:
        raise TaskError(f"{row.instance_id}: got={row.log_parser} expected tests run by pytest")
    cut = [name for name in row.fail_to_pass if is_cut(name)]
    if cut:
        raise TaskError(f"{row.instance_id}: names of tests to repair are cut off: got={cut[:3]}")
    kept = [name for name in row.pass_to_pass if not is_cut(name)]
    task = agent_task(row, image)
    return replace(
        task,
        expected=dict.fromkeys((*row.fail_to_pass, *kept), "PASSED"),
        metadata={**task.metadata, "names_left_out": str(len(row.pass_to_pass) - len(kept))},
        plan=_plan(row, test_files),
    )


def _plan(row: SweBenchRow, test_files: Mapping[str, bytes] | None) -> TestPlan:
    script = row.eval_script[: row.eval_script.rindex("\n", 0, row.eval_script.index(_END))]
    files = {f"{REPOSITORY}/{path}": data for path, data in (test_files or {}).items()}
    if files:
        script = _without_test_patch(row, script)
    return TestPlan(
        command=("bash", "-c", script),
        judged_paths=tuple(files),
        files=files,
        timeout_s=TEST_TIMEOUT_S,
    )


def official_test_files(sandbox: Sandbox, row: SweBenchRow) -> dict[str, bytes]:
    """Return the files that the row's test patch leaves, made in a container of its image.

    Raises TaskError when the patch does not apply to the base commit.
    """
    paths = touched_paths(row.test_patch.encode())
    script = (
        'cd "$1" && base=$2 && shift 2 && { git checkout -q "$base" -- "$@" 2>/dev/null || true; }'
        " && git apply --whitespace=nowarn -"
    )
    argv = ["bash", "-c", script, "bash", REPOSITORY, row.base_commit, *paths]
    done = sandbox.exec(argv, timeout_s=120.0, cwd=".", stdin=row.test_patch.encode())
    if done.exit_code != 0:
        raise TaskError(
            f"{row.instance_id}: the test patch does not apply: got={done.output[-300:]!r}"
        )
    return {path: sandbox.read(path) for path in paths if _exists(sandbox, path)}


def _exists(sandbox: Sandbox, path: str) -> bool:
    return sandbox.exec(["test", "-f", path], timeout_s=60.0).exit_code == 0


def _without_test_patch(row: SweBenchRow, script: str) -> str:
    """Take out the commands that restore and patch the tests: the grader has placed them.

    Raises TaskError when the script is of another shape."""
    head, mark, command = script.partition(f": '{_START}'")
    patched = re.sub(r"^git apply [^\n]*<<'(\w+)'\n.*?^\1$\n?", "", head, flags=re.M | re.S)
    restored = re.sub(
        rf"^git checkout {re.escape(row.base_commit)} [^\n]*\n", "", patched, flags=re.M
    )
    removed = re.sub(r"^rm -r?f [^\n]*\n", "", restored, flags=re.M)
    if not mark or patched == head:
        raise TaskError(
            f"{row.instance_id}: eval_script does not apply its test patch by git apply"
        )
    return removed + mark + command


def is_cut(name: str) -> bool:
    """Tell whether a data set cut the test's name off inside its brackets."""
    return name.count("[") > name.count("]")


def _text(row: Mapping[str, object], key: str) -> str:
    value = row.get(key)
    return value if isinstance(value, str) else ""


def _names(row: Mapping[str, object], key: str, label: str) -> tuple[str, ...]:
    """Read a list of test names, which some data sets hold as JSON text."""
    value = row.get(key, [])
    try:
        loaded = cast(object, json.loads(value)) if isinstance(value, str) else value
    except ValueError as error:
        raise TaskError(f"{label}: {key} is not JSON: got={error}") from error
    if isinstance(loaded, list | tuple):
        items = list(cast("Sequence[object]", loaded))
        names = tuple(item for item in items if isinstance(item, str))
        if len(names) == len(items):
            return names
    kind = type(cast(object, loaded)).__name__
    raise TaskError(f"{label}: {key} got={kind} expected a list of names")
