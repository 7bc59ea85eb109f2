"""Edges of tinygrad's operations: NV agrees with another device of tinygrad's, the CPU or (`--reference CUDA`) CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import compare_backends

pytestmark = [pytest.mark.board, pytest.mark.clang(as_reference=True)]

ATOL = 1e-4
Function = Callable[..., Any]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype)


def whole(*shape: int, dtype: str = "int32", low: int = -100, high: int = 100) -> np.ndarray:
    return np.random.default_rng((7, *shape)).integers(low, high, shape).astype(dtype)


ANGLES = normal(500) * 1000
SMALL_TO_LARGE, EXPONENTS = (np.logspace(-30, 30, 333), np.linspace(-110, 110, 333))
SPECIAL = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-45, 1.1754944e-38, 3.4e38, -3.4e38], np.float32)
HALVES = np.array([0.0, -0.0, 65504, -65504, 6e-8, 6.1e-5, np.inf, -np.inf, np.nan, 1.0], np.float16)

CASES: dict[str, tuple[Function, tuple[np.ndarray, ...]]] = {
    "no elements": (lambda x: (x + 1, x.sum(1), x.cat(x, dim=0)), (np.zeros((3, 0, 2), np.float32),)),
    "one element": (lambda x: (x.exp().log(), x.softmax(), x.reshape(1, 1) @ x.reshape(1, 1)), (normal(1),)),
    "infinities and NaN": (lambda x: (x + x, x * 0, x.relu(), x.abs(), x.sign(), x == x, x < 0), (SPECIAL,)),
    "largest of infinities": (lambda x: (x.max(), x.min(), x.argmax()), (SPECIAL[[0, 2, 4, 5, 9]],)),
    "rounding": (lambda x: (x.round(), x.floor(), x.ceil(), x.trunc()), (np.arange(-4, 4, 0.25).astype("float32"),)),
    "halves at their ends": (lambda x: (x + x, x * 2, x.float(), x.relu()), (HALVES,)),
    "floats to halves": (lambda x: (x.half(), x.cast("bfloat16").float()), (normal(1000) * 1e4,)),
    "floats to integers": (lambda x: (x.int(), x.cast("int8"), x.cast("int64")), (whole(999).astype("float32"),)),
    "integers around": (lambda x: (x + x, x * 3, -x), (whole(257, dtype="int8", low=-128, high=128),)),
    "unsigned integers around": (lambda x: (x + 200, x * 3), (whole(257, dtype="uint8", low=0, high=256),)),
    "quotients and rests": (lambda x, y: (x // y, x % y), (whole(300), whole(300, low=1, high=9))),
    "quotients by negatives": (lambda x, y: (x // y, x % y), (whole(300), whole(300, low=-9, high=0))),
    "shifts": (lambda x: (x << 3, x >> 2), (whole(64, dtype="uint32", low=0, high=1 << 30),)),
    "bits": (lambda x, y: (x & y, x | y, x ^ y), (whole(64), whole(64, low=0))),
    "64 bits": (lambda x: (x * 3_000_000_000, x.sum(), x.max()), (whole(501, dtype="int64"),)),
    "sums of a million": (lambda x: (x.sum(), x.mean(), x.std()), (normal(1_000_003) / 1000,)),
    "sums along each axis": (lambda x: tuple(x.sum(axis) for axis in (0, 1, 2, (0, 2))), (normal(13, 7, 33),)),
    "products": (lambda x: x.prod(1), (normal(17, 9),)),
    "running sums": (lambda x: (x.cumsum(0), x.cumsum(1)), (normal(33, 65),)),
    "largest of equals": (lambda x: (x.argmax(1), x.argmin(1)), (whole(9, 40, low=0, high=3),)),
    "sorted": (lambda x: x.sort(1), (normal(5, 37),)),
    "the largest ten": (lambda x: x.topk(10), (normal(100),)),
    "softmax of large numbers": (lambda x: (x.softmax(), x.log_softmax()), (normal(7, 1009) * 50,)),
    "odd products": (lambda a, b: a @ b, (normal(31, 63), normal(63, 65))),
    "a row by a matrix": (lambda a, b: a @ b, (normal(1, 127), normal(127, 33))),
    "an outer product": (lambda a, b: a @ b, (normal(257, 1), normal(1, 129))),
    "batches of products": (lambda a, b: a @ b, (normal(3, 5, 7, 11), normal(3, 1, 11, 2))),
    "products of integers": (lambda a, b: a @ b, (whole(17, 19), whole(19, 23))),
    "a strided view": (lambda x: (x[::3, 1::2] + 1, x.flip((0, 1)) * 2), (normal(31, 17),)),
    "a permuted view": (lambda x: x.permute(2, 0, 1).contiguous() + x.permute(2, 0, 1), (normal(5, 7, 9),)),
    "an expanded view": (lambda x: x.expand(64, 33, 5).sum((0, 2)), (normal(1, 33, 1),)),
    "padding": (lambda x: (x.pad(((2, 1), (0, 3))), x.pad(((1, 1), (1, 1))).sum(0)), (normal(5, 6),)),
    "a negative padding": (lambda x: x.pad(((-1, -2), (-3, 0))), (normal(9, 9),)),
    "rows by index": (lambda x, i: x[i], (normal(50, 8), whole(100, low=0, high=50))),
    "gathered": (lambda x, i: x.gather(1, i), (normal(9, 50), whole(9, 20, low=0, high=50))),
    "chosen": (lambda x, y: (x > 0).where(x, y), (normal(777), normal(777, seed=1))),
    "a convolution with a stride": (lambda x, w: x.conv2d(w, stride=3), (normal(2, 3, 17, 19), normal(5, 3, 3, 5))),
    "a dilated convolution": (lambda x, w: x.conv2d(w, dilation=2), (normal(1, 4, 15, 15), normal(4, 4, 3, 3))),
    "a convolution in groups": (lambda x, w: x.conv2d(w, groups=4), (normal(2, 8, 9, 9), normal(8, 2, 3, 3))),
    "pools": (lambda x: (x.max_pool2d(3), x.avg_pool2d(2)), (normal(2, 3, 13, 14),)),
    "sines of large angles": (lambda x: (x.sin(), x.cos()), (ANGLES,)),
    "exponents at their ends": (lambda x: (x.exp(), x.exp2(), x.sigmoid(), x.tanh()), (EXPONENTS.astype("float32"),)),
    "logarithms": (lambda x: (x.log(), x.log2(), x.sqrt(), x.rsqrt()), (SMALL_TO_LARGE.astype("float32"),)),
    "powers": (lambda x, y: x.pow(y), (np.abs(normal(200)) + 0.1, normal(200, seed=1))),
    "doubles": (lambda x: (x.exp().log(), x.sum(), x @ x.T), (normal(33, 33, dtype="float64"),)),
    "a layer norm": (lambda x: x.layernorm(), (normal(17, 1023) + 100,)),
    "attention": (lambda q, k, v: q.scaled_dot_product_attention(k, v), (normal(2, 4, 33, 16),) * 3),
    "random numbers": (lambda x: (x.rand_like(), x.randn_like()), (normal(1009),)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_edge_is_as_on_another_device(name: str) -> None:
    function, arrays = CASES[name]
    compare_backends(function, *arrays, rtol=1e-4, atol=ATOL)
