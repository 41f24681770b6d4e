"""The environment of image tasks: tools, malformed calls, order of calls, destroyed work trees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from r2e_specimens import CALC, SMALL, make_image, make_row

from envs.actions import R2E_TOOLS, R2EXml, ToolCall
from envs.errors import EpisodeError
from envs.images.env import ImageEnv, ImageEnvParts, issue_text
from envs.images.grading import ImageGrader
from envs.images.prepare import ImagePreparer
from envs.sandbox.docker.host import DockerHost
from envs.tasks.r2e_gym import make_task


def test_issue_text() -> None:
    assert issue_text("a [ISSUE]\n b\n[/ISSUE] c") == "b"
    assert issue_text(" no marks ") == "no marks"


@pytest.fixture(scope="module")
def parts(docker_host: DockerHost) -> ImageEnvParts:
    grader, preparer = ImageGrader(docker_host, SMALL), ImagePreparer(docker_host, SMALL)
    return ImageEnvParts(docker_host, SMALL, preparer, grader, R2EXml(), R2E_TOOLS)


@pytest.fixture
def env(docker_host: DockerHost, parts: ImageEnvParts) -> Iterator[ImageEnv]:
    env = ImageEnv(make_task(make_row(CALC, *make_image(docker_host, CALC))), parts)
    yield env
    env.close()


def call(env: ImageEnv, name: str, **arguments: str | int | tuple[int, ...]) -> str:
    return env.step(R2EXml().write(ToolCall(name, arguments))).text


def edit(env: ImageEnv, command: str, path: str = "/testbed/calc/__init__.py", **more: str) -> str:
    return call(env, "file_editor", command=command, path=path, **more)


@pytest.mark.docker
def test_the_tools_of_r2e_gym(env: ImageEnv) -> None:
    assert env.reset().text == CALC.issue
    assert "calc" in edit(env, "view", "/testbed")
    assert "     5\tdef mean(xs):" in edit(env, "view")
    shown = call(env, "file_editor", command="view", path="calc/__init__.py", view_range=(5, 6))
    assert shown.splitlines()[0].endswith("def mean(xs):")
    assert "no such lines" in call(
        env, "file_editor", command="view", path="calc/__init__.py", view_range=(5, 60)
    )
    old = "    return sum(xs) / len(xs)\n"
    new = "    return sum(xs) / len(xs) if xs else 0.0\n"
    assert "must occur exactly once" in edit(env, "str_replace", old_str="nothing", new_str="x")
    assert "edited" in edit(env, "str_replace", old_str=old.strip(), new_str=new.strip())
    assert "undid" in edit(env, "undo_edit")
    assert "no edit to undo" in edit(env, "undo_edit")
    assert "edited" in edit(env, "str_replace", old_str=old.strip(), new_str=new.strip())
    assert "exists" in edit(env, "create", file_text="x")
    assert "created" in edit(env, "create", "/testbed/notes.md", file_text="caf\u00e9\n")
    assert "edited" in call(
        env, "file_editor", command="insert", path="notes.md", insert_line=1, new_str="two"
    )
    assert "outside the work folder" in edit(env, "view", "/etc/passwd")
    assert "calc/__init__.py:6" in call(env, "search", search_term="return sum")
    assert call(env, "search", search_term="$(nothing) 'here'") == "no match"
    call(env, "execute_bash", cmd="cd calc && export X=1")
    assert call(env, "execute_bash", cmd="pwd; echo $X") == "/testbed/calc\n1\n\n[exit code 0]"
    done = env.step(R2EXml().write(ToolCall("finish", {"command": "submit"})))
    assert (done.done, done.stop_reason) == (True, "submit")
    with pytest.raises(EpisodeError, match="over"):
        env.step("more")
    assert env.grade().reward == 1.0
    assert env.extract().files == ("calc/__init__.py", "notes.md")


@pytest.mark.docker
@pytest.mark.parametrize(
    "said",
    [
        "just words",
        "<function=execute_bash><parameter=cmd>ls",
        "<function=nothing></function>",
        "<function=execute_bash></function>",
        "<function=file_editor><parameter=command>fly</parameter></function>",
        "<think><function=execute_bash><parameter=cmd>touch x</parameter></function>",
        "<function=execute_bash><parameter=cmd>" + "x" * 1_000_000 + "</parameter></function>",
    ],
    ids=lambda said: said[:30],
)
def test_a_malformed_call_is_answered_and_changes_nothing(env: ImageEnv, said: str) -> None:
    env.reset()
    reply = env.step(said)
    assert reply.malformed
    assert reply.text.startswith("ERROR")
    assert not reply.done
    assert env.patch() == b""


@pytest.mark.docker
def test_a_destroyed_work_tree_is_an_empty_patch_and_graded(env: ImageEnv) -> None:
    env.reset()
    call(env, "execute_bash", cmd="rm -rf /testbed /var/lib/agent-rl /usr/bin")
    assert env.patch() == b""
    score = env.grade()
    assert (score.status, score.reward) == ("graded", 0.0)


@pytest.mark.docker
def test_calls_out_of_order(env: ImageEnv) -> None:
    with pytest.raises(EpisodeError, match="new"):
        env.step("x")
    with pytest.raises(EpisodeError):
        env.patch()
    env.reset()
    call(env, "execute_bash", cmd="echo x > y.py")
    assert env.reset().text == CALC.issue
    assert env.patch() == b"", "reset starts from the base"
