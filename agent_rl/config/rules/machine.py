"""Rules about this machine: the programs and the policy that are on it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from agent_rl.config.rules.fault import Fault, Rule
from agent_rl.config.schema import RunConfig
from agent_rl.errors import ConfigError, EngineSetupError
from agent_rl.model.config_json import read_served_model, read_shape
from agent_rl.model.policies import policy_folder


def _sandbox_program(config: RunConfig) -> Iterator[Fault]:
    """Look for the program; that it works is probed before the run."""
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
    """Look for the environment of servers that the run starts; others are somebody else's."""
    if config.engine.kind == "local" or config.engine.urls:
        return
    from agent_rl.engines.http.server_process import engine_python

    try:
        engine_python(config.engine.kind)
    except EngineSetupError as error:
        for problem in error.problems:
            yield (
                "engine.kind",
                f"{problem}, or name running servers in engine.urls, or set engine.kind=local",
            )


def _divides(config: RunConfig) -> Iterator[Fault]:
    """Compare parallel sizes with the sizes of the policy."""
    try:
        shape = read_shape(policy_folder(config.policy.path))
    except ConfigError:
        return  # another rule says so, or the policy is not for training
    experts, tensor, stages = (
        ("trainer.expert_parallel", config.trainer.expert_parallel),
        ("trainer.tensor_parallel", config.trainer.tensor_parallel),
        ("trainer.pipeline_parallel", config.trainer.pipeline_parallel),
    )
    latent = shape.latent
    # Megatron cuts the down projections of latent attention before ours take their place.
    down = latent.kv_rank + latent.rope_dim if latent else 0
    for (key, size), what, total in (
        (experts, "number of experts", shape.num_experts),
        (tensor, "num_attention_heads", shape.num_heads),
        (tensor, "num_key_value_heads", shape.num_kv_heads),
        (tensor, "vocab_size", shape.vocab_size),
        (tensor, "q_lora_rank", latent.q_rank or 0 if latent else 0),
        (tensor, "kv_lora_rank + qk_rope_head_dim", down),
        (stages, "num_hidden_layers", shape.num_layers),
    ):
        if size > 0 and total % size:
            yield key, f"got {size}, expected a divisor of the policy's {what} ({total})"
    chunks = stages[1] * config.trainer.virtual_pipeline
    if config.trainer.virtual_pipeline > 1 and chunks > 0 and shape.num_layers % chunks:
        yield (
            "trainer.virtual_pipeline",
            f"got {config.trainer.virtual_pipeline}, expected a number that, times "
            f"trainer.pipeline_parallel ({stages[1]}), divides num_hidden_layers "
            f"({shape.num_layers})",
        )


def policy_faults(error: ConfigError) -> Iterator[Fault]:
    """Name the key that names the model which cannot be used."""
    for problem in error.problems:
        yield "policy.path", problem.removeprefix("policy.path: ")


def _policy(config: RunConfig) -> Iterator[Fault]:
    """Look for the policy's files and for its router."""
    try:
        read_served_model(policy_folder(config.policy.path))
    except ConfigError as error:
        yield from policy_faults(error)


MACHINE_RULES: tuple[Rule, ...] = (
    _sandbox_program,
    _ray_program,
    _engine_environment,
    _divides,
    _policy,
)
