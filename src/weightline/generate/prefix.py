"""Prefix cache: keys and values that another request computed, in blocks of tokens, for new ones to start
from.

A block is found by the block before it and its own tokens, so a chain of blocks says exactly which tokens its
keys and values belong to; nothing is hashed, nothing can collide. A chain begins at (namespace, salt). The
namespace is renewed whenever weights or label change and after every pause that kept requests: a chain of an
older one is never found again, and its memory is free at once. Hence every block of a chain was computed
under the one label that its namespace had.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

import torch

from weightline.generate.requests import Sequence

BLOCK = 16
"""Tokens of a block."""
Key = tuple[int, tuple[int, ...]]


class Rows(Protocol):
    """What the prefix cache needs of the row store."""

    def read_row(self, row: int, start: int, stop: int) -> torch.Tensor:
        """A copy of keys and values of some positions of a row."""
        ...

    def write_row(self, row: int, kept: torch.Tensor) -> None:
        """Put copies back, at the first positions of a row."""
        ...


class Block:
    """Keys and values of one block, and the label whose weights computed them."""

    __slots__ = ("id", "kept", "label")

    def __init__(self, number: int, kept: torch.Tensor, label: str) -> None:
        self.id, self.kept, self.label = number, kept, label


class PrefixCache:
    """Blocks of the present namespace, least recently used ones dropped first. Only the engine thread
    touches it.

    `room` is in tokens; 0 turns it off.
    """

    def __init__(self, rows: Rows, room: int) -> None:
        self.rows = rows
        self.room = room // BLOCK
        self.namespace = 0
        self.queried_tokens = 0
        """Prompt tokens that were looked up."""
        self.hit_tokens = 0
        """Those of them whose keys and values were there."""
        self._blocks: OrderedDict[Key, Block] = OrderedDict()
        self._roots: dict[str | None, int] = {}
        self._made = 0

    def __len__(self) -> int:
        """Blocks held."""
        return len(self._blocks)

    def renew(self) -> None:
        """Begin a fresh namespace: nothing that was computed so far is found again."""
        self.namespace += 1
        self._blocks.clear()
        self._roots.clear()

    def _root(self, salt: str | None) -> int:
        if salt not in self._roots:
            self._made += 1
            self._roots[salt] = self._made
        return self._roots[salt]

    def _key(self, sequence: Sequence, k: int, before: Block | None) -> Key:
        """Where the k-th block of a sequence's context is held, given the one before it."""
        parent = self._root(sequence.request.cache_salt) if before is None else before.id
        return parent, tuple(sequence.context(k * BLOCK, (k + 1) * BLOCK))

    def _touch(self, chain: list[Key]) -> None:
        """Ends of chains first, so that no block is dropped before those that only it leads to."""
        for key in reversed(chain):
            self._blocks.move_to_end(key)

    def restore(self, sequence: Sequence, row: int) -> None:
        """Fill the row of a sequence that has nothing computed with the longest chain that is held. The last
        position is always left to compute, since its logits are wanted.
        """
        sequence.namespace = self.namespace
        if not self.room:
            return
        self.queried_tokens += sequence.length
        keys: list[Key] = []
        blocks: list[Block] = []
        for k in range((sequence.length - 1) // BLOCK):
            key = self._key(sequence, k, blocks[-1] if blocks else None)
            block = self._blocks.get(key)
            if block is None:
                break
            keys.append(key)
            blocks.append(block)
        if not blocks:
            return
        self._touch(keys)
        self.rows.write_row(row, torch.cat([block.kept for block in blocks], dim=-2))
        for block in blocks:
            sequence.cover(block.label, BLOCK)
        self.hit_tokens += sequence.computed

    def keep(self, sequence: Sequence, row: int, label: str) -> None:
        """Hold the full blocks of what a row has computed, if all of it belongs to this namespace, whose
        label is `label`.
        """
        if not self.room or sequence.namespace != self.namespace or sequence.poisoned:
            return
        keys: list[Key] = []
        before: Block | None = None
        for k in range(sequence.computed // BLOCK):
            key = self._key(sequence, k, before)
            before = self._blocks.get(key)
            if before is None:
                self._made += 1
                kept = self.rows.read_row(row, k * BLOCK, (k + 1) * BLOCK)
                before = self._blocks[key] = Block(self._made, kept, label)
            keys.append(key)
        self._touch(keys)
        while len(self._blocks) > self.room:
            self._blocks.popitem(last=False)
