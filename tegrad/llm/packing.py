"""The layout in which our kernels read a matrix: the file's bytes, reordered within segments of 2048 weights.

A matrix is its blocks, row after row. 2048 consecutive weights are a **segment**; it takes its bytes in the file.
Lane L of a warp owns the 64 consecutive weights 64L .. 64L + 63, in four **sets** of 16, and reads them with 16-byte
loads: a **plane** is 512 bytes, 16 of each lane, byte i of which belongs to weight i of a set. Bits above a byte's
low ones hold another set. After the planes lie the scales, in the order of the weights.

| format | planes | then |
|---|---|---|
| Q6_K | 3: low 6 bits of plane p: set p; top 2 bits of plane p: bits 2p and up of set 3 | 128 int8 scales, 8 halves d |
| Q4_0 | 2: the low nibbles of plane p are set 2p, the high ones set 2p + 1 | 64 halves d |
| Q4_K | as Q4_0 | 8 times the file's 16 bytes of d, dmin, scales and minima |
| Q5_K | as Q4_0; then 256 bytes, 8 of each lane: the fifth bit of weight i of set s is bit 16s + i | as Q4_K |
| Q8_0 | 4: plane s is set s | 64 halves d |
| F16, BF16, F32 | the file's bytes | |

The last segment is filled up with zero bytes, which mean the same in both orders. This module does in
numpy what kernels/repack.cu does on the device: arrays of bytes in, arrays of bytes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import BF16, F16, F32, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, BlockType

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

SEGMENT: Final = 2048
"""Weights that are reordered among themselves: 64 for each lane of a warp."""

LANES: Final = 32
LANE_WEIGHTS: Final = SEGMENT // LANES
SET: Final = 16

PLAIN: Final = (F32, F16, BF16)
"""Formats without blocks, which keep the file's order."""


# --- the file's blocks: integers in the order of the weights, and back ------------------------------------------------


def _or(a: NDArray[Any], b: NDArray[Any]) -> Bytes:
    """a | b, whose type numpy's stubs widen."""
    both: Bytes = np.bitwise_or(a, b)
    return both


def _split_nibbles(data: Bytes, run: int) -> Bytes:
    """(n, bytes) to (n, 2 * bytes): of each run, the low nibbles and then the high ones."""
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(data), -1)


def _join_nibbles(values: Bytes, run: int) -> Bytes:
    runs = (values & 15).reshape(len(values), -1, 2, run)
    return _or(runs[:, :, 0], runs[:, :, 1] << _FOUR).reshape(len(values), -1)


_FOUR: Final = np.uint8(4)
_BITS: Final = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
_PAIRS: Final = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)


def _split_q5_k(data: Bytes) -> Bytes:
    """32 bytes of fifth bits (weight 32s + l has bit s of byte l), 128 of nibbles."""
    fifth = (data[:, None, :32] >> _BITS) & 1
    return _or(_split_nibbles(data[:, 32:], 32), fifth.reshape(len(data), 256) << _FOUR)


def _join_q5_k(values: Bytes) -> Bytes:
    fifth = np.bitwise_or.reduce((values.reshape(-1, 8, 32) >> _FOUR) << _BITS, axis=1)
    return np.concatenate([fifth, _join_nibbles(values, 32)], axis=1)


def _split_q6_k(data: Bytes) -> Bytes:
    """Of each 128 weights 64 bytes of low nibbles; then, of each, 32 bytes of four bit pairs."""
    low = _split_nibbles(data[:, :128], 64)
    high = (data[:, 128:].reshape(-1, 2, 1, 32) >> _PAIRS) & 3
    return _or(low, high.reshape(len(data), 256) << _FOUR)


def _join_q6_k(values: Bytes) -> Bytes:
    high = np.bitwise_or.reduce((values.reshape(-1, 2, 4, 32) >> _FOUR) << _PAIRS, axis=2)
    return np.concatenate([_join_nibbles(values, 64), high.reshape(-1, 64)], axis=1)


# --- the planes: (segments, lanes, sets, 16) integers to bytes, and back ----------------------------------------------


def _planes(sets: Bytes) -> Bytes:
    """(n, lanes, planes, 16) to (n, bytes): plane after plane."""
    return np.ascontiguousarray(sets.transpose(0, 2, 1, 3)).reshape(len(sets), -1)


def _lanes(data: Bytes) -> Bytes:
    """The reverse of `_planes`."""
    return data.reshape(len(data), -1, LANES, SET).transpose(0, 2, 1, 3)


def _pack_4(values: Bytes) -> Bytes:
    return _planes(_or(values[:, :, 0::2] & 15, values[:, :, 1::2] << _FOUR))


def _unpack_4(data: Bytes) -> Bytes:
    lanes = _lanes(data)
    return np.stack([lanes & 15, lanes >> 4], axis=3).reshape(len(data), LANES, 4, SET)


def _pack_5(values: Bytes) -> Bytes:
    fifth = np.packbits((values >> _FOUR).reshape(len(values), -1), axis=1, bitorder="little")
    return np.concatenate([_pack_4(values), fifth], axis=1)


def _unpack_5(data: Bytes) -> Bytes:
    fifth = np.unpackbits(data[:, 1024:], axis=1, bitorder="little").reshape(len(data), LANES, 4, SET)
    return _or(_unpack_4(data[:, :1024]), fifth << _FOUR)


_THIRDS: Final = np.array([0, 2, 4], np.uint8).reshape(1, 1, 3, 1)


def _pack_6(values: Bytes) -> Bytes:
    return _planes(_or(values[:, :, :3], ((values[:, :, 3:] >> _THIRDS) & 3) << np.uint8(6)))


def _unpack_6(data: Bytes) -> Bytes:
    lanes = _lanes(data)
    last = np.bitwise_or.reduce((lanes >> np.uint8(6)) << _THIRDS, axis=2, keepdims=True)
    return np.concatenate([lanes & 63, last], axis=2)


# --- what the integers mean: (n, blocks, weights) float32 -------------------------------------------------------------


def _half(data: Bytes) -> Floats:
    """(..., 2) bytes to (..., 1) float32."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _signed(data: Bytes) -> Floats:
    return data.view(np.int8).astype(np.float32)


def _value_q4_0(values: Bytes, d: Bytes) -> Floats:
    return _half(d) * (values.astype(np.float32) - 8)


def _value_q8_0(values: Bytes, d: Bytes) -> Floats:
    return _half(d) * _signed(values)


def _value_affine(values: Bytes, head: Bytes) -> Floats:
    """d, dmin, and 12 bytes of eight 6-bit scales and minima, of 32 weights each."""
    a, b, c = head[..., 4:8], head[..., 8:12], head[..., 12:]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 6) << _FOUR)], axis=-1)
    minimum = np.concatenate([b & 63, (c >> _FOUR) | ((b >> 6) << _FOUR)], axis=-1)
    unit, shift = _half(head[..., :2]) * scale.astype(np.float32), _half(head[..., 2:4]) * minimum.astype(np.float32)
    q = values.reshape(*values.shape[:-1], 8, 32).astype(np.float32)
    return (unit[..., None] * q - shift[..., None]).reshape(values.shape)


def _value_q6_k(values: Bytes, scales: Bytes, d: Bytes) -> Floats:
    unit = _half(d) * _signed(scales)
    q = values.reshape(*values.shape[:-1], 16, 16).astype(np.float32) - 32
    return (unit[..., None] * q).reshape(values.shape)


# --- the formats ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """A block format's two orders."""

    fields: tuple[int, ...]
    """Bytes of each kind of scale in a block, in the order of the segment."""
    at: tuple[int, ...]
    """Where those begin in the file's block; all other bytes are the integers."""
    split: Callable[[Bytes], Bytes]
    """Integers' bytes of blocks (n, bytes) to integers (n, weights)."""
    join: Callable[[Bytes], Bytes]
    pack: Callable[[Bytes], Bytes]
    """Integers (segments, lanes, sets, 16) to the planes (segments, bytes)."""
    unpack: Callable[[Bytes], Bytes]
    value: Callable[..., Floats]
    """Integers (segments, blocks, weights) and the fields (segments, blocks, bytes) to weights."""


def _same(data: Bytes) -> Bytes:
    return data


LAYOUTS: Final[Mapping[BlockType, Layout]] = {
    Q4_0: Layout((2,), (0,), lambda q: _split_nibbles(q, 16), lambda q: _join_nibbles(q, 16), _pack_4, _unpack_4,
                 _value_q4_0),
    Q8_0: Layout((2,), (0,), _same, _same, _planes, _lanes, _value_q8_0),
    Q4_K: Layout((16,), (0,), lambda q: _split_nibbles(q, 32), lambda q: _join_nibbles(q, 32), _pack_4, _unpack_4,
                 _value_affine),
    Q5_K: Layout((16,), (0,), _split_q5_k, _join_q5_k, _pack_5, _unpack_5, _value_affine),
    Q6_K: Layout((16, 2), (192, 208), _split_q6_k, _join_q6_k, _pack_6, _unpack_6, _value_q6_k),
}  # fmt: skip


def segment_bytes(kind: BlockType) -> int:
    """Bytes of 2048 weights."""
    return kind.row_bytes(SEGMENT)


def segments(rows: int, columns: int) -> int:
    """Segments of a matrix, the last one perhaps only partly used."""
    return -(-rows * columns // SEGMENT)


def packed_bytes(kind: BlockType, rows: int, columns: int) -> int:
    """Bytes of a packed matrix: whole segments."""
    return segments(rows, columns) * segment_bytes(kind)


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
    if kind in PLAIN:
        return whole
    layout, n = LAYOUTS[kind], segments(rows, columns)
    blocks = whole.reshape(-1, kind.size)
    fields = [blocks[:, at : at + size] for at, size in zip(layout.at, layout.fields, strict=True)]
    integers = np.delete(blocks, _field_bytes(layout), axis=1)
    planes = layout.pack(layout.split(integers).reshape(n, LANES, 4, SET))
    scales = [np.ascontiguousarray(field).reshape(n, -1) for field in fields]
    return np.concatenate([planes, *scales], axis=1).reshape(-1)


def unpack(kind: BlockType, packed: Bytes, rows: int, columns: int) -> Bytes:
    """The reverse of `pack`: the file's bytes, (rows, row bytes)."""
    size = rows * kind.row_bytes(columns)
    if kind in PLAIN:
        return packed.reshape(-1)[:size].reshape(rows, -1)
    layout = LAYOUTS[kind]
    values, fields = _parts(kind, packed)
    blocks = np.empty((values.size // kind.elements, kind.size), np.uint8)
    own = _field_bytes(layout)
    blocks[:, own] = np.concatenate([field.reshape(len(blocks), -1) for field in fields], axis=1)
    blocks[:, np.delete(np.arange(kind.size), own)] = layout.join(values.reshape(-1, kind.elements))
    return blocks.reshape(-1)[:size].reshape(rows, -1)


def dequantize_packed(kind: BlockType, packed: Bytes, rows: int, columns: int) -> Floats:
    """The weights (rows, columns) of a packed matrix."""
    if kind in PLAIN:
        return _plain(kind, packed.reshape(-1)).reshape(-1)[: rows * columns].reshape(rows, columns)
    values, fields = _parts(kind, packed)
    return LAYOUTS[kind].value(values, *fields).reshape(-1)[: rows * columns].reshape(rows, columns)


def _field_bytes(layout: Layout) -> list[int]:
    """The places of the fields' bytes in the file's block, field after field."""
    return [at + byte for at, size in zip(layout.at, layout.fields, strict=True) for byte in range(size)]


def _parts(kind: BlockType, packed: Bytes) -> tuple[Bytes, list[Bytes]]:
    """The integers of a packed matrix (segments, blocks, weights) and its fields (segments, blocks, bytes)."""
    layout = LAYOUTS[kind]
    data = packed.reshape(-1, segment_bytes(kind))
    n, blocks = len(data), SEGMENT // kind.elements
    ends = np.cumsum([size * blocks for size in layout.fields][::-1])[::-1]
    planes = layout.unpack(data[:, : data.shape[1] - ends[0]])
    fields = [
        data[:, data.shape[1] - end :][:, : size * blocks].reshape(n, blocks, size)
        for end, size in zip(ends, layout.fields, strict=True)
    ]
    return np.ascontiguousarray(planes).reshape(n, blocks, kind.elements), fields


def _plain(kind: BlockType, data: Bytes) -> Floats:
    if kind is BF16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    return data.view("<f2" if kind is F16 else "<f4").astype(np.float32)
