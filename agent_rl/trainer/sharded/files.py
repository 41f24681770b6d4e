"""A rank's files: flushed to the disk, and one rank's failure becomes that of all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

_OS_CODE = re.compile(r"Os \{ code: (\d+)|os error (\d+)")


class RankFiles:
    """Writes files and keeps the first failure for ``agree``.

    Writing goes on in step with the other ranks after a failure here: one that left the way would
    let them wait in their next exchange for ever.
    """

    def __init__(self) -> None:
        self._failure: OSError | None = None

    def tensors(
        self, path: Path, tensors: Mapping[str, torch.Tensor], metadata: dict[str, str]
    ) -> None:
        self.made(lambda file: save_file(dict(tensors), file, metadata=metadata), path)

    def text(self, path: Path, text: str) -> None:
        self.made(lambda file: file.write_text(text), path)

    def folder(self, path: Path) -> None:
        try:
            path.mkdir(exist_ok=True)
        except OSError as error:
            self._failure = self._failure or error

    def made(self, make: Callable[[Path], object], path: Path) -> None:
        """Have ``make`` write ``path`` and flush it; nothing after an earlier failure."""
        if self._failure is not None:
            return
        try:
            make(path)
            with path.open("rb") as stream:
                os.fsync(stream.fileno())
        except OSError as error:
            self._failure = error
        except SafetensorError as error:
            self._failure = _os_error(error, path)

    def agree(self) -> None:
        """Raise ``OSError`` on every rank if any of them failed. Collective."""
        own = None if self._failure is None else (self._failure.errno, str(self._failure))
        failures: list[tuple[int | None, str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(failures, own)
        if self._failure is not None:
            raise self._failure
        for rank, failure in enumerate(failures):
            if failure is not None:
                code, text = failure
                raise OSError(code or errno.EIO, f"rank {rank} could not write: {text}")


def _os_error(error: SafetensorError, path: Path) -> OSError:
    """Find the ``OSError`` that safetensors wraps in an error of its own."""
    found = _OS_CODE.search(str(error))
    code = int(found[1] or found[2]) if found else errno.EIO
    return OSError(code, f"{os.strerror(code)} ({error})", str(path))
