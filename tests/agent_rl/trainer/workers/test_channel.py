"""Messages and blocks between driver and worker."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_rl.errors import ReplayError, TrainerError
from agent_rl.trainer.workers.channel import Channel, ChannelClosedError, write_block
from agent_rl.trainer.workers.messages import Alive, Done, Failed, Publish, Save, Step

Ends = tuple[Channel, Channel]


@pytest.fixture
def ends() -> Iterator[Ends]:
    near, far = Channel.pair()
    pair = near, Channel(far)
    yield pair
    for end in pair:
        end.close()


def content(descriptor: int | None) -> bytes:
    assert descriptor is not None
    try:
        return os.pread(descriptor, 1 << 20, 0)
    finally:
        os.close(descriptor)


def test_messages_arrive_in_order_and_equal(ends: Ends) -> None:
    near, far = ends
    sent = [Step(), Save(Path("/x")), Alive(), Done({"loss": 0.5}, 7), Publish()]
    for message in sent:
        near.send(message)
    assert [far.receive() for _ in sent] == [(message, None) for message in sent]


def test_an_error_arrives_as_itself(ends: Ends) -> None:
    near, far = ends
    near.send(Failed(ReplayError("rows are missing"), "trace", is_ours=True))
    message = far.receive().message
    assert isinstance(message, Failed)
    assert isinstance(message.error, ReplayError)
    assert str(message.error) == "rows are missing"


def test_a_block_stays_with_its_own_message(ends: Ends) -> None:
    """Frames that wait together are read together: the descriptor must not go to the first."""
    near, far = ends
    blocks = [write_block("a", [b"first"]), write_block("b", [b"sec", memoryview(b"ond")])]
    near.send(Alive())
    near.send(Done(None, 1), blocks[0])
    near.send(Alive())
    near.send(Done(None, 2), blocks[1])
    for block in blocks:
        os.close(block)
    received = [far.receive() for _ in range(4)]
    assert [r.block is None for r in received] == [True, False, True, False]
    assert [content(received[i].block) for i in (1, 3)] == [b"first", b"second"]


def test_a_block_can_be_read_by_every_receiver_and_leaves_nothing_behind(ends: Ends) -> None:
    near, far = ends
    before = set(os.listdir("/dev/shm"))
    block = write_block("samples", [b"x" * 100_000])
    near.send(Step(), block)
    near.send(Step(), block)
    os.close(block)
    assert [content(far.receive().block) for _ in range(2)] == [b"x" * 100_000] * 2
    assert set(os.listdir("/dev/shm")) == before


def test_a_message_larger_than_the_socket_arrives_whole(ends: Ends) -> None:
    near, far = ends
    value = {f"metric_{i}": float(i) for i in range(200_000)}
    sending = threading.Thread(target=near.send, args=(Done(value, 1),))
    sending.start()
    assert far.receive().message == Done(value, 1)
    sending.join()


def test_a_frame_in_parts_is_not_given_out_before_it_is_complete() -> None:
    near, far = Channel.pair()
    peer = Channel(socket.socket(fileno=os.dup(near.fileno())))
    peer.send(Done(None, 4))
    frame = far.recv(1 << 16)
    peer.close()
    far.sendall(frame[:20])
    assert near.receive_ready() == []
    far.sendall(frame[20:] + frame)
    assert [r.message for r in near.receive_ready()] == [Done(None, 4)] * 2
    near.close()
    far.close()


def test_the_end_of_the_other_side_is_an_error_of_its_own(ends: Ends) -> None:
    near, far = ends
    near.send(Alive())
    near.close()
    assert far.receive().message == Alive()
    with pytest.raises(ChannelClosedError, match="was closed"):
        far.receive()
    with pytest.raises(ChannelClosedError):
        far.send(Alive())


def test_bytes_that_are_no_frame_are_refused() -> None:
    near, far = Channel.pair()
    far.sendall(b"Traceback (most recent call last)")
    with pytest.raises(TrainerError, match=r"out of step: got=b'Trac'"):
        near.receive()
    near.close()
    far.close()
