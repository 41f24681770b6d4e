"""The configuration of an evaluation: every key with its type, range, default and meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from agent_rl.config.declaring import key, section
from agent_rl.config.reading import read_config
from agent_rl.config.rules.fault import Fault, untouched
from envs.actions import load_prompts
from envs.errors import TaskError

# When some keys are read.
_OPENAI = "model.kind=openai"
_SCRIPTED = "model.kind=scripted"
_ENGINE = "model.kind=engine"
_SAMPLED = "model.kind=openai and engine"
_NOT_READ = {
    "openai": (_SCRIPTED, _ENGINE),
    "scripted": (_OPENAI, _ENGINE, _SAMPLED),
    "engine": (_OPENAI, _SCRIPTED),
}


@section
class DatasetConfig:
    """The instances to solve."""

    source: str = key("verified", "a file, a folder, or verified, lite or full")
    split: str = key("test", "which split of a data set")
    instance_ids: tuple[str, ...] = key((), "instances to solve; empty is all")
    max_instances: NonNegativeInt = key(0, "solve the first so many; 0 is all")


@section
class ModelConfig:
    """The model that answers.

    ``openai``: any OpenAI-compatible endpoint. ``scripted``: fixed replies from a JSON file.
    ``engine``: one of our engines, as the training configuration ``engine`` names it.
    """

    kind: Literal["openai", "scripted", "engine"] = key("openai", "who answers, see above")
    name: str = key("", "as the endpoint calls it; also the name in the predictions")
    base_url: str = key("http://localhost:8000/v1", "the endpoint", only_for=_OPENAI)
    api_key_env: str = key(
        "OPENAI_API_KEY", "environment variable that holds the key", only_for=_OPENAI
    )
    temperature: NonNegativeFloat = key(0.0, "0 takes the likeliest token", only_for=_SAMPLED)
    top_p: PositiveFloat = key(1.0, "1 is off", le=1, only_for=_OPENAI)
    max_new_tokens: PositiveInt = key(8192, "tokens of one reply", le=1 << 24, only_for=_SAMPLED)
    timeout_s: PositiveFloat = key(900.0, "time for one reply", only_for=_OPENAI)
    max_retries: NonNegativeInt = key(8, "further tries of one reply", le=1000, only_for=_OPENAI)
    keep_thinking: bool = key(False, "send <think> blocks of earlier turns again", only_for=_OPENAI)
    script: str = key("", "a JSON file of replies", only_for=_SCRIPTED)
    engine: str = key("", "a training configuration, for its engine and policy", only_for=_ENGINE)


@section
class AgentLoopConfig:
    """The agent's way of working and the limits that stop it."""

    prompts: str = key("swe", "a name that ships with envs.actions, or a file")
    action_format: Literal["r2e_xml", "hermes_json", "bash_block"] = key(
        "r2e_xml", "how an action is written"
    )
    tools: Literal["r2e", "shell"] = key("r2e", "the tools of the agent; bash_block needs shell")
    max_turns: PositiveInt = key(100, "turns of one episode", le=10_000)
    max_completion_tokens: PositiveInt = key(200_000, "tokens sampled in one episode")
    max_seconds: PositiveFloat = key(3600.0, "wall clock of one episode")
    max_malformed: PositiveInt = key(5, "turns in a row without a usable call", le=10_000)
    patch_at_limit: bool = key(True, "hand in what an episode has that a limit ends")


@section
class ContainerConfig:
    """The container in which an agent works."""

    memory_bytes: PositiveInt = key(4 << 30, "memory of one container")
    cpus: PositiveFloat = key(2.0, "CPUs of one container")
    max_processes: PositiveInt = key(512, "processes of one container")
    disk_bytes: PositiveInt = key(8 << 30, "what one container may write")
    command_timeout_s: PositiveFloat = key(90.0, "wall clock of one command of the agent")
    max_observation_chars: PositiveInt = key(16_000, "longest reply of a command", le=100_000_000)
    allow_emulation: bool = key(
        False, "run images of another architecture: slow, and time-outs follow"
    )


@section
class GradingConfig:
    """The official harness."""

    python: str = key("", "an interpreter that has swebench; empty is this one")
    num_workers: PositiveInt = key(4, "instances graded at a time", le=1024)
    timeout_s: PositiveInt = key(1800, "wall clock of one instance's tests")
    redo_timeouts: bool = key(False, "grade again what timed out, on resume")


@section
class SuiteConfig:
    """A whole evaluation run.

    Example:
        >>> SuiteConfig(name="mini", samples=1).dataset.source
        'verified'
    """

    name: str = key(
        "swebench",
        "the run's folder is run_root/name",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        expected="letters, digits, '_', '.' and '-'",
    )
    run_root: str = key("runs/eval", "where run folders go")
    samples: PositiveInt = key(
        1, "tries for each instance; pass@k is reported up to this k", le=16_384
    )
    num_workers: PositiveInt = key(4, "episodes at a time", le=4096)
    max_consecutive_failures: PositiveInt = key(
        10, "infrastructure failures in a row that stop the run"
    )
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    agent: AgentLoopConfig = field(default_factory=AgentLoopConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> SuiteConfig:
    """Read a suite's YAML. Raises ConfigError with every fault found."""
    return read_config(SuiteConfig, path, overrides, rules=check_suite)


def check_suite(config: SuiteConfig) -> Iterator[Fault]:
    """Yield faults between keys, before anything is started."""
    model, agent = config.model, config.agent
    needed = {"openai": "name", "scripted": "script", "engine": "engine"}[model.kind]
    if not getattr(model, needed):
        yield f"model.{needed}", f"got nothing, expected a value for model.kind={model.kind}"
    for name in ("script", "engine"):
        value = getattr(model, name)
        if model.kind.startswith(name) and value and not Path(value).is_file():
            yield f"model.{name}", f"no such file: got {value!r}"
    for where in _NOT_READ[model.kind]:
        yield from untouched("model", model, where)
    if agent.action_format == "bash_block" and agent.tools != "shell":
        yield "agent.tools", f"got {agent.tools!r}, expected shell with bash_block actions"
    try:
        load_prompts(agent.prompts)
    except TaskError as error:
        yield "agent.prompts", str(error)
