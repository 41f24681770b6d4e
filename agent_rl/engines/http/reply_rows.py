"""The rows of one reply: as many as its tokens need, and of this conversation.

A prompt of P tokens with N sampled ones has rows ``[start, P + N - 1)``: the last sampled token was
never fed forward. Another number is refused, never padded or cut into shape.

The seam check tells whether rows are those of this conversation. Shape cannot: rows of another
request may have the right count. So every request of a known session asks for one row more than it
needs, the newest one that it has already, and compares (``routing_cache.agreement``). It costs one
row per turn, and catches a reply mixed up now as well as one mixed up a turn earlier (then the
stored row was not ours).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from agent_rl.engines.http.inference_server import ServerReply
from agent_rl.errors import EngineReplyError
from agent_rl.types import Rows
from routing_cache import RowLayout, check_rows
from routing_cache.agreement import Agreement, compare_again
from routing_cache.row_check import expected_rows


@dataclass(frozen=True)
class _Seam:
    position: int  # absolute index of the row
    row: Rows  # [1, L, K]


class SeamBook:
    """The newest row of every live session. Mutable; forgets the least recently used session."""

    def __init__(self, layout: RowLayout, max_sessions: int = 4096) -> None:
        self._layout = layout
        self._seams: OrderedDict[str, _Seam] = OrderedDict()
        self._max_sessions = max_sessions

    def first_row(self, session_id: str, start: int) -> int:
        """Return the row to ask from to check the seam: ``start`` or one before it."""
        seam = self._seams.get(session_id)
        return start - 1 if seam is not None and seam.position == start - 1 else start

    def judge(self, session_id: str, row: Rows, *, reused: bool) -> Agreement:
        """Compare the returned row ``[1, L, K]`` with the one known from the turn before.

        ``reused``: the engine says that it found the token's KV in its cache.
        """
        return compare_again(self._seams[session_id].row, row, self._layout, reused=reused)

    def note(self, session_id: str, rows: Rows, start: int) -> None:
        """Remember the last of ``rows [R, L, K]``, which begin at ``start``, if it is good."""
        if not len(rows):
            return
        # A copy: a view would keep the whole reply alive for one row.
        last = rows[-1:].copy()
        self.forget(session_id)
        if check_rows(last, self._layout).all_good:
            self._seams[session_id] = _Seam(start + len(rows) - 1, last)
            if len(self._seams) > self._max_sessions:
                self._seams.popitem(last=False)

    def forget(self, session_id: str) -> None:
        self._seams.pop(session_id, None)

    def clear(self) -> None:
        """Forget all rows: the weights changed, and none can be expected again."""
        self._seams.clear()


def accept_rows(
    reply: ServerReply,
    layout: RowLayout,
    *,
    num_prompt: int,
    start: int,
    where: str,
    refuse_bad: bool = True,
) -> Rows | None:
    """Return the reply's rows ``[start, P + N - 1)``, ``[R, L, K]``.

    Args:
        num_prompt: P; N is the number of tokens in the reply.
        start: first row that was asked for.
        where: names engine and session in messages.
        refuse_bad: False returns bad and missing rows as they came, and None for a reply without
            any: whoever stores them marks and counts them.

    Raises:
        EngineReplyError: another number of rows or from elsewhere; with ``refuse_bad`` also rows
            absent, or ids that no router can choose.
    """
    num_sampled = max(1, len(reply.token_ids))
    expected = expected_rows(num_prompt + num_sampled, start)
    rows = reply.rows
    if rows is None:
        if not refuse_bad:
            return None
        raise EngineReplyError(
            f"{where}: the reply has no routing rows: got none, expected {expected}; start the "
            "server with --enable-return-routed-experts"
        )
    if len(rows) != expected or reply.rows_start != start:
        raise EngineReplyError(
            f"{where}: the reply does not cover the tokens: got {len(rows)} routing rows from "
            f"{reply.rows_start}, expected {expected} from {start} ({num_prompt} prompt + "
            f"{num_sampled} sampled - 1); the server must honour the start index"
        )
    if not refuse_bad:
        return rows
    check = check_rows(rows, layout)
    if not check.all_good:
        raise EngineReplyError(
            f"{where}: got {check.num_bad + check.num_missing} of {len(rows)} routing rows with "
            f"repeated or out-of-range experts, expected {layout.moe_top_k} distinct ids below "
            f"{layout.num_experts} in every MoE layer; the server's capture is broken"
        )
    return rows
