"""Replay over a step and a model: what it leaves behind, copies, refuses and gives back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from replayed_policy import EXPERTS, TOP_K, Policy, backward, random_table, some_ids, table
from torch.utils._python_dispatch import TorchDispatchMode

from agent_rl.errors import ReplayError
from agent_rl.trainer.router_replay import RouterReplay

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("process_group")]


def test_a_stage_without_moe_layers_takes_part_in_everything() -> None:
    """Recording, replay and counts over no layers: the other stages wait for its answers."""
    stage = RouterReplay([torch.nn.Linear(2, 2)], num_experts=EXPERTS, recompute=True)
    nothing = table(torch.zeros(0, 7, TOP_K), missing=(2,), pads=(6,))
    with stage.step():
        stage.put(0, nothing)
        with stage.forward(0, record=True, count=True):
            pass
        assert stage.recorded(0).shape == (0, 7, TOP_K)
        stage.replay_recorded(0)
        assert (stage.counts.layers, stage.counts.tokens) == ((), 5)
        assert stage.consistency.values.shape == (0,)


def test_nothing_survives_a_step_even_a_failed_one(policy: Path) -> None:
    subject, ids = Policy(policy), some_ids(1, 5)
    stock = subject.plain(ids)

    def fail() -> None:
        with subject.replay.step():
            subject.replay.put(0, random_table(3, 5, seed=1))
            subject.forward(0, ids, count=True)
            raise RuntimeError("the step fails")

    with pytest.raises(RuntimeError, match="the step fails"):
        fail()
    assert subject.replay.counts.tokens == 0
    assert torch.equal(subject.plain(ids), stock)  # live again
    with pytest.raises(ReplayError, match="no rows for micro-batch"):
        subject.forward(0, ids)


def test_a_backward_after_the_step_is_refused(policy: Path) -> None:
    subject, ids = Policy(policy, recompute="full"), some_ids(1, 5)
    subject.model.train()
    with subject.replay.step():
        subject.replay.put(0, random_table(3, 5, seed=1))
        out = subject.forward(0, ids)
    with pytest.raises(ReplayError, match="after its rows were cleared"):
        out.sum().backward()


def test_two_models_in_one_process_do_not_mix(policy: Path) -> None:
    first, second = Policy(policy), Policy(policy)
    ids = some_ids(1, 6)
    stock = second.plain(ids)
    with first.replay.step():
        first.replay.put(0, random_table(3, 6, seed=3))
        replayed = first.forward(0, ids)
        assert torch.equal(second.plain(ids), stock)
    assert not torch.equal(replayed, stock)


class Copies(TorchDispatchMode):
    """Notes every copy between devices: the type it left with and the one it arrived in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        source = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if source is not None and isinstance(out, torch.Tensor) and source.device != out.device:
            self.seen.append((source.dtype, out.dtype))
        return out


@pytest.mark.parametrize("missing", [(), (0, 2)])
def test_rows_reach_the_device_narrow_once_a_pass_and_nothing_waits_for_it(
    policy: Path, missing: tuple[int, ...]
) -> None:
    """The device is torch's ``meta``, where whatever needs a value on the host raises."""
    subject = Policy(policy)
    scores = torch.empty(6, EXPERTS, device="meta")

    def live(detached: torch.Tensor) -> torch.Tensor:
        return detached.topk(TOP_K, dim=1).indices

    with subject.replay.step():
        subject.replay.put(0, random_table(3, 6, seed=1, missing=missing, pads=(5,)))
        for options in ({}, {"count": True}, {"record": True}, {"live": True}):
            with Copies() as copies, subject.replay.forward(0, **options):
                chosen = [subject.replay.choose(layer, scores, live) for layer in (0, 1, 2)]
            assert all(ids is not None and ids.dtype == torch.int64 for ids in chosen)
            assert all(left == arrived for left, arrived in copies.seen)
            moved = [left for left, _ in copies.seen]
            assert moved.count(torch.uint8) == (1 if options == {} else 0)  # then it is there
            assert moved.count(torch.int64) == (2 if "count" in options else 0)  # empty sums


def test_shapes_that_do_not_fit_are_refused(policy: Path) -> None:
    subject = Policy(policy)
    with pytest.raises(ReplayError, match="got=2 layers"):
        subject.replay.put(0, random_table(2, 5, seed=0))
    with subject.replay.step():
        subject.replay.put(0, random_table(3, 5, seed=0))
        with pytest.raises(ReplayError, match="do not line up"):
            subject.forward(0, some_ids(1, 6))


def test_a_router_that_ignores_replay_is_refused(policy: Path) -> None:
    with pytest.raises(ReplayError, match="fused and the sinkhorn router"):
        Policy(policy, moe_router_fusion=True)


def test_detached_routers_are_megatrons_again(policy: Path) -> None:
    subject = Policy(policy)
    subject.replay.detach()
    routers = [layer.mlp.router.router_replay for layer in subject.model.decoder.layers]
    assert list(itertools.chain(routers)) == [None, None, None]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_only_an_updates_real_tokens_count_for_the_selection_bias(
    policy: Path, recompute: str
) -> None:
    """Once, recomputed or not; padding, forward-only passes and evaluation count nothing."""
    subject = Policy(
        policy,
        recompute,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
    )
    subject.model.train()
    routers = [layer.mlp.router for layer in subject.model.decoder.layers]
    biases = [router.expert_bias.clone() for router in routers]
    ids, rows = some_ids(1, 6), random_table(3, 6, seed=4, pads=(4, 5))

    def counted() -> list[list[float]]:
        return [router.local_tokens_per_expert.tolist() for router in routers]

    nothing = [[0.0] * EXPERTS] * 3
    backward(subject.plain(ids).sum())  # outside a step, as an evaluation might
    with subject.replay.step():
        subject.replay.put(0, rows)
        with torch.no_grad():
            subject.forward(0, ids, count=True)
        assert counted() == nothing
        backward(subject.forward(0, ids).logsumexp(-1).sum())
    expected = [
        torch.bincount(rows.rows[slot, :4].flatten().long(), minlength=EXPERTS).float().tolist()
        for slot in range(3)
    ]
    assert counted() == expected
    assert all(torch.equal(r.expert_bias, b) for r, b in zip(routers, biases, strict=True))
    subject.replay.detach()
    backward(subject.plain(ids).sum())
    assert counted() != expected  # Megatron's own count again
