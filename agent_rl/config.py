"""The configuration schema: frozen dataclasses with their defaults. ``config_io`` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class PolicyConfig:
    """Where the starting weights are: a Hugging Face folder, or ``builtin:tiny_moe``."""

    path: str = "builtin:tiny_moe"


@dataclass(frozen=True)
class TasksConfig:
    """What to solve. ``repair`` is generated from ``seed``; the held-out set is disjoint."""

    kind: Literal["repair"] = "repair"
    seed: int = 1
    num_train: int = 6000
    num_heldout: int = 384
    heldout_split: Literal["heldout", "confirm"] = "heldout"  # confirm: never used for tuning


@dataclass(frozen=True)
class SandboxConfig:
    """Where untrusted code runs. ``auto`` takes bubblewrap, then unshare; never a plain process."""

    kind: Literal["auto", "bubblewrap", "unshare", "process"] = "auto"
    allow_unsafe: bool = False
    num_workers: int = 4  # sandboxes running at one time
    timeout_s: float = 10.0
    memory_bytes: int = 256 << 20
    max_processes: int = 32
    max_file_bytes: int = 16 << 20
    cpu_s: int = 10
    output_cap_bytes: int = 64 << 10
    share_identical_runs: bool = True  # the same code under the same tests runs once a step


@dataclass(frozen=True)
class AgentConfig:
    """Limits of one trajectory and how it is rendered into tokens."""

    renderer: Literal["compact", "chat_template"] = "compact"
    max_turns: int = 6
    max_tokens: int = 224  # whole trajectory, prompt included
    max_new_tokens: int = 24  # one turn
    max_observation_tokens: int = 64
    max_malformed: int = 3  # malformed actions before the episode ends as truncated
    train_malformed: bool = True  # whether sampled tokens of malformed actions stay in the loss


@dataclass(frozen=True)
class EngineConfig:
    """The inference engine: embedded, or servers that are launched here or attached to."""

    kind: Literal["local", "sglang", "vllm"] = "local"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    capture_routing: bool = True
    max_sessions: int = 256  # KV slots, or requests running on one server
    num_threads: int = 1  # the other core runs the sandboxes
    # The rest is for sglang and vllm only.
    urls: tuple[str, ...] = ()  # servers to attach to; empty launches num_servers here
    num_servers: int = 1
    tensor_parallel: int = 1  # of one launched server
    device: Literal["cpu", "cuda"] = "cpu"
    weight_transfer: Literal["tensors", "disk"] = "tensors"  # vllm: disk
    verify_weights: bool = True  # recompute a prompt's log-probs here after each update
    start_timeout_s: float = 900.0
    extra_args: tuple[str, ...] = ()  # for the server's command line


@dataclass(frozen=True)
class SamplingConfig:
    """The sampling distribution. Top-p and top-k below full are refused for training."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 is off


@dataclass(frozen=True)
class RoutingConfig:
    """Capture, cache and replay of the router's choices."""

    replay: Literal["off", "r2", "r3"] = "r3"
    conflict_policy: Literal["first", "latest"] = "first"
    missing: Literal["strict", "lenient"] = "strict"
    max_missing_fraction: float = 0.05  # lenient: stop above this share of trained tokens
    budget_bytes: int = 1 << 30
    max_staleness: int = 0  # weight versions a row may be behind the trainer


@dataclass(frozen=True)
class AlgorithmConfig:
    """GRPO and its knobs."""

    loss: Literal["grpo", "sft"] = "grpo"
    advantage: Literal["grpo"] = "grpo"
    group_size: int = 8
    groups_per_step: int = 32
    num_mini_steps: int = 2
    clip_low: float = 0.2
    clip_high: float = 0.28
    normalize_std: bool = True
    loss_reduction: Literal["token", "sequence"] = "token"


@dataclass(frozen=True)
class RolloutConfig:
    """What to do when group members fail."""

    max_retries: int = 2
    min_valid_members: int = 2
    max_failure_fraction: float = 0.25  # of a step's trajectories; above it the run stops
    concurrency: int = 256


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and the learning-rate schedule."""

    lr: float = 7e-4
    min_lr: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True)
class TrainerConfig:
    """Megatron-core: precision, layout and micro-batching."""

    kind: Literal["megatron"] = "megatron"
    dtype: Literal["float32", "bfloat16"] = "float32"
    micro_batch_tokens: int = 4096  # padded tokens of one forward
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    context_parallel: int = 1
    expert_parallel: int = 1
    sequence_parallel: bool = False  # on with tensor_parallel: MoE layers do not train without it
    virtual_pipeline: int = 1  # model chunks a pipeline stage; above 1 interleaves their schedule
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"  # how tokens reach experts
    packed: bool = False  # sequences one behind the other (thd) in place of padded side by side
    distributed_optimizer: bool = False  # optimizer state split over the data-parallel ranks
    recompute: Literal["none", "selective", "full"] = "none"
    num_threads: int = 1  # on CPU; more pay off only for larger models on an idle machine


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run and what it leaves behind."""

    steps: int = 100
    max_wall_s: float = 0.0  # 0 is no limit
    save_every: int = 10
    keep_last: int = 2
    eval_every: int = 0  # 0: only before and after
    mismatch_every: int = 10  # steps between measurements with and without replay


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out tasks."""

    num_tasks: int = 384
    samples_per_task: int = 1
    temperature: float = 1.0


@dataclass(frozen=True)
class RunConfig:
    """Everything a run needs.

    Example:
        >>> RunConfig(name="short", train=TrainConfig(steps=50)).train.steps
        50
    """

    name: str = "run"
    seed: int = 0
    run_root: str = "runs"
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    tasks: TasksConfig = field(default_factory=TasksConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
