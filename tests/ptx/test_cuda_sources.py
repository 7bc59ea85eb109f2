"""Hand-written CUDA C++, compiled by NVRTC and executed: the idioms that fast kernels are made of."""

from functools import cache

import numpy as np
import pytest

from tegrad import ptx

pytestmark = pytest.mark.board
RNG = np.random.default_rng(51)


@cache
def kernel(source: str, name: str, arch: str = "compute_87") -> ptx.LoadedKernel:
    from tegrad.nv import toolchain

    flags = [f"-I{d}" for d in toolchain.require_include_dirs()]
    text = toolchain.nvrtc().compile(source, arch.replace("compute", "sm"), flags).ptx
    return ptx.load(text, None).kernels[name]


REDUCE = """
extern "C" __global__ void reduce(const float* x, float* out, int n) {
  __shared__ float part[32];
  float s = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
  for (int o = 16; o; o >>= 1) s += __shfl_xor_sync(0xffffffff, s, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x < 32) {
    s = threadIdx.x < blockDim.x / 32 ? part[threadIdx.x] : 0;
    for (int o = 16; o; o >>= 1) s += __shfl_down_sync(0xffffffff, s, o);
    if (threadIdx.x == 0) atomicAdd(out, s);
  }
}"""


def test_block_reduction_by_shuffles_and_an_atomic() -> None:
    x, out = RNG.integers(-9, 9, 10000).astype(np.float32), np.zeros(1, np.float32)
    kernel(REDUCE, "reduce").launch((5, 1, 1), (256, 1, 1), [x, out, len(x)])
    assert out[0] == x.sum()


SCAN = """
extern "C" __global__ void scan(const int* x, int* out) {
  __shared__ int sums[32];
  int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, v = x[threadIdx.x];
  for (int d = 1; d < 32; d <<= 1) { int o = __shfl_up_sync(~0u, v, d); if (lane >= d) v += o; }
  if (lane == 31) sums[warp] = v;
  __syncthreads();
  if (warp == 0) {
    int s = sums[lane];
    for (int d = 1; d < 32; d <<= 1) { int o = __shfl_up_sync(~0u, s, d); if (lane >= d) s += o; }
    sums[lane] = s;
  }
  __syncthreads();
  out[threadIdx.x] = v + (warp ? sums[warp - 1] : 0);
}"""


def test_scan_of_a_block() -> None:
    x, out = RNG.integers(-99, 99, 1024).astype(np.int32), np.zeros(1024, np.int32)
    kernel(SCAN, "scan").launch((1, 1, 1), (1024, 1, 1), [x, out])
    assert (out == np.cumsum(x)).all()


HISTOGRAM = """
extern "C" __global__ void histogram(const unsigned char* x, unsigned* out, int n) {
  __shared__ unsigned bins[256];
  for (int i = threadIdx.x; i < 256; i += blockDim.x) bins[i] = 0;
  __syncthreads();
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&bins[x[i]], 1);
  __syncthreads();
  for (int i = threadIdx.x; i < 256; i += blockDim.x) if (bins[i]) atomicAdd(&out[i], bins[i]);
}"""


def test_histogram_in_shared_memory() -> None:
    x, out = (RNG.integers(0, 256, 20000) ** 2 // 256).astype(np.uint8), np.zeros(256, np.uint32)
    kernel(HISTOGRAM, "histogram").launch((6, 1, 1), (192, 1, 1), [x, out, len(x)])
    assert (out == np.bincount(x, minlength=256)).all()


DOT = """
struct Block { unsigned short scale; signed char q[32]; };
__device__ float half_bits(unsigned short h) { float f; asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h)); return f; }
extern "C" __global__ void dot(const Block* w, const int* x, const float* xs, float* out, int blocks) {
  int row = blockIdx.x, lane = threadIdx.x;
  float sum = 0;
  for (int b = lane; b < blocks; b += 32) {
    const Block& k = w[row * blocks + b];
    int acc = 0;
#pragma unroll
    for (int j = 0; j < 8; j++) {
      const unsigned short* p = (const unsigned short*)(k.q + 4 * j);
      acc = __dp4a((int)(p[0] | (unsigned)p[1] << 16), x[b * 8 + j], acc);
    }
    sum += half_bits(k.scale) * xs[b] * acc;
  }
  sum += __shfl_xor_sync(~0u, sum, 16); sum += __shfl_xor_sync(~0u, sum, 8); sum += __shfl_xor_sync(~0u, sum, 4);
  sum += __shfl_xor_sync(~0u, sum, 2); sum += __shfl_xor_sync(~0u, sum, 1);
  if (lane == 0) out[row] = sum;
}"""


def test_quantized_matrix_vector_product() -> None:
    rows, blocks = 7, 40
    q = RNG.integers(-127, 128, (rows, blocks, 32)).astype(np.int8)
    scale = RNG.random((rows, blocks)).astype(np.float16)
    raw = np.concatenate([scale.view(np.uint8).reshape(rows, blocks, 2), q.view(np.uint8)], 2)
    x, xs = RNG.integers(-127, 128, (blocks, 32)).astype(np.int8), RNG.random(blocks).astype(np.float32)
    out = np.zeros(rows, np.float32)
    arguments = [np.ascontiguousarray(raw), x.view(np.int32).ravel(), xs, out, blocks]
    kernel(DOT, "dot").launch((rows, 1, 1), (32, 1, 1), arguments)
    want = np.einsum("rbk,bk,rb,b->r", q.astype(np.float64), x.astype(np.float64), scale.astype(np.float64), xs)
    np.testing.assert_allclose(out, want, rtol=1e-5)


HALF = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void half_math(const __half2* a, const __half2* b, __half2* out, __nv_bfloat16* bf) {
  int i = threadIdx.x;
  __half2 v = __hfma2(a[i], b[i], __hadd2(a[i], b[i]));
  out[i] = __hmax2(v, __hmul2(a[i], a[i]));
  bf[i] = __hadd(__float2bfloat16(__low2float(a[i])), __float2bfloat16(__high2float(b[i])));
}"""


def test_half_and_bfloat_intrinsics() -> None:
    a, b = (RNG.standard_normal((64, 2)).astype(np.float16) for _ in range(2))
    out, bf = np.zeros((64, 2), np.float16), np.zeros(64, np.uint16)
    kernel(HALF, "half_math").launch((1, 1, 1), (64, 1, 1), [a, b, out, bf])
    total = (a + b).astype(np.float16)
    fma = (a.astype(np.float64) * b + total).astype(np.float16)
    assert (out == np.maximum(fma, a * a)).all()

    def rounded(x: np.ndarray) -> np.ndarray:
        raw = x.astype(np.float32).view(np.uint32)
        return ((raw + 0x7FFF + (raw >> 16 & 1)) & 0xFFFF0000).view(np.float32)

    want = rounded(rounded(a[:, 0]) + rounded(b[:, 1]))
    assert (bf == want.view(np.uint32) >> 16).all()


TILES = """
#include <cuda_fp16.h>
extern "C" __global__ void tiles(const __half* a, const __half* b, float* c, int n) {
  __shared__ __align__(16) __half sa[2][16 * 16], sb[2][16 * 8];
  int lane = threadIdx.x, row = blockIdx.y * 16, col = blockIdx.x * 8;
  float d[4] = {0, 0, 0, 0};
  auto fetch = [&](int k, int buf) {
    unsigned pa = __cvta_generic_to_shared(&sa[buf][lane / 2 * 16 + lane % 2 * 8]);
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(pa), "l"(a + (row + lane / 2)
    * n + k + lane % 2 * 8));
    if (lane < 16) {
      unsigned pb = __cvta_generic_to_shared(&sb[buf][lane * 8]);
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(pb), "l"(b + (k + lane) * n + col));
    }
    asm volatile("cp.async.commit_group;");
  };
  fetch(0, 0);
  for (int k = 0; k < n; k += 16) {
    int buf = k / 16 % 2;
    if (k + 16 < n) { fetch(k + 16, buf ^ 1); asm volatile("cp.async.wait_group 1;"); }
    else asm volatile("cp.async.wait_group 0;");
    __syncwarp();
    unsigned ra[4], rb[2];
    unsigned pa = __cvta_generic_to_shared(&sa[buf][lane % 16 * 16 + lane / 16 * 8]);
    unsigned pb = __cvta_generic_to_shared(&sb[buf][lane % 16 * 8]);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "r"(pa));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(rb[0]), "=r"(rb[1]) : "r"(pb));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
    __syncwarp();
  }
  int r = row + lane / 4, q = col + lane % 4 * 2;
  c[r * n + q] = d[0]; c[r * n + q + 1] = d[1]; c[(r + 8) * n + q] = d[2]; c[(r + 8) * n + q + 1] = d[3];
}"""


def test_matrix_product_with_async_copies_ldmatrix_and_mma() -> None:
    n = 64
    a, b = (RNG.integers(-4, 5, (n, n)).astype(np.float16) for _ in range(2))
    c = np.zeros((n, n), np.float32)
    kernel(TILES, "tiles").launch((n // 8, n // 16, 1), (32, 1, 1), [a, b, c, n])
    assert (c == a.astype(np.float64) @ b.astype(np.float64)).all()


def test_a_missing_wait_for_async_copies_is_seen() -> None:
    """Copies land at their wait, not before: code that forgets it reads what was there."""
    n = 64
    a = b = np.ones((n, n), np.float16)
    c = np.zeros((n, n), np.float32)
    broken = TILES.replace("cp.async.wait_group 1;", "").replace("cp.async.wait_group 0;", "").replace("tiles", "hasty")
    kernel(broken, "hasty").launch((n // 8, n // 16, 1), (32, 1, 1), [a, b, c, n])
    assert not (c == n).all()


PERSISTENT = """
extern "C" __global__ void steps(float* x, float* y, unsigned* barrier, int n, int rounds) {
  for (int r = 0; r < rounds; r++) {
    float* from = r & 1 ? y : x; float* to = r & 1 ? x : y;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
      to[i] = from[(i + n - 1) % n] + from[(i + 1) % n];
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(barrier) : "memory");
      unsigned seen;
      do { asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(barrier) : "memory"); }
      while (seen < gridDim.x * (r + 1));
    }
    __syncthreads();
  }
}"""


@pytest.mark.parametrize("threads", [1, 2])
def test_persistent_kernel_with_a_grid_barrier(threads: int) -> None:
    n, rounds = 1000, 9
    x, y, barrier = RNG.integers(0, 3, n).astype(np.float32), np.zeros(n, np.float32), np.zeros(1, np.uint32)
    want = x.copy()
    for _ in range(rounds):
        want = np.roll(want, 1) + np.roll(want, -1)
    kernel(PERSISTENT, "steps").launch((8, 1, 1), (128, 1, 1), [x, y, barrier, n, rounds], threads=threads)
    assert (y == want).all()


SWITCH = """
__device__ __noinline__ float op(int k, float a, float b) {
  switch (k) {
    case 0: return a + b; case 1: return a - b; case 2: return a * b; case 3: return a / b; case 4: return fminf(a, b);
    case 5: return fmaxf(a, b); case 6: return sqrtf(fabsf(a)) + b; case 7: return powf(fabsf(a), 2.0f);
    case 8: return sinf(a);
    default: return expf(b);
  }
}
extern "C" __global__ void switched(const int* k, const float* a, const float* b, float* out) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  out[i] = op(k[i], a[i], b[i]);
}"""


def test_switch_in_a_function_that_is_not_inlined() -> None:
    n = 256
    k = RNG.integers(0, 10, n).astype(np.int32)
    a, b = (RNG.standard_normal(n).astype(np.float32) for _ in range(2))
    out = np.zeros(n, np.float32)
    kernel(SWITCH, "switched").launch((2, 1, 1), (128, 1, 1), [k, a, b, out])
    x, y = a.astype(np.float64), b.astype(np.float64)
    table = [
        x + y,
        x - y,
        x * y,
        x / y,
        np.minimum(x, y),
        np.maximum(x, y),
        np.sqrt(abs(x)) + y,
        x * x,
        np.sin(x),
        np.exp(y),
    ]
    np.testing.assert_allclose(out, np.choose(k, table), rtol=3e-6, atol=1e-6)


MATH = """
extern "C" __global__ void functions(const double* x, double* out, const float* f, float* g) {
  int i = threadIdx.x;
  double v = x[i];
  out[8 * i] = exp(v); out[8 * i + 1] = log(fabs(v)); out[8 * i + 2] = sin(v * 1e6); out[8 * i + 3] = cbrt(v);
  out[8 * i + 4] = erf(v); out[8 * i + 5] = tgamma(fabs(v) + 1); out[8 * i + 6] = atan2(v, 2.0);
  out[8 * i + 7] = fmod(v, 0.7);
  float u = f[i];
  g[6 * i] = expf(u); g[6 * i + 1] = tanhf(u); g[6 * i + 2] = sinf(u * 1e5f); g[6 * i + 3] = lgammaf(fabsf(u) + 1);
  g[6 * i + 4] = __fdividef(u, 3.0f); g[6 * i + 5] = rintf(u * 4);
}"""


def test_the_cuda_math_library() -> None:
    import math

    x = RNG.standard_normal(64) * 3
    f = x.astype(np.float32)
    out, g = np.zeros((64, 8)), np.zeros((64, 6), np.float32)
    kernel(MATH, "functions").launch((1, 1, 1), (64, 1, 1), [x, out, f, g])
    wide = [
        np.exp(x), np.log(abs(x)), np.sin(x * 1e6), np.cbrt(x), [math.erf(v) for v in x], [math.gamma(abs(v) + 1)
        for v in x],
        np.arctan2(x, 2), np.fmod(x, 0.7),
    ]  # fmt: skip
    np.testing.assert_allclose(out, np.array(wide).T, rtol=1e-14, atol=1e-15)
    u = f.astype(np.float64)
    big = (f * np.float32(1e5)).astype(np.float64)
    narrow = [
        np.exp(u),
        np.tanh(u),
        np.sin(big),
        [math.lgamma(abs(v) + 1) for v in u],
        u / 3,
        np.rint(f * np.float32(4)),
    ]
    np.testing.assert_allclose(g, np.array(narrow).T, rtol=1e-5, atol=2e-6)


def test_integer_division_of_64_bits() -> None:
    source = """extern "C" __global__ void divide(const long long* a, const unsigned long long* b, long long* q,
      unsigned long long* r) {
      int i = threadIdx.x; q[i] = a[i] / (long long)(b[i] >> 20 | 1); r[i] = (unsigned long long)a[i] % (b[i] | 1); }"""
    a = RNG.integers(-(1 << 62), 1 << 62, 96)
    b = RNG.integers(1, 1 << 62, 96).astype(np.uint64) >> RNG.integers(0, 40, 96).astype(np.uint64)
    q, r = np.zeros(96, np.int64), np.zeros(96, np.uint64)
    kernel(source, "divide").launch((1, 1, 1), (96, 1, 1), [a, b, q, r])
    for i in range(96):
        d = int(b[i]) >> 20 | 1
        assert int(q[i]) == abs(int(a[i])) // d * (1 if a[i] >= 0 else -1)
        assert int(r[i]) == (int(a[i]) & (1 << 64) - 1) % (int(b[i]) | 1)


def test_printing_and_dynamic_calls_are_refused_by_name() -> None:
    source = """extern "C" __global__ void through(int (**f)(int), int* out) { out[0] = f[0](1); }"""
    with pytest.raises(ptx.PtxError, match="call"):
        kernel(source, "through")
