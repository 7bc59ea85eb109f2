"""/dev/host1x-fence, and what it makes of (syncpoint, threshold): an fd that is readable when the counter is there.

Source: nvidia-oot's host1x-fence.
"""

from __future__ import annotations

import errno

from tegrad.orin.files import Call, File, Table
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Process, Steps, copy_out, require
from tegrad.orin.syncpoint import SYNCPOINT_COUNT
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s


class FenceFile(File):
    """A fence fd: readable once a syncpoint has reached its threshold."""

    kind = "sync_file"

    def __init__(self, driver: DriverState, process: Process) -> None:
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

    def __init__(self, driver: DriverState, process: Process, number: int, threshold: int) -> None:
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
