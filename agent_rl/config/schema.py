"""The configuration schema: every key with its type, range, default and meaning."""

from __future__ import annotations

from dataclasses import field
from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from agent_rl.config.declaring import Fraction, key, section

# When some keys are read; the rules hold the others to their defaults.
SERVERS = "engine.kind=sglang and vllm"
ROWS = "tasks from rows, or as a module takes it"
CHAT_TEMPLATE = "agent.renderer=chat_template"
IMAGES = "tasks with images"
REPAIR = "tasks.kind=repair"
MODULE = "tasks.kind=module"

# Upper bounds are generous: they stop a mistyped size from filling the machine.
_TASKS = 10_000_000
_TOKENS = 1 << 24
_SESSIONS = 65_536
_PROCESSES = 1024  # or threads, servers, downloads: what a machine runs side by side


@section
class PolicyConfig:
    """The place of the starting weights: a Hugging Face folder, or ``builtin:tiny_moe``."""

    path: str = key(
        "builtin:tiny_moe", "a folder, hf:OWNER/NAME of the local cache, or builtin:NAME"
    )


@section
class TasksConfig:
    """The tasks to solve; the held-out set is disjoint.

    ``repair`` is generated from ``seed``, ``module`` are your own. ``r2e_gym`` and ``swebench`` are
    rows, each with a container image; a hash of a task's id says on which side it is, ``seed``
    which ones are taken when there are more than wanted.
    """

    kind: Literal["repair", "r2e_gym", "swebench", "module"] = key(
        "repair", "repair: generated; r2e_gym, swebench: the form of the rows; module: your own"
    )
    seed: int = key(1, "decides what is generated, or which rows are taken when there are more")
    num_train: PositiveInt = key(6000, "tasks to train on; at most so many rows", le=_TASKS)
    num_heldout: PositiveInt = key(384, "held-out tasks; at most so many rows", le=_TASKS)
    heldout_split: Literal["heldout", "confirm"] = key("heldout", "confirm: never used for tuning")
    module: str = key(
        "", "an importable name or a .py file; see own_environment.md", only_for=MODULE
    )
    bugs: Literal["token", "syntax"] = key(
        "token", "bugs of one token of a line, or of any kind", only_for=REPAIR
    )
    rows: str = key(
        "",
        "a .json, .jsonl or .parquet file, or the name of a Hugging Face data set",
        only_for=ROWS,
    )
    rows_split: str = key("train", "which split of a data set", only_for=ROWS)
    heldout_fraction: float = key(
        0.1, "share of all rows; as many again are kept for ``confirm``", only_for=ROWS
    )


@section
class SandboxConfig:
    """The sandbox of untrusted code. ``auto`` takes bubblewrap, then unshare, never a process.

    Tasks with images need ``docker``; their limits are those of ``images``.
    """

    kind: Literal["auto", "bubblewrap", "unshare", "process", "docker"] = key(
        "auto", "what isolates; process isolates nothing, docker is for tasks with images"
    )
    allow_unsafe: bool = key(False, "without it kind=process is refused")
    num_workers: PositiveInt = key(4, "sandboxes running at one time", le=4096)
    timeout_s: PositiveFloat = key(10.0, "wall clock of one run of code or tests")
    memory_bytes: PositiveInt = key(256 << 20, "address space of one process")
    max_processes: PositiveInt = key(32, "processes of one sandbox")
    max_file_bytes: PositiveInt = key(16 << 20, "largest file that may be written")
    cpu_s: PositiveInt = key(10, "CPU time of one process")
    output_cap_bytes: PositiveInt = key(
        64 << 10, "what is kept of the output of one run", le=1 << 30
    )
    share_identical_runs: bool = key(True, "run the same code under the same tests once per step")


@section
class ImagesConfig:
    """Tasks in container images: the daemon, a run's share of it, and what one container gets."""

    docker_url: str = key("", "a socket or host; empty is DOCKER_HOST, then Docker's own socket")
    pull: bool = key(True, "fetch missing images before the run; false stops when one is missing")
    max_pulls: PositiveInt = key(4, "images fetched at a time", le=_PROCESSES)
    max_containers: PositiveInt = key(
        64, "containers alive at a time; a further start waits", le=16_384
    )
    max_starting: PositiveInt = key(
        4, "containers being made at a time: daemons fall over under more", le=_PROCESSES
    )
    disk_floor_bytes: NonNegativeInt = key(
        5 << 30, "free on the daemon's disk; below it nothing new starts"
    )
    allow_emulation: bool = key(False, "run images of another architecture, about 27 times slower")
    memory_bytes: PositiveInt = key(4 << 30, "memory of one container, swap included")
    cpus: PositiveFloat = key(2.0, "CPUs of one container")
    max_processes: PositiveInt = key(512, "processes of one container")
    disk_bytes: PositiveInt = key(8 << 30, "what one container may write")
    max_file_bytes: PositiveInt = key(4 << 30, "largest file in a container")
    shm_bytes: PositiveInt = key(64 << 20, "/dev/shm of one container")
    user: str = key("", "name or uid:gid in the container; empty is the image's own")
    network: str = key("none", "none, or the name of a network made for sandboxes")
    runtime: str = key("", "runtime of containers, for example runsc; empty is the daemon's own")
    command_timeout_s: PositiveFloat = key(90.0, "wall clock of one command of the agent")
    output_cap_bytes: PositiveInt = key(
        256 << 10, "what is kept of the output of one command", le=1 << 30
    )
    max_chars: PositiveInt = key(
        16_000, "longest reply, before agent.max_observation_tokens", le=100_000_000
    )
    num_validating: PositiveInt = key(
        2, "tasks shown solvable at a time, before the run", le=_PROCESSES
    )
    validations: str = key(
        "", "folder that remembers which tasks are; empty is run_root/validations"
    )
    max_prepared: NonNegativeInt = key(
        500, "images made safe for the agent that stay at the end, newest first", le=1_000_000
    )


@section
class AgentConfig:
    """Limits of one trajectory and how it is rendered into tokens."""

    renderer: Literal["compact", "chat_template"] = key(
        "compact",
        "compact: the shipped policies' own words; chat_template: what the model's tokenizer ships",
    )
    max_turns: PositiveInt = key(6, "turns of one trajectory", le=10_000)
    max_tokens: int = key(224, "tokens of the whole trajectory, prompt included", le=_TOKENS)
    max_new_tokens: PositiveInt = key(24, "tokens sampled in one turn", le=_TOKENS)
    max_observation_tokens: PositiveInt = key(
        64, "tokens of one reply of the environment; what is longer is cut", le=_TOKENS
    )
    max_malformed: PositiveInt = key(
        3, "malformed actions before the episode ends as truncated", le=10_000
    )
    train_malformed: bool = key(True, "keep sampled tokens of malformed actions in the loss")
    action_format: Literal["r2e_xml", "hermes_json", "bash_block"] = key(
        "r2e_xml", "how an action is written", only_for=CHAT_TEMPLATE
    )
    tools: Literal["r2e", "shell"] = key(
        "r2e", "the tools that an agent has; bash_block needs shell", only_for=IMAGES
    )
    prompts: str = key(
        "swe", "a name that ships with envs.actions, or a file", only_for=CHAT_TEMPLATE
    )
    observation_role: Literal["user", "tool"] = key(
        "user", "role of the messages that hold replies", only_for=CHAT_TEMPLATE
    )
    on_rewrite: Literal["append", "refuse"] = key(
        "append", "what to do when a template changes history", only_for=CHAT_TEMPLATE
    )


@section
class EngineConfig:
    """The inference engine: embedded, or servers that are launched here or attached to."""

    kind: Literal["local", "sglang", "vllm"] = key("local", "embedded, or which server")
    dtype: Literal[
        "float32", "bfloat16", "fp8_simulated", "int4_simulated", "router_int4_simulated"
    ] = key(
        "bfloat16",
        "precision of weights and products. The simulated ones are the local engine's: bfloat16, "
        "products rounded as in fp8 or int4; the router_ one rounds only the weights that experts "
        "are chosen by (a controlled experiment).",
    )
    capture_routing: bool = key(True, "record the experts that the routers choose; replay needs it")
    max_sessions: PositiveInt = key(
        256, "KV slots, or requests running on one server", le=_SESSIONS
    )
    num_threads: PositiveInt = key(1, "threads of the embedded engine", le=_PROCESSES)
    urls: tuple[str, ...] = key(
        (), "servers to attach to; empty launches num_servers here", only_for=SERVERS
    )
    num_servers: PositiveInt = key(
        1, "servers to launch when urls is empty", le=_PROCESSES, only_for=SERVERS
    )
    tensor_parallel: PositiveInt = key(
        1, "GPUs that share one launched server", le=_PROCESSES, only_for=SERVERS
    )
    device: Literal["cpu", "cuda"] = key("cpu", "device of launched servers", only_for=SERVERS)
    weight_transfer: Literal["tensors", "disk"] = key(
        "tensors", "how new weights travel; vllm: disk", only_for=SERVERS
    )
    verify_weights: bool = key(
        True, "recompute a prompt's log-probs here after each update", only_for=SERVERS
    )
    start_timeout_s: PositiveFloat = key(
        900.0, "time for a launched server to answer", only_for=SERVERS
    )
    extra_args: tuple[str, ...] = key((), "added to a launched server's command", only_for=SERVERS)


@section
class SamplingConfig:
    """The sampling distribution. Top-p and top-k below full are refused for training."""

    temperature: PositiveFloat = key(
        1.0,
        "of rollouts; the trainer scores at the same. Greedy groups have no signal: only "
        "evaluations may have 0, eval.temperature",
    )
    top_p: float = key(1.0, "1 is off")
    top_k: NonNegativeInt = key(0, "0 is off")


@section
class RoutingConfig:
    """Capture, cache and replay of the router's choices.

    ``replay``: ``off`` routes live; ``r2`` replays in the update what the old-policy pass chose;
    ``r3`` replays in both passes what the rollout chose and stops before the update when a row is
    missing; ``mixed`` is ``r3`` with the live router where a row is missing.
    """

    replay: Literal["off", "r2", "r3", "mixed"] = key(
        "r3", "what the trainer's routers use, see above"
    )
    conflict_policy: Literal["first", "latest"] = key(
        "first",
        "which rows win when the same tokens bring others; first: those of the sampled log-probs",
    )
    max_missing_fraction: Fraction = key(
        0.05, "mixed: stop when more of the trained tokens lack a row"
    )
    budget_bytes: PositiveInt = key(1 << 30, "what the cache may hold")
    max_staleness: NonNegativeInt = key(0, "weight versions a row may be behind the trainer")


@section
class AlgorithmConfig:
    """The objective. ``null`` takes the value of ``loss`` in ``agent_rl.config.objective``."""

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"] = key("grpo", "see trainer.md")
    advantage: Literal["grpo", "dr_grpo"] | None = key(None, "dr_grpo: not divided by the std")
    group_size: int = key(
        8, "trajectories of one task in a step; one alone has no baseline", ge=2, le=1024
    )
    groups_per_step: PositiveInt = key(32, "tasks in a step", le=16_384)
    num_mini_steps: PositiveInt = key(2, "optimizer steps from one rollout", le=10_000)
    clip_low: Fraction | None = key(None, "the ratio is held above 1 - clip_low")
    clip_high: NonNegativeFloat | None = key(None, "the ratio is held below 1 + clip_high")
    loss_reduction: Literal["token", "sequence", "constant"] | None = key(
        None, "what a token's term is divided by: all tokens, those of its sequence, or a constant"
    )
    overlong_fraction: Fraction | None = key(
        None, "last part of agent.max_tokens, where length costs"
    )
    dynamic_sampling_rounds: NonNegativeInt | None = key(
        None, "further rollouts to replace groups without signal", le=1000
    )
    correction: Literal["none", "tis", "icepop", "mis"] = key("none", "weight by p_old / p_rollout")
    correction_low: float | None = key(None, "lower bound of p_old / p_rollout")
    correction_high: float | None = key(None, "upper bound of p_old / p_rollout")
    kl_weight: NonNegativeFloat = key(
        0.0, "k3 KL to the starting weights, which then stay in memory"
    )
    entropy_weight: NonNegativeFloat = key(0.0, "above 0 rewards entropy")
    router_consistency_weight: NonNegativeFloat = key(
        0.0, "0.5 to 1.0 pulls the live router to recorded rows"
    )


@section
class RolloutConfig:
    """The treatment of failed group members."""

    max_retries: NonNegativeInt = key(2, "how often a failed member is tried again", le=1000)
    retry_wait_s: NonNegativeFloat = key(
        1.0, "before the first retry; doubled before each further one"
    )
    retry_wait_max_s: NonNegativeFloat = key(60.0, "the longest wait before a retry")
    min_valid_members: int = key(2, "a group with fewer teaches nothing")
    max_failure_fraction: Fraction = key(
        0.25, "share of a step's trajectories; above it the run stops"
    )
    concurrency: PositiveInt = key(256, "trajectories being played at a time", le=_SESSIONS)


@section
class OptimConfig:
    """AdamW and the learning-rate schedule."""

    lr: PositiveFloat = key(7e-4, "peak learning rate")
    min_lr: NonNegativeFloat = key(0.0, "where decay ends")
    beta1: Fraction = key(0.9, "decay of AdamW's mean of gradients")
    beta2: Fraction = key(0.95, "decay of AdamW's mean of squared gradients")
    eps: float = key(1e-8, "AdamW's term against division by 0")
    weight_decay: NonNegativeFloat = key(0.0, "AdamW's, apart from the gradient")
    clip_grad: PositiveFloat = key(1.0, "largest norm of the gradient")
    warmup_steps: NonNegativeInt = key(0, "optimizer steps over which the rate rises from 0")
    decay: Literal["constant", "linear", "cosine"] = key(
        "constant", "how the rate falls after warm-up, until the last step"
    )


@section
class TrainerConfig:
    """Megatron-core: precision, layout and micro-batching."""

    kind: Literal["megatron"] = key("megatron", "the one there is")
    dtype: Literal["float32", "bfloat16"] = key(
        "float32", "precision of weights and products; AdamW keeps float32 masters of them"
    )
    layer_spec: Literal["auto", "portable", "transformer_engine"] = key(
        "auto",
        "auto: Transformer Engine's layers with its package and a CUDA device, else portable ones",
    )
    micro_batch_tokens: PositiveInt = key(4096, "padded tokens of one forward", le=_TOKENS)
    tensor_parallel: PositiveInt = key(1, "processes that share each matrix", le=_PROCESSES)
    pipeline_parallel: PositiveInt = key(1, "stages that share the layers", le=_PROCESSES)
    context_parallel: PositiveInt = key(1, "processes that share each sequence", le=_PROCESSES)
    expert_parallel: PositiveInt = key(
        1, "processes that share each layer's experts", le=_PROCESSES
    )
    sequence_parallel: bool = key(
        False, "on with tensor_parallel: MoE layers do not train without it"
    )
    virtual_pipeline: PositiveInt = key(
        1, "model chunks per pipeline stage; above 1 interleaves their schedule", le=_PROCESSES
    )
    token_dispatcher: Literal["alltoall", "allgather"] = key("alltoall", "how tokens reach experts")
    packed: bool = key(
        False, "lay sequences one behind the other (thd) in place of padded side by side"
    )
    distributed_optimizer: bool = key(False, "split optimizer state over the data-parallel ranks")
    recompute: Literal["none", "selective", "full"] = key(
        "none", "which activations are made again in the backward pass, to save memory"
    )
    num_threads: PositiveInt = key(
        1, "threads on CPU; more pay off only for larger models on an idle machine", le=_PROCESSES
    )
    launcher: Literal["auto", "inline", "local", "ray"] = key(
        "auto",
        "who runs the trainer's processes; auto: the driver where one is enough, else local",
    )
    num_processes: NonNegativeInt = key(
        0, "0: as few as the parallel sizes need; more of them are data parallel", le=16_384
    )
    worker_timeout_s: PositiveFloat = key(
        600.0, "longest time without a sign of life, or within one collective"
    )
    ray_address: str = key(
        "local",
        "local starts a cluster for this run; auto or HOST:PORT joins one",
        pattern=r"^(local|auto|[^\s:/]+:\d+)$",
        expected="local, auto or HOST:PORT",
    )


@section
class TrainConfig:
    """Length of the run and what it leaves behind."""

    steps: PositiveInt = key(100, "how often to roll out and update")
    overlap_rollout: bool = key(
        False, "roll out the next step while this one trains; its weights are one update older then"
    )
    max_wall_s: NonNegativeFloat = key(0.0, "end after the step that passes it; 0 is no limit")
    save_every: PositiveInt = key(10, "steps between checkpoints")
    keep_last: PositiveInt = key(2, "checkpoints that stay")
    eval_every: NonNegativeInt = key(
        0, "steps between evaluations on the held-out tasks; 0: only before and after"
    )
    mismatch_every: NonNegativeInt = key(
        1, "steps between measurements with, without replay and against itself"
    )
    mismatch_samples: PositiveInt = key(
        16, "samples of a step for these measurements", le=1_000_000
    )
    stop_on_alarm: bool = key(False, "end the run when F(2) reaches 0.1")


@section
class EvalConfig:
    """Evaluation on held-out tasks."""

    num_tasks: PositiveInt = key(384, "held-out tasks, or all where there are fewer", le=_TASKS)
    samples_per_task: PositiveInt = key(1, "trajectories of each", le=16_384)
    temperature: NonNegativeFloat = key(
        1.0, "temperature of the sampling; 0 takes the likeliest token"
    )


@section
class RunConfig:
    """Everything a run needs.

    Example:
        >>> RunConfig(name="short", train=TrainConfig(steps=50)).train.steps
        50
    """

    name: str = key(
        "run",
        "the run's folder is run_root/name",
        pattern=r"^(\.{0,2}[^/.][^/]*|\.{3}[^/]*)$",
        expected="a plain folder name",
    )
    seed: NonNegativeInt = key(0, "of rollouts, of the order of tasks, and of the trainer")
    run_root: str = key("runs", "where run folders go")
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
