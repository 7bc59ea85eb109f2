"""Section 1: device nodes, fds, what keeps what alive, and what a close does."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from tegrad.conformance.engine import PLAIN_RELEASE, Block, Gpu, Queue, host
from tegrad.conformance.process import Peer
from tegrad.conformance.rig import FENCE, NVMAP, PAGE, Rig
from tegrad.conformance.rule import Differs, rule, rules
from tegrad.conformance.s2_nvmap import alloc_fields, known
from tegrad.uapi.errors import DriverError

NODES = (
    "power",
    "as",
    "channel",
    "ctrl",
    "ctxsw",
    "dbg",
    "prof",
    "prof-ctx",
    "prof-dev",
    "sched",
    "nvsched",
    "nvsched_ctrl_fifo",
    "tsg",
)


def legacy(name: str) -> str:
    """The old path of a node."""
    return "/dev/nvhost-gpu" if name == "channel" else f"/dev/nvhost-{name}-gpu"


# ---- 1.1 nodes -------------------------------------------------------------------------------------------------


@rules(
    "1.1",
    "the node {node} has its new and its legacy name",
    "node name",
    [(node, node.replace("_", "-")) for node in NODES],
    name="node-{name}",
)
def both_names(rig: Rig, node: str) -> None:
    for path in (f"/dev/nvgpu/igpu0/{node}", legacy(node)):
        rig.check(rig.kernel.exists(path), f"a node {path}", "none")


@rule("1.1", "/dev/nvmap and /dev/host1x-fence exist")
def nodes_beside(rig: Rig) -> None:
    for path in (NVMAP, FENCE):
        rig.check(rig.kernel.exists(path), f"a node {path}", "none")


@rule("1.1", "what is no node cannot be opened: ENOENT")
def no_other_nodes(rig: Rig) -> None:
    path = "/dev/nvgpu/igpu0/nothing"
    rig.check(not rig.kernel.exists(path), "no such node", path)
    rig.fails(errno.ENOENT, f"open {path}", lambda: rig.open(path))


@rule("1.1", "/dev/nvmap and ctrl are all that a compute client opens")
def two_nodes_suffice(rig: Rig) -> None:
    try:
        rig.channel_ready()
        rig.doorbell()
    except DriverError as error:
        raise Differs("a channel and its doorbell", str(error)) from None


# ---- 1.2 fds ---------------------------------------------------------------------------------------------------

MAKERS: dict[str, Callable[[Rig], int]] = {
    "as": lambda rig: rig.address_space(),
    "tsg": lambda rig: rig.tsg(),
    "channel": lambda rig: rig.open_channel(),
}
"""How each fd that the driver makes comes into being."""


def _made_fd(kind: str) -> None:
    """The rules of one kind of fd that the driver makes."""
    make = MAKERS[kind]

    @rule("1.2", f"a new {kind} fd is close-on-exec", name=f"{kind}-fd-is-cloexec")
    def cloexec(rig: Rig) -> None:
        rig.check(not os.get_inheritable(make(rig)), "O_CLOEXEC", "an inheritable fd")

    @rule("1.2", f"a new {kind} fd has the lowest free number", name=f"{kind}-fd-is-lowest")
    def lowest(rig: Rig) -> None:
        rig.ctrl  # noqa: B018  opened before the numbers are looked at
        free = os.dup(rig.ctrl)
        os.close(free)
        rig.equal("the number", free, make(rig))

    @rule("1.2", f"an fd of kind {kind} cannot be mapped: ENODEV", name=f"{kind}-fd-has-no-mmap")
    def no_mmap(rig: Rig) -> None:
        rig.refuses_mmap(errno.ENODEV, make(rig), PAGE)


for _kind in MAKERS:
    _made_fd(_kind)


@rule("1.2", "an fd of /dev/nvmap cannot be mapped: EPERM")
def nvmap_has_no_mmap(rig: Rig) -> None:
    rig.refuses_mmap(errno.EPERM, rig.nvmap, PAGE)


@rule("1.2", "opening the tsg node gives a TSG")
def tsg_node(rig: Rig) -> None:
    for path in ("/dev/nvgpu/igpu0/tsg", legacy("tsg")):
        fd = _opens(rig, path)
        rig.accepts(fd, "TSG_GET_TIMESLICE")


@rule("1.2", "CHANNEL_OPEN on a channel fd gives another channel")
def channel_from_channel(rig: Rig) -> None:
    first = rig.open_channel()
    second = rig.accepts(first, "CHANNEL_OPEN").channel_fd
    rig.close(first)
    rig.equal("GET_TIMEDOUT of a channel in no TSG", 1, rig.accepts(second, "CHANNEL_GET_TIMEDOUT").value)


# ---- 1.3 open --------------------------------------------------------------------------------------------------


def _opens(rig: Rig, path: str) -> int:
    """The rule: a node can be opened."""
    return rig.succeeds(f"{path} opens", lambda: rig.open(path))


@rule("1.3", "each open of ctrl has a device_instance_id of its own, and they rise")
def instance_ids_rise(rig: Rig) -> None:
    ids = []
    for _ in range(3):
        rig.ctrl = rig.open_ctrl()
        ids.append(rig.instance_id())
    rig.check(ids[0] < ids[1] < ids[2], "rising ids", ids)


@rule("1.3", "the id of a ctrl fd stays while it is open")
def instance_id_stays(rig: Rig) -> None:
    first = rig.instance_id()
    rig.open_ctrl()
    rig.equal("the id", first, rig.instance_id())


@rule("1.3", "the as node cannot be opened: its default big page size is disabled, EINVAL")
def as_node(rig: Rig) -> None:
    for path in ("/dev/nvgpu/igpu0/as", legacy("as")):
        rig.fails(errno.EINVAL, f"open {path}", lambda path=path: rig.open(path))  # type: ignore[misc]


@rule("1.3", "opening the channel node gives a channel on the graphics runlist")
def channel_node(rig: Rig) -> None:
    vm, tsg = rig.address_space(), rig.tsg()
    first = rig.open_channel()
    rig.bind(vm, tsg, first)  # fixes the TSG's runlist
    fd = _opens(rig, "/dev/nvgpu/igpu0/channel")
    rig.accepts(vm, "AS_BIND_CHANNEL", channel_fd=fd)
    rig.accepts(tsg, "TSG_BIND_CHANNEL_EX", channel_fd=fd)


@rule("1.3", "the sched node has one opener; the second is EBUSY until the first has closed")
def sched_node(rig: Rig) -> None:
    path = "/dev/nvgpu/igpu0/sched"
    try:
        first = rig.open(path)
    except DriverError as error:
        rig.need(error.errno not in (errno.EACCES, errno.EPERM, errno.EBUSY), f"the sched node: {error.code}")
        raise Differs(f"{path} opens", error.code) from None
    rig.fails(errno.EBUSY, "a second open of sched", lambda: rig.open(legacy("sched")))
    rig.close(first)
    _opens(rig, path)


@rule("1.3", "a second open of nvmap in a process shares its handles")
def nvmap_fds_share_handles(rig: Rig) -> None:
    handle, second = rig.handle(), rig.open(NVMAP)
    rig.accepts(second, "NVMAP_ALLOC", alloc_fields(handle))


@rule("1.3", "handles stay while one nvmap fd of the process is open")
def handles_stay_with_one_fd(rig: Rig) -> None:
    first = rig.open(NVMAP)
    handle = rig.handle(nvmap=first)
    rig.nvmap  # noqa: B018  the second fd
    rig.close(first)
    rig.check(known(rig, handle), "a known handle", "an unknown one")


@rule("1.3", "another process does not see the handles, not even of the same number")
def handles_of_another_process(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> bool:
        return known(own, handle)

    handle = rig.buffer().handle
    rig.equal("known to another process", False, rig.child(other).result())


# ---- 1.4 what keeps what alive ---------------------------------------------------------------------------------


def _releases(queue: Queue, block: Block, value: int) -> None:
    """The rule: the channel stores a word into the block."""
    queue.release(block.va, value, PLAIN_RELEASE).submit()
    queue.rig.wait(lambda: block.u32() == value or queue.rig.timed_out(queue.channel.fd))
    queue.rig.equal("the released word", value, block.u32())


@rule("1.4", "a dmabuf fd keeps a buffer's memory without its handle")
def fd_keeps_memory(rig: Rig) -> None:
    buffer = rig.buffer()
    memory = rig.mapped(buffer)
    memory.put32(0xABCD)
    memory.close()
    rig.free(buffer.handle)
    rig.close(rig.nvmap)
    rig.equal("the word", 0xABCD, rig.mmap(buffer.fd, PAGE).u32())


@rule("1.4", "a CPU mapping keeps a buffer's memory without fd and handle")
def cpu_mapping_keeps_memory(rig: Rig) -> None:
    buffer = rig.buffer()
    memory = rig.mapped(buffer)
    memory.put32(0xABCE)
    rig.free(buffer.handle)
    rig.close(buffer.fd)
    rig.buffer(8 * PAGE)  # would get the memory if it were free
    rig.equal("the word", 0xABCE, memory.u32())


@rule("1.4", "a GPU mapping stays valid without fd and handle")
def gpu_mapping_keeps_memory(rig: Rig) -> None:
    queue, block = host(rig)
    rig.free(block.buffer.handle)
    rig.close(block.buffer.fd)
    _releases(queue, block, 77)


@rule("1.4", "a channel keeps its address space and all mappings when the AS fd is closed")
def channel_keeps_address_space(rig: Rig) -> None:
    queue, block = host(rig)
    rig.close(queue.channel.vm)
    _releases(queue, block, 78)


@rule("1.4", "a channel keeps its TSG alive when the TSG fd is closed")
def channel_keeps_tsg(rig: Rig) -> None:
    queue, block = host(rig)
    rig.close(queue.channel.tsg)
    rig.equal("GET_TIMEDOUT", 0, rig.timed_out(queue.channel.fd))
    _releases(queue, block, 79)


@rule("1.4", "AS, TSG and channel fds live on without the ctrl fd that made them")
def ctrl_may_go(rig: Rig) -> None:
    vm, tsg, channel = rig.address_space(), rig.tsg(), rig.open_channel()
    rig.close(rig.ctrl)
    rig.accepts(vm, "AS_ALLOC_SPACE", pages=1, page_size=PAGE)
    rig.accepts(vm, "AS_BIND_CHANNEL", channel_fd=channel)
    rig.accepts(tsg, "TSG_BIND_CHANNEL_EX", channel_fd=channel)
    rig.equal("GET_TIMEDOUT", 0, rig.timed_out(channel))


@rule("1.4", "the doorbell's mapping keeps working when its ctrl fd is closed")
def doorbell_outlives_ctrl(rig: Rig) -> None:
    queue, block = host(rig)
    rig.close(rig.ctrl)
    _releases(queue, block, 80)


@rule("1.4", "a duplicate of a channel's fd keeps the channel")
def duplicate_keeps_channel(rig: Rig) -> None:
    channel = rig.bound_channel()
    copy = rig.keep(os.dup(channel.fd))
    rig.close(channel.fd)
    rig.equal("GET_TIMEDOUT", 0, rig.accepts(copy, "CHANNEL_GET_TIMEDOUT").value)


# ---- 1.5 close -------------------------------------------------------------------------------------------------


@rule("1.5", "a closed channel's id is the next to be given")
def closed_channel_id_is_next(rig: Rig) -> None:
    first, second = rig.channel_ready(), rig.channel_ready()
    rig.close(first.fd)
    rig.equal("the token", first.token, rig.channel_ready().token)
    rig.check(second.token != first.token, "two tokens", first.token)


@rule("1.5", "closing a bound channel takes it out of its TSG, which serves on")
def close_unbinds(rig: Rig) -> None:
    gpu = Gpu(rig)
    first, second, block = gpu.queue(contexts=()), gpu.queue(contexts=()), gpu.memory()
    rig.close(first.channel.fd)
    _releases(second, block, 81)
    rig.equal("GET_TIMEDOUT of the other", 0, rig.timed_out(second.channel.fd))


@rule("1.5", "the last channel that leaves a subcontext by its close deletes the subcontext")
def last_channel_deletes_subcontext(rig: Rig) -> None:
    vm, tsg = rig.address_space(), rig.tsg()
    veid = rig.call(tsg, "TSG_CREATE_SUBCONTEXT", type=1, as_fd=vm).veid
    first, second, third = rig.open_channel(), rig.open_channel(), rig.open_channel()
    rig.bind(vm, tsg, first, veid=veid)
    rig.bind(vm, tsg, second, veid=veid)
    rig.close(first)
    rig.call(vm, "AS_BIND_CHANNEL", channel_fd=third)
    rig.accepts(tsg, "TSG_BIND_CHANNEL_EX", channel_fd=third, subcontext_id=veid)
    rig.close(third)
    rig.close(second)
    rig.equal("the veid that is free again", veid, rig.call(tsg, "TSG_CREATE_SUBCONTEXT", type=1, as_fd=vm).veid)
    rig.accepts(tsg, "TSG_DELETE_SUBCONTEXT", veid=veid)


@rule("1.5", "the last nvmap fd of a process takes its handles along")
def last_nvmap_fd_drops_handles(rig: Rig) -> None:
    handle = rig.buffer().handle
    rig.close(rig.nvmap)
    rig.nvmap = rig.open(NVMAP)
    rig.check(not known(rig, handle), "an unknown handle", "a known one")


@rule("1.5", "memory outlives the last nvmap fd through fds and can be imported again")
def memory_outlives_nvmap(rig: Rig) -> None:
    buffer = rig.buffer()
    rig.mapped(buffer).put32(0x4321)
    rig.close(rig.nvmap)
    rig.nvmap = rig.open(NVMAP)
    handle = rig.accepts(rig.nvmap, "NVMAP_FROM_FD", fd=buffer.fd).handle
    rig.keep_handle(handle)
    rig.equal("the word", 0x4321, rig.mmap(rig.get_fd(handle), PAGE).u32())


@rule("1.5", "a killed process's channels are free at once")
def killed_process_frees_channels(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> None:
        peer.send(own.channel_ready().token)
        peer.value()

    rig.ctrl  # noqa: B018  so that the board knows this process
    child = rig.child(other)
    token = child.peer.value()
    child.kill()
    rig.equal("the token", token, rig.channel_ready().token)


@rule("1.5", "a killed process's buffer lives on where another process has its fd")
def killed_process_leaves_passed_buffers(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> None:
        buffer = own.buffer()
        own.mapped(buffer).put32(0x600D)
        peer.send(None, buffer.fd)
        peer.value()

    child = rig.child(other)
    _, (fd,) = child.peer.receive()
    rig.keep(fd)
    child.kill()
    rig.equal("the word", 0x600D, rig.mmap(fd, PAGE).u32())


@rule("1.5", "fds may be closed in any order")
def any_order_of_closes(rig: Rig) -> None:
    for order in ("ctrl as tsg channel", "tsg channel as ctrl", "as ctrl channel tsg", "channel tsg as ctrl"):
        rig.ctrl = rig.open_ctrl()
        channel = rig.channel_ready()
        rig.call(channel.fd, "CHANNEL_ALLOC_OBJ_CTX", class_num=0xC7C0)
        fds = {"ctrl": rig.ctrl, "as": channel.vm, "tsg": channel.tsg, "channel": channel.fd}
        for name in order.split():
            rig.succeeds(f"close of {name} in the order {order}", lambda fd=fds[name]: rig.close(fd))  # type: ignore[misc]
        rig.ctrl = rig.open_ctrl()
        rig.equal(f"the token after {order}", channel.token, rig.channel_ready().token)


@rule("1.5", "the documented clean order of a client releases everything")
def clean_order(rig: Rig) -> None:
    channel = rig.channel_ready()
    buffer, bell = rig.buffer(), rig.doorbell()
    va = rig.map(channel.vm, buffer.fd)
    rig.close(channel.fd)
    rig.accepts(channel.vm, "AS_UNMAP_BUFFER", offset=va)
    rig.close(channel.tsg)
    rig.close(channel.vm)
    bell.close()
    rig.close(rig.ctrl)
    rig.accepts(rig.nvmap, "NVMAP_FREE", value=buffer.handle)
    rig.check(not known(rig, buffer.handle), "an unknown handle", "a known one")
