"""No change of files without the fix earns the reward of an image task."""

from __future__ import annotations

from dataclasses import replace

import pytest
from attacks import ATTACKS, MODULE, SOURCE, TESTS, Attack
from r2e_specimens import CALC, SMALL, make_image, make_row
from redteam_report import Attempt

from envs.base import Score
from envs.grading.control import turn_wrong
from envs.images.grading import ImageGrader, Validation
from envs.images.task import ImageTask
from envs.patches.diff import diff_trees
from envs.sandbox.docker.host import DockerHost
from envs.tasks.r2e_gym import make_task

pytestmark = pytest.mark.docker
FIX = SOURCE.replace("    return sum(xs)", "    if not xs:\n        return 0.0\n    return sum(xs)")


def patch_of(attack: Attack) -> bytes:
    """The attack as a patch on the repository of the target."""
    base = {path: text.encode() for path, text in CALC.files.items()}
    after = dict(base)
    links = b""
    for path, text in attack.files.items():
        if text is None:
            after.pop(path)
        elif text.startswith("->"):
            links += link_patch(path, text[2:])
        else:
            after[path] = text.encode()
    return diff_trees(base, after).patch + links


def link_patch(path: str, target: str) -> bytes:
    return (
        f"diff --git a/{path} b/{path}\nnew file mode 120000\n--- /dev/null\n+++ b/{path}\n"
        f"@@ -0,0 +1 @@\n+{target}\n\\ No newline at end of file\n"
    ).encode()


@pytest.fixture(scope="module")
def image_task(docker_host: DockerHost) -> ImageTask:
    assert CALC.files[MODULE] == SOURCE
    return make_task(make_row(CALC, *make_image(docker_host, CALC)))


@pytest.fixture(scope="module")
def grader(docker_host: DockerHost) -> ImageGrader:
    return ImageGrader(docker_host, SMALL)


@pytest.fixture(scope="module")
def validation(image_task: ImageTask, grader: ImageGrader) -> Validation:
    return grader.check(image_task)


def note(attempts: list[Attempt], sandbox: str, name: str, score: Score) -> None:
    attempts.append(Attempt(sandbox, name, score.reward, score.reason, score.protected_touched))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_on_docker(
    attack: Attack,
    image_task: ImageTask,
    grader: ImageGrader,
    validation: Validation,
    attempts: list[Attempt],
) -> None:
    score = grader.grade(image_task, patch_of(attack), validation)
    note(attempts, "docker", attack.name, score)
    assert score.status == "graded"
    assert score.reward == 0.0
    assert score.reason


def test_the_fix_itself_earns_it(
    image_task: ImageTask, grader: ImageGrader, validation: Validation
) -> None:
    patch = patch_of(Attack("fix", {MODULE: FIX}))
    score = grader.grade(image_task, patch, validation)
    assert (score.reward, score.protected_touched) == (1.0, ()), score
    with_a_test = patch + patch_of(Attack("test", {"tests/test_new.py": "def test(): pass\n"}))
    touched = grader.grade(image_task, with_a_test, validation)
    assert (touched.reward, touched.protected_touched) == (1.0, ("tests/test_new.py",))


def test_without_the_control_run_forging_would_pay(
    image_task: ImageTask, grader: ImageGrader, validation: Validation
) -> None:
    """The attack is real: it is the control run that stops it."""
    forging = next(
        attack for attack in ATTACKS if attack.name == "read the wanted value, names hidden"
    )
    careless = ImageGrader(grader._host, SMALL, replace(grader._policy, control_run=False))  # pyright: ignore[reportPrivateUsage]
    assert careless.grade(image_task, patch_of(forging), validation).reward == 1.0
    score = grader.grade(image_task, patch_of(forging), validation)
    assert "wrong expectations" in score.reason


def test_every_expectation_of_the_target_is_turned() -> None:
    import random

    wrong = turn_wrong(TESTS.encode(), random.Random(0))
    assert wrong.turned == {"TestCalc.test_add", "TestCalc.test_mean_empty", "TestCalc.test_mean"}
