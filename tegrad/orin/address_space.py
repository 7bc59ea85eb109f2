"""Address spaces: where buffers land in GPU memory, what holds them there, and what the GPU is told of it.

The user range [start, end) is the client's; the driver's own buffers of the same address space (each channel's
GPFIFO, its syncpoint, the map of all syncpoints) lie in [end, end + 4 GiB). `as_calls` has the AS fd's calls.
Source: L4T r36.4.3 nvgpu, common/mm/as.c, vm.c and vm_area.c, os/linux/vm.c.
"""

from __future__ import annotations

import errno
from bisect import bisect_left, insort
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from tegrad.orin.buddy import BuddyAllocator
from tegrad.orin.buffers import PAGE, Buffer, round_up
from tegrad.orin.keeper import Keeper
from tegrad.orin.link import GpuError
from tegrad.orin.page_table import EMPTY, SPARSE, Entry, entry
from tegrad.orin.steps import Errno, WaitQueue, needed, require
from tegrad.uapi import constants as k

PDE_ALIGN = 1 << 21  # bounds of an address space are multiples of this
KERNEL_SIZE = 1 << 32  # the driver's own range after the user range
PAGE_TABLE_BITS = 49
MAX_SPARSE = 1 << 38  # bytes of one sparse area: the board's page flags take memory, as page tables do
ACCESS_SHIFT = k.NVGPU_AS_MAP_BUFFER_FLAGS_ACCESS_BITMASK_OFFSET
ACCESS_MASK = 3 << ACCESS_SHIFT
READ_ONLY = k.NVGPU_AS_MAP_BUFFER_ACCESS_READ_ONLY << ACCESS_SHIFT
FD_NOT_WRITABLE = 1 << 32
"""Beside the flags of MAP_BUFFER_EX: the mapping was made through an fd that cannot be written through."""


@dataclass(slots=True)
class Mapping:
    """A buffer, or part of one, in an address space. `count`: how many UNMAPs it takes to go.

    A client's mapping keeps the flags it was asked for and its kind: a second map of the same buffer with the same of
    both is the same mapping. `fixed`: the client chose the address, so none is to be given back.
    """

    va: int
    size: int
    buffer: Buffer
    offset: int = 0
    writable: bool = True
    flags: int = 0
    kind: int = 0
    area: Area | None = None
    backed: bool = True
    count: int = 1
    released: WaitQueue = field(default_factory=WaitQueue)

    @property
    def end(self) -> int:
        return self.va + self.size

    @property
    def cached(self) -> bool:
        """Whether the GPU's L2 keeps of it."""
        return not self.entry.volatile

    @property
    def fixed(self) -> bool:
        return bool(self.flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET)

    @property
    def entry(self) -> Entry:
        """The page table entry of each of its pages."""
        access = self.flags & ACCESS_MASK
        return entry(self.flags, self.kind, read_only=access == READ_ONLY or bool(self.flags & FD_NOT_WRITABLE))


@dataclass(slots=True)
class Piece:
    """Pages of a sparse area that REMAP put a buffer behind. All in pages; `offset` is the buffer's."""

    first: int
    pages: int
    buffer: Buffer
    offset: int
    writable: bool
    cached: bool = False

    @property
    def last(self) -> int:
        return self.first + self.pages


@dataclass(slots=True)
class Area:
    """A range reserved by ALLOC_SPACE, the fixed mappings in it, and if it is sparse what REMAP put there."""

    start: int
    size: int
    sparse: bool
    mappings: dict[int, Mapping] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + self.size


class Shim(Protocol):
    """The memory from which the GPU reads all syncpoints: `size` bytes, of which each has `stride`."""

    @property
    def fd(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def stride(self) -> int: ...


class KeepsSpaces(Keeper, Protocol):
    """Who keeps address spaces."""

    vms: dict[int, AddressSpace]

    @property
    def syncpoints(self) -> Shim: ...

    def new_vm_id(self) -> int: ...


class AddressSpace:
    """A GPU address space: two allocators and the mappings. It lives as long as its AS fd or a channel on it."""

    def __init__(self, driver: KeepsSpaces, start: int, end: int) -> None:
        self.driver, self.start, self.end = driver, start, end
        self.id = driver.new_vm_id()
        self.holders = 1
        self.user = BuddyAllocator(start, end)
        self.kernel = BuddyAllocator(end, end + KERNEL_SIZE)
        self.mappings: dict[int, Mapping] = {}
        self.kernel_mappings: dict[int, Mapping] = {}
        self.syncpoints: dict[int, int] = {}
        self.syncpoints_va: int | None = None
        self.areas: dict[int, Area] = {}
        self._left_sparse: list[tuple[int, int]] = []
        """Ranges [start, end) of freed sparse areas: their page table entries stay until others replace them."""
        self._starts: list[int] = []  # of the mappings, in order
        self._by_buffer: dict[tuple[tuple[int, int], int], dict[int, Mapping]] = {}
        driver.vms[self.id] = self
        try:
            driver.tell_gpu("vm_create", self.id)
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
        for area in self.areas.values():
            for piece in area.pieces:
                piece.buffer.drop()

    def map(self, buffer: Buffer, flags: int, kind: int) -> int:
        """A buffer at an address of the driver's choice; the same buffer, flags and kind are mapped once."""
        known = self._known(buffer, flags, kind)
        if known is not None:
            known.count += 1
            return known.va
        va = needed(self.user.allocate(buffer.length), errno.ENOMEM)
        self._add(Mapping(va, buffer.length, buffer, 0, flags=flags, kind=kind))
        return va

    def map_fixed(self, buffer: Buffer, flags: int, kind: int, va: int, offset: int, size: int) -> int:
        """Part of a buffer (all of it for a size of 0) at a given address inside a reserved area.

        The very same map again, at the same start, is counted, whatever part of the buffer it asks for.
        """
        known = self.mappings.get(va)
        if known is not None and (known.buffer, known.flags, known.kind) == (buffer, flags, kind):
            known.count += 1
            return va
        size = round_up(size or buffer.length)
        require(size <= buffer.length - offset)
        require(va % PAGE == 0)
        area = needed(self.area_at(va))
        require(va + size <= area.end)
        require(not self._overlaps(va, va + size))
        require(offset % PAGE == 0, errno.ENOMEM)
        self._add(Mapping(va, size, buffer, offset, flags=flags, kind=kind, area=area))
        return va

    def _known(self, buffer: Buffer, flags: int, kind: int) -> Mapping | None:
        """The mapping that one more map of a buffer shares: the driver looks at the one with the lowest address."""
        found = self._by_buffer.get((buffer.key, kind))
        first = found[min(found)] if found else None
        return first if first is not None and first.flags == flags else None

    def _before(self, end: int) -> Mapping | None:
        """The client's mapping with the highest start below an address."""
        i = bisect_left(self._starts, end)
        return self.mappings[self._starts[i - 1]] if i else None

    def _overlaps(self, start: int, end: int) -> bool:
        before = self._before(end)
        return before is not None and before.end > start

    def entry_at(self, va: int) -> Entry:
        """What the page table says of a page of the client's range; pieces that REMAP put there are not told."""
        mapping = self._before(va + 1)
        if mapping is not None and va < mapping.end:
            return mapping.entry
        return SPARSE if self._is_sparse(va, va + 1) else EMPTY

    def _is_sparse(self, start: int, end: int) -> bool:
        """Whether part of a range, which no area's bound cuts, has or had a sparse area's entries."""
        area = self.area_at(start)
        sparse = area is not None and area.sparse
        return sparse or any(first < end and start < last for first, last in self._left_sparse)

    def _add(self, mapping: Mapping) -> None:
        """Record a client's mapping and write its page table entries, or Errno(ENOMEM) and nothing is left of it."""
        buffer, pte = mapping.buffer.hold(), mapping.entry
        mapping.writable, mapping.backed = not pte.read_only, pte.valid
        self.mappings[mapping.va] = mapping
        insort(self._starts, mapping.va)
        self._by_buffer.setdefault((buffer.key, mapping.kind), {})[mapping.va] = mapping
        if mapping.area is not None:
            mapping.area.mappings[mapping.va] = mapping
        self._back(mapping, self._remove)

    def map_kernel(self, buffer: Buffer, *, writable: bool) -> int:
        """A buffer of the driver's own in its range; Errno(ENOMEM) when that is full."""
        va = self.take_kernel(buffer.length)
        mapping = Mapping(va, buffer.length, buffer.hold(), 0, writable)
        self.kernel_mappings[va] = mapping
        self._back(mapping, self._remove_kernel)
        return va

    def map_syncpoints(self) -> int:
        """All syncpoints, to read; made once per address space. Its address; Errno(ENOMEM) when the range is full."""
        if self.syncpoints_va is None:
            pool = self.driver.syncpoints
            self.syncpoints_va = self.take_kernel(pool.size)
            self._tell_of_syncpoints()
        return self.syncpoints_va

    def _tell_of_syncpoints(self) -> None:
        pool = self.driver.syncpoints
        self.driver.tell_gpu("map", self.id, self.syncpoints_va, pool.size, 0, False, fd=pool.fd)

    def map_syncpoint(self, number: int) -> int:
        """The shim of a syncpoint in the driver's range; a store there moves the counter on, a load reads it."""
        self.map_syncpoints()
        self.syncpoints[number] = va = self.take_kernel(self.driver.syncpoints.stride)
        self._tell_of_syncpoint(number, va)
        return va

    def _tell_of_syncpoint(self, number: int, va: int) -> None:
        pool = self.driver.syncpoints
        self.driver.tell_gpu("map", self.id, va, pool.stride, number * pool.stride, False, fd=pool.fd)
        self.driver.tell_gpu("syncpoint", number, self.id, va)

    def unmap_syncpoint(self, number: int, va: int) -> None:
        """Undo map_syncpoint."""
        del self.syncpoints[number]
        self.kernel.free(va)
        self.driver.tell_gpu("syncpoint_free", number)
        self.driver.tell_gpu("unmap", self.id, va, self.driver.syncpoints.stride)

    def take_kernel(self, size: int) -> int:
        """Addresses in the driver's range, with nothing behind them yet; Errno(ENOMEM) when it is full."""
        return needed(self.kernel.allocate(size), errno.ENOMEM)

    def give_kernel(self, va: int) -> None:
        """Undo take_kernel, unless the whole address space is gone by now."""
        if self.holders:
            self.kernel.free(va)

    def unmap(self, mapping: Mapping) -> None:
        """Give one reference to a mapping back; the last one takes it down."""
        mapping.count -= 1
        if mapping.count == 0:
            self._remove(mapping)
        mapping.released.wake()  # who waits goes on in here

    def unmap_kernel(self, va: int) -> None:
        """Undo map_kernel."""
        self._remove_kernel(self.kernel_mappings[va])

    def reserve(self, size: int, base: int | None, *, sparse: bool) -> int:
        """ALLOC_SPACE: keep a range out of the allocator's hands; at `base` if given. Errno(ENOMEM) if it cannot."""
        require(not (sparse and size > MAX_SPARSE), errno.ENOMEM)
        if base is None:
            base = needed(self.user.allocate(size), errno.ENOMEM)
        else:
            require(self.user.allocate_fixed(base, size), errno.ENOMEM)
        if sparse:
            try:
                self.driver.tell_gpu("sparse", self.id, base, size)
            except (GpuError, Errno) as failure:
                self.user.free(base)
                raise self._refusal(failure) from failure
        self.areas[base] = Area(base, size, sparse)
        return base

    def release(self, va: int) -> None:
        """FREE_SPACE: free the area that holds `va`; each mapping in it loses one reference.

        Where a sparse one was, the GPU goes on to read zeros until something else is mapped there.
        """
        area = self.area_at(va)
        if area is None:
            return
        del self.areas[area.start]
        for mapping in list(area.mappings.values()):
            mapping.area = None
            self.unmap(mapping)
        for piece in area.pieces:
            piece.buffer.drop()
        if area.sparse:
            self._left_sparse.append((area.start, area.end))
            with suppress(GpuError, Errno):  # a GPU that fails here has nothing left to show
                self.driver.tell_gpu("sparse", self.id, area.start, area.size, True)
        self.user.free(area.start)

    def put_behind(self, area: Area, piece: Piece | None, first: int, pages: int) -> None:
        """REMAP: pages of a sparse area get part of a buffer behind them, or with None nothing again."""
        kept: list[Piece] = []
        for old in area.pieces:
            before, after = min(old.last, first) - old.first, old.last - max(old.first, first + pages)
            if before > 0:
                kept.append(replace(old, pages=before, buffer=old.buffer.hold()))
            if after > 0:
                start = old.last - after
                offset = old.offset + start - old.first
                kept.append(replace(old, first=start, pages=after, buffer=old.buffer.hold(), offset=offset))
            old.buffer.drop()
        area.pieces = kept
        if piece is not None:
            piece.buffer.hold()
            area.pieces.append(piece)
        self._show(piece, first, pages)

    def _show(self, piece: Piece | None, first: int, pages: int) -> None:
        va, size = first * PAGE, pages * PAGE
        if piece is None:
            self.driver.tell_gpu("sparse", self.id, va, size, True)
        else:
            self._tell_of_map(va, size, piece.offset * PAGE, piece.writable, piece.cached, piece.buffer)

    def _tell_of_map(self, va: int, size: int, offset: int, writable: bool, cached: bool, buffer: Buffer) -> None:
        self.driver.tell_gpu("map", self.id, va, size, offset, writable, cached, buffer.label, fd=buffer.fd)

    def area_at(self, va: int) -> Area | None:
        """The reserved area that holds an address."""
        return next((a for a in self.areas.values() if a.start <= va < a.end), None)

    def replay(self) -> None:
        """Tell a new GPU process everything that is mapped."""
        self.driver.tell_gpu("vm_create", self.id)
        if self.syncpoints_va is not None:
            self._tell_of_syncpoints()
        for number, va in self.syncpoints.items():
            self._tell_of_syncpoint(number, va)
        for start, end in self._left_sparse:
            self.driver.tell_gpu("sparse", self.id, start, end - start)
        for area in self.areas.values():
            if area.sparse:
                self.driver.tell_gpu("sparse", self.id, area.start, area.size)
            for piece in area.pieces:
                self._show(piece, piece.first, piece.pages)
        for mapping in (*self.mappings.values(), *self.kernel_mappings.values()):
            self._write_ptes(mapping)

    def _remove(self, mapping: Mapping) -> None:
        key = mapping.buffer.key, mapping.kind
        del self.mappings[mapping.va], self._starts[bisect_left(self._starts, mapping.va)]
        del self._by_buffer[key][mapping.va]
        if not self._by_buffer[key]:
            del self._by_buffer[key]
        if not mapping.fixed:
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
        sparse = self._is_sparse(mapping.va, mapping.end)
        self._replace_sparse(mapping.va, mapping.end)
        if mapping.backed:
            m = mapping
            self._tell_of_map(m.va, m.size, m.offset, m.writable, m.cached, m.buffer)
        elif sparse:
            self.driver.tell_gpu("unmap", self.id, mapping.va, mapping.size)

    def _replace_sparse(self, start: int, end: int) -> None:
        """Entries that a freed sparse area has left in a range are others from now on."""
        self._left_sparse = [
            part
            for first, last in self._left_sparse
            for part in ((first, min(last, start)), (max(first, end), last))
            if part[0] < part[1]
        ]

    def _clear_ptes(self, mapping: Mapping) -> None:
        """Invalid entries again; sparse ones in a sparse area."""
        if mapping.area is not None and mapping.area.sparse:
            self.driver.tell_gpu("sparse", self.id, mapping.va, mapping.size, True)
        elif mapping.backed:
            self._replace_sparse(mapping.va, mapping.end)
            self.driver.tell_gpu("unmap", self.id, mapping.va, mapping.size)
