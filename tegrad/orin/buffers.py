"""Buffers, the handles that processes hold on them, and the board's memory.

A buffer is a memfd, which is its dmabuf at the same time: clients map it directly and pass its fd around. It is known
by inode, and its name and seals say what it is (`SEALS` are set when it is allocated), so an fd is still a buffer
when the driver holds nothing of it any more. The driver keeps its own fd while a handle, a GPU mapping or a pin holds
the buffer. Source: L4T r36.4.3 nvmap, nvmap_alloc.c and nvmap_dmabuf.c.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
from dataclasses import dataclass, field
from pathlib import Path

from tegrad.orin.steps import Errno, require
from tegrad.orin.wire import BUFFER_NAME
from tegrad.uapi import constants as k

PAGE = 4096
# Ids come from one rising index that starts at 2^31-1; whatever ran before the first client took the one below 2^31.
FIRST_HANDLE = 1 << 31
SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK
HOST_MARGIN = 256 << 20  # bytes of host memory that the board leaves alone


def round_up(size: int) -> int:
    """Bytes rounded up to whole pages."""
    return (size + PAGE - 1) // PAGE * PAGE


class Buffer:
    """Physical memory behind handles, dmabuf fds and mappings, in whole pages: what was asked for is rounded up."""

    def __init__(self, memory: Memory, fd: int, stat: os.stat_result) -> None:
        self.memory, self.fd, self.key, self.length = memory, fd, _key(stat), stat.st_size
        self.holders = 0
        self.align = 0
        self.label = ""
        self.flags = k.NVMAP_HANDLE_WRITE_COMBINE
        self.heap = 0
        self.allocated = False
        self._read_only_fd = -1

    @property
    def read_only_fd(self) -> int:
        """The driver's own fd of the memory that cannot be written through."""
        if self._read_only_fd < 0:
            self._read_only_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC)
        return self._read_only_fd

    def close(self) -> None:
        """Let go of the driver's own fds."""
        os.close(self.fd)
        if self._read_only_fd >= 0:
            os.close(self._read_only_fd)

    @property
    def cached(self) -> bool:
        """Whether the CPU caches it, so that cache maintenance does something."""
        return self.flags & k.NVMAP_HANDLE_CACHE_FLAG >= k.NVMAP_HANDLE_INNER_CACHEABLE

    def hold(self) -> Buffer:
        """Take a reference."""
        self.holders += 1
        return self

    def drop(self) -> None:
        """Give a reference back; at the last one only the clients' fds and mappings keep the memory."""
        self.holders -= 1
        if self.holders == 0:
            self.memory.forget(self)


class Memory:
    """The board's memory: every buffer the driver holds, by inode, and how much of the limit is taken."""

    PREFIX = BUFFER_NAME

    def __init__(self, limit: int, board_id: str) -> None:
        self.limit = limit
        self.name = f"{self.PREFIX}:{board_id}"
        """What the memfd of every buffer is called."""
        self.taken = 0
        self.buffers: dict[tuple[int, int], Buffer] = {}

    def create(self, size: int) -> Buffer:
        """A new buffer without memory; Errno(ENOMEM) when the host cannot give one."""
        try:
            fd = os.memfd_create(self.name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise Errno(errno.ENOMEM) from error
        try:
            os.ftruncate(fd, round_up(size))
        except OSError as error:
            os.close(fd)
            raise Errno(errno.ENOMEM) from error
        return self._keep(fd, os.fstat(fd))

    def allocate(self, buffer: Buffer, align: int, flags: int, heap: int) -> None:
        """Give a buffer its memory; Errno(ENOMEM) past the board's limit or the host's free memory."""
        require(self.taken + buffer.length <= self.limit, errno.ENOMEM)
        # Pages are taken on first touch, so everything granted before may still have to come out of what is free now.
        # The cheap look is enough where memory is plenty.
        wanted = buffer.length + HOST_MARGIN
        if host_idle() < wanted + self.taken:
            require(host_free() >= wanted + self._untouched(), errno.ENOMEM)
        fcntl.fcntl(buffer.fd, fcntl.F_ADD_SEALS, SEALS)
        buffer.align, buffer.flags, buffer.heap, buffer.allocated = max(align, PAGE), flags, heap, True
        self.taken += buffer.length

    def find(self, fd: int, stat: os.stat_result) -> Buffer | None:
        """The buffer behind an open fd, one reference taken; None when it is not one of this board's."""
        buffer = self.buffers.get(_key(stat)) or self._revive(fd, stat)
        return buffer.hold() if buffer else None

    def forget(self, buffer: Buffer) -> None:
        """The last holder in the driver is gone."""
        del self.buffers[buffer.key]
        if buffer.allocated:
            self.taken -= buffer.length
        buffer.close()

    def _keep(self, fd: int, stat: os.stat_result) -> Buffer:
        buffer = Buffer(self, fd, stat)
        self.buffers[buffer.key] = buffer
        return buffer

    def _revive(self, fd: int, stat: os.stat_result) -> Buffer | None:
        """A buffer that only clients held until now: its name says that it is one, its seals that it has memory."""
        if os.readlink(f"/proc/self/fd/{fd}") != f"/memfd:{self.name} (deleted)":
            return None
        own = os.dup(fd)
        buffer = self._keep(own, stat)
        if fcntl.fcntl(own, fcntl.F_GET_SEALS) & SEALS == SEALS:
            buffer.allocated, buffer.heap, buffer.align = True, k.NVMAP_HEAP_IOVMM, PAGE
            self.taken += buffer.length
        return buffer

    def _untouched(self) -> int:
        held = (b for b in self.buffers.values() if b.allocated)
        return sum(max(0, b.length - os.fstat(b.fd).st_blocks * 512) for b in held)


def _key(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino


def host_idle() -> int:
    """Bytes of the host that nothing uses, not even as a cache: never more than host_free."""
    return os.sysconf("SC_AVPHYS_PAGES") * PAGE


def host_free() -> int:
    """Bytes the host could still give (MemAvailable)."""
    with Path("/proc/meminfo").open() as meminfo:
        for line in meminfo:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 1 << 62


@dataclass(slots=True)
class Handle:
    """A process's name for a buffer, of which it may have several: each is created, imported or duplicated.

    `read_only`: made by DUP_HANDLE, its dmabuf fds cannot be written through.
    """

    id: int
    buffer: Buffer
    read_only: bool = False


@dataclass(slots=True)
class NvmapClient:
    """The handles of one process, shared by all of its nvmap fds."""

    opens: int = 0
    handles: dict[int, Handle] = field(default_factory=dict)
    warned_of_tag: bool = False


class NvmapState:
    """What the nvmap driver keeps: clients by process, and the rising handle index."""

    def __init__(self) -> None:
        self.clients: dict[str, NvmapClient] = {}
        self.labels: dict[int, str] = {}
        """Names of the tags in allocations' flags, whoever gave them."""
        self.next_id = itertools.count(FIRST_HANDLE)
