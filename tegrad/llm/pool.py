"""Blocks of positions: which sequence has which, and which of them hold beginnings of prompts that may come again.

A block that a prompt fills has a key, a hash of its tokens and of all tokens before them. Once what fills it was
submitted it can be found by that key, and nobody writes it any more: sequences whose prompts begin alike have it in
common. When the last of them leaves it is kept, until another sequence needs a block and this one is the least recently
used. Blocks are made once; a pool never has more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from tegrad.llm.cache import BLOCK_POSITIONS
from tegrad.llm.errors import NoRoom


@dataclass(eq=False, slots=True)
class Lease:
    """What a sequence has: its `blocks` in order, of which the prompt so far has filled so many positions."""

    blocks: list[int]
    keys: list[bytes]
    """Of the blocks that its prompt fills; none where nothing is shared."""
    filled: int = 0
    found: int = 0
    """Positions of these that others had filled."""


def keys_of(tokens: Sequence[int]) -> Iterator[bytes]:
    """A key for every block that tokens fill."""
    key, data = b"", np.asarray(tokens, np.int32)
    for at in range(BLOCK_POSITIONS, len(data) + 1, BLOCK_POSITIONS):
        key = sha256(key + data[at - BLOCK_POSITIONS : at].tobytes()).digest()
        yield key


class Pool:
    """`blocks` blocks, numbered from 0."""

    def __init__(self, blocks: int) -> None:
        self._users = [0] * blocks
        self._keys: list[bytes | None] = [None] * blocks
        self._known: dict[bytes, int] = {}
        self._unused = list(range(blocks - 1, -1, -1))
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Blocks that can be found and nobody has, the least recently used first."""

    @property
    def free(self) -> int:
        """Blocks that a new sequence could have, what is kept included."""
        return len(self._unused) + len(self._kept)

    def take(self, positions: int, prompt: Sequence[int] = ()) -> Lease:
        """Blocks for so many positions, with those that hold a beginning of `prompt` already. NoRoom."""
        keys = list(keys_of(prompt))
        found = []
        for key in keys:
            if (block := self._known.get(key)) is None:
                break
            found.append(block)
        more = -(-positions // BLOCK_POSITIONS) - len(found)
        free = self.free - sum(block in self._kept for block in found)
        if more > free:
            raise NoRoom(f"{more} blocks of {BLOCK_POSITIONS} positions are needed, {free} are free: wait")
        for block in found:
            self._join(block)
        filled = BLOCK_POSITIONS * len(found)
        return Lease(found + [self._new() for _ in range(more)], keys, filled, filled)

    def find(self, lease: Lease) -> int:
        """Put what can be found by now in place of blocks that the prompt is about to fill; how many blocks those are.

        They stand before `filled`, which moves on. Only between whole blocks is anything done.
        """
        at = first = lease.filled // BLOCK_POSITIONS
        if lease.filled % BLOCK_POSITIONS == 0:
            while at < len(lease.keys) and (block := self._known.get(lease.keys[at])) is not None:
                self._join(block)
                self._leave(lease.blocks[at])
                lease.blocks[at] = block
                at += 1
            lease.filled += (at - first) * BLOCK_POSITIONS
            lease.found += (at - first) * BLOCK_POSITIONS
        return at - first

    def fill(self, lease: Lease, filled: int) -> None:
        """The prompt's positions below `filled` were submitted: blocks that it has filled can be found."""
        for at in range(lease.filled // BLOCK_POSITIONS, min(filled // BLOCK_POSITIONS, len(lease.keys))):
            if lease.keys[at] not in self._known:
                self._known[lease.keys[at]] = lease.blocks[at]
                self._keys[lease.blocks[at]] = lease.keys[at]
        lease.filled = filled

    def give(self, lease: Lease) -> None:
        """Take a sequence's blocks back. Giving twice is harmless."""
        for block in reversed(lease.blocks):  # what comes after a block is of no use without it, and goes first
            self._leave(block)
        lease.blocks = []

    def _join(self, block: int) -> None:
        self._users[block] += 1
        self._kept.pop(block, None)

    def _leave(self, block: int) -> None:
        self._users[block] -= 1
        if self._users[block] == 0:
            if self._keys[block] is None:
                self._unused.append(block)
            else:
                self._kept[block] = None

    def _new(self) -> int:
        if self._unused:
            block = self._unused.pop()
        else:
            block, _ = self._kept.popitem(last=False)
            key, self._keys[block] = self._keys[block], None
            if key is not None:
                del self._known[key]
        self._users[block] = 1
        return block
