"""The public objects: a loaded module and its kernels."""

import ctypes
import hashlib
import pickle
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tegrad.ptx import jit
from tegrad.ptx.control import barriers
from tegrad.ptx.convergence import branch_around
from tegrad.ptx.emitter import Emitter
from tegrad.ptx.errors import PtxError
from tegrad.ptx.inline import expand_calls
from tegrad.ptx.instructions import find
from tegrad.ptx.launch import DEFAULT_WINDOWS, HOST, AbortFlag, Dim, Dims, Memory, Plan, Stats, Windows
from tegrad.ptx.parser import parse
from tegrad.ptx.syntax import Function, Ins, Param, Source, Variable
from tegrad.ptx.warpgroup import prepare

MAX_PLANS = 64
KERNEL_LEVEL = 0
"""LLVM's level for kernels. Values live in registers within a block as they are written, so that higher levels run real
kernels no faster and compile twice as long; a second tier has nothing to gain."""
Arguments = bytes | bytearray | memoryview | Sequence[Any]


class LoadedKernel:
    """One .entry function of a module."""

    def __init__(self, module: "Module", fn: Function) -> None:
        fn = branch_around(prepare(expand_calls(module.source, fn)))
        self.module, self.fn, self.name = module, fn, fn.name
        self.params: list[Param] = fn.params
        self.param_size = fn.param_size
        self.max_threads = fn.max_threads
        emitter = Emitter(module.source, fn, find)
        ir = emitter.emit()
        self._text, self._imports = ir.text(), sorted(ir.imports)
        self._key = module.store.key("kernel", KERNEL_LEVEL, self._text)
        self.globals: list[Variable] = emitter.layout.globals
        self.static_shared = emitter.layout.shared
        self.local_size = -(-emitter.layout.local // 16) * 16
        self.frame_size = emitter.layout.frame_size
        self.weights = np.array(emitter.counters, dtype=np.int64)
        self.pcs = [i for i in fn.body if isinstance(i, Ins)]
        self.reads_dims = emitter.reads_dims
        self.barriers = barriers(self.pcs)
        self.asynchronous = emitter.asynchronous
        self.draws = self.asynchronous or any(i.base in ("wgmma", "cp") for i in self.pcs)
        self.copy_queue = emitter.layout.queue if emitter.arrives else 0
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._code: jit.Linked | None = None
        self._plans: dict[object, list[Plan]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """What is found anew in each process, or told by the module, is not kept; neither is text that is compiled."""
        own = {"module": None, "_lock": None, "_code": None, "_plans": None, "_text": ""}
        return vars(self) | own

    def loaded(self, module: "Module") -> None:
        """Belong to a module, after `__getstate__`."""
        self.module = module
        self._begin()

    def compile(self) -> int:
        """The address of the compiled warp function; compiled, or read from the cache, at first use."""
        if self._code is None:
            with self._lock:
                if self._code is None:
                    store = self.module.store
                    data = store.object(self._key, self._ir, KERNEL_LEVEL, False)
                    needs = {n: jit.helper(n, store) for n in self._imports}
                    self._text = ""
                    self._code = jit.link(data, ["tgx_warp"], needs)
        return self._code.addresses["tgx_warp"]

    def _ir(self) -> str:
        return self._text or Emitter(self.module.source, self.fn, find).emit().text()

    def settle(self) -> int:
        """The address of the function that looks after a CTA's bulk copies, 0 for a kernel that has none."""
        return jit.helper("tgx_async_settle", self.module.store) if self.asynchronous else 0

    def pack(self, args: Arguments) -> bytes:
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
        grid: Dim,
        block: Dim,
        args: Arguments,
        *,
        dims: Dims | None = None,
        memory: Memory = HOST,
        shared: int = 0,
        symbols: Mapping[str, int] | None = None,
        windows: Windows = DEFAULT_WINDOWS,
        threads: int | None = None,
        abort: AbortFlag | None = None,
        seed: int = 0,
        tag: int = 0,
    ) -> Stats:
        """Run a grid and wait for it; the GIL is released.

        `args` are the bytes of the parameter space, or one numpy array or number per parameter (arrays on HOST memory).
        `dims` is what %ntid and %nctaid read, `block` and `grid` unless given; see `reads_dims`.
        `shared` is the dynamic shared memory in bytes, `symbols` the device address of each module variable (on HOST
        the engine provides them), `threads` the number of host threads. With a `seed` that is not 0 copies land
        early, bulk ones out of order too, and wgmma runs early as it draws, else as late as they may. `tag` is what
        reports of the L2 name this launch by. Raises PtxFault for the first fault or an abort, PtxError for a launch
        that cannot be made.
        """
        params = self.pack(args)
        addresses = self.module.addresses(symbols, memory) if self.globals else ()
        dims = dims or (block, grid)
        key = (grid, block, dims, memory, windows, shared, addresses)
        idle = self._plans.get(key) or self._room(key)
        try:
            plan = idle.pop()
        except IndexError:
            plan = self._plan(grid, block, dims, memory, windows, shared, addresses)
        try:
            return plan.go(self.module.worker(), params, threads, abort, seed, tag)
        finally:
            idle.append(plan)

    def _plan(
        self, grid: Dim, block: Dim, dims: Dims, memory: Memory, windows: Windows, shared: int,
        addresses: tuple[int, ...]
    ) -> Plan:  # fmt: skip
        count = block[0] * block[1] * block[2]
        if not 1 <= count <= 1024 or min(grid) < 1 or min(block) < 1:
            raise PtxError(f"kernel {self.name}: grid {grid} with block {block} cannot be launched (1 to 1024 threads)")
        return Plan(self, self.compile(), grid, block, dims, memory, windows, shared, addresses)

    def _room(self, key: object) -> list[Plan]:
        """The list of plans of these dimensions that no launch uses; launches take from it and put back."""
        with self._lock:
            if len(self._plans) >= MAX_PLANS and key not in self._plans:
                self._plans.pop(next(iter(self._plans)))
            return self._plans.setdefault(key, [])


def _pack_one(p: Param, a: Any) -> bytes:
    if isinstance(a, np.ndarray):
        return struct.pack("<Q", a.ctypes.data)
    if p.type.kind == "f":
        return struct.pack({16: "<e", 32: "<f", 64: "<d"}[p.type.bits], a)
    if isinstance(a, float):
        return struct.pack("<f" if p.size == 4 else "<d", a)
    return (int(a) & ((1 << 8 * p.size) - 1)).to_bytes(p.size, "little")


class Module:
    """A loaded PTX module. `kernels` are its .entry functions by name, `variables` its .global and .const variables."""

    def __init__(self, text: str, cache_dir: Path | None) -> None:
        self.store = jit.Store(cache_dir)
        self.source, self.kernels = self._read(text)
        self.variables = [v for v in self.source.variables.values() if v.space in ("global", "const")]
        self._own: dict[str, np.ndarray[Any, np.dtype[np.uint8]]] = {}
        self._worker: Any = None

    def _read(self, text: str) -> tuple[Source, dict[str, LoadedKernel]]:
        """The parsed text and its kernels, from the cache if they are there."""
        key = self.store.key("module", _sources(), text)
        if (kept := self.store.get(key)) is not None:
            self.source, kernels = pickle.loads(kept)
            for kernel in kernels.values():
                kernel.loaded(self)
            return self.source, kernels
        self.source = parse(text)
        kernels = {fn.name: LoadedKernel(self, fn) for fn in self.source.functions.values() if fn.entry}
        if not kernels:
            raise PtxError("the PTX text has no .entry function; is it complete?")
        if self.store.directory:
            self.store.put(key, pickle.dumps((self.source, kernels), pickle.HIGHEST_PROTOCOL))
        return self.source, kernels

    def worker(self) -> Any:
        """The scheduler's entry point: worker(launch address, arena address)."""
        if self._worker is None:
            address = jit.helper("tgx_worker", self.store)
            self._worker = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(address)
        return self._worker

    def launch(self, grid: Dim, block: Dim, args: Arguments, **options: Any) -> Stats:
        """Launch the module's only kernel; options as in `Kernel.launch`."""
        if len(self.kernels) != 1:
            raise PtxError(f"the module has {len(self.kernels)} kernels: choose one of {', '.join(self.kernels)}")
        return next(iter(self.kernels.values())).launch(grid, block, args, **options)

    def addresses(self, symbols: Mapping[str, int] | None, memory: Memory) -> tuple[int, ...]:
        """Addresses of the module's variables in table order."""
        given = symbols or {}
        missing = [v.name for v in self.variables if v.name not in given]
        if missing and (memory.base or memory.pages):
            raise PtxError(f"no address given for the variable {missing[0]}: pass it in symbols")
        return tuple(given[v.name] if v.name in given else self.host_variable(v) for v in self.variables)

    def host_variable(self, v: Variable) -> int:
        """The address of a module variable in host memory, with its initial value."""
        known = self._own.get(v.name)
        if known is None:
            raw = np.zeros(v.size + v.align, np.uint8)
            skip = -raw.ctypes.data % v.align
            known = self._own[v.name] = raw[skip : skip + v.size]
            if v.init:
                known[: len(v.init)] = np.frombuffer(v.init, np.uint8)
            by_name = {o.name: o for o in self.variables}
            for offset, name, addend in v.pointers:
                address = struct.pack("<Q", self.host_variable(by_name[name]) + addend)
                known[offset : offset + 8] = np.frombuffer(address, np.uint8)
        return int(known.ctypes.data)


@cache
def _sources() -> str:
    """Digest of all that decides what is read from a text: this package, and who pickles it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join([sys.version.encode(), *(path.read_bytes() for path in files)])).hexdigest()


def load(text: str, cache_dir: Path | str | None = "default") -> Module:
    """Parse and check PTX text. `cache_dir` None keeps no compiled code on disk.

    Raises PtxError with the line for text that cannot be read or an instruction that is not supported.
    """
    directory = (
        jit.default_cache_dir() if cache_dir == "default" else Path(cache_dir) if cache_dir is not None else None
    )
    return Module(text, directory)
