"""Origin of a run of rows, and whose the tokens are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple, cast

from routing_cache.errors import RowCountError

ConflictPolicy = Literal["first", "latest"]
Kind = Literal["decode", "prefill"]
Role = Literal["prompt", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("prompt", "assistant", "tool")


class Provenance(NamedTuple):
    """Origin of a run of rows."""

    engine: str
    weight_version: int
    kind: Kind  # decoded one by one, or computed in a prefill


def read_origins(items: object) -> list[Provenance]:
    """Read ``[engine, weight version, kind]`` items as JSON gives them.

    Raises:
        ValueError, TypeError, OverflowError: they are something else.
    """
    origins: list[Provenance] = []
    for engine, version, kind in cast("list[tuple[str, int, str]]", items):
        if kind not in ("decode", "prefill"):
            raise ValueError(f"unknown kind of provenance {kind}")
        origins.append(Provenance(str(engine), int(version), kind))
    return origins


class RoleSpan(NamedTuple):
    """Tokens ``[start, stop)`` of a session, absolute indices, and whose they are."""

    role: Role
    start: int
    stop: int


def check_roles(spans: Iterable[RoleSpan], num_tokens: int) -> None:
    """Refuse spans of unknown roles or outside a session of ``num_tokens``.

    Raises:
        RowCountError: see :meth:`Session.record`.
    """
    for role, start, stop in spans:
        if role not in ROLES or not 0 <= start <= stop <= num_tokens:
            raise RowCountError(
                "an impossible role span",
                got=(role, start, stop),
                expected=f"one of {ROLES}, 0 <= start <= stop <= {num_tokens}",
            )


def role_code(role: Role) -> int:
    """Index into ``ROLES``."""
    return ROLES.index(role)
