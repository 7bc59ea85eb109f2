"""What the GPU's L2 shows of memory that it may keep: each case gives an outcome, on a GPU and on an emulated board.

`python tests/hardware/l2_matrix.py [case ...] [--record FILE]` runs each case twice in a process of its own, with the
memory under test mapped volatile and cached, and prints what was seen. On a desktop's driver cached is system memory
allocated with GPU_CACHEABLE_YES; on a Jetson's, or a board's (TEGRAD_BOARD), a mapping with CACHEABLE.
docs/coherence.md tells what the outcomes mean. tests/hardware/test_l2.py holds the board against what an H200 showed.
"""

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 60
PAGES = 32
"""Pages of the memory under test."""
CACHEABLE_YES = 1 << 18
"""NVOS02_FLAGS_GPU_CACHEABLE_YES, of a desktop driver's memory allocations."""
LOADS = {
    "ld.cg": "asm volatile(\"ld.global.cg.u32 %0, [%1];\" : \"=r\"(v) : \"l\"(b));",
    "ld.volatile": "v = *(volatile unsigned *)b;",
    "ld.relaxed.sys": "asm volatile(\"ld.relaxed.sys.global.u32 %0, [%1];\" : \"=r\"(v) : \"l\"(b));",
    "ld.acquire.sys": "asm volatile(\"ld.acquire.sys.global.u32 %0, [%1];\" : \"=r\"(v) : \"l\"(b));",
}  # fmt: skip
VARIES = {("writers", "cached", "32 bytes"): ([5, 5], [6, 6])}
"""Outcomes of an H200 that differ from run to run: whether L2 takes two stores of a thread as one is open."""
STORES = {
    "st": "a[0] = 7;",
    "st.volatile": "*(volatile unsigned *)a = 7;",
    "st.release.sys": "asm volatile(\"st.release.sys.global.u32 [%0], %1;\" :: \"l\"(a), \"r\"(7));",
    "st, then __threadfence_system": "a[0] = 7; __threadfence_system();",
}  # fmt: skip
UNTIL = "while (!*(volatile unsigned *)b) ;"
BEGINS_S = 60.0
"""Within which a kernel begins that says so: on a busy machine a board takes seconds to compile it."""

RING = "gpfifo"
"""The case that only a desktop's driver has (`with_ring`)."""

CASES: dict[str, Callable[["Gpu"], Any]] = {}


def case(function: Callable[["Gpu"], Any]) -> Callable[["Gpu"], Any]:
    """Register a case."""
    CASES[function.__name__] = function
    return function


def stock_with_flags(allocate: Callable[[], Any], cached: bool) -> Any:
    """What `allocate` gets of a desktop's driver, memory of the host with or without GPU_CACHEABLE_YES."""
    from tinygrad.runtime import ops_nv

    stock = ops_nv.nv_gpu.NVOS02_PARAMETERS

    def parameters(**fields: Any) -> Any:
        return stock(**{**fields, "flags": fields["flags"] | (CACHEABLE_YES if cached else 0)})

    ops_nv.nv_gpu.NVOS02_PARAMETERS = parameters
    try:
        return allocate()
    finally:
        ops_nv.nv_gpu.NVOS02_PARAMETERS = stock


class Words:
    """A buffer as 32-bit words of the CPU."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        if buffer.view is None:  # ours gives no view of what the L2 may keep
            from tinygrad.runtime.support.hcq import MMIOInterface

            buffer.view = MMIOInterface(buffer.meta.address, buffer.size, fmt="B")
        self._view = buffer.cpu_view().view(0, buffer.size, "I")

    def __getitem__(self, index: int) -> int:
        return int(self._view[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._view[index] = value

    @property
    def va(self) -> int:
        return int(self.buffer.va_addr)


class Gpu:
    """The open device, memory under test (`m`, cached or not), plain memory for results (`r`), and kernels."""

    def __init__(self, cached: bool) -> None:
        from nv_opened import device

        self.cached, self.dev = cached, device()
        self.tegra = type(self.dev.iface).__name__ == "TegraIface"
        self.m, self.r = self.host(cached, PAGES * 4096), self.host(False)
        self._programs: dict[str, Any] = {}

    def host(self, cached: bool, size: int = 4096, at: int | None = None) -> Words:
        """Zeroed memory of the host that the GPU sees, cached by its L2 or not."""
        if self.tegra:
            from tegrad.nv import roles

            flags = roles.CACHED if cached else roles.VOLATILE
            made = self.dev.iface.alloc(size, role=replace(roles.STAGING, volatile=flags, cached=flags))
        else:
            made = self._desktop(cached, size, at)
        words = Words(made)
        for i in range(size // 4 if at is None else 0):
            words[i] = 0
        return words

    def _desktop(self, cached: bool, size: int, at: int | None) -> Any:
        return stock_with_flags(lambda: self.dev.iface.alloc(size, host=True, cpu_addr=at), cached)

    def twice(self) -> tuple[Words, Words]:
        """The same memory mapped as the one under test, and volatile."""
        if self.tegra:
            from tinygrad.runtime.support.hcq import HCQBuffer

            from tegrad.nv import roles

            iface, plain = self.dev.iface, self.host(False)
            memory = plain.buffer.meta
            if not self.cached:
                return plain, plain
            with iface.nvmap.export(memory) as fd:
                va = iface._space.map(fd, roles.CACHED)
            return Words(HCQBuffer(va, 4096, meta=memory, view=plain.buffer.cpu_view())), plain
        fd, size = os.memfd_create("twice"), 1 << 20
        os.ftruncate(fd, size)
        self._maps = [mmap.mmap(fd, size) for _ in range(2)]
        for pages in self._maps:
            pages[:4096] = bytes(4096)
        addresses = [ctypes.addressof(ctypes.c_char.from_buffer(pages)) for pages in self._maps]
        return self.host(self.cached, size, addresses[0]), self.host(False, size, addresses[1])

    def run(self, body: str, a: Words, b: Words, wait: bool = True) -> None:
        """Run a kernel of one thread on two buffers."""
        from nv_opened import raw

        if body not in self._programs:
            name = f"k{len(self._programs)}"
            source = f'extern "C" __global__ void {name}(unsigned *a, unsigned *b) {{ unsigned v = 0; {body} }}'
            self._programs[body] = raw(source, name, 2)
        self._programs[body](a.buffer, b.buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), wait=wait)

    def load(self, words: Words, index: int = 0, how: str = "ld.cg") -> int:
        """What a kernel reads of a word."""
        self.run(f"b += {index}; {LOADS[how]} a[0] = v;", self.r, words)
        return self.r[0]

    def push(self, *segments: tuple[int, int]) -> None:
        """Have the host engine execute segments of commands (address, words), and wait for it."""
        fifo = self.dev.compute_gpfifo
        number = fifo.submissions + 1
        fifo.push([*segments, self.dev.place_commands(array("I", fifo.release(number)))])
        fifo.wait(number)

    def mem_op(self, op: int) -> None:
        """MEM_OP_D."""
        from tegrad.hw.gpfifo import MethodOp, method_header

        self.push(self.dev.place_commands(array("I", [method_header(MethodOp.INC, 0, 0x28, 4), 0, 0, 0, op << 27])))

    def release(self, va: int, value: int) -> None:
        """The host engine releases a semaphore."""
        from tegrad.hw.gpfifo import semaphore
        from tegrad.nv.queues import RELEASE

        self.push(self.dev.place_commands(array("I", semaphore(RELEASE, va, value))))

    def stale(self) -> None:
        """The GPU has read 1 of the memory under test; since then the CPU has stored 2."""
        self.m[0] = 1
        self.load(self.m)
        self.m[0] = 2

    def queue(self) -> Any:
        """A compute queue that begins with tinygrad's memory barrier."""
        return self.dev.hw_compute_queue_t().memory_barrier()

    def finish(self, queue: Any) -> None:
        """Submit a queue and wait for it."""
        queue.signal(self.dev.timeline_signal, self.dev.next_timeline()).submit(self.dev)
        self.dev.synchronize()


@case
def loads(gpu: Gpu) -> Any:
    """The CPU stores 1, 2, 3; what each form of load reads after each."""
    seen: dict[str, list[int]] = {how: [] for how in LOADS}
    for value in (1, 2, 3):
        gpu.m[0] = value
        for how in LOADS:
            seen[how].append(gpu.load(gpu.m, how=how))
    return seen


@case
def grain(gpu: Gpu) -> Any:
    """9 is stored beside a word that the GPU has read: in its sector of 32 bytes, in its line of 128, after it."""
    for index in (0, 4, 16, 32):
        gpu.m[index] = 1
    gpu.load(gpu.m)
    for index in (4, 16, 32):
        gpu.m[index] = 9
    return {"same sector": gpu.load(gpu.m, 4), "same line": gpu.load(gpu.m, 16), "next line": gpu.load(gpu.m, 32)}


@case
def polling(gpu: Gpu) -> Any:
    """Whether a kernel that polls sees a store of the CPU within a second (plain memory ends it)."""
    gpu.load(gpu.m)
    threading.Timer(0.2, lambda: gpu.m.__setitem__(0, 1)).start()
    threading.Timer(1.2, lambda: gpu.r.__setitem__(1, 1)).start()
    body = "volatile unsigned *m = b, *r = a; while (!m[0] && !r[1]) ; a[0] = m[0];"
    gpu.run(body, gpu.r, gpu.m)
    return {"sees": gpu.r[0]}


@case
def stores_while_running(gpu: Gpu) -> Any:
    """What the CPU sees of a store while the kernel still runs; what becomes of the CPU's own stores meanwhile."""
    outcome = {}
    for how, body in STORES.items():
        for i in range(8):
            gpu.m[i] = 0
        gpu.load(gpu.m)
        gpu.r[0] = gpu.r[1] = 0
        seen: list[int] = []

        def other(seen: list[int] = seen) -> None:
            until = time.monotonic() + BEGINS_S
            while not gpu.r[1] and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.3)
            seen.append(gpu.m[0])
            gpu.m[0], gpu.m[1] = 99, 98
            gpu.r[0] = 1

        thread = threading.Thread(target=other)
        thread.start()
        gpu.run(f"((volatile unsigned *)b)[1] = 1; {body} {UNTIL} a[2] = 8;", gpu.m, gpu.r)
        thread.join()
        outcome[how] = {"seen": seen[0], "after": [gpu.m[i] for i in range(3)]}
    return outcome


@case
def writers(gpu: Gpu) -> Any:
    """The GPU writes 5 to a word, the CPU stores 6 there and to its neighbour; what the GPU reads of the two.

    Each writer has a page of its own; `kept` ones were read by the GPU before.
    """
    bodies = {
        "4 bytes": "a[0] = 5;",
        "16 bytes": "*(uint4 *)a = make_uint4(5, 5, 5, 5);",
        "32 bytes": "((uint4 *)a)[0] = make_uint4(5, 5, 5, 5); ((uint4 *)a)[1] = make_uint4(5, 5, 5, 5);",
        "32 bytes, a fence between": "((uint4 *)a)[0] = make_uint4(5, 5, 5, 5); __threadfence_system(); "
        "((uint4 *)a)[1] = make_uint4(5, 5, 5, 5);",
        "8 words, fences between": "for (int i = 0; i < 8; i++) { a[i] = 5; __threadfence_system(); }",
        "a line": "for (int i = 0; i < 8; i++) ((uint4 *)a)[i] = make_uint4(5, 5, 5, 5);",
        "volatile": "*(volatile unsigned *)a = 5;",
        "atomic": "atomicExch(a, 5u);",
        "reduction": 'asm volatile("red.global.max.u32 [%0], 5;" :: "l"(a));',
    }
    ways: dict[str, Callable[[int], None]] = {
        how: (lambda at, body=body: gpu.run(f"a += {at}; {body}", gpu.m, gpu.r)) for how, body in bodies.items()
    }
    ways["two kernels"] = lambda at: _halves(gpu, at, invalidate=False)
    ways["two kernels, 0xe between"] = lambda at: _halves(gpu, at, invalidate=True)
    ways["copy engine"] = lambda at: _copy_words(gpu, at, 16)
    ways["copy engine, 8 bytes"] = lambda at: _copy_words(gpu, at, 2)
    ways["release"] = lambda at: gpu.release(gpu.m.va + 4 * at, 5)
    outcome, line = {}, 0
    for how, write in ways.items():
        for kept in (False, True):
            if kept:
                gpu.load(gpu.m, line)
            write(line)
            gpu.m[line], gpu.m[line + 5] = 6, 6
            outcome[f"{how}, kept" if kept else how] = [gpu.load(gpu.m, line), gpu.load(gpu.m, line + 5)]
            line += 1024
    return outcome


def _halves(gpu: Gpu, at: int, invalidate: bool) -> None:
    """A sector written by two kernels, half by half."""
    for half in (0, 4):
        if half and invalidate:
            gpu.mem_op(0xE)
        gpu.run(f"a += {at + half}; *(uint4 *)a = make_uint4(5, 5, 5, 5);", gpu.m, gpu.r)


def _copy_words(gpu: Gpu, at: int, count: int) -> None:
    source = gpu.host(False)
    for i in range(count):
        source[i] = 5
    target = gpu.m.buffer.offset(4 * at, 4 * count)
    gpu.finish(gpu.dev.hw_copy_queue_t().copy(target, source.buffer, 4 * count))


@case
def atomics(gpu: Gpu) -> Any:
    """The GPU has read 1, the CPU stores 100, the GPU adds 10: what it found, what memory holds."""
    outcome = {}
    for scope, body in (("gpu", "v = atomicAdd(a, 10u);"), ("system", "v = atomicAdd_system(a, 10u);")):
        gpu.m[0] = 1
        gpu.run("atomicExch(a, 1u);", gpu.m, gpu.r)
        gpu.m[0] = 100
        gpu.run(f"{body} b[0] = v;", gpu.m, gpu.r)
        outcome[scope] = {"found": gpu.r[0], "memory": gpu.m[0]}
    return outcome


def _memory_operation(op: int) -> Callable[[Gpu], Any]:
    def run(gpu: Gpu) -> Any:
        """A memory operation between a stale load and the next."""
        gpu.stale()
        before = gpu.load(gpu.m)
        try:
            gpu.mem_op(op)
            time.sleep(1)  # an error is told some time later
            return {"before": before, "after": gpu.load(gpu.m)}
        except Exception as error:
            return {"before": before, "error": type(error).__name__}

    return run


for _op in (0x5, 0xD, 0xE, 0x10, 0x15):
    CASES[f"mem_op_{_op:#x}"] = _memory_operation(_op)


@case
def pushbuffers(gpu: Gpu) -> Any:
    """Commands at one address that release 1, then 2, then 3; and once more after MEM_OP_D 0xE."""
    from tegrad.hw.gpfifo import semaphore
    from tegrad.nv.queues import RELEASE

    seen = []
    for value in (1, 2, 3):
        words = semaphore(RELEASE, gpu.r.va, value)
        for i, word in enumerate(words):
            gpu.m[i] = word
        gpu.push((gpu.m.va, len(words)))
        seen.append(gpu.r[0])
    gpu.mem_op(0xE)
    gpu.push((gpu.m.va, 6))
    return {"released": seen, "after 0xe": gpu.r[0]}


def _put_and_run(gpu: Gpu, source: Words, blocks: int) -> None:
    """Arguments and QMD into the memory under test; the kernel adds its source's word once a block."""
    gpu.run("atomicAdd(a, b[0]);", gpu.host(False), source)
    program = gpu._programs["atomicAdd(a, b[0]);"]
    state = program.fill_kernargs((gpu.r.buffer, source.buffer), (), gpu.m.buffer)
    gpu.finish(gpu.queue().exec(program, state, (blocks, 1, 1), (1, 1, 1)))


@case
def arguments(gpu: Gpu) -> Any:
    """Arguments rewritten at one address name 11, 22, 11, 22, with memory barriers between; then after 0xE."""
    sources = [gpu.host(False), gpu.host(False)]
    sources[0][0], sources[1][0] = 11, 22
    seen = []
    for i in range(5):
        if i == 4:
            gpu.mem_op(0xE)
        gpu.r[0] = 0
        _put_and_run(gpu, sources[i % 2 if i < 4 else 1], 1)
        seen.append(gpu.r[0])
    return {"read": seen[:4], "after 0xe": seen[4]}


@case
def launch_descriptors(gpu: Gpu) -> Any:
    """QMDs rewritten at one address launch 1, 2 and 3 blocks; then 3 after MEM_OP_D 0xE."""
    source = gpu.host(False)
    source[0] = 1
    seen = []
    for blocks in (1, 2, 3):
        gpu.r[0] = 0
        _put_and_run(gpu, source, blocks)
        seen.append(gpu.r[0])
    gpu.mem_op(0xE)
    gpu.r[0] = 0
    _put_and_run(gpu, source, 3)
    return {"blocks": seen, "after 0xe": gpu.r[0]}


@case
def copies(gpu: Gpu) -> Any:
    """The copy engine reads a word into which the CPU stores 1, 2, 3; and what it writes, the CPU reads."""
    target, seen, written = gpu.host(False), [], []
    for value in (1, 2, 3):
        gpu.m[0] = value
        gpu.finish(gpu.dev.hw_copy_queue_t().copy(target.buffer, gpu.m.buffer, 64))
        seen.append(target[0])
    for value in (4, 5):
        target[0] = value
        gpu.finish(gpu.dev.hw_copy_queue_t().copy(gpu.m.buffer, target.buffer, 64))
        written.append(gpu.m[0])
    return {"read": seen, "written": written}


@case
def acquire(gpu: Gpu) -> Any:
    """Whether a semaphore that is acquired while it is 0 passes within 2 s of the CPU's store."""
    from tegrad.hw.classes import HostMethod
    from tegrad.hw.gpfifo import MethodOp, method_header

    header = method_header(MethodOp.INC, 0, HostMethod.SEM_ADDR_LO, 5)
    words = [header, gpu.m.va & 0xFFFFFFFF, gpu.m.va >> 32, 5, 0, 3 | 1 << 24]
    fifo = gpu.dev.compute_gpfifo
    number = fifo.submissions + 1
    threading.Timer(0.3, lambda: gpu.m.__setitem__(0, 5)).start()
    fifo.push([gpu.dev.place_commands(array("I", words)), gpu.dev.place_commands(array("I", fifo.release(number)))])
    until = time.monotonic() + 2.3
    while fifo.done < number and time.monotonic() < until:
        time.sleep(0.01)
    return {"passes": fifo.done >= number}


@case
def releases(gpu: Gpu) -> Any:
    """What the CPU sees of the host engine's releases of 1 and 2, having stored 9 between; then a kernel's load."""
    seen = []
    for value in (1, 2):
        gpu.release(gpu.m.va, value)
        seen.append(gpu.m[0])
        gpu.m[0] = 9
    return {"seen": seen, "a kernel reads": gpu.load(gpu.m)}


@case
def both_mappings(gpu: Gpu) -> Any:
    """The same memory mapped as under test and volatile: loads through one after loads and stores through the other."""
    kept, plain = gpu.twice()
    outcome: dict[str, Any] = {}
    plain[0] = 1
    first = gpu.load(kept)
    plain[0] = 2
    outcome["kept, plain, kept"] = [first, gpu.load(kept), gpu.load(plain), gpu.load(kept)]
    plain[0] = 6
    gpu.load(kept)
    plain[0] = 7
    gpu.run("atomicAdd(a, 100u);", plain, gpu.r)
    outcome["added through plain"] = [plain[0], gpu.load(kept)]
    plain[0] = 1
    gpu.run("a[0] = 8;", plain, gpu.r)
    outcome["stored through plain"] = [plain[0], gpu.load(kept)]
    plain[0] = 3
    gpu.load(kept)
    plain[0] = 4
    gpu.load(plain, 1)
    outcome["a neighbour through plain"] = gpu.load(kept)
    plain[0] = 5
    outcome["a neighbour through kept"] = [gpu.load(kept, 1), gpu.load(kept)]
    return outcome


RING_BYTES = 0x300000
"""What tinygrad allocates for all GPFIFOs and USERDs of a desktop's device."""


def with_ring(cached: bool) -> dict[str, Any]:
    """A desktop's device whose GPFIFOs lie in memory of the host, volatile or cached: how far submissions come.

    A board has no such case: nvgpu maps GPFIFOs itself, volatile.
    """
    from tegrad.nv.hopper import NVKIface

    stock, made = NVKIface.alloc, []

    def alloc(self: Any, size: int, *args: Any, **kwargs: Any) -> Any:
        if size != RING_BYTES or made:
            return stock(self, size, *args, **kwargs)
        made.append(size)
        return stock_with_flags(lambda: stock(self, size, host=True), cached)

    NVKIface.alloc = alloc
    done = 0
    try:
        gpu = Gpu(False)
        for value in range(1, 9):
            gpu.release(gpu.r.va, value)
            if gpu.r[0] != value:
                break
            done += 1
    except Exception as error:
        return {"opens": bool(done), "submissions": done, "error": type(error).__name__}
    return {"opens": True, "submissions": done}


# ---- running


def outcomes_of(names: Sequence[str], cached: bool, **more: str) -> dict[str, Any]:
    """Run cases one after the other in a process of their own: their outcomes, or what went wrong."""
    here = str(Path(__file__).resolve().parent)
    path = os.pathsep.join(filter(None, [str(ROOT), here, os.environ.get("PYTHONPATH", "")]))
    environment = {**os.environ, "DEV": "NV", "PARALLEL": "0", "PYTHONPATH": path, **more}
    environment.setdefault("HCQDEV_WAIT_TIMEOUT_MS", "5000")
    command = [sys.executable, __file__, "--inside", "cached" if cached else "volatile", *names]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIME_LIMIT_S * len(names), check=False
        )
        said, wrong = done.stdout, f"failed: {done.stderr[-500:]}"
    except subprocess.TimeoutExpired as error:
        said, wrong = (error.stdout or b"").decode(), f"no end after {TIME_LIMIT_S} s"
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return dict.fromkeys(names, wrong) | {row["case"]: row["outcome"] for row in found}


def matrix(names: list[str], **more: str) -> dict[str, dict[str, Any]]:
    """Outcomes by case, volatile and cached; a process for each, as some end the channel."""
    found = {}
    for name in names or [*CASES, RING]:
        found[name] = {kind: outcomes_of([name], kind == "cached", **more)[name] for kind in ("volatile", "cached")}
        print(f"{name:24s} {json.dumps(found[name])}", flush=True)
    return found


def settled(outcomes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Outcomes with the first possible answer in place of any that is possible."""
    found: dict[str, dict[str, Any]] = json.loads(json.dumps(outcomes))
    for (name, kind, how), possible in VARIES.items():
        if found[name][kind][how] in possible:
            found[name][kind][how] = possible[0]
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        sys.path.insert(0, str(ROOT))
        import tegrad  # noqa: F401  (activates)

        if sys.argv[3:] == [RING]:
            print("\n" + json.dumps({"case": RING, "outcome": with_ring(sys.argv[2] == "cached")}), flush=True)
            os._exit(0)
        for inside in sys.argv[3:]:
            print(
                "\n" + json.dumps({"case": inside, "outcome": CASES[inside](Gpu(sys.argv[2] == "cached"))}), flush=True
            )
        os._exit(0)  # some cases leave a channel that waits for ever
    arguments_ = argparse.ArgumentParser(description=__doc__)
    arguments_.add_argument("case", nargs="*", help="cases to run; all of them if left out")
    arguments_.add_argument("--record", type=Path, help="keep the outcomes as JSON here")
    options = arguments_.parse_args()
    sys.path.insert(0, str(ROOT))
    outcomes = matrix(options.case)
    if options.record is not None:
        from tegrad.bench.record import machine, now, versions

        about = {"date": now(), "machine": machine(), "versions": versions()}
        about["command"] = "python tests/hardware/l2_matrix.py"
        options.record.write_text(json.dumps({**about, "cases": outcomes}, indent=1) + "\n")
