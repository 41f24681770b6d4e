"""Rules about this machine: what is installed, and where the policy lies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from agent_rl.config.rules.fault import Fault, Rule
from agent_rl.config.schema import RunConfig
from agent_rl.errors import ConfigError, EngineSetupError
from agent_rl.model.policies import policy_folder


def _sandbox_program(config: RunConfig) -> Iterator[Fault]:
    """Cheap part of the check; whether the program really works is probed before the run."""
    programs = {"bubblewrap": "bwrap", "unshare": "unshare"}
    kind = config.sandbox.kind
    wanted = list(programs) if kind == "auto" else [kind] if kind in programs else []
    if wanted and not any(shutil.which(programs[name]) for name in wanted):
        names = " or ".join(programs[name] for name in wanted)
        yield (
            "sandbox.kind",
            f"got {kind}, expected {names} on the PATH; install it (apt-get install bubblewrap)",
        )


def _ray_program(config: RunConfig) -> Iterator[Fault]:
    if config.trainer.launcher == "ray" and find_spec("ray") is None:
        yield (
            "trainer.launcher",
            "got ray, which is not installed; install it with .venv/bin/pip install -r "
            "requirements-cluster.lock, or set trainer.launcher=local",
        )


def _engine_environment(config: RunConfig) -> Iterator[Fault]:
    """Servers that a run starts itself; those of ``engine.urls`` are somebody else's."""
    if config.engine.kind == "local" or config.engine.urls:
        return
    from agent_rl.engines.http.process import engine_python

    try:
        engine_python(config.engine.kind)
    except EngineSetupError as error:
        for problem in error.problems:
            yield (
                "engine.kind",
                f"{problem}, or name running servers in engine.urls, or set engine.kind=local",
            )


def _divides(config: RunConfig) -> Iterator[Fault]:
    """Parallel sizes against the policy's own."""
    try:
        text = (policy_folder(config.policy.path) / "config.json").read_text()
    except (ConfigError, OSError):
        return  # reported by another rule
    try:
        model = json.loads(text)
    except ValueError as error:
        yield "policy.path", f"got {config.policy.path!r}, whose config.json is not JSON: {error}"
        return
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((name for name in names if name in model), names[0])
    tensor_parallel = config.trainer.tensor_parallel
    for key, size, what in (
        ("trainer.expert_parallel", config.trainer.expert_parallel, experts),
        ("trainer.tensor_parallel", tensor_parallel, "num_attention_heads"),
        ("trainer.tensor_parallel", tensor_parallel, "num_key_value_heads"),
        ("trainer.tensor_parallel", tensor_parallel, "vocab_size"),
        # Latent attention: Megatron cuts its down projections before ours take their place.
        ("trainer.tensor_parallel", tensor_parallel, "q_lora_rank"),
        ("trainer.tensor_parallel", tensor_parallel, "kv_lora_rank + qk_rope_head_dim"),
        ("trainer.pipeline_parallel", config.trainer.pipeline_parallel, "num_hidden_layers"),
    ):
        parts = [model.get(name) for name in what.split(" + ")]
        if size <= 0 or not all(isinstance(part, int) for part in parts):
            continue
        if (total := sum(parts)) % size:
            yield key, f"got {size}, expected a divisor of the policy's {what} ({total})"
    layers, stages = model.get("num_hidden_layers"), config.trainer.pipeline_parallel
    chunks = stages * config.trainer.virtual_pipeline
    if config.trainer.virtual_pipeline > 1 and isinstance(layers, int) and layers % chunks:
        yield (
            "trainer.virtual_pipeline",
            f"got {config.trainer.virtual_pipeline}, expected a number that, times "
            f"trainer.pipeline_parallel ({stages}), divides num_hidden_layers ({layers})",
        )


def _policy(config: RunConfig) -> Iterator[Fault]:
    try:
        policy_folder(config.policy.path)
    except ConfigError as error:
        for problem in error.problems:
            yield "policy.path", problem.removeprefix("policy.path: ")


MACHINE_RULES: tuple[Rule, ...] = (
    _sandbox_program,
    _ray_program,
    _engine_environment,
    _divides,
    _policy,
)
