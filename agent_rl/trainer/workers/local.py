"""Ranks as processes of this machine, one GPU each where there are any."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import agent_rl
from agent_rl.config.schema import RunConfig
from agent_rl.errors import ConfigError
from agent_rl.protocols import Weights
from agent_rl.run.process_guard import ProcessGuard
from agent_rl.trainer.workers.channel import (
    Channel,
    ChannelClosedError,
    Received,
    write_block,
)
from agent_rl.trainer.workers.messages import Alive, Close, Done, Failed, Request, Start
from agent_rl.trainer.workers.sample_block import SampleBlock
from agent_rl.trainer.workers.worker_group import Answered, Event, Lost, SeenAlive, log_folder
from agent_rl.trainer.workers.world import num_processes

_HOST = "127.0.0.1"
_PACKAGES = Path(agent_rl.__file__).parents[1]  # a worker runs the code that its driver runs


@dataclass(frozen=True)
class _Worker:
    """A started process and this end of its channel."""

    process: subprocess.Popen[bytes]
    channel: Channel
    log_file: Path


class LocalWorkers:
    """``WorkerGroup`` over child processes. They end with this process, however it ends."""

    def __init__(self, config: RunConfig, model_path: Path) -> None:
        self._workers: list[_Worker] = []
        self._selector = selectors.DefaultSelector()
        count = num_processes(config.trainer)
        _require_devices(count)
        self._guard = ProcessGuard(grace_s=0.0)
        self._store, port = _rendezvous()
        try:
            for rank in range(count):
                worker = _launch(rank, count, port, config, self._guard.group)
                self._workers.append(worker)
                self._selector.register(worker.channel, selectors.EVENT_READ, rank)
                start = Start(config, model_path.resolve(), rank, count, rank, (_HOST, port))
                with suppress(ChannelClosedError):  # ended at once: poll says how
                    worker.channel.send(start)
        except BaseException:
            self.kill()
            raise

    @property
    def num_ranks(self) -> int:
        return len(self._workers)

    def pid(self, rank: int) -> int:
        return self._workers[rank].process.pid

    def log_file(self, rank: int) -> Path:
        return self._workers[rank].log_file

    def send(self, request: Request, samples: SampleBlock | None = None) -> None:
        block = None if samples is None else write_block("samples", samples.parts)
        try:
            for worker in self._workers:
                with suppress(ChannelClosedError):  # poll reports its end
                    worker.channel.send(request, block)
        finally:
            if block is not None:
                os.close(block)  # every worker holds its own by now

    def poll(self, timeout_s: float) -> list[Event]:
        events: list[Event] = []
        for key, _ in self._selector.select(timeout_s):
            rank: int = key.data
            try:
                messages = self._workers[rank].channel.receive_ready()
            except ChannelClosedError:
                self._selector.unregister(key.fileobj)
                events.append(Lost(rank, self._ending(rank)))
                continue
            events += [_event(rank, received) for received in messages]
        return events

    def kill(self) -> None:
        self._guard.kill()
        for worker in self._workers:
            worker.process.wait()
            worker.channel.close()
        self._selector.close()
        self._store = None

    def shut_down(self, grace_s: float) -> None:
        if self._workers:
            self.send(Close())
        deadline = time.monotonic() + grace_s
        for worker in self._workers:
            with suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
        self.kill()

    def _ending(self, rank: int) -> str:
        process = self._workers[rank].process
        try:
            status = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return f"process {process.pid} closed its channel and still runs"
        if status < 0:
            return f"process {process.pid} was ended by {signal.Signals(-status).name}"
        return f"process {process.pid} exited with status {status}"


def _require_devices(count: int) -> None:
    devices = torch.cuda.device_count()
    if devices and devices < count:
        raise ConfigError(
            [
                f"trainer.num_processes: got {count} on a machine with {devices} GPUs, expected "
                f"at most {devices}: one each; use trainer.launcher=ray over several machines"
            ]
        )


def _rendezvous() -> tuple[dist.TCPStore | None, int]:
    """A store that listens on the loopback device alone; the port is taken, not guessed."""
    listener = socket.create_server((_HOST, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def _launch(rank: int, count: int, port: int, config: RunConfig, group: int) -> _Worker:
    log_file = log_folder(config) / f"rank-{rank}.log"
    log_file.parent.mkdir(parents=True, exist_ok=True)
    channel, child = Channel.pair()
    with ExitStack() as stack:
        stack.enter_context(child)
        log = stack.enter_context(log_file.open("ab"))
        worker = [sys.executable, "-P", "-m", "agent_rl.trainer.workers.worker"]
        process = subprocess.Popen(
            [*worker, str(child.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=_environment(rank, count, port, config.trainer.num_threads),
            pass_fds=[child.fileno()],
            process_group=group,  # Ctrl-C is for the driver, which ends the step in progress
        )
    return _Worker(process, channel, log_file)


def _environment(rank: int, count: int, port: int, num_threads: int) -> Mapping[str, str]:
    python_path = (str(_PACKAGES), *filter(None, [os.environ.get("PYTHONPATH")]))
    return {
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": str(num_threads),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(python_path),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": _HOST,
        "MASTER_PORT": str(port),
    }


def _event(rank: int, received: Received) -> Event:
    weights = None if received.block is None else _weights(received.block)
    match received.message:
        case Done() | Failed() as reply:
            return Answered(rank, reply, weights)
        case Alive():
            return SeenAlive(rank)
        case other:
            return Lost(rank, f"it answered with {type(other).__name__}, expected a reply")


def _weights(descriptor: int) -> Weights:
    """Tensors over the worker's memory file, mapped and not copied; writes stay private."""
    try:
        return load_file(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
