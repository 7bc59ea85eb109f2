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
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter

from tegrad.errors import TegradError
from tegrad.hw.faults import MMU_ENGINE_IDS, MmuAccess, MmuClientType, MmuFaultType
from tegrad.orin.events import FatalEvent, MmuFault

PAGE = 4096
PAGE_SHIFT = 12
PDE_SHIFT = 21
"""A page table covers 2 MiB: the fault type tells whether one was ever made there."""

DEFAULT_SPAN = (1 << 40) + (1 << 32)
"""40 bits of address, and the 4 GiB that the driver puts behind a user range that ends at 2^40."""

MAX_SPAN = 1 << 46
"""What one address space can have at most, in a process with 47-bit addresses."""

MAPPED, WRITABLE = 1, 2
"""Bits of a page's flag byte as the SMs see it; 0 means unmapped."""

ENGINES = 2
"""The other engines' view of a page lies this many bits higher: shader windows hide memory from the SMs only."""

_NOT_WRITABLE = re.compile(rb"[^\x0c\x0f]")
_ENGINES_ONLY = bytes(flags & ~(MAPPED | WRITABLE) for flags in range(256))

_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MADV_DONTNEED = 4
_PROT_NONE = 0
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


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


@dataclass(frozen=True, slots=True)
class Mapping:
    """A mapped buffer, or part of one: GPU address, size in bytes, whether the GPU may write."""

    va: int
    size: int
    writable: bool


_va = attrgetter("va")


def _mmap(addr: int, size: int, prot: int, flags: int, fd: int = -1, offset: int = 0) -> int:
    """mmap(2) at a fixed or free address; raises OSError."""
    got = _libc.mmap(addr or None, size, prot, flags, fd, offset)
    if got is None or got == _FAILED:
        errno = ctypes.get_errno()
        raise OSError(errno, os.strerror(errno))
    return int(got)


def _pages(va: int, size: int) -> slice:
    return slice(va >> PAGE_SHIFT, (va + size + PAGE - 1) >> PAGE_SHIFT)


class AddressSpace:
    """One GPU address space: [0, span) of GPU addresses at host address `base`, with a flag byte per page at `pages`.

    Mapping and unmapping may happen in one thread while engines access memory in others. An engine brackets its
    accesses by `enter` and `leave`: host pages of an unmapped buffer stay until nobody is inside, so that a grid that
    lost a buffer faults by the flags and never takes the process down.
    """

    def __init__(self, vm: int, span: int = DEFAULT_SPAN) -> None:
        if not 0 < span <= MAX_SPAN or span % PAGE:
            raise OutOfAddresses(
                f"no GPU address space of {span:#x} bytes fits a host process; choose a smaller va_end"
            )
        self.vm = vm
        self.span = span
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self.base = _mmap(0, span, _PROT_NONE, anonymous)
        except OSError as error:
            raise OutOfAddresses(
                f"cannot reserve {span:#x} bytes of host addresses ({error}); close other GPU users"
            ) from error
        try:
            self.pages = _mmap(0, span >> PAGE_SHIFT, mmap.PROT_READ | mmap.PROT_WRITE, anonymous)
        except OSError as error:
            _libc.munmap(self.base, span)
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

    # -- mapping, from the driver -------------------------------------------------------------------------------------

    def map(self, va: int, size: int, fd: int, offset: int, writable: bool) -> None:
        """Map `size` bytes (rounded up to pages) of the memfd at `va`. OSError or ValueError for what cannot be."""
        size = (size + PAGE - 1) // PAGE * PAGE
        if va % PAGE or offset % PAGE or size <= 0 or va < 0 or va + size > self.span:
            raise ValueError(f"cannot map {size:#x} bytes at {va:#x}, offset {offset:#x}")
        if os.fstat(fd).st_size < offset + size:
            raise ValueError(f"the buffer is smaller than {offset + size:#x} bytes")
        with self._lock:
            if self._sparse:
                self._forget(va, va + size)
            self._map_host(va, size, fd, offset)
            self._allow(va, size, writable)
            insort(self._mappings, Mapping(va, size, writable), key=_va)
            self._tables.update(range(va >> PDE_SHIFT, (va + size - 1 >> PDE_SHIFT) + 1))

    def _allow(self, va: int, size: int, writable: bool) -> None:
        """Set the flags of pages that can be accessed from now on."""
        flags = MAPPED | (WRITABLE if writable else 0)
        ctypes.memset(self.pages + (va >> PAGE_SHIFT), flags | flags << ENGINES, size >> PAGE_SHIFT)
        for window in self._windows:
            self._hide(window, va, size)

    def sparse(self, va: int, size: int) -> None:
        """Pages that read as zero and drop what is stored: memory of our own, emptied before anybody may see it.

        Engines empty what they are about to read; what a grid stores is dropped once no engine is inside. So only a
        grid, or one beside it, can read back what it stored here. A range inside a sparse one becomes sparse again.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        with self._lock:
            self._forget(va, va + size)
            _mmap(self.base + va, size, mmap.PROT_READ | mmap.PROT_WRITE, flags)
            self._allow(va, size, True)
            if not any(start <= va and va + size <= start + length for start, length in self._sparse):
                self._sparse.append((va, size))

    def sparse_free(self, va: int, size: int) -> None:
        """End of a sparse area: accesses fault from now on."""
        with self._lock:
            self._sparse.remove((va, size))
        self.unmap(va, size)

    def _empty(self, va: int, size: int) -> None:
        """Drop what was stored to the sparse pages of a range. Buffers mapped in it lose nothing: they are shared."""
        for start, length in self._sparse:
            first, last = max(va & ~(PAGE - 1), start), min(va + size, start + length)
            if first < last:
                _libc.madvise(self.base + first, last - first, _MADV_DONTNEED)

    def hide(self, start: int, size: int) -> None:
        """A shader window: from now on kernels see no global memory in [start, start + size); other engines do."""
        if (start, size) not in self._windows:
            with self._lock:
                self._windows.add((start, size))
                for mapping in self._mappings:
                    self._hide((start, size), mapping.va, mapping.size)

    def _hide(self, window: tuple[int, int], va: int, size: int) -> None:
        start, end = max(va, window[0]), min(va + size, sum(window))
        if start < end:
            pages = _pages(start, end - start)
            self.flags[pages] = bytes(self.flags[pages]).translate(_ENGINES_ONLY)

    def _map_host(self, va: int, size: int, fd: int, offset: int) -> None:
        flags = mmap.MAP_SHARED | _MAP_FIXED
        try:
            _mmap(self.base + va, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        except PermissionError:
            _mmap(self.base + va, size, mmap.PROT_READ, flags, fd, offset)

    def unmap(self, va: int, size: int) -> None:
        """Unmap pages: accesses fault from now on; the host pages go when no engine is inside."""
        size = (size + PAGE - 1) // PAGE * PAGE
        if va % PAGE or size <= 0 or va < 0 or va + size > self.span:
            raise ValueError(f"cannot unmap {size:#x} bytes at {va:#x}")
        with self._lock:
            ctypes.memset(self.pages + (va >> PAGE_SHIFT), 0, size >> PAGE_SHIFT)
            self._forget(va, va + size)
            self._leftover.append((va, size))
            if not self._inside:
                self._flush()

    def _forget(self, start: int, end: int) -> None:
        """Drop every mapping that reaches into [start, end)."""
        mappings = self._mappings
        first = self._index(start)
        if first < 0 or mappings[first].va + mappings[first].size <= start:
            first += 1
        del mappings[first : bisect_left(mappings, end, key=_va)]

    def _index(self, va: int) -> int:
        """Index of the last mapping that starts at or below `va`; -1 if there is none."""
        return bisect_right(self._mappings, va, key=_va) - 1

    def _flush(self) -> None:
        """Give back host pages of unmapped buffers, short of what has been mapped there again."""
        for va, size in self._leftover:
            first = va >> PAGE_SHIFT
            for run in re.finditer(rb"\0+", bytes(self.flags[_pages(va, size)])):
                start, end = first + run.start(), first + run.end()
                _mmap(
                    self.base + (start << PAGE_SHIFT),
                    end - start << PAGE_SHIFT,
                    _PROT_NONE,
                    mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED,
                )
        self._leftover.clear()

    def close(self) -> None:
        """Give the whole range back, as soon as no engine is inside."""
        with self._lock:
            self._closed = True
            self._mappings.clear()
            if not self._inside:
                self._free()

    def _free(self) -> None:
        for view in (self.words, self.quads, self.flags, self.bytes):
            view.release()
        _libc.munmap(self.base, self.span)
        _libc.munmap(self.pages, self.span >> PAGE_SHIFT)

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
        need = (MAPPED | WRITABLE if write else MAPPED) << ENGINES
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
        if write and self.flags[va >> PAGE_SHIFT] & MAPPED << ENGINES:
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

    def read(self, va: int, size: int, client: int, *, gpc: int | None = None, what: str = "") -> bytes:
        """A copy of [va, va + size); MMU fault of `client` where it is not mapped."""
        self.require(va, size, client, gpc=gpc, what=what)
        return bytes(self.bytes[va : va + size])

    def write(self, va: int, data: bytes | memoryview, client: int, *, what: str = "") -> None:
        """Store bytes; MMU fault of `client` where that is not allowed."""
        self.require(va, len(data), client, write=True, what=what)
        self.bytes[va : va + len(data)] = data

    def mapping_at(self, va: int) -> Mapping | None:
        """The mapping that holds `va`."""
        with self._lock:
            i = self._index(va)
            return self._mappings[i] if i >= 0 and va < self._mappings[i].va + self._mappings[i].size else None

    def counts(self) -> dict[str, int]:
        """How many mappings there are and how many bytes they cover."""
        with self._lock:
            return {"mappings": len(self._mappings), "bytes": sum(m.size for m in self._mappings)}
