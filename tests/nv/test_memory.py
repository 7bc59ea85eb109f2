"""Buffers: how they are asked for, what is undone when a step fails, what MemoryError means."""

import ctypes
import errno
import mmap
from pathlib import Path

import pytest
from fake import FakeKernel

from tegrad.nv import memory
from tegrad.nv.faults import UnsupportedBuffer
from tegrad.nv.memory import AddressSpace, Nvmap
from tegrad.uapi import constants as c
from tegrad.uapi.errors import DriverError
from tegrad.uapi.structs import AllocHandle


@pytest.fixture
def kernel() -> FakeKernel:
    return FakeKernel()


@pytest.fixture
def nvmap(kernel: FakeKernel) -> Nvmap:
    return Nvmap(kernel, "/dev/nvmap")


def asked(kernel: FakeKernel) -> AllocHandle:
    arg = next(arg for name, arg in reversed(kernel.calls) if name == "NVMAP_ALLOC")
    assert isinstance(arg, AllocHandle)
    return arg


@pytest.mark.parametrize(
    ("size", "align"), [(1, 4096), (4096, 4096), ((8 << 20) - 1, 4096), (8 << 20, 2 << 20), (64 << 20, 2 << 20)]
)
def test_large_buffers_are_aligned_to_2_mib(kernel: FakeKernel, nvmap: Nvmap, size: int, align: int) -> None:
    buffer = nvmap.alloc(size)
    assert asked(kernel).align == align
    assert asked(kernel).heap_mask == c.NVMAP_HEAP_IOVMM
    nvmap.free(buffer)


def test_sizes_from_4_gib_use_create_64(kernel: FakeKernel, nvmap: Nvmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 1 << 40)
    for size, call in (((1 << 32) - 4096, "NVMAP_CREATE"), (1 << 32, "NVMAP_CREATE_64"), (5 << 30, "NVMAP_CREATE_64")):
        kernel.calls.clear()
        buffer = nvmap.alloc(size)
        assert kernel.calls[0][0] == call
        ctypes.c_uint8.from_address(buffer.address + size - 1).value = 7
        nvmap.free(buffer)
    assert kernel.handles == {}


@pytest.mark.parametrize("step", ["NVMAP_CREATE", "NVMAP_ALLOC", "NVMAP_GET_FD", "mmap"])
def test_a_failing_step_leaves_nothing_behind(kernel: FakeKernel, nvmap: Nvmap, step: str) -> None:
    kernel.fail[step] = errno.EINVAL
    with pytest.raises(DriverError):
        nvmap.alloc(4096)
    assert kernel.held() == {"fds": 1, "handles": 0, "maps": 0, "gpu maps": 0}


@pytest.mark.parametrize("step", ["NVMAP_CREATE", "NVMAP_ALLOC"])
def test_enomem_is_a_memory_error(kernel: FakeKernel, nvmap: Nvmap, step: str) -> None:
    kernel.fail[step] = errno.ENOMEM
    with pytest.raises(MemoryError, match="driver"):
        nvmap.alloc(4096)
    assert kernel.handles == {}


def test_the_system_keeps_its_reserve(kernel: FakeKernel, nvmap: Nvmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: memory.RESERVE_BYTES + (1 << 20))
    nvmap.free(nvmap.alloc(1 << 20))
    with pytest.raises(MemoryError, match="reserved"):
        nvmap.alloc((1 << 20) + 1)


def meminfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **mib: int) -> None:
    """Let the machine have so much memory, and nvmap a pool of 64 MiB."""
    (tmp_path / "meminfo").write_text("".join(f"{name}: {size << 10:8} kB\n" for name, size in mib.items()))
    (tmp_path / "pool_size").write_text(f"{(64 << 20) // 4096}\n")
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "POOL_SIZE", tmp_path / "pool_size")


def test_memory_for_cma_alone_is_none_of_nvmap_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo(tmp_path, monkeypatch, MemTotal=4096, MemFree=900, MemAvailable=1000, CmaTotal=256, CmaFree=200)
    assert memory.available_memory() == 800 << 20
    meminfo(tmp_path, monkeypatch, MemAvailable=1000)
    assert memory.available_memory() == 1000 << 20
    meminfo(tmp_path, monkeypatch, MemTotal=4096)
    assert memory.available_memory() > 1 << 60


def test_what_nvmap_keeps_of_freed_memory_is_said(
    nvmap: Nvmap, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it may be what is lacking: a second run of a model that just fitted finds that much less."""
    meminfo(tmp_path, monkeypatch, MemAvailable=(memory.RESERVE_BYTES >> 20) + 16)
    with pytest.raises(MemoryError, match=r"nvmap may keep 67108864 bytes .*drop_caches$"):
        nvmap.alloc(80 << 20)
    with pytest.raises(MemoryError, match=r"smaller model or batch$"):
        nvmap.alloc(81 << 20)
    (tmp_path / "pool_size").unlink()
    with pytest.raises(MemoryError, match=r"smaller model or batch$"):
        nvmap.alloc(80 << 20)


def test_a_dmabuf_is_never_fd_0(kernel: FakeKernel, nvmap: Nvmap, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([0, 5])
    closed: list[int] = []
    monkeypatch.setattr(kernel, "nvmap_get_fd", lambda _, arg: setattr(arg, "fd", next(numbers)), raising=False)
    monkeypatch.setattr(kernel, "close", closed.append)
    with nvmap.export(memory.Memory(1, 4096, 0)) as fd:
        assert fd == 5
    assert sorted(closed) == [0, 5]


def test_the_cpu_sees_a_buffer_at_the_gpus_address(kernel: FakeKernel, nvmap: Nvmap) -> None:
    """tinygrad writes host buffers through their GPU address; where something else lies there, any address will do."""
    space = AddressSpace(kernel, kernel._fd("as", None))
    first = nvmap.alloc(10000, space=space)
    assert first.address == first.va != 0
    ctypes.memset(first.va, 7, 10000)
    nvmap.free(first, space)
    taken = kernel._next_va
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    placed = kernel._linux.mmap(-1, 4096, mmap.PROT_READ, flags, addr=taken)  # elsewhere if the program lies there
    second = nvmap.alloc(10000, space=space)
    assert second.va == taken != second.address
    nvmap.free(second, space)
    kernel._linux.munmap(placed, 4096)


def test_adopted_memory_keeps_its_contents_and_its_address(kernel: FakeKernel, nvmap: Nvmap) -> None:
    own = mmap.mmap(-1, 10000)
    own[:4] = b"abcd"
    address = ctypes.addressof(ctypes.c_char.from_buffer(own))
    space = AddressSpace(kernel, kernel._fd("as", None))
    buffer = nvmap.adopt(address, 10000, space)
    assert own[:4] == b"abcd"
    with nvmap.export(buffer) as fd:
        seen = kernel.mmap(fd, 4096, mmap.PROT_READ, mmap.MAP_SHARED)
    own[:4] = b"wxyz"
    assert ctypes.string_at(seen, 4) == b"wxyz"
    nvmap.free(buffer, space)
    assert own[:4] == b"wxyz"
    kernel.munmap(seen, 4096)
    kernel.maps.pop(address)
    space.close()
    assert kernel.held() == {"fds": 1, "handles": 0, "maps": 0, "gpu maps": 0}


def test_memory_inside_a_page_cannot_be_adopted(kernel: FakeKernel, nvmap: Nvmap) -> None:
    with pytest.raises(UnsupportedBuffer, match="start a page"):
        nvmap.adopt(0x1010, 4096, AddressSpace(kernel, 0))


@pytest.mark.parametrize("step", ["NVMAP_GET_FD", "mmap"])
def test_an_adoption_that_fails_leaves_the_memory_as_it_was(
    kernel: FakeKernel, nvmap: Nvmap, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    own = mmap.mmap(-1, 4096)
    own[:4] = b"abcd"
    address = ctypes.addressof(ctypes.c_char.from_buffer(own))
    space = AddressSpace(kernel, kernel._fd("as", None))
    real, done = kernel._fail, []

    def fail(name: str) -> None:
        real(name)
        done.extend([name] if name == step else [])
        if name == step and len(done) == 2:
            raise DriverError(name, errno.EIO)

    monkeypatch.setattr(kernel, "_fail", fail)
    with pytest.raises(DriverError):
        nvmap.adopt(address, 4096, space)
    assert own[:4] == b"abcd"
    assert kernel.held() == {"fds": 2, "handles": 0, "maps": 0, "gpu maps": 0}


def test_a_reservation_is_fixed_and_in_pages(kernel: FakeKernel) -> None:
    space = AddressSpace(kernel, kernel._fd("as", None))
    space.reserve(0xFE00000000, 1 << 32)
    arg = kernel.calls[-1][1]
    assert (arg.flags, arg.page_size, arg.pages) == (c.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET, 4096, 1 << 20)
    assert kernel.reserved == [(0xFE00000000, 1 << 32)]
    space.close()
