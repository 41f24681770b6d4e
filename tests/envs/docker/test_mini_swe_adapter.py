"""The adapter for mini-swe-agent, on a sandbox that answers from a list."""

from __future__ import annotations

from envs.adapters.mini_swe_agent import MiniSweEnvironment
from envs.base import ExecResult


class AnsweringSandbox:
    workspace = "/testbed"

    def __init__(self, *answers: ExecResult) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, float]] = []

    def run_shell(self, command: str, *, timeout_s: float, output_cap_bytes: int = 1) -> ExecResult:
        self.asked.append((command, timeout_s))
        return self._answers.pop(0)


def test_replies_have_the_keys_that_the_agent_reads() -> None:
    box = AnsweringSandbox(
        ExecResult(3, b"caf\xe9\n"), ExecResult(None, b"part", timed_out=True, seconds=5.2)
    )
    environment = MiniSweEnvironment(box, timeout=5.0)
    assert environment.execute({"command": "x"}) == {
        "output": "caf\ufffd\n",
        "returncode": 3,
        "exception_info": "",
    }
    late = environment.execute({"command": "y"}, timeout=9)
    assert (late["output"], late["returncode"]) == ("part", -1)
    assert "killed after 5 seconds" in late["exception_info"]
    assert box.asked == [("x", 5.0), ("y", 9)]


def test_a_folder_is_quoted_and_a_nul_is_the_agents_mistake() -> None:
    box = AnsweringSandbox(ExecResult(0, b""))
    environment = MiniSweEnvironment(box)
    environment.execute({"command": "ls"}, cwd="it's here")
    assert box.asked[0][0] == "cd -- 'it'\"'\"'s here' && { ls\n}"
    assert environment.execute({"command": "a\0b"})["returncode"] == -1


def test_templates_see_the_sandbox_and_not_this_machine() -> None:
    shown = MiniSweEnvironment(AnsweringSandbox(), branch="main").get_template_vars(task="t")
    assert (shown["cwd"], shown["branch"], shown["task"]) == ("/testbed", "main", "t")
    assert "PATH" not in shown
    assert MiniSweEnvironment(AnsweringSandbox()).serialize()["info"]["config"]["environment"]
