"""Measures the cache against plain numpy on one reference workload.

``python -m routing_cache.bench [--json FILE]`` prints a table. One process, CPU only, fixed seed,
well under 90 s. Sizes are exact; timings are medians with quartiles.

:mod:`routing_cache.bench_workload` is what it runs on, :mod:`routing_cache.bench_timing` how two
things are compared.
"""

from __future__ import annotations

import argparse
import base64
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from routing_cache.batch_writer import pack
from routing_cache.bench_timing import Figure, paired, summary, thread_ns
from routing_cache.bench_workload import (
    FINAL_TOKENS,
    GROUP_SIZE,
    LAYOUT,
    NUM_TURNS,
    PROMPT_TOKENS,
    SEED,
    TURN_ROWS,
    make_rows,
    make_tokens,
    play,
    prompt_tokens,
    recording,
    replies,
)
from routing_cache.cache import RoutingCache
from routing_cache.codec import decode, encode
from routing_cache.digest import Digester
from routing_cache.layout import RowLayout, Rows
from routing_cache.lease import RowsLease
from routing_cache.row_check import kernel_knows
from routing_cache.session import Session


class Bar(NamedTuple):
    """Limit that a figure must keep; None only reports it."""

    limit: float | None
    at_least: bool = False

    def holds(self, value: float) -> bool:
        if self.limit is None:
            return True
        return value >= self.limit if self.at_least else value <= self.limit

    def __str__(self) -> str:
        return "" if self.limit is None else f"{'>=' if self.at_least else '<='} {self.limit:.4g}"


BARS: dict[str, Bar] = {
    "held_over_unique": Bar(1.10),
    "int32_per_trajectory_over_held": Bar(4.2, at_least=True),
    "accounted_over_traced": Bar(None),
    "batch_bytes_over_unique": Bar(1.02),
    "wire_suffix_over_full_int32": Bar(1 / 120),
    "wire_over_suffix_int32": Bar(0.19),
    "wire_set_over_ordered": Bar(0.77),
    "match_over_array_equal": Bar(2.5),
    "match_int32_over_array_equal": Bar(3.0),
    "append_over_memcpy": Bar(5.0),
    "append_with_digest_over_memcpy": Bar(None),
    "digest_over_memcpy": Bar(6.0),
    "gather_over_memcpy": Bar(0.70, at_least=True),
    "layer_slice_over_full": Bar(0.8),
    "lazy_view_over_memcpy": Bar(0.01),
    "decode_ns_per_set": Bar(None),
    "delta_1p5": Bar(0.012),
    "delta_14": Bar(0.10),
    "wrong_rows": Bar(0),
}


def measure_group() -> dict[str, Figure]:
    """Measure a finished group's bytes in memory and packed, and compare every row."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache = RoutingCache(LAYOUT)
    leases: list[RowsLease] = []
    for member in range(GROUP_SIZE):
        with play(cache, member) as session:
            leases.append(session.lease())
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    wrong = 0
    for member, lease in enumerate(leases):
        rows, present = lease.gather()
        truth = np.concatenate([reply.rows for reply in replies(member)])
        wrong += int((rows[:-1] != truth).any(axis=(1, 2)).sum()) + int((~present[:-1]).sum())
        wrong += int(present[-1]) + abs(len(truth) - (FINAL_TOKENS - 1))
    unique_rows = PROMPT_TOKENS + GROUP_SIZE * (FINAL_TOKENS - 1 - PROMPT_TOKENS)
    unique = unique_rows * LAYOUT.row_bytes
    int32_bytes = GROUP_SIZE * (FINAL_TOKENS - 1) * LAYOUT.row_bytes * 4
    return {
        "held_over_unique": Figure(held / unique),
        "int32_per_trajectory_over_held": Figure(int32_bytes / held),
        "accounted_over_traced": Figure(cache.stats().held_bytes / held),
        "batch_bytes_over_unique": Figure(pack(leases).nbytes / unique),
        "wrong_rows": Figure(wrong),
    }


def measure_wire() -> dict[str, Figure]:
    """Measure one sample's bytes on the wire, and the encodings' sizes and speed."""
    suffix = full_int32 = suffix_int32 = 0
    num_rows = 0
    for reply in replies(0):
        num_rows += len(reply.rows)
        suffix += len(encode(reply.rows, LAYOUT, "raw", token_ids=None))
        suffix_int32 += base64_bytes(len(reply.rows))
        full_int32 += base64_bytes(num_rows)
    rng = np.random.default_rng(SEED)
    rows = make_rows(rng, TURN_ROWS)
    raw, sets = encode(rows, LAYOUT, "raw"), encode(rows, LAYOUT, "elias_fano")
    num_sets = TURN_ROWS * LAYOUT.num_moe_layers
    decode_ns = [decode_sets_ns(sets) / num_sets for _ in range(41)]
    return {
        "wire_suffix_over_full_int32": Figure(suffix / full_int32),
        "wire_over_suffix_int32": Figure(suffix / suffix_int32),
        "wire_set_over_ordered": Figure(len(sets) / len(raw)),
        "decode_ns_per_set": summary(decode_ns[1:]),
        "delta_1p5": Figure(delta_size(rng, rows, 0.015)),
        "delta_14": Figure(delta_size(rng, rows, 0.14)),
    }


def base64_bytes(num_rows: int) -> int:
    """Count the characters of the rows as base64 of int32."""
    assert len(base64.b64encode(bytes(1536))) == 2048
    return (num_rows * LAYOUT.row_bytes * 4 + 2) // 3 * 4


def decode_sets_ns(data: bytes) -> int:
    """Time the set decoder alone, without header and content hash, in nanoseconds."""
    from routing_cache.codec import elias_fano
    from routing_cache.codec.header import read_header

    view = memoryview(data)
    header, at = read_header(view)
    payload = view[at:]
    return thread_ns(lambda: elias_fano.decode(payload, header.num_rows, LAYOUT))


def delta_size(rng: np.random.Generator, rows: Rows, share: float) -> float:
    """Size over uint8 of rows whose sets differ from their base in ``share`` of the places.

    A changed set has one expert exchanged, every fifth one two: what a router near a tie does.
    """
    flat = rows.reshape(-1, 8).copy()
    changed = np.flatnonzero(rng.random(len(flat)) < share)
    for number, index in enumerate(changed.tolist()):
        count = 2 if number % 5 == 0 else 1
        others = np.setdiff1d(np.arange(128, dtype=np.uint8), flat[index])
        slots = rng.choice(8, count, replace=False)
        flat[index, slots] = rng.choice(others, count, replace=False)
    new = flat.reshape(rows.shape)
    data = encode(new, LAYOUT, "delta", base=rows)
    assert np.array_equal(decode(data, base=rows).rows, new)
    return len(data) / rows.nbytes


def measure_match() -> dict[str, Figure]:
    """Time the longest prefix of 38,000 tokens in a tree with 1,000 branches at turn boundaries."""
    narrow = RowLayout(1, (0,), 128, 8)
    rng = np.random.default_rng(SEED)
    cache = RoutingCache(narrow, digest=False)
    ids = make_tokens(rng, 38_000)
    trunk = cache.session(1)
    rows = make_rows(rng, len(ids))[:, :1]
    edges = [PROMPT_TOKENS + TURN_ROWS * turn for turn in range(NUM_TURNS + 1)]
    for low, high in pairwise([0, *edges]):
        start = trunk.num_rows
        trunk.record(
            ids[low:high], rows[start : high - 1], start=start, weight_version=1, num_prefill=0
        )
    for _ in range(1_000):
        branch = trunk.branch(int(rng.choice(edges[:-1])))
        start = branch.num_rows
        new = make_tokens(rng, 50)
        stop = branch.num_tokens + len(new) - 1
        part = make_rows(rng, stop - start)[:, :1]
        branch.record(new, part, start=start, weight_version=1, num_prefill=0)
        branch.close()
    key, copy, versions = ids.tobytes(), ids.copy(), {1}
    assert cache.match(key, versions).num_rows == len(ids) - 1

    def equal() -> bool:
        return np.array_equal(ids, copy)

    return {
        "match_over_array_equal": paired(
            (lambda: cache.match(key, versions), equal) for _ in range(301)
        ),
        "match_int32_over_array_equal": paired(
            (lambda: cache.match(ids, versions), equal) for _ in range(301)
        ),
    }


def measure_append() -> dict[str, Figure]:
    """Time appending the turns' replies, and hashing them, against copying the same bytes.

    Every reply is its own memory and every copy goes to memory not used before, as in a rollout.
    """
    return {
        "append_over_memcpy": paired(append_rounds(digest=False)),
        "append_with_digest_over_memcpy": paired(append_rounds(digest=True)),
        "digest_over_memcpy": paired(digest_rounds()),
    }


def append_rounds(*, digest: bool) -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    cache = RoutingCache(LAYOUT, digest=digest)
    for member in range(4):
        pool = list(replies(member))
        copies = [reply.rows.copy() for reply in pool]
        target = np.empty((FINAL_TOKENS, 48, 8), np.uint8)
        session = cache.session(1)
        session.adopt(prompt_tokens())
        at = 0
        for turn, (reply, copy) in enumerate(zip(pool, copies, strict=True)):
            append = recording(session, reply)
            if turn == 0:
                append()
            else:
                yield append, partial(np.copyto, target[at : at + len(copy)], copy)
            at += len(copy)


def digest_rounds() -> Iterator[tuple[Callable[[], object], Callable[[], object]]]:
    digester = Digester(LAYOUT)
    pool = list(replies(0))[1:]
    copies = [reply.rows.copy() for reply in pool]
    target = np.empty((4 * FINAL_TOKENS, 48, 8), np.uint8)
    for number in range(4 * len(pool)):
        reply, copy = pool[number % len(pool)], copies[number % len(pool)]
        place = target[number * TURN_ROWS : (number + 1) * TURN_ROWS]
        tokens = reply.new_token_ids
        digest = partial(digester.rows, reply.rows, tokens, start=6_000, weight_version=1)
        yield digest, partial(np.copyto, place, copy)


VIEW_REPEATS = 16


def lease_often(session: Session) -> None:
    for _ in range(VIEW_REPEATS):
        session.lease().release()


def measure_read() -> dict[str, Figure]:
    """Read one sample's rows: everything, a quarter of the layers, or a reference."""
    session = play(RoutingCache(LAYOUT), 0)
    lease = session.lease()
    source = lease.gather()[0]
    quarter = range(12)
    return {
        "gather_over_memcpy": paired(
            ((lease.gather, source.copy) for _ in range(41)), inverse=True
        ),
        "layer_slice_over_full": paired(
            (lambda: lease.gather(layers=quarter), lease.gather) for _ in range(41)
        ),
        "lazy_view_over_memcpy": paired(
            ((lambda: lease_often(session), source.copy) for _ in range(41)),
            repeats=VIEW_REPEATS,
        ),
    }


def measure() -> dict[str, Figure]:
    """Measure all figures, in the table's order."""
    found = {
        **measure_group(),
        **measure_wire(),
        **measure_match(),
        **measure_append(),
        **measure_read(),
    }
    return {key: found[key] for key in BARS}


def table(figures: dict[str, Figure]) -> str:
    lines = [f"{'figure':34} {'median':>10} {'quartiles':>21}  {'bar':>10}"]
    for key, figure in figures.items():
        spread = "" if figure.quartiles is None else "{:.4g} .. {:.4g}".format(*figure.quartiles)
        verdict = "" if BARS[key].holds(figure.value) else "  MISSED"
        lines.append(f"{key:34} {figure.value:>10.4g} {spread:>21}  {BARS[key]!s:>10}{verdict}")
    return "\n".join(lines)


def as_json(figures: dict[str, Figure]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, figure in figures.items():
        flat[key] = figure.value
        if figure.quartiles is not None:
            flat[f"{key}_q1"], flat[f"{key}_q3"] = figure.quartiles
    return flat


def main(arguments: list[str] | None = None) -> int:
    """Run all measurements; 1 when a bar was missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write a flat JSON object to this file")
    options = parser.parse_args(arguments)
    figures = measure()
    print(table(figures))
    probe = np.zeros((1, LAYOUT.num_moe_layers, LAYOUT.moe_top_k), LAYOUT.dtype)
    print(
        f"rows are checked by {'the compiled kernel' if kernel_knows(probe, LAYOUT) else 'numpy'}"
    )
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(figures), indent=1) + "\n")
    return 0 if all(BARS[key].holds(figure.value) for key, figure in figures.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
