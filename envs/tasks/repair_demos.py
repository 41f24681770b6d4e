"""Scripted, noisy demonstrations of repair episodes, which the warm start imitates.

The demonstrator reads the source, edits a line (often the right one, often with the right code),
runs the tests about half the time and retries after most failures. It is good enough to teach the
tools and the grammar, and bad enough to leave the policy most of the work. Replies have exactly
the form that the real environment gives; a test compares the two.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from envs.tasks.mutations import line_mutations, variable_names
from envs.tasks.repair import NUM_VISIBLE, Raised, RepairTask, run_trusted, same_value

Role = Literal["user", "assistant", "obs"]


@dataclass(frozen=True)
class DemoSkill:
    """Chances of the demonstrator's choices."""

    right_line: float = 0.8
    right_code: float = 0.55
    test_after_edit: float = 0.5
    retry_after_failure: float = 0.7
    test_first: float = 0.15
    max_turns: int = 6


@dataclass(frozen=True)
class Demo:
    """A finished episode: (role, text) messages and whether the hidden tests passed."""

    messages: tuple[tuple[Role, str], ...]
    solved: bool


def demonstrate(task: RepairTask, rng: random.Random, skill: DemoSkill) -> Demo:
    """Play one episode of ``task``."""
    episode = _Episode(task, skill.max_turns)
    episode.act("view")
    if rng.random() < skill.test_first:
        episode.act("test")
    while not episode.done:
        episode.act(_draw_edit(episode, rng, skill))
        if not episode.done and rng.random() < skill.test_after_edit:
            reply = episode.act("test")
            if episode.done:
                break
            if reply != "pass" and rng.random() < skill.retry_after_failure:
                continue
        if not episode.done:
            episode.act("submit")
    return Demo(tuple(episode.messages), episode.solved)


def _draw_edit(episode: _Episode, rng: random.Random, skill: DemoSkill) -> str:
    fixed, names = episode.task.fixed, episode.names
    wrong = [i for i, line in enumerate(episode.body) if line != fixed[i]]
    other = [i for i in range(len(fixed)) if i not in wrong]
    at_fault = bool(wrong) and (not other or rng.random() < skill.right_line)
    number = rng.choice(wrong if at_fault else other)
    if at_fault and rng.random() < skill.right_code:
        code = fixed[number]
    else:
        drawn = [m.line for m in line_mutations(episode.body[number], names)]
        code = rng.choice([line for line in drawn if line != fixed[number]] or [fixed[number]])
    return f"replace {number + 1} {code.strip()}"


class _Episode:
    """The environment's behaviour over trusted code: no sandbox, a few microseconds per step."""

    def __init__(self, task: RepairTask, max_turns: int) -> None:
        self.task, self.max_turns = task, max_turns
        self.body = list(task.broken)
        self.names = variable_names(task.fixed, task.specimen.args)
        self.messages: list[tuple[Role, str]] = [("user", task.issue)]
        self.done, self.solved, self.turns = False, False, 0

    def act(self, action: str) -> str:
        """Take one action; returns the reply and appends both to ``messages``."""
        self.turns += 1
        self.messages.append(("assistant", action))
        reply = self._reply(action)
        self.done = self.done or self.turns >= self.max_turns
        if not self.done:
            self.messages.append(("obs", reply))
        return reply

    def _reply(self, action: str) -> str:
        if action == "view":
            return "\n".join(f"{i + 1} {line.strip()}" for i, line in enumerate(self.body))
        if action == "test":
            return self._first_failure(NUM_VISIBLE)
        if action == "submit":
            self.done, self.solved = True, self._first_failure(len(self.task.cases)) == "pass"
            return ""
        _, number, code = action.split(" ", 2)
        line = self.body[int(number) - 1]
        self.body[int(number) - 1] = line[: len(line) - len(line.lstrip())] + code
        return "ok"

    def _first_failure(self, num_cases: int) -> str:
        cases = self.task.cases[:num_cases]
        results = run_trusted(self.task.specimen, self.body, [arguments for arguments, _ in cases])
        for (arguments, wanted), got in zip(cases, results, strict=True):
            if isinstance(got, Raised):
                return f"error {got.error}"
            if not same_value(got, wanted):
                call = f"{self.task.specimen.name}({', '.join(repr(a) for a in arguments)})"
                return f"fail {call} got {got!r} want {wanted!r}"
        return "pass"
