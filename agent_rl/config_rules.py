"""Cross-field rules of a configuration: what must hold between keys before anything starts."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec

from agent_rl.algorithms import correction_bounds
from agent_rl.config import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.policies import policy_folder
from agent_rl.task_rules import TASK_RULES
from agent_rl.trainer.workers.world import fewest_processes, num_processes

Fault = tuple[str, str]  # key, what is wrong


def check_rules(config: RunConfig) -> list[Fault]:
    """Every broken rule; empty when the configuration can be used on this machine."""
    return [fault for rule in (*RULES, *MACHINE_RULES) for fault in rule(config)]


def check_rules_anywhere(config: RunConfig) -> list[Fault]:
    """Every broken rule that would be broken on any machine."""
    return [fault for rule in RULES for fault in rule(config)]


def _positive(config: RunConfig) -> Iterator[Fault]:
    positive = {
        "tasks.num_train": config.tasks.num_train,
        "tasks.num_heldout": config.tasks.num_heldout,
        "sandbox.num_workers": config.sandbox.num_workers,
        "sandbox.timeout_s": config.sandbox.timeout_s,
        "sandbox.memory_bytes": config.sandbox.memory_bytes,
        "sandbox.max_processes": config.sandbox.max_processes,
        "sandbox.max_file_bytes": config.sandbox.max_file_bytes,
        "sandbox.cpu_s": config.sandbox.cpu_s,
        "sandbox.output_cap_bytes": config.sandbox.output_cap_bytes,
        "agent.max_turns": config.agent.max_turns,
        "agent.max_new_tokens": config.agent.max_new_tokens,
        "agent.max_observation_tokens": config.agent.max_observation_tokens,
        "agent.max_malformed": config.agent.max_malformed,
        "engine.max_sessions": config.engine.max_sessions,
        "engine.num_threads": config.engine.num_threads,
        "engine.num_servers": config.engine.num_servers,
        "engine.tensor_parallel": config.engine.tensor_parallel,
        "engine.start_timeout_s": config.engine.start_timeout_s,
        "routing.budget_bytes": config.routing.budget_bytes,
        "algorithm.groups_per_step": config.algorithm.groups_per_step,
        "algorithm.num_mini_steps": config.algorithm.num_mini_steps,
        "rollout.concurrency": config.rollout.concurrency,
        "optim.lr": config.optim.lr,
        "optim.clip_grad": config.optim.clip_grad,
        "trainer.micro_batch_tokens": config.trainer.micro_batch_tokens,
        "trainer.tensor_parallel": config.trainer.tensor_parallel,
        "trainer.pipeline_parallel": config.trainer.pipeline_parallel,
        "trainer.context_parallel": config.trainer.context_parallel,
        "trainer.expert_parallel": config.trainer.expert_parallel,
        "trainer.virtual_pipeline": config.trainer.virtual_pipeline,
        "trainer.num_threads": config.trainer.num_threads,
        "trainer.worker_timeout_s": config.trainer.worker_timeout_s,
        "train.steps": config.train.steps,
        "train.save_every": config.train.save_every,
        "train.keep_last": config.train.keep_last,
        "train.mismatch_samples": config.train.mismatch_samples,
        "eval.num_tasks": config.eval.num_tasks,
        "eval.samples_per_task": config.eval.samples_per_task,
    }
    for key, value in positive.items():
        if value <= 0:
            yield key, f"got {value}, expected a number above 0"
    not_negative = {
        "train.max_wall_s": config.train.max_wall_s,
        "train.eval_every": config.train.eval_every,
        "train.mismatch_every": config.train.mismatch_every,
        "algorithm.kl_weight": config.algorithm.kl_weight,
        "algorithm.entropy_weight": config.algorithm.entropy_weight,
        "algorithm.router_consistency_weight": config.algorithm.router_consistency_weight,
        "rollout.max_retries": config.rollout.max_retries,
        "rollout.retry_wait_s": config.rollout.retry_wait_s,
        "rollout.retry_wait_max_s": config.rollout.retry_wait_max_s,
        "optim.min_lr": config.optim.min_lr,
        "optim.weight_decay": config.optim.weight_decay,
        "optim.warmup_steps": config.optim.warmup_steps,
        "routing.max_staleness": config.routing.max_staleness,
        "trainer.num_processes": config.trainer.num_processes,
        "sampling.top_k": config.sampling.top_k,
        "eval.temperature": config.eval.temperature,
        "seed": config.seed,
    }
    for key, value in not_negative.items():
        if value < 0:
            yield key, f"got {value}, expected 0 or more"


def _fractions(config: RunConfig) -> Iterator[Fault]:
    fractions = {
        "routing.max_missing_fraction": config.routing.max_missing_fraction,
        "rollout.max_failure_fraction": config.rollout.max_failure_fraction,
        "optim.beta1": config.optim.beta1,
        "optim.beta2": config.optim.beta2,
    }
    for key, value in fractions.items():
        if not 0 <= value <= 1:
            yield key, f"got {value}, expected a number from 0 to 1"


def _replay(config: RunConfig) -> Iterator[Fault]:
    mode = config.routing.replay
    if mode in ("r3", "mixed") and not config.engine.capture_routing:
        yield (
            "engine.capture_routing",
            f"got false, expected true because routing.replay={mode} replays what the engine "
            "captures; capture it or set routing.replay=off",
        )
    weight = config.algorithm.router_consistency_weight
    if weight > 0 and mode not in ("r3", "mixed"):
        yield (
            "algorithm.router_consistency_weight",
            f"got {weight}, expected 0 because routing.replay={mode} hands the trainer no recorded "
            "routing to be consistent with; set routing.replay=r3 or mixed",
        )


def _objective(config: RunConfig) -> Iterator[Fault]:
    """Keys of the loss: in range, and none that the chosen loss would ignore."""
    algorithm = config.algorithm
    ranges = (
        ("clip_low", algorithm.clip_low, 0.0, 1.0),
        ("clip_high", algorithm.clip_high, 0.0, None),
        ("overlong_fraction", algorithm.overlong_fraction, 0.0, 1.0),
        ("dynamic_sampling_rounds", algorithm.dynamic_sampling_rounds, 0.0, None),
    )
    for name, value, low, high in ranges:
        if value is not None and (value < low or (high is not None and value > high)):
            expected = f"{low:g} or more" if high is None else f"a number from {low:g} to {high:g}"
            yield f"algorithm.{name}", f"got {value}, expected {expected}"
    if algorithm.loss == "sft":
        for name, value in (("clip_low", algorithm.clip_low), ("clip_high", algorithm.clip_high)):
            if value is not None:
                yield f"algorithm.{name}", f"got {value}, expected null: loss=sft has no ratio"
        if algorithm.correction != "none":
            yield (
                "algorithm.correction",
                f"got {algorithm.correction}, expected none: loss=sft scores no old policy",
            )


def _correction(config: RunConfig) -> Iterator[Fault]:
    algorithm = config.algorithm
    given = {"low": algorithm.correction_low, "high": algorithm.correction_high}
    if algorithm.correction == "none":
        for name, value in given.items():
            if value is not None:
                yield (
                    f"algorithm.correction_{name}",
                    f"got {value}, expected null because algorithm.correction=none",
                )
        return
    if algorithm.correction == "tis" and algorithm.correction_low is not None:
        yield (
            "algorithm.correction_low",
            f"got {algorithm.correction_low}, expected null: tis truncates from above only",
        )
    low, high = correction_bounds(algorithm)
    if not 0 <= low < high:
        yield (
            "algorithm.correction_high",
            f"got {high}, expected a number above algorithm.correction_low ({low}), which is 0 or "
            "more",
        )


def _sampling(config: RunConfig) -> Iterator[Fault]:
    if config.sampling.temperature <= 0:
        yield (
            "sampling.temperature",
            (f"got {config.sampling.temperature}, expected above 0: greedy groups have no signal"),
        )
    if config.sampling.top_p != 1.0:
        yield (
            "sampling.top_p",
            (
                f"got {config.sampling.top_p}, expected 1.0: the trainer scores the full "
                "distribution, a cut one would bias every importance ratio"
            ),
        )
    if config.sampling.top_k != 0:
        yield (
            "sampling.top_k",
            (
                f"got {config.sampling.top_k}, expected 0 (off): the trainer scores the full "
                "distribution, a cut one would bias every importance ratio"
            ),
        )


def _groups(config: RunConfig) -> Iterator[Fault]:
    group_size = config.algorithm.group_size
    if group_size < 2:
        yield (
            "algorithm.group_size",
            (f"got {group_size}, expected 2 or more: a group of one has no baseline"),
        )
    if not 2 <= config.rollout.min_valid_members <= max(2, group_size):
        yield (
            "rollout.min_valid_members",
            (
                f"got {config.rollout.min_valid_members}, "
                f"expected 2 to algorithm.group_size ({group_size})"
            ),
        )
    if config.algorithm.groups_per_step > config.tasks.num_train:
        yield (
            "algorithm.groups_per_step",
            (
                f"got {config.algorithm.groups_per_step}, "
                f"expected at most tasks.num_train ({config.tasks.num_train})"
            ),
        )
    if config.eval.num_tasks > config.tasks.num_heldout:
        yield (
            "eval.num_tasks",
            (
                f"got {config.eval.num_tasks}, "
                f"expected at most tasks.num_heldout ({config.tasks.num_heldout})"
            ),
        )


def _lengths(config: RunConfig) -> Iterator[Fault]:
    agent = config.agent
    if agent.max_new_tokens >= agent.max_tokens:
        yield (
            "agent.max_new_tokens",
            (f"got {agent.max_new_tokens}, expected below agent.max_tokens ({agent.max_tokens})"),
        )
    if config.trainer.micro_batch_tokens < agent.max_tokens:
        yield (
            "trainer.micro_batch_tokens",
            (
                f"got {config.trainer.micro_batch_tokens}, expected at least agent.max_tokens "
                f"({agent.max_tokens}): the longest trajectory must fit one micro-batch"
            ),
        )
    if config.engine.max_sessions < 1 or config.rollout.concurrency > config.engine.max_sessions:
        yield (
            "rollout.concurrency",
            (
                f"got {config.rollout.concurrency}, "
                f"expected at most engine.max_sessions ({config.engine.max_sessions})"
            ),
        )


def _servers(config: RunConfig) -> Iterator[Fault]:
    engine = config.engine
    if engine.kind == "vllm" and engine.weight_transfer != "disk":
        yield (
            "engine.weight_transfer",
            f"got {engine.weight_transfer}, expected disk: vLLM loads weights from folders only",
        )
    if engine.kind != "local" and engine.dtype.endswith("_simulated"):
        yield (
            "engine.dtype",
            f"got {engine.dtype}, expected float32 or bfloat16: only the local engine simulates "
            "low precision; give a server a quantised checkpoint instead",
        )
    if engine.kind == "local" and engine.urls:
        yield "engine.urls", f"got {len(engine.urls)} urls, expected none for engine.kind=local"
    for url in engine.urls:
        if not url.startswith(("http://", "https://")):
            yield "engine.urls", f"got {url!r}, expected http://HOST:PORT"


def _optim(config: RunConfig) -> Iterator[Fault]:
    if config.optim.min_lr > config.optim.lr:
        yield (
            "optim.min_lr",
            (f"got {config.optim.min_lr}, expected at most optim.lr ({config.optim.lr})"),
        )


def _parallel(config: RunConfig) -> Iterator[Fault]:
    trainer = config.trainer
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        yield (
            "trainer.sequence_parallel",
            ("got true, expected false when trainer.tensor_parallel is 1"),
        )
    if trainer.tensor_parallel > 1 and not trainer.sequence_parallel:
        yield (
            "trainer.sequence_parallel",
            "got false, expected true when trainer.tensor_parallel is above 1: "
            "Megatron trains no MoE layer without it",
        )
    if trainer.virtual_pipeline > 1 and trainer.pipeline_parallel == 1:
        yield (
            "trainer.virtual_pipeline",
            f"got {trainer.virtual_pipeline}, expected 1 when trainer.pipeline_parallel is 1: "
            "there is no pipeline whose chunks could be interleaved",
        )


def _workers(config: RunConfig) -> Iterator[Fault]:
    trainer = config.trainer
    sizes = (
        trainer.tensor_parallel,
        trainer.pipeline_parallel,
        trainer.context_parallel,
        trainer.expert_parallel,
    )
    if min(sizes) <= 0 or trainer.num_processes < 0:
        return  # reported by another rule
    fewest = fewest_processes(trainer)
    if trainer.num_processes % fewest:
        yield (
            "trainer.num_processes",
            f"got {trainer.num_processes}, expected a multiple of {fewest}, which the parallel "
            "sizes need (0 takes the fewest)",
        )
    if trainer.launcher == "inline" and num_processes(trainer) > 1:
        yield (
            "trainer.launcher",
            f"got inline for {num_processes(trainer)} processes, expected local or ray: the "
            "driver is one process",
        )
    if not re.fullmatch(r"local|auto|[^\s:/]+:\d+", trainer.ray_address):
        yield (
            "trainer.ray_address",
            f"got {trainer.ray_address!r}, expected local, auto or HOST:PORT",
        )
    if trainer.ray_address != "local" and trainer.launcher != "ray":
        yield (
            "trainer.ray_address",
            f"got {trainer.ray_address!r}, which only trainer.launcher=ray reads: expected local",
        )


def _sandbox(config: RunConfig) -> Iterator[Fault]:
    if config.sandbox.kind == "process" and not config.sandbox.allow_unsafe:
        yield (
            "sandbox.kind",
            (
                "got process, which isolates nothing: expected bubblewrap, unshare or auto, "
                "or sandbox.allow_unsafe=true to accept that the policy's code runs as you"
            ),
        )


def _ray_program(config: RunConfig) -> Iterator[Fault]:
    if config.trainer.launcher == "ray" and find_spec("ray") is None:
        yield (
            "trainer.launcher",
            "got ray, which is not installed: expected the cluster extra; install it with "
            "pip install 'agent-rl[cluster]', or set trainer.launcher=local",
        )


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


def _divides(config: RunConfig) -> Iterator[Fault]:
    """Parallel sizes against the policy's own."""
    try:
        text = (policy_folder(config.policy.path) / "config.json").read_text()
    except (ConfigError, OSError):
        return  # reported by another rule
    model = json.loads(text)
    names = ("num_experts", "n_routed_experts", "num_local_experts")
    experts = next((name for name in names if name in model), names[0])
    for key, size, what in (
        ("trainer.expert_parallel", config.trainer.expert_parallel, experts),
        ("trainer.tensor_parallel", config.trainer.tensor_parallel, "num_attention_heads"),
        ("trainer.tensor_parallel", config.trainer.tensor_parallel, "num_key_value_heads"),
        ("trainer.tensor_parallel", config.trainer.tensor_parallel, "vocab_size"),
        ("trainer.pipeline_parallel", config.trainer.pipeline_parallel, "num_hidden_layers"),
    ):
        total = model.get(what)
        if isinstance(total, int) and size > 0 and total % size:
            yield key, f"got {size}, expected a divisor of the policy's {what} ({total})"
    layers, stages = model.get("num_hidden_layers"), config.trainer.pipeline_parallel
    chunks = stages * config.trainer.virtual_pipeline
    if config.trainer.virtual_pipeline > 1 and isinstance(layers, int) and layers % chunks:
        yield (
            "trainer.virtual_pipeline",
            f"got {config.trainer.virtual_pipeline}, expected a number that, times "
            f"trainer.pipeline_parallel ({stages}), divides num_hidden_layers ({layers})",
        )


def _name(config: RunConfig) -> Iterator[Fault]:
    if not config.name or "/" in config.name or config.name in (".", ".."):
        yield "name", f"got {config.name!r}, expected a plain folder name"


def _policy(config: RunConfig) -> Iterator[Fault]:
    try:
        policy_folder(config.policy.path)
    except ConfigError as error:
        for problem in error.problems:
            yield "policy.path", problem.removeprefix("policy.path: ")


RULES: tuple[Callable[[RunConfig], Iterator[Fault]], ...] = (
    _positive,
    _fractions,
    _replay,
    _objective,
    _correction,
    _sampling,
    _groups,
    _lengths,
    _servers,
    _optim,
    _parallel,
    _workers,
    _sandbox,
    _name,
    *TASK_RULES,
)
# These look at this machine: what is installed, and where the policy lies.
MACHINE_RULES: tuple[Callable[[RunConfig], Iterator[Fault]], ...] = (
    _sandbox_program,
    _ray_program,
    _divides,
    _policy,
)
