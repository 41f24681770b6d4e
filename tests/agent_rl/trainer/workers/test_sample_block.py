"""A batch on its way to the ranks: nothing changes, and every shared row travels once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agent_rl.errors import ReplayError, TrainerError
from agent_rl.trainer.workers.sample_block import SampleBlock, decode_samples, encode_samples
from agent_rl.types import TrainSample
from routing_cache import ArrayRows, DigestMismatchError, RoutingCache, RowLayout

LAYOUT = RowLayout(4, (1, 2, 3), 8, 2)  # layer 0 is dense
QWEN3_30B = RowLayout(48, tuple(range(48)), 128, 8)


def random_rows(layout: RowLayout, num_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct experts, ``[num_rows, L, K]``."""
    scores = rng.random((num_rows, layout.num_moe_layers, layout.num_experts), np.float32)
    return np.argpartition(scores, layout.moe_top_k, axis=-1)[..., : layout.moe_top_k].astype(
        layout.dtype
    )


def sample(name: str, ids: np.ndarray, rows: object, rng: np.random.Generator) -> TrainSample:
    mask = rng.random(len(ids)) < 0.4
    return TrainSample(
        sample_id=name,
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -rng.exponential(1.0, len(ids)), 0).astype(np.float32),
        advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
        weight_versions=(3,),
        routed_experts=rows,  # type: ignore[arg-type]
    )


def array_samples(lengths: Sequence[int], layout: RowLayout = LAYOUT) -> list[TrainSample]:
    rng = np.random.default_rng(0)
    samples = []
    for number, length in enumerate(lengths):
        ids = rng.integers(0, 99, length).astype(np.int32)
        rows = random_rows(layout, length - 1, rng)
        present = rng.random(length - 1) < 0.9
        leased = ArrayRows(layout, ids, rows, present, weight_version=3)
        samples.append(sample(f"group/{number}", ids, leased, rng))
    return samples


def group_samples(
    layout: RowLayout, *, group_size: int, prompt: int, turns: int, sampled: int, observed: int
) -> tuple[list[TrainSample], int]:
    """A group as a rollout leaves it in the cache, and the number of its distinct rows."""
    rng = np.random.default_rng(1)
    cache = RoutingCache(layout, budget_bytes=1 << 30)
    prompt_ids = rng.integers(0, 1000, prompt).astype(np.int32)
    prompt_rows = random_rows(layout, prompt, rng)
    samples = []
    for member in range(group_size):
        session = cache.session(weight_version=3)
        session.adopt(prompt_ids)
        for turn in range(turns):
            start = session.num_rows
            observation = rng.integers(1000, 2000, observed if turn else 0).astype(np.int32)
            new = np.concatenate([observation, rng.integers(2000, 3000, sampled).astype(np.int32)])
            asked_from = session.num_tokens + len(observation)
            rows = random_rows(layout, session.num_tokens + len(new) - 1 - start, rng)
            if start == 0:
                rows[:prompt] = prompt_rows
            session.record(
                new, rows, start=start, weight_version=3, num_prefill=asked_from - start, turn=turn
            )
        samples.append(sample(f"g/{member}", session.token_ids, session.lease(), rng))
    # Every row but the shared prompt's belongs to one member; a last token has none.
    return samples, prompt + group_size * (len(samples[0].token_ids) - 1 - prompt)


def sent(block: SampleBlock) -> memoryview:
    data = b"".join(bytes(part) for part in block.parts)
    assert len(data) == block.nbytes
    return memoryview(data)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_every_array_and_row_arrives_as_it_was(num_chunks: int) -> None:
    samples = array_samples([2, 9, 1, 30])
    samples[1] = replace(
        samples[1], routed_experts=None, advantages=np.full(9, np.nextafter(0, -1), np.float32)
    )
    arrived = decode_samples(sent(encode_samples(samples, num_chunks=num_chunks)))
    for before, after in zip(samples, arrived, strict=True):
        assert (after.sample_id, after.weight_versions) == (before.sample_id, (3,))
        for name in ("token_ids", "loss_mask", "rollout_logprobs", "advantages"):
            got, expected = getattr(after, name), getattr(before, name)
            assert got.dtype == expected.dtype
            assert np.array_equal(got, expected), name
        if before.routed_experts is None:
            assert after.routed_experts is None
            continue
        assert after.routed_experts is not None
        after.routed_experts.verify(after.token_ids)
        for layers in (None, (1, 2), (0,)):
            got, expected = (s.routed_experts.gather(layers=layers) for s in (after, before))
            assert np.array_equal(got[0], expected[0])
            assert np.array_equal(got[1], expected[1])


def test_a_message_is_hardly_larger_than_its_distinct_rows() -> None:
    """The layout of Qwen3-30B-A3B, a group of eight with a shared prompt, four turns."""
    samples, num_rows = group_samples(
        QWEN3_30B, group_size=8, prompt=600, turns=4, sampled=60, observed=40
    )
    block = encode_samples(samples)
    assert block.unique_row_bytes == num_rows * QWEN3_30B.num_moe_layers * QWEN3_30B.moe_top_k
    assert block.nbytes / block.unique_row_bytes <= 1.05
    unshared = sum(len(s.token_ids) - 1 for s in samples) * QWEN3_30B.row_bytes
    assert block.nbytes < 0.48 * unshared
    for after, before in zip(decode_samples(sent(block)), samples, strict=True):
        assert after.routed_experts is not None
        after.routed_experts.verify(before.token_ids)


def test_a_pipeline_stage_reads_its_own_layers_only() -> None:
    samples = array_samples([20, 30], QWEN3_30B)
    arrived = decode_samples(sent(encode_samples(samples, num_chunks=4)))
    batch = arrived[0].routed_experts._batch  # type: ignore[union-attr]
    for got in arrived:
        assert got.routed_experts is not None
        got.routed_experts.gather(layers=range(12, 24), stop=len(got.token_ids) - 1)
    assert batch.bytes_read == (19 + 29) * 12 * QWEN3_30B.moe_top_k


def test_changed_bytes_do_not_verify_on_the_other_side() -> None:
    samples = array_samples([12])
    block = bytearray(sent(encode_samples(samples)))
    block[-1] ^= 1
    arrived = decode_samples(memoryview(block))[0]
    assert arrived.routed_experts is not None
    with pytest.raises(DigestMismatchError):
        arrived.routed_experts.verify(arrived.token_ids)


def test_arrays_of_different_lengths_are_named_before_anything_is_sent() -> None:
    samples = array_samples([5, 6])
    samples[1] = replace(samples[1], advantages=samples[1].advantages[:-1])
    with pytest.raises(ReplayError, match=r"group/1: arrays of different lengths, got=\[5, 6\]"):
        encode_samples(samples)


def test_rows_that_no_longer_fit_their_tokens_are_refused() -> None:
    samples = array_samples([5, 6])
    changed = samples[1].token_ids.copy()
    changed[2] += 1
    samples[1] = replace(samples[1], token_ids=changed)
    with pytest.raises(ReplayError, match="cannot be packed"):
        encode_samples(samples, num_chunks=3)  # blocks get digests of their own: checked first
    arrived = decode_samples(sent(encode_samples(samples)))[1]
    assert arrived.routed_experts is not None
    with pytest.raises(DigestMismatchError):
        arrived.routed_experts.verify(arrived.token_ids)


class ForeignRows:
    """Rows held in a way of their own."""


def test_rows_of_an_unknown_kind_are_named() -> None:
    samples = array_samples([5])
    foreign = replace(samples[0], routed_experts=ForeignRows())  # type: ignore[arg-type]
    with pytest.raises(TrainerError, match=r"group/0: .*got=ForeignRows expected=a lease"):
        encode_samples([foreign])


@pytest.mark.parametrize("keep", [0, 7, 30, 200])
def test_a_block_that_is_cut_short_is_refused(keep: int) -> None:
    block = sent(encode_samples(array_samples([12])))
    with pytest.raises(TrainerError, match=r"no batch of samples|cut short"):
        decode_samples(block[:keep])
