"""Address spaces: the AS fd, where buffers land in GPU memory, and what may be mapped how.

The user range [start, end) is the client's; the driver's own buffers of the same address space (each channel's
GPFIFO, its syncpoint) lie in [end, end + 4 GiB).
Source: L4T r36.4.3 nvgpu, common/mm/as.c, vm.c and vm_area.c, os/linux/ioctl_as.c.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tegrad.orin.buddy import BuddyAllocator
from tegrad.orin.channel import ChannelFile
from tegrad.orin.files import Call, Errno, File, Process, Steps, Table, copy_out, needed, require
from tegrad.orin.link import GpuError
from tegrad.orin.nvmap import PAGE, Buffer, dmabuf, round_up
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi.structs import AsVaRegion

if TYPE_CHECKING:
    from tegrad.orin.driver import Driver

PDE_ALIGN = 1 << 21  # bounds of an address space are multiples of this
KERNEL_SIZE = 1 << 32  # the driver's own range behind the user range
PAGE_TABLE_BITS = 49
ACCESS_SHIFT = k.NVGPU_AS_MAP_BUFFER_FLAGS_ACCESS_BITMASK_OFFSET
ACCESS_MASK = 3 << ACCESS_SHIFT
KNOWN_MAP_FLAGS = (
    k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_MAPPABLE_COMPBITS
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_L3_ALLOC
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_SYSTEM_COHERENT
    | ACCESS_MASK
)


@dataclass(slots=True)
class Mapping:
    """A buffer, or part of one, in an address space. `count`: how many UNMAPs it takes to go."""

    va: int
    size: int
    buffer: Buffer
    offset: int
    writable: bool
    key: tuple[object, ...] | None
    backed: bool = True
    area: Area | None = None
    count: int = 1


@dataclass(slots=True)
class Area:
    """A range reserved by ALLOC_SPACE, and the fixed mappings in it."""

    start: int
    size: int
    sparse: bool
    mappings: dict[int, Mapping] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + self.size


class AddressSpace:
    """A GPU address space: two allocators and the mappings. It lives as long as its AS fd or a channel on it."""

    def __init__(self, driver: Driver, start: int, end: int) -> None:
        self.driver, self.start, self.end = driver, start, end
        self.id = driver.new_vm_id()
        self.holders = 1
        self.user = BuddyAllocator(start, end)
        self.kernel = BuddyAllocator(end, end + KERNEL_SIZE)
        self.mappings: dict[int, Mapping] = {}
        self.kernel_mappings: dict[int, Mapping] = {}
        self.syncpoints: dict[int, int] = {}
        self._shared: dict[tuple[object, ...], Mapping] = {}
        self.areas: dict[int, Area] = {}
        driver.vms[self.id] = self
        try:
            driver.tell_gpu("vm_create", self.id, end + KERNEL_SIZE)
        except (GpuError, Errno) as failure:
            del driver.vms[self.id]
            raise self._refusal(failure) from failure

    def hold(self) -> AddressSpace:
        """Take a reference."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """Give a reference back; the last one takes down every mapping."""
        self.holders -= 1
        if self.holders:
            return
        del self.driver.vms[self.id]
        self.driver.tell_gpu("vm_destroy", self.id)
        for mapping in (*self.mappings.values(), *self.kernel_mappings.values()):
            mapping.buffer.drop()

    def map(self, buffer: Buffer, flags: int, kinds: tuple[int, int]) -> int:
        """A buffer at an address of the driver's choice; the same buffer with the same flags is mapped once."""
        key = (buffer.key, flags, kinds)
        known = self._shared.get(key)
        if known is not None:
            known.count += 1
            return known.va
        require(buffer.allocated, errno.ENOMEM)
        va = needed(self.user.allocate(buffer.length), errno.ENOMEM)
        mapping = self._mapping(va, buffer, 0, buffer.length, flags, key)
        self._shared[key] = mapping
        self.mappings[va] = mapping
        self._back(mapping, self._remove)
        return va

    def map_fixed(self, buffer: Buffer, flags: int, va: int, offset: int, size: int) -> int:
        """Part of a buffer at a given address inside a reserved area."""
        require(buffer.allocated, errno.ENOMEM)
        size = round_up(size or buffer.length - offset)
        area = needed(self.area_at(va))
        require(va % PAGE == 0 and va + size <= area.end)
        require(not any(m.va < va + size and va < m.va + m.size for m in area.mappings.values()))
        require(offset % PAGE == 0, errno.ENOMEM)
        mapping = self._mapping(va, buffer, offset, size, flags, None)
        mapping.area = area
        area.mappings[va] = self.mappings[va] = mapping
        self._back(mapping, self._remove)
        return va

    def map_kernel(self, buffer: Buffer, *, writable: bool) -> int:
        """A buffer of the driver's own in its range; Errno(ENOMEM) when that is full."""
        va = self.take_kernel(buffer.length)
        mapping = Mapping(va, buffer.length, buffer.hold(), 0, writable, None)
        self.kernel_mappings[va] = mapping
        self._back(mapping, self._remove_kernel)
        return va

    def map_syncpoint(self, number: int, size: int) -> int:
        """The shim of a syncpoint in the driver's range; a store there moves the counter on."""
        self.syncpoints[number] = va = self.take_kernel(size)
        self.driver.tell_gpu("syncpoint", number, self.id, va)
        return va

    def unmap_syncpoint(self, number: int, va: int) -> None:
        """Undo map_syncpoint."""
        del self.syncpoints[number]
        self.kernel.free(va)
        self.driver.tell_gpu("syncpoint_free", number)

    def take_kernel(self, size: int) -> int:
        """Addresses in the driver's range, with nothing behind them yet; Errno(ENOMEM) when it is full."""
        return needed(self.kernel.allocate(size), errno.ENOMEM)

    def give_kernel(self, va: int) -> None:
        """Undo take_kernel, unless the whole address space is gone by now."""
        if self.holders:
            self.kernel.free(va)

    def unmap(self, va: int) -> None:
        """Undo one map of the mapping that starts at `va`; an unknown address is ignored."""
        mapping = self.mappings.get(va)
        if mapping is None:
            return
        mapping.count -= 1
        if mapping.count == 0:
            self._remove(mapping)

    def unmap_kernel(self, va: int) -> None:
        """Undo map_kernel."""
        self._remove_kernel(self.kernel_mappings[va])

    def reserve(self, size: int, base: int | None, *, sparse: bool) -> int:
        """ALLOC_SPACE: keep a range out of the allocator's hands; at `base` if given. Errno(ENOMEM) if it cannot."""
        require(size, errno.ENOMEM)
        if base is None:
            base = needed(self.user.allocate(size), errno.ENOMEM)
        else:
            require(self.user.allocate_fixed(base, size), errno.ENOMEM)
        self.areas[base] = Area(base, size, sparse)
        return base

    def release(self, va: int) -> None:
        """FREE_SPACE: free the area that holds `va`; each mapping in it loses one reference."""
        area = self.area_at(va)
        if area is None:
            return
        for mapping in list(area.mappings.values()):
            mapping.area = None
            mapping.count -= 1
            if mapping.count == 0:
                self._remove(mapping)
        del self.areas[area.start]
        self.user.free(area.start)

    def area_at(self, va: int) -> Area | None:
        """The reserved area that holds an address."""
        return next((a for a in self.areas.values() if a.start <= va < a.end), None)

    def replay(self) -> None:
        """Tell a new GPU process everything that is mapped."""
        self.driver.tell_gpu("vm_create", self.id, self.end + KERNEL_SIZE)
        for number, va in self.syncpoints.items():
            self.driver.tell_gpu("syncpoint", number, self.id, va)
        for mapping in (*self.mappings.values(), *self.kernel_mappings.values()):
            self._write_ptes(mapping)

    def _mapping(
        self, va: int, buffer: Buffer, offset: int, size: int, flags: int, key: tuple[object, ...] | None
    ) -> Mapping:
        writable = flags & ACCESS_MASK != k.NVGPU_AS_MAP_BUFFER_ACCESS_READ_ONLY << ACCESS_SHIFT
        backed = not flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE
        return Mapping(va, size, buffer.hold(), offset, writable and not buffer.read_only, key, backed)

    def _remove(self, mapping: Mapping) -> None:
        del self.mappings[mapping.va]
        if mapping.key is not None:
            del self._shared[mapping.key]
            self.user.free(mapping.va)
        if mapping.area is not None:
            del mapping.area.mappings[mapping.va]
        self._clear_ptes(mapping)
        mapping.buffer.drop()

    def _remove_kernel(self, mapping: Mapping) -> None:
        del self.kernel_mappings[mapping.va]
        self.kernel.free(mapping.va)
        self._clear_ptes(mapping)
        mapping.buffer.drop()

    def _back(self, mapping: Mapping, undo: Callable[[Mapping], None]) -> None:
        """Write the page table entries of a new mapping, or undo it: Errno(ENOMEM) as when page tables fail."""
        try:
            self._write_ptes(mapping)
        except (GpuError, Errno) as failure:
            mapping.backed = False
            undo(mapping)
            raise self._refusal(failure) from failure

    def _refusal(self, failure: GpuError | Errno) -> Errno:
        """What the caller gets when the GPU did not do its part: no room there is ENOMEM."""
        if isinstance(failure, Errno):
            return failure
        self.driver.log.board(str(failure))
        return Errno(errno.ENOMEM)

    def _write_ptes(self, mapping: Mapping) -> None:
        if mapping.backed:
            buffer = mapping.buffer
            self.driver.tell_gpu(
                "map", self.id, mapping.va, mapping.size, mapping.offset, mapping.writable, fd=buffer.fd
            )

    def _clear_ptes(self, mapping: Mapping) -> None:
        if mapping.backed:
            self.driver.tell_gpu("unmap", self.id, mapping.va, mapping.size)


class AsFile(File):
    """An address-space fd. Its VM outlives it while channels are bound."""

    kind = "as"

    def __init__(self, driver: Driver, process: Process, vm: AddressSpace) -> None:
        super().__init__(driver, process)
        self.vm = vm

    def release(self) -> None:
        """Drop the VM."""
        self.vm.drop()


def alloc_as(driver: Driver, big_page_size: int, start: int, end: int, split: int) -> AddressSpace:
    """The checks of ALLOC_AS, in order, and the VM."""
    require(big_page_size == 0)
    require(start and start % PDE_ALIGN == 0 and end and end % PDE_ALIGN == 0 and start < end)
    require(split == 0)
    require(end + KERNEL_SIZE <= 1 << PAGE_TABLE_BITS, errno.ENOMEM)
    return AddressSpace(driver, start, end)


def bind_channel(file: AsFile, call: Call) -> None:
    """BIND_CHANNEL: for good; the channel keeps the VM alive."""
    channel = call.file("channel_fd", ChannelFile)
    require(channel)
    require(channel.channel.vm is None)
    channel.channel.vm = file.vm.hold()


def alloc_space(file: AsFile, call: Call) -> None:
    """ALLOC_SPACE: unknown flags are ignored; without FIXED_OFFSET the address given does not matter."""
    arg = call.arg
    require(arg.page_size == PAGE)
    fixed = arg.flags & k.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET
    sparse = bool(arg.flags & k.NVGPU_AS_ALLOC_SPACE_FLAGS_SPARSE)
    arg.o_a.offset = file.vm.reserve(arg.pages * PAGE, arg.o_a.offset if fixed else None, sparse=sparse)


def free_space(file: AsFile, call: Call) -> None:
    """FREE_SPACE: succeeds on anything."""
    file.vm.release(call.arg.offset)


def map_buffer_ex(file: AsFile, call: Call) -> None:
    """MAP_BUFFER_EX. `page_size` is ignored; only `offset` comes back, and only for a non-fixed map."""
    arg = call.arg
    fixed = arg.flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET
    require(not arg.flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_TEGRA_RAW)
    buffer = dmabuf(call, "dmabuf_fd")
    if not fixed:
        require(arg.offset == 0 and arg.buffer_offset == 0 and arg.mapping_size == 0)
    require(arg.mapping_size <= buffer.length and arg.buffer_offset + arg.mapping_size <= buffer.length)
    require(not arg.flags & ~KNOWN_MAP_FLAGS and arg.flags & ACCESS_MASK != ACCESS_MASK)
    read_write = arg.flags & ACCESS_MASK == k.NVGPU_AS_MAP_BUFFER_ACCESS_READ_WRITE << ACCESS_SHIFT
    require(not (read_write and buffer.read_only))
    require(not (arg.compr_kind == k.NV_KIND_INVALID and arg.incompr_kind == k.NV_KIND_INVALID))
    if fixed:
        file.vm.map_fixed(buffer, arg.flags, arg.offset, arg.buffer_offset, arg.mapping_size)
    else:
        arg.offset = file.vm.map(buffer, arg.flags, (arg.compr_kind, arg.incompr_kind))


def unmap_buffer(file: AsFile, call: Call) -> None:
    """UNMAP_BUFFER: succeeds on anything; needs the exact start."""
    file.vm.unmap(call.arg.offset)


def get_va_regions(file: AsFile, call: Call) -> Steps:
    """GET_VA_REGIONS: the one region of a 4 KiB-page address space; whole structs that fit are copied."""
    arg, vm = call.arg, file.vm
    region = AsVaRegion(offset=vm.start, page_size=PAGE, pages=(vm.end - vm.start) // PAGE)
    size = ctypes.sizeof(AsVaRegion)
    if arg.buf_size >= size:
        left = yield from copy_out(arg.buf_addr, bytes(region))
        require(left == 0, errno.EFAULT)
    arg.buf_size = size
    return None


HANDLERS: Table = {
    io.NVGPU_AS_IOCTL_BIND_CHANNEL.request: bind_channel,
    io.NVGPU_AS_IOCTL_ALLOC_SPACE.request: alloc_space,
    io.NVGPU_AS_IOCTL_FREE_SPACE.request: free_space,
    io.NVGPU_AS_IOCTL_MAP_BUFFER_EX.request: map_buffer_ex,
    io.NVGPU_AS_IOCTL_UNMAP_BUFFER.request: unmap_buffer,
    io.NVGPU_AS_IOCTL_GET_VA_REGIONS.request: get_va_regions,
}
