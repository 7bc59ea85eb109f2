"""What it costs that a kernel waits for the one before it, for every form of the dependency (`nv/replay.py`).

Each form runs in a process of its own, because some of them are guesses from the names of QMD fields: a guess may hang
its channel. A form counts only where kernels that read what other blocks of the one before wrote come out right. Where
they do not, it is tried again with kernels that wait for the one before by themselves (griddepcontrol).
Times are the GPU's: the slope between recordings of different lengths, so that what surrounds them falls out.

    tegrad bench dependencies              every form, a line each
    tegrad bench dependencies chain idle   these, in one process
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any, Final, TypeVar

import numpy as np
from tinygrad import Device

import tegrad.nv
from tegrad.bench.gpu import check_gpu
from tegrad.hw.classes import HOST
from tegrad.hw.gpfifo import semaphore
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
    Place,
    latched,
    lean,
    wait_idle,
)
from tegrad.nv.spec import MemorySpec

Row = TypeVar("Row")

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
PASSES: Final = 9
TIMEOUT_S: Final = 60


def _fields(**given: int) -> Any:
    return lambda place: given


def _signalled(place: Place) -> Mapping[str, int]:
    """A release of the launch's number, from 1, into the scratch word."""
    return {
        "release0_enable": 1,
        "release0_address_lower": place.scratch & 0xFFFFFFFF,
        "release0_address_upper": place.scratch >> 32,
        "release0_payload_lower": place.index + 1,
        "release0_payload_upper": 0,
    }


def _acquired(place: Place) -> Sequence[int]:
    # Equality: what the run before left is the number of its last launch, which none waits for.
    return semaphore(HOST["SEM_EXECUTE"].pack(operation="ACQUIRE", payload_size="64BIT"), place.scratch, place.index)


BARE: Final = {**LEAN, "invalidate_shader_data_cache": 0, "cwd_membar_type": 0}

FORMS: Final[Mapping[str, Dependency]] = {
    **DEPENDENCIES,
    "chain-late": Dependency({**CHAIN, "prefetch": 0}, BARRIER),
    "chain-count": Dependency(
        {"action": 4, "prefetch": 1}, BARRIER, fields=lambda place: {"dependence_counter": int(place.index > 0)}
    ),
    "chain-lean-sysmembar": Dependency(CHAIN, fields=_fields(**LEAN, cwd_membar_type=SYSMEMBAR)),
    "chain-gpu-membar": Dependency(CHAIN, BARRIER, fields=_fields(cwd_membar_type=GPU_MEMBAR)),
    "chain-no-membar": Dependency(CHAIN, fields=_fields(**LEAN, cwd_membar_type=0)),
    "chain-bare": Dependency(CHAIN, fields=_fields(**BARE)),
    "idle-schedule": Dependency(between=wait_idle, fields=lean, action=2),
    "idle-barrier": Dependency(start=BARRIER, between=lambda place: (*wait_idle(place), *BARRIER)),
    "idle-bare": Dependency(between=wait_idle, fields=_fields(**BARE)),
    "none": Dependency(fields=lean),
}
"""Forms for every chip. The bare ones and those without a membar need not be right; `none` orders nothing."""

HOPPER: Final[Mapping[str, Dependency]] = {
    "semaphore": Dependency(between=_acquired, fields=lambda place: {**lean(place), **_signalled(place)}),
    "chain-chasing": Dependency(CHAIN, fields=lambda place: {**lean(place), "cwd_membar_task_chasing_enable": 1}),
    "chain-pre-exit": Dependency(CHAIN, fields=lambda place: {**lean(place), "pre_exit_at_last_cta_launch": 1}),
    "chain-latch": Dependency(CHAIN, fields=partial(latched, pre_exit_at_last_cta_launch=1)),
    "chain-latch-program": AHEAD,
    "latch": Dependency(fields=partial(latched, pre_exit_at_last_cta_launch=1)),
    "latch-program": Dependency(fields=partial(latched, enable_program_pre_exit=1)),
    "latch-alone": Dependency(fields=latched),
}
"""Forms with fields that only version 4 has, and a release that the GPU resets by itself."""

ALL_FORMS: Final = {**FORMS, **HOPPER}


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
        short, long = (gpu_us(self.device, self.launches(name, count, value), form) for count in RECORDED_LAUNCHES)
        return (long - short) / (RECORDED_LAUNCHES[1] - RECORDED_LAUNCHES[0])


def gpu_us(device: Gpu, launches: Sequence[Launch], form: Dependency) -> float:
    """Median microseconds of the GPU's clock of a recording of these launches, with what begins and ends it."""
    with device.record(launches, form) as recording:
        recording.wait(recording.run())
        return statistics.median(device.timed(recording.run) for _ in range(PASSES))


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
    return [*FORMS, *(HOPPER if kernels_of(device_arch).overlaps else ())]


@contextmanager
def opened() -> Iterator[Any]:
    """The NV device, for a measurement. NoGpu."""
    check_gpu()
    tegrad.nv.install()
    device = Device["NV"]
    try:
        yield device
    finally:
        device.close()


def _in_process(form: str) -> list[dict[str, Any]]:
    """A form's costs, measured in a process of its own; or what went wrong there."""
    command = [sys.executable, "-m", "tegrad", "bench", "dependencies", form, "--json"]
    try:
        environment = {"HCQDEV_WAIT_TIMEOUT_MS": "3000", **os.environ}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return [{"form": form, "error": f"did not end in {TIMEOUT_S} s"}]
    with suppress(ValueError, IndexError):
        found: list[dict[str, Any]] = json.loads(done.stdout.strip().splitlines()[-1])
        return found
    return [{"form": form, "error": (done.stderr.strip().splitlines() or ["no output"])[-1]}]


def measure() -> Iterator[dict[str, Any]]:
    """The costs of every form of this machine's chip, or the error of a form, as they come."""
    with opened() as device:
        names = forms(device.arch)
    for form in names:
        yield from _in_process(form)


def line(row: Mapping[str, Any]) -> str:
    """A cost as a line of the table."""
    if "error" in row:
        return f"{row['form']:22} {row['error']}"
    dependency = "" if row["dependency_us"] is None else f"{row['dependency_us']:9.2f}"
    shape = f"{row['blocks']}x{row['threads']}"
    seen = "WRONG" if not row["right"] else "right" if row["constant"] else "nc WRONG"
    seen += ", waits" if row["waits"] and row["right"] else ""
    return f"{row['form']:22} {shape:>8} {seen:15} {row['empty_us']:9.2f} {dependency}"


def show(forms: Sequence[str], *, quiet: bool = False) -> list[dict[str, Any]]:
    """Print the costs of forms unless `quiet`: those named, in this process; or all, each in its own. The rows."""

    def named() -> Iterator[dict[str, Any]]:
        with opened() as device:
            for form, (blocks, threads) in product(forms, SHAPES):
                yield asdict(cost(device, form, blocks or device.sm_count, threads))

    rows = named() if forms else measure()
    return list(rows) if quiet else printed(rows, line)


def printed(rows: Iterable[Row], line: Callable[[Row], str]) -> list[Row]:
    """Rows of a bench, a line of each printed as it comes."""
    found = []
    for row in rows:
        found.append(row)
        print(line(row), flush=True)
    return found
