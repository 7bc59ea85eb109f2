"""tinygrad's operations on the board agree with numpy, on every chip row and with both renderers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from boards import use_board
from numpy.lib.stride_tricks import sliding_window_view

pytestmark = pytest.mark.board

CONFIGURATIONS = [
    pytest.param((chip, renderer), id=f"{chip}-{renderer}", marks=[pytest.mark.long] * (renderer != often))
    for chip, often in (("agx-orin-64gb", "CUDA"), ("gh100", "PTX"))
    for renderer in ("CUDA", "PTX")
]
"""Each chip and each renderer once, but where time is plenty."""
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}


@pytest.fixture(scope="module", params=CONFIGURATIONS, autouse=True)
def machine(request: pytest.FixtureRequest) -> Iterator[None]:
    chip, renderer = request.param
    with use_board(chip, renderer):
        yield


@pytest.fixture(params=TOLERANCE)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def random(dtype: str, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Random numbers of the type, and the same ones in double precision."""
    values = np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)
    return values, values.astype(np.float64)


def agree(got: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    assert got.dtype in (np.float32, np.float16)
    np.testing.assert_allclose(got.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


def test_the_renderer_is_the_one_asked_for(machine: Any, request: pytest.FixtureRequest) -> None:
    from tinygrad import Device

    chip, renderer = request.node.callspec.params["machine"]
    assert type(Device["NV"].renderer).__name__ == f"NV{renderer}Renderer"
    assert Device["NV"].arch == {"agx-orin-64gb": "sm_87", "gh100": "sm_90"}[chip]


def test_the_first_addition() -> None:
    from tinygrad import Tensor

    assert (Tensor([1, 2, 3]) + Tensor([4, 5, 6])).numpy().tolist() == [5, 7, 9]


@pytest.mark.parametrize("shape", [(64, 96, 48), (1, 256, 33), (7, 5, 3)])
def test_matmul(dtype: str, shape: tuple[int, int, int]) -> None:
    from tinygrad import Tensor

    m, k, n = shape
    (a, wide_a), (b, wide_b) = random(dtype, m, k), random(dtype, k, n)
    agree((Tensor(a) @ Tensor(b)).numpy(), wide_a @ wide_b, 5 * TOLERANCE[dtype])


def test_sine_of_small_and_huge_angles() -> None:
    from tinygrad import Tensor

    angles = np.float32([0, 1e-3, 1.5, -3.1, 30.5, 1e4, 123456.7, -4.1e16, 1e30, 3.4e38])
    np.testing.assert_allclose(Tensor(angles).sin().numpy(), np.sin(angles.astype(np.float64)), rtol=1e-5, atol=1e-6)


def test_conv2d(dtype: str) -> None:
    from tinygrad import Tensor

    (x, wide_x), (w, wide_w) = random(dtype, 2, 3, 12, 12), random(dtype, 4, 3, 3, 3)
    windows = sliding_window_view(wide_x, (3, 3), axis=(2, 3))
    expected = np.einsum("nchwij,ocij->nohw", windows, wide_w)
    agree(Tensor(x).conv2d(Tensor(w)).numpy(), expected, 5 * TOLERANCE[dtype])


def test_softmax(dtype: str) -> None:
    from tinygrad import Tensor

    x, wide = random(dtype, 8, 100)
    exponents = np.exp(wide)
    agree(Tensor(x).softmax().numpy(), exponents / exponents.sum(-1, keepdims=True), TOLERANCE[dtype])


def test_cumsum(dtype: str) -> None:
    from tinygrad import Tensor

    x, wide = random(dtype, 8, 100)
    agree(Tensor(x).cumsum(1).numpy(), wide.cumsum(1), 20 * TOLERANCE[dtype])


def test_argmax(dtype: str) -> None:
    from tinygrad import Tensor

    x, _ = random(dtype, 9, 101)
    assert Tensor(x).argmax(1).numpy().tolist() == x.argmax(1).tolist()


def test_backward(dtype: str) -> None:
    from tinygrad import Tensor

    (a, wide_a), (b, wide_b) = random(dtype, 24, 40), random(dtype, 40, 16)
    left, right = Tensor(a), Tensor(b)
    (left @ right).relu().sum().backward()
    positive = (wide_a @ wide_b > 0).astype(np.float64)
    assert left.grad is not None
    assert right.grad is not None
    agree(left.grad.numpy(), positive @ wide_b.T, 5 * TOLERANCE[dtype])
    agree(right.grad.numpy(), wide_a.T @ positive, 5 * TOLERANCE[dtype])


def test_a_jitted_step_with_a_state(dtype: str) -> None:
    from tinygrad import Tensor, TinyJit

    state = Tensor.zeros(64, dtype=dtype).contiguous().realize()

    @TinyJit
    def step(x: Tensor) -> Tensor:
        state.assign(state * 2 + x).realize()
        return (state.sum() + x).realize()

    expected = np.zeros(64)
    for i in range(6):
        got = step(Tensor(np.full(64, i, dtype=dtype)).realize()).numpy()
        expected = expected * 2 + i
        agree(got, expected.sum() + i, 1e-3)
