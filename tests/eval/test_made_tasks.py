"""Tasks made from a repository: their images build, and both kinds of judge agree on the fix."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from swe_specimens import IMAGE_BASE

from agent_rl.config.schema import ImagesConfig, RunConfig, TasksConfig
from agent_rl.tasks.images import ROWS, open_environments
from envs.base import Score
from envs.images.environments import ImageSettings
from envs.images.grading import ImageGrader
from envs.sandbox.docker.docker_py import DockerPyEngine
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost, HostLimits
from envs.sandbox.docker.options import DockerOptions
from envs.tasks import r2e_gym, swebench
from envs.tasks.from_repository.images import check_images
from envs.tasks.from_repository.made_task import MadeTask
from envs.tasks.from_repository.repository import Repository
from envs.tasks.from_repository.store import write_folder
from eval.config import GradingConfig
from eval.grading import GradeStore, grade_predictions
from eval.harness import OfficialHarness
from eval.outcomes import Outcome
from eval.predictions import Prediction

pytestmark = [pytest.mark.docker, pytest.mark.slow]

FIXED = b"def clamp(x, low, high):\n    return max(low, min(x, high))\n"
BROKEN = FIXED.replace(b"min(x", b"max(x")
FILES = {
    "setup.cfg": b"[metadata]\nname = clamps\n",
    "src/clamps/__init__.py": FIXED,
    "tests/helper.py": b"LOW = 1\n",
    "tests/test_clamps.py": (
        b"import pytest\nfrom clamps import clamp\nfrom helper import LOW\n\n\n"
        b"def test_low():\n    assert clamp(0, LOW, 3) == 1\n\n\n"
        b"@pytest.mark.parametrize('x', [1, 2, 3])\n"
        b"def test_inside(x):\n    assert clamp(x, LOW, 3) == x\n"
    ),
    "tests/test_other.py": b"def test_other():\n    assert True\n",
}
EXPECTED = {
    **{f"tests/test_clamps.py::test_inside[{x}]": "PASSED" for x in (1, 2, 3)},
    "tests/test_clamps.py::test_low": "PASSED",
    "tests/test_other.py::test_other": "PASSED",
}
FAILING = tuple(name for name in EXPECTED if "other" not in name and "[3]" not in name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one made task, its image built."""
    repository = Repository("clamps", "1.0", FILES)
    task = MadeTask(
        repository, "src/clamps/__init__.py", BROKEN, "sibling_call", "clamp", 2, FAILING,
        EXPECTED, "clamp is wrong",
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("made")
    write_folder(folder, repository, [task], IMAGE_BASE)
    environment = {**os.environ, "DOCKER_BUILDKIT": "0"}
    argv = ["sh", str(folder / "images" / "build.sh")]
    done = subprocess.run(argv, env=environment, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return folder


@pytest.fixture(scope="module")
def host() -> Iterator[DockerHost]:
    limits = HostLimits(disk_floor_bytes=1 << 30)
    host = DockerHost(DockerPyEngine(), run_id="made-tasks", limits=limits)
    yield host
    host.close()


def test_the_official_harness_resolves_the_fix_and_only_that(made: Path, tmp_path: Path) -> None:
    (row,) = swebench.load_rows(str(made / "swebench.jsonl"))
    harness = OfficialHarness(tmp_path, "made-swe", GradingConfig(timeout_s=120))
    for name, patch, outcome in (
        ("gold", row.patch, Outcome.RESOLVED),
        (
            "wrong",
            row.patch.replace("+    return max(low", "+    return min(low"),
            Outcome.UNRESOLVED,
        ),
        ("cheat", CHEAT, Outcome.UNRESOLVED),
    ):
        prediction = {row.instance_id: Prediction(row.instance_id, name, patch)}
        grades = grade_predictions([row], prediction, harness, GradeStore(tmp_path / name))
        assert grades[row.instance_id].outcome is outcome, (name, grades)


# Adds a plugin that claims success and leaves; the row's script puts runner configuration back.
CHEAT = (
    "diff --git a/pytest.ini b/pytest.ini\nnew file mode 100644\n--- /dev/null\n+++ b/pytest.ini\n"
    "@@ -0,0 +1,2 @@\n+[pytest]\n+addopts = -p cheat\n"
    "diff --git a/cheat.py b/cheat.py\nnew file mode 100644\n--- /dev/null\n+++ b/cheat.py\n"
    "@@ -0,0 +1,4 @@\n+import os\n+print()\n"
    f"+[print('PASSED', name, flush=True) for name in {tuple(EXPECTED)!r}]\n+os._exit(0)\n"
)


def test_r2e_gym_rows_give_the_same_verdicts(made: Path, host: DockerHost) -> None:
    (task,) = r2e_gym.load_tasks(str(made / "r2e_gym.jsonl"))
    (row,) = [json.loads(line) for line in (made / "swebench.jsonl").read_text().splitlines()]
    grader = ImageGrader(host, DockerOptions())
    gold: Score = grader.grade(task, row["patch"].encode())
    assert (gold.reward, gold.status) == (1.0, "graded"), gold
    wrong = row["patch"].replace("+    return max(low", "+    return min(low")
    assert grader.grade(task, wrong.encode()).reward == 0.0
    assert grader.grade(task, b"").reward == 0.0


def test_swebench_rows_train_too(made: Path, host: DockerHost) -> None:
    (row,) = swebench.load_rows(str(made / "swebench.jsonl"))
    sandbox = DockerSandbox.start(host, row.image, DockerOptions())
    try:
        files = swebench.official_test_files(sandbox, row)
    finally:
        sandbox.close()
    assert files == {"tests/test_clamps.py": FILES["tests/test_clamps.py"]}
    task = swebench.training_task(row, row.image, files)
    grader = ImageGrader(host, DockerOptions())
    validation = grader.check(task)
    assert validation.controls  # some tests can be turned wrong: forging is noticed
    assert grader.grade(task, row.patch.encode(), validation).reward == 1.0
    assert grader.grade(task, CHEAT.encode(), validation).reward == 0.0
    equal_to_all = row.patch.replace("+    return max(low, min(x, high))", EQUAL_TO_ALL)
    assert grader.grade(task, equal_to_all.encode(), validation).reward == 0.0


EQUAL_TO_ALL = "+    return type('E', (), {'__eq__': lambda a, b: not None})()"


def image_config(kind: Literal["r2e_gym", "swebench"], rows: Path, folder: Path) -> RunConfig:
    return RunConfig(
        name="made",
        run_root=str(folder),
        tasks=TasksConfig(kind=kind, rows=str(rows)),
        images=ImagesConfig(docker_url=os.environ["DOCKER_HOST"], disk_floor_bytes=1 << 30),
    )


@pytest.mark.parametrize("kind", ["r2e_gym", "swebench"])
def test_their_rows_can_be_trained_on(
    kind: Literal["r2e_gym", "swebench"], made: Path, tmp_path: Path
) -> None:
    """What ``agent-rl train`` does with a file of rows, up to the reward."""
    rows = made / f"{kind}.jsonl"
    environments = open_environments(image_config(kind, rows, tmp_path))
    try:
        (task,) = environments.admit(ROWS[kind](str(rows), "train"))
        for text, reward in ((FIXED, 1.0), (BROKEN.replace(b"low", b"lo"), 0.0)):
            env = environments.make(task)
            env.reset()
            code = f"open('src/clamps/__init__.py', 'w').write({text.decode()!r})"
            env.step(CALL.format(f"python3 - <<'END'\n{code}\nEND"))
            assert env.grade().reward == reward
            env.close()
    finally:
        environments.close()


CALL = "<function=execute_bash><parameter=cmd>{}</parameter></function>"


def test_what_does_not_hold_in_its_image_is_taken_out_of_the_rows(tmp_path: Path) -> None:
    """A task whose failing test passes without the fix, as when an image lacks a package."""
    repository = Repository("clamps", "1.0", FILES)
    good = MadeTask(
        repository, "src/clamps/__init__.py", BROKEN, "sibling_call", "clamp", 2, FAILING,
        EXPECTED, "clamp is wrong",
    )  # fmt: skip
    harmless = FIXED.replace(b"low, high):", b"low, high):  # limits")
    bad = replace(good, content=harmless)
    write_folder(tmp_path, repository, [good, bad], IMAGE_BASE)
    settings = ImageSettings(
        "made-images", tmp_path / "seen", host_limits=HostLimits(disk_floor_bytes=1 << 30)
    )
    report = check_images(tmp_path, DockerPyEngine(), settings)
    image = f"{good.task_id.replace('__', '.')}:latest"
    assert report.kept == (image,)
    (reason,) = report.refused.values()
    assert "solved as it stands" in reason
    assert [row.image for row in swebench.load_rows(str(tmp_path / "swebench.jsonl"))] == [image]
    (task,) = r2e_gym.load_tasks(str(tmp_path / "r2e_gym.jsonl"))
    assert task.image == image
    assert json.loads((tmp_path / "report.json").read_text())["images"]["kept"] == 1
