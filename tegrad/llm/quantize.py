"""Rows of float32 to GGML blocks and back.

`formats` has their layouts. How good a block is depends on its scales alone, so the K-quantizers search for them: they
try several scales per sub-block, solve the weighted least squares problem that the rounded integers leave, round the
scales as the format stores them, and finally try the neighbours of the rounded scales, each with the integers that fit
it best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import ArrayLike, NDArray

from tegrad.errors import TegradError
from tegrad.llm.formats import (
    E2M1,
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
    Bytes,
    Floats,
    Layout,
    book,
    power,
)

Quantized: TypeAlias = tuple[Bytes, list[Bytes]]
"""Integers (n, weights) and fields (n, bytes) of blocks, as `Layout.put_together` takes them."""

SUPER_BLOCK = 256
"""Weights in a K-quant super-block."""

_CHUNK = 2048
"""Blocks quantized at once: bounds the search's temporaries to some tens of megabytes."""

_TRIALS = np.linspace(-1.0, 1.0, 17, dtype=np.float32)
"""Levels by which a trial scale stretches or shrinks the plain one."""

_VANISHING = np.float32(2.0**-26)
"""Below half of fp16's smallest number, which is the smallest that a block can hold, a value is zero."""


class QuantizeError(TegradError):
    """A tensor cannot be stored in the wanted block format."""


# --- rounding and packing ---------------------------------------------------------------------------------------------


def _half(values: Floats) -> tuple[Bytes, Floats]:
    """`values` (n,) as little-endian fp16 bytes (n, 2), and as the float32 that a reader gets.

    Subnormals are rounded away from zero: rounded down, they would push the integers beyond their range.
    """
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise QuantizeError(
            f"a block scale of {np.abs(values).max():.3g} exceeds fp16's 65504: scale the tensor down or keep it F32"
        )
    short = (np.abs(values) < 2.0**-14) & (np.abs(half.astype(np.float32)) < np.abs(values))
    half = np.where(short, np.nextafter(half, np.copysign(np.float16(np.inf), values.astype(np.float16))), half)
    return half.astype("<f2").view(np.uint8).reshape(-1, 2), half.astype(np.float32)


def _ratio(numerator: Floats, denominator: Floats) -> Floats:
    """Quotient, 0 where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator != 0)


def _levels(x: Floats, scale: Floats, low: int, high: int) -> Floats:
    """`x` in units of `scale`, rounded into [low, high]; 0 (or the bound nearest to it) where the scale is 0."""
    return np.clip(np.rint(_ratio(x, np.broadcast_to(scale, x.shape))), low, high)


def _normalised(blocks: Floats) -> tuple[Floats, Floats]:
    """Blocks divided by their largest magnitude, which is returned too (n,), so that the search cannot overflow."""
    peak: Floats = np.abs(blocks).max(axis=-1)
    peak = np.where(peak < _VANISHING, np.float32(0), peak)
    return _ratio(blocks, np.broadcast_to(peak[:, None], blocks.shape)), peak


def _importance(x: Floats) -> Floats:
    """Weight of each value's squared error: large weights matter more, small ones still count."""
    rms: Floats = np.sqrt(np.mean(x * x, axis=-1, keepdims=True))
    return rms + np.abs(x)


# --- Q8_0: fp16 scale, 32 int8 ----------------------------------------------------------------------------------------


def _quantize_q8_0(blocks: Floats) -> Quantized:
    scale_bytes, scale = _half(np.abs(blocks).max(axis=-1) / np.float32(127))
    return _levels(blocks, scale[:, None], -127, 127).astype(np.int8).view(np.uint8), [scale_bytes]


# --- Q4_0 and Q5_0: fp16 scale, 32 integers; x = d * (q - 8), or d * (q - 16) -----------------------------------------


def _quantize_symmetric(blocks: Floats, low: int) -> Quantized:
    normal, peak = _normalised(blocks)
    scale_bytes, scale = _half(_fit_symmetric(normal, _importance(normal), low, -low - 1)[:, 0] * peak)
    return (_levels(blocks, scale[:, None], low, -low - 1) - low).astype(np.uint8), [scale_bytes]


# --- Q6_K and Q3_K: 16 sub-blocks of 16; x = d * scale[int8] * (q - 32), or d * (scale[6 bits] - 32) * (q - 4) --------


def _extreme(x: Floats) -> Floats:
    """The value of the largest magnitude along the last axis (..., 1)."""
    made: Floats = np.take_along_axis(x, np.abs(x).argmax(axis=-1, keepdims=True), axis=-1)
    return made


def _fit(x: Floats, w: Floats, trials: Iterable[Floats]) -> Floats:
    """The scale (..., 1) of each sub-block that leaves the least weighted squared error with one of the `trials`,
    which are what stands for x."""
    scale, gain = np.zeros_like(x[..., :1]), np.zeros_like(x[..., :1])
    for q in trials:
        dot = np.sum(w * x * q, axis=-1, keepdims=True)
        norm = np.sum(w * q * q, axis=-1, keepdims=True)
        better = dot * dot > gain * norm
        scale = np.where(better, _ratio(dot, norm), scale)
        gain = np.where(better, _ratio(dot * dot, norm), gain)
    return scale


def _fit_symmetric(x: Floats, w: Floats, low: int, high: int) -> Floats:
    """The scale (..., 1) of each sub-block whose integers in [low, high] leave the least weighted squared error."""
    extreme = _extreme(x)
    return _fit(x, w, (_levels(x, extreme / (low + trial), low, high) for trial in _TRIALS))


def _quantize_sixteenths(blocks: Floats, low: int, least: int) -> tuple[Floats, Floats, Bytes]:
    """Integers from `low` on (n, 256), their scales from `least` on (n, 16), and d."""
    high, most = -low - 1, -least - 1
    normal, peak = _normalised(blocks)
    x = normal.reshape(-1, 16, 16)
    w = _importance(x)
    scale = _fit_symmetric(x, w, low, high)[..., 0]
    d_bytes, d = _half(_extreme(scale)[:, 0] / np.float32(least) * peak)
    d = _ratio(d, peak)[:, None]

    nearest = _levels(scale, d, least, most)
    best, steps = np.full(scale.shape, np.inf, np.float32), nearest
    q = np.zeros_like(x)
    for delta in (0, -1, 1):
        trial = np.clip(nearest + delta, least, most)
        unit = (d * trial)[..., None]
        levels = _levels(x, unit, low, high)
        error = np.sum(w * (x - unit * levels) ** 2, axis=-1)
        better = error < best
        best = np.where(better, error, best)
        steps = np.where(better, trial, steps)
        q = np.where(better[..., None], levels, q)

    return q.reshape(-1, SUPER_BLOCK), steps, d_bytes


def _quantize_q6_k(blocks: Floats) -> Quantized:
    q, steps, d = _quantize_sixteenths(blocks, -32, -128)
    return (q + 32).astype(np.uint8), [steps.astype(np.int8).view(np.uint8), d]


def _quantize_q3_k(blocks: Floats) -> Quantized:
    q, steps, d = _quantize_sixteenths(blocks, -4, -32)
    six = (steps + 32).astype(np.uint8)
    low = (six[:, :8] & 15) | ((six[:, 8:] & 15) << 4)
    high = np.bitwise_or.reduce((six >> 4).reshape(-1, 4, 4) << np.array([[0], [2], [4], [6]], np.uint8), axis=1)
    return (q + 4).astype(np.uint8), [low, high, d]


# --- Q4_K and Q5_K: 8 sub-blocks of 32; x = d * scale[6 bits] * q - dmin * min[6 bits]. Q2_K: 16 of 16, 4 bits --------


def _fit_affine(x: Floats, w: Floats, high: int, *, free: bool = False) -> tuple[Floats, Floats]:
    """Scale and offset (..., 1), both >= 0, with x ~ scale * q - offset, q in [0, high], of least weighted error.

    Where `free`, the offset may be negative.
    """
    floor = x.min(axis=-1, keepdims=True)
    floor = floor if free else np.minimum(floor, 0)
    span = x.max(axis=-1, keepdims=True) - floor
    sw, swx = np.sum(w, axis=-1, keepdims=True), np.sum(w * x, axis=-1, keepdims=True)
    scale, offset = span / high, -floor
    plain = scale * _levels(x - floor, scale, 0, high) - offset
    best = np.sum(w * (x - plain) ** 2, axis=-1, keepdims=True)
    for trial in _TRIALS:
        q = _levels(x - floor, span / (high + trial), 0, high)
        swq = np.sum(w * q, axis=-1, keepdims=True)
        swqq = np.sum(w * q * q, axis=-1, keepdims=True)
        swqx = np.sum(w * q * x, axis=-1, keepdims=True)
        slope = _ratio(sw * swqx - swq * swx, sw * swqq - swq * swq)
        shift = _ratio(swq * swqx - swqq * swx, sw * swqq - swq * swq)
        through_zero = (shift <= 0) & (not free)  # a K-quant's offset cannot be negative
        slope = np.maximum(np.where(through_zero, _ratio(swqx, swqq), slope), 0)
        shift = np.where(through_zero, np.float32(0), shift)
        error = np.sum(w * (x - slope * q + shift) ** 2, axis=-1, keepdims=True)
        better = error < best
        best = np.where(better, error, best)
        scale, offset = np.where(better, slope, scale), np.where(better, shift, offset)
    return scale, offset


def _pack_six_bits(scale: Bytes, offset: Bytes) -> Bytes:
    """Eight 6-bit scales and eight 6-bit offsets in the 12 bytes of block_q4_K.scales."""
    first = scale[:, :4] | ((scale[:, 4:] >> 4) << 6)
    second = offset[:, :4] | ((offset[:, 4:] >> 4) << 6)
    third = (scale[:, 4:] & 15) | ((offset[:, 4:] & 15) << 4)
    return np.concatenate([first, second, third], axis=1)


def _quantize_groups(blocks: Floats, group: int, high: int, most: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Integers in [0, high] (n, 256), scales and minima of each group in [0, most], and d and dmin (n, 4)."""
    normal, peak = _normalised(blocks)
    x = normal.reshape(-1, SUPER_BLOCK // group, group)
    w = _importance(x)
    scale, offset = (fit[..., 0] for fit in _fit_affine(x, w, high))
    d_bytes, d = _half(scale.max(axis=-1) / np.float32(most) * peak)
    m_bytes, m = _half(offset.max(axis=-1) / np.float32(most) * peak)
    d, m = _ratio(d, peak)[:, None], _ratio(m, peak)[:, None]

    near_scale, near_offset = _levels(scale, d, 0, most), _levels(offset, m, 0, most)
    best, scales, offsets = np.full(scale.shape, np.inf, np.float32), near_scale, near_offset
    q = np.zeros_like(x)
    for step_scale in (0, -1, 1):
        for step_offset in (0, -1, 1):
            s, o = np.clip(near_scale + step_scale, 0, most), np.clip(near_offset + step_offset, 0, most)
            unit, shift = (d * s)[..., None], (m * o)[..., None]
            levels = _levels(x + shift, unit, 0, high)
            error = np.sum(w * (x - unit * levels + shift) ** 2, axis=-1)
            better = error < best
            best = np.where(better, error, best)
            scales, offsets = np.where(better, s, scales), np.where(better, o, offsets)
            q = np.where(better[..., None], levels, q)

    integers, pair = q.astype(np.uint8).reshape(-1, SUPER_BLOCK), np.concatenate([d_bytes, m_bytes], axis=1)
    return integers, scales.astype(np.uint8), offsets.astype(np.uint8), pair


def _quantize_affine(blocks: Floats, high: int) -> Quantized:
    q, scales, minima, pair = _quantize_groups(blocks, 32, high, 63)
    return q, [np.concatenate([pair, _pack_six_bits(scales, minima)], axis=1)]


def _quantize_q2_k(blocks: Floats) -> Quantized:
    q, scales, minima, pair = _quantize_groups(blocks, 16, 3, 15)
    return q, [scales | (minima << np.uint8(4)), pair]


# --- Q4_1 and Q5_1: fp16 scale and minimum, 32 integers as in Q4_0 and Q5_0; x = d * q + m ----------------------------


def _quantize_pairs(blocks: Floats, high: int) -> Quantized:
    normal, peak = _normalised(blocks)
    scale, offset = _fit_affine(normal, _importance(normal), high, free=True)
    d_bytes, d = _half(scale[:, 0] * peak)
    m_bytes, m = _half(-offset[:, 0] * peak)
    levels = _levels(blocks - m[:, None], d[:, None], 0, high)
    return levels.astype(np.uint8), [np.concatenate([d_bytes, m_bytes], axis=1)]


# --- IQ4_NL: fp16 scale, 32 codes; x = d * code. IQ4_XS: 8 of them; x = d * (scale[6 bits] - 32) * code ---------------


def _nearest(x: Floats, scale: Floats, codes: Floats) -> NDArray[np.int64]:
    """The places of the codes, which rise, that come nearest to `x` in units of `scale`."""
    return np.searchsorted((codes[1:] + codes[:-1]) / 2, _ratio(x, np.broadcast_to(scale, x.shape)))


def _fit_codes(x: Floats, w: Floats, codes: Floats) -> Floats:
    """The scale (..., 1) of each group whose codes leave the least weighted squared error."""
    extreme = _extreme(x)
    return _fit(x, w, (codes[_nearest(x, extreme / codes[0] * trial, codes)] for trial in 1 + _TRIALS / 8))


def _quantize_iq4_nl(blocks: Floats) -> Quantized:
    codes = np.array(NONLINEAR, np.float32)
    normal, peak = _normalised(blocks)
    d_bytes, d = _half(_fit_codes(normal, _importance(normal), codes)[:, 0] * peak)
    return _nearest(blocks, d[:, None], codes).astype(np.uint8), [d_bytes]


def _quantize_iq4_xs(blocks: Floats) -> Quantized:
    codes = np.array(NONLINEAR, np.float32)
    normal, peak = _normalised(blocks)
    x = normal.reshape(-1, 8, 32)
    scale = _fit_codes(x, _importance(x), codes)[..., 0]
    d_bytes, d = _half(_extreme(scale)[:, 0] / np.float32(-32) * peak)
    steps = _levels(scale, _ratio(d, peak)[:, None], -32, 31)
    unit = _ratio(d, peak)[:, None] * steps
    six = (steps + 32).astype(np.uint8)
    pairs = np.bitwise_or.reduce((six >> 4).reshape(-1, 2, 4) << np.array([0, 2, 4, 6], np.uint8), axis=2)
    nibbles = (six[:, 0::2] & 15) | ((six[:, 1::2] & 15) << 4)
    at = _nearest(x, unit[..., None], codes).astype(np.uint8).reshape(-1, SUPER_BLOCK)
    return at, [np.concatenate([d_bytes, pairs, nibbles], axis=1)]


# --- MXFP4: the exponent of a power of two, 32 codes; x = 2 ** (exponent - 128) * code --------------------------------


def _quantize_mxfp4(blocks: Floats) -> Quantized:
    """The larger of both powers whose codes reach the largest weight, or the one below, where that errs less."""
    order = np.argsort(E2M1, kind="stable")
    codes = np.array(E2M1, np.float32)[order]
    peak: Floats = np.abs(blocks).max(axis=-1)
    if (peak > 2.0**127).any():
        raise QuantizeError(f"a weight of {peak.max():.3g} is beyond MXFP4: scale the tensor down or keep it F32")
    top = np.clip(np.ceil(np.log2(np.maximum(peak, 1e-38) / 12)) + 128, 0, 255)
    best, exponent, at = np.full(peak.shape, np.inf), top, np.zeros(blocks.shape, np.int64)
    for trial in (top, np.maximum(top - 1, 0)):
        unit = power(trial.astype(np.uint8))[:, None]
        places = _nearest(blocks, unit, codes)
        error = np.sum((blocks - unit * codes[places]) ** 2, axis=-1, dtype=np.float64)
        better = error < best
        best, exponent = np.where(better, error, best), np.where(better, trial, exponent)
        at = np.where(better[:, None], places, at)
    return order[at].astype(np.uint8), [exponent.astype(np.uint8)[:, None]]


# --- code books: four or eight magnitudes at once, a sign each; x = d * factor * (2 * scale + 1) * magnitude ----------

_AT_ONCE = 64
"""Blocks that are compared with a whole book at once."""


@dataclass(frozen=True, slots=True)
class _Booked:
    """How blocks of a format with a code book are made."""

    kind: BlockType
    group: int
    """Weights that share a scale."""
    even: bool
    """Of each eight weights an even number is negative."""
    fields: Callable[[NDArray[Any], Bytes, Bytes], list[Bytes]]
    """Places (n, entries), signs (n, 32) and scales (n, 8 or 16) as bytes of the block but for d."""

    def __call__(self, blocks: Floats) -> Quantized:
        parts = [self._some(blocks[at : at + _AT_ONCE]) for at in range(0, len(blocks), _AT_ONCE)]
        return np.zeros((len(blocks), 0), np.uint8), [np.concatenate(field) for field in zip(*parts, strict=True)]

    def _some(self, blocks: Floats) -> list[Bytes]:
        normal, peak = _normalised(blocks)
        eights = normal.reshape(-1, 8)
        negative = eights < 0
        if self.even:
            least = np.abs(eights).argmin(axis=1)
            negative[np.arange(len(eights)), least] ^= negative.sum(axis=1) % 2 == 1
        layout = self.kind.layout
        assert layout is not None
        entries = np.array(layout.codes, np.float32)[book(self.kind.name)]
        x = np.where(negative, -eights, eights).reshape(-1, entries.shape[1])
        twice, squares = x @ (2 * entries.T), np.sum(entries * entries, axis=1)
        groups = (len(blocks), 256 // self.group, -1)  # and entries of each

        def nearest(unit: Floats) -> tuple[NDArray[np.int64], Floats]:
            """The entries that are nearest where groups have such scales (n, groups), and the groups' errors."""
            each = np.repeat(unit.reshape(-1, 1), self.group // entries.shape[1], axis=0)
            cost = each * squares
            cost -= twice
            at = cost.argmin(axis=1)
            return at, (each * np.take_along_axis(cost, at[:, None], axis=1)).reshape(groups).sum(axis=-1)

        top = np.abs(normal).reshape(groups).max(axis=-1) / entries.max()
        scale, gain = np.zeros_like(top), np.zeros_like(top)
        for trial in (0.9, 1.0, 1.1, 1.25, 1.7, entries.max() / entries.min()):
            at, _ = nearest(top * np.float32(trial))
            dot = np.take_along_axis(twice, at[:, None], axis=1).reshape(groups).sum(axis=-1) / 2
            norm = squares[at].reshape(groups).sum(axis=-1)
            better = (dot > 0) & (dot * dot > gain * norm)
            scale = np.where(better, dot / norm, scale)
            gain = np.where(better, dot * dot / norm, gain)

        d_bytes, d = _half(scale.max(axis=-1) / np.float32(31 * layout.factor) * peak)
        unit = _ratio(d, peak)[:, None] * np.float32(layout.factor)
        near = _levels(scale / 2 - unit / 2, np.broadcast_to(unit, scale.shape), 0, 15)
        best, steps, index = np.full(scale.shape, np.inf, np.float32), near, np.zeros(len(x), np.int64)
        for delta in (0, -1, 1):
            trial_steps = np.clip(near + delta, 0, 15)
            at, cost = nearest(unit * (2 * trial_steps + 1))
            better = cost < best
            best, steps = np.where(better, cost, best), np.where(better, trial_steps, steps)
            index = np.where(np.repeat(better.reshape(-1), self.group // entries.shape[1]), at, index)

        signs = np.packbits(negative, axis=1, bitorder="little").reshape(len(blocks), 32)
        return [*self.fields(index.reshape(len(blocks), -1), signs, steps.astype(np.uint8)), d_bytes]


def _words_of(signs: Bytes, scales: Bytes) -> Bytes:
    """Words (n, 8) of four times seven signs and a scale, as bytes (n, 8, 4)."""
    seven = (signs & 127).reshape(-1, 8, 4).astype(np.uint32) << np.array([0, 7, 14, 21], np.uint32)
    words = np.bitwise_or.reduce(seven, axis=-1) | scales.astype(np.uint32) << np.uint32(28)
    made: Bytes = words.astype("<u4")[..., None].view(np.uint8)
    return made


def _nibbles(scales: Bytes) -> Bytes:
    return scales[:, 0::2] | scales[:, 1::2] << np.uint8(4)


def _fields_iq2_xxs(index: NDArray[Any], signs: Bytes, scales: Bytes) -> list[Bytes]:
    both = np.concatenate([index.astype(np.uint8).reshape(-1, 8, 4), _words_of(signs, scales)], axis=2)
    return [both.reshape(-1, 64)]


def _fields_iq2_xs(index: NDArray[Any], signs: Bytes, scales: Bytes) -> list[Bytes]:
    both = index.astype("<u2") | (signs & 127).astype("<u2") << np.uint16(9)
    return [both.view(np.uint8), _nibbles(scales)]


def _fields_iq2_s(index: NDArray[Any], signs: Bytes, scales: Bytes) -> list[Bytes]:
    high = np.bitwise_or.reduce((index >> 8).reshape(-1, 8, 4) << np.array([0, 2, 4, 6]), axis=-1)
    return [index.astype(np.uint8), signs, high.astype(np.uint8), _nibbles(scales)]


def _fields_iq3_xxs(index: NDArray[Any], signs: Bytes, scales: Bytes) -> list[Bytes]:
    return [index.astype(np.uint8), _words_of(signs, scales).reshape(-1, 32)]


def _fields_iq3_s(index: NDArray[Any], signs: Bytes, scales: Bytes) -> list[Bytes]:
    high = np.packbits(index >> 8, axis=1, bitorder="little")
    return [index.astype(np.uint8), signs, high, _nibbles(scales)]


_BOOKED: Final = (
    _Booked(IQ2_XXS, 32, True, _fields_iq2_xxs),
    _Booked(IQ2_XS, 16, True, _fields_iq2_xs),
    _Booked(IQ2_S, 16, False, _fields_iq2_s),
    _Booked(IQ3_XXS, 32, True, _fields_iq3_xxs),
    _Booked(IQ3_S, 32, False, _fields_iq3_s),
)

# --- the formats ------------------------------------------------------------------------------------------------------


_QUANTIZERS: Final[Mapping[BlockType, Callable[[Floats], Quantized]]] = {
    Q4_0: partial(_quantize_symmetric, low=-8), Q5_0: partial(_quantize_symmetric, low=-16),
    Q4_1: partial(_quantize_pairs, high=15), Q5_1: partial(_quantize_pairs, high=31),
    IQ4_NL: _quantize_iq4_nl, IQ4_XS: _quantize_iq4_xs, MXFP4: _quantize_mxfp4, Q8_0: _quantize_q8_0,
    Q2_K: _quantize_q2_k, Q3_K: _quantize_q3_k, Q6_K: _quantize_q6_k,
    Q4_K: partial(_quantize_affine, high=15), Q5_K: partial(_quantize_affine, high=31),
    **{booked.kind: booked for booked in _BOOKED},
}  # fmt: skip
FORMATS: Final = {GGMLQuantizationType(kind.number): kind for kind in _QUANTIZERS}
"""The quantized types that this module writes and reads."""


def quantize(array: ArrayLike, qtype: GGMLQuantizationType) -> Bytes:
    """Quantize `array` (..., n) along its last axis.

    Returns uint8 (..., n / weights * size). Raises QuantizeError for a type that is not in FORMATS, a row length that
    is no multiple of the block's weights, a value that is not finite, and a scale beyond fp16.
    """
    kind, layout = _format(qtype)
    data = np.asarray(array, dtype=np.float32)
    if data.ndim == 0 or data.shape[-1] % kind.elements:
        raise QuantizeError(f"{qtype.name} needs rows of a multiple of {kind.elements} weights, not shape {data.shape}")
    if not np.isfinite(data).all():
        raise QuantizeError(f"{qtype.name} cannot hold infinities or NaN: clean the tensor before quantizing it")
    blocks = data.reshape(-1, kind.elements)
    out = np.empty((len(blocks), kind.size), np.uint8)
    for start in range(0, len(blocks), _CHUNK):
        out[start : start + _CHUNK] = layout.put_together(*_QUANTIZERS[kind](blocks[start : start + _CHUNK]))
    return out.reshape(*data.shape[:-1], kind.row_bytes(data.shape[-1]))


def dequantize(data: ArrayLike, qtype: GGMLQuantizationType) -> Floats:
    """The float32 values (..., n) of uint8 blocks (..., bytes per row); raises QuantizeError like `quantize`."""
    kind, layout = _format(qtype)
    raw = np.asarray(data, dtype=np.uint8)
    if raw.ndim == 0 or raw.shape[-1] % kind.size:
        raise QuantizeError(f"{qtype.name} rows are a multiple of {kind.size} bytes, not shape {raw.shape}")
    integers, fields = layout.taken_apart(np.ascontiguousarray(raw).reshape(-1, kind.size))
    return layout.value(integers, *fields).reshape(*raw.shape[:-1], raw.shape[-1] // kind.size * kind.elements)


def _format(qtype: GGMLQuantizationType) -> tuple[BlockType, Layout]:
    if qtype not in FORMATS or (layout := FORMATS[qtype].layout) is None:
        known = ", ".join(known.name for known in FORMATS)
        raise QuantizeError(f"no quantizer for {getattr(qtype, 'name', qtype)}: use one of {known}")
    return FORMATS[qtype], layout
