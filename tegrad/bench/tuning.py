"""Open questions of how a GPU is best driven, asked of the one that is here: `tegrad bench tuning`.

Those of the earlier effort on an AGX Orin that nobody has answered with figures. Some need a Jetson's drivers, which an
emulated board has, too: there every answer is right or wrong, and its times are the emulation's. Questions that another
command answers name it.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Final
from unittest.mock import patch

from tegrad.nv import device as nv_device
from tegrad.nv import iface, probes, roles
from tegrad.nv.device import NVDevice
from tegrad.nv.replay import Launch
from tegrad.uapi import constants as c

SIZE: Final = 16 << 20
"""Bytes that the CPU writes and reads."""
DIRTY: Final = 2 << 20
"""Bytes in L2 when it is flushed: half of an Orin's."""
PASSES: Final = 9
SUBMISSIONS: Final = 4096
"""More than the smallest ring holds."""
RINGS: Final = (1024, 2048, 4096, 8192)
AT_ONCE: Final = (1, 2, 4, 8, 16)
ATTRIBUTES: Final = {
    "uncached": c.NVMAP_HANDLE_UNCACHEABLE,
    "write-combined": c.NVMAP_HANDLE_WRITE_COMBINE,
    "inner cacheable": c.NVMAP_HANDLE_INNER_CACHEABLE,
    "cacheable": c.NVMAP_HANDLE_CACHEABLE,
}
"""nvmap's attributes: what the CPU's caches make of a buffer."""
WINDOWS: Final = {
    "0xfd, 0xfe (local, shared)": (0xFD00000000, 0xFE00000000),
    "0xfe, 0xfd": (0xFE00000000, 0xFD00000000),
    "0x3d, 0x3e": (0x3D00000000, 0x3E00000000),
    "0x01, 0x02": (0x0100000000, 0x0200000000),
}
"""Where the shader windows lie: the upper byte of 40 bits."""
THROUGH: Final = """extern "C" __global__ void through(unsigned *out, int odd) {
    __shared__ unsigned shared[32];
    unsigned local[32];
    for (int i = 0; i < 32; i++) local[(i * odd) % 32] = i, shared[(i * odd) % 32] = 100 + i;
    __syncthreads();
    unsigned sum = 0;
    for (int i = 0; i < 32; i++) {
        volatile unsigned *window = (threadIdx.x + i) & 1 ? local : shared;  // a generic address, by lane
        sum += window[(threadIdx.x * odd) % 32];
    }
    out[threadIdx.x] = sum;
}"""
"""Lane t sums up 16 times t from local and 100 + t from shared memory, by generic loads."""
STEP: Final = """extern "C" __global__ void step(unsigned *word, int add) {
    if (!threadIdx.x && !blockIdx.x) *word += add;
}"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One setting and what it gave; `right` where what the GPU computed was checked."""

    question: str
    setting: str
    value: float
    unit: str
    right: bool = True


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked; who answers it, or which other command does; `jetson` if only nvgpu's interface knows."""

    asks: str
    ask: Callable[[NVDevice], Iterator[Answer]] | None = None
    command: str = ""
    jetson: bool = False


def cpu_memory(device: NVDevice) -> Iterator[Answer]:
    """MB/s of the CPU in a buffer of each attribute, and whether a kernel reads what it wrote."""
    read, pieces = probes.load(device, probes.READ, "read", 2, 2), SIZE // 16
    fill = probes.load(device, probes.FILL, "fill", 1, 1)
    shape = {"global_size": (device.sm_count, 1, 1), "local_size": (probes.THREADS, 1, 1), "wait": True}
    with probes.buffer(device, SIZE) as wanted:
        fill(wanted, vals=(pieces,), **shape)
        device.synchronize()
        pattern = bytes(wanted.cpu_view()[0:SIZE])
    for name, attribute in ATTRIBUTES.items():
        role = replace(roles.TENSORS, name=f"{name} tuning", nvmap=attribute)
        with probes.buffer(device, SIZE, role) as buffer, probes.buffer(device, 16) as out:
            address, host = buffer.cpu_view().addr, ctypes.create_string_buffer(pattern, SIZE)
            written = _best(partial(ctypes.memmove, address, host, SIZE))
            device.upload(out, bytes(16))
            read(buffer, out, vals=(pieces, 1), **shape)
            right = probes.words(device, out, 1)[0] == probes.sum_of(pieces)
            back = _best(partial(ctypes.memmove, host, address, SIZE))
            right &= host.raw[:SIZE] == pattern
            yield Answer("cpu-memory", f"{name}, written", SIZE / written / 1e6, "MB/s", right)
            yield Answer("cpu-memory", f"{name}, read", SIZE / back / 1e6, "MB/s", right)


def flush(device: NVDevice) -> Iterator[Answer]:
    """Microseconds of FLUSH_L2 with nothing in L2, and after a kernel that filled half of it by a cached mapping."""
    fill = probes.load(device, probes.FILL, "fill", 1, 1)
    shape = {"global_size": (device.sm_count, 1, 1), "local_size": (probes.THREADS, 1, 1), "wait": True}
    cached = probes.kinds(device)[probes.CACHED]
    with probes.buffer(device, DIRTY, cached) as buffer:
        times: Mapping[str, list[float]] = {"clean": [], "dirty": []}
        for state in ("dirty", "clean") * PASSES:
            if state == "dirty":
                fill(buffer, vals=(DIRTY // 16,), **shape)
            times[state].append(_seconds(device.iface.flush_l2))
    for state, taken in sorted(times.items()):
        yield Answer("flush", state, 1e6 * statistics.median(taken), "us")


def gpfifo(device: NVDevice) -> Iterator[Answer]:
    """Microseconds a submission of many in a row, by the number of entries of the ring."""
    for entries in RINGS:
        with patch.object(iface, "GPFIFO_ENTRIES", entries):
            opened = nv_device.reopen()
        assert opened.compute_gpfifo.entries_count == entries
        took, right = _submitted(opened, 1)
        yield Answer("gpfifo", f"{entries} entries", took, "us", right)
    nv_device.reopen()


def windows(device: NVDevice) -> Iterator[Answer]:
    """Microseconds of a kernel that reads local and shared memory by generic addresses, by where their windows lie."""
    known = iface._chip
    for name, (local, shared) in WINDOWS.items():
        row = partial(replace, local_window=local, shared_window=shared)
        with patch.object(iface, "_chip", lambda version, row=row: row(known(version))):
            opened = nv_device.reopen()
        through = partial(probes.load(opened, THROUGH, "through", 1, 1), vals=(3,), wait=True)
        with probes.buffer(opened, 128) as out:
            took = _best(partial(through, out, global_size=(1, 1, 1), local_size=(32, 1, 1)))
            right = probes.words(opened, out, 32) == [16 * (100 + 2 * lane) for lane in range(32)]
        yield Answer("windows", name, 1e6 * took, "us", right)
    nv_device.reopen()


def doorbell(device: NVDevice) -> Iterator[Answer]:
    """Microseconds a submission where so many share one doorbell."""
    for count in AT_ONCE:
        took, right = _submitted(nv_device.reopen(), count)
        yield Answer("doorbell", f"{count} at once", took, "us", right)


def _submitted(device: NVDevice, at_once: int) -> tuple[float, bool]:
    """Microseconds of each of SUBMISSIONS runs of a tiny kernel, and whether each of them ran once."""
    program = probes.load(device, STEP, "step", 1, 1)
    with probes.buffer(device, 16) as word:
        device.upload(word, bytes(16))
        with device.record([Launch(program, (word,), (1, 1, 1), (32, 1, 1), (1,))], depth=2 * at_once) as recording:
            recording.wait(recording.run(at_once))
            begun = time.perf_counter()
            for _ in range(SUBMISSIONS // at_once):
                recording.run(at_once)
            recording.wait()
            took = time.perf_counter() - begun
        return 1e6 * took / SUBMISSIONS, probes.words(device, word, 1) == [SUBMISSIONS + at_once]


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _best(work: Callable[[], object]) -> float:
    """The median of some passes, after one that touches every page."""
    work()
    return statistics.median(_seconds(work) for _ in range(PASSES))


QUESTIONS: Final[Mapping[str, Question]] = {
    "cpu-memory": Question("nvmap's attributes: how fast the CPU is, what the GPU sees", cpu_memory, jetson=True),
    "flush": Question("what a flush of L2 costs", flush, jetson=True),
    "gpfifo": Question("GPFIFOs of 1,024 to 8,192 entries", gpfifo, jetson=True),
    "windows": Question("where the shader windows lie", windows, jetson=True),
    "doorbell": Question("one doorbell for several submissions", doorbell),
    "flushes": Question("which flushes are needed", command="tegrad selftest --stage coherence"),
    "signals": Question("QMD fields and releases, pushbuffer signals", command="tegrad bench dependencies"),
    "rows": Question("threads to a row", command="tegrad bench products 1b-q6k --sweep 5"),
    "beam": Question("kernel searches", command="BEAM=2 tegrad bench tinygrad gpt2-f16-124m"),
    "flags": Question("a channel's flags (usermode takes deterministic)", command="tegrad conformance"),
}
"""In the order in which they are asked."""


def answers(names: Iterable[str]) -> Iterator[Answer]:
    """Each question's answers, of those that this GPU's interface knows. The device is closed in the end."""
    try:
        for name in names:
            question, device = QUESTIONS[name], probes.device()
            unified = getattr(device.iface, "unified_memory", False)
            if question.ask is not None and (unified or not question.jetson):
                yield from question.ask(device)
    finally:
        probes.device().close()


def text(row: Answer) -> str:
    """A line."""
    return f"{row.question:12} {row.setting:26} {row.value:10.4g} {row.unit:6}{'' if row.right else ' WRONG'}"
