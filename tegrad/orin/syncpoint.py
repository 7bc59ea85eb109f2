"""Syncpoints: counters that the GPU moves on by storing to a shim page, and the fences that wait for them.

A channel's user syncpoint lies in its address space's driver range; `/dev/host1x-fence` turns (syncpoint, threshold)
into an fd that becomes readable when the counter gets there. Source: L4T r36.4.3 nvgpu
(os/linux/ioctl_channel.c, hal/sync) and host1x-fence.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tegrad.orin.files import Call, File, Process, Table, needed, require
from tegrad.uapi import ioctls as io

if TYPE_CHECKING:
    from tegrad.orin.address_space import AddressSpace
    from tegrad.orin.driver import Driver

COUNT = 1024
SHIM_SIZE = 1 << 16  # bytes of the shim that belong to one syncpoint
FIRST_FREE = 1  # syncpoint 0 is reserved by host1x
SAFE_STEP = 1 << 16  # how far a dead channel's syncpoint jumps, past every threshold that may be waited for
WRAP = 1 << 32


class Syncpoint:
    """One counter, given to one channel."""

    def __init__(self, pool: Syncpoints, number: int, vm: AddressSpace) -> None:
        self.pool, self.id, self.vm = pool, number, vm
        self.value = self.max = pool.values[number]
        self.gpu_va = vm.map_syncpoint(number, SHIM_SIZE)

    def release(self) -> None:
        """Reach every threshold and go back to the pool."""
        self.make_safe()
        self.vm.unmap_syncpoint(self.id, self.gpu_va)
        del self.pool.used[self.id]

    def make_safe(self) -> None:
        """Jump past what anybody may wait for."""
        self.pool.advance(self.id, SAFE_STEP)


class Syncpoints:
    """All counters of the host1x, and the fences that wait."""

    def __init__(self) -> None:
        self.values = [0] * COUNT
        self.used: dict[int, Syncpoint] = {}
        self.fences: list[FenceFile] = []

    def allocate(self, vm: AddressSpace) -> Syncpoint:
        """A free syncpoint with its shim in an address space; Errno(ENOMEM) when none is left."""
        number = needed(next((i for i in range(FIRST_FREE, COUNT) if i not in self.used), None), errno.ENOMEM)
        made = self.used[number] = Syncpoint(self, number, vm)
        return made

    def advance(self, number: int, by: int = 1) -> None:
        """Move a counter on and signal the fences it passes."""
        self.values[number] = (self.values[number] + by) % WRAP
        for fence in [f for f in self.fences if f.waits_for(number, self.values[number])]:
            fence.signal()


class FenceFile(File):
    """A fence fd: readable once its syncpoint has passed the threshold. A poll fd is one that is armed later."""

    kind = "fence_fd"

    def __init__(self, driver: Driver, process: Process) -> None:
        super().__init__(driver, process)
        self.armed: tuple[int, int] | None = None

    def arm(self, number: int, threshold: int) -> None:
        """Wait for a syncpoint; signals at once if it is there already."""
        require(number < COUNT)
        self.armed = number, threshold
        self.driver.syncpoints.fences.append(self)
        if self.waits_for(number, self.driver.syncpoints.values[number]):
            self.signal()

    def waits_for(self, number: int, value: int) -> bool:
        """Whether this value of this syncpoint is what the fence waits for (the counter wraps)."""
        return self.armed is not None and self.armed[0] == number and (value - self.armed[1]) % WRAP < WRAP // 2

    def signal(self) -> None:
        """Make the fd readable."""
        self.driver.syncpoints.fences.remove(self)
        self.armed = None
        self.make_readable()

    def release(self) -> None:
        """Nobody waits any more."""
        if self.armed is not None:
            self.driver.syncpoints.fences.remove(self)


class FenceNode(File):
    """An fd of /dev/host1x-fence."""

    kind = "fence"


def create_fence(file: FenceNode, call: Call) -> None:
    """CREATE_FENCE: an fd for (syncpoint, threshold)."""
    require(call.arg.reserved[0] == 0)
    require(call.arg.id < COUNT)
    fence = FenceFile(file.driver, file.process)
    call.install("fence_fd", fence)
    fence.arm(call.arg.id, call.arg.threshold)


def create_pollfd(file: FenceNode, call: Call) -> None:
    """CREATE_POLLFD: an fd that TRIGGER_POLLFD arms."""
    call.install("fd", FenceFile(file.driver, file.process))


def trigger_pollfd(file: FenceNode, call: Call) -> None:
    """TRIGGER_POLLFD: arm a poll fd for (syncpoint, threshold)."""
    found = call.file("fd", FenceFile)
    require(found)
    require(call.arg.id < COUNT)
    found.arm(call.arg.id, call.arg.threshold)


HANDLERS: Table = {
    io.HOST1X_IOCTL_CREATE_FENCE.request: create_fence,
    io.HOST1X_IOCTL_CREATE_POLLFD.request: create_pollfd,
    io.HOST1X_IOCTL_TRIGGER_POLLFD.request: trigger_pollfd,
}
