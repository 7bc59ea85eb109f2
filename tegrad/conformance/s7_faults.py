"""Section 7: what a fault does to channels, what the notifier and the kernel log say, and which mistake gives which."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import Any

from tegrad.conformance.engine import M32, PLAIN_RELEASE, QUIET_S, RELEASE, Block, Gpu, Queue
from tegrad.conformance.rig import Rig
from tegrad.conformance.rule import rule, rules
from tegrad.conformance.s5_channels import semaphore
from tegrad.conformance.s6_compute import release_fields
from tegrad.conformance.s8_fences import fence, node, readable
from tegrad.conformance.waiter import Waiter
from tegrad.hw.classes import ComputeMethod as C
from tegrad.hw.classes import CopyMethod
from tegrad.hw.classes import HostMethod as H
from tegrad.hw.faults import NOTIFIER_ERROR, SkedBit, WarpEsr
from tegrad.hw.gpfifo import GpOpcode, MethodOp, Subchannel, method_header
from tegrad.uapi import constants as k

MMU, GR, PBDMA, ILLEGAL, CE, RESET, IDLE_TIMEOUT = 31, 13, 32, 25, 11, 43, 8


def bad_semaphore(queue: Queue) -> Queue:
    """A release to memory that is not mapped any more."""
    return queue.release(queue.gpu.hole(), 1, PLAIN_RELEASE)


def dead(gpu: Gpu) -> Queue:
    """A channel that an MMU fault has killed."""
    return bad_semaphore(gpu.queue(contexts=())).dies(MMU)


# ---- 5.8 time limits -------------------------------------------------------------------------------------------------


def spinning(gpu: Gpu, limit_ms: int, mode: int = k.NVGPU_COMPUTE_PREEMPTION_MODE_WFI) -> tuple[Queue, Block]:
    """A channel with a time limit whose kernel runs until the block's first word is not zero."""
    queue, gate = gpu.queue(contexts=("compute",)).setup(), gpu.memory()
    queue.rig.call(queue.channel.fd, "CHANNEL_SET_PREEMPTION_MODE", compute_preempt_mode=mode)
    queue.rig.call(queue.channel.fd, "CHANNEL_SET_TIMEOUT", timeout=limit_ms)
    queue.launch(gpu.kernel("spin", gate.va)).fenced()
    queue.waits("the kernel runs")
    return queue, gate


def another_group(gpu: Gpu) -> Queue:
    """A channel of another TSG, ready to launch."""
    return gpu.queue(tsg=gpu.rig.tsg()).setup()


@rule("5.8", "a TSG that does not give way to another is killed when its time is up: notifier 8", hazardous=True)
def stuck_switch(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, _ = spinning(gpu, 200)
    rig.hazard()
    other, out = another_group(gpu), gpu.memory()
    other.launch(gpu.kernel("store", out.va, 5)).done("the other TSG's kernel runs")
    rig.equal("info32 of the one that blocked", IDLE_TIMEOUT, queue.note.info32)


@rule("5.8", "a TSG that is alone may run one kernel past its time limit", hazardous=True)
def alone_on_the_engine(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, gate = spinning(gpu, 100)
    rig.check(not rig.wait(lambda: queue.dead, 0.5), "the channel lives", "it died")
    gate.put32(1)
    queue.done("the kernel ends")


@rule("5.8", "time counts only while a context switch is stuck: a TSG that gives way lives", hazardous=True)
def giving_way(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, gate = spinning(gpu, 1000, k.NVGPU_COMPUTE_PREEMPTION_MODE_CILP)
    other, out = another_group(gpu), gpu.memory()
    for turn in range(8):
        other.launch(gpu.kernel("store", out.va, turn)).done("the other TSG's kernels run")
    rig.check(not queue.dead, "the channel that gave way lives", f"notifier {queue.note.info32}")
    gate.put32(1)
    queue.done("the kernel ends")


# ---- 7.1 common outcome ----------------------------------------------------------------------------------------------


@rule("7.1", "a fault writes the notifier of every channel of the TSG")
def every_notifier(rig: Rig) -> None:
    gpu = Gpu(rig)
    sister = gpu.queue(contexts=())
    dead(gpu)
    rig.wait(lambda: sister.dead)
    rig.equal("the sister's info32", MMU, sister.note.info32)


@rule("7.1", "after a fault GET_TIMEDOUT is 1 for every channel of the TSG")
def every_timedout(rig: Rig) -> None:
    gpu = Gpu(rig)
    sister = gpu.queue(contexts=())
    rig.equal("before, GET_TIMEDOUT is", 0, rig.timed_out(sister.channel.fd))
    queue = dead(gpu)
    rig.wait(lambda: rig.timed_out(sister.channel.fd))
    seen = (rig.timed_out(queue.channel.fd), rig.timed_out(sister.channel.fd))
    rig.equal("GET_TIMEDOUT of both is", (1, 1), seen)


@rule("7.1", "channels of other TSGs go on")
def other_groups(rig: Rig) -> None:
    gpu = Gpu(rig)
    other = gpu.queue(tsg=rig.tsg(), contexts=())
    queue = dead(gpu)
    rig.call(queue.channel.fd, "CHANNEL_FORCE_RESET")  # recoveries take turns: that of the fault is over
    rig.equal("GET_TIMEDOUT of the other", 0, rig.timed_out(other.channel.fd))
    other.done("the channel of another TSG works")


@rule("7.1", "a fault ends the sister channel's grid: nothing after it is executed")
def sister_grid(rig: Rig) -> None:
    gpu = Gpu(rig)
    sister, gate, out = gpu.compute(), gpu.memory(), gpu.memory()
    sister.launch(gpu.kernel("spin", gate.va, **release_fields(0, out.va, 1, structure_size=1))).fenced()
    sister.waits("the grid runs")
    dead(gpu)
    gate.put32(1)
    rig.check(not rig.wait(lambda: out.u32(), QUIET_S), "the grid's release never comes", "it came")


@rule("7.1", "a dead channel takes doorbells and executes nothing")
def doorbells_are_ignored(rig: Rig) -> None:
    gpu = Gpu(rig)
    sister, out = gpu.queue(contexts=()), gpu.memory()
    for queue in (dead(gpu), sister):
        queue.release(out.va, 1, PLAIN_RELEASE).submit()
    rig.check(not rig.wait(lambda: out.u32(), QUIET_S), "the semaphore stays", "it was released")


def waiting(queue: Queue, *, times: int = 1) -> Waiter:
    """A CHANNEL_WAIT for a semaphore that nobody releases."""
    return Waiter(queue.rig, queue.channel.fd, semaphore(queue.gpu.scratch.buffer.fd, payload=1), times=times)


@rule("7.1", "WAIT on a dead channel is ETIMEDOUT at once")
def wait_when_dead(rig: Rig) -> None:
    rig.equal("WAIT returned, before its time,", "ETIMEDOUT", waiting(dead(Gpu(rig)), times=2).result())


@rule("7.1", "SUBMIT_GPFIFO on a dead channel is ETIMEDOUT")
def submit_when_dead(rig: Rig) -> None:
    queue = dead(Gpu(rig))
    rig.refuses(errno.ETIMEDOUT, queue.channel.fd, "CHANNEL_SUBMIT_GPFIFO")


@rule("7.1", "a fault wakes a caller in WAIT, with success")
def waiter_is_woken(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=())
    waiter = waiting(queue)
    bad_semaphore(queue).dies(MMU)
    rig.equal("WAIT returned", "success", waiter.result())


@rule("7.1", "a fault lets whoever waits for the channel's syncpoint go: it is set to a safe value")
def syncpoint_is_safe(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=())
    found = rig.call(queue.channel.fd, "CHANNEL_GET_USER_SYNCPOINT")
    waited = fence(rig, node(rig), found.syncpoint_id, found.syncpoint_max + 1000)
    rig.equal("before, the fence polls as ready", False, readable(waited))
    bad_semaphore(queue).dies(MMU)
    rig.equal("after, the fence polls as ready", True, readable(waited, rig.patience))


@rule("7.1", "after a fault AS, TSG and nvmap calls work, and memory and mappings stay")
def the_rest_works(rig: Rig) -> None:
    gpu = Gpu(rig)
    kept = gpu.memory()
    kept.put32(0x1234)
    queue = dead(gpu)
    rig.accepts(queue.channel.tsg, "TSG_GET_TIMESLICE")
    fresh = gpu.memory()
    other = gpu.queue(tsg=rig.tsg())
    other.setup().copy(kept.va, fresh.va, 4).done("a new channel in the same address space works")
    rig.equal("it reads what was there before", 0x1234, fresh.u32())


@rule("7.1", "nothing un-faults a channel; a new one, in the same TSG once the dead are closed, works")
def way_on(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue = dead(gpu)
    rig.call(queue.channel.fd, "CHANNEL_ENABLE")
    rig.equal("GET_TIMEDOUT after ENABLE", 1, rig.timed_out(queue.channel.fd))
    rig.close(queue.channel.fd)
    gpu.queue(contexts=()).done("a new channel works")


# ---- 7.2 the notifier ------------------------------------------------------------------------------------------------


@rule("7.2", "status is 0xFFFF after an error")
def status(rig: Rig) -> None:
    rig.equal("status", NOTIFIER_ERROR, dead(Gpu(rig)).note.status)


@rule("7.2", "the notifier's time is the wall clock, in nanoseconds")
def wall_clock(rig: Rig) -> None:
    before = time.time_ns()
    at = dead(Gpu(rig)).note.time_ns
    rig.check(before - 10**9 <= at <= time.time_ns() + 10**9, f"a time near {before}", at)


@rule("7.2", "info16 is left as it was")
def info16(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=())
    queue.notifier.write(b"\xcd\xab", 12)
    bad_semaphore(queue).dies(MMU)
    rig.equal("info16", 0xABCD, queue.note.info16)


@rule("7.2", "the first error stays")
def first_error_stays(rig: Rig) -> None:
    queue = dead(Gpu(rig))
    rig.call(queue.channel.fd, "CHANNEL_FORCE_RESET")
    rig.equal("info32 after a reset", MMU, queue.note.info32)


@rule("7.2", "an error replaces the first once the client has cleared its status")
def cleared_status(rig: Rig) -> None:
    queue = dead(Gpu(rig))
    queue.notifier.write(bytes(2), 14)
    rig.call(queue.channel.fd, "CHANNEL_FORCE_RESET")
    rig.equal("info32 after a reset", RESET, queue.note.info32)


@rule("7.2", "registering again zeroes the record, and the next error is written")
def registered_again(rig: Rig) -> None:
    queue = dead(Gpu(rig))
    queue.register()
    rig.equal("status", 0, queue.note.status)
    rig.call(queue.channel.fd, "CHANNEL_FORCE_RESET")
    rig.equal("info32 after a reset", RESET, queue.note.info32)


@rule("7.2", "FORCE_RESET is code 43")
def force_reset(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=())
    rig.call(queue.channel.fd, "CHANNEL_FORCE_RESET")
    rig.wait(lambda: queue.dead)
    rig.equal("info32", RESET, queue.note.info32)


@rule("7.2", "a method that the class does not have is code 25 (inferred)")
def illegal_method(rig: Rig) -> None:
    Gpu(rig).compute().cls(0xFFC, 0).dies(ILLEGAL)


@rule("7.2", "a copy that the engine refuses is code 11")
def refused_copy(rig: Rig) -> None:
    gpu = Gpu(rig)
    gpu.compute().copy(gpu.scratch.va, gpu.scratch.va + 64, 4, 0x182 | 1 << 13).dies(CE)


# ---- 7.3 the kernel log ----------------------------------------------------------------------------------------------

FIRST = (
    r"\[ERR\].*\[MMU FAULT\].*engine id:.*ch id:\s*(\d+), fault addr: (0x[0-9a-f]+)"
    r".*fault type: (.+), access type: (.+)"
)
SECOND = (
    r"\[MMU FAULT\] protected mode: \d+, client type: (\w+), client id:\s*(\S+), "
    r"gpc id if client type is gpc: (\d+)"
)


def unmapped_load(rig: Rig) -> tuple[Queue, int]:
    """A launch of a kernel that reads memory that is not mapped any more, and the address."""
    gpu = Gpu(rig)
    at = gpu.hole()
    return gpu.compute().launch(gpu.kernel("load", at + 0x10, 0, gpu.scratch.va)), at


@rule("7.3", "an MMU fault is logged with the channel's number and the page's address, without its lower 12 bits")
def mmu_first_line(rig: Rig) -> None:
    queue, at = unmapped_load(rig)
    found = queue.logs(FIRST, MMU)
    rig.equal("channel and address", (queue.chid, at), (int(found[1]), int(found[2], 16)))


@rule("7.3", "a second line tells the client: a kernel's access comes from the L1 of a TPC (gpc, t1_n)")
def mmu_second_line(rig: Rig) -> None:
    queue, _ = unmapped_load(rig)
    found = queue.logs(SECOND, MMU)
    rig.equal("client type", "gpc", found[1])
    rig.check(found[2].startswith("t1_"), "client t1_n", found[2])


@rule("7.3", "a page-fault summary follows, with type and address")
def mmu_summary(rig: Rig) -> None:
    queue, at = unmapped_load(rig)
    found = queue.logs(r"err_type\D*(\d+).*address\D*(0x[0-9a-f]+|\d+)", MMU)
    rig.equal("type and address", (2, at), (int(found[1]), int(found[2], 0)))


@rule("7.3", "a line names the TSG of an MMU fault")
def mmu_tsg(rig: Rig) -> None:
    queue, _ = unmapped_load(rig)
    queue.logs(r"TSG.*\d+.*mmu fault", MMU)


@rule("7.3", "a channel that registered a notifier gets its line, with code and process")
def notifier_line(rig: Rig) -> None:
    queue, _ = unmapped_load(rig)
    queue.logs(rf"error notifier set to 31 for ch {queue.chid} owned by \S+", MMU)


@rule("7.3", "a channel without a notifier gets no line")
def no_notifier_no_line(rig: Rig) -> None:
    gpu = Gpu(rig)
    silent = rig.channel_ready(vm=gpu.vm, tsg=gpu.tsg)
    lines = bad_semaphore(gpu.queue(contexts=())).block(MMU)
    about = [line for line in lines if f"for ch {silent.token & 0xFFF} " in line]
    rig.equal("lines about it", [], about)


@rules(
    "7.3",
    "the access of a kernel's {what} is logged as {text}",
    "what kernel text",
    [("load", "load", "virt read"), ("store", "store", "virt write"), ("atomic", "count", "virt atomic strong")],
    name="access-{what}",
)
def access(rig: Rig, kernel: str, text: str) -> None:
    gpu = Gpu(rig)
    queue = gpu.compute().launch(gpu.kernel(kernel, gpu.hole(), 1, gpu.scratch.va))
    rig.equal("access type", text, queue.logs(FIRST, MMU)[4].strip())


@rule("7.3", "a mapping that is gone is an invalid PTE")
def invalid_pte(rig: Rig) -> None:
    queue, _ = unmapped_load(rig)
    rig.equal("fault type", "invalid pte", queue.logs(FIRST, MMU)[3])


@rule("7.3", "an SM exception is logged with GPC and TPC, and with the registers of the SM")
def sm_lines(rig: Rig) -> None:
    gpu = Gpu(rig)
    lines = "\n".join(gpu.compute().launch(gpu.kernel("store", gpu.scratch.va + 2)).block(GR))
    for pattern in ("sm machine check err", "gpc_id", "tpc_id", "hww_warp_esr", "sm hww global 0x"):
        rig.check(pattern in lines, f"a line with {pattern}", lines)


@rule("7.3", "a refused launch is logged with the SKED exception register")
def sked_line(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue = gpu.compute().launch(gpu.kernel("store", gpu.scratch.va, block=(0, 1, 1)))
    queue.logs(r"sked exception: esr 0x[0-9a-f]{8}", GR)


@rule("7.3", "a class error is logged")
def class_error_line(rig: Rig) -> None:
    gpu = Gpu(rig)
    gpu.queue().cls(H.SET_OBJECT, gpu.chip.dma_class).logs(r"\[ERR\].*class error", GR)


@rule("7.3", "an illegal method is logged")
def illegal_method_line(rig: Rig) -> None:
    Gpu(rig).compute().cls(0xFFC, 0).logs(r"\[ERR\].*(illegal method|invalid method|invalid class)", ILLEGAL)


@rule("7.3", "a PBDMA interrupt is logged by name, and with the PBDMA's registers")
def pbdma_lines(rig: Rig) -> None:
    lines = "\n".join(Gpu(rig).queue(contexts=()).host(H.ILLEGAL, 0).block(PBDMA))
    for pattern in ("PBDMA intr method Error", "pbdma_intr_0(", "PBH: ", "SHADOW: ", "M0: "):
        rig.check(pattern in lines, f"a line with {pattern}", lines)


@rule("7.3", "the registers of a PBDMA interrupt tell the method's header")
def pbdma_header(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=()).raw(method_header(MethodOp.INC, 0, H.ILLEGAL, 1), 0x5555)
    found = queue.logs(r"PBH: ([0-9a-f]+) ", PBDMA)
    rig.equal("the header", method_header(MethodOp.INC, 0, H.ILLEGAL, 1), int(found[1], 16))


@rule("7.3", "a copy that is refused is logged as a launch error")
def ce_line(rig: Rig) -> None:
    gpu = Gpu(rig)
    gpu.compute().copy(gpu.scratch.va, gpu.scratch.va + 64, 4, 0x182 | 1 << 13).logs("ce launch error interrupt", CE)


# ---- 7.4 ESR codes ---------------------------------------------------------------------------------------------------


def warp_error(rig: Rig, launch: Callable[[Gpu, Queue], object]) -> Queue:
    """The queue of a launch that an SM stops."""
    gpu = Gpu(rig)
    queue = gpu.compute()
    launch(gpu, queue)
    return queue.dies(GR)


def _misaligned(gpu: Gpu, queue: Queue) -> None:
    queue.launch(gpu.kernel("store", gpu.scratch.va + 2))


def _out_of_range(gpu: Gpu, queue: Queue) -> None:
    queue.launch(gpu.kernel("shared", gpu.scratch.va, block=(256, 1, 1), shared_memory_size=0x400))


def _illegal_instruction(gpu: Gpu, queue: Queue) -> None:
    program = gpu.program("store")
    program.image.cpu.write(b"\xff" * program.code_size)
    queue.launch(gpu.qmd(program, gpu.bank(program, gpu.scratch.va, 1)))


@rules(
    "7.4",
    "{what} warp error 0x{code:X}",
    "name what code launch",
    [
        ("misaligned", "a misaligned access is", WarpEsr.MISALIGNED_ADDR, _misaligned),
        ("out-of-range", "shared memory beyond what the QMD allots is", WarpEsr.OOR_ADDR, _out_of_range),
        (
            "illegal-instruction",
            "instructions that mean nothing are",
            WarpEsr.ILLEGAL_INSTR_ENCODING,
            _illegal_instruction,
        ),
    ],
)
def warp_code(rig: Rig, code: WarpEsr, launch: Callable[[Gpu, Queue], object]) -> None:
    rig.equal("the code", code, warp_error(rig, launch).sm_error().warp_esr & 0xFFFF)


@rule("7.4", "a trap is an illegal instruction encoding, 0x9, and no breakpoint, as on an H200 (inferred)")
def trap(rig: Rig) -> None:
    found = warp_error(rig, lambda gpu, q: q.launch(gpu.kernel("trap", gpu.scratch.va, 1))).sm_error()
    expected = (WarpEsr.ILLEGAL_INSTR_ENCODING, 0)
    rig.equal("warp error, global ESR bit 0x10", expected, (found.warp_esr & 0xFFFF, found.global_esr & 0x10))


@rule("7.4", "the record's program counter lies in the kernel")
def warp_pc(rig: Rig) -> None:
    gpu = Gpu(rig)
    program = gpu.program("store")
    queue = gpu.compute().launch(gpu.qmd(program, gpu.bank(program, gpu.scratch.va + 2, 1))).dies(GR)
    start, end, seen = program.va, program.va + program.code_size, queue.sm_error().warp_esr_pc
    rig.check(start <= seen < end, f"a pc in [{start:#x}, {end:#x})", seen)


@rule("7.4", "only the SM that stopped has a record")
def one_record(rig: Rig) -> None:
    rig.equal("SMs with an error", 1, len(warp_error(rig, _misaligned).sm_errors()))


@rule("7.4", "a fault of the PBDMA leaves no record on any SM")
def no_record(rig: Rig) -> None:
    queue = Gpu(rig).compute().host(H.ILLEGAL, 0).dies(PBDMA)
    rig.equal("SMs with an error", 0, len(queue.sm_errors()))


SKED_ROWS: tuple[tuple[str, str, SkedBit, dict[str, Any]], ...] = (
    (
        "bank",
        "a constant buffer of more than 64 KiB",
        SkedBit.CONSTANT_BUFFER_SIZE,
        {"constant_buffer_size_shifted4_0": 0x1001},
    ),
    (
        "local-low",
        "a low local size that is no multiple of 16",
        SkedBit.LOCAL_MEMORY_LOW_SIZE,
        {"shader_local_memory_low_size": 8},
    ),
    (
        "local-high",
        "a high local size that is no multiple of 16",
        SkedBit.LOCAL_MEMORY_HIGH_SIZE,
        {"shader_local_memory_high_size": 8},
    ),
    (
        "local-total",
        "more local memory than the TPCs have",
        SkedBit.LOCAL_MEMORY_TOTAL_SIZE,
        {"shader_local_memory_high_size": 0x400},
    ),
    ("registers", "256 registers", SkedBit.REGISTER_COUNT, {"register_count_v": 256}),
    ("threads", "2048 threads in a CTA", SkedBit.TOTAL_THREADS, {"block": (1024, 2, 1)}),
    (
        "shared-step",
        "shared memory that is no multiple of 128",
        SkedBit.SHARED_MEMORY_SIZE,
        {"shared_memory_size": 0x440},
    ),
    (
        "shared-most",
        "more shared memory than a CTA can have",
        SkedBit.SHARED_MEMORY_SIZE,
        {"shared_memory_size": 0x29080},
    ),
    ("grid-zero", "an empty grid", SkedBit.ZERO_CTA_DIMENSION, {"grid": (1, 0, 1)}),
    ("block-zero", "an empty CTA", SkedBit.ZERO_CTA_DIMENSION, {"block": (1, 1, 0)}),
    (
        "l1-config",
        "a largest configuration below the shared size",
        SkedBit.L1_CONFIG_TOO_SMALL,
        {"shared_memory_size": 0x8080, "max_sm_config_shared_mem_size": 9},
    ),
    (
        "register-file",
        "more registers than an SM has",
        SkedBit.CTA_REGISTER_CONSUMPTION,
        {"register_count_v": 128, "block": (1024, 1, 1)},
    ),
)
"""What is wrong, the bit, what is changed in a QMD that works."""


@rules("7.4", "{what}: SKED bit {bit:d}", "name what bit fields", SKED_ROWS, name="sked-{name}")
def sked(rig: Rig, bit: SkedBit, fields: dict[str, Any]) -> None:
    gpu = Gpu(rig)
    queue = gpu.compute().local_memory(0x200)
    queue.launch(gpu.kernel("store", gpu.scratch.va, 1, **fields)).refused(bit)


@rule("7.4", "a program address that is no multiple of 128: SKED bit 20")
def sked_program(rig: Rig) -> None:
    gpu = Gpu(rig)
    program = gpu.program("store")
    lower = program.va + 64 & M32
    qmd = gpu.qmd(program, gpu.bank(program, gpu.scratch.va, 1), program_address_lower=lower)
    gpu.compute().launch(qmd).refused(SkedBit.PROGRAM_OFFSET)


@rule("7.4", "a dependence counter that falls below zero: SKED bit 8")
def sked_dependence(rig: Rig) -> None:
    gpu = Gpu(rig)
    gpu.compute().launch(gpu.kernel("store", gpu.scratch.va, 1), 7).refused(SkedBit.DEPENDENCE_COUNTER_UNDERFLOW)


@rule("7.4", "invalidating a QMD that is active: SKED bit 29 (inferred)")
def sked_active(rig: Rig) -> None:
    gpu = Gpu(rig)
    gate = gpu.memory()
    qmd = gpu.kernel("spin", gate.va)
    gpu.compute().launch(qmd).launch(qmd, 3).refused(SkedBit.INVALIDATE_ACTIVE_QMD)


@rule("7.4", "windows that overlap: SKED bit 24")
def sked_overlap(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue = gpu.compute().windows(gpu.chip.shared_window, gpu.chip.shared_window + (1 << 20))
    queue.launch(gpu.kernel("store", gpu.scratch.va, 1)).refused(SkedBit.MEMORY_WINDOW_OVERLAP)


@rule("7.4", "a GPFIFO entry of length 0 with opcode 1: GPENTRY, which the driver only logs")
def gpentry(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=())
    queue.entry(GpOpcode.ILLEGAL << 32).hangs("gpentry")


@rule("7.4", "a method whose data reach past the end of the segment: PBSEG, which the driver only logs")
def pbseg(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=())
    queue.raw(method_header(MethodOp.INC, 0, H.NOP, 100), 0)
    queue.hangs("pbseg", queue.submit)


# ---- 7.5 mistakes ----------------------------------------------------------------------------------------------------


@rule("7.5", "a QMD at an unmapped address: MMU fault of hub client sked or fe")
def qmd_unmapped(rig: Rig) -> None:
    gpu = Gpu(rig)
    found = gpu.compute().launch(gpu.hole()).logs(SECOND, MMU)
    rig.equal("client type", "hub", found[1])
    rig.check("sked" in found[2] or "fe" in found[2], "client sked or fe", found[2])


@rule("7.5", "a kernel's pointer to unmapped memory: MMU fault")
def pointer_unmapped(rig: Rig) -> None:
    unmapped_load(rig)[0].dies(MMU)


@rule("7.5", "a store to a read-only mapping: MMU fault type 6")
def read_only(rig: Rig) -> None:
    gpu = Gpu(rig)
    target = gpu.memory(read_only=True)
    found = gpu.compute().launch(gpu.kernel("store", target.va, 1)).logs(FIRST, MMU)
    rig.equal("type and page", ("write, ro violation", target.va), (found[3], int(found[2], 16)))
    rig.equal("the memory is untouched", 0, target.u32())


@rule("7.5", "a load from a read-only mapping works")
def read_only_load(rig: Rig) -> None:
    gpu = Gpu(rig)
    source, out = gpu.memory(read_only=True), gpu.memory()
    source.put32(7)
    gpu.compute().launch(gpu.kernel("load", source.va, 0, out.va)).done()
    rig.equal("what was read", 7, out.u32())


@rule("7.5", "a copy to a read-only mapping: MMU fault")
def read_only_copy(rig: Rig) -> None:
    gpu = Gpu(rig)
    target = gpu.memory(read_only=True)
    gpu.compute().copy(gpu.scratch.va, target.va, 4).dies(MMU)


@rule("7.5", "a pushbuffer at an unmapped address: MMU fault of hub client host")
def pushbuffer_unmapped(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue = gpu.queue(contexts=())
    queue.entry(gpu.hole() | 4 << 42)
    found = queue.logs(SECOND, MMU)
    rig.equal("client", ("hub", "host"), (found[1], found[2]))


@rule("7.5", "no windows set: SKED 0x01000000")
def no_windows(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue = gpu.queue().cls(H.SET_OBJECT, gpu.chip.compute_class)
    queue.launch(gpu.kernel("store", gpu.scratch.va, 1)).refused(SkedBit.MEMORY_WINDOW_OVERLAP)


@rule("7.5", "a buffer inside a shader window: kernels do not see it; a store is warp error 0x10 or 0xE, if it is one")
def window_buffer(rig: Rig) -> None:
    gpu = Gpu(rig)
    target = gpu.memory(fixed=gpu.chip.shared_window + (2 << 20))
    queue = gpu.compute().launch(gpu.kernel("store", target.va, 5)).fenced()
    rig.eventually(lambda: queue.dead or queue.over, "the kernel ends")
    rig.equal("the buffer is untouched", 0, target.u32())
    if queue.dead:
        code = queue.sm_error().warp_esr & 0xFFFF
        rig.check(code in (WarpEsr.INVALID_ADDR_SPACE, WarpEsr.OOR_ADDR), "warp error 0x10 or 0xE", code)


@rule("7.5", "a buffer inside a shader window is visible to the copy engine (inferred)")
def window_buffer_copy(rig: Rig) -> None:
    gpu = Gpu(rig)
    target = gpu.memory(fixed=gpu.chip.shared_window + (2 << 20))
    gpu.scratch.put32(9)
    gpu.compute().launch(gpu.kernel("store", gpu.memory().va, 1)).copy(gpu.scratch.va, target.va, 4).done()
    rig.equal("the buffer", 9, target.u32())


@rules(
    "7.5",
    "SET_OBJECT of {what} on subchannel {subchannel:d}: class error, notifier 13",
    "what subchannel field",
    [("the copy class", Subchannel.COMPUTE, "dma_class"), ("the compute class", Subchannel.COPY, "compute_class")],
    name="wrong-class-{subchannel:d}",
)
def wrong_class(rig: Rig, subchannel: int, field: str) -> None:
    gpu = Gpu(rig)
    gpu.queue().method(subchannel, H.SET_OBJECT, getattr(gpu.chip, field)).logs("class error", GR)


@rule("7.5", "engine methods without ALLOC_OBJ_CTX: ctxnotvalid, notifier 32")
def no_context(rig: Rig) -> None:
    gpu = Gpu(rig)
    gpu.queue(contexts=()).cls(H.SET_OBJECT, gpu.chip.compute_class).logs("(?i)ctxnotvalid", PBDMA)


@rule("7.5", "GP_PUT at or beyond the ring's entries: GPPTR, which the driver only logs")
def gpptr(rig: Rig) -> None:
    queue = Gpu(rig).queue(contexts=())
    queue.userd.put32(queue.channel.entries, 0x8C)
    queue.hangs("gpptr", queue.ring_doorbell)


@rule("7.5", "a 16-byte semaphore at a multiple of 8: SEMAPHORE, which the driver only logs")
def stamped_at_8(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue = gpu.queue(contexts=())
    queue.release(gpu.scratch.va + 8, 1, RELEASE).hangs("semaphore")


@rule("7.5", "UNMAP while a kernel uses the buffer: MMU fault")
def unmapped_while_running(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, gate = gpu.compute(), gpu.memory()
    queue.launch(gpu.kernel("spin", gate.va)).fenced()
    queue.waits("the kernel runs")
    rig.unmap(gpu.vm, gate.va)
    rig.wait(lambda: queue.dead)
    rig.equal("notifier", MMU, queue.note.info32)


@rule("7.5", "closing the channel of a running kernel first is safe: no fault, and the rest goes on")
def closed_while_running(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, gate, other = gpu.compute(), gpu.memory(), gpu.queue(tsg=rig.tsg())
    queue.launch(gpu.kernel("spin", gate.va)).fenced()
    queue.waits("the kernel runs")
    mark = rig.log_mark()
    rig.close(queue.channel.fd)
    rig.unmap(gpu.vm, gate.va)
    other.done("another channel goes on")
    faults = [line for line in rig.log_since(mark) if "[MMU FAULT]" in line]
    rig.equal("MMU faults", [], faults)


@rule("7.5", "waiting for a value that is never written is silent")
def silent_wait(rig: Rig) -> None:
    gpu = Gpu(rig)
    mark = rig.log_mark()
    queue = gpu.queue(contexts=()).acquire(gpu.scratch.va, 1, 0).fenced()
    rig.check(not rig.wait(lambda: queue.dead or queue.over, 0.5), "nothing happens", "something did")
    rig.equal("error lines", [], [line for line in rig.log_since(mark) if "[ERR]" in line])


@rule("7.5", "a copy from unmapped memory: MMU fault of the copy engine")
def copy_unmapped(rig: Rig) -> None:
    gpu = Gpu(rig)
    found = gpu.compute().copy(gpu.hole(), gpu.scratch.va, 4).logs(SECOND, MMU)
    rig.equal("client type", "hub", found[1])
    rig.check("ce" in found[2] or "grcopy" in found[2], "a copy engine", found[2])


@rule("7.5", "a program at an unmapped address: MMU fault of the GPC's instruction fetch (inferred)")
def program_unmapped(rig: Rig) -> None:
    gpu = Gpu(rig)
    program = gpu.program("store")
    hole = gpu.hole()
    fields: dict[str, Any] = {"program_address_lower": hole & M32, "program_address_upper": hole >> 32}
    found = gpu.compute().launch(gpu.qmd(program, gpu.bank(program, gpu.scratch.va, 1), **fields)).logs(SECOND, MMU)
    rig.equal("client type", "gpc", found[1])


@rule("7.5", "local memory that is not mapped: MMU fault (inferred)")
def local_unmapped(rig: Rig) -> None:
    gpu = Gpu(rig)
    hole, chip = gpu.hole(), gpu.chip
    queue = gpu.compute()
    per_tpc = 0x40 * 32 * chip.warps_per_sm * chip.sm_per_tpc
    queue.cls(C.SET_SHADER_LOCAL_MEMORY_A, hole >> 32, hole & M32)
    queue.cls(C.SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A, 0, per_tpc, 0x100)
    queue.launch(gpu.kernel("spill", gpu.scratch.va, 3, shader_local_memory_low_size=0x40)).dies(MMU)


@rule("7.5", "a misaligned semaphore of the copy engine: launch error")
def copy_semaphore_misaligned(rig: Rig) -> None:
    gpu = Gpu(rig)
    queue, va = gpu.compute(), gpu.scratch.va + 8
    queue.method(Subchannel.COPY, CopyMethod.SET_SEMAPHORE_A, va >> 32, va & M32, 1)
    queue.method(Subchannel.COPY, CopyMethod.LAUNCH_DMA, 2 << 3).dies(CE)
