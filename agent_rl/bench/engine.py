"""The cost of routing rows on a real inference server: rows, bytes, client CPU, tokens per second.

The workload is a group: one prompt, ``num_samples`` conversations of ``num_turns`` turns, each turn
sampling ``new_tokens`` and adding ``observed_tokens``. The first sample's first turn goes ahead, so
that the siblings find the prompt's rows in the cache and its KV on the server. The cost of capture
is taken from pairs of runs, one server with capture and one without, in turn: as wall time, which a
loaded machine makes useless, and as CPU time of the server's processes, which it does not.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.server_fleet import ServerFleet
from agent_rl.types import GenerateRequest, SamplingParams, TokenIds
from routing_cache import RoutingCache, Session


@dataclass(frozen=True)
class Workload:
    """One group of multi-turn conversations. Counts are tokens where not said otherwise."""

    num_turns: int = 12
    num_samples: int = 4
    prompt_tokens: int = 96
    new_tokens: int = 24
    observed_tokens: int = 48
    seed: int = 0

    @property
    def longest(self) -> int:
        per_turn = self.new_tokens + self.observed_tokens
        return self.prompt_tokens + self.num_turns * per_turn


@dataclass(frozen=True)
class EngineBench:
    """Figures of one engine. Ratios first; the absolute ones hold for this machine and its load."""

    engine: str
    rows_fetched: int
    rows_unique: int
    rows_fetched_over_unique: float
    full_returns_over_unique: float  # had every turn returned the whole conversation
    row_bytes_on_wire: int
    full_bytes_over_suffix: float
    seam_rows: int
    prefix_hit_over_shared: float
    client_cpu_us_per_token: float
    capture_slowdown_median: float  # seconds with capture over seconds without, minus 1
    capture_slowdown_low: float
    capture_slowdown_high: float
    capture_cpu_median: float  # the same of the server's CPU seconds
    capture_cpu_low: float
    capture_cpu_high: float
    num_pairs: int
    tokens_per_s_with_capture: float

    def to_json(self) -> dict[str, float | int | str]:
        return asdict(self)


async def measure(
    kind: Literal["sglang", "vllm"],
    policy: Path,
    work_dir: Path,
    *,
    workload: Workload | None = None,
    num_pairs: int = 6,
    report: Callable[[str], None] = print,
) -> EngineBench:
    """Launch two servers of ``policy``, with and without capture, and run the workload on them."""
    work = workload or Workload()
    config = EngineConfig(
        kind=kind,
        dtype="float32",
        max_sessions=work.num_samples,
        weight_transfer="disk" if kind == "vllm" else "tensors",
        verify_weights=False,
    )
    without = replace(config, capture_routing=False)
    length = work.longest + 8
    capture, plain = (
        ServerFleet(Deployment(settings, policy, work_dir / name, context_length=length))
        for settings, name in ((config, "capture"), (without, "plain"))
    )
    try:
        report(f"starting two {kind} servers")
        await asyncio.gather(capture.start(), plain.start())
        report("counting rows and bytes")
        counted = await _count(capture, work)
        pairs: list[tuple[_Cost, _Cost]] = []
        for number in range(num_pairs):
            again = replace(work, seed=work.seed + 1000 + number)
            order = (capture, plain) if number % 2 else (plain, capture)
            cost = {fleet: await _cost(fleet, again) for fleet in order}
            pairs.append((cost[capture], cost[plain]))
            report(f"pair {number + 1} of {num_pairs}: {_ratios(pairs, 'cpu_s')[-1]:+.1%} CPU")
    finally:
        await asyncio.gather(capture.aclose(), plain.aclose())
    sampled = work.num_samples * work.num_turns * work.new_tokens
    wall, cpu = _ratios(pairs, "wall_s"), _ratios(pairs, "cpu_s")
    return replace(
        counted,
        capture_slowdown_median=statistics.median(wall),
        capture_slowdown_low=min(wall),
        capture_slowdown_high=max(wall),
        capture_cpu_median=statistics.median(cpu),
        capture_cpu_low=min(cpu),
        capture_cpu_high=max(cpu),
        num_pairs=num_pairs,
        tokens_per_s_with_capture=sampled / statistics.median(c.wall_s for c, _ in pairs),
    )


@dataclass(frozen=True)
class _Cost:
    """The cost of one run of the workload."""

    wall_s: float
    cpu_s: float  # of the server


def _ratios(pairs: list[tuple[_Cost, _Cost]], name: Literal["wall_s", "cpu_s"]) -> list[float]:
    return [getattr(with_, name) / getattr(without, name) - 1 for with_, without in pairs]


@dataclass
class _Tally:
    """Adds up over the turns of a group."""

    full_rows: int = 0
    shared: int = 0  # prompt tokens that the tree knows to be on the server
    cached: int = 0


async def _count(fleet: ServerFleet, work: Workload) -> EngineBench:
    cache = RoutingCache(fleet.row_layout)
    tally = _Tally()
    before = fleet.metrics()
    cpu = time.process_time()
    wholes = await _play(fleet, work, cache, tally)
    cpu = time.process_time() - cpu
    after = fleet.metrics()
    gained = {key: after[key] - before[key] for key in after}
    unique = _unique_prefixes([whole[:-1] for whole in wholes])
    fetched, row_bytes = int(gained["engine_rows_fetched"]), int(gained["engine_row_bytes"])
    return EngineBench(
        engine=fleet.name,
        rows_fetched=fetched,
        rows_unique=unique,
        rows_fetched_over_unique=fetched / unique,
        full_returns_over_unique=tally.full_rows / unique,
        row_bytes_on_wire=row_bytes,
        full_bytes_over_suffix=tally.full_rows / fetched,
        seam_rows=int(gained["engine_seams_checked"]),
        prefix_hit_over_shared=tally.cached / tally.shared,
        client_cpu_us_per_token=1e6 * cpu / gained["engine_sampled_tokens"],
        capture_slowdown_median=0.0,
        capture_slowdown_low=0.0,
        capture_slowdown_high=0.0,
        capture_cpu_median=0.0,
        capture_cpu_low=0.0,
        capture_cpu_high=0.0,
        num_pairs=0,
        tokens_per_s_with_capture=0.0,
    )


async def _cost(fleet: ServerFleet, work: Workload) -> _Cost:
    """Run the whole group once."""
    cache = RoutingCache(fleet.row_layout) if fleet.deployment.config.capture_routing else None
    process = fleet.supervisors[0].process
    cpu_s, started = process.cpu_s(), time.monotonic()
    await _play(fleet, work, cache, _Tally())
    return _Cost(time.monotonic() - started, process.cpu_s() - cpu_s)


async def _play(
    fleet: ServerFleet, work: Workload, cache: RoutingCache | None, tally: _Tally
) -> list[TokenIds]:
    """Play the group; token ids of every conversation ``[T]``."""
    rng = np.random.default_rng(work.seed)
    prompt = rng.integers(6, fleet.model.vocab_size, work.prompt_tokens, dtype=np.int32)
    players = [
        _Player(fleet, work, cache, tally, np.random.default_rng((work.seed, n)), n)
        for n in range(work.num_samples)
    ]
    await players[0].turn(prompt)
    await asyncio.gather(*(player.play(prompt) for player in players))
    return [player.whole for player in players]


class _Player:
    """One conversation of the group."""

    def __init__(
        self,
        fleet: ServerFleet,
        work: Workload,
        cache: RoutingCache | None,
        tally: _Tally,
        rng: np.random.Generator,
        number: int,
    ) -> None:
        self._fleet, self._work, self._cache = fleet, work, cache
        self._tally, self._rng, self._number = tally, rng, number
        self._rows: Session | None = None
        self._num_turns = 0
        self.whole: TokenIds = np.empty(0, np.int32)

    async def play(self, prompt: TokenIds) -> None:
        """Play to the end, from wherever it is."""
        while self._num_turns < self._work.num_turns:
            await self.turn(prompt if self._num_turns == 0 else self._next_prompt())
        await self._fleet.end_session(self._session_id)

    async def turn(self, prompt: TokenIds) -> None:
        if self._cache is not None and self._rows is None:
            self._rows = self._cache.session(0, engine=self._fleet.name)
            self._rows.adopt(prompt)
        start = None if self._rows is None else self._rows.num_rows
        sampling = SamplingParams(1.0, self._work.new_tokens)
        completion = await self._fleet.generate(
            GenerateRequest(self._session_id, prompt, sampling, start)
        )
        # On the server is what was fed: all but the last sampled token of the turn before, or the
        # prompt that a sibling ran. The last prompt token is always computed again.
        fed = len(self.whole) - 1 if self._num_turns else (len(prompt) if self._number else 0)
        self._tally.shared += max(0, min(fed, len(prompt) - 1))
        self._tally.cached += completion.cached_tokens
        self.whole = np.concatenate([prompt, completion.token_ids])
        self._tally.full_rows += len(self.whole) - 1
        if self._rows is not None and start is not None:
            self._rows.record(
                self.whole[self._rows.num_tokens :],
                completion.routed_experts,
                start=start,
                weight_version=completion.weight_versions[-1],
                num_prefill=len(prompt) - start,
                turn=self._num_turns,
            )
        self._num_turns += 1

    def _next_prompt(self) -> TokenIds:
        observed = self._rng.integers(
            6, self._fleet.model.vocab_size, self._work.observed_tokens, dtype=np.int32
        )
        return np.concatenate([self.whole, observed])

    @property
    def _session_id(self) -> str:
        return f"bench-{self._work.seed}/{self._number}"


def _unique_prefixes(sequences: list[TokenIds]) -> int:
    """Distinct (prefix, token) pairs: rows that a perfect client fetches, once each."""
    nodes = 0
    for number, sequence in enumerate(sequences):
        shared = 0
        for other in sequences[:number]:
            length = min(len(sequence), len(other))
            differ = np.flatnonzero(sequence[:length] != other[:length])
            shared = max(shared, int(differ[0]) if len(differ) else length)
        nodes += len(sequence) - shared
    return nodes
