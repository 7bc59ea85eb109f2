"""Sections 6.4 to 6.8: method headers, host methods, compute launches, QMDs, the copy class.

Rules that end in a dead channel are in s7_faults, but for what a header or a host method does.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from tegrad.conformance.engine import (
    M32,
    PLAIN_RELEASE,
    QMD_AT,
    QUIET_S,
    RELEASE,
    Block,
    Gpu,
    Queue,
    becomes,
    compute,
    host,
)
from tegrad.conformance.rig import Rig
from tegrad.conformance.rule import rule, rules
from tegrad.conformance.s5_channels import semaphore
from tegrad.conformance.waiter import Waiter
from tegrad.hw import ptxsection
from tegrad.hw.classes import ComputeMethod as C
from tegrad.hw.classes import CopyMethod
from tegrad.hw.classes import HostMethod as H
from tegrad.hw.gpfifo import MethodOp, Subchannel, Userd, method_header

WIDE, STAMPED, WAITING = 1 << 24, 1 << 25, 1 << 20
"""Bits of SEM_EXECUTE: 64-bit payload, timestamp, wait for idle before a release."""
OLD = 0xFFFFFFFFFFFFFFFF


def after_the_grid(
    rig: Rig,
    build: Callable[[Queue, Block], object],
    what: str,
    expected: int,
    read: Callable[[Queue, Block], int] = lambda queue, out: out.u32(),
) -> None:
    """What is queued after a grid that still runs happens when that is over, and not before. 0 is before."""
    gpu, queue, gate = compute(rig)
    out = gpu.memory()
    queue.launch(gpu.kernel("spin", gate.va))
    build(queue, out)
    queue.submit()
    rig.check(not rig.wait(lambda: read(queue, out), QUIET_S), f"{what} waits for the grid", "it did not")
    gate.put32(1)
    queue.done()
    becomes(rig, f"{what} after the grid", expected, lambda: read(queue, out))


def with_a_release(rig: Rig, before: int, expected: int, read: Callable[[Block], int], **fields: int) -> Block:
    """What a QMD's release 0 with these fields makes of a 64-bit word."""
    gpu, queue, out = compute(rig)
    other = gpu.memory()
    out.cpu.write(struct.pack("<QQ", before, OLD))
    queue.launch(gpu.kernel("store", other.va, 1, **release_fields(0, out.va, **fields))).done()
    becomes(rig, "the semaphore is", expected, lambda: read(out))
    return out


def woken(queue: Queue, gate: Block, out: Block) -> None:
    """CHANNEL_WAIT for 1 in `out` returns when the gate opens, not only at the end of its time."""
    waiter = Waiter(queue.rig, queue.channel.fd, semaphore(out.buffer.fd, payload=1), times=2)
    gate.put32(1)
    queue.rig.equal("WAIT, which the interrupt wakes, returns", "success", waiter.result())


# ---- 6.4 method headers ----------------------------------------------------------------------------------------------


def payload_rule(rig: Rig, build: Callable[[Queue], object], expected: int) -> None:
    """What the host's 32-bit payload register holds after some headers, as a release shows it."""
    queue, out = host(rig)
    out.put64(OLD)
    queue.host(H.SEM_ADDR_LO, out.va & M32, out.va >> 32)
    build(queue)
    queue.host(H.SEM_EXECUTE, PLAIN_RELEASE).done()
    rig.equal("the payload is", expected, out.u32())


@rule("6.4", "INC: every word goes to the method 4 bytes after the one before")
def inc(rig: Rig) -> None:
    payload_rule(rig, lambda q: q.method(3, H.SEM_PAYLOAD_LO, 0x11, 0x22), 0x11)


@rule("6.4", "NON-INC: every word goes to the same method")
def non_inc(rig: Rig) -> None:
    payload_rule(rig, lambda q: q.host(H.SEM_PAYLOAD_LO, 0x11, 0x22, op=MethodOp.NON_INC), 0x22)


@rule("6.4", "ONE-INC: the first word goes to the method, all others to the one after it")
def one_inc(rig: Rig) -> None:
    queue, out = host(rig)
    queue.host(H.SEM_ADDR_LO, out.va & M32, out.va >> 32)
    queue.host(H.SEM_PAYLOAD_LO, 0x11, 0x22, 0x33, op=MethodOp.ONE_INC)
    queue.host(H.SEM_EXECUTE, PLAIN_RELEASE | WIDE).done()
    rig.equal("payload low and high are", 0x33_0000_0011, out.u64())


@rule("6.4", "IMMD: the header itself holds 13 bits of data, and no word follows")
def immediate(rig: Rig) -> None:
    header = method_header(MethodOp.IMMEDIATE, 0, H.SEM_PAYLOAD_LO, 0x1ABC)
    payload_rule(rig, lambda q: q.raw(header), 0x1ABC)


@rule("6.4", "END_SEGMENT: what follows in the segment is not executed")
def end_segment(rig: Rig) -> None:
    queue, out = host(rig)
    queue.raw(method_header(MethodOp.END_SEGMENT, 0, 0, 0)).release(out.va, 1, PLAIN_RELEASE).submit()
    queue.done()
    rig.equal("the semaphore stays", 0, out.u32())


@rule("6.4", "a zero word is a NOP")
def zero_word(rig: Rig) -> None:
    payload_rule(rig, lambda q: q.raw(0, 0).host(H.SEM_PAYLOAD_LO, 5).raw(0), 5)


@rule("6.4", "op 0 with tert op 1, 2 or 3 is a subdevice mask: no method")
def subdevice_mask(rig: Rig) -> None:
    payload_rule(rig, lambda q: q.host(H.SEM_PAYLOAD_LO, 6).raw(*(tert << 16 | 1 << 4 for tert in (1, 2, 3))), 6)


@rule("6.4", "a count of 0 is a no-op")
def count_zero(rig: Rig) -> None:
    header = method_header(MethodOp.INC, 0, H.SEM_PAYLOAD_LO, 0)
    payload_rule(rig, lambda q: q.host(H.SEM_PAYLOAD_LO, 7).raw(header), 7)


@rules("6.4", "op {op} does not exist: PBENTRY", "op", (2, 6), name="op-{op}", hazardous=True)
def bad_op(rig: Rig, op: int) -> None:
    Gpu(rig).queue(contexts=()).raw(op << 29 | 1 << 16 | H.NOP >> 2, 0).interrupted("pbentry")


@rule("6.4", "host methods (below 0x100) ignore the subchannel, software ones too")
def host_methods_ignore_the_subchannel(rig: Rig) -> None:
    payload_rule(rig, lambda q: q.method(7, H.SEM_PAYLOAD_LO, 8), 8)


@rules(
    "6.4",
    "subchannel {subchannel} is for software methods: DEVICE interrupt",
    "subchannel",
    (5, 6, 7),
    name="subchannel-{subchannel}",
    hazardous=True,
)
def software(rig: Rig, subchannel: int) -> None:
    Gpu(rig).queue().method(subchannel, C.NO_OPERATION, 0).interrupted("device")


@rule("6.4", "a method on a subchannel without SET_OBJECT is a class error", hazardous=True)
def method_before_set_object(rig: Rig) -> None:
    Gpu(rig).queue().cls(C.NO_OPERATION, 0).dies(13)


@rule("6.4", "switching from compute to copy waits until the grid is over")
def switching_waits(rig: Rig) -> None:
    def build(queue: Queue, out: Block) -> None:
        queue.gpu.scratch.put32(5)
        queue.copy(queue.gpu.scratch.va, out.va, 4)

    after_the_grid(rig, build, "the copy", 5)


# ---- 6.5 host methods ------------------------------------------------------------------------------------------------


@rule("6.5", "NOP, YIELD, CLEAR_FAULTED and the operands of MEM_OP are accepted")
def harmless_methods(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=())
    queue.host(H.NOP, 1).host(H.YIELD, 0).host(H.CLEAR_FAULTED, 0).host(H.MEM_OP_A, 0, 0, 0).done()


@rule("6.5", "YIELD of the TSG (3) is accepted")
def yield_tsg(rig: Rig) -> None:
    Gpu(rig).queue(contexts=()).host(H.YIELD, 3).done()


@rules(
    "6.5",
    "MEM_OP {op:#x}, {what}, is accepted",
    "op what",
    [(5, "a membar"), (0xE, "L2 sysmem invalidate"), (0x10, "L2 flush dirty")],
    name="mem-op-{op:#x}",
)
def mem_op(rig: Rig, op: int) -> None:
    Gpu(rig).queue(contexts=()).host(H.MEM_OP_A, 0, 0, 0, op << 27).done()


@rule("6.5", "MEM_OP 9, TLB invalidate, is privileged: the channel dies", hazardous=True)
def tlb_invalidate(rig: Rig) -> None:
    Gpu(rig).queue(contexts=()).host(H.MEM_OP_A, 0, 0, 0, 9 << 27).dies(32)


@rule("6.5", "the ILLEGAL method is an error of the PBDMA", hazardous=True)
def illegal(rig: Rig) -> None:
    Gpu(rig).queue(contexts=()).host(H.ILLEGAL, 0).interrupted("method")


@rule("6.5", "a host method that does not exist is an error of the PBDMA", hazardous=True)
def no_such_host_method(rig: Rig) -> None:
    Gpu(rig).queue(contexts=()).host(0xF8, 0).interrupted("method")


@rule("6.5", "SET_REFERENCE stores to USERD's Ref")
def reference(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=()).host(H.SET_REFERENCE, 0xCAFE)
    queue.done()
    becomes(rig, "Ref is", 0xCAFE, lambda: queue.userd.u32(Userd.REF))


@rule("6.5", "SET_REFERENCE waits until the grid is over")
def reference_waits(rig: Rig) -> None:
    after_the_grid(
        rig, lambda q, out: q.host(H.SET_REFERENCE, 3), "Ref", 3, lambda queue, out: queue.userd.u32(Userd.REF)
    )


@rule("6.5", "WFI waits until the grid is over")
def wfi(rig: Rig) -> None:
    after_the_grid(rig, lambda q, out: q.host(H.WFI, 0).release(out.va, 1, PLAIN_RELEASE), "the host", 1)


@rule("6.5", "SEM_EXECUTE bit 20 makes a release wait until the grid is over")
def release_wfi(rig: Rig) -> None:
    after_the_grid(rig, lambda q, out: q.release(out.va, 1, PLAIN_RELEASE | WAITING), "the release", 1)


@rule("6.5", "without SEM_EXECUTE bit 20 a release does not wait for the grid")
def release_without_wfi(rig: Rig) -> None:
    gpu, queue, gate = compute(rig)
    out = gpu.memory()
    queue.launch(gpu.kernel("spin", gate.va)).release(out.va, 1, PLAIN_RELEASE).submit()
    seen = rig.wait(lambda: out.u32() == 1)
    gate.put32(1)
    rig.check(seen, "the release comes while the grid runs", "it did not")


def released(rig: Rig, execute: int) -> bytes:
    """What a release of 0x11_0000_0005 stores over 16 bytes of ones."""
    queue, out = host(rig)
    out.cpu.write(b"\xff" * 16)
    queue.release(out.va, 0x11_0000_0005, execute).done()
    return out.cpu.read(0, 16)


@rule("6.5", "a plain release stores the lower 32 bits of the payload and nothing else")
def release_32(rig: Rig) -> None:
    rig.equal("the bytes are", struct.pack("<I", 5) + b"\xff" * 12, released(rig, PLAIN_RELEASE))


@rule("6.5", "with bit 24 a release stores 64 bits")
def release_64(rig: Rig) -> None:
    rig.equal("the bytes are", struct.pack("<Q", 0x11_0000_0005) + b"\xff" * 8, released(rig, PLAIN_RELEASE | WIDE))


@rule("6.5", "with bit 25 a release stores 16 bytes: payload with a zero upper half, and nanoseconds at 8")
def release_stamped(rig: Rig) -> None:
    payload, stamp = struct.unpack("<QQ", released(rig, PLAIN_RELEASE | STAMPED))
    rig.equal("the payload is", 5, payload)
    rig.check(0 < stamp < OLD, "a timestamp", stamp)


@rule("6.5", "the field's sequence stores a 64-bit payload and a timestamp that rises")
def field_sequence(rig: Rig) -> None:
    queue, out = host(rig)
    queue.release(out.va, 1 << 40, RELEASE).release(out.va + 16, 2, RELEASE).done()
    rig.equal("payloads", (1 << 40, 2), (out.u64(), out.u64(16)))
    rig.check(0 < out.u64(8) <= out.u64(24), "timestamps that rise", (out.u64(8), out.u64(24)))


@rule("6.5", "the legacy SEMAPHORE A to D release")
def legacy_semaphore(rig: Rig) -> None:
    queue, out = host(rig)
    queue.host(H.SEMAPHOREA, out.va >> 32, out.va & M32, 9, 2 | 1 << 24).done()
    rig.equal("the semaphore is", 9, out.u32())


ACQUIRES = (
    ("equal", 0, 7, 6, 7),
    ("at-least-unsigned", 2, 7, 6, 0x80000000),
    ("circular", 3, 7, 0x80000010, 8),
    ("and", 4, 0x30, 0x0F, 0x10),
    ("nor", 5, 0xF0F0F0F0, 0x0F0F0F0F, 0x0F0F0F0E),
)
"""The operation, its payload, a value that does not satisfy it, one that does."""


@rules(
    "6.5",
    "acquire operation {op} ({name}): {no:#x} blocks at {payload:#x}, {yes:#x} lets go",
    "name op payload no yes",
    ACQUIRES,
)
def acquire(rig: Rig, op: int, payload: int, no: int, yes: int) -> None:
    queue, semaphore = host(rig)
    semaphore.put32(no)
    queue.acquire(semaphore.va, payload, op).fenced().waits("the acquire blocks")
    semaphore.put32(yes)
    rig.eventually(lambda: queue.over, "the acquire lets go")


@rule("6.5", "an acquire on a semaphore polls: a store of the CPU lets it go, without a doorbell, however late")
def acquire_polls(rig: Rig) -> None:
    queue, semaphore = host(rig)
    queue.acquire(semaphore.va, 1, 0).fenced()
    rig.check(not rig.wait(lambda: queue.over or queue.dead, 0.5), "it waits without an error", "it did not")
    semaphore.put32(1)
    rig.eventually(lambda: queue.over, "the acquire lets go")


@rule("6.5", "an acquire of 32 bits needs an alignment of 4 only")
def acquire_alignment(rig: Rig) -> None:
    queue, semaphore = host(rig)
    semaphore.put32(1, 4)
    queue.acquire(semaphore.va + 4, 1, 0).done("the acquire at a multiple of 4 lets go")


REDUCTIONS = (
    ("imin", 0, 0, 5, 0xFFFFFFFE, 0xFFFFFFFE),
    ("imin-unsigned", 0, 1, 5, 0xFFFFFFFE, 5),
    ("imax", 1, 0, 5, 0xFFFFFFFE, 5),
    ("ixor", 2, 1, 5, 6, 3),
    ("iand", 3, 1, 5, 6, 4),
    ("ior", 4, 1, 5, 6, 7),
    ("iadd", 5, 1, 5, 6, 11),
    ("inc", 6, 1, 5, 6, 6),
    ("dec", 7, 1, 5, 6, 4),
)
"""The reduction, whether it is unsigned, the value before, the payload, the value after."""


@rules(
    "6.5",
    "reduction {op} ({name}): {before:#x} with {payload:#x} gives {after:#x}",
    "name op unsigned before payload after",
    REDUCTIONS,
    name="reduction-{name}",
)
def reduction(rig: Rig, op: int, unsigned: int, before: int, payload: int, after: int) -> None:
    queue, semaphore = host(rig)
    semaphore.put32(before)
    queue.release(semaphore.va, payload, 6 | op << 27 | unsigned << 31).done()
    rig.equal("the semaphore is", after, semaphore.u32())


@rules(
    "6.5",
    "{what}: SEMAPHORE interrupt, which the driver only logs",
    "name what offset execute",
    [
        ("wide-release-alignment", "a 64-bit release at a multiple of 4", 4, PLAIN_RELEASE | WIDE),
        ("stamped-release-alignment", "a release with a timestamp at a multiple of 8", 8, PLAIN_RELEASE | STAMPED),
        ("signed-inc", "a signed INC reduction", 0, 6 | 6 << 27),
        ("no-such-semaphore-operation", "operation 7", 0, 7),
    ],
    hazardous=True,
)
def semaphore_error(rig: Rig, offset: int, execute: int) -> None:
    queue, out = host(rig)
    queue.release(out.va + offset, 1, execute).hangs("semaphore")


@rule("6.5", "NON_STALL_INT wakes CHANNEL_WAIT")
def non_stall_interrupt(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, gate, out = gpu.queue(contexts=()), gpu.memory(), gpu.memory()
    queue.acquire(gate.va, 1, 0).release(out.va, 1, PLAIN_RELEASE).host(H.NON_STALL_INTERRUPT, 0).submit()
    woken(queue, gate, out)


# ---- 6.6 compute class, launch ---------------------------------------------------------------------------------------


def launched(rig: Rig, action: int) -> int:
    """What a kernel that stores 0x77 has stored, launched by this action."""
    gpu, queue, out = compute(rig)
    queue.launch(gpu.kernel("store", out.va, 0x77), action).done()
    return out.u32()


@rules(
    "6.6",
    "SEND_SIGNALING_PCAS2_B {action:#x} launches the QMD of SEND_PCAS_A",
    "action",
    (2, 3, 9, 0xA),
    name="action-{action:#x}",
)
def schedules(rig: Rig, action: int) -> None:
    rig.equal("the kernel's store", 0x77, launched(rig, action))


@rules(
    "6.6",
    "SEND_SIGNALING_PCAS2_B {action}, {what}, launches nothing",
    "action what",
    [(1, "invalidate"), (8, "prefetch")],
    name="action-{action}",
)
def silent(rig: Rig, action: int) -> None:
    rig.equal("nothing is stored", 0, launched(rig, action))


@rule("6.6", "SEND_SIGNALING_PCAS_B, of the class before Ampere's, launches nothing and is no error")
def pcas_b(rig: Rig) -> None:
    gpu, queue, out = compute(rig)
    queue.cls(C.SEND_PCAS_A, gpu.kernel("store", out.va, 0x77) >> 8).cls(C.SEND_SIGNALING_PCAS_B, 3).done()
    rig.equal("nothing is stored", 0, out.u32())


@rule("6.6", "windows 16 MiB apart, below 2^32, are apart enough")
def near_windows(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, out = gpu.compute().windows(0xFE000000, 0xFF000000), gpu.memory()
    queue.launch(gpu.kernel("store", out.va, 0x77)).done()
    rig.equal("the kernel's store", 0x77, out.u32())


@rule("6.6", "PCAS2 action 7 launches a QMD when its dependence counter comes down to zero")
def decrement_dependence(rig: Rig) -> None:
    gpu, queue, out = compute(rig)
    qmd = gpu.kernel("store", out.va, 5, dependence_counter=2)
    queue.launch(qmd, 7).done()
    rig.equal("with one to go nothing is stored", 0, out.u32())
    queue.launch(qmd, 7).done()
    rig.equal("the kernel's store", 5, out.u32())


@rule("6.6", "PCAS2 action 0xC adds to the dependence counter")
def increment_dependence(rig: Rig) -> None:
    gpu, queue, out = compute(rig)
    qmd = gpu.kernel("store", out.va, 5, dependence_counter=1)
    queue.launch(qmd, 0xC).launch(qmd, 7).done()
    rig.equal("with one to go nothing is stored", 0, out.u32())
    queue.launch(qmd, 7).done()
    rig.equal("the kernel's store", 5, out.u32())


@rule("6.6", "WAIT_FOR_IDLE waits until the grid is over")
def wait_for_idle(rig: Rig) -> None:
    after_the_grid(rig, lambda q, out: q.cls(C.WAIT_FOR_IDLE, 0).release(out.va, 1, PLAIN_RELEASE), "the channel", 1)


def constants_changed(rig: Rig, launch: Callable[[Queue, int], object], **fields: Any) -> None:
    """A launch of a kernel whose constants have changed since its last one sees them."""
    gpu, queue, out = compute(rig)
    program = gpu.program("store")
    bank = gpu.bank(program, out.va, 1)
    kept: dict[str, Any] = {"constant_buffer_invalidate_0": 0}
    queue.launch(gpu.qmd(program, bank, **kept)).done()
    gpu.arguments(bank, program, out.va, 2)
    launch(queue, gpu.qmd(program, bank, **(kept | fields)))
    queue.done()
    rig.equal("the kernel's store", 2, out.u32())


@rules(
    "6.6",
    "{method.name} 0x1011 makes launches see constants that changed",
    "name method",
    [("constants-wfi", C.INVALIDATE_SHADER_CACHES), ("constants-no-wfi", C.INVALIDATE_SHADER_CACHES_NO_WFI)],
)
def constants(rig: Rig, method: C) -> None:
    constants_changed(rig, lambda queue, qmd: queue.cls(method, 0x1011).launch(qmd))


def replaced_program(rig: Rig, launch: Callable[[Gpu, Queue, int], object], **fields: Any) -> None:
    """Another program where one has run: the second runs once the instruction caches are invalidated."""
    gpu, queue, out = compute(rig)
    first, second = gpu.program("store"), gpu.program("add")
    bank = gpu.bank(first, out.va, 40)
    registers = max(first.registers, second.registers, 16)
    queue.launch(gpu.qmd(first, bank, register_count_v=registers)).done()
    size = min(first.image.cpu.size, second.image.cpu.size)
    image = bytearray(second.image.cpu.read(0, size))
    if (notes := image.find(ptxsection.MAGIC)) >= 0:
        struct.pack_into("<Q", image, notes + ptxsection.ENTRY_SLOT, first.va)
    first.image.cpu.write(bytes(image))
    launch(gpu, queue, gpu.qmd(first, bank, register_count_v=registers, **fields))
    queue.done()
    rig.equal("the second program adds", 80, out.u32())


@rule("6.6", "INVALIDATE_SHADER_CACHES bit 0 makes launches fetch the instructions that are there now")
def instructions(rig: Rig) -> None:
    replaced_program(rig, lambda gpu, queue, qmd: queue.cls(C.INVALIDATE_SHADER_CACHES, 1).launch(qmd))


@rule("6.6", "REPORT_SEMAPHORE releases after the grid")
def report_semaphore(rig: Rig) -> None:
    def build(queue: Queue, out: Block) -> None:
        queue.cls(C.SET_REPORT_SEMAPHORE_PAYLOAD_LOWER, 9, 0, out.va & M32, out.va >> 32)
        queue.cls(C.REPORT_SEMAPHORE_EXECUTE, 1 << 3)

    after_the_grid(rig, build, "the report", 9)


@rule("6.6", "the legacy report semaphore (0x1B00) releases")
def legacy_report(rig: Rig) -> None:
    _, queue, out = compute(rig)
    queue.cls(C.SET_REPORT_SEMAPHORE_A, out.va >> 32, out.va & M32, 8, 1 << 28).done()
    rig.equal("the semaphore is", 8, out.u32())


@rule("6.6", "inline data go to memory, line by line with a pitch")
def inline_data(rig: Rig) -> None:
    _, queue, out = compute(rig)
    queue.cls(C.LINE_LENGTH_IN, 8, 2, out.va >> 32, out.va & M32, 64)
    queue.cls(C.LAUNCH_DMA, 1 | 1 << 4)
    queue.method(Subchannel.COMPUTE, C.LOAD_INLINE_DATA, 1, 2, 3, 4, op=MethodOp.NON_INC).done()
    becomes(rig, "the second line, 64 bytes after the first", 4 << 32 | 3, lambda: out.u64(64))
    rig.equal("the first line", 2 << 32 | 1, out.u64())


@rule("6.6", "an inline QMD is stored at its address and can be launched (inferred)")
def inline_qmd(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, out, place, program = gpu.compute(), gpu.memory(), gpu.memory(), gpu.program("store")
    bank = gpu.bank(program, out.va, 6)
    gpu.qmd(program, bank)
    words = struct.unpack("<64I", bank.cpu.read(QMD_AT, 256))
    queue.cls(C.SET_INLINE_QMD_ADDRESS_A, place.va >> 40, place.va >> 8 & M32)
    queue.cls(C.LOAD_INLINE_QMD_DATA, *words).launch(place.va, 2).done()
    rig.equal("the kernel's store", 6, out.u32())


# ---- 6.7 QMD ---------------------------------------------------------------------------------------------------------


@rule("6.7", "grid x, y and z are the CTAs that run, block x, y and z the threads of each")
def dimensions(rig: Rig) -> None:
    gpu, queue, out = compute(rig)
    queue.launch(gpu.kernel("count", out.va, grid=(5, 3, 2), block=(8, 3, 2))).done()
    rig.equal("threads that ran", 5 * 3 * 2 * 8 * 3 * 2, out.u32())


@rule("6.7", "machine code reads its dimensions from words 0 to 5 of constant bank 0")
def dimension_words(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, out, program = gpu.compute(), gpu.memory(), gpu.program("dims")
    bank = gpu.bank(program, out.va)
    qmd = gpu.qmd(program, bank)
    bank.cpu.write(struct.pack("<6I", 7, 6, 5, 4, 3, 2))
    queue.launch(qmd).done()
    rig.equal("what the kernel read", (7, 6, 5, 4, 3, 2), tuple(out.u32(4 * i) for i in range(1, 7)))


@rule("6.7", "kernel parameters begin at byte 0x160 of constant bank 0")
def parameter_base(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, out, program = gpu.compute(), gpu.memory(), gpu.program("store")
    rig.equal("the compiler puts them at", 0x160, program.param_base)
    bank = gpu.bank(program, 0, 0)
    bank.cpu.write(struct.pack("<QI", out.va, 3), 0x160)
    queue.launch(gpu.qmd(program, bank)).done()
    rig.equal("the kernel's store", 3, out.u32())


@rules(
    "6.7",
    "the QMD's constant {what} invalidate makes this launch see constants that changed",
    "name what field",
    [
        ("bank-invalidate", "buffer", "constant_buffer_invalidate_0"),
        ("cache-invalidate", "cache", "invalidate_shader_constant_cache"),
    ],
)
def qmd_invalidate(rig: Rig, field: str) -> None:
    constants_changed(rig, lambda queue, qmd: queue.launch(qmd), **{field: 1})


@rule("6.7", "the QMD's instruction cache invalidate makes this launch fetch the instructions that are there now")
def instruction_invalidate(rig: Rig) -> None:
    replaced_program(rig, lambda gpu, queue, qmd: queue.launch(qmd), invalidate_instruction_cache=1)


def release_fields(i: int, va: int, payload: int, **more: int) -> dict[str, Any]:
    """QMD fields of release `i`."""
    fields = {"enable": 1, "address_lower": va & M32, "address_upper": va >> 32}
    fields |= {"payload_lower": payload & M32, "payload_upper": payload >> 32} | more
    return {f"release{i}_{name}": value for name, value in fields.items()}


@rules("6.7", "release {i} of a QMD stores its payload when the grid is over", "i", range(3), name="release-{i}")
def release(rig: Rig, i: int) -> None:
    gpu, queue, gate = compute(rig)
    out = gpu.memory()
    queue.launch(gpu.kernel("spin", gate.va, **release_fields(i, out.va, 5, structure_size=1))).submit()
    rig.check(not rig.wait(lambda: out.u32(), QUIET_S), "the release waits for the grid", "it did not")
    gate.put32(1)
    queue.done()
    becomes(rig, "the payload", 5, out.u32)


@rules(
    "6.7",
    "a QMD release of structure size {size} is {what}",
    "name what size expected stamped",
    [
        ("release-four-words", "four words", 0, 5, True),
        ("release-one-word", "one word", 1, M32 << 32 | 5, False),
        ("release-two-words", "two words", 2, 5, False),
    ],
)
def structure(rig: Rig, size: int, expected: int, stamped: bool) -> None:
    out = with_a_release(rig, OLD, expected, lambda out: out.u64(), payload=5, structure_size=size)
    rig.check((out.u64(8) != OLD) is stamped, "a timestamp" if stamped else "no timestamp", out.u64(8))


@rule("6.7", "a QMD release with payload64b stores 64 bits")
def release_payload_64(rig: Rig) -> None:
    wide = 0x3_0000_0005
    with_a_release(rig, OLD, wide, lambda out: out.u64(), payload=wide, structure_size=2, payload64b=1)


QMD_REDUCTIONS = (
    ("add", 0, 0, 7, 5, 12),
    ("min", 1, 0, 7, 5, 5),
    ("max", 2, 0, 5, 7, 7),
    ("max-signed", 2, 1, 0xFFFFFFFF, 5, 5),
    ("inc", 3, 0, 7, 9, 8),
    ("dec", 4, 0, 7, 9, 6),
    ("and", 5, 0, 7, 5, 5),
    ("or", 6, 0, 8, 5, 13),
    ("xor", 7, 0, 7, 5, 2),
)
"""The reduction, its format, the value before, the payload, the value after."""


@rules(
    "6.7",
    "QMD reduction {op} ({name}): {before:#x} with {payload:#x} gives {after:#x}",
    "name op form before payload after",
    QMD_REDUCTIONS,
    name="reduce-{name}",
)
def qmd_reduction(rig: Rig, op: int, form: int, before: int, payload: int, after: int) -> None:
    fields = {"structure_size": 1, "reduction_enable": 1, "reduction_op": op, "reduction_format": form}
    with_a_release(rig, before, after, lambda out: out.u32(), payload=payload, **fields)


@rule("6.7", "dependent QMD 0 is launched when the grid is over (action 1)")
def dependent(rig: Rig) -> None:
    gpu, queue, gate = compute(rig)
    out = gpu.memory()
    second = gpu.kernel("store", out.va, 4)
    fields: dict[str, Any] = {"dependent_qmd0_enable": 1, "dependent_qmd0_action": 1}
    queue.launch(gpu.kernel("spin", gate.va, dependent_qmd0_pointer=second >> 8, **fields)).submit()
    rig.check(not rig.wait(lambda: out.u32(), QUIET_S), "the dependent waits", "it did not")
    gate.put32(1)
    queue.done()
    becomes(rig, "the dependent's store", 4, out.u32)


@rule("6.7", "a dependent QMD with action 4 runs when its dependence counter comes down to zero")
def dependent_counter(rig: Rig) -> None:
    gpu, queue, out = compute(rig)
    other = gpu.memory()
    last = gpu.kernel("store", out.va, 4, dependence_counter=2)
    fields = {"dependent_qmd0_enable": 1, "dependent_qmd0_action": 4, "dependent_qmd0_pointer": last >> 8}
    first = gpu.kernel("store", other.va, 1, **fields)
    queue.launch(first).done()
    rig.equal("with one to go nothing is stored", 0, out.u32())
    queue.launch(first).done()
    becomes(rig, "the dependent's store", 4, out.u32)


@rule("6.7", "static shared memory counts on top of the 0x400 bytes of the system")
def shared_memory(rig: Rig) -> None:
    gpu, queue, out = compute(rig)
    queue.launch(gpu.kernel("shared", out.va, 1, block=(256, 1, 1))).done()
    rig.equal("what went through shared memory", (256, 1), (out.u32(), out.u32(255 * 4)))


@rule("6.7", "a kernel that needs no shared memory may have a shared size of 0")
def no_shared_memory(rig: Rig) -> None:
    gpu = Gpu(rig)
    out = gpu.memory()
    gpu.compute().launch(gpu.kernel("store", out.va, 0x77, shared_memory_size=0)).done()
    rig.equal("the kernel's store", 0x77, out.u32())


@rule("6.7", "a release's address has 40 bits: 32 and 8")
def release_address(rig: Rig) -> None:
    gpu = Gpu(rig)
    high = 0xFC00000000
    rig.reserve(gpu.vm, 1 << 20, high)
    queue, out, other = gpu.compute(), gpu.memory(fixed=high), gpu.memory()
    queue.launch(gpu.kernel("store", other.va, 1, **release_fields(0, out.va, 5, structure_size=1))).done()
    becomes(rig, "the semaphore above 2^39", 5, out.u32)


# ---- 6.8 the copy class ----------------------------------------------------------------------------------------------

ONE_WORD, STAMP_RELEASE, FLUSH, MULTI_LINE, REMAP = 1 << 3, 2 << 3, 1 << 2, 1 << 9, 1 << 10


@rules(
    "6.8",
    "LAUNCH_DMA {launch:#x} copies a line",
    "name launch",
    [("copy-non-pipelined", 0x182), ("copy-pipelined", 0x181)],
)
def linear(rig: Rig, launch: int) -> None:
    gpu, queue, src = compute(rig)
    dst, data = gpu.memory(), bytes(range(251)) * 3
    src.cpu.write(data, 1)
    queue.copy(src.va + 1, dst.va + 3, len(data), launch).done()
    rig.equal("the bytes arrive", True, dst.cpu.read(0, len(data) + 6) == bytes(3) + data + bytes(3))


def lines(rig: Rig, launch: int) -> list[bytes]:
    """Three lines of 4 bytes, 16 apart at the source and 8 apart where they go: what arrives there."""
    gpu, queue, src = compute(rig)
    dst = gpu.memory()
    for i in range(3):
        src.cpu.write(bytes([65 + i]) * 4, 16 * i)
    queue.method(Subchannel.COPY, CopyMethod.PITCH_IN, 16, 8)
    queue.method(Subchannel.COPY, CopyMethod.LINE_COUNT, 3)
    queue.copy(src.va, dst.va, 4, launch).done()
    return [dst.cpu.read(8 * i, 4) for i in range(3)]


@rule("6.8", "with multi-line (bit 9) LINE_COUNT lines are copied, pitches apart")
def multi_line(rig: Rig) -> None:
    rig.equal("the lines", [b"AAAA", b"BBBB", b"CCCC"], lines(rig, 0x182 | MULTI_LINE))


@rule("6.8", "without multi-line only one line is copied")
def single_line(rig: Rig) -> None:
    rig.equal("the lines", [b"AAAA", bytes(4), bytes(4)], lines(rig, 0x182))


@rule("6.8", "a remap with constant components fills")
def fill(rig: Rig) -> None:
    gpu, queue, dst = compute(rig)
    queue.method(Subchannel.COPY, CopyMethod.SET_REMAP_CONST_A, 0x01020304)
    queue.method(Subchannel.COPY, CopyMethod.SET_REMAP_COMPONENTS, 4 | 3 << 16)
    queue.copy(gpu.scratch.va, dst.va, 5, 0x182 | REMAP).done()
    rig.equal("five words", struct.pack("<5I", *[0x01020304] * 5) + bytes(4), dst.cpu.read(0, 24))


def copy_semaphore(rig: Rig, launch: int, *, before: int = OLD) -> bytes:
    """What the copy engine's semaphore of 0x7_0000_0005 stores over 16 bytes."""
    _, queue, out = compute(rig)
    out.cpu.write(struct.pack("<QQ", before, OLD))
    queue.method(Subchannel.COPY, CopyMethod.SET_SEMAPHORE_A, out.va >> 32, out.va & M32, 5)
    queue.method(Subchannel.COPY, CopyMethod.SET_SEMAPHORE_PAYLOAD_UPPER, 7)
    queue.method(Subchannel.COPY, CopyMethod.LAUNCH_DMA, launch | FLUSH).done()
    rig.wait(lambda: out.u64() != before)
    return out.cpu.read(0, 16)


@rule("6.8", "semaphore type 1 stores one word")
def copy_semaphore_one_word(rig: Rig) -> None:
    rig.equal("the bytes", struct.pack("<I", 5) + b"\xff" * 12, copy_semaphore(rig, ONE_WORD))


@rule("6.8", "semaphore type 2 stores payload and timestamp")
def copy_semaphore_stamped(rig: Rig) -> None:
    payload, stamp = struct.unpack("<QQ", copy_semaphore(rig, STAMP_RELEASE))
    rig.equal("the payload", 5, payload)
    rig.check(0 < stamp < OLD, "a timestamp", stamp)


@rule("6.8", "bit 27: the semaphore's payload has 64 bits")
def copy_semaphore_64(rig: Rig) -> None:
    rig.equal("the bytes", struct.pack("<Q", 0x7_0000_0005) + b"\xff" * 8, copy_semaphore(rig, ONE_WORD | 1 << 27))


@rule("6.8", "bit 19: the semaphore is reduced (5: add)")
def copy_semaphore_reduction(rig: Rig) -> None:
    found = copy_semaphore(rig, ONE_WORD | 1 << 19 | 5 << 14 | 1 << 18, before=40)
    rig.equal("40 plus 5", 45, struct.unpack_from("<I", found)[0])


@rule("6.8", "interrupt type 2 (non-blocking) wakes CHANNEL_WAIT")
def copy_interrupt(rig: Rig) -> None:
    gpu, queue, gate = compute(rig)
    out = gpu.memory()
    queue.acquire(gate.va, 1, 0)
    gpu.scratch.put32(1)
    queue.copy(gpu.scratch.va, out.va, 4, 0x182 | FLUSH | 2 << 5).submit()
    woken(queue, gate, out)


@rule("6.8", "physical addresses are privileged: the copy is refused", hazardous=True)
def physical(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue = gpu.compute()
    queue.copy(gpu.scratch.va, gpu.scratch.va + 64, 4, 0x182 | 1 << 12).logs("ce launch error", 11)
