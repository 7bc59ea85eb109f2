"""The tables of angles that kernels rotate heads by, on the device."""

from __future__ import annotations

from tegrad.llm.rope import Divisors, Rope
from tegrad.llm.workspace import Workspace
from tegrad.nv.gpu import Buffer


class Turns:
    """Cosines and sines float32 (2, positions, pairs) of each rope of a model: call it for a rope's buffer.

    `positions` are the context's, `divisors` the file's. Of a rope that rotates nothing it is any buffer. MemoryError.
    """

    def __init__(self, workspace: Workspace, positions: int, divisors: Divisors) -> None:
        self._workspace, self._positions, self._divisors = workspace, positions, divisors.of(positions)
        self._made: dict[Rope, Buffer] = {}

    def __call__(self, rope: Rope) -> Buffer:
        """A rope's table, made when it is first asked for."""
        if rope not in self._made:
            self._made[rope] = self._workspace.put(rope.tables(self._positions, self._divisors).tobytes() or bytes(16))
        return self._made[rope]
