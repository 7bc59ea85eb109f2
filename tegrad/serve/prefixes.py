"""Which replica a request goes to: one that has met its beginning, unless others have much less to do."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from tegrad.llm.cache import BLOCK_POSITIONS

KEPT: Final = 1 << 14
"""Blocks of prompts that are remembered."""


class Prefixes:
    """What replicas have been asked, by blocks: a cache finds whole ones."""

    def __init__(self, kept: int = KEPT) -> None:
        self._met: OrderedDict[int, set[str]] = OrderedDict()
        """By a hash of a prompt up to the end of a block, who was asked that. Two that are equal cost no more than
        the time to compute what a cache might have had."""
        self._kept = kept

    def order(self, tokens: Sequence[int], loads: Mapping[str, int], margin: int) -> list[str]:
        """The replicas, the best one first, by how many requests each has.

        The longest beginning wins among those that have at most `margin` requests more than the one with the fewest;
        the others come behind, those with few requests first.
        """
        least = min(loads.values(), default=0)
        matched = dict.fromkeys(loads, 0)
        for end, key in enumerate(_keys(tokens), 1):
            for name in self._met.get(key, ()):
                if matched.get(name) == end - 1:
                    matched[name] = end
        return sorted(
            loads, key=lambda name: (0, -matched[name], loads[name]) if loads[name] <= least + margin
            else (1, loads[name], -matched[name]),
        )  # fmt: skip

    def met(self, tokens: Sequence[int], name: str) -> None:
        """A replica is asked this."""
        for key in _keys(tokens):
            self._met.setdefault(key, set()).add(name)
            self._met.move_to_end(key)
        while len(self._met) > self._kept:
            self._met.popitem(last=False)

    def forget(self, name: str) -> None:
        """A replica is gone, and its cache with it."""
        for key in [key for key, names in self._met.items() if name in names]:
            self._met[key].discard(name)


def _keys(tokens: Sequence[int]) -> Iterator[int]:
    """A hash for each whole block, of all up to its end."""
    key = 0
    for end in range(BLOCK_POSITIONS, len(tokens) + 1, BLOCK_POSITIONS):
        key = hash((key, tuple(tokens[end - BLOCK_POSITIONS : end])))
        yield key
