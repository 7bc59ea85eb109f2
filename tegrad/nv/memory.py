"""Memory of a Jetson: nvmap buffers, their CPU mappings, and the GPU's address space.

An nvmap handle is the memory; a dmabuf fd, made when needed and closed again, carries it into another call; CPU and GPU
mappings each keep it alive. Every function undoes what it did when a later step fails.
"""

import ctypes
import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tegrad.nv.faults import UnsupportedBuffer
from tegrad.uapi import constants as c
from tegrad.uapi import ioctls
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import MAP_FIXED, MAP_SHARED, PROT_READ, PROT_WRITE, Kernel
from tegrad.uapi.structs import AllocHandle, AsAllocSpace, AsMapBufferEx, AsUnmapBuffer, CreateHandle

PAGE = 4096
LARGE_ALIGN = 2 << 20
"""Alignment of buffers of LARGE_SIZE and more; the GPU maps 4 KiB pages, but the allocator can use larger groups."""
LARGE_SIZE = 8 << 20
CREATE_64_SIZE = 1 << 32
"""From here up the size does not fit CREATE's 32 bits."""
NVMAP_TAG = 0x0900
"""Any nonzero value in flags 31:16; without one the driver logs an error line. This one has been used on hardware."""
RESERVE = 128 << 20
"""Bytes of free memory that an allocation leaves to the system: beyond, the OOM killer takes unified memory back."""
MAKE_ROOM = "free tensors, or use a smaller model or batch"


class Role(IntEnum):
    """What a buffer is for, as the cacheability that suits it.

    Orin is I/O coherent, so cached memory needs no maintenance: reading it back runs at 11.8 GB/s against 0.7 for
    write-combined and 0.07 for uncached memory (measured on an AGX Orin, 1 MiB).
    """

    DATA = c.NVMAP_HANDLE_INNER_CACHEABLE
    """Tensors, programs, kernel arguments, signals, notifiers: all read by the CPU as well."""
    RING = c.NVMAP_HANDLE_WRITE_COMBINE
    """GPFIFOs and USERD: the CPU only writes them, and the host engine need not snoop the CPU's caches to see it."""


@dataclass(slots=True, eq=False)
class Memory:
    """An nvmap buffer: its CPU address and, where it is mapped for the GPU, the address there (else 0).

    `size` is as asked for, the driver rounds to pages.
    """

    handle: int
    size: int
    address: int = 0
    va: int = 0
    owns_mapping: bool = True

    @property
    def hMemory(self) -> int:
        """The handle under the name that tinygrad asks the meta of a buffer for."""
        return self.handle


def available_memory() -> int:
    """Bytes that the system can still give out (MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


class Nvmap:
    """The nvmap fd: buffers come and go here. The fd is closed by `close`, with whatever is left."""

    def __init__(self, kernel: Kernel, path: str) -> None:
        self._kernel = kernel
        self.fd = kernel.open(path)

    def alloc(self, size: int, role: Role = Role.DATA, space: "AddressSpace | None" = None) -> Memory:
        """A zeroed buffer of `size` bytes, mapped for the CPU and, given an address space, for the GPU.

        The CPU sees it at the GPU's address where that is free, as tinygrad expects of memory that both reach.
        MemoryError when the driver or the system has not enough left; DriverError for anything else.
        """
        if (free := available_memory()) - size < RESERVE:
            raise MemoryError(
                f"{size} bytes are asked for and {free} are free, of which {RESERVE} stay reserved: {MAKE_ROOM}."
            )
        with ExitStack() as undo:
            try:
                memory = Memory(self._create(size), size)
                undo.callback(self._free_handle, memory.handle)
                self._allocate(memory.handle, size, role)
                with self.export(memory) as fd:
                    if space is not None:
                        memory.va = space.map(fd)
                        undo.callback(space.unmap, memory.va)
                    memory.address = self._map(fd, size, memory.va)
                    undo.callback(self._kernel.munmap, memory.address, _pages(size))
            except DriverError as error:
                if error.errno == errno.ENOMEM:
                    raise MemoryError(f"The driver has no {size} bytes left: {MAKE_ROOM}.") from error
                raise
            undo.pop_all()
            return memory

    def adopt(self, address: int, size: int, space: "AddressSpace") -> Memory:
        """Turn `size` bytes of the process's own memory at `address` into a buffer in place, contents kept.

        A mapping of the buffer replaces the pages, so the owner's pointers and its munmap stay valid; another one is
        for the GPU. The caller keeps other threads from writing meanwhile. UnsupportedBuffer unless `address` starts
        a page.
        """
        if address % PAGE:
            raise UnsupportedBuffer(
                f"Memory at {address:#x} cannot be mapped for the GPU: it does not start a page. Copy it to NV."
            )
        memory = self.alloc(size, space=space)
        with ExitStack() as undo:
            undo.callback(self.free, memory, space)
            ctypes.memmove(memory.address, address, size)
            with self.export(memory) as fd:
                self._map(fd, size, address, MAP_FIXED)
            undo.pop_all()
        self._kernel.munmap(memory.address, _pages(size))
        memory.address, memory.owns_mapping = address, False
        return memory

    def free(self, memory: Memory, space: "AddressSpace | None" = None) -> None:
        """Give the buffer back; `space` is where it is mapped, if it still is. Nothing may use it any more."""
        with ExitStack() as steps:
            steps.callback(self._free_handle, memory.handle)
            if memory.owns_mapping:
                steps.callback(self._kernel.munmap, memory.address, _pages(memory.size))
            if space is not None and memory.va:
                steps.callback(space.unmap, memory.va)

    @contextmanager
    def export(self, memory: Memory) -> Iterator[int]:
        """A dmabuf fd of the buffer, open inside the `with`; never 0, which SETUP_BIND refuses."""
        with ExitStack() as fds:
            fd = 0
            while fd == 0:
                arg = CreateHandle(handle=memory.handle)
                self._kernel.ioctl(self.fd, ioctls.NVMAP_IOC_GET_FD, arg)
                fd = int(arg.fd)
                fds.callback(self._kernel.close, fd)
            yield fd

    def close(self) -> None:
        """Close the fd; buffers that nothing else keeps alive end with it."""
        self._kernel.close(self.fd)

    def _map(self, fd: int, size: int, near: int = 0, flags: int = 0) -> int:
        """Map for the CPU: at `near` if nothing is there, or in any case with MAP_FIXED."""
        return self._kernel.mmap(fd, _pages(size), PROT_READ | PROT_WRITE, MAP_SHARED | flags, addr=near)

    def _create(self, size: int) -> int:
        if size < CREATE_64_SIZE:
            arg = CreateHandle(size=size)
            self._kernel.ioctl(self.fd, ioctls.NVMAP_IOC_CREATE, arg)
            return int(arg.handle)
        arg = CreateHandle(size64=size)
        self._kernel.ioctl(self.fd, ioctls.NVMAP_IOC_CREATE_64, arg)
        return int(arg.handle64)

    def _allocate(self, handle: int, size: int, role: Role) -> None:
        arg = AllocHandle(
            handle=handle,
            heap_mask=c.NVMAP_HEAP_IOVMM,
            flags=role | NVMAP_TAG << 16,
            align=LARGE_ALIGN if size >= LARGE_SIZE else PAGE,
            numa_nid=-1,
        )
        self._kernel.ioctl(self.fd, ioctls.NVMAP_IOC_ALLOC, arg)

    def _free_handle(self, handle: int) -> None:
        self._kernel.ioctl(self.fd, ioctls.NVMAP_IOC_FREE, handle)


class AddressSpace:
    """The GPU's address space of one client (the AS fd)."""

    def __init__(self, kernel: Kernel, fd: int) -> None:
        self._kernel = kernel
        self.fd = fd

    def reserve(self, start: int, size: int) -> None:
        """Keep every later mapping out of [start, start + size)."""
        arg = AsAllocSpace(
            pages=size // PAGE, page_size=PAGE, flags=c.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET, o_a=(start,)
        )
        self._kernel.ioctl(self.fd, ioctls.NVGPU_AS_IOCTL_ALLOC_SPACE, arg)

    def map(self, dmabuf: int) -> int:
        """Map a whole buffer, cached in the GPU's L2; the driver picks the address."""
        arg = AsMapBufferEx(
            flags=c.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE,
            compr_kind=c.NV_KIND_INVALID,
            incompr_kind=0,
            dmabuf_fd=dmabuf,
            page_size=PAGE,
        )
        self._kernel.ioctl(self.fd, ioctls.NVGPU_AS_IOCTL_MAP_BUFFER_EX, arg)
        return int(arg.offset)

    def unmap(self, va: int) -> None:
        """Remove a mapping. The driver does not wait for the GPU: nothing may use it any more."""
        self._kernel.ioctl(self.fd, ioctls.NVGPU_AS_IOCTL_UNMAP_BUFFER, AsUnmapBuffer(offset=va))

    def close(self) -> None:
        """Close the fd; the driver keeps the address space until the last channel is gone."""
        self._kernel.close(self.fd)


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
