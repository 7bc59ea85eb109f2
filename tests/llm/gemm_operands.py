"""A product's random operands on a device, and what it should be in float64 on the same weights."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType
from operands import Operands as Placed

from tegrad.llm import packing, quantize
from tegrad.llm.formats import BlockType
from tegrad.llm.gemm import AnyTile, Gemm, Operands, fragment_order
from tegrad.llm.programs import Programs


def raw_weights(kind: BlockType, rows: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes, and the weights that they stand for."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) / 8
    if kind.name in ("F32", "F16"):
        raw = values.astype(np.float32 if kind.name == "F32" else np.float16)
    elif kind.name == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = quantize.quantize(values, GGMLQuantizationType[kind.name])
    packed = packing.pack(kind, raw.view(np.uint8), rows, columns)
    return packed, packing.dequantize_packed(kind, packed, rows, columns).astype(np.float64)


def ordered(x: np.ndarray) -> np.ndarray:
    """Halves in the order of fragments."""
    out = np.empty_like(x)
    out[:, fragment_order(x.shape[1])] = x
    return out


def product(
    opened: Any, operands: Placed, gemm: Gemm, tile: AnyTile, tokens: int, most: int = 48, overlap: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """What the kernel computes of random operands, and what it should, for `tokens` tokens."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((tokens, gemm.columns)).astype(np.float16)
    packed, w = raw_weights(gemm.kind, gemm.rows, gemm.columns, 0)
    packed2, w2 = raw_weights(gemm.kind, gemm.rows, gemm.columns, 1) if gemm.gated else (packed, w)
    bias = rng.standard_normal((2 if gemm.gated else 1, gemm.rows)).astype(np.float32)
    before = rng.standard_normal((tokens, gemm.rows)).astype(np.float16 if gemm.half_out else np.float32)
    y = operands.put(before)
    unused = np.full((most - tokens, gemm.columns), np.nan, np.float16)  # rows that nobody's result may depend on
    on = Operands(
        y,
        operands.put(np.concatenate([ordered(x), unused])),
        operands.put(packed),
        operands.put(np.array([tokens], np.int32)),
        operands.put(packed2) if gemm.gated else None,
        operands.put(bias) if gemm.bias else None,
        operands.zeros(max(tile.scratch_bytes(gemm, most), 16), np.uint8),
        operands.zeros(max(tile.counters(gemm, most), 4), np.uint32),
    )
    launch = tile.launch(Programs(opened), gemm, on, most, overlap)
    for _ in range(1 if gemm.add else 2):  # the second finds what the first left in the counters
        launch.program(*launch.buffers, global_size=launch.grid, local_size=launch.block, wait=True)
    exact = x.astype(np.float64)
    expected = exact @ w.T + (bias[0] if gemm.bias else 0)
    if gemm.activation == "silu":
        expected = expected / (1 + np.exp(-expected))
    if gemm.activation == "gelu":
        expected = expected / (1 + np.exp(-2 * 0.7978845608028654 * (expected + 0.044715 * expected**3)))
    if gemm.gated:
        expected = expected * (exact @ w2.T + (bias[1] if gemm.bias else 0))
    if gemm.add:
        expected = expected + before
    ours = operands.get(y, before.shape, before.dtype).astype(np.float64)
    return ours[:, fragment_order(gemm.rows)] if gemm.half_out else ours, expected


def check(ours: np.ndarray, expected: np.ndarray) -> None:
    """Halves have 11 bits: weights, and results that are halves, are off by 2^-12 of themselves at most."""
    difference = ours - expected
    assert np.linalg.norm(difference) < 5e-4 * np.linalg.norm(expected)
    assert np.abs(difference).max() < 2e-3 * np.abs(expected).max()
