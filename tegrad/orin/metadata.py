"""What a client registers about its buffers: an opaque blob each, which any holder of the buffer can read back.

CUDA registers every buffer. Source: L4T r36.4.3 nvgpu, os/linux/ioctl_ctrl.c.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tegrad.orin.files import Call, Steps, copy_in, copy_out, require
from tegrad.orin.nvmap import dmabuf
from tegrad.uapi import constants as k

if TYPE_CHECKING:
    from tegrad.orin.ctrl import CtrlFile

REGISTERED, COMPTAGS, MUTABLE = (
    k.NVGPU_GPU_BUFFER_INFO_FLAGS_METADATA_REGISTERED,
    k.NVGPU_GPU_BUFFER_INFO_FLAGS_COMPTAGS_ALLOCATED,
    k.NVGPU_GPU_BUFFER_INFO_FLAGS_MUTABLE_METADATA,
)
MOST_UNHELD_BUFFERS = 4096
"""Buffers whose metadata the board remembers while only fds of clients hold them."""


@dataclass(slots=True)
class Metadata:
    """What is registered for one buffer."""

    blob: bytes = b""
    flags: int = 0


class Registry:
    """Metadata by buffer: of those that somebody holds here, and of the last that nobody does."""

    def __init__(self) -> None:
        self._by_key: dict[tuple[int, int], Metadata] = {}

    def find(self, key: tuple[int, int]) -> Metadata | None:
        """What is registered for a buffer."""
        return self._by_key.get(key)

    def put(self, key: tuple[int, int], metadata: Metadata) -> None:
        """Register; forgets the oldest where too many are kept."""
        self._by_key.pop(key, None)
        self._by_key[key] = metadata
        if len(self._by_key) > MOST_UNHELD_BUFFERS:
            del self._by_key[next(iter(self._by_key))]


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
