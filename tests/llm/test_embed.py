"""The embedding kernel's rows are the matrix's, in every format, and its int8 form is what the next product reads."""

import ctypes
from typing import Any

import numpy as np
import packs
import pytest
from operands import Operands

from tegrad.llm import formats, packing
from tegrad.llm.formats import BF16, BLOCK_TYPES, F16, F32, BlockType
from tegrad.llm.programs import load_kernel
from tegrad.llm.state import State

pytestmark = pytest.mark.board

ROWS, POSITIONS = 37, 11
TOKENS, AT = (0, 36, 17, 1 << 30), (3, 9, 0, 1 << 20)
"""The last one is of a slot that nobody owns."""


def random_matrix(kind: BlockType, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A packed matrix with ordinary scales, and its weights."""
    rng = np.random.default_rng(kind.size)
    packed = packing.pack(kind, packs.blocks(kind, rng, rows * columns // kind.elements), rows, columns)
    return packed, packing.dequantize_packed(kind, packed, rows, columns)


def states() -> np.ndarray:
    made = (State * len(TOKENS))(*(State(token=t, position=p) for t, p in zip(TOKENS, AT, strict=True)))
    return np.frombuffer(ctypes.string_at(made, ctypes.sizeof(made)), np.uint8)


def close_to(ours: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("kind", formats.PACKED, ids=lambda kind: kind.name)
def test_rows_of_packed_matrices_are_embedded_and_quantized(opened: Any, operands: Operands, kind: BlockType) -> None:
    columns = 768  # of neither a segment's nor a block of threads' size
    packed, weights = random_matrix(kind, ROWS, columns)
    rows = weights[[0, 36, 17, 0]]
    norm = np.random.default_rng(1).standard_normal(columns).astype(np.float32)
    given = [operands.put(array) for array in (states(), packed)]
    x = operands.zeros((4, columns), np.float32)
    weight = operands.put(norm)
    q, s, ss = (operands.zeros((4, size), kind) for size, kind in ((768, np.int8), (48, np.float32), (24, np.float32)))
    program = load_kernel(opened, "embed", buffers=7, K=columns, ROWS=ROWS, FORMAT=kind.name, OUT_Q=True)
    program(*given, x, weight, q, s, ss, global_size=(3, 4, 1), local_size=(256, 1, 1))
    embedded = operands.get(x, (4, columns), np.float32)
    close_to(embedded, rows)
    normed = (embedded * norm).reshape(4, 48, 16)
    largest = np.abs(normed).max(axis=-1)
    close_to(operands.get(s, (4, 48), np.float32), largest / 127)
    levels = normed * np.divide(127, largest, out=np.zeros_like(largest), where=largest > 0)[..., None]
    assert np.abs(operands.get(q, (4, 48, 16), np.int8) - levels).max() < 0.5001
    sums = (rows**2).reshape(4, 24, 32).sum(-1)
    np.testing.assert_allclose(operands.get(ss, (4, 24), np.float32), sums, rtol=1e-5)


@pytest.mark.parametrize(("kind", "learned"), [(F16, BF16), (BF16, F32), (F32, F16)], ids=["F16", "BF16", "F32"])
def test_rows_of_plain_matrices_are_embedded_with_their_positions(
    opened: Any, operands: Operands, kind: BlockType, learned: BlockType
) -> None:
    columns = 328
    assert {kind, learned} <= set(BLOCK_TYPES.values())
    (matrix, weights), (table, vectors) = random_matrix(kind, ROWS, columns), random_matrix(learned, POSITIONS, columns)
    given = [operands.put(array) for array in (states(), matrix, table)]
    x = operands.zeros((4, columns), np.float32)
    defines = {"FORMAT": kind.name, "POSITIONS": POSITIONS, "POSITIONS_FORMAT": learned.name}
    program = load_kernel(opened, "embed", buffers=4, K=columns, ROWS=ROWS, **defines)
    program(*given, x, global_size=(2, 4, 1), local_size=(256, 1, 1))
    close_to(operands.get(x, (4, columns), np.float32), weights[[0, 36, 17, 0]] + vectors[[3, 9, 0, 0]])
