"""Packed blocks to numbers inside the graph: each function says, in tensor operations, where a weight's bits lie.

A function takes the packed rows as uint8 of shape (rows, blocks, block bytes) and returns float32 of shape (rows,
blocks, *inner), where `inner` multiplies to the block's elements, in their order. Nothing is realized: the operations
fuse into the kernel that uses the weights, so they stay packed in memory. Layouts: ggml-common.h and ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Final

import numpy as np
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Compiled
from tinygrad.dtype import DType

from tegrad.llm.formats import (
    BF16,
    E2M1,
    F16,
    F32,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NONLINEAR,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    BlockType,
    book,
)


def _half(data: Tensor) -> Tensor:
    """Two bytes in the last dimension to one float32."""
    return data.bitcast(dtypes.float16).float()


def _signed(data: Tensor) -> Tensor:
    return data.bitcast(dtypes.int8).float()


def _choose(axis: int, rank: int, *values: Tensor) -> Tensor:
    """`values[i]` at index i of a new `axis` of length 2, which they have with length 1, as a select."""
    shape = [1] * rank
    shape[axis] = 2
    return Tensor.arange(2).reshape(shape).eq(0).where(*values)


def _sixteen(data: Tensor) -> Tensor:
    """16 bytes: their low nibbles, then their high ones. inner is (nibble, byte)."""
    shift = Tensor.arange(2).reshape(1, 1, 2, 1) * 4
    return (data.reshape(*data.shape[:2], 1, 16).int() >> shift) & 15


def _q4_0(data: Tensor) -> Tensor:
    """d (half), 16 bytes; minus 8."""
    return _half(data[:, :, :2]).unsqueeze(-1) * (_sixteen(data[:, :, 2:]) - 8).float()


def _q4_1(data: Tensor) -> Tensor:
    """d, m (half), 16 bytes as in Q4_0."""
    d, m = (_half(data[:, :, at : at + 2]).unsqueeze(-1) for at in (0, 2))
    return d * _sixteen(data[:, :, 4:]).float() + m


def _five_bits(data: Tensor) -> Tensor:
    """4 bytes of fifth bits in the order of the weights, 16 as in Q4_0. inner is (nibble, byte / 8, byte % 8)."""
    rows, blocks = data.shape[:2]
    shift = Tensor.arange(2).reshape(1, 1, 2, 1, 1) * 4
    fifth = (data[:, :, :4].reshape(rows, blocks, 2, 2, 1).int() >> Tensor.arange(8).reshape(1, 1, 1, 1, 8)) & 1
    return ((data[:, :, 4:].reshape(rows, blocks, 1, 2, 8).int() >> shift) & 15) | (fifth << 4)


def _q5_0(data: Tensor) -> Tensor:
    """d (half), integers plus 16."""
    d = _half(data[:, :, :2]).reshape(*data.shape[:2], 1, 1, 1)
    return d * (_five_bits(data[:, :, 2:]) - 16).float()


def _q5_1(data: Tensor) -> Tensor:
    """d, m (half), integers."""
    d, m = (_half(data[:, :, at : at + 2]).reshape(*data.shape[:2], 1, 1, 1) for at in (0, 2))
    return d * _five_bits(data[:, :, 4:]).float() + m


def _coded(codes: tuple[int, ...], code: Tensor) -> Tensor:
    """What codes stand for, int8 in four words of four, as float32: by shifts, which need no memory."""
    words = np.array(codes, np.int8).view("<i4").tolist()
    word = (code < 8).where((code < 4).where(words[0], words[1]), (code < 12).where(words[2], words[3]))
    return _signed(((word >> ((code & 3) * 8)) & 255).cast(dtypes.uint8))


def _iq4_nl(data: Tensor) -> Tensor:
    """d (half), 16 bytes of codes as in Q4_0."""
    return _half(data[:, :, :2]).unsqueeze(-1) * _coded(NONLINEAR, _sixteen(data[:, :, 2:]))


def _iq4_xs(data: Tensor) -> Tensor:
    """d (half), 2 bytes of pairs of bits and 4 of nibbles of eight scales, 8 times 16 bytes of codes as in Q4_0.

    inner is (s/4, s%4/2, s%2, nibble, byte) for scale s.
    """
    rows, blocks = data.shape[:2]
    nibble = Tensor.arange(2).reshape(1, 1, 1, 1, 1, 2, 1) * 4
    low_at = Tensor.arange(2).reshape(1, 1, 1, 1, 2, 1, 1) * 4
    high_at = Tensor.arange(4).reshape(1, 1, 1, 2, 2, 1, 1) * 2
    high = (data[:, :, 2:4].reshape(rows, blocks, 2, 1, 1, 1, 1).int() >> high_at) & 3
    low = (data[:, :, 4:8].reshape(rows, blocks, 2, 2, 1, 1, 1).int() >> low_at) & 15
    code = (data[:, :, 8:].reshape(rows, blocks, 2, 2, 2, 1, 16).int() >> nibble) & 15
    d = _half(data[:, :, :2]).reshape(rows, blocks, 1, 1, 1, 1, 1)
    return d * ((low | (high << 4)) - 32).float() * _coded(NONLINEAR, code)


def _mxfp4(data: Tensor) -> Tensor:
    """A byte of exponent, 16 of codes as in Q4_0: what a float32 with that exponent is, less half."""
    exponent = data[:, :, :1].cast(dtypes.uint32)
    power = ((exponent - 1) << 23).bitcast(dtypes.float32)
    tiny = (exponent < 1).where(2.0**-128, 2.0**-127)
    return (exponent < 2).where(tiny, power).unsqueeze(-1) * _coded(E2M1, _sixteen(data[:, :, 1:]))


def _q8_0(data: Tensor) -> Tensor:
    """d (half), 32 x int8."""
    return _half(data[:, :, :2]) * _signed(data[:, :, 2:])


def _pairs(data: Tensor) -> Tensor:
    """64 bytes: element 128n + 32j + l has bits 2j and 2j + 1 of byte 32n + l. inner is (n, j/2, j%2, l/16, l%16)."""
    shift = Tensor.arange(4).reshape(1, 1, 1, 2, 2, 1, 1) * 2
    return (data.reshape(*data.shape[:2], 2, 1, 1, 2, 16).int() >> shift) & 3


def _q2_k(data: Tensor) -> Tensor:
    """16 bytes of scales (low four bits) and minima, 64 of pairs, d, dmin (half)."""
    rows, blocks = data.shape[:2]
    both = data[:, :, :16].reshape(rows, blocks, 2, 2, 2, 2, 1).int()
    d, dmin = (_half(data[:, :, at : at + 2]).reshape(rows, blocks, 1, 1, 1, 1, 1) for at in (80, 82))
    return d * (both & 15).float() * _pairs(data[:, :, 16:80]).float() - dmin * (both >> 4).float()


def _q3_k(data: Tensor) -> Tensor:
    """32 bytes of third bits (element 32s + l has bit s of byte l), 64 of pairs, 12 of scales, d (half).

    Of scale 8n + 2j + h the low nibble is nibble n of byte 2j + h, and the high pair pair 2n + j/2 of byte
    8 + 2(j%2) + h.
    """
    rows, blocks = data.shape[:2]
    n = Tensor.arange(2).reshape(1, 1, 2, 1, 1, 1, 1) * 4
    bit = n + Tensor.arange(4).reshape(1, 1, 1, 2, 2, 1, 1)
    third = (data[:, :, :32].reshape(rows, blocks, 1, 1, 1, 2, 16).int() >> bit) & 1
    low = (data[:, :, 96:104].reshape(rows, blocks, 1, 2, 2, 2, 1).int() >> n) & 15
    pair = n + Tensor.arange(2).reshape(1, 1, 1, 2, 1, 1, 1) * 2
    high = (data[:, :, 104:108].reshape(rows, blocks, 1, 1, 2, 2, 1).int() >> pair) & 3
    d = _half(data[:, :, 108:]).reshape(rows, blocks, 1, 1, 1, 1, 1)
    value = (_pairs(data[:, :, 32:96]) | (third << 2)) - 4
    return d * ((low | (high << 4)) - 32).float() * value.float()


def _q6_k(data: Tensor) -> Tensor:
    """128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, d (half).

    Element 128h + 64n + 32m + l has nibble n of low byte 64h + 32m + l, bits 4n + 2m of high byte 32h + l, and scale
    8h + 4n + 2m + l/16. inner is (h, n, m, l/16, l%16).
    """
    rows, blocks = data.shape[:2]
    low = data[:, :, :128].reshape(rows, blocks, 2, 1, 2, 2, 16)
    high = data[:, :, 128:192].reshape(rows, blocks, 2, 1, 1, 2, 16)
    scale = _signed(data[:, :, 192:208]).reshape(rows, blocks, 2, 2, 2, 2, 1)
    d = _half(data[:, :, 208:]).reshape(rows, blocks, 1, 1, 1, 1, 1)
    nibble = Tensor.arange(2).reshape(1, 1, 1, 2, 1, 1, 1) * 4
    pair = nibble + Tensor.arange(2).reshape(1, 1, 1, 1, 2, 1, 1) * 2
    low = (low.int() >> nibble) & 15
    high = (high.int() >> pair) & 3
    return d * scale * ((low | (high << 4)) - 32).float()


def _affine(data: Tensor, value: Tensor) -> Tensor:
    """`value` (rows, blocks, 2, 2, 2, 32) scaled: d, dmin (half), 12 bytes of eight 6-bit scales and minima.

    Elements 32s .. 32s + 31 have scale and minimum s. The first four scales are the low six
    bits of bytes 0..3, the first four minima of bytes 4..7; of the last four, the low nibbles are the nibbles of bytes
    8..11 and the high pairs the high bits of bytes 0..7. inner is (s/4, s/2%2, s%2, 32).
    """
    rows, blocks = data.shape[:2]
    d, dmin = (_half(data[:, :, at : at + 2]).reshape(rows, blocks, 1, 1, 1, 1) for at in (0, 2))
    scales, minima, nibbles = (data[:, :, at : at + 4].reshape(rows, blocks, 1, 2, 2, 1).int() for at in (4, 8, 12))
    scale = _choose(2, 6, scales & 63, (nibbles & 15) | ((scales >> 6) << 4))
    minimum = _choose(2, 6, minima & 63, (nibbles >> 4) | ((minima >> 6) << 4))
    return d * scale.float() * value.float() - dmin * minimum.float()


def _nibbles(data: Tensor) -> Tensor:
    """128 bytes: element 64j + 32n + l is nibble n of byte 32j + l. inner is (j/2, j%2, n, l)."""
    shift = Tensor.arange(2).reshape(1, 1, 1, 1, 2, 1) * 4
    return (data.reshape(*data.shape[:2], 2, 2, 1, 32).int() >> shift) & 15


def _q4_k(data: Tensor) -> Tensor:
    """16 bytes of scales, 128 of nibbles."""
    return _affine(data, _nibbles(data[:, :, 16:]))


def _q5_k(data: Tensor) -> Tensor:
    """16 bytes of scales, 32 of fifth bits (element 32s + l has bit s of byte l), 128 of nibbles."""
    rows, blocks = data.shape[:2]
    bit = Tensor.arange(8).reshape(1, 1, 2, 2, 2, 1)
    fifth = (data[:, :, 16:48].reshape(rows, blocks, 1, 1, 1, 32).int() >> bit) & 1
    return _affine(data, _nibbles(data[:, :, 48:]) | (fifth << 4))


@cache
def _book(kind: BlockType, device: Compiled) -> Tensor:
    """The code book (entries, weights) as magnitudes on an opened device."""
    assert kind.layout is not None
    magnitudes = np.array(kind.layout.codes, np.float32)[book(kind.name)]
    return Tensor(magnitudes, device=device.device).realize()


def _booked(kind: BlockType, d: Tensor, index: Tensor, signs: Tensor, scale: Tensor) -> Tensor:
    """d (half) times odd scales, the format's factor and signed entries; inner is (block of 32, half, eight, entry,
    weight).

    `index` has a place for each entry, `signs` a byte for each eight weights, `scale` a number s of each half or block,
    which stands for 2s + 1: all with as many dimensions.
    """
    assert kind.layout is not None
    table = _book(kind, Device[d.device])
    unit = _half(d).reshape(*d.shape[:2], 1, 1, 1, 1, 1) * ((scale * 2 + 1).float() * kind.layout.factor)
    weights = table.shape[1]
    bit = Tensor.arange(8).reshape(1, 1, 1, 1, 1, 8 // weights, weights)
    sign = 1 - ((signs >> bit) & 1) * 2
    return unit * sign.float() * table[index.squeeze(-1)]


def _sevens(words: Tensor) -> tuple[Tensor, Tensor]:
    """Words (rows, blocks, 8) of four times seven signs and a scale, as signs and scales that `_booked` takes.

    Of each eight weights the last one's sign is what makes the number of negative ones even.
    """
    words = words.reshape(*words.shape, 1, 1, 1, 1)
    at = Tensor.arange(4).reshape(1, 1, 1, 2, 2, 1, 1) * 7
    return _eighth((words >> at.cast(dtypes.uint32)).cast(dtypes.int32) & 127), (words >> 28).cast(dtypes.int32)


def _eighth(seven: Tensor) -> Tensor:
    odd = seven ^ (seven >> 4)
    odd = odd ^ (odd >> 2)
    return seven | (((odd ^ (odd >> 1)) & 1) << 7)


def _nibbles_of(data: Tensor, *shape: int) -> Tensor:
    """Bytes to nibbles, the low one first."""
    shift = Tensor.arange(2).reshape(1, 1, 1, 2) * 4
    return ((data.unsqueeze(-1).int() >> shift) & 15).reshape(*data.shape[:2], *shape, 1, 1, 1)


def _iq2_xxs(data: Tensor) -> Tensor:
    """d (half), of each 32 weights four bytes of places and a word of signs and scale."""
    both = data[:, :, 2:].reshape(*data.shape[:2], 8, 8)
    signs, scale = _sevens(both[:, :, :, 4:].bitcast(dtypes.uint32).squeeze(-1))
    index = both[:, :, :, :4].reshape(*data.shape[:2], 8, 2, 2, 1, 1).int()
    return _booked(IQ2_XXS, data[:, :, :2], index, signs, scale)


def _iq2_xs(data: Tensor) -> Tensor:
    """d (half), 32 times nine bits of place and seven signs, 8 bytes of scales."""
    both = data[:, :, 2:66].bitcast(dtypes.uint16).int().reshape(*data.shape[:2], 8, 2, 2, 1, 1)
    scale = _nibbles_of(data[:, :, 66:], 8, 2)
    return _booked(IQ2_XS, data[:, :, :2], both & 511, _eighth(both >> 9), scale)


def _iq2_s(data: Tensor) -> Tensor:
    """d (half), 32 low bytes of places, 32 bytes of signs, 8 of pairs of high bits, 8 of scales."""
    shape = (*data.shape[:2], 8, 2, 2, 1, 1)
    low, signs = data[:, :, 2:34].reshape(shape).int(), data[:, :, 34:66].reshape(shape).int()
    at = Tensor.arange(4).reshape(1, 1, 1, 2, 2, 1, 1) * 2
    high = (data[:, :, 66:74].reshape(*data.shape[:2], 8, 1, 1, 1, 1).int() >> at) & 3
    return _booked(IQ2_S, data[:, :, :2], low | (high << 8), signs, _nibbles_of(data[:, :, 74:], 8, 2))


def _iq3_xxs(data: Tensor) -> Tensor:
    """d (half), 64 places, 8 words of signs and scale."""
    signs, scale = _sevens(data[:, :, 66:].bitcast(dtypes.uint32))
    index = data[:, :, 2:66].reshape(*data.shape[:2], 8, 2, 2, 2, 1).int()
    return _booked(IQ3_XXS, data[:, :, :2], index, signs, scale)


def _iq3_s(data: Tensor) -> Tensor:
    """d (half), 64 low bytes of places, 8 bytes of high bits, 32 of signs, 4 of scales."""
    low = data[:, :, 2:66].reshape(*data.shape[:2], 8, 2, 2, 2, 1).int()
    high = (
        data[:, :, 66:74].reshape(*data.shape[:2], 8, 1, 1, 1, 1).int() >> Tensor.arange(8).reshape(1, 1, 1, 2, 2, 2, 1)
    ) & 1
    signs = data[:, :, 74:106].reshape(*data.shape[:2], 8, 2, 2, 1, 1).int()
    return _booked(IQ3_S, data[:, :, :2], low | (high << 8), signs, _nibbles_of(data[:, :, 106:], 8, 1))


def _bf16(data: Tensor) -> Tensor:
    """The upper halves of float32 values."""
    return (data.cast(dtypes.uint32) << 16).bitcast(dtypes.float32)


_PACKED: Final[Mapping[BlockType, Callable[[Tensor], Tensor]]] = {
    Q4_0: _q4_0, Q4_1: _q4_1, Q5_0: _q5_0, Q5_1: _q5_1, IQ4_NL: _iq4_nl, IQ4_XS: _iq4_xs, MXFP4: _mxfp4, Q8_0: _q8_0,
    IQ2_XXS: _iq2_xxs, IQ2_XS: _iq2_xs, IQ2_S: _iq2_s, IQ3_XXS: _iq3_xxs, IQ3_S: _iq3_s,
    Q2_K: _q2_k, Q3_K: _q3_k, Q4_K: _q4_k, Q5_K: _q5_k, Q6_K: _q6_k,
}  # fmt: skip
_PLAIN: Final[Mapping[BlockType, DType]] = {F32: dtypes.float32, F16: dtypes.float16, BF16: dtypes.uint16}


def storage(kind: BlockType) -> DType:
    """The dtype of a matrix on the device: its own where it is a plain one, else bytes."""
    return _PLAIN.get(kind, dtypes.uint8)


def dequantize(kind: BlockType, data: Tensor) -> Tensor:
    """Rows as stored (rows, row elements of `storage`) to float32 (rows, blocks, *inner), lazily."""
    if kind is BF16:
        return _bf16(data)
    if kind in _PLAIN:
        return data.float()
    return _PACKED[kind](data.reshape(data.shape[0], -1, kind.size))
