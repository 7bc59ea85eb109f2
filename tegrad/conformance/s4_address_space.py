"""Section 4: address spaces."""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Callable
from typing import Any

from tegrad.conformance.calls import NO_FD, Calls, ctrl, unallocated
from tegrad.conformance.rig import VA_END, VA_START, VOLATILE, Raw, Rig, map_fields, request
from tegrad.conformance.rule import rule, rules
from tegrad.uapi import constants as k
from tegrad.uapi import structs as s

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
FIXED, CACHEABLE = k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET, k.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE
ACCESS = k.NVGPU_AS_MAP_BUFFER_FLAGS_ACCESS_BITMASK_OFFSET
READ_ONLY, READ_WRITE = (
    k.NVGPU_AS_MAP_BUFFER_ACCESS_READ_ONLY << ACCESS,
    k.NVGPU_AS_MAP_BUFFER_ACCESS_READ_WRITE << ACCESS,
)
SPARSE = k.NVGPU_AS_ALLOC_SPACE_FLAGS_SPARSE
WINDOW = 0xFE00000000
SEEN_END = 0xFFFFE00000
"""The end of the range that placements were read off on an AGX Orin 64GB."""
PAGE = 4 * KIB
"""The GPU's small page."""
AREA = 16 * PAGE
MAP, SPACE = "AS_MAP_BUFFER_EX", "AS_ALLOC_SPACE"
Fields = dict[str, int]


def maps(rig: Rig, vm: int, fd: int, **fields: int) -> int:
    """The rule: this MAP_BUFFER_EX succeeds. Its address."""
    return int(rig.accepts(vm, MAP, map_fields(fd, **fields)).offset)


def fixed(rig: Rig, vm: int, fd: int, va: int, **fields: int) -> int:
    """The rule: this fixed MAP_BUFFER_EX succeeds."""
    return maps(rig, vm, fd, **{"flags": FIXED, "offset": va} | fields)


def reserves(rig: Rig, vm: int, size: int, at: int | None = None) -> int:
    """The rule: this ALLOC_SPACE succeeds. Its address."""
    return rig.succeeds(f"ALLOC_SPACE of {size:#x} bytes", lambda: rig.reserve(vm, size, at))


def with_area(rig: Rig) -> int:
    """An address space with an area at the window."""
    vm = rig.address_space()
    rig.reserve(vm, AREA, WINDOW)
    return vm


def space_fields(**fields: int) -> Fields:
    """The fields of an ALLOC_SPACE that works (`at`: the union's address); `fields` change them."""
    usual = {"pages": 2, "page_size": PAGE, "flags": 0, "at": 0} | fields
    return {"o_a.offset": usual.pop("at"), **usual}


# ---- 4.1 BIND_CHANNEL -----------------------------------------------------------------------------------------------

BIND = Calls("4.1", "AS_BIND_CHANNEL", Rig.address_space)
BIND.refuses("bind-no-channel", "an fd that is no channel is", errno.EINVAL, channel_fd=Rig.tsg)
BIND.refuses("bind-closed", "an fd that is not open is", errno.EINVAL, channel_fd=NO_FD)


@rule("4.1", "BIND_CHANNEL: a channel that is bound to another address space is EINVAL")
def bound_elsewhere(rig: Rig) -> None:
    channel = rig.open_channel()
    rig.call(rig.address_space(), "AS_BIND_CHANNEL", channel_fd=channel)
    rig.refuses(errno.EINVAL, rig.address_space(), "AS_BIND_CHANNEL", channel_fd=channel)


@rule("4.1", "BIND_CHANNEL: a channel that is bound to this address space already is EINVAL")
def bound_twice(rig: Rig) -> None:
    channel, vm = rig.open_channel(), rig.address_space()
    rig.call(vm, "AS_BIND_CHANNEL", channel_fd=channel)
    rig.refuses(errno.EINVAL, vm, "AS_BIND_CHANNEL", channel_fd=channel)


@rule("4.1", "BIND_CHANNEL: takes a reference to the address space, which outlives its fd")
def bind_holds(rig: Rig) -> None:
    channel = rig.bound_channel()
    rig.close(channel.vm)
    found = rig.accepts(channel.fd, "CHANNEL_GET_USER_SYNCPOINT")
    rig.check(found.gpu_va >= VA_END, "an address in the driver's range", found.gpu_va)


# ---- 4.2 ALLOC_SPACE and FREE_SPACE ---------------------------------------------------------------------------------


def fixed_space(at: int) -> Fields:
    """What a fixed ALLOC_SPACE changes."""
    return {"flags": k.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET, "o_a.offset": at}


SPACES = Calls("4.2", SPACE, Rig.address_space, lambda rig: space_fields())
SPACES.refuses("space-64k-pages", "pages of 64 KiB are", errno.EINVAL, page_size=65536)
SPACES.refuses("space-no-page-size", "a page size of 0 is", errno.EINVAL, page_size=0)
SPACES.refuses("space-no-pages", "0 pages are", errno.ENOMEM, pages=0)
SPACES.refuses("space-too-large", "more pages than there are is", errno.ENOMEM, pages=1 << 30)
SPACES.refuses("space-page-size-first", "0 pages of a bad size are", errno.EINVAL, pages=0, page_size=8192)
SPACES.refuses("space-fixed-unaligned", "a fixed address off a page is", errno.ENOMEM, **fixed_space(VA_START + 100))
SPACES.refuses("space-fixed-below", "a fixed range below the user range is", errno.ENOMEM, **fixed_space(PAGE))
SPACES.refuses("space-fixed-above", "a fixed range in the driver's range is", errno.ENOMEM, **fixed_space(VA_END))
SPACES.refuses("space-fixed-over-end", "a fixed range over the end is", errno.ENOMEM, **fixed_space(VA_END - PAGE))
SPACES.refuses("space-fixed-empty", "0 pages at a fixed address are", errno.ENOMEM, pages=0, **fixed_space(VA_START))
SPACES.accepts("space-flags", "unknown flags are ignored", flags=0xFFFFFFFC)


@rule("4.2", "ALLOC_SPACE: a fixed range that is taken, by an area or by a buffer, is ENOMEM")
def space_taken(rig: Rig) -> None:
    vm = rig.address_space()
    rig.reserve(vm, 4 * PAGE, WINDOW)
    rig.refuses(errno.ENOMEM, vm, SPACE, space_fields(flags=1, at=WINDOW + 3 * PAGE))
    va = rig.map(vm, rig.buffer().fd)
    rig.refuses(errno.ENOMEM, vm, SPACE, space_fields(flags=1, at=va))


@rule("4.2", "ALLOC_SPACE: a fixed range is reserved where it was asked for")
def space_fixed(rig: Rig) -> None:
    vm = rig.address_space()
    for at, pages in ((VA_START, 1), (WINDOW, GIB // PAGE), (VA_END - 3 * PAGE, 3), (VA_START + 5 * PAGE, 3)):
        done = rig.accepts(vm, SPACE, space_fields(flags=1, at=at, pages=pages))
        rig.equal("address", at, done.o_a.offset)


@rule("4.2", "ALLOC_SPACE: without FIXED_OFFSET the address (or alignment) given is ignored")
def space_align_ignored(rig: Rig) -> None:
    plain = rig.accepts(rig.address_space(), SPACE, space_fields()).o_a.offset
    for at in (12345, WINDOW, 64 * KIB):
        rig.equal("address", plain, rig.accepts(rig.address_space(), SPACE, space_fields(at=at)).o_a.offset)


@rule("4.2", "ALLOC_SPACE: a sparse area can be reserved, fixed or not")
def space_sparse(rig: Rig) -> None:
    vm = rig.address_space()
    rig.accepts(vm, SPACE, space_fields(flags=SPARSE))
    rig.accepts(vm, SPACE, space_fields(flags=SPARSE | 1, at=WINDOW))


@rule("4.2", "ALLOC_SPACE: the 24-byte form (nr 2) does the same")
def space_short_form(rig: Rig) -> None:
    vm, page_size = rig.address_space(), PAGE
    done = rig.accepts(vm, "NVGPU32_AS_ALLOC_SPACE", {"pages": 2, "page_size": page_size, "flags": 0})
    rig.equal("address", rig.accepts(rig.address_space(), SPACE, space_fields()).o_a.offset, done.o_a.offset)
    rig.refuses(errno.EINVAL, vm, "NVGPU32_AS_ALLOC_SPACE", {"pages": 2, "page_size": 65536, "flags": 0})


@rule("4.2", "a reserved area is never chosen for a buffer")
def reserved_is_not_chosen(rig: Rig) -> None:
    buffer = rig.buffer(2 * MIB)
    natural = rig.map(rig.address_space(), buffer.fd)
    vm = rig.address_space()
    rig.reserve(vm, 2 * MIB, natural)
    rig.check(maps(rig, vm, buffer.fd) != natural, "another address", natural)


@rule("4.2", "FREE_SPACE: any address inside an area frees all of it")
def free_inside(rig: Rig) -> None:
    vm = with_area(rig)
    rig.accepts(vm, "AS_FREE_SPACE", offset=WINDOW + 9 * PAGE + 123)
    reserves(rig, vm, AREA, WINDOW)


@rule("4.2", "FREE_SPACE: an address in no area returns 0 and frees nothing")
def free_unknown(rig: Rig) -> None:
    vm = with_area(rig)
    for offset in (0, WINDOW - 1, WINDOW + 16 * PAGE, 1 << 63):
        rig.accepts(vm, "AS_FREE_SPACE", offset=offset)
    rig.refuses(errno.ENOMEM, vm, SPACE, space_fields(flags=1, at=WINDOW))


@rule("4.2", "FREE_SPACE: pages and page_size do not matter")
def free_ignores(rig: Rig) -> None:
    vm = with_area(rig)
    rig.accepts(vm, "AS_FREE_SPACE", offset=WINDOW, pages=3, page_size=12345)
    reserves(rig, vm, AREA, WINDOW)


@rule("4.2", "FREE_SPACE: a buffer mapped in the area is unmapped")
def free_unmaps(rig: Rig) -> None:
    vm, buffer = with_area(rig), rig.buffer()
    rig.map(vm, buffer.fd, flags=FIXED, offset=WINDOW)
    rig.accepts(vm, "AS_FREE_SPACE", offset=WINDOW)
    reserves(rig, vm, AREA, WINDOW)
    fixed(rig, vm, rig.buffer().fd, WINDOW)


# ---- 4.3 MAP_BUFFER_EX ----------------------------------------------------------------------------------------------

KNOWN_FLAGS = FIXED | CACHEABLE | 0x20 | 0x40 | 0x80 | 0x200 | 3 << ACCESS | 0x1000
UNKNOWN_FLAGS = tuple(1 << bit for bit in range(32) if not KNOWN_FLAGS >> bit & 1)


@rule("4.3", "MAP_BUFFER_EX: MAPPABLE_COMPBITS is ignored: the mapping is the one without it")
def mappable_compbits(rig: Rig) -> None:
    vm, fd = rig.address_space(), rig.buffer().fd
    va = rig.map(vm, fd)
    flags = VOLATILE | k.NVGPU_AS_MAP_BUFFER_FLAGS_MAPPABLE_COMPBITS
    rig.equal("address", va, maps(rig, vm, fd, flags=flags))


MAPS = Calls("4.3", MAP, with_area, lambda rig: map_fields(rig.buffer(2 * PAGE).fd))
MAPS.accepts("volatile", "maps with no flag at all", flags=VOLATILE)
MAPS.accepts("cacheable", "maps with CACHEABLE", flags=CACHEABLE)
MAPS.accepts("unmapped-pte", "maps with UNMAPPED_PTE", flags=k.NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE)
MAPS.accepts("l3-alloc", "maps with L3_ALLOC", flags=k.NVGPU_AS_MAP_BUFFER_FLAGS_L3_ALLOC)
MAPS.accepts("system-coherent", "maps with SYSTEM_COHERENT", flags=k.NVGPU_AS_MAP_BUFFER_FLAGS_SYSTEM_COHERENT)
MAPS.accepts("read-only", "maps with read-only access", flags=READ_ONLY)
MAPS.accepts("read-write", "maps with read-write access", flags=READ_WRITE)
MAPS.refuses("unknown-flags", "any unknown flag bit is", errno.EINVAL, flags=UNKNOWN_FLAGS)
MAPS.refuses("access-3", "access 3 is", errno.EINVAL, flags=3 << ACCESS)
MAPS.refuses("tegra-raw", "TEGRA_RAW is", errno.EINVAL, flags=k.NVGPU_AS_MAP_BUFFER_FLAGS_TEGRA_RAW)
MAPS.refuses("fd-closed", "an fd that is not open is", errno.EBADF, dmabuf_fd=NO_FD)
MAPS.refuses("fd-no-dmabuf", "an fd that is no dmabuf is", errno.EINVAL, dmabuf_fd=ctrl)
MAPS.refuses("offset-not-fixed", "an offset without FIXED_OFFSET is", errno.EINVAL, offset=WINDOW)
MAPS.refuses("part-not-fixed", "a buffer_offset without FIXED_OFFSET is", errno.EINVAL, buffer_offset=PAGE)
MAPS.refuses("size-not-fixed", "a mapping_size without FIXED_OFFSET is", errno.EINVAL, mapping_size=PAGE)
MAPS.refuses("not-allocated", "a buffer without memory is", errno.ENOMEM, dmabuf_fd=unallocated)
MAPS.refuses("no-kind", "no kind at all is", errno.EINVAL, incompr_kind=-1)
MAPS.refuses("fd-first", "a bad fd with bad flags is", errno.EBADF, dmabuf_fd=NO_FD, flags=0x2000)
MAPS.refuses(
    "flags-before-pin", "a buffer without memory with bad flags is", errno.EINVAL, dmabuf_fd=unallocated, flags=0x2000
)

FIXED_MAPS = Calls("4.3", MAP, with_area, lambda rig: map_fields(rig.buffer(2 * PAGE).fd, flags=FIXED, offset=WINDOW))
FIXED_MAPS.refuses("size-past-buffer", "a mapping_size above the buffer's is", errno.EINVAL, mapping_size=3 * PAGE)
FIXED_MAPS.refuses(
    "part-past-buffer", "a part that ends past the buffer is", errno.EINVAL, buffer_offset=PAGE, mapping_size=2 * PAGE
)
FIXED_MAPS.refuses(
    "part-wraps",
    "a buffer_offset that wraps with the size is",
    errno.EINVAL,
    buffer_offset=(1 << 64) - PAGE,
    mapping_size=2 * PAGE,
)
FIXED_MAPS.refuses("part-without-size", "a buffer_offset without mapping_size is", errno.EINVAL, buffer_offset=PAGE)
FIXED_MAPS.refuses("no-area", "a fixed address in no area is", errno.EINVAL, offset=1 << 28)
FIXED_MAPS.refuses("before-area", "a fixed map that begins before is", errno.EINVAL, offset=WINDOW - PAGE)
FIXED_MAPS.refuses("over-area", "a fixed map over the end of its area is", errno.EINVAL, offset=WINDOW + AREA - PAGE)
FIXED_MAPS.refuses("fixed-unaligned", "a fixed address off a page is", errno.EINVAL, offset=WINDOW + 100)
FIXED_MAPS.refuses(
    "part-unaligned", "a fixed part of a buffer off a page is", errno.ENOMEM, buffer_offset=16, mapping_size=PAGE
)
FIXED_MAPS.refuses(
    "pin-before-area", "one without memory in no area is", errno.ENOMEM, dmabuf_fd=unallocated, offset=1 << 28
)
FIXED_MAPS.refuses(
    "area-before-part",
    "a part off a page in no area is",
    errno.EINVAL,
    offset=1 << 28,
    buffer_offset=16,
    mapping_size=PAGE,
)


@rule("4.3", "MAP_BUFFER_EX: read-write access to a read-only dmabuf is EINVAL; by default it is mapped read-only")
def read_only_buffer(rig: Rig) -> None:
    vm, fd = rig.address_space(), rig.get_fd(rig.read_only_handle(rig.buffer().handle))
    rig.refuses(errno.EINVAL, vm, MAP, map_fields(fd, flags=READ_WRITE))
    maps(rig, vm, fd)


@rule("4.3", "MAP_BUFFER_EX: a fixed map that overlaps another one is EINVAL")
def fixed_overlap(rig: Rig) -> None:
    vm, buffer = with_area(rig), rig.buffer(4 * PAGE)
    rig.map(vm, buffer.fd, flags=FIXED, offset=WINDOW + 2 * PAGE)
    for offset in (0, PAGE, 3 * PAGE, 5 * PAGE):
        rig.refuses(errno.EINVAL, vm, MAP, map_fields(buffer.fd, flags=FIXED, offset=WINDOW + offset))
    fixed(rig, vm, buffer.fd, WINDOW + 6 * PAGE)


@rule("4.3", "MAP_BUFFER_EX: a fixed map lands where it was asked for, up to the end of its area")
def fixed_place(rig: Rig) -> None:
    vm, buffer = with_area(rig), rig.buffer(4 * PAGE)
    for offset in (0, AREA - 4 * PAGE):
        rig.equal("address", WINDOW + offset, fixed(rig, vm, buffer.fd, WINDOW + offset))


@rule("4.3", "MAP_BUFFER_EX: part of a buffer can be mapped at a fixed address")
def fixed_part(rig: Rig) -> None:
    vm, buffer = with_area(rig), rig.buffer(4 * PAGE)
    fixed(rig, vm, buffer.fd, WINDOW, buffer_offset=PAGE, mapping_size=2 * PAGE)
    fixed(rig, vm, buffer.fd, WINDOW + 2 * PAGE, buffer_offset=0, mapping_size=PAGE)
    fixed(rig, vm, buffer.fd, WINDOW + 3 * PAGE, mapping_size=100)
    fixed(rig, vm, buffer.fd, WINDOW + 4 * PAGE)


@rule("4.3", "MAP_BUFFER_EX: a range without room is ENOMEM, and the buffer can be mapped elsewhere")
def no_room(rig: Rig) -> None:
    vm = rig.address_space(VA_START, VA_START + 2 * MIB)
    first, second = rig.buffer(MIB), rig.buffer(2 * MIB)
    rig.map(vm, first.fd)
    rig.refuses(errno.ENOMEM, vm, MAP, map_fields(second.fd))
    maps(rig, rig.address_space(), second.fd)


@rule("4.3", "MAP_BUFFER_EX: page_size is ignored and never written back")
def page_size_ignored(rig: Rig) -> None:
    done = rig.accepts(rig.address_space(), MAP, map_fields(rig.buffer().fd, page_size=65537))
    rig.equal("page_size", 65537, done.page_size)


@rule("4.3", "MAP_BUFFER_EX: nothing but offset is written back")
def only_offset(rig: Rig) -> None:
    fields = map_fields(rig.buffer().fd)
    done = rig.accepts(rig.address_space(), MAP, fields)
    seen = (done.flags, done.dmabuf_fd, done.buffer_offset, done.mapping_size, done.compr_kind, done.incompr_kind)
    rig.equal("the other fields", (fields["flags"], fields["dmabuf_fd"], 0, 0, -1, 0), seen)


@rule("4.3", "MAP_BUFFER_EX: mappings are whole pages of 4 KiB")
def rounded_to_pages(rig: Rig) -> None:
    vm = rig.address_space()
    first = maps(rig, vm, rig.buffer(5).fd)
    rig.equal("address of the next", first + PAGE, maps(rig, vm, rig.buffer().fd))


@rule("4.3", "MAP_BUFFER_EX: the same buffer again is the same mapping")
def same_buffer(rig: Rig) -> None:
    vm, fd = rig.address_space(), rig.buffer().fd
    rig.equal("address", rig.map(vm, fd), maps(rig, vm, fd))


@rule("4.3", "MAP_BUFFER_EX: the same buffer through another fd of it is the same mapping")
def same_buffer_other_fd(rig: Rig) -> None:
    vm, buffer = rig.address_space(), rig.buffer()
    rig.equal("address", rig.map(vm, buffer.fd), maps(rig, vm, rig.get_fd(buffer.handle)))


def still_mapped(rig: Rig, vm: int, va: int) -> bool:
    """Whether a one-page mapping is still at an address that would be chosen next if it were free."""
    fresh = rig.buffer()
    chosen = rig.map(vm, fresh.fd)
    rig.unmap(vm, chosen)
    return chosen != va


@rule("4.3", "MAP_BUFFER_EX: a buffer mapped twice needs two UNMAPs")
def counted(rig: Rig) -> None:
    vm, fd = rig.address_space(), rig.buffer().fd
    va = rig.map(vm, fd)
    maps(rig, vm, fd)
    rig.unmap(vm, va)
    rig.check(still_mapped(rig, vm, va), "a mapping after one UNMAP", "none")
    rig.unmap(vm, va)
    rig.check(not still_mapped(rig, vm, va), "no mapping after two", "one")


@rule("4.3", "MAP_BUFFER_EX: other flags make a second mapping")
def other_flags(rig: Rig) -> None:
    vm, fd = rig.address_space(), rig.buffer().fd
    seen = {maps(rig, vm, fd, flags=flags) for flags in (CACHEABLE, 0, CACHEABLE | READ_ONLY)}
    rig.equal("addresses", 3, len(seen))


@rule("4.3", "MAP_BUFFER_EX: another kind makes a second mapping")
def other_kind(rig: Rig) -> None:
    vm, fd = rig.address_space(), rig.buffer().fd
    rig.check(maps(rig, vm, fd) != maps(rig, vm, fd, incompr_kind=6), "two addresses", "one")


@rule("4.3", "MAP_BUFFER_EX: a fixed map is never another one's: it is made where it was asked for")
def fixed_is_its_own(rig: Rig) -> None:
    vm, fd = with_area(rig), rig.buffer().fd
    rig.map(vm, fd)
    rig.equal("address", WINDOW, fixed(rig, vm, fd, WINDOW))
    rig.equal("address of a further one", WINDOW + PAGE, fixed(rig, vm, fd, WINDOW + PAGE))


@rule("4.3", "MAP_BUFFER_EX: a mapping holds the buffer when its fds and handle are gone")
def mapping_holds(rig: Rig) -> None:
    vm, buffer = rig.address_space(), rig.buffer()
    va = rig.map(vm, buffer.fd)
    rig.close(buffer.fd)
    rig.free(buffer.handle)
    rig.check(still_mapped(rig, vm, va), "a mapping", "none")
    rig.unmap(vm, va)
    rig.check(not still_mapped(rig, vm, va), "none after UNMAP", "one")


# ---- 4.4 placement --------------------------------------------------------------------------------------------------

SEEN = [
    ("4k", 4 * KIB, 0xFFFFA00000),
    ("4k-again", 4 * KIB, 0xFFFFA01000),
    ("64k", 64 * KIB, 0xFFFFA10000),
    ("1m", MIB, 0xFFFFB00000),
    ("16m", 16 * MIB, 0xFFFE200000),
    ("64m", 64 * MIB, 0xFFF8200000),
]


@rules(
    "4.4",
    "in [0x200000, 0xffffe00000) the buffer of {kib} KiB that comes as number {index} of those seen lands at {va:#x}",
    "index name kib va",
    [(index, name, size // KIB, va) for index, (name, size, va) in enumerate(SEEN)],
    name="seen-{name}",
)
def placed(rig: Rig, index: int, va: int) -> None:
    vm = rig.address_space(VA_START, SEEN_END)
    places = [rig.map(vm, rig.buffer(size).fd) for _, size, _ in SEEN[: index + 1]]
    rig.equal("address", va, places[-1])


LANDMARKS = [
    ("512m", SEEN_END, 512 << 10, 0xFFC0200000),
    ("8g", SEEN_END, 8 << 20, 0xFC00200000),
    ("8m", SEEN_END, 8 << 10, 0xFFFF200000),
    ("4g", SEEN_END, 4 << 20, 0xFE00200000),
    ("low-4k", VA_END, 4, 0xFEFFE00000),
    ("low-4m", VA_END, 4 << 10, 0xFEFFA00000),
    ("low-2g", VA_END, 2 << 20, 0xFE00200000),
]
"""The range's end, and where its first so many KiB lie."""


@rules("4.4", "the first {kib} KiB in [0x200000, {end:#x}) are at {va:#x}", "name end kib va", LANDMARKS)
def landmark(rig: Rig, end: int, kib: int, va: int) -> None:
    rig.equal("address", va, reserves(rig, rig.address_space(VA_START, end), kib * KIB))


@rule("4.4", "once the smaller pieces are full, 512 MiB lie at 0xfe00200000, after the shared window")
def after_the_window(rig: Rig) -> None:
    vm = rig.address_space(VA_START, SEEN_END)
    places = [reserves(rig, vm, 512 * MIB) for _ in range(1 + 2 + 4 + 1)]
    rig.equal("address of the eighth", 0xFE00200000, places[-1])


@rule("4.4", "a request is rounded up to a power of two of pages")
def rounded_up(rig: Rig) -> None:
    vm = rig.address_space()
    first = reserves(rig, vm, 3 * PAGE)
    rig.equal("address of the next page", first + 4 * PAGE, reserves(rig, vm, PAGE))


@rule("4.4", "the left half of a piece is used first, then the right half")
def left_half_first(rig: Rig) -> None:
    vm = rig.address_space()
    places = [reserves(rig, vm, PAGE) for _ in range(4)]
    rig.equal("addresses", [places[0] + i * PAGE for i in range(4)], places)


@rule("4.4", "the smallest piece that is large enough is used")
def smallest_piece(rig: Rig) -> None:
    vm = rig.address_space()
    first = reserves(rig, vm, PAGE)
    large = reserves(rig, vm, 16 * PAGE)
    rig.equal("address of 16 pages", first + 16 * PAGE, large)
    rig.equal("address of a page", first + PAGE, reserves(rig, vm, PAGE))


@rule("4.4", "what was freed last is used first")
def freed_is_used(rig: Rig) -> None:
    vm = rig.address_space()
    places = [reserves(rig, vm, PAGE) for _ in range(8)]
    for i in (1, 6, 3):
        rig.call(vm, "AS_FREE_SPACE", offset=places[i])
    rig.equal("addresses", [places[3], places[6], places[1]], [reserves(rig, vm, PAGE) for _ in range(3)])


@rule("4.4", "freed pieces merge with their neighbours")
def freed_merges(rig: Rig) -> None:
    vm = rig.address_space(VA_START, VA_START + 2 * MIB)
    halves = [reserves(rig, vm, MIB) for _ in range(2)]
    rig.refuses(errno.ENOMEM, vm, SPACE, space_fields(pages=2 * MIB // PAGE))
    for half in halves:
        rig.call(vm, "AS_FREE_SPACE", offset=half)
    rig.equal("address", VA_START, reserves(rig, vm, 2 * MIB))


@rule("4.4", "an address is a multiple of its power-of-two size, relative to the range's start")
def natural_alignment(rig: Rig) -> None:
    start = 3 * 2 * MIB
    vm = rig.address_space(start, start + GIB)
    for size in (PAGE, 64 * KIB, 16 * MIB, 2 * MIB, PAGE, 128 * MIB):
        rig.equal(f"remainder of {size:#x} bytes", 0, (reserves(rig, vm, size) - start) % size)


@rule("4.4", "pieces are sized relative to the range's start, not to address 0")
def relative_to_start(rig: Rig) -> None:
    start = 3 * 2 * MIB
    vm = rig.address_space(start, start + 8 * MIB)
    rig.equal("address", start, reserves(rig, vm, 8 * MIB))


@rule("4.4", "a window reserved before anything is mapped keeps buffers out of it")
def fenced_window(rig: Rig) -> None:
    vm = rig.address_space(VA_START, SEEN_END)
    rig.reserve(vm, GIB, 0xFD00000000)
    rig.reserve(vm, GIB, WINDOW)
    places = [reserves(rig, vm, 512 * MIB) for _ in range(10)]
    inside = [va for va in places if WINDOW - 512 * MIB < va < WINDOW + GIB]
    rig.equal("addresses in the window", [], inside)


@rule("4.4", "the driver's range has an allocator of its own, whose addresses start at va_range_end")
def kernel_range(rig: Rig) -> None:
    base = rig.accepts(rig.address_space(), "AS_GET_SYNC_RO_MAP").base_gpuva
    rig.equal("address of the first thing in it", VA_END, base)


@rule("4.4", "addresses in the driver's range are multiples of their power-of-two size, relative to va_range_end")
def kernel_alignment(rig: Rig) -> None:
    end = VA_START + 2 * MIB
    vm = rig.address_space(VA_START, end)
    channel = rig.bound_channel(vm=vm)
    va = rig.accepts(channel.fd, "CHANNEL_GET_USER_SYNCPOINT").gpu_va
    rig.equal("remainder of 64 KiB", 0, (va - end) % (64 * KIB))
    found = rig.accepts(vm, "AS_GET_SYNC_RO_MAP")
    size = found.sync_size * found.num_syncpoints
    rig.equal("remainder of all syncpoints", 0, (found.base_gpuva - end) % size)


# ---- 4.5 UNMAP_BUFFER -----------------------------------------------------------------------------------------------


Calls("4.5", "AS_UNMAP_BUFFER", Rig.address_space).accepts(
    "unmap-unknown", "an unknown address returns 0", offset=(0, 0x123456, VA_END, 1 << 63)
)


@rule("4.5", "UNMAP_BUFFER: only the exact start unmaps")
def unmap_inside(rig: Rig) -> None:
    vm, buffer = rig.address_space(), rig.buffer(4 * PAGE)
    va = rig.map(vm, buffer.fd)
    rig.accepts(vm, "AS_UNMAP_BUFFER", offset=va + PAGE)
    rig.accepts(vm, "AS_UNMAP_BUFFER", offset=va + 1)
    rig.check(maps(rig, vm, rig.buffer(4 * PAGE).fd) != va, "a mapping that stays", "its address is free")


@rule("4.5", "UNMAP_BUFFER: gives the address back")
def unmap_frees(rig: Rig) -> None:
    vm = rig.address_space()
    places = [rig.map(vm, rig.buffer().fd) for _ in range(3)]
    rig.unmap(vm, places[1])
    rig.equal("address", places[1], maps(rig, vm, rig.buffer().fd))


@rule("4.5", "UNMAP_BUFFER: an area's address is not given back with the buffer in it")
def unmap_fixed(rig: Rig) -> None:
    vm, fd = with_area(rig), rig.buffer().fd
    rig.map(vm, fd, flags=FIXED, offset=WINDOW)
    rig.unmap(vm, WINDOW)
    rig.refuses(errno.ENOMEM, vm, SPACE, space_fields(flags=1, at=WINDOW))
    fixed(rig, vm, fd, WINDOW)


@rule("4.5", "UNMAP_BUFFER: a fixed mapping with several references is waited for 100 ms, then loses one")
def unmap_fixed_counted(rig: Rig) -> None:
    vm, fd = with_area(rig), rig.buffer().fd
    fixed(rig, vm, fd, WINDOW)
    fixed(rig, vm, fd, WINDOW)
    began = time.monotonic()
    rig.unmap(vm, WINDOW)
    waited = time.monotonic() - began
    rig.check(waited >= 0.09, "an UNMAP that takes 100 ms", f"{waited * 1000:.1f} ms")
    other = rig.buffer().fd
    rig.refuses(errno.EINVAL, vm, MAP, map_fields(other, flags=FIXED, offset=WINDOW))
    rig.unmap(vm, WINDOW)
    fixed(rig, vm, other, WINDOW)


# ---- 4.6 the rest ---------------------------------------------------------------------------------------------------

REGIONS = "AS_GET_VA_REGIONS"


@rule("4.6", "GET_VA_REGIONS: one region, the user range in pages of 4 KiB")
def va_region(rig: Rig) -> None:
    room = rig.memory(PAGE)
    done = rig.accepts(rig.address_space(), REGIONS, buf_addr=room.address, buf_size=24)
    rig.equal("buf_size", 24, done.buf_size)
    seen = (room.u64(), room.u32(8), room.u64(16))
    rig.equal("offset, page size, pages", (VA_START, PAGE, (VA_END - VA_START) // PAGE), seen)


@rule("4.6", "GET_VA_REGIONS: only whole structs are copied, and buf_size tells the room for all")
def va_region_room(rig: Rig) -> None:
    vm, room = rig.address_space(), rig.memory(PAGE)
    rig.equal("buf_size", 24, rig.accepts(vm, REGIONS, buf_addr=room.address, buf_size=23).buf_size)
    rig.equal("what was stored", 0, room.u64())
    rig.equal("buf_size", 24, rig.accepts(vm, REGIONS, buf_addr=room.address, buf_size=PAGE).buf_size)
    rig.equal("what follows", bytes(24), room.read(24, 24))


Calls("4.6", REGIONS, Rig.address_space).refuses(
    "va-region-bad-address", "a bad address is", errno.EFAULT, buf_addr=Rig.bad_address, buf_size=24
)


BATCH = "AS_MAP_BUFFER_BATCH"


def batch(rig: Rig, unmaps: list[int], items: list[Fields]) -> tuple[Fields, Any]:
    """The fields of a MAP_BUFFER_BATCH, and the memory of its maps."""
    room = rig.memory(PAGE)
    for i, va in enumerate(unmaps):
        room.put64(va, 8 * i)
    maps_at = 8 * len(unmaps)
    for i, fields in enumerate(items):
        room.write(bytes(s.AsMapBufferEx(**fields)), maps_at + 40 * i)
    counts = {"num_unmaps": len(unmaps), "num_maps": len(items)}
    return {"unmaps": room.address, "maps": room.address + maps_at} | counts, room


BATCHES = Calls("4.6", BATCH, Rig.address_space)
BATCHES.refuses("batch-unmaps", "more than 256 unmaps are", errno.EINVAL, num_unmaps=257, unmaps=Rig.bad_address)
BATCHES.refuses("batch-maps", "more than 256 maps are", errno.EINVAL, num_maps=257, maps=Rig.bad_address)


@rule("4.6", "MAP_BUFFER_BATCH: unmaps come first, then maps")
def batch_order(rig: Rig) -> None:
    vm, old, new = with_area(rig), rig.buffer().fd, rig.buffer().fd
    rig.map(vm, old, flags=FIXED, offset=WINDOW)
    rig.accepts(vm, BATCH, batch(rig, [WINDOW], [map_fields(new, flags=FIXED, offset=WINDOW)])[0])
    rig.refuses(errno.EINVAL, vm, MAP, map_fields(old, flags=FIXED, offset=WINDOW))


@rule("4.6", "MAP_BUFFER_BATCH: stops at the first error, and what came before it stays")
def batch_stops(rig: Rig) -> None:
    vm, fds = with_area(rig), [rig.buffer().fd for _ in range(3)]
    items = [map_fields(fd, flags=FIXED, offset=WINDOW + i * PAGE) for i, fd in enumerate(fds)]
    items[1]["dmabuf_fd"] = NO_FD
    rig.refuses(errno.EBADF, vm, BATCH, batch(rig, [], items)[0])
    rig.refuses(errno.EINVAL, vm, MAP, map_fields(fds[1], flags=FIXED, offset=WINDOW))
    fixed(rig, vm, fds[1], WINDOW + 2 * PAGE)


@rule("4.6", "MAP_BUFFER_BATCH: nothing is copied back on an error, so nobody learns how far it got")
def batch_tells_nothing(rig: Rig) -> None:
    vm, arg = rig.address_space(), s.AsMapBufferBatch()
    fields, _ = batch(rig, [], [map_fields(rig.buffer().fd), map_fields(NO_FD)])
    for name, value in fields.items():
        setattr(arg, name, value)
    rig.fails(errno.EBADF, BATCH, lambda: rig.returns(vm, BATCH, arg))
    rig.equal("num_maps", 2, arg.num_maps)


@rule("4.6", "MAP_BUFFER_BATCH: a list that cannot be read is EFAULT")
def batch_bad_address(rig: Rig) -> None:
    vm = rig.address_space()
    rig.refuses(errno.EFAULT, vm, BATCH, num_unmaps=1, unmaps=rig.bad_address())
    rig.refuses(errno.EFAULT, vm, BATCH, num_maps=1, maps=rig.bad_address())


SYNC_MAP = "AS_GET_SYNC_RO_MAP"


@rule("4.6", "GET_SYNC_RO_MAP: base, size per syncpoint and count; in the driver's range")
def sync_map(rig: Rig) -> None:
    found = rig.accepts(rig.address_space(), SYNC_MAP)
    rig.check(VA_END <= found.base_gpuva < VA_END + 4 * GIB, "a base in the driver's range", found.base_gpuva)
    rig.check(found.sync_size in (PAGE, 64 * KIB), "4 or 64 KiB per syncpoint", found.sync_size)
    rig.check(found.num_syncpoints > 1, "syncpoints", found.num_syncpoints)


@rule("4.6", "GET_SYNC_RO_MAP: the map is made once per address space")
def sync_map_once(rig: Rig) -> None:
    vm = rig.address_space()
    rig.equal("base", rig.call(vm, SYNC_MAP).base_gpuva, rig.accepts(vm, SYNC_MAP).base_gpuva)


@rule("4.6", "GET_SYNC_RO_MAP: covers the id of a user syncpoint, whose own page lies elsewhere")
def sync_map_ids(rig: Rig) -> None:
    channel = rig.bound_channel()
    own = rig.call(channel.fd, "CHANNEL_GET_USER_SYNCPOINT")
    found = rig.accepts(channel.vm, SYNC_MAP)
    rig.check(own.syncpoint_id < found.num_syncpoints, "an id below the count", own.syncpoint_id)
    size = found.sync_size * found.num_syncpoints
    outside = not found.base_gpuva <= own.gpu_va < found.base_gpuva + size
    rig.check(outside, "a page outside the read-only map", own.gpu_va)


MODIFY = "AS_MAPPING_MODIFY"
MODIFY_REFUSED = [
    ("modify-inside", "an address inside a mapping", {"map_address": PAGE}),
    ("modify-offset", "an offset off a page", {"buffer_offset": 100}),
    ("modify-size", "a size off a page", {"buffer_size": 100}),
    ("modify-past-end", "a part that ends past the mapping", {"buffer_offset": 3 * PAGE, "buffer_size": 2 * PAGE}),
    ("modify-too-large", "a part larger than the mapping", {"buffer_size": 5 * PAGE}),
    ("modify-no-kind", "no kind at all", {"incompr_kind": -1}),
]


def _modify(rig: Rig, fields: Fields) -> tuple[int, Fields]:
    vm, buffer = rig.address_space(), rig.buffer(4 * PAGE)
    usual = {"compr_kind": -1, "incompr_kind": 0, "buffer_offset": 0, "buffer_size": PAGE, "map_address": 0} | fields
    usual["map_address"] += rig.map(vm, buffer.fd)
    return vm, usual


@rules("4.6", "MAPPING_MODIFY: {what} is EINVAL", "name what fields", MODIFY_REFUSED)
def modify_refused(rig: Rig, fields: Fields) -> None:
    vm, block = _modify(rig, fields)
    rig.refuses(errno.EINVAL, vm, MODIFY, block)


Calls("4.6", MODIFY, Rig.address_space).refuses(
    "modify-unknown",
    "an address where nothing is mapped is",
    errno.EINVAL,
    compr_kind=-1,
    buffer_size=PAGE,
    map_address=WINDOW,
)


@rule("4.6", "MAPPING_MODIFY: changes the kind of all or part of a mapping")
def modify(rig: Rig) -> None:
    for fields in ({}, {"buffer_size": 4 * PAGE}, {"buffer_offset": 2 * PAGE, "incompr_kind": 6}):
        vm, block = _modify(rig, fields)
        rig.accepts(vm, MODIFY, block)


REMAP = "AS_REMAP"
SIZE_4K = k.NVGPU_AS_REMAP_OP_FLAGS_PAGESIZE_4K
FIRST = WINDOW // PAGE
SPARSE_PAGES = BUFFER_PAGES = 32


def op(handle: int = 0, **fields: int) -> s.AsRemapOp:
    """An operation on the first page of the area: a map of a dmabuf fd, or an unmap."""
    kinds = {"compr_kind": -1, "incompr_kind": 0 if handle else -1}
    usual = {"flags": SIZE_4K, "mem_handle": handle, "virt_offset_in_pages": FIRST, "num_pages": 1} | kinds
    return s.AsRemapOp(**usual | fields)


def sparse_space(rig: Rig) -> int:
    """An address space with a sparse area at the window."""
    vm = rig.address_space()
    rig.reserve(vm, SPARSE_PAGES * PAGE, WINDOW, flags=SPARSE)
    return vm


def remap_fields(rig: Rig, ops: list[s.AsRemapOp]) -> tuple[Fields, Any]:
    """The fields of a REMAP, and the memory of its operations."""
    room = rig.memory(PAGE)
    room.write(b"".join(bytes(one) for one in ops))
    return {"ops": room.address, "num_ops": len(ops)}, room


Op = Callable[[int], s.AsRemapOp]
REMAP_REFUSED: list[tuple[str, str, Op]] = [
    ("remap-no-page-size", "an operation without page size", lambda fd: op(fd, flags=0)),
    ("remap-two-page-sizes", "one with two page sizes", lambda fd: op(fd, flags=SIZE_4K | 0x10000)),
    ("remap-unknown-flag", "one with an unknown flag", lambda fd: op(fd, flags=SIZE_4K | 1)),
    ("remap-unmap-flags", "an unmap with a flag of maps", lambda fd: op(flags=SIZE_4K | 4)),
    ("remap-unmap-kind", "an unmap with a kind", lambda fd: op(incompr_kind=0)),
    ("remap-unmap-offset", "an unmap with an offset in a buffer", lambda fd: op(mem_offset_in_pages=1)),
    ("remap-bad-handle", "a handle that is no dmabuf fd", lambda fd: op(NO_FD)),
    ("remap-no-pages", "0 pages", lambda fd: op(fd, num_pages=0)),
    ("remap-huge", "more pages than an address space has", lambda fd: op(num_pages=1 << 40)),
    ("remap-64k", "pages of 64 KiB", lambda fd: op(fd, flags=0x10000, virt_offset_in_pages=FIRST // 16)),
    ("remap-128k", "pages of 128 KiB", lambda fd: op(fd, flags=0x20000, virt_offset_in_pages=FIRST // 32)),
    (
        "remap-past-area",
        "pages past the area",
        lambda fd: op(virt_offset_in_pages=FIRST + SPARSE_PAGES - 1, num_pages=2),
    ),
    (
        "remap-past-buffer",
        "pages past the buffer",
        lambda fd: op(fd, mem_offset_in_pages=BUFFER_PAGES - 1, num_pages=2),
    ),
    ("remap-no-area", "an address in no area", lambda fd: op(fd, virt_offset_in_pages=FIRST + SPARSE_PAGES)),
]


@rules("4.6", "REMAP: {what} is EINVAL", "name what made", REMAP_REFUSED)
def remap_refused(rig: Rig, made: Op) -> None:
    vm = sparse_space(rig)
    rig.refuses(errno.EINVAL, vm, REMAP, remap_fields(rig, [made(rig.buffer(BUFFER_PAGES * PAGE).fd)])[0])


@rule("4.6", "REMAP: an area that is not sparse is EINVAL")
def remap_not_sparse(rig: Rig) -> None:
    vm = with_area(rig)
    rig.refuses(errno.EINVAL, vm, REMAP, remap_fields(rig, [op(rig.buffer().fd)])[0])


REMAPS = Calls("4.6", REMAP, sparse_space, lambda rig: {"ops": rig.bad_address()})
REMAPS.accepts("remap-nothing", "0 operations return 0, whatever the address", Rig.address_space, num_ops=0)
REMAPS.refuses("remap-bad-address", "operations that cannot be read are", errno.EFAULT, num_ops=1)


@rule("4.6", "REMAP: buffers come behind pages of a sparse area and go again")
def remap(rig: Rig) -> None:
    vm, fd = sparse_space(rig), rig.buffer(4 * PAGE).fd
    ops = [
        op(fd, num_pages=4),
        op(fd, mem_offset_in_pages=2, num_pages=2, virt_offset_in_pages=FIRST + 14, flags=SIZE_4K | 0x404),
        op(num_pages=2, virt_offset_in_pages=FIRST + 1),
    ]
    rig.equal("operations done", 3, rig.accepts(vm, REMAP, remap_fields(rig, ops)[0]).num_ops)
    rig.accepts(vm, REMAP, remap_fields(rig, [op(num_pages=16)])[0])


@rule("4.6", "REMAP: on success every operation in the caller's memory is overwritten with the last one's fields")
def remap_write_back(rig: Rig) -> None:
    vm, fd = sparse_space(rig), rig.buffer(4 * PAGE).fd
    ops = [op(fd, num_pages=2), op(fd, num_pages=1, virt_offset_in_pages=FIRST + 9)]
    fields, room = remap_fields(rig, ops)
    rig.accepts(vm, REMAP, fields)
    rig.equal("first operation", bytes(ops[1]), room.read(0, ctypes.sizeof(ops[0])))


@rule("4.6", "REMAP: the block goes back after a refused operation too, with 0 operations done")
def remap_copies_back(rig: Rig) -> None:
    vm, fields = sparse_space(rig), remap_fields(rig, [op(), op(num_pages=0)])[0]
    block = bytes(s.AsRemap(**fields))
    done: Raw = rig.raw(vm, "as", request(REMAP), block)
    rig.equal("errno", errno.EINVAL, done.errno)
    rig.equal("num_ops", 0, s.AsRemap.from_buffer_copy(done.data).num_ops)


@rule("4.6", "REMAP: a buffer without memory is ENOMEM")
def remap_unallocated(rig: Rig) -> None:
    vm, buffer = sparse_space(rig), rig.buffer(allocate=False)
    rig.refuses(errno.ENOMEM, vm, REMAP, remap_fields(rig, [op(buffer.fd)])[0])


for _gone in ("GET_BUFFER_COMPBITS_INFO", "MAP_BUFFER_COMPBITS"):
    Calls("4.6", f"AS_{_gone}", Rig.address_space, begins=f"{_gone} ").refuses(
        _gone.lower().replace("_", "-"), "is", errno.ENOTTY
    )
