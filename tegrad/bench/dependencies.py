"""What it costs that a kernel waits for the one before it, for every form of the dependency (`nv/replay.py`).

A form counts only where kernels that read what other blocks of the one before wrote come out right. Where they do not,
it is tried again with kernels that wait for the one before by themselves (griddepcontrol). Other forms were tried and
are wrong or slower: docs/notebook.md has them. Times are the GPU's: the slope between recordings of different lengths,
so that what surrounds them falls out.

    tegrad bench dependencies              every form, a line each
    tegrad bench dependencies chain idle   these

A form that faults ends the run: name the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np

from tegrad.bench.gpu import gpu_us, opened, printed, slope
from tegrad.llm.chips import kernels_of
from tegrad.nv.compilers import compile_cuda
from tegrad.nv.gpu import Gpu, Program
from tegrad.nv.replay import (
    AHEAD,
    BARRIER,
    CHAIN,
    DEPENDENCIES,
    GPU_MEMBAR,
    LEAN,
    SYSMEMBAR,
    Dependency,
    Launch,
    latched,
    lean,
)
from tegrad.nv.spec import MemorySpec

GATHER: Final = """extern "C" __global__ void NAME(int *to, int *from, int value) {
    __shared__ unsigned total;
    LAUNCH; WAIT;
    if (threadIdx.x == 0) total = value;
    __syncthreads();
    unsigned sum = 0;
    for (unsigned block = threadIdx.x; block < gridDim.x; block += blockDim.x)
        sum += (2 * block + 1) * (unsigned)READ(from + block * blockDim.x);
    atomicAdd(&total, sum);
    __syncthreads();
    if (blockIdx.x + 1 == gridDim.x)
        for (long long begun = clock64(); clock64() - begun < LATE;) {}
    to[blockIdx.x * blockDim.x + threadIdx.x] = total + threadIdx.x;
}
"""
"""A kernel of SOURCE by its name and the load that reads."""
SOURCE: Final = (
    """
#if WAITS
#define WAIT asm volatile("griddepcontrol.wait;" ::: "memory")
#define LAUNCH asm volatile("griddepcontrol.launch_dependents;" ::: "memory")
#else
#define WAIT
#define LAUNCH
#endif
extern "C" __global__ void empty(int *to, int *from, int value) { LAUNCH; WAIT; }
extern "C" __global__ void shift(int *to, int *from, int value) {
    LAUNCH; WAIT;
    unsigned count = gridDim.x * blockDim.x, at = blockIdx.x * blockDim.x + threadIdx.x;
    to[at] = from[(at + count / 2 + 1) % count] * 3 + value;
}
"""
    + GATHER.replace("NAME", "gather").replace("READ", "*")
    + GATHER.replace("NAME", "gather_constant").replace("READ", "__ldg")
    + """extern "C" __global__ void spin(int *to, int *from, int value) {
    LAUNCH; WAIT;
    long long begun = clock64();
    while (clock64() - begun < value) {}
}
"""
)
"""`spin` takes `value` cycles. With WAITS 1 a kernel lets the next one begin at once, and waits for the one before.

In `gather` the last block is late, so that a kernel that does not wait for it reads what was there before. Every block
reads a word of every block's: each SM's L1 holds lines of both buffers, which other SMs store anew in every second
launch. A form that leaves L1 as it was cannot come out right. `gather_constant` does it by loads that take memory for
unchanging (ld.global.nc), which L1 may hold apart.
"""

NAMES: Final = ("empty", "shift", "gather", "gather_constant", "spin")
SHAPES: Final = ((1, 32), (0, 512))
"""Blocks and threads of a block; 0 is a block for each SM of the device."""
RECORDED_LAUNCHES: Final = (100, 400)
"""Launches of the recordings whose difference is measured."""
SPIN_CYCLES: Final = 10_000
"""Cycles of the kernel between dependencies: about 5 us."""
LATE_CYCLES: Final = 4_000
"""Cycles by which a block of `gather` is late."""
SPEC: Final = MemorySpec(cpu_access=True, nolru=True)

ONE_FIELD: Final[Mapping[str, Dependency]] = {
    "chain-late": Dependency({**CHAIN, "prefetch": 0}, BARRIER),
    "chain-gpu-membar": Dependency(CHAIN, BARRIER, fields=lambda place: {"cwd_membar_type": GPU_MEMBAR}),
    "chain-lean-sysmembar": Dependency(CHAIN, fields=lambda place: {**LEAN, "cwd_membar_type": SYSMEMBAR}),
    "chain-no-membar": Dependency(CHAIN, fields=lambda place: {**LEAN, "cwd_membar_type": 0}),
}
"""Forms that differ from those of a recording in one QMD field, for what it costs on a chip where nobody has asked.
Without a membar the results need not be right."""
HOPPER: Final[Mapping[str, Dependency]] = {
    "chain-chasing": Dependency(CHAIN, fields=lambda place: {**lean(place), "cwd_membar_task_chasing_enable": 1}),
    "chain-latch-program": AHEAD,
    "latch-program": Dependency(fields=partial(latched, enable_program_pre_exit=1)),
}
"""Forms with fields that only QMD version 4 has."""
ALL_FORMS: Final = {**DEPENDENCIES, **ONE_FIELD, **HOPPER}


@dataclass(frozen=True)
class Cost:
    """What a form costs for kernels of one shape.

    `empty_us`: an empty kernel; `dependency_us`: a kernel of known length, beyond that length; `right`: whether kernels
    that depend on each other computed what they should, `waits`: only if they wait by themselves; `constant`: whether
    they do by ld.global.nc too.
    """

    form: str
    blocks: int
    threads: int
    right: bool
    waits: bool
    constant: bool
    empty_us: float
    dependency_us: float | None


class Probe:
    """The kernels of this module, which may wait by themselves, and their memory on an opened device."""

    def __init__(self, device: Gpu, blocks: int, threads: int, waits: bool = False) -> None:
        self.device, self.blocks, self.threads, self.waits = device, blocks, threads, waits
        self.size = 4 * blocks * threads
        self.buffers = [device.allocate(self.size, SPEC) for _ in range(2)]
        self.programs = {name: _load(device, name, waits) for name in NAMES}

    def close(self) -> None:
        """Give the memory back."""
        for buffer in self.buffers:
            self.device.release(buffer, SPEC)

    def launches(self, name: str, count: int, value: int | None = None) -> list[Launch]:
        """`count` launches of a kernel, from one buffer to the other and back; `value`, or the launch's number."""
        both, grid, block = self.buffers, (self.blocks, 1, 1), (self.threads, 1, 1)
        program = self.programs[name]
        return [
            Launch(program, (both[1 - i % 2], both[i % 2]), grid, block, (i if value is None else value,))
            for i in range(count)
        ]

    def right(self, form: Dependency, count: int = 32, runs: int = 4) -> bool:
        """Whether launches see what those before them stored, in every run: of other blocks, and of every block."""
        return all(self.sees(form, name, count, runs) for name in ("shift", "gather"))

    def sees(self, form: Dependency, name: str, count: int = 32, runs: int = 4) -> bool:
        """`right` for one of the kernels "shift", "gather", "gather_constant"; `count` is even."""
        from_, to = (buffer.cpu_view() for buffer in self.buffers)
        values = np.arange(self.blocks * self.threads, dtype=np.int32)
        from_[0 : self.size], to[0 : self.size] = values.tobytes(), bytes(self.size)
        with self.device.record(self.launches(name, count), form) as recording:
            for _ in range(runs):
                recording.run()
            recording.wait()
        following = self._shifted if name == "shift" else self._gathered
        for i in range(count * runs):
            values = following(values, i % count)
        return bytes(from_[0 : self.size]) == values.tobytes()

    def _shifted(self, values: np.ndarray[Any, Any], value: int) -> np.ndarray[Any, Any]:
        return np.roll(values, -(len(values) // 2 + 1)) * np.int32(3) + np.int32(value)

    def _gathered(self, values: np.ndarray[Any, Any], value: int) -> np.ndarray[Any, Any]:
        words = values[:: self.threads].view(np.uint32)
        factors = 2 * np.arange(self.blocks, dtype=np.uint32) + np.uint32(1)
        total = np.sum(words * factors, dtype=np.uint32) + np.uint32(value)
        return np.tile(np.arange(self.threads, dtype=np.uint32) + total, self.blocks).view(np.int32)

    def slope(self, form: Dependency, name: str, value: int = 0) -> float:
        """Microseconds that one more launch takes."""
        return slope(self.device, self.launches(name, RECORDED_LAUNCHES[1], value), form, *RECORDED_LAUNCHES)


def _load(device: Gpu, name: str, waits: bool) -> Program:
    kernel = next(part for part in SOURCE.split('extern "C"') if f"void {name}(" in part)
    macros = f"#define WAITS {int(waits)}\n#define LATE {LATE_CYCLES}\n"
    image = compile_cuda(f'{macros}{SOURCE.split(chr(10) + "extern")[0]}\nextern "C"{kernel}', device.arch)
    return device.load_program(image, name, buffers=2, values=1)


def cost(device: Gpu, form: str, blocks: int, threads: int) -> Cost:
    """Check and measure one form with kernels of one shape."""
    dependency = ALL_FORMS[form]
    with closing(Probe(device, blocks, threads)) as probe:
        found = _cost(probe, form, dependency)
    if found.right or form not in HOPPER:
        return found
    with closing(Probe(device, blocks, threads, waits=True)) as probe:
        return _cost(probe, form, dependency)


def _cost(probe: Probe, form: str, dependency: Dependency) -> Cost:
    right, constant = probe.right(dependency), probe.sees(dependency, "gather_constant")
    empty = probe.slope(dependency, "empty")
    # One kernel that is longer by so many cycles gives the length of a cycle, with no dependency in it.
    cycle = gpu_us(probe.device, probe.launches("spin", 1, 101 * SPIN_CYCLES), dependency)
    cycle = (cycle - gpu_us(probe.device, probe.launches("spin", 1, SPIN_CYCLES), dependency)) / (100 * SPIN_CYCLES)
    spent = probe.slope(dependency, "spin", SPIN_CYCLES)
    # Kernels that overlap take less than their own length together, which says nothing of a dependency.
    beyond = spent - SPIN_CYCLES * cycle if right else None
    return Cost(form, probe.blocks, probe.threads, right, probe.waits, constant, empty, beyond)


def forms(device_arch: str) -> list[str]:
    """The forms that a chip can try."""
    return [*DEPENDENCIES, *ONE_FIELD, *(HOPPER if kernels_of(device_arch).overlaps else ())]


def line(row: Mapping[str, Any]) -> str:
    """A cost as a line of the table."""
    dependency = "" if row["dependency_us"] is None else f"{row['dependency_us']:9.2f}"
    shape = f"{row['blocks']}x{row['threads']}"
    seen = "WRONG" if not row["right"] else "right" if row["constant"] else "nc WRONG"
    seen += ", waits" if row["waits"] and row["right"] else ""
    return f"{row['form']:22} {shape:>8} {seen:15} {row['empty_us']:9.2f} {dependency}"


def show(named: Sequence[str]) -> list[dict[str, Any]]:
    """Print the costs of forms, of all that this machine's chip has unless some are named; the rows."""
    with opened() as device:
        tried = product(named or forms(device.arch), SHAPES)
        rows = (asdict(cost(device, form, blocks or device.sm_count, threads)) for form, (blocks, threads) in tried)
        return printed(rows, line)
