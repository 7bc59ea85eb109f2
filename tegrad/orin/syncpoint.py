"""Syncpoints: counters that the GPU moves on by storing to a shim page.

A channel's user syncpoint lies in its address space's driver range; `fences` has the fds that wait for one.
Source: L4T r36.4.3 nvgpu, os/linux/ioctl_channel.c, hal/sync/syncpt_cmdbuf_gv11b_fusa.c.
"""

from __future__ import annotations

import errno
import os
from typing import Protocol

from tegrad.orin.address_space import AddressSpace
from tegrad.orin.steps import needed

SYNCPOINT_COUNT = 1024
SHIM_SIZE = 1 << 16  # bytes of the shim that belong to one syncpoint
FIRST_FREE = 1  # syncpoint 0 is reserved by host1x
SAFE_STEP = 1 << 16  # how far a dead channel's syncpoint jumps, past every threshold that may be waited for
WRAP = 1 << 32


class Fence(Protocol):
    """Something that waits for syncpoints."""

    def look(self, number: int) -> None:
        """A counter has moved."""


class Syncpoint:
    """One counter, given to one channel."""

    def __init__(self, pool: Syncpoints, number: int, vm: AddressSpace) -> None:
        self.pool, self.id, self.vm = pool, number, vm
        self.value = self.max = pool.values[number]
        self.gpu_va = vm.map_syncpoint(number)

    def release(self) -> None:
        """Reach every threshold and go back to the pool."""
        self.make_safe()
        self.vm.unmap_syncpoint(self.id, self.gpu_va)
        del self.pool.used[self.id]

    def make_safe(self) -> None:
        """Jump past what anybody may wait for."""
        self.pool.advance(self.id, SAFE_STEP)


class Syncpoints:
    """All counters of the host1x, the memory that the GPU reads them from, and the fences that wait.

    A counter is the first word of its part of the shim; the driver alone writes it.
    """

    size, stride = SYNCPOINT_COUNT * SHIM_SIZE, SHIM_SIZE

    def __init__(self) -> None:
        self.values = [0] * SYNCPOINT_COUNT
        self.used: dict[int, Syncpoint] = {}
        self.fences: list[Fence] = []
        self.fd = os.memfd_create("syncpoints", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.size)

    def allocate(self, vm: AddressSpace) -> Syncpoint:
        """A free syncpoint with its shim in an address space; Errno(ENOMEM) when none is left."""
        number = needed(next((i for i in range(FIRST_FREE, SYNCPOINT_COUNT) if i not in self.used), None), errno.ENOMEM)
        made = self.used[number] = Syncpoint(self, number, vm)
        return made

    def advance(self, number: int, by: int = 1) -> None:
        """Move a counter on and signal the fences it passes."""
        self.values[number] = (self.values[number] + by) % WRAP
        os.pwrite(self.fd, self.values[number].to_bytes(4, "little"), number * self.stride)
        for fence in list(self.fences):
            fence.look(number)

    def reached(self, number: int, threshold: int) -> bool:
        """Whether a counter is at a threshold or past it, by less than half of the numbers there are."""
        return (self.values[number] - threshold) % WRAP < WRAP // 2
