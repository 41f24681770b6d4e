"""Images in R2E-Gym's layout, made from the base image without a registry or a builder.

Each repository's history holds the fix in the places where real images leave it: a branch, a tag,
the stash, a remote ref and an unreachable object.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field

from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions

BASE_IMAGE = "agent-rl/base:py"
SMALL = DockerOptions(
    memory_bytes=512 << 20, max_processes=128, cpus=2.0, disk_bytes=512 << 20, shm_bytes=16 << 20
)
_GITIGNORE = ".venv/\nrun_tests.sh\nr2e_tests\n__pycache__/\n*.pyc\n"
_RUN_TESTS = (
    "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' .venv/bin/python -W ignore"
    " -m pytest -rA r2e_tests\n"
)
_MAKE = r"""
set -e
cd /testbed
git config --global user.email dev@example.org
git config --global user.name dev
git config --global init.defaultBranch main
git config --global --add safe.directory /testbed
git init -q; git add -A; git commit -qm 'older work'
echo '# notes' > NOTES.md; git add -A; git commit -qm 'base'
BASE=$(git rev-parse HEAD)
cp -a /fix/. /testbed/; git add -A; git commit -qm 'the fix'
FIX=$(git rev-parse HEAD)
git tag v2; git branch later; git update-ref refs/remotes/origin/main $FIX
git remote add origin https://example.org/project.git
git reset -q --hard $BASE
cp -a /fix/. /testbed/; git stash -q
git pack-refs --all
printf '%s' "$RUNNER" > run_tests.sh
python3 -m venv --system-site-packages --without-pip .venv
rm -rf /fix
echo $BASE $FIX
"""


@dataclass(frozen=True)
class Specimen:
    """A repository with a bug: files before and after the fix, and the judged tests."""

    name: str
    issue: str
    files: Mapping[str, str]
    fix: Mapping[str, str]
    tests: Mapping[str, str]
    expected: Mapping[str, str]
    image: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", f"agent-rl/test-r2e-{self.name}:1")


def _text(source: str) -> str:
    return textwrap.dedent(source).lstrip("\n")


CALC = Specimen(
    name="calc",
    issue="mean([]) raises ZeroDivisionError; it should return 0.0",
    files={
        "calc/__init__.py": _text(
            """
            def add(a, b):
                return a + b


            def mean(xs):
                return sum(xs) / len(xs)
            """
        ),
        "tests/test_calc.py": (
            "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"
        ),
    },
    fix={
        "calc/__init__.py": _text(
            """
            def add(a, b):
                return a + b


            def mean(xs):
                if not xs:
                    return 0.0
                return sum(xs) / len(xs)
            """
        )
    },
    tests={
        "__init__.py": "",
        "test_1.py": _text(
            """
            import pytest

            from calc import add, mean


            class TestCalc:
                def test_add(self):
                    assert add(1, 2) == 3

                def test_mean_empty(self):
                    assert mean([]) == 0.0

                @pytest.mark.parametrize("xs, want", [([1, 3], 2), ([5], 5)])
                def test_mean(self, xs, want):
                    assert mean(xs) == want

                @pytest.mark.skip(reason="slow - and odd")
                def test_skipped(self):
                    raise AssertionError

                @pytest.mark.xfail
                def test_known_bug(self):
                    assert add("a", "b") == "ba"
            """
        ),
    },
    expected={
        "TestCalc.test_add": "PASSED",
        "TestCalc.test_mean_empty": "PASSED",
        "TestCalc.test_mean[xs0-2]": "PASSED",
        "TestCalc.test_mean[xs1-5]": "PASSED",
    },
)

SLUG = Specimen(
    name="slug",
    issue="slugify leaves a dash at the end of 'hello world!'",
    files={
        "slug.py": _text(
            """
            import re


            def slugify(text):
                return re.sub(r"[^a-z0-9]+", "-", text.lower())
            """
        )
    },
    fix={
        "slug.py": _text(
            """
            import re


            def slugify(text):
                return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
            """
        )
    },
    tests={
        "__init__.py": "",
        "test_1.py": _text(
            """
            import pytest

            from slug import slugify


            @pytest.mark.parametrize("text", ["it's 'str' object", "a - b", "x"])
            def test_no_edge(text):
                assert not slugify(text).endswith("-")


            def test_end():
                assert slugify("hello world!") == "hello-world"
            """
        ),
    },
    expected={
        "test_no_edge[it's 'str' object]": "PASSED",
        "test_no_edge[a - b]": "PASSED",
        "test_no_edge[x]": "PASSED",
        "test_end": "PASSED",
    },
)

MERGE = Specimen(
    name="merge",
    issue="merge() does not join intervals that touch",
    files={
        "intervals/__init__.py": "from intervals.core import merge\n",
        "intervals/core.py": _text(
            """
            def merge(spans):
                out = []
                for start, end in sorted(spans):
                    if out and start < out[-1][1]:
                        out[-1] = (out[-1][0], max(out[-1][1], end))
                    else:
                        out.append((start, end))
                return out
            """
        ).replace("\n", "\r\n"),
    },
    fix={
        "intervals/core.py": _text(
            """
            def merge(spans):
                out = []
                for start, end in sorted(spans):
                    if out and start <= out[-1][1]:
                        out[-1] = (out[-1][0], max(out[-1][1], end))
                    else:
                        out.append((start, end))
                return out
            """
        ).replace("\n", "\r\n")
    },
    tests={
        "__init__.py": "",
        "test_1.py": _text(
            """
            import unittest

            from intervals import merge


            class MergeTest(unittest.TestCase):
                def test_apart(self):
                    self.assertEqual(merge([(3, 4), (1, 2)]), [(1, 2), (3, 4)])

                def test_touching(self):
                    self.assertEqual(merge([(1, 2), (2, 4)]), [(1, 4)])

                def test_bad_input(self):
                    with self.assertRaises(TypeError):
                        merge(None)
            """
        ),
    },
    expected={
        "MergeTest.test_apart": "PASSED",
        "MergeTest.test_touching": "PASSED",
        "MergeTest.test_bad_input": "PASSED",
    },
)

STOCK = Specimen(
    name="stock",
    issue="taking more than there is must raise ValueError and change nothing",
    files={
        "stock/__init__.py": "",
        "stock/shelf.py": _text(
            """
            class Shelf:
                def __init__(self):
                    self.items = {}

                def put(self, name, number=1):
                    self.items[name] = self.items.get(name, 0) + number

                def take(self, name, number=1):
                    self.items[name] = self.items.get(name, 0) - number
                    return self.items[name]
            """
        ),
        "setup.cfg": "[tool:pytest]\naddopts = -q\n",
    },
    fix={
        "stock/shelf.py": _text(
            """
            class Shelf:
                def __init__(self):
                    self.items = {}

                def put(self, name, number=1):
                    self.items[name] = self.items.get(name, 0) + number

                def take(self, name, number=1):
                    if self.items.get(name, 0) < number:
                        raise ValueError(f"only {self.items.get(name, 0)} {name}")
                    self.items[name] -= number
                    return self.items[name]
            """
        )
    },
    tests={
        "__init__.py": "",
        "test_1.py": _text(
            """
            import pytest

            from stock.shelf import Shelf


            @pytest.fixture
            def shelf():
                shelf = Shelf()
                shelf.put("bolt", 3)
                return shelf


            def test_take(shelf):
                assert shelf.take("bolt") == 2


            def test_take_too_many(shelf):
                with pytest.raises(ValueError):
                    shelf.take("bolt", 9)
                assert shelf.items == {"bolt": 3}


            def test_unknown(shelf):
                with pytest.raises(ValueError):
                    shelf.take("nut")
            """
        ),
    },
    expected={"test_take": "PASSED", "test_take_too_many": "PASSED", "test_unknown": "PASSED"},
)

SPECIMENS = (CALC, SLUG, MERGE, STOCK)


def make_image(host: DockerHost, specimen: Specimen) -> tuple[str, str]:
    """Build the image if it is not here. Returns the ids of the base and the fix commit."""
    found = host.engine.find_image(specimen.image)
    if found is not None and "test.commits" in found.labels:
        base, fix = found.labels["test.commits"].split()
        return base, fix
    sandbox = DockerSandbox.start(host, BASE_IMAGE, SMALL)
    try:
        sandbox.put_files("/testbed", _encoded({".gitignore": _GITIGNORE, **specimen.files}))
        sandbox.exec(["mkdir", "/fix", "/r2e_tests"], timeout_s=10)
        sandbox.put_files("/fix", _encoded(specimen.fix))
        sandbox.put_files("/r2e_tests", _encoded(specimen.tests))
        made = sandbox.exec(["bash", "-c", _MAKE], timeout_s=60, env={"RUNNER": _RUN_TESTS})
        assert made.exit_code == 0, made.output
        base, fix = made.output.decode().split()[-2:]
        host.engine.commit(sandbox.container_id, specimen.image, {"test.commits": f"{base} {fix}"})
    finally:
        sandbox.close()
    return base, fix


def make_row(specimen: Specimen, base: str, fix: str) -> dict[str, object]:
    """The specimen as an R2E-Gym row."""
    diffs = [
        {
            "header": {"file": {"path": path}},
            "is_binary_file": False,
            "minus_file": {"path": f"a/{path}"},
            "plus_file": {"path": f"b/{path}"},
            "old_file_content": specimen.files[path],
            "new_file_content": text,
        }
        for path, text in specimen.fix.items()
    ]
    commit = {"file_diffs": diffs, "old_commit_hash": base, "new_commit_hash": fix}
    return {
        "repo_name": specimen.name,
        "docker_image": specimen.image,
        "commit_hash": fix,
        "parsed_commit_content": json.dumps(commit),
        "problem_statement": f"Here it is.\n[ISSUE]\n{specimen.issue}\n[/ISSUE]",
        "expected_output_json": json.dumps(dict(specimen.expected)),
    }


def _encoded(files: Mapping[str, str]) -> dict[str, bytes]:
    return {path: text.encode() for path, text in files.items()}
