"""The cases of the coherence matrix: what CPU and GPU see of each other's stores, by flags of the GPU mapping.

Pushbuffers and results lie in volatile memory, whatever is tried. Every case has a page of its own, so that nothing
which another one left in L2 can answer. docs/coherence.md says what the words mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tegrad.conformance.engine import PLAIN_RELEASE, Block, Gpu, Program
from tegrad.conformance.rig import PAGE, Rig
from tegrad.conformance.rule import Differs
from tegrad.diag.selftest.stage import Notes
from tegrad.hw.classes import HostMethod, MemOp
from tegrad.hw.gpfifo import gp_entry, semaphore
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel

FLAGS = (0, 0x4, 0x200, 0x204)
"""MAP_BUFFER_EX's: none, CACHEABLE, SYSTEM_COHERENT, both."""
BUFFER_PAGES = 256
SETTLE_S = 0.02
"""How long the CPU looks for a store of the GPU that is done."""
TIMEOUT_S = 5.0
CLIENT = "FLUSH_L2 (l2_flush, l2_invalidate, fb_flush)"
"""What tegrad does where the CPU comes in to cached memory (nv/coherence.py)."""
NONE = "no flush"

FLUSHES: Mapping[str, Mapping[str, int]] = {
    "FLUSH_L2 (fb_flush)": {"fb_flush": 1},
    "FLUSH_L2 (l2_flush)": {"l2_flush": 1},
    "FLUSH_L2 (l2_flush, l2_invalidate)": {"l2_flush": 1, "l2_invalidate": 1},
    CLIENT: {"l2_flush": 1, "l2_invalidate": 1, "fb_flush": 1},
}
"""FLUSH_L2 with these fields."""
UNMAP = "UNMAP of something else"
FLUSH_DIRTY, INVALIDATE = "MEM_OP_D 0x10", "MEM_OP_D 0xE"
MEM_OPS = {FLUSH_DIRTY: MemOp.L2_FLUSH_DIRTY, INVALIDATE: MemOp.L2_SYSMEM_INVALIDATE}
"""Operations in the pushbuffer. Whether an Orin lets a user's channel send them is not known: they come last."""


@dataclass(slots=True)
class Seen:
    """What was seen of a mapping with these flags. True: the store was seen; text: why the remedy could not be tried.

    `to_cpu` and `to_gpu`: by way, then by remedy. `pushbuffers`: what the segments at one address released, that should
    be 1, 2, 3; `anew`: by remedy, whether a fourth was read. `kept`: whether the CPU's later store outlived a line's
    leaving L2. `refused`: why nothing else is known.
    """

    to_cpu: dict[str, dict[str, bool | str]] = field(default_factory=dict)
    to_gpu: dict[str, dict[str, bool | str]] = field(default_factory=dict)
    pushbuffers: list[int] = field(default_factory=list)
    anew: dict[str, bool | str] = field(default_factory=dict)
    kept: dict[str, bool] = field(default_factory=dict)
    refused: str = ""

    @property
    def coherent(self) -> bool:
        """Whether everything is right with no remedy."""
        return self._right_after(NONE) and all(self.kept.values())

    @property
    def right(self) -> bool:
        """Whether everything is right with what the client does, and does before the CPU's access."""
        return self.coherent or self._right_after(CLIENT)

    def _right_after(self, remedy: str) -> bool:
        cases = [self.anew, *self.to_cpu.values(), *self.to_gpu.values()]
        return not self.refused and all(True in (one.get(NONE), one.get(remedy)) for one in cases)


class MatrixBench:
    """A channel, results that are volatile, and pages mapped with the flags under test."""

    def __init__(self, rig: Rig, flags: int, kernels: bool) -> None:
        self.rig, self.gpu = rig, Gpu(rig)
        self.kernels = kernels and self.gpu.launches
        self.queue = self.gpu.compute().done()
        self.results = self.gpu.memory()
        buffer = rig.buffer(BUFFER_PAGES * PAGE)
        va = rig.map(self.gpu.vm, buffer.fd, flags=flags)
        self.block = Block(buffer, rig.mapped(buffer), va)
        self._page = 0
        self._programs: dict[str, Program] = {}

    def page(self) -> int:
        """The offset of a page that nothing has touched."""
        self._page += PAGE
        return self._page

    # ---- ways to store and to load

    def stores(self) -> Mapping[str, Callable[[int, int], None]]:
        """Ways of the GPU to store a word at an offset."""
        ways = {"release": self._release, "copy engine": self._copy_in}
        return ways | ({"kernel": lambda at, value: self._kernel("store", at, value)} if self.kernels else {})

    def loads(self) -> Mapping[str, Callable[[int], int]]:
        """Ways of the GPU to load the word at an offset."""
        return {"copy engine": self._copy_out} | ({"kernel": self._load} if self.kernels else {})

    def _release(self, at: int, value: int) -> None:
        self.queue.release(self.block.va + at, value, PLAIN_RELEASE).done()

    def _copy_in(self, at: int, value: int) -> None:
        self.results.put32(value, 64)
        self.queue.copy(self.results.va + 64, self.block.va + at, 4).done()

    def _copy_out(self, at: int) -> int:
        self.queue.copy(self.block.va + at, self.results.va, 4).done()
        return self.results.u32()

    def _kernel(self, name: str, at: int, value: int = 0) -> None:
        if name not in self._programs:
            self._programs[name] = self.gpu.program(name)
        program = self._programs[name]
        bank = self.gpu.bank(program, self.block.va + at, value, self.results.va)
        self.queue.launch(self.gpu.qmd(program, bank)).done()

    def _load(self, at: int) -> int:
        self._kernel("load", at)
        return self.results.u32()

    def push(self, at: int, value: int) -> int:
        """Write a segment that releases a value into an address under test, run it; what the results hold then."""
        words = semaphore(PLAIN_RELEASE, self.results.va + 128, value)
        for i, word in enumerate(words):
            self.block.put32(word, at + 4 * i)
        self.queue.entry(gp_entry(self.block.va + at, len(words))).done()
        return self.results.u32(128)

    # ---- remedies

    def remedy(self, name: str) -> None:
        """Do what may make stores seen. DriverError where the driver refuses it, Differs where the channel dies."""
        if name in FLUSHES:
            self.rig.call(self.rig.ctrl, "GPU_FLUSH_L2", **FLUSHES[name])
        elif name == UNMAP:
            self.rig.unmap(self.gpu.vm, self.gpu.memory().va)
        elif name in MEM_OPS:
            self.queue.host(HostMethod.MEM_OP_A, 0, 0, 0, MEM_OPS[name] << 27).done(name)

    def empty(self) -> None:
        """Make L2 let go of everything, by whatever the driver allows."""
        try:
            self.remedy(CLIENT)
        except DriverError:
            self.remedy(UNMAP)

    def seen(self, at: int, value: int) -> bool:
        """Whether the CPU sees a word now, or a moment later."""
        return self.rig.wait(lambda: self.block.u32(at) == value, SETTLE_S)


Case = Callable[[MatrixBench, str], bool]


def _store_case(way: str) -> Case:
    def case(bench: MatrixBench, remedy: str) -> bool:
        at = bench.page()
        bench.block.put32(1, at)
        bench.stores()[way](at, 2)
        bench.remedy(remedy)
        return bench.seen(at, 2)

    return case


def _load_case(way: str) -> Case:
    def case(bench: MatrixBench, remedy: str) -> bool:
        at, load = bench.page(), bench.loads()[way]
        bench.block.put32(1, at)
        first = load(at)
        bench.block.put32(2, at)
        bench.remedy(remedy)
        return (first, load(at)) == (1, 2)

    return case


def _pushbuffer_case(bench: MatrixBench, remedy: str) -> bool:
    at = bench.page()
    bench.push(at, 1)
    bench.block.put32(4, at + 12)
    bench.remedy(remedy)
    return bench.push(at, 4) == 4


def _kept(bench: MatrixBench) -> dict[str, bool]:
    """The GPU has stored a word, then the CPU stores it and a neighbour; L2 lets go. Whether these are still there."""
    at = bench.page()
    for offset in (0, 16):
        bench.block.put32(1, at + offset)
    bench.stores()["release"](at, 2)
    bench.block.put32(3, at)
    bench.block.put32(4, at + 16)
    bench.empty()
    time.sleep(SETTLE_S)
    return {"the word": bench.block.u32(at) == 3, "a neighbour of it": bench.block.u32(at + 16) == 4}


def look(notes: Notes, kernel: Kernel, flags: int, *, kernels: bool) -> Seen:
    """Try one kind of mapping: without remedies, then those of the driver."""
    seen = Seen()
    try:
        with Rig(kernel, patience=TIMEOUT_S, hazardous=False) as rig:
            _without_pushbuffer(notes, MatrixBench(rig, flags, kernels), seen, flags)
    except DriverError as error:
        seen.refused = f"{error.name}: {error.code}"
    except Differs as found:
        seen.refused = f"{found.expected}: {found.seen}"
    return seen


def look_again(notes: Notes, kernel: Kernel, flags: int, seen: Seen, *, kernels: bool) -> None:
    """Try the remedies of the pushbuffer where something is left to mend, each in a channel of its own: it may die."""
    if seen.refused:
        return
    for op in MEM_OPS:
        for answers, name, case in _unsettled(seen, op):
            with notes.step(f"flags {flags:#x}, {name}, {op}"):
                try:
                    with Rig(kernel, patience=TIMEOUT_S, hazardous=False) as rig:
                        answers[op] = case(MatrixBench(rig, flags, kernels), op)
                except Differs as found:
                    answers[op] = f"{found.expected}: {found.seen}"
            if isinstance(answers[op], str):
                break  # one channel that dies of it is enough


def _without_pushbuffer(notes: Notes, bench: MatrixBench, seen: Seen, flags: int) -> None:
    seen.to_cpu, seen.to_gpu = {way: {} for way in bench.stores()}, {way: {} for way in bench.loads()}
    with notes.step(f"flags {flags:#x}: a pushbuffer rewritten at one address"):
        at = bench.page()
        seen.pushbuffers = [bench.push(at, value) for value in (1, 2, 3)]
    with notes.step(f"flags {flags:#x}: whether a line overwrites what the CPU stored later"):
        seen.kept = _kept(bench)
    for remedy in (NONE, *FLUSHES, UNMAP):
        for answers, name, case in _unsettled(seen, remedy):
            with notes.step(f"flags {flags:#x}, {name}, {remedy}"):
                try:
                    answers[remedy] = case(bench, remedy)
                except DriverError as error:
                    answers[remedy] = error.code


def _unsettled(seen: Seen, remedy: str) -> list[tuple[dict[str, bool | str], str, Case]]:
    """The cases that a remedy is of interest for: all of them without one, then those that were not right so."""
    cases: list[tuple[dict[str, bool | str], str, Case]] = []
    cases += [(table, f"the GPU stores by {way}", _store_case(way)) for way, table in seen.to_cpu.items()]
    cases += [(table, f"the GPU loads by {way}", _load_case(way)) for way, table in seen.to_gpu.items()]
    cases += [(seen.anew, "a pushbuffer rewritten", _pushbuffer_case)]
    return cases if remedy == NONE else [case for case in cases if case[0].get(NONE) is False]


def fact(seen: Seen) -> Mapping[str, Any]:
    """What was seen, as data."""
    if seen.refused:
        return {"refused": seen.refused}
    return {
        "the CPU sees the GPU's stores": seen.to_cpu,
        "the GPU sees the CPU's stores": seen.to_gpu,
        "pushbuffers": seen.pushbuffers,
        "a pushbuffer is read anew": seen.anew,
        "the CPU's later stores stay": seen.kept,
    }
