"""The process of one local rank: ``python -m agent_rl.trainer.workers.worker DESCRIPTOR``.

The descriptor is a Unix socket to the driver. When it closes, because the driver stopped in
whatever way, this process ends at once: also in the middle of a collective.
"""

from __future__ import annotations

import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING

from agent_rl.trainer.workers.channel import Channel, ChannelClosedError, Received, write_block
from agent_rl.trainer.workers.messages import Alive, Close, Done, Failed, Start

if TYPE_CHECKING:
    import torch

_ORPHANED = 3  # exit status of a worker whose driver is gone


def main(descriptor: int) -> None:
    """Serve the driver until it says ``Close`` or goes away.

    Schedulers send SIGTERM to all processes of a job: the driver ends its step first, with us.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=descriptor))
    start = channel.receive().message
    assert isinstance(start, Start)
    requests: queue.SimpleQueue[Received] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, requests), daemon=True).start()
    busy = threading.Event()
    busy.set()
    period_s = min(5.0, start.config.trainer.worker_timeout_s / 4)
    threading.Thread(target=_beat, args=(channel, busy, period_s), daemon=True).start()
    _serve(channel, start, requests, busy)


def _listen(channel: Channel, requests: queue.SimpleQueue[Received]) -> None:
    try:
        while True:
            requests.put(channel.receive())
    except ChannelClosedError:
        print("the driver is gone", file=sys.stderr, flush=True)
        os._exit(_ORPHANED)


def _beat(channel: Channel, busy: threading.Event, period_s: float) -> None:
    """Tell the driver that this process is scheduled, however long a request takes."""
    try:
        while busy.wait():  # an idle driver does not read: nothing may pile up
            channel.send(Alive())
            time.sleep(period_s)
    except ChannelClosedError:
        return  # the listener ends the process


def _serve(
    channel: Channel,
    start: Start,
    requests: queue.SimpleQueue[Received],
    busy: threading.Event,
) -> None:
    from agent_rl.trainer.workers.rank import Rank, failure  # seconds: the heart beats already
    from agent_rl.trainer.workers.weight_block import weight_parts

    try:
        rank = Rank(start)
    except Exception as error:  # a rank's boundary: the driver raises it
        traceback.print_exc()
        channel.send(failure(error))
        return
    channel.send(Done(None, rank.weight_version))
    while True:
        busy.clear()
        request, descriptor = requests.get()
        busy.set()
        exported: list[int] = []

        def export(weights: dict[str, torch.Tensor], exported: list[int] = exported) -> None:
            exported.append(write_block("weights", weight_parts(weights)))

        block = None if descriptor is None else _mapped(descriptor)
        reply = rank.handle(request, block, export)
        if isinstance(reply, Failed):
            print(reply.trace, file=sys.stderr, flush=True)
        channel.send(reply, exported[0] if exported else None)
        for descriptor in exported:
            os.close(descriptor)
        if isinstance(request, Close):
            return


def _mapped(descriptor: int) -> memoryview:
    """The block's bytes; the pages are shared with the driver and the other ranks."""
    try:
        return memoryview(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ))
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main(int(sys.argv[1]))
