"""A Python repository, read from a folder or an sdist, with its sources told from its tests."""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from envs.errors import TaskError

_SKIPPED_FOLDERS = frozenset(
    {".git", ".hg", "__pycache__", ".venv", "venv", "node_modules", ".tox", ".nox", "build", "dist"}
)
_MAX_FILE_BYTES = 4 << 20
_MAX_TOTAL_BYTES = 64 << 20
_TEST_FOLDERS = frozenset({"tests", "test", "testing"})
_TEST_FILE = re.compile(r"test_.*\.py|.*_test\.py")
_NO_SOURCE = frozenset({"setup.py", "conftest.py", "noxfile.py", "tasks.py", "fabfile.py"})
_NO_SOURCE_FOLDERS = frozenset({"docs", "doc", "examples", "benchmarks", "scripts", "tools"})
_NAME = re.compile(r"(.+?)-(\d[^-]*)\Z")


@dataclass(frozen=True)
class Repository:
    """A correct tree. ``files`` maps relative posix paths to content; links are left out."""

    name: str  # lower case, letters, digits and dashes
    version: str  # empty where neither the source's name nor its pyproject.toml says one
    files: Mapping[str, bytes]

    @property
    def title(self) -> str:
        """Name and version, for people; the name alone where there is no version."""
        return f"{self.name} {self.version}".rstrip()

    @cached_property
    def test_files(self) -> tuple[str, ...]:
        """Files that pytest collects."""
        return tuple(p for p in self.files if _TEST_FILE.fullmatch(posixpath.basename(p)))

    @cached_property
    def test_support(self) -> tuple[str, ...]:
        """Files that tests need beside them: helpers, data and ``conftest.py``."""
        found = (p for p in self.files if _in_folder(p, _TEST_FOLDERS) or _is_conftest(p))
        return tuple(p for p in found if p not in self.test_files)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Python files that a bug may be put into."""
        excluded = {*self.test_files, *self.test_support}
        return tuple(
            path
            for path in self.files
            if path.endswith(".py")
            and path not in excluded
            and posixpath.basename(path) not in _NO_SOURCE
            and not _in_folder(path, _NO_SOURCE_FOLDERS)
        )

    @cached_property
    def import_folders(self) -> tuple[str, ...]:
        """Folders, relative to the tree, that imports need beside the tree itself."""
        has_src = any(path.startswith("src/") and path.endswith(".py") for path in self.files)
        return ("src",) if has_src else ()


def read_repository(path: Path) -> Repository:
    """Read a folder, ``.tar.gz``, ``.tar.bz2``, ``.tar.xz`` or ``.zip``. Raises TaskError.

    Nothing is unpacked to disk and nothing of it is run.
    """
    if path.is_dir():
        entries, label = _from_folder(path), path.resolve().name
    elif tarfile.is_tarfile(path) if path.is_file() else False:
        entries, label = _from_tar(path), re.sub(r"\.tar\.\w+\Z|\.tgz\Z", "", path.name)
    elif path.is_file() and zipfile.is_zipfile(path):
        entries, label = _from_zip(path), path.name.removesuffix(".zip")
    else:
        raise TaskError(f"no repository: got={str(path)!r} expected a folder or an sdist")
    files: dict[str, bytes] = {}
    total = 0
    for name, data in entries:
        if len(data) > _MAX_FILE_BYTES:
            continue
        total += len(data)
        if total > _MAX_TOTAL_BYTES:
            raise TaskError(f"{path} is too large: got>{_MAX_TOTAL_BYTES} bytes of files")
        files[name] = data
    match = _NAME.fullmatch(label)
    name, version = match.groups() if match else (label, "")
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    files = dict(sorted(_without_top(files).items()))
    repository = Repository(slug or "repository", version or _declared_version(files), files)
    if not repository.test_files:
        raise TaskError(f"{path} has no tests: got no test_*.py or *_test.py, expected some")
    if not repository.sources:
        raise TaskError(f"{path} has no Python source outside its tests")
    return repository


def _declared_version(files: Mapping[str, bytes]) -> str:
    """Return ``project.version`` of ``pyproject.toml``.

    Empty where it is computed or not readable.
    """
    try:
        declared = tomllib.loads(files.get("pyproject.toml", b"").decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        return ""
    project = declared.get("project")
    version = cast("dict[str, object]", project).get("version") if isinstance(project, dict) else ""
    return version.strip() if isinstance(version, str) else ""


def _from_folder(root: Path) -> Iterator[tuple[str, bytes]]:
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            file = Path(folder, name)
            if file.is_file() and not file.is_symlink() and _wanted(name):
                yield file.relative_to(root).as_posix(), file.read_bytes()


def _from_tar(path: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(path) as tar:
        for member in tar:
            if member.isfile() and _wanted(member.name) and member.size <= _MAX_FILE_BYTES:
                handle = tar.extractfile(member)
                if handle is not None:
                    yield _clean(member.name, path), handle.read()


def _from_zip(path: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if not info.is_dir() and _wanted(info.filename) and info.file_size <= _MAX_FILE_BYTES:
                yield _clean(info.filename, path), archive.read(info)


def _wanted(name: str) -> bool:
    parts = name.split("/")
    return not name.endswith((".pyc", ".pyo")) and not _SKIPPED_FOLDERS & set(parts[:-1])


def _clean(name: str, archive: Path) -> str:
    normal = posixpath.normpath(name)
    if normal.startswith(("/", "../")) or normal == "..":
        raise TaskError(f"{archive} holds a path outside itself: got={name!r}")
    return normal


def _without_top(files: Mapping[str, bytes]) -> Mapping[str, bytes]:
    """Take off the one folder that holds everything in an archive."""
    tops = {path.partition("/")[0] for path in files}
    if len(tops) != 1 or not all("/" in path for path in files):
        return files
    return {path.partition("/")[2]: data for path, data in files.items()}


def _in_folder(path: str, names: frozenset[str]) -> bool:
    return bool(names & set(path.split("/")[:-1]))


def _is_conftest(path: str) -> bool:
    return posixpath.basename(path) == "conftest.py"
