"""Row arithmetic of one reply: how many rows must come, which of them are new, and whose they are.

A prompt of P tokens with N sampled ones has rows ``[start, P + N - 1)``: the last sampled token was
never fed forward. Anything else is refused, never padded or cut into shape.

The seam check tells whether rows are those of this conversation. Shape cannot: rows of another
request may have the right count. So every request of a known session asks for one row more than it
needs, the newest one that it has already. An engine that reused the prefix returns that row again;
one that prefilled the token anew, or that kept a sibling's copy of it, may flip an expert or two;
rows of another request share about K/E of their experts. It costs one row a turn, and catches a
reply mixed up now as well as one mixed up a turn earlier (then the stored row was not ours).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from agent_rl.engines.http.inference_server import ServerReply
from agent_rl.errors import EngineReplyError
from agent_rl.types import Rows
from routing_cache import RowLayout, check_rows

Verdict = Literal["equal", "recomputed", "foreign"]
_MIN_SHARED = {True: 0.75, False: 0.5}  # share of a token's experts; keyed by "KV was reused"


@dataclass(frozen=True)
class _Seam:
    position: int  # absolute index of the row
    row: Rows  # [L, K]


class SeamBook:
    """The newest row of every live session. Mutable; forgets the least recently used session."""

    def __init__(self, max_sessions: int = 4096) -> None:
        self._seams: OrderedDict[str, _Seam] = OrderedDict()
        self._max_sessions = max_sessions

    def __len__(self) -> int:
        return len(self._seams)

    def first_row(self, session_id: str, start: int) -> int:
        """Row to ask from so that the seam can be checked: ``start`` or one before it."""
        seam = self._seams.get(session_id)
        return start - 1 if seam is not None and seam.position == start - 1 else start

    def judge(self, session_id: str, row: Rows, position: int, cached_tokens: int) -> Verdict:
        """Compare the returned row ``[L, K]`` with the one known from the turn before.

        ``recomputed``: float noise flipped a few experts. ``foreign``: too few are the same for
        that, and the bar is higher when the engine says that it reused the token's KV.
        """
        known = self._seams[session_id].row
        shared = (row[:, :, None] == known[:, None, :]).any(axis=2).mean()
        if shared == 1.0:
            return "equal"
        return "recomputed" if shared >= _MIN_SHARED[position < cached_tokens] else "foreign"

    def note(self, session_id: str, rows: Rows, start: int) -> None:
        """Remember the last of ``rows [R, L, K]``, which begin at ``start``."""
        if len(rows):
            # A copy: a view would keep the whole reply alive for one row.
            self._seams[session_id] = _Seam(start + len(rows) - 1, rows[-1].copy())
            self._seams.move_to_end(session_id)
            if len(self._seams) > self._max_sessions:
                self._seams.popitem(last=False)

    def forget(self, session_id: str) -> None:
        self._seams.pop(session_id, None)

    def clear(self) -> None:
        """The weights changed: no row of before can be expected again."""
        self._seams.clear()


def expected_rows(num_prompt: int, num_sampled: int, start: int) -> int:
    """Rows of a reply: ``prompt + sampled - 1 - start``; 0 tokens sampled counts like one."""
    return num_prompt + max(1, num_sampled) - 1 - start


def accept_rows(
    reply: ServerReply, layout: RowLayout, *, num_prompt: int, start: int, where: str
) -> Rows:
    """The reply's rows ``[start, P + N - 1)``, ``[R, L, K]``, or an error.

    Args:
        num_prompt: P; N is the number of tokens in the reply.
        start: first row that was asked for.
        where: names engine and session in messages.

    Raises:
        EngineReplyError: rows absent, another number of them or from elsewhere, or ids that no
            router can choose.
    """
    num_sampled = len(reply.token_ids)
    expected = expected_rows(num_prompt, num_sampled, start)
    rows = reply.rows
    if rows is None:
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
    check = check_rows(rows, layout)
    if check.num_bad or check.num_missing:
        raise EngineReplyError(
            f"{where}: got {check.num_bad + check.num_missing} of {len(rows)} routing rows with "
            f"repeated or out-of-range experts, expected {layout.moe_top_k} distinct ids below "
            f"{layout.num_experts} in every MoE layer; the server's capture is broken"
        )
    return rows
