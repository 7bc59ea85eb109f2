"""Programs in tinygrad, run by this engine and compared with numpy.

Run as `python -m tests.ptx.tinygrad_programs RENDERER`.

Prints one JSON object: the name of each program and "" or what went wrong.
"""

import json
import sys
import traceback
from collections.abc import Callable

import numpy as np

PROGRAMS: dict[str, Callable[[], None]] = {}
RNG = np.random.default_rng(7)


def program(fn: Callable[[], None]) -> Callable[[], None]:
    PROGRAMS[fn.__name__] = fn
    return fn


def near(got: np.ndarray, want: np.ndarray, rtol: float = 1e-5, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=rtol, atol=atol)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@program
def add_of_lists() -> None:
    assert (T([1, 2, 3]) + T([4, 5, 6])).numpy().tolist() == [5, 7, 9]


@program
def matmul_fp32_of_odd_sizes() -> None:
    for m, k, n in ((65, 130, 77), (128, 64, 128), (3, 5, 7), (1, 300, 50)):
        a, b = normal(m, k), normal(k, n)
        near((T(a) @ T(b)).numpy(), a.astype(np.float64) @ b, 1e-4, 1e-4)


@program
def matmul_fp16_on_tensor_cores() -> None:
    a, b = normal(128, 64).astype(np.float16), normal(64, 96).astype(np.float16)
    want = a.astype(np.float64) @ b.astype(np.float64)
    near((T(a) @ T(b)).numpy(), want, 2e-2, 6e-2)
    near(T(a).matmul(T(b), dtype=dtypes.float32).numpy(), want, 1e-4, 1e-4)


@program
def conv2d_with_stride_and_padding() -> None:
    x, w = normal(2, 3, 11, 13), normal(4, 3, 3, 3)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))).astype(np.float64)
    out = np.zeros((2, 4, 6, 7))
    for i in range(6):
        for j in range(7):
            out[:, :, i, j] = np.einsum("bchw,ochw->bo", padded[:, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3], w)
    near(T(x).conv2d(T(w), stride=2, padding=1).numpy(), out, 1e-4, 1e-4)


@program
def softmax_and_log_softmax() -> None:
    x = normal(33, 70) * 5
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    near(T(x).softmax().numpy(), e / e.sum(1, keepdims=True), 1e-4, 1e-6)
    near(T(x).log_softmax().numpy(), np.log(e / e.sum(1, keepdims=True)), 1e-4, 1e-4)


@program
def cumsum() -> None:
    x = normal(5, 700)
    near(T(x).cumsum(1).numpy(), x.astype(np.float64).cumsum(1), 1e-3, 1e-3)


@program
def argmax_and_argmin() -> None:
    x = normal(40, 57)
    assert (T(x).argmax(1).numpy() == x.argmax(1)).all()
    assert (T(x).argmin(0).numpy() == x.argmin(0)).all()


@program
def reductions() -> None:
    x = normal(64, 1000)
    near(T(x).sum().numpy(), x.astype(np.float64).sum(), 1e-4, 1e-2)
    near(T(x).sum(1).numpy(), x.astype(np.float64).sum(1), 1e-4, 1e-3)
    near(T(x).max(0).numpy(), x.max(0), 0, 0)
    near(T(x).mean(1).numpy(), x.astype(np.float64).mean(1), 1e-4, 1e-4)
    near(T(x).var(1).numpy(), x.astype(np.float64).var(1, ddof=1), 1e-4, 1e-4)
    near(T(x[:8, :5]).prod(1).numpy(), x[:8, :5].astype(np.float64).prod(1), 1e-4, 1e-5)


NUMPY = {
    "bool": np.bool_, "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16, "int32": np.int32,
    "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64, "float16": np.float16, "float32": np.float32,
    "float64": np.float64,
}  # fmt: skip


@program
def casts_of_all_types() -> None:
    values = np.array([0, 1, 2, 3, 7, 50, 100, 127])
    sources = [(values % 2 if name == "bool" else values).astype(t) for name, t in NUMPY.items()]
    for target, to_type in NUMPY.items():
        got = T.cat(*(T(x).cast(getattr(dtypes, target)) for x in sources)).numpy()
        assert got.dtype == to_type, target
        assert (got == np.concatenate([x.astype(to_type) for x in sources])).all(), (target, got)


@program
def integer_arithmetic_of_all_types() -> None:
    for name, t in NUMPY.items():
        if name == "bool" or name.startswith("float"):
            continue
        info = np.iinfo(t)
        a = RNG.integers(info.min, info.max, 100, dtype=t, endpoint=True)
        b = RNG.integers(1, 100, 100).astype(t)
        ops = ("__add__", "__sub__", "__mul__", "__and__", "__or__", "__xor__")
        got = T.stack(*(getattr(T(a), op)(T(b)) for op in ops)).numpy()
        assert (got == np.stack([getattr(a, op)(b) for op in ops])).all(), name
        small = (a // 2).astype(t)
        quotient = np.array(
            [abs(int(p)) // int(q) * (1 if p >= 0 else -1) for p, q in zip(small, b, strict=True)], dtype=t
        )
        assert (T(small).div(T(b), rounding_mode="trunc").numpy() == quotient).all(), name
        assert (T(a).maximum(T(b)).numpy() == np.maximum(a, b)).all(), name


@program
def transcendental_functions() -> None:
    x = np.linspace(0.05, 6, 300, dtype=np.float32)
    names = ("exp", "log", "sin", "cos", "sqrt", "exp2", "log2", "tanh", "sigmoid", "rsqrt")
    wide = x.astype(np.float64)
    want = [getattr(np, name)(wide) for name in names[:-2]] + [1 / (1 + np.exp(-wide)), 1 / np.sqrt(wide)]
    near(T.stack(*(getattr(T(x), name)() for name in names)).numpy(), np.stack(want), 1e-4, 1e-5)


@program
def backward_of_a_small_network() -> None:
    x, w1, w2 = normal(16, 20), normal(20, 30), normal(30, 5)
    tx, t1, t2 = (T(v).is_param_(True) if hasattr(T(v), "is_param_") else T(v, requires_grad=True) for v in (x, w1, w2))
    loss = ((tx @ t1).relu() @ t2).square().mean()
    grads = loss.gradient(tx, t1, t2)
    h = x.astype(np.float64) @ w1
    r = np.maximum(h, 0)
    y = r @ w2
    dy = 2 * y / y.size
    dh = (dy @ w2.T) * (h > 0)
    for got, want in zip(grads, (dh @ w1.T, x.T @ dh, r.T @ dy), strict=True):
        near(got.numpy(), want, 1e-3, 1e-4)


@program
def gather_scatter_and_sort() -> None:
    x = normal(50, 8)
    index = RNG.integers(0, 50, 30)
    near(T(x)[T(index)].numpy(), x[index], 0, 0)
    near(T(x[:16, 0]).sort()[0].numpy(), np.sort(x[:16, 0]), 0, 0)


@program
def attention() -> None:
    q, k, v = (normal(2, 4, 24, 16) for _ in range(3))
    s = np.einsum("bhqd,bhkd->bhqk", q.astype(np.float64), k) / 4
    mask = np.triu(np.full((24, 24), -np.inf), 1)
    e = np.exp(s + mask - (s + mask).max(-1, keepdims=True))
    want = np.einsum("bhqk,bhkd->bhqd", e / e.sum(-1, keepdims=True), v)
    near(T(q).scaled_dot_product_attention(T(k), T(v), is_causal=True).numpy(), want, 1e-4, 1e-4)


@program
def bfloat16_and_half_storage() -> None:
    x = normal(100)
    bits = x.view(np.uint32)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    near(T(x).cast(dtypes.bfloat16).contiguous().cast(dtypes.float32).numpy(), rounded, 0, 0)
    near(T(x).half().contiguous().float().numpy(), x.astype(np.float16), 0, 0)


def main(renderer: str) -> None:
    global T, dtypes
    from tests.ptx.cpu_device import KERNELS, prepare

    prepare(renderer)
    from tinygrad import Tensor, dtypes

    T = Tensor
    results = {}
    for name, fn in PROGRAMS.items():
        before = len(KERNELS)
        try:
            fn()
            results[name] = "" if len(KERNELS) > before else "no kernel was run"
        except Exception:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
