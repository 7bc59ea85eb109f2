"""blocks.cuh against float64: a lane's part of a segment of every format, as compiled for sm_87."""

import numpy as np
import packs
import pytest

import tegrad.ptx as ptx
from tegrad.llm import programs
from tegrad.nv import toolchain

pytestmark = pytest.mark.board

DOT = """
extern "C" __global__ void dot(float *out, const unsigned char *w, const signed char *q, const float *s) {
    __shared__ __align__(16) unsigned char x[INPUT_BYTES], copy[FORMAT::BYTES];
    const int lane = threadIdx.x, segment = blockIdx.x;
    stage<FORMAT>(x, q, s, SEGMENT, lane, 32);
    for (int at = lane; at < FORMAT::BYTES / 16; at += 32)
        ((uint4 *)copy)[at] = ((const uint4 *)w)[segment * (FORMAT::BYTES / 16) + at];
    __syncthreads();
    FORMAT::Segment streamed, shared;
    streamed.load(Stream{w + segment * FORMAT::BYTES}, lane);
    shared.load(Memory{copy}, lane);
    const Input in = load_input(x, lane);
    out[(2 * segment) * 32 + lane] = FORMAT::dot(streamed, in, lane);
    out[(2 * segment + 1) * 32 + lane] = FORMAT::dot(shared, in, lane);
}
"""

FLOAT_DOT = """
extern "C" __global__ void dot(float *out, const unsigned char *w, const float *v) {
    __shared__ float4 x[512];
    const int lane = threadIdx.x;
    for (int at = lane; at < 512; at += 32)
        x[FORMAT::place(at)] = 4 * at < COUNT ? ((const float4 *)v)[at] : make_float4(0, 0, 0, 0);
    __syncthreads();
    FORMAT::Segment<COUNT> row;
    row.load(Stream{w}, lane);
    out[lane] = FORMAT::dot<COUNT>(row, x, lane);
}
"""


def kernel(body: str, kind: str, **defines: int) -> ptx.LoadedKernel:
    flags = ["--std=c++17", f"-DFORMAT={kind}", *(f"-D{key}={value}" for key, value in defines.items())]
    made = toolchain.nvrtc().compile(programs.source("blocks.cuh") + body, "sm_87", flags)
    return ptx.load(made.ptx).kernels["dot"]


@pytest.mark.parametrize("kind", packs.PACKED)
def test_a_lane_multiplies_its_64_weights(kind: str) -> None:
    rng = np.random.default_rng(7)
    data, weights = packs.segments(kind, rng, 3)
    q, s = packs.activations(rng, 2048)
    out = np.full((3, 2, 32), np.nan, np.float32)
    kernel(DOT, kind).launch((3, 1, 1), (32, 1, 1), [out, data, q, s])
    terms = weights.reshape(3, 32, 64) * (q * np.repeat(s.astype(np.float64), 16)).reshape(32, 64)
    error = np.abs(out - terms.sum(-1)[:, None]) / np.abs(terms).sum(-1)[:, None]
    assert error.max() < 1e-6
    np.testing.assert_array_equal(out[:, 0], out[:, 1])  # device memory and shared memory


def test_the_largest_sums_stay_exact() -> None:
    """63 and 255 levels times -127 in all of a set: the integer that MAGIC must hold without rounding."""
    q, s = np.full(2048, -127, np.int8), np.ones(128, np.float32)
    data = np.full((1, 1680), 0xFF, np.uint8)
    data[0, 1536:1664] = 1
    data[0, 1664:] = np.ones(8, np.float16).view(np.uint8)
    out = np.zeros((1, 2, 32), np.float32)
    kernel(DOT, "Q6_K").launch((1, 1, 1), (32, 1, 1), [out, data, q, s])
    assert (out == 64 * 31 * -127).all()


@pytest.mark.parametrize("kind", packs.FLOATS)
@pytest.mark.parametrize("count", [2048, 328])
def test_a_row_of_floats_ends_where_it_ends(kind: str, count: int) -> None:
    rng = np.random.default_rng(8)
    data, weights = packs.segments(kind, rng, 1)
    used = data[0, : count * (4 if kind == "F32" else 2)].copy()
    x = rng.standard_normal(count).astype(np.float32)
    out = np.full(32, np.nan, np.float32)
    kernel(FLOAT_DOT, kind, COUNT=count).launch((1, 1, 1), (32, 1, 1), [out, used, x])
    terms = weights[0, :count] * x
    assert abs(out.astype(np.float64).sum() - terms.sum()) / np.abs(terms).sum() < 1e-6
