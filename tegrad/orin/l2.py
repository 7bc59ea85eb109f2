"""The GPU's L2: what cached mappings show of memory.

The L2 is not coherent with the CPU. A sector of 32 bytes that the GPU has touched through a cached mapping is kept, and
what the CPU stores there afterwards is not seen until the sector goes: by a flush that invalidates, an unmap of
anything, an eviction, or an access through a volatile mapping of the same memory. Stores go through to memory at once,
or with `back` stay until a flush or an eviction. Sectors are physical: all mappings of a buffer meet the same ones.

Seen on an H200 (docs/coherence.md): what is kept and for how long, the grain, stores that go through and keep only what
they cover whole, atomics on the kept value, both kinds of mapping of the same pages. Read in nvgpu
(hal/mm/cache/flush_gk20a_fusa.c): a flush leaves lines as clean, an invalidation only drops clean ones. Inferred: that
ga10b does the same; stores that stay (`back`).

Every buffer with a cached mapping has frames, one per page, in one memfd of what the L2 keeps. A cached mapping shows
these at its addresses, and memory itself `delta` after them (`tegrad.ptx.l2` has the compiled part). Kernels load
pages that are mostly kept as a whole, which is stricter than silicon; everything else is exact to sectors.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import random
import threading
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tegrad.errors import SettingError, TegradError
from tegrad.orin.hostmem import ANONYMOUS, READ_WRITE, map_memory, punch, unmap_memory
from tegrad.ptx import jit
from tegrad.ptx.l2 import (
    DROP,
    MAX_FRAMES,
    MOST_EVENTS,
    OVERWRITTEN,
    PAGE,
    PAGE_SECTORS,
    SECTOR,
    WRITE_BACK,
    Cache,
    Event,
    Mode,
    Page,
    Port,
)

if TYPE_CHECKING:
    from tegrad.orin.memory import AddressSpace, Mapping

VARIABLE = "TEGRAD_L2"
WORDS = {"through": Mode(0), "back": Mode.BACK, "tell": Mode.TELL}
"""What the variable may say, separated by commas: how stores behave, and whether to report stale loads."""

_FREE_SHARE = 4
"""A full L2 is emptied by this share of it at once."""

_LOOK_AHEAD = 4096
"""Frames in the order of eviction that are looked at together."""


def mode_from_environment() -> Mode:
    """The mode that the environment asks for. SettingError for a word that has no meaning."""
    mode = Mode(0)
    for word in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if word not in WORDS:
            raise SettingError(f"{VARIABLE}={word} means nothing: use {', '.join(WORDS)}, separated by commas")
        mode |= WORDS[word]
    return mode


class Functions:
    """The compiled functions. Each gives up the GIL meanwhile; addresses of structures are host addresses."""

    def __init__(self) -> None:
        store = jit.Store(jit.default_cache_dir())
        pointer, wide = ctypes.c_void_p, ctypes.c_uint64

        def bound(name: str, *types: Any) -> Any:
            return ctypes.CFUNCTYPE(None, *types)(jit.helper(f"tgx_l2_{name}", store))

        self.lock, self.unlock = bound("lock", pointer), bound("unlock", pointer)
        self.load = bound("load", pointer, wide, wide, wide)
        self.begin, self.end = bound("begin", pointer, wide, wide), bound("end", pointer, wide, wide)
        self.look = bound("look", pointer, wide, wide, pointer)
        self.sweep = bound("sweep", pointer, wide, wide, ctypes.c_uint32)


@dataclass(slots=True, eq=False)
class Physical:
    """A buffer's memory: its frames, once it has a cached mapping, and where it is mapped."""

    key: tuple[int, int]
    pages: int
    label: str = ""
    first: int = -1
    cached: list[tuple[AddressSpace, Mapping]] = field(default_factory=list)
    volatile: list[tuple[AddressSpace, Mapping]] = field(default_factory=list)

    @property
    def mixed(self) -> bool:
        return bool(self.cached and self.volatile)

    def where(self, mapping: Mapping) -> list[tuple[AddressSpace, Mapping]]:
        """The list that a mapping belongs to."""
        return self.cached if mapping.cached else self.volatile


class L2:
    """The L2 of one GPU. `capacity` in bytes; `evictions` is a seed with which sectors go by themselves."""

    def __init__(self, capacity: int, mode: Mode | None = None, evictions: int | None = None) -> None:
        self.mode = mode_from_environment() if mode is None else mode
        self.capacity = capacity
        self.tell = bool(self.mode & Mode.TELL)
        self._random = None if evictions is None else random.Random(evictions)
        self._struct = ctypes.create_string_buffer(Cache.SIZE)
        self.address = ctypes.addressof(self._struct)
        self._word(Cache.MODE, ctypes.c_uint32).value = int(self.mode)
        self._kept = self._word(Cache.KEPT)
        self._filled = self._word(Cache.FILLED)
        self._ordered = self._word(Cache.ORDERED)
        self._reported = self._word(Cache.REPORTED)
        self._physical: dict[tuple[int, int], Physical] = {}
        self._by_frame: list[tuple[int, Physical]] = []
        self._free: list[tuple[int, int]] = [(0, MAX_FRAMES)]
        self._read = 0
        self._tags: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._areas: list[tuple[int, int]] = []
        self._fd = os.memfd_create("gpu-l2")  # from the start: who counts fds finds none come
        os.ftruncate(self._fd, MAX_FRAMES * PAGE)
        self._order: Any = None
        self._events: Any = None
        self._counts: Any = None
        self._sectors: Any = None
        self._ids = itertools.count(1)
        self._spaces: dict[int, AddressSpace] = {}
        self.functions: Functions | None = None

    def _word(self, offset: int, kind: Any = ctypes.c_uint64) -> Any:
        return kind.from_address(self.address + offset)

    @property
    def kept(self) -> int:
        """Bytes of the sectors that are kept."""
        return int(self._kept.value) * SECTOR

    @property
    def filled(self) -> int:
        """How many sectors have come to be kept so far."""
        return int(self._filled.value)

    @property
    def untold(self) -> int:
        """How many reports there are, in mode `tell`, since `reports` was called last."""
        return int(self._reported.value)

    # -- mappings -----------------------------------------------------------------------------------------------------

    def port(self, space: AddressSpace) -> PortOf:
        """An address space's way into the L2."""
        port = PortOf(self, next(self._ids), space)
        self._spaces[port.id] = space
        return port

    def physical(self, key: tuple[int, int], pages: int, label: str) -> Physical:
        """The buffer whose memfd has this device and inode."""
        known = self._physical.setdefault(key, Physical(key, pages))
        known.label = label or known.label
        return known

    def attach(self, space: AddressSpace, mapping: Mapping) -> None:
        """A mapping comes; its buffer's other mappings change if it is the first of its kind. Its own pages are shown
        by the caller, once there is memory behind them."""
        physical = mapping.physical
        assert physical is not None
        with self._lock:
            was = physical.mixed
            if mapping.cached and physical.first < 0:
                self._give_frames(physical)
            physical.where(mapping).append((space, mapping))
            self._mix(physical, was, mapping)

    def leave(self, space: AddressSpace, mapping: Mapping) -> None:
        """A mapping is about to go: nothing of it stays kept."""
        if mapping.cached and self.functions is not None:
            self.functions.sweep(space.port.address, mapping.va, mapping.size, WRITE_BACK | DROP)

    def detach(self, space: AddressSpace, mapping: Mapping) -> None:
        """A mapping has gone: its pages' flags are 0."""
        physical = mapping.physical
        assert physical is not None
        with self._lock:
            was = physical.mixed
            physical.where(mapping).remove((space, mapping))
            if not physical.cached and physical.first >= 0:
                self._take_frames(physical)
            if not physical.cached and not physical.volatile:
                self._physical.pop(physical.key, None)
            self._mix(physical, was)

    def _mix(self, physical: Physical, was: bool, new: Mapping | None = None) -> None:
        if physical.mixed != was:
            for space, mapping in (*physical.cached, *physical.volatile):
                if mapping is not new:
                    space.show(mapping)

    def _give_frames(self, physical: Physical) -> None:
        self.start()
        for i, (first, count) in enumerate(self._free):
            if count >= physical.pages:
                self._free[i] = (first + physical.pages, count - physical.pages)
                physical.first = first
                break
        else:
            raise TegradError(f"the emulated L2 tells {MAX_FRAMES} pages apart, no more: cache fewer buffers")
        self._by_frame.append((physical.first, physical))
        self._by_frame.sort(key=lambda pair: pair[0])

    def _take_frames(self, physical: Physical) -> None:
        first, count = physical.first, physical.pages
        with self.locked():
            # What a kernel touched between the last sweep and the end of the flags.
            self._kept.value -= int(self._counts[first : first + count].sum())
            self._counts[first : first + count] = 0
            self._sectors[first * PAGE_SECTORS : (first + count) * PAGE_SECTORS] = 0
        self._by_frame = [pair for pair in self._by_frame if pair[1] is not physical]
        with suppress(OSError):
            punch(self._fd, first * PAGE, count * PAGE)
        self._free = _joined([*self._free, (first, count)])
        physical.first = -1

    def start(self) -> None:
        """Make what only a board with cached mappings needs."""
        if self.functions is not None:
            return
        self._word(Cache.SHADOW).value = self._area(MAX_FRAMES * PAGE, mmap.MAP_SHARED, self._fd)
        sizes = {Cache.SECTORS: MAX_FRAMES * PAGE_SECTORS, Cache.COUNTS: MAX_FRAMES, Cache.ORDER: 4 * MAX_FRAMES,
                 Cache.EVENTS: MOST_EVENTS * Event.END, Cache.MASKS: 8 * MAX_FRAMES * PAGE_SECTORS}  # fmt: skip
        if self.tell:
            sizes[Cache.CLEAN] = MAX_FRAMES * PAGE
        for offset, size in sizes.items():
            self._word(offset).value = self._area(size)
        self._order = self._view(Cache.ORDER, ctypes.c_uint32, MAX_FRAMES)
        self._events = self._view(Cache.EVENTS, ctypes.c_uint8, sizes[Cache.EVENTS])
        self._counts = self._view(Cache.COUNTS, ctypes.c_uint8, MAX_FRAMES)
        self._sectors = self._view(Cache.SECTORS, ctypes.c_uint8, MAX_FRAMES * PAGE_SECTORS)
        self.functions = Functions()

    def _area(self, size: int, flags: int = ANONYMOUS, fd: int = -1) -> int:
        """Zeroed memory that is only there where it is touched: its address."""
        address = map_memory(0, size, READ_WRITE, flags, fd)
        self._areas.append((address, size))
        return address

    def _view(self, offset: int, kind: Any, count: int) -> Any:
        """An array whose address is in the structure."""
        return np.ctypeslib.as_array((kind * count).from_address(self._word(offset).value))

    def map_shadow(self, mapping: Mapping) -> tuple[int, int]:
        """The fd and the offset of what the L2 keeps of a cached mapping."""
        assert mapping.physical is not None
        return self._fd, mapping.physical.first * PAGE + mapping.offset

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No kernel looks at the L2 or at its pages' flags meanwhile."""
        if self.functions is None:
            yield
            return
        self.functions.lock(self.address)
        try:
            yield
        finally:
            self.functions.unlock(self.address)

    def none_of(self, frames: Any) -> Any:
        """Of which of these frames nothing is kept."""
        return self._counts[frames] == 0

    # -- flushes ------------------------------------------------------------------------------------------------------

    def write_back(self) -> None:
        """Dirty sectors go to memory, and stay as clean ones."""
        self._sweep_all(WRITE_BACK)

    def invalidate(self) -> None:
        """Clean sectors are forgotten; dirty ones stay."""
        self._sweep_all(DROP)

    def flush(self) -> None:
        """Write back, then invalidate, as the driver does after every unmap."""
        self._sweep_all(WRITE_BACK | DROP)

    def _sweep_all(self, what: int) -> None:
        if self._kept.value:
            with self._lock:
                for _, physical in self._by_frame:
                    self._sweep(physical, what)
                if what & DROP and not self._kept.value:
                    self._read = self._ordered.value

    def _sweep(self, physical: Physical, what: int, first: int = 0, count: int | None = None) -> None:
        """Go through a buffer's pages [first, first + count) in all of its cached mappings."""
        start, end = first * PAGE, (physical.pages if count is None else first + count) * PAGE
        assert self.functions is not None
        for space, mapping in physical.cached:
            low, high = max(start, mapping.offset), min(end, mapping.offset + mapping.size)
            if low < high:
                va = mapping.va + low - mapping.offset
                self.functions.sweep(space.port.address, va, high - low, what)

    def settle(self) -> None:
        """Evict: what does not fit, the oldest first; with a seed now and then more. Called between pieces of work."""
        if not self._kept.value:
            return
        if self._random is not None and self._random.random() < 0.3:
            self._evict(int(self._kept.value) * self._random.random())
        elif self.kept > self.capacity:
            self._evict((self.kept - self.capacity + self.capacity // _FREE_SHARE) // SECTOR)

    def _evict(self, sectors: float) -> None:
        """Let at least so many sectors go, dirty ones to memory, frames in the order in which they came."""
        with self._lock:
            until = self._kept.value - sectors
            while self._kept.value > until and self._read < self._ordered.value:
                self._read = max(self._read, self._ordered.value - MAX_FRAMES)
                places = np.arange(self._read, min(self._ordered.value, self._read + _LOOK_AHEAD)) % MAX_FRAMES
                frames = self._order[places]
                enough = int(np.searchsorted(np.cumsum(self._counts[frames], dtype=np.int64), self._kept.value - until))
                frames = np.unique(frames[: enough + 1])
                self._read += min(enough + 1, len(places))
                for run in np.split(frames, np.flatnonzero(np.diff(frames) != 1) + 1):
                    self._evict_frames(int(run[0]), int(run[-1]) + 1)

    def _evict_frames(self, start: int, end: int) -> None:
        """Write back and drop what is kept of the frames [start, end)."""
        i = max(0, bisect_right(self._by_frame, start, key=lambda pair: pair[0]) - 1)
        for first, physical in self._by_frame[i:]:
            if first >= end:
                break
            low, high = max(start, first), min(end, first + physical.pages)
            if low < high:
                self._sweep(physical, WRITE_BACK | DROP, low - first, high - low)

    # -- reports ------------------------------------------------------------------------------------------------------

    def launch(self, kernel: str) -> int:
        """A number for a launch, by which reports name it and its stores are told from others'."""
        number = next(self._numbers) & 0xFFFFFFFF
        if self.tell:
            self._names[number] = f"kernel {kernel}"
        return number

    def tag(self, what: str) -> int:
        """The number by which reports name what an engine does."""
        if what not in self._tags:
            number = self._tags[what] = next(self._numbers)
            self._names[number] = what
        return self._tags[what]

    def told(self) -> list[str]:
        """What was found since the last call, in mode `tell`: a sentence for each buffer and whoever met it."""
        groups: dict[object, list[Report]] = {}
        for report in self.reports():
            groups.setdefault((report.overwritten, report.buffer, report.who), []).append(report)
        return [f"{found[0]} ({len(found)} of these)" if found[1:] else str(found[0]) for found in groups.values()]

    def reports(self) -> list[Report]:
        """What was found since the last call, in mode `tell`; at most MOST_EVENTS."""
        if not self._reported.value:
            return []
        with self._lock, self.locked():
            count = min(self._reported.value, MOST_EVENTS)
            raw = self._events[: count * Event.END].tobytes()
            self._reported.value = 0
        return [self._report(raw[at : at + Event.END]) for at in range(0, len(raw), Event.END)]

    def _report(self, raw: bytes) -> Report:
        def word(offset: int, size: int = 4) -> int:
            return int.from_bytes(raw[offset : offset + size], "little")

        va = word(Event.VA, 8)
        space = self._spaces.get(word(Event.PORT, 8))
        mapping = space.mapping_at(va) if space is not None else None
        label = mapping.physical.label if mapping is not None and mapping.physical is not None else ""
        lane = ctypes.c_int32(word(Event.LANE)).value
        return Report(
            overwritten=word(Event.KIND) == OVERWRITTEN,
            va=va,
            size=word(Event.SIZE),
            buffer=mapping.va if mapping is not None else 0,
            role=label,
            who=self._names.get(word(Event.TAG, 8), ""),
            cta=word(Event.CTA, 8),
            thread=word(Event.WARP) * 32 + lane if lane >= 0 else -1,
            pc=word(Event.PC),
        )

    def close(self) -> None:
        """Give all memory back. No address space may be left."""
        self._order = self._events = self._counts = self._sectors = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        for address, size in self._areas:
            unmap_memory(address, size)
        self._areas.clear()


@dataclass(frozen=True, slots=True)
class Report:
    """A load that saw an old value, or a dirty sector that went over what the CPU had stored meanwhile.

    `who`: the kernel, or what an engine did; `cta` is its linear index; `thread` -1: no kernel.
    """

    overwritten: bool
    va: int
    size: int
    buffer: int
    role: str
    who: str
    cta: int
    thread: int
    pc: int

    def __str__(self) -> str:
        buffer = f"{self.role or 'a buffer'} at {self.buffer:#x} + {self.va - self.buffer:#x}"
        if self.overwritten:
            return f"L2: a dirty sector of {buffer} was stored over what the CPU had written there"
        by = f"{self.who}, CTA {self.cta}, thread {self.thread}" if self.thread >= 0 else self.who
        return f"L2: stale load of {self.size} bytes of {buffer} by {by}: the CPU has written there since"


class PortOf:
    """An address space's way into the L2: its structure, its frames by page, whether any mapping needs it."""

    def __init__(self, cache: L2, number: int, space: AddressSpace) -> None:
        self.cache, self.id, self._space = cache, number, space
        self._struct = ctypes.create_string_buffer(Port.SIZE)
        self.address = ctypes.addressof(self._struct)
        self.used = 0
        """Cached and mixed mappings."""
        self.delta = 0
        self._frames = 0
        self._table: Any = None
        for offset, value in ((Port.CACHE, cache.address), (Port.BASE, space.base), (Port.PAGES, space.pages),
                              (Port.ID, number)):  # fmt: skip
            self._set(offset, value)

    def _set(self, offset: int, value: int) -> None:
        ctypes.c_uint64.from_address(self.address + offset).value = value & (1 << 64) - 1

    def open(self, delta: int) -> None:
        """The address space has got its second view, of memory itself, `delta` after the first."""
        self.delta = delta
        pages = self._space.span // PAGE
        self._frames = address = map_memory(0, pages * 4, READ_WRITE, ANONYMOUS)
        self._table = np.ctypeslib.as_array((ctypes.c_uint32 * pages).from_address(address))
        self._set(Port.DELTA, delta)
        self._set(Port.FRAMES, address)

    def number(self, mapping: Mapping) -> None:
        """Tell the frames of a mapping's pages."""
        assert mapping.physical is not None
        first = mapping.physical.first + mapping.offset // PAGE
        page, count = mapping.va // PAGE, mapping.size // PAGE
        self._table[page : page + count] = np.arange(first, first + count, dtype=np.uint32)

    def load(self, va: int, size: int, what: str) -> None:
        """An engine is about to read a range at its addresses."""
        functions = self.cache.functions
        assert functions is not None
        functions.load(self.address, va, size, self.cache.tag(what) if self.cache.tell else 0)

    @contextmanager
    def storing(self, va: int, size: int) -> Iterator[None]:
        """An engine stores to a range at its addresses inside the `with`, and nothing else comes between."""
        functions = self.cache.functions
        assert functions is not None
        functions.begin(self.address, va, size)
        try:
            yield
        finally:
            functions.end(self.address, va, size)

    def look(self, va: int, size: int) -> bytes:
        """What a load would see, without being one."""
        functions = self.cache.functions
        assert functions is not None
        pages = slice(va // PAGE, (va + size - 1) // PAGE + 1)
        flags = np.frombuffer(self._space.flags[pages], np.uint8)
        plain, cached = flags & Page.READ != 0, flags & Page.CACHED != 0
        if (plain | cached & self.cache.none_of(self._table[pages])).all():
            return self._runs(va, size, plain)
        out = ctypes.create_string_buffer(size)
        functions.look(self.address, va, size, out)
        return out.raw

    def _runs(self, va: int, size: int, plain: Any) -> bytes:
        """Bytes of a range: as they lie at the addresses of plain pages, and memory itself behind the others."""
        starts = [0, *(np.flatnonzero(plain[1:] != plain[:-1]) + 1).tolist()]
        edges = [va, *((va // PAGE + start) * PAGE for start in starts[1:]), va + size]
        spans = zip(starts, edges, edges[1:], strict=False)
        held, raw = self._space.bytes, self._space.raw
        return b"".join(held[low:high] if plain[at] else raw(low, high - low) for at, low, high in spans)

    def close(self) -> None:
        """The address space goes."""
        self._table = None
        if self._frames:
            unmap_memory(self._frames, self._space.span // PAGE * 4)
        self.cache._spaces.pop(self.id, None)


def flags_of(mapping: Mapping) -> int:
    """The flag byte of a mapping's pages (`ptx.l2.Page`)."""
    read, write = Page.ENGINE_READ, Page.ENGINE_WRITE if mapping.writable else 0
    physical = mapping.physical
    mixed = physical is not None and physical.mixed
    if not mapping.cached and not mixed:
        return int(read | write | Page.READ | (Page.WRITE if mapping.writable else 0))
    slow = Page.SLOW_READ | (Page.SLOW_WRITE if mapping.writable else 0)
    return int(read | write | slow | (Page.CACHED if mapping.cached else 0) | (Page.MIXED if mixed else 0))


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of (first, count) in order, neighbours made one."""
    out: list[tuple[int, int]] = []
    for first, count in sorted(pair for pair in ranges if pair[1]):
        if out and sum(out[-1]) == first:
            out[-1] = (out[-1][0], out[-1][1] + count)
        else:
            out.append((first, count))
    return out
