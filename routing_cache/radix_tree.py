"""A radix tree over token ids that knows nothing of its payload.

Edges are ``bytes`` of little-endian int32 token ids, so a whole edge is compared with one memcmp
(``key.startswith(edge, offset)``). A position is a pair (node, tokens from the root), inside the
node's edge or at its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

import numpy as np

from routing_cache.errors import CodecError

TOKEN_BYTES = 4
# An unbranched tail grows in place up to this size: fewer nodes to walk, yet small enough to
# copy on every turn and to evict piecewise.
_MAX_GROWN_EDGE_BYTES = 16 << 10
# CPython's cost of a node: object, children dict, edge and payload headers, LRU entry.
NODE_BYTES = 640


class Payload(Protocol):
    """Content of a node for the tokens of its edge."""

    def split(self, at: int) -> Self:
        """Keep what belongs to tokens before ``at``; return the rest. Mutates."""
        ...

    def grow(self) -> None:
        """Note that the node's edge has become longer. Mutates."""
        ...


P = TypeVar("P", bound=Payload)


class Node(Generic[P]):
    """Tokens ``[start, end)`` of every sequence that passes through it."""

    __slots__ = (
        "__weakref__",
        "children",
        "edge",
        "last_used",
        "parent",
        "payload",
        "queued",
        "recent",
        "start",
    )

    def __init__(self, edge: bytes, start: int, parent: Node[P] | None, payload: P) -> None:
        self.edge = edge
        self.start = start
        self.parent = parent
        self.payload = payload
        self.last_used = 0
        self.queued = False  # an entry of the order of eviction is for it
        self.recent: Node[P] | None = None  # the child that a walk entered last, tried first
        self.children: dict[bytes, Node[P]] = {}

    @property
    def end(self) -> int:
        return self.start + len(self.edge) // TOKEN_BYTES


class Position(NamedTuple, Generic[P]):
    """A place in the tree: ``num_tokens`` from the root, inside ``node`` or at its end."""

    node: Node[P]
    num_tokens: int


class NodeLru(Generic[P]):
    """The bytes of all nodes of several trees, and their leaves, least recently used first.

    The leaves stand in a heap whose entries may be out of date: using a node only notes when, and
    the entry is put right once it comes to the front. Only the node where a walk ended is marked
    as used: its ancestors cannot be evicted before it, and one that becomes a leaf takes its
    child's place in the order unless it was used since.
    """

    def __init__(self) -> None:
        self.num_nodes = 0
        self.edge_bytes = 0
        self._clock = 0
        self._queue: list[tuple[int, int, Node[P]]] = []  # last use, a number that breaks ties
        self._tickets = count()
        self._num_gone = 0  # entries of nodes that were removed

    @property
    def num_bytes(self) -> int:
        return self.edge_bytes + NODE_BYTES * self.num_nodes

    def add(self, node: Node[P]) -> None:
        """Count a new node, as just used."""
        self.num_nodes += 1
        self.edge_bytes += len(node.edge)
        self.touch(node)
        self.enqueue(node)

    def touch(self, node: Node[P]) -> None:
        """Mark ``node`` as used just now."""
        self._clock += 1
        node.last_used = self._clock

    def enqueue(self, node: Node[P]) -> None:
        """Put a leaf into the order unless it is there; does nothing for other nodes."""
        if node.queued or node.children or node.parent is None:
            return
        node.queued = True
        heappush(self._queue, (node.last_used, next(self._tickets), node))

    def oldest(self) -> Node[P] | None:
        """Return the least recently used leaf in the order."""
        while self._queue:
            last_used, ticket, node = self._queue[0]
            if node.parent is None or node.children:
                self.set_aside(node)
            elif last_used != node.last_used:
                heapreplace(self._queue, (node.last_used, ticket, node))
            else:
                return node
        return None

    def set_aside(self, node: Node[P]) -> None:
        """Take the first of the order out of it until :meth:`enqueue`."""
        _, _, first = heappop(self._queue)
        assert first is node
        node.queued = False
        self._num_gone -= node.parent is None

    def remove(self, node: Node[P]) -> None:
        """Cut a childless ``node`` off its tree."""
        parent = node.parent
        assert parent is not None
        assert not node.children
        del parent.children[node.edge[:TOKEN_BYTES]]
        if parent.recent is node:
            parent.recent = None
        node.parent = None
        self.num_nodes -= 1
        self.edge_bytes -= len(node.edge)
        self._num_gone += node.queued
        if self._num_gone > len(self._queue) // 2:
            self._queue = [entry for entry in self._queue if entry[2].parent is not None]
            heapify(self._queue)
            self._num_gone = 0
        if not parent.children:
            parent.last_used = max(parent.last_used, node.last_used)
            self.enqueue(parent)


def common_prefix_bytes(key: bytes, offset: int, edge: bytes) -> int:
    """Length in bytes, whole tokens, of the common prefix of ``key[offset:]`` and ``edge``."""
    limit = min(len(key) - offset, len(edge))
    done, step = 0, 64
    while done < limit:
        step = min(step, limit - done)
        if key[offset + done : offset + done + step] != edge[done : done + step]:
            left = np.frombuffer(key, np.int32, step // TOKEN_BYTES, offset + done)
            right = np.frombuffer(edge, np.int32, step // TOKEN_BYTES, done)
            return done + TOKEN_BYTES * int(np.argmax(left != right))
        done += step
        step *= 4
    return limit


class RadixTree(Generic[P]):
    """One root. ``empty`` is the payload class's constructor for a new node."""

    def __init__(self, empty: type[P], lru: NodeLru[P]) -> None:
        self._empty = empty
        self._lru = lru
        self.root: Node[P] = Node(b"", 0, None, empty())

    def walk(self, key: bytes, at: Position[P] | None = None) -> Position[P]:
        """Follow ``key`` from ``at`` (default: the root) as far as it goes."""
        node, num_tokens = at if at is not None else (self.root, 0)
        done, size = 0, len(key)
        inside = (num_tokens - node.start) * TOKEN_BYTES
        if inside < len(node.edge):
            done = common_prefix_bytes(key, 0, node.edge[inside:])
            if inside + done < len(node.edge):
                return Position(node, num_tokens + done // TOKEN_BYTES)
        starts_with, width = key.startswith, TOKEN_BYTES
        while done < size:  # runs once per node, so each step of it counts
            child = node.recent
            if child is not None and starts_with(child.edge, done):
                node = child
                done += len(child.edge)
                continue
            try:
                child = node.children[key[done : done + width]]
            except KeyError:
                break
            node.recent = child
            node = child
            edge = child.edge
            if starts_with(edge, done):
                done += len(edge)
                continue
            done += common_prefix_bytes(key, done, edge)
            break
        return Position(node, num_tokens + done // TOKEN_BYTES)

    def insert(self, key: bytes, at: Position[P]) -> Position[P]:
        """Make ``key`` below ``at`` exist; returns where it ends. Mutates the tree.

        Known tokens change nothing; a node is split exactly where new tokens leave its edge.
        """
        node, num_tokens = self.walk(key, at)
        done = (num_tokens - at.num_tokens) * TOKEN_BYTES
        if done == len(key):
            return Position(node, num_tokens)
        if num_tokens < node.end:
            node = self._split(node, num_tokens)
        rest = key[done:]
        end = num_tokens + len(rest) // TOKEN_BYTES
        grown = len(node.edge) + len(rest)
        if node.parent is not None and not node.children and grown <= _MAX_GROWN_EDGE_BYTES:
            node.edge += rest
            node.payload.grow()
            self._lru.edge_bytes += len(rest)
        else:
            child = Node(rest, num_tokens, node, self._empty())
            node.children[rest[:TOKEN_BYTES]] = child
            self._lru.add(child)
            node = child
        return Position(node, end)

    def graft(self, parent: Node[P], edge: bytes) -> Node[P]:
        """Add a child to ``parent``, for rebuilding a tree whose shape is known. Mutates.

        Raises:
            CodecError: an empty edge, or one that ``parent`` already has.
        """
        first = edge[:TOKEN_BYTES]
        if not first or first in parent.children:
            raise CodecError("an edge is empty or there twice", got=first.hex())
        child = Node(edge, parent.end, parent, self._empty())
        parent.children[first] = child
        self._lru.add(child)
        return child

    def _split(self, node: Node[P], at: int) -> Node[P]:
        """Cut ``node`` before token ``at``; returns the new upper half.

        The lower half keeps the object, so positions at its end stay valid; :meth:`settle`
        repairs those that pointed into the upper half.
        """
        parent = node.parent
        assert parent is not None
        cut = (at - node.start) * TOKEN_BYTES
        upper = Node(node.edge[:cut], node.start, parent, node.payload)
        node.payload = upper.payload.split(at)
        parent.children[upper.edge[:TOKEN_BYTES]] = upper
        if parent.recent is node:
            parent.recent = upper
        self._lru.edge_bytes -= cut
        node.edge = node.edge[cut:]
        node.start = at
        node.parent = upper
        upper.children[node.edge[:TOKEN_BYTES]] = node
        upper.last_used = node.last_used
        self._lru.num_nodes += 1
        self._lru.edge_bytes += cut
        # What kept the lower half out of the order may have gone to the upper one.
        self._lru.enqueue(node)
        return upper

    def settle(self, position: Position[P]) -> Position[P] | None:
        """Return ``position`` after splits by others; None when its node was evicted."""
        node = position.node
        if node.parent is None and node is not self.root:
            return None
        while position.num_tokens <= node.start and node.parent is not None:
            node = node.parent
        return Position(node, position.num_tokens)

    def path(self, node: Node[P]) -> list[Node[P]]:
        """Nodes from the root's child down to ``node``."""
        nodes: list[Node[P]] = []
        current = node
        while current.parent is not None:
            nodes.append(current)
            current = current.parent
        nodes.reverse()
        return nodes

    def nodes(self) -> Iterator[Node[P]]:
        """All nodes but the root, parents before children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())
