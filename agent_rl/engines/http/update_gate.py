"""Lets requests run, or lets none run: what weight updates stand on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Counts who is inside; can be shut for newcomers, and waited on until it is empty.

    Args:
        places: how many may work at one time; others inside wait for a place.
    """

    def __init__(self, places: int) -> None:
        self.num_inside = 0
        self._places = asyncio.Semaphore(places)
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()

    def shut(self) -> None:
        """New requests wait outside from now on."""
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    async def wait_open(self) -> None:
        await self._open.wait()

    async def wait_empty(self, timeout_s: float) -> None:
        """Raises ``TimeoutError`` when somebody is still inside then."""
        await asyncio.wait_for(self._empty.wait(), timeout_s)

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Be counted, and hold a place. Does not look whether the gate is open."""
        self.num_inside += 1
        self._empty.clear()
        try:
            async with self._places:
                yield
        finally:
            self.num_inside -= 1
            if self.num_inside == 0:
                self._empty.set()
