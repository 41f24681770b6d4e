"""One trajectory: model and environment in turn until the episode ends, with its routing rows.

This is the rollout boundary: whatever goes wrong inside becomes a status, so one broken sandbox
or engine reply never takes the other trajectories down, and never turns into a reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from agent_rl.config.schema import AgentConfig
from agent_rl.protocols import Generator
from agent_rl.rollout.chat import Renderer, closing
from agent_rl.rollout.replies import check_completion, check_overlap
from agent_rl.types import (
    Completion,
    GenerateRequest,
    SamplingParams,
    Status,
    TokenIds,
    Trajectory,
    Turn,
)
from envs.base import Env, Score
from envs.errors import InfrastructureError
from routing_cache import RoutingCache, Session

_T = TypeVar("_T")


async def run_trajectory(
    env: Env,
    generator: Generator,
    cache: RoutingCache | None,
    renderer: Renderer,
    config: AgentConfig,
    *,
    group_id: str,
    member: int,
    seed: int,
    executor: Executor,
    temperature: float = 1.0,
    session_id: str = "",
) -> Trajectory:
    """Roll out one episode on ``env.task`` and close ``env``.

    Never raises for what happens inside: failures give status ``failed`` with ``error`` set, and
    cancelling gives ``aborted``, so run it in a task of its own. Only an episode that ended by
    itself is graded; one cut by a limit earns 0. ``token_ids`` ends with the last sampled token.

    Args:
        cache: where rows go; None records no routing.
        seed: of this member; positions make the draws of different turns independent.
        executor: runs the environment's blocking calls.
        session_id: names the engine session; derived from group and member when empty.
    """
    episode = _Episode(env, generator, cache, renderer, config, seed, temperature, executor)
    episode.session_id = session_id or f"{group_id}/{member}"
    for part in (episode.run, episode.release):
        try:
            await part()
        except asyncio.CancelledError:
            episode.end(Status.ABORTED, "cancelled")
        except Exception as error:  # the rollout boundary: a failure is data, not a crash
            episode.fail(error)
    return episode.record(group_id, member)


@dataclass(eq=False)
class _Episode:
    """The state of one rollout in progress."""

    env: Env
    generator: Generator
    cache: RoutingCache | None
    renderer: Renderer
    config: AgentConfig
    seed: int
    temperature: float
    executor: Executor
    session_id: str = ""
    routing: Session | None = None
    token_ids: TokenIds = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    pending: TokenIds = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    sampled: list[tuple[int, Completion, bool]] = field(default_factory=list)  # start, …, train
    turns: list[Turn] = field(default_factory=list)
    num_malformed: int = 0
    status: Status = Status.FAILED
    stop_reason: str = ""
    reward: float | None = None
    patch: bytes = b""
    error: str = ""
    details: dict[str, str | int | float] = field(default_factory=dict)

    async def run(self) -> None:
        """Play until something ends the episode; ``end`` has been called then."""
        first = await self.blocking(self.env.reset)
        self.pending = self.renderer.initial(first.text)
        if self.cache is not None:
            version, engine = self.generator.weight_version, self.generator.name
            self.routing = self.cache.session(version, engine=engine)
            self.routing.adopt(self.pending)
        while not self.stop_reason:
            await self.turn()

    async def turn(self) -> None:
        """One completion and the environment's reply."""
        room = self.config.max_tokens - len(self.token_ids) - len(self.pending)
        if room < 1:
            return self.end(Status.TRUNCATED, "max_tokens", reward=0.0)
        prompt = np.concatenate([self.token_ids, self.pending]).astype(np.int32)
        started = time.monotonic()
        completion = await self.generate(prompt, min(room, self.config.max_new_tokens))
        generated = time.monotonic()
        self.token_ids = np.concatenate([prompt, completion.token_ids]).astype(np.int32)
        action = self.renderer.parse(completion.token_ids)
        if completion.finish_reason != "stop":
            limit = "max_tokens" if room <= self.config.max_new_tokens else "max_new_tokens"
            self.note_turn(prompt, completion, action, "", generated - started, 0.0)
            return self.end(Status.TRUNCATED, limit, reward=0.0)
        reply = await self.blocking(self.env.step, action)
        replied = time.monotonic()
        train = self.config.train_malformed or not reply.malformed
        self.note_turn(
            prompt, completion, action, reply.text, generated - started, replied - generated, train
        )
        self.num_malformed += reply.malformed
        if reply.done:
            return await self.grade(reply.stop_reason)
        if self.num_malformed >= self.config.max_malformed:
            return self.end(Status.TRUNCATED, "max_malformed", reward=0.0)
        if len(self.turns) >= self.config.max_turns:
            return self.end(Status.TRUNCATED, "max_turns", reward=0.0)
        self.pending = np.concatenate(
            [
                closing(completion.token_ids, self.renderer.stop_token_ids),
                self.renderer.observation(reply.text),
            ]
        )
        return None

    async def generate(self, prompt: TokenIds, max_new_tokens: int) -> Completion:
        """Ask for one completion, check it, and put its rows into the cache."""
        start = None if self.routing is None else self.routing.num_rows
        request = GenerateRequest(
            session_id=self.session_id,
            token_ids=prompt,
            sampling=SamplingParams(
                temperature=self.temperature,
                max_new_tokens=max_new_tokens,
                stop_token_ids=self.renderer.stop_token_ids,
                seed=self.seed,
            ),
            routed_experts_start=start,
        )
        completion = await self.generator.generate(request)
        check_completion(request, completion)
        if self.routing is not None and completion.routed_experts is not None:
            self.compare_rows(self.routing, completion)
            known = self.routing.num_tokens
            whole = np.concatenate([prompt, completion.token_ids]).astype(np.int32)
            self.routing.record(
                whole[known:],
                completion.routed_experts,
                start=completion.routed_experts_start,
                weight_version=completion.weight_versions[-1],
                num_prefill=len(prompt) - completion.routed_experts_start,
                turn=len(self.turns),
            )
        return completion

    def compare_rows(self, routing: Session, completion: Completion) -> None:
        """Rows that came again, after a move to another engine, are of the same tokens or refused.

        How often and how well they agreed is noted; single differences are counted by the cache.
        """
        num_stored = routing.num_rows
        if self.cache is None or completion.routed_experts_start >= num_stored:
            return
        with routing.lease() as stored:
            compared, shared = check_overlap(stored, num_stored, completion, self.cache.layout)
        self.details["rows_compared"] = compared + int(self.details.get("rows_compared", 0))
        self.details["rows_shared_least"] = min(
            shared, float(self.details.get("rows_shared_least", 1.0))
        )

    async def grade(self, stop_reason: str) -> None:
        """The episode ended by itself: judge it."""
        self.patch = await self.blocking(self.env.patch)
        score: Score = await self.blocking(self.env.grade)
        self.details |= {
            "grade": score.reason,
            "tests_passed": score.passed,
            "tests_failed": score.failed,
        }
        if score.protected_touched:
            self.details["protected_touched"] = ", ".join(score.protected_touched)
        if score.reward is None:
            raise InfrastructureError(f"grading failed: {score.reason}")
        self.end(Status.COMPLETED, stop_reason, reward=score.reward)

    def note_turn(
        self,
        prompt: TokenIds,
        completion: Completion,
        action: str,
        observation: str,
        seconds_generate: float,
        seconds_environment: float,
        train: bool = True,
    ) -> None:
        self.sampled.append((len(prompt), completion, train))
        rows = completion.routed_experts
        self.turns.append(
            Turn(
                prompt_end=len(prompt),
                completion_end=len(prompt) + len(completion.token_ids),
                finish_reason=completion.finish_reason,
                action=action,
                observation=observation,
                rows_requested=0 if rows is None else len(rows),
                seconds_generate=seconds_generate,
                seconds_environment=seconds_environment,
            )
        )

    def end(self, status: Status, stop_reason: str, *, reward: float | None = None) -> None:
        self.status, self.stop_reason, self.reward = status, stop_reason, reward

    def fail(self, error: Exception) -> None:
        """Something broke. A verdict reached before (closing failed) still stands."""
        self.error = f"{type(error).__name__}: {error}"
        if not self.stop_reason:
            self.end(Status.FAILED, "infrastructure")

    async def release(self) -> None:
        """Give back the engine session and the sandbox, whatever happened."""
        try:
            await self.generator.end_session(self.session_id)
        finally:
            await self.blocking(self.env.close)

    def record(self, group_id: str, member: int) -> Trajectory:
        """The finished trajectory; a lease on its rows goes with it when it has a reward."""
        size = len(self.token_ids)
        mask = np.zeros(size, dtype=np.bool_)
        logprobs = np.zeros(size, dtype=np.float32)
        versions: set[int] = set()
        for start, completion, train in self.sampled:
            end = start + len(completion.token_ids)
            mask[start:end] = train
            logprobs[start:end] = completion.logprobs
            versions |= set(completion.weight_versions)
        rows = None
        if self.routing is not None:
            rows = self.routing.lease() if self.reward is not None and self.turns else None
            self.routing.close()
        return Trajectory(
            task_id=self.env.task.task_id,
            group_id=group_id,
            member=member,
            status=self.status,
            stop_reason=self.stop_reason,
            token_ids=self.token_ids,
            loss_mask=mask,
            rollout_logprobs=logprobs,
            turns=self.turns,
            reward=self.reward,
            weight_versions=tuple(sorted(versions)),
            routed_experts=rows,
            patch=self.patch,
            error=self.error,
            details=self.details,
        )

    async def blocking(self, call: Callable[..., _T], *args: str) -> _T:
        """Run an environment call in the executor; a cancelled one is waited for, because an
        environment is used by one thread at a time."""
        future = asyncio.get_running_loop().run_in_executor(self.executor, call, *args)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait({future})
            raise
