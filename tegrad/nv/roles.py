"""The one table of what memory is for, and the two policies by which the GPU's L2 may keep lines of it.

A ga10b snoops the CPU's caches, but the CPU does not see the GPU's L2. A GPU mapping made without CACHEABLE is
*volatile*: every access of the GPU reaches memory. One made with it is *cached*: L2 may hold on to what it has read,
and to what it is to write. Neither says anything of the CPU's caches, which nvmap's attribute decides.

Under the first policy everything is volatile. Under the second, what the CPU does not touch between launches is cached,
and `coherence` tells what is done where the CPU comes in after all. docs/coherence.md shows the table.
"""

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tegrad.errors import SettingError
from tegrad.nv import memory_record
from tegrad.nv.kernel import emulated
from tegrad.uapi import constants as c

PAGE: Final = 4096
LARGE_ALIGN: Final = 2 << 20
"""Alignment of buffers of LARGE_SIZE and more; the GPU maps 4 KiB pages, but the allocator can use larger groups."""
LARGE_SIZE: Final = 8 << 20
NVMAP_TAG: Final = 0x0900
"""The first role's tag. Flags 31:16 of an nvmap allocation take any nonzero value; without one the driver logs an error
line. This one has been used on hardware."""
VARIABLE: Final = "TEGRAD_MEMORY"

VOLATILE: Final = 0
CACHED: Final = c.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE


class PolicyError(SettingError, ValueError):
    """TEGRAD_MEMORY names no policy."""


class Policy(StrEnum):
    """Which of a role's two columns of map flags holds."""

    VOLATILE = "volatile"
    """Flags 0 everywhere: what ran on an AGX Orin and an Orin Nano for others, and what nvgpu does for its own."""
    CACHED = "cached"
    """CACHEABLE for what the CPU does not touch between launches."""


def policy() -> Policy:
    """The policy of this process: what TEGRAD_MEMORY says, else volatile. PolicyError for another value.

    Where nothing is said, and on a device only, cached where a record of this very machine shows it right and faster.
    """
    asked = os.environ.get(VARIABLE, "")
    if not asked:
        record = _record()
        return Policy.CACHED if record is not None and record.cached else Policy.VOLATILE
    try:
        return Policy(asked)
    except ValueError:
        known = " or ".join(Policy)
        raise PolicyError(f"{VARIABLE}={asked} is no memory policy: set it to {known}, or unset it") from None


def one_launch() -> bool:
    """Whether a record of this very machine shows packets between CTAs right, and quicker than launches.

    In the kind of memory that the policy gives to what kernels hand to each other. PolicyError.
    """
    record = _record()
    return record is not None and record.one_launch(policy() is Policy.CACHED)


def _record() -> memory_record.MemoryRecord | None:
    """This machine's record; None on a board, for which no device's decides."""
    return None if emulated() else memory_record.of_this_device()


@dataclass(frozen=True, slots=True, eq=False)
class Role:
    """A row: what memory is for, how it is allocated and mapped, who touches it when, and why that is so."""

    name: str
    number: int
    """Counts the rows; the tag of nvmap allocations is made of it."""
    nvmap: int
    """nvmap's attribute: how the CPU's caches treat it."""
    volatile: int
    """Flags of the GPU mapping under the first policy."""
    cached: int
    """The same under the second policy."""
    align: int
    """Bytes, of buffers of LARGE_SIZE and more; smaller ones start a page."""
    cpu: str
    gpu: str
    why: str
    source: str
    within: str = ""
    """Roles whose memory it lies in, if it is never a buffer of its own."""

    @property
    def tag(self) -> int:
        """Bits 31:16 of the flags of an nvmap allocation."""
        return NVMAP_TAG + self.number

    @property
    def label(self) -> str:
        """The tag's name, in the driver's debug files."""
        return f"tegrad {self.name}"

    def flags(self, chosen: Policy) -> int:
        """Flags of MAP_BUFFER_EX."""
        return self.cached if chosen is Policy.CACHED else self.volatile

    def alignment(self, size: int) -> int:
        """Alignment of a buffer of `size` bytes."""
        return self.align if size >= LARGE_SIZE else PAGE


_INNER, _COMBINED = c.NVMAP_HANDLE_INNER_CACHEABLE, c.NVMAP_HANDLE_WRITE_COMBINE
_FIELD = "flags 0: TegraIface that ran tinygrad's test_ops on an AGX Orin"
_DRIVER = "nvgpu maps its own with flags 0 (os/linux/linux-channel.c, common/mm/dma.c)"
_ONE_WAY = "CUDA for Tegra, 3.1: coherency is one way"
_H200 = "an H200 with system memory mapped cacheable (docs/coherence.md)"

TENSORS: Final = Role(
    "tensors", 0, _INNER, VOLATILE, VOLATILE, LARGE_ALIGN,
    cpu="at any time between launches: copies, zero-copy views, tegrad.record's arrays",
    gpu="every launch",
    why="views of it outlive any moment at which L2 could be written back; also what nothing else claims",
    source=_FIELD,
)  # fmt: skip
PUSHBUFFER: Final = Role(
    "pushbuffer", 1, _INNER, VOLATILE, VOLATILE, PAGE,
    cpu="writes commands before each submission, at addresses that were read before",
    gpu="the host engine reads them once",
    why="the same address rewritten between submissions ran its first commands again",
    source=f"{_H200}; {_DRIVER}",
)  # fmt: skip
GPFIFO: Final = Role(
    "GPFIFO", 2, _COMBINED, VOLATILE, VOLATILE, PAGE,
    cpu="writes an entry for each segment",
    gpu="the host engine reads it; the driver maps it itself",
    why="the CPU only writes it, and the host engine need not snoop the CPU's caches to see it",
    source=_DRIVER,
)  # fmt: skip
USERD: Final = Role(
    "USERD", 3, _COMBINED, VOLATILE, VOLATILE, PAGE,
    cpu="writes GP_PUT before each doorbell",
    gpu="the host engine reads it at the doorbell, by physical address",
    why="as GPFIFO",
    source="nvgpu, common/fifo/userd",
)  # fmt: skip
ARGUMENTS: Final = Role(
    "kernel arguments", 4, _INNER, VOLATILE, VOLATILE, PAGE,
    cpu="writes constant bank 0 of each launch into a ring",
    gpu="SMs read it through the constant cache",
    why="rewritten arguments were read as they had been, with membars and constant invalidations between",
    source=_H200,
)  # fmt: skip
QMD: Final = Role(
    "QMD", 5, _INNER, VOLATILE, VOLATILE, PAGE,
    cpu="writes it before the launch, after the arguments",
    gpu="the front end reads it when the launch is scheduled",
    why="as kernel arguments: rewritten QMDs launched their first grid again",
    source=_H200,
    within="kernel arguments, recording",
)  # fmt: skip
RECORDING: Final = Role(
    "recording", 6, _INNER, VOLATILE, VOLATILE, PAGE,
    cpu="writes arguments, QMDs and commands once, and two numbers before each run",
    gpu="host engine, front end and SMs read it in each run",
    why="the numbers are rewritten at addresses that were read before",
    source=_H200,
)  # fmt: skip
SIGNALS: Final = Role(
    "signals", 7, _INNER, VOLATILE, VOLATILE, PAGE,
    cpu="polls them, and sets some",
    gpu="releases and acquires them",
    why="a release that stays in L2 is a wait without end, and so is an acquire of a kept word",
    source=f"{_H200}; nvgpu, common/semaphore/semaphore_pool.c: flags 0; on an Orin Nano a CPU polled a result in "
    "memory that it caches (TegraIface has its signals write-combined)",
)  # fmt: skip
NOTIFIER: Final = Role(
    "notifier", 8, _INNER, VOLATILE, VOLATILE, PAGE,
    cpu="the driver writes it when a channel dies, waits read it",
    gpu="never; it is not mapped",
    why="no GPU access",
    source="nvgpu, os/linux/ioctl_channel.c",
)  # fmt: skip
STAGING: Final = Role(
    "staging", 9, _INNER, VOLATILE, VOLATILE, LARGE_ALIGN,
    cpu="at any time: buffers of tinygrad's CPU device that the GPU reaches, blocks of a file on its way",
    gpu="copies and kernels",
    why="its owner does not know that a GPU sees it",
    source="CUDA for Tegra, table 1: pinned memory is not cached by the iGPU",
)  # fmt: skip
STATE: Final = Role(
    "state", 10, _INNER, VOLATILE, VOLATILE, PAGE,
    cpu="polls rings of tokens and timestamps while steps run; sets prompts, states, settings between them",
    gpu="every step reads and advances it",
    why="CPU and GPU write neighbouring words of it",
    source=_ONE_WAY,
)  # fmt: skip
LOGITS: Final = Role(
    "logits", 11, _INNER, VOLATILE, VOLATILE, LARGE_ALIGN,
    cpu="copies them out, of each token where the host samples",
    gpu="the last product writes them, sampling reads them once",
    why="a flush for each token would empty L2 of the next step's input",
    source=_ONE_WAY,
)  # fmt: skip
CODE: Final = Role(
    "code", 12, _INNER, VOLATILE, CACHED, LARGE_ALIGN,
    cpu="writes it when a program is loaded, to memory that no launch has read",
    gpu="SMs fetch instructions and constants",
    why="the CPU does not touch it between launches",
    source=_ONE_WAY,
)  # fmt: skip
WEIGHTS: Final = Role(
    "weights", 13, _INNER, VOLATILE, CACHED, LARGE_ALIGN,
    cpu="writes a file's bytes before the first launch that reads them",
    gpu="repacks them once, then only reads",
    why="the CPU does not touch it between launches; several SMs read the same lines",
    source=_ONE_WAY,
)  # fmt: skip
KV_CACHE: Final = Role(
    "KV cache", 14, _INNER, VOLATILE, CACHED, LARGE_ALIGN,
    cpu="never",
    gpu="each step appends to it and reads all of it",
    why="the CPU does not touch it between launches",
    source=_ONE_WAY,
)  # fmt: skip
WORKSPACE: Final = Role(
    "workspace", 15, _INNER, VOLATILE, CACHED, LARGE_ALIGN,
    cpu="puts tables and zeros there before the first launch; copies out what a test or a profile asks for",
    gpu="kernels hand activations to each other in it",
    why="the CPU does not touch it between launches; what one kernel writes the next one reads",
    source=_ONE_WAY,
)  # fmt: skip
LOCAL: Final = Role(
    "local memory", 16, _INNER, VOLATILE, CACHED, LARGE_ALIGN,
    cpu="never",
    gpu="threads spill registers to it",
    why="the CPU does not touch it",
    source=_ONE_WAY,
)  # fmt: skip

ROLES: Final = (
    TENSORS, PUSHBUFFER, GPFIFO, USERD, ARGUMENTS, QMD, RECORDING, SIGNALS, NOTIFIER, STAGING, STATE, LOGITS, CODE,
    WEIGHTS, KV_CACHE, WORKSPACE, LOCAL,
)  # fmt: skip
"""Every role. nvmap's attributes: Orin is I/O coherent, so memory that the CPU caches needs no maintenance of the
CPU's; reading it back runs at 11.8 GB/s against 0.7 for write-combined and 0.07 for uncached memory (measured by others
on an AGX Orin, 1 MiB)."""
