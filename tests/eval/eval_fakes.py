"""An environment that does what it is told, and fails where it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from envs.base import Observation, Score, Task
from envs.errors import InfrastructureError

_T = TypeVar("_T")


def run_blocking(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(work)


class FakeEnv:
    """``submit`` ends it, ``bad`` is malformed, everything else is done."""

    def __init__(self, patch: bytes = b"", fails_in: str = "", seconds: float = 0.0) -> None:
        self._patch, self._fails_in, self._seconds = patch, fails_in, seconds
        self.closed = False
        self.busy = False

    @property
    def task(self) -> Task:
        return Task("a", "issue", {}, "", (), {}, {}, b"")

    def fail_if(self, where: str) -> None:
        if self._fails_in == where:
            raise InfrastructureError(f"{where} is broken")

    def reset(self) -> Observation:
        self.fail_if("reset")
        return Observation("issue")

    def step(self, action: str) -> Observation:
        self.fail_if("step")
        self.busy = True
        time.sleep(self._seconds)
        self.busy = False
        if action == "submit":
            return Observation("submitted", done=True, stop_reason="submit")
        return Observation(f"did {action}", malformed=action == "bad")

    def patch(self) -> bytes:
        self.fail_if("patch")
        return self._patch

    def grade(self) -> Score:
        raise AssertionError("the official harness grades")

    def close(self) -> None:
        self.closed = True
        self.fail_if("close")
