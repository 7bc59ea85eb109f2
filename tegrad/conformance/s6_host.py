"""Section 6: what a client sees of the hardware: GPFIFO entries, USERD, submission."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from tegrad.conformance.engine import PLAIN_RELEASE, becomes, host
from tegrad.conformance.process import Peer
from tegrad.conformance.rig import Rig
from tegrad.conformance.rule import rule, rules
from tegrad.conformance.s5_channels import semaphore
from tegrad.conformance.s8_fences import fence, node, readable
from tegrad.conformance.waiter import Waiter
from tegrad.hw.classes import HostMethod
from tegrad.hw.gpfifo import DOORBELL, VA_LIMIT, MethodOp, Userd, gp_entry, method_header

MMU_FAULT = 31
SYNC, SUBROUTINE, CONDITIONAL = 1 << 63, 1 << 41, 1
SETTLE_S = 0.05
"""How long a rule waits for something that must not happen."""


class Client:
    """A channel for host methods alone, and a page into which its entries store."""

    def __init__(self, rig: Rig, *, entries: int = 512) -> None:
        self.rig = rig
        self.queue, self.page = host(rig, entries=entries)
        self.channel, self.userd = self.queue.channel, self.queue.userd

    def stores(self, value: int, offset: int = 0) -> int:
        """An entry that stores a value into the page."""
        return self.queue.release(self.page.va + offset, value, PLAIN_RELEASE).segment()

    def submit(self, *entries: int) -> None:
        """Write entries into the ring, move GPPut on and ring the doorbell."""
        self.queue.entry(*entries).ring_doorbell()

    def reaches(self, value: int, offset: int = 0) -> None:
        """The rule: the page comes to hold a value."""
        becomes(self.rig, "the word in memory", value, lambda: self.page.u32(offset))

    def stays(self, value: int) -> None:
        """The rule: the page begins with a value, and still does a while later."""
        time.sleep(SETTLE_S)
        self.rig.equal("memory", value, self.page.u32())


# ---- 6.1 GPFIFO entries ----------------------------------------------------------------------------------------------


TAKEN: tuple[tuple[str, str, Callable[[int], tuple[int, ...]]], ...] = (
    ("entry-runs", "an entry's segment is fetched and executed", lambda entry: (entry,)),
    ("nop-entry", "an entry of length 0 with opcode 0 does nothing", lambda entry: (0, entry)),
    ("opcode-2", "an entry of length 0 with opcode 2 (GP CRC) is taken", lambda entry: (2 << 32, entry)),
    ("opcode-3", "an entry of length 0 with opcode 3 (PB CRC) is taken", lambda entry: (3 << 32, entry)),
    ("sync-entry", "an entry with the sync bit is executed", lambda entry: (entry | SYNC,)),
    ("subroutine-entry", "an entry with the subroutine bit is executed", lambda entry: (entry | SUBROUTINE,)),
    ("conditional-entry", "an entry with the conditional bit is executed", lambda entry: (entry | CONDITIONAL,)),
)
"""The entries that are submitted, with one in them that stores a word: it does."""


@rules("6.1", "{sentence}", "name sentence entries", TAKEN)
def taken(rig: Rig, entries: Callable[[int], tuple[int, ...]]) -> None:
    client = Client(rig)
    client.submit(*entries(client.stores(7)))
    client.reaches(7)


ILLEGAL = (
    ("illegal-opcode", "an entry of length 0 with opcode 1 is illegal: GPENTRY, which the driver only logs", 1 << 32),
    ("unknown-opcode", "an entry of length 0 with an opcode above 3 is illegal: GPENTRY, only logged", 9 << 32),
    (
        "entry-at-the-limit",
        "a segment may not reach 2^40: GPENTRY, which the driver only logs",
        gp_entry(VA_LIMIT - 4, 1),
    ),
)


@rules("6.1", "{sentence}", "name sentence entry", ILLEGAL, hazardous=True)
def illegal(rig: Rig, entry: int) -> None:
    client = Client(rig)
    client.queue.hangs("gpentry", lambda: client.submit(entry))


@rule("6.1", "an entry's length counts words: what follows is not executed")
def entry_length(rig: Rig) -> None:
    client = Client(rig)
    client.queue.release(client.page.va, 7, PLAIN_RELEASE)
    words = len(client.queue.words)
    both = client.stores(9)
    client.submit(both & ((1 << 42) - 1) | words << 42)
    client.reaches(7)
    client.stays(7)


@rule("6.1", "a long segment is executed to its end")
def long_entry(rig: Rig) -> None:
    client = Client(rig)
    client.queue.raw(*[method_header(MethodOp.IMMEDIATE, 0, HostMethod.NOP, 0)] * 8000)
    client.submit(client.stores(7))
    client.reaches(7)


@rule("6.1", "a pushbuffer that is not mapped is an MMU fault: notifier 31", hazardous=True)
def unmapped_pushbuffer(rig: Rig) -> None:
    queue, _ = host(rig)
    queue.entry(gp_entry(0x80000000, 8)).dies(MMU_FAULT)
    rig.equal("GET_TIMEDOUT", 1, rig.timed_out(queue.channel.fd))


@rule("6.1", "a ring index that is not below the entries is refused: GPPTR, which the driver only logs", hazardous=True)
def put_outside_the_ring(rig: Rig) -> None:
    queue, _ = host(rig)
    queue.userd.put32(queue.channel.entries, Userd.GP_PUT)
    queue.hangs("gpptr", queue.ring_doorbell)


# ---- 6.2 USERD -------------------------------------------------------------------------------------------------------


@rule("6.2", "GPGet at 0x88 comes to equal GPPut")
def get_follows_put(rig: Rig) -> None:
    client = Client(rig)
    client.submit(*(client.stores(i) for i in range(1, 6)))
    becomes(rig, "GPGet", 5, lambda: client.userd.u32(0x88))


@rule("6.2", "GPPut at 0x8C is what the client writes: entries after it are not fetched")
def put_is_at_0x8c(rig: Rig) -> None:
    client = Client(rig)
    client.queue.ring.put64(client.stores(7), 0)
    client.queue.ring.put64(client.stores(9), 8)
    client.userd.put32(1, 0x8C)
    client.queue.ring_doorbell()
    client.reaches(7)
    client.stays(7)


@rule("6.2", "SET_REFERENCE stores to Ref at 0x48")
def reference(rig: Rig) -> None:
    queue, _ = host(rig)
    queue.host(HostMethod.SET_REFERENCE, 0x1234).submit()
    becomes(rig, "Ref", 0x1234, lambda: queue.userd.u32(0x48))


@rule("6.2", "the doorbell does not change GPPut")
def put_is_the_clients(rig: Rig) -> None:
    client = Client(rig)
    client.submit(client.stores(7))
    client.reaches(7)
    rig.equal("GPPut", 1, client.userd.u32(0x8C))


# ---- 6.3 submission --------------------------------------------------------------------------------------------------


@rule("6.3", "GPPut alone is not polled: nothing happens without the doorbell")
def put_is_not_polled(rig: Rig) -> None:
    client = Client(rig)
    client.queue.entry(client.stores(7))
    client.stays(0)
    client.queue.ring_doorbell()
    client.reaches(7)


@rule("3.9", "the doorbell is everybody's: a process may ring the channels of another")
def doorbell_of_another_process(rig: Rig) -> None:
    client = Client(rig)
    client.queue.entry(client.stores(7))

    def other(own: Rig, peer: Peer) -> None:
        bell = own.succeeds("a doorbell in another process", own.doorbell)
        bell.store32(DOORBELL, client.channel.token)

    rig.child(other).result()
    client.reaches(7)


@rule("6.3", "one doorbell serves several entries, in order")
def one_doorbell_for_many(rig: Rig) -> None:
    client = Client(rig)
    client.submit(*(client.stores(i, 16 * i) for i in range(1, 20)), client.stores(20))
    client.reaches(20)
    rig.equal("the others", [*range(1, 20)], [client.page.u32(16 * i) for i in range(1, 20)])


@rule("6.3", "a doorbell without new entries does nothing")
def empty_doorbell(rig: Rig) -> None:
    client = Client(rig)
    for _ in range(5):
        client.queue.ring_doorbell()
    client.stays(0)
    client.submit(client.stores(7))
    client.reaches(7)
    rig.equal("GET_TIMEDOUT", 0, rig.timed_out(client.channel.fd))


@rule("6.3", "a token that is no channel's is ignored silently")
def bad_token(rig: Rig) -> None:
    client = Client(rig)
    client.queue.entry(client.stores(7))
    for token in (client.channel.token ^ 1, client.channel.token | 5 << 16, 0xFFFFFFFF):
        client.queue.ring_doorbell(token)
    client.stays(0)
    client.queue.ring_doorbell()
    client.reaches(7)


@rule("6.3", "the ring wraps: index entries - 1 is followed by 0")
def ring_wraps(rig: Rig) -> None:
    client = Client(rig, entries=4)
    for value in range(1, 11):
        client.submit(client.stores(value))
        client.reaches(value)
    becomes(rig, "GPGet", 10 % 4, lambda: client.userd.u32(0x88))


@rule("6.3", "a ring takes entries - 1 at once")
def full_ring(rig: Rig) -> None:
    client = Client(rig, entries=4)
    client.submit(*(client.stores(value, 16 * value) for value in (1, 2, 3)))
    client.reaches(3, 48)
    rig.equal("all of them", [1, 2, 3], [client.page.u32(16 * value) for value in (1, 2, 3)])


@rule("6.3", "a ring of two entries works")
def smallest_ring(rig: Rig) -> None:
    client = Client(rig, entries=2)
    for value in range(1, 6):
        client.submit(client.stores(value))
        client.reaches(value)


@rule("6.3", "a doorbell starts its channel only")
def doorbell_of_one_channel(rig: Rig) -> None:
    one, two = Client(rig), _second(rig)
    two.queue.entry(two.stores(9))
    one.submit(one.stores(7))
    one.reaches(7)
    two.stays(0)


def _second(rig: Rig) -> Client:
    """A second client: the doorbell is one mapping per ctrl fd, so it gets a ctrl fd of its own."""
    other = Rig(rig.kernel)
    rig.at_end(other.release)
    return Client(other)


@rule("6.3", "a disabled channel's doorbell waits until it is enabled")
def disabled_channel(rig: Rig) -> None:
    client = Client(rig)
    rig.call(client.channel.fd, "CHANNEL_DISABLE")
    client.submit(client.stores(7))
    client.stays(0)
    rig.call(client.channel.fd, "CHANNEL_ENABLE")
    client.reaches(7)


@rule("6.3", "TSG DISABLE stops all channels of the TSG, CHANNEL ENABLE starts one of them")
def disabled_group(rig: Rig) -> None:
    client = Client(rig)
    rig.call(client.channel.tsg, "TSG_DISABLE")
    client.submit(client.stores(7))
    client.stays(0)
    rig.call(client.channel.fd, "CHANNEL_ENABLE")
    client.reaches(7)


@rule("6.3", "PREEMPT of a channel enables all channels of its TSG")
def preempt_enables(rig: Rig) -> None:
    client = Client(rig)
    rig.call(client.channel.fd, "CHANNEL_DISABLE")
    client.submit(client.stores(7))
    client.stays(0)
    rig.call(client.channel.fd, "CHANNEL_PREEMPT")
    client.reaches(7)


@rule("6.3", "after a fault doorbells are taken and ignored")
def doorbell_after_a_fault(rig: Rig) -> None:
    client = Client(rig)
    rig.call(client.channel.fd, "CHANNEL_FORCE_RESET")
    client.submit(client.stores(7))
    client.stays(0)


# ---- 5.2 and 5.7 with work on the GPU --------------------------------------------------------------------------------


@rule("5.2", "the non-stall interrupt raises event 2, blocking sync")
def blocking_sync_event(rig: Rig) -> None:
    queue, _ = host(rig)
    fd = int(rig.call(queue.channel.tsg, "TSG_EVENT_ID_CTRL", cmd=1, event_id=2).event_fd)
    queue.host(HostMethod.NON_STALL_INTERRUPT, 0).submit()
    watch = select.poll()
    watch.register(fd, select.POLLIN | select.POLLPRI)
    rig.eventually(lambda: watch.poll(0), "a readable event fd")


@rule("5.7", "WAIT for a semaphore looks again at the non-stall interrupt")
def wait_wakes_at_the_interrupt(rig: Rig) -> None:
    queue, page = host(rig)
    waiter = Waiter(rig, queue.channel.fd, semaphore(page.buffer.fd, payload=5), times=2)
    queue.release(page.va, 5, PLAIN_RELEASE).host(HostMethod.NON_STALL_INTERRUPT, 0).submit()
    rig.equal("WAIT returned", "success", waiter.result())


@rule("5.7", "a fence of a channel's syncpoint is signalled when the channel is closed")
def syncpoint_of_a_closed_channel(rig: Rig) -> None:
    fd, made = node(rig), rig.channel_ready()
    found = rig.call(made.fd, "CHANNEL_GET_USER_SYNCPOINT")
    waiting = fence(rig, fd, int(found.syncpoint_id), int(found.syncpoint_max) + 1)
    rig.check(not readable(waiting), "nothing before", "POLLIN")
    rig.close(made.fd)
    rig.check(readable(waiting, rig.patience), "a signalled fence", "nothing in time")
