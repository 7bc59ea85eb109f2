"""Loading a cubin as a program of tinygrad's NV device.

tinygrad's loader stays; what it gets wrong is put right around it: shared memory up to the chip's own limit and memory
that is given at launch, registers and stack of the kernel instead of those of the last function in the file, addends
of relocations, and a refusal of what cannot run (several kernels in one cubin, a misaligned argument).
"""

import math
import re
import struct
from collections.abc import Sequence
from typing import Any

from tinygrad.device import BufferSpec, TinyELF
from tinygrad.runtime import ops_nv
from tinygrad.runtime.support import elf

from tegrad.errors import TegradError
from tegrad.nv import directives, roles
from tegrad.nv.cubin import BadCubin, Cubin, read_ptx, sole_kernel
from tegrad.nv.spec import allocating

SHARED_RESERVE = 0x400
"""Bytes of shared memory that the hardware keeps of each block's."""
_SHARED_GRANULE = 128
# What an SM can split off its L1 as shared memory (KiB): CUDA programming guide, compute capabilities 8.0 to 9.0.
# Smaller splits exist, but every block takes 1 KiB, so that they would limit how many blocks an SM holds.
_SM_CONFIGS = {
    0x800: (32, 64, 100, 132, 164),
    0x807: (32, 64, 100, 132, 164),
    0x900: (32, 64, 100, 132, 164, 196, 228),
}
_DEFAULT_CONFIGS = (32, 64, 100)


class LaunchError(TegradError, RuntimeError):
    """A kernel cannot be loaded or launched as asked."""


def sm_config(size: int, sm_version: int) -> int:
    """The QMD's code for the smallest shared-memory split of an SM that has `size` bytes."""
    configs = _SM_CONFIGS.get(sm_version, _DEFAULT_CONFIGS)
    for kib in configs:
        if size <= kib << 10:
            return kib // 4 + 1
    raise LaunchError(f"the kernel needs {size} bytes of shared memory, an SM has {configs[-1] << 10}: use less")


def shared_limit(sm_version: int) -> int:
    """Bytes of shared memory that one block may take, with the hardware's reserve."""
    return _SM_CONFIGS.get(sm_version, _DEFAULT_CONFIGS)[-1] << 10


def shared_usage(cubin: Cubin, kernel: str) -> int:
    """Bytes of shared memory that one block takes, with the hardware's reserve and the memory given at launch."""
    section = read_ptx(cubin.data)
    dynamic = section.dynamic_shared if section else 0
    used = SHARED_RESERVE + cubin.static_shared(kernel)
    used = (used + 15) // 16 * 16 + dynamic if dynamic else used
    return (used + _SHARED_GRANULE - 1) // _SHARED_GRANULE * _SHARED_GRANULE


_BARRIER = re.compile(r"bar(?<!\wbar)(?:rier)?(?:\.cta)?\.(?:sync|arrive|red)\b([\w.]*)\s*([^;]*);")
"""Begins with letters, by which a text of a megabyte is searched four times faster than for the edge of a word."""
ALL_BARRIERS = 16
_RESIDENT = re.compile(r"\.minnctapersm\s+(\d+)")


def barrier_count(cubin: Cubin, kernel: str) -> int:
    """Barriers that each block gets: what the kernel's machine code or, where that does not tell, its PTX names.

    A barrier beyond the count is an illegal instruction parameter. A number in a register may be any of them.
    """
    count = max(1, cubin.barriers(kernel))
    section = read_ptx(cubin.data)
    for how, operands in _BARRIER.findall(section.ptx if section else ""):
        given = [o.strip() for o in operands.split(",")][1 if how.startswith((".popc", ".and", ".or")) else 0 :]
        if not given or not given[0]:
            continue
        count = max(count, int(given[0], 0) + 1 if given[0][0].isdigit() else ALL_BARRIERS)
    return min(count, ALL_BARRIERS)


def resident_shared(cubin: Cubin, shared: int, limit: int) -> int:
    """Bytes of shared memory of as many blocks as the kernel's launch bounds ask an SM to hold, or as its limit allows.

    An SM that has split off only one block's share takes no second one, whatever registers are left.
    """
    section = read_ptx(cubin.data)
    asked = _RESIDENT.search(section.ptx) if section else None
    return shared * max(1, min(int(asked[1]) if asked else 1, limit // shared))


def without_shared(cubin: Cubin, kernel: str) -> bytes:
    """The same file with the shared section's size zero: tinygrad's loader fails where that is above 100 KiB."""
    index = next((i for i, s in enumerate(cubin.sections) if s.name == f".nv.shared.{kernel}"), None)
    if index is None:
        return cubin.data
    data = bytearray(cubin.data)
    struct.pack_into("<Q", data, cubin.ehdr[6] + index * 64 + 32, 0)
    return bytes(data)


def load_elf(
    blob: bytes, force_section_align: int = 1, **kwargs: Any
) -> tuple[Any, Any, list[tuple[int, int, int, int]]]:
    """tinygrad's `elf_loader`, with each relocation's addend added to its target: NVProgram drops addends."""
    image, sections, relocations = elf.elf_loader(blob, force_section_align, **kwargs)
    return image, sections, [(at, target + addend, kind, 0) for at, target, kind, addend in relocations]


class NVProgram(ops_nv.NVProgram):  # type: ignore[misc]
    """One kernel in device memory, ready to launch."""

    _launcher: Any = None

    def __init__(self, dev: Any, obj: TinyELF) -> None:
        self.align: tuple[int, ...] = ()
        if obj.lib[:4] != b"\x7fELF":  # NAK's shaders
            self._load(dev, obj)
            return
        cubin = Cubin(obj.lib)
        try:
            kernel = sole_kernel(cubin)
        except BadCubin as error:
            raise LaunchError(f"{obj.name}: {error}") from error
        if kernel != obj.name:
            raise LaunchError(f'the cubin holds the kernel {kernel}, not {obj.name}: use extern "C" and that name')
        shared = shared_usage(cubin, kernel)
        limit = shared_limit(dev.sm_version)
        config = sm_config(resident_shared(cubin, shared, limit), dev.sm_version)
        if section := read_ptx(obj.lib):
            self.align = directives.parse(section.ptx).align
        self._load(dev, TinyELF(without_shared(cubin, kernel), obj.name, obj.target, obj.signature, obj.profile_key))
        self.lib, self.shmem_usage = obj.lib, shared
        size = "shared_memory_size_shifted7" if self.qmd.ver >= 5 else "shared_memory_size"
        self.qmd.write(
            **{size: shared >> 7 if self.qmd.ver >= 5 else shared},
            barrier_count=barrier_count(cubin, kernel),
            min_sm_config_shared_mem_size=config,
            target_sm_config_shared_mem_size=config,
            max_sm_config_shared_mem_size=sm_config(limit, dev.sm_version),
        )
        self._forget_old_code()

    def _load(self, dev: Any, obj: TinyELF) -> None:
        """tinygrad's loading, which gives the code's memory back if it fails; the finalizer comes at its very end."""
        try:
            with allocating(roles.CODE):
                super().__init__(dev, obj)
        except BaseException:
            if (memory := self.__dict__.get("lib_gpu")) is not None:
                dev.allocator.free(memory, memory.size, BufferSpec(nolru=True))
            raise

    def _forget_old_code(self) -> None:
        """Invalidate the instruction caches: this program may lie where another one was before.

        tinygrad invalidates before launches of its own, but a queue may launch without.
        """
        dev = self.dev
        queue = ops_nv.NVComputeQueue().wait(dev.timeline_signal, dev.timeline_value - 1).memory_barrier()
        queue.signal(dev.timeline_signal, dev.next_timeline()).submit(dev)

    def fill_kernargs(self, bufs: Any, vals: Any = (), kernargs: Any = None) -> Any:
        """tinygrad's, after a check that no pointer breaks the alignment that the kernel's vector accesses need."""
        for index, buf in enumerate(bufs[: len(self.align)]):
            if isinstance(buf.va_addr, int):  # a recording's inputs come when it is replayed (graph.NVGraph)
                check_alignment(self, index, buf.va_addr)
        return super().fill_kernargs(bufs, vals, kernargs)

    def __call__(
        self,
        *bufs: Any,
        global_size: Any = (1, 1, 1),
        local_size: Any = (1, 1, 1),
        vals: Any = (),
        wait: bool = False,
        timeout: int | None = None,
    ) -> float | None:
        """Launch the kernel; several threads may. With `wait` the seconds that it took."""
        with self.dev.lock:
            if not wait:
                if self._launcher is None:
                    self._launcher = _launcher(self)
                if self._launcher.launch(self, bufs, global_size, local_size, vals):
                    return None
            sizes = {"global_size": global_size, "local_size": local_size}
            seconds: float | None = super().__call__(*bufs, **sizes, vals=vals, wait=wait, timeout=timeout)
        return seconds


def _launcher(program: NVProgram) -> Any:
    from tegrad.nv.launch import Launcher  # which builds on recordings, and these on programs

    return Launcher(program)


def check_alignment(program: Any, index: int, address: int) -> None:
    """LaunchError if the address is not what the kernel's accesses through this argument need."""
    if address % (align := program.align[index]):
        raise LaunchError(
            f"argument {index} of {program.name} is at {address:#x}, its accesses need multiples of {align}: "
            "copy that view first (clone()) or start it at a 16-byte boundary"
        )


GRID_MAX = (0x7FFFFFFF, 0xFFFF, 0xFFFF)
BLOCK_MAX = (1024, 1024, 64)
"""Blocks of a grid and threads of a block along x, y, z (CUDA programming guide, compute capabilities 3.0 to 9.0)."""
THREADS_MAX = 1024


def check_size(program: Any, what: str, axis: int, size: int) -> None:
    """LaunchError if a grid or block is empty or too large along an axis: the hardware would stop the channel."""
    limit = (GRID_MAX if what == "grid" else BLOCK_MAX)[axis]
    if not 1 <= size <= limit:
        raise LaunchError(f"{program.name}: the {what} is {size} along {'xyz'[axis]}, which must be 1 to {limit}")


def check_sizes(program: Any, grid: Sequence[int], block: Sequence[int]) -> None:
    """LaunchError unless grid and block, in x, y and z, can run."""
    for what, sizes in (("grid", grid), ("block", block)):
        for axis, size in enumerate(sizes):
            check_size(program, what, axis, size)
    check_block(program, block)


def check_block(program: Any, block: Sequence[int]) -> None:
    """LaunchError if an SM cannot hold a block of these sizes, for its threads or for the kernel's registers."""
    threads, limit = math.prod(block), min(THREADS_MAX, program.max_threads)
    if threads > limit:
        raise LaunchError(
            f"{program.name}: a block of {'x'.join(map(str, block))} has {threads} threads, the kernel's "
            f"{program.regs_usage} registers allow {limit}: use smaller blocks"
        )
