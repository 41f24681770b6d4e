"""The loop that training and evaluation share, with a speaker of texts alone."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from rollout_fakes import ScriptedEnv, run

from agent_rl.rollout.episode import Answer, Episode, EpisodeLimits, NoRoomError, play
from agent_rl.types import Status
from envs.base import Env, Observation, Score

LIMITS = EpisodeLimits(max_turns=9, max_malformed=2)
BAD = Observation("bad", malformed=True)


class Lines:
    """Says lines in order, raises those that are errors, and keeps what it was told."""

    def __init__(self, *lines: str | Answer | Exception) -> None:
        self._lines = list(lines)
        self.heard: list[str] = []
        self.num_closed = 0

    async def answer(self, observed: str) -> Answer:
        self.heard.append(observed)
        line = self._lines.pop(0)
        if isinstance(line, Exception):
            raise line
        return line if isinstance(line, Answer) else Answer(line, completion_tokens=1)

    def time_is_up(self, max_seconds: float) -> None:
        raise AssertionError("nobody is stopped here")

    async def close(self) -> None:
        self.num_closed += 1


def played(env: Env, speaker: Lines, limits: EpisodeLimits = LIMITS) -> Episode:
    async def work(executor: ThreadPoolExecutor) -> Episode:
        return await play(lambda: env, speaker, limits, executor)

    return run(work)


def test_a_speaker_hears_the_issue_and_then_each_reply() -> None:
    env, speaker = ScriptedEnv(replies=["one", "two"]), Lines("view", "test", "submit")
    episode = played(env, speaker)
    assert speaker.heard == ["fix a", "one", "two"]
    assert env.actions == [turn.answer.text for turn in episode.turns] == ["view", "test", "submit"]
    assert (episode.status, episode.stop_reason, episode.reward) == (
        Status.COMPLETED,
        "submit",
        1.0,
    )
    assert (env.num_closed, speaker.num_closed) == (1, 1)


@pytest.mark.parametrize(
    ("in_a_row", "num_turns", "reason"), [(False, 3, "max_malformed"), (True, 4, "malformed")]
)
def test_malformed_turns_count_in_all_or_in_a_row(
    in_a_row: bool, num_turns: int, reason: str
) -> None:
    limits = EpisodeLimits(max_turns=9, max_malformed=2, malformed_in_a_row=in_a_row)
    env = ScriptedEnv(replies=[BAD, "ok", BAD, BAD])
    episode = played(env, Lines(*["act"] * 9), limits)
    assert (episode.stop_reason, len(episode.turns)) == (reason, num_turns)


def test_an_answer_that_was_cut_ends_the_episode_or_is_carried_out_with_a_notice() -> None:
    cut = Answer("replace", completion_tokens=1, cut_by="max_new_tokens")
    ended_env = ScriptedEnv()
    ended = played(ended_env, Lines(cut))
    assert (ended.status, ended.stop_reason) == (Status.TRUNCATED, "max_new_tokens")
    assert ended_env.actions == []
    speaker = Lines(cut, "submit")
    limits = EpisodeLimits(max_turns=9, max_malformed=2, cut_notice="Cut. ")
    went_on = played(ScriptedEnv(replies=["done"]), speaker, limits)
    assert (went_on.status, speaker.heard[1]) == (Status.COMPLETED, "Cut. done")
    assert went_on.turns[0].observation == "done"


@pytest.mark.parametrize(
    ("limits", "patch", "reward"),
    [
        (EpisodeLimits(1, 1), b"", 0.0),
        (EpisodeLimits(1, 1, patch_at_limit=True), b"diff", 0.0),
        (EpisodeLimits(1, 1, grade=False), b"", None),
    ],
)
def test_a_limit_hands_in_the_patch_and_costs_the_reward_as_asked(
    limits: EpisodeLimits, patch: bytes, reward: float | None
) -> None:
    env = ScriptedEnv(score=AssertionError("an episode that did not end is not judged"))
    episode = played(env, Lines("view"), limits)
    assert (episode.status, episode.stop_reason) == (Status.TRUNCATED, "max_turns")
    assert (episode.patch, episode.reward) == (patch, reward)


def test_no_room_is_a_limit_and_every_other_error_a_failure() -> None:
    full = played(ScriptedEnv(), Lines("view", NoRoomError("full")))
    assert (full.status, full.stop_reason, full.error) == (Status.TRUNCATED, "max_tokens", "")
    limits = EpisodeLimits(9, 9, max_seconds=60.0)
    late = played(ScriptedEnv(), Lines(TimeoutError("the engine's own")), limits)
    assert (late.status, late.stop_reason) == (Status.FAILED, "infrastructure")
    assert late.error == "TimeoutError: the engine's own"


def test_an_environment_that_ends_without_a_reason_has_been_submitted() -> None:
    env = ScriptedEnv(replies=[Observation("", done=True)], score=Score(0.5, "graded", ""))
    episode = played(env, Lines("go"))
    assert (episode.status, episode.stop_reason, episode.reward) == (
        Status.COMPLETED,
        "submit",
        0.5,
    )


def test_the_first_error_is_kept_when_closing_fails_too() -> None:
    class Stuck(ScriptedEnv):
        def close(self) -> None:
            raise RuntimeError("still mounted")

    episode = played(Stuck(), Lines(OSError("no space left")))
    assert episode.error == "OSError: no space left"


def test_an_environment_that_is_being_made_when_the_episode_is_cancelled_is_closed() -> None:
    entered, leave = threading.Event(), threading.Event()
    env, speaker = ScriptedEnv(), Lines("never asked")

    def make_env() -> Env:
        entered.set()
        assert leave.wait(10)
        return env

    async def work(executor: ThreadPoolExecutor) -> Episode:
        task = asyncio.create_task(play(make_env, speaker, LIMITS, executor))
        await asyncio.to_thread(entered.wait, 10)
        task.cancel()
        await asyncio.sleep(0.02)
        leave.set()
        return await task

    episode = run(work)
    assert (episode.status, episode.stop_reason) == (Status.ABORTED, "cancelled")
    assert (env.num_closed, speaker.num_closed, speaker.heard) == (1, 1, [])
