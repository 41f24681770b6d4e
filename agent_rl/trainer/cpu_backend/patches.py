"""Attributes replaced in order, so that all of them can be put back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Patches:
    """The replacements so far; ``set`` and ``undo`` change the modules themselves."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace or add ``owner.name``."""
        self._replaced.append((owner, name, owner.__dict__.get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back, the last replacement first."""
        for owner, name, value in reversed(self._replaced):
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
        self._replaced.clear()
