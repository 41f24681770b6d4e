"""Typed fields of a ``config.json``: all faults are collected, not raised one by one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agent_rl.model.shape import Yarn


class Fields:
    """Typed access to the fields of a configuration.

    ``missing`` has a line for every field that is absent or unreadable, ``not_covered`` one for
    every setting that Megatron would compute differently.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self.missing: list[str] = []
        self.not_covered: list[str] = []
        # Rows and weights are read as they are: quantised tensors would be taken for numbers.
        self.require("quantization_config", None)

    def int(self, key: str, *others: str) -> int:
        """Return the positive integer under the first of the names that is there."""
        for name in (key, *others):
            value = self._raw.get(name)
            if value is not None:
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
                self.missing.append(f"{name}: got={value!r} expected=an integer above 0")
                return 1
        self.missing.append(f"{key}: missing")
        return 1

    def maybe_int(self, key: str) -> int | None:
        """Return a whole number, or None where it is absent or null."""
        value = self._raw.get(key)
        return None if value is None else int(value)

    def stated_int(self, key: str) -> int | None:
        """Do as :meth:`maybe_int` where null has a meaning of its own; absence is a fault."""
        if key not in self._raw:
            self.missing.append(f"{key}: missing")
        return self.maybe_int(key)

    def float(self, key: str, default: float | None = None) -> float:
        value = self._raw.get(key, default)
        if value is None:
            self.missing.append(f"{key}: missing")
            return 1.0
        return float(value)

    def bool(self, key: str, default: bool = False) -> bool:
        return bool(self._raw.get(key, default))

    def ints(self, key: str) -> tuple[int, ...]:
        return tuple(int(value) for value in self._raw.get(key) or ())

    def require(self, key: str, expected: object, *also: object) -> None:
        """Refuse every value but ``expected`` and ``also``; an absent key is fine."""
        got = self._raw.get(key, expected)
        if got != expected and got not in also:
            self.not_covered.append(f"{key}: not covered, {got=} {expected=}")

    @property
    def _rope(self) -> Mapping[str, Any]:
        """Return ``rope_parameters`` (transformers 5) or ``rope_scaling`` (older folders)."""
        return self._raw.get("rope_parameters") or self._raw.get("rope_scaling") or {}

    @property
    def rope_theta(self) -> float:
        theta = self._rope.get("rope_theta") or self._raw.get("rope_theta")
        if theta is None:  # transformers' default is another one for each family
            self.missing.append("rope_theta: missing")
            return 1.0
        return float(theta)

    @property
    def rotary_fraction(self) -> float:
        """The rotated share of a head; 0.5 where it is absent, as transformers reads GLM's."""
        own = self._raw.get("partial_rotary_factor")
        return float(self._rope.get("partial_rotary_factor") or own or 0.5)

    @property
    def _rope_type(self) -> str:
        return str(self._rope.get("rope_type", self._rope.get("type", "default")))

    def require_plain_rope(self) -> None:
        if self._rope_type != "default":
            self.not_covered.append(
                f"rope_type: not covered, got={self._rope_type!r} expected='default'"
            )

    def yarn(self) -> Yarn | None:
        """Return YaRN's numbers, None for a plain rotary embedding."""
        rope = self._rope
        if self._rope_type != "yarn":
            self.require_plain_rope()
            return None
        own_factor = rope.get("attention_factor")
        if own_factor is not None or rope.get("truncate", True) is not True:
            self.not_covered.append("rope: attention_factor and truncate=false are not covered")
        if rope.get("factor") is None:
            self.missing.append("rope factor: missing")
        positions = rope.get("original_max_position_embeddings")
        return Yarn(
            factor=float(rope.get("factor") or 1.0),
            original_positions=int(positions or self.int("max_position_embeddings")),
            beta_fast=float(rope.get("beta_fast") or 32.0),
            beta_slow=float(rope.get("beta_slow") or 1.0),
            mscale=float(rope.get("mscale") or 1.0),
            mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
        )
