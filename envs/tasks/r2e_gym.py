"""R2E-Gym rows as image tasks: layout, hidden files, expected outcomes and solution.

A row has ``docker_image``, ``problem_statement``, ``expected_output_json`` (test -> status) and
``parsed_commit_content`` (JSON: the commit with the full text of every changed file). Its image has
the repository in ``/testbed``, the judged tests in ``/r2e_tests`` and the command in
``/testbed/run_tests.sh``, which finds the tests through the link ``r2e_tests`` in the repository.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

from envs.errors import TaskError
from envs.images.env import issue_text
from envs.images.outcomes import normal_expected
from envs.images.task import IMAGE_PROTECTED, ImageTask, TestPlan
from envs.patches.diff import diff_trees
from envs.paths import is_protected

REPOSITORY = "/testbed"
_TESTS = "/r2e_tests"
_LINK = f"{REPOSITORY}/r2e_tests"
_RUNNER = f"{REPOSITORY}/run_tests.sh"
# What R2E-Gym's image builder leaves behind and an agent must not read.
_LEFTOVERS = (
    "run_tests.sh",
    "r2e_tests",
    "expected_test_output.json",
    "execution_result.json",
    "parsed_commit.json",
    "modified_files.json",
    "modified_entities.json",
    "syn_issue.json",
)
HIDDEN_PATHS = tuple(
    f"{folder}/{name}" for folder in (REPOSITORY, "", "/root") for name in _LEFTOVERS
)
TEST_TIMEOUT_S = 300.0  # R2E-Gym's own
_REQUIRED = ("docker_image", "problem_statement", "expected_output_json")
# Their tests run under unittest's own runner, so pytest's plugin does not report them.
_WITHOUT_PYTEST = frozenset({"tornado"})
_PATH = (
    "/testbed/.venv/bin:/root/.venv/bin:/root/.local/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin"
    ":/usr/bin:/sbin:/bin"
)

Row = Mapping[str, object]


def is_row_file(source: str) -> bool:
    """Tell whether rows of ``source`` are read from a file; else it names a data set."""
    path = Path(source)
    return path.suffix in (".json", ".jsonl", ".parquet") or path.exists()


def load_rows(source: str, split: str = "train") -> list[Row]:
    """Read rows of a ``.json``, ``.jsonl`` or ``.parquet`` file, or of a Hugging Face data set.

    A data set's name (``R2E-Gym/R2E-Gym-Lite``) needs the ``datasets`` package and the network.
    Raises TaskError when the source cannot be read as rows.
    """
    if is_row_file(source):
        return _read_file(Path(source))
    try:
        from datasets import load_dataset  # pyright: ignore
    except ImportError as error:
        raise TaskError(
            f"no such file: got={source!r} expected=a .json, .jsonl or .parquet file, or a Hugging"
            " Face data set, which needs the package that reads them: .venv/bin/pip install -r"
            " requirements-eval.lock"
        ) from error
    rows = cast("Iterable[Row]", load_dataset(source, split=split))
    return [dict(row) for row in rows]


def _read_file(path: Path) -> list[Row]:
    if not path.is_file():
        raise TaskError(
            f"no such file: got={str(path)!r} expected=a .json, .jsonl or .parquet file"
        )
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet  # pyright: ignore[reportMissingTypeStubs]

        return cast("list[Row]", parquet.read_table(path).to_pylist())  # pyright: ignore[reportUnknownMemberType]
    text = path.read_text(encoding="utf-8")
    try:
        if path.suffix == ".jsonl":
            # Only a line feed ends a line: issues hold other characters that Python ends lines at.
            loaded: object = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            loaded = json.loads(text)
    except ValueError as error:
        raise TaskError(f"{path} is not {path.suffix.lstrip('.')}: got={error}") from error
    rows = cast("list[object]", loaded) if isinstance(loaded, list) else [loaded]
    if not all(isinstance(row, dict) for row in rows):
        raise TaskError(f"{path} does not hold rows: expected=objects")
    return cast("list[Row]", rows)


def load_tasks(source: str, split: str = "train") -> list[ImageTask]:
    """Read every row as a task. Raises TaskError naming the first row that cannot be used."""
    return [make_task(row) for row in load_rows(source, split)]


def make_task(row: Row) -> ImageTask:
    """Turn one row into a task. Raises TaskError when a field is missing or unreadable."""
    missing = [key for key in _REQUIRED if not isinstance(row.get(key), str) or not row[key]]
    if missing:
        raise TaskError(f"an R2E-Gym row lacks fields: got={sorted(row)} expected also {missing}")
    image = str(row["docker_image"])
    commit = _json_object(row, "parsed_commit_content") if row.get("parsed_commit_content") else {}
    expected = normal_expected(_statuses(row))
    fix = commit.get("new_commit_hash")
    repository = str(row.get("repo_name") or row.get("repo") or "")
    return ImageTask(
        task_id=image.rpartition("/")[2],
        issue=issue_text(str(row["problem_statement"])),
        files={},
        focus_path="",
        visible_tests=(),
        hidden_files={},
        expected=expected,
        solution=_solution(commit),
        protected=IMAGE_PROTECTED,
        metadata={"source": "r2e_gym", "repository": repository},
        image=image,
        repository=REPOSITORY,
        hidden_paths=HIDDEN_PATHS,
        fix_ids=(fix,) if isinstance(fix, str) and fix else (),
        plan=TestPlan(
            command=("bash", _RUNNER),
            judged_paths=(_TESTS,),
            links={_LINK: _TESTS},
            names="r2e",
            timeout_s=TEST_TIMEOUT_S,
            plugin=repository not in _WITHOUT_PYTEST,
            environment={"PATH": _PATH, "COLUMNS": "200"},
        ),
        exact=True,
    )


def _statuses(row: Row) -> dict[str, str]:
    loaded = _json_object(row, "expected_output_json")
    return {name: str(status) for name, status in loaded.items()}


def _json_object(row: Row, key: str) -> dict[str, object]:
    value = row[key]
    try:
        loaded = cast(object, json.loads(value)) if isinstance(value, str) else value
    except ValueError as error:
        raise TaskError(f"field {key} of an R2E-Gym row is not JSON: got={error}") from error
    if not isinstance(loaded, dict):
        raise TaskError(
            f"field {key} of an R2E-Gym row: got={type(loaded).__name__} expected=an object"
        )
    return cast("dict[str, object]", loaded)


def _solution(commit: Mapping[str, object]) -> bytes:
    """Return the commit's source changes as a patch; its test files are the image's matter."""
    before: dict[str, bytes] = {}
    after: dict[str, bytes] = {}
    for entry in _changed_files(commit):
        old_path, new_path = _path(entry, "minus_file"), _path(entry, "plus_file")
        path = new_path or old_path
        if entry.get("is_binary_file") or is_protected(path, IMAGE_PROTECTED):
            continue
        old, new = entry.get("old_file_content"), entry.get("new_file_content")
        if old_path and isinstance(old, str):
            before[path] = old.encode()
        if new_path and isinstance(new, str):
            after[path] = new.encode()
    return diff_trees(before, after).patch


def _changed_files(commit: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    entries = commit.get("file_diffs")
    for entry in cast("Sequence[object]", entries) if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            yield cast("Mapping[str, object]", entry)


def _path(entry: Mapping[str, object], side: str) -> str:
    """Return the file's path on one side, empty where it does not exist there."""
    chosen = entry.get(side)
    if chosen is None:
        header = entry.get("header")
        chosen = (
            cast("Mapping[str, object]", header).get("file") if isinstance(header, dict) else None
        )
    path = cast("Mapping[str, object]", chosen).get("path") if isinstance(chosen, dict) else None
    if not isinstance(path, str) or path == "/dev/null":
        return ""
    return path[2:] if path[:2] in ("a/", "b/") else path
