"""The block quantizers: readable by gguf, tight for ordinary weights, safe for odd ones."""

from typing import Any

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tegrad.llm.formats import Layout
from tegrad.llm.quantize import FORMATS, QuantizeError, dequantize, quantize

Q4_0, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0
Q4_K, Q5_K, Q6_K = GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K, GGMLQuantizationType.Q6_K
TYPES = pytest.mark.parametrize("qtype", list(FORMATS), ids=lambda t: t.name)


def levels(layout: Layout) -> float:
    """Steps between the least and the largest integer; of codes, such as their largest one."""
    steps = np.diff(np.sort(layout.codes)) if layout.codes else np.ones(1)
    return (layout.highest - layout.lowest) / steps.max()


LEVELS = {qtype: levels(kind.layout) for qtype, kind in FORMATS.items()} | {Q8_0: 254}
GROUP = {Q4_0: 32, Q8_0: 32, Q4_K: 32, Q5_K: 32, Q6_K: 16}


BOOKED = {qtype: qtype.name[4:] != "S" for qtype, kind in FORMATS.items() if kind.booked}
"""Several weights at once are one of few choices; whether one of eight may have to have the wrong sign."""


def relative_error(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.sqrt(np.mean((x - y) ** 2) / np.mean(x**2)))


def plain(x: np.ndarray, qtype: GGMLQuantizationType) -> np.ndarray:
    """The same number of levels spread evenly over each group's range, with exact scales: no search, no rounding."""
    group = x.reshape(-1, GROUP[qtype])
    if qtype in (Q4_K, Q5_K):
        low, high = np.minimum(group.min(1, keepdims=True), 0), group.max(1, keepdims=True)
        top = LEVELS[qtype]
        return (np.rint((group - low) / (high - low) * top) / top * (high - low) + low).reshape(x.shape)
    unit = np.abs(group).max(1, keepdims=True) / (LEVELS[qtype] // 2)
    return (np.rint(group / unit) * unit).reshape(x.shape)


def near(qtype: GGMLQuantizationType) -> float:
    """How near to a block's largest weight a level lies; scales that are powers of two leave half a step."""
    return 0.5 / 3 if FORMATS[qtype].layout.spread.exponent else 2e-2


@TYPES
def test_format_sizes_are_ggmls(qtype):
    assert (FORMATS[qtype].elements, FORMATS[qtype].size) == GGML_QUANT_SIZES[qtype]


@TYPES
def test_gguf_reads_what_we_write(qtype):
    x = np.random.default_rng(1).standard_normal((3, 5, 512)).astype(np.float32)
    data = quantize(x, qtype)
    assert data.dtype == np.uint8
    assert data.shape == (3, 5, 512 // FORMATS[qtype].elements * FORMATS[qtype].size)
    np.testing.assert_array_equal(dequantize(data, qtype), quants.dequantize(data, qtype))


@TYPES
def test_dequantize_equals_gguf_on_every_bit_pattern(qtype):
    rng = np.random.default_rng(2)
    data = rng.integers(0, 256, (4, FORMATS[qtype].size * 64), dtype=np.uint8)
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(dequantize(data, qtype), quants.dequantize(data, qtype))


@TYPES
def test_normal_weights_round_trip_within_the_formats_error(qtype):
    """32 of them span four deviations: one step's deviation is 4 / levels / sqrt(12) of theirs.

    No code of b bits a weight errs by less than 2 ** -b of them.
    """
    bound = {Q4_0: 0.088, Q8_0: 0.0054, Q4_K: 0.072, Q5_K: 0.036, Q6_K: 0.0175}.get(qtype, 1.37 / LEVELS[qtype])
    if qtype in BOOKED:
        bound = 1.5 * 2 ** (-8 * FORMATS[qtype].size / 256)
    x = np.random.default_rng(3).standard_normal((256, 512)).astype(np.float32)
    assert relative_error(x, dequantize(quantize(x, qtype), qtype)) < bound


@pytest.mark.parametrize("qtype", [Q4_0, Q4_K, Q5_K, Q6_K], ids=["Q4_0", "Q4_K", "Q5_K", "Q6_K"])
def test_search_beats_evenly_spread_levels(qtype):
    x = np.random.default_rng(4).standard_t(5, (256, 512)).astype(np.float32)
    searched = relative_error(x, dequantize(quantize(x, qtype), qtype))
    assert searched < 0.97 * relative_error(x, plain(x, qtype))


@pytest.mark.parametrize(
    "qtype", [t for t in FORMATS if "quantize_blocks" in vars(quants._type_traits[t])], ids=lambda t: t.name
)
def test_simple_formats_are_no_worse_than_ggufs_own(qtype):
    x = np.random.default_rng(5).standard_normal((256, 512)).astype(np.float32)
    theirs = quants.dequantize(quants.quantize(x, qtype), qtype)
    assert relative_error(x, dequantize(quantize(x, qtype), qtype)) <= relative_error(x, theirs)


@TYPES
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_error_stays_within_the_blocks_coarsest_step(qtype, data: Any):
    # Of fp16: what is added to the levels, or a scale of which there are half as many levels.
    most = 5e4 if FORMATS[qtype].layout.scales == "HALF_PAIRS" else min(2e6, 5e4 * LEVELS[qtype] / 2)
    magnitude = data.draw(st.sampled_from([1e-9, 1e-3, 1.0, 1e4, most]))
    unit = arrays(np.float32, (2, 256), elements=st.floats(-1, 1, width=32))
    x = data.draw(unit) * np.float32(magnitude)
    y = dequantize(quantize(x, qtype), qtype)
    span = np.abs(x).max(axis=-1, keepdims=True) * 2
    # A super-block shares its fp16 scales, and those cannot go below fp16's smallest number.
    steps = 2 - BOOKED[qtype] if qtype in BOOKED else LEVELS[qtype]
    step = span / steps + 127 * 2.0**-24
    assert (np.abs(x - y) <= 1.05 * step).all()


@TYPES
def test_zeros_stay_zero(qtype):
    x = np.zeros((2, 256), np.float32)
    np.testing.assert_array_equal(dequantize(quantize(x, qtype), qtype), x)


@TYPES
@pytest.mark.parametrize("value", [1.0, -1.0, 0.037, -5e4])
def test_constant_rows_keep_their_value(qtype, value):
    x = np.full((1, 256), value, np.float32)
    np.testing.assert_allclose(dequantize(quantize(x, qtype), qtype), x, rtol=near(qtype))


@TYPES
def test_one_outlier_does_not_hurt_the_other_blocks(qtype):
    x = np.random.default_rng(6).standard_normal((1, 512)).astype(np.float32)
    calm = dequantize(quantize(x, qtype), qtype)[:, 256:]
    x[0, 3] = 1e5
    y = dequantize(quantize(x, qtype), qtype)
    # Of a code book, the smallest of 31 others counts as much: 43 of 43 * 43 + 31 * 8 * 8.
    np.testing.assert_allclose(y[0, 3], 1e5, rtol=0.55 if qtype in BOOKED else near(qtype) / 2)
    np.testing.assert_array_equal(y[:, 256:], calm)


@TYPES
def test_values_too_small_for_fp16_scales_become_small(qtype):
    x = np.full((1, 256), 1e-30, np.float32)
    x[0, ::2] *= -1
    y = dequantize(quantize(x, qtype), qtype)
    assert np.abs(y).max() < 1e-6


@TYPES
def test_values_beyond_fp16_scales_are_refused(qtype):
    with pytest.raises(QuantizeError, match="beyond MXFP4" if FORMATS[qtype].layout.spread.exponent else "65504"):
        quantize(np.full((1, 256), 3e38, np.float32), qtype)


@TYPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_values_are_refused(qtype, bad):
    x = np.zeros((1, 256), np.float32)
    x[0, 7] = bad
    with pytest.raises(QuantizeError, match="NaN"):
        quantize(x, qtype)


@TYPES
def test_odd_row_lengths_are_refused(qtype):
    with pytest.raises(QuantizeError, match="multiple"):
        quantize(np.zeros((2, 100), np.float32), qtype)
    with pytest.raises(QuantizeError, match="multiple"):
        dequantize(np.zeros((2, 101), np.uint8), qtype)


def test_unknown_types_are_refused_by_name():
    with pytest.raises(QuantizeError, match="TQ2_0"):
        quantize(np.zeros((1, 256), np.float32), GGMLQuantizationType.TQ2_0)


@TYPES
def test_a_tensor_of_many_blocks_equals_its_rows(qtype):
    """The chunked pass over a large tensor gives the same blocks as quantizing row by row."""
    x = np.random.default_rng(7).standard_normal((2049, 256)).astype(np.float32)
    whole = quantize(x, qtype)
    for row in (0, 255, 2047, 2048):
        np.testing.assert_array_equal(whole[row], quantize(x[row], qtype))
