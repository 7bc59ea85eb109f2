"""The order in which our kernels read a matrix: the file's bytes, reordered in segments of 2048 weights (`formats`).

The last segment is filled up with zero bytes, which mean the same in both orders. This module does in
numpy what kernels/repack.cu does on the device: arrays of bytes in, arrays of bytes out.
"""

from __future__ import annotations

import numpy as np

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import (
    BF16,
    F16,
    LANE_WEIGHTS,
    LANES,
    PLAIN,
    SEGMENT,
    BlockType,
    Bytes,
    Floats,
    Layout,
)


def segments(rows: int, columns: int) -> int:
    """Segments of a matrix, the last one perhaps only partly used."""
    return -(-rows * columns // SEGMENT)


def packed_bytes(kind: BlockType, rows: int, columns: int) -> int:
    """Bytes of a packed matrix: whole segments."""
    return segments(rows, columns) * kind.segment_bytes


def check(kind: BlockType, columns: int) -> None:
    """Refuse rows that our kernels cannot read: a lane's 64 weights are of one row, a plain row begins at 16 bytes."""
    if kind not in PLAIN and columns % LANE_WEIGHTS:
        raise UnsupportedModelError(
            f"rows of {columns} weights in {kind.name}: packed rows of a multiple of {LANE_WEIGHTS} are run; "
            "convert the model to F16"
        )
    if kind in PLAIN and columns * kind.size % 16:
        raise UnsupportedModelError(f"rows of {columns} weights in {kind.name} are no multiple of 16 bytes")


def pack(kind: BlockType, raw: Bytes, rows: int, columns: int) -> Bytes:
    """A matrix's bytes as in the file (any shape) in our order, (packed_bytes,)."""
    whole = np.zeros(packed_bytes(kind, rows, columns), np.uint8)
    flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    whole[: rows * kind.row_bytes(columns)] = flat
    if (layout := kind.layout) is None:
        return whole
    n = segments(rows, columns)
    integers, fields = layout.taken_apart(whole.reshape(-1, kind.size))
    planes = layout.pack(integers.reshape(n, LANES, 4, -1))
    return np.concatenate([planes, *(np.ascontiguousarray(field).reshape(n, -1) for field in fields)], axis=1).reshape(
        -1
    )


def unpack(kind: BlockType, packed: Bytes, rows: int, columns: int) -> Bytes:
    """The reverse of `pack`: the file's bytes, (rows, row bytes)."""
    size = rows * kind.row_bytes(columns)
    if (layout := kind.layout) is None:
        return packed.reshape(-1)[:size].reshape(rows, -1)
    values, fields = _parts(kind, layout, packed)
    blocks = layout.put_together(
        values.reshape(values.shape[0] * values.shape[1], -1), [field.reshape(-1, field.shape[-1]) for field in fields]
    )
    return blocks.reshape(-1)[:size].reshape(rows, -1)


def dequantize_packed(kind: BlockType, packed: Bytes, rows: int, columns: int) -> Floats:
    """The weights (rows, columns) of a packed matrix."""
    if (layout := kind.layout) is None:
        return _plain(kind, packed.reshape(-1)).reshape(-1)[: rows * columns].reshape(rows, columns)
    values, fields = _parts(kind, layout, packed)
    return layout.value(values, *fields).reshape(-1)[: rows * columns].reshape(rows, columns)


def _parts(kind: BlockType, layout: Layout, packed: Bytes) -> tuple[Bytes, list[Bytes]]:
    """The integers of a packed matrix (segments, blocks, weights) and its fields (segments, blocks, bytes)."""
    data = packed.reshape(-1, kind.segment_bytes)
    n, blocks = len(data), SEGMENT // kind.elements
    ends = np.cumsum([size * blocks for size in layout.fields][::-1])[::-1]
    planes = layout.unpack(data[:, : data.shape[1] - ends[0]])
    fields = [
        data[:, data.shape[1] - end :][:, : size * blocks].reshape(n, blocks, size)
        for end, size in zip(ends, layout.fields, strict=True)
    ]
    return np.ascontiguousarray(planes).reshape(n, blocks, -1), fields


def _plain(kind: BlockType, data: Bytes) -> Floats:
    if kind is BF16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f2" if kind is F16 else "<f4").astype(np.float32)
