"""The configuration of an evaluation: frozen dataclasses with their defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agent_rl.config.reading import read_config
from envs.actions import FORMATS, TOOL_SETS, load_prompts
from envs.errors import TaskError

Fault = tuple[str, str]


@dataclass(frozen=True)
class DatasetConfig:
    """Which instances. ``source`` is a file, a folder, or ``verified``, ``lite``, ``full``."""

    source: str = "verified"
    split: str = "test"
    instance_ids: tuple[str, ...] = ()  # empty is all
    max_instances: int = 0  # the first so many; 0 is all


@dataclass(frozen=True)
class ModelConfig:
    """Who answers. ``openai``: any OpenAI-compatible endpoint. ``scripted``: fixed replies from a
    JSON file. ``engine``: one of our engines, as the training configuration ``engine`` names it."""

    kind: Literal["openai", "scripted", "engine"] = "openai"
    name: str = ""  # as the endpoint calls it; also the name in the predictions
    base_url: str = "http://localhost:8000/v1"
    api_key_env: str = "OPENAI_API_KEY"  # the environment variable that holds the key
    temperature: float = 0.0
    top_p: float = 1.0
    max_new_tokens: int = 8192  # of one reply
    timeout_s: float = 900.0
    max_retries: int = 8
    keep_thinking: bool = False  # whether <think> blocks of earlier turns are sent again
    script: str = ""
    engine: str = ""


# Which of them a kind reads; what nobody reads must have its default.
_READ = {
    "openai": frozenset(
        (
            *("kind", "name", "base_url", "api_key_env", "temperature", "top_p"),
            *("max_new_tokens", "timeout_s", "max_retries", "keep_thinking"),
        )
    ),
    "scripted": frozenset(("kind", "name", "script")),
    "engine": frozenset(("kind", "name", "temperature", "max_new_tokens", "engine")),
}


@dataclass(frozen=True)
class AgentLoopConfig:
    """How the agent works and when it is stopped."""

    prompts: str = "swe"  # a name that ships, or a file
    action_format: str = "r2e_xml"
    tools: str = "r2e"
    max_turns: int = 100
    max_completion_tokens: int = 200_000  # over the whole episode
    max_seconds: float = 3600.0
    max_malformed: int = 5  # turns in a row without a usable call
    patch_at_limit: bool = True  # an episode that a limit ends hands in what it has


@dataclass(frozen=True)
class ContainerConfig:
    """The container in which an agent works."""

    memory_bytes: int = 4 << 30
    cpus: float = 2.0
    max_processes: int = 512
    disk_bytes: int = 8 << 30
    command_timeout_s: float = 90.0
    max_observation_chars: int = 16_000
    allow_emulation: bool = False  # images of another architecture: slow, and time-outs follow


@dataclass(frozen=True)
class GradingConfig:
    """The official harness."""

    python: str = ""  # an interpreter that has swebench; empty is this one
    num_workers: int = 4
    timeout_s: int = 1800  # of one instance's tests
    redo_timeouts: bool = False  # on resume


@dataclass(frozen=True)
class SuiteConfig:
    """A whole evaluation run.

    Example:
        >>> SuiteConfig(name="mini", samples=1).dataset.source
        'verified'
    """

    name: str = "swebench"
    run_root: str = "runs/eval"
    samples: int = 1  # tries for each instance; pass@k is reported up to this k
    num_workers: int = 4  # episodes at a time
    max_consecutive_failures: int = 10  # infrastructure failures in a row that stop the run
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    agent: AgentLoopConfig = field(default_factory=AgentLoopConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> SuiteConfig:
    """Read a suite's YAML. Raises ConfigError with every fault found."""
    return read_config(SuiteConfig, path, overrides, rules=check_suite)


def check_suite(config: SuiteConfig) -> Iterator[Fault]:
    """Faults between keys, before anything is started."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", config.name):
        yield "name", f"got {config.name!r}, expected letters, digits, '_', '.' and '-'"
    yield from _positive(config)
    model, agent = config.model, config.agent
    needed = {"openai": "name", "scripted": "script", "engine": "engine"}[model.kind]
    if not getattr(model, needed):
        yield f"model.{needed}", f"got nothing, expected a value for model.kind={model.kind}"
    for key in ("script", "engine"):
        value = getattr(model, key)
        if model.kind.startswith(key) and value and not Path(value).is_file():
            yield f"model.{key}", f"no such file: got {value!r}"
    for key, value in vars(model).items():
        default = getattr(ModelConfig(), key)
        if key not in _READ[model.kind] and value != default:
            readers = " and ".join(kind for kind, keys in _READ.items() if key in keys)
            yield (
                f"model.{key}",
                f"got {value!r}, expected {default!r}: only read for model.kind={readers}",
            )
    if not 0 < model.top_p <= 1 or model.temperature < 0:
        yield "model.top_p", f"got {model.top_p} at temperature {model.temperature}"
    if agent.action_format not in FORMATS:
        yield "agent.action_format", f"got {agent.action_format!r}, expected one of {list(FORMATS)}"
    if agent.tools not in TOOL_SETS:
        yield "agent.tools", f"got {agent.tools!r}, expected one of {list(TOOL_SETS)}"
    if agent.action_format == "bash_block" and agent.tools != "shell":
        yield "agent.tools", f"got {agent.tools!r}, expected shell with bash_block actions"
    try:
        load_prompts(agent.prompts)
    except TaskError as error:
        yield "agent.prompts", str(error)


def _positive(config: SuiteConfig) -> Iterator[Fault]:
    sections = {"": config, "model.": config.model, "agent.": config.agent}
    sections |= {"container.": config.container, "grading.": config.grading}
    may_be_zero = {"model.temperature", "model.max_retries"}
    for prefix, section in sections.items():
        for key, value in vars(section).items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and (value < 0 or (value == 0 and prefix + key not in may_be_zero)):
                yield prefix + key, f"got {value}, expected more than 0"
    if config.dataset.max_instances < 0:
        yield "dataset.max_instances", f"got {config.dataset.max_instances}, expected 0 or more"
