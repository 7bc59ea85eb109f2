"""What a GPU is to hold for long or in bulk: small here, at its size with `--full`.

`--full` needs a GPU with more than 8 GiB free; what it found is in the report (`--junitxml`) as properties.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness import driver_fds, driver_maps, fill, words

from tegrad.uapi.errors import DriverError

pytestmark = pytest.mark.board

MIB, GIB = 1 << 20, 1 << 30
Note = Callable[[str, object], None]


@dataclass(frozen=True)
class Size:
    """How much of everything."""

    product: int
    """Rows and columns of the matrices."""
    seconds: float
    kept: int
    """Bytes that are held at once."""
    piece: int
    """Bytes of a buffer on the way to exhaustion."""
    copy: int
    """Bytes of a copy."""


SMALL, FULL = Size(48, 1.0, 64 * MIB, GIB, 4 * MIB), Size(1024, 60.0, 8 * GIB, GIB, 256 * MIB)


@pytest.fixture(scope="module")
def size(full: bool) -> Size:
    """The sizes of this run."""
    return FULL if full else SMALL


def test_products_for_a_while(size: Size, record_property: Note) -> None:
    """A rotation's powers, kept as floats: each product is compared with the angle that it has come to."""
    from tinygrad import Tensor, TinyJit

    count, angle = size.product, 2 * np.pi / 1000
    rotation = np.kron(np.eye(count // 2), [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix, start = Tensor(rotation.astype(np.float32)).realize(), np.eye(count, dtype=np.float32)

    @TinyJit
    def step(x: Any) -> Any:
        for _ in range(8):
            x = matrix @ x
        return x.realize()

    turns, x, until = 0, Tensor(start).realize(), time.monotonic() + size.seconds
    while time.monotonic() < until:
        x, turns = step(x).clone().realize(), turns + 8
        if not turns % 1000:  # rounding grows with each
            corner = x[:2, :2].numpy()
            np.testing.assert_allclose(corner, np.eye(2), atol=1e-3)
            x = Tensor(start).realize()
    turned = turns % 1000 * angle
    got = x.numpy()
    expected = np.kron(np.eye(count // 2), [[np.cos(turned), -np.sin(turned)], [np.sin(turned), np.cos(turned)]])
    np.testing.assert_allclose(got, expected, atol=1e-3)
    record_property("products", turns)


def test_memory_is_held_to_its_last_byte(device: Any, size: Size) -> None:
    """Buffers that double up to the size, all at once, each with a mark at both ends."""
    from tinygrad.device import BufferSpec

    spec, kept, length = BufferSpec(nolru=True), [], MIB
    try:
        while length <= size.kept // 2:
            kept.append((device.allocator.alloc(length, spec), length))
            mark = bytearray(len(kept).to_bytes(4, "little"))
            fill(kept[-1][0], mark)
            fill(kept[-1][0].offset(length - 4, 4), mark)
            length *= 2
        for number, (buffer, held) in enumerate(kept, 1):
            assert words(buffer) == words(buffer.offset(held - 4, 4)) == [number]
    finally:
        for buffer, held in kept:
            device.allocator.free(buffer, held, spec)


def pieces(device: Any, length: int, spec: Any) -> list[Any]:
    """Buffers until there is no memory for another."""
    kept: list[Any] = []
    with suppress(MemoryError, DriverError):
        while len(kept) < 4096:
            kept.append(device.allocator.alloc(length, spec))
    assert len(kept) < 4096
    return kept


def test_memory_to_the_last_piece(device: Any, size: Size, record_property: Note) -> None:
    """An allocation that is too much is one error, after which everything else goes on, and all comes back."""
    from tinygrad.device import BufferSpec

    spec, rounds = BufferSpec(nolru=True), []
    device.allocator.free_cache()
    for _ in range(2):
        kept = pieces(device, size.piece, spec)
        rounds.append(len(kept))
        assert len(kept) > 1
        last = kept[-1].offset(size.piece - 4, 4)
        fill(last, bytearray(b"\x07\0\0\0"))
        assert words(last) == [7]
        for buffer in kept:
            device.allocator.free(buffer, size.piece, spec)
    record_property("most bytes", rounds[0] * size.piece)
    assert abs(rounds[0] - rounds[1]) <= 1  # another program may have taken or given back some


def test_a_thousand_allocations_that_no_cache_holds(device: Any, record_property: Note) -> None:
    from tinygrad.device import BufferSpec

    spec = BufferSpec(nolru=True)
    device.allocator.free(device.allocator.alloc(4096, spec), 4096, spec)
    device.allocator.free_cache()
    fds, maps, start = driver_fds(), driver_maps(), time.perf_counter()
    for turn in range(1000):
        length = 4096 * (1 + turn % 64)
        buffer = device.allocator.alloc(length, spec)
        device.allocator.free(buffer, length, spec)
    record_property("microseconds each", round((time.perf_counter() - start) * 1e3, 1))
    device.allocator.free_cache()
    gc.collect()
    assert (driver_fds(), driver_maps()) == (fds, maps)


def test_copies_through_the_copy_engine(device: Any, size: Size, record_property: Note) -> None:
    """In, from buffer to buffer, and out: every byte."""
    from tinygrad.device import BufferSpec

    from tegrad.nv.queues import NVCopyQueue

    data = np.random.default_rng(3).integers(0, 256, size.copy, dtype=np.uint8)
    source, target = (device.allocator.alloc(size.copy) for _ in range(2))
    seen = np.empty_like(data)
    start = time.perf_counter()
    device.allocator._copyin(source, memoryview(data))
    device.synchronize()
    middle = time.perf_counter()
    done = device.new_signal(value=0)
    NVCopyQueue().wait(device.timeline_signal, device.timeline_value - 1).copy(target, source, size.copy).signal(
        done, 1
    ).submit(device)
    done.wait(1)
    device.allocator._copyout(memoryview(seen), target)
    assert (seen == data).all()
    record_property("GB/s in", round(size.copy / (middle - start) / 1e9, 2))
    device.allocator.free(source, size.copy, BufferSpec())
    device.allocator.free(target, size.copy, BufferSpec())
