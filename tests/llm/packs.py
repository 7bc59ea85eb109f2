"""Random packed segments for the tests of the kernels, and their weights as the package gguf reads the blocks."""

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from tegrad.llm import formats, packing
from tegrad.llm.formats import SEGMENT, BlockType

Packed = tuple[NDArray[np.uint8], NDArray[np.float64]]
KINDS = {kind.name: kind for kind in formats.FORMATS}
PACKED = tuple(kind.name for kind in formats.PACKED)
FLOATS = tuple(kind.name for kind in formats.PLAIN)


def blocks(kind: BlockType, rng: np.random.Generator, count: int, deviation: float = 1.0) -> NDArray[np.uint8]:
    """Blocks (count, bytes) of the file: every bit random but for scales, which make weights of about `deviation`."""
    if (layout := kind.layout) is None:
        values = (rng.standard_normal(count * kind.elements) * deviation).astype(np.float32)
        if kind.name == "BF16":
            return values.view(np.uint8).reshape(count, -1)[:, 2:].copy()
        return values.astype("<f2" if kind.name == "F16" else "<f4").view(np.uint8).reshape(count, kind.size)
    made = rng.integers(0, 256, (count, kind.size), dtype=np.uint8)
    layout.spread.scale(made, rng.uniform(-2, 2, (count, 1)) * (deviation / layout.spread.deviation))
    return made


def segments(name: str, rng: np.random.Generator, count: int) -> Packed:
    """`count` segments with every bit random: bytes (count, bytes of a segment) and weights (count, 2048)."""
    kind = KINDS[name]
    raw = blocks(kind, rng, count * SEGMENT // kind.elements)
    weights = dequantize(raw.reshape(count, -1), GGMLQuantizationType[name]).astype(np.float64)
    return packing.pack(kind, raw, count, SEGMENT).reshape(count, -1), weights


def activations(rng: np.random.Generator, columns: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Random int8 (columns,) and their scales (columns / 16,)."""
    scales = rng.uniform(0.5, 1.5, columns // 16).astype(np.float32)
    return rng.integers(-127, 128, columns, np.int8), scales
