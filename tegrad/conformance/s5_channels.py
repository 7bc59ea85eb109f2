"""Section 5: TSGs and channels."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Mapping

from tegrad.conformance.calls import NO_FD, Calls, bound, ctrl, nvmap, ready, unallocated
from tegrad.conformance.process import Peer
from tegrad.conformance.rig import PAGE, SETUP_FLAGS, VA_END, Rig, RigChannel
from tegrad.conformance.rule import rule, rules
from tegrad.conformance.waiter import Waiter
from tegrad.uapi import constants as k

COMPUTE, COPY, GRAPHICS = 0xC7C0, 0xC7B5, 0xC797
SYNC, ASYNC = k.NVGPU_TSG_SUBCONTEXT_TYPE_SYNC, k.NVGPU_TSG_SUBCONTEXT_TYPE_ASYNC
DETERMINISTIC = k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_DETERMINISTIC
USERMODE = k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT
NOTIFIER_ERROR = 0xFFFF
RESET_CODE = 43


def subcontext(rig: Rig, tsg: int, kind: int = ASYNC, *, vm: int | None = None) -> int:
    """A new subcontext of a TSG; its veid."""
    vm = rig.address_space() if vm is None else vm
    return int(rig.accepts(tsg, "TSG_CREATE_SUBCONTEXT", type=kind, as_fd=vm).veid)


def on_address_space(rig: Rig, vm: int | None = None) -> int:
    """A channel in an address space and in no TSG."""
    fd = rig.open_channel()
    rig.call(rig.address_space() if vm is None else vm, "AS_BIND_CHANNEL", channel_fd=fd)
    return fd


def with_object(rig: Rig) -> RigChannel:
    """A bound channel with an object."""
    made = rig.bound_channel()
    rig.call(made.fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=COMPUTE)
    return made


def group_with_object(rig: Rig) -> int:
    """The TSG of a bound channel with an object."""
    return with_object(rig).tsg


def larger(rig: Rig) -> int:
    """A dmabuf of four pages."""
    return rig.buffer(4 * PAGE).fd


def no_fail_line(rig: Rig, mark: int) -> None:
    """The rule: SETUP_BIND and its like have not printed their bare `fail`."""
    lines = [line for line in rig.log_since(mark) if line.rstrip().endswith("fail")]
    rig.equal("lines that end with `fail`", [], lines)


def reset(rig: Rig, channel: RigChannel) -> None:
    """Kill a channel's TSG."""
    rig.call(channel.fd, "CHANNEL_FORCE_RESET")


# ---- 5.1 the order --------------------------------------------------------------------------------------------------


@rule("5.1", "AS_BIND_CHANNEL: a channel that has an address space is refused another: EINVAL")
def one_address_space_a_channel(rig: Rig) -> None:
    fd = on_address_space(rig)
    rig.refuses(errno.EINVAL, rig.address_space(), "AS_BIND_CHANNEL", channel_fd=fd)


Calls("5.1", "CHANNEL_ALLOC_OBJ_CTX", bound, begins="ALLOC_OBJ_CTX ").accepts(
    "object-before-setup", "does not need SETUP_BIND", class_num=COMPUTE
)


@rule("5.1", "one TSG serves a compute and a copy channel of one subcontext")
def compute_and_copy_in_one_tsg(rig: Rig) -> None:
    vm, tsg = rig.address_space(), rig.tsg()
    for class_num in (COMPUTE, COPY):
        made = rig.channel_ready(vm=vm, tsg=tsg)
        rig.accepts(made.fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=class_num)


Calls("5.1", "CHANNEL_SET_ERROR_NOTIFIER", Rig.open_channel, begins="SET_ERROR_NOTIFIER ").accepts(
    "notifier-needs-nothing", "needs nothing before it", offset=0, size=16, mem=lambda rig: rig.buffer().fd
)


# ---- 5.2 TSG ioctls -------------------------------------------------------------------------------------------------


@rule("5.2", "CREATE_SUBCONTEXT: the SYNC one has veid 0")
def sync_subcontext_is_0(rig: Rig) -> None:
    rig.equal("the veid is", 0, subcontext(rig, rig.tsg(), SYNC))


@rule("5.2", "CREATE_SUBCONTEXT: a second SYNC one is ENOSPC")
def one_sync_subcontext(rig: Rig) -> None:
    tsg, vm = rig.tsg(), rig.address_space()
    subcontext(rig, tsg, SYNC, vm=vm)
    rig.refuses(errno.ENOSPC, tsg, "TSG_CREATE_SUBCONTEXT", type=SYNC, as_fd=vm)


@rule("5.2", "CREATE_SUBCONTEXT: ASYNC ones have the lowest free veid from 1 on")
def async_subcontexts_from_1(rig: Rig) -> None:
    tsg, vm = rig.tsg(), rig.address_space()
    rig.equal("the veids are", [1, 2, 3], [subcontext(rig, tsg, vm=vm) for _ in range(3)])
    rig.call(tsg, "TSG_DELETE_SUBCONTEXT", veid=2)
    rig.equal("the free veid is", 2, subcontext(rig, tsg, vm=vm))


@rule("5.2", "CREATE_SUBCONTEXT: the 64th ASYNC one has veid 0, and then there is ENOSPC")
def subcontexts_64(rig: Rig) -> None:
    tsg, vm = rig.tsg(), rig.address_space()
    veids = [subcontext(rig, tsg, vm=vm) for _ in range(64)]
    rig.equal("the veids are", [*range(1, 64), 0], veids)
    rig.refuses(errno.ENOSPC, tsg, "TSG_CREATE_SUBCONTEXT", type=ASYNC, as_fd=vm)


SUBCONTEXT = Calls("5.2", "TSG_CREATE_SUBCONTEXT", Rig.tsg, lambda rig: {"type": ASYNC, "as_fd": rig.address_space()})
SUBCONTEXT.refuses("subcontext-types", "another type is", errno.EINVAL, type=2)
SUBCONTEXT.refuses(
    "subcontext-needs-address-space",
    "an as_fd that is no address space is",
    errno.EINVAL,
    as_fd=(NO_FD, Rig.tsg, lambda rig: rig.buffer().fd),
)
Calls("5.2", "TSG_DELETE_SUBCONTEXT", Rig.tsg).refuses(
    "delete-veid-64", "a veid of 64 or more is", errno.EINVAL, veid=64
)


@rule("5.2", "DELETE_SUBCONTEXT: EINVAL while channels are bound to it")
def delete_used_subcontext(rig: Rig) -> None:
    made = rig.bound_channel()
    rig.refuses(errno.EINVAL, made.tsg, "TSG_DELETE_SUBCONTEXT", veid=0)


BIND = Calls("5.2", "TSG_BIND_CHANNEL_EX", Rig.tsg, lambda rig: {"channel_fd": on_address_space(rig)})
BIND.refuses("bind-needs-channel", "an fd that is no channel is", errno.EINVAL, channel_fd=(NO_FD, Rig.tsg))
BIND.refuses("bind-veid-64", "a subcontext_id of 64 or more is", errno.EINVAL, subcontext_id=64)


@rule("5.2", "BIND_CHANNEL_EX: a veid above 0 that was never created is EINVAL for a channel with an address space")
def bind_unknown_veid(rig: Rig) -> None:
    rig.refuses(errno.EINVAL, rig.tsg(), "TSG_BIND_CHANNEL_EX", channel_fd=on_address_space(rig), subcontext_id=3)


@rule("5.2", "BIND_CHANNEL_EX: a channel of another address space than the subcontext's is EINVAL")
def bind_other_address_space(rig: Rig) -> None:
    tsg = rig.tsg()
    veid = subcontext(rig, tsg)
    rig.refuses(errno.EINVAL, tsg, "TSG_BIND_CHANNEL_EX", channel_fd=on_address_space(rig), subcontext_id=veid)


@rule("5.2", "BIND_CHANNEL_EX: a channel that is in a TSG is EINVAL")
def bind_bound_channel(rig: Rig) -> None:
    made = rig.bound_channel()
    for tsg in (made.tsg, rig.tsg()):
        rig.refuses(errno.EINVAL, tsg, "TSG_BIND_CHANNEL_EX", channel_fd=made.fd)


@rule("5.2", "BIND_CHANNEL_EX: a TSG takes 128 channels, the next is EINVAL")
def bind_128_channels(rig: Rig) -> None:
    tsg, vm = rig.tsg(), rig.address_space()
    for _ in range(128):
        rig.accepts(tsg, "TSG_BIND_CHANNEL_EX", channel_fd=on_address_space(rig, vm))
    rig.refuses(errno.EINVAL, tsg, "TSG_BIND_CHANNEL_EX", channel_fd=on_address_space(rig, vm))


@rule("5.2", "BIND_CHANNEL_EX makes veid 0 with the channel's address space where there is none")
def bind_makes_veid_0(rig: Rig) -> None:
    made = rig.bound_channel()
    rig.refuses(errno.ENOSPC, made.tsg, "TSG_CREATE_SUBCONTEXT", type=SYNC, as_fd=made.vm)
    rig.accepts(made.tsg, "TSG_BIND_CHANNEL_EX", channel_fd=on_address_space(rig, made.vm))
    rig.refuses(errno.EINVAL, made.tsg, "TSG_BIND_CHANNEL_EX", channel_fd=on_address_space(rig))


@rule(
    "5.2", "BIND_CHANNEL_EX takes a channel without address space into a veid that does not exist, and it is of no use"
)
def bind_without_address_space(rig: Rig) -> None:
    tsg, fd = rig.tsg(), rig.open_channel()
    rig.accepts(tsg, "TSG_BIND_CHANNEL_EX", channel_fd=fd)
    rig.refuses(errno.ENOSPC, tsg, "TSG_BIND_CHANNEL_EX", channel_fd=on_address_space(rig))


@rule("5.2", "BIND_CHANNEL_EX makes the channel serviceable")
def bound_is_serviceable(rig: Rig) -> None:
    fd, tsg = on_address_space(rig), rig.tsg()
    rig.equal("GET_TIMEDOUT before", 1, rig.timed_out(fd))
    rig.call(tsg, "TSG_BIND_CHANNEL_EX", channel_fd=fd)
    rig.equal("GET_TIMEDOUT after", 0, rig.timed_out(fd))


@rule("5.2", "BIND_CHANNEL binds to veid 0")
def plain_bind(rig: Rig) -> None:
    tsg, vm = rig.tsg(), rig.address_space()
    fd = on_address_space(rig, vm)
    rig.accepts(tsg, "TSG_BIND_CHANNEL", {"value": fd})
    rig.equal("GET_TIMEDOUT", 0, rig.timed_out(fd))
    rig.refuses(errno.ENOSPC, tsg, "TSG_CREATE_SUBCONTEXT", type=SYNC, as_fd=vm)


@rule("5.2", "a failed BIND_CHANNEL_EX leaves its veid in the channel, and BIND_CHANNEL uses it", hazardous=True)
def failed_bind_leaves_veid(rig: Rig) -> None:
    tsg, fd = rig.tsg(), on_address_space(rig)
    rig.refuses(errno.EINVAL, tsg, "TSG_BIND_CHANNEL_EX", channel_fd=fd, subcontext_id=5)
    rig.refuses(errno.EINVAL, tsg, "TSG_BIND_CHANNEL", {"value": fd})


Calls("5.2", "TSG_UNBIND_CHANNEL", Rig.tsg).refuses(
    "unbind-stranger", "a channel that is not in this TSG is", errno.EINVAL, value=bound
)


@rule("5.2", "UNBIND_CHANNEL makes the channel unserviceable")
def unbound_is_unserviceable(rig: Rig) -> None:
    made = rig.bound_channel()
    rig.accepts(made.tsg, "TSG_UNBIND_CHANNEL", {"value": made.fd})
    rig.equal("GET_TIMEDOUT", 1, rig.timed_out(made.fd))


@rule("5.2", "UNBIND_CHANNEL of the last channel leaves the subcontext")
def unbind_leaves_subcontext(rig: Rig) -> None:
    made = rig.bound_channel()
    rig.call(made.tsg, "TSG_UNBIND_CHANNEL", {"value": made.fd})
    rig.refuses(errno.ENOSPC, made.tsg, "TSG_CREATE_SUBCONTEXT", type=SYNC, as_fd=made.vm)


@rules(
    "5.2",
    "{ioctl} returns 0, on a TSG without channels too",
    "ioctl name",
    [("ENABLE", "tsg-enable"), ("DISABLE", "tsg-disable"), ("PREEMPT", "tsg-preempt")],
)
def tsg_control(rig: Rig, ioctl: str) -> None:
    rig.accepts(rig.tsg(), f"TSG_{ioctl}")
    rig.accepts(rig.channel_ready().tsg, f"TSG_{ioctl}")


@rule("5.2", "GET_TIMESLICE: 1024 us by default")
def timeslice_default(rig: Rig) -> None:
    rig.equal("the time slice is", 1024, int(rig.accepts(rig.tsg(), "TSG_GET_TIMESLICE").timeslice_us))


@rules(
    "5.2",
    "SET_TIMESLICE: {beyond} {limit} us is EINVAL",
    "name beyond limit refused",
    [("timeslice-low", "below", 1000, 999), ("timeslice-high", "above", 50000, 50001)],
)
def timeslice_limit(rig: Rig, limit: int, refused: int) -> None:
    tsg = rig.tsg()
    rig.refuses(errno.EINVAL, tsg, "TSG_SET_TIMESLICE", timeslice_us=refused)
    rig.accepts(tsg, "TSG_SET_TIMESLICE", timeslice_us=limit)


@rule("5.2", "GET_TIMESLICE tells what was set")
def timeslice_is_told(rig: Rig) -> None:
    tsg = rig.bound_channel().tsg
    rig.call(tsg, "TSG_SET_TIMESLICE", timeslice_us=2600)
    rig.equal("the time slice is", 2600, int(rig.call(tsg, "TSG_GET_TIMESLICE").timeslice_us))


@rule("5.2", "SET_RUNLIST_INTERLEAVE: levels 0 to 2, others EINVAL")
def interleave_levels(rig: Rig) -> None:
    tsg = rig.bound_channel().tsg
    for level in range(3):
        rig.accepts(tsg, "TSG_SET_RUNLIST_INTERLEAVE", level=level)
    rig.refuses(errno.EINVAL, tsg, "TSG_SET_RUNLIST_INTERLEAVE", level=3)


EVENT = Calls("5.2", "TSG_EVENT_ID_CTRL", Rig.tsg)
EVENT.refuses("event-command", "a command but enable is", errno.EINVAL, cmd=(0, 2), event_id=2)
EVENT.refuses("event-id", "an event id of 6 or more is", errno.EINVAL, cmd=1, event_id=6)


@rule("5.2", "EVENT_ID_CTRL gives a new fd each time, any number for an event")
def event_fds_are_new(rig: Rig) -> None:
    tsg = rig.tsg()
    fds = [int(rig.accepts(tsg, "TSG_EVENT_ID_CTRL", cmd=1, event_id=event).event_fd) for event in (*range(6), 2, 2)]
    rig.equal("different fds", 8, len(set(fds)))


@rule("5.2", "an event fd is not readable before its event")
def event_fd_is_quiet(rig: Rig) -> None:
    fd = int(rig.call(rig.tsg(), "TSG_EVENT_ID_CTRL", cmd=1, event_id=2).event_fd)
    watch = select.poll()
    watch.register(fd, select.POLLIN | select.POLLPRI)
    rig.equal("poll", [], watch.poll(20))


@rule("5.2", "READ_SINGLE_SM_ERROR_STATE: an SM that does not exist is EINVAL")
def sm_out_of_range(rig: Rig) -> None:
    count = int(rig.call(rig.ctrl, "GPU_NUM_VSMS").num_vsms)
    tsg = group_with_object(rig)
    rig.refuses(errno.EINVAL, tsg, "TSG_READ_SINGLE_SM_ERROR_STATE", sm_id=count, record_mem=0, record_size=0)
    rig.accepts(tsg, "TSG_READ_SINGLE_SM_ERROR_STATE", sm_id=count - 1, record_mem=0, record_size=0)


SM_RECORDS = (
    ("sm-record-of-24-bytes", "copies 24 bytes at most, zero before any error", 64, 24),
    ("sm-record-size", "copies no more than record_size", 8, 8),
    ("sm-record-of-0-bytes", "of size 0 copies nothing", 0, 0),
)
"""The record_size, and how many bytes are stored."""


@rules("5.2", "READ_SINGLE_SM_ERROR_STATE {sentence}", "name sentence size stored", SM_RECORDS)
def sm_record(rig: Rig, size: int, stored: int) -> None:
    memory = rig.memory(64)
    memory.write(b"\xaa" * 64)
    fields = {"sm_id": 0, "record_mem": memory.address, "record_size": size}
    rig.accepts(group_with_object(rig), "TSG_READ_SINGLE_SM_ERROR_STATE", fields)
    rig.equal("the record", bytes(stored) + b"\xaa" * (64 - stored), memory.read(0, 64))


Calls("5.2", "TSG_READ_ALL_SM_ERROR_STATES", Rig.tsg, begins="READ_ALL_SM_ERROR_STATES ").refuses(
    "no-read-all", "is", errno.ENOTTY
)
Calls("5.2", "TSG_SET_L2_MAX_WAYS_EVICT_LAST", group_with_object).refuses(
    "l2-ways", "more ways than a set has is", errno.EINVAL, max_ways=17
)


@rule("5.2", "GET_L2_MAX_WAYS_EVICT_LAST tells what was set")
def l2_ways_are_told(rig: Rig) -> None:
    tsg = group_with_object(rig)
    rig.accepts(tsg, "TSG_SET_L2_MAX_WAYS_EVICT_LAST", max_ways=5)
    rig.equal("ways", 5, int(rig.accepts(tsg, "TSG_GET_L2_MAX_WAYS_EVICT_LAST").max_ways))


@rule("5.2", "SET_L2_SECTOR_PROMOTION: a flag but 1, 2 and 4 is EINVAL")
def l2_sector_promotion(rig: Rig) -> None:
    tsg = group_with_object(rig)
    for flag in (0, 3, 8):
        rig.refuses(errno.EINVAL, tsg, "TSG_SET_L2_SECTOR_PROMOTION", promotion_flag=flag)
    for flag in (1, 2, 4):
        rig.accepts(tsg, "TSG_SET_L2_SECTOR_PROMOTION", promotion_flag=flag)


DOMAIN = Calls("5.2", "TSG_BIND_SCHEDULING_DOMAIN", Rig.tsg)
DOMAIN.refuses("domain-reserved", "reserved fields that are not 0 are", errno.EINVAL, domain_fd=NO_FD, reserved0=1)
DOMAIN.refuses("domain-fd", "an fd that is no domain is", errno.ENOENT, domain_fd=(NO_FD, ctrl))


# ---- 5.2 share tokens ----------------------------------------------------------------------------------------------


class Sharing:
    """Two instances of the device, and a TSG that was opened through the first."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.near = rig.instance_id()
        self.other = rig.open_ctrl()
        self.far = rig.instance_id(self.other)
        self.tsg = rig.tsg()

    def fields(self, **changed: int) -> Mapping[str, int]:
        """The fields of GET_SHARE_TOKEN."""
        return {"source_device_instance_id": self.near, "target_device_instance_id": self.far} | changed

    def token(self) -> int:
        """A token for the second instance."""
        return int(self.rig.accepts(self.tsg, "TSG_GET_SHARE_TOKEN", self.fields()).share_token)

    def use(self, token: int, **changed: int) -> Mapping[str, int]:
        """The fields of the OPEN_TSG that uses a token."""
        return {"flags": 1, "source_device_instance_id": self.near, "share_token": token} | changed


@rule("5.2", "GET_SHARE_TOKEN: an instance id of 0 is EINVAL")
def share_ids_of_0(rig: Rig) -> None:
    both = Sharing(rig)
    for name in ("source_device_instance_id", "target_device_instance_id"):
        rig.refuses(errno.EINVAL, both.tsg, "TSG_GET_SHARE_TOKEN", both.fields(**{name: 0}))


@rule("5.2", "GET_SHARE_TOKEN: a source that has not opened the TSG is EINVAL")
def share_unauthorized(rig: Rig) -> None:
    both = Sharing(rig)
    fields = both.fields(source_device_instance_id=both.far, target_device_instance_id=both.near)
    rig.refuses(errno.EINVAL, both.tsg, "TSG_GET_SHARE_TOKEN", fields)


@rule("5.2", "GET_SHARE_TOKEN: a target that does not exist is EINVAL")
def share_unknown_target(rig: Rig) -> None:
    both = Sharing(rig)
    fields = both.fields(target_device_instance_id=both.far + 1000)
    rig.refuses(errno.EINVAL, both.tsg, "TSG_GET_SHARE_TOKEN", fields)


@rule("5.2", "a share token opens the TSG of another instance")
def share_opens(rig: Rig) -> None:
    both = Sharing(rig)
    shared = int(rig.accepts(both.other, "GPU_OPEN_TSG", both.use(both.token())).tsg_fd)
    rig.call(shared, "TSG_SET_TIMESLICE", timeslice_us=4321)
    rig.equal("the first fd's time slice", 4321, int(rig.call(both.tsg, "TSG_GET_TIMESLICE").timeslice_us))


@rule("5.2", "a share token opens the TSG in another process")
def share_across_processes(rig: Rig) -> None:
    tsg = rig.tsg()
    near = rig.instance_id()

    def use(own: Rig, peer: Peer) -> int:
        peer.send(own.instance_id())
        fields = {"flags": 1, "source_device_instance_id": near, "share_token": peer.value()}
        shared = int(own.accepts(own.ctrl, "GPU_OPEN_TSG", fields).tsg_fd)
        return int(own.call(shared, "TSG_GET_TIMESLICE").timeslice_us)

    rig.call(tsg, "TSG_SET_TIMESLICE", timeslice_us=3210)
    child = rig.child(use)
    fields = {"source_device_instance_id": near, "target_device_instance_id": child.peer.value()}
    child.peer.send(int(rig.call(tsg, "TSG_GET_SHARE_TOKEN", fields).share_token))
    rig.equal("the time slice in the other process", 3210, child.result())


@rule("5.2", "a share token is good for one open")
def share_once(rig: Rig) -> None:
    both = Sharing(rig)
    use = both.use(both.token())
    rig.accepts(both.other, "GPU_OPEN_TSG", use)
    rig.refuses(errno.EINVAL, both.other, "GPU_OPEN_TSG", use)


@rule("5.2", "a share token is good for its target only")
def share_target_only(rig: Rig) -> None:
    both = Sharing(rig)
    rig.refuses(errno.EINVAL, rig.ctrl, "GPU_OPEN_TSG", both.use(both.token()))


@rule("5.2", "a revoked share token is EINVAL")
def share_revoked(rig: Rig) -> None:
    both = Sharing(rig)
    token = both.token()
    rig.accepts(both.tsg, "TSG_REVOKE_SHARE_TOKEN", both.fields(share_token=token))
    rig.refuses(errno.EINVAL, both.other, "GPU_OPEN_TSG", both.use(token))


@rule("5.2", "REVOKE_SHARE_TOKEN of a token that does not exist is EINVAL")
def share_revoke_unknown(rig: Rig) -> None:
    both = Sharing(rig)
    token = both.token()
    for number in (0, token + 1):
        rig.refuses(errno.EINVAL, both.tsg, "TSG_REVOKE_SHARE_TOKEN", both.fields(share_token=number))


@rule("5.2", "closing the TSG fd that a token came from revokes it")
def share_ends_with_its_fd(rig: Rig) -> None:
    both = Sharing(rig)
    use = both.use(both.token())
    rig.call(both.tsg, "TSG_GET_TIMESLICE")
    rig.close(both.tsg)
    rig.refuses(errno.EINVAL, both.other, "GPU_OPEN_TSG", use)


@rule("5.2", "a shared TSG lives on when the fd it was shared from is closed")
def share_keeps_the_tsg(rig: Rig) -> None:
    both = Sharing(rig)
    rig.call(both.tsg, "TSG_SET_TIMESLICE", timeslice_us=4000)
    shared = int(rig.call(both.other, "GPU_OPEN_TSG", both.use(both.token())).tsg_fd)
    rig.close(both.tsg)
    rig.equal("the time slice", 4000, int(rig.accepts(shared, "TSG_GET_TIMESLICE").timeslice_us))
    rig.accepts(rig.bound_channel(tsg=shared).fd, "CHANNEL_SETUP_BIND", rig.rings())


@rule("5.2", "a TSG has 64 unused share tokens at most: then ENOSPC")
def share_64_tokens(rig: Rig) -> None:
    both = Sharing(rig)
    for _ in range(64):
        both.token()
    rig.refuses(errno.ENOSPC, both.tsg, "TSG_GET_SHARE_TOKEN", both.fields())


# ---- 5.3 SETUP_BIND -------------------------------------------------------------------------------------------------


@rule("5.3", "SETUP_BIND: fewer than 2 entries are EINVAL")
def setup_one_entry(rig: Rig) -> None:
    made = rig.bound_channel()
    for entries in (0, 1):
        rig.refuses(errno.EINVAL, made.fd, "CHANNEL_SETUP_BIND", rig.rings(num_gpfifo_entries=entries))
    rig.accepts(made.fd, "CHANNEL_SETUP_BIND", rig.rings(entries=2))


SETUP = Calls("5.3", "CHANNEL_SETUP_BIND", bound, Rig.rings)
SETUP.refuses("setup-power-of-two", "entries that are no power of two are", errno.EINVAL, num_gpfifo_entries=384)
SETUP.refuses("setup-small-ring", "a ring larger than its buffer is", errno.EINVAL, num_gpfifo_entries=1024)
SETUP.refuses("setup-once", "a second one is", errno.EEXIST, ready)
SETUP.refuses("setup-needs-deterministic", "USERMODE without DETERMINISTIC is", errno.EINVAL, flags=USERMODE)


@rule("5.3", "SETUP_BIND: more than 2^28 entries are EINVAL, by the entry checks, which print no line")
def setup_too_many(rig: Rig) -> None:
    made, mark = rig.bound_channel(), rig.log_mark()
    rig.refuses(errno.EINVAL, made.fd, "CHANNEL_SETUP_BIND", rig.rings(num_gpfifo_entries=1 << 29))
    no_fail_line(rig, mark)


@rule("5.3", "SETUP_BIND: a channel without address space is EINVAL")
def setup_needs_address_space(rig: Rig) -> None:
    tsg, fd = rig.tsg(), rig.open_channel()
    rig.call(tsg, "TSG_BIND_CHANNEL_EX", channel_fd=fd)
    rig.call(fd, "CHANNEL_WDT", wdt_status=k.NVGPU_IOCTL_CHANNEL_DISABLE_WDT)
    rig.refuses(errno.EINVAL, fd, "CHANNEL_SETUP_BIND", rig.rings())


@rule("5.3", "SETUP_BIND: a channel in no TSG is EINVAL")
def setup_needs_tsg(rig: Rig) -> None:
    fd = on_address_space(rig)
    rig.call(fd, "CHANNEL_WDT", wdt_status=k.NVGPU_IOCTL_CHANNEL_DISABLE_WDT)
    rig.refuses(errno.EINVAL, fd, "CHANNEL_SETUP_BIND", rig.rings())


@rule("5.3", "SETUP_BIND: EEXIST comes before the checks of the buffers")
def setup_once_first(rig: Rig) -> None:
    rig.refuses(errno.EEXIST, rig.channel_ready().fd, "CHANNEL_SETUP_BIND", rig.rings(gpfifo_dmabuf_fd=0))


@rule("5.3", "SETUP_BIND: DETERMINISTIC with the watchdog on is EINVAL")
def setup_needs_watchdog_off(rig: Rig) -> None:
    made = rig.bound_channel()
    rig.call(made.fd, "CHANNEL_WDT", wdt_status=k.NVGPU_IOCTL_CHANNEL_ENABLE_WDT)
    rig.refuses(errno.EINVAL, made.fd, "CHANNEL_SETUP_BIND", rig.rings())


for _field in ("gpfifo", "userd"):

    @rule("5.3", f"SETUP_BIND: {_field} fd 0 is EINVAL, whatever it is", name=f"setup-{_field}-fd-0")
    def setup_fd_0(rig: Rig, field: str = f"{_field}_dmabuf_fd") -> None:
        def with_fd_0(own: Rig, peer: Peer) -> None:
            fields = own.rings()
            os.dup2(fields[field], 0)
            own.refuses(errno.EINVAL, own.bound_channel().fd, "CHANNEL_SETUP_BIND", fields | {field: 0})

        rig.child(with_fd_0).result()

    _fd = f"{_field}_dmabuf_fd"
    SETUP.refuses(f"setup-{_field}-not-open", f"a {_field} fd that is not open is", errno.EBADF, **{_fd: NO_FD})
    SETUP.refuses(f"setup-{_field}-no-dmabuf", f"a {_field} fd that is no dmabuf is", errno.EINVAL, **{_fd: ctrl})
    SETUP.refuses(
        f"setup-{_field}-no-memory", f"a {_field} buffer without memory is", errno.ENOMEM, **{_fd: unallocated}
    )
    SETUP.refuses(
        f"setup-{_field}-offset",
        f"a {_field} offset is",
        errno.EINVAL,
        **{_fd: larger},
        **{f"{_field}_dmabuf_offset": PAGE},
    )


@rule("5.3", "SETUP_BIND: a failed one leaves the channel reusable")
def setup_can_be_repeated(rig: Rig) -> None:
    made = rig.bound_channel()
    rig.refuses(errno.EBADF, made.fd, "CHANNEL_SETUP_BIND", rig.rings(userd_dmabuf_fd=NO_FD))
    rig.accepts(made.fd, "CHANNEL_SETUP_BIND", rig.rings())


@rule("5.3", "SETUP_BIND: a failure after the entry checks prints a bare `fail`")
def setup_fail_line(rig: Rig) -> None:
    made, mark = rig.bound_channel(), rig.log_mark()
    rig.refuses(errno.EBADF, made.fd, "CHANNEL_SETUP_BIND", rig.rings(userd_dmabuf_fd=NO_FD))
    lines = rig.log_since(mark)
    rig.check(any(line.rstrip().endswith("fail") for line in lines), "a line that ends with `fail`", lines)


@rule("5.3", "SETUP_BIND: the token is the channel id and the runlist in bits 16 on")
def setup_token(rig: Rig) -> None:
    token = int(rig.accepts(rig.bound_channel().fd, "CHANNEL_SETUP_BIND", rig.rings()).work_submit_token)
    rig.check(0 <= token < 512, "a channel id below 512 on runlist 0", token)


@rule("5.3", "SETUP_BIND: the three addresses come back as 0")
def setup_addresses_are_0(rig: Rig) -> None:
    names = ("gpfifo_gpu_va", "userd_gpu_va", "usermode_mmio_gpu_va")
    done = rig.accepts(rig.bound_channel().fd, "CHANNEL_SETUP_BIND", rig.rings(**dict.fromkeys(names, 7)))
    rig.equal("the addresses", [0, 0, 0], [int(getattr(done, name)) for name in names])


@rule("5.3", "SETUP_BIND ignores unknown flags")
def setup_unknown_flags(rig: Rig) -> None:
    rig.accepts(rig.bound_channel().fd, "CHANNEL_SETUP_BIND", rig.rings(flags=SETUP_FLAGS | 0x100))


@rule("5.3", "SETUP_BIND maps the whole ring buffer in the driver's range: a bigger one leaves less")
def setup_maps_the_ring(rig: Rig) -> None:
    before = syncpoint(rig, rig.channel_ready())[0]
    made = rig.bound_channel()
    rig.call(made.fd, "CHANNEL_SETUP_BIND", rig.rings(gpfifo_dmabuf_fd=rig.buffer(1 << 20).fd))
    rig.check(syncpoint(rig, made)[0] > before, "the syncpoint after a bigger ring lies higher", hex(before))


@rule("5.3", "SETUP_BIND without USERMODE: fewer than 4 entries are EINVAL, by the entry checks, which print no line")
def kernel_ring_entries(rig: Rig) -> None:
    made, mark = rig.bound_channel(), rig.log_mark()
    rig.refuses(errno.EINVAL, made.fd, "CHANNEL_SETUP_BIND", rig.rings(entries=2, flags=DETERMINISTIC))
    no_fail_line(rig, mark)


@rule("5.7", "ALLOC_GPFIFO_EX: entries that are fewer than 4 or no power of two are EINVAL, and print no line")
def gpfifo_ex_entries(rig: Rig) -> None:
    made, mark = rig.bound_channel(), rig.log_mark()
    for entries in (0, 2, 6):
        rig.refuses(errno.EINVAL, made.fd, "CHANNEL_ALLOC_GPFIFO_EX", num_entries=entries)
    no_fail_line(rig, mark)


@rule("5.7", "ALLOC_GPFIFO_EX with USERMODE is EINVAL: it has no buffers for it")
def gpfifo_ex_usermode(rig: Rig) -> None:
    fields = {"num_entries": 512, "flags": USERMODE | DETERMINISTIC}
    rig.refuses(errno.EINVAL, rig.bound_channel().fd, "CHANNEL_ALLOC_GPFIFO_EX", fields)


Calls("5.7", "CHANNEL_ALLOC_GPFIFO_EX", ready, begins="ALLOC_GPFIFO_EX on ").refuses(
    "gpfifo-ex-once", "a channel that has a ring is", errno.EEXIST, num_entries=512
)


# ---- 5.4 WDT -------------------------------------------------------------------------------------------------------


WDT = Calls("5.4", "CHANNEL_WDT", Rig.open_channel)
WDT.refuses("wdt-neither", "neither enable nor disable is", errno.EINVAL, wdt_status=4, timeout_ms=1000)
WDT.refuses("wdt-both", "both enable and disable are", errno.EINVAL, wdt_status=3)
WDT.accepts("wdt-other-bits", "other bits are ignored", wdt_status=1 | 4 | 8 | 0x100, timeout_ms=1000)


@rule("5.4", "WDT: a deterministic channel takes only disable")
def wdt_deterministic(rig: Rig) -> None:
    made = rig.channel_ready()
    rig.refuses(errno.EINVAL, made.fd, "CHANNEL_WDT", wdt_status=2)
    rig.accepts(made.fd, "CHANNEL_WDT", wdt_status=1)


@rule("5.4", "the watchdog is on by default")
def wdt_default(rig: Rig) -> None:
    vm, tsg, fd = rig.address_space(), rig.tsg(), rig.open_channel()
    rig.bind(vm, tsg, fd)
    rig.refuses(errno.EINVAL, fd, "CHANNEL_SETUP_BIND", rig.rings())


# ---- 5.5 ALLOC_OBJ_CTX -----------------------------------------------------------------------------------------------


for _class in (COMPUTE, COPY, GRAPHICS, 0xC76F, 0xC637):
    Calls("5.5", "CHANNEL_ALLOC_OBJ_CTX", bound, begins="ALLOC_OBJ_CTX ").accepts(
        f"class-{_class:x}", f"takes class {_class:#x}", class_num=_class
    )


@rule("5.5", "ALLOC_OBJ_CTX takes classes of older chips")
def older_classes(rig: Rig) -> None:
    for class_num in (0xC5C0, 0xC46F, 0xC5B5, 0xC3C0, 0xC0B5, 0xA0B5, 0xA140, 0xB0B5, 0xB06F, 0xB1C0, 0x902D):
        rig.accepts(rig.bound_channel().fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=class_num)


GFXP, CILP = k.NVGPU_ALLOC_OBJ_FLAGS_GFXP, k.NVGPU_ALLOC_OBJ_FLAGS_CILP
OBJECT = Calls("5.5", "CHANNEL_ALLOC_OBJ_CTX", bound, lambda rig: {"class_num": COMPUTE})
OBJECT.refuses(
    "unknown-class", "a class that the driver does not know is", errno.EINVAL, class_num=(0, 0xC6C0, 0xC56F, 0xCBC0)
)
OBJECT.refuses("object-needs-tsg", "a channel in no TSG is", errno.EINVAL, on_address_space)
OBJECT.refuses("gfxp-and-cilp", "GFXP and CILP together are", errno.EINVAL, flags=GFXP | CILP)


@rule("5.5", "ALLOC_OBJ_CTX: a channel without address space is EINVAL")
def object_needs_address_space(rig: Rig) -> None:
    fd = rig.open_channel()
    rig.call(rig.tsg(), "TSG_BIND_CHANNEL_EX", channel_fd=fd)
    rig.refuses(errno.EINVAL, fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=COMPUTE)


@rule("5.5", "ALLOC_OBJ_CTX: a graphics class off veid 0 is EINVAL")
def graphics_off_veid_0(rig: Rig) -> None:
    vm, tsg, fd = rig.address_space(), rig.tsg(), rig.open_channel()
    rig.bind(vm, tsg, fd, veid=subcontext(rig, tsg, vm=vm))
    rig.refuses(errno.EINVAL, fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=GRAPHICS)
    rig.accepts(fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=COMPUTE)


@rule("5.5", "ALLOC_OBJ_CTX never writes obj_id")
def object_id_is_not_written(rig: Rig) -> None:
    done = rig.accepts(rig.bound_channel().fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=COMPUTE, obj_id=77)
    rig.equal("obj_id", 77, int(done.obj_id))


@rule("5.5", "a channel takes more than one object")
def two_objects(rig: Rig) -> None:
    made = with_object(rig)
    rig.accepts(made.fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=COPY)
    rig.accepts(made.fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=COMPUTE)


# ---- 5.6 SET_PREEMPTION_MODE ----------------------------------------------------------------------------------------


def preemption(graphics: int, compute: int) -> dict[str, int]:
    """The fields of SET_PREEMPTION_MODE."""
    return {"graphics_preempt_mode": graphics, "compute_preempt_mode": compute}


PREEMPTION = Calls("5.6", "CHANNEL_SET_PREEMPTION_MODE", lambda rig: with_object(rig).fd)
PREEMPTION.refuses("preemption-needs-object", "a channel without object is", errno.EINVAL, bound, **preemption(0, 4))
PREEMPTION.refuses("preemption-of-both", "GFXP with CILP is", errno.EINVAL, **preemption(2, 4))
PREEMPTION.accepts(
    "preemption-of-nothing", "nothing to change is fine", graphics_preempt_mode=(0, 1), compute_preempt_mode=(0, 1)
)
PREEMPTION.accepts(
    "preemption-rises", "the compute mode rises from WFI over CTA to CILP", compute_preempt_mode=(2, 4, 4)
)


@rule("5.6", "SET_PREEMPTION_MODE: a channel that has left its TSG is EINVAL")
def preemption_needs_tsg(rig: Rig) -> None:
    made = with_object(rig)
    rig.call(made.tsg, "TSG_UNBIND_CHANNEL", {"value": made.fd})
    rig.refuses(errno.EINVAL, made.fd, "CHANNEL_SET_PREEMPTION_MODE", preemption(0, 4))


@rule("5.6", "SET_PREEMPTION_MODE: a lower mode is EINVAL")
def preemption_does_not_fall(rig: Rig) -> None:
    made = with_object(rig)
    rig.call(made.fd, "CHANNEL_SET_PREEMPTION_MODE", preemption(0, 4))
    for compute in (1, 2):
        rig.refuses(errno.EINVAL, made.fd, "CHANNEL_SET_PREEMPTION_MODE", preemption(0, compute))


@rule("5.6", "SET_PREEMPTION_MODE: modes that do not exist are EINVAL")
def preemption_unknown(rig: Rig) -> None:
    made = with_object(rig)
    for graphics, compute in ((4, 0), (0, 8)):
        rig.refuses(errno.EINVAL, made.fd, "CHANNEL_SET_PREEMPTION_MODE", preemption(graphics, compute))


# ---- 5.7 the rest ---------------------------------------------------------------------------------------------------


NOTIFIER = Calls("5.7", "CHANNEL_SET_ERROR_NOTIFIER", Rig.open_channel, lambda rig: {"offset": 0, "size": 16})
NOTIFIER.refuses("notifier-mem-0", "mem 0 is", errno.EINVAL, mem=0)
NOTIFIER.refuses("notifier-bad-fd", "a bad fd is", errno.EINVAL, mem=(NO_FD, ctrl))


@rule("5.7", "SET_ERROR_NOTIFIER: a record that does not lie in the buffer is EINVAL")
def notifier_outside(rig: Rig) -> None:
    fd, mem = rig.open_channel(), rig.buffer().fd
    for offset in (PAGE - 15, PAGE, (1 << 64) - 8):
        rig.refuses(errno.EINVAL, fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=offset, size=16, mem=mem)
    rig.accepts(fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=PAGE - 16, size=16, mem=mem)


@rule("5.7", "SET_ERROR_NOTIFIER zeroes 16 bytes at once, whatever `size` says")
def notifier_is_zeroed(rig: Rig) -> None:
    buffer = rig.buffer()
    memory = rig.mapped(buffer)
    memory.write(b"\xff" * 64)
    rig.accepts(rig.open_channel(), "CHANNEL_SET_ERROR_NOTIFIER", offset=16, size=0, mem=buffer.fd)
    rig.equal("the buffer", b"\xff" * 16 + bytes(16) + b"\xff" * 16, memory.read(0, 48))


@rule("5.7", "SET_ERROR_NOTIFIER drops the old notifier even when the new one is bad")
def notifier_old_goes_first(rig: Rig) -> None:
    made, buffer = rig.channel_ready(), rig.buffer()
    memory = rig.mapped(buffer)
    rig.call(made.fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=0, size=16, mem=buffer.fd)
    rig.refuses(errno.EINVAL, made.fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=0, size=16, mem=NO_FD)
    reset(rig, made)
    rig.equal("the old notifier", bytes(16), memory.read(0, 16))


@rule("5.7", "the error notifier keeps its buffer without handle and fd")
def notifier_keeps_its_buffer(rig: Rig) -> None:
    made, buffer = rig.channel_ready(), rig.buffer()
    memory = rig.mapped(buffer)
    rig.call(made.fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=0, size=16, mem=buffer.fd)
    rig.free(buffer.handle)
    rig.close(buffer.fd)
    reset(rig, made)
    rig.equal("info32", RESET_CODE, memory.u32(8))


def syncpoint(rig: Rig, channel: RigChannel) -> tuple[int, int, int]:
    """A channel's user syncpoint: address, number, maximum."""
    done = rig.call(channel.fd, "CHANNEL_GET_USER_SYNCPOINT")
    return int(done.gpu_va), int(done.syncpoint_id), int(done.syncpoint_max)


@rule("5.7", "GET_USER_SYNCPOINT: made once per channel, then the same")
def syncpoint_is_made_once(rig: Rig) -> None:
    made = rig.channel_ready()
    rig.equal("the second answer", syncpoint(rig, made), syncpoint(rig, made))


@rule("5.7", "GET_USER_SYNCPOINT: every channel has one of its own")
def syncpoints_differ(rig: Rig) -> None:
    one, two = (syncpoint(rig, rig.channel_ready()) for _ in range(2))
    rig.check(one[1] != two[1], "different numbers", (one[1], two[1]))


@rule("5.7", "GET_USER_SYNCPOINT: its address lies in the driver's range")
def syncpoint_in_the_drivers_range(rig: Rig) -> None:
    va = syncpoint(rig, rig.channel_ready())[0]
    rig.check(VA_END <= va < VA_END + (1 << 32), f"an address in [{VA_END:#x}, + 4 GiB)", hex(va))


SUBMIT = Calls("5.7", "CHANNEL_SUBMIT_GPFIFO", ready, begins="SUBMIT_GPFIFO on ")
SUBMIT.refuses("submit-usermode", "a usermode channel is", errno.EINVAL)
SUBMIT.refuses("submit-unserviceable", "an unserviceable channel is", errno.ETIMEDOUT, Rig.open_channel)
SUBMIT.refuses("submit-without-ring", "a channel without a ring is", errno.ENOMEM, bound)


@rule("5.7", "GET_TIMEDOUT: 1 after the TSG was killed")
def timedout_after_reset(rig: Rig) -> None:
    made = rig.channel_ready()
    rig.equal("before", 0, rig.timed_out(made.fd))
    reset(rig, made)
    rig.equal("after", 1, rig.timed_out(made.fd))


@rule("5.7", "SET_TIMEOUT and SET_TIMEOUT_EX take any number")
def timeouts(rig: Rig) -> None:
    fd = rig.open_channel()
    for timeout in (0, 1, 3000, 0xFFFFFFFF):
        rig.accepts(fd, "CHANNEL_SET_TIMEOUT", timeout=timeout)
        rig.accepts(fd, "CHANNEL_SET_TIMEOUT_EX", timeout=timeout, flags=0xFFFFFFFF)


def semaphore(fd: int, *, offset: int = 0, payload: int = 0, timeout: int = 2000, kind: int = 1) -> dict[str, int]:
    """The fields of a WAIT."""
    where = {"condition.semaphore.dmabuf_fd": fd, "condition.semaphore.offset": offset}
    return {"type": kind, "timeout": timeout, "condition.semaphore.payload": payload} | where


WAIT = Calls("5.7", "CHANNEL_WAIT", ready, lambda rig: semaphore(rig.buffer().fd), begins="WAIT")
WAIT_FD, WAIT_OFFSET = "condition.semaphore.dmabuf_fd", "condition.semaphore.offset"
WAIT.refuses("wait-unserviceable", " on an unserviceable channel is", errno.ETIMEDOUT, Rig.open_channel)
WAIT.refuses("wait-type", ": another type is", errno.EINVAL, type=2)
WAIT.refuses("wait-bad-fd", ": a bad fd is", errno.EINVAL, **{WAIT_FD: (NO_FD, ctrl)})
WAIT.refuses(
    "wait-odd-offset", " for a semaphore: an offset that is no multiple of 4 is", errno.EINVAL, **{WAIT_OFFSET: 2}
)
WAIT.refuses(
    "wait-notifier-outside",
    " for a notifier: a record that does not lie in the buffer is",
    errno.EINVAL,
    type=k.NVGPU_WAIT_TYPE_NOTIFIER,
    **{WAIT_OFFSET: PAGE - 15},
)


@rule("5.7", "WAIT for a semaphore: an offset outside the buffer is EINVAL")
def wait_outside(rig: Rig) -> None:
    made, fd = rig.channel_ready(), rig.buffer().fd
    rig.equal("WAIT outside returned", "EINVAL", Waiter(rig, made.fd, semaphore(fd, offset=PAGE)).result())
    rig.equal("WAIT at the end returned", "success", Waiter(rig, made.fd, semaphore(fd, offset=PAGE - 4)).result())


@rule("5.7", "WAIT for a semaphore that has its payload returns at once")
def wait_is_over(rig: Rig) -> None:
    made, buffer = rig.channel_ready(), rig.buffer()
    rig.mapped(buffer).put32(9, 64)
    waiter = Waiter(rig, made.fd, semaphore(buffer.fd, offset=64, payload=9), times=2)
    rig.equal("WAIT returned", "success", waiter.result())


@rule("5.7", "WAIT for a semaphore: ETIMEDOUT when the time is over")
def wait_times_out(rig: Rig) -> None:
    made = rig.channel_ready()
    rig.refuses(errno.ETIMEDOUT, made.fd, "CHANNEL_WAIT", semaphore(rig.buffer().fd, payload=1, timeout=30))


@rule("5.7", "WAIT returns 0 when the channel is killed meanwhile")
def wait_of_a_killed_channel(rig: Rig) -> None:
    made, buffer = rig.channel_ready(), rig.buffer()
    waiter = Waiter(rig, made.fd, semaphore(buffer.fd, payload=1))
    reset(rig, made)
    rig.equal("WAIT returned", "success", waiter.result())


@rule("5.7", "WAIT drops the channel's lock: other calls on the fd go on")
def wait_does_not_lock(rig: Rig) -> None:
    made, buffer = rig.channel_ready(), rig.buffer()
    waiter = Waiter(rig, made.fd, semaphore(buffer.fd, payload=1), times=2)
    rig.equal("GET_TIMEDOUT", 0, int(rig.accepts(made.fd, "CHANNEL_GET_TIMEDOUT").value))
    rig.check(waiter.asleep, "GET_TIMEDOUT answers while WAIT sleeps", "after it")


@rule("5.7", "WAIT for a notifier whose status is 0 returns at once and fills the record in")
def wait_for_notifier(rig: Rig) -> None:
    made, buffer = rig.channel_ready(), rig.buffer()
    rig.accepts(made.fd, "CHANNEL_WAIT", semaphore(buffer.fd, offset=16, kind=0))
    rig.equal("info32", 0xDEADBEEF, rig.mapped(buffer).u32(24))


@rule("5.7", "WAIT for a notifier: EINTR when the time is over (inferred)")
def wait_for_notifier_times_out(rig: Rig) -> None:
    made, buffer = rig.channel_ready(), rig.buffer()
    rig.mapped(buffer).put32(1 << 16, 12)  # status: in progress
    rig.refuses(errno.EINTR, made.fd, "CHANNEL_WAIT", semaphore(buffer.fd, kind=0, timeout=30))


for _name in ("ENABLE", "DISABLE", "PREEMPT"):
    Calls("5.7", f"CHANNEL_{_name}", ready, begins=f"{_name} ").accepts(
        f"channel-{_name.lower()}", "of a channel returns 0"
    )
for _name in ("PREEMPT", "ZCULL_BIND"):
    Calls("5.7", f"CHANNEL_{_name}", Rig.open_channel, begins=f"{_name} ").refuses(
        f"{_name.split('_')[0].lower()}-needs-tsg", "of a channel in no TSG is", errno.EINVAL
    )


@rule("5.7", "FORCE_RESET kills the TSG: notifier code 43 for every channel that registered one")
def force_reset(rig: Rig) -> None:
    vm, tsg = rig.address_space(), rig.tsg()
    both, records = [rig.channel_ready(vm=vm, tsg=tsg) for _ in range(2)], []
    for made in both:
        buffer = rig.buffer()
        records.append(rig.mapped(buffer))
        rig.call(made.fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=0, size=16, mem=buffer.fd)
    rig.accepts(both[0].fd, "CHANNEL_FORCE_RESET")
    rig.equal("the codes", [RESET_CODE, RESET_CODE], [record.u32(8) for record in records])
    rig.equal("the status", [NOTIFIER_ERROR, NOTIFIER_ERROR], [record.u32(12) >> 16 for record in records])
    rig.equal("GET_TIMEDOUT", [1, 1], [rig.timed_out(made.fd) for made in both])


@rule("5.7", "FORCE_RESET leaves other TSGs alone")
def force_reset_of_one(rig: Rig) -> None:
    one, other = rig.channel_ready(), rig.channel_ready()
    reset(rig, one)
    rig.equal("GET_TIMEDOUT of the other", 0, rig.timed_out(other.fd))


@rule("5.7", "SET_BOOSTED_CTX is EINVAL on ga10b")
def no_boosted_context(rig: Rig) -> None:
    rig.refuses(errno.EINVAL, with_object(rig).fd, "CHANNEL_SET_BOOSTED_CTX", boost=1)


Calls("5.7", "CHANNEL_SET_NVMAP_FD", Rig.open_channel, begins="SET_NVMAP_FD ").accepts(
    "set-nvmap-fd", "is accepted and does nothing", fd=(NO_FD, nvmap)
)


for _name in ("EVENT_ID_CTRL", "SET_RUNLIST_INTERLEAVE"):
    Calls("5.7", f"CHANNEL_{_name}", ready, begins=f"CHANNEL_{_name} ").refuses(
        f"no-channel-{_name.lower().replace('_', '-')}", "is", errno.ENOTTY
    )
