"""The one list that ``train`` asks before it starts, and that the doctor shows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from family_policies import write_family

from agent_rl.commands.train import train_command
from agent_rl.config.reading import load_config
from agent_rl.config.rules.training import check_training, refuse, too_few_tasks
from agent_rl.config.schema import EngineConfig, PolicyConfig, RunConfig, TasksConfig
from agent_rl.doctor.checks import check_config
from agent_rl.errors import ConfigError

DENSE = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 9}
MODULE = """
from agent_rl.tasks import TaskSets
def load_tasks(config):
    return TaskSets([], []) if config.seed == 2 else TaskSets([1, 2, 3], [4])
def open_environments(config): ...
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    """A module with three tasks to train on."""
    (tmp_path / "three.py").write_text(MODULE)
    return str(tmp_path / "three.py")


def own(module: str, **tasks: int) -> RunConfig:
    return RunConfig(tasks=TasksConfig(kind="module", module=module, **tasks))  # type: ignore[arg-type]


def at(folder: Path, config: RunConfig | None = None) -> RunConfig:
    """``config`` with the policy in ``folder``, which gets what else a policy has."""
    (folder / "tokenizer.json").touch()
    return replace(config or RunConfig(), policy=PolicyConfig(path=str(folder)))


def test_the_defaults_can_be_trained() -> None:
    assert check_training(RunConfig()) == []
    refuse([])


def test_fewer_tasks_than_a_step_asks(module: str) -> None:
    faults = check_training(own(module))
    key, text = (
        "algorithm.groups_per_step",
        "expected at most the 3 training tasks that can be used",
    )
    assert faults == [(key, f"got 32, {text}")]
    assert list(too_few_tasks(own(module), 3)) == faults
    assert list(too_few_tasks(own(module), 32)) == []
    with pytest.raises(ConfigError, match=f"^{key}: got 32, {text}$"):
        refuse(faults)


def test_tasks_that_cannot_be_loaded(tmp_path: Path) -> None:
    ((key, text),) = check_training(own(str(tmp_path / "absent.py")))
    assert (key, text.endswith("which is no file")) == ("tasks.module", True)
    rows = tmp_path / "rows.json"
    rows.write_text("[]")
    config = RunConfig(tasks=TasksConfig(kind="r2e_gym", rows=str(rows)))
    ((key, text),) = check_training(config)
    assert key == "tasks.rows"
    assert text.startswith("no task for the split train and heldout: got 0 tasks")


def test_a_dense_policy_is_told_that_it_has_no_router(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    for engine in (EngineConfig(), EngineConfig(kind="sglang", urls=("http://a:1",))):
        ((key, text),) = check_training(at(tmp_path, RunConfig(engine=engine)))
        assert key == "policy.path"
        assert "dense model (model_type 'llama'), which has no router" in text


def test_trainer_and_engine_must_both_run_the_policy(tmp_path: Path) -> None:
    config = at(write_family(tmp_path, "glm4_moe"))
    assert check_training(config) == [
        (
            "engine.kind",
            "got local, which runs qwen3_moe only, expected sglang or vllm for a policy of "
            "glm4_moe",
        )
    ]
    served = replace(config, engine=EngineConfig(kind="sglang", urls=("http://a:1",)))
    assert check_training(served) == []
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"model_type": "other_moe"}))
    ((key, text),) = check_training(served)
    assert (key, "model_type not covered, got='other_moe'" in text) == ("policy.path", True)


@pytest.mark.parametrize(
    "keys",
    [
        "policy: {path: POLICY}",
        "tasks: {kind: module, module: MODULE}",
        "trainer: {expert_parallel: 3}",
        "policy: {path: nowhere}",
        "tasks: {kind: module, module: nowhere.py}\npolicy: {path: nowhere}",
    ],
)
def test_what_train_refuses_the_doctor_refuses_in_the_same_words(
    tmp_path: Path, module: str, keys: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    at(tmp_path)
    file = tmp_path / "run.yaml"
    keys = keys.replace("POLICY", str(tmp_path)).replace("MODULE", module)
    file.write_text(f"{keys}\nrun_root: {tmp_path}/runs\n")
    with pytest.raises(ConfigError) as refused:
        train_command(file, [], None)
    assert not (tmp_path / "runs").exists()  # nothing was started
    checks = check_config(load_config(file, on_this_machine=False))
    said = [
        f"{check.name}: {check.detail}; {check.advice}".removesuffix(f"; change {check.name}")
        for check in checks
        if check.verdict == "missing"
    ]
    assert set(said) >= {problem.removeprefix(f"{file}: ") for problem in refused.value.problems}
