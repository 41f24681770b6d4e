"""Small repositories as SWE-bench 5.x instances, with what an agent may do to each of them.

Every one has a parser, a layout or a kind of file of its own. ``IMAGE_BASE`` is what
``scripts/docker/base_image.sh`` makes.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from envs.patches.diff import diff_trees
from envs.tasks.write_repository import commit_tree

IMAGE_BASE = os.environ.get("AGENT_RL_BASE_IMAGE", "agent-rl/base:py")
_HEREDOC = "EOF_114329324912"


@dataclass(frozen=True)
class Specimen:
    """A broken repository, its fix and its hidden test. ``edit`` is the fix as a bash command."""

    name: str
    parser: str
    command: str
    files: Mapping[str, bytes]
    fix: Mapping[str, bytes]
    tests: Mapping[str, bytes]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    edit: str
    extra: Mapping[str, bytes] = field(default_factory=dict[str, bytes])

    @property
    def instance_id(self) -> str:
        return f"local__{self.name}-1"

    @property
    def image(self) -> str:
        return f"agent-rl/test-swe-{self.name}:1"

    @property
    def base_files(self) -> dict[str, bytes]:
        return {**self.files, **self.extra}

    @property
    def gold(self) -> str:
        fixed = {**self.base_files, **self.fix}
        return diff_trees(self.base_files, fixed).patch.decode()

    def row(self) -> dict[str, object]:
        with tempfile.TemporaryDirectory() as folder:
            commit = commit_tree(self.base_files, Path(folder))
        after = {**self.base_files, **self.tests}
        test_patch = diff_trees(self.base_files, after).patch.decode()
        known = " ".join(path for path in self.tests if path in self.files)
        restore = f"git checkout {commit} {known}" if known else ":"
        script = "\n".join(
            [
                "#!/bin/bash",
                "set -uxo pipefail",
                "cd /testbed",
                "git config --global --add safe.directory /testbed",
                restore,
                f"git apply -v - <<'{_HEREDOC}'\n{test_patch}\n{_HEREDOC}",
                ": '>>>>> Start Test Output'",
                self.command,
                ": '>>>>> End Test Output'",
                restore,
                "",
            ]
        )
        return {
            "repo": f"local/{self.name}",
            "instance_id": self.instance_id,
            "base_commit": commit,
            "environment_setup_commit": commit,
            "patch": self.gold,
            "test_patch": test_patch,
            "problem_statement": f"{self.name} gives wrong results",
            "hints_text": "",
            "created_at": "2026-01-01T00:00:00Z",
            "version": "1",
            "FAIL_TO_PASS": json.dumps(self.fail_to_pass),
            "PASS_TO_PASS": json.dumps(self.pass_to_pass),
            "image": self.image,
            "eval_script": script,
            "log_parser": self.parser,
            "eval_type": "pass_and_fail",
        }

    def build(self) -> None:
        """Make the image, unless it is there. Its history also holds the fix, on a branch."""
        if _docker("images", "--quiet", self.image).strip():
            return
        with tempfile.TemporaryDirectory() as folder:
            commit_tree(self.base_files, Path(folder))
            _leave_the_fix_behind(Path(folder), self.fix)
            context = _context(Path(folder))
        _docker("build", "--network", "none", "--tag", self.image, "-", stdin=context)


def _leave_the_fix_behind(folder: Path, fix: Mapping[str, bytes]) -> None:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false"]

    def git(*arguments: str) -> None:
        argv = ["git", "-C", str(folder), *who, *arguments]
        subprocess.run(argv, check=True, capture_output=True)

    git("checkout", "--quiet", "-b", "the-fix")
    for path, data in fix.items():
        (folder / path).write_bytes(data)
    git("commit", "--quiet", "--all", "--message", "the fix")
    git("checkout", "--quiet", "main")


def _context(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        tar.add(folder, arcname="testbed")
        text = (
            f"FROM {IMAGE_BASE}\nCOPY testbed /testbed\nWORKDIR /testbed\n"
            "RUN git config --system --add safe.directory /testbed\n"
        ).encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    return buffer.getvalue()


def _docker(*arguments: str, stdin: bytes = b"") -> str:
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    done = subprocess.run(
        ["docker", *arguments], input=stdin, capture_output=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def _pytest(name: str, function: str, good: str, cases: tuple[str, str]) -> Specimen:
    """A one-function module tested by plain pytest."""
    bad = good.replace("+", "-")
    test = f"tests/test_{name}.py"
    head = f"from {name} import {function}\n\n\n"
    old = f"{head}def test_zero():\n    assert {function}(0) == {cases[0]}\n"
    new = f"{old}\n\ndef test_two():\n    assert {function}(2) == {cases[1]}\n"
    return Specimen(
        name=name,
        parser="parse_log_pytest",
        command=f"python3 -m pytest -rA {test}",
        files={f"{name}.py": f"def {function}(x):\n    return {bad}\n".encode(), test: old.encode(),
               "conftest.py": b""},
        fix={f"{name}.py": f"def {function}(x):\n    return {good}\n".encode()},
        tests={test: new.encode()},
        fail_to_pass=(f"{test}::test_two",),
        pass_to_pass=(f"{test}::test_zero",),
        edit=f"sed -i 's/return .*/return {good}/' {name}.py",
    )  # fmt: skip


CALC = _pytest("calc", "double", "x + x", ("0", "4"))
SHAPES = _pytest("shapes", "grow", "2 * (x + 0) + x", ("0", "6"))
STACK = _pytest("stack", "push", "x + 3 * x", ("0", "8"))
QUEUE = _pytest("queues", "later", "x + 4 * x", ("0", "10"))
TREE = _pytest("tree", "deepen", "x + 5 * x", ("0", "12"))
MUTE = _pytest("mute", "louder", "x + 6 * x", ("0", "14"))

WORDS = Specimen(  # descriptions of unittest, as Django's runner prints them
    name="words",
    parser="parse_log_django",
    command="python3 -m unittest -v tests.test_words",
    files={
        "words.py": b"def title(text):\n    return text.upper()\n",
        "tests/__init__.py": b"",
        "tests/test_words.py": b"import unittest\n",
    },
    fix={"words.py": b"def title(text):\n    return text.title()\n"},
    tests={
        "tests/test_words.py": (
            b"import unittest\n\nfrom words import title\n\n\n"
            b"class TitleTests(unittest.TestCase):\n"
            b"    def test_two(self):\n"
            b"        self.assertEqual(title('a b c'), 'A B C')\n"
            b"        self.assertEqual(title('ab cd'), 'Ab Cd')\n\n"
            b"    def test_empty(self):\n        self.assertEqual(title(''), '')\n"
        )
    },
    fail_to_pass=("test_two (tests.test_words.TitleTests.test_two)",),
    pass_to_pass=("test_empty (tests.test_words.TitleTests.test_empty)",),
    edit="sed -i 's/upper/title/' words.py",
)
NAMES = Specimen(  # names with spaces and brackets, one cut off by the data set
    name="names",
    parser="parse_log_pytest_v2",
    command="python3 -m pytest -rA test_names.py",
    files={"names.py": b"def first(text):\n    return text.split(',')[0]\n", "conftest.py": b""},
    fix={"names.py": b"def first(text):\n    return text.split()[0]\n"},
    tests={
        "test_names.py": (
            b"import pytest\n\nfrom names import first\n\n\n"
            b"@pytest.mark.parametrize('text', ['a - b', 'c  d', 'log(photon /x)'])\n"
            b"def test_first(text):\n    assert first(text) == text.split(' ')[0]\n\n\n"
            b"def test_comma():\n    assert first('a')== 'a'\n"
        )
    },
    fail_to_pass=("test_names.py::test_first[a - b]", "test_names.py::test_first[log(photon"),
    pass_to_pass=("test_names.py::test_comma",),
    edit="sed -i \"s/split(',')/split()/\" names.py",
)
PACK = Specimen(  # a binary file beside the source
    name="pack",
    parser="parse_log_pytest_options",
    command="python3 -m pytest -rA test_pack.py",
    files={
        "pack.py": b"def size(data):\n    return len(data) + 1\n",
        "data.bin": bytes(range(64)),
        "conftest.py": b"",
    },
    fix={"pack.py": b"def size(data):\n    return len(data)\n"},
    tests={
        "test_pack.py": (
            b"from pack import size\n\n\ndef test_size():\n    assert size(b'ab') == 2\n"
        )
    },
    fail_to_pass=("test_pack.py::test_size",),
    pass_to_pass=(),
    edit="sed -i 's/ + 1//' pack.py; printf '\\000\\001\\377' > data.bin",
)
CRLF = Specimen(  # a source file with CRLF line ends and one byte that is not UTF-8 elsewhere
    name="crlf",
    parser="parse_log_pytest",
    command="python3 -m pytest -rA test_crlf.py",
    files={
        "crlf.py": b"def half(x):\r\n    y = x // 2\r\n    return y + 1\r\n\r\n\r\n# end\r\n",
        ".gitattributes": b"*.py -text\n",
        "conftest.py": b"",
    },
    fix={"crlf.py": b"def half(x):\r\n    y = x // 2\r\n    return y\r\n\r\n\r\n# end\r\n"},
    tests={
        "test_crlf.py": b"from crlf import half\n\n\ndef test_half():\n    assert half(4) == 2\n"
    },
    fail_to_pass=("test_crlf.py::test_half",),
    pass_to_pass=(),
    edit="sed -i 's/y + 1/y/' crlf.py",
)
RUNNER = Specimen(  # a runner of its own, as sympy's
    name="runner",
    parser="parse_log_sympy",
    command="python3 run.py",
    files={"logic.py": b"def both(a, b):\n    return a or b\n", "run.py": b"pass\n"},
    fix={"logic.py": b"def both(a, b):\n    return a and b\n"},
    tests={
        "run.py": (
            b"import sys\nfrom logic import both\nbad = 0\n"
            b"for name, ok in (('test_both', both(1, 0) == 0), ('test_same', both(1, 1) == 1)):\n"
            b"    print(name, 'ok' if ok else 'F')\n    bad += not ok\nsys.exit(bad)\n"
        )
    },
    fail_to_pass=("test_both",),
    pass_to_pass=("test_same",),
    edit="sed -i 's/a or b/a and b/' logic.py",
)

SPECIMENS: dict[str, Specimen] = {
    specimen.instance_id: specimen
    for specimen in (*(CALC, SHAPES, STACK, QUEUE, TREE, MUTE, WORDS, NAMES, PACK, CRLF, RUNNER),)
}


def write_dataset(file: Path, specimens: list[Specimen]) -> Path:
    """Rows as JSON lines."""
    file.write_text("".join(f"{json.dumps(specimen.row())}\n" for specimen in specimens))
    return file
