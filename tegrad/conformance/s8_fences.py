"""Section 8: fences of the host1x. The syncpoints that they wait for are in 5.7 and 4.6."""

from __future__ import annotations

import errno
import select
from typing import Any

from tegrad.conformance.calls import NO_FD, Calls
from tegrad.conformance.rig import FENCE, PAGE, Rig, RigChannel
from tegrad.conformance.rule import rule
from tegrad.uapi import structs as s

WRAP = 1 << 32
NO_SYNCPOINT = 1 << 20


def node(rig: Rig) -> int:
    """An fd of /dev/host1x-fence; not applicable where there is none."""
    rig.need(rig.kernel.exists(FENCE), f"no {FENCE}")
    return rig.open(FENCE)


def syncpoint(rig: Rig) -> tuple[RigChannel, Any]:
    """A channel with its user syncpoint. Nothing increments it until the channel is closed."""
    channel = rig.bound_channel()
    return channel, rig.call(channel.fd, "CHANNEL_GET_USER_SYNCPOINT")


def fence(rig: Rig, fd: int, number: int, threshold: int) -> int:
    """A fence fd."""
    return int(rig.accepts(fd, "HOST1X_CREATE_FENCE", id=number, threshold=threshold % WRAP).fence_fd)


def readable(fd: int, seconds: float = 0.0) -> bool:
    """Whether poll reports POLLIN."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return any(events & select.POLLIN for _, events in poll.poll(seconds * 1000))


@rule("8", "CREATE_FENCE: a fence at a threshold that the syncpoint has reached is readable")
def fence_reached(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd = fence(rig, node(rig), found.syncpoint_id, found.syncpoint_max)
    rig.check(readable(fd, rig.patience), "POLLIN", "nothing in time")


@rule("8", "CREATE_FENCE: a fence at a threshold ahead is not readable")
def fence_ahead(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd = fence(rig, node(rig), found.syncpoint_id, found.syncpoint_max + 1)
    rig.check(not readable(fd, 0.05), "nothing", "POLLIN")


@rule("8", "CREATE_FENCE: thresholds wrap: what is less than 2^31 behind counts as reached")
def fence_wraps(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd = node(rig)
    behind = fence(rig, fd, found.syncpoint_id, found.syncpoint_max - (1 << 31) + 1)
    ahead = fence(rig, fd, found.syncpoint_id, found.syncpoint_max + (1 << 31) - 1)
    rig.check(readable(behind, rig.patience), "POLLIN for a threshold behind", "nothing in time")
    rig.check(not readable(ahead), "nothing for a threshold ahead", "POLLIN")


@rule("8", "CREATE_FENCE: poll wakes when the syncpoint gets there: a channel that goes makes its syncpoint safe")
def fence_wakes(rig: Rig) -> None:
    channel, found = syncpoint(rig)
    fd = fence(rig, node(rig), found.syncpoint_id, found.syncpoint_max + 1)
    rig.check(not readable(fd), "nothing before", "POLLIN")
    rig.close(channel.fd)
    rig.check(readable(fd, rig.patience), "POLLIN", "nothing in time")


Calls("8", "HOST1X_CREATE_FENCE", node).refuses(
    "fence-unknown", "a syncpoint that does not exist is", errno.EINVAL, id=NO_SYNCPOINT, threshold=0
)


@rule("8", "CREATE_FENCE: the reserved word must be 0")
def fence_reserved(rig: Rig) -> None:
    arg = s.Host1xCreateFence(id=1)
    arg.reserved[0] = 1
    fd = node(rig)
    rig.fails(errno.EINVAL, "CREATE_FENCE", lambda: rig.returns(fd, "HOST1X_CREATE_FENCE", arg))


@rule("8", "CREATE_FENCE: any syncpoint of the machine may be waited for, also another client's")
def fence_of_others(rig: Rig) -> None:
    _, found = syncpoint(rig)

    def there(own: Rig, peer: object) -> bool:
        return readable(fence(own, node(own), found.syncpoint_id, found.syncpoint_max), own.patience)

    rig.check(rig.child(there).result(), "POLLIN in another process", "nothing in time")


def extract(rig: Rig, fd: int, fence_fd: int, count: int, address: int) -> Any:
    """FENCE_EXTRACT."""
    fields = {"fence_fd": fence_fd, "num_fences": count, "fences_ptr": address}
    return rig.accepts(fd, "HOST1X_FENCE_EXTRACT", fields)


@rule("8", "FENCE_EXTRACT: tells syncpoint and threshold of a fence")
def extract_fence(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd, room = node(rig), rig.memory(PAGE)
    threshold = (found.syncpoint_max + 5) % WRAP
    done = extract(rig, fd, fence(rig, fd, found.syncpoint_id, threshold), 4, room.address)
    rig.equal("fences", 1, done.num_fences)
    rig.equal("syncpoint and threshold", (found.syncpoint_id, threshold), (room.u32(), room.u32(4)))
    rig.equal("what follows", 0, room.u64(8))


@rule("8", "FENCE_EXTRACT: room for none tells how many there are and stores nothing")
def extract_count(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd = node(rig)
    made = fence(rig, fd, found.syncpoint_id, found.syncpoint_max + 5)
    rig.equal("fences", 1, extract(rig, fd, made, 0, rig.bad_address()).num_fences)


@rule("8", "FENCE_EXTRACT: works on a fence that has signalled")
def extract_signalled(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd, room = node(rig), rig.memory(PAGE)
    made = fence(rig, fd, found.syncpoint_id, found.syncpoint_max)
    rig.check(readable(made, rig.patience), "POLLIN", "nothing in time")
    rig.equal("fences", 1, extract(rig, fd, made, 1, room.address).num_fences)
    rig.equal("threshold", found.syncpoint_max, room.u32(4))


EXTRACT = Calls("8", "HOST1X_FENCE_EXTRACT", node, lambda rig: {"num_fences": 0})
EXTRACT.refuses("extract-closed", "an fd that is not open is", errno.EINVAL, fence_fd=NO_FD)
EXTRACT.refuses("extract-no-fence", "an fd that is no fence is", errno.EINVAL, fence_fd=Rig.tsg)


@rule("8", "FENCE_EXTRACT: a bad address is EFAULT")
def extract_bad_address(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd = node(rig)
    fields = {"fence_fd": fence(rig, fd, found.syncpoint_id, 0), "num_fences": 1, "fences_ptr": rig.bad_address()}
    rig.refuses(errno.EFAULT, fd, "HOST1X_FENCE_EXTRACT", fields)


def pollfd(rig: Rig, fd: int) -> int:
    """A poll fd."""
    return int(rig.accepts(fd, "HOST1X_CREATE_POLLFD").fd)


@rule("8", "CREATE_POLLFD: the fd is not readable before it is triggered")
def pollfd_idle(rig: Rig) -> None:
    rig.check(not readable(pollfd(rig, node(rig)), 0.05), "nothing", "POLLIN")


@rule("8", "TRIGGER_POLLFD: the fd becomes readable once the syncpoint is at the threshold")
def pollfd_triggered(rig: Rig) -> None:
    channel, found = syncpoint(rig)
    fd = node(rig)
    waiting = pollfd(rig, fd)
    threshold = (found.syncpoint_max + 1) % WRAP
    rig.accepts(fd, "HOST1X_TRIGGER_POLLFD", fd=waiting, id=found.syncpoint_id, threshold=threshold)
    rig.check(not readable(waiting), "nothing before", "POLLIN")
    rig.close(channel.fd)
    rig.check(readable(waiting, rig.patience), "POLLIN", "nothing in time")


@rule("8", "TRIGGER_POLLFD: a threshold that is reached already makes the fd readable")
def pollfd_reached(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd = node(rig)
    waiting = pollfd(rig, fd)
    rig.accepts(fd, "HOST1X_TRIGGER_POLLFD", fd=waiting, id=found.syncpoint_id, threshold=found.syncpoint_max)
    rig.check(readable(waiting, rig.patience), "POLLIN", "nothing in time")


@rule("8", "TRIGGER_POLLFD: several thresholds may be waited for on one fd")
def pollfd_several(rig: Rig) -> None:
    _, found = syncpoint(rig)
    fd = node(rig)
    waiting = pollfd(rig, fd)
    for threshold in (found.syncpoint_max + 10, found.syncpoint_max):
        fields = {"fd": waiting, "id": found.syncpoint_id, "threshold": threshold % WRAP}
        rig.accepts(fd, "HOST1X_TRIGGER_POLLFD", fields)
    rig.check(readable(waiting, rig.patience), "POLLIN", "nothing in time")


@rule("8", "TRIGGER_POLLFD: a fd that is no poll fd, or a syncpoint that does not exist, is EINVAL")
def pollfd_refused(rig: Rig) -> None:
    fd = node(rig)
    rig.refuses(errno.EINVAL, fd, "HOST1X_TRIGGER_POLLFD", fd=rig.tsg(), id=1, threshold=0)
    rig.refuses(errno.EINVAL, fd, "HOST1X_TRIGGER_POLLFD", fd=pollfd(rig, fd), id=NO_SYNCPOINT, threshold=0)


@rule("8", "the fence node refuses commands that are not its own with ENOTTY")
def fence_unknown_command(rig: Rig) -> None:
    fd = node(rig)
    for request in (0xC0105803, 0xC0084702, 0xC00C5802):
        rig.raw_refuses(errno.ENOTTY, fd, "fence", request)
