"""Section 6: what a client sees of the hardware: GPFIFO entries, USERD, submission."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence

from tegrad.conformance.process import Peer
from tegrad.conformance.rig import Rig, RigChannel
from tegrad.conformance.rule import Differs, rule
from tegrad.conformance.waiter import Waiter
from tegrad.hw.classes import HostMethod
from tegrad.hw.gpfifo import DOORBELL, VA_LIMIT, MethodOp, Userd, gp_entry, method_header
from tegrad.uapi import constants as k
from tegrad.uapi.errors import DriverError

MMU_FAULT = 31
RELEASE = 1
"""SEM_EXECUTE: store a word."""
SYNC, SUBROUTINE, CONDITIONAL = 1 << 63, 1 << 41, 1
SETTLE_S = 0.05
"""How long a rule waits for something that must not happen."""
WORDS = 1 << 14


class Client:
    """A channel with its rings mapped, a pushbuffer, a semaphore page and a notifier."""

    def __init__(self, rig: Rig, *, entries: int = 512) -> None:
        self.rig, self.entries, self.put = rig, entries, 0
        self.channel: RigChannel = rig.channel_ready(entries=entries)
        assert self.channel.gpfifo is not None
        assert self.channel.userd is not None
        self.ring, self.userd = rig.mapped(self.channel.gpfifo), rig.mapped(self.channel.userd)
        self.bell = rig.doorbell()
        push, page, record = rig.buffer(WORDS * 4), rig.buffer(), rig.buffer()
        self.push_va, self.push = rig.map(self.channel.vm, push.fd), rig.mapped(push)
        self.va, self.page = rig.map(self.channel.vm, page.fd), rig.mapped(page)
        self.record = rig.mapped(record)
        rig.call(self.channel.fd, "CHANNEL_SET_ERROR_NOTIFIER", offset=0, size=16, mem=record.fd)
        self._at = 0

    def segment(self, *words: int) -> int:
        """Words in the pushbuffer; their entry."""
        at, self._at = self._at, self._at + 4 * len(words)
        for i, word in enumerate(words):
            self.push.put32(word, at + 4 * i)
        return gp_entry(self.push_va + at, len(words))

    def stores(self, value: int, offset: int = 0, *, execute: int = RELEASE) -> int:
        """An entry that stores a value into the semaphore page."""
        va = self.va + offset
        header = method_header(MethodOp.INC, 0, HostMethod.SEM_ADDR_LO, 5)
        return self.segment(header, va & 0xFFFFFFFF, va >> 32, value, 0, execute)

    def enter(self, *entries: int) -> None:
        """Write entries into the ring and move GPPut on, without the doorbell."""
        for entry in entries:
            self.ring.put64(entry, 8 * self.put)
            self.put = (self.put + 1) % self.entries
        self.userd.put32(self.put, Userd.GP_PUT)

    def ring_bell(self, token: int | None = None) -> None:
        """Store a token (the channel's) to the doorbell."""
        self.bell.store32(DOORBELL, self.channel.token if token is None else token)

    def submit(self, *entries: int) -> None:
        """Write entries and ring the doorbell."""
        self.enter(*entries)
        self.ring_bell()

    def stored(self, value: int, offset: int = 0) -> bool:
        """Whether the semaphore page comes to hold a value."""
        return self.rig.wait(lambda: self.page.u32(offset) == value)

    def reaches(self, value: int, offset: int = 0) -> None:
        """The rule: the semaphore page comes to hold a value."""
        if not self.stored(value, offset):
            raise Differs(f"{value} in memory", self.page.u32(offset))

    def stays(self, value: int, offset: int = 0) -> None:
        """The rule: the semaphore page holds a value, and still does a while later."""
        time.sleep(SETTLE_S)
        self.rig.equal("memory", value, self.page.u32(offset))

    def dies(self, code: int) -> None:
        """The rule: the channel dies, with this notifier code."""
        if not self.rig.wait(lambda: self.record.u32(12) >> 16):
            raise Differs("an error notification", "none")
        self.rig.equal("info32", code, self.record.u32(8))
        self.rig.equal("GET_TIMEDOUT", 1, self.rig.timed_out(self.channel.fd))

    def hangs(self, interrupt: str, act: Callable[[], object]) -> None:
        """The rule: by `act` the host raises this interrupt, which the driver only logs; the channel is reset then."""
        self.rig.hazard()
        mark, line = self.rig.log_mark(), f"PBDMA intr {interrupt} Error"
        act()
        self.rig.eventually(lambda: any(line in one for one in self.rig.log_since(mark)), line, "nothing was logged")
        time.sleep(SETTLE_S)
        self.rig.equal("info32", 0, self.record.u32(8))
        self.rig.equal("GET_TIMEDOUT", 0, self.rig.timed_out(self.channel.fd))
        self.rig.call(self.channel.fd, "CHANNEL_FORCE_RESET")


def methods(method: int, data: Sequence[int]) -> tuple[int, ...]:
    """A host method with its data."""
    return (method_header(MethodOp.INC, 0, method, len(data)), *data)


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
"""(name, sentence, the entries that are submitted, with one in them that stores a word: it does)"""

for _name, _sentence, _entries in TAKEN:

    @rule("6.1", _sentence, name=_name)
    def taken(rig: Rig, entries: Callable[[int], tuple[int, ...]] = _entries) -> None:
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
"""(name, sentence, the entry)"""

for _name, _sentence, _entry in ILLEGAL:

    @rule("6.1", _sentence, name=_name, hazardous=True)
    def illegal(rig: Rig, entry: int = _entry) -> None:
        client = Client(rig)
        client.hangs("gpentry", lambda: client.submit(entry))


@rule("6.1", "an entry's length counts words: what follows is not executed")
def entry_length(rig: Rig) -> None:
    client = Client(rig)
    first = client.stores(7)
    client.stores(9)
    client.submit(first)
    client.reaches(7)
    client.stays(7)


@rule("6.1", "a long segment is executed to its end")
def long_entry(rig: Rig) -> None:
    client = Client(rig)
    nops = (method_header(MethodOp.IMMEDIATE, 0, HostMethod.NOP, 0),) * 8000
    begin = client.segment(*nops)
    client.stores(7)
    client.submit(begin & ((1 << 42) - 1) | (8000 + 6) << 42)
    client.reaches(7)


@rule("6.1", "a pushbuffer that is not mapped is an MMU fault: notifier 31", hazardous=True)
def unmapped_pushbuffer(rig: Rig) -> None:
    client = Client(rig)
    client.submit(gp_entry(0x80000000, 8))
    client.dies(MMU_FAULT)


@rule("6.1", "a ring index that is not below the entries is refused: GPPTR, which the driver only logs", hazardous=True)
def put_outside_the_ring(rig: Rig) -> None:
    client = Client(rig)
    client.userd.put32(client.entries, Userd.GP_PUT)
    client.hangs("gpptr", client.ring_bell)


# ---- 6.2 USERD -------------------------------------------------------------------------------------------------------


@rule("6.2", "GPGet at 0x88 comes to equal GPPut")
def get_follows_put(rig: Rig) -> None:
    client = Client(rig)
    client.submit(*(client.stores(i) for i in range(1, 6)))
    rig.eventually(lambda: client.userd.u32(0x88) == 5, "GPGet 5", lambda: client.userd.u32(0x88))


@rule("6.2", "GPPut at 0x8C is what the client writes: entries after it are not fetched")
def put_is_at_0x8c(rig: Rig) -> None:
    client = Client(rig)
    client.ring.put64(client.stores(7), 0)
    client.ring.put64(client.stores(9), 8)
    client.userd.put32(1, 0x8C)
    client.ring_bell()
    client.reaches(7)
    client.stays(7)


@rule("6.2", "SET_REFERENCE stores to Ref at 0x48")
def reference(rig: Rig) -> None:
    client = Client(rig)
    client.submit(client.segment(*methods(HostMethod.SET_REFERENCE, [0x1234])))
    rig.eventually(lambda: client.userd.u32(0x48) == 0x1234, "Ref 0x1234", lambda: client.userd.u32(0x48))


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
    client.enter(client.stores(7))
    client.stays(0)
    client.ring_bell()
    client.reaches(7)


@rule("3.9", "the doorbell is everybody's: a process may ring the channels of another")
def doorbell_of_another_process(rig: Rig) -> None:
    client = Client(rig)
    client.enter(client.stores(7))

    def other(own: Rig, peer: Peer) -> None:
        try:
            own.doorbell().store32(DOORBELL, client.channel.token)
        except DriverError as error:
            raise Differs("a doorbell in another process", error.code) from None

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
        client.ring_bell()
    client.stays(0)
    client.submit(client.stores(7))
    client.reaches(7)
    rig.equal("GET_TIMEDOUT", 0, rig.timed_out(client.channel.fd))


@rule("6.3", "a token that is no channel's is ignored silently")
def bad_token(rig: Rig) -> None:
    client = Client(rig)
    client.enter(client.stores(7))
    for token in (client.channel.token ^ 1, client.channel.token | 5 << 16, 0xFFFFFFFF):
        client.ring_bell(token)
    client.stays(0)
    client.ring_bell()
    client.reaches(7)


@rule("6.3", "the ring wraps: index entries - 1 is followed by 0")
def ring_wraps(rig: Rig) -> None:
    client = Client(rig, entries=4)
    for value in range(1, 11):
        client.submit(client.stores(value))
        client.reaches(value)
    rig.eventually(lambda: client.userd.u32(0x88) == 10 % 4, "GPGet 2", lambda: client.userd.u32(0x88))


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
    two.enter(two.stores(9))
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
    client = Client(rig)
    fd = int(rig.call(client.channel.tsg, "TSG_EVENT_ID_CTRL", cmd=1, event_id=2).event_fd)
    client.submit(client.segment(*methods(HostMethod.NON_STALL_INTERRUPT, [0])))
    watch = select.poll()
    watch.register(fd, select.POLLIN | select.POLLPRI)
    rig.eventually(lambda: watch.poll(0), "a readable event fd")


@rule("5.7", "WAIT for a semaphore looks again at the non-stall interrupt")
def wait_wakes_at_the_interrupt(rig: Rig) -> None:
    client, page = Client(rig), rig.buffer()
    va = rig.map(client.channel.vm, page.fd)
    condition = {"condition.semaphore.dmabuf_fd": page.fd, "condition.semaphore.payload": 5}
    waiter = Waiter(rig, client.channel.fd, {"type": k.NVGPU_WAIT_TYPE_SEMAPHORE, **condition}, times=2)
    store = (method_header(MethodOp.INC, 0, HostMethod.SEM_ADDR_LO, 5), va & 0xFFFFFFFF, va >> 32, 5, 0, RELEASE)
    client.submit(client.segment(*store, *methods(HostMethod.NON_STALL_INTERRUPT, [0])))
    rig.equal("WAIT returned", "success", waiter.result())


@rule("5.7", "a fence of a channel's syncpoint is signalled when the channel is closed")
def syncpoint_of_a_closed_channel(rig: Rig) -> None:
    rig.need(rig.kernel.exists("/dev/host1x-fence"), "no /dev/host1x-fence")
    made = rig.channel_ready()
    found = rig.call(made.fd, "CHANNEL_GET_USER_SYNCPOINT")
    node = rig.open("/dev/host1x-fence")
    threshold = int(found.syncpoint_max) + 1
    fence = int(rig.call(node, "HOST1X_CREATE_FENCE", id=int(found.syncpoint_id), threshold=threshold).fence_fd)
    watch = select.poll()
    watch.register(fence, select.POLLIN)
    rig.equal("poll before", [], watch.poll(0))
    rig.close(made.fd)
    rig.eventually(lambda: watch.poll(0), "a signalled fence")
