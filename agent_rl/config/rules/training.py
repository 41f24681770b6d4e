"""The one list of what must hold before training starts; ``train`` and ``doctor`` both ask it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec

from agent_rl.config.rules.fault import Fault, Rule
from agent_rl.config.rules.machine import MACHINE_RULES, policy_faults
from agent_rl.config.schema import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.model.config_json import read_shape
from agent_rl.model.policies import policy_folder
from agent_rl.tasks.kinds import load_tasks
from envs.tasks.r2e_gym import is_row_file

_EMBEDDED_FAMILY = "qwen3_moe"  # that agent_rl.engines.local runs


def check_training(config: RunConfig) -> list[Fault]:
    """Return every fault that keeps ``config`` from being trained here; starts nothing."""
    faults = [fault for rule in TRAINING_RULES for fault in rule(config)]
    return list(dict.fromkeys(faults))


def refuse(faults: Iterable[Fault]) -> None:
    """Raise one ``ConfigError`` with all ``faults``, if there are any."""
    if problems := [f"{key}: {text}" for key, text in faults]:
        raise ConfigError(problems)


def too_few_tasks(config: RunConfig, num_usable: int) -> Iterator[Fault]:
    """A step asks different tasks: there must be as many."""
    if num_usable < config.algorithm.groups_per_step:
        yield (
            "algorithm.groups_per_step",
            f"got {config.algorithm.groups_per_step}, expected at most the {num_usable} training "
            "tasks that can be used",
        )


def _model(config: RunConfig) -> Iterator[Fault]:
    """The trainer and the engine must both run the policy's family."""
    try:
        family = read_shape(policy_folder(config.policy.path)).family
    except ConfigError as error:
        yield from policy_faults(error)
        return
    if config.engine.kind == "local" and family != _EMBEDDED_FAMILY:
        yield (
            "engine.kind",
            f"got local, which runs {_EMBEDDED_FAMILY} only, expected sglang or vllm for a policy "
            f"of {family}",
        )


def _tasks(config: RunConfig) -> Iterator[Fault]:
    """Load the tasks of files and modules; a data set is fetched when the run starts."""
    kind, rows = config.tasks.kind, config.tasks.rows
    if kind == "repair":
        return  # as many are generated as tasks.num_train says
    if kind != "module" and not is_row_file(rows) and find_spec("datasets") is not None:
        return
    try:
        tasks = load_tasks(config.tasks)
    except ConfigError as error:
        for problem in error.problems:
            key, _, text = problem.partition(": ")
            yield key, text
        return
    yield from too_few_tasks(config, len(tasks.train))


TRAINING_RULES: tuple[Rule, ...] = (*MACHINE_RULES, _model, _tasks)
