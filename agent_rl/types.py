"""The data that moves between engine, environment, cache and trainer. No torch here.

Axis letters: T tokens, L MoE layers, K experts per token, N sampled tokens.

Row p of ``routed_experts`` holds the experts used when token p was fed forward after tokens
0..p-1, so a sequence of T tokens whose last token was sampled has T-1 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32]  # [T]
Floats = NDArray[np.float32]  # [T]
Mask = NDArray[np.bool_]  # [T]
Rows = NDArray[np.unsignedinteger]  # [T, L, K] uint8 or uint16

FinishReason = Literal["stop", "length", "abort"]


class Status(StrEnum):
    """The ways a trajectory ends. Only the first two carry a reward."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"  # a limit on turns, tokens or malformed actions ended it
    ABORTED = "aborted"  # cancelled by us: shutdown, weight update
    FAILED = "failed"  # infrastructure: engine, sandbox, disk; never a reward


@dataclass(frozen=True)
class SamplingParams:
    """The distribution a completion is drawn from; log-probs are of exactly this distribution.

    ``temperature`` 0 means greedy: log-probs are then reported at temperature 1.
    """

    temperature: float = 1.0
    max_new_tokens: int = 32
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """One completion to sample.

    ``routed_experts_start`` is the first row wanted, an absolute token index in
    ``[0, len(token_ids)]``; None asks for no routing.
    """

    session_id: str
    token_ids: TokenIds  # [T] the whole prompt: previous ids + sampled ids + new observation
    sampling: SamplingParams
    routed_experts_start: int | None = 0
    return_full_logprobs: bool = False  # for mismatch studies; engines that cannot refuse it


@dataclass(frozen=True)
class Completion:
    """An engine's answer. ``routed_experts`` covers rows
    ``[routed_experts_start, len(prompt) + len(token_ids) - 1)``."""

    token_ids: TokenIds  # [N] sampled ids, the stop token included
    logprobs: Floats  # [N] under the sampling distribution
    finish_reason: FinishReason
    weight_versions: tuple[int, ...]  # every version that sampled a token, ascending
    routed_experts: Rows | None = None  # [R, L or hidden layers, K]
    routed_experts_start: int = 0
    rows_lost: bool = False  # they were asked for and are missing: the run takes that
    cached_tokens: int = 0  # prompt tokens whose KV was reused
    engine: str = "local"
    full_logprobs: Floats | None = None  # [N, V] when asked for


class RoutedRows(Protocol):
    """Routing rows of one sequence, held by reference. ``routing_cache`` implements it."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def weight_versions(self) -> tuple[int, ...]: ...

    def gather(
        self, *, layers: Sequence[int] | None = None, start: int = 0, stop: int | None = None
    ) -> tuple[Rows, Mask]:
        """Rows ``[stop-start, len(layers), K]`` and which of them are present ``[stop-start]``.

        ``layers`` indexes the L axis (MoE layers in ascending global order); None is all.
        """
        ...

    def verify(self, token_ids: TokenIds) -> None:
        """Raise when digest, token ids or weight version do not belong together."""
        ...

    def release(self) -> None:
        """Give the lease back; the rows may then be evicted. Idempotent."""
        ...


@dataclass(frozen=True)
class Turn:
    """One completion plus the environment's reply, as spans of the trajectory's token ids."""

    prompt_end: int  # tokens before the sampled ones
    completion_end: int  # prompt_end + N
    finish_reason: FinishReason
    action: str
    observation: str
    rows_requested: int  # rows asked of the engine in this turn
    seconds_generate: float = 0.0
    seconds_environment: float = 0.0


@dataclass
class Branch:
    """One linear sequence of an episode: what the model saw, and what it said.

    An agent that only ever appends makes one. Sub-agents, a compacted history and answers that
    were thrown away make more; where two share turns, those are in the loss of the first only.
    """

    token_ids: TokenIds  # [T]
    loss_mask: Mask  # [T] True on sampled tokens, each in one branch of its episode
    rollout_logprobs: Floats  # [T] 0 where not sampled
    turns: list[Turn]
    weight_versions: tuple[int, ...]
    routed_experts: RoutedRows | None = None
    num_shared_turns: int = 0  # leading turns that an earlier branch of the episode holds

    @property
    def own_turns(self) -> list[Turn]:
        """The turns that no earlier branch holds."""
        return self.turns[self.num_shared_turns :]

    @property
    def num_own_tokens(self) -> int:
        """Tokens behind the turns that an earlier branch holds."""
        shared = self.num_shared_turns
        return len(self.token_ids) - (self.turns[shared - 1].completion_end if shared else 0)


@dataclass
class Trajectory:
    """The finished record of one episode: one attempt at a task, with one reward."""

    task_id: str
    group_id: str
    member: int
    status: Status
    stop_reason: str  # "submit", "max_turns", "max_tokens", "malformed", "infrastructure", …
    reward: float | None  # None exactly when status is aborted or failed
    branches: list[Branch]  # none where it failed before the model spoke
    patch: bytes = b""
    error: str = ""
    details: dict[str, str | int | float] = field(default_factory=dict[str, str | int | float])

    @property
    def is_valid(self) -> bool:
        """True where it has a reward, so that it may be learnt from."""
        return self.reward is not None

    @property
    def branch(self) -> Branch:
        """The branch of an episode that has just one; raises ValueError for others."""
        (only,) = self.branches
        return only

    @property
    def turns(self) -> list[Turn]:
        """Every turn once, branch by branch."""
        return [turn for branch in self.branches for turn in branch.own_turns]

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches, turns that they share counted once."""
        return sum(branch.num_own_tokens for branch in self.branches)

    @property
    def num_sampled(self) -> int:
        """Tokens in the loss."""
        return sum(int(branch.loss_mask.sum()) for branch in self.branches)

    @property
    def weight_versions(self) -> tuple[int, ...]:
        """Every version that sampled a token, ascending."""
        return tuple(sorted({v for branch in self.branches for v in branch.weight_versions}))

    def release_rows(self) -> None:
        """Give its routing rows back to the cache."""
        for branch in self.branches:
            if branch.routed_experts is not None:
                branch.routed_experts.release()


@dataclass
class Group:
    """One task and its sibling trajectories."""

    group_id: str
    task_id: str
    trajectories: list[Trajectory]

    @property
    def valid(self) -> list[Trajectory]:
        return [t for t in self.trajectories if t.is_valid]


def release_rows(groups: Sequence[Group]) -> None:
    """Give the routing rows of these groups back to the cache."""
    for trajectory in (t for group in groups for t in group.trajectories):
        trajectory.release_rows()


@dataclass(frozen=True)
class TrainSample:
    """A flat token row for the trainer; ``routed_experts`` stays a reference until the device."""

    sample_id: str
    token_ids: TokenIds  # [T]
    loss_mask: Mask  # [T] True where the token was sampled by the policy
    rollout_logprobs: Floats  # [T]
    advantages: Floats  # [T] 0 where not sampled
    weight_versions: tuple[int, ...]
    routed_experts: RoutedRows | None = None
