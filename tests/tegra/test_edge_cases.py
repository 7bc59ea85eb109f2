"""Fifteen edges: addresses, memory, copies, shapes, types, the ring, caches, grids."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from harness import Backend, driver_fds, driver_maps, fill, words
from kernels import program

pytestmark = pytest.mark.board

MIB = 1 << 20


def random(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def pattern(size: int, seed: int = 0) -> np.ndarray:
    """Bytes of which no stretch repeats soon."""
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def zeroed(device: Any, size: int) -> Any:
    """A buffer of zeros; a plain allocation may be an old buffer."""
    buffer = device.allocator.alloc(size)
    fill(buffer, bytearray(size))
    return buffer


def launch(prg: Any, buffer: Any, value: int, grid: tuple[int, int, int] = (1, 1, 1), block: int = 1) -> None:
    prg(buffer, global_size=grid, local_size=(block, 1, 1), vals=(value,))


# ---- addresses and memory


@contextmanager
def mapped_below(iface: Any, end: int, size: int) -> Iterator[Any]:
    """A buffer in the highest free room below a GPU address."""
    from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

    from tegrad.uapi import constants as c
    from tegrad.uapi import ioctls
    from tegrad.uapi.errors import DriverError
    from tegrad.uapi.structs import AsFreeSpace, AsMapBufferEx

    space, kernel, memory, va = iface._space, iface.kernel, iface.nvmap.alloc(size), end
    reserved = False
    while not reserved:
        va -= size
        with suppress(DriverError):  # taken: the allocator uses the small pieces at the end first
            space.reserve(va, size)
            reserved = True
    try:
        with iface.nvmap.export(memory) as fd:
            flags = c.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET
            arg = AsMapBufferEx(flags=flags, compr_kind=c.NV_KIND_INVALID, dmabuf_fd=fd, page_size=4096, offset=va)
            kernel.ioctl(space.fd, ioctls.NVGPU_AS_IOCTL_MAP_BUFFER_EX, arg)
        assert arg.offset == va
        yield HCQBuffer(va, size, meta=memory, view=MMIOInterface(memory.address, size, fmt="B"), owner=iface.dev)
        iface.dev.synchronize()
        space.unmap(va)
    finally:
        kernel.ioctl(
            space.fd, ioctls.NVGPU_AS_IOCTL_FREE_SPACE, AsFreeSpace(offset=va, pages=size // 4096, page_size=4096)
        )
        iface.nvmap.free(memory)


def test_a_buffer_right_below_the_windows_and_the_40_bit_boundary(device: Any, gpu: Backend) -> None:
    if not gpu.unified_memory:
        pytest.skip("a discrete GPU has no such boundary: its addresses have 49 bits")
    add, size = program(device, "add"), 4 * MIB
    with mapped_below(device.iface, device.iface.chip.local_window, size) as buffer:
        assert buffer.va_addr >> 32 == 0xFC
        last = buffer.offset(size - 4096, 4096)
        assert words(last)[0] == 0
        launch(add, last, 7)
        launch(add, last, 8)
        device.synchronize()
        assert words(last)[0] == 15


def test_progressive_memory_pressure() -> None:
    from tinygrad import Tensor

    kept = []
    for power in range(9):
        size = MIB << power
        kept.append((size, Tensor.full((size // 4,), power + 1).contiguous().realize()))
    for size, tensor in kept:
        assert tensor[-3:].tolist() == [size.bit_length() - 20] * 3
        assert int(tensor.sum().item()) == size // 4 * (size.bit_length() - 20)


def test_a_thousand_allocations_and_frees_leave_nothing(device: Any) -> None:
    def cycle(count: int) -> None:
        for i in range(count):
            device.allocator.free(device.allocator.alloc(4096 * (1 + i % 7)), 4096 * (1 + i % 7))

    cycle(20)
    device.allocator.free_cache()
    fds, maps = driver_fds(), driver_maps()
    cycle(1000)
    device.allocator.free_cache()
    assert driver_fds() == fds
    assert driver_maps() == maps


def test_freed_memory_is_given_back(device: Any, gpu: Backend) -> None:
    """A buffer of which nothing is left cannot be reached: its mappings are gone, and its room is used again."""
    from tinygrad import Tensor

    if not gpu.unified_memory:
        pytest.skip("buffers of a discrete GPU are not mapped in this process")
    device.allocator.free_cache()
    before = driver_maps()
    tensors = [Tensor(pattern(MIB + i)).realize() for i in range(8)]
    assert driver_maps() == before + len(tensors)
    del tensors
    gc.collect()
    device.allocator.free_cache()
    assert driver_maps() == before


# ---- copies


def round_trip(sizes: list[int]) -> None:
    from tinygrad import Tensor

    for size in sizes:
        data = pattern(size, seed=size)
        assert (Tensor(data).realize().contiguous().numpy() == data).all(), size


def test_small_copies() -> None:
    round_trip([1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 63, 64, 65, 127, 255, 256, 257, 511])


def test_medium_copies() -> None:
    round_trip([4095, 4096, 4097, 65535, 65536, 65537, MIB - 1, MIB, MIB + 1])


def test_large_copies() -> None:
    round_trip([16 * MIB - 3, 64 * MIB, 96 * MIB + 5])


# ---- shapes and types


def test_tensors_without_elements() -> None:
    from tinygrad import Tensor

    assert Tensor(np.zeros((0,), np.float32)).numpy().shape == (0,)
    assert (Tensor.ones(3, 0, 2) + 1).numpy().shape == (3, 0, 2)
    assert Tensor.ones(0, 4).sum(0).tolist() == [0, 0, 0, 0]
    assert Tensor.ones(2, 0).cat(Tensor.ones(2, 3), dim=1).numpy().tolist() == [[1] * 3] * 2
    assert (Tensor.ones(2, 0) @ Tensor.ones(0, 3)).numpy().tolist() == [[0] * 3] * 2


def test_tensors_of_one_element() -> None:
    from tinygrad import Tensor

    one = Tensor([3.0])
    assert (one * one + one).item() == 12.0
    assert one.exp().log().item() == pytest.approx(3.0, rel=1e-5)
    assert one.reshape(1, 1, 1).sum().item() == one.max().item() == one.softmax().item() * 3.0
    assert (one.reshape(1, 1) @ one.reshape(1, 1)).item() == 9.0


@pytest.mark.parametrize("shape", [(1, 1009), (13, 7, 5), (3, 1, 17, 2), (257, 129), (1, 1, 1, 31)], ids=str)
def test_odd_shapes(shape: tuple[int, ...]) -> None:
    from tinygrad import Tensor

    a, b = random(*shape), random(*shape, seed=1)
    got = ((Tensor(a) * Tensor(b)).permute(*reversed(range(len(shape)))).contiguous() - 1).numpy()
    np.testing.assert_allclose(got, (a * b).T - 1, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(Tensor(a).sum().item(), a.astype(np.float64).sum(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 127, 1), (17, 1, 33), (31, 63, 65), (129, 3, 7), (5, 255, 2)], ids=str
)
def test_odd_matmuls(shape: tuple[int, int, int]) -> None:
    from tinygrad import Tensor

    m, k, n = shape
    a, b = random(m, k), random(k, n, seed=1)
    np.testing.assert_allclose((Tensor(a) @ Tensor(b)).numpy(), a.astype(np.float64) @ b, rtol=1e-4, atol=1e-4)


DTYPES = [
    "bool",
    "int8",
    "uint8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type(dtype: str) -> None:
    from tinygrad import Tensor

    values = (pattern(101).astype(np.int64) % 31).astype(dtype)
    tensor = Tensor(values)
    assert tensor.numpy().dtype == values.dtype
    assert (tensor.flip(0).contiguous().numpy() == values[::-1]).all()
    if dtype == "bool":
        assert (~tensor).numpy().tolist() == (~values).tolist()
    else:
        assert (tensor + tensor).numpy().tolist() == (values + values).tolist()
        assert (tensor * 3).max().numpy() == (values * np.dtype(dtype).type(3)).max()


def test_bfloat16() -> None:
    """numpy has no such type: small whole numbers, which it holds exactly, go in and come out as float32."""
    from tinygrad import Tensor

    values = (pattern(101).astype(np.int64) % 31).astype(np.float32)
    tensor = Tensor(values).cast("bfloat16").realize()
    assert tensor.element_size() == 2
    assert (tensor.flip(0).contiguous().float().numpy() == values[::-1]).all()
    assert (tensor + tensor).float().numpy().tolist() == (values + values).tolist()
    assert (tensor * 3).max().float().item() == values.max() * 3


# ---- the ring, caches, grids


def test_the_gpfifo_wraps_around(device: Any) -> None:
    """More submissions than the ring has entries, each a kernel that counts."""
    add, buffer = program(device, "add"), zeroed(device, 4096)
    launches = device.compute_gpfifo.entries_count + 300
    put = device.compute_gpfifo.put_value
    for _ in range(launches):
        launch(add, buffer, 1)
    device.synchronize()
    assert words(buffer)[0] == launches
    assert device.compute_gpfifo.put_value - put > device.compute_gpfifo.entries_count
    device.allocator.free(buffer, 4096)


def test_caches_are_invalidated_between_cpu_and_gpu(device: Any) -> None:
    """Write, compute, read; change, compute, read: never the value of the turn before."""
    from tinygrad import Tensor

    data = Tensor(np.zeros(4096, np.int32)).realize()
    for turn in range(20):
        fresh = np.full(4096, turn, np.int32)
        data.assign(Tensor(fresh)).realize()
        got = (data * 2 + 1).numpy()
        assert (got == 2 * turn + 1).all(), turn


def test_a_large_grid(device: Any) -> None:
    """A million blocks in a row, and 65,535 in each of the other directions."""
    stride, size = program(device, "stride"), 1 << 20
    buffer = zeroed(device, 4 * size)
    launch(stride, buffer, size, grid=(size, 1, 1))
    launch(stride, buffer, 1, grid=(1, 65535, 1))
    launch(stride, buffer, 1, grid=(1, 1, 65535))
    device.synchronize()
    view = np.array(words(buffer, size))
    assert (view[1:] == 1).all()
    assert 2 <= view[0] <= 1 + 2 * 65535  # unordered additions of many blocks to one word
    device.allocator.free(buffer, 4 * size)
