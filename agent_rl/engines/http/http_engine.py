"""``Generator`` over one inference server: the part that is the same for every dialect.

    generate() ─▶ gate ─▶ check ids ─▶ server ─▶ request id, versions, row count, seam ─▶ Completion
    load_weights() ─▶ close gate ─▶ wait for running ─▶ pause ─▶ load + flush ─▶ verify ─▶ open gate

A reply is used whole or not at all. What is wrong with one is counted in ``stats`` and raised, and
the rollout turns it into a status; nothing is repaired by guessing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace

from agent_rl.engines.http.deployment import Deployment
from agent_rl.engines.http.engine_counters import EngineStats
from agent_rl.engines.http.inference_server import InferenceServer, ServerFacts, ServerReply
from agent_rl.engines.http.reply_rows import SeamBook, accept_rows
from agent_rl.engines.http.request_checks import check_reply, check_request, turn_sampling
from agent_rl.engines.http.server_probe import probe_server
from agent_rl.engines.http.server_weights import ServerWeights, WeightReference
from agent_rl.engines.http.update_gate import Gate
from agent_rl.errors import (
    EngineAbortedError,
    EngineError,
    EngineReplyError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from agent_rl.model.config_json import ServedModel
from agent_rl.protocols import Weights
from agent_rl.types import Completion, Floats, GenerateRequest, Rows, TokenIds
from routing_cache import RowLayout

_MAX_RESENDS = 1  # of a generation whose reply was lost on the way


class HttpEngine:
    """An inference server as a ``Generator``. Make it with ``await HttpEngine.connect(...)``.

    Not thread-safe: one event loop at a time.
    """

    def __init__(
        self,
        server: InferenceServer,
        model: ServedModel,
        deployment: Deployment,
        facts: ServerFacts,
        *,
        name: str,
        weight_version: int = 0,
        reference: WeightReference | None = None,
    ) -> None:
        self.server = server
        self.name = name
        self.facts = facts
        self.stats = EngineStats()
        self._model = model
        self._deployment = deployment
        self._version = weight_version
        self._weights = ServerWeights(server, model, deployment, name=name, reference=reference)
        self._seams = SeamBook(model.layout)
        self._gate = Gate(deployment.config.max_sessions)
        self._broken = ""  # why the server's weights are not known any more

    @classmethod
    async def connect(
        cls,
        server: InferenceServer,
        model: ServedModel,
        deployment: Deployment,
        *,
        name: str,
        weight_version: int = 0,
        reference: WeightReference | None = None,
    ) -> HttpEngine:
        """Probe the server, name its version, and wrap it.

        Args:
            name: of this engine among those of ``deployment``.
            weight_version: of the weights that the server has now.
            reference: says what log-probs new weights must give; None checks version and flush
                only.

        Raises:
            EngineSetupError: the server cannot be trusted with replay; says what to change.
            EngineUnavailableError: it is not up.
        """
        facts = await probe_server(
            server,
            model.layout if deployment.config.capture_routing else None,
            vocab_size=model.vocab_size,
            weight_version=weight_version,
        )
        return cls(
            server,
            model,
            deployment,
            facts,
            name=name,
            weight_version=weight_version,
            reference=reference,
        )

    @property
    def row_layout(self) -> RowLayout:
        return self._model.layout

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def is_usable(self) -> bool:
        """False while its weights are not known: an update failed, or it restarted unasked."""
        return not self._broken

    @property
    def num_running(self) -> int:
        """Requests that are being worked on or wait for a place."""
        return self._gate.num_inside

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion. Cancelling the call aborts it on the server.

        Raises:
            CapacityError: prompt plus ``max_new_tokens`` exceeds the server's context length.
            EngineUnavailableError: the server does not answer; EngineTimeoutError when it may
                still be working on it.
            EngineReplyError: it answered something else than was asked.
            EngineAbortedError: the server ended the request early.
            EngineError: malformed request, refusal, or weights in an unknown state.
        """
        check_request(
            request,
            vocab_size=self._model.vocab_size,
            context_length=self.facts.context_length,
            captures_routing=self._deployment.config.capture_routing,
            gives_full_logprobs=self.server.gives_full_logprobs,
            where=self._where(request),
        )
        await self._gate.wait_open()
        self._check_usable()
        async with self._gate.inside():
            return await self._generate(request)

    async def score(self, token_ids: TokenIds) -> Floats:
        """Return log-probs ``[T-1]`` at temperature 1 of tokens 1..T-1 under its weights."""
        await self._gate.wait_open()
        self._check_usable()
        async with self._gate.inside():
            return await self.server.score(token_ids)

    async def is_up(self) -> bool:
        """Ask the server what it is; False where it does not say."""
        try:
            await self.server.facts()
        except EngineError:
            return False
        return True

    async def end_session(self, session_id: str) -> None:
        """Forget the session; the server's prefix cache evicts by itself."""
        self._seams.forget(session_id)

    async def load_weights(self, weights: Weights, version: int) -> None:
        """Replace the server's weights, flush its cache, and prove both with a probe.

        New requests wait meanwhile; running ones are awaited, and aborted after
        ``drain_timeout_s``. On failure the engine refuses requests until an update succeeds:
        half-loaded weights must not sample.
        """
        async with self.closed():
            await self.replace_weights(weights, version)

    def hold(self) -> None:
        """Let new requests wait from now on. :meth:`closed` ends it."""
        self._gate.shut()

    @asynccontextmanager
    async def closed(self) -> AsyncIterator[None]:
        """Keep requests off the server inside the block; new ones wait before it."""
        self._gate.shut()
        timeout_s = self._deployment.drain_timeout_s
        try:
            try:
                await self._gate.wait_empty(timeout_s)
                await self.server.pause()
            except TimeoutError:
                await self.server.pause()  # ends what is left; the callers get an abort
                await self._wait_aborted(timeout_s)
            yield
        finally:
            try:
                await self.server.resume()
            except EngineError as error:
                self._broken = self._broken or f"it does not go on after a pause: {error}"
            self._gate.open()  # whatever happened: who waits before it is told then

    async def _wait_aborted(self, timeout_s: float) -> None:
        try:
            await self._gate.wait_empty(timeout_s)
        except TimeoutError as error:
            raise EngineUnavailableError(
                f"engine {self.name!r}: got {self.num_running} requests still running "
                f"{timeout_s:g} s after the server was told to end them, expected none; see its log"
            ) from error

    async def replace_weights(self, weights: Weights, version: int) -> None:
        """Carry out the update; call it inside :meth:`closed`. Mutates the server.

        ``weights`` are kept for a server that restarts: they must not change afterwards.
        """
        with self._weights_in_doubt(version):
            await self._weights.replace(weights, version)
        self._version = version
        self.stats.weight_updates += 1

    async def restore_weights(self) -> None:
        """Give a restarted server the weights it had; call it inside :meth:`closed`."""
        layout = self._model.layout if self._deployment.config.capture_routing else None
        with self._weights_in_doubt(self._version):
            await self.server.resume()  # a paused server would not answer the probe
            await probe_server(
                self.server,
                layout,
                vocab_size=self._model.vocab_size,
                weight_version=self._version,
            )
            await self.server.pause()
            await self._weights.restore(self._version)
            await self.server.resume()

    async def recover(self) -> None:
        """Restore the weights of a server that came back, and take requests again."""
        async with self.closed():
            await self.restore_weights()

    async def aclose(self) -> None:
        """Close the connections; the server itself belongs to whoever started it."""
        await self.server.aclose()
        self._weights.forget()

    @contextmanager
    def _weights_in_doubt(self, version: int) -> Iterator[None]:
        """Requests are refused until the block has ended well."""
        self._broken = f"the update to version {version} did not finish"
        try:
            yield
        except EngineError as error:
            self.stats.failed_updates += 1
            self._broken = f"the update to version {version} failed: {error}"
            raise
        self._broken = ""
        self._seams.clear()

    def _check_usable(self) -> None:
        if self._broken:
            raise EngineUnavailableError(
                f"engine {self.name!r} takes no requests: {self._broken}; load weights again"
            )

    async def _generate(self, request: GenerateRequest) -> Completion:
        version_before = self._version
        start = request.routed_experts_start
        first = None if start is None else self._seams.first_row(request.session_id, start)
        ask = replace(request, routed_experts_start=first)
        if not self.server.seeds_by_position:
            ask = replace(ask, sampling=turn_sampling(ask.sampling, len(ask.token_ids)))
        reply = await self._ask(ask)
        versions = self._versions(reply, version_before)
        rows: Rows | None = None
        if start is not None and first is not None:
            rows = self._accept_rows(request, reply, first, start)
        self.stats.count(reply, 0 if rows is None else len(rows) + (start or 0) - (first or 0))
        return Completion(
            token_ids=reply.token_ids,
            logprobs=reply.logprobs,
            finish_reason=reply.finish_reason,
            weight_versions=versions,
            routed_experts=rows,
            routed_experts_start=start or 0,
            rows_lost=start is not None and rows is None,
            cached_tokens=reply.cached_tokens,
            engine=self.name,
            full_logprobs=reply.full_logprobs,
        )

    async def _ask(self, request: GenerateRequest) -> ServerReply:
        """Send, and once more if the reply got lost: nothing of the first was seen or used.

        A time-out is not resent: long completions would be drawn again until they are short.
        """
        for attempt in range(_MAX_RESENDS + 1):
            request_id = secrets.token_hex(12)
            self.stats.requests += 1
            try:
                reply = await self.server.generate(request, request_id)
            except asyncio.CancelledError:
                self.stats.aborts += 1
                await self._abort_quietly(request_id)
                raise
            except EngineUnavailableError as error:
                self.stats.unavailable += 1
                lost = not isinstance(error, EngineTimeoutError)
                if lost and attempt < _MAX_RESENDS and await self.is_up():
                    self.stats.resends += 1
                    await self._abort_quietly(request_id)
                    continue
                await self._abort_quietly(request_id)
                raise
            except EngineReplyError:
                self.stats.bad_replies += 1
                raise
            except EngineError:
                self.stats.refused += 1
                raise
            self._judge(request, reply, request_id)
            return reply
        raise AssertionError("unreachable")

    async def _abort_quietly(self, request_id: str) -> None:
        """Tell the server to stop; it does not matter whether it still can."""
        try:
            await asyncio.shield(self.server.abort(request_id))
        except EngineError:
            return

    def _where(self, request: GenerateRequest) -> str:
        return f"engine {self.name!r}, session {request.session_id!r}"

    def _judge(self, request: GenerateRequest, reply: ServerReply, request_id: str) -> None:
        self.stats.retractions += reply.num_retractions
        try:
            check_reply(
                request,
                reply,
                request_id,
                vocab_size=self._model.vocab_size,
                where=self._where(request),
            )
        except EngineAbortedError:
            self.stats.aborts += 1
            raise
        except EngineReplyError:
            self.stats.bad_replies += 1
            raise

    def _versions(self, reply: ServerReply, version_before: int) -> tuple[int, ...]:
        """Return the versions that sampled, ascending. A restarted server names its first one."""
        expected = {version_before, self._version}
        if not reply.weight_versions:
            versions = expected
        else:
            versions = {int(v) if v.isdigit() else -1 for v in reply.weight_versions}
        if not versions <= expected:
            self.stats.stale_replies += 1
            self._broken = f"it answers with version {reply.weight_versions}, not {self._version}"
            raise EngineReplyError(
                f"engine {self.name!r} sampled with other weights: got version "
                f"{reply.weight_versions}, expected {sorted(expected)}; it was restarted or "
                "updated behind our back"
            )
        if len(versions) > 1:
            self.stats.mixed_versions += 1
        return tuple(sorted(versions))

    def _accept_rows(
        self, request: GenerateRequest, reply: ServerReply, first: int, start: int
    ) -> Rows | None:
        """Return the rows ``[start, …)`` of a reply whose rows begin at ``first``."""
        session_id = request.session_id
        where = self._where(request)
        try:
            rows = accept_rows(
                reply,
                self._model.layout,
                num_prompt=len(request.token_ids),
                start=first,
                where=where,
                refuse_bad=self._deployment.refuse_bad_rows,
            )
        except EngineReplyError:
            self.stats.bad_replies += 1
            raise
        if rows is None:
            return None
        if first < start:
            reused = first < reply.cached_tokens
            seam = self._seams.judge(session_id, rows[:1], reused=reused)
            self.stats.seams_checked += seam.num_compared
            self.stats.seams_recomputed += seam.of_same_tokens and seam.shared < 1.0
            if not seam.of_same_tokens:
                self.stats.foreign_rows += 1
                self.stats.bad_replies += 1
                self._seams.forget(session_id)
                raise EngineReplyError(
                    f"{where}: the routing rows are not of this conversation: row {first} "
                    "differs from the one returned a turn before, expected the same experts"
                )
        self._seams.note(session_id, rows, first)
        return rows[start - first :]
