"""REMAP: buffers behind pages of a sparse area, several operations at once, all of them or none.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_as.c and vm_remap.c, common/mm/vm_remap.c.
"""

from __future__ import annotations

import ctypes
import errno
from typing import Any

from tegrad.orin.address_space import KERNEL_SIZE, AddressSpace, Area, Piece
from tegrad.orin.as_file import AsFile
from tegrad.orin.buffers import PAGE, Buffer
from tegrad.orin.files import Call, Table
from tegrad.orin.steps import Errno, GetFile, Steps, copy_in, copy_out, needed, require, signed
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi.structs import AsRemapOp

PAGE_SIZES = {
    k.NVGPU_AS_REMAP_OP_FLAGS_PAGESIZE_4K: 1 << 12,
    k.NVGPU_AS_REMAP_OP_FLAGS_PAGESIZE_64K: 1 << 16,
    k.NVGPU_AS_REMAP_OP_FLAGS_PAGESIZE_128K: 1 << 17,
}
PAGE_SIZE_FLAGS = sum(PAGE_SIZES)
MAP_FLAGS = PAGE_SIZE_FLAGS | k.NVGPU_AS_REMAP_OP_FLAGS_CACHEABLE | k.NVGPU_AS_REMAP_OP_FLAGS_ACCESS_NO_WRITE
KERNEL_OP_SIZE, KMALLOC_LIMIT = 40, 4 << 20
"""Bytes of an operation in the driver, and the most that one kmalloc gives."""


def remap(file: AsFile, call: Call) -> Steps:
    """REMAP. The block goes back in any case, with 0 operations after one that is not valid.

    After success every operation in the caller's memory is overwritten with the last one: the driver's own mistake.
    """
    arg, vm, size = call.arg, file.vm, ctypes.sizeof(AsRemapOp)
    call.copy_back_always = True
    if arg.num_ops == 0:
        return None
    require(arg.num_ops * KERNEL_OP_SIZE <= KMALLOC_LIMIT, errno.ENOMEM)
    ops: list[Any] = []
    for i in range(arg.num_ops):
        ops.append(AsRemapOp.from_buffer_copy((yield from copy_in(arg.ops + i * size, size))))
        _check_op(arg, vm, ops[-1])
    arg.num_ops = 0
    area = _area(vm, ops[0])
    pieces: list[Piece | None] = []
    for op in ops:
        buffer = None
        if op.mem_handle:
            asked = GetFile(signed(op.mem_handle))
            found = yield asked
            buffer = _usable(op, found, read_only=asked.unwritable)
        pieces.append(_piece(area, op, buffer))
    require(vm.area_at(area.start) is area)  # another thread may have freed it since
    for op, piece in zip(ops, pieces, strict=True):
        vm.put_behind(area, piece, op.virt_offset_in_pages, op.num_pages)
    for i, op in enumerate(ops):
        arg.num_ops = i
        ops[-1].compr_kind, ops[-1].incompr_kind = op.compr_kind, op.incompr_kind
        left = yield from copy_out(arg.ops + i * size, bytes(ops[-1]))
        require(left == 0, errno.EFAULT)
    arg.num_ops = len(ops)
    return None


def _check_op(arg: Any, vm: AddressSpace, op: Any) -> None:
    """What an operation must be by itself."""
    size = PAGE_SIZES.get(op.flags & PAGE_SIZE_FLAGS, 0)
    known = not op.flags & ~(MAP_FLAGS if op.mem_handle else PAGE_SIZE_FLAGS)
    unmap = op.compr_kind == op.incompr_kind == k.NV_KIND_INVALID and op.mem_offset_in_pages == 0
    limit = (vm.end + KERNEL_SIZE) // size if size else 0
    within = max(op.num_pages, op.mem_offset_in_pages, op.virt_offset_in_pages) <= limit
    if not (size and known and (op.mem_handle or unmap) and op.num_pages and within):
        arg.num_ops = 0
        raise Errno(errno.EINVAL)


def _area(vm: AddressSpace, op: Any) -> Area:
    """The sparse area that all operations are about: the first one's. Its pages are of 4 KiB."""
    size = PAGE_SIZES[op.flags & PAGE_SIZE_FLAGS]
    area = needed(vm.area_at(op.virt_offset_in_pages * size))
    require(area.sparse)
    require(size == PAGE)
    return area


def _usable(op: Any, found: object, *, read_only: bool) -> Buffer:
    """The buffer of an operation: any bad handle is EINVAL, and so is writing through an fd that is read-only."""
    if not isinstance(found, Buffer):
        raise Errno(errno.EINVAL)
    require(not read_only or op.flags & k.NVGPU_AS_REMAP_OP_FLAGS_ACCESS_NO_WRITE)
    require(found.allocated, errno.ENOMEM)
    return found


def _piece(area: Area, op: Any, buffer: Buffer | None) -> Piece | None:
    """What an operation puts behind its pages, once they lie in the buffer and in the area."""
    size = PAGE_SIZES[op.flags & PAGE_SIZE_FLAGS]
    if buffer is not None:
        mapped, offset = op.num_pages * size, op.mem_offset_in_pages * size
        require(mapped <= buffer.length and offset <= buffer.length - mapped)
    first, last = op.virt_offset_in_pages, op.virt_offset_in_pages + op.num_pages
    require(area.start // PAGE <= first and last <= area.end // PAGE)
    if buffer is None:
        return None
    writable = not op.flags & k.NVGPU_AS_REMAP_OP_FLAGS_ACCESS_NO_WRITE
    cached = bool(op.flags & k.NVGPU_AS_REMAP_OP_FLAGS_CACHEABLE)
    return Piece(first, op.num_pages, buffer, op.mem_offset_in_pages, writable, cached)


HANDLERS: Table = {io.NVGPU_AS_IOCTL_REMAP.request: remap}
