"""What examples/bringup.py needs of the GPU: buffers, a channel, pushbuffer words, a program and its QMD.

Everything stands on the tables of tegrad.hw and the ioctl rows of tegrad.uapi, so that it reads as the driver works.
"""

import ctypes
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from tegrad.errors import TegradError
from tegrad.hw import bank0
from tegrad.hw.chips import Chip
from tegrad.hw.classes import COMPUTE, COPY, HOST, ComputeMethod, CopyMethod, HostMethod
from tegrad.hw.faults import NOTIFIER_TEXT, read_notifier
from tegrad.hw.gpfifo import DOORBELL, MethodOp, Subchannel, Userd, gp_entry, method_header
from tegrad.hw.ptxsection import ALIGN, ENTRY_SLOT
from tegrad.hw.ptxsection import NAME as SECTION
from tegrad.hw.qmd import LAYOUTS, Qmd
from tegrad.nv import compilers, cubin
from tegrad.nv.fence import full_barrier
from tegrad.uapi import constants as c
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s
from tegrad.uapi.kernel import MAP_SHARED, PROT_READ, PROT_WRITE, Doorbell, Kernel

PAGE = 4096
NVMAP_TAG = 0x0900 << 16  # any nonzero tag; without one the driver logs a complaint
ENTRIES = 1024
PUSH_SIZE = 64 << 10
PREFETCH_MARGIN = 4 << 10  # the instruction prefetcher reads past the end of the code
MAX_SMS = 0x100  # the count that the field port of r36.4 wrote; no local memory is given, so it sizes nothing
SHARED_RESERVE = 0x400  # least shared memory of a launch
SM_CONFIG_32K = 32 // 4 + 1  # the QMD counts shared-memory splits in 4 KiB, from 1
WAIT_S = 60.0

SOURCE = """
extern "C" __global__ void bringup(unsigned *out, const unsigned *in, unsigned n, unsigned factor) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = in[i] * factor + i;
}
"""
THREADS = 128


class CheckFailed(TegradError):
    """The GPU or the driver answered, but not what it should have."""


def expect(found: object, wanted: object, what: str) -> None:
    """CheckFailed unless the two are equal."""
    if found != wanted:
        raise CheckFailed(f"{what}: expected {shown(wanted)}, got {shown(found)}")


def shown(value: object) -> str:
    """A value for a message."""
    return f"{value:#x}" if isinstance(value, int) and value > 9 else str(value)


def bytes_at(address: int, size: int) -> memoryview:
    """Mapped memory as bytes; valid as long as the mapping."""
    return memoryview((ctypes.c_uint8 * size).from_address(address)).cast("B")


@dataclass(slots=True)
class Buffer:
    """An nvmap buffer: its handle, an open dmabuf fd, a CPU mapping, and its GPU address if it is mapped there."""

    handle: int
    fd: int
    size: int
    address: int
    va: int = 0

    def view(self, offset: int = 0, size: int | None = None) -> memoryview:
        """The CPU's view of the buffer as bytes."""
        return bytes_at(self.address + offset, self.size - offset if size is None else size)

    def word(self, offset: int) -> ctypes.c_uint32:
        """One 32-bit word, read and written in one access."""
        return ctypes.c_uint32.from_address(self.address + offset)

    def quad(self, offset: int) -> ctypes.c_uint64:
        """One 64-bit word."""
        return ctypes.c_uint64.from_address(self.address + offset)


class Device:
    """The driver calls that more than one check needs, each with its undoing on a stack."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.fds: dict[str, int] = {}

    def fd(self, name: str) -> int:
        """An fd that an earlier check got; CheckFailed when it did not."""
        if name not in self.fds:
            raise CheckFailed(f"not tried: there is no {name} fd")
        return self.fds[name]

    def open(self, undo: ExitStack, path: str) -> int:
        """Open a node until the stack unwinds."""
        fd = self.kernel.open(path)
        undo.callback(self.kernel.close, fd)
        return fd

    def keep(self, undo: ExitStack, fd: int) -> int:
        """Close an fd that an ioctl returned when the stack unwinds."""
        undo.callback(self.kernel.close, fd)
        return fd

    def buffer(self, undo: ExitStack, size: int, flags: int = c.NVMAP_HANDLE_INNER_CACHEABLE) -> Buffer:
        """CREATE, ALLOC, GET_FD and a shared mapping."""
        create = s.CreateHandle(size=size)
        nvmap = self.fd("nvmap")
        self.kernel.ioctl(nvmap, io.NVMAP_IOC_CREATE, create)
        handle = int(create.handle)
        undo.callback(self.kernel.ioctl, nvmap, io.NVMAP_IOC_FREE, handle)
        alloc = s.AllocHandle(
            handle=handle, heap_mask=c.NVMAP_HEAP_IOVMM, flags=flags | NVMAP_TAG, align=PAGE, numa_nid=-1
        )
        self.kernel.ioctl(self.fd("nvmap"), io.NVMAP_IOC_ALLOC, alloc)
        get = s.CreateHandle(handle=handle)
        self.kernel.ioctl(self.fd("nvmap"), io.NVMAP_IOC_GET_FD, get)
        fd = self.keep(undo, int(get.fd))
        return Buffer(handle, fd, size, self.map_cpu(undo, fd, size))

    def map_cpu(self, undo: ExitStack, fd: int, size: int) -> int:
        """Map a dmabuf for the CPU; the address."""
        address = self.kernel.mmap(fd, size, PROT_READ | PROT_WRITE, MAP_SHARED)
        undo.callback(self.kernel.munmap, address, size)
        return address

    def map_gpu(self, undo: ExitStack, buffer: Buffer) -> int:
        """MAP_BUFFER_EX where the driver likes, pitch kind, volatile: the CPU does not see what L2 keeps."""
        arg = s.AsMapBufferEx(flags=0, compr_kind=-1, incompr_kind=0, dmabuf_fd=buffer.fd)
        self.kernel.ioctl(self.fd("space"), io.NVGPU_AS_IOCTL_MAP_BUFFER_EX, arg)
        va = int(arg.offset)
        undo.callback(self.unmap_gpu, va)
        buffer.va = va
        return va

    def unmap_gpu(self, va: int) -> None:
        """UNMAP_BUFFER."""
        self.kernel.ioctl(self.fd("space"), io.NVGPU_AS_IOCTL_UNMAP_BUFFER, s.AsUnmapBuffer(offset=va))

    def gpu_buffer(self, undo: ExitStack, size: int) -> Buffer:
        """A buffer mapped for both."""
        buffer = self.buffer(undo, size)
        self.map_gpu(undo, buffer)
        return buffer


class Channel:
    """A usermode channel: its ring, its pushbuffer, and one semaphore that counts what was pushed."""

    def __init__(self, device: Device, undo: ExitStack, tsg: int, veid: int, chip: Chip) -> None:
        kernel = device.kernel
        self.kernel = kernel
        self.gpfifo = device.buffer(undo, ENTRIES * 8, c.NVMAP_HANDLE_WRITE_COMBINE)
        self.userd = device.buffer(undo, PAGE)
        self.notifier = device.buffer(undo, PAGE)
        self.push = device.gpu_buffer(undo, PUSH_SIZE)
        self.semaphore = device.gpu_buffer(undo, PAGE)
        arg = s.GpuOpenChannel()
        arg.in_.runlist_id = -1
        kernel.ioctl(device.fd("ctrl"), io.NVGPU_GPU_IOCTL_OPEN_CHANNEL, arg)
        self.fd = device.keep(undo, int(arg.channel_fd))
        kernel.ioctl(device.fd("space"), io.NVGPU_AS_IOCTL_BIND_CHANNEL, s.AsBindChannel(channel_fd=self.fd))
        kernel.ioctl(
            tsg, io.NVGPU_TSG_IOCTL_BIND_CHANNEL_EX, s.TsgBindChannelEx(channel_fd=self.fd, subcontext_id=veid)
        )
        wdt = s.ChannelWdt(wdt_status=c.NVGPU_IOCTL_CHANNEL_DISABLE_WDT)
        kernel.ioctl(self.fd, io.NVGPU_IOCTL_CHANNEL_WDT, wdt)
        self.token = self._setup_bind()
        # The preemption mode is judged by the class that was asked for last: a copy engine has no mode to raise.
        for number in (chip.dma_class, chip.compute_class):
            kernel.ioctl(self.fd, io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, s.AllocObjCtx(class_num=number))
        self.syncpoint = s.GetUserSyncpoint()
        kernel.ioctl(self.fd, io.NVGPU_IOCTL_CHANNEL_GET_USER_SYNCPOINT, self.syncpoint)
        notifier = s.SetErrorNotifier(offset=0, size=16, mem=self.notifier.fd)
        kernel.ioctl(self.fd, io.NVGPU_IOCTL_CHANNEL_SET_ERROR_NOTIFIER, notifier)
        self.bell: Doorbell | None = None
        self.put = self.used = self.count = 0

    def _setup_bind(self) -> int:
        flags = c.NVGPU_CHANNEL_SETUP_BIND_FLAGS_DETERMINISTIC | c.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT
        arg = s.ChannelSetupBind(
            num_gpfifo_entries=ENTRIES, flags=flags, userd_dmabuf_fd=self.userd.fd, gpfifo_dmabuf_fd=self.gpfifo.fd
        )
        self.kernel.ioctl(self.fd, io.NVGPU_IOCTL_CHANNEL_SETUP_BIND, arg)
        return int(arg.work_submit_token)

    def queue(self, words: list[int]) -> None:
        """Write the words to the pushbuffer and an entry for them to the ring; nothing runs yet."""
        size = 4 * len(words)
        if self.used + size > self.push.size:
            raise CheckFailed(f"the pushbuffer of {self.push.size} bytes is full")
        self.push.view(self.used, size)[:] = struct.pack(f"<{len(words)}I", *words)
        self.gpfifo.quad(self.put * 8).value = gp_entry(self.push.va + self.used, len(words))
        self.used += size
        self.put = (self.put + 1) % ENTRIES

    def ring(self) -> None:
        """Make what is queued visible, then GP_PUT, then the doorbell."""
        if self.bell is None:
            raise CheckFailed("not tried: the doorbell page is not mapped")
        full_barrier()
        self.userd.word(Userd.GP_PUT).value = self.put
        full_barrier()
        self.bell.store32(DOORBELL, self.token)

    def run(self, *segments: list[int]) -> float:
        """Run the segments, one ring entry each, then a semaphore release; seconds from doorbell to its value."""
        self.count += 1
        for words in segments:
            self.queue(words)
        self.queue(release(self.semaphore.va, self.count))
        start = time.perf_counter()
        self.ring()
        self.wait(lambda: self.semaphore.quad(0).value >= self.count, f"semaphore value {self.count}")
        return time.perf_counter() - start

    def wait(self, done: Callable[[], bool], what: str) -> None:
        """Poll until done; CheckFailed with the notifier's reason when the channel died, or after WAIT_S."""
        start = time.perf_counter()
        while not done():
            elapsed = time.perf_counter() - start
            notifier = read_notifier(self.notifier.view(0, 16))
            if notifier.status:
                reason = NOTIFIER_TEXT.get(notifier.info32, "unknown")
                raise CheckFailed(f"the channel died waiting for {what}: code {notifier.info32}, {reason}")
            if elapsed > WAIT_S:
                raise CheckFailed(f"no {what} within {WAIT_S:.0f} s; the channel reports no error")
            if elapsed > 0.002:
                time.sleep(0.0005)

    def timed_out(self) -> int:
        """GET_TIMEDOUT: 1 once the driver has given the channel up."""
        arg = s.GetParam()
        self.kernel.ioctl(self.fd, io.NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT, arg)
        return int(arg.value)


def methods(subchannel: int, first: int, *words: int) -> list[int]:
    """Consecutive methods from `first`, one word each."""
    return [method_header(MethodOp.INC, subchannel, first, len(words)), *words]


def split(address: int) -> tuple[int, int]:
    """(upper, lower) 32 bits, the order in which most methods take an address."""
    return address >> 32, address & 0xFFFFFFFF


def release(va: int, value: int) -> list[int]:
    """A host semaphore release that waits for everything before it: 64-bit payload, then a timestamp 8 bytes on."""
    execute = HOST["SEM_EXECUTE"].pack(
        operation="RELEASE", release_wfi="EN", payload_size="64BIT", release_timestamp="EN"
    )
    upper, lower = split(va)
    return methods(0, HostMethod.SEM_ADDR_LO, lower, upper, value & 0xFFFFFFFF, value >> 32, execute)


def syncpoint_increment(va: int) -> list[int]:
    """A 32-bit release to a syncpoint's address: any store there counts it up by one."""
    upper, lower = split(va)
    execute = HOST["SEM_EXECUTE"].pack(operation="RELEASE", release_wfi="EN")
    return methods(0, HostMethod.SEM_ADDR_LO, lower, upper, 0, 0, execute)


def setup(chip: Chip) -> list[int]:
    """Both engine objects, the shader windows and an empty local memory, once per channel."""
    compute = Subchannel.COMPUTE
    return [
        *methods(compute, HostMethod.SET_OBJECT, chip.compute_class),
        *methods(compute, ComputeMethod.SET_SHADER_SHARED_MEMORY_WINDOW_A, *split(chip.shared_window)),
        *methods(compute, ComputeMethod.SET_SHADER_LOCAL_MEMORY_WINDOW_A, *split(chip.local_window)),
        *methods(compute, ComputeMethod.SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A, 0, 0, MAX_SMS),
        *methods(Subchannel.COPY, HostMethod.SET_OBJECT, chip.dma_class),
    ]


def copy(source: int, target: int, size: int) -> list[int]:
    """One linear copy on the copy engine, flushed when it is done."""
    launch = COPY["LAUNCH_DMA"].pack(
        data_transfer_type="NON_PIPELINED", flush_enable=1, src_memory_layout="PITCH", dst_memory_layout="PITCH"
    )
    return [
        *methods(Subchannel.COPY, CopyMethod.OFFSET_IN_UPPER, *split(source), *split(target)),
        *methods(Subchannel.COPY, CopyMethod.LINE_LENGTH_IN, size, 1),
        *methods(Subchannel.COPY, CopyMethod.LAUNCH_DMA, launch),
    ]


def launch(qmd_va: int) -> list[int]:
    """Drop stale instructions, data and constants, then hand the QMD to the scheduler."""
    caches = COMPUTE["INVALIDATE_SHADER_CACHES"].pack(instruction=1, data=1, constant=1)
    action = COMPUTE["SEND_SIGNALING_PCAS2_B"].pack(pcas_action="PREFETCH_SCHEDULE")
    compute = Subchannel.COMPUTE
    return [
        *methods(compute, ComputeMethod.INVALIDATE_SHADER_CACHES, caches),
        *methods(compute, ComputeMethod.SEND_PCAS_A, qmd_va >> 8),
        *methods(compute, ComputeMethod.SEND_SIGNALING_PCAS2_B, action),
    ]


@dataclass(frozen=True, slots=True)
class Program:
    """A compiled kernel: its machine code and PTX section as loaded, and what a launch needs to know of it."""

    code: bytes
    section: bytes
    registers: int
    param_base: int

    @classmethod
    def compile(cls, chip: Chip) -> "Program":
        """SOURCE compiled by NVRTC for the chip."""
        elf = cubin.Cubin(compilers.compile_cuda(SOURCE, chip.arch))
        name = cubin.sole_kernel(elf)
        text, section = elf.find(f".text.{name}"), elf.find(SECTION)
        if text is None or section is None or list(elf.relocations(f".text.{name}")):
            raise CheckFailed(f"{name} was not compiled to code that stands alone")
        return cls(elf.content(text), elf.content(section), elf.registers(name), elf.param_base(name))

    @property
    def section_offset(self) -> int:
        """Where the PTX section goes, after the code."""
        return -(-len(self.code) // ALIGN) * ALIGN

    @property
    def size(self) -> int:
        """Bytes of the buffer, whole pages."""
        return -(-(self.section_offset + len(self.section) + PREFETCH_MARGIN) // PAGE) * PAGE

    def load(self, buffer: Buffer) -> None:
        """Machine code at the start, the section after it with its entry slot relocated."""
        section = bytearray(self.section)
        struct.pack_into("<Q", section, ENTRY_SLOT, buffer.va)
        buffer.view(0, len(self.code))[:] = self.code
        buffer.view(self.section_offset, len(section))[:] = section


def constant_bank(chip: Chip, program: Program, grid: int, *arguments: int) -> bytes:
    """Constant bank 0: dimensions, windows and stack top where compiled code expects them; two pointers, two ints."""
    bank = bytearray(program.param_base) + struct.pack("<QQII", *arguments)
    bank0.DIMS.pack_into(bank, bank0.BLOCK_DIM, THREADS, 1, 1, grid, 1, 1)
    struct.pack_into("<QQQ", bank, 24, chip.shared_window, chip.local_window, 0xFFFDC0)
    return bytes(bank).ljust(-(-len(bank) // 256) * 256, b"\0")


def build_qmd(chip: Chip, mem: memoryview, program: Program, code: int, bank: int, bank_size: int, grid: int) -> None:
    """Fill a QMD of the chip's version for `grid` blocks of THREADS threads."""
    qmd = Qmd(LAYOUTS[chip.qmd], mem)
    mem[: qmd.layout.size] = bytes(qmd.layout.size)
    upper, lower = split(code)
    qmd.write(
        qmd_major_version=qmd.layout.major,
        qmd_group_id=0x3F,
        program_address_upper=upper,
        program_address_lower=lower,
        cta_thread_dimension0=THREADS,
        cta_thread_dimension1=1,
        cta_thread_dimension2=1,
        shared_memory_size=SHARED_RESERVE,
        min_sm_config_shared_mem_size=SM_CONFIG_32K,
        target_sm_config_shared_mem_size=SM_CONFIG_32K,
        max_sm_config_shared_mem_size=chip.smem_per_sm // 4096 + 1,
        invalidate_texture_header_cache=1,
        invalidate_texture_sampler_cache=1,
        invalidate_texture_data_cache=1,
        invalidate_shader_data_cache=1,
        api_visible_call_limit=1,
        sampler_index=1,
        barrier_count=1,
        cwd_membar_type=qmd.layout.enums["cwd_membar_type"]["L1_SYSMEMBAR"],
        sass_version=chip.sass_version,
        constant_buffer_valid_0=1,
        constant_buffer_invalidate_0=1,
        constant_buffer_size_shifted4_0=bank_size // 16,
        **VERSION_FIELDS[chip.qmd](program.registers, grid, bank),
    )


def _v3(registers: int, grid: int, bank: int) -> dict[str, int]:
    return {
        "sm_global_caching_enable": 1,
        "register_count_v": registers,
        "cta_raster_width": grid,
        "cta_raster_height": 1,
        "cta_raster_depth": 1,
        "constant_buffer_addr_upper_0": bank >> 32,
        "constant_buffer_addr_lower_0": bank & 0xFFFFFFFF,
    }


def _v4(registers: int, grid: int, bank: int) -> dict[str, int]:
    return {
        "qmd_type": LAYOUTS["V4"].enums["qmd_type"]["GRID_CTA"],
        "register_count": registers,
        "grid_width": grid,
        "grid_height": 1,
        "grid_depth": 1,
        "constant_buffer_addr_upper_shifted6_0": bank >> 38,
        "constant_buffer_addr_lower_shifted6_0": bank >> 6 & 0xFFFFFFFF,
    }


VERSION_FIELDS: dict[str, Callable[[int, int, int], dict[str, int]]] = {"V3": _v3, "V4": _v4}
