"""The exception tree of ``routing_cache``.

Every message says what happened, what was got, what was expected and what to do. All of them
survive pickling, so they can cross process borders.
"""

from __future__ import annotations


class RoutingCacheError(Exception):
    """Root of everything this package raises on purpose."""

    def __init__(
        self, what: str, *, got: object = None, expected: object = None, fix: str = ""
    ) -> None:
        parts = [what]
        if got is not None:
            parts.append(f"got={got}")
        if expected is not None:
            parts.append(f"expected={expected}")
        if fix:
            parts.append(fix)
        # One string in ``args`` is what makes the default pickling work for every subclass.
        super().__init__("; ".join(parts))


class LayoutError(RoutingCacheError):
    """An array does not have the shape or dtype of the model's routing rows."""


class RowCountError(RoutingCacheError):
    """Rows do not cover the tokens they claim: a gap, too few, too many."""


class DigestMismatchError(RoutingCacheError):
    """Rows, token ids and weight version do not belong together."""


class BudgetError(RoutingCacheError):
    """The memory budget is exhausted and nothing may be evicted or spilled."""


class CodecError(RoutingCacheError):
    """Encoded rows are truncated, foreign, damaged or too large."""


class PayloadError(RoutingCacheError):
    """An engine's reply cannot be read as routing rows without guessing."""


class ClosedError(RoutingCacheError):
    """A session or lease was used after it was closed or released."""


class ConcurrencyError(RoutingCacheError):
    """Two threads changed one cache at the same time."""
