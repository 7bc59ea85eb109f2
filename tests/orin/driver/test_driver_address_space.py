"""Address spaces: where buffers land, what may be mapped how, what succeeds on garbage."""

from __future__ import annotations

import ctypes
import errno

import pytest
from driver_user import SPEC, VA_END, VA_START, User, refused

from tegrad.orin.client import board_status
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FIXED, CACHEABLE = k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET, k.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE
READ_ONLY, READ_WRITE = 1 << 10, 2 << 10
WINDOW = 0xFE00000000


def test_placement_matches_what_was_seen_on_hardware(user: User) -> None:
    vm = user.address_space(0x200000, 0xFFFFE00000)
    sizes = [4 * KIB, 4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
    places = [user.map(vm, user.buffer(size).fd) for size in sizes]
    assert places == [0xFFFFA00000, 0xFFFFA01000, 0xFFFFA10000, 0xFFFFB00000, 0xFFFE200000, 0xFFF8200000]


def test_placement_below_the_drivers_range(user: User) -> None:
    vm = user.address_space()
    assert user.map(vm, user.buffer(4096).fd) == 0xFEFFE00000
    assert user.map(vm, user.buffer(4 * MIB).fd) == 0xFEFFA00000


def test_a_freed_address_is_used_next(user: User) -> None:
    vm = user.address_space()
    places = [user.map(vm, user.buffer().fd) for _ in range(3)]
    user.unmap(vm, places[1])
    assert user.map(vm, user.buffer().fd) == places[1]


def test_the_same_buffer_is_mapped_once_and_counted(user: User) -> None:
    vm, fd = user.address_space(), user.buffer().fd
    first = user.map(vm, fd)
    assert user.map(vm, fd) == first
    assert user.map(vm, fd, flags=CACHEABLE | READ_ONLY) != first
    before = _mappings()
    user.unmap(vm, first)
    assert _mappings() == before
    user.unmap(vm, first)
    assert _mappings() == before - 1
    user.unmap(vm, first)
    assert _mappings() == before - 1


def _mappings() -> int:
    return int(board_status(SPEC)["counts"]["gpu_mappings"])


def test_page_size_is_ignored_and_not_written(user: User) -> None:
    arg = s.AsMapBufferEx(flags=CACHEABLE, compr_kind=-1, dmabuf_fd=user.buffer().fd, page_size=65536)
    user.kernel.ioctl(user.address_space(), io.NVGPU_AS_IOCTL_MAP_BUFFER_EX, arg)
    assert arg.page_size == 65536


MAP_REFUSED = [
    ("fd not open", {"dmabuf_fd": 987654}, errno.EBADF),
    ("offset without FIXED", {"offset": 0x200000}, errno.EINVAL),
    ("buffer_offset without FIXED", {"buffer_offset": 4096}, errno.EINVAL),
    ("mapping_size without FIXED", {"mapping_size": 4096}, errno.EINVAL),
    ("unknown flag 2", {"flags": 2}, errno.EINVAL),
    ("unknown flag 0x2000", {"flags": 0x2000}, errno.EINVAL),
    ("tegra raw", {"flags": k.NVGPU_AS_MAP_BUFFER_FLAGS_TEGRA_RAW}, errno.EINVAL),
    ("access 3", {"flags": 3 << 10}, errno.EINVAL),
    ("no kind", {"incompr_kind": -1}, errno.EINVAL),
    ("fixed without an area", {"flags": FIXED, "offset": 0x10000000}, errno.EINVAL),
    ("fixed at 0", {"flags": FIXED}, errno.EINVAL),
    ("fixed: longer than the buffer", {"flags": FIXED, "offset": WINDOW, "mapping_size": 3 * 4096}, errno.EINVAL),
    ("fixed: past the buffer", {"flags": FIXED, "offset": WINDOW, "buffer_offset": 4096, "mapping_size": 8192}, 22),
    ("fixed: unaligned address", {"flags": FIXED, "offset": WINDOW + 100}, errno.EINVAL),
    ("fixed: over the area's end", {"flags": FIXED, "offset": WINDOW + 15 * 4096}, errno.EINVAL),
    ("fixed: before the area", {"flags": FIXED, "offset": WINDOW - 4096}, errno.EINVAL),
    ("fixed: unaligned part", {"flags": FIXED, "offset": WINDOW, "buffer_offset": 16, "mapping_size": 4096}, 12),
    ("bad fd before bad flags", {"dmabuf_fd": 987654, "flags": 0x2000}, errno.EBADF),
]


@pytest.mark.parametrize(("fields", "number"), [r[1:] for r in MAP_REFUSED], ids=[r[0] for r in MAP_REFUSED])
def test_map_refuses(user: User, fields: dict[str, int], number: int) -> None:
    vm = user.address_space()
    user.reserve(vm, 16 * 4096, WINDOW)
    before = _mappings()
    with refused(number):
        user.map(vm, **{"fd": user.buffer(8192).fd, "flags": CACHEABLE} | fields)
    assert _mappings() == before


def test_map_refuses_what_is_no_usable_buffer(user: User) -> None:
    vm = user.address_space()
    duplicate = s.DuplicateHandle(handle=user.buffer().handle, access_flags=k.NVMAP_HANDLE_RO)
    user.kernel.ioctl(user.nvmap, io.NVMAP_IOC_DUP_HANDLE, duplicate)
    read_only = user.get_fd(duplicate.dup_handle)
    for fd, flags, number in (
        (user.ctrl, CACHEABLE, errno.EINVAL),
        (user.buffer(allocate=False).fd, CACHEABLE, errno.ENOMEM),
        (read_only, READ_WRITE, errno.EINVAL),
    ):
        with refused(number):
            user.map(vm, fd, flags=flags)
    user.map(vm, read_only)


def test_fixed_maps_inside_a_reserved_area(user: User) -> None:
    vm, fd = user.address_space(), user.buffer(4 * 4096).fd
    user.reserve(vm, MIB, WINDOW)
    user.map(vm, fd, flags=FIXED, offset=WINDOW)
    user.map(vm, fd, flags=FIXED, offset=WINDOW + 0x10000, buffer_offset=4096, mapping_size=8192)
    with refused(errno.EINVAL):
        user.map(vm, fd, flags=FIXED, offset=WINDOW + 0x11000)
    user.unmap(vm, WINDOW + 0x10000)
    user.map(vm, fd, flags=FIXED, offset=WINDOW + 0x11000)


def test_a_reserved_area_is_never_chosen(user: User) -> None:
    plain, fenced = user.address_space(), user.address_space()
    fd = user.buffer(2 * MIB).fd
    natural = user.map(plain, fd)
    user.reserve(fenced, 2 * MIB, natural)
    assert user.map(fenced, fd) != natural
    with refused(errno.ENOMEM):
        user.reserve(fenced, 4096, natural + 4096)


def test_freeing_an_area_gives_its_addresses_back_and_unmaps(user: User) -> None:
    vm = user.address_space()
    user.reserve(vm, 2 * MIB, 0xFEFFE00000)
    user.map(vm, user.buffer().fd, flags=FIXED, offset=0xFEFFE00000)
    before = _mappings()
    free = s.AsFreeSpace(offset=0xFEFFE00000 + 12345)
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_FREE_SPACE, free)
    assert _mappings() == before - 1
    assert user.map(vm, user.buffer().fd) == 0xFEFFE00000


RESERVE_REFUSED = [
    ("64 KiB pages", {"page_size": 65536}, errno.EINVAL),
    ("no page size", {"page_size": 0}, errno.EINVAL),
    ("no pages", {"pages": 0}, errno.ENOMEM),
    ("more than there is", {"pages": 1 << 30}, errno.ENOMEM),
    ("fixed, unaligned", {"flags": 1, "at": VA_START + 100}, errno.ENOMEM),
    ("fixed, below the range", {"flags": 1, "at": 0x1000}, errno.ENOMEM),
    ("fixed, in the driver's range", {"flags": 1, "at": VA_END}, errno.ENOMEM),
    ("fixed, over the end", {"flags": 1, "at": VA_END - 4096}, errno.ENOMEM),
    ("fixed, no pages", {"flags": 1, "at": VA_START, "pages": 0}, errno.ENOMEM),
]


@pytest.mark.parametrize(("fields", "number"), [r[1:] for r in RESERVE_REFUSED], ids=[r[0] for r in RESERVE_REFUSED])
def test_alloc_space_refuses(user: User, fields: dict[str, int], number: int) -> None:
    values = {"pages": 2, "page_size": 4096, "flags": 0, "at": 0} | fields
    arg = s.AsAllocSpace(pages=values["pages"], page_size=values["page_size"], flags=values["flags"])
    arg.o_a.offset = values["at"]
    with refused(number):
        user.kernel.ioctl(user.address_space(), io.NVGPU_AS_IOCTL_ALLOC_SPACE, arg)


def test_alloc_space_ignores_the_address_without_fixed_and_unknown_flags(user: User) -> None:
    arg = s.AsAllocSpace(pages=1, page_size=4096, flags=0x80)
    arg.o_a.offset = 12345
    user.kernel.ioctl(user.address_space(), io.NVGPU_AS_IOCTL_ALLOC_SPACE, arg)
    assert arg.o_a.offset == 0xFEFFE00000


def test_garbage_succeeds(user: User) -> None:
    vm = user.address_space()
    user.unmap(vm, 0x123456)
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_FREE_SPACE, s.AsFreeSpace(offset=0x123456))


def test_unmap_needs_the_exact_start(user: User) -> None:
    vm = user.address_space()
    va = user.map(vm, user.buffer(8192).fd)
    before = _mappings()
    user.unmap(vm, va + 4096)
    assert _mappings() == before


def test_a_full_range_is_enomem_and_leaves_nothing(user: User) -> None:
    vm = user.address_space(0x200000, 0x600000)
    user.map(vm, user.buffer(2 * MIB).fd)
    before = _mappings()
    with refused(errno.ENOMEM):
        user.map(vm, user.buffer(4 * MIB).fd)
    assert _mappings() == before


def test_va_regions(user: User) -> None:
    vm, region = user.address_space(), s.AsVaRegion()
    arg = s.AsGetVaRegions(buf_addr=ctypes.addressof(region), buf_size=ctypes.sizeof(region))
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_GET_VA_REGIONS, arg)
    assert (region.offset, region.page_size, region.pages) == (VA_START, 4096, (VA_END - VA_START) // 4096)
    assert arg.buf_size == 24
    small = s.AsGetVaRegions(buf_addr=8, buf_size=23)
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_GET_VA_REGIONS, small)
    assert small.buf_size == 24
    with refused(errno.EFAULT):
        user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_GET_VA_REGIONS, s.AsGetVaRegions(buf_addr=8, buf_size=24))


def test_an_unmapped_pte_keeps_its_address_without_memory_behind(user: User) -> None:
    vm = user.address_space()
    before = _gpu_mapped()
    user.map(vm, user.buffer().fd, flags=k.NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE)
    assert _gpu_mapped() == before
    user.map(vm, user.buffer().fd)
    assert _gpu_mapped() == before + 1


def _gpu_mapped() -> int:
    return int(board_status(SPEC)["gpu"]["mapped"])


@pytest.mark.parametrize("row", [io.NVGPU_AS_IOCTL_GET_BUFFER_COMPBITS_INFO, io.NVGPU_AS_IOCTL_MAP_BUFFER_COMPBITS])
def test_comptag_calls_are_enotty(user: User, row: io.Ioctl) -> None:
    assert row.struct is not None
    with refused(errno.ENOTTY):
        user.kernel.ioctl(user.address_space(), row, row.struct())
