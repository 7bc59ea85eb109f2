"""The small kernels between a prompt's products, with operands at the edges of their pages, on the board."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from operands import Operands as Placed

from tegrad.llm import packing, quantize
from tegrad.llm.formats import F16, Q6_K
from tegrad.llm.gemm import fragment_order
from tegrad.llm.prefill import chunk_bytes
from tegrad.llm.programs import load_kernel

pytestmark = pytest.mark.board

COUNT, MOST, START = 3, 5, 11


@pytest.fixture(params=["end", "start"])
def placed(opened: Any, request: pytest.FixtureRequest) -> Iterator[Placed]:
    made = Placed(opened, request.param)
    yield made
    made.check()
    made.free()


def chunk(placed: Placed, **more: int) -> Any:
    given = {"start": START, "count": COUNT, "slot": 1, "at": 2, **more}
    return placed.put(np.frombuffer(chunk_bytes(**given), np.uint8))


def run(program: Any, buffers: tuple[Any, ...], grid: tuple[int, int, int], threads: int, *values: int) -> None:
    program(*buffers, global_size=grid, local_size=(threads, 1, 1), vals=values, wait=True)


@pytest.mark.parametrize("eps", [1e-5, 3.0])
@pytest.mark.parametrize("layer", [False, True], ids=["root mean square", "mean and variance, of the last"])
def test_norms(opened: Any, placed: Placed, layer: bool, eps: float) -> None:
    """Rows beyond the chunk are left alone; the last one goes to row 0."""
    columns, rng = 176, np.random.default_rng(1)
    x = (rng.standard_normal((COUNT, columns)) * 3 + 1).astype(np.float32)
    weight, bias = rng.standard_normal((2, columns)).astype(np.float32)
    before = np.full((MOST, columns), 7, np.float16)
    y = placed.put(before)
    program = load_kernel(
        opened, "norm_rows", buffers=5, COLUMNS=columns, NORM=2 if layer else 1, EPS=f"{eps}f", LAST=layer, THREADS=32
    )
    unused = np.full((MOST - COUNT, columns), np.nan, np.float32)
    buffers = (y, placed.put(np.concatenate([x, unused])), placed.put(weight), placed.put(bias), chunk(placed))
    run(program, buffers, (1 if layer else MOST, 1, 1), 32)
    exact = x.astype(np.float64)
    exact -= exact.mean(axis=1, keepdims=True) if layer else 0
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + eps) * weight + (bias if layer else 0)
    expected = exact[-1:] if layer else exact
    found = placed.get(y, before.shape, np.float16)
    np.testing.assert_allclose(found[: len(expected), fragment_order(columns)], expected, rtol=1e-3, atol=1e-4)
    assert (found[len(expected) :] == 7).all()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_the_last_row_of_a_chunk_of_any_length_is_normed_and_of_none_nothing(
    opened: Any, placed: Placed, count: int
) -> None:
    columns = 64
    x = np.random.default_rng(count).standard_normal((count + 1, columns)).astype(np.float32)
    y, weight = placed.put(np.full(columns, 7, np.float16)), placed.put(np.ones(columns, np.float32))
    rows = placed.put(np.concatenate([np.ones((1, columns), np.float32), x]))  # the first one is nobody's
    program = load_kernel(
        opened, "norm_rows", buffers=5, COLUMNS=columns, NORM=1, EPS="0.0f", LAST=True, THREADS=32
    )  # fmt: skip
    given = chunk(placed, count=count)
    run(program, (y, rows.offset(offset=4 * columns), weight, weight, given), (1, 1, 1), 32)
    found = placed.get(y, (columns,), np.float16)
    if not count:
        assert (found == 7).all()
        return
    last = x[count - 1].astype(np.float64)
    np.testing.assert_allclose(found[fragment_order(columns)], last / np.sqrt((last**2).mean()), rtol=1e-3, atol=1e-4)


def test_a_chunks_rows_of_the_embedding_and_its_positions(opened: Any, placed: Placed) -> None:
    rows, columns, rng = 9, 256, np.random.default_rng(2)
    raw = quantize.quantize(rng.standard_normal((rows, columns)), GGMLQuantizationType.Q6_K)
    packed = packing.pack(Q6_K, raw, rows, columns)
    learned = rng.standard_normal((START + COUNT, columns)).astype(np.float16)
    tokens = np.array([8, 8, 0, 8, 4], np.int32)  # the chunk's begin at 2
    x = placed.put(np.full((COUNT, columns), 7, np.float32))
    program = load_kernel(
        opened, "embed_rows", buffers=5, FORMAT="Q6_K", ROWS=rows, COLUMNS=columns, POSITIONS=START + COUNT,
        POSITIONS_FORMAT=F16.name,
    )  # fmt: skip
    buffers = (x, placed.put(packed), placed.put(learned), placed.put(tokens), chunk(placed))
    run(program, buffers, (1, MOST, 1), 256)
    weights = packing.dequantize_packed(Q6_K, packed, rows, columns)
    expected = weights[tokens[2:]] + learned[START:].astype(np.float32)
    np.testing.assert_allclose(placed.get(x, expected.shape, np.float32), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("q8", [False, True], ids=["f16, neighbours", "q8_0, halves, normed"])
def test_queries_are_rotated_and_keys_and_values_lie_in_their_slot(opened: Any, placed: Placed, q8: bool) -> None:
    """Of a head of 64 the first 24 pairs turn; the other slot and the positions around the chunk are left alone."""
    heads, kv_heads, width, pairs, positions, eps = 3, 1, 64, 24, START + COUNT, 0.5
    rng = np.random.default_rng(3)
    qkv = rng.standard_normal((COUNT, heads + 2 * kv_heads, width)).astype(np.float32)
    norms = rng.uniform(0.5, 1.5, (2, width)).astype(np.float32)
    angle = rng.uniform(0, 6, (positions, pairs))
    rope = np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)
    kind = np.int8 if q8 else np.float16
    sides = [placed.put(np.full((2, kv_heads, positions, width), 7, kind)) for _ in range(2)]
    scales = [placed.put(np.full((2, kv_heads, positions, width // 32), 7, np.float16)) for _ in range(2)]
    q = placed.put(np.full((MOST, heads, width), 7, np.float16))
    program = load_kernel(
        opened, "store_qkv", buffers=10, values=1, HEADS=heads, KV_HEADS=kv_heads, HEAD_DIM=width, POSITIONS=positions,
        CACHE_Q8=q8, ROPE=2 if q8 else 1, ROPE_PAIRS=pairs, QK_NORM=q8, EPS=f"{eps}f", WARPS=4,
    )  # fmt: skip
    buffers = (q, *sides, *scales, placed.put(qkv), *map(placed.put, norms), placed.put(rope), chunk(placed))
    run(program, buffers, (MOST, 2, 1), 128, positions)

    def turned(x: np.ndarray, norm: np.ndarray) -> np.ndarray:
        x = x.astype(np.float64)
        if q8:
            x = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps) * norm
        first, second = (np.s_[:pairs], np.s_[pairs : 2 * pairs]) if q8 else (np.s_[0:48:2], np.s_[1:48:2])
        cos, sin = rope[:, START:, None]
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first], x[..., second] = a * cos - b * sin, a * sin + b * cos
        return x

    found = placed.get(q, (MOST, heads, width), np.float16)
    np.testing.assert_allclose(found[:COUNT], turned(qkv[:, :heads], norms[0]), rtol=2e-3, atol=1e-3)
    assert (found[COUNT:] == 7).all()
    for side, scale, exact in zip(sides, scales, (turned(qkv[:, 3:4], norms[1]), qkv[:, 4:]), strict=True):
        cache = placed.get(side, (2, positions, width), kind).astype(np.float64)
        assert (cache[0] == 7).all()
        assert (cache[1, :START] == 7).all()
        steps = np.repeat(placed.get(scale, (2, positions, 2), np.float16).astype(np.float64), 32, axis=-1)
        stored = cache[1, START:] * (steps[1, START:] if q8 else 1)
        np.testing.assert_allclose(stored, exact[:, 0], atol=0.02 if q8 else 2e-3)
