"""How many positions a layer keeps that is within a window or convolves, and what of a sequence such rings have lost.

Position p lies in row p % rows. What is written at once never overwrites what the first of it still attends to; but
who goes back further than that finds later positions there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tegrad.llm.network import Delta, Mixer

MULTIPLE: Final = 64
"""What a ring's rows are a multiple of: the largest tile of attention."""


def rows_of(op: Mixer, positions: int, ahead: int) -> int:
    """Rows of a layer for so many positions, of which up to `ahead` are written at once."""
    if op.window is None:
        return positions
    if isinstance(op, Delta):  # a chunk's own are read where they are made; a token may be taken again
        return min(positions, op.taps + 1)
    return min(positions, -(-(op.window + ahead) // MULTIPLE) * MULTIPLE)


class Rings:
    """What the layers of `slots` sequences hold, of which each keeps so many `rows`."""

    def __init__(self, mixers: Sequence[Mixer], rows: Sequence[int], positions: int, slots: int = 1) -> None:
        self._ends = [0] * slots
        self._along = any(isinstance(op, Delta) for op in mixers)
        self._rings = {
            (op.window, kept)
            for op, kept in zip(mixers, rows, strict=True)
            if op.window is not None and kept < positions
        }

    def __bool__(self) -> bool:
        """Whether there is a layer that does not keep all positions."""
        return bool(self._rings) or self._along

    def begin(self, slot: int = 0) -> None:
        """A sequence is written anew, from its first position on."""
        self._ends[slot] = 0

    def wrote(self, end: int, slot: int = 0) -> None:
        """A sequence's positions below `end` may have been written."""
        self._ends[slot] = max(self._ends[slot], end)

    def holds(self, position: int, slot: int = 0) -> bool:
        """Whether a sequence can go on at a position: no ring has lost what the window there has in it, and where a
        state runs along, that is there as it was before the position, which is the last one or comes after it."""
        end = self._ends[slot]
        if self._along and not end - 1 <= position <= end:
            return False
        return all(max(0, position - window + 1) >= end - rows for window, rows in self._rings)
