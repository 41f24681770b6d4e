"""Several engines behind one ``Generator``: placement, failover, all-or-nothing weight updates.

    session ─▶ the engine it is on, while that one is in service
            ─▶ else where the longest prefix is warm (unless much busier than the least loaded)
            ─▶ else the least loaded

In service means: it answers, and it has the fleet's weight version. An engine that fails leaves
service and is brought back in the background with the fleet's weights; its sessions move. Every
request carries its whole prompt, so nothing is lost with an engine but its prefix cache.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field, replace

from agent_rl.engines.balanced.warm_prefixes import PrefixIndex
from agent_rl.engines.http.http_engine import HttpEngine
from agent_rl.errors import (
    EngineError,
    EngineReplyError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from agent_rl.protocols import Weights
from agent_rl.types import Completion, Floats, GenerateRequest, TokenIds
from routing_cache import RowLayout


@dataclass(frozen=True)
class BalancedOptions:
    """Placement and recovery. ``max_imbalance``: how many more requests than the least loaded
    engine one may have and still attract new sessions by a warm prefix."""

    max_imbalance: int = 16
    min_warm_tokens: int = 32
    revive_every_s: float = 1.0
    revive_timeout_s: float = 900.0  # how long requests wait when no engine is in service
    overlap_after_move: bool = True  # ask a new engine for all rows, to measure disagreement


@dataclass
class BalancedStats:
    """Counters since the start."""

    moved_sessions: int = 0
    engines_lost: int = 0
    engines_revived: int = 0
    warm_placements: int = 0
    cold_placements: int = 0
    requests_repeated: int = 0
    partial_updates: int = 0


@dataclass(eq=False)
class _Member:
    number: int
    engine: HttpEngine
    in_service: bool = True
    reviving: asyncio.Task[None] | None = None
    sessions: set[str] = field(default_factory=set[str])


class BalancedEngine:
    """``Generator`` over connected engines of one model and one weight version.

    Raises ``EngineError`` at construction when they do not agree on layout and version.
    """

    def __init__(
        self, engines: Sequence[HttpEngine], options: BalancedOptions | None = None
    ) -> None:
        versions = {engine.weight_version for engine in engines}
        layouts = {engine.row_layout for engine in engines}
        if len(versions) != 1 or len(layouts) != 1:
            raise EngineError(
                f"engines of one fleet must agree: got weight versions {sorted(versions)} and "
                f"{len(layouts)} row layouts, expected one of each"
            )
        self.options = options or BalancedOptions()
        self.stats = BalancedStats()
        self._members = [_Member(number, engine) for number, engine in enumerate(engines)]
        self._version = engines[0].weight_version
        self._weights: Weights | None = None  # of the newest update, for engines that come back
        self._prefixes = PrefixIndex(len(engines))
        self._home: dict[str, _Member] = {}
        self._changed = asyncio.Event()  # set when an engine came back
        self._updating = asyncio.Lock()
        self._closed = False

    @property
    def name(self) -> str:
        return "+".join(member.engine.name for member in self._members)

    @property
    def row_layout(self) -> RowLayout:
        return self._members[0].engine.row_layout

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def num_in_service(self) -> int:
        return sum(member.in_service for member in self._members)

    def metrics(self) -> dict[str, float]:
        """Return the counters of the fleet and, summed, of its engines."""
        summed: dict[str, float] = {}
        for member in self._members:
            for key, value in member.engine.stats.to_metrics("engine").items():
                summed[key] = summed.get(key, 0.0) + value
        own = {f"fleet_{key}": float(value) for key, value in asdict(self.stats).items()}
        return summed | own | {"fleet_in_service": float(self.num_in_service)}

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion, on another engine when one fails.

        After a move ``routed_experts_start`` of the completion is 0, earlier than asked: the new
        engine's rows for the whole prompt, so that whoever holds the old ones can compare.

        Raises:
            EngineUnavailableError: no engine came back within ``revive_timeout_s``.
            EngineTimeoutError: the answer took too long; it is not asked for again.
            EngineError: as ``HttpEngine.generate``, for reasons that another engine shares.
        """
        while True:
            member = await self._place(request)
            moved = self._settle(member, request)
            ask = request
            if moved and self.options.overlap_after_move and request.routed_experts_start:
                ask = replace(request, routed_experts_start=0)
            try:
                completion = await member.engine.generate(ask)
            except EngineTimeoutError:
                # Asked again it would be drawn again until it is short, and might never end.
                if not await member.engine.is_up():
                    self._lose(member)
                raise
            except EngineUnavailableError:
                self._lose(member)
            except EngineReplyError:
                if member.engine.is_usable:
                    raise
                self._lose(member)  # it restarted: its weights are not ours
            else:
                return completion
            self.stats.requests_repeated += 1

    async def score(self, token_ids: TokenIds) -> Floats:
        """Score as ``HttpEngine.score`` does, on the least loaded engine."""
        member = min(self._in_service(), key=lambda m: m.engine.num_running, default=None)
        if member is None:
            raise EngineUnavailableError("no engine is in service")
        return await member.engine.score(token_ids)

    async def end_session(self, session_id: str) -> None:
        """Forget where the session was. Unknown ids are ignored."""
        member = self._home.pop(session_id, None)
        if member is not None:
            member.sessions.discard(session_id)
            await member.engine.end_session(session_id)

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Update every engine, with all gates closed before the first one changes.

        An engine that cannot be updated leaves service until it has these weights; so whoever is
        in service has them, and no request is answered by two versions.

        Raises:
            EngineError: no engine could be updated. None is in service then.
        """
        async with self._updating:
            members = self._in_service()
            for member in members:
                member.engine.hold()
            # A copy: the trainer may go on to change its own while an engine is still away.
            self._weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
            failures = await self._update(members, self._weights, version)
            self._version = version
            for member, error in failures.items():
                self._lose(member)
                self.stats.partial_updates += 1
                if len(failures) == len(members):
                    raise EngineError(f"no engine took version {version}: {error}") from error
            if not members:
                raise EngineError(
                    f"version {version} was loaded nowhere: got no engine in service, expected one"
                )

    async def aclose(self) -> None:
        """Stop reviving and close every connection. Idempotent."""
        self._closed = True
        tasks = [member.reviving for member in self._members if member.reviving is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for member in self._members:
            await member.engine.aclose()

    async def _update(
        self, members: Sequence[_Member], weights: Weights, version: int
    ) -> dict[_Member, EngineError]:
        failures: dict[_Member, EngineError] = {}
        async with AsyncExitStack() as gates:
            for member in members:
                try:
                    await gates.enter_async_context(member.engine.closed())
                except EngineError as error:
                    failures[member] = error
            ready = [member for member in members if member not in failures]

            async def update(member: _Member) -> None:
                try:
                    await member.engine.replace_weights(weights, version)
                    self._prefixes.forget(member.number)
                except EngineError as error:
                    failures[member] = error

            await asyncio.gather(*(update(member) for member in ready))
            for member in failures:
                member.in_service = False  # before its gate opens
        return failures

    def _in_service(self) -> list[_Member]:
        return [member for member in self._members if member.in_service]

    async def _place(self, request: GenerateRequest) -> _Member:
        """Choose the engine for this request. Waits while none is in service."""
        deadline = asyncio.get_running_loop().time() + self.options.revive_timeout_s
        while not (members := self._in_service()):
            self._changed.clear()
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait_for(self._changed.wait(), max(0.0, left))
            except TimeoutError as error:
                raise EngineUnavailableError(
                    f"no engine came back in {self.options.revive_timeout_s:.0f} s; see the "
                    "servers' logs"
                ) from error
        home = self._home.get(request.session_id)
        if home is not None and home.in_service:
            return home
        least = min(members, key=lambda m: (m.engine.num_running, len(m.sessions)))
        warm = self._prefixes.warm_tokens(request.token_ids, [m.number for m in members])
        warmest = max(members, key=lambda m: (warm[m.number], -m.engine.num_running))
        busier = warmest.engine.num_running - least.engine.num_running
        is_warm = warm[warmest.number] >= self.options.min_warm_tokens
        if is_warm and busier <= self.options.max_imbalance:
            self.stats.warm_placements += 1
            return warmest
        self.stats.cold_placements += 1
        return least

    def _settle(self, member: _Member, request: GenerateRequest) -> bool:
        """Book the session on ``member``; return whether it was on another one before."""
        home = self._home.get(request.session_id)
        self._home[request.session_id] = member
        member.sessions.add(request.session_id)
        # At once, not when the answer comes: siblings that start together belong together.
        self._prefixes.add(member.number, request.token_ids)
        if home is None or home is member:
            return False
        home.sessions.discard(request.session_id)
        self.stats.moved_sessions += 1
        return True

    def _lose(self, member: _Member) -> None:
        """Take an engine out of service and start bringing it back. Idempotent."""
        self._prefixes.forget(member.number)
        if member.in_service or member.reviving is None:
            member.in_service = False
            self.stats.engines_lost += 1
        if (member.reviving is None or member.reviving.done()) and not self._closed:
            member.reviving = asyncio.get_running_loop().create_task(self._revive(member))

    async def _revive(self, member: _Member) -> None:
        """Try until the engine answers and has the fleet's weights."""
        while not member.in_service:
            await asyncio.sleep(self.options.revive_every_s)
            async with self._updating:
                try:
                    if member.engine.weight_version == self._version:
                        await member.engine.recover()
                    elif self._weights is not None:
                        await member.engine.load_weights(self._weights, self._version)
                except EngineError:
                    continue
                member.in_service = True
                self.stats.engines_revived += 1
                self._changed.set()
