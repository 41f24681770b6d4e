"""The configuration schema: frozen dataclasses with their defaults. ``config_io`` reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class PolicyConfig:
    """Where the starting weights are: a Hugging Face folder, or ``builtin:tiny_moe``."""

    path: str = "builtin:tiny_moe"  # a folder, hf:OWNER/NAME of the local cache, or builtin:NAME


@dataclass(frozen=True)
class TasksConfig:
    """What to solve; the held-out set is disjoint.

    ``repair`` is generated from ``seed``, ``module`` are your own. ``r2e_gym`` and ``swebench`` are
    rows, each with a container image; a hash of a task's id says on which side it is, ``seed``
    which ones are taken when there are more than wanted.
    """

    # repair: generated; r2e_gym, swebench: the form of the rows; module: your own
    kind: Literal["repair", "r2e_gym", "swebench", "module"] = "repair"
    seed: int = 1  # of what is generated, or of which rows are taken when there are more
    num_train: int = 6000  # tasks to train on; of rows: at most so many
    num_heldout: int = 384  # held-out tasks; of rows: at most so many
    heldout_split: Literal["heldout", "confirm"] = "heldout"  # confirm: never used for tuning
    module: str = ""  # of kind module: an importable name or a .py file; see own_environment.md
    bugs: Literal["token", "syntax"] = "token"  # of repair: one token of a line, or of any kind
    # The rest is for rows only, or as a module takes it.
    rows: str = ""  # a .json, .jsonl or .parquet file, or the name of a Hugging Face data set
    rows_split: str = "train"  # which split of a data set
    heldout_fraction: float = 0.1  # of all rows; as many again are kept for ``confirm``


@dataclass(frozen=True)
class SandboxConfig:
    """Where untrusted code runs. ``auto`` takes bubblewrap, then unshare; never a plain process.

    Tasks with images need ``docker``; their limits are those of ``images``.
    """

    # what isolates; process isolates nothing, docker is for tasks with images
    kind: Literal["auto", "bubblewrap", "unshare", "process", "docker"] = "auto"
    allow_unsafe: bool = False  # without it kind=process is refused
    num_workers: int = 4  # sandboxes running at one time
    timeout_s: float = 10.0  # of one run of code or tests, wall clock
    memory_bytes: int = 256 << 20  # address space of one process
    max_processes: int = 32  # of one sandbox
    max_file_bytes: int = 16 << 20  # of one file that is written
    cpu_s: int = 10  # CPU time of one process
    output_cap_bytes: int = 64 << 10  # what is kept of the output of one run
    share_identical_runs: bool = True  # the same code under the same tests runs once a step


@dataclass(frozen=True)
class ImagesConfig:
    """Tasks in container images: the daemon, a run's share of it, and what one container gets."""

    docker_url: str = ""  # a socket or host; empty is DOCKER_HOST, then Docker's own socket
    pull: bool = True  # fetch missing images before the run; false stops when one is missing
    max_pulls: int = 4  # images fetched at a time
    max_containers: int = 64  # containers alive at a time; a further start waits
    max_starting: int = 4  # containers being made at a time: daemons fall over under more
    disk_floor_bytes: int = 5 << 30  # free on the daemon's disk; below it nothing new starts
    allow_emulation: bool = False  # run images of another architecture, about 27 times slower
    memory_bytes: int = 4 << 30  # of one container, swap included
    cpus: float = 2.0  # of one container
    max_processes: int = 512  # of one container
    disk_bytes: int = 8 << 30  # that one container may write
    max_file_bytes: int = 4 << 30  # of one file in a container
    shm_bytes: int = 64 << 20  # /dev/shm of one container
    user: str = ""  # in the container: "name" or "uid:gid"; empty is the image's own
    network: str = "none"  # of a container, or the name of a network made for sandboxes
    runtime: str = ""  # of containers, for example "runsc"; empty is the daemon's own
    command_timeout_s: float = 90.0  # wall clock of one command of the agent
    output_cap_bytes: int = 256 << 10  # what is kept of the output of one command
    max_chars: int = 16_000  # of one reply, before agent.max_observation_tokens
    num_validating: int = 2  # tasks shown solvable at a time, before the run
    validations: str = ""  # folder that remembers which are; empty is run_root/validations
    max_prepared: int = 500  # images made safe for the agent that stay at the end, newest first


@dataclass(frozen=True)
class AgentConfig:
    """Limits of one trajectory and how it is rendered into tokens."""

    # compact: the shipped policies' own words; chat_template: what the model's tokenizer ships
    renderer: Literal["compact", "chat_template"] = "compact"
    max_turns: int = 6  # of one trajectory
    max_tokens: int = 224  # of the whole trajectory, prompt included
    max_new_tokens: int = 24  # sampled in one turn
    max_observation_tokens: int = 64  # of one reply of the environment; what is longer is cut
    max_malformed: int = 3  # malformed actions before the episode ends as truncated
    train_malformed: bool = True  # whether sampled tokens of malformed actions stay in the loss
    # The rest is for renderer chat_template.
    # how an action is written
    action_format: Literal["r2e_xml", "hermes_json", "bash_block"] = "r2e_xml"
    tools: Literal["r2e", "shell"] = "r2e"  # of tasks with images; bash_block needs shell
    prompts: str = "swe"  # a name that ships with envs.actions, or a file
    observation_role: Literal["user", "tool"] = "user"  # of the messages that hold replies
    on_rewrite: Literal["append", "refuse"] = "append"  # when a template changes history


@dataclass(frozen=True)
class EngineConfig:
    """The inference engine: embedded, or servers that are launched here or attached to."""

    kind: Literal["local", "sglang", "vllm"] = "local"  # embedded, or which server
    # precision of weights and products. The simulated ones are the local engine's: bfloat16,
    # products rounded as in fp8 or int4; the router_ one rounds only the weights that experts are
    # chosen by (a controlled experiment).
    dtype: Literal[
        "float32", "bfloat16", "fp8_simulated", "int4_simulated", "router_int4_simulated"
    ] = "bfloat16"
    capture_routing: bool = True  # record the experts that the routers choose; replay needs it
    max_sessions: int = 256  # KV slots, or requests running on one server
    num_threads: int = 1  # of the embedded engine
    # The rest is for sglang and vllm only.
    urls: tuple[str, ...] = ()  # servers to attach to; empty launches num_servers here
    num_servers: int = 1  # to launch when urls is empty
    tensor_parallel: int = 1  # of one launched server
    device: Literal["cpu", "cuda"] = "cpu"  # of launched servers
    weight_transfer: Literal["tensors", "disk"] = "tensors"  # how new weights travel; vllm: disk
    verify_weights: bool = True  # recompute a prompt's log-probs here after each update
    start_timeout_s: float = 900.0  # for a launched server to answer
    extra_args: tuple[str, ...] = ()  # added to a launched server's command


@dataclass(frozen=True)
class SamplingConfig:
    """The sampling distribution. Top-p and top-k below full are refused for training."""

    temperature: float = 1.0  # of rollouts; the trainer scores at the same
    top_p: float = 1.0  # 1 is off
    top_k: int = 0  # 0 is off


@dataclass(frozen=True)
class RoutingConfig:
    """Capture, cache and replay of the router's choices.

    ``replay``: ``off`` routes live; ``r2`` replays in the update what the old-policy pass chose;
    ``r3`` replays in both passes what the rollout chose and stops before the update when a row is
    missing; ``mixed`` is ``r3`` with the live router where a row is missing.
    """

    replay: Literal["off", "r2", "r3", "mixed"] = "r3"  # what the trainer's routers use, see above
    # which rows win when the same tokens bring others: first are those of the sampled log-probs
    conflict_policy: Literal["first", "latest"] = "first"
    max_missing_fraction: float = 0.05  # mixed: stop when more of the trained tokens lack a row
    budget_bytes: int = 1 << 30  # that the cache may hold
    max_staleness: int = 0  # weight versions a row may be behind the trainer


@dataclass(frozen=True)
class AlgorithmConfig:
    """What is optimised. ``null`` takes the value of ``loss`` in ``agent_rl.config.objective``."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"] = "grpo"  # see trainer.md
    advantage: Literal["grpo", "dr_grpo"] | None = None  # dr_grpo: not divided by the std
    group_size: int = 8  # trajectories of one task in a step
    groups_per_step: int = 32  # tasks in a step
    num_mini_steps: int = 2  # optimizer steps from one rollout
    clip_low: float | None = None  # the ratio is held above 1 - clip_low
    clip_high: float | None = None  # the ratio is held below 1 + clip_high
    # what a token's term is divided by: all tokens, those of its sequence, or a constant
    loss_reduction: Literal["token", "sequence", "constant"] | None = None
    overlong_fraction: float | None = None  # last part of agent.max_tokens, where length costs
    dynamic_sampling_rounds: int | None = None  # further rollouts to replace groups without signal
    correction: Literal["none", "tis", "icepop", "mis"] = "none"  # weight by p_old / p_rollout
    correction_low: float | None = None  # lower bound of p_old / p_rollout
    correction_high: float | None = None  # upper bound of p_old / p_rollout
    kl_weight: float = 0.0  # k3 KL to the starting weights, which then stay in memory
    entropy_weight: float = 0.0  # above 0 rewards entropy
    router_consistency_weight: float = 0.0  # 0.5 to 1.0 pulls the live router to recorded rows


@dataclass(frozen=True)
class RolloutConfig:
    """What to do when group members fail."""

    max_retries: int = 2  # how often a failed member is tried again
    retry_wait_s: float = 1.0  # before the first retry; doubled before each further one
    retry_wait_max_s: float = 60.0  # the longest wait before a retry
    min_valid_members: int = 2  # a group with fewer teaches nothing
    max_failure_fraction: float = 0.25  # of a step's trajectories; above it the run stops
    concurrency: int = 256  # trajectories being played at a time


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and the learning-rate schedule."""

    lr: float = 7e-4  # peak learning rate
    min_lr: float = 0.0  # where decay ends
    beta1: float = 0.9  # of AdamW's mean of gradients
    beta2: float = 0.95  # of AdamW's mean of squared gradients
    eps: float = 1e-8  # AdamW's term against division by 0
    weight_decay: float = 0.0  # AdamW's, apart from the gradient
    clip_grad: float = 1.0  # largest norm of the gradient
    warmup_steps: int = 0  # over which the rate rises from 0; optimizer steps
    # of the rate, after warm-up, until the last step
    decay: Literal["constant", "linear", "cosine"] = "constant"


@dataclass(frozen=True)
class TrainerConfig:
    """Megatron-core: precision, layout and micro-batching."""

    kind: Literal["megatron"] = "megatron"  # the one there is
    # of weights and products; AdamW keeps float32 masters of them
    dtype: Literal["float32", "bfloat16"] = "float32"
    # auto: Transformer Engine's layers where package and CUDA device are there, else portable ones
    layer_spec: Literal["auto", "portable", "transformer_engine"] = "auto"
    micro_batch_tokens: int = 4096  # padded tokens of one forward
    tensor_parallel: int = 1  # processes that share each matrix
    pipeline_parallel: int = 1  # stages that share the layers
    context_parallel: int = 1  # processes that share each sequence
    expert_parallel: int = 1  # processes that share each layer's experts
    sequence_parallel: bool = False  # on with tensor_parallel: MoE layers do not train without it
    virtual_pipeline: int = 1  # model chunks a pipeline stage; above 1 interleaves their schedule
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"  # how tokens reach experts
    packed: bool = False  # sequences one behind the other (thd) in place of padded side by side
    distributed_optimizer: bool = False  # optimizer state split over the data-parallel ranks
    # which activations are made again in the backward pass, to save memory
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

    steps: int = 100  # rollout and update, this often
    # roll out the next step while this one trains; its weights are one update older then
    overlap_rollout: bool = False
    max_wall_s: float = 0.0  # end after the step that passes it; 0 is no limit
    save_every: int = 10  # steps between checkpoints
    keep_last: int = 2  # checkpoints that stay
    eval_every: int = 0  # steps between evaluations on the held-out tasks; 0: only before and after
    mismatch_every: int = 1  # steps between measurements with, without replay and against itself
    mismatch_samples: int = 16  # samples of a step for these measurements
    stop_on_alarm: bool = False  # end the run when F(2) reaches 0.1


@dataclass(frozen=True)
class EvalConfig:
    """Evaluation on held-out tasks."""

    num_tasks: int = 384  # held-out tasks, or all where there are fewer
    samples_per_task: int = 1  # trajectories of each
    temperature: float = 1.0  # of the sampling; 0 takes the likeliest token


@dataclass(frozen=True)
class RunConfig:
    """Everything a run needs.

    Example:
        >>> RunConfig(name="short", train=TrainConfig(steps=50)).train.steps
        50
    """

    name: str = "run"  # the run's folder is run_root/name
    seed: int = 0  # of rollouts, of the order of tasks, and of the trainer
    run_root: str = "runs"  # where run folders go
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
