"""What operations compute, in numpy: norms, rotations, activations, and how caches round.

In the precision of what they are given: `reference` works in float32, the evaluators of tests/llm in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import pi, sqrt
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating[Any]]
Float = TypeVar("Float", bound=np.floating[Any])


def unit(x: Floats, eps: float) -> Floats:
    """x with a root mean square of 1 along its last axis."""
    square = np.mean(x * x, axis=-1, keepdims=True, dtype=x.dtype)
    y: Floats = x / np.sqrt(square + x.dtype.type(eps))
    return y


def capped(x: NDArray[Float], cap: float | None) -> NDArray[Float]:
    """cap * tanh(x / cap), or x where there is no cap."""
    if cap is None:
        return x
    bound = x.dtype.type(cap)
    y: NDArray[Float] = np.tanh(x / bound) * bound
    return y


def attended(before: int, count: int, window: int | None, *, causal: bool = True) -> NDArray[np.bool_]:
    """Which positions of `before` and then `count` tokens each of the latter attends to (count, before + count)."""
    ahead = 0 if causal else before + count if window is None else window - 1
    seen = np.tri(count, before + count, before + ahead, dtype=bool)
    return seen if window is None else seen & ~np.tri(count, before + count, before - window, dtype=bool)


def _rotate_neighbours(x: Floats, tables: Floats) -> Floats:
    """Rotate pairs (2i, 2i + 1) of the last axis of x (tokens, heads, group, dim), as far as the tables go."""
    cos, sin = tables[:, :, None, None, :]
    width = 2 * cos.shape[-1]
    even, odd = x[..., 0:width:2], x[..., 1:width:2]
    pairs = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return np.concatenate([pairs.reshape(*x.shape[:-1], width), x[..., width:]], axis=-1)


def _rotate_halves(x: Floats, tables: Floats) -> Floats:
    """Rotate pairs (i, i + n) of the last axis of x (tokens, heads, group, dim), n being the width of the tables."""
    cos, sin = tables[:, :, None, None, :]
    n = cos.shape[-1]
    first, second = x[..., :n], x[..., n : 2 * n]
    return np.concatenate([first * cos - second * sin, first * sin + second * cos, x[..., 2 * n :]], axis=-1)


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    with np.errstate(over="ignore"):
        y: Floats = 1 / (1 + np.exp(-x))
    return y


def softplus(x: Floats) -> Floats:
    """log(1 + exp(x))."""
    y: Floats = np.logaddexp(x, x.dtype.type(0))
    return y


def _silu(x: Floats) -> Floats:
    with np.errstate(over="ignore"):  # far below zero the quotient is zero, as it should be
        y: Floats = x / (1 + np.exp(-x))
    return y


def _gelu(x: Floats) -> Floats:
    y: Floats = 0.5 * x * (1 + np.tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))
    return y


def _relu2(x: Floats) -> Floats:
    y: Floats = np.maximum(x, 0) ** 2
    return y


def _round_q8_0(x: Floats) -> Floats:
    """Blocks of 32: a half, the largest magnitude over 127, times integers, ties away from zero (ggml's q8_0)."""
    blocks = x.reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    levels = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    rounded = np.trunc(levels + np.copysign(np.float32(0.5), levels))
    y: Floats = rounded * scale.astype(np.float16).astype(np.float32)
    return y.reshape(x.shape)


ROUNDINGS: Final[Mapping[str, Callable[[Floats], Floats]]] = {
    "F32": lambda x: x,
    "F16": lambda x: x.astype(np.float16).astype(np.float32),
    "Q8_0": _round_q8_0,
}
"""What a cache of a kind gives back of what was stored in it."""

ROTATIONS: Final[Mapping[str, Callable[[Floats, Floats], Floats]]] = {
    "interleaved": _rotate_neighbours,
    "halves": _rotate_halves,
    "none": lambda x, _: x,
}
ACTIVATIONS: Final[Mapping[str, Callable[[Floats], Floats]]] = {"silu": _silu, "gelu": _gelu, "relu2": _relu2}
