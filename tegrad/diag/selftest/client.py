"""Stages 7 to 9: tegrad's own client: the one-liner, launches until every ring has wrapped, and hard kernels."""

from __future__ import annotations

import time
from dataclasses import asdict

from tegrad.conformance.engine import Gpu
from tegrad.conformance.rig import Rig
from tegrad.diag.selftest.matrix import CLIENT, FLUSHES
from tegrad.diag.selftest.place import Place, place
from tegrad.diag.selftest.stage import Notes
from tegrad.nv import exercise
from tegrad.nv.kernel import pick_kernel

BLOCKS, THREADS = 100, 256
"""Of the kernel that counts itself."""


def one_liner(notes: Notes) -> None:
    """tinygrad on this GPU: a sum of two tensors."""
    with notes.step("import, open, compile, run"):
        start = time.perf_counter()
        notes.fact("sum", exercise.one_liner())
        notes.fact("seconds", round(time.perf_counter() - start, 3))
    notes.fact("chip", exercise.open_device())


def launches(notes: Notes) -> None:
    """Small launches whose results each depend on all before."""
    with notes.step("open"):
        exercise.open_device()
        count = max(notes.amount, exercise.ring_entries() * 11 // 10)
    with notes.step("launches"):
        start = time.perf_counter()
        rounds = exercise.launches(count, lambda done: notes.fact("launches submitted", done))
        seconds = time.perf_counter() - start
    notes.fact("us a launch", round(seconds / count * 1e6, 1))
    notes.fact("times each ring wrapped", asdict(rounds))
    if notes.board:
        if unwrapped := [name for name, times in asdict(rounds).items() if not times]:
            notes.line(f"so few launches, as on a board, wrap no ring of {' and '.join(unwrapped)}")
    else:
        notes.expect(min(asdict(rounds).values()) > 0, "every ring to wrap", rounds)


def kernels(notes: Notes) -> None:
    """Local memory, all shared memory of a block, atomics in both kinds of memory."""
    with notes.step("open"):
        exercise.open_device()
    with notes.step("a kernel that spills"):
        notes.fact("threads that spill 1 KiB", exercise.spill())
    with notes.step("a block with all shared memory"):
        notes.fact("bytes of shared memory of a block", exercise.all_shared())
    if place() is not Place.ORIN:
        notes.line("no atomics in volatile or cached memory were tried: only an Orin's driver has such mappings")
        return
    for name, cached in (("volatile", False), ("cached", True)):
        with notes.step(f"atomics in {name} memory"), Rig(pick_kernel(), hazardous=False) as rig:
            gpu = Gpu(rig)
            if not gpu.launches:
                notes.line(f"no atomics in {name} memory were tried: a ga10b's QMD is no other chip's")
                continue
            word = gpu.memory(cached=cached)
            start = time.perf_counter()
            queue = gpu.compute()
            queue.launch(gpu.kernel("count", word.va, grid=(BLOCKS, 1, 1), block=(THREADS, 1, 1))).done()
            notes.fact(
                f"{BLOCKS * THREADS} atomics in {name} memory, with set-up, us",
                round((time.perf_counter() - start) * 1e6),
            )
            if cached:
                rig.call(rig.ctrl, "GPU_FLUSH_L2", **FLUSHES[CLIENT])
            notes.expect(word.u32() == BLOCKS * THREADS, f"{BLOCKS * THREADS} counted", word.u32())
