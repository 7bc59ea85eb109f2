"""The tables of angles that kernels rotate heads by, on the device."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.rope import Rope
from tegrad.llm.workspace import Workspace
from tegrad.nv.gpu import Buffer


class Turns:
    """Cosines and sines float32 (2, positions, pairs) of each rope of a model: call it for a rope's buffer.

    `divisors` are the file's rope_freqs. Of a rope that rotates nothing it is any buffer. MemoryError.
    """

    def __init__(self, workspace: Workspace, positions: int, divisors: NDArray[np.float32] | None) -> None:
        self._workspace, self._positions, self._divisors = workspace, positions, divisors
        self._made: dict[Rope, Buffer] = {}

    def __call__(self, rope: Rope) -> Buffer:
        """A rope's table, made when it is first asked for."""
        if rope not in self._made:
            self._made[rope] = self._workspace.put(rope.tables(self._positions, self._divisors).tobytes() or bytes(16))
        return self._made[rope]
