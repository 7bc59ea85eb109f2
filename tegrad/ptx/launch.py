"""One launch: its structure in memory, the host threads that run it, and what to make of its end.

A plan is everything about a launch but its arguments; kernels keep the plans of their recent launches, so that a launch
again costs little.
"""

import ctypes
import os
import struct
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

from tegrad.ptx.arena import Arena, Job, pool
from tegrad.ptx.bulk import AREA_BYTES
from tegrad.ptx.errors import PtxFault
from tegrad.ptx.l2 import Page
from tegrad.ptx.layout import LANES, Access, Flag, Launch, Slot, Space

if TYPE_CHECKING:
    from tegrad.ptx.module import LoadedKernel

PAGE = 4096
SMALL_INSTRUCTIONS = 400_000
"""Thread instructions below which a second host thread costs more than it brings."""
NO_ACCESS = {
    Access.TRAP: "trap", Access.ILLEGAL: "illegal", Access.MISSING: "missing-lanes", Access.OUTSIDE: "unnamed-lanes"
}  # fmt: skip
"""Faults that are of no access, by what a record has in place of one."""
Dim = tuple[int, int, int]
Dims = tuple[Dim, Dim]
"""What %ntid and %nctaid read."""


class Memory(NamedTuple):
    """Device memory. `base` is the host address of device address 0; `pages` the host address of one byte per 4 KiB
    page (`l2.Page`: bit 0 mapped, bit 1 writable; 0 for no checks); addresses at or above `limit` are unmapped. `l2` is
    the host address of the L2's port, where pages may be cached."""

    base: int = 0
    pages: int = 0
    limit: int = (1 << 64) - 1
    l2: int = 0


class Windows(NamedTuple):
    """Where generic addresses mean shared or local memory."""

    shared: int = 0xFE00000000
    local: int = 0xFD00000000
    size: int = 1 << 32


HOST = Memory()
DEFAULT_WINDOWS = Windows()


class AbortFlag:
    """Set from any thread to end launches that were given it, or to make them give way for a while.

    A launch that gives way keeps its state, sleeps in its own threads, and goes on when `resume` is called.
    """

    def __init__(self) -> None:
        self._words = (ctypes.c_uint32 * 2)()
        self._lock = threading.Lock()

    def set(self) -> None:
        """End the launches."""
        with self._lock:
            self._words[0] |= Flag.ABORT

    def clear(self) -> None:
        """Let launches run again."""
        with self._lock:
            self._words[0] = 0

    def pause(self, *, between_ctas: bool = False) -> None:
        """Make launches give way: at the next chance, or when the CTAs that have begun are done."""
        with self._lock:
            self._words[0] |= Flag.PAUSE_CTA if between_ctas else Flag.PAUSE

    def resume(self) -> None:
        """Let launches that gave way go on."""
        with self._lock:
            self._words[0] &= Flag.ABORT

    @property
    def is_set(self) -> bool:
        """Whether launches are to end."""
        return bool(self._words[0] & Flag.ABORT)

    @property
    def running(self) -> int:
        """How many host threads execute launches that were given this flag; those that gave way do not count."""
        return int(self._words[1])

    @property
    def address(self) -> int:
        """Where compiled code finds the flag."""
        return ctypes.addressof(self._words)


NEVER = AbortFlag()


class Stats(NamedTuple):
    """What a launch executed: thread instructions and the bytes its threads asked for."""

    instructions: int
    bytes_read: int
    bytes_written: int


class Plan:
    """A kernel with its grid, block, memory and shared memory: the launch structure and the arenas."""

    def __init__(
        self, kernel: "LoadedKernel", code: int, grid: Dim, block: Dim, dims: Dims, memory: Memory, windows: Windows,
        shared: int, symbols: tuple[int, ...]
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.block, self.memory, self.windows = kernel, grid, block, memory, windows
        count = block[0] * block[1] * block[2]
        warps = -(-count // LANES)
        self.ctas = grid[0] * grid[1] * grid[2]
        self.params = ctypes.create_string_buffer(max(kernel.param_size, 8) + 8)
        self.symbols = (ctypes.c_uint64 * max(1, len(symbols)))(*symbols)
        static = kernel.static_shared
        total_shared = -(-static // 16) * 16 + shared if shared else static
        frames_end = Slot.FRAMES + warps * kernel.frame_size + (AREA_BYTES if kernel.asynchronous else 0)
        shared_end = frames_end + -(-total_shared // 64) * 64
        self.stride = -(-(shared_end + warps * LANES * kernel.local_size) // PAGE) * PAGE
        raw = bytearray(Launch.SIZE)
        struct.pack_into(
            "<QQQQ6I2I", raw, 0, memory.base, memory.pages, memory.limit, ctypes.addressof(self.params), *grid,
            *block, warps, count,
        )  # fmt: skip
        struct.pack_into(
            "<QQQIIQQQQQQQQII", raw, Launch.SHARED_WINDOW, windows.shared, windows.local, windows.size, total_shared,
            kernel.local_size,
            0, 0, self.ctas, kernel.frame_size, frames_end, shared_end, code, ctypes.addressof(self.symbols),
            kernel.param_size, shared,
        )  # fmt: skip
        struct.pack_into("<6I", raw, Launch.NTID, *dims[0], *dims[1])
        struct.pack_into("<IQ", raw, Launch.COPY_QUEUE, kernel.copy_queue, kernel.settle())
        struct.pack_into("<Q", raw, Launch.L2, memory.l2)
        self.launch = ctypes.create_string_buffer(bytes(raw), Launch.SIZE)
        self.address = ctypes.addressof(self.launch)
        self.abort = ctypes.c_uint64.from_address(self.address + Launch.ABORT)
        self.next_cta = ctypes.c_uint64.from_address(self.address + Launch.NEXT_CTA)
        self.fault = ctypes.c_uint32.from_address(self.address + Launch.FAULT_STATE)
        self.seed = ctypes.c_uint32.from_address(self.address + Launch.SEED)
        self.tag = ctypes.c_uint32.from_address(self.address + Launch.TAG)
        self.arenas: list[Arena] = []
        # Until a launch has told, every instruction is taken to run once.
        self.instructions = len(kernel.pcs) * count * self.ctas

    def workers(self, threads: int | None) -> int:
        """How many host threads to use."""
        if threads:
            return min(threads, self.ctas)
        if self.ctas == 1 or self.instructions <= SMALL_INSTRUCTIONS:
            return 1
        return min(_cpus(), self.ctas)

    def go(
        self, worker: Any, params: bytes, threads: int | None, abort: AbortFlag | None, seed: int = 0, tag: int = 0
    ) -> Stats:
        """Run the grid; raises PtxFault."""
        ctypes.memmove(self.params, params, min(len(params), len(self.params)))
        flag = abort or NEVER
        self.abort.value = flag.address
        self.next_cta.value = 0
        self.fault.value = 0
        self.seed.value, self.tag.value = seed, tag
        count = self.workers(threads)
        arenas = self.arenas
        while len(arenas) < count:
            arenas.append(Arena(self.stride, max(self.ctas, 64), len(self.kernel.weights)))
        if count == 1:
            worker(self.address, arenas[0].address)
            total = arenas[0].counters @ self.kernel.weights
        else:
            self._together(worker, arenas[:count])
            total = sum((a.counters for a in arenas[1:count]), arenas[0].counters) @ self.kernel.weights
        for a in arenas[:count]:
            a.counters.fill(0)
        if self.fault.value or flag.is_set:
            self.raise_fault(flag)
        instructions, read, written = total.tolist()
        self.instructions = instructions
        return Stats(instructions, read, written)

    def _together(self, worker: Any, arenas: list[Arena]) -> None:
        job = Job(lambda place: worker(self.address, arenas[place].address), len(arenas) - 1)
        pool().offer(job)
        try:
            worker(self.address, arenas[0].address)
        finally:
            pool().withdraw(job)
            job.close()

    def raise_fault(self, flag: AbortFlag) -> None:
        """Raise the fault that ended the launch, or the abort."""
        state, pc, lane, warp, cta, address, info = struct.unpack_from("<IIIIQQI", self.launch, Launch.FAULT_STATE)
        name = self.kernel.name
        if state == 0:
            if self.next_cta.value < self.ctas or flag.is_set:
                raise PtxFault("aborted", name)
            return
        ins = self.kernel.pcs[pc]
        gx, gy, _ = self.grid
        bx, by, _ = self.block
        thread = warp * LANES + lane
        access, size, space = Access(info >> 16 & 0xFF), info & 0xFFFF, Space(info >> 24)
        raise PtxFault(
            self.kind(access, size, space, address),
            name,
            pc,
            self.kernel.module.source.line(ins.line),
            (cta % gx, cta // gx % gy, cta // (gx * gy)),
            warp,
            lane,
            (thread % bx, thread // bx % by, thread // (bx * by)),
            address,
            "" if access in NO_ACCESS else access.name.lower(),
            size,
        )

    def kind(self, access: Access, size: int, space: Space, address: int) -> str:
        """Name a fault from the access that was refused."""
        if access in NO_ACCESS:
            return NO_ACCESS[access]
        if address % size:
            return "misaligned"
        windows, memory = self.windows, self.memory
        inside = any(0 <= address - w < windows.size for w in (windows.shared, windows.local))
        if space in (Space.SHARED, Space.LOCAL, Space.PARAM) or (space == Space.GENERIC and inside):
            return "out-of-range"
        if inside:
            return "address-space"
        if address >= memory.limit or not memory.pages:
            return "unmapped"
        flags = ctypes.c_uint8.from_address(memory.pages + address // PAGE).value
        return "read-only" if flags & (Page.READ | Page.SLOW_READ) else "unmapped"


def _cpus() -> int:
    """The processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
