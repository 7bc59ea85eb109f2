"""Random keys and values, as a cache holds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tiny_llama import Shape

from tegrad.llm.cache import KvCache


def fill(device: Any, cache: KvCache, kept: Sequence[bytes]) -> None:
    """Each layer's keys, values and their scales."""
    for layer in cache.layers:
        buffers = (layer.keys, layer.values, layer.key_scales, layer.value_scales)
        for buffer, data in zip(buffers, kept, strict=False):
            device.allocator._copyin(buffer, memoryview(bytearray(data)))


def stored(shape: Shape, q8: bool, positions: int) -> list[bytes]:
    """What a cache holds: keys, values and their scales."""
    rng = np.random.default_rng(8)
    rows = rng.standard_normal((2, shape.kv_heads * positions * shape.width))
    if not q8:
        return [side.astype(np.float16).tobytes() for side in rows]
    scales = [(side.reshape(-1, 32).std(axis=1) / 40).astype(np.float16).tobytes() for side in rows]
    return [*(np.clip(side * 40, -127, 127).astype(np.int8).tobytes() for side in rows), *scales]
