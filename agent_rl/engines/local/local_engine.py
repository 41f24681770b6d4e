"""The embedded engine: a Hugging Face MoE model, continuous batching, one KV prefix per session.

    callers (event loop)                 driver task (same loop)            worker thread
    generate() ── waiting ──────────────▶ admit ─▶ lanes ─────────────────▶ ModelRunner.burst
       ▲                                                                        │
       └── Completion ◀── finished ◀── note tokens, rows, log-probs ◀───────────┘

All bookkeeping happens on the event loop; the thread only computes. The driver lives while there
are requests, so the engine may be used from one event loop after another.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from agent_rl.config.schema import EngineConfig
from agent_rl.engines.local.runner import Lane, LaneResult, ModelRunner
from agent_rl.engines.local.slots import Slot, SlotTable
from agent_rl.errors import CapacityError, EngineError
from agent_rl.types import Completion, FinishReason, Floats, GenerateRequest
from routing_cache import RowLayout

_BURST_ITERATIONS = 4  # tokens decoded between two looks at the waiting requests
_GATHER_S = 0.002  # an idle engine waits for more requests while they keep coming this close
_GATHER_ROUNDS = 5  # … at most this many times
_JOIN_FRACTION = 4  # a running batch takes newcomers once they are a quarter of it
_MAX_PASSED_OVER = 3  # … or once the oldest has been passed over this many bursts


@dataclass(eq=False)
class _Call:
    """One request from arrival to answer."""

    request: GenerateRequest
    seed: int
    answer: asyncio.Future[Completion]
    slot: Slot | None = None
    cached_tokens: int = 0
    shared: bool = False  # the prompt was computed by a sibling of the same burst
    passed_over: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    full_logprobs: list[Floats] = field(default_factory=list)

    @property
    def session_id(self) -> str:
        return self.request.session_id

    @property
    def is_over(self) -> bool:
        return self.answer.done()


class LocalEngine:
    """``Generator`` over a Qwen3-MoE checkpoint folder, on CPU.

    A request with a seed samples the same tokens whatever shares its batch; see ``sampling.py``
    and ``experts.py`` for why. Not thread-safe: call it from one event loop at a time.

    Args:
        folder: Hugging Face checkpoint folder (``config.json``, safetensors).
        config: ``dtype`` is that of weights and activations, a simulated one as in
            ``quantize.py``, attention always runs in float32; ``max_sessions`` counts KV slots,
            which idle sessions lose, least recently used first; without ``capture_routing``
            requests for rows are refused. None takes the defaults.
        max_tokens: longest prompt plus completion of a request.
        weight_version: version of the weights in ``folder``.
    """

    def __init__(
        self,
        folder: Path,
        config: EngineConfig | None = None,
        *,
        max_tokens: int = 256,
        weight_version: int = 0,
    ) -> None:
        config = config or EngineConfig()
        max_sessions = config.max_sessions
        self._runner = ModelRunner(
            folder, dtype=config.dtype, num_slots=max_sessions, max_tokens=max_tokens
        )
        layout = self._runner.layout
        self._table = SlotTable(
            max_sessions,
            max_tokens=max_tokens,
            row_shape=(layout.num_moe_layers, layout.moe_top_k),
            row_dtype=layout.dtype,
        )
        self._max_tokens = max_tokens
        self._captures = config.capture_routing
        self._version = weight_version
        self._executor = ThreadPoolExecutor(
            1,
            thread_name_prefix="local-engine",
            initializer=torch.set_num_threads,
            initargs=(config.num_threads,),
        )
        self._waiting: deque[_Call] = deque()
        self._active: list[_Call] = []
        self._driver: asyncio.Task[None] | None = None
        self._loading = False
        self._unusable: str = ""  # why every further request is refused, for good

    @property
    def name(self) -> str:
        return "local"

    @property
    def row_layout(self) -> RowLayout:
        return self._runner.layout

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def num_sessions(self) -> int:
        """Sessions that hold a KV slot."""
        return len(self._table)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion; cancelling the call frees the session's slot.

        Raises:
            CapacityError: prompt plus ``max_new_tokens`` exceeds ``max_tokens``.
            EngineError: a malformed request, a session that is already running one, an engine
                that is closed or loading, or a failure of the worker.
        """
        self._check(request)
        seed = request.sampling.seed
        call = _Call(
            request=request,
            seed=secrets.randbits(63) if seed is None else seed,
            answer=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(call)
        self._ensure_driver()
        return await call.answer

    async def end_session(self, session_id: str) -> None:
        """Free the session's slot. Raises ``EngineError`` while it runs a request."""
        if self._is_running(session_id):
            raise EngineError(f"session {session_id!r} cannot end: a request is still running")
        if not any(call.session_id == session_id for call in self._active):
            self._table.forget(session_id)  # else a cancelled call still computes: freed after it

    async def load_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replace all parameters and forget every session's prefix and rows.

        Raises:
            EngineError: requests are running, or the weights do not fit (then nothing changes).
        """
        self._check_usable()
        running = [c.session_id for c in (*self._waiting, *self._active) if not c.is_over]
        if running:
            raise EngineError(
                f"weights cannot change under running requests: got {len(running)} running "
                f"({running[:3]}), expected none; wait for them or cancel them"
            )
        self._loading = True
        try:
            if self._driver is not None:  # cancelled calls may still be computing
                await asyncio.wait({self._driver})
                self._check_usable()
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._executor, self._runner.load_weights, weights)
        finally:
            self._loading = False
        self._table.clear()
        self._version = version

    async def aclose(self) -> None:
        """Fail what is running, stop the worker. Idempotent."""
        self._unusable = "it is closed"
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait({self._driver})
        self._executor.shutdown(wait=True)

    def _check_usable(self) -> None:
        if self._unusable:
            raise EngineError(f"the local engine takes no requests: {self._unusable}")

    def _check(self, request: GenerateRequest) -> None:
        self._check_usable()
        if self._loading:
            raise EngineError("the local engine takes no requests while weights are loading")
        num_prompt, sampling = len(request.token_ids), request.sampling
        start = request.routed_experts_start
        if num_prompt == 0 or sampling.max_new_tokens < 1 or sampling.temperature < 0:
            raise EngineError(
                f"request of {request.session_id!r} is malformed: got {num_prompt} prompt tokens, "
                f"max_new_tokens={sampling.max_new_tokens}, temperature={sampling.temperature}; "
                "expected at least 1, at least 1, at least 0"
            )
        if start is not None and not self._captures:
            raise EngineError(
                f"session {request.session_id!r} asked for routing rows, but this engine does not "
                "capture them; set engine.capture_routing or pass routed_experts_start=None"
            )
        if start is not None and not 0 <= start <= num_prompt:
            raise EngineError(
                f"routed_experts_start is outside the prompt: got {start}, expected 0..{num_prompt}"
            )
        low, high = int(request.token_ids.min()), int(request.token_ids.max())
        if low < 0 or high >= self._runner.vocab_size:
            raise EngineError(
                f"prompt of {request.session_id!r} has ids outside the vocabulary: "
                f"got {low}..{high}, expected 0..{self._runner.vocab_size - 1}"
            )
        if num_prompt + sampling.max_new_tokens > self._max_tokens:
            raise CapacityError(
                f"session {request.session_id!r} does not fit: got {num_prompt} prompt tokens + "
                f"{sampling.max_new_tokens} new, expected at most {self._max_tokens}; "
                "raise max_tokens of the engine or lower the agent's limits"
            )
        if self._is_running(request.session_id):
            raise EngineError(
                f"session {request.session_id!r} is busy: got a second request while one runs"
            )

    def _is_running(self, session_id: str) -> bool:
        calls = (*self._waiting, *self._active)
        return any(c.session_id == session_id and not c.is_over for c in calls)

    def _ensure_driver(self) -> None:
        if self._driver is None:
            self._driver = asyncio.get_running_loop().create_task(self._drive())
            self._driver.add_done_callback(self._driver_ended)

    def _driver_ended(self, driver: asyncio.Task[None]) -> None:
        """Leave nobody waiting when the driver returned, crashed or was cancelled."""
        self._driver = None
        error = None if driver.cancelled() else driver.exception()
        if not driver.cancelled() and error is None:
            if self._waiting:  # arrived after its last look
                self._ensure_driver()
            return
        if error is not None:
            self._unusable = f"its worker failed with {type(error).__name__}: {error}"
        for call in (*self._waiting, *self._active):
            self._table.forget(call.session_id)
            if not call.is_over:
                failure = EngineError(
                    f"request of {call.session_id!r} was lost: "
                    f"{self._unusable or 'the event loop is shutting down'}"
                )
                failure.__cause__ = error
                call.answer.set_exception(failure)
        self._waiting.clear()
        self._active.clear()

    async def _drive(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting or self._active:
            if not self._active:
                await self._gather()
            self._drop_cancelled()
            self._admit()
            lanes = _share_prompts([self._lane(call) for call in self._active])
            if not lanes:
                continue
            results = await loop.run_in_executor(
                self._executor, self._runner.burst, lanes, _BURST_ITERATIONS
            )
            self._note(lanes, results)

    async def _gather(self) -> None:
        """Let a few more requests arrive before an idle engine starts, never for long."""
        for _ in range(_GATHER_ROUNDS):
            before = len(self._waiting)
            await asyncio.sleep(_GATHER_S)
            if len(self._waiting) == before:
                return

    def _drop_cancelled(self) -> None:
        for call in self._active:
            if call.is_over:
                self._table.forget(call.session_id)
        self._active = [call for call in self._active if not call.is_over]
        self._waiting = deque(call for call in self._waiting if not call.is_over)

    def _admit(self) -> None:
        """Move waiting calls into slots, oldest first, when enough of them have gathered."""
        if self._active and self._waiting:
            enough = len(self._waiting) * _JOIN_FRACTION >= len(self._active)
            if not enough and self._waiting[0].passed_over < _MAX_PASSED_OVER:
                self._waiting[0].passed_over += 1
                return
        while self._waiting:
            call = self._waiting[0]
            slot = self._table.acquire(call.session_id)
            if slot is None:
                return  # every slot is busy: one of them will finish
            prompt = call.request.token_ids
            # The last prompt token is always fed: its logits give the first new token.
            call.cached_tokens = min(slot.common_prefix(prompt), len(prompt) - 1)
            slot.truncate(call.cached_tokens)
            call.slot = slot
            self._active.append(self._waiting.popleft())

    def _lane(self, call: _Call) -> Lane:
        request, slot = call.request, call.slot
        assert slot is not None
        sampled = np.array(call.token_ids[-1:], dtype=np.int32)
        return Lane(
            slot=slot.index,
            start=slot.length,
            pending=sampled if sampled.size else request.token_ids[slot.length :],
            max_new_tokens=request.sampling.max_new_tokens - len(call.token_ids),
            sampling=request.sampling,
            seed=call.seed,
            return_full_logprobs=request.return_full_logprobs,
        )

    def _note(self, lanes: list[Lane], results: list[LaneResult]) -> None:
        """Mutating: book a burst's tokens and rows; answer the calls that are finished."""
        still_active = []
        for call, lane, result in zip(self._active, lanes, results, strict=True):
            slot = call.slot
            assert slot is not None
            fed = np.concatenate([lane.pending, np.array(result.token_ids[:-1], dtype=np.int32)])
            slot.extend(fed, result.routed_experts)
            if lane.same_as is not None:
                call.shared = True
            call.token_ids += result.token_ids
            call.logprobs += result.logprobs
            call.full_logprobs += result.full_logprobs
            is_spent = len(call.token_ids) >= call.request.sampling.max_new_tokens
            if call.is_over or not (result.stopped or is_spent):
                still_active.append(call)  # cancelled calls are dropped before the next burst
                continue
            self._table.release(call.session_id)
            call.answer.set_result(self._complete(call, slot, result.stopped))
        self._active = still_active

    def _complete(self, call: _Call, slot: Slot, stopped: bool) -> Completion:
        request = call.request
        num_prompt = len(request.token_ids)
        start = request.routed_experts_start
        reason: FinishReason = "stop" if stopped else "length"
        return Completion(
            token_ids=np.array(call.token_ids, dtype=np.int32),
            logprobs=np.array(call.logprobs, dtype=np.float32),
            finish_reason=reason,
            weight_versions=(self._version,),
            routed_experts=None
            if start is None
            else slot.rows(start, num_prompt + len(call.token_ids) - 1),
            routed_experts_start=start or 0,
            cached_tokens=num_prompt if call.shared else call.cached_tokens,
            engine=self.name,
            full_logprobs=np.stack(call.full_logprobs) if call.full_logprobs else None,
        )


def _share_prompts(lanes: list[Lane]) -> list[Lane]:
    """Mark fresh lanes whose whole prompt another lane of the burst feeds too (group members)."""
    first: dict[bytes, int] = {}
    shared = []
    for i, lane in enumerate(lanes):
        if lane.start > 0 or len(lane.pending) < 2:
            shared.append(lane)
            continue
        leader = first.setdefault(lane.pending.tobytes(), i)
        shared.append(lane if leader == i else lane.following(leader))
    return shared
