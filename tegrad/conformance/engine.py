"""The GPU as a rule uses it: memory that both sides see, channels with pushbuffers, small kernels, and their faults.

Nothing here judges but `done`, `dies`, `refused`: the rest is set-up. Sections 6 and 7 of the driver's facts; the field
port's sequence for what a channel needs first.
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tegrad.conformance.rig import PAGE, VOLATILE, Buffer, Mapped, Rig, RigChannel
from tegrad.conformance.rule import Differs, NotApplicable
from tegrad.errors import TegradError
from tegrad.hw import bank0, ptxsection
from tegrad.hw.chips import Chip, by_sm_version
from tegrad.hw.classes import ComputeMethod, CopyMethod, HostMethod
from tegrad.hw.faults import Notifier, SkedBit, read_notifier
from tegrad.hw.gpfifo import DOORBELL, MethodOp, Subchannel, Userd, gp_entry, method_header
from tegrad.hw.qmd import LAYOUTS, Qmd
from tegrad.nv import compilers, cubin, turns
from tegrad.uapi import constants as k
from tegrad.uapi.structs import TsgSmErrorStateRecord

M32 = 0xFFFFFFFF
RELEASE = 0x03100001
"""The field's SEM_EXECUTE: release, wait for idle, 64 bits, timestamp."""
PLAIN_RELEASE = 1
PUSHBUFFER = 1 << 16
QMD_AT = 0x800
"""Where in its page a constant bank ends and a QMD begins."""
READ_ONLY = k.NVGPU_AS_MAP_BUFFER_ACCESS_READ_ONLY << k.NVGPU_AS_MAP_BUFFER_FLAGS_ACCESS_BITMASK_OFFSET
WINDOWS_AT, STACK_START = 0x18, 0xFFFDC0
"""Where constant bank 0 holds the windows and then the start of the stack, and that start: the field port's."""
QUIET_S = 0.2
"""How long a rule looks on before it says that something does not happen."""

KERNELS = {
    "store": "*p = n;",
    "add": "*p = *(volatile unsigned *)p + n;",
    "load": "q[0] = *(volatile unsigned *)p;",
    "count": "atomicAdd(p, 1u);",
    "spin": "while (!*(volatile unsigned *)p) {}",
    "trap": "if (n) __trap(); *p = 0;",
    "dims": "if (atomicAdd(p, 1u) == 0) { p[1] = blockDim.x; p[2] = blockDim.y; p[3] = blockDim.z;"
    " p[4] = gridDim.x; p[5] = gridDim.y; p[6] = gridDim.z; }",
    "spill": "volatile unsigned a[16]; for (int i = 0; i < 16; i++) a[i] = n + i; p[0] = a[n & 15];",
    "generic": "*(volatile unsigned *)(n + (unsigned long long)p) = 1;",
    "shared": "__shared__ volatile unsigned s[256]; s[threadIdx.x] = n + threadIdx.x; __syncthreads();"
    " p[threadIdx.x] = s[255 - threadIdx.x];",
    "chain": turns.CHAIN,
}
"""Bodies of kernels of (unsigned *p, unsigned n, unsigned *q)."""


@functools.cache
def _compiled(name: str, arch: str) -> bytes:
    body = f'extern "C" __global__ void {name}(unsigned *p, unsigned n, unsigned *q) {{ {KERNELS[name]} }}'
    try:
        return compilers.compile_cuda(body, arch)
    except TegradError as error:
        raise NotApplicable(f"no compiler for test kernels: {error}") from None


def becomes(rig: Rig, what: str, expected: object, read: Callable[[], object]) -> None:
    """The rule: what `read` returns is this, now that the work is done, or a moment later."""
    rig.wait(lambda: read() == expected)
    rig.equal(what, expected, read())


class Block:
    """Memory of the GPU's address space that this process sees too; `va` is its GPU address."""

    def __init__(self, buffer: Buffer, cpu: Mapped, va: int) -> None:
        self.buffer, self.cpu, self.va = buffer, cpu, va
        self.u32, self.u64, self.put32, self.put64 = cpu.u32, cpu.u64, cpu.put32, cpu.put64


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded kernel: its address, its registers and shared bytes, where its parameters begin, its image."""

    va: int
    registers: int
    shared: int
    param_base: int
    image: Block
    code_size: int


class Gpu:
    """An address space with the shader windows kept free, a TSG, a doorbell, and the chip's layouts."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        info = rig.characteristics()
        try:
            self.chip: Chip = by_sm_version(info.sm_arch_sm_version)
        except KeyError:
            raise NotApplicable(f"no layouts for SM version {info.sm_arch_sm_version:#x}") from None
        self.layout = LAYOUTS[self.chip.qmd]
        self.vm = rig.address_space()
        for window in (self.chip.shared_window, self.chip.local_window):
            rig.reserve(self.vm, self.chip.window_size, window)
        self.tsg = rig.tsg()
        self.doorbell = rig.doorbell()
        self.scratch = self.memory()

    @property
    def launches(self) -> bool:
        """Whether `qmd` writes what this chip takes."""
        return self.chip.qmd == "V3"

    # ---- memory and programs -------------------------------------------------------------------------------------

    def memory(
        self, size: int = PAGE, *, read_only: bool = False, fixed: int | None = None, cached: bool = False
    ) -> Block:
        """A zeroed buffer, mapped on both sides; read-only for the GPU if asked for, at a reserved address if given.

        Volatile unless `cached` is asked for.
        """
        buffer = self.rig.buffer(size)
        flags = VOLATILE if fixed is None else k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET
        flags |= k.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE if cached else 0
        flags |= READ_ONLY if read_only else 0
        va = self.rig.map(self.vm, buffer.fd, flags=flags, offset=fixed or 0)
        return Block(buffer, self.rig.mapped(buffer), va)

    def hole(self) -> int:
        """The address of a page that was mapped and is not any more; nothing else is put there."""
        gone = self.memory(fixed=self.rig.reserve(self.vm, PAGE))
        self.rig.unmap(self.vm, gone.va)
        return gone.va

    def program(self, name: str) -> Program:
        """Load one of KERNELS."""
        found = cubin.Cubin(_compiled(name, self.chip.arch))
        text, section = found.find(f".text.{name}"), found.find(ptxsection.NAME)
        assert text is not None
        code = found.content(text)
        at = (len(code) + 127) // 128 * 128
        notes = bytearray(found.content(section) if section else b"")
        image = self.memory((at + len(notes)) // PAGE * PAGE + 2 * PAGE)
        if notes:
            struct.pack_into("<Q", notes, ptxsection.ENTRY_SLOT, image.va)
        image.cpu.write(code)
        image.cpu.write(bytes(notes), at)
        shared = 0x400 + (found.static_shared(name) + 127) // 128 * 128
        return Program(image.va, found.registers(name), shared, found.param_base(name), image, len(code))

    def bank(self, program: Program, p: int, n: int = 0, q: int = 0) -> Block:
        """A constant bank 0 with these arguments; room for a QMD after it."""
        made = self.memory()
        self.arguments(made, program, p, n, q)
        return made

    def arguments(self, bank: Block, program: Program, p: int, n: int = 0, q: int = 0) -> None:
        """Store arguments into a bank."""
        bank.cpu.write(struct.pack("<QQQ", p, n, q), program.param_base)

    def qmd(
        self,
        program: Program,
        bank: Block,
        *,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (1, 1, 1),
        **fields: int,
    ) -> int:
        """Write a QMD into the bank's page and its dimensions where machine code reads them; the QMD's address.

        `fields` add to the QMD or change it.
        """
        shared = {f"{edge}_sm_config_shared_mem_size": program.shared // 4096 + 9 for edge in ("min", "target")}
        base = {
            "qmd_major_version": 3,
            "qmd_group_id": 0x3F,
            "api_visible_call_limit": 1,
            "sm_global_caching_enable": 1,
            "cwd_membar_type": 1,
            "sampler_index": 1,
            "program_address_upper": program.va >> 32,
            "program_address_lower": program.va & M32,
            "shared_memory_size": program.shared,
            **shared,
            "max_sm_config_shared_mem_size": 26,
            "register_count_v": max(program.registers, 16),
            "barrier_count": 1,
            "sass_version": self.chip.sass_version,
            "constant_buffer_valid_0": 1,
            "constant_buffer_invalidate_0": 1,
            "constant_buffer_size_shifted4_0": QMD_AT >> 4,
            "constant_buffer_addr_upper_0": bank.va >> 32,
            "constant_buffer_addr_lower_0": bank.va & M32,
            **dict(zip(("cta_raster_width", "cta_raster_height", "cta_raster_depth"), grid, strict=True)),
            **{f"cta_thread_dimension{i}": size for i, size in enumerate(block)},
        }
        mem = bytearray(self.layout.size)
        Qmd(self.layout, mem).write(**(base | fields))
        bank.cpu.write(bytes(mem), QMD_AT)
        bank.cpu.write(bank0.DIMS.pack(*block, *grid), bank0.BLOCK_DIM)
        windows = struct.pack("<QQQ", self.chip.shared_window, self.chip.local_window, STACK_START)
        bank.cpu.write(windows, WINDOWS_AT)
        return bank.va + QMD_AT

    def kernel(self, name: str, p: int, n: int = 0, q: int = 0, **fields: Any) -> int:
        """The address of a QMD that launches one of KERNELS with these arguments."""
        made = self.program(name)
        return self.qmd(made, self.bank(made, p, n, q), **fields)

    def queue(
        self, *, contexts: Sequence[str] = ("compute", "dma"), tsg: int | None = None, entries: int = 512
    ) -> Queue:
        """A channel in service with its pushbuffer, in this TSG unless another is given."""
        return Queue(self, contexts, self.tsg if tsg is None else tsg, entries)

    def compute(self) -> Queue:
        """A channel with objects bound and windows set: ready to launch."""
        return self.queue().setup()


def host(rig: Rig, *, entries: int = 512) -> tuple[Queue, Block]:
    """A channel for host methods alone, and memory."""
    gpu = Gpu(rig)
    return gpu.queue(contexts=(), entries=entries), gpu.memory()


def compute(rig: Rig) -> tuple[Gpu, Queue, Block]:
    """A GPU, a channel that is ready to launch, and memory."""
    gpu = Gpu(rig)
    return gpu, gpu.compute(), gpu.memory()


class Queue:
    """A channel's client side: collects methods, submits them, and says how the channel is."""

    def __init__(self, gpu: Gpu, contexts: Sequence[str], tsg: int, entries: int) -> None:
        self.gpu, self.rig = gpu, gpu.rig
        self.channel: RigChannel = self.rig.channel_ready(vm=gpu.vm, tsg=tsg, entries=entries)
        assert self.channel.gpfifo is not None
        assert self.channel.userd is not None
        self.ring, self.userd = self.rig.mapped(self.channel.gpfifo), self.rig.mapped(self.channel.userd)
        self._notifier = self.rig.buffer()
        self.notifier = self.rig.mapped(self._notifier)
        self.register()
        classes = {"compute": gpu.chip.compute_class, "dma": gpu.chip.dma_class}
        for name in contexts:
            self.rig.call(self.channel.fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=classes[name])
        self._push = gpu.memory(PUSHBUFFER)
        self._at = 0
        self._put = 0
        self._fence = gpu.memory()
        self._number = 0
        self.words: list[int] = []

    def register(self) -> None:
        """Register the error notifier, for the first time or again."""
        self.rig.call(self.channel.fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=0, size=16, mem=self._notifier.fd)

    # ---- building ------------------------------------------------------------------------------------------------

    def raw(self, *words: int) -> Queue:
        """Words as they are."""
        self.words += words
        return self

    def method(self, subchannel: int, offset: int, *data: int, op: MethodOp = MethodOp.INC) -> Queue:
        """A method with its data."""
        return self.raw(method_header(op, subchannel, offset, len(data)), *data)

    def host(self, offset: int, *data: int, op: MethodOp = MethodOp.INC) -> Queue:
        """A host method, or several in a row."""
        return self.method(0, offset, *data, op=op)

    def cls(self, offset: int, *data: int) -> Queue:
        """A method of the compute class."""
        return self.method(Subchannel.COMPUTE, offset, *data)

    def setup(self) -> Queue:
        """Bind both objects and set the windows."""
        chip = self.gpu.chip
        self.cls(HostMethod.SET_OBJECT, chip.compute_class)
        self.method(Subchannel.COPY, HostMethod.SET_OBJECT, chip.dma_class)
        return self.windows(chip.shared_window, chip.local_window)

    def windows(self, shared: int, local: int) -> Queue:
        """Set the shader windows."""
        self.cls(ComputeMethod.SET_SHADER_SHARED_MEMORY_WINDOW_A, shared >> 32, shared & M32)
        return self.cls(ComputeMethod.SET_SHADER_LOCAL_MEMORY_WINDOW_A, local >> 32, local & M32)

    def local_memory(self, per_thread: int) -> Queue:
        """Give kernels this many bytes of local memory a thread."""
        chip = self.gpu.chip
        per_tpc = (per_thread * 32 + 0x1FF) // 0x200 * 0x200 * chip.warps_per_sm * chip.sm_per_tpc
        made = self.gpu.memory(per_tpc * chip.num_gpc * chip.tpc_per_gpc)
        self.cls(ComputeMethod.SET_SHADER_LOCAL_MEMORY_A, made.va >> 32, made.va & M32)
        return self.cls(ComputeMethod.SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A, 0, per_tpc, 0x100)

    def semaphore(self, va: int, payload: int, execute: int) -> Queue:
        """SEM_EXECUTE with its operands, as the field does it. ValueError for an address it cannot say."""
        if va & 3:
            raise ValueError(f"a semaphore at {va:#x}: the method has bits 31 to 2 of its address")
        return self.host(HostMethod.SEM_ADDR_LO, va & M32, va >> 32, payload & M32, payload >> 32, execute)

    def release(self, va: int, payload: int, execute: int = RELEASE) -> Queue:
        """A release: waiting for idle, 64 bits and a timestamp unless told otherwise."""
        return self.semaphore(va, payload, execute)

    def acquire(self, va: int, payload: int, op: int = 3) -> Queue:
        """A 32-bit acquire, circular >= unless told otherwise."""
        return self.semaphore(va, payload, op)

    def launch(self, qmd: int, action: int = 9) -> Queue:
        """Launch a QMD by PCAS: prefetch and schedule unless told otherwise."""
        self.cls(ComputeMethod.SEND_PCAS_A, qmd >> 8)
        return self.cls(ComputeMethod.SEND_SIGNALING_PCAS2_B, action)

    def copy(self, src: int, dst: int, size: int, launch: int = 0x182) -> Queue:
        """A linear copy."""
        self.method(Subchannel.COPY, CopyMethod.OFFSET_IN_UPPER, src >> 32, src & M32, dst >> 32, dst & M32)
        self.method(Subchannel.COPY, CopyMethod.LINE_LENGTH_IN, size)
        return self.method(Subchannel.COPY, CopyMethod.LAUNCH_DMA, launch)

    # ---- submitting ----------------------------------------------------------------------------------------------

    def entry(self, *raw: int) -> Queue:
        """GPFIFO entries as they are, and GP_PUT after them."""
        for one in raw:
            self.ring.put64(one, self._put * 8)
            self._put = (self._put + 1) % self.channel.entries
        self.userd.put32(self._put, Userd.GP_PUT)
        return self

    def ring_doorbell(self, token: int | None = None) -> Queue:
        """Store a token (the channel's) to the doorbell."""
        self.gpu.doorbell.store32(DOORBELL, self.channel.token if token is None else token)
        return self

    def segment(self) -> int:
        """Put what was collected into the pushbuffer: the entry for it."""
        data = struct.pack(f"<{len(self.words)}I", *self.words)
        assert self._at + len(data) <= PUSHBUFFER
        self._push.cpu.write(data, self._at)
        made = gp_entry(self._push.va + self._at, len(self.words))
        self._at += (len(data) + 15) // 16 * 16
        self.words = []
        return made

    def submit(self) -> Queue:
        """Submit what was collected, and ring."""
        return self.entry(self.segment()).ring_doorbell()

    def fenced(self) -> Queue:
        """Submit with a release after everything."""
        self._number += 1
        return self.release(self._fence.va, self._number).submit()

    @property
    def chid(self) -> int:
        """The channel's number, as the kernel log names it."""
        return self.channel.token & 0xFFF

    @property
    def over(self) -> bool:
        """Whether everything submitted with a fence is done."""
        return self._fence.u64() >= self._number

    @property
    def dead(self) -> bool:
        """Whether the notifier says that the channel is dead."""
        return self.note.status != 0

    @property
    def note(self) -> Notifier:
        """The error notifier's record."""
        status = self.notifier.read(14, 2)  # written last, so read first
        return read_notifier(self.notifier.read(0, 14) + status)

    # ---- judging -------------------------------------------------------------------------------------------------

    def done(self, what: str = "the work is done") -> Queue:
        """The rule: what is submitted now ends, and the channel lives."""
        self.fenced()
        self.rig.eventually(lambda: self.over or self.dead, what, "nothing happened")
        self.rig.check(not self.dead, what, f"the channel died with notifier {self.note.info32}")
        return self

    def waits(self, what: str) -> Queue:
        """The rule: what was submitted with a fence is not over for a while, and the channel lives."""
        self.rig.check(not self.rig.wait(lambda: self.over or self.dead, QUIET_S), what, "it went on")
        return self

    def dies(self, code: int) -> Queue:
        """The rule: what is submitted now kills the channel with this notifier code."""
        self.rig.hazard()
        self.fenced()
        expected = f"the channel dies: notifier {code}"
        self.rig.eventually(lambda: self.dead or self.over, expected, "nothing happened")
        if not self.dead:
            raise Differs(expected, "it was accepted")
        self.rig.equal(expected + ", info32", code, self.note.info32)
        return self

    def block(self, code: int) -> list[str]:
        """The rule: what is submitted now kills the channel with this code. The lines that the kernel logs about it."""
        mark = self.rig.log_mark()
        self.dies(code)
        end = f"error notifier set to {code} for ch {self.chid} "
        self.rig.wait(lambda: any(end in line for line in self.rig.log_since(mark)))
        return self.rig.log_since(mark)

    def logs(self, pattern: str, code: int) -> re.Match[str]:
        """The rule: what is submitted now kills the channel with this code, and the kernel logs a line like this."""
        lines = self.block(code)
        found = [match for line in lines if (match := re.search(pattern, line))]
        self.rig.check(found, f"a line like {pattern}", "; ".join(lines))
        return found[0]

    def refused(self, bit: SkedBit) -> None:
        """The rule: the launch that was collected raises this bit of the SKED exception."""
        found = self.logs(r"sked exception: esr 0x([0-9a-f]+)", 13)
        self.rig.check(int(found[1], 16) >> bit & 1, f"SKED bit {int(bit)}", f"esr 0x{found[1]}")

    def interrupted(self, name: str) -> None:
        """The rule: what was collected raises this PBDMA interrupt."""
        self.logs(rf"PBDMA intr {name} Error", 32)

    def hangs(self, name: str, ring: Callable[[], object] | None = None) -> None:
        """The rule: what was collected (or what `ring` does) raises this PBDMA interrupt, and the driver only logs it.

        The channel is reset after it, so that the next one finds a host that works.
        """
        self.rig.hazard()
        mark, line = self.rig.log_mark(), f"PBDMA intr {name} Error"
        (ring or self.fenced)()
        self.rig.eventually(lambda: any(line in one for one in self.rig.log_since(mark)), line, "nothing was logged")
        ended = self.rig.wait(lambda: self.dead or (ring is None and self.over), QUIET_S)
        self.rig.check(not ended, "the channel hangs", f"notifier {self.note.info32}")
        self.rig.equal("GET_TIMEDOUT", 0, self.rig.timed_out(self.channel.fd))
        self.rig.call(self.channel.fd, "CHANNEL_FORCE_RESET")

    def sm_errors(self) -> list[TsgSmErrorStateRecord]:
        """The records of the TSG's SMs that hold an error."""
        records = []
        for sm in range(self.rig.call(self.rig.ctrl, "GPU_NUM_VSMS").num_vsms):
            record = TsgSmErrorStateRecord()
            where = {"record_mem": ctypes.addressof(record), "record_size": ctypes.sizeof(record)}
            self.rig.call(self.channel.tsg, "TSG_READ_SINGLE_SM_ERROR_STATE", sm_id=sm, **where)
            records.append(record)
        return [record for record in records if record.global_esr or record.warp_esr]

    def sm_error(self) -> TsgSmErrorStateRecord:
        """The first of `sm_errors`, or an empty record."""
        return next(iter(self.sm_errors()), TsgSmErrorStateRecord())
