"""The ctrl fd's calls about what `registry` keeps: any holder of a buffer can read back what was registered for it.

Source: L4T r36.4.3 nvgpu, os/linux/ioctl_ctrl.c.
"""

from __future__ import annotations

import errno

from tegrad.orin.ctrl import CtrlFile
from tegrad.orin.files import Call, Table
from tegrad.orin.nvmap import dmabuf
from tegrad.orin.registry import Metadata
from tegrad.orin.steps import Steps, copy_in, copy_out, require
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io

REGISTERED, COMPTAGS, MUTABLE = (
    k.NVGPU_GPU_BUFFER_INFO_FLAGS_METADATA_REGISTERED,
    k.NVGPU_GPU_BUFFER_INFO_FLAGS_COMPTAGS_ALLOCATED,
    k.NVGPU_GPU_BUFFER_INFO_FLAGS_MUTABLE_METADATA,
)


def register_buffer(file: CtrlFile, call: Call) -> Steps:
    """REGISTER_BUFFER: once, or again with MODIFY where the first said MUTABLE.

    Compression tags cost nothing on this chip (the compression bit cache works on raw addresses): asked for, they are
    enabled, and stay.
    """
    arg, registry = call.arg, file.driver.metadata
    require(arg.metadata_size <= k.NVGPU_GPU_REGISTER_BUFFER_METADATA_MAX_SIZE)
    require(arg.comptags_alloc_control <= k.NVGPU_GPU_COMPTAGS_ALLOC_REQUIRED)
    buffer = dmabuf(call, "dmabuf_fd")
    known = registry.find(buffer.key)
    if known is not None:
        require(arg.flags & k.NVGPU_GPU_REGISTER_BUFFER_FLAGS_MODIFY)
        require(known.flags & MUTABLE)
    blob = yield from copy_in(arg.metadata_addr, arg.metadata_size)
    flags = REGISTERED
    if arg.comptags_alloc_control != k.NVGPU_GPU_COMPTAGS_ALLOC_NONE or (known is not None and known.flags & COMPTAGS):
        flags |= COMPTAGS
    if arg.flags & k.NVGPU_GPU_REGISTER_BUFFER_FLAGS_MUTABLE:
        flags |= MUTABLE
    registry.put(buffer.key, Metadata(blob, flags))
    arg.flags = k.NVGPU_GPU_REGISTER_BUFFER_FLAGS_COMPTAGS_ALLOCATED if flags & COMPTAGS else 0
    return None


def get_buffer_info(file: CtrlFile, call: Call) -> Steps:
    """GET_BUFFER_INFO: the size of any buffer, and as much of its metadata as the caller has room for."""
    arg = call.arg
    room, address = arg.in_.metadata_size, arg.in_.metadata_addr
    buffer = dmabuf(call, "in_.dmabuf_fd")
    known = file.driver.metadata.find(buffer.key)
    if known is not None and room:
        left = yield from copy_out(address, known.blob[:room])
        require(left == 0, errno.EFAULT)
    arg.out.flags = known.flags if known is not None else 0
    arg.out.metadata_size = len(known.blob) if known is not None else 0
    arg.out.size = buffer.length
    return None


HANDLERS: Table = {
    io.NVGPU_GPU_IOCTL_REGISTER_BUFFER.request: register_buffer,
    io.NVGPU_GPU_IOCTL_GET_BUFFER_INFO.request: get_buffer_info,
}
