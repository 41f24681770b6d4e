"""The bounded buffer against a plain one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from envs.sandbox.guest.relay import BoundedBuffer


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(0, 64))
def test_head_and_tail_are_those_of_the_stream(chunks: list[bytes], cap: int) -> None:
    buffer = BoundedBuffer(cap)
    for chunk in chunks:
        buffer.feed(chunk)
    whole = b"".join(chunks)
    kept = buffer.kept()
    assert buffer.total_bytes == len(whole)
    if len(whole) <= cap:
        assert kept == whole
    else:
        head = cap - cap // 2
        assert kept == whole[:head] + (whole[-(cap // 2) :] if cap // 2 else b"")


def test_memory_stays_bounded() -> None:
    buffer = BoundedBuffer(1000)
    for _ in range(500):
        buffer.feed(bytes(1 << 16))
    assert len(buffer._tail) < 1000 + (1 << 17)  # pyright: ignore[reportPrivateUsage]
    assert len(buffer.kept()) == 1000
