"""Attention of a chunk over the cache, against float64 on the same halves, on whatever device is opened."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from operands import Operands

from tegrad.llm.attention import PLAIN, Scoring
from tegrad.llm.cache import BLOCK_POSITIONS
from tegrad.llm.flash import Flash
from tegrad.llm.gemm import fragment_order
from tegrad.llm.numerics import capped
from tegrad.llm.prefill import chunk_bytes
from tegrad.llm.programs import Programs


def attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray, start: int, scoring: Scoring = PLAIN) -> np.ndarray:
    """(tokens, heads, width), of q alike and keys and values (kv_heads, positions, width)."""
    scale = 1 / np.sqrt(q.shape[-1]) if scoring.scale is None else scoring.scale
    tokens, heads, _ = q.shape
    group = heads // len(keys)
    out = np.empty(q.shape)
    for token in range(tokens):
        own, end = start + token, start + tokens
        window = scoring.window or end
        seen = slice(max(0, own - window + 1), own + 1 if scoring.causal else min(own + window, end))
        for head in range(heads):
            scores = capped(keys[head // group, seen] @ q[token, head] * scale, scoring.cap)
            weights = np.exp(scores - scores.max())
            out[token, head] = weights @ values[head // group, seen] / weights.sum()
    return out


def check_chunk(opened: Any, operands: Operands, flash: Flash, start: int, count: int) -> NDArray[np.float64]:
    """Hold `count` tokens from position `start` on, of up to 48, against float64; what was computed for them.

    Beyond the last position the cache holds NaN, and so do the tokens that the chunk lacks.
    """
    rng = np.random.default_rng(start)
    slots, slot, end = 2, 1, start + count
    rows, window = flash.positions, flash.scoring.window
    length = max(rows, end)  # positions that there are keys of, or of those that the ring has forgotten nothing
    shape = (slots, flash.kv_heads, length, flash.head_dim)
    left = 0 if window is None else max(0, start - window + 1) // flash.tile * flash.tile  # tiles that nobody may read

    def ring(side: np.ndarray) -> np.ndarray:
        """What positions of a window's tiles have, at their places; elsewhere, where there may be, NaN."""
        if side.dtype != np.int8:
            side[slot, :, end:] = np.nan
            side[slot, :, :left] = np.nan
        made = side[:, :, :rows].copy()
        for position in range(max(left, end - rows), end):
            made[:, :, position % rows] = side[:, :, position]
        return made

    q = rng.standard_normal((48, flash.heads, flash.head_dim)).astype(np.float16)
    q[count:] = np.nan
    sides, scales, exact = [], [], []
    for _ in range(2):
        if flash.q8:
            side = rng.integers(-127, 128, shape).astype(np.int8)
            scale = rng.uniform(0.005, 0.02, (*shape[:3], flash.head_dim // 32)).astype(np.float16)
            exact.append(side[slot] * np.repeat(scale[slot].astype(np.float64), 32, axis=-1))
            scales.append(ring(scale))
        else:
            side = rng.standard_normal(shape).astype(np.float16)
            exact.append(side[slot].astype(np.float64))
        sides.append(ring(side))
    table = None
    if flash.blocks:  # in no order
        order = np.random.default_rng(6).permutation(slots * flash.blocks).astype(np.int32).reshape(slots, -1)
        table = operands.put(order)
        held = [*sides, *scales]
        for index, side in enumerate(held):
            cut = side.reshape(slots, flash.kv_heads, flash.blocks, BLOCK_POSITIONS, -1).swapaxes(1, 2)
            held[index] = np.empty((order.size, *cut.shape[2:]), side.dtype)
            held[index][order] = cut
        sides, scales = held[:2], held[2:]
    sides, scales = [operands.put(side) for side in sides], [operands.put(scale) for scale in scales]
    out = operands.put(np.full(q.shape, 7, np.float16))
    chunk = operands.put(np.frombuffer(chunk_bytes(start=start, count=count, slot=slot), np.uint8))
    launch = flash.launch(
        Programs(opened), out=out, q=operands.put(q), keys=sides[0], values=sides[1], chunk=chunk, tokens=48,
        key_scales=scales[0] if scales else None, value_scales=scales[1] if scales else None, table=table,
    )  # fmt: skip
    launch.program(*launch.buffers, global_size=launch.grid, local_size=launch.block, wait=True)
    ours = operands.get(out, (len(q), -1), np.float16)[:, fragment_order(q[0].size)].reshape(q.shape).astype(np.float64)
    expected = attention(q[:count].astype(np.float64), *exact, start, flash.scoring)
    assert np.abs(ours[:count] - expected).max() < 2e-3 * np.abs(expected).max()
    assert (ours[count:] == 7).all()
    return ours[:count]
