"""A module of one's own: found, checked, played, and trained on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from agent_rl.config.reading import load_config
from agent_rl.config.schema import (
    AgentConfig,
    AlgorithmConfig,
    EvalConfig,
    OptimConfig,
    RunConfig,
    TasksConfig,
    TrainConfig,
)
from agent_rl.errors import ConfigError
from agent_rl.loop import train_steps
from agent_rl.run.parts import assemble
from agent_rl.tasks.kinds import episode_prompts, load_tasks, open_environments
from agent_rl.types import Group
from envs.actions import Prompts

DOCS = Path(__file__).parents[3] / "docs"
EXAMPLE = DOCS / "examples" / "say_the_word.py"
TASKS = TasksConfig(kind="module", module=str(EXAMPLE), num_train=8, num_heldout=4)


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (DOCS / "own_environment.md").read_text()
    assert f"```python\n{EXAMPLE.read_text()}```" in page


def test_the_example_plays_and_judges() -> None:
    tasks = load_tasks(TASKS)
    assert not {t.task_id for t in tasks.train} & {t.task_id for t in tasks.heldout}
    assert (len(tasks.train), len(tasks.heldout)) == (8, 4)
    environments = open_environments(RunConfig(tasks=TASKS))
    env = environments.make(tasks.train[0])
    assert env.reset().text == "fix view"
    replies = [env.step(action) for action in ("view", "test", "view 3")]
    assert [reply.done for reply in replies] == [False, False, True]
    assert env.grade().reward == pytest.approx(2 / 3)
    env.reset()
    assert env.grade().reward == 0.0
    environments.close()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("absent.py", None, "which is no file"),
        ("half.py", "def load_tasks(config): ...\n", "lacks open_environments"),
        ("no_such_module_anywhere", None, "cannot be imported"),
    ],
)
def test_what_is_no_such_module_is_named(
    tmp_path: Path, name: str, text: str | None, said: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    module = str(tmp_path / name) if name.endswith(".py") else name
    with pytest.raises(ConfigError, match=said):
        load_tasks(replace(TASKS, module=module))


def test_an_importable_name_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_words.py").write_text(EXAMPLE.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    assert len(load_tasks(replace(TASKS, module="my_own_words")).train) == 8


def test_prompts_for_a_chat_template_are_the_modules(tmp_path: Path) -> None:
    config = RunConfig(tasks=TASKS)
    with pytest.raises(ConfigError, match="lacks episode_prompts"):
        episode_prompts(config, "the issue")
    own = tmp_path / "with_prompts.py"
    own.write_text(
        f"{EXAMPLE.read_text()}\n\nfrom envs.actions import Prompts\n\n\n"
        "def episode_prompts(config, issue):\n    return Prompts('Be brief.', f'Do: {issue}')\n"
    )
    config = RunConfig(tasks=replace(TASKS, module=str(own)))
    assert episode_prompts(config, "the issue") == Prompts("Be brief.", "Do: the issue")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["tasks.kind=module"], "tasks.module: got nothing"),
        (["tasks.module=a.py"], "tasks.module: got 'a.py', expected '': only read for"),
        (["tasks.kind=module", "tasks.module=a.py", "tasks.bugs=syntax"], "tasks.bugs"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(
    tmp_path: Path, overrides: list[str], said: str
) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(ConfigError, match=said):
        load_config(tmp_path / "config.yaml", overrides)


class Rewards:
    """Observer that keeps the mean reward of each step."""

    def __init__(self) -> None:
        self.means: list[float] = []

    def step_done(self, step: int, groups: list[Group], metrics: dict[str, float]) -> bool:
        self.means.append(metrics["reward_mean"])
        return False


@pytest.mark.slow
@pytest.mark.megatron
def test_training_on_the_example_raises_its_reward(tmp_path: Path) -> None:
    config = RunConfig(
        run_root=str(tmp_path),
        tasks=TASKS,
        agent=AgentConfig(max_new_tokens=8, max_tokens=96),
        algorithm=AlgorithmConfig(groups_per_step=8, num_mini_steps=2),
        optim=OptimConfig(lr=2e-3),
        train=TrainConfig(steps=8, mismatch_every=0),
        eval=EvalConfig(num_tasks=4),
    )
    rewards = Rewards()

    async def train() -> None:
        parts = assemble(config)
        try:
            await train_steps(parts.loop, rewards, first_step=1)  # type: ignore[arg-type]
        finally:
            await parts.aclose()

    asyncio.run(train())
    assert sum(rewards.means[-2:]) / 2 > sum(rewards.means[:2]) / 2 + 0.1, rewards.means
