"""The life of an episode."""

from __future__ import annotations

import random

import pytest
from affine_repo import FIXED, affine_task

from envs.actions import HermesJson
from envs.actions.grammars.function_calls import FunctionCallGrammar
from envs.actions.tool_specs import WORKSPACE_TOOLS
from envs.base import Env
from envs.errors import EpisodeError, InfrastructureError
from envs.grading.case_runner import CaseRunner
from envs.patches.apply import apply_patch
from envs.sandbox.launch import SandboxSpec
from envs.sandbox.pool import SandboxPool
from envs.sandbox.worker_sandbox import WorkerSandbox
from envs.swe import SweEnv
from envs.tasks.repair import take
from envs.tasks.repair_demos import DemoSkill, demonstrate


def test_it_is_an_env(case_runner: CaseRunner) -> None:
    env: Env = SweEnv(affine_task(), case_runner)
    assert env.task.task_id == "affine"


def test_a_step_before_reset_or_after_the_end_is_an_error(case_runner: CaseRunner) -> None:
    env = SweEnv(affine_task(), case_runner)
    with pytest.raises(EpisodeError, match="new"):
        env.step("view")
    env.reset()
    env.step("submit")
    with pytest.raises(EpisodeError, match="over"):
        env.step("view")
    env.close()
    with pytest.raises(EpisodeError, match="closed"):
        env.step("view")


def test_reset_starts_over_from_the_base(case_runner: CaseRunner) -> None:
    env = SweEnv(affine_task(), case_runner)
    env.reset()
    env.step("replace 1 t = x * 3")
    assert env.patch()
    env.step("submit")
    env.reset()
    assert env.patch() == b""
    assert env.step("view").text.startswith("1 t = x * 2")


def test_the_patch_holds_the_work_and_can_be_graded_before_the_end(case_runner: CaseRunner) -> None:
    env = SweEnv(affine_task(), case_runner)
    env.reset()
    assert env.grade().reason == "empty patch"
    env.step("replace 1 t = x * 3")
    assert apply_patch(env.task.files, env.patch())["solution.py"] == FIXED
    assert env.grade().reward == 1.0


def test_infrastructure_trouble_in_a_step_is_raised_and_in_grading_is_a_status() -> None:
    pool = SandboxPool(SandboxSpec("process"), num_workers=1)
    env = SweEnv(affine_task(), CaseRunner(pool))
    env.reset()
    env.step("replace 1 t = x * 3")
    pool.close()
    with pytest.raises(InfrastructureError):
        env.step("test")
    score = env.grade()
    assert (score.reward, score.status) == (None, "infrastructure")


def test_the_demonstrations_replies_are_those_of_the_environment(case_runner: CaseRunner) -> None:
    """The warm start imitates scripted episodes: the real environment must answer the same."""
    rng = random.Random(4)
    for task in take(9, "train", 25):
        demo = demonstrate(task, rng, DemoSkill())
        env = SweEnv(task.to_task(), case_runner)
        observation = env.reset()
        solved = None
        for role, text in demo.messages:
            if role == "assistant":
                observation = env.step(text)
                if observation.done:
                    solved = env.grade().reward == 1.0
            else:
                assert observation.text == text
        if solved is not None:
            assert solved == demo.solved
        env.close()


def hermes(*calls: str) -> str:
    return "\n".join(f"<tool_call>{call}</tool_call>" for call in calls)


def call(name: str, arguments: str = "{}") -> str:
    return f'{{"name": "{name}", "arguments": {arguments}}}'


def large_env(case_runner: CaseRunner) -> SweEnv:
    return SweEnv(
        affine_task(),
        case_runner,
        grammar=FunctionCallGrammar(HermesJson()),
        start_sandbox=lambda: WorkerSandbox(SandboxSpec("bubblewrap")),
    )


def test_a_large_model_speaks_to_the_same_tools(case_runner: CaseRunner) -> None:
    env = large_env(case_runner)
    env.reset()
    view = env.step(hermes(call("view", '{"path": "solution.py", "start": 2, "end": 2}')))
    assert view.text == "<tool_response>\n2\t    t = x * 2\n</tool_response>"
    edit = call("edit", '{"path": "solution.py", "old": "x * 2", "new": "x * 3"}')
    both = env.step(hermes(edit, call("test")))
    assert both.text.count("<tool_response>") == 2
    assert "ok" in both.text
    assert "all tests pass: 2 PASSED" in both.text
    shell = env.step(hermes(call("bash", '{"command": "cat solution.py; exit 3"}')))
    assert "t = x * 3" in shell.text
    assert "[exit code 3]" in shell.text
    found = env.step(hermes(call("search", '{"text": "affine("}')))
    assert "solution.py:1: def affine(x):" in found.text
    made = call("create", '{"path": "notes.txt", "text": "done"}')
    lines = call("replace_lines", '{"path": "notes.txt", "start": 1, "end": 1, "text": "all done"}')
    assert env.step(hermes(made, lines)).text.count("ok") == 2
    end = env.step(hermes(call("submit"), call("bash", '{"command": "rm -r solution.py"}')))
    assert (end.done, end.stop_reason) == (True, "submit")
    assert "not run: the episode is over" in end.text
    assert env.grade().reward == 1.0
    env.close()


@pytest.mark.parametrize(
    ("action", "malformed", "expected"),
    [
        ("I would like to think about it.", True, "no call found"),
        (hermes('{"name": "bash", "arguments": {"command": "ls'), True, "not valid JSON"),
        (hermes('["ls"]'), True, "expected an object"),
        (hermes(call("rm", "{}")), True, "rm"),
        (hermes(call("bash", "[]")), True, "arguments"),
        (hermes(call("view", '{"path": 7}')), True, "path"),
        (hermes(call("view", '{"path": "solution.py", "start": "one"}')), True, "start"),
        (hermes(call("view")), True, "path"),
        (hermes(call("view", '{"path": "gone.py"}')), False, "error: no such file"),
        (hermes(call("rm"), call("view", '{"path": "README.md"}')), False, "# affine"),
        (f"<think>{hermes(call('submit'))}</think>", True, "no call found"),
        (hermes(call("create", '{"path": "x", "text": "' + "a" * (1 << 20) + '"}')), True, ""),
    ],
    ids=["no call", "cut JSON", "list", "unknown tool", "list of arguments", "wrong type",
         "wrong number", "missing", "absent file", "one bad of two", "inside thinking", "1 MB"],
)  # fmt: skip
def test_malformed_calls_are_answered_and_change_nothing(
    case_runner: CaseRunner, action: str, malformed: bool, expected: str
) -> None:
    env = large_env(case_runner)
    env.reset()
    observation = env.step(action)
    assert observation.malformed == malformed
    assert expected in observation.text
    assert not observation.done
    assert env.patch() == b""
    env.close()


def test_each_tool_is_on_offer_and_described() -> None:
    names = [spec.name for spec in WORKSPACE_TOOLS]
    assert names == ["view", "search", "replace_lines", "edit", "create", "bash", "test", "submit"]
    assert all(
        spec.description and all(p.description for p in spec.parameters) for spec in WORKSPACE_TOOLS
    )
