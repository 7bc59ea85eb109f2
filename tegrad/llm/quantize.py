"""Rows of float32 to GGML blocks and back: Q4_0, Q8_0, Q4_K, Q5_K and Q6_K.

The block layouts are ggml's (ggml-common.h: block_q4_0 and so on). How good a block is depends on its
scales alone, so the K-quantizers search for them: they try several scales per sub-block, solve the weighted least
squares problem that the rounded integers leave, round the scales as the format stores them, and finally try the
neighbours of the rounded scales, each with the integers that fit it best.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import ArrayLike, NDArray

from tegrad.errors import TegradError

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]

SUPER_BLOCK = 256
"""Weights in a K-quant super-block."""

_CHUNK = 2048
"""Blocks quantized at once: bounds the search's temporaries to some tens of megabytes."""

_TRIALS = np.linspace(-1.0, 1.0, 17, dtype=np.float32)
"""Levels by which a trial scale stretches or shrinks the plain one."""

_EIGHT = np.arange(8, dtype=np.uint8).reshape(1, 8, 1)

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


def _quantize_q8_0(blocks: Floats) -> Bytes:
    scale_bytes, scale = _half(np.abs(blocks).max(axis=-1) / np.float32(127))
    q = _levels(blocks, scale[:, None], -127, 127).astype(np.int8)
    return np.concatenate([scale_bytes, q.view(np.uint8)], axis=1)


def _dequantize_q8_0(data: Bytes) -> Floats:
    return _read_half(data[:, :2]) * data[:, 2:].view(np.int8).astype(np.float32)


# --- Q4_0: fp16 scale, 32 nibbles; x = d * (q - 8), the first 16 in the low nibbles ----------------------------------


def _quantize_q4_0(blocks: Floats) -> Bytes:
    normal, peak = _normalised(blocks)
    scale_bytes, scale = _half(_fit_symmetric(normal, _importance(normal), -8, 7)[:, 0] * peak)
    u = (_levels(blocks, scale[:, None], -8, 7) + 8).astype(np.uint8).reshape(-1, 2, 16)
    return np.concatenate([scale_bytes, u[:, 0] | (u[:, 1] << 4)], axis=1)


def _dequantize_q4_0(data: Bytes) -> Floats:
    q = np.concatenate([data[:, 2:] & 15, data[:, 2:] >> 4], axis=1)
    return _read_half(data[:, :2]) * (q.astype(np.float32) - 8)


# --- Q6_K: 16 sub-blocks of 16; x = d * scale[int8] * (q - 32) --------------------------------------------------------


def _fit_symmetric(x: Floats, w: Floats, low: int, high: int) -> Floats:
    """The scale (..., 1) of each sub-block whose integers in [low, high] leave the least weighted squared error."""
    at = np.abs(x).argmax(axis=-1, keepdims=True)
    extreme: Floats = np.take_along_axis(x, at, axis=-1)
    scale, gain = np.zeros_like(extreme), np.zeros_like(extreme)
    for trial in _TRIALS:
        q = _levels(x, extreme / (low + trial), low, high)
        dot = np.sum(w * x * q, axis=-1, keepdims=True)
        norm = np.sum(w * q * q, axis=-1, keepdims=True)
        better = dot * dot > gain * norm
        scale = np.where(better, _ratio(dot, norm), scale)
        gain = np.where(better, _ratio(dot * dot, norm), gain)
    return scale


def _quantize_q6_k(blocks: Floats) -> Bytes:
    normal, peak = _normalised(blocks)
    x = normal.reshape(-1, 16, 16)
    w = _importance(x)
    scale = _fit_symmetric(x, w, -32, 31)[..., 0]
    extreme = np.take_along_axis(scale, np.abs(scale).argmax(axis=-1, keepdims=True), axis=-1)
    d_bytes, d = _half(extreme[:, 0] / np.float32(-128) * peak)
    d = _ratio(d, peak)[:, None]

    nearest = _levels(scale, d, -128, 127)
    best, steps = np.full(scale.shape, np.inf, np.float32), nearest
    q = np.zeros_like(x)
    for delta in (0, -1, 1):
        trial = np.clip(nearest + delta, -128, 127)
        unit = (d * trial)[..., None]
        levels = _levels(x, unit, -32, 31)
        error = np.sum(w * (x - unit * levels) ** 2, axis=-1)
        better = error < best
        best = np.where(better, error, best)
        steps = np.where(better, trial, steps)
        q = np.where(better[..., None], levels, q)

    u = (q + 32).astype(np.uint8).reshape(-1, 2, 4, 32)  # two halves of 128, each four runs of 32
    low = (u[:, :, :2] & 15) | ((u[:, :, 2:] & 15) << 4)
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    high = np.bitwise_or.reduce((u >> 4) << shift, axis=2)
    n = len(blocks)
    parts = [low.reshape(n, 128), high.reshape(n, 64), steps.astype(np.int8).view(np.uint8), d_bytes]
    return np.concatenate(parts, axis=1)


def _dequantize_q6_k(data: Bytes) -> Floats:
    n = len(data)
    low = data[:, :128].reshape(n, 2, 2, 32)
    high = data[:, 128:192].reshape(n, 2, 1, 32)
    shift = np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)
    u = np.concatenate([low & 15, low >> 4], axis=2) | (((high >> shift) & 3) << 4)
    unit = _read_half(data[:, 208:210]) * data[:, 192:208].view(np.int8).astype(np.float32)
    values: Floats = unit[..., None] * (u.reshape(n, 16, 16).astype(np.float32) - 32)
    return values.reshape(n, SUPER_BLOCK)


# --- Q4_K and Q5_K: 8 sub-blocks of 32; x = d * scale[6 bits] * q - dmin * min[6 bits] --------------------------------


def _fit_affine(x: Floats, w: Floats, high: int) -> tuple[Floats, Floats]:
    """Scale and offset (..., 1), both >= 0, with x ~ scale * q - offset, q in [0, high], of least weighted error."""
    floor = np.minimum(x.min(axis=-1, keepdims=True), 0)
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
        through_zero = shift <= 0  # the format's offset cannot be negative
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


def _unpack_six_bits(data: Bytes) -> tuple[Bytes, Bytes]:
    first, second, third = data[:, :4], data[:, 4:8], data[:, 8:]
    scale = np.concatenate([first & 63, (third & 15) | ((first >> 6) << 4)], axis=1)
    offset = np.concatenate([second & 63, (third >> 4) | ((second >> 6) << 4)], axis=1)
    return scale, offset


def _quantize_affine(blocks: Floats, high: int) -> tuple[Bytes, Bytes]:
    """The 16 bytes of d, dmin and scales of each block (n, 16), and its integers in [0, high] as (n, 8, 32)."""
    normal, peak = _normalised(blocks)
    x = normal.reshape(-1, 8, 32)
    w = _importance(x)
    scale, offset = (fit[..., 0] for fit in _fit_affine(x, w, high))
    d_bytes, d = _half(scale.max(axis=-1) / np.float32(63) * peak)
    m_bytes, m = _half(offset.max(axis=-1) / np.float32(63) * peak)
    d, m = _ratio(d, peak)[:, None], _ratio(m, peak)[:, None]

    near_scale, near_offset = _levels(scale, d, 0, 63), _levels(offset, m, 0, 63)
    best, scales, offsets = np.full(scale.shape, np.inf, np.float32), near_scale, near_offset
    q = np.zeros_like(x)
    for step_scale in (0, -1, 1):
        for step_offset in (0, -1, 1):
            s, o = np.clip(near_scale + step_scale, 0, 63), np.clip(near_offset + step_offset, 0, 63)
            unit, shift = (d * s)[..., None], (m * o)[..., None]
            levels = _levels(x + shift, unit, 0, high)
            error = np.sum(w * (x - unit * levels + shift) ** 2, axis=-1)
            better = error < best
            best = np.where(better, error, best)
            scales, offsets = np.where(better, s, scales), np.where(better, o, offsets)
            q = np.where(better[..., None], levels, q)

    six = _pack_six_bits(scales.astype(np.uint8), offsets.astype(np.uint8))
    return np.concatenate([d_bytes, m_bytes, six], axis=1), q.astype(np.uint8)


def _dequantize_affine(head: Bytes, q: Bytes) -> Floats:
    """Blocks (n, 256) of the two results of `_quantize_affine`."""
    scale, offset = _unpack_six_bits(head[:, 4:16])
    unit = (_read_half(head[:, :2]) * scale.astype(np.float32))[..., None]
    shift = (_read_half(head[:, 2:4]) * offset.astype(np.float32))[..., None]
    return (unit * q.astype(np.float32) - shift).reshape(-1, SUPER_BLOCK)


def _or(a: NDArray[Any], b: NDArray[Any]) -> Bytes:
    """a | b, whose type numpy's stubs widen."""
    both: Bytes = np.bitwise_or(a, b)
    return both


def _pack_nibbles(q: Bytes) -> Bytes:
    """(n, 8, 32) to 128 bytes: each run of 32 holds two sub-blocks, the first in the low bits."""
    u = (q & 15).reshape(-1, 4, 2, 32)
    return _or(u[:, :, 0], u[:, :, 1] << np.uint8(4)).reshape(-1, 128)


def _unpack_nibbles(data: Bytes) -> Bytes:
    runs = data.reshape(-1, 4, 1, 32)
    return np.concatenate([runs & 15, runs >> 4], axis=2).reshape(-1, 8, 32)


def _quantize_q4_k(blocks: Floats) -> Bytes:
    head, q = _quantize_affine(blocks, 15)
    return np.concatenate([head, _pack_nibbles(q)], axis=1)


def _dequantize_q4_k(data: Bytes) -> Floats:
    return _dequantize_affine(data[:, :16], _unpack_nibbles(data[:, 16:]))


def _quantize_q5_k(blocks: Floats) -> Bytes:
    head, q = _quantize_affine(blocks, 31)
    fifth = np.bitwise_or.reduce((q >> 4) << _EIGHT, axis=1)  # bit s of byte l: weight l of sub-block s
    return np.concatenate([head, fifth, _pack_nibbles(q)], axis=1)


def _dequantize_q5_k(data: Bytes) -> Floats:
    fifth = (data[:, None, 16:48] >> _EIGHT) & 1
    return _dequantize_affine(data[:, :16], _or(_unpack_nibbles(data[:, 48:]), fifth << np.uint8(4)))


def _read_half(data: Bytes) -> Floats:
    """Two bytes (n, 2) as fp16, float32 (n, 1)."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


# --- the formats ------------------------------------------------------------------------------------------------------


class BlockFormat(NamedTuple):
    """One GGML type: weights and bytes per block, and the functions between (blocks, weights) and (blocks, bytes)."""

    weights: int
    size: int
    quantize: Callable[[Floats], Bytes]
    dequantize: Callable[[Bytes], Floats]


FORMATS: dict[GGMLQuantizationType, BlockFormat] = {
    GGMLQuantizationType.Q4_0: BlockFormat(32, 18, _quantize_q4_0, _dequantize_q4_0),
    GGMLQuantizationType.Q8_0: BlockFormat(32, 34, _quantize_q8_0, _dequantize_q8_0),
    GGMLQuantizationType.Q4_K: BlockFormat(SUPER_BLOCK, 144, _quantize_q4_k, _dequantize_q4_k),
    GGMLQuantizationType.Q5_K: BlockFormat(SUPER_BLOCK, 176, _quantize_q5_k, _dequantize_q5_k),
    GGMLQuantizationType.Q6_K: BlockFormat(SUPER_BLOCK, 210, _quantize_q6_k, _dequantize_q6_k),
}
"""The quantized types that this module writes and reads."""


def quantize(array: ArrayLike, qtype: GGMLQuantizationType) -> Bytes:
    """Quantize `array` (..., n) along its last axis.

    Returns uint8 (..., n / weights * size). Raises QuantizeError for a type that is not in FORMATS, a row length that
    is no multiple of the block's weights, a value that is not finite, and a scale beyond fp16.
    """
    form = _format(qtype)
    data = np.asarray(array, dtype=np.float32)
    if data.ndim == 0 or data.shape[-1] % form.weights:
        raise QuantizeError(f"{qtype.name} needs rows of a multiple of {form.weights} weights, not shape {data.shape}")
    if not np.isfinite(data).all():
        raise QuantizeError(f"{qtype.name} cannot hold infinities or NaN: clean the tensor before quantizing it")
    blocks = data.reshape(-1, form.weights)
    out = np.empty((len(blocks), form.size), np.uint8)
    for start in range(0, len(blocks), _CHUNK):
        out[start : start + _CHUNK] = form.quantize(blocks[start : start + _CHUNK])
    return out.reshape(*data.shape[:-1], data.shape[-1] // form.weights * form.size)


def dequantize(data: ArrayLike, qtype: GGMLQuantizationType) -> Floats:
    """The float32 values (..., n) of uint8 blocks (..., bytes per row); raises QuantizeError like `quantize`."""
    form = _format(qtype)
    raw = np.asarray(data, dtype=np.uint8)
    if raw.ndim == 0 or raw.shape[-1] % form.size:
        raise QuantizeError(f"{qtype.name} rows are a multiple of {form.size} bytes, not shape {raw.shape}")
    values = form.dequantize(np.ascontiguousarray(raw).reshape(-1, form.size))
    return values.reshape(*raw.shape[:-1], raw.shape[-1] // form.size * form.weights)


def _format(qtype: GGMLQuantizationType) -> BlockFormat:
    if qtype not in FORMATS:
        known = ", ".join(known.name for known in FORMATS)
        raise QuantizeError(f"no quantizer for {getattr(qtype, 'name', qtype)}: use one of {known}")
    return FORMATS[qtype]
