"""Tasks, an environment and a reward of one's own: say the word that the task asks for."""

from __future__ import annotations

from agent_rl.config import RunConfig, TasksConfig
from agent_rl.tasks import Environments, TaskSets
from envs.base import Env, Observation, Score, Task

WORD = "view"  # of the policy's vocabulary
NUM_TURNS = 3


def load_tasks(config: TasksConfig) -> TaskSets:
    heldout = _tasks(config.heldout_split, config.num_heldout)
    return TaskSets(_tasks("train", config.num_train), heldout)


def open_environments(config: RunConfig) -> Environments:
    del config  # a real one opens its sandboxes here and closes them below
    return Environments(
        make=SayTheWord, begin_batch=lambda: None, close=lambda: None, sandbox_kind="none"
    )


def _tasks(side: str, count: int) -> list[Task]:
    return [_task(f"say-{side}-{n}", WORD) for n in range(count)]


def _task(task_id: str, word: str) -> Task:
    return Task(
        task_id=task_id,
        issue=f"fix {word}",  # what the policy sees first
        metadata={"word": word},  # what the environment needs to judge
        files={},  # the rest is for repositories
        focus_path="",
        visible_tests=(),
        hidden_files={},
        expected={},
        solution=b"",
    )


class SayTheWord(Env):
    """Three actions; the reward is the share of them that begin with the task's word."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._said: list[str] = []

    @property
    def task(self) -> Task:
        return self._task

    def reset(self) -> Observation:
        self._said = []
        return Observation(self._task.issue)

    def step(self, action: str) -> Observation:
        self._said.append(action)
        over = len(self._said) == NUM_TURNS
        return Observation("ok", done=over, stop_reason="said" if over else "")

    def grade(self) -> Score:
        right = sum(said.split()[:1] == [self._task.metadata["word"]] for said in self._said)
        return Score(right / NUM_TURNS, "graded", f"{right} of {NUM_TURNS}")

    def patch(self) -> bytes:
        return b""  # nothing is changed here

    def close(self) -> None:
        pass
