"""Numbers in their ranges, one key at a time."""

from __future__ import annotations

from collections.abc import Iterator

from agent_rl.config.rules.fault import Fault, Rule
from agent_rl.config.schema import RunConfig


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


def _name(config: RunConfig) -> Iterator[Fault]:
    if not config.name or "/" in config.name or config.name in (".", ".."):
        yield "name", f"got {config.name!r}, expected a plain folder name"


RANGES_RULES: tuple[Rule, ...] = (
    _positive,
    _fractions,
    _name,
)
