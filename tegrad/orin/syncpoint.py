"""Syncpoints: counters that the GPU moves on by storing to a shim page, and the fences that wait for them.

A channel's user syncpoint lies in its address space's driver range; `/dev/host1x-fence` turns (syncpoint, threshold)
into an fd that becomes readable when the counter gets there. Source: L4T r36.4.3 nvgpu
(os/linux/ioctl_channel.c, hal/sync/syncpt_cmdbuf_gv11b_fusa.c) and nvidia-oot's host1x-fence.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from tegrad.orin.files import Call, File, Process, Steps, Table, copy_out, needed, require
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

if TYPE_CHECKING:
    from tegrad.orin.address_space import AddressSpace
    from tegrad.orin.driver import Driver

SYNCPOINT_COUNT = 1024
SHIM_SIZE = 1 << 16  # bytes of the shim that belong to one syncpoint
FIRST_FREE = 1  # syncpoint 0 is reserved by host1x
SAFE_STEP = 1 << 16  # how far a dead channel's syncpoint jumps, past every threshold that may be waited for
WRAP = 1 << 32


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
        self.fences: list[FenceFile] = []
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


class FenceFile(File):
    """A fence fd: readable once a syncpoint has reached its threshold."""

    kind = "sync_file"

    def __init__(self, driver: Driver, process: Process) -> None:
        super().__init__(driver, process)
        self.waits: list[tuple[int, int]] = []

    def arm(self, number: int, threshold: int) -> None:
        """Wait for a syncpoint; signals at once if it is there already."""
        if not self.waits:
            self.driver.syncpoints.fences.append(self)
        self.waits.append((number, threshold))
        self.look(number)

    def look(self, number: int) -> None:
        """A counter has moved: become readable if it was waited for."""
        reached = self.driver.syncpoints.reached
        done = [wait for wait in self.waits if wait[0] == number and reached(*wait)]
        if done:
            self.waits = [wait for wait in self.waits if wait not in done]
            if not self.waits:
                self.driver.syncpoints.fences.remove(self)
            self.make_readable()

    def release(self) -> None:
        """Nobody waits any more."""
        if self.waits:
            self.driver.syncpoints.fences.remove(self)


class SyncFile(FenceFile):
    """What CREATE_FENCE makes: a fence for one threshold, which FENCE_EXTRACT tells."""

    def __init__(self, driver: Driver, process: Process, number: int, threshold: int) -> None:
        super().__init__(driver, process)
        self.id, self.threshold = number, threshold


class PollFile(FenceFile):
    """What CREATE_POLLFD makes: TRIGGER_POLLFD adds thresholds, any number of them."""

    kind = "pollfd"


class FenceNode(File):
    """An fd of /dev/host1x-fence."""

    kind = "fence"


def create_fence(file: FenceNode, call: Call) -> None:
    """CREATE_FENCE: an fd for (syncpoint, threshold)."""
    arg = call.arg
    require(arg.reserved[0] == 0)
    require(arg.id < SYNCPOINT_COUNT)
    fence = SyncFile(file.driver, file.process, arg.id, arg.threshold)
    call.install("fence_fd", fence)
    fence.arm(arg.id, arg.threshold)


def fence_extract(file: FenceNode, call: Call) -> Steps:
    """FENCE_EXTRACT: the syncpoint and threshold of a fence, also after it signalled; how many there are (one)."""
    arg = call.arg
    require(not any(arg.reserved))
    fence = call.file("fence_fd", SyncFile)
    require(fence)
    if arg.num_fences:
        left = yield from copy_out(arg.fences_ptr, bytes(s.Host1xFenceExtractFence(fence.id, fence.threshold)))
        require(left == 0, errno.EFAULT)
    arg.num_fences = 1
    return None


def create_pollfd(file: FenceNode, call: Call) -> None:
    """CREATE_POLLFD: an fd that TRIGGER_POLLFD arms."""
    call.install("fd", PollFile(file.driver, file.process))


def trigger_pollfd(file: FenceNode, call: Call) -> None:
    """TRIGGER_POLLFD: arm a poll fd for one more (syncpoint, threshold)."""
    found = call.file("fd", PollFile)
    require(found)
    require(call.arg.id < SYNCPOINT_COUNT)
    found.arm(call.arg.id, call.arg.threshold)


HANDLERS: Table = {
    io.HOST1X_IOCTL_CREATE_FENCE.request: create_fence,
    io.HOST1X_IOCTL_FENCE_EXTRACT.request: fence_extract,
    io.HOST1X_IOCTL_CREATE_POLLFD.request: create_pollfd,
    io.HOST1X_IOCTL_TRIGGER_POLLFD.request: trigger_pollfd,
}
