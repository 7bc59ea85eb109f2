"""The formats of weights that we run: one row each, from which the packing and the kernels' constants come.

A matrix is its blocks, row after row. Our kernels read 2048 consecutive weights, a **segment**, reordered within the
bytes that they take in the file (`packing`). Lane L of a warp owns its **run**, the 64 consecutive weights 64L .. 64L +
63, in four **sets** of 16, and reads it with 16-byte loads: a **plane** is 512 bytes, 16 of each lane, byte i of which
belongs to weight i of a set. Bits above a byte's low ones hold another set. A word of fifth bits has that of weight
4w + b of a set in its byte b: bit w of set 2p, bit 4 + w of set 2p + 1. After the planes lie the **pieces**, of which
the scales are made.

| format | planes | then |
|---|---|---|
| Q6_K | 3: low 6 bits of plane p: set p; top 2 bits of plane p: bits 2p and up of set 3 | 128 int8 scales, 8 halves d |
| Q4_0 | 2: the low nibbles of plane p are set 2p, the high ones set 2p + 1 | 64 halves d |
| Q4_1 | as Q4_0 | 64 times the halves d and m |
| Q4_K | as Q4_0 | 8 times the file's 16 bytes of d, dmin, scales and minima |
| Q5_K | as Q5_0 | as Q4_K |
| Q5_0 | as Q4_0; then 256 bytes, 8 of each lane: the fifth bits of sets 2p and 2p + 1 are word p | as Q4_0 |
| Q5_1 | as Q5_0 | as Q4_1 |
| IQ4_NL | 2: the halves of word w of plane p have four nibbles each: weights 4w .. of set 2p, and of 2p + 1 | as Q4_0 |
| Q3_K | 1: pair s of bits is set s; then 8 bytes of each lane: third bits | 64 bytes of scales, 32 of them, 8 d |
| IQ4_XS | as IQ4_NL | 8 times the file's 8 bytes of d and scales |
| MXFP4 | as IQ4_NL | 64 exponents, a byte each |
| Q2_K | 1: as Q3_K | 128 bytes of a scale and a minimum, 8 times the halves d and dmin |
| Q8_0 | 4: plane s is set s | 64 halves d |
| IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S | 0 | field after field of the file's blocks, of all 8, d last |
| F16, BF16, F32 | the file's bytes | |

Weights of the last five are entries of a code book, 4 or 8 magnitudes at once, with a sign each and a scale of four
bits s that stands for 2s + 1: what an entry is made of lies in consecutive bytes of each run as it does in the file.

To add a format: a row here; how a decode step multiplies it and reads one weight (kernels/blocks.cuh); how the device
reorders it (kernels/repack.cu); what tinygrad's graph makes of it (dequant.py); how test files get it (quantize.py).
Products for prompts and batches (kernels/fragments.cuh) know kinds of integers and of scales, not formats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from itertools import accumulate
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]

SEGMENT: Final = 2048
"""Weights that are reordered among themselves: 64 for each lane of a warp."""
LANES: Final = 32
LANE_WEIGHTS: Final = SEGMENT // LANES
SET: Final = 16
PLANE_BYTES: Final = SET * LANES

_FOUR: Final = np.uint8(4)


# --- the file's blocks: integers in the order of the weights, and back ------------------------------------------------


def _bytes(values: NDArray[Any]) -> Bytes:
    """Bytes, whose type numpy's stubs widen or forget."""
    made: Bytes = values
    return made


def _or(a: NDArray[Any], b: NDArray[Any]) -> Bytes:
    return _bytes(np.bitwise_or(a, b))


def _split_nibbles(data: Bytes, run: int) -> Bytes:
    """(n, bytes) to (n, 2 * bytes): of each run, the low nibbles and then the high ones."""
    runs = data.reshape(len(data), -1, 1, run)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(len(data), -1)


def _join_nibbles(values: Bytes, run: int) -> Bytes:
    runs = (values & 15).reshape(len(values), -1, 2, run)
    return _or(runs[:, :, 0], runs[:, :, 1] << _FOUR).reshape(len(values), -1)


_BITS: Final = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)
_PAIRS: Final = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)


def _split_q5_0(data: Bytes) -> Bytes:
    """4 bytes of fifth bits in the order of the weights, 16 of nibbles."""
    return _or(_split_nibbles(data[:, 4:], 16), np.unpackbits(data[:, :4], axis=1, bitorder="little") << _FOUR)


def _join_q5_0(values: Bytes) -> Bytes:
    fifth = np.packbits(values >> _FOUR, axis=1, bitorder="little")
    return np.concatenate([fifth, _join_nibbles(values, 16)], axis=1)


def _split_q5_k(data: Bytes) -> Bytes:
    """32 bytes of fifth bits (weight 32s + l has bit s of byte l), 128 of nibbles."""
    fifth = (data[:, None, :32] >> _BITS) & 1
    return _or(_split_nibbles(data[:, 32:], 32), fifth.reshape(len(data), 256) << _FOUR)


def _join_q5_k(values: Bytes) -> Bytes:
    fifth = np.bitwise_or.reduce((values.reshape(-1, 8, 32) >> _FOUR) << _BITS, axis=1)
    return np.concatenate([fifth, _join_nibbles(values, 32)], axis=1)


def _split_two_bits(data: Bytes) -> Bytes:
    """Of each 128 weights 32 bytes: weight 32j + l has bits 2j and 2j + 1 of byte l."""
    return _bytes((data.reshape(-1, 2, 1, 32) >> _PAIRS) & 3).reshape(len(data), 256)


def _join_two_bits(values: Bytes) -> Bytes:
    return _bytes(np.bitwise_or.reduce((values.reshape(-1, 2, 4, 32) & 3) << _PAIRS, axis=2)).reshape(-1, 64)


def _split_q3_k(data: Bytes) -> Bytes:
    """32 bytes of third bits (weight 32s + l has bit s of byte l), 64 of pairs."""
    third = (data[:, None, :32] >> _BITS) & 1
    return _or(_split_two_bits(data[:, 32:]), third.reshape(len(data), 256) << np.uint8(2))


def _join_q3_k(values: Bytes) -> Bytes:
    third = np.bitwise_or.reduce((values.reshape(-1, 8, 32) >> np.uint8(2)) << _BITS, axis=1)
    return np.concatenate([third, _join_two_bits(values)], axis=1)


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


def _pack_bits(bits: Bytes) -> Bytes:
    """(n, lanes, sets, 16) of one bit each as 8 bytes of each lane: bit 4 * odd + w of byte b of word p."""
    words = bits.reshape(len(bits), LANES, 2, 8, 4)  # p, (odd, w), b
    return _bytes(np.bitwise_or.reduce(words << _BITS, axis=3).reshape(len(bits), -1))


def _unpack_bits(data: Bytes) -> Bytes:
    """The reverse of `_pack_bits`."""
    return _bytes((data.reshape(len(data), LANES, 2, 1, 4) >> _BITS) & 1).reshape(len(data), LANES, 4, SET)


def _pack_5(values: Bytes) -> Bytes:
    return np.concatenate([_pack_4(values), _pack_bits(values >> _FOUR)], axis=1)


def _unpack_5(data: Bytes) -> Bytes:
    return _or(_unpack_4(data[:, :1024]), _unpack_bits(data[:, 1024:]) << _FOUR)


def _pack_codes(values: Bytes) -> Bytes:
    """Nibbles side by side, as a permutation of bytes takes its indices: (p, odd, w, half, 2) to (p, w, odd, half)."""
    pairs = values.reshape(len(values), LANES, 2, 2, 4, 2, 2)
    both = _or(pairs[..., 0] & 15, pairs[..., 1] << _FOUR).transpose(0, 1, 2, 4, 3, 5)
    return _planes(np.ascontiguousarray(both).reshape(len(values), LANES, 2, SET))


def _unpack_codes(data: Bytes) -> Bytes:
    both = _lanes(data).reshape(len(data), LANES, 2, 4, 2, 2).transpose(0, 1, 2, 4, 3, 5)
    return np.stack([both & 15, both >> 4], axis=-1).reshape(len(data), LANES, 4, SET)


def _pack_2(values: Bytes) -> Bytes:
    return _planes(_bytes(np.bitwise_or.reduce((values & 3) << _PAIRS, axis=2, keepdims=True)))


def _unpack_2(data: Bytes) -> Bytes:
    return _bytes((_lanes(data) >> _PAIRS) & 3)


_THIRD_AT: Final = np.array([[0, 1, 4, 5]], np.uint8).T + np.array([2, 0], np.uint8)
"""The bit of set s, of an even and of an odd word: beside the pairs of sets 0 and 2, and after a shift of 1 and 3."""


def _pack_3(values: Bytes) -> Bytes:
    """A word of third bits is of two words of four sets: byte b has those of their bytes b."""
    third = (values >> np.uint8(2)).reshape(len(values), LANES, 4, 2, 2, 4) << _THIRD_AT[:, None, :, None]
    both = np.bitwise_or.reduce(np.bitwise_or.reduce(third, axis=4), axis=2)
    return np.concatenate([_pack_2(values), both.reshape(len(values), -1)], axis=1)


def _unpack_3(data: Bytes) -> Bytes:
    third = (data[:, PLANE_BYTES:].reshape(len(data), LANES, 1, 2, 1, 4) >> _THIRD_AT[:, None, :, None]) & 1
    return _or(_unpack_2(data[:, :PLANE_BYTES]), third.reshape(len(data), LANES, 4, SET) << np.uint8(2))


_THIRDS: Final = np.array([0, 2, 4], np.uint8).reshape(1, 1, 3, 1)


def _pack_6(values: Bytes) -> Bytes:
    return _planes(_or(values[:, :, :3], ((values[:, :, 3:] >> _THIRDS) & 3) << np.uint8(6)))


def _unpack_6(data: Bytes) -> Bytes:
    lanes = _lanes(data)
    last = np.bitwise_or.reduce((lanes >> np.uint8(6)) << _THIRDS, axis=2, keepdims=True)
    return np.concatenate([lanes & 63, last], axis=2)


# --- what the integers mean: (..., weights) float32 -------------------------------------------------------------


def _half(data: Bytes) -> Floats:
    """(..., 2) bytes to (..., 1) float32."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _signed(data: Bytes) -> Floats:
    return data.view(np.int8).astype(np.float32)


def _value_above(lowest: int, values: Bytes, d: Bytes) -> Floats:
    return _half(d) * (values.astype(np.float32) + np.float32(lowest))


NONLINEAR: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""ggml's kvalues_iq4nl."""


def _value_codes(codes: tuple[int, ...], values: Bytes, d: Bytes) -> Floats:
    return _half(d) * np.array(codes, np.float32)[values]


def _value_iq4_xs(values: Bytes, head: Bytes) -> Floats:
    """d, a pair of bits for each of eight scales of 32 weights, and their nibbles; less 32."""
    pairs = np.concatenate(
        [head[..., 2 + at // 4 : 3 + at // 4] >> np.uint8(at % 4 * 2) & 3 for at in range(8)], axis=-1
    )
    nibbles = np.stack([head[..., 4:] & 15, head[..., 4:] >> _FOUR], axis=-1).reshape(pairs.shape)
    unit = _half(head[..., :2]) * (_or(nibbles, pairs << _FOUR).astype(np.float32) - 32)
    q = np.array(NONLINEAR, np.float32)[values].reshape(*values.shape[:-1], 8, 32)
    return (unit[..., None] * q).reshape(values.shape)


E2M1: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice what the four bits of a float stand for, ggml's kvalues_mxfp4."""


def power(exponent: Bytes) -> Floats:
    """Half of what a byte of exponents (OCP's E8M0) stands for: 2 ** (exponent - 128), exactly."""
    return np.ldexp(np.float32(1), exponent.astype(np.int32) - 128)


def _value_mxfp4(values: Bytes, exponent: Bytes) -> Floats:
    with np.errstate(over="ignore"):
        return power(exponent) * np.array(E2M1, np.float32)[values]


def _value_q8_0(values: Bytes, d: Bytes) -> Floats:
    return _half(d) * _signed(values)


def _value_pairs(values: Bytes, pairs: Bytes) -> Floats:
    return _half(pairs[..., :2]) * values.astype(np.float32) + _half(pairs[..., 2:])


def _value_affine(values: Bytes, head: Bytes) -> Floats:
    """d, dmin, and 12 bytes of eight 6-bit scales and minima, of 32 weights each."""
    a, b, c = head[..., 4:8], head[..., 8:12], head[..., 12:]
    scale = np.concatenate([a & 63, (c & 15) | ((a >> 6) << _FOUR)], axis=-1)
    minimum = np.concatenate([b & 63, (c >> _FOUR) | ((b >> 6) << _FOUR)], axis=-1)
    unit, shift = _half(head[..., :2]) * scale.astype(np.float32), _half(head[..., 2:4]) * minimum.astype(np.float32)
    q = values.reshape(*values.shape[:-1], 8, 32).astype(np.float32)
    return (unit[..., None] * q - shift[..., None]).reshape(values.shape)


def _value_q2_k(values: Bytes, scales: Bytes, pair: Bytes) -> Floats:
    """Of 16 weights each a scale in the low four bits and a minimum in the others."""
    unit = _half(pair[..., :2]) * (scales & 15).astype(np.float32)
    shift = _half(pair[..., 2:]) * (scales >> _FOUR).astype(np.float32)
    q = values.reshape(*values.shape[:-1], 16, 16).astype(np.float32)
    return (unit[..., None] * q - shift[..., None]).reshape(values.shape)


def _value_q3_k(values: Bytes, low: Bytes, high: Bytes, d: Bytes) -> Floats:
    """Of 16 scales low nibbles, of the last eight above those of the first; then four top pairs a byte."""
    nibbles = np.concatenate([low & 15, low >> _FOUR], axis=-1)
    pairs = np.concatenate([high >> np.uint8(2 * at) & 3 for at in range(4)], axis=-1)
    unit = _half(d) * (_or(nibbles, pairs << _FOUR).astype(np.float32) - 32)
    q = values.reshape(*values.shape[:-1], 16, 16).astype(np.float32) - 4
    return (unit[..., None] * q).reshape(values.shape)


def _value_q6_k(values: Bytes, scales: Bytes, d: Bytes) -> Floats:
    unit = _half(d) * _signed(scales)
    q = values.reshape(*values.shape[:-1], 16, 16).astype(np.float32) - 32
    return (unit[..., None] * q).reshape(values.shape)


# --- code books: what an entry is, and where a block has which --------------------------------------------------------


@cache
def book(name: str) -> Bytes:
    """The entries (entries, weights) of a format's code book: which magnitude each weight has."""
    # books.txt: a name, then numbers of four hexadecimal digits; a weight has two or, of IQ3, four bits of them.
    text = (resources.files("tegrad.llm") / "books.txt").read_text().split("\n", 1)[1]
    digits = text.partition(f"{name}\n")[2].partition("\nIQ")[0].replace("\n", "")
    entries, bits = np.frombuffer(bytes.fromhex(digits), ">u2"), 2 if name.startswith("IQ2") else 4
    return _bytes((entries[:, None] >> np.arange(0, 16, bits) & (1 << bits) - 1).astype(np.uint8))


def _view(data: Bytes, kind: str) -> NDArray[Any]:
    return np.ascontiguousarray(data).view(kind)


def _eight_signs(seven: NDArray[Any]) -> Bytes:
    """Of each eight weights seven signs and, made of them, the last: an even number is negative."""
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return _bytes((seven | ((odd ^ odd >> 1) & 1) << 7).astype(np.uint8))


def _signs_and_scales(words: NDArray[Any]) -> tuple[Bytes, NDArray[Any]]:
    """Words (..., n) of four times seven signs and a scale: signs (..., 4n) and scales (..., n)."""
    seven = words[..., None] >> np.array([0, 7, 14, 21], np.uint32) & 127
    return _eight_signs(seven.reshape(*words.shape[:-1], -1)), words >> 28


def _halves_of_bytes(data: Bytes) -> Bytes:
    return _bytes(np.stack([data & 15, data >> _FOUR], axis=-1).reshape(*data.shape[:-1], -1))


Entries: TypeAlias = tuple[NDArray[Any], Bytes, NDArray[Any]]
"""Of blocks: places in the code book (..., entries), bytes of signs (..., 32), and scales (..., 8 or 16)."""


def _entries_iq2_xxs(at: Bytes) -> Entries:
    """Of each 32 weights four bytes of places and a word of signs and scale."""
    index = at.reshape(*at.shape[:-1], 8, 8)[..., :4].reshape(*at.shape[:-1], 32)
    return index, *_signs_and_scales(_view(at, "<u4")[..., 1::2])


def _entries_iq2_xs(at: Bytes, scales: Bytes) -> Entries:
    """Nine bits of place, seven signs."""
    words = _view(at, "<u2")
    return words & 511, _eight_signs(words >> 9), _halves_of_bytes(scales)


def _entries_iq2_s(low: Bytes, signs: Bytes, high: Bytes, scales: Bytes) -> Entries:
    """Eight bits of place, and two above them."""
    two = high[..., None] >> np.array([0, 2, 4, 6], np.uint8) & 3
    return low | two.reshape(low.shape).astype(np.uint16) << 8, signs, _halves_of_bytes(scales)


def _entries_iq3_xxs(at: Bytes, signs: Bytes) -> Entries:
    return at, *_signs_and_scales(_view(signs, "<u4"))


def _entries_iq3_s(at: Bytes, signs: Bytes, high: Bytes, scales: Bytes) -> Entries:
    """Eight bits of place, and one above them."""
    ninth = np.unpackbits(high, axis=-1, bitorder="little")
    return at | ninth.astype(np.uint16) << 8, signs, _halves_of_bytes(scales)


def _value_book(
    name: str, codes: tuple[int, ...], factor: float, entries: Callable[..., Entries], values: Bytes, *fields: Bytes
) -> Floats:
    index, signs, scales = entries(*fields[:-1])
    magnitude = np.array(codes, np.float32)[book(name)][index].reshape(*index.shape[:-1], 256)
    sign = 1 - 2 * np.unpackbits(signs, axis=-1, bitorder="little").astype(np.float32)
    unit = _half(fields[-1]) * (scales.astype(np.float32) * 2 + 1) * np.float32(factor)
    return sign * magnitude * np.repeat(unit, 256 // scales.shape[-1], axis=-1)


# --- what a row says --------------------------------------------------------------------------------------------------

Integers = Literal[
    "NIBBLES", "NIBBLES_AND_FIFTH", "CODES", "TWO_BITS", "TWO_BITS_AND_THIRD", "SIX_BITS", "BYTES", "BOOK"
]
"""How a run's integers lie in its planes; of a code book, in the pieces."""
Scales = Literal[
    "HALVES", "HALF_PAIRS", "SIX_BIT_PAIRS", "FOUR_BIT_PAIRS", "SIX_BITS_OF_32", "SIX_BITS", "INT8", "EXPONENTS", "ODD"
]
"""What its scales are: a half for each 32; that and a half to be added; a block's six-bit scales and minima for each
32; four-bit ones for each 16; six bits for each 32, or for each 16; an int8 for each 16; the exponent of a power of two
for each 32; four bits for each 16 or 32, which stand for odd numbers."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes after the planes, once for every 1 << `shift` lanes; `member` of the kernels' Head holds them."""

    member: Literal["scales", "pairs", "head", "low", "d", "k", "fifth", "third", "at", "signs", "high"]
    bytes: int
    shift: int = 0

    @property
    def segment_bytes(self) -> int:
        """Bytes of a segment."""
        return self.bytes * (LANES >> self.shift)


@dataclass(frozen=True, slots=True)
class Spread:
    """How weights scatter whose blocks are random bits but for d, for tests and measurements."""

    deviation: float
    """Standard deviation of a weight where d is 1."""
    halves: tuple[tuple[int, float], ...]
    """Where the file's block has halves, and how many times d they are: with a minimum the mean is about 0."""
    either_sign: bool = False
    """d has either sign, which balances the mean of integers that are not balanced."""

    exponent: bool = False
    """Instead of a half there is a byte, the exponent of half of a power of two."""

    def scale(self, blocks: Bytes, d: NDArray[Any]) -> None:
        """Store `d` (n, 1) into blocks (n, bytes); powers of two alternate so that the mean square is that of d."""
        if self.exponent:
            fraction, exponent = np.frexp(np.nan_to_num(d))  # d = fraction * 2 ** exponent, the fraction from 1/2 on
            upper = np.arange(len(d))[:, None] * 0.618034 % 1 < (4 * fraction * fraction - 1) / 3
            blocks[:, :1] = np.where(np.isfinite(d), np.clip(exponent - 1 + upper + 128, 0, 254), 255)
            return
        for at, times in self.halves:
            blocks[:, at : at + 2] = (d * times).astype("<f2").view(np.uint8)


@dataclass(frozen=True, slots=True)
class Layout:
    """A block format's two orders: the file's and ours."""

    planes: int
    pieces: tuple[Piece, ...]
    integers: Integers
    scales: Scales
    lowest: int
    """The least integer, less what is subtracted from it."""
    highest: int
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
    """Integers (..., weights) and the fields (..., bytes) to weights (..., weights)."""
    spread: Spread
    codes: tuple[int, ...] = ()
    """Where a kernel is to look them up: what the 16 integers stand for, int8; the magnitudes of a code book."""
    factor: float = 1.0
    """By which a code book's magnitudes are multiplied."""

    @property
    def field_bytes(self) -> list[int]:
        """The places of the fields' bytes in the file's block, field after field."""
        return [at + byte for at, size in zip(self.at, self.fields, strict=True) for byte in range(size)]

    def taken_apart(self, blocks: Bytes) -> tuple[Bytes, list[Bytes]]:
        """Blocks as in the file (n, bytes) as integers (n, weights) and fields (n, bytes)."""
        fields = [blocks[:, at : at + size] for at, size in zip(self.at, self.fields, strict=True)]
        return self.split(np.delete(blocks, self.field_bytes, axis=1)), fields

    def put_together(self, integers: Bytes, fields: Sequence[Bytes]) -> Bytes:
        """The reverse of `taken_apart`."""
        data, own = self.join(integers), self.field_bytes
        blocks = np.empty((len(integers), data.shape[1] + len(own)), np.uint8)
        blocks[:, own] = np.concatenate(fields, axis=1)
        blocks[:, np.delete(np.arange(blocks.shape[1]), own)] = data
        return blocks


@dataclass(frozen=True, slots=True, eq=False)  # one of each: `kind in PLAIN` is asked thousands of times
class BlockType:
    """How ggml packs the elements of a row: `elements` of them in `size` bytes."""

    name: str
    number: int
    """ggml's, in files and in kernels."""
    elements: int
    size: int
    registers: int
    """That a decode product's item in flight takes; of floats, with some of the activations, which come from memory."""
    layout: Layout | None = None
    """None: plain numbers, in the file's order."""

    @property
    def booked(self) -> bool:
        """Whether weights are entries of a code book."""
        return self.layout is not None and self.layout.integers == "BOOK"

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of `columns` elements, which must be a multiple of the block."""
        return columns // self.elements * self.size

    @property
    def segment_bytes(self) -> int:
        """Bytes of 2048 weights."""
        return self.row_bytes(SEGMENT)

    @property
    def run_bytes(self) -> int:
        """Bytes that a stage in shared memory holds for 64 weights."""
        if self.layout is None:
            return self.segment_bytes // LANES
        return SET * self.layout.planes + sum(piece.bytes for piece in self.layout.pieces)


# --- the table --------------------------------------------------------------------------------------------------------


def _same(data: Bytes) -> Bytes:
    return data


def _nibbles(run: int) -> tuple[Callable[[Bytes], Bytes], Callable[[Bytes], Bytes]]:
    return partial(_split_nibbles, run=run), partial(_join_nibbles, run=run)


# fmt: off
def _book(
    name: str, factor: float, magnitudes: tuple[int, ...], pieces: tuple[Piece, ...], at: tuple[int, ...],
    entries: Callable[..., Entries], deviation: float,
) -> Layout:
    """A format whose blocks of 256 are d, at their start, and `pieces` at those bytes, of which come the entries."""
    pieces, most = (*pieces, Piece("d", 4, shift=3)), magnitudes[-1]
    return Layout(
        0, pieces, "BOOK", "ODD", -most, most, tuple(piece.segment_bytes // 8 for piece in pieces), (*at, 0),
        _same, _same, _planes, _lanes, partial(_value_book, name, magnitudes, factor, entries),
        Spread(deviation, ((0, 1.0),)), magnitudes, factor)


_K: Final = Piece("k", 16, shift=2)
_FIFTH: Final = Piece("fifth", 8)

Q6_K: Final = BlockType("Q6_K", 14, 256, 210, 14, Layout(
    3, (Piece("scales", 4), Piece("d", 4, shift=3)), "SIX_BITS", "INT8", -32, 31,
    (16, 2), (192, 208), _split_q6_k, _join_q6_k, _pack_6, _unpack_6, _value_q6_k, Spread(1365.7, ((208, 1.0),))))
Q5_K: Final = BlockType("Q5_K", 13, 256, 176, 14, Layout(
    2, (_FIFTH, _K), "NIBBLES_AND_FIFTH", "SIX_BIT_PAIRS", 0, 31,
    (16,), (0,), _split_q5_k, _join_q5_k, _pack_5, _unpack_5, _value_affine, Spread(526.9, ((0, 1.0), (2, 15.5)))))
Q4_K: Final = BlockType("Q4_K", 12, 256, 144, 12, Layout(
    2, (_K,), "NIBBLES", "SIX_BIT_PAIRS", 0, 15,
    (16,), (0,), *_nibbles(32), _pack_4, _unpack_4, _value_affine, Spread(258.3, ((0, 1.0), (2, 7.5)))))
Q2_K: Final = BlockType("Q2_K", 10, 256, 84, 6, Layout(
    1, (Piece("scales", 4), Piece("d", 4, shift=2)), "TWO_BITS", "FOUR_BIT_PAIRS", 0, 3,
    (16, 4), (0, 80), _split_two_bits, _join_two_bits, _pack_2, _unpack_2, _value_q2_k,
    Spread(13.9, ((80, 1.0), (82, 1.5)))))
Q3_K: Final = BlockType("Q3_K", 11, 256, 110, 9, Layout(
    1, (Piece("third", 8), Piece("low", 8, shift=2), Piece("scales", 4, shift=2), Piece("d", 4, shift=3)),
    "TWO_BITS_AND_THIRD", "SIX_BITS", -4, 3,
    (8, 4, 2), (96, 104, 108), _split_q3_k, _join_q3_k, _pack_3, _unpack_3, _value_q3_k, Spread(43.3, ((108, 1.0),))))
Q8_0: Final = BlockType("Q8_0", 8, 32, 34, 17, Layout(
    4, (Piece("scales", 4),), "BYTES", "HALVES", -128, 127,
    (2,), (0,), _same, _same, _planes, _lanes, _value_q8_0, Spread(73.9, ((0, 1.0),))))
Q4_0: Final = BlockType("Q4_0", 2, 32, 18, 9, Layout(
    2, (Piece("scales", 4),), "NIBBLES", "HALVES", -8, 7,
    (2,), (0,), *_nibbles(16), _pack_4, _unpack_4, partial(_value_above, -8),
    Spread(4.6, ((0, 1.0),), either_sign=True)))
Q4_1: Final = BlockType("Q4_1", 3, 32, 20, 10, Layout(
    2, (Piece("pairs", 8),), "NIBBLES", "HALF_PAIRS", 0, 15,
    (4,), (0,), *_nibbles(16), _pack_4, _unpack_4, _value_pairs, Spread(4.6, ((0, 1.0), (2, -7.5)))))
Q5_0: Final = BlockType("Q5_0", 6, 32, 22, 11, Layout(
    2, (_FIFTH, Piece("scales", 4)), "NIBBLES_AND_FIFTH", "HALVES", -16, 15,
    (2,), (0,), _split_q5_0, _join_q5_0, _pack_5, _unpack_5, partial(_value_above, -16),
    Spread(9.2, ((0, 1.0),), either_sign=True)))
Q5_1: Final = BlockType("Q5_1", 7, 32, 24, 12, Layout(
    2, (_FIFTH, Piece("pairs", 8)), "NIBBLES_AND_FIFTH", "HALF_PAIRS", 0, 31,
    (4,), (0,), _split_q5_0, _join_q5_0, _pack_5, _unpack_5, _value_pairs, Spread(9.2, ((0, 1.0), (2, -15.5)))))
IQ4_XS: Final = BlockType("IQ4_XS", 23, 256, 136, 10, Layout(
    2, (Piece("head", 8, shift=2),), "CODES", "SIX_BITS_OF_32", -127, 113,
    (8,), (0,), *_nibbles(16), _pack_codes, _unpack_codes, _value_iq4_xs, Spread(1293.0, ((0, 1.0),)), NONLINEAR))
MXFP4: Final = BlockType("MXFP4", 39, 32, 17, 9, Layout(
    2, (Piece("scales", 4, shift=1),), "CODES", "EXPONENTS", -12, 12,
    (1,), (0,), *_nibbles(16), _pack_codes, _unpack_codes, _value_mxfp4,
    Spread(5.85, ((0, 1.0),), exponent=True), E2M1))
IQ4_NL: Final = BlockType("IQ4_NL", 20, 32, 18, 9, Layout(
    2, (Piece("scales", 4),), "CODES", "HALVES", -127, 113,
    (2,), (0,), *_nibbles(16), _pack_codes, _unpack_codes, partial(_value_codes, NONLINEAR),
    Spread(69.8, ((0, 1.0),), either_sign=True), NONLINEAR))
_OF_16: Final = Piece("scales", 4, shift=1)
_IQ2: Final = (8, 25, 43)
IQ2_XXS: Final = BlockType("IQ2_XXS", 16, 256, 66, 10, _book(
    "IQ2_XXS", 1 / 8, _IQ2, (Piece("at", 16),), (2,), _entries_iq2_xxs, 53.5))
IQ2_XS: Final = BlockType("IQ2_XS", 17, 256, 74, 10, _book(
    "IQ2_XS", 1 / 8, _IQ2, (Piece("at", 16), _OF_16), (2, 66), _entries_iq2_xs, 55.8))
IQ2_S: Final = BlockType("IQ2_S", 22, 256, 82, 10, _book(
    "IQ2_S", 1 / 8, _IQ2, (Piece("low", 8), Piece("signs", 8), Piece("high", 4, shift=1), _OF_16), (2, 34, 66, 74),
    _entries_iq2_s, 56.3))
IQ3_XXS: Final = BlockType("IQ3_XXS", 18, 256, 98, 12, _book(
    "IQ3_XXS", 1 / 4, (4, 12, 20, 28, 36, 44, 52, 62), (Piece("at", 16), Piece("signs", 8)), (2, 66),
    _entries_iq3_xxs, 142.7))
IQ3_S: Final = BlockType("IQ3_S", 21, 256, 110, 12, _book(
    "IQ3_S", 1, (1, 3, 5, 7, 9, 11, 13, 15),
    (Piece("at", 16), Piece("signs", 8), Piece("high", 4, shift=1), Piece("scales", 4, shift=2)), (2, 74, 66, 106),
    _entries_iq3_s, 140.4))
F16: Final = BlockType("F16", 1, 1, 2, 24)
BF16: Final = BlockType("BF16", 30, 1, 2, 24)
F32: Final = BlockType("F32", 0, 1, 4, 44)
# fmt: on

FORMATS: Final = (
    Q6_K, Q5_K, Q4_K, Q3_K, Q2_K, Q8_0, Q5_1, Q5_0, Q4_1, Q4_0, IQ4_XS, IQ4_NL, MXFP4,
    IQ3_S, IQ3_XXS, IQ2_S, IQ2_XS, IQ2_XXS, F16, BF16, F32,
)  # fmt: skip
"""What we run; the place of each is its number in the program of a step in one launch."""
PACKED: Final = tuple(kind for kind in FORMATS if kind.layout is not None)
PLAIN: Final = tuple(kind for kind in FORMATS if kind.layout is None)
"""Formats without blocks, which keep the file's order."""
BLOCK_TYPES: Final[Mapping[int, BlockType]] = {kind.number: kind for kind in FORMATS}
"""By ggml's type number."""


# --- the same for kernels ---------------------------------------------------------------------------------------------

HEADER: Final = "formats.cuh"
"""The name by which kernels include `header`."""
_WORDS: Final = {4: "unsigned", 8: "uint2", 16: "uint4"}


def header() -> str:
    """The table in C: KIND_X, BYTES_X, BASE_X_scales, ... of every format X, lists of formats, and OF_KIND(BYTES)."""
    lines = ["#pragma once"]
    for what, names in (("INTEGERS", get_args(Integers)), ("SCALES", get_args(Scales))):
        lines += [f"#define {what}_{name} {code}" for code, name in enumerate(("NONE", *names))]
    for kind in FORMATS:
        lines += [f"#define {what}_{kind.name} {value}" for what, value in _constants(kind).items()]
        lines += [f"#define BASE_{kind.name}_{piece.member} {base}" for piece, base in _places(kind)]
        lines += [f"#define HEAD_{kind.name}(Y) {_head(kind)}", f"#ifndef USES_{kind.name}"]
        lines += [f"#define USES_{kind.name} 0", "#endif"]
    for name, kinds in (("EVERY_FORMAT", FORMATS), ("EVERY_PACKED", PACKED), ("EVERY_PLAIN", PLAIN)):
        lines.append(f"#define {name}(X, ...) " + " ".join(f"X({kind.name}, __VA_ARGS__)" for kind in kinds))
    lines.append("#ifdef KIND")
    for kind in FORMATS:
        lines += [f"#if KIND == {kind.number}", f"#define OF_KIND(what) what##_{kind.name}", "#endif"]
    return "\n".join([*lines, "#endif"]) + "\n"


def _constants(kind: BlockType) -> dict[str, object]:
    """What kernels know of a format; a plain one has 16 bytes of a run for a plane."""
    layout, plain = kind.layout, kind.segment_bytes // PLANE_BYTES
    planes, pieces = (plain, 0) if layout is None else (layout.planes, len(layout.pieces))
    return {
        "KIND": kind.number, "BYTES": kind.segment_bytes, "PLANES": planes, "PIECES": planes + pieces,
        "INTEGERS_OF": f"INTEGERS_{layout.integers if layout else 'NONE'}",
        "SCALES_OF": f"SCALES_{layout.scales if layout else 'NONE'}",
        "LOWEST": layout.lowest if layout else 0, "HIGHEST": layout.highest if layout else 0,
        "CODES": _words(layout.codes if layout and not kind.booked else ()),
        "BOOK": _magnitudes(kind) if kind.booked else 0,
    }  # fmt: skip


def _magnitudes(kind: BlockType) -> str:
    """A code book's entries as words of four bytes; one of eight weights is two words."""
    assert kind.layout is not None
    return ",".join(map(str, np.array(kind.layout.codes, np.uint8)[book(kind.name)].view("<u4").reshape(-1).tolist()))


def _words(codes: tuple[int, ...]) -> str:
    """16 codes as four words of four bytes; zeros where there are none."""
    return ", ".join(f"{word:#010x}u" for word in np.array(codes or (0,) * 16, np.int8).view("<u4").tolist())


def _places(kind: BlockType) -> list[tuple[Piece, int]]:
    """The pieces after the planes, and where in a segment each begins."""
    pieces = kind.layout.pieces if kind.layout else ()
    first = PLANE_BYTES * kind.layout.planes if kind.layout else 0
    return list(zip(pieces, accumulate((piece.segment_bytes for piece in pieces), initial=first), strict=False))


def _head(kind: BlockType) -> str:
    """Y(which piece, member of Head, its type, base in the segment, shift) for each piece, the widest load first."""
    planes = kind.layout.planes if kind.layout else 0
    rows = [(piece, f"Y({planes + at}, {piece.member}, {_WORDS[piece.bytes]}, {base}, {piece.shift})")
            for at, (piece, base) in enumerate(_places(kind))]  # fmt: skip
    return " ".join(text for _, text in sorted(rows, key=lambda row: -row[0].bytes))
