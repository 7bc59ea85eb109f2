"""How fast the PTX engine is: lane-instructions per second on one core, and compile times.

A kernel is a loop written out here; its lane-instructions are its length times its trips, known before it runs. Time is
the CPU time of the thread that runs it, so that other programs on the machine count little; a sample is one launch of
tens of milliseconds, the figure is their median. All checks are on: memory has page flags, as on the emulated board.

What is compiled is a fixed sample of tinygrad's kernels, made by its own renderers without a GPU: the programs of its
operation tests in small, which a first-tier compiler meets. CUDA sources join the sample where NVRTC is installed.
"""

from __future__ import annotations

import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tinygrad import Tensor, dtypes
from tinygrad.codegen import to_program
from tinygrad.codegen.opt.tc import TensorCore, get_cuda
from tinygrad.device import Compiler
from tinygrad.helpers import Target
from tinygrad.renderer import Renderer
from tinygrad.renderer.cstyle import CUDARenderer
from tinygrad.renderer.ptx import PTXRenderer
from tinygrad.uop.ops import Ops

from tegrad import ptx
from tegrad.bench.record import Record, RecordError, Side, make
from tegrad.nv import toolchain

ARCH, ISA = "sm_87", "7.5"
DEVICE = "CUDA"


def _of(*shape: int, dtype: object = dtypes.float32) -> Tensor:
    return Tensor.empty(*shape, dtype=dtype, device=DEVICE)


_HALF = dtypes.float16

PROGRAMS: dict[str, Callable[[], Tensor]] = {
    "add": lambda: _of(45, 65) + _of(45, 65),
    "broadcast": lambda: _of(45, 1, 7) * _of(1, 33, 7),
    "where": lambda: (_of(500) > 0).where(_of(500), 2),
    "integers": lambda: (_of(100, dtype=dtypes.int32) * 3 + 7) // 5 % 11,
    "wide-integers": lambda: (_of(100, dtype=dtypes.int64) << 3) ^ _of(100, dtype=dtypes.int64),
    "cast-half": lambda: _of(40, 50).cast(_HALF).contiguous().cast(dtypes.float32),
    "cast-bytes": lambda: _of(40, 50).cast(dtypes.uint8).cast(dtypes.int64),
    "exp": lambda: _of(45, 65).exp(),
    "sin": lambda: _of(45, 65).sin(),
    "gelu": lambda: _of(45, 65).gelu(),
    "sum": lambda: _of(64, 1000).sum(),
    "sum-rows": lambda: _of(64, 1000).sum(1),
    "max": lambda: _of(45, 65).max(0),
    "var": lambda: _of(45, 65).var(1),
    "argmax": lambda: _of(40, 57).argmax(1),
    "cumsum": lambda: _of(5, 700).cumsum(1),
    "softmax": lambda: _of(33, 70).softmax(),
    "layernorm": lambda: _of(8, 10, 64).layernorm(),
    "matmul": lambda: _of(128, 64) @ _of(64, 96),
    "matmul-odd": lambda: _of(65, 130) @ _of(130, 77),
    "matmul-half": lambda: _of(128, 64, dtype=_HALF).matmul(_of(64, 96, dtype=_HALF), dtype=dtypes.float32),
    "matvec": lambda: _of(1, 768) @ _of(768, 768),
    "conv2d": lambda: _of(2, 3, 11, 13).conv2d(_of(4, 3, 3, 3), stride=2, padding=1),
    "conv2d-grouped": lambda: _of(1, 8, 12, 12).conv2d(_of(8, 2, 3, 3), groups=4),
    "max-pool": lambda: _of(2, 3, 16, 16).max_pool2d(),
    "pad": lambda: _of(3, 3).pad(((1, 2), (3, 4))),
    "permute": lambda: _of(5, 6, 7).permute(2, 0, 1).contiguous(),
    "cat": lambda: Tensor.cat(_of(45, 65), _of(45, 10), dim=1),
    "gather": lambda: _of(50, 8)[_of(30, dtype=dtypes.int32)],
    "sort": lambda: _of(16).sort()[0],
    "attention": lambda: _of(2, 4, 24, 16).scaled_dot_product_attention(
        _of(2, 4, 24, 16), _of(2, 4, 24, 16), is_causal=True
    ),
    "cross-entropy": lambda: _of(32, 10).sparse_categorical_crossentropy(_of(32, dtype=dtypes.int32)),
}  # fmt: skip


def _renderer(kind: type[Renderer], name: str, tensor_cores: list[TensorCore]) -> Renderer:
    """A renderer for ARCH whose "compiler" leaves the text as it is."""
    renderer = object.__new__(kind)
    Renderer.__init__(renderer, Target(DEVICE, name, ARCH))
    renderer.compiler, renderer.tensor_cores = Compiler(), tensor_cores
    return renderer


def _kernels(renderer: Renderer) -> Iterator[tuple[str, bytes]]:
    """Every kernel of the programs: "program.number" and what the renderer's compiler made of it."""
    for name, build in PROGRAMS.items():
        calls = [call.src[0] for call in build().schedule_linear().src if call.src[0].op is Ops.SINK]
        for number, ast in enumerate(calls):
            program = to_program(ast, renderer)
            yield f"{name}.{number}", next(u.arg for u in program.src if u.op is Ops.BINARY)


def _ptx(text: str) -> str:
    return text.replace("VERSION", ISA).replace("TARGET", ARCH)


def kernels() -> dict[str, str]:
    """PTX text by "renderer/program.number"; identical texts appear once."""
    rendered = _kernels(_renderer(PTXRenderer, "PTX", PTXRenderer.tc_sm80))
    found = {_ptx(text.decode()): f"ptx/{name}" for name, text in rendered}
    try:
        nvrtc, flags = toolchain.nvrtc(), [f"-I{d}" for d in toolchain.require_include_dirs()]
    except toolchain.CompilerMissing:
        return {name: text for text, name in found.items()}
    for name, text in _kernels(_renderer(CUDARenderer, "CUDA", get_cuda(ARCH))):
        found.setdefault(nvrtc.compile(text.decode(), ARCH, flags).ptx, f"cuda/{name}")
    return {name: text for text, name in found.items()}


# ---- loops


CTA, CTAS = 256, 8
REPETITIONS = 9
SAMPLE_NS = 40_000_000
"""CPU time that one launch should take."""
TABLE_BYTES = 1 << 18
"""Bytes that loads and gathers range over: more than a first-level cache, less than a second-level one."""


@dataclass(frozen=True)
class Loop:
    """A kernel: `body` is executed by every thread `trips` times between `setup` and a store of `result`.

    Registers: %t the thread's index in its CTA, %i the trip, %d the table's address, %w four times %t; %r, %f, %a, %p
    are free. Of two arms of a branch, `either` of them (with as many instructions) is executed by a lane.
    """

    name: str
    what: str
    body: str
    setup: str = ""
    result: str = "%f1"
    either: str = ""

    @cached_property
    def text(self) -> str:
        kind = "f32" if self.result.startswith("%f") else "b32"
        return f"""
.version 8.5
.target sm_87
.address_size 64
.visible .entry {self.name}(.param .u64 out, .param .u64 table, .param .u32 trips) {{
 .reg .pred %p<4>; .reg .b32 %t, %i, %n, %w, %r<40>; .reg .f32 %f<40>; .reg .b64 %d, %o, %a<8>;
 .shared .align 16 .b8 pool[{4 * CTA}];
 mov.u32 %t, %tid.x; shl.b32 %w, %t, 2; ld.param.u64 %o, [out]; ld.param.u64 %d, [table]; ld.param.u32 %n, [trips];
 cvt.rn.f32.u32 %f1, %t; {self.setup} mov.u32 %i, 0;
LOOP:
 {self.body}
 add.u32 %i, %i, 1; setp.lt.u32 %p0, %i, %n; @%p0 bra LOOP;
 mov.u32 %r0, %ctaid.x; mad.lo.u32 %r0, %r0, {CTA}, %t; mad.wide.u32 %o, %r0, 4, %o;
 st.global.{kind} [%o], {self.result};
 ret;
}}
"""

    def lane_instructions(self, trips: int) -> int:
        """What the whole grid executes."""
        before, rest = self.text.split("LOOP:")
        loop, after = rest.split("bra LOOP;")
        once = _count(before[before.index("mov.u32 %t") :]) + _count(after)
        return (once + trips * (_count(loop) + 1 - _count(self.either))) * CTA * CTAS


def _count(text: str) -> int:
    return text.count(";")


def _chains(count: int, pattern: str, start: int = 1) -> str:
    return " ".join(pattern.format(k=start + k) for k in range(count))


_FMA = "fma.rn.f32 %f{k}, %f{k}, 0f3F7FF000, 0f3A83126F;"
_INTEGER = "mad.lo.u32 %r{k}, %r{k}, 5, %t; xor.b32 %r{k}, %r{k}, %i;"
_FLOATS = _chains(8, "cvt.rn.f32.u32 %f{k}, %t;")
_INTEGERS = _chains(8, "add.u32 %r{k}, %t, {k};")
_MMA = (
    "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f1, %f2, %f3, %f4}, {%r1, %r2, %r3, %r4}, {%r5, %r6}, "
    "{%f1, %f2, %f3, %f4};"
)

LOOPS = (
    Loop("alu", "half fma.f32, half integer", (_chains(8, _FMA) + _chains(4, _INTEGER)) * 4, _FLOATS + _INTEGERS),
    Loop("fma", "eight chains of fma.f32", _chains(8, _FMA) * 8, _FLOATS),
    Loop("integer", "four chains of mad and xor", _chains(4, _INTEGER) * 8, _INTEGERS, "%r1"),
    Loop(
        "load",
        "eight coalesced loads a trip, each added to a sum",
        f"and.b32 %r1, %i, {TABLE_BYTES // CTA // 32 - 1}; mad.wide.u32 %a0, %r1, {8 * 4 * CTA}, %a1; "
        + "".join(f"ld.global.f32 %f{8 + k}, [%a0+{4 * CTA * k}]; " for k in range(8))
        + "".join(f"add.f32 %f{1 + k % 4}, %f{1 + k % 4}, %f{8 + k}; " for k in range(8)),
        "cvt.u64.u32 %a1, %w; add.u64 %a1, %a1, %d;" + _FLOATS,
    ),
    Loop(
        "gather",
        "four loads a trip from random places",
        (
            "mad.lo.u32 %r1, %r1, 1664525, 1013904223; shr.u32 %r2, %r1, 16; mad.wide.u32 %a0, %r2, 4, %d; "
            "ld.global.f32 %f2, [%a0]; add.f32 %f1, %f1, %f2;"
        )
        * 4,
        "mov.u32 %r1, %t;",
    ),
    Loop(
        "shared",
        "store, barrier, load of another warp's value, fma, barrier",
        "st.shared.f32 [%r1], %f1; bar.sync 0; ld.shared.f32 %f2, [%r2]; "
        "fma.rn.f32 %f1, %f2, 0f3F000000, %f1; bar.sync 0;",
        "mov.u32 %r3, pool; add.u32 %r1, %r3, %w; xor.b32 %r2, %w, 128; add.u32 %r2, %r2, %r3;",
    ),
    Loop(
        "divergent",
        "lanes of a warp take two ways",
        "and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; @%p1 bra EVEN; "
        "mad.lo.u32 %r1, %r1, 3, 1; xor.b32 %r1, %r1, %i; bra JOIN; "
        "EVEN: shr.u32 %r1, %r1, 1; xor.b32 %r1, %r1, %t; add.u32 %r1, %r1, 1; JOIN: add.u32 %r1, %r1, 7;",
        "mov.u32 %r1, %t;",
        "%r1",
        "shr.u32 %r1, %r1, 1; xor.b32 %r1, %r1, %t; add.u32 %r1, %r1, 1;",
    ),
    Loop("mma", "mma m16n8k16 of f16 with f32 sums", _MMA * 4, _FLOATS + _chains(6, "mov.b32 %r{k}, 0x3c003c00;")),
    Loop("shuffle", "butterfly and add", "shfl.sync.bfly.b32 %f2, %f1, 16, 31, -1; add.f32 %f1, %f1, %f2;" * 4),
)  # fmt: skip


class EngineBench:
    """Device memory with page flags, and the loops loaded on first use."""

    def __init__(self, cache_dir: Path | None = None) -> None:
        self._cache = cache_dir
        pages = (TABLE_BYTES + 4 * CTA * CTAS) // 4096
        self._bytes = np.zeros(4096 * (pages + 1), np.uint8)
        self._flags = np.full(pages, 3, np.uint8)
        base = -(-self._bytes.ctypes.data // 4096) * 4096
        self._memory = ptx.Memory(base=base, pages=self._flags.ctypes.data, limit=4096 * pages)

    def launch(self, kernel: ptx.LoadedKernel, trips: int) -> tuple[ptx.Stats, int]:
        """Run a loop on this thread; what it counted, and nanoseconds of CPU time."""
        args = struct.pack("<QQI", TABLE_BYTES, 0, trips)
        began = time.thread_time_ns()
        stats = kernel.launch((CTAS, 1, 1), (CTA, 1, 1), args, memory=self._memory, threads=1)
        return stats, time.thread_time_ns() - began

    def load(self, loop: Loop) -> ptx.LoadedKernel:
        """The loop's kernel, compiled."""
        return ptx.load(loop.text, self._cache).kernels[loop.name]

    def samples(self, loop: Loop, repetitions: int = REPETITIONS) -> list[float]:
        """G lane-instructions a second and core, one value per launch."""
        kernel, trips = self.load(loop), 64
        self.launch(kernel, trips)
        _, took = self.launch(kernel, trips)
        trips = max(trips, trips * SAMPLE_NS // took)
        values = []
        for _ in range(repetitions):
            stats, took = self.launch(kernel, trips)
            if stats.instructions != loop.lane_instructions(trips):
                raise RecordError(f"loop {loop.name} executed {stats.instructions} lane-instructions, not as written")
            values.append(stats.instructions / took)
        return values

    def launches(self, repetitions: int = REPETITIONS, each: int = 200) -> list[float]:
        """Microseconds of CPU time for a launch of eight CTAs that do next to nothing."""
        kernel = self.load(LOOPS[1])
        self.launch(kernel, 1)
        values = []
        for _ in range(repetitions):
            values.append(sum(self.launch(kernel, 1)[1] for _ in range(each)) / each / 1000)
        return values


def compile_times(texts: Mapping[str, str]) -> tuple[list[float], list[float]]:
    """Milliseconds of CPU time per kernel from text to callable code: with an empty cache, and from the cache on disk.

    The engine's own helpers are compiled once per cache; they count for the first kernel that needs them.
    """
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (list(_compile_all(texts, Path(folder))) for _ in range(2))
    return cold, warm


def _compile_all(texts: Mapping[str, str], folder: Path) -> Iterator[float]:
    for text in texts.values():
        began = time.thread_time_ns()
        for kernel in ptx.load(text, folder).kernels.values():
            kernel.compile()
        yield (time.thread_time_ns() - began) / 1e6


class EngineRow(NamedTuple):
    """One line of `tegrad bench ptx`: median, smallest and largest sample (compile times: 99th percentile)."""

    name: str
    median: float
    low: float
    high: float
    unit: str
    what: str


def _row(name: str, values: list[float], unit: str, what: str, top: float = 1.0) -> EngineRow:
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(top * len(ordered)))]
    return EngineRow(name, statistics.median(ordered), ordered[0], high, unit, what)


def report() -> list[EngineRow]:
    """Everything, in the order in which it is printed. Takes about half a minute, most of it tinygrad's."""
    cold, warm = compile_times(kernels())
    bench = EngineBench()
    rows = [_row(loop.name, bench.samples(loop), "G/s/core", loop.what) for loop in LOOPS]
    rows.append(_row("launch", bench.launches(), "us", "a launch of eight CTAs that do next to nothing"))
    rows.append(_row("compile", cold, "ms", "a kernel of tinygrad's, nothing cached (right: 99th percentile)", 0.99))
    rows.append(_row("compile-cached", warm, "ms", "the same from the cache on disk (right: 99th percentile)", 0.99))
    return rows


def rate(id: str, name: str) -> Record:
    """The record of one loop's speed."""
    loop = next(loop for loop in LOOPS if loop.name == name)
    what = f"PTX engine, {loop.what}; lane-instructions by CPU time of one thread, CTAs of {CTA}, all checks on"
    return make(id, what, "G/s/core", Side("tegrad", f"tegrad bench take {id}", EngineBench().samples(loop)))


def compile_record(id: str, cached: bool) -> Record:
    """The record of compile times: a sample per kernel of the committed sample."""
    times = compile_times(kernels())[cached]
    state = "from the cache on disk" if cached else "nothing cached"
    what = f"PTX engine, text of a tinygrad kernel to callable code, {state}; CPU time, {len(times)} kernels"
    side = Side("tegrad", f"tegrad bench take {id}", times)
    return make(id, what, "ms", side, larger_is_better=False)
