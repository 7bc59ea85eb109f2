"""Products of a matrix and one vector: a warp to a row, whatever stands between the loads and the sum."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from tinygrad import Tensor, dtypes
from tinygrad.codegen.opt.postrange import Scheduler
from tinygrad.helpers import Target
from tinygrad.uop.ops import AxisType, Ops, UOp

from tegrad.errors import TegradError
from tegrad.llm import formats
from tegrad.llm.quantize import dequantize, quantize
from tegrad.llm.weights import Matrix, Norm
from tegrad.nv import codegen, matvec
from tegrad.nv.renderers import NVPTXRenderer
from tests.nv.boards import use_board

pytestmark = pytest.mark.usefixtures("null_device")
ROWS, COLUMNS = 64, 512


def empty(*shape: int, dtype: Any = dtypes.float) -> Tensor:
    return Tensor.empty(*shape, dtype=dtype, device="NULL")


def packed(kind: formats.BlockType) -> Matrix:
    return Matrix(kind, empty(ROWS, COLUMNS // kind.elements * kind.size, dtype=dtypes.uint8))


def cut(made: Tensor) -> Any:
    """The scheduler that our rule makes of a computation's last kernel, or None."""
    ast = [call.src[0] for call in made.schedule_linear().src if call.src[0].op is Ops.SINK][-1]
    k = Scheduler(ast, NVPTXRenderer(Target("NV", arch="sm_87")))
    k.convert_loop_to_global()
    return matvec.optimize(k)


def lanes(k: Any) -> int:
    return int(np.prod([r.vmax + 1 for r in k.ranges_of(AxisType.GROUP_REDUCE)]))


def gated(gate: Matrix, up: Matrix, x: Tensor, norm: Norm) -> Tensor:
    row = x.reshape(1, -1)
    return gate.apply(row, norm).silu() * up.apply(row, norm)


X, W = empty(COLUMNS), empty(ROWS, COLUMNS)
PRODUCTS = {
    "vector first": lambda: X @ W.T,
    "matrix first": lambda: W @ X,
    "half weights": lambda: X @ empty(ROWS, COLUMNS, dtype=dtypes.half).T,
    "half vector and weights": lambda: X.half() @ empty(ROWS, COLUMNS, dtype=dtypes.half).T,
    "bfloat16 weights": lambda: X @ empty(ROWS, COLUMNS, dtype=dtypes.bfloat16).float().T,
    "a chain of factors": lambda: (X * 3.0 * empty(COLUMNS)) @ W.T,
    "a norm beside it": lambda: Matrix(formats.F32, W).apply(X.reshape(1, -1), Norm(empty(COLUMNS), 1e-5)),
    **{
        kind.name: lambda kind=kind: packed(kind).apply(X.reshape(1, -1))
        for kind in (formats.Q6_K, formats.Q4_K, formats.Q8_0)
    },
    "two products of packed weights": lambda: gated(
        packed(formats.Q6_K), packed(formats.Q6_K), X, Norm(empty(COLUMNS), 1e-5)
    ),
}
OTHERS = {
    "a matrix and a matrix": lambda: empty(8, COLUMNS) @ W.T,
    "sums of columns": lambda: W.sum(axis=0),
    "elementwise": lambda: W + 1,
    "short rows": lambda: empty(ROWS, 16) @ empty(16),
    "the largest of a row": lambda: W.max(axis=1),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_row_gets_a_warp(name: str) -> None:
    k = cut(PRODUCTS[name]())
    assert k is not None
    assert lanes(k) == matvec.THREADS


@pytest.mark.parametrize("name", OTHERS)
def test_other_kernels_are_left_to_tinygrad(name: str) -> None:
    assert cut(OTHERS[name]()) is None


def step(load: UOp, lane: UOp) -> int:
    """Elements between what two neighbouring lanes load."""
    index = load.src[1].get_idx()
    at = [index.substitute({r: r.const_like(n if r is lane else 0) for r in index.ranges}).simplify() for n in (0, 1)]
    return int(at[1].arg) - int(at[0].arg)


@pytest.mark.parametrize(("name", "elements"), [("vector first", 4), ("half weights", 4), ("Q8_0", 1), ("Q6_K", 1)])
def test_neighbouring_lanes_read_neighbouring_elements(name: str, elements: int) -> None:
    """A vector of floats or halves, a byte of packed weights."""
    k = cut(PRODUCTS[name]())
    row = k.ranges_of(AxisType.GLOBAL)[0]
    lane = k.ranges_of(AxisType.GROUP_REDUCE)[0]
    steps = [step(load, lane) for load in k.bufs if row in load.ranges and lane in load.ranges]
    assert steps
    assert set(steps) == {elements}


@pytest.fixture(scope="module")
def board_device() -> Iterator[None]:
    with use_board("agx-orin-64gb:18GiB", "CUDA"):
        yield


@pytest.mark.board
@pytest.mark.usefixtures("board_device")
@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_the_products_are_right_on_the_board(kind: str, normed: bool) -> None:
    rng = np.random.default_rng(5)
    weights, x, scale = (rng.standard_normal(shape).astype(np.float32) for shape in ((ROWS, COLUMNS), COLUMNS, COLUMNS))
    if kind == "F16":
        data = weights.astype(np.float16)
        exact = data.astype(np.float64)
    else:
        data = quantize(weights, GGMLQuantizationType[kind])
        exact = dequantize(data, GGMLQuantizationType[kind]).astype(np.float64)
    block = next(block for block in formats.BLOCK_TYPES.values() if block.name == kind)
    norm = Norm(Tensor(scale, device="NV").realize(), 1e-5) if normed else None
    made = (
        Matrix(block, Tensor(data, device="NV").realize()).apply(Tensor(x[None], device="NV").realize(), norm).numpy()
    )
    expected = exact @ (x * scale) / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5) if normed else exact @ x
    np.testing.assert_allclose(made[0], expected, atol=2e-6 * np.abs(expected).max() + 1e-5)


@pytest.mark.board
@pytest.mark.usefixtures("board_device")
def test_two_products_in_one_kernel_are_right_on_the_board() -> None:
    """Their rows have several axes each, which share the lanes of the first product."""
    rng = np.random.default_rng(6)
    data = [quantize(rng.standard_normal((ROWS, COLUMNS)).astype(np.float32), GGMLQuantizationType.Q6_K) for _ in "gu"]
    gate, up = (dequantize(packed, GGMLQuantizationType.Q6_K).astype(np.float64) for packed in data)
    x, scale = rng.standard_normal((2, COLUMNS)).astype(np.float32) / 8
    on_board = [Matrix(formats.Q6_K, Tensor(packed, device="NV").realize()) for packed in data]
    norm = Norm(Tensor(scale, device="NV").realize(), 1e-5)
    made = gated(*on_board, Tensor(x, device="NV").realize(), norm).numpy()[0]
    normed = x * scale / np.sqrt(np.mean(x.astype(np.float64) ** 2) + 1e-5)
    expected = (gate @ normed) / (1 + np.exp(-(gate @ normed))) * (up @ normed)
    np.testing.assert_allclose(made, expected, atol=4e-6 * np.abs(expected).max() + 1e-5)


REPAIRS_MADE = """
from tegrad.nv import renderers
from tinygrad import Tensor, dtypes
from tinygrad.codegen import to_program
from tinygrad.codegen.opt import heuristic
from tinygrad.device import CompileError
from tinygrad.helpers import Target
from tinygrad.uop.ops import UOp


def assembles(made):
    ast = made.schedule_linear().src[-1].src[0]
    try:
        to_program(ast, renderers.NVPTXRenderer(Target("NV", arch="sm_87")))
    except CompileError as error:
        assert "error   :" in str(error), error
        return False
    return True


doubles = Tensor.empty(64, dtype=dtypes.double, device="NULL")
made = {
    "views": hasattr(UOp.contiguous_view, "__wrapped__"),
    "double": assembles(doubles.sqrt()),
    "polynomials": assembles(doubles.exp2()),
    "matvec": hasattr(heuristic.hand_coded_optimizations, "__wrapped__"),
}
print(*[name for name, there in made.items() if there])
"""
"""Prints the repairs that are there; `double` has two parts."""


@pytest.mark.parametrize(
    ("off", "left"),
    [
        ("", "views double polynomials matvec"),
        ("matvec", "views double polynomials"),
        ("views", "double polynomials matvec"),
        ("double,views", "matvec"),
    ],
)
def test_each_repair_can_be_left_out(off: str, left: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), codegen.SWITCH: off}
    command = [sys.executable, "-c", REPAIRS_MADE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.stdout.strip() == left, done.stderr[-2000:]


def test_an_unknown_repair_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(codegen.SWITCH, "matvecs")
    with pytest.raises(TegradError, match="names matvecs: the repairs are views, double, matvec"):
        codegen.active("views")
