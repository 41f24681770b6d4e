"""Check what a configuration needs of this machine: policy, accelerators, memory, disk, ports.

Nothing is started and nothing is downloaded, so it can be asked on any machine.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from agent_rl.config.schema import RunConfig
from agent_rl.doctor.budget import Budget, budget
from agent_rl.doctor.check import Check, counted, gib
from agent_rl.doctor.known_models import KNOWN_MODELS
from agent_rl.errors import ConfigError
from agent_rl.model.config_json import read_shape
from agent_rl.model.policies import HUB_PREFIX, policy_folder
from agent_rl.model.shape import ModelShape
from agent_rl.trainer.workers.world import launcher, num_processes

_CONNECT_TIMEOUT_S = 3.0
_INSTALL_TE = ".venv/bin/pip install --no-build-isolation 'transformer-engine[pytorch]'"
_CHECK_SHARE = 0.9  # of a device's memory may be planned with


def check_policy(config: RunConfig) -> Iterator[Check]:
    """Say how large the policy's files are; a rule says when they are not here."""
    with suppress(ConfigError):
        folder = policy_folder(config.policy.path)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        yield Check("policy.path", "ok", f"{folder}, {gib(size)}")


def check_needs(config: RunConfig) -> Iterator[Check]:
    """Check memory, accelerators and disk, from the model's shape."""
    shape = _shape(config)
    if shape is None:
        detail = "unknown without the policy"
        yield Check("memory", "warning", detail, "see policy.path above")
        return
    need = budget(config, shape)
    yield from check_trainer_memory(config, need, gpu_memory(), _memory_bytes())
    yield from _engine(config, need)
    yield from _host_memory(config, need)
    yield from _run_disk(config, need)


def check_ports(config: RunConfig) -> Iterator[Check]:
    """Check what the processes of a run talk through."""
    try:
        with socket.create_server(("127.0.0.1", 0)):
            pass
    except OSError as error:
        yield Check("ports", "missing", f"127.0.0.1: {error}", "allow listening on the loopback")
    else:
        yield Check("ports", "ok", "the loopback device takes listeners")
    host, _, port = config.trainer.ray_address.partition(":")
    if port:
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            detail = f"{config.trainer.ray_address}: {error}"
            yield Check("Ray", "missing", detail, "ray start --head, or trainer.ray_address=local")
        else:
            yield Check("Ray", "ok", config.trainer.ray_address)


def _shape(config: RunConfig) -> ModelShape | None:
    try:
        return read_shape(policy_folder(config.policy.path))
    except ConfigError:
        return KNOWN_MODELS.get(config.policy.path.removeprefix(HUB_PREFIX))


def gpu_memory() -> list[int]:
    """Return the bytes of every GPU here; none where there is none or torch cannot see it."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_properties(i).total_memory for i in range(count)]


def check_trainer_memory(
    config: RunConfig, need: Budget, gpus: Sequence[int], memory: int
) -> Iterator[Check]:
    """Check that ``gpus`` (bytes of each), or without any ``memory`` (bytes), hold the trainer."""
    processes = num_processes(config.trainer)
    one = need.trainer_gpu + need.activations_gpu
    each = ", each" if processes > 1 else ":"
    detail = (
        f"{counted(processes, 'process', 'processes')}{each} {gib(need.trainer_gpu)} of weights, "
        f"gradients and optimizer and about {gib(need.activations_gpu)} of activations"
    )
    if launcher(config.trainer) == "ray":
        yield Check("trainer memory", "ok", f"{detail}; Ray finds the GPUs for them")
        return
    fitting = sum(size * _CHECK_SHARE >= one for size in gpus)
    here = f"{counted(len(gpus), 'GPU')} here, {fitting} with that much memory"
    if fitting >= processes:
        yield Check("trainer memory", "ok", f"{detail}; {here}")
        yield from _transformer_engine()
        return
    if not gpus and memory * _CHECK_SHARE >= processes * one:
        yield Check("trainer memory", "ok", f"{detail}; on CPU: no GPU here")
        return
    if not gpus:
        here = f"no GPU here, and {gib(memory)} of memory are too little to train on CPU"
    size = f"of at least {gib(one / _CHECK_SHARE)}{' each' if processes > 1 else ''}"
    yield Check(
        "GPUs for the trainer",
        "missing",
        f"{detail}; {here}",
        f"{counted(processes, 'GPU')} {size}; or more GPUs of less memory, with a larger "
        "trainer.num_processes and trainer.expert_parallel or context_parallel",
    )
    yield from _transformer_engine()


def _transformer_engine() -> Iterator[Check]:
    """Look for Megatron's faster layers, which are of use on GPUs alone."""
    if importlib.util.find_spec("transformer_engine") is None:
        detail = "not installed: Megatron falls back to torch's AdamW and unfused kernels"
        yield Check("transformer-engine", "warning", detail, f"where the GPUs are: {_INSTALL_TE}")


def _engine(config: RunConfig, need: Budget) -> Iterator[Check]:
    engine = config.engine
    if engine.kind == "local":
        return
    servers = len(engine.urls) or engine.num_servers
    sequences = -(-min(config.rollout.concurrency, engine.max_sessions) // servers)
    cache = need.kv_token_gpu * config.agent.max_tokens * sequences
    on_cpu = not engine.urls and engine.device == "cpu"
    device = counted(engine.tensor_parallel, *(("process", "processes") if on_cpu else ("GPU",)))
    yield Check(
        "engine memory",
        "ok",
        f"{counted(servers, 'server')} of {device}{' each' if servers > 1 else ''}; each "
        f"{'process' if on_cpu else 'GPU'} holds {gib(need.engine_gpu)} of weights, and "
        f"{need.kv_token_gpu:,} bytes of keys and values per token: {gib(cache)} for "
        f"{counted(sequences, 'trajectory', 'trajectories')} at the longest",
    )


def _host_memory(config: RunConfig, need: Budget) -> Iterator[Check]:
    # The rows of a step are held until it is trained on, beside those of the next one's rollout.
    num_steps = 1 + config.train.overlap_rollout
    rows = num_steps * need.routing_step
    routing = min(rows, config.routing.budget_bytes)
    wanted = need.weights + routing
    memory = _memory_bytes()
    detail = (
        f"{gib(need.weights)} for weights on their way to the engine, {gib(routing)} for routing "
        f"rows ({need.routing_token:,} bytes per token); {gib(memory)} of memory here"
    )
    enough = wanted <= memory * _CHECK_SHARE
    advice = "" if enough else f"a machine with at least {gib(wanted / _CHECK_SHARE)}"
    yield Check("host memory", "ok" if enough else "missing", detail, advice)
    if rows > config.routing.budget_bytes:
        steps = "two steps, held at once," if num_steps > 1 else "a step"
        yield Check(
            "routing.budget_bytes",
            "warning",
            f"{gib(config.routing.budget_bytes)}; {steps} whose trajectories are all at their "
            f"longest and share nothing would need {gib(rows)} of rows",
            "raise it if rows are evicted",
        )


def _run_disk(config: RunConfig, need: Budget) -> Iterator[Check]:
    root = _existing(Path(config.run_root))
    free = shutil.disk_usage(root).free
    # The newest is written before the oldest goes; weights by disk lie beside them for a moment.
    by_disk = config.engine.kind != "local" and config.engine.weight_transfer == "disk"
    wanted = (config.train.keep_last + 1) * need.checkpoint + (2 * need.weights if by_disk else 0)
    detail = (
        f"{gib(wanted)} for {counted(config.train.keep_last, 'kept checkpoint')} and the one being "
        f"written, {gib(need.checkpoint)} each{', and weights on their way' if by_disk else ''}; "
        f"{gib(free)} free below {root}"
    )
    enough = wanted <= free
    advice = "" if enough else "another disk: run_root=FOLDER, or lower train.keep_last"
    yield Check("disk for the run", "ok" if enough else "missing", detail, advice)


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
