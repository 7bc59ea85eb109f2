"""matvec.cu on the board, against float64 on the same quantized inputs: every format, every ending, odd shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import packs
import pytest
from numpy.typing import NDArray
from operands import Operands

from tegrad.llm import formats
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import BF16, F16, F32, PLAIN, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0, BlockType
from tegrad.llm.matvec import LaunchConfig, Part, Product
from tegrad.llm.packing import dequantize_packed, packed_bytes, segments

pytestmark = pytest.mark.board

EPS, LARGE_EPS = 1e-5, 0.75
"""The second is so large that nothing is right without it."""
Array = NDArray[Any]


def matrix(kind: BlockType, rows: int, columns: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """A random matrix: its bytes on the device and its weights as float64. What a last segment has too many is zero."""
    count = segments(rows, columns)
    data, weights = packs.segments(kind.name, rng, count)
    assert data.size == packed_bytes(kind, rows, columns)
    flat = weights.reshape(-1)[: rows * columns].reshape(rows, columns)
    if kind in PLAIN:
        return data.reshape(-1)[: kind.row_bytes(rows * columns)], flat
    np.testing.assert_allclose(dequantize_packed(kind, data.reshape(-1), rows, columns), flat, rtol=1e-5, atol=1e-6)
    return data, flat


@dataclass
class Run:
    """A product's inputs on the device, and what must come of them in float64."""

    product: Product
    config: LaunchConfig
    operands: Operands
    seed: int = 5

    def __post_init__(self) -> None:
        p, rng = self.product, np.random.default_rng(self.seed)
        self.given: dict[str, Array] = {}
        self.given["q"], self.given["s"] = packs.activations(rng, p.columns)
        self.given["ss"] = rng.uniform(1, 3, max(p.ss_parts, 1)).astype(np.float32)
        self.given["x"] = (rng.standard_normal(p.columns) + 0.5).astype(np.float32)
        self.given["norm"] = rng.uniform(0.5, 1.5, p.columns).astype(np.float32)
        self.given["norm_bias"] = rng.standard_normal(p.columns).astype(np.float32)
        if p.joins:
            self._join(rng)
        products = []
        for index, part in enumerate(p.parts):
            data, weights = matrix(part.kind, part.rows, p.columns, rng)
            self.given[f"w{index}"], self.given[f"b{index}"] = data, rng.standard_normal(part.rows).astype(np.float32)
            y = weights @ self._input(part.kind)
            if (
                index == 0 and part.kind not in PLAIN and not p.joins
            ):  # the norm brings the first part's products to about 2
                mean = p.eps if p.eps == LARGE_EPS else np.var(y) / 4
                self.given["ss"] *= np.float32(p.columns * mean / self.given["ss"].sum())
            y = y * self._factor(part.kind)
            products.append(y + self.given[f"b{index}"] if p.bias else y)
        scale = float(np.abs(np.concatenate(products)).max())
        self.given["out"] = (scale * rng.standard_normal(p.rows)).astype(np.float32)
        self.given["next_norm"] = rng.uniform(0.5, 1.5, p.rows).astype(np.float32)
        groups = -(-p.rows // 16)
        outputs = {"out_q": (p.rows, np.int8), "out_s": (groups, np.float32)}
        outputs |= {"out_ss": (p.out_ss_parts(self.config), np.float32)}
        outputs |= {"best": (-(-p.rows // 32), np.float32), "best_row": (-(-p.rows // 32), np.int32)}
        self.given |= {name: np.zeros(shape, kind) for name, (shape, kind) in outputs.items()}
        self.expected = self._end(products)

    def _join(self, rng: np.random.Generator) -> None:
        """The stream with what is still to be added to it, normed; as floats, and times the norm's weight as int8."""
        p, given = self.product, self.given
        given["y"] = (3 * rng.standard_normal(p.columns)).astype(np.float32)
        given["post"] = rng.uniform(0.5, 1.5, p.columns).astype(np.float32)
        y = given["y"].astype(np.float64)
        given["ss"] = np.add.reduceat(y * y, np.arange(0, p.columns, p.columns // p.ss_parts)).astype(np.float32)
        assert len(given["ss"]) == p.ss_parts
        self.joined = given["x"] + y / np.sqrt((y * y).mean() + p.eps) * given["post"]
        given["joined"] = np.zeros(p.columns, np.float32)
        if p.packed:
            sets = (self.joined * given["norm"]).reshape(-1, 16)
            scales = np.abs(sets).max(axis=1, keepdims=True) / 127
            given["s"], given["q"] = scales[:, 0].astype(np.float32), np.rint(sets / scales).reshape(-1)

    def _input(self, kind: BlockType) -> Array:
        if kind not in PLAIN:
            return self.given["q"] * np.repeat(self.given["s"].astype(np.float64), 16)
        x = self.joined if self.product.joins else self.given["x"].astype(np.float64)
        if self.product.norm == "none":
            return x
        x = x - x.mean() if self.product.norm == "layer" else x
        x = x / np.sqrt((x * x).mean() + self.product.eps) * self.given["norm"]
        return x + self.given["norm_bias"] if self.product.norm == "layer" else x

    def _factor(self, kind: BlockType) -> float:
        if kind in PLAIN or self.product.norm == "none":
            return 1.0
        if self.product.joins:
            return float(1 / np.sqrt((self.joined**2).mean() + self.product.eps))
        return 1 / np.sqrt(self.given["ss"].astype(np.float64).sum() / self.product.columns + self.product.eps)

    def _end(self, products: list[Array]) -> Array:
        first = products[0] if self.product.gated else np.concatenate(products)
        match self.product.activation:
            case "silu":
                first = first / (1 + np.exp(-first))
            case "cap":
                first = self.product.cap * np.tanh(first / self.product.cap)
            case "gelu":
                first = 0.5 * first * (1 + np.tanh(np.sqrt(2 / np.pi) * (first + 0.044715 * first**3)))
        y = first * products[1] if self.product.gated else first
        return y + self.given["out"] if self.product.residual else y

    def __call__(self) -> None:
        p, config = self.product, self.config
        assert p.fits(config)
        buffers = {name: self.operands.put(self.given[name]) for name in p.arguments}
        program = p.load(self.operands.device, config)
        program(*buffers.values(), global_size=(p.grid(config), 1, 1), local_size=(32 * config.warps, 1, 1), wait=True)
        self.got = {
            name: self.operands.get(buffer, self.given[name].shape, self.given[name].dtype)
            for name, buffer in buffers.items()
        }
        for name in set(p.arguments) - {"out", "out_q", "out_s", "out_ss", "best", "best_row", "joined"}:
            np.testing.assert_array_equal(self.got[name], self.given[name])

    def check(self) -> None:
        """Everything that the product was to write."""
        p, y = self.product, self.expected
        largest = np.abs(y).max()
        if p.out_x or p.residual:
            assert np.abs(self.got["out"] - y).max() < 1e-5 * largest
        if p.joins:
            np.testing.assert_allclose(self.got["joined"], self.joined, rtol=1e-5, atol=1e-5)
        if p.out_norm or p.out_ss:
            size = min(self.config.cta_rows, 32)
            squares = np.add.reduceat(y * y, np.arange(0, p.rows, size))
            np.testing.assert_allclose(self.got["out_ss"], squares, rtol=1e-5)
        if p.out_norm:
            y = y * self.given["next_norm"]
        if p.out_q:
            scales = np.maximum.reduceat(np.abs(y), np.arange(0, p.rows, 16)) / 127
            np.testing.assert_allclose(self.got["out_s"], scales, rtol=1e-4)
            error = np.abs(self.got["out_q"] - y / np.repeat(scales, 16)[: p.rows])
            assert error.max() < 0.5 + 1e-2
            assert np.abs(self.got["out_q"]).max() == 127
        if p.best:
            blocks = [y[at : at + 32] for at in range(0, p.rows, 32)]
            assert list(self.got["best_row"]) == [32 * at + int(block.argmax()) for at, block in enumerate(blocks)]
            np.testing.assert_allclose(self.got["best"], [block.max() for block in blocks], rtol=1e-4)


CASES = {
    # three parts, of formats that stage the input differently; a warp keeps its activations in registers
    "qkv": (
        Product((Part(Q4_K, 32), Part(Q6_K, 16), Part(F16, 16)), 2048, "rms", EPS, 40, bias=True, out_x=True),
        LaunchConfig(16, 4),
    ),
    # rows of 14 chunks: a segment touches four of them
    "odd rows": (
        Product((Part(Q8_0, 64),), 896, "rms", EPS, 3, residual=True, out_q=True, out_norm=True),
        LaunchConfig(32, 4),
    ),
    "gate and up": (
        Product((Part(Q4_0, 32),) * 2, 3072, "rms", EPS, 96, gated=True, activation="silu", out_q=True),
        LaunchConfig(16, 8, 3),
    ),
    "two segments a row": (Product((Part(Q5_K, 32),), 4096, residual=True, out_x=True), LaunchConfig(16, 4, 2)),
    "down": (
        Product((Part(Q6_K, 64),), 8192, bias=True, residual=True, out_q=True, out_norm=True),
        LaunchConfig(16, 16),
    ),
    "layer norm": (
        Product((Part(F16, 96),), 768, "layer", EPS, bias=True, activation="gelu", out_x=True),
        LaunchConfig(32, 4),
    ),
    "ragged, plain": (Product((Part(BF16, 50),), 3080, "rms", EPS, out_x=True, best=True), LaunchConfig(32, 4)),
    "ragged, packed": (Product((Part(Q6_K, 73),), 256, "rms", EPS, 8, out_x=True, best=True), LaunchConfig(32, 2)),
    "an epsilon that counts, packed": (
        Product((Part(Q8_0, 32),), 896, "rms", LARGE_EPS, 3, out_x=True),
        LaunchConfig(32, 4),
    ),
    "an epsilon that counts, plain": (
        Product((Part(F16, 32),), 768, "rms", LARGE_EPS, out_x=True),
        LaunchConfig(32, 4),
    ),
    "an epsilon that counts, layer": (
        Product((Part(F32, 32),), 768, "layer", LARGE_EPS, out_x=True),
        LaunchConfig(32, 4),
    ),
    "rows of 32 floats": (Product((Part(F32, 50),), 32, "rms", EPS, out_x=True, best=True), LaunchConfig(32, 4)),
    "rows of 16 halves": (Product((Part(F16, 50),), 16, "layer", EPS, out_x=True), LaunchConfig(32, 4)),
    "joined, three parts": (
        Product((Part(Q4_K, 32), Part(Q6_K, 16), Part(F16, 16)), 2048, "rms", EPS, 128, out_x=True, joins=True),
        LaunchConfig(16, 4),
    ),
    "joined, odd rows, an epsilon that counts": (
        Product(
            (Part(Q8_0, 64),) * 2, 896, "rms", LARGE_EPS, 28, gated=True, activation="gelu", out_q=True, joins=True
        ),
        LaunchConfig(32, 8),
    ),
    "joined, pieces with ends": (
        Product((Part(F32, 50),), 3080, "rms", EPS, 77, out_x=True, joins=True),
        LaunchConfig(32, 4),
    ),
    "squares alone": (Product((Part(Q6_K, 64),), 896, bias=True, out_x=True, out_ss=True), LaunchConfig(32, 4)),
    "capped": (
        Product((Part(Q6_K, 73),), 256, "rms", EPS, 8, activation="cap", cap=1.5, out_x=True, best=True),
        LaunchConfig(32, 2),
    ),
    "plain gate": (Product((Part(F32, 16),) * 2, 328, gated=True, activation="silu", out_x=True), LaunchConfig(16, 8)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_product_is_exact_and_touches_nothing_else(name: str, operands: Operands) -> None:
    run = Run(*CASES[name], operands)
    run()
    run.check()


def test_what_cannot_be_run_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="layer norm"):
        Product((Part(Q8_0, 16),), 2048, "layer")
    with pytest.raises(UnsupportedModelError, match="96"):
        Product((Part(formats.Q8_0, 16),), 96)
