"""KV of prompts and finished turns, kept for whoever begins with the same tokens under the same weights.

    reused = prefixes.copy_into(tokens, kv)        # fills kv[..., :reused, :], the longest recorded prefix
    prefixes.insert(tokens, kv)                    # keeps what is not there yet
    prefixes.evict(1000)                           # least recently used first

A radix tree: each node holds some tokens and their KV, shared by all sequences through it (the prompt of a group, the
earlier turns of a session). Contents are copied in and out, so nothing in here is pinned by a running request, and copying
costs a thousandth of computing. The tree belongs to one weight version: `clear` empties it at a swap (settled 7).
"""

from __future__ import annotations

import heapq

import numpy as np
from torch import Tensor

from areal.base.types import IntArray


class _Node:
    __slots__ = ("children", "kv", "parent", "tokens", "used")

    def __init__(self, tokens: IntArray, kv: Tensor | None, parent: _Node | None) -> None:
        self.tokens = tokens
        self.kv = kv  # [layers, 2 * kv_heads, len(tokens), head_dim]; None at the root alone
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.used = 0


class PrefixCache:
    """One owner, the engine's thread. KV tensors are [layers, 2 * kv_heads, tokens, head_dim]."""

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int32), None, None)
        self._clock = 0
        self.tokens = 0  # held, over all nodes

    def match(self, tokens: IntArray) -> int:
        """Length of the longest prefix of `tokens` that is held."""
        return sum(length for _, length in self._walk(tokens))

    def copy_into(self, tokens: IntArray, kv: Tensor) -> int:
        """Copy the KV of the longest held prefix of `tokens` into kv[:, :, :length]; returns length."""
        self._clock += 1
        at = 0
        for node, length in self._walk(tokens):
            assert node.kv is not None
            kv[:, :, at : at + length] = node.kv[:, :, :length]
            node.used = self._clock
            at += length
        return at

    def insert(self, tokens: IntArray, kv: Tensor) -> None:
        """Keep a copy of kv[:, :, :len(tokens)], of the part that is not held yet."""
        self._clock += 1
        node, at = self._root, 0
        for child, length in self._walk(tokens):
            child.used = self._clock
            node, at = child, at + length
            if length < len(child.tokens):
                node = self._split(child, length)
        if at < len(tokens):
            new = _Node(tokens[at:].copy(), kv[:, :, at : len(tokens)].clone(), node)
            new.used = self._clock
            node.children[int(tokens[at])] = new
            self.tokens += len(new.tokens)

    def evict(self, tokens: int) -> int:
        """Forget at least `tokens` tokens, the least recently used ends of branches first; returns how many it was."""
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children]
        heapq.heapify(leaves)
        freed = 0
        while freed < tokens and leaves:
            _, _, leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            del parent.children[int(leaf.tokens[0])]
            freed += len(leaf.tokens)
            if not parent.children and parent.parent is not None:
                heapq.heappush(leaves, (parent.used, id(parent), parent))
        self.tokens -= freed
        return freed

    def clear(self) -> None:
        """Forget everything. The memory is free at once: a tree that knows its parents would wait for the cycle collector,
        which runs by the number of objects, not by their gigabytes."""
        for node in self._nodes():
            node.parent = None
        self._root = _Node(np.empty(0, np.int32), None, None)
        self.tokens = 0

    def _walk(self, tokens: IntArray) -> list[tuple[_Node, int]]:
        """The nodes along `tokens`, each with how many of its tokens agree (only the last may agree in part)."""
        path: list[tuple[_Node, int]] = []
        node, at = self._root, 0
        while at < len(tokens):
            child = node.children.get(int(tokens[at]))
            if child is None:
                break
            length = common_prefix(child.tokens, tokens[at:])
            path.append((child, length))
            if length < len(child.tokens):
                break
            node, at = child, at + length
        return path

    def _split(self, node: _Node, length: int) -> _Node:
        """Cut a node in two; returns the upper one, which holds its first `length` tokens."""
        parent, kv = node.parent, node.kv
        assert parent is not None
        assert kv is not None
        upper = _Node(node.tokens[:length].copy(), kv[:, :, :length].clone(), parent)
        upper.used = node.used
        node.tokens, node.kv, node.parent = node.tokens[length:].copy(), kv[:, :, length:].clone(), upper
        upper.children[int(node.tokens[0])] = node
        parent.children[int(upper.tokens[0])] = upper
        return upper

    def _nodes(self) -> list[_Node]:
        found, todo = [], list(self._root.children.values())
        while todo:
            node = todo.pop()
            found.append(node)
            todo.extend(node.children.values())
        return found


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many leading entries agree."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length
