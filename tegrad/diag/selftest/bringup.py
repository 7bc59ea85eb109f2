"""Stage 4: the GPU's first work, from ioctls alone: the host, the copy engine, a kernel by QMD, and each result."""

from __future__ import annotations

import time

from tegrad.conformance.engine import PLAIN_RELEASE, Gpu, Queue
from tegrad.conformance.rig import Rig
from tegrad.diag.selftest.child import NEEDS
from tegrad.diag.selftest.stage import Notes
from tegrad.hw.gpfifo import gp_entry
from tegrad.nv.kernel import pick_kernel

TIMEOUT_S = 10.0
COPY_BYTES = (1 << 20) + 52
"""Bytes of the copy: an odd number of words more than a MiB."""
BLOCKS, THREADS = 100, 256


def bringup(notes: Notes) -> None:
    """Each engine once, and what it leaves behind."""
    with Rig(pick_kernel(), patience=TIMEOUT_S, hazardous=False) as rig:
        with notes.step("a channel"):
            gpu = Gpu(rig)
            queue = gpu.queue()
        with notes.step("engine objects and windows, and a release after them"):
            start = time.perf_counter()
            queue.setup().done()
            notes.fact("first submission us", round((time.perf_counter() - start) * 1e6))
        with notes.step("a release with a time stamp"):
            _stamp(notes, gpu, queue)
        with notes.step("three segments with one doorbell"):
            _segments(notes, gpu, queue)
        with notes.step("the copy engine"):
            _copy(notes, gpu, queue)
        if lacking := NEEDS["compilers"]() or ("" if gpu.launches else "a ga10b's QMD is no other chip's"):
            notes.line(f"no kernel was run: {lacking}")
        else:
            with notes.step("a kernel by QMD"):
                _kernel(notes, gpu, queue)
        with notes.step("health"):
            notes.expect(queue.note.status == 0, "no error notifier", queue.note.info32)
            notes.expect(rig.timed_out(queue.channel.fd) == 0, "a channel that lives", "GET_TIMEDOUT 1")


def _stamp(notes: Notes, gpu: Gpu, queue: Queue) -> None:
    block = gpu.memory()
    stamps = []
    for value in (7, 8):
        queue.release(block.va, value).done()
        notes.expect(block.u64() == value, f"{value} in memory", block.u64())
        stamps.append(block.u64(8))
    notes.fact("GPU ns between two releases", stamps[1] - stamps[0])
    notes.expect(0 < stamps[0] < stamps[1], "a clock of the GPU that goes forward", stamps)


def _segments(notes: Notes, gpu: Gpu, queue: Queue) -> None:
    code, target = gpu.memory(), gpu.memory()
    for turn in range(3):
        words = queue.release(target.va, 7 + turn, PLAIN_RELEASE).words
        for i, word in enumerate(words):
            code.put32(word, 64 * turn + 4 * i)
        queue.entry(gp_entry(code.va + 64 * turn, len(words)))
        queue.words = []
    queue.done()
    notes.expect(target.u32() == 9, "9, which the last of three segments releases", target.u32())


def _copy(notes: Notes, gpu: Gpu, queue: Queue) -> None:
    source, target = gpu.memory(COPY_BYTES), gpu.memory(COPY_BYTES)
    data = bytes(i * 7 % 251 for i in range(COPY_BYTES))
    source.cpu.write(data)
    start = time.perf_counter()
    queue.copy(source.va, target.va, COPY_BYTES - 4).done()
    notes.fact(f"copy of {COPY_BYTES - 4} bytes us", round((time.perf_counter() - start) * 1e6))
    notes.expect(target.cpu.read(0, COPY_BYTES - 4) == data[:-4], "the bytes of the source", "others")
    notes.expect(target.u32(COPY_BYTES - 4) == 0, "nothing after the copy", hex(target.u32(COPY_BYTES - 4)))


def _kernel(notes: Notes, gpu: Gpu, queue: Queue) -> None:
    block = gpu.memory()
    queue.launch(gpu.kernel("shared", block.va, 5, block=(THREADS, 1, 1))).done()
    found = [block.u32(4 * i) for i in range(THREADS)]
    notes.expect(
        found == [5 + THREADS - 1 - i for i in range(THREADS)], "a block's threads through shared memory", found
    )
    block.put32(0)
    for turn in (1, 2):
        start = time.perf_counter()
        queue.launch(gpu.kernel("count", block.va, grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1))).done()
        notes.fact(f"kernel of {BLOCKS} blocks us, {turn}", round((time.perf_counter() - start) * 1e6))
        notes.expect(block.u32() == turn * BLOCKS * THREADS, f"{turn * BLOCKS * THREADS} threads counted", block.u32())
