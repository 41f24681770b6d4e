"""The frozen reference policy: the starting weights, swapped in for one forward pass per step.

A copy of the rank's own shards stays on the CPU for the whole run; while it is in, the current
weights wait beside it. That costs the model's size twice in host memory and two copies of it a
step, and no second model on the device.

The reference routes with its own routers. Recorded rows are choices of the *current* policy's
routers: forced upon other weights they would describe a policy that never existed. At equal
weights the KL term therefore starts at the mismatch without replay, about 1e-3, not at 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


class ReferencePolicy:
    """Copies what ``chunks`` hold now: parameters and buffers, so a router's bias too."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        # By name: Megatron's data-parallel wrapper has another thing under ``buffers``.
        self._held = [
            tensor
            for chunk in chunks
            for _, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
        ]
        self._frozen = self._copy()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """The reference's weights inside, the current ones again outside, bit for bit.

        The optimizer must not step inside; under bfloat16 its float32 masters are not touched.
        """
        current = self._copy()
        try:
            self._put(self._frozen)
            yield
        finally:
            self._put(current)

    @torch.no_grad()
    def _copy(self) -> list[torch.Tensor]:
        return [t.detach().to("cpu", copy=True) for t in self._held]

    @torch.no_grad()
    def _put(self, values: Sequence[torch.Tensor]) -> None:
        for held, value in zip(self._held, values, strict=True):
            held.copy_(value)  # in place: the data-parallel wrapper's buffers own the memory
