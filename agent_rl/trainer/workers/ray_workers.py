"""Ranks as Ray actors, over one machine or several. The only module that imports Ray.

Every machine needs this package at the same version and the run folder and policy at the same
paths (a shared file system): rank 0 writes checkpoints, every rank reads them.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch

from agent_rl.config.schema import RunConfig, TrainerConfig
from agent_rl.errors import ConfigError, TrainerError
from agent_rl.protocols import Weights
from agent_rl.trainer.workers.messages import Close, Done, Failed, Message, Reply, Request, Start
from agent_rl.trainer.workers.sample_block import SampleBlock
from agent_rl.trainer.workers.session_folder import SessionFolder
from agent_rl.trainer.workers.worker_group import Answered, Event, Lost, SeenAlive, log_folder
from agent_rl.trainer.workers.world import num_processes

# isort: split
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its new default, without a note
os.environ.setdefault("RAY_worker_niceness", "0")  # of its 15, on a busy machine ranks never run
import ray  # pyright: ignore[reportMissingImports]  # an extra: not installed everywhere
from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]
from ray.util.placement_group import (  # pyright: ignore[reportMissingImports]
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

_KNOCK_S = 10.0  # for a machine that answers nothing at all
_Block = np.ndarray  # [bytes] uint8: what Ray's object store shares between processes unpickled


@dataclass(frozen=True)
class Place:
    """The place where an actor runs."""

    host: str
    pid: int


class RankActor:
    """One rank inside Ray. Requests run in one thread, signs of life in another."""

    def __init__(self) -> None:
        self._rank: Any = None
        self._store: Any = None

    def place(self) -> Place:
        return Place(ray.util.get_node_ip_address(), os.getpid())

    def open_store(self) -> tuple[str, int]:
        """Host the rendezvous of all ranks on a port that is free here."""
        import torch.distributed as dist

        host = ray.util.get_node_ip_address()
        listener = socket.create_server((host, 0))
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return host, port

    def start(self, start: Start, log_file: Path) -> tuple[Reply, None]:
        """Build the trainer; from here on this process prints to ``log_file``."""
        _redirect_output(log_file)
        from agent_rl.trainer.workers.rank import Rank, failure

        try:
            self._rank = Rank(start)
        except Exception as error:  # a rank's boundary: the driver raises it
            return failure(error), None
        return Done(None, self._rank.weight_version), None

    def handle(self, request: Message, block: _Block | None) -> tuple[Reply, _Block | None]:
        """Carry a request out; the weights, when asked for, are the second value."""
        from agent_rl.trainer.workers.weight_block import weight_parts

        exported: list[_Block] = []

        def export(weights: dict[str, Any]) -> None:
            exported.append(_joined(list(weight_parts(weights))))

        view = None if block is None else block.data
        reply: Reply = self._rank.handle(request, view, export)
        if isinstance(reply, Failed):
            print(reply.trace, file=sys.stderr, flush=True)
        return reply, exported[0] if exported else None

    def alive(self, after_s: float) -> None:
        """Answer after a while: a sign that this process is scheduled."""
        time.sleep(after_s)


class RayWorkers:
    """``WorkerGroup`` over actors, one CPU each and one GPU each where the cluster has any."""

    def __init__(self, config: RunConfig, model_path: Path) -> None:
        self._logs = log_folder(config)
        self._period_s = min(5.0, config.trainer.worker_timeout_s / 4)
        self._pending: dict[Any, tuple[int, bool]] = {}  # reference -> rank, whether an answer
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._group: PlacementGroup | None = None
        self._ray = _Connection(config.trainer)
        try:
            self._launch(config, model_path)
        except RayError as error:
            self.kill()
            raise TrainerError(
                f"Ray cannot start the trainer's ranks: got={_one_line(error)} "
                f"expected={num_processes(config.trainer)} actors"
            ) from error
        except BaseException:
            self.kill()
            raise

    def _launch(self, config: RunConfig, model_path: Path) -> None:
        count = num_processes(config.trainer)
        group = self._group = _reserve(count, config.trainer.worker_timeout_s)
        resources = group.bundle_specs[0]
        make_actor: Any = ray.remote  # its stubs know no concurrency groups
        actor_class = make_actor(concurrency_groups={"watch": 1})(RankActor)
        actors = [
            actor_class.options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(count)
        ]
        self._actors = actors
        places: list[Place] = ray.get([actor.place.remote() for actor in actors])
        # Neighbouring ranks share a machine, and rank 0, which writes checkpoints, the driver's.
        here = ray.util.get_node_ip_address()
        order = sorted(range(count), key=lambda i: (places[i].host != here, places[i].host, i))
        self._actors, self._places = [actors[i] for i in order], [places[i] for i in order]
        host, port = ray.get(self._actors[0].open_store.remote())
        for rank, actor in enumerate(self._actors):
            # Ray shows an actor its own devices only, so each one's is number 0.
            start = Start(config, model_path.resolve(), rank, count, 0, (host, port))
            self._expect(rank, actor.start.remote(start, self.log_file(rank)))

    @property
    def num_ranks(self) -> int:
        return len(self._actors)

    def pid(self, rank: int) -> int:
        return self._places[rank].pid

    def log_file(self, rank: int) -> Path:
        return self._logs / f"rank-{rank}.log"

    def send(self, request: Request, samples: SampleBlock | None = None) -> None:
        block = None if samples is None else ray.put(_joined(samples.parts))
        for rank, actor in enumerate(self._actors):
            self._expect(rank, actor.handle.remote(request, block))

    def poll(self, timeout_s: float) -> list[Event]:
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        return [event for reference in ready if (event := self._event(reference)) is not None]

    def kill(self) -> None:
        try:
            self._end_actors()
        finally:  # also where the cluster does not answer any more
            self._ray.close()

    def _end_actors(self) -> None:
        for actor in self._actors:
            with suppress(RayError):
                ray.kill(actor)
        for place in self._places:
            if place.host == self._ray.host:  # Ray asks the process, which may be stopped
                with suppress(ProcessLookupError):
                    os.kill(place.pid, signal.SIGKILL)
        self._actors, self._places = [], []
        self._pending.clear()
        group, self._group = self._group, None
        if group is not None:
            with suppress(RayError):
                remove_placement_group(group)

    def shut_down(self, grace_s: float) -> None:
        if self._actors:
            leaving = [actor.handle.remote(Close(), None) for actor in self._actors]
            ray.wait(leaving, num_returns=len(leaving), timeout=grace_s)
        self.kill()

    def _expect(self, rank: int, answer: Any) -> None:
        self._pending[answer] = rank, True
        self._watch(rank)

    def _watch(self, rank: int) -> None:
        alive = self._actors[rank].alive.options(concurrency_group="watch")
        self._pending[alive.remote(self._period_s)] = rank, False

    def _event(self, reference: Any) -> Event | None:
        rank, is_answer = self._pending.pop(reference)
        try:
            result = ray.get(reference)
        except RayError as error:
            return Lost(
                rank,
                f"process {self._places[rank].pid} on {self._places[rank].host}: "
                f"{_one_line(error)}",
            )
        if is_answer:
            reply, weights = result
            return Answered(rank, reply, None if weights is None else _weights(weights))
        if any(other == rank and answer for other, answer in self._pending.values()):
            self._watch(rank)
        return SeenAlive(rank)


class _Connection:
    """Ray as ``trainer.ray_address`` says: one started here ends with the run, files included."""

    def __init__(self, trainer: TrainerConfig) -> None:
        self._folder: SessionFolder | None = None
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            # Ray replaces the handler for SIGTERM by one that exits; ours ends the step first.
            handler = signal.getsignal(signal.SIGTERM)
            try:
                self._connect(trainer)
            except Exception as error:  # Ray raises that very class when a start takes too long
                self.close()
                verb = "started" if trainer.ray_address == "local" else "reached"
                raise TrainerError(
                    f"Ray cannot be {verb}: got={_one_line(error)} expected=a cluster at "
                    f"trainer.ray_address={trainer.ray_address}"
                ) from error
            finally:
                with suppress(ValueError):  # only the main thread may, and only there it changed
                    signal.signal(signal.SIGTERM, handler)
        self.host: str = ray.util.get_node_ip_address()

    def _connect(self, trainer: TrainerConfig) -> None:
        common: Mapping[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if trainer.ray_address != "local":
            if trainer.ray_address != "auto":
                _knock(trainer.ray_address)
            ray.init(address=trainer.ray_address, **common)
            return
        # Ray keeps sockets in here, and a socket's path may have 107 characters.
        self._folder = SessionFolder("agent-rl-ray-")
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, num_processes(trainer)),
            include_dashboard=False,
            _temp_dir=str(self._folder.path),
            **common,
        )

    def close(self) -> None:
        """Leave the cluster. Idempotent."""
        if self._is_ours:
            ray.shutdown()
            self._is_ours = False
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def _knock(address: str) -> None:
    """Fail at once where nothing listens: Ray itself asks again for minutes. ``OSError``."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_KNOCK_S):
        pass


def _reserve(count: int, timeout_s: float) -> PlacementGroup:
    """Room for ``count`` ranks, on as few machines as possible."""
    total = ray.cluster_resources()
    has_gpus = total.get("GPU", 0) > 0
    bundle = {"CPU": 1.0, "GPU": 1.0} if has_gpus else {"CPU": 1.0}
    short = {name: total.get(name, 0) for name in bundle if total.get(name, 0) < count}
    if short:
        raise ConfigError(
            [
                f"trainer.num_processes: got {count} for a Ray cluster with {short}, expected at "
                f"most {int(min(short.values()))}: every rank takes {bundle}"
            ]
        )
    bundles: list[Any] = [bundle] * count
    group: PlacementGroup = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_s):
        free = {name: ray.available_resources().get(name, 0) for name in bundle}
        remove_placement_group(group)
        raise TrainerError(
            f"the Ray cluster had no room for {count} trainer ranks in {timeout_s:g} s: "
            f"got={free} free expected={count} times {bundle}"
        )
    return group


def _redirect_output(log_file: Path) -> None:
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def _joined(parts: list[Any]) -> _Block:
    """The parts as one array, each copied once."""
    views = [np.frombuffer(part, np.uint8) for part in parts]
    block = np.empty(sum(len(view) for view in views), np.uint8)
    at = 0
    for view in views:
        block[at : at + len(view)] = view
        at += len(view)
    return block


def _weights(block: _Block) -> Weights:
    return safetensors.torch.load(block.tobytes())


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]
