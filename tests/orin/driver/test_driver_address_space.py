"""Address spaces: what is counted, and that what is refused leaves nothing. Where buffers land is in the rules."""

from __future__ import annotations

import errno
import threading

import pytest
from driver_user import SPEC, User, asleep, refused

from tegrad.orin.client import board_status
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s
from tegrad.uapi.errors import DriverError

MIB = 1 << 20
FIXED, CACHEABLE = k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET, k.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE
READ_ONLY = 1 << 10
WINDOW = 0xFE00000000


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


def test_freeing_an_area_gives_its_addresses_back_and_unmaps(user: User) -> None:
    vm = user.address_space()
    user.reserve(vm, 2 * MIB, 0xFEFFE00000)
    user.map(vm, user.buffer().fd, flags=FIXED, offset=0xFEFFE00000)
    before = _mappings()
    free = s.AsFreeSpace(offset=0xFEFFE00000 + 12345)
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_FREE_SPACE, free)
    assert _mappings() == before - 1
    assert user.map(vm, user.buffer().fd) == 0xFEFFE00000


def test_a_full_range_is_enomem_and_leaves_nothing(user: User) -> None:
    vm = user.address_space(0x200000, 0x600000)
    user.map(vm, user.buffer(2 * MIB).fd)
    before = _mappings()
    with refused(errno.ENOMEM):
        user.map(vm, user.buffer(4 * MIB).fd)
    assert _mappings() == before


def test_an_unmapped_pte_keeps_its_address_without_memory_behind(user: User) -> None:
    vm = user.address_space()
    before = _gpu_mapped()
    user.map(vm, user.buffer().fd, flags=k.NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE)
    assert _gpu_mapped() == before
    user.map(vm, user.buffer().fd)
    assert _gpu_mapped() == before + 1


def _gpu_mapped() -> int:
    return int(board_status(SPEC)["gpu"]["mapped"])


@pytest.mark.parametrize("area", [False, True])
def test_two_threads_take_down_a_fixed_mapping_that_was_mapped_twice(user: User, area: bool) -> None:
    """The first waits for the second, which is another UNMAP or frees the area: it goes once."""
    made = user.channel()
    fd, errors = user.buffer(8192).fd, list[DriverError]()
    va = user.reserve(made.vm, MIB)
    for _ in range(2):
        user.map(made.vm, fd, flags=FIXED, offset=va, mapping_size=8192)
    before = _mappings()

    def unmap() -> None:
        try:
            user.unmap(made.vm, va)
        except DriverError as error:
            errors.append(error)

    thread = threading.Thread(target=unmap, daemon=True)
    thread.start()
    asleep(user, thread, made)
    free = s.AsFreeSpace(offset=va, pages=MIB // 4096, page_size=4096)
    user.kernel.ioctl(made.vm, io.NVGPU_AS_IOCTL_FREE_SPACE, free) if area else unmap()
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []
    assert _mappings() == before - 1
    if area:
        assert user.reserve(made.vm, MIB, va) == va
