"""The compute side of the local engine: feed tokens, read routers, sample. No scheduling here.

A burst starts from lanes, each with tokens not yet in the KV storage, and runs a few iterations:
the first feeds whatever is pending (long suffixes in padded batches, single tokens together), the
others decode one token for every lane still alive. The host sees only the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from agent_rl.engines.local.hf_model import load_model, load_state, routers, row_layout
from agent_rl.engines.local.kv_slots import KEYS_MULTIPLE, KvSlots, KvWindow
from agent_rl.engines.local.quantize import QUANTIZATIONS, round_weights
from agent_rl.engines.local.sampling import counter_uniform, sample
from agent_rl.types import Floats, Rows, SamplingParams, TokenIds

# Shapes are rounded up to these, which keeps a token's low bits independent of its batch: CPU
# kernels take another path for the last 1-3 rows or columns.
_BATCH_MULTIPLE = 8
_LENGTH_MULTIPLE = 8
_MAX_PREFILL_TOKENS = 32768  # padded tokens of one forward; bounds memory


@dataclass(frozen=True)
class Lane:
    """One request's part in a burst."""

    slot: int
    start: int  # absolute position of pending[0]; the slot holds positions [0, start)
    pending: TokenIds  # [S] tokens to feed, at least one
    max_new_tokens: int  # most tokens to sample in this burst, at least one
    sampling: SamplingParams
    seed: int
    return_full_logprobs: bool = False
    same_as: int | None = None  # lane of this burst with the same start 0 and pending tokens

    def following(self, leader: int) -> Lane:
        """Return this lane, its pending tokens copied from lane ``leader`` instead of fed."""
        return replace(self, same_as=leader)


@dataclass
class LaneResult:
    """Outcome of a burst for one lane: S + n - 1 tokens fed, n sampled."""

    token_ids: list[int] = field(default_factory=list)  # [n]
    logprobs: list[float] = field(default_factory=list)  # [n]
    full_logprobs: list[Floats] = field(default_factory=list)  # n times [V]
    rows: list[Rows] = field(default_factory=list)  # parts of [S + n - 1, L, K], in token order
    stopped: bool = False

    @property
    def routed_experts(self) -> Rows:
        """Rows ``[S + n - 1, L, K]`` of every token fed."""
        return np.concatenate(self.rows)


class ModelRunner:
    """Owns the model and the KV storage. Every method must run on one thread at a time."""

    def __init__(self, folder: Path, *, dtype: str, num_slots: int, max_tokens: int) -> None:
        self._model = load_model(folder, dtype)
        self._quantization = QUANTIZATIONS.get(dtype)
        self.layout = row_layout(self._model)
        config = self._model.config
        self._pad_slot = num_slots  # padding rows of a batch read and write here and above
        self._kv = KvSlots(
            num_layers=config.num_hidden_layers,
            num_slots=num_slots + _BATCH_MULTIPLE,
            max_tokens=max_tokens,
            heads=config.num_key_value_heads,
            head_dim=config.head_dim,
        )
        self._chosen: list[torch.Tensor] = []
        for router in routers(self._model).values():
            router.register_forward_hook(self._record_choice)
        self.vocab_size: int = config.vocab_size

    def _record_choice(
        self, module: torch.nn.Module, args: object, output: tuple[torch.Tensor, ...]
    ) -> None:
        self._chosen.append(output[2])

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Mutating: replace every parameter. The caller forgets all slots."""
        load_state(self._model, weights)
        if self._quantization is not None:
            round_weights(self._model, self._quantization)

    @torch.inference_mode()
    def burst(self, lanes: Sequence[Lane], max_iterations: int) -> list[LaneResult]:
        """Feed the pending tokens of ``lanes`` and sample up to ``max_iterations`` tokens each.

        Lanes that stop early rest. Mutates the KV storage at the fed positions only.
        """
        results = [LaneResult() for _ in lanes]
        batch = _BatchState(lanes)
        logits = self._feed_pending(lanes, results)
        alive = np.arange(len(lanes))
        for iteration in range(max_iterations):
            finished = batch.sample(alive, logits, results)
            alive = alive[~finished]
            if iteration == max_iterations - 1 or not alive.size:
                break
            logits, rows = self._forward(
                batch.slots[alive], batch.tokens[alive, None], batch.positions[alive]
            )
            for i, lane in enumerate(alive):
                results[lane].rows.append(rows[i])  # [1, L, K]
            batch.positions[alive] += 1
        return results

    def _feed_pending(self, lanes: Sequence[Lane], results: list[LaneResult]) -> torch.Tensor:
        """Feed every lane's pending tokens; next-token logits ``[B, V]`` in lane order."""
        logits = torch.empty(len(lanes), self.vocab_size, dtype=self._model.dtype)
        own = [i for i, lane in enumerate(lanes) if lane.same_as is None]
        for batch in prefill_batches([len(lanes[i].pending) for i in own]):
            members = [own[i] for i in batch]
            length = max(len(lanes[i].pending) for i in members)
            tokens = np.zeros((len(members), length), dtype=np.int64)
            for row, i in enumerate(members):
                tokens[row, : len(lanes[i].pending)] = lanes[i].pending
            part, rows = self._forward(
                np.array([lanes[i].slot for i in members]),
                tokens,
                np.array([lanes[i].start for i in members]),
                np.array([len(lanes[i].pending) for i in members]),
            )
            logits[torch.tensor(members)] = part
            for row, i in enumerate(members):
                results[i].rows.append(rows[row, : len(lanes[i].pending)])
        for i, lane in enumerate(lanes):
            if lane.same_as is not None:
                self._kv.copy_prefix(lanes[lane.same_as].slot, lane.slot, len(lane.pending))
                logits[i] = logits[lane.same_as]
                results[i].rows.append(results[lane.same_as].rows[0])
        return logits

    def _forward(
        self,
        slots: NDArray[np.int64],
        tokens: NDArray[np.int64],
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64] | None = None,
    ) -> tuple[torch.Tensor, Rows]:
        """Feed ``tokens`` ``[B, S]`` (row b: ``lengths[b]`` valid) at ``starts`` ``[B]``.

        Returns the logits after each row's last valid token ``[B, V]`` and the experts chosen
        for every token ``[B, S, L, K]``.
        """
        batch, length = tokens.shape
        lengths = np.ones(batch, dtype=np.int64) if lengths is None else lengths
        rows, place, size = self._batch_rows(slots)
        padded = 1 if length == 1 else _round_up(length, _LENGTH_MULTIPLE)
        offsets = np.arange(padded)
        valid = np.zeros((size, padded), dtype=bool)
        valid[place] = offsets < lengths[:, None]
        ids = np.zeros((size, padded), dtype=np.int64)
        ids[place, :length] = tokens
        positions = np.zeros((size, padded), dtype=np.int64)
        positions[place] = starts[:, None] + offsets
        positions[~valid] = 0
        slot_of_row = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows.numpy()
        columns = np.where(valid, positions, self._kv.width - 1)
        window = KvWindow(
            rows=rows,
            write_index=self._kv.write_index(
                torch.from_numpy(slot_of_row), torch.from_numpy(columns)
            ),
            num_keys=_round_up(int((starts + lengths).max()), KEYS_MULTIPLE),
        )
        hidden = self._run_layers(torch.from_numpy(ids), torch.from_numpy(positions), window)
        last = torch.zeros(size, dtype=torch.int64)
        last[torch.from_numpy(place)] = torch.from_numpy(lengths - 1)
        logits = self._model.lm_head(hidden[torch.arange(size), last])
        chosen = torch.stack(self._chosen, dim=1).view(size, padded, len(self._chosen), -1)
        routed = chosen.numpy().astype(self.layout.dtype)[place, :length]
        return logits[torch.from_numpy(place)], routed

    def _run_layers(
        self, ids: torch.Tensor, positions: torch.Tensor, window: KvWindow
    ) -> torch.Tensor:
        """Hidden states ``[B, S, H]``; the routers' choices are left in ``_chosen``."""
        self._chosen.clear()
        self._kv.select(window)
        seen = torch.arange(window.num_keys) <= positions[:, None, :, None]  # [B, 1, S, keys]
        mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
        output = self._model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            cache=self._kv,
            use_cache=True,
        )
        return output.last_hidden_state

    def _batch_rows(
        self, slots: NDArray[np.int64]
    ) -> tuple[slice | torch.Tensor, NDArray[np.int64], int]:
        """Lay lanes into a batch of a rounded size: a view of neighbouring slots when few
        are idle, a gather otherwise. Returns the rows, each lane's row and the batch size."""
        low, high = int(slots.min()), int(slots.max()) + 1
        size = _round_up(len(slots), _BATCH_MULTIPLE)
        span = _round_up(high - low, _BATCH_MULTIPLE)
        if span <= size + size // 4:
            return slice(low, low + span), slots - low, span
        padding = np.full(size - len(slots), self._pad_slot)
        return torch.from_numpy(np.concatenate([slots, padding])), np.arange(len(slots)), size


class _BatchState:
    """Per-lane arrays of one burst, indexed by lane number."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self.slots = np.array([lane.slot for lane in lanes], dtype=np.int64)
        self.positions = np.array([lane.start + len(lane.pending) for lane in lanes])
        self.tokens = np.zeros(len(lanes), dtype=np.int64)
        self._seeds = np.array([lane.seed & 0xFFFFFFFFFFFFFFFF for lane in lanes], dtype=np.uint64)
        self._temperatures = torch.tensor(
            [lane.sampling.temperature for lane in lanes], dtype=torch.float32
        )
        self._stops = [frozenset(lane.sampling.stop_token_ids) for lane in lanes]

    def sample(
        self, alive: NDArray[np.int64], logits: torch.Tensor, results: list[LaneResult]
    ) -> NDArray[np.bool_]:
        """Mutating: append one token to every lane in ``alive``; which of them finished."""
        uniforms = counter_uniform(self._seeds[alive], self.positions[alive])
        tokens, logprobs = sample(logits, self._temperatures[torch.from_numpy(alive)], uniforms)
        self.tokens[alive] = tokens.numpy()
        taken = logprobs.gather(1, tokens[:, None]).squeeze(1).tolist()
        finished = np.zeros(len(alive), dtype=bool)
        for row, (lane, token) in enumerate(zip(alive.tolist(), tokens.tolist(), strict=True)):
            result = results[lane]
            result.token_ids.append(token)
            result.logprobs.append(taken[row])
            if self._lanes[lane].return_full_logprobs:
                result.full_logprobs.append(logprobs[row].numpy().copy())
            result.stopped = token in self._stops[lane]
            spent = len(result.token_ids) >= self._lanes[lane].max_new_tokens
            finished[row] = result.stopped or spent
        return finished


def prefill_batches(lengths: Sequence[int]) -> list[list[int]]:
    """Cut lanes into forwards: within one, no row is padded to over twice its length.

    Single tokens form one batch; order inside a batch is by length, then by lane number.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        head = lengths[batches[-1][0]] if batches else 0
        fits = batches and (
            (lengths[i] == head == 1) or (head > 1 and lengths[i] > 1 and 2 * lengths[i] >= head)
        )
        if fits and (len(batches[-1]) + 1) * head <= _MAX_PREFILL_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
