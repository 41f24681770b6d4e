"""One trajectory of the policy that is trained: an episode with its token ids and routing rows."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor

import numpy as np

from agent_rl.config.schema import AgentConfig
from agent_rl.protocols import Generator
from agent_rl.rollout.chat import Renderer
from agent_rl.rollout.episode import Episode, EpisodeLimits, PlayedTurn, play
from agent_rl.rollout.row_capture import RowCapture
from agent_rl.rollout.token_speaker import Sampled, TokenSpeaker
from agent_rl.types import Branch, Floats, Mask, SamplingParams, Trajectory, Turn
from envs.base import Env, Score
from routing_cache import RoutingCache


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

    Never raises for what happens inside, see :func:`play`. Only an episode that ended by itself is
    graded; one cut by a limit earns 0. It has one branch, whose ``token_ids`` end with the last
    sampled token, with a lease on its rows where there is a reward.

    Args:
        cache: where rows go; None records no routing.
        seed: of this member; positions make the draws of different turns independent.
        executor: runs the environment's blocking calls.
        session_id: names the engine session; derived from group and member when empty.
    """
    rows = None if cache is None else RowCapture(cache, generator)
    speaker = TokenSpeaker(
        generator,
        renderer,
        session_id=session_id or f"{group_id}/{member}",
        sampling=SamplingParams(temperature, config.max_new_tokens, seed=seed),
        max_tokens=config.max_tokens,
        rows=rows,
    )
    limits = EpisodeLimits(config.max_turns, config.max_malformed)
    episode = await play(lambda: env, speaker, limits, executor)
    place = (env.task.task_id, group_id, member)
    return _trajectory(place, episode, speaker, rows, config.train_malformed)


def _trajectory(
    place: tuple[str, str, int],
    episode: Episode,
    speaker: TokenSpeaker,
    rows: RowCapture | None,
    train_malformed: bool,
) -> Trajectory:
    """Join what was played and what was sampled; ``place`` is task, group and member."""
    pairs = list(zip(episode.turns, speaker.sampled, strict=False))  # a failed turn has no reply
    mask, logprobs = _token_arrays(pairs, len(speaker.token_ids), train_malformed)
    versions = {v for _, sampled in pairs for v in sampled.completion.weight_versions}
    keep_rows = episode.reward is not None and bool(episode.turns)
    branch = Branch(
        token_ids=speaker.token_ids,
        loss_mask=mask,
        rollout_logprobs=logprobs,
        turns=[_turn(played, sampled) for played, sampled in pairs],
        weight_versions=tuple(sorted(versions)),
        routed_experts=None if rows is None else rows.close(keep=keep_rows),
    )
    return Trajectory(
        *place,
        status=episode.status,
        stop_reason=episode.stop_reason,
        reward=episode.reward,
        branches=[branch],
        patch=episode.patch,
        error=episode.error,
        details=({} if rows is None else rows.details) | _verdict(episode.score),
    )


def _token_arrays(
    pairs: Sequence[tuple[PlayedTurn, Sampled]], size: int, train_malformed: bool
) -> tuple[Mask, Floats]:
    """Return the loss mask and log-probs ``[T]`` of a sequence of ``size`` tokens."""
    mask, logprobs = np.zeros(size, np.bool_), np.zeros(size, np.float32)
    for played, sampled in pairs:
        mask[sampled.start : sampled.stop] = train_malformed or not played.malformed
        logprobs[sampled.start : sampled.stop] = sampled.completion.logprobs
    return mask, logprobs


def _turn(played: PlayedTurn, sampled: Sampled) -> Turn:
    rows = sampled.completion.routed_experts
    return Turn(
        prompt_end=sampled.start,
        completion_end=sampled.stop,
        finish_reason=sampled.completion.finish_reason,
        action=played.answer.text,
        observation=played.observation,
        rows_requested=0 if rows is None else len(rows),
        seconds_generate=played.seconds_generate,
        seconds_environment=played.seconds_environment,
    )


def _verdict(score: Score | None) -> dict[str, str | int | float]:
    """Details of a graded episode."""
    if score is None:
        return {}
    counts = {"grade": score.reason, "tests_passed": score.passed, "tests_failed": score.failed}
    touched = ", ".join(score.protected_touched)
    return counts | ({"protected_touched": touched} if touched else {})
