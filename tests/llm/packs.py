"""Random packed segments and their weights, written from the layout's table for the tests of the kernels."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.quantize import _pack_six_bits

Packed = tuple[NDArray[np.uint8], NDArray[np.float64]]


def _halves(rng: np.random.Generator, shape: tuple[int, ...], scale: float) -> NDArray[np.float16]:
    return (rng.uniform(-1, 1, shape) * scale).astype(np.float16)


def _join(*parts: NDArray[np.generic]) -> NDArray[np.uint8]:
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8).reshape(len(part), -1) for part in parts], axis=1)


def _q6_k(rng: np.random.Generator, n: int) -> Packed:
    levels = rng.integers(0, 64, (n, 32, 4, 16), np.uint8)
    scales, d = rng.integers(-128, 128, (n, 128), np.int8), _halves(rng, (n, 8), 1e-3)
    top = levels[:, :, 3]
    planes = [levels[:, :, p] | (((top >> (2 * p)) & 3) << 6) for p in range(3)]
    unit = np.repeat(d.astype(np.float64), 16, 1) * scales
    return _join(*planes, scales, d), np.repeat(unit, 16, 1) * (levels.reshape(n, -1).astype(np.float64) - 32)


def _nibbles(levels: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """Sets (n, 32, 4, 16) of four bits as two planes."""
    return [(levels[:, :, 2 * p] & 15) | ((levels[:, :, 2 * p + 1] & 15) << 4) for p in range(2)]


def _affine(rng: np.random.Generator, n: int, levels: NDArray[np.uint8]) -> Packed:
    d = _halves(rng, (n, 8, 2), 1e-2)
    scale, minimum = (rng.integers(0, 64, (n, 8, 8), np.uint8) for _ in range(2))
    six = _pack_six_bits(scale.reshape(-1, 8), minimum.reshape(-1, 8)).reshape(n, 8, 12)
    header = np.concatenate([d.view(np.uint8).reshape(n, 8, 4), six], axis=2)
    unit, shift = (d[..., i : i + 1].astype(np.float64) * v for i, v in enumerate((scale, minimum)))
    weights = unit[..., None] * levels.reshape(n, 8, 8, 32) - shift[..., None]
    return header.reshape(n, 128), weights.reshape(n, -1)


def _q4_k(rng: np.random.Generator, n: int) -> Packed:
    levels = rng.integers(0, 16, (n, 32, 4, 16), np.uint8)
    header, weights = _affine(rng, n, levels)
    return _join(*_nibbles(levels), header), weights


def _q5_k(rng: np.random.Generator, n: int) -> Packed:
    levels = rng.integers(0, 32, (n, 32, 4, 16), np.uint8)
    header, weights = _affine(rng, n, levels)
    bits = (levels >> 4).reshape(n, 32, 2, 8, 4)  # of which sets 2p and 2p + 1 share a word, a byte for each b
    fifth = (bits << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=3, dtype=np.uint8)
    return _join(*_nibbles(levels), fifth, header), weights


def _q8_0(rng: np.random.Generator, n: int) -> Packed:
    levels, d = rng.integers(-128, 128, (n, 32, 4, 16), np.int8), _halves(rng, (n, 64), 1e-2)
    planes = [levels[:, :, p] for p in range(4)]
    return _join(*planes, d), np.repeat(d.astype(np.float64), 32, 1) * levels.reshape(n, -1)


def _q4_0(rng: np.random.Generator, n: int) -> Packed:
    levels, d = rng.integers(0, 16, (n, 32, 4, 16), np.uint8), _halves(rng, (n, 64), 1e-1)
    weights = np.repeat(d.astype(np.float64), 32, 1) * (levels.reshape(n, -1).astype(np.float64) - 8)
    return _join(*_nibbles(levels), d), weights


def _f16(rng: np.random.Generator, n: int) -> Packed:
    weights = _halves(rng, (n, 2048), 1.0)
    return _join(weights), weights.astype(np.float64)


def _bf16(rng: np.random.Generator, n: int) -> Packed:
    weights = (rng.standard_normal((n, 2048)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return _join(weights), (weights.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _f32(rng: np.random.Generator, n: int) -> Packed:
    weights = rng.standard_normal((n, 2048)).astype(np.float32)
    return _join(weights), weights.astype(np.float64)


_MAKERS: dict[str, Callable[[np.random.Generator, int], Packed]] = {
    "Q6_K": _q6_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q8_0": _q8_0, "Q4_0": _q4_0, "F16": _f16, "BF16": _bf16, "F32": _f32,
}  # fmt: skip
PACKED = ("Q6_K", "Q4_K", "Q5_K", "Q8_0", "Q4_0")
FLOATS = ("F16", "BF16", "F32")


def segments(kind: str, rng: np.random.Generator, count: int) -> Packed:
    """`count` segments with every bit random: bytes (count, bytes of a segment) and weights (count, 2048)."""
    return _MAKERS[kind](rng, count)


def activations(rng: np.random.Generator, columns: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Random int8 (columns,) and their scales (columns / 16,)."""
    scales = rng.uniform(0.5, 1.5, columns // 16).astype(np.float32)
    return rng.integers(-127, 128, columns, np.int8), scales
