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
    """What to solve; the held-out set is disjoint.

    ``repair`` is generated from ``seed``. ``r2e_gym`` and ``swebench`` are rows, each with a
    container image; a hash of a task's id says on which side it is, ``seed`` which ones are taken
    when there are more than wanted.
    """

    kind: Literal["repair", "r2e_gym", "swebench"] = "repair"
    seed: int = 1
    num_train: int = 6000  # of rows: at most so many
    num_heldout: int = 384  # likewise
    heldout_split: Literal["heldout", "confirm"] = "heldout"  # confirm: never used for tuning
    bugs: Literal["token", "syntax"] = "token"  # of repair: one token of a line, or of any kind
    # The rest is for rows only.
    rows: str = ""  # a .json, .jsonl or .parquet file, or the name of a Hugging Face data set
    rows_split: str = "train"  # of a data set
    heldout_fraction: float = 0.1  # of all rows; as many again are kept for ``confirm``


@dataclass(frozen=True)
class SandboxConfig:
    """Where untrusted code runs. ``auto`` takes bubblewrap, then unshare; never a plain process.

    Tasks with images need ``docker``; their limits are those of ``images``.
    """

    kind: Literal["auto", "bubblewrap", "unshare", "process", "docker"] = "auto"
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
class ImagesConfig:
    """Tasks in container images: the daemon, a run's share of it, and what one container gets."""

    docker_url: str = ""  # a socket or host; empty is DOCKER_HOST, then Docker's own socket
    pull: bool = True  # fetch missing images before the run; false stops when one is missing
    max_pulls: int = 4  # at a time
    max_containers: int = 64  # alive at a time; a further start waits
    max_starting: int = 4  # being made at a time: daemons fall over under more
    disk_floor_bytes: int = 5 << 30  # free on the daemon's disk, below it nothing new starts
    allow_emulation: bool = False  # images of another architecture, about 27 times slower
    memory_bytes: int = 4 << 30  # of one container, swap included; so are the next six
    cpus: float = 2.0
    max_processes: int = 512
    disk_bytes: int = 8 << 30
    max_file_bytes: int = 4 << 30
    shm_bytes: int = 64 << 20
    user: str = ""  # "name" or "uid:gid"; empty is the image's own
    network: str = "none"  # or the name of a network made for sandboxes
    runtime: str = ""  # for example "runsc"
    command_timeout_s: float = 90.0  # of one command of the agent
    output_cap_bytes: int = 256 << 10  # of one command
    max_chars: int = 16_000  # of one reply, before agent.max_observation_tokens
    num_validating: int = 2  # tasks shown solvable at a time, before the run; remembered below
    validations: str = ""  # folder of remembered verdicts; empty is run_root/validations
    max_prepared: int = 500  # images made safe for the agent that stay at the end, newest first


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
    # The rest is for renderer chat_template.
    action_format: Literal["r2e_xml", "hermes_json", "bash_block"] = "r2e_xml"
    tools: Literal["r2e", "shell"] = "r2e"  # of tasks with images; bash_block needs shell
    prompts: str = "swe"  # a name that ships with envs.actions, or a file
    observation_role: Literal["user", "tool"] = "user"
    on_rewrite: Literal["append", "refuse"] = "append"  # a template that changes the history


@dataclass(frozen=True)
class EngineConfig:
    """The inference engine: embedded, or servers that are launched here or attached to."""

    kind: Literal["local", "sglang", "vllm"] = "local"
    # The simulated ones are the local engine's: bfloat16, products rounded as in fp8 or int4; the
    # router_ one rounds only the weights that experts are chosen by (a controlled experiment).
    dtype: Literal[
        "float32", "bfloat16", "fp8_simulated", "int4_simulated", "router_int4_simulated"
    ] = "bfloat16"
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
    """Capture, cache and replay of the router's choices.

    ``replay``: ``off`` routes live; ``r2`` replays in the update what the old-policy pass chose;
    ``r3`` replays in both passes what the rollout chose and stops before the update when a row is
    missing; ``mixed`` is ``r3`` with the live router where a row is missing.
    """

    replay: Literal["off", "r2", "r3", "mixed"] = "r3"
    conflict_policy: Literal["first", "latest"] = "first"
    max_missing_fraction: float = 0.05  # mixed: stop above this share of trained tokens
    budget_bytes: int = 1 << 30
    max_staleness: int = 0  # weight versions a row may be behind the trainer


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is optimised. ``null`` takes the value that ``loss`` has in ``agent_rl.algorithms``."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"] = "grpo"
    advantage: Literal["grpo", "dr_grpo"] | None = None  # dr_grpo: not divided by the std
    group_size: int = 8
    groups_per_step: int = 32
    num_mini_steps: int = 2
    clip_low: float | None = None  # the ratio is held above 1 - clip_low
    clip_high: float | None = None  # and below 1 + clip_high
    loss_reduction: Literal["token", "sequence", "constant"] | None = None
    overlong_fraction: float | None = None  # last part of agent.max_tokens, where length costs
    dynamic_sampling_rounds: int | None = None  # further rollouts to replace groups without signal
    correction: Literal["none", "tis", "icepop", "mis"] = "none"  # of rollout against old policy
    correction_low: float | None = None  # bounds of p_old / p_rollout
    correction_high: float | None = None
    kl_weight: float = 0.0  # k3 KL to the starting weights, which then stay in memory
    entropy_weight: float = 0.0
    router_consistency_weight: float = 0.0  # 0.5 to 1.0 pulls the live router to recorded rows


@dataclass(frozen=True)
class RolloutConfig:
    """What to do when group members fail."""

    max_retries: int = 2
    retry_wait_s: float = 1.0  # before the first retry; doubled before each further one
    retry_wait_max_s: float = 60.0
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
    # auto: Transformer Engine's layers where package and CUDA device are there, else portable ones
    layer_spec: Literal["auto", "portable", "transformer_engine"] = "auto"
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
    # Who runs the trainer's processes. auto: the driver where one is enough, else local.
    launcher: Literal["auto", "inline", "local", "ray"] = "auto"
    num_processes: int = 0  # 0: as few as the parallel sizes need; more of them are data parallel
    worker_timeout_s: float = 600.0  # without a sign of life, or within one collective
    ray_address: str = "local"  # starts one for this run; auto or HOST:PORT joins a cluster


@dataclass(frozen=True)
class TrainConfig:
    """Length of the run and what it leaves behind."""

    steps: int = 100
    max_wall_s: float = 0.0  # 0 is no limit
    save_every: int = 10
    keep_last: int = 2
    eval_every: int = 0  # 0: only before and after
    mismatch_every: int = 1  # steps between measurements with, without replay and against itself
    mismatch_samples: int = 16  # of a step, for these measurements
    stop_on_alarm: bool = False  # end the run when F(2) reaches 0.1


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
    images: ImagesConfig = field(default_factory=ImagesConfig)
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
