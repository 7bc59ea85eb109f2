"""The plan of one prefill chunk."""

from __future__ import annotations

import struct

_CHUNK = struct.Struct("<8i")


def chunk_bytes(start: int = 0, count: int = 0, slot: int = 0, at: int = 0, left: int = 0) -> bytes:
    """`struct Chunk` of kernels/chunk.cuh."""
    return _CHUNK.pack(start, count, slot, at, left, 0, 0, 0)
