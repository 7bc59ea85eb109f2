"""Rotary position embedding: by which angles the pairs of a head are turned at each position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

POSITIONS_AT_ONCE: Final = 4096
"""Positions whose angles are computed at once."""


@dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN's blend of interpolated and plain rope frequencies (arXiv:2309.00071), with llama.cpp's defaults."""

    trained_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Temperature:
    """What queries are multiplied by, the more the farther they stand: 1 + scale * log(1 + position // period)."""

    scale: float
    period: int

    def factors(self, first: int, count: int) -> NDArray[np.float64]:
        """Those of `count` positions from `first` on."""
        made: NDArray[np.float64] = 1 + self.scale * np.log1p(np.arange(first, first + count) // self.period)
        return made


@dataclass(frozen=True, slots=True)
class Divisors:
    """What each pair's frequency is divided by, as a file has it: in a context of any length, or of which length."""

    near: NDArray[np.float32] | None
    """In contexts up to the trained one."""
    far: NDArray[np.float32] | None
    """In longer ones."""
    trained_context: int

    def of(self, context: int) -> NDArray[np.float32] | None:
        """Those of a session of so many positions; None: nothing is divided."""
        return self.near if context <= self.trained_context else self.far


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding of the first `dim` elements of each head; none where `dim` is 0."""

    dim: int
    base: float
    scale: float = 1.0
    """Positions are multiplied by it (1 / rope.scaling.factor)."""
    yarn: Yarn | None = None
    attention: float = 1.0
    """What cosines and sines are multiplied by (rope.scaling.attn_factor), however positions are scaled."""
    divided: bool = True
    """Whether a file's divisors are of it, too."""

    def tables(self, positions: int, divisors: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
        """Cosines and sines (2, positions, dim/2); `divisors` are one per pair (`Divisors.of` the context)."""
        pairs = np.arange(self.dim // 2, dtype=np.float64)
        frequency = self.base ** (-2.0 * pairs / max(1, self.dim))
        if divisors is not None and self.dim and self.divided:  # a file's are of the layers that rotate
            frequency = frequency / divisors
        magnitude = self.attention
        if self.yarn is None:
            frequency = frequency * self.scale
        else:
            ramp = self._yarn_ramp(self.yarn, pairs)
            frequency = frequency * (self.scale * (1 - ramp) + ramp)
            magnitude *= 1.0 + 0.1 * max(0.0, float(np.log(1.0 / self.scale)))
        tables = np.empty((2, positions, len(pairs)), np.float32)
        for start in range(0, positions, POSITIONS_AT_ONCE):
            angle = np.arange(start, min(start + POSITIONS_AT_ONCE, positions), dtype=np.float64)[:, None] * frequency
            tables[:, start : start + POSITIONS_AT_ONCE] = np.stack([np.cos(angle), np.sin(angle)]) * magnitude
        return tables

    def _yarn_ramp(self, yarn: Yarn, pairs: NDArray[np.float64]) -> NDArray[np.float64]:
        """1 where a pair turns often within the trained context (kept as it is), 0 where seldom (interpolated)."""

        def pair_with(turns: float) -> float:
            return self.dim * float(np.log(yarn.trained_context / (turns * 2 * np.pi))) / (2 * float(np.log(self.base)))

        low = max(0.0, np.floor(pair_with(yarn.beta_fast)))
        high = min(self.dim - 1.0, np.ceil(pair_with(yarn.beta_slow)))
        ramp: NDArray[np.float64] = 1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)
        return ramp


UNTURNED: Final = Rope(0, 1.0)
"""Nothing is rotated."""
