"""Saving and loading the trees."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from cache_truth import LAYOUT, TOY, check_integrity, true_rows

from routing_cache import BudgetError, CodecError, LayoutError, RoutingCache


def build() -> tuple[RoutingCache, list[tuple[int, tuple[int, ...]]]]:
    cache = RoutingCache(LAYOUT, conflict_policy="latest", digest_key=99)
    samples = []
    for member in range(3):
        for version in (1, 2):
            tokens = (*range(20), 50 + member, 60)
            session = cache.session(version, engine="ä")
            start = session.adopt(np.array(tokens[:20], np.int32))
            session.record(
                np.array(tokens[20:], np.int32),
                true_rows(version, tokens, start, 21),
                start=start,
                weight_version=version,
                num_prefill=20 - start,
            )
            samples.append((version, tokens))
    return cache, samples


def test_everything_the_trees_know_comes_back(tmp_path: Path) -> None:
    cache, samples = build()
    path = tmp_path / "cache.rows"
    assert cache.save(path) == path.stat().st_size
    loaded = RoutingCache.load(path, layout=LAYOUT)
    assert loaded.conflict_policy == "latest"
    for version, tokens in samples:
        lease = loaded.lease(np.array(tokens, np.int32), {version})
        lease.verify(np.array(tokens, np.int32))
        np.testing.assert_array_equal(lease.gather()[0][:21], true_rows(version, tokens, 0, 21))
        assert lease.segments[0].provenance == ("ä", version, "prefill")
    check_integrity(loaded)
    again = tmp_path / "again.rows"
    loaded.save(again)
    assert RoutingCache.load(again).stats().row_bytes == loaded.stats().row_bytes
    session = loaded.session(1)
    assert session.adopt(np.array(samples[0][1], np.int32)) == 21


def test_a_cache_without_digests_and_an_empty_one(tmp_path: Path) -> None:
    path = tmp_path / "cache.rows"
    RoutingCache(LAYOUT).save(path)
    assert RoutingCache.load(path).stats().num_nodes == 0
    plain = RoutingCache(LAYOUT, digest=False)
    plain.session(1).record(
        np.arange(3, dtype=np.int32),
        true_rows(1, (0, 1, 2), 0, 2),
        start=0,
        weight_version=1,
        num_prefill=0,
    )
    plain.save(path)
    assert RoutingCache.load(path).match([0, 1, 2], {1}).num_rows == 2


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    cache, _ = build()
    path = tmp_path / "cache.rows"
    cache.save(path)
    before = path.read_bytes()
    missing = tmp_path / "no" / "cache.rows"
    with pytest.raises(FileNotFoundError):
        cache.save(missing)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["cache.rows"]


def test_any_damaged_byte_and_any_cut_is_noticed(tmp_path: Path) -> None:
    cache, _ = build()
    path = tmp_path / "cache.rows"
    cache.save(path)
    data = path.read_bytes()
    for place in range(0, len(data), 11):
        broken = bytearray(data)
        broken[place] ^= 4
        path.write_bytes(broken)
        with pytest.raises(CodecError):
            RoutingCache.load(path)
    for cut in (0, 10, 47, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(CodecError):
            RoutingCache.load(path)


def test_the_wrong_model_and_too_small_a_budget_are_refused(tmp_path: Path) -> None:
    cache, _ = build()
    path = tmp_path / "cache.rows"
    cache.save(path)
    with pytest.raises(LayoutError, match="another model"):
        RoutingCache.load(path, layout=TOY)
    with pytest.raises(BudgetError):
        RoutingCache.load(path, budget_bytes=1500)


def forged(path: Path, change: tuple[str, object], rows: bytes = b"") -> None:
    """A file with a right hash around a wrong index."""
    index = {
        "layout": [3, [1, 2], 16, 2],
        "conflict_policy": "first",
        "digest_key": 1,
        "with_digests": False,
        "origins": [["e", 1, "decode"]],
        "versions": [[1, [[-1, 2, 0, [[0, 1, 0, 0]]]]]],
    }
    index[change[0]] = change[1]
    text = json.dumps(index).encode()
    body = b"RRCACHE1" + len(text).to_bytes(8, "little") + text + rows
    path.write_bytes(body + hashlib.blake2b(body, digest_size=32).digest())


GOOD_ROWS = np.array([5, 6], np.int32).tobytes() + bytes([1, 2, 3, 4])


def test_a_hand_made_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "made"
    forged(path, ("digest_key", 1), GOOD_ROWS)
    assert RoutingCache.load(path).match([5, 6], {1}) == (2, 1, (1,))


@pytest.mark.parametrize(
    "change",
    [
        ("layout", [3, [1, 9], 16, 2]),
        ("layout", [3]),
        ("conflict_policy", "newest"),
        ("origins", [["e", 1, "guess"]]),
        ("origins", []),
        ("digest_key", "x"),
        ("versions", [[1, [[0, 2, 0, []]]]]),
        ("versions", [[1, [[-1, 0, 0, []]]]]),
        ("versions", [[1, [[-1, -1, 0, []]]]]),
        ("versions", [[1, [[-1, 2, 0, [[0, 3, 0, 0]]]]]]),
        ("versions", [[1, [[-1, 2, 0, [[0, 1, 0, 0], [0, 1, 0, 0]]]]]]),
        ("versions", [[1, [[-1, 2, 0, [[0, 0, 0, 0]]]]]]),
        ("versions", [[1, [[-1, 1, 0, []], [-1, 1, 0, []]]]]),
        ("versions", [[1, [[-1, 99, 0, []]]]]),
        ("versions", 3),
    ],
)
def test_an_impossible_index_is_refused_although_its_hash_is_right(
    tmp_path: Path, change: tuple[str, object]
) -> None:
    path = tmp_path / "forged"
    rows = GOOD_ROWS if change[0] != "versions" else np.array([5, 5], np.int32).tobytes() + b"1234"
    forged(path, change, rows)
    with pytest.raises(CodecError):
        RoutingCache.load(path)
