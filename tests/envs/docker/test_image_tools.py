"""The tools of image tasks, over a container whose shell answers everything with success."""

from __future__ import annotations

import json

import pytest
from yes_engine import YesEngine, make_box, make_engine

from envs.actions import FORMATS, TOOL_SETS
from envs.actions.calls import CallError
from envs.actions.container_tools import ContainerTools, ToolSettings
from envs.images.env import ImageEnv, ImageEnvParts
from envs.images.grading import ImageGrader
from envs.images.prepare import ImagePreparer, PreparedImage
from envs.images.task import ImageTask
from envs.patches.git_patch import Baseline
from envs.sandbox.docker.docker_sandbox import DockerSandbox
from envs.sandbox.docker.host import DockerHost
from envs.sandbox.docker.options import DockerOptions


@pytest.fixture
def engine() -> YesEngine:
    return make_engine()


@pytest.fixture
def box(engine: YesEngine) -> DockerSandbox:
    return make_box(engine)


def said(name: str, **arguments: str | int) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


HALF, NUL = "a\ud800b", "a\0b"  # JSON can spell both


@pytest.mark.parametrize(
    "action",
    [
        *(said("execute_bash", cmd=bad) for bad in (HALF, NUL)),
        *(said("search", search_term=bad) for bad in (HALF, NUL)),
        *(said("search", search_term="x", path=bad) for bad in (HALF, NUL)),
        *(said("file_editor", command="view", path=bad) for bad in (HALF, NUL)),
        *(said("file_editor", command="create", path=b, file_text="x") for b in (HALF, NUL)),
        said("file_editor", command="create", path="n.py", file_text=HALF),
        said("file_editor", command="str_replace", path="n.py", old_str=HALF, new_str="y"),
        said("file_editor", command="str_replace", path="n.py", old_str="y", new_str=HALF),
        said("file_editor", command="insert", path="n.py", insert_line=0, new_str=HALF),
        *(said("file_editor", command="undo_edit", path=bad) for bad in (HALF, NUL)),
    ],
    ids=ascii,
)
def test_text_that_no_command_or_file_can_hold_is_a_reply_and_not_a_failure(
    box: DockerSandbox, engine: YesEngine, action: str
) -> None:
    (call,) = FORMATS["hermes_json"]().parse(action, TOOL_SETS["r2e"]).calls
    assert not isinstance(call, CallError)
    before = len(engine.shell.sent)
    reply = ContainerTools(box, ToolSettings()).run(call)
    assert reply.startswith("ERROR: ")
    reply.encode()
    assert len(engine.shell.sent) == before


def test_a_file_may_hold_a_nul_byte(box: DockerSandbox, engine: YesEngine) -> None:
    action = said("file_editor", command="insert", path="n.bin", insert_line=0, new_str="a\0b")
    (call,) = FORMATS["hermes_json"]().parse(action, TOOL_SETS["r2e"]).calls
    assert not isinstance(call, CallError)
    assert ContainerTools(box, ToolSettings()).run(call).startswith("edited")
    assert engine.shell.sent[-1].endswith(b"a\0b\n")


@pytest.mark.parametrize("word", ["\ud800", "a\0b"])
def test_a_command_that_cannot_even_start_is_the_agents(box: DockerSandbox, word: str) -> None:
    assert box.exec(["echo", word], timeout_s=5).exit_code == 126
    assert box.run_shell(f"echo {word}", timeout_s=5).exit_code == 126


class Prepared(ImagePreparer):
    def prepare(self, task: ImageTask) -> PreparedImage:
        return PreparedImage("image", Baseline("/testbed", "/store", "tree"))


@pytest.mark.parametrize(
    ("calls", "malformed"),
    [(("good", "bad"), False), (("bad", "good"), False), (("bad", "bad"), True), ((), True)],
)
def test_an_action_is_malformed_only_when_nothing_of_it_can_be_carried_out(
    engine: YesEngine, calls: tuple[str, ...], malformed: bool
) -> None:
    """Such actions may be masked: what acted on the work tree must not be."""
    host = DockerHost(engine, "run", free_bytes=lambda folder: 1 << 40)
    options = DockerOptions()
    parts = ImageEnvParts(
        host,
        options,
        Prepared(host, options),
        ImageGrader(host, options),
        FORMATS["hermes_json"](),
        TOOL_SETS["r2e"],
    )
    task = ImageTask("a", "issue", {}, "", (), {}, {}, b"", image="image")
    env = ImageEnv(task, parts)
    env.reset()
    said_by = {"good": said("execute_bash", cmd="true"), "bad": said("execute_bash")}
    assert env.step("".join(said_by[name] for name in calls)).malformed == malformed
    env.close()
