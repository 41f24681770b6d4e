"""Row layout, narrowing, checking and padding rows."""

import pickle
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from cache_truth import TOY, random_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from routing_cache import LayoutError, RowCountError, RowLayout, check_rows, spread_rows
from routing_cache.layout import as_token_ids
from routing_cache.row_check import clean_by_kernel, clean_by_numpy, expected_rows, kernel_knows

RNG = np.random.default_rng(1)


@pytest.mark.parametrize(
    ("experts", "dtype", "missing"),
    [
        (1, "uint8", 255),
        (128, "uint8", 255),
        (255, "uint8", 255),
        (256, "uint16", 65535),
        (384, "uint16", 65535),
        (65535, "uint16", 65535),
    ],
)
def test_the_dtype_follows_from_the_number_of_experts(
    experts: int, dtype: str, missing: int
) -> None:
    """One value always stays free for the missing mark, whatever ids occur."""
    layout = RowLayout(1, (0,), experts, 1)
    assert layout.dtype.name == dtype
    assert layout.missing == missing
    assert layout.missing >= experts
    assert layout.row_bytes == layout.dtype.itemsize


@pytest.mark.parametrize(
    "arguments",
    [
        (4, (), 8, 2),
        (4, (1, 1), 8, 2),
        (4, (2, 1), 8, 2),
        (4, (3, 4), 8, 2),
        (4, (-1, 2), 8, 2),
        (4, (1,), 8, 0),
        (4, (1,), 8, 9),
        (4, (1,), 0, 1),
        (4, (1,), 65536, 1),
    ],
)
def test_impossible_layouts_are_refused(arguments: tuple[int, tuple[int, ...], int, int]) -> None:
    with pytest.raises(LayoutError, match=r"got="):
        RowLayout(*arguments)


@pytest.mark.parametrize("moe_layers", [(1, 2, 3), (0, 2), (0, 1, 2, 3)])
def test_layers_are_mapped_by_their_global_number(moe_layers: tuple[int, ...]) -> None:
    """Dense layers in front or in between must not shift a neighbour's rows."""
    layout = RowLayout(4, moe_layers, 8, 2)
    every = np.broadcast_to(np.arange(4, dtype=np.int32)[None, :, None], (5, 4, 2))
    wanted = np.broadcast_to(np.array(moe_layers)[None, :, None], (5, len(moe_layers), 2))
    np.testing.assert_array_equal(layout.select(every), wanted)
    np.testing.assert_array_equal(layout.select(wanted), wanted)


def test_pipeline_stages_get_their_own_layers() -> None:
    """Layers 0-1 on one stage, 2-3 on the other: L indices 0 and 1-2 of the MoE layers 1, 2, 3."""
    rows = np.broadcast_to(np.arange(4, dtype=np.int32)[None, :, None], (5, 4, 2))
    canonical = TOY.canonical(rows)
    stages = [
        [i for i, layer in enumerate(TOY.moe_layers) if layer in stage]
        for stage in ((0, 1), (2, 3))
    ]
    assert [canonical[0, s, 0].tolist() for s in stages] == [[1], [2, 3]]


@pytest.mark.parametrize(
    "shape", [(5, 2, 2), (5, 5, 2), (5, 3, 3), (5, 6), (5, 3, 2, 1), (0, 1, 2)]
)
def test_any_other_shape_is_an_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match="do not fit the model"):
        TOY.select(np.zeros(shape, np.uint8))


def test_rows_must_be_integers() -> None:
    with pytest.raises(LayoutError, match="integers"):
        TOY.select(np.zeros((1, 3, 2), np.float32))  # type: ignore[arg-type]


def test_narrowing_never_wraps() -> None:
    """Ids 127, 128, 255, 256, 383: int8 and uint8 would turn them into other experts."""
    layout = RowLayout(1, (0,), 384, 5)
    ids = np.array([[[127, 128, 255, 256, 383]]], np.int32)
    assert layout.canonical(ids).tolist() == ids.tolist()
    for dtype in (np.int8, np.uint8):
        with pytest.raises(LayoutError, match="cannot hold the ids"):
            layout.canonical(ids.astype(dtype))
    assert layout.canonical(ids.astype(np.int16)).tolist() == ids.tolist()


def test_ids_out_of_range_are_judged_in_full_width_and_only_marks_become_the_mark() -> None:
    """256 + 3 must not pass as expert 3 of a model with 8."""
    ids = np.array([[[259, 1]] * 3, [[-1, 1]] * 3, [[2, 1]] * 3], np.int64)
    rows = TOY.canonical(ids)
    assert rows[:, 0, 0].tolist() == [8, 255, 2]
    check = check_rows(rows, TOY)
    assert check.bad is not None
    assert check.bad.tolist() == [True, True, False]


def test_zero_rows_are_bad_and_dense_layers_are_not_judged() -> None:
    good = random_rows(RNG, 5, TOY)
    everything_zero = np.zeros_like(good)
    assert check_rows(everything_zero, TOY).num_bad == 5
    half = good.copy()
    half[3:] = 0
    assert check_rows(half, TOY).bad.tolist() == [False, False, False, True, True]  # type: ignore[union-attr]
    dense_in_front = np.zeros((5, 4, 2), np.int32)
    dense_in_front[:, 1:] = good
    assert check_rows(TOY.canonical(dense_in_front), TOY).all_good


@pytest.mark.parametrize("bad_set", [[9, 1], [3, 3]])
def test_an_id_out_of_range_or_twice_makes_the_row_bad(bad_set: list[int]) -> None:
    rows = random_rows(RNG, 5, TOY)
    rows[2, 1] = bad_set
    check = check_rows(rows, TOY)
    assert check.num_bad == 1
    assert check.bad is not None
    assert check.bad[2]


def test_a_wholly_marked_row_is_missing_and_a_partly_marked_one_is_bad() -> None:
    rows = random_rows(RNG, 4, TOY)
    rows[1] = TOY.missing
    rows[2, 0, 1] = TOY.missing
    check = check_rows(rows, TOY)
    assert check.missing is not None
    assert check.missing.tolist() == [False, True, False, False]
    assert check.bad is not None
    assert check.bad.tolist() == [False, False, True, False]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_fast_check_agrees_with_counting(data: st.DataObject) -> None:
    """Any K, layer count, dtype and place of the fault, across chunk borders too."""
    experts = data.draw(st.sampled_from([1, 2, 8, 64, 128, 129, 200, 255, 256, 512, 40000]))
    k = data.draw(st.integers(1, min(experts, 9)))
    layout = RowLayout(3, tuple(range(data.draw(st.integers(1, 3)))), experts, k)
    num_rows = data.draw(st.integers(1, 70))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    first = rng.integers(0, experts, (num_rows, layout.num_moe_layers, 1))
    rows = ((first + np.arange(k)) % experts).astype(layout.dtype)
    for _ in range(data.draw(st.integers(0, 3))):
        p, layer = rng.integers(num_rows), rng.integers(layout.num_moe_layers)
        rows[p, layer, rng.integers(k)] = rng.integers(0, int(np.iinfo(layout.dtype).max) + 1)
    wanted = [
        not (row == layout.missing).all()
        and any(len(set(s)) < k or max(s) >= experts for s in row.tolist())
        for row in rows
    ]
    bad = check_rows(rows, layout).bad
    assert wanted == ([False] * num_rows if bad is None else bad.tolist())
    clean = not any(wanted) and not (rows == layout.missing).any()
    assert clean_by_numpy(rows, layout) == clean
    if kernel_knows(rows, layout):
        assert clean_by_kernel(rows, layout) == clean


def test_the_compiled_check_is_built_where_there_is_a_compiler() -> None:
    """Installing falls back to numpy silently, so this is where a broken build shows."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    can_build = shutil.which("gcc") is not None and headers.is_file()
    layout = RowLayout(1, (0,), 8, 2)
    assert kernel_knows(spread_rows(3, layout), layout) or not can_build


@pytest.mark.parametrize("num_experts", [16, 256, 300])
@pytest.mark.parametrize("k", [2, 4, 8])
def test_both_checks_see_every_pair_in_every_place(num_experts: int, k: int) -> None:
    """Every pair of places of every set, also behind the last whole vector of 32 bytes."""
    layout = RowLayout(1, (0,), num_experts, k)
    rows = spread_rows(21, layout)
    built = [clean_by_kernel] if kernel_knows(rows, layout) else []
    for is_clean in (clean_by_numpy, *built):
        assert is_clean(rows, layout)
        for row in range(21):
            for first in range(k):
                for second in range(first):
                    broken = rows.copy()
                    broken[row, 0, first] = broken[row, 0, second]
                    assert not is_clean(broken, layout)
                broken = rows.copy()
                broken[row, 0, first] = layout.num_experts
                assert not is_clean(broken, layout)


def test_the_compiled_check_refuses_what_it_does_not_know() -> None:
    layout = RowLayout(1, (0,), 16, 8)
    if not kernel_knows(spread_rows(1, layout), layout):
        return  # not built here; the test above says whether it should have been
    rows = np.zeros((3, 1, 5), np.uint8)
    with pytest.raises(ValueError, match="expected=whole sets of 2, 4 or 8"):
        clean_by_kernel(rows, RowLayout(1, (0,), 16, 5))
    with pytest.raises(ValueError, match="got=15 bytes"):
        clean_by_kernel(rows, RowLayout(1, (0,), 16, 8))
    strided = np.zeros((3, 2, 8), np.uint8)[:, :1]
    assert not kernel_knows(strided, RowLayout(1, (0,), 16, 8))


def test_a_fault_is_found_in_every_place_of_a_large_block() -> None:
    layout = RowLayout(48, tuple(range(48)), 128, 8)
    rows = np.tile(np.arange(8, dtype=np.uint8), (700, 48, 1))
    assert check_rows(rows, layout).all_good
    for place in range(0, 700 * 48, 997):
        flat = rows.reshape(-1, 8)
        flat[place, 7] = flat[place, place % 7]
        assert check_rows(rows, layout).num_bad == 1
        flat[place, 7] = 7


@pytest.mark.parametrize("num_rows", [1, 2, 3, 1000])
@pytest.mark.parametrize("experts", [8, 200, 256, 40_000])
def test_good_rows_never_take_the_slow_check(num_rows: int, experts: int) -> None:
    """Zeros at the end of a block must not look like repeats of what follows it."""
    layout = RowLayout(3, (0, 1, 2), experts, 4)
    rows = np.tile(np.array([3, 2, 1, 0], layout.dtype), (num_rows, 3, 1))
    assert clean_by_numpy(rows, layout)
    rows[-1, -1, 0] = 0
    assert not clean_by_numpy(rows, layout)


VIEWS = {
    "as it is": lambda rows: rows,
    "some layers": lambda rows: rows[:, 1:],
    "every other row": lambda rows: rows[::2],
    "layer by layer": lambda rows: rows.swapaxes(0, 1).copy().swapaxes(0, 1),
    "experts reversed": lambda rows: rows[:, :, ::-1],
    "big-endian": lambda rows: rows.astype(rows.dtype.newbyteorder(">")),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("damage", [None, 8, -2, 1 << 14, "twice", "missing"])
def test_any_dtype_subset_of_layers_and_memory_order_is_judged_alike(
    view: str, dtype: type, damage: int | str | None
) -> None:
    rows = random_rows(RNG, 40_000, TOY).astype(dtype)
    if damage == "missing":
        rows[30_000] = -1 if np.iinfo(dtype).min < 0 else np.iinfo(dtype).max
    elif damage == "twice":
        rows[30_000, 2] = 5
    elif damage is not None:
        rows[30_000, 2, 1] = damage if np.can_cast(np.min_scalar_type(damage), dtype) else 254
    seen = VIEWS[view](rows)
    token = 15_000 if view == "every other row" else 30_000
    check = check_rows(seen, TOY)
    assert check.num_bad == (damage not in (None, "missing"))
    assert check.num_missing == (damage == "missing")
    assert check.first_bad == ((token, seen.shape[1] - 1) if check.num_bad else None)
    assert check.all_good == (damage is None)
    hidden = np.arange(len(seen)) != token
    assert check_rows(seen, TOY, hidden).all_good
    shown = check_rows(seen, TOY, ~hidden)
    assert (shown.num_bad, shown.num_missing, shown.first_bad) == (
        check.num_bad,
        check.num_missing,
        check.first_bad,
    )


def test_the_check_refuses_what_cannot_be_this_models_rows() -> None:
    wide = RowLayout(1, (0,), 300, 2)
    for wrong, layout in (
        (np.zeros((3, 2), np.uint8), TOY),
        (np.zeros((3, 2, 3), np.uint8), TOY),
        (np.zeros((3, 2, 2), np.float32), TOY),
        (np.zeros((3, 1, 2), np.uint8), wide),
    ):
        with pytest.raises(LayoutError):
            check_rows(wrong, layout)
    with pytest.raises(RowCountError):
        check_rows(random_rows(RNG, 4, TOY), TOY, np.ones(3, bool))


def test_the_last_sampled_token_has_no_row() -> None:
    assert expected_rows(10) == 9
    assert expected_rows(10, start=4) == 5


def test_padding_rows_are_valid_and_even_across_expert_parallel_ranks() -> None:
    """100 padding rows filled with 0..7 would all go to rank 0 of 8; these go to all alike."""
    layout = RowLayout(2, (0, 1), 128, 8)
    rows = spread_rows(100, layout)
    assert check_rows(rows, layout).all_good
    for layer in range(2):
        per_rank = np.bincount(rows[:, layer].reshape(-1) // 16, minlength=8)
        assert per_rank.sum() == 800
        assert per_rank.min() >= 96
        assert per_rank.max() <= 112
    again = np.concatenate([spread_rows(60, layout), spread_rows(40, layout, first=60)])
    np.testing.assert_array_equal(again, rows)


def test_repeated_ids_are_what_the_check_prevents_at_the_dispatcher() -> None:
    """[[0,3],[0,0],[5,5]] gives 4 map entries where 6 are promised: two of the rows are bad."""
    layout = RowLayout(1, (0,), 8, 2)
    rows = np.array([[[0, 3]], [[0, 0]], [[5, 5]]], np.uint8)
    routing_map = np.zeros((3, 8), bool)
    np.put_along_axis(routing_map, rows[:, 0].astype(int), True, axis=1)
    assert routing_map.sum() == 4
    assert check_rows(rows, layout).num_bad == 2
    assert check_rows(spread_rows(3, layout), layout).all_good


def test_token_ids_are_taken_as_vectors_of_int32() -> None:
    assert as_token_ids([1, 2]).dtype == np.int32
    assert as_token_ids(np.array([1, 2], np.uint64)).tolist() == [1, 2]
    assert as_token_ids([]).shape == (0,)
    for wrong in ([[1, 2]], [1.5], np.array([2**31]), ["a"]):
        with pytest.raises(LayoutError):
            as_token_ids(wrong)


def test_errors_keep_their_text_and_type_across_processes() -> None:
    with pytest.raises(LayoutError) as caught:
        TOY.select(np.zeros((1, 9, 2), np.uint8))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is LayoutError
    assert str(copy) == str(caught.value)
    assert "expected=[T, 3 or 4, 2]" in str(copy)


@pytest.mark.parametrize("num_experts", [7, 16, 300])
def test_padding_rows_by_layer_are_those_of_the_formula(num_experts: int) -> None:
    layout = RowLayout(5, (0, 1, 3), num_experts, 4)
    token, layer, slot = np.ogrid[9:40, 0:3, 0:4]
    rows = spread_rows(31, layout, first=9)
    assert rows.dtype == layout.dtype
    np.testing.assert_array_equal(rows, (token * 4 + layer + slot) % num_experts)
    np.testing.assert_array_equal(spread_rows(31, layout, first=9, layers=[2, 0]), rows[:, [2, 0]])
