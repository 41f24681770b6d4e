"""mini-swe-agent (version 2) on a sandbox: its ``Environment`` protocol over ours.

Example::

    from minisweagent.agents.default import DefaultAgent

    sandbox = DockerSandbox.start(host, image, DockerOptions())
    agent = DefaultAgent(model, MiniSweEnvironment(sandbox), system_template=…, instance_template=…)
    agent.run("mean([]) raises ZeroDivisionError")
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from envs.base import ExecResult

SUBMIT_LINE = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"


class ShellSandbox(Protocol):
    """A sandbox with a shell whose folder and environment last."""

    @property
    def workspace(self) -> str: ...

    def run_shell(
        self, command: str, *, timeout_s: float, output_cap_bytes: int = ...
    ) -> ExecResult: ...


@dataclass(frozen=True)
class MiniSweConfig:
    """Values that the agent's templates may show."""

    cwd: str
    timeout: float = 60.0
    output_cap_bytes: int = 256 << 10
    variables: Mapping[str, str] = field(default_factory=dict[str, str])


class MiniSweEnvironment:
    """An environment that runs the agent's commands in a container, not on this machine.

    Output is decoded lossily, for the model's view; a command cut at the cap says so in its output.
    Raises InfrastructureError when the sandbox is gone, and mini-swe-agent's own ``Submitted`` when
    a command's first line is its submission mark.
    """

    def __init__(self, sandbox: ShellSandbox, *, timeout: float = 60.0, **variables: str) -> None:
        self._sandbox = sandbox
        self.config = MiniSweConfig(sandbox.workspace, timeout, variables=variables)

    def execute(
        self, action: dict[str, Any], cwd: str = "", *, timeout: float | None = None
    ) -> dict[str, Any]:
        """Run ``action["command"]``; the reply has the keys that theirs has."""
        command = str(action.get("command", ""))
        if "\0" in command:
            return _reply("", -1, "a command cannot hold a NUL byte")
        if cwd:
            command = f"cd -- {shlex.quote(cwd)} && {{ {command}\n}}"
        result = self._sandbox.run_shell(
            command,
            timeout_s=timeout or self.config.timeout,
            output_cap_bytes=self.config.output_cap_bytes,
        )
        text = result.output.decode("utf-8", "replace")
        if result.timed_out:
            return _reply(text, -1, f"the command was killed after {result.seconds:.0f} seconds")
        code = -1 if result.exit_code is None else result.exit_code
        lines = text.lstrip().splitlines(keepends=True)
        if lines and lines[0].strip() == SUBMIT_LINE and code == 0:
            raise _submitted("".join(lines[1:]))
        return _reply(text, code, "")

    def get_template_vars(self, **kwargs: Any) -> dict[str, Any]:
        """Return the variables of their prompt templates.

        The sandbox's system, not this machine's.
        """
        system = {"system": "Linux", "release": "", "version": "", "machine": "x86_64"}
        return {**asdict(self.config), **system, **self.config.variables, **kwargs}

    def serialize(self) -> dict[str, Any]:
        kind = f"{type(self).__module__}.{type(self).__name__}"
        return {"info": {"config": {"environment": asdict(self.config), "environment_type": kind}}}


def _reply(output: str, returncode: int, exception_info: str) -> dict[str, Any]:
    return {"output": output, "returncode": returncode, "exception_info": exception_info}


def _submitted(submission: str) -> Exception:
    from minisweagent.exceptions import Submitted  # pyright: ignore

    extra = {"exit_status": "Submitted", "submission": submission}
    message = {"role": "exit", "content": submission, "extra": extra}
    return Submitted(message)  # pyright: ignore[reportUnknownVariableType]
