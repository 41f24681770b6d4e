"""One layout moves ids, masks, values and routing rows together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_rl.errors import ReplayError
from agent_rl.trainer.assignment import plan_micro_batches
from agent_rl.trainer.batch import MicroBatch, fed_tokens, lay_out
from agent_rl.trainer.grid import Part
from agent_rl.types import TokenIds, TrainSample
from routing_cache import ArrayRows, RowLayout

LAYOUT = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=64, moe_top_k=2)


def marker(sample: int, position: int) -> int:
    """An id below 32 that tells both sample and position apart from their neighbours."""
    return (position + 3 * sample) % 8 + 8 * (sample % 4)


def marked_sample(number: int, length: int) -> TrainSample:
    """Token p, its log-prob, advantage and row all say which sample and position they are of."""
    ids = np.array([1000 * (number + 1) + p for p in range(length)], dtype=np.int32)
    mask = np.array([p % 3 != 0 for p in range(length)], dtype=bool)
    rows = np.zeros((max(0, length - 1), 2, 2), dtype=np.uint8)
    for p in range(length - 1):
        rows[p, 0] = marker(number, p), 32 + marker(number, p)
        rows[p, 1] = 63 - marker(number, p), marker(number, p)
    return TrainSample(
        sample_id=f"sample-{number}",
        token_ids=ids,
        loss_mask=mask,
        rollout_logprobs=-(ids / 7).astype(np.float32),
        advantages=(ids / 3).astype(np.float32),
        weight_versions=(0,),
        routed_experts=ArrayRows(LAYOUT, ids, rows),
    )


def check_values(batch: MicroBatch) -> list[tuple[int, int]]:
    """Check every real position; which (sample, position) they are."""
    seen = []
    for b, s in (~batch.padding).nonzero().tolist():
        sample = int(batch.sequence_ids[b, s])
        token = int(batch.token_ids[b, s])
        assert token // 1000 == sample + 1
        position = token - 1000 * (sample + 1)
        assert int(batch.position_ids[b, s]) == position
        assert int(batch.labels[b, s]) == token + 1
        assert bool(batch.loss_mask[b, s]) == ((position + 1) % 3 != 0)
        if batch.loss_mask[b, s]:
            assert float(batch.rollout_logprobs[b, s]) == pytest.approx(-(token + 1) / 7, rel=1e-6)
            assert float(batch.advantages[b, s]) == pytest.approx((token + 1) / 3, rel=1e-6)
        seen.append((sample, position))
    for values in (batch.weights, batch.units, batch.loss_mask, batch.advantages):
        assert not bool(values[batch.padding].any())
    return seen


def check_routed(batch: MicroBatch) -> list[tuple[int, int]]:
    """Check the rows of every token that the routers see; which (sample, position) they are."""
    table, seen = batch.table(replay=True), []
    ids, sequences = batch.routed(batch.token_ids), batch.routed(batch.sequence_ids)
    assert torch.equal(table.padding, sequences < 0)
    assert torch.equal(table.present, ~table.padding)
    for n in (~table.padding).nonzero().flatten().tolist():
        sample = int(sequences[n])
        position = int(ids[n]) - 1000 * (sample + 1)
        expected = marker(sample, position)
        assert table.rows[0, n].tolist() == [expected, 32 + expected]
        assert table.rows[1, n].tolist() == [63 - expected, expected]
        seen.append((sample, position))
    return seen


@pytest.mark.parametrize("alignment", [1, 4, 8, 16])
@pytest.mark.parametrize("lengths", [(5, 9), (9, 5), (17, 1, 16), (1,), (2, 2)])
def test_every_token_keeps_its_own_row(lengths: tuple[int, ...], alignment: int) -> None:
    samples = [marked_sample(i, n) for i, n in enumerate(lengths)]
    batch = lay_out(samples, range(len(samples)), index=0, layout=LAYOUT, alignment=alignment)
    width = batch.token_ids.shape[1]
    assert width % alignment == 0
    assert width - max(1, max(lengths) - 1) < alignment
    assert sorted(check_values(batch)) == sorted(check_routed(batch))
    seen = 0
    for b, length in enumerate(lengths):
        for s in range(width):
            if s < length - 1:
                assert int(batch.sequence_ids[b, s]) == b
                seen += 1
            else:
                assert batch.padding[b, s]
                assert not batch.loss_mask[b, s]
                assert not batch.present[s, b]
                assert batch.weights[b, s] == 0
                assert batch.units[b, s] == 0
    assert seen == batch.num_tokens == sum(max(0, n - 1) for n in lengths)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sp_size", [1, 2])
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("alignment", [1, 4, 8, 16])
def test_every_part_keeps_its_own_rows(
    cp_size: int, sp_size: int, alignment: int, packed: bool
) -> None:
    """Context parallelism cuts everything, sequence parallelism only what the routers see."""
    lengths = (5, 9, 1, 16)
    samples = [marked_sample(i, n) for i, n in enumerate(lengths)]
    seen, units, routed = [], 0, []
    for cp_rank in range(cp_size):
        for sp_rank in range(sp_size):
            local = lay_out(
                samples,
                range(4),
                index=0,
                layout=LAYOUT,
                part=Part(cp_rank, cp_size, sp_rank, sp_size),
                packed=packed,
                alignment=alignment,
            )
            assert local.lengths == tuple(n - 1 for n in lengths)
            routed += check_routed(local)
            if sp_rank == 0:
                seen += check_values(local)
                units += int(local.units.sum())
    wanted = [(i, p) for i, n in enumerate(lengths) for p in range(n - 1)]
    assert sorted(seen) == sorted(routed) == wanted
    assert units == sum(int(s.loss_mask[1:].sum()) for s in samples)


def test_zigzag_parts_hold_the_outer_and_the_inner_chunks() -> None:
    parts = [
        lay_out([marked_sample(0, 9)], [0], index=0, layout=LAYOUT, part=Part(r, 2), alignment=8)
        for r in range(2)
    ]
    assert parts[0].position_ids[0].tolist() == [0, 1, 6, 7]
    assert parts[1].position_ids[0].tolist() == [2, 3, 4, 5]


def test_packed_sequences_follow_each_other() -> None:
    samples = [marked_sample(i, n) for i, n in enumerate((6, 5))]
    whole = lay_out(samples, [0, 1], index=0, layout=LAYOUT, packed=True, alignment=8)
    assert whole.boundaries == (0, 5, 16)
    assert whole.position_ids[0, :8].tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert whole.sequence_ids[0, :10].tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, -1]
    second = lay_out(samples, [0, 1], index=0, layout=LAYOUT, packed=True, part=Part(1, 2))
    assert second.boundaries == (0, 8, 12)
    assert second.position_ids[0].tolist() == [2, 3, 4, 5, 1, 2]
    assert second.sequence_ids[0].tolist() == [0, 0, 0, -1, 1, 1]


class CountingRows:
    """Rows that note which layers and tokens of them were read."""

    def __init__(self, rows: ArrayRows) -> None:
        self._rows = rows
        self.num_tokens, self.weight_versions = rows.num_tokens, rows.weight_versions
        self.reads: list[tuple[Sequence[int] | None, int, int]] = []

    def gather(
        self, *, layers: Sequence[int] | None = None, start: int = 0, stop: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        self.reads.append((layers, start, stop if stop is not None else self.num_tokens))
        return self._rows.gather(layers=layers, start=start, stop=stop)

    def verify(self, token_ids: TokenIds) -> None: ...

    def release(self) -> None: ...


def test_a_rank_reads_only_its_layers_and_tokens() -> None:
    sample = marked_sample(0, 17)
    rows = CountingRows(sample.routed_experts)
    sample = dataclasses.replace(sample, routed_experts=rows)
    for part in (Part(1, 2), Part(0, 2, 1, 2), Part(sp_rank=1, sp_size=2)):
        lay_out([sample], [0], index=0, layout=LAYOUT, layers=(1,), part=part)
    zigzag, both, run = [(4, 8), (8, 12)], [(12, 16)], [(8, 16)]
    assert rows.reads == [((1,), *span) for span in zigzag + both + run]
    rows.reads.clear()
    batch = lay_out([sample], [0], index=0, layout=LAYOUT, layers=())
    assert batch.rows.shape == (0, 16, 1, 2)
    assert bool(batch.present.all())
    assert rows.reads == [((), 0, 16)]


@pytest.mark.parametrize("packed", [False, True])
def test_a_micro_batch_fills_up_to_the_shape_of_another_rank(packed: bool) -> None:
    sample = marked_sample(0, 9)
    batch = lay_out([sample], [0], index=0, layout=LAYOUT, packed=packed, at_least=(3, 12))
    assert batch.token_ids.shape == ((1, 12) if packed else (3, 12))
    assert sorted(check_values(batch)) == [(0, p) for p in range(8)]


def test_only_the_layers_of_this_stage_are_laid_out() -> None:
    batch = lay_out([marked_sample(0, 5)], [0], index=0, layout=LAYOUT, layers=(1,))
    assert batch.rows.shape == (1, 4, 1, 2)
    assert batch.rows[0, 2, 0].tolist() == [63 - marker(0, 2), marker(0, 2)]


def test_samples_at_the_limit_and_beyond_it() -> None:
    # 16 fed tokens fill the budget exactly, 17 exceed it and stand alone.
    (plan,) = plan_micro_batches([8, 17, 8, 16, 3], token_budget=16, alignment=1)
    assert plan == [(1,), (3,), (0, 2), (4,)]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=30),
    budget=st.integers(1, 120),
    alignment=st.sampled_from([1, 4, 8]),
    num_ranks=st.integers(1, 4),
    multiple_of=st.integers(1, 3),
)
def test_plan_covers_every_sample_once_with_equal_steps(
    lengths: list[int], budget: int, alignment: int, num_ranks: int, multiple_of: int
) -> None:
    plan = plan_micro_batches(
        lengths,
        token_budget=budget,
        alignment=alignment,
        num_ranks=num_ranks,
        multiple_of=multiple_of,
    )
    assert len(plan) == num_ranks
    assert len({len(batches) for batches in plan}) == 1
    assert len(plan[0]) % multiple_of == 0
    assert len(plan[0]) >= 1
    chosen = [i for batches in plan for batch in batches for i in batch]
    assert sorted(chosen) == list(range(len(lengths)))
    for batch in (b for batches in plan for b in batches if len(b) > 1):
        width = max(1, -(-max(lengths[i] for i in batch) // alignment)) * alignment
        assert width * len(batch) <= budget


def test_an_empty_micro_batch_still_has_a_shape() -> None:
    batch = lay_out([], [], index=3, layout=LAYOUT, alignment=4)
    assert batch.token_ids.shape == (1, 4)
    assert bool(batch.padding.all())
    assert int(batch.units.sum()) == 0


def test_padding_loads_every_rank_alike() -> None:
    """100 padded positions of a model with 128 experts on 8 ranks: no rank gets them all."""
    layout = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=128, moe_top_k=8)
    batch = lay_out([], [], index=0, layout=layout, alignment=100)
    for rows in batch.rows.flatten(1, 2).long():
        assert all(len(set(row)) == 8 for row in rows.tolist())
        per_rank = torch.bincount(rows.flatten() // 16, minlength=8)
        assert int(per_rank.min()) >= 96
        assert int(per_rank.max()) <= 112


def test_padded_rows_of_a_batch_have_distinct_ids() -> None:
    batch = lay_out([marked_sample(0, 2), marked_sample(1, 33)], [0, 1], index=0, layout=LAYOUT)
    padding = batch.padding.T.flatten()
    rows = batch.rows.flatten(1, 2)[:, padding].long()
    assert bool((rows[..., 0] != rows[..., 1]).all())
    load = torch.bincount(rows[0].flatten(), minlength=64)
    assert int(load.max() - load.min()) <= 2


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("part", [Part(), Part(1, 2), Part(0, 2, 1, 2), Part(sp_rank=1, sp_size=4)])
def test_padding_of_any_part_loads_expert_parallel_ranks_alike(part: Part, packed: bool) -> None:
    """Also where only some of several sequences side by side are padded."""
    layout = RowLayout(num_hidden_layers=2, moe_layers=(0, 1), num_experts=8, moe_top_k=2)
    samples = [marked_sample(0, 400)] + [marked_sample(i, 3) for i in range(1, 4)]
    batch = lay_out(
        samples, range(4), index=0, layout=layout, part=part, packed=packed, at_least=(1, 1600),
        use_rows=False,
    )  # fmt: skip
    table = batch.table(replay=True)
    rows = table.rows[:, table.padding].long()
    assert rows.shape[1] > 100
    for layer in rows:
        load = torch.bincount(layer.flatten(), minlength=8)
        assert int(load.max() - load.min()) <= 2 * len(samples)


def test_sequence_reduction_weighs_sequences_alike() -> None:
    samples = [marked_sample(0, 10), marked_sample(1, 4)]
    batch = lay_out(samples, [0, 1], index=0, layout=LAYOUT, reduction="sequence")
    assert batch.units.sum(dim=1).tolist() == [1, 1]
    assert batch.weights.sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
    assert bool((batch.weights[batch.loss_mask] > 0).all())
    tokens = lay_out(samples, [0, 1], index=0, layout=LAYOUT, reduction="token")
    assert int(tokens.units.sum()) == int(tokens.loss_mask.sum())


@pytest.mark.parametrize(
    ("row", "words"),
    [([5, 5], "got=\\[5, 5\\]"), ([64, 1], "got=\\[64, 1\\]"), ([255, 3], "got=\\[255, 3\\]")],
)
def test_a_damaged_row_names_sample_token_and_layer(row: list[int], words: str) -> None:
    sample = marked_sample(2, 6)
    rows = np.stack([np.array([[1, 2], [3, 4]])] * 5).astype(np.uint8)
    rows[3, 1] = row
    damaged = TrainSample(**{**sample.__dict__, "routed_experts": UncheckedRows(rows)})
    with pytest.raises(ReplayError, match=f"sample-2.*token 3, layer 1.*{words}"):
        lay_out([damaged], [0], index=0, layout=LAYOUT)


def test_only_rows_that_say_they_are_present_are_judged() -> None:
    """A foreign store may hold anything where a row is missing, and may call a mark a row."""
    sample = marked_sample(2, 6)
    rows = np.stack([np.array([[1, 2], [3, 4]])] * 5).astype(np.uint8)
    rows[1, 1], rows[4] = [7, 7], 255

    class Lossy(UncheckedRows):
        present = np.array([True, False, True, True, False])

        def gather(
            self, *, layers: Sequence[int] | None = None, start: int = 0, stop: int | None = None
        ) -> tuple[np.ndarray, np.ndarray]:
            found, _ = super().gather(layers=layers, start=start, stop=stop)
            return found, self.present[start:stop]

    lossy = Lossy(rows)
    batch = lay_out(
        [dataclasses.replace(sample, routed_experts=lossy)], [0], index=0, layout=LAYOUT
    )
    assert batch.present[:, 0].tolist() == lossy.present.tolist()
    lossy.present = np.array([True, False, True, True, True])
    with pytest.raises(ReplayError, match=r"1 damaged rows, first at token 4, layer 0: got=\[255"):
        lay_out([dataclasses.replace(sample, routed_experts=lossy)], [0], index=0, layout=LAYOUT)


def test_rows_of_another_width_are_refused() -> None:
    sample = marked_sample(2, 6)
    rows = np.stack([np.array([[1, 2], [3, 4], [5, 6]])] * 5).astype(np.uint8)
    foreign = TrainSample(**{**sample.__dict__, "routed_experts": UncheckedRows(rows)})
    with pytest.raises(ReplayError, match="another model or length"):
        lay_out([foreign], [0], index=0, layout=LAYOUT)


def test_a_sample_feeds_all_but_its_last_token() -> None:
    assert [fed_tokens(marked_sample(0, n)) for n in (1, 2, 9)] == [0, 1, 8]


class UncheckedRows:
    """Rows that hand out whatever they hold, as a foreign implementation might."""

    weight_versions = (0,)

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self.num_tokens = len(rows) + 1

    def gather(
        self, *, layers: Sequence[int] | None = None, start: int = 0, stop: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = self._rows if layers is None else self._rows[:, list(layers)]
        return rows[start:stop], np.ones(len(rows[start:stop]), dtype=bool)

    def verify(self, token_ids: TokenIds) -> None: ...

    def release(self) -> None: ...
