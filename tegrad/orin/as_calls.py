"""The AS fd's calls: what may be mapped how, in the driver's check order.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_as.c and vm.c, common/mm/vm.c and vm_area.c.
"""

from __future__ import annotations

import ctypes
import errno
import time
from collections.abc import Generator
from typing import Any

from tegrad.orin.address_space import ACCESS_MASK, ACCESS_SHIFT, FD_NOT_WRITABLE, AddressSpace
from tegrad.orin.as_file import AsFile
from tegrad.orin.buffers import PAGE, Buffer
from tegrad.orin.channel_calls import ChannelFile
from tegrad.orin.files import Call, File, Foreign, Table
from tegrad.orin.steps import Errno, GetFile, Request, Steps, Until, copy_in, copy_out, require, signed
from tegrad.orin.topology import BATCH_LIMIT
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

KNOWN_MAP_FLAGS = (
    k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_MAPPABLE_COMPBITS
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_L3_ALLOC
    | k.NVGPU_AS_MAP_BUFFER_FLAGS_SYSTEM_COHERENT
    | ACCESS_MASK
)
READ_WRITE = k.NVGPU_AS_MAP_BUFFER_ACCESS_READ_WRITE << ACCESS_SHIFT
U64_MASK = (1 << 64) - 1
SYNC_UNMAP_S, SYNC_UNMAP_STEP_S = 0.1, 0.01
"""How long an unmap of a fixed mapping waits for its other references, and how often it looks."""


def bind_channel(file: AsFile, call: Call) -> None:
    """BIND_CHANNEL: for good; the channel keeps the VM alive."""
    channel = call.file("channel_fd", ChannelFile)
    require(channel)
    require(channel.channel.vm is None)
    channel.channel.vm = file.vm.hold()


def alloc_space(file: AsFile, call: Call) -> None:
    """ALLOC_SPACE: unknown flags are ignored; without FIXED_OFFSET the address given does not matter.

    The size is a product of 64 bits, which wraps.
    """
    arg = call.arg
    require(arg.page_size == PAGE)
    fixed = arg.flags & k.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET
    sparse = bool(arg.flags & k.NVGPU_AS_ALLOC_SPACE_FLAGS_SPARSE)
    arg.o_a.offset = file.vm.reserve(arg.pages * PAGE & U64_MASK, arg.o_a.offset if fixed else None, sparse=sparse)


def free_space(file: AsFile, call: Call) -> None:
    """FREE_SPACE: succeeds on anything."""
    file.vm.release(call.arg.offset)


def map_one(vm: AddressSpace, arg: Any, found: File | Buffer | Foreign | None, *, read_only: bool = False) -> int:
    """Map one buffer as MAP_BUFFER_EX says; its address. `read_only`: its fd cannot be written through."""
    fixed = arg.flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_FIXED_OFFSET
    require(found is not None, errno.EBADF)
    if not isinstance(found, Buffer):
        raise Errno(errno.EINVAL)
    require(fixed or (arg.offset == 0 and arg.buffer_offset == 0))
    require(fixed or arg.mapping_size == 0)
    require(arg.mapping_size <= found.length and arg.buffer_offset <= found.length - arg.mapping_size)
    require(arg.flags & ACCESS_MASK != ACCESS_MASK)
    require(not arg.flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_TEGRA_RAW)
    require(not arg.flags & ~KNOWN_MAP_FLAGS)
    require(found.allocated, errno.ENOMEM)
    require(arg.flags & ACCESS_MASK != READ_WRITE or not read_only)
    require(arg.compr_kind != k.NV_KIND_INVALID or arg.incompr_kind >= 0)
    flags = arg.flags & ~k.NVGPU_AS_MAP_BUFFER_FLAGS_MAPPABLE_COMPBITS
    flags |= FD_NOT_WRITABLE if read_only else 0
    kind = arg.incompr_kind if arg.compr_kind == k.NV_KIND_INVALID else arg.compr_kind
    if fixed:
        return vm.map_fixed(found, flags, kind, arg.offset, arg.buffer_offset, arg.mapping_size)
    return vm.map(found, flags, kind)


def map_buffer_ex(file: AsFile, call: Call) -> None:
    """MAP_BUFFER_EX. `page_size` is ignored; only `offset` comes back."""
    read_only = "dmabuf_fd" in call.unwritable
    call.arg.offset = map_one(file.vm, call.arg, call.files.get("dmabuf_fd"), read_only=read_only)


def unmap_one(vm: AddressSpace, va: int) -> Generator[Request, Any, None]:
    """Undo one map of what starts at exactly this address, if anything does.

    A fixed mapping that is mapped several times is waited for: somebody else might be about to let go.
    """
    mapping = vm.mappings.get(va)
    if mapping is None:
        return
    deadline = time.monotonic() + SYNC_UNMAP_S
    while mapping.fixed and mapping.count > 1 and time.monotonic() < deadline:
        yield Until(mapping.released, min(deadline, time.monotonic() + SYNC_UNMAP_STEP_S))
    if mapping.fixed and mapping.count > 1:
        vm.driver.log.warn("nvgpu_vm_unmap", f"{mapping.count} references remaining on 0x{va:x}")
    if vm.mappings.get(va) is mapping:
        vm.unmap(mapping)


def unmap_buffer(file: AsFile, call: Call) -> Steps:
    """UNMAP_BUFFER: succeeds on anything; needs the exact start. It does not wait for the GPU."""
    yield from unmap_one(file.vm, call.arg.offset)
    return None


def map_buffer_batch(file: AsFile, call: Call) -> Steps:
    """MAP_BUFFER_BATCH: unmaps, then maps, up to the first failure. Where the maps went is told nobody."""
    arg = call.arg
    require(arg.num_unmaps <= BATCH_LIMIT and arg.num_maps <= BATCH_LIMIT)
    size = ctypes.sizeof(s.AsUnmapBuffer)
    for i in range(arg.num_unmaps):
        one = s.AsUnmapBuffer.from_buffer_copy((yield from copy_in(arg.unmaps + i * size, size)))
        yield from unmap_one(file.vm, one.offset)
    size = ctypes.sizeof(s.AsMapBufferEx)
    for i in range(arg.num_maps):
        item = s.AsMapBufferEx.from_buffer_copy((yield from copy_in(arg.maps + i * size, size)))
        asked = GetFile(signed(item.dmabuf_fd))
        found = yield asked
        map_one(file.vm, item, found, read_only=asked.unwritable)
    return None


def get_va_regions(file: AsFile, call: Call) -> Steps:
    """GET_VA_REGIONS: the one region of a 4 KiB-page address space; whole structs that fit are copied."""
    arg, vm = call.arg, file.vm
    region = s.AsVaRegion(offset=vm.start, page_size=PAGE, pages=(vm.end - vm.start) // PAGE)
    size = ctypes.sizeof(s.AsVaRegion)
    if arg.buf_size >= size:
        left = yield from copy_out(arg.buf_addr, bytes(region))
        require(left == 0, errno.EFAULT)
    arg.buf_size = size
    return None


def get_sync_ro_map(file: AsFile, call: Call) -> None:
    """GET_SYNC_RO_MAP: all syncpoints, mapped read-only once per address space."""
    arg, pool = call.arg, file.driver.syncpoints
    arg.base_gpuva = file.vm.map_syncpoints()
    arg.sync_size, arg.num_syncpoints = pool.stride, pool.size // pool.stride


def mapping_modify(file: AsFile, call: Call) -> None:
    """MAPPING_MODIFY: another kind for part of a mapping, by its exact start. Kinds change nothing on this board."""
    arg = call.arg
    mapping = file.vm.mappings.get(arg.map_address)
    if mapping is None:
        raise Errno(errno.EINVAL)
    require(arg.buffer_offset % PAGE == 0)
    require(arg.buffer_size % PAGE == 0)
    require(arg.buffer_size <= mapping.size and arg.buffer_offset <= mapping.size - arg.buffer_size)
    require(not arg.compr_kind == arg.incompr_kind == k.NV_KIND_INVALID)


HANDLERS: Table = {
    io.NVGPU_AS_IOCTL_BIND_CHANNEL.request: bind_channel,
    io.NVGPU32_AS_IOCTL_ALLOC_SPACE.request: alloc_space,
    io.NVGPU_AS_IOCTL_FREE_SPACE.request: free_space,
    io.NVGPU_AS_IOCTL_UNMAP_BUFFER.request: unmap_buffer,
    io.NVGPU_AS_IOCTL_ALLOC_SPACE.request: alloc_space,
    io.NVGPU_AS_IOCTL_MAP_BUFFER_EX.request: map_buffer_ex,
    io.NVGPU_AS_IOCTL_GET_VA_REGIONS.request: get_va_regions,
    io.NVGPU_AS_IOCTL_MAP_BUFFER_BATCH.request: map_buffer_batch,
    io.NVGPU_AS_IOCTL_GET_SYNC_RO_MAP.request: get_sync_ro_map,
    io.NVGPU_AS_IOCTL_MAPPING_MODIFY.request: mapping_modify,
}
