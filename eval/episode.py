"""One episode of an evaluation: the loop of ``agent_rl.rollout.episode``, recorded for people.

It is not graded here: the official harness judges the patch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor

from agent_rl.rollout.episode import EpisodeLimits, PlayedTurn, play
from agent_rl.types import Status
from agent_rl.view.record import EpisodeRecord, TurnRecord
from envs.actions import Prompts
from envs.base import Env
from eval.config import AgentLoopConfig
from eval.models.base import Model
from eval.predictions import patch_text

CUT_NOTICE = "Your last message was cut off: it was too long.\n\n"


def episode_limits(config: AgentLoopConfig) -> EpisodeLimits:
    """Return the limits of a suite's episodes."""
    return EpisodeLimits(
        max_turns=config.max_turns,
        max_malformed=config.max_malformed,
        malformed_in_a_row=True,
        max_completion_tokens=config.max_completion_tokens,
        max_seconds=config.max_seconds,
        cut_notice=CUT_NOTICE,
        patch_at_limit=config.patch_at_limit,
        grade=False,
    )


async def play_episode(
    make_env: Callable[[], Env],
    model: Model,
    prompts: Prompts,
    config: AgentLoopConfig,
    *,
    instance_id: str,
    sample: int,
    executor: Executor,
) -> EpisodeRecord:
    """Play and record. Failures inside give status ``failed``; only cancelling is raised.

    Args:
        prompts: filled with the instance's issue.
        executor: runs ``make_env`` and the environment's blocking calls.
    """
    speaker = model.speaker(f"{instance_id}/{sample}", prompts)
    episode = await play(make_env, speaker, episode_limits(config), executor)
    if episode.status is Status.ABORTED:
        raise asyncio.CancelledError
    return EpisodeRecord(
        task_id=instance_id,
        sample=sample,
        model=model.name,
        status=str(episode.status),
        stop_reason=episode.stop_reason,
        system_prompt=prompts.system,
        user_prompt=prompts.user,
        turns=tuple(_turn_record(turn) for turn in episode.turns),
        patch=patch_text(episode.patch),
        notes=episode.notes,
        error=episode.error,
        seconds=round(episode.seconds, 3),
    )


def _turn_record(turn: PlayedTurn) -> TurnRecord:
    return TurnRecord(
        action=turn.answer.text,
        observation=turn.observation,
        prompt_tokens=turn.answer.prompt_tokens,
        completion_tokens=turn.answer.completion_tokens,
        seconds_generate=round(turn.seconds_generate, 3),
        seconds_environment=round(turn.seconds_environment, 3),
        malformed=turn.malformed,
        reasoning=turn.answer.reasoning,
    )
