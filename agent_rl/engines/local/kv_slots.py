"""Preallocated KV storage: one slot a session, written at any position of any slot.

Layout of each layer's keys and values: ``[num_slots, kv_heads, width, head_dim]`` in
float32 (see ``attention.py``). The last column of a slot is scratch: padding writes there and no
mask ever lets it be read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

# Attention over few keys, or over a number that is no multiple of 4, takes other kernels that round
# differently; a coarse multiple also limits the number of shapes.
KEYS_MULTIPLE = 32


@dataclass(frozen=True)
class KvWindow:
    """The part of the storage that one forward touches.

    ``rows`` selects the slots of the batch: a slice is a view, a tensor ``[B]`` int64 a copy.
    ``write_index`` ``[B * kv_heads * S]`` int64 says where each fed token's head goes in the
    storage seen as ``[num_slots * kv_heads * width, head_dim]``; ``num_keys`` is how many columns
    attention reads.
    """

    rows: slice | torch.Tensor
    write_index: torch.Tensor
    num_keys: int


class SlotLayer(CacheLayerMixin):
    """One layer's storage. ``window`` must be set before each forward."""

    def __init__(self, num_slots: int, width: int, heads: int, head_dim: int):
        super().__init__()
        keys = torch.zeros(num_slots, heads, width, head_dim)
        self.storage = (keys, torch.zeros_like(keys))
        self.keys, self.values = self.storage
        self.window: KvWindow | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the storage exists from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write ``[B, heads, S, head_dim]`` and return the keys and values attention reads,
        ``[B, heads, num_keys, head_dim]``. Mutates the storage."""
        window = self.window
        assert window is not None
        keys, values = self.storage
        return (
            self._exchange(keys, key_states, window),
            self._exchange(values, value_states, window),
        )

    def _exchange(self, storage: torch.Tensor, new: torch.Tensor, window: KvWindow) -> torch.Tensor:
        flat = storage.view(-1, storage.shape[-1])
        flat.index_copy_(0, window.write_index, new.reshape(-1, new.shape[-1]).float())
        return storage[:, :, : window.num_keys][window.rows]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        assert self.window is not None
        return self.window.num_keys, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self.storage[0].shape[2] - 1


class KvSlots(Cache):
    """The storage of all layers as a transformers cache."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        max_tokens: int,
        heads: int,
        head_dim: int,
    ) -> None:
        self.width = -(-(max_tokens + 1) // KEYS_MULTIPLE) * KEYS_MULTIPLE
        self._heads = heads
        self.slot_layers = [
            SlotLayer(num_slots, self.width, heads, head_dim) for _ in range(num_layers)
        ]
        super().__init__(layers=list(self.slot_layers))

    def write_index(self, slots: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """``KvWindow.write_index`` of tokens fed to ``slots`` ``[B]`` at ``columns`` ``[B, S]``."""
        heads = slots[:, None] * self._heads + torch.arange(self._heads)
        return (heads[:, :, None] * self.width + columns[:, None]).view(-1)

    def select(self, window: KvWindow) -> None:
        """Mutating: the next forward reads and writes ``window``."""
        for layer in self.slot_layers:
            layer.window = window

    def copy_prefix(self, source: int, target: int, num_tokens: int) -> None:
        """Mutating: the first ``num_tokens`` columns of slot ``target`` become ``source``'s."""
        for layer in self.slot_layers:
            for held in layer.storage:
                held[target, :, :num_tokens] = held[source, :, :num_tokens]
