"""The trainer in the driver when the work is done by several processes.

Every request goes to all ranks, since Megatron's steps are collective, and is over when all have
answered. When ranks could disagree about the state of the weights (one died, one failed alone, one
is silent), all of them are stopped: a run continues from its newest checkpoint, never from half an
update.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from agent_rl.config.schema import RunConfig
from agent_rl.errors import AgentRLError, TrainerError
from agent_rl.protocols import Scored, Weights
from agent_rl.trainer.workers.messages import (
    Done,
    Failed,
    Load,
    Publish,
    Request,
    Save,
    Score,
    Step,
    Value,
)
from agent_rl.trainer.workers.sample_block import encode_samples
from agent_rl.trainer.workers.worker_group import Answered, Event, Lost, WorkerGroup
from agent_rl.types import TrainSample

_POLL_S = 0.5
_GRACE_S = 30.0  # for the other ranks to fail alike
_ROOT_CAUSE_S = 10.0  # a rank that died shows up after those that noticed
_CLOSE_S = 15.0
_LOG_TAIL_BYTES = 2048
_CHANGE_NOTHING = (Score, Publish, Save)
_FAIL_BEFORE_CHANGING = (Step, Load)  # or say that the rank is not to be trusted any more


@dataclass(frozen=True)
class Transfer:
    """Bytes of the last batch that was sent, and of the routing rows in it, each counted once."""

    message_bytes: int
    unique_row_bytes: int


class TrainerFleet:
    """``protocols.Trainer`` over the ranks of a ``WorkerGroup``.

    Example:
        >>> trainer = TrainerFleet(config, LocalWorkers(config, Path("policies/tiny_moe")))
        >>> metrics = trainer.step(samples)
    """

    def __init__(
        self, config: RunConfig, workers: WorkerGroup, *, grace_s: float = _GRACE_S
    ) -> None:
        """``grace_s``: how long ranks may take to fail like the first one that failed."""
        self._grace_s = grace_s
        self._timeout_s = config.trainer.worker_timeout_s
        self._num_chunks = config.trainer.pipeline_parallel * config.trainer.virtual_pipeline
        self._workers = workers
        self._weight_version = 0
        self._stopped = ""  # why nothing can be asked of the ranks any more
        self.last_transfer = Transfer(0, 0)
        try:
            self._collect(None)
        except BaseException:
            self._workers.kill()
            raise

    @property
    def weight_version(self) -> int:
        return self._weight_version

    def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """As ``MegatronTrainer.step``; adds the size of the batch on its way to the ranks."""
        if not samples:
            raise TrainerError("no samples to train on: got=0 expected=at least one")
        metrics = cast(dict[str, float], _value(self._ask(Step(), samples)))
        return metrics | {"transfer_bytes": float(self.last_transfer.message_bytes)}

    def score(
        self,
        samples: Sequence[TrainSample],
        replay: Literal["off", "r3"],
        *,
        live_routing: bool = False,
    ) -> Sequence[Scored]:
        if not samples:
            return []
        return cast(Sequence[Scored], _value(self._ask(Score(replay, live_routing), samples)))

    def publish_weights(self) -> Weights:
        """As ``MegatronTrainer.publish_weights``; mapped from the ranks' memory where it can be."""
        weights = self._ask(Publish()).weights
        assert weights is not None
        return weights

    def save(self, folder: Path) -> None:
        self._ask(Save(folder.resolve()))

    def load(self, folder: Path) -> None:
        self._ask(Load(folder.resolve()))

    def close(self) -> None:
        """End the ranks. Idempotent."""
        if not self._stopped:
            self._stopped = "they were closed"
            self._workers.shut_down(_CLOSE_S)

    def _ask(self, request: Request, samples: Sequence[TrainSample] | None = None) -> Answered:
        """Rank 0's answer to ``request`` once every rank has carried it out."""
        if self._stopped:
            raise TrainerError(f"the trainer's workers are gone: {self._stopped}")
        block = None
        if samples is not None:
            block = encode_samples(samples, num_chunks=self._num_chunks)
            self.last_transfer = Transfer(block.nbytes, block.unique_row_bytes)
        try:
            self._workers.send(request, block)
            return self._collect(request)
        except BaseException as error:
            # An interrupt leaves the ranks in the middle of something: nobody may ask again.
            if not isinstance(error, AgentRLError | OSError):
                self._stop(f"{type(error).__name__} during {_name(request)}")
            raise

    def _collect(self, request: Request | None) -> Answered:
        """Wait until every rank has answered; raise what went wrong."""
        answers = _Answers(self._workers.num_ranks, self._grace_s)
        while answers.missing:
            for event in self._workers.poll(_POLL_S):
                answers.add(event)
            if answers.lost is not None:
                raise self._given_up(answers.lost, f"rank {answers.lost.rank} is gone", request)
            silent = answers.silent(self._timeout_s)
            if silent is not None:
                why = f"no sign of life for trainer.worker_timeout_s={self._timeout_s:g}"
                raise self._given_up(Lost(silent, why), f"rank {silent} hangs", request)
            if answers.is_overdue:
                break
        if not answers.failed:
            done = answers.of[0].reply
            assert isinstance(done, Done)
            self._weight_version = done.weight_version
            return answers.of[0]
        raise self._failure(answers, request)

    def _failure(self, answers: _Answers, request: Request | None) -> Exception:
        """The first failure, to raise; stops the ranks unless they surely still agree.

        One that still owes an answer waits for the others in an exchange that they have left: it
        would take their next one for it.
        """
        first = answers.failed[0]
        failures = [a.reply for a in answers.failed if isinstance(a.reply, Failed)]
        all_failed = len(failures) == self._workers.num_ranks
        alike = isinstance(request, _CHANGE_NOTHING) or (
            all_failed and isinstance(request, _FAIL_BEFORE_CHANGING)
        )
        goes_on = alike and not answers.missing and all(f.is_ours for f in failures)
        error = failures[0].error
        if not goes_on:
            self._stop(f"rank {first.rank} failed during {_name(request)}: {error}")
        if not failures[0].is_ours:
            return TrainerError(
                f"trainer rank {first.rank} failed during {_name(request)}, all ranks were "
                f"stopped: {error}\n{self._log_tail(first.rank)}"
            )
        return with_rank(error, first.rank)

    def _given_up(self, lost: Lost, what: str, request: Request | None) -> TrainerError:
        self._stop(f"{what} ({lost.why})")
        return TrainerError(
            f"trainer {what} during {_name(request)}, all ranks were stopped: got={lost.why} "
            "expected=an answer; a run continues from its newest checkpoint with "
            f"'agent-rl train --resume RUN_FOLDER'\n{self._log_tail(lost.rank)}"
        )

    def _stop(self, why: str) -> None:
        self._stopped = why
        self._workers.kill()

    def _log_tail(self, rank: int) -> str:
        file = self._workers.log_file(rank)
        if not file.is_file() or not file.stat().st_size:
            return f"{file} is empty"
        with file.open("rb") as log:
            log.seek(max(0, file.stat().st_size - _LOG_TAIL_BYTES))
            text = log.read().decode(errors="replace").rstrip()
        return f"the end of {file}:\n{text}"


def _value(answer: Answered) -> Value:
    assert isinstance(answer.reply, Done)
    return answer.reply.value


class _Answers:
    """Answers to the request in progress: those that came, signs of life, the first failure."""

    def __init__(self, num_ranks: int, grace_s: float) -> None:
        self.missing = set(range(num_ranks))
        self.of: dict[int, Answered] = {}
        self.failed: list[Answered] = []  # in the order of arrival
        self.lost: Lost | None = None
        self._seen = dict.fromkeys(range(num_ranks), time.monotonic())
        self._grace_s, self._give_up_at = grace_s, math.inf

    def add(self, event: Event) -> None:
        self._seen[event.rank] = time.monotonic()
        if isinstance(event, Lost):
            self.lost = self.lost or event
        elif isinstance(event, Answered):
            self.missing.discard(event.rank)
            self.of[event.rank] = event
            if isinstance(event.reply, Failed):
                self.failed.append(event)
                patience_s = self._grace_s if event.reply.is_ours else _ROOT_CAUSE_S
                self._give_up_at = min(self._give_up_at, time.monotonic() + patience_s)

    @property
    def is_overdue(self) -> bool:
        """A rank failed and the others had time enough to do the same."""
        return time.monotonic() > self._give_up_at

    def silent(self, timeout_s: float) -> int | None:
        """A rank that owes an answer and was not heard of for ``timeout_s``."""
        now = time.monotonic()
        return next((r for r in sorted(self.missing) if now - self._seen[r] > timeout_s), None)


def with_rank(error: Exception, rank: int) -> Exception:
    """Return ``error`` as one of the same class whose text names the rank."""
    if type(error).__init__ is Exception.__init__ and len(error.args) == 1:
        return type(error)(f"trainer rank {rank}: {error}")
    error.add_note(f"raised in trainer rank {rank}")
    return error


def _name(request: Request | None) -> str:
    return "its start" if request is None else type(request).__name__.lower()
