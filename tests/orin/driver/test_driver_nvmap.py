"""/dev/nvmap: handles, dmabufs, mappings, and every refusal with its errno."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import replace

import pytest
from driver_user import MEMORY, SPEC, TAGGED, User, refused

from tegrad.orin.client import BoardKernel, board_log
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

GIB = 1 << 30


def test_handles_are_large_unsigned_and_rise(user: User) -> None:
    first, second = user.create(100), user.create(100)
    assert first >= 1 << 31
    assert second > first


@pytest.mark.parametrize("row", [io.NVMAP_IOC_CREATE, io.NVMAP_IOC_CREATE_64])
def test_create_refuses_size_zero(user: User, row: io.Ioctl) -> None:
    with refused(errno.EINVAL):
        user.kernel.ioctl(user.nvmap, row, s.CreateHandle())


def test_create_64_takes_more_than_four_gib(user: User) -> None:
    arg = s.CreateHandle(size64=4 * GIB + 5)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_CREATE_64, arg)
    assert arg.handle64 >= 1 << 31
    user.alloc(arg.handle64)
    assert os.fstat(user.get_fd(arg.handle64)).st_size == 4 * GIB + 4096
    user.free(arg.handle64)


def test_buffer_sizes_are_whole_pages(user: User) -> None:
    assert os.fstat(user.buffer(1).fd).st_size == 4096
    assert os.fstat(user.buffer(4097).fd).st_size == 8192


ALLOC_REFUSED = [
    ("align 3", {"align": 3}, errno.EINVAL),
    ("handle 0", {"handle": 0}, errno.EINVAL),
    ("numa node 64", {"numa_nid": 64}, errno.EINVAL),
    ("unknown handle", {"handle": 0x8FFFFFFF}, errno.EINVAL),
    ("no heap", {"heap_mask": 0}, errno.ENOMEM),
    ("SYSMEM of other trees", {"heap_mask": 1 << 31}, errno.ENOMEM),
    ("absent carveout", {"heap_mask": k.NVMAP_HEAP_CARVEOUT_TSEC}, errno.ENOMEM),
    ("VIDMEM beside another heap", {"heap_mask": k.NVMAP_HEAP_CARVEOUT_VIDMEM | k.NVMAP_HEAP_IOVMM}, errno.EINVAL),
    ("IVM beside another heap", {"heap_mask": k.NVMAP_HEAP_CARVEOUT_IVM | k.NVMAP_HEAP_IOVMM}, errno.EINVAL),
    # The first check that fails decides.
    ("align before handle", {"align": 3, "handle": 0x8FFFFFFF}, errno.EINVAL),
    ("handle before heap", {"handle": 0x8FFFFFFF, "heap_mask": 0}, errno.EINVAL),
]


@pytest.mark.parametrize(
    ("fields", "number"), [row[1:] for row in ALLOC_REFUSED], ids=[row[0] for row in ALLOC_REFUSED]
)
def test_alloc_refuses(user: User, fields: dict[str, int], number: int) -> None:
    arg = s.AllocHandle(user.create(4096), k.NVMAP_HEAP_IOVMM, TAGGED, 4096, -1)
    for name, value in fields.items():
        setattr(arg, name, value)
    with refused(number):
        user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_ALLOC, arg)


def test_alloc_twice_is_eexist_even_with_no_heap(user: User) -> None:
    handle = user.buffer().handle
    with refused(errno.EEXIST):
        user.alloc(handle, heap=0)


def test_generic_heap_falls_back_to_iovmm(user: User) -> None:
    handle = user.create(4096)
    user.alloc(handle, heap=k.NVMAP_HEAP_CARVEOUT_GENERIC)
    assert _parameters(user, handle).heap == k.NVMAP_HEAP_IOVMM


def test_alloc_past_the_boards_memory_is_enomem(user: User) -> None:
    arg = s.CreateHandle(size64=MEMORY + GIB)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_CREATE_64, arg)
    with refused(errno.ENOMEM):
        user.alloc(arg.handle64)


def test_allocation_without_a_tag_is_logged_once_per_client(user: User) -> None:
    before = len(_tag_lines())
    for _ in range(2):
        user.buffer(flags=k.NVMAP_HANDLE_INNER_CACHEABLE)
    assert len(_tag_lines()) == before + 1


def test_allocation_with_a_tag_is_not_logged(user: User) -> None:
    before = len(_tag_lines())
    user.buffer()
    assert len(_tag_lines()) == before


def _tag_lines() -> list[str]:
    return [line for line in board_log(SPEC) if "must have a tag" in line]


def test_memory_starts_zeroed_and_is_shared_by_all_its_mappings(user: User) -> None:
    buffer = user.buffer(8192)
    one, two = user.mapped(buffer), user.mapped(buffer)
    assert bytes(one) == bytes(8192)
    one[5000] = 77
    assert two[5000] == 77


def test_get_fd_makes_a_new_close_on_exec_fd_at_the_lowest_number(user: User) -> None:
    handle = user.create(4096)
    free = os.open("/dev/null", os.O_RDONLY)
    os.close(free)
    fd = user.get_fd(handle)
    assert fd == free
    assert not os.get_inheritable(fd)
    assert user.get_fd(handle) != fd


def test_get_fd_of_an_unknown_handle_tries_it_as_an_fd(user: User) -> None:
    buffer = user.buffer()
    for number, code in ((987654, errno.EBADF), (user.ctrl, errno.EINVAL), (buffer.fd, errno.EINVAL)):
        with refused(code):
            user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_GET_FD, s.CreateHandle(handle=number))


def test_from_fd_of_an_own_buffer_makes_another_handle(user: User) -> None:
    buffer = user.buffer()
    arg = s.CreateHandle(fd=buffer.fd)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_FROM_FD, arg)
    assert arg.handle != buffer.handle
    user.free(buffer.handle)
    with refused(errno.ENODEV):
        _parameters(user, buffer.handle)
    assert _parameters(user, arg.handle).size == 4096
    user.free(arg.handle)
    with refused(errno.ENODEV):
        _parameters(user, arg.handle)


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


@pytest.mark.parametrize("garbage", [0, 12345, 0x8FFFFFFF])
def test_free_succeeds_on_garbage(user: User, garbage: int) -> None:
    user.free(garbage)


def test_free_of_a_dmabuf_fd_closes_it(user: User) -> None:
    fd = user.buffer().fd
    user.free(fd)
    user.fds.remove(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# ---- mmap ----------------------------------------------------------------------------------------------------------

MMAP_REFUSED = [
    ("past the end", 8193, 0, errno.EINVAL),
    ("offset and length past the end", 8192, 4096, errno.EINVAL),
    ("odd offset", 4096, 100, errno.EINVAL),
    ("nothing", 0, 0, errno.EINVAL),
]


@pytest.mark.parametrize(
    ("size", "offset", "number"), [row[1:] for row in MMAP_REFUSED], ids=[row[0] for row in MMAP_REFUSED]
)
def test_mmap_refuses(user: User, size: int, offset: int, number: int) -> None:
    fd = user.buffer(8192).fd
    with refused(number):
        user.kernel.mmap(fd, size, mmap.PROT_READ, mmap.MAP_SHARED, offset=offset)


def test_mmap_of_a_handle_without_memory_is_eperm(user: User) -> None:
    with refused(errno.EPERM):
        user.mapped(user.buffer(allocate=False))


def test_the_flag_for_read_only_memory_changes_nothing(user: User) -> None:
    """nvmap looks at it for memory of a process that FROM_VA takes, and nowhere else."""
    buffer = user.buffer(flags=TAGGED | k.NVMAP_HANDLE_RO)
    user.mapped(buffer)[0] = 7
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_WRITE, _rw(user, buffer.handle, ctypes.create_string_buffer(b"abc")))
    assert bytes(user.mapped(buffer)[:3]) == b"abc"
    assert _parameters(user, buffer.handle).access_flags == 0


def test_mmap_of_other_fds(user: User) -> None:
    with refused(errno.EPERM):
        user.kernel.mmap(user.nvmap, 4096, mmap.PROT_READ, mmap.MAP_SHARED)
    with refused(errno.ENODEV):
        user.kernel.mmap(user.address_space(), 4096, mmap.PROT_READ, mmap.MAP_SHARED)


def test_mmap_at_an_offset_and_over_a_reserved_range(user: User) -> None:
    buffer = user.buffer(8192)
    user.mapped(buffer)[4096] = 3
    place = user.kernel.mmap(-1, 8192, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    fixed = mmap.MAP_SHARED | 0x10
    assert user.kernel.mmap(buffer.fd, 4096, mmap.PROT_READ, fixed, addr=place, offset=4096) == place
    assert ctypes.c_uint8.from_address(place).value == 3
    user.kernel.munmap(place, 8192)


def test_a_mapping_survives_fd_and_handle(user: User) -> None:
    buffer = user.buffer()
    memory = user.mapped(buffer)
    user.free(buffer.handle)
    user.close(buffer.fd)
    memory[0] = 1
    assert memory[0] == 1


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
    ("addr 0", {"addr": 0}, errno.EINVAL),
    ("count 0", {"count": 0}, errno.EINVAL),
    ("elem_size 0", {"elem_size": 0}, errno.EINVAL),
    ("unknown handle", {"handle": 5}, errno.EINVAL),
    ("element larger than the buffer", {"elem_size": 5000}, errno.EINVAL),
    ("offset at the end", {"offset": 4096}, errno.EINVAL),
    ("element larger than the stride", {"hmem_stride": 2}, errno.EINVAL),
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


def test_read_and_write_of_a_handle_without_memory_are_eperm(user: User) -> None:
    data = ctypes.create_string_buffer(4)
    arg = _rw(user, user.create(4096), data)
    for row in (io.NVMAP_IOC_READ, io.NVMAP_IOC_WRITE):
        with refused(errno.EPERM):
            user.kernel.ioctl(user.nvmap, row, arg)


# ---- cache maintenance and queries ---------------------------------------------------------------------------------


def test_cache_maintenance_of_a_mapped_range(user: User) -> None:
    buffer = user.buffer(8192)
    address = ctypes.addressof(user.mapped(buffer))
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_CACHE, s.CacheOp(address, buffer.handle, 8192, k.NVMAP_CACHE_OP_WB))
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_CACHE_64, s.CacheOp64(address + 64, buffer.handle, 64, 2))


def test_cache_maintenance_refuses(user: User, kernel: BoardKernel) -> None:
    buffer, other = user.buffer(8192), user.buffer(8192)
    address = ctypes.addressof(user.mapped(buffer))
    anonymous = kernel.mmap(-1, 4096, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    table = [
        (s.CacheOp(0, buffer.handle, 64, 0), errno.EINVAL),
        (s.CacheOp(address, buffer.handle, 64, 3), errno.EINVAL),
        (s.CacheOp(address, 77, 64, 0), errno.EINVAL),
        (s.CacheOp(anonymous, buffer.handle, 64, 0), errno.EADDRNOTAVAIL),
        (s.CacheOp(8, buffer.handle, 64, 0), errno.EADDRNOTAVAIL),
        (s.CacheOp(address, other.handle, 64, 0), errno.EFAULT),
    ]
    for arg, number in table:
        with refused(number):
            kernel.ioctl(user.nvmap, io.NVMAP_IOC_CACHE, arg)
    kernel.munmap(anonymous, 4096)


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


def test_heaps(user: User) -> None:
    arg = s.AvailableHeaps()
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_GET_AVAILABLE_HEAPS, arg)
    assert arg.heaps == 0x10000004
    query = s.QueryHeapParams(heap_mask=k.NVMAP_HEAP_IOVMM)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_QUERY_HEAP_PARAMS, query)
    assert query.total == MEMORY
    assert 0 < query.free <= query.total
    assert query.granule_size == query.largest_free_block == 4096
    query = s.QueryHeapParams(total=5)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_QUERY_HEAP_PARAMS, query)
    assert (query.total, query.free, query.granule_size) == (0, 0, 0)
    with refused(errno.ENODEV):
        query = s.QueryHeapParams(heap_mask=k.NVMAP_HEAP_CARVEOUT_TSEC)
        user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_QUERY_HEAP_PARAMS, query)


def test_parameters(user: User) -> None:
    handle = user.create(5000)
    user.alloc(handle, align=65536)
    found = _parameters(user, handle)
    assert (found.size, found.align, found.heap) == (8192, 65536, k.NVMAP_HEAP_IOVMM)
    assert found.coherency == k.NVMAP_HANDLE_INNER_CACHEABLE
    with refused(errno.ENODEV):
        _parameters(user, 0x8FFFFFFF)


def _parameters(user: User, handle: int) -> s.HandleParameters:
    arg = s.HandleParameters(handle=handle)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_PARAMETERS, arg)
    return arg
