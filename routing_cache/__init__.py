"""Router decisions of a Mixture-of-Experts rollout, cached by token prefix.

numpy and the standard library only. Start with :class:`RoutingCache`; ``README.md`` explains the
key, the invariants and the cost.
"""

from routing_cache.batch_reader import PackedRows, PackedSample
from routing_cache.batch_writer import pack
from routing_cache.cache import CacheStats, Match, RetireReport, RoutingCache
from routing_cache.context_parallel import gather_ranges, zigzag_ranges
from routing_cache.disagreement import DisagreementCounts
from routing_cache.errors import (
    BudgetError,
    ClosedError,
    CodecError,
    ConcurrencyError,
    DigestMismatchError,
    LayoutError,
    PayloadError,
    RoutingCacheError,
    RowCountError,
)
from routing_cache.layout import RowLayout, spread_rows
from routing_cache.lease import RowsLease
from routing_cache.provenance import Provenance, RoleSpan
from routing_cache.row_check import check_rows
from routing_cache.sequence_rows import ArrayRows
from routing_cache.session import Session

__all__ = [
    "ArrayRows",
    "BudgetError",
    "CacheStats",
    "ClosedError",
    "CodecError",
    "ConcurrencyError",
    "DigestMismatchError",
    "DisagreementCounts",
    "LayoutError",
    "Match",
    "PackedRows",
    "PackedSample",
    "PayloadError",
    "Provenance",
    "RetireReport",
    "RoleSpan",
    "RoutingCache",
    "RoutingCacheError",
    "RowCountError",
    "RowLayout",
    "RowsLease",
    "Session",
    "check_rows",
    "gather_ranges",
    "pack",
    "spread_rows",
    "zigzag_ranges",
]
