"""The embedding kernel's rows are the matrix's, in every format, and its int8 form is what the next product reads."""

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tegrad.llm import packing
from tegrad.llm.gguf import BF16, BLOCK_TYPES, F16, F32, Q8_0, BlockType
from tegrad.llm.programs import load_kernel
from tegrad.llm.state import State

pytestmark = pytest.mark.board

ROWS, POSITIONS = 37, 11


@pytest.fixture
def place(device: str) -> Iterator[Callable[[np.ndarray], Any]]:
    """A function that copies an array into a new buffer of the device."""
    from tinygrad import Device
    from tinygrad.device import BufferSpec

    allocator, spec, made = Device[device].allocator, BufferSpec(nolru=True), []

    def copy(array: np.ndarray) -> Any:
        buffer = allocator.alloc(array.nbytes, spec)
        made.append(buffer)
        allocator._copyin(buffer, memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8)))
        return buffer

    yield copy
    for buffer in made:
        allocator.free(buffer, buffer.size, spec)


def content(buffer: Any, like: np.ndarray) -> np.ndarray:
    out = np.empty_like(like)
    buffer.owner.allocator._copyout(memoryview(out.reshape(-1).view(np.uint8)), buffer)
    return out


def random_matrix(kind: BlockType, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A packed matrix with ordinary scales, and its weights."""
    rng = np.random.default_rng(kind.size)
    blocks = rng.integers(0, 256, (rows, columns // kind.elements, kind.size), dtype=np.uint8)
    for at in {"F16": [0], "Q4_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(kind.name, []):
        blocks[..., at : at + 2] = rng.standard_normal((*blocks.shape[:2], 1)).astype(np.float16).view(np.uint8)
    if kind in (F32, BF16):
        blocks = rng.standard_normal((*blocks.shape[:2], 1)).astype(np.float32).view(np.uint8)[..., -kind.size :]
    packed = packing.pack(kind, blocks, rows, columns)
    return packed, packing.dequantize_packed(kind, packed, rows, columns)


def states(tokens: list[int], positions: list[int]) -> np.ndarray:
    made = (State * len(tokens))(*(State(token=t, position=p) for t, p in zip(tokens, positions, strict=True)))
    return np.frombuffer(ctypes.string_at(made, ctypes.sizeof(made)), np.uint8)


@pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
def test_rows_of_tokens_are_embedded_in_every_format(
    device: str, place: Callable[[np.ndarray], Any], kind: BlockType
) -> None:
    from tinygrad import Device

    packed_kind = kind not in packing.PLAIN
    columns = 768 if packed_kind else 328  # of neither a segment's nor a block of threads' size
    packed, weights = random_matrix(kind, ROWS, columns)
    # The last one is of a slot that nobody owns.
    tokens, at = [0, 36, 17, 1 << 30], [3, 9, 0, 1 << 20]
    rows = weights[[0, 36, 17, 0]]
    x = np.zeros((4, columns), np.float32)
    defines: dict[str, object] = {"K": columns, "ROWS": ROWS, "FORMAT": kind.name}
    buffers = [place(states(tokens, at)), place(packed)]
    if packed_kind:
        norm = np.random.default_rng(1).standard_normal(columns).astype(np.float32)
        q, s = np.zeros((4, columns), np.int8), np.zeros((4, columns // 16), np.float32)
        ss = np.zeros((4, columns // 32), np.float32)
        outputs = [place(array) for array in (x, norm, q, s, ss)]
        defines["OUT_Q"] = True
    else:
        table, learned = random_matrix(F16, POSITIONS, columns)
        buffers.append(place(table))
        outputs = [place(x)]
        rows = rows + learned[[3, 9, 0, 0]]
        defines |= {"POSITIONS": POSITIONS, "POSITIONS_FORMAT": "F16"}
    buffers += outputs
    program = load_kernel(Device[device], "embed", buffers=len(buffers), **defines)
    program(*buffers, global_size=(-(-columns // 256), 4, 1), local_size=(256, 1, 1), wait=True)

    np.testing.assert_allclose(content(outputs[0], x), rows, rtol=1e-6, atol=1e-6 * np.abs(rows).max())
    if packed_kind:
        normed = (content(outputs[0], x) * norm).reshape(4, -1, 16)
        largest = np.abs(normed).max(axis=-1)
        np.testing.assert_allclose(content(outputs[3], s), largest / 127, rtol=1e-6)
        levels = normed * (127 / largest)[..., None]
        assert np.abs(content(outputs[2], q).reshape(levels.shape) - levels).max() < 0.5001
        np.testing.assert_allclose(content(outputs[4], ss), (rows**2).reshape(4, -1, 32).sum(-1), rtol=1e-5)


def test_a_chunks_tokens_stand_one_behind_the_other(device: str, place: Callable[[np.ndarray], Any]) -> None:
    from tinygrad import Device

    packed, weights = random_matrix(Q8_0, ROWS, 64)
    table, learned = random_matrix(F32, POSITIONS, 64)
    tokens = np.array([5, 5, 30], np.int32)
    out = np.zeros((3, 64), np.float32)
    buffers = [place(array) for array in (states([1], [7]), tokens, packed, table, out)]
    program = load_kernel(
        Device[device], "embed", buffers=5, K=64, ROWS=ROWS, FORMAT="Q8_0", TOKENS=1, POSITIONS=POSITIONS,
        POSITIONS_FORMAT="F32",
    )  # fmt: skip
    program(*buffers, global_size=(1, 3, 1), local_size=(256, 1, 1), wait=True)
    expected = weights[tokens] + learned[[7, 8, 9]]
    np.testing.assert_allclose(content(buffers[4], out), expected, rtol=1e-6, atol=1e-6 * np.abs(expected).max())
