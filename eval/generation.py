"""Episodes that are still missing, played; their predictions are written as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial

from agent_rl.types import Status
from agent_rl.view.record import EpisodeRecord
from envs.actions import Prompts
from envs.base import Env
from envs.tasks.swebench import SweBenchRow
from eval.config import SuiteConfig
from eval.episode import play_episode
from eval.errors import TooManyFailuresError
from eval.folder import EvalFolder
from eval.models.base import Model
from eval.predictions import Prediction, append_prediction

OnEpisode = Callable[[EpisodeRecord, int, int], None]  # record, episodes done, of
EnvFactory = Callable[[SweBenchRow], Env]
FillPrompts = Callable[[SweBenchRow], Prompts]


@dataclass(frozen=True)
class GenerationParts:
    """Parts that episodes are played with."""

    model: Model
    make_env: EnvFactory
    fill_prompts: FillPrompts
    executor: Executor


@dataclass(frozen=True)
class _Try:
    row: SweBenchRow
    sample: int


async def generate(
    config: SuiteConfig,
    folder: EvalFolder,
    rows: Sequence[SweBenchRow],
    parts: GenerationParts,
    on_episode: OnEpisode | None = None,
) -> None:
    """Play every (sample, instance) that has no prediction, ``num_workers`` at a time.

    A prediction is on disk before the next episode of that worker starts; an episode that failed
    has none and is played again on resume. Raises TooManyFailuresError when so many fail in a row
    that the machinery must be broken.
    """
    pending: asyncio.Queue[_Try] = asyncio.Queue()
    total = config.samples * len(rows)
    for sample in range(config.samples):
        done = folder.predictions(sample)
        for row in rows:
            if row.instance_id not in done:
                pending.put_nowait(_Try(row, sample))
    state = _State(total - pending.qsize(), total, config.max_consecutive_failures)
    if pending.empty():
        return
    await parts.model.check()
    workers = min(config.num_workers, pending.qsize())
    async with asyncio.TaskGroup() as group:
        for _ in range(workers):
            group.create_task(_work(config, folder, pending, parts, state, on_episode))
    if state.stopped:
        raise TooManyFailuresError(
            f"{state.failures_in_a_row} episodes in a row failed, the last with: {state.stopped};"
            " what is done is kept: repair the cause and run the same command again"
        )


@dataclass(eq=False)
class _State:
    done: int
    total: int
    max_failures_in_a_row: int
    failures_in_a_row: int = 0
    stopped: str = ""

    def note(self, record: EpisodeRecord) -> None:
        failed = record.status == Status.FAILED
        self.done += not failed
        self.failures_in_a_row = self.failures_in_a_row + 1 if failed else 0
        if self.failures_in_a_row >= self.max_failures_in_a_row:
            self.stopped = record.error


async def _work(
    config: SuiteConfig,
    folder: EvalFolder,
    pending: asyncio.Queue[_Try],
    parts: GenerationParts,
    state: _State,
    on_episode: OnEpisode | None,
) -> None:
    while not pending.empty() and not state.stopped:
        attempt = pending.get_nowait()
        row = attempt.row
        record = await play_episode(
            partial(parts.make_env, row),
            parts.model,
            parts.fill_prompts(row),
            config.agent,
            instance_id=row.instance_id,
            sample=attempt.sample,
            executor=parts.executor,
        )
        folder.save_episode(record)
        if record.status != Status.FAILED:
            prediction = Prediction(row.instance_id, record.model, record.patch)
            append_prediction(folder.predictions_file(attempt.sample), prediction)
        state.note(record)
        if on_episode is not None:
            on_episode(record, state.done, state.total)
