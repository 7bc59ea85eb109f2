"""Memory of a Jetson: nvmap buffers, their CPU mappings, and the GPU's address space.

An nvmap handle is the memory; a dmabuf fd, made when needed and closed again, carries it into another call; CPU and GPU
mappings each keep it alive. What a buffer is for decides how it is allocated and mapped (`roles`). Every function
undoes what it did when a later step fails.
"""

import ctypes
import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tegrad.nv import roles
from tegrad.nv.faults import UnsupportedBuffer
from tegrad.nv.roles import PAGE, Policy, Role
from tegrad.uapi import constants as c
from tegrad.uapi import ioctls
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import MAP_FIXED, MAP_SHARED, PROT_READ, PROT_WRITE, Kernel
from tegrad.uapi.structs import AllocHandle, AsAllocSpace, AsMapBufferEx, AsUnmapBuffer, CreateHandle, SetTagLabel

CREATE_64_SIZE = 1 << 32
"""From here up the size does not fit CREATE's 32 bits."""
RESERVE_BYTES = 128 << 20
"""Bytes of free memory that an allocation leaves to the system: beyond, the OOM killer takes unified memory back."""
MAKE_ROOM = "free tensors, or use a smaller model or batch"
MEMINFO = Path("/proc/meminfo")
POOL_SIZE = Path("/sys/module/nvmap/parameters/pool_size")
"""Pages that nvmap's pool of freed ones may hold."""
EMPTY_POOL = "echo 2 | sudo tee /proc/sys/vm/drop_caches"
"""Gives the pool's pages back, as to any shrinker (nvmap_pp.c)."""


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
    role: Role = roles.TENSORS
    flags: int = 0
    """Of the GPU mapping."""
    mapped_after: int = 0
    """How much had been submitted before: none of it has touched this memory (see `coherence`)."""

    @property
    def cached(self) -> bool:
        """Whether the GPU's L2 may keep lines of it."""
        return bool(self.flags & roles.CACHED)

    @property
    def hMemory(self) -> int:
        """The handle under the name that tinygrad asks the meta of a buffer for."""
        return self.handle


def available_memory() -> int:
    """Bytes that nvmap can still take from the system: MemAvailable, without what is free for CMA alone.

    nvmap's pages are not movable, so that none comes from there; past the rest the kernel ends processes for them
    (its own count: nvmap_ioctl.c, system_heap_free_mem).
    """
    found = {}
    for line in MEMINFO.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("MemAvailable", "CmaFree"):
            found[name] = int(rest.split()[0]) << 10
    return max(0, found["MemAvailable"] - found.get("CmaFree", 0)) if "MemAvailable" in found else 1 << 62


def pooled_memory() -> int:
    """Bytes that nvmap may keep of what was freed before, which count as used; 0 where it tells none.

    An eighth of the memory (nvmap_pp.c). Allocations take from there first, but how much is there it does not say.
    """
    with suppress(OSError, ValueError):
        return int(POOL_SIZE.read_text()) * PAGE
    return 0


class Nvmap:
    """The nvmap fd: buffers come and go here. The fd is closed by `close`, with whatever is left.

    `policy` is the column of map flags that holds.
    """

    def __init__(self, kernel: Kernel, path: str, policy: Policy = Policy.VOLATILE) -> None:
        self._kernel = kernel
        self.policy = policy
        self.fd = kernel.open(path)
        self._labelled: set[Role] = set()

    def alloc(self, size: int, role: Role = roles.TENSORS, space: "AddressSpace | None" = None) -> Memory:
        """A zeroed buffer of `size` bytes, mapped for the CPU and, given an address space, for the GPU.

        The CPU sees it at the GPU's address where that is free, as tinygrad expects of memory that both reach.
        MemoryError when the driver or the system has not enough left; DriverError for anything else.
        """
        if (free := available_memory()) - size < RESERVE_BYTES:
            raise MemoryError(
                f"{size} bytes are asked for and {free} are free, of which {RESERVE_BYTES} stay reserved: {MAKE_ROOM}"
                + _pool_hint(size - (free - RESERVE_BYTES))
            )
        with ExitStack() as undo:
            try:
                memory = Memory(self._create(size), size, role=role)
                undo.callback(self._free_handle, memory.handle)
                self._allocate(memory.handle, size, role)
                with self.export(memory) as fd:
                    if space is not None:
                        memory.flags = role.flags(self.policy)
                        memory.va = space.map(fd, memory.flags)
                        undo.callback(space.unmap, memory.va)
                    memory.address = self._map(fd, size, memory.va)
                    undo.callback(self._kernel.munmap, memory.address, _pages(size))
            except DriverError as error:
                if error.errno == errno.ENOMEM:
                    raise MemoryError(f"the driver has no {size} bytes left: {MAKE_ROOM}") from error
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
                f"memory at {address:#x} cannot be mapped for the GPU: it does not start a page; copy it to NV"
            )
        memory = self.alloc(size, roles.STAGING, space)
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
        self._label(role)
        arg = AllocHandle(
            handle=handle,
            heap_mask=c.NVMAP_HEAP_IOVMM,
            flags=role.nvmap | role.tag << 16,
            align=role.alignment(size),
            numa_nid=-1,
        )
        self._kernel.ioctl(self.fd, ioctls.NVMAP_IOC_ALLOC, arg)

    def _label(self, role: Role) -> None:
        """Name the role's tag for the driver's debug files, once; a driver that does not want to know is left alone."""
        if role not in self._labelled:
            self._labelled.add(role)
            label = ctypes.create_string_buffer(role.label.encode())
            arg = SetTagLabel(tag=role.tag, len=len(role.label), addr=ctypes.addressof(label))
            with suppress(DriverError):
                self._kernel.ioctl(self.fd, ioctls.NVMAP_IOC_SET_TAG_LABEL, arg)

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

    def map(self, dmabuf: int, flags: int = roles.VOLATILE) -> int:
        """Map a whole buffer; the driver picks the address."""
        arg = AsMapBufferEx(
            flags=flags,
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


def _pool_hint(lacking: int) -> str:
    """What to do where memory that nvmap keeps may be what is lacking."""
    if not (most := pooled_memory()) or lacking > most:
        return ""
    return f"; nvmap may keep {most} bytes of what was freed before; this gives them back: {EMPTY_POOL}"
