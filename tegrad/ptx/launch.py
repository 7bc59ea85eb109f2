"""The public objects: a loaded module, its kernels, and launches."""

import ctypes
import os
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tegrad.ptx import jit
from tegrad.ptx.arena import Arena, Job, pool
from tegrad.ptx.emitter import Emitter
from tegrad.ptx.errors import PtxError, PtxFault
from tegrad.ptx.inline import expand_calls
from tegrad.ptx.instructions import find
from tegrad.ptx.layout import LANES, Access, Launch, Slot, Space
from tegrad.ptx.parser import parse
from tegrad.ptx.syntax import Function, Ins, Param, Source, Variable

PAGE = 4096


class Memory(NamedTuple):
    """Device memory. `base` is the host address of device address 0; `pages` the host address of one byte per 4 KiB
    page (bit 0 mapped, bit 1 writable; 0 for no checks); addresses at or above `limit` are unmapped."""

    base: int = 0
    pages: int = 0
    limit: int = (1 << 64) - 1


class Windows(NamedTuple):
    """Where generic addresses mean shared or local memory."""

    shared: int = 0xFE00000000
    local: int = 0xFD00000000
    size: int = 1 << 32


HOST = Memory()
DEFAULT_WINDOWS = Windows()


class AbortFlag:
    """Set from any thread or process to end launches that were given it."""

    def __init__(self) -> None:
        self._word = ctypes.c_uint32(0)

    def set(self) -> None:
        self._word.value = 1

    def clear(self) -> None:
        self._word.value = 0

    @property
    def is_set(self) -> bool:
        return bool(self._word.value)

    @property
    def address(self) -> int:
        return ctypes.addressof(self._word)


_NEVER = AbortFlag()


@dataclass(frozen=True, slots=True)
class Stats:
    """What a launch executed: thread instructions and the bytes its threads asked for."""

    instructions: int
    bytes_read: int
    bytes_written: int


class Kernel:
    """One .entry function of a module."""

    def __init__(self, module: "Module", fn: Function) -> None:
        fn = expand_calls(module.source, fn)
        self.module, self.fn, self.name = module, fn, fn.name
        self.params: list[Param] = fn.params
        self.param_size = fn.param_size
        self.max_threads = fn.max_threads
        emitter = Emitter(module.source, fn, find)
        self.ir = emitter.emit()
        self.globals: list[Variable] = emitter.layout.globals
        self.static_shared = emitter.layout.shared
        self.local_size = -(-emitter.layout.local // 16) * 16
        self.frame_size = emitter.layout.frame_size
        self.weights = np.array(emitter.counters, dtype=np.uint64)
        self.pcs = [i for i in fn.body if isinstance(i, Ins)]
        self._lock = threading.Lock()
        self._code: jit.Linked | None = None
        self._arenas: dict[int, list[Arena]] = {}

    def compile(self) -> int:
        """The address of the compiled warp function; compiled, or read from the cache, at first use."""
        with self._lock:
            if self._code is None:
                store = self.module.store
                text = self.ir.text()
                data = store.object(store.key("kernel", text), lambda: text, 1, False)
                needs = {n: jit.helper(n, store) for n in sorted(self.ir.imports)}
                self._code = jit.link(data, ["tgx_warp"], needs)
            return self._code.addresses["tgx_warp"]

    def pack(self, args: bytes | Sequence[np.ndarray | int | float]) -> bytes:
        """Arguments as the bytes of the parameter space."""
        if isinstance(args, bytes | bytearray | memoryview):
            if len(args) < self.param_size:
                raise PtxError(f"kernel {self.name} takes {self.param_size} bytes of parameters, got {len(args)}")
            return bytes(args)
        if len(args) != len(self.params):
            raise PtxError(f"kernel {self.name} takes {len(self.params)} arguments, got {len(args)}")
        out = bytearray(max(self.param_size, 8))
        for p, a in zip(self.params, args, strict=True):
            out[p.offset : p.offset + p.size] = _pack_one(p, a)
        return bytes(out)

    def launch(
        self,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: bytes | Sequence[np.ndarray | int | float],
        *,
        memory: Memory = HOST,
        shared: int = 0,
        symbols: Mapping[str, int] | None = None,
        windows: Windows = DEFAULT_WINDOWS,
        threads: int | None = None,
        abort: AbortFlag | None = None,
    ) -> Stats:
        """Run a grid and wait for it; the GIL is released.

        `shared` is the dynamic shared memory in bytes, `symbols` the device address of each module variable (on HOST the
        engine provides them). Raises PtxFault for the first fault, PtxError for a launch that cannot be made.
        """
        fn = self.compile()
        count = block[0] * block[1] * block[2]
        ctas = grid[0] * grid[1] * grid[2]
        if not 1 <= count <= 1024 or min(grid) < 1 or min(block) < 1:
            raise PtxError(f"kernel {self.name}: grid {grid} with block {block} cannot be launched (1 to 1024 threads)")
        run = _Run(
            self,
            fn,
            grid,
            block,
            self.pack(args),
            memory,
            shared,
            self.module.addresses(symbols or {}, memory),
            windows,
            abort,
        )
        workers = min(threads or os.cpu_count() or 1, ctas)
        return run.go(workers)

    def take_arenas(self, count: int, stride: int, ctas: int) -> list[Arena]:
        """Arenas of this stride, from earlier launches where possible."""
        with self._lock:
            free = self._arenas.setdefault(stride, [])
            usable = [a for a in free if a.slots >= min(ctas, 64)][:count]
            for a in usable:
                free.remove(a)
        while len(usable) < count:
            usable.append(Arena(stride, max(ctas, 64), len(self.weights)))
        return usable

    def give_arenas(self, arenas: list[Arena], stride: int) -> None:
        with self._lock:
            self._arenas[stride] = (self._arenas.get(stride, []) + arenas)[-8:]


class _Run:
    """One launch: its structure in memory, and what to make of its end."""

    def __init__(
        self, kernel: Kernel, fn: int, grid: tuple[int, int, int], block: tuple[int, int, int], params: bytes, memory: Memory,
        shared: int, symbols: "ctypes.Array[ctypes.c_uint64]", windows: Windows, abort: AbortFlag | None,
    ) -> None:  # fmt: skip
        self.kernel, self.grid, self.block, self.memory, self.windows = kernel, grid, block, memory, windows
        self.params = ctypes.create_string_buffer(params, max(len(params), 8) + 8)
        self.symbols, self.abort = symbols, abort or _NEVER
        count = block[0] * block[1] * block[2]
        warps = -(-count // LANES)
        self.ctas = grid[0] * grid[1] * grid[2]
        total_shared = -(-kernel.static_shared // 16) * 16 + shared if shared else kernel.static_shared
        frames_end = Slot.FRAMES + warps * kernel.frame_size
        shared_end = frames_end + -(-total_shared // 64) * 64
        self.stride = -(-(shared_end + warps * LANES * kernel.local_size) // 4096) * 4096
        raw = bytearray(Launch.SIZE)
        struct.pack_into(
            "<QQQQ6I2I",
            raw,
            0,
            memory.base,
            memory.pages,
            memory.limit,
            ctypes.addressof(self.params),
            *grid,
            *block,
            warps,
            count,
        )
        struct.pack_into(
            "<QQQIIQQQQQQQQII", raw, Launch.SHARED_WINDOW, windows.shared, windows.local, windows.size, total_shared, kernel.local_size,
            self.abort.address, 0, self.ctas, kernel.frame_size, frames_end, shared_end, fn, ctypes.addressof(symbols), kernel.param_size, shared,
        )  # fmt: skip
        self.launch = (ctypes.c_char * (Launch.SIZE + 64)).from_buffer_copy(bytes(raw) + bytes(64))
        self.address = ctypes.addressof(self.launch)

    def go(self, workers: int) -> Stats:
        kernel = self.kernel
        arenas = kernel.take_arenas(workers, self.stride, self.ctas)
        worker = kernel.module.worker
        try:
            if workers == 1:
                worker(self.address, arenas[0].address)
            else:
                job = Job(lambda place: worker(self.address, arenas[place].address), workers - 1)
                pool().offer(job)
                try:
                    worker(self.address, arenas[0].address)
                finally:
                    pool().withdraw(job)
                    job.close()
            stats = self.stats(arenas)
        finally:
            for a in arenas:
                ctypes.memset(a.counters, 0, ctypes.sizeof(a.counters))
            kernel.give_arenas(arenas, self.stride)
        self.check()
        return stats

    def stats(self, arenas: list[Arena]) -> Stats:
        total = sum(
            (np.frombuffer(a.counters, dtype=np.uint64) for a in arenas), np.zeros(len(self.kernel.weights), np.uint64)
        )
        n, r, w = (int(x) for x in total @ self.kernel.weights)
        return Stats(n, r, w)

    def check(self) -> None:
        """Raise the fault or the abort that ended the launch."""
        state, pc, lane, warp, cta, address, info = struct.unpack_from("<IIIIQQI", self.launch, Launch.FAULT_STATE)
        if state == 0:
            if self.abort.is_set:
                raise PtxFault("aborted", self.kernel.name)
            return
        ins = self.kernel.pcs[pc]
        gx, gy, _ = self.grid
        bx, by, _ = self.block
        thread = warp * LANES + lane
        access, size, space = Access(info >> 16 & 0xFF), info & 0xFFFF, Space(info >> 24)
        raise PtxFault(
            self.kind(access, size, space, address),
            self.kernel.name,
            pc,
            self.kernel.module.source.line(ins.line),
            (cta % gx, cta // gx % gy, cta // (gx * gy)),
            warp,
            lane,
            (thread % bx, thread // bx % by, thread // (bx * by)),
            address,
            {Access.READ: "read", Access.WRITE: "write", Access.ATOMIC: "atomic"}.get(access, ""),
            size,
        )

    def kind(self, access: Access, size: int, space: Space, address: int) -> str:
        """Name a fault from the access that was refused."""
        if access == Access.TRAP:
            return "trap"
        if access == Access.ILLEGAL:
            return "illegal"
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
        return "read-only" if ctypes.c_uint8.from_address(memory.pages + address // PAGE).value & 1 else "unmapped"


def _pack_one(p: Param, a: np.ndarray | int | float) -> bytes:
    if isinstance(a, np.ndarray):
        return struct.pack("<Q", a.ctypes.data)
    if p.type.kind == "f":
        return struct.pack({16: "<e", 32: "<f", 64: "<d"}[p.type.bits], a)
    if isinstance(a, float):
        return struct.pack("<f" if p.size == 4 else "<d", a)
    return (int(a) & ((1 << 8 * p.size) - 1)).to_bytes(p.size, "little")


class Module:
    """A loaded PTX module."""

    def __init__(self, text: str, cache_dir: Path | None) -> None:
        self.source: Source = parse(text)
        self.store = jit.Store(cache_dir)
        self._own: dict[str, np.ndarray] = {}
        self.kernels: dict[str, Kernel] = {}
        for fn in self.source.functions.values():
            if fn.entry:
                self.kernels[fn.name] = Kernel(self, fn)
        if not self.kernels:
            raise PtxError("the PTX text has no .entry function; is it complete?")
        self._worker: jit.Linked | None = None
        self.variables = [v for v in self.source.variables.values() if v.space in ("global", "const")]

    @property
    def worker(self) -> "ctypes._CFuncPointer":
        """The scheduler's entry point: worker(launch address, arena address)."""
        return _worker_function(jit.helper("tgx_worker", self.store))

    def launch(
        self, grid: tuple[int, int, int], block: tuple[int, int, int], args: Sequence[np.ndarray | int | float]
    ) -> Stats:
        """Launch the module's only kernel on host memory."""
        if len(self.kernels) != 1:
            raise PtxError(f"the module has {len(self.kernels)} kernels; choose one of {', '.join(self.kernels)}")
        return next(iter(self.kernels.values())).launch(grid, block, args)

    def addresses(self, symbols: Mapping[str, int], memory: Memory) -> "ctypes.Array[ctypes.c_uint64]":
        """Addresses of the module's variables in table order."""
        table = (ctypes.c_uint64 * max(1, len(self.variables)))()
        for i, v in enumerate(self.variables):
            if v.name in symbols:
                table[i] = symbols[v.name]
            elif memory.base == 0 and memory.pages == 0:
                table[i] = self._host_variable(v)
            else:
                raise PtxError(f"no address given for the variable {v.name}; pass it in symbols")
        return table

    def _host_variable(self, v: Variable) -> int:
        """A variable of the module in host memory, with its initial value."""
        known = self._own.get(v.name)
        if known is None:
            raw = np.zeros(v.size + v.align, np.uint8)
            skip = -raw.ctypes.data % v.align
            known = raw[skip : skip + v.size]
            self._own[v.name] = known
            if v.init:
                known[: len(v.init)] = np.frombuffer(v.init, np.uint8)
            by_name = {o.name: o for o in self.variables}
            for offset, name, addend in v.pointers:
                known[offset : offset + 8] = np.frombuffer(
                    struct.pack("<Q", self._host_variable(by_name[name]) + addend), np.uint8
                )
        return known.ctypes.data


_function_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
_functions: dict[int, "ctypes._CFuncPointer"] = {}


def _worker_function(address: int) -> "ctypes._CFuncPointer":
    fn = _functions.get(address)
    if fn is None:
        fn = _functions[address] = _function_type(address)
    return fn


def load(text: str, cache_dir: Path | None | str = "default") -> Module:
    """Parse and check PTX text. `cache_dir` None keeps no compiled code on disk.

    Raises PtxError with the line for text that cannot be read or an instruction that is not supported.
    """
    directory = (
        jit.default_cache_dir() if cache_dir == "default" else Path(cache_dir) if cache_dir is not None else None
    )
    return Module(text, directory)
