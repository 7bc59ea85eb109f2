"""GPU virtual memory: each address space is one reserved range of host addresses.

Mapping a buffer maps its memfd into that range, so that translating a GPU address is one addition. A byte per 4 KiB
page tells what is mapped; every access checks it, kernels included, so that a GPU fault never becomes a host fault.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import attrgetter

from tegrad.errors import TegradError
from tegrad.hw.faults import MMU_ENGINE_IDS, MmuAccess, MmuClientType, MmuFaultType
from tegrad.orin.events import FatalEvent, MmuFault
from tegrad.orin.hostmem import ANONYMOUS, FIXED, PROT_NONE, READ_WRITE, forget_memory, map_memory, unmap_memory
from tegrad.orin.l2 import L2, Physical, flags_of
from tegrad.ptx.l2 import Page

PAGE = 4096
PAGE_SHIFT = 12
PDE_SHIFT = 21
"""A page table covers 2 MiB: the fault type tells whether one was ever made there."""

DEFAULT_L2 = 4 << 20
"""Bytes of the L2 of an address space that is made by itself."""

DEFAULT_SPAN = (1 << 40) + (1 << 32)
"""40 bits of address, and the 4 GiB that the driver puts after a user range that ends at 2^40."""

MAX_SPAN = 1 << 46
"""What one address space can have at most, in a process with 47-bit addresses."""

CHUNK = 1 << 20
"""Bytes that an engine stores to cached memory at once: nothing else looks at the L2 meanwhile."""

_ENGINE_WRITABLE = Page.ENGINE_READ | Page.ENGINE_WRITE
_SM = Page.READ | Page.WRITE | Page.SLOW_READ | Page.SLOW_WRITE
_LOOKED_AT = Page.CACHED | Page.MIXED


def _any_of(flags: Iterable[int]) -> re.Pattern[bytes]:
    """Finds a page that has one of these flag bytes."""
    return re.compile(b"[" + b"".join(re.escape(bytes([value])) for value in flags) + b"]")


_NOT_WRITABLE = _any_of(value for value in range(256) if value & _ENGINE_WRITABLE != _ENGINE_WRITABLE)
_IN_L2 = _any_of(value for value in range(256) if value & _LOOKED_AT)
_NOT_WHOLE = _any_of(value for value in range(256) if value & _LOOKED_AT and not value & Page.READ)
"""Finds a page that is not kept as a whole: loads of the others need no look at the L2."""
_ENGINES_ONLY = bytes(flags & ~_SM for flags in range(256))


class OutOfAddresses(TegradError):
    """The host has no room for one more GPU address space."""


class Fault(Exception):
    """Raised by an engine where the channel cannot go on: the event to report, short of channel and TSG."""

    def __init__(self, kind: type[FatalEvent], **details: int | str) -> None:
        super().__init__(f"{kind.__name__}: {details}")
        self.kind = kind
        self.details = details

    def event(self, chid: int, tsg: int) -> FatalEvent:
        """The event as the driver gets it."""
        return self.kind(chid, tsg, **self.details)


class HubClient(IntEnum):
    """Hub clients of the MMU that the emulated engines access memory as."""

    FE = 4
    HOST = 6
    GRCOPY = 24
    SKED = 29


GPC_CLIENT_GCC = 17
"""The GPC client that fetches constants and instructions."""


@dataclass(frozen=True, slots=True, eq=False)
class Mapping:
    """A mapped buffer, or part of one: GPU address, size in bytes, whether the GPU may write.

    `physical` is the buffer's memory, `offset` where in it the mapping begins, `cached` whether the L2 keeps of it.
    """

    va: int
    size: int
    writable: bool
    offset: int = 0
    cached: bool = False
    physical: Physical | None = None


_va = attrgetter("va")


def _pages(va: int, size: int) -> slice:
    return slice(va >> PAGE_SHIFT, (va + size + PAGE - 1) >> PAGE_SHIFT)


class AddressSpace:
    """One GPU address space: [0, span) of GPU addresses at host address `base`, with a flag byte per page at `pages`.

    Mapping and unmapping may happen in one thread while engines access memory in others. An engine brackets its
    accesses by `enter` and `leave`: host pages of an unmapped buffer stay until nobody is inside, so that a grid that
    lost a buffer faults by the flags and never takes the process down.
    """

    def __init__(self, vm: int, span: int = DEFAULT_SPAN, l2: L2 | None = None) -> None:
        if not 0 < span <= MAX_SPAN or span % PAGE:
            raise OutOfAddresses(
                f"no GPU address space of {span:#x} bytes fits a host process: choose a smaller va_end"
            )
        self.vm = vm
        self.span = span
        try:
            self.base = map_memory(0, span, PROT_NONE, ANONYMOUS)
        except OSError as error:
            raise OutOfAddresses(
                f"cannot reserve {span:#x} bytes of host addresses ({error}): close other GPU users"
            ) from error
        try:
            self.pages = map_memory(0, span >> PAGE_SHIFT, READ_WRITE, ANONYMOUS)
        except OSError as error:
            unmap_memory(self.base, span)
            raise OutOfAddresses(f"cannot reserve the page flags of a GPU address space: {error}") from error
        self.bytes = memoryview((ctypes.c_ubyte * span).from_address(self.base)).cast("B")
        self.words = self.bytes.cast("I")
        self.quads = self.bytes.cast("Q")
        self.flags = memoryview((ctypes.c_ubyte * (span >> PAGE_SHIFT)).from_address(self.pages)).cast("B")
        self.syncpoints: dict[int, int] = {}
        """Syncpoint by page of its shim, which no memory lies behind."""
        self._mappings: list[Mapping] = []
        self._windows: set[tuple[int, int]] = set()
        self._sparse: list[tuple[int, int]] = []
        self._tables: set[int] = set()
        self._lock = threading.Lock()
        self._inside = 0
        self._leftover: list[tuple[int, int]] = []
        self._closed = False
        self._memory = 0
        """Where the second view begins, of memory itself behind cached mappings; 0 while there is none."""
        self._own_l2 = l2 is None
        self.l2 = L2(DEFAULT_L2) if l2 is None else l2
        self.port = self.l2.port(self)

    # -- mapping, from the driver -------------------------------------------------------------------------------------

    def map(
        self, va: int, size: int, fd: int, offset: int, writable: bool, cached: bool = False, label: str = ""
    ) -> None:
        """Map `size` bytes (rounded up to pages) of the memfd at `va`. OSError or ValueError for what cannot be.

        `cached`: the L2 keeps what the GPU touches; `label` is what reports call the buffer.
        """
        size = (size + PAGE - 1) // PAGE * PAGE
        if va % PAGE or offset % PAGE or size <= 0 or va < 0 or va + size > self.span:
            raise ValueError(f"cannot map {size:#x} bytes at {va:#x}, offset {offset:#x}")
        held = os.fstat(fd)
        if held.st_size < offset + size:
            raise ValueError(f"the buffer is smaller than {offset + size:#x} bytes")
        with self._lock:
            if self._sparse:
                self._forget(va, va + size)
            physical = self.l2.physical((held.st_dev, held.st_ino), -(-held.st_size // PAGE), label)
            mapping = Mapping(va, size, writable, offset, cached, physical)
            if cached:  # which a sweep of the L2 goes through from now on
                self._second_view()
            self.l2.attach(self, mapping)
            try:
                self._map_views(mapping, fd)
            except BaseException:
                self.l2.detach(self, mapping)
                raise
            self.show(mapping)
            insort(self._mappings, mapping, key=_va)
            self._tables.update(range(va >> PDE_SHIFT, (va + size - 1 >> PDE_SHIFT) + 1))

    def _map_views(self, mapping: Mapping, fd: int) -> None:
        """Put a mapping's memory at its addresses; if it is cached, what the L2 keeps of it, and memory behind."""
        va, size, offset = mapping.va, mapping.size, mapping.offset
        if not mapping.cached:
            self._map_host(self.base + va, size, fd, offset)
            return
        self._map_host(self.base + va, size, *self.l2.map_shadow(mapping))
        self._map_host(self._memory + va, size, fd, offset)

    def _second_view(self) -> None:
        """Reserve the addresses at which memory itself lies behind cached mappings."""
        if not self._memory:
            try:
                self._memory = map_memory(0, self.span, PROT_NONE, ANONYMOUS)
            except OSError as error:
                raise OutOfAddresses(
                    f"cannot reserve {self.span:#x} bytes more for cached mappings ({error}): close other GPU users"
                ) from error
            self.port.open(self._memory - self.base)

    def show(self, mapping: Mapping) -> None:
        """Set the flags of a mapping's pages: what can be accessed from now on, and how. With `self._lock` held, or
        by the one thread that maps and unmaps."""
        flags = flags_of(mapping)
        if flags & _LOOKED_AT:
            self._second_view()
            self.port.number(mapping)
            self.port.used = True
        self._allow(mapping.va, mapping.size, flags)

    def _allow(self, va: int, size: int, flags: int) -> None:
        with self.l2.locked():
            ctypes.memset(self.pages + (va >> PAGE_SHIFT), flags, size >> PAGE_SHIFT)
            for window in self._windows:
                self._hide(window, va, size)

    def sparse(self, va: int, size: int) -> None:
        """Pages that read as zero and drop what is stored: memory of our own, emptied before anybody may see it.

        Engines empty what they are about to read; what a grid stores is dropped once no engine is inside. So only a
        grid, or one beside it, can read back what it stored here. A range inside a sparse one becomes sparse again.
        """
        flags = ANONYMOUS | FIXED
        with self._lock:
            self._forget(va, va + size)
            map_memory(self.base + va, size, READ_WRITE, flags)
            self._allow(va, size, Page.READ | Page.WRITE | _ENGINE_WRITABLE)
            if not any(start <= va and va + size <= start + length for start, length in self._sparse):
                self._sparse.append((va, size))

    def _empty(self, va: int, size: int) -> None:
        """Drop what was stored to the sparse pages of a range. Buffers mapped in it lose nothing: they are shared."""
        for start, length in self._sparse:
            first, last = max(va & ~(PAGE - 1), start), min(va + size, start + length)
            if first < last:
                forget_memory(self.base + first, last - first)

    def hide(self, start: int, size: int) -> None:
        """A shader window: from now on kernels see no global memory in [start, start + size); other engines do."""
        if (start, size) not in self._windows:
            with self._lock, self.l2.locked():
                self._windows.add((start, size))
                for mapping in self._mappings:
                    self._hide((start, size), mapping.va, mapping.size)

    def _hide(self, window: tuple[int, int], va: int, size: int) -> None:
        start, end = max(va, window[0]), min(va + size, sum(window))
        if start < end:
            pages = _pages(start, end - start)
            self.flags[pages] = bytes(self.flags[pages]).translate(_ENGINES_ONLY)

    def _map_host(self, at: int, size: int, fd: int, offset: int) -> None:
        flags = mmap.MAP_SHARED | FIXED
        try:
            map_memory(at, size, READ_WRITE, flags, fd, offset)
        except PermissionError:
            map_memory(at, size, mmap.PROT_READ, flags, fd, offset)

    def unmap(self, va: int, size: int) -> None:
        """Unmap pages: accesses fault from now on; the host pages go when no engine is inside."""
        size = (size + PAGE - 1) // PAGE * PAGE
        if va % PAGE or size <= 0 or va < 0 or va + size > self.span:
            raise ValueError(f"cannot unmap {size:#x} bytes at {va:#x}")
        with self._lock:
            self._forget(va, va + size)
            with self.l2.locked():
                ctypes.memset(self.pages + (va >> PAGE_SHIFT), 0, size >> PAGE_SHIFT)
            self._leftover.append((va, size))
            if not self._inside:
                self._flush()

    def _forget(self, start: int, end: int) -> None:
        """Drop what mappings have in [start, end), and all that is kept of it; what they have outside stays mapped."""
        mappings = self._mappings
        first = self._index(start)
        if first < 0 or mappings[first].va + mappings[first].size <= start:
            first += 1
        gone = slice(first, bisect_left(mappings, end, key=_va))
        rest: list[Mapping] = []
        for old in mappings[gone]:
            self.l2.leave(self, old)
            before, after = start - old.va, old.va + old.size - end
            if before > 0:
                rest.append(replace(old, size=before))
            if after > 0:
                rest.append(replace(old, va=end, size=after, offset=old.offset + end - old.va))
        for part in rest:
            self.l2.attach(self, part)
        for old in mappings[gone]:
            low, high = max(old.va, start), min(old.va + old.size, end)
            with self.l2.locked():
                ctypes.memset(self.pages + (low >> PAGE_SHIFT), 0, high - low >> PAGE_SHIFT)
            self.l2.detach(self, old)
        mappings[gone] = rest

    def _index(self, va: int) -> int:
        """Index of the last mapping that starts at or below `va`; -1 if there is none."""
        return bisect_right(self._mappings, va, key=_va) - 1

    def _flush(self) -> None:
        """Give back host pages of unmapped buffers, short of what has been mapped there again."""
        for va, size in self._leftover:
            first = va >> PAGE_SHIFT
            for run in re.finditer(rb"\0+", bytes(self.flags[_pages(va, size)])):
                start, end = first + run.start(), first + run.end()
                for view in filter(None, (self.base, self._memory)):
                    map_memory(
                        view + (start << PAGE_SHIFT),
                        end - start << PAGE_SHIFT,
                        PROT_NONE,
                        ANONYMOUS | FIXED,
                    )
        self._leftover.clear()

    def close(self) -> None:
        """Give the whole range back, as soon as no engine is inside."""
        with self._lock:
            self._forget(0, self.span)
            self._closed = True
            if not self._inside:
                self._free()

    def _free(self) -> None:
        for view in (self.words, self.quads, self.flags, self.bytes):
            view.release()
        self.port.close()
        if self._own_l2:
            self.l2.close()
        unmap_memory(self.base, self.span)
        unmap_memory(self.pages, self.span >> PAGE_SHIFT)
        if self._memory:
            unmap_memory(self._memory, self.span)

    # -- access, from the engines -------------------------------------------------------------------------------------

    def enter(self) -> None:
        """An engine starts to access this memory."""
        with self._lock:
            self._inside += 1

    def leave(self) -> None:
        """An engine is done; the last one out gives back what was unmapped meanwhile."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                if self._closed:
                    self._free()
                    return
                self._empty(0, self.span)
                if self._leftover:
                    self._flush()

    def bad_page(self, va: int, size: int, write: bool) -> int | None:
        """Address of the first page of [va, va + size) that the access may not touch, or None."""
        if va < 0 or va + size > self.span:
            return (va if va < 0 or va >= self.span else self.span) & ~(PAGE - 1)
        flags = self.flags
        first, last = va >> PAGE_SHIFT, (va + size - 1) >> PAGE_SHIFT
        need = _ENGINE_WRITABLE if write else Page.ENGINE_READ
        if first == last:
            return None if flags[first] & need == need else first << PAGE_SHIFT
        held = bytes(flags[first : last + 1])
        if write:
            found = _NOT_WRITABLE.search(held)
            return None if found is None else first + found.start() << PAGE_SHIFT
        at = held.find(0)
        return None if at < 0 else first + at << PAGE_SHIFT

    def fault_type(self, va: int, write: bool) -> MmuFaultType:
        """Why the MMU refuses an access to the page of `va`."""
        if not 0 <= va < self.span:
            return MmuFaultType.INVALID_PDE
        if write and self.flags[va >> PAGE_SHIFT] & Page.ENGINE_READ:
            return MmuFaultType.WRITE_RO_VIOLATION
        return MmuFaultType.INVALID_PTE if va >> PDE_SHIFT in self._tables else MmuFaultType.INVALID_PDE

    def fault(self, va: int, access: MmuAccess, client: int, *, gpc: int | None = None, detail: str = "") -> Fault:
        """The MMU fault of an access to the page of `va` that `bad_page` found, by a hub client or one in a GPC."""
        return Fault(
            MmuFault,
            address=va & ~(PAGE - 1),
            fault_type=int(self.fault_type(va, access is not MmuAccess.VIRT_READ)),
            access=int(access),
            client_type=int(MmuClientType.HUB if gpc is None else MmuClientType.GPC),
            client=int(client),
            gpc=gpc or 0,
            engine=MMU_ENGINE_IDS["ce0"] if client == HubClient.GRCOPY and gpc is None else 0,
            detail=detail,
        )

    def require(
        self, va: int, size: int, client: int, *, write: bool = False, gpc: int | None = None, what: str = ""
    ) -> None:
        """Raise the MMU fault of `client` unless all of [va, va + size) may be accessed. A size of 0 is always fine."""
        if self._sparse and not write:
            self._empty(va, size)
        if size and (page := self.bad_page(va, size, write)) is not None:
            access = MmuAccess.VIRT_WRITE if write else MmuAccess.VIRT_READ
            raise self.fault(page, access, client, gpc=gpc, detail=what)
        if not write and self.port.used and self._in_l2(va, size, _NOT_WHOLE):
            self.port.load(va, size, what)

    def _in_l2(self, va: int, size: int, pages: re.Pattern[bytes] = _IN_L2) -> bool:
        """Whether an access to [va, va + size) has to look at the L2: one of its pages is of these."""
        held = bytes(self.flags[va >> PAGE_SHIFT : ((va + size - 1) >> PAGE_SHIFT) + 1]) if size > 0 else b""
        return pages.search(held) is not None

    @contextmanager
    def storing(self, va: int, size: int) -> Iterator[None]:
        """An engine stores to [va, va + size), which `require` has allowed, inside the `with`."""
        if not self.port.used or not self._in_l2(va, size):
            yield
            return
        with self.port.storing(va, size):
            yield

    def read(self, va: int, size: int, client: int, *, gpc: int | None = None, what: str = "") -> bytes:
        """A copy of [va, va + size); MMU fault of `client` where it is not mapped."""
        self.require(va, size, client, gpc=gpc, what=what)
        return bytes(self.bytes[va : va + size])

    def look(self, va: int, size: int) -> bytes:
        """What a load of [va, va + size), which must be mapped, would see, without being one."""
        if self.port.used and self._in_l2(va, size, _NOT_WHOLE):
            return self.port.look(va, size)
        return bytes(self.bytes[va : va + size])

    def holds(self, va: int, data: bytes) -> bool:
        """Whether a load at `va`, which must be mapped, would see these bytes, without being one."""
        return self.look(va, len(data)) == data

    def write(self, va: int, data: bytes | memoryview, client: int, *, what: str = "") -> None:
        """Store bytes; MMU fault of `client` where that is not allowed."""
        self.require(va, len(data), client, write=True, what=what)
        with self.storing(va, len(data)):
            self.bytes[va : va + len(data)] = data

    def copy(self, dst: int, src: int, size: int) -> None:
        """Move bytes that `require` has allowed on both sides."""
        for at in range(0, size, CHUNK):
            part = min(CHUNK, size - at)
            with self.storing(dst + at, part):
                ctypes.memmove(self.base + dst + at, self.base + src + at, part)

    def raw(self, va: int, size: int) -> memoryview:
        """Memory itself behind [va, va + size), past the L2; it must be mapped."""
        return memoryview((ctypes.c_ubyte * size).from_address(self.raw_address(va))).cast("B")

    def raw_address(self, va: int) -> int:
        """The host address of memory itself behind `va`, and behind all of the mapping that holds it."""
        cached = self._memory and self.flags[va >> PAGE_SHIFT] & Page.CACHED
        return (self._memory if cached else self.base) + va

    def mapping_at(self, va: int) -> Mapping | None:
        """The mapping that holds `va`."""
        with self._lock:
            i = self._index(va)
            return self._mappings[i] if i >= 0 and va < self._mappings[i].va + self._mappings[i].size else None

    def counts(self) -> dict[str, int]:
        """How many mappings there are and how many bytes they cover."""
        with self._lock:
            return {"mappings": len(self._mappings), "bytes": sum(m.size for m in self._mappings)}
