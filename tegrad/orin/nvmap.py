"""/dev/nvmap: its fd and calls. `buffers` has the buffers and handles that they are about.

Source: L4T r36.4.3 nvmap, nvmap_ioctl.c and nvmap_dmabuf.c.
"""

from __future__ import annotations

import errno
import fcntl
import os

from tegrad.orin.buffers import (
    FIRST_HANDLE,
    HOST_MARGIN,
    PAGE,
    Buffer,
    Handle,
    Memory,
    NvmapClient,
    host_free,
    round_up,
)
from tegrad.orin.files import Call, File, Table
from tegrad.orin.state import DriverState
from tegrad.orin.steps import (
    CloseFd,
    Errno,
    FindVma,
    GetFile,
    Process,
    Steps,
    copy_in,
    copy_in_partly,
    copy_out,
    require,
)
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io

NO_PEER = 0xFFFFFFFF
"""The peer of memory that is shared with no other guest."""
MAX_NUMNODES = 64
CARVEOUTS = k.NVMAP_HEAP_CARVEOUT_VPR | k.NVMAP_HEAP_CARVEOUT_FSI  # 0x10000004, as read on an AGX Orin 64GB
# The carveouts exist but belong to the secure world and the safety island: no room in them for a client.
CARVEOUT_BYTES = 64 << 20  # of each; nobody has read the true sizes
TAG_LABEL_MAX = 63
USABLE_HEAPS = k.NVMAP_HEAP_IOVMM | k.NVMAP_HEAP_CARVEOUT_GENERIC
LONE_HEAPS = k.NVMAP_HEAP_CARVEOUT_IVM | k.NVMAP_HEAP_CARVEOUT_VIDMEM


class NvmapFile(File):
    """An fd of /dev/nvmap."""

    kind = "nvmap"

    def __init__(self, driver: DriverState, process: Process) -> None:
        super().__init__(driver, process)
        self.client = driver.nvmap.clients.setdefault(process.token, NvmapClient())
        self.client.opens += 1

    def release(self) -> None:
        """The last fd of a process takes all of its handles along."""
        self.client.opens -= 1
        if self.client.opens:
            return
        del self.driver.nvmap.clients[self.process.token]
        for handle in self.client.handles.values():
            handle.buffer.drop()

    def add(self, buffer: Buffer, *, read_only: bool = False) -> int:
        """A new handle on a buffer of which the caller gives up one reference."""
        handle = Handle(next(self.driver.nvmap.next_id), buffer, read_only=read_only)
        self.client.handles[handle.id] = handle
        return handle.id

    def handle(self, number: int, otherwise: int = errno.EINVAL) -> Handle:
        """The process's handle of that id, or Errno(otherwise)."""
        found = self.client.handles.get(number)
        if found is None:
            raise Errno(otherwise)
        return found


def dmabuf(call: Call, name: str) -> Buffer:
    """The buffer of an fd field: Errno(EBADF) when the fd is not open, Errno(EINVAL) when it is something else.

    The reference ends with the call: a handler that keeps the buffer holds it.
    """
    found = call.files.get(name)
    require(found is not None, errno.EBADF)
    if not isinstance(found, Buffer):
        raise Errno(errno.EINVAL)
    return found


def dmabuf_or_none(call: Call, name: str) -> Buffer | None:
    """The dmabuf of an fd field, or None: these handlers do not tell a bad fd from a wrong one."""
    found = call.files.get(name)
    return found if isinstance(found, Buffer) else None


def create(file: NvmapFile, call: Call) -> None:
    """CREATE: a handle on `size` bytes without memory yet."""
    require(call.arg.size)
    call.arg.handle = file.add(file.driver.memory.create(call.arg.size).hold())


def create_64(file: NvmapFile, call: Call) -> None:
    """CREATE_64: the same for any size; the handle comes back in the first word."""
    require(call.arg.size64)
    require(call.arg.size64 < 1 << 62, errno.ENOMEM)
    call.arg.handle64 = file.add(file.driver.memory.create(call.arg.size64).hold())


def alloc(file: NvmapFile, call: Call) -> None:
    """ALLOC: memory for a handle."""
    arg = call.arg
    require(arg.align & (arg.align - 1) == 0)
    require(arg.handle)
    require(arg.numa_nid == -1 or 0 <= arg.numa_nid < MAX_NUMNODES)
    if arg.flags >> 16 == 0 and not file.client.warned_of_tag:
        file.client.warned_of_tag = True
        file.driver.log.nvmap(f"PID {file.process.pid}: {file.process.comm}: all allocations must have a tag")
    buffer = file.handle(arg.handle).buffer
    require(not buffer.allocated, errno.EEXIST)
    require(arg.heap_mask, errno.ENOMEM)
    lone = arg.heap_mask & LONE_HEAPS
    require(not lone or arg.heap_mask == lone & -lone)
    heap = arg.heap_mask & USABLE_HEAPS
    require(heap, errno.ENOMEM)
    flags = arg.flags & ~k.NVMAP_HANDLE_KIND_SPECIFIED
    file.driver.memory.allocate(buffer, arg.align, flags & 0xFFFF, k.NVMAP_HEAP_IOVMM)
    buffer.label = file.driver.nvmap.labels.get(arg.flags >> 16, "")


def get_fd(file: NvmapFile, call: Call) -> Steps:
    """GET_FD: a new dmabuf fd. An unknown handle is tried as a dmabuf fd, of which only foreign ones are duplicated."""
    handle = file.client.handles.get(call.arg.handle)
    if handle is None:
        found = yield GetFile(call.arg.handle)
        raise Errno(errno.EBADF if found is None else errno.EINVAL)
    call.install("fd", handle.buffer.read_only_fd if handle.read_only else handle.buffer.fd)
    return None


def from_fd(file: NvmapFile, call: Call) -> None:
    """FROM_FD: a new handle on a dmabuf, also where the process has one already."""
    buffer = dmabuf(call, "fd")
    require(buffer.allocated)
    call.arg.handle = file.add(buffer.hold())


def dup_handle(file: NvmapFile, call: Call) -> None:
    """DUP_HANDLE: a new handle with these access rights. One without memory is then looked for as an fd: EBADF."""
    handle = file.handle(call.arg.handle)
    read_only = call.arg.access_flags == k.NVMAP_HANDLE_RO
    require(read_only or not handle.read_only, errno.EPERM)
    require(handle.buffer.allocated, errno.EBADF)
    call.arg.dup_handle = file.add(handle.buffer.hold(), read_only=read_only)


def free(file: NvmapFile, call: Call) -> Steps:
    """FREE: never fails; a number that is a dmabuf fd of the caller is closed instead."""
    handle = file.client.handles.get(call.value & 0xFFFFFFFF)
    if handle is not None:
        del file.client.handles[handle.id]
        handle.buffer.drop()
    elif 0 < call.value < FIRST_HANDLE:
        found = yield GetFile(call.value)
        if isinstance(found, Buffer):
            yield CloseFd(call.value)
    return None


def _rw_checks(file: NvmapFile, call: Call, *, write: bool) -> Buffer:
    arg = call.arg
    require(arg.addr and arg.count and arg.elem_size)
    handle = file.handle(arg.handle)
    buffer = handle.buffer
    require(buffer.allocated, errno.EPERM)
    require(not (write and handle.read_only), errno.EPERM)
    if arg.elem_size == arg.hmem_stride == arg.user_stride and arg.offset % 8 == 0:
        arg.elem_size *= arg.count
        arg.hmem_stride = arg.user_stride = arg.elem_size
        arg.count = 1
    require(arg.elem_size <= buffer.length and arg.offset < buffer.length)
    require(arg.elem_size <= arg.hmem_stride and arg.elem_size <= arg.user_stride)
    require(arg.user_stride <= (buffer.length - arg.offset) // arg.count)
    require(arg.offset + arg.hmem_stride * (arg.count - 1) + arg.elem_size <= buffer.length)
    return buffer


def write(file: NvmapFile, call: Call) -> Steps:
    """WRITE: strided copy from the caller into a buffer."""
    arg, left = call.arg, 0
    buffer = _rw_checks(file, call, write=True).hold()  # another thread may free the handle meanwhile
    try:
        for i in range(arg.count):
            data, left = yield from copy_in_partly(arg.addr + i * arg.user_stride, arg.elem_size)
            os.pwrite(buffer.fd, data, arg.offset + i * arg.hmem_stride)
            if left:
                break
    finally:
        buffer.drop()
    _moved(call, left or arg.count * arg.elem_size)
    return None


def read(file: NvmapFile, call: Call) -> Steps:
    """READ: strided copy out of a buffer to the caller."""
    arg, left = call.arg, 0
    buffer = _rw_checks(file, call, write=False).hold()
    try:
        for i in range(arg.count):
            data = os.pread(buffer.fd, arg.elem_size, arg.offset + i * arg.hmem_stride)
            if left := (yield from copy_out(arg.addr + i * arg.user_stride, data)):
                break
    finally:
        buffer.drop()
    _moved(call, left or arg.count * arg.elem_size)
    return None


def _moved(call: Call, size: int) -> None:
    """The end of a READ or WRITE: less than all of it is EINTR. `count` comes back in either case.

    Where an element's address is bad, the driver takes the bytes left of it for those moved: that many come back, and
    where they are as many as were asked for, the call succeeds.
    """
    whole = call.arg.count * call.arg.elem_size
    call.arg.count, call.copy_back, call.copy_back_always = size, True, True
    require(size >= whole, errno.EINTR)


def cache(file: NvmapFile, call: Call) -> Steps:
    """CACHE: maintenance of a mapped range; nothing to do on write-combined memory, nor on a coherent board."""
    arg = call.arg
    require(arg.addr and 0 <= arg.op <= k.NVMAP_CACHE_OP_WB_INV)
    buffer = file.handle(arg.handle).buffer
    area = yield FindVma(arg.addr)
    require(area is not None and arg.addr + arg.len <= area.end, errno.EADDRNOTAVAIL)
    mine = area.inode == buffer.key[1] and area.file_offset(arg.addr) + arg.len <= buffer.length
    foreign = not area.path.startswith(f"/memfd:{Memory.PREFIX}:")
    require(not foreign, errno.EADDRNOTAVAIL)
    require(mine, errno.EFAULT)
    return None


def cache_list(file: NvmapFile, call: Call) -> None:
    """CACHE_LIST: does nothing on this SoC once its arguments are sane, whatever the operation."""
    arg = call.arg
    require(arg.handles and arg.offsets and arg.sizes and arg.nr)


def set_tag_label(file: NvmapFile, call: Call) -> Steps:
    """SET_TAG_LABEL: a name for a tag, for the driver's statistics; cut at 63 characters."""
    label = yield from copy_in(call.arg.addr, min(call.arg.len, TAG_LABEL_MAX))
    file.driver.nvmap.labels[call.arg.tag] = label.split(b"\0")[0].decode("latin-1")
    return None


def get_available_heaps(file: NvmapFile, call: Call) -> None:
    """GET_AVAILABLE_HEAPS: the carveouts; the IOVMM heap is never listed."""
    call.arg.heaps = CARVEOUTS


def query_heap_params(file: NvmapFile, call: Call) -> None:
    """QUERY_HEAP_PARAMS: size and free space of a heap."""
    arg = call.arg
    mask = arg.heap_mask
    memory = file.driver.memory
    arg.flags, arg.contig, arg.total, arg.free, arg.largest_free_block, arg.granule_size = 0, 0, 0, 0, 0, 0
    if mask == 0:
        return
    arg.granule_size = PAGE
    if not mask & k.NVMAP_HEAP_IOVMM:
        require(mask & CARVEOUTS, errno.ENODEV)
        arg.total = CARVEOUT_BYTES
        return
    arg.total = memory.limit
    arg.free = max(0, min(memory.limit - memory.taken, host_free() - HOST_MARGIN))
    arg.largest_free_block = PAGE


def get_heap_size(file: NvmapFile, call: Call) -> None:
    """GET_HEAP_SIZE: of a carveout; system memory has none that this call tells."""
    require(call.arg.heap & CARVEOUTS, errno.ENODEV)
    call.arg.size = CARVEOUT_BYTES


def parameters(file: NvmapFile, call: Call) -> None:
    """PARAMETERS: what is known of a handle. The import id stays the caller's, as access flags do unless read-only."""
    arg = call.arg
    handle = file.handle(arg.handle, errno.ENODEV)
    buffer = handle.buffer
    arg.size, arg.align = buffer.length, buffer.align
    arg.coherency, arg.heap, arg.contig = buffer.flags & k.NVMAP_HANDLE_CACHE_FLAG, buffer.heap, 0
    arg.heap_number, arg.offset = NO_PEER, 0
    if handle.read_only:
        arg.access_flags = k.NVMAP_HANDLE_RO
    arg.serial_id = buffer.key[1]


HANDLERS: Table = {
    io.NVMAP_IOC_CREATE.request: create,
    io.NVMAP_IOC_CREATE_64.request: create_64,
    io.NVMAP_IOC_ALLOC.request: alloc,
    io.NVMAP_IOC_FREE.request: free,
    io.NVMAP_IOC_WRITE.request: write,
    io.NVMAP_IOC_READ.request: read,
    io.NVMAP_IOC_CACHE.request: cache,
    io.NVMAP_IOC_CACHE_64.request: cache,
    io.NVMAP_IOC_GET_FD.request: get_fd,
    io.NVMAP_IOC_FROM_FD.request: from_fd,
    io.NVMAP_IOC_CACHE_LIST.request: cache_list,
    io.NVMAP_IOC_SET_TAG_LABEL.request: set_tag_label,
    io.NVMAP_IOC_GET_AVAILABLE_HEAPS.request: get_available_heaps,
    io.NVMAP_IOC_GET_HEAP_SIZE.request: get_heap_size,
    io.NVMAP_IOC_PARAMETERS.request: parameters,
    io.NVMAP_IOC_QUERY_HEAP_PARAMS.request: query_heap_params,
    io.NVMAP_IOC_DUP_HANDLE.request: dup_handle,
}


def mmap_check(buffer: Buffer, fd: int, length: int, offset: int, *, write: bool) -> None:
    """The checks of mmap on a dmabuf fd (2.5): Linux's of the fd's mode, then bounds, then that it has memory."""
    require(length > 0 and offset % PAGE == 0)
    require(not (write and read_only(fd)), errno.EACCES)
    require(round_up(length) + offset <= buffer.length)
    require(buffer.allocated, errno.EPERM)


def read_only(fd: int) -> bool:
    """Whether an fd was opened for reading alone, as those of a read-only handle are."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
