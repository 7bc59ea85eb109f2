"""/dev/nvmap: handles, dmabufs, mappings. Most of what it refuses is in the rules (tegrad/conformance/s2_nvmap.py)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import replace
from typing import Any

import pytest
from driver_user import MEMORY, TAGGED, User, refused

from tegrad.orin import connection
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

GIB = 1 << 30


def test_create_64_takes_more_than_four_gib(user: User) -> None:
    arg = s.CreateHandle(size64=4 * GIB + 5)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_CREATE_64, arg)
    assert arg.handle64 >= 1 << 31
    user.alloc(arg.handle64)
    assert os.fstat(user.get_fd(arg.handle64)).st_size == 4 * GIB + 4096
    user.free(arg.handle64)


def test_numa_nodes_end_at_64(user: User) -> None:
    with refused(errno.EINVAL):
        arg = s.AllocHandle(user.create(4096), k.NVMAP_HEAP_IOVMM, TAGGED, 4096, 64)
        user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_ALLOC, arg)


def test_get_fd_makes_a_new_close_on_exec_fd_at_the_lowest_number(user: User) -> None:
    handle = user.create(4096)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    fd = user.get_fd(handle)
    assert fd == free
    assert not os.get_inheritable(fd)
    assert user.get_fd(handle) != fd


def test_from_fd_refuses_what_is_no_allocated_buffer(user: User) -> None:
    fresh = user.buffer(allocate=False)
    for number, code in ((fresh.fd, errno.EINVAL), (user.ctrl, errno.EINVAL), (987654, errno.EBADF)):
        with refused(code):
            user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_FROM_FD, s.CreateHandle(fd=number))


def test_a_buffer_that_only_an_fd_holds_is_still_a_buffer(user: User) -> None:
    buffer = user.buffer(5000)
    memory = user.mapped(buffer)
    memory[4999] = 9
    user.free(buffer.handle)
    arg = s.CreateHandle(fd=buffer.fd)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_FROM_FD, arg)
    assert arg.handle not in (0, buffer.handle)
    assert _parameters(user, arg.handle).size == 8192
    assert user.map(user.address_space(), buffer.fd)
    assert memory[4999] == 9


# ---- mmap ----------------------------------------------------------------------------------------------------------


def test_mmap_of_nothing_is_einval(user: User) -> None:
    with refused(errno.EINVAL):
        user.kernel.mmap(user.buffer(8192).fd, 0, mmap.PROT_READ, mmap.MAP_SHARED)


def test_the_flag_for_read_only_memory_changes_nothing(user: User) -> None:
    """nvmap looks at it for memory of a process that FROM_VA takes, and nowhere else."""
    buffer = user.buffer(flags=TAGGED | k.NVMAP_HANDLE_RO)
    user.mapped(buffer)[0] = 7
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_WRITE, _rw(user, buffer.handle, ctypes.create_string_buffer(b"abc")))
    assert bytes(user.mapped(buffer)[:3]) == b"abc"
    assert _parameters(user, buffer.handle).access_flags == 0


def test_a_client_cannot_change_a_buffers_size(user: User) -> None:
    fd = user.buffer().fd
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 0)


# ---- DUP_HANDLE and SET_TAG_LABEL ----------------------------------------------------------------------------------


def _dup(user: User, handle: int, access: int) -> int:
    arg = s.DuplicateHandle(handle=handle, access_flags=access)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_DUP_HANDLE, arg)
    return arg.dup_handle


def test_a_duplicate_is_another_handle_over_the_same_memory(user: User) -> None:
    buffer = user.buffer()
    user.mapped(buffer)[7] = 9
    handle = _dup(user, buffer.handle, 0)
    assert handle != buffer.handle
    user.free(buffer.handle)
    with refused(errno.ENODEV):
        _parameters(user, buffer.handle)
    assert user.mapped(type(buffer)(handle, user.get_fd(handle), 4096))[7] == 9


def test_a_read_only_duplicate_cannot_be_written_through(user: User) -> None:
    buffer = user.buffer()
    user.mapped(buffer)[7] = 9
    handle = _dup(user, buffer.handle, k.NVMAP_HANDLE_RO)
    assert handle != buffer.handle
    fd = user.get_fd(handle)
    with refused(errno.EACCES):
        user.kernel.mmap(fd, 4096, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED)
    address = user.kernel.mmap(fd, 4096, mmap.PROT_READ, mmap.MAP_SHARED)
    assert ctypes.c_uint8.from_address(address + 7).value == 9
    data = ctypes.create_string_buffer(4)
    with refused(errno.EPERM):
        user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_WRITE, _rw(user, handle, data))
    user.mapped(buffer)[7] = 10
    with refused(errno.EPERM):
        _dup(user, handle, 0)
    user.kernel.munmap(address, 4096)


def test_duplicates_of_what_is_no_buffer_are_refused(user: User, settled: None) -> None:
    with refused(errno.EINVAL):
        _dup(user, 0x8FFFFFFF, 0)
    handle = user.create(4096)
    for rights in (0, k.NVMAP_HANDLE_RO):
        with refused(errno.EBADF):
            _dup(user, handle, rights)
    user.free(handle)


def test_a_tags_label_is_read_from_the_caller(user: User) -> None:
    label = ctypes.create_string_buffer(b"weights" * 20)
    arg = s.SetTagLabel(tag=0x900, len=len(label), addr=ctypes.addressof(label))
    assert user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_SET_TAG_LABEL, arg) == 0
    with refused(errno.EFAULT):
        user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_SET_TAG_LABEL, s.SetTagLabel(tag=0x900, len=7, addr=64))


# ---- READ and WRITE ------------------------------------------------------------------------------------------------


def _rw(user: User, handle: int, data: ctypes.Array[ctypes.c_char], **fields: int) -> s.RwHandle:
    size = len(data)
    values = {"offset": 0, "elem_size": size, "hmem_stride": size, "user_stride": size, "count": 1}
    return s.RwHandle(addr=ctypes.addressof(data), handle=handle, **values | fields)


def test_write_then_read_with_strides(user: User) -> None:
    handle = user.buffer().handle
    source = ctypes.create_string_buffer(b"abXXcdXX", 8)
    arg = _rw(user, handle, source, elem_size=2, user_stride=4, hmem_stride=8, count=2, offset=16)
    assert user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_WRITE, arg) == 0
    assert arg.count == 4
    back = ctypes.create_string_buffer(26)
    arg = _rw(user, handle, back)
    assert user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_READ, arg) == 0
    assert arg.count == 26
    assert back.raw == bytes(16) + b"ab" + bytes(6) + b"cd"
    apart = ctypes.create_string_buffer(b"........", 8)
    arg = _rw(user, handle, apart, elem_size=2, user_stride=5, hmem_stride=8, count=2, offset=16)
    assert user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_READ, arg) == 0
    assert (arg.count, apart.raw) == (4, b"ab...cd.")


def test_large_read_and_write(user: User) -> None:
    handle = user.buffer(300_000).handle
    pattern = bytes(i * 7 & 0xFF for i in range(300_000))
    source = ctypes.create_string_buffer(pattern, 300_000)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_WRITE, _rw(user, handle, source))
    back = ctypes.create_string_buffer(300_000)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_READ, _rw(user, handle, back))
    assert back.raw == pattern


@pytest.mark.parametrize("row", [io.NVMAP_IOC_READ, io.NVMAP_IOC_WRITE])
def test_what_is_left_at_a_bad_address_counts_as_moved(user: User, row: io.Ioctl) -> None:
    handle, once = user.buffer(8192).handle, replace(row, sleeps=True)
    page = user.kernel.mmap(-1, 8192, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    user.kernel.munmap(page + 4096, 4096)
    whole = {"handle": handle, "elem_size": 8192, "hmem_stride": 8192, "user_stride": 8192, "count": 1}
    arg = s.RwHandle(addr=page + 1000, **whole)
    with refused(errno.EINTR):
        user.kernel.ioctl(user.nvmap, once, arg)
    assert arg.count == 8192 - 3096
    arg = s.RwHandle(addr=page + 4096, **whole)
    assert user.kernel.ioctl(user.nvmap, once, arg) == 0
    assert arg.count == 8192
    user.kernel.munmap(page, 4096)


RW_REFUSED = [
    ("end past the buffer", {"offset": 4095}, errno.EINVAL),
    ("users stride past the buffer", {"user_stride": 4097}, errno.EINVAL),
]


@pytest.mark.parametrize("row", [io.NVMAP_IOC_READ, io.NVMAP_IOC_WRITE])
@pytest.mark.parametrize(("fields", "number"), [r[1:] for r in RW_REFUSED], ids=[r[0] for r in RW_REFUSED])
def test_read_and_write_refuse(user: User, row: io.Ioctl, fields: dict[str, int], number: int) -> None:
    data = ctypes.create_string_buffer(4)
    arg = _rw(user, user.buffer(4096).handle, data)
    for name, value in fields.items():
        setattr(arg, name, value)
    with refused(number):
        user.kernel.ioctl(user.nvmap, row, arg)


# ---- cache maintenance and queries ---------------------------------------------------------------------------------


def test_cache_maintenance_of_a_mapped_range(user: User) -> None:
    buffer = user.buffer(8192)
    address = ctypes.addressof(user.mapped(buffer))
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_CACHE, s.CacheOp(address, buffer.handle, 8192, k.NVMAP_CACHE_OP_WB))
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_CACHE_64, s.CacheOp64(address + 64, buffer.handle, 64, 2))


def test_cache_maintenance_where_nothing_is_mapped(user: User) -> None:
    with refused(errno.EADDRNOTAVAIL):
        user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_CACHE, s.CacheOp(8, user.buffer().handle, 64, 0))


def test_carveouts_tell_their_size_and_have_no_room(user: User) -> None:
    size = s.HeapSize(heap=k.NVMAP_HEAP_CARVEOUT_VPR)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_GET_HEAP_SIZE, size)
    query = s.QueryHeapParams(heap_mask=k.NVMAP_HEAP_CARVEOUT_VPR)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_QUERY_HEAP_PARAMS, query)
    assert query.total == size.size > 0
    assert query.free == 0
    for heap in (k.NVMAP_HEAP_IOVMM, k.NVMAP_HEAP_CARVEOUT_TSEC, 0):
        with refused(errno.ENODEV):
            user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_GET_HEAP_SIZE, s.HeapSize(heap=heap))


def test_system_memory_is_the_boards(user: User) -> None:
    query = s.QueryHeapParams(heap_mask=k.NVMAP_HEAP_IOVMM)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_QUERY_HEAP_PARAMS, query)
    assert query.total == MEMORY


def _parameters(user: User, handle: int) -> s.HandleParameters:
    arg = s.HandleParameters(handle=handle)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_PARAMETERS, arg)
    return arg


@pytest.mark.parametrize("row", [io.NVMAP_IOC_WRITE, io.NVMAP_IOC_READ], ids=["write", "read"])
def test_write_and_read_keep_the_buffer_whose_handle_another_thread_frees(
    user: User, monkeypatch: pytest.MonkeyPatch, row: Any
) -> None:
    """While they wait for the caller's memory; what gets the memory's number next is somebody else's."""
    serve, others, size = connection.serve, list[int](), 2048
    data = (ctypes.c_uint8 * size)(*b"A" * size)

    def move(row: Any, handle: int, *, apart: int = 0) -> None:
        own = {"elem_size": size // 2 - apart, "hmem_stride": size // 2, "user_stride": size // 2, "count": 2}
        user.kernel.ioctl(user.nvmap, row, row.struct(addr=ctypes.addressof(data), handle=handle, **own))

    def meanwhile(message: Any) -> Any:
        if not others:
            others.append(0)
            user.free(handle)
            for _ in range(3):
                others.append(user.create(size))
                user.alloc(others[-1])
        return serve(message)

    handle = user.create(size)
    user.alloc(handle)
    move(io.NVMAP_IOC_WRITE, handle)
    monkeypatch.setattr(connection, "serve", meanwhile)
    move(row, handle, apart=8)
    assert bytes(data) == b"A" * size
    for other in others[1:]:
        move(io.NVMAP_IOC_READ, other)
        assert bytes(data) == bytes(size)
        user.free(other)
