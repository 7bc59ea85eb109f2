"""The host engine: rings, pushbuffers, host methods, and what stops a channel there."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator

import pytest
from gpu_rig import PAGE, ChannelRig, Rig

from tegrad.hw.classes import ComputeMethod, HostMethod
from tegrad.hw.faults import MmuAccess, MmuClientType, MmuFaultType, PbdmaIntr0, PbdmaIntr1
from tegrad.hw.gpfifo import DOORBELL, MethodOp, Userd, gp_entry, method_header
from tegrad.orin.events import ClassError, FatalEvent, MmuFault, NonStall, PbdmaFault, SyncptIncrement

M32 = 0xFFFFFFFF


@pytest.fixture
def rig() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


# -- ring ---------------------------------------------------------------------------------------------------------


def test_nothing_happens_without_the_doorbell(rig: Rig) -> None:
    channel, out = rig.channel(), rig.buffer()
    channel.release(out.va, 7).submit(ring=False)
    assert not rig.wait(lambda: out.u64() == 7, 0.05)
    channel.doorbell()
    assert rig.wait(lambda: out.u64() == 7)


def test_one_doorbell_runs_all_entries_in_order_and_advances_gp_get(rig: Rig) -> None:
    channel, out = rig.channel(entries=8), rig.buffer()
    for i in range(7):
        channel.release(out.va, i + 1).submit(ring=False)
    channel.doorbell()
    assert rig.wait(lambda: out.u64() == 7)
    assert rig.wait(lambda: channel.userd.u32(Userd.GP_GET) == 7)


def test_the_ring_wraps(rig: Rig) -> None:
    channel, out = rig.channel(entries=4), rig.buffer()
    for i in range(1, 30):
        assert channel.release(out.va, i).run()
        assert out.u64() == i


@pytest.mark.parametrize("bad", [0, 0x7FF, 511 | 1 << 16, 511 | 1 << 12, 511 | 1 << 31])
def test_a_bad_token_rings_nobody(rig: Rig, bad: int) -> None:
    channel, out = rig.channel(), rig.buffer()
    channel.release(out.va, 7).submit(ring=False)
    os.write(rig.doorbell_fd, struct.pack("<II", DOORBELL, bad))
    os.write(rig.doorbell_fd, struct.pack("<II", DOORBELL + 4, channel.token))
    assert not rig.wait(lambda: out.u64() == 7, 0.05)
    assert not rig.events


def test_a_doorbell_with_an_empty_ring_is_harmless(rig: Rig) -> None:
    channel = rig.channel()
    channel.doorbell().doorbell()
    assert channel.run()
    assert not rig.events


def test_a_segment_is_read_before_its_methods_run(rig: Rig) -> None:
    channel, out, gate = rig.channel(), rig.buffer(), rig.buffer()
    channel.release(out.va + 16, 1).acquire(gate.va, 1).release(out.va, 5).submit()
    assert rig.wait(lambda: out.u64(16) == 1)  # the segment is being executed
    channel._pushed.put(bytes(256))
    gate.put64(1)
    assert rig.wait(lambda: out.u64() == 5)


# -- method headers -----------------------------------------------------------------------------------------------


def test_header_operations(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    channel.words += [0, method_header(0, 0, 0, 0) | 1 << 16]  # a NOP and a subdevice mask
    channel.method(0, HostMethod.SEM_ADDR_LO, out.va & M32, out.va >> 32)
    channel.words += [method_header(MethodOp.IMMEDIATE, 0, HostMethod.SEM_PAYLOAD_LO, 0x1ABC)]
    channel.words += [method_header(MethodOp.INC, 0, HostMethod.NOP, 0)]
    channel.method(0, HostMethod.SEM_PAYLOAD_LO, 0x77, 0x1, op=MethodOp.ONE_INC)
    channel.method(0, HostMethod.SEM_EXECUTE, 1 | 1 << 24, 1 | 1 << 24, op=MethodOp.NON_INC)
    channel.words += [method_header(MethodOp.END_SEGMENT, 0, 0, 0), 0x40000000]
    assert not channel.run(0.02)  # the fence lies after the end of the segment
    assert channel.run()
    assert out.u64() == 0x1_0000_0077
    assert not rig.events


def test_inline_data_goes_to_memory(rig: Rig) -> None:
    channel, out, sem = rig.channel().setup(), rig.buffer(1 << 16), rig.buffer()
    data = os.urandom(30_002)
    words = list(struct.unpack("<7501I", data.ljust(30_004, b"\0")))
    va = out.va + 8
    channel.method(1, ComputeMethod.LINE_LENGTH_IN, len(data), 1, va >> 32, va & M32)
    channel.method(1, ComputeMethod.SET_I2M_SEMAPHORE_A, sem.va >> 32, sem.va & M32, 99)
    channel.method(1, ComputeMethod.LAUNCH_DMA, 1 | 2 << 4 | 1 << 12)
    channel.method(1, ComputeMethod.LOAD_INLINE_DATA, *words[:5], op=MethodOp.NON_INC)
    channel.method(1, ComputeMethod.LOAD_INLINE_DATA, *words[5:6])
    channel.method(1, ComputeMethod.LOAD_INLINE_DATA, *words[6:], op=MethodOp.NON_INC)
    assert channel.run()
    assert out.mem[8 : 8 + len(data)] == data
    assert out.mem[8 + len(data) : 16 + len(data)] == bytes(8)
    assert sem.u32() == 99


# -- semaphores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("execute", "expected"),
    [
        (1, struct.pack("<IIQ", 5, M32, 0xAAAA)),
        (1 | 1 << 24, struct.pack("<QQ", 0x3_0000_0005, 0xAAAA)),
        (1 | 1 << 25, struct.pack("<Q", 5)),
        (1 | 1 << 25 | 1 << 24, struct.pack("<Q", 0x3_0000_0005)),
        (1 | 1 << 20, struct.pack("<II", 5, M32)),
    ],
)
def test_a_release_touches_its_own_bytes_only(rig: Rig, execute: int, expected: bytes) -> None:
    channel, out = rig.channel(), rig.buffer()
    out.put(struct.pack("<QQQ", (1 << 64) - 1, 0xAAAA, 0xBBBB))
    before = time.monotonic_ns()
    assert channel.release(out.va, 0x3_0000_0005, execute).run()
    assert out.mem[: len(expected)] == expected
    assert out.u64(16) == 0xBBBB
    if execute >> 25 & 1:
        assert before - 64 < out.u64(8) <= time.monotonic_ns()


ACQUIRES = [
    # operation, payload, a value that does not satisfy it, one that does
    (0, 5, 6, 5),
    (2, 5, 4, 6),
    (2, 0x80000000, 0x7FFFFFFF, 0x80000000),
    (3, 5, 4, 6),
    (3, 0x7FFFFFFF, 0x7FFFFFFE, 0x80000005),
    (4, 0b0110, 0b1001, 0b1010),
    (5, 0xFFFFFFFB, 4, 3),
]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(("op", "payload", "no", "yes"), ACQUIRES)
def test_an_acquire_waits_for_its_condition(rig: Rig, op: int, payload: int, no: int, yes: int, wide: bool) -> None:
    if wide and op in (3, 2, 5):  # the same distances around the top of 64 bits
        payload, no, yes = (v << 32 | (M32 if op == 5 and v == payload else 0) for v in (payload, no, yes))
    channel, gate, out = rig.channel(), rig.buffer(), rig.buffer()
    gate.put64(no)
    channel.acquire(gate.va, payload, op, wide=wide).release(out.va, 1).submit()
    assert not rig.wait(lambda: out.u64() == 1, 0.01)
    gate.put64(yes)
    assert rig.wait(lambda: out.u64() == 1)


def test_a_blocked_channel_holds_up_no_other(rig: Rig) -> None:
    blocked, other, gate, out = rig.channel(), rig.channel(), rig.buffer(), rig.buffer()
    blocked.acquire(gate.va, 1).release(out.va, 1).submit()
    for _ in range(10):
        assert other.run()
    assert out.u64() == 0
    other.release(gate.va, 1).submit()
    assert rig.wait(lambda: out.u64() == 1)


def test_a_value_never_written_is_waited_for_silently_and_cheaply(rig: Rig) -> None:
    channel, gate = rig.channel(), rig.buffer()
    channel.acquire(gate.va, 1).submit()
    time.sleep(0.02)
    channel.release(gate.va, 2).submit()  # a doorbell that the blocked channel cannot answer
    time.sleep(0.02)
    before, start = time.process_time(), time.monotonic()
    time.sleep(0.2)
    assert time.process_time() - before < 0.15 * (time.monotonic() - start)
    assert gate.u64() == 0
    assert not rig.events


def test_two_channels_play_ping_pong(rig: Rig) -> None:
    one, two, ball = rig.channel(), rig.channel(), rig.buffer()
    for i in range(0, 200, 2):
        one.acquire(ball.va, i, 0).release(ball.va, i + 1)
        two.acquire(ball.va, i + 1, 0).release(ball.va, i + 2)
    two.submit()
    one.submit()
    assert rig.wait(lambda: ball.u64() == 200)


REDUCTIONS = [
    # reduction, unsigned, old, payload, new
    (0, 1, 5, 3, 3),
    (0, 0, 5, 0xFFFFFFFF, 0xFFFFFFFF),
    (1, 1, 5, 0xFFFFFFFF, 0xFFFFFFFF),
    (1, 0, 5, 0xFFFFFFFF, 5),
    (2, 1, 0b1100, 0b1010, 0b0110),
    (3, 1, 0b1100, 0b1010, 0b1000),
    (4, 1, 0b1100, 0b1010, 0b1110),
    (5, 1, 0xFFFFFFFF, 2, 1),
    (6, 1, 4, 5, 5),
    (6, 1, 5, 5, 0),
    (7, 1, 4, 5, 3),
    (7, 1, 0, 5, 5),
    (7, 1, 9, 5, 5),
]


@pytest.mark.parametrize(("op", "unsigned", "old", "payload", "new"), REDUCTIONS)
def test_reductions(rig: Rig, op: int, unsigned: int, old: int, payload: int, new: int) -> None:
    channel, out = rig.channel(), rig.buffer()
    out.put(struct.pack("<II", old, 0x5A5A))
    assert channel.release(out.va, payload, 6 | op << 27 | unsigned << 31).run()
    assert out.u32() == new
    assert out.u32(4) == 0x5A5A


def test_legacy_semaphores(rig: Rig) -> None:
    channel, sem, out = rig.channel(), rig.buffer(), rig.buffer()
    channel.method(0, HostMethod.SEMAPHOREA, sem.va >> 32, sem.va & M32, 7, 4)  # acquire >=
    channel.method(0, HostMethod.SEMAPHOREA, out.va >> 32, out.va & M32, 9, 2)  # release with time
    channel.method(0, HostMethod.SEMAPHOREA, out.va >> 32, (out.va + 16) & M32, 10, 2 | 1 << 24)
    channel.submit()
    assert not rig.wait(lambda: out.u32() == 9, 0.01)
    sem.put64(8)
    assert rig.wait(lambda: out.u32(16) == 10)
    assert out.u64() == 9
    assert out.u64(8) > 0
    assert out.u64(24) == 0


def test_non_stall_reference_yield_and_memory_operations(rig: Rig) -> None:
    channel = rig.channel()
    channel.method(0, HostMethod.NON_STALL_INTERRUPT, 0).method(0, HostMethod.SET_REFERENCE, 0x1234)
    channel.method(0, HostMethod.YIELD, 3).method(0, HostMethod.WFI, 1).method(0, HostMethod.FB_FLUSH, 0)
    channel.method(0, HostMethod.MEM_OP_A, 0, 0, 0, 5 << 27).method(0, HostMethod.MEM_OP_D, 0x10 << 27)
    assert channel.run()
    assert channel.userd.u32(Userd.REF) == 0x1234
    assert rig.events == [NonStall(channel.chid, 1)]


def test_a_release_to_a_shim_increments_the_syncpoint(rig: Rig) -> None:
    channel, shim = rig.channel(), 0xFF00010000
    rig.gpu.syncpoint(17, 1, shim)
    assert channel.release(shim, 0, 1).release(shim + 0x8000, 0, 1 | 1 << 20).run()
    assert rig.events == [SyncptIncrement(channel.chid, 1, 17)] * 2
    rig.gpu.syncpoint_free(17)
    channel.release(shim, 0, 1).submit()
    assert isinstance(rig.fatal(), MmuFault)


# -- faults -------------------------------------------------------------------------------------------------------


def host_fault(rig: Rig, address: int, kind: MmuFaultType, access: MmuAccess = MmuAccess.VIRT_READ) -> None:
    event = rig.fatal()
    assert isinstance(event, MmuFault)
    assert (event.address, event.fault_type, event.access) == (address & ~(PAGE - 1), kind, access)
    assert (event.client_type, event.client) == (MmuClientType.HUB, 6)


def test_an_unmapped_pushbuffer_faults(rig: Rig) -> None:
    channel = rig.channel()
    channel.entry(gp_entry(0x5000_1000, 4)).doorbell()
    host_fault(rig, 0x5000_1000, MmuFaultType.INVALID_PDE)


def test_an_unmapped_ring_faults(rig: Rig) -> None:
    channel = rig.channel()
    rig.gpu.unmap(1, channel.ring.va, channel.ring.size)
    channel.release(channel.fence.va, 1).submit()
    host_fault(rig, channel.ring.va, MmuFaultType.INVALID_PTE)


@pytest.mark.parametrize("execute", [1, 0])
def test_an_unmapped_semaphore_faults(rig: Rig, execute: int) -> None:
    channel = rig.channel()
    channel.release(0x5000_0000, 1, execute).submit()
    access = MmuAccess.VIRT_WRITE if execute else MmuAccess.VIRT_READ
    host_fault(rig, 0x5000_0000, MmuFaultType.INVALID_PDE, access)


def test_a_release_to_a_read_only_mapping_faults(rig: Rig) -> None:
    channel, out = rig.channel(), rig.buffer(writable=False)
    channel.release(out.va, 1).submit()
    host_fault(rig, out.va, MmuFaultType.WRITE_RO_VIOLATION, MmuAccess.VIRT_WRITE)


def test_a_semaphore_unmapped_while_waited_for_faults(rig: Rig) -> None:
    channel, gate = rig.channel(), rig.buffer()
    channel.acquire(gate.va, 1).submit()
    time.sleep(0.01)
    rig.gpu.unmap(1, gate.va, gate.size)
    host_fault(rig, gate.va, MmuFaultType.INVALID_PTE)


def _ring_past_40_bits(rig: Rig) -> ChannelRig:
    """A 3 MiB ring where the driver puts it when the user range ends at 0xFFFFE00000: in the next free 4 MiB."""
    ring, userd = rig.buffer(3 << 20, va=0x100_0020_0000), rig.buffer()
    rig.gpu.channel_create(40, 1, 1, 0, ring.va, 0x10000, userd.fd)
    return ChannelRig(rig, 40, 0, ring, userd, 0x10000)


def test_a_ring_above_40_bits_is_fetched_from_the_masked_address(rig: Rig) -> None:
    channel = _ring_past_40_bits(rig)
    channel.release(channel.fence.va, 1).submit()
    host_fault(rig, 0x20_0000, MmuFaultType.INVALID_PDE)


def _past_ring(rig: Rig) -> ChannelRig:
    ring, userd = rig.buffer(1 << 20, va=(1 << 40) - (1 << 19)), rig.buffer()
    rig.gpu.channel_create(40, 1, 1, 0, ring.va, 1 << 17, userd.fd)
    return ChannelRig(rig, 40, 0, ring, userd, 1 << 17)


def _gp_put_past_the_ring(channel: ChannelRig) -> None:
    channel.userd.put(struct.pack("<I", channel.entries), Userd.GP_PUT)


def _words(*words: int) -> Callable[[ChannelRig], None]:
    def build(channel: ChannelRig) -> None:
        channel.words += words
        channel.submit(ring=False)

    return build


def _method(offset: int, data: int) -> Callable[[ChannelRig], None]:
    return lambda channel: channel.method(0, offset, data).submit(ring=False) and None


def _release(offset: int, execute: int) -> Callable[[ChannelRig], None]:
    return lambda channel: channel.release(channel.fence.va + offset, 1, execute).submit(ring=False) and None


PBDMA_FAULTS: list[tuple[str, Callable[[ChannelRig], object], PbdmaIntr0]] = [
    ("GP_PUT past the ring", _gp_put_past_the_ring, PbdmaIntr0.GPPTR),
    ("segment to the very end", lambda c: c.entry((1 << 40) - 16 | 4 << 42), PbdmaIntr0.GPENTRY),
    ("segment past the end", lambda c: c.entry((1 << 40) - 16 | 8 << 42), PbdmaIntr0.GPENTRY),
    ("illegal entry", lambda c: c.entry(1 << 32), PbdmaIntr0.GPENTRY),
    ("unknown entry", lambda c: c.entry(9 << 32), PbdmaIntr0.GPENTRY),
    ("header operation 2", _words(2 << 29), PbdmaIntr0.PBENTRY),
    ("header operation 6", _words(6 << 29), PbdmaIntr0.PBENTRY),
    ("method cut off", _words(method_header(1, 0, 8, 3), 1), PbdmaIntr0.PBSEG),
    ("ILLEGAL", _method(HostMethod.ILLEGAL, 0), PbdmaIntr0.METHOD),
    ("unknown host method", _method(0xF0, 0), PbdmaIntr0.METHOD),
    ("16 bytes at 8", _release(8, 1 | 1 << 24 | 1 << 25), PbdmaIntr0.SEMAPHORE),
    ("8 bytes at 4", _release(4, 1 | 1 << 24), PbdmaIntr0.SEMAPHORE),
    ("acquire of 8 bytes at 4", _release(4, 1 << 24), PbdmaIntr0.SEMAPHORE),
    ("operation 7", _release(0, 7), PbdmaIntr0.SEMAPHORE),
    ("reduction 9", _release(0, 6 | 9 << 27), PbdmaIntr0.SEMAPHORE),
    ("signed INC", _release(0, 6 | 6 << 27), PbdmaIntr0.SEMAPHORE),
    ("software subchannel", lambda c: c.method(5, 0x100, 0).submit(ring=False), PbdmaIntr0.DEVICE),
]


@pytest.mark.parametrize(("build", "bit"), [row[1:] for row in PBDMA_FAULTS], ids=[row[0] for row in PBDMA_FAULTS])
def test_what_stops_the_pbdma(rig: Rig, build: Callable[[ChannelRig], object], bit: PbdmaIntr0) -> None:
    channel = rig.channel()
    build(channel)
    channel.doorbell()
    event = rig.fatal()
    assert isinstance(event, PbdmaFault)
    assert (event.intr_0, event.intr_1) == (1 << bit, 0), event


def test_a_ring_that_ends_past_40_bits_is_refused(rig: Rig) -> None:
    channel = _past_ring(rig)
    channel.release(channel.fence.va, 1).submit()
    event = rig.fatal()
    assert isinstance(event, PbdmaFault)
    assert event.intr_0 == 1 << PbdmaIntr0.GPFIFO


@pytest.mark.parametrize(("op", "bit"), [(9, PbdmaIntr1.HCE_PRIV), (1, PbdmaIntr1.HCE_RE_ILLEGAL_OP)])
def test_memory_operations_that_are_refused(rig: Rig, op: int, bit: PbdmaIntr1) -> None:
    rig.channel().method(0, HostMethod.MEM_OP_D, op << 27).submit()
    event = rig.fatal()
    assert isinstance(event, PbdmaFault)
    assert (event.intr_0, event.intr_1) == (0, 1 << bit)


@pytest.mark.parametrize("method", [HostMethod.SET_OBJECT, 0x100])
def test_engine_methods_need_a_context(rig: Rig, method: int) -> None:
    rig.channel(contexts=()).method(1, method, rig.chip.compute_class).submit()
    event = rig.fatal()
    assert isinstance(event, PbdmaFault)
    assert (event.intr_0, event.intr_1) == (0, 1 << PbdmaIntr1.CTXNOTVALID)


@pytest.mark.parametrize(("subch", "class_id"), [(1, 0xC5C0), (1, 0xC7B5), (4, 0xC7C0), (4, 0xC8B5), (0, 0xC7C0)])
def test_a_class_that_is_not_the_subchannels_is_a_class_error(rig: Rig, subch: int, class_id: int) -> None:
    channel = rig.channel().method(subch, HostMethod.SET_OBJECT, class_id)
    channel.submit()
    event = rig.fatal()
    assert isinstance(event, ClassError)
    assert (event.subchannel, event.class_id, event.chid) == (subch, class_id, channel.chid)


@pytest.mark.parametrize(("subch", "method"), [(1, 0x3C), (1, 0x2C8), (4, 0x304), (4, 0x2B4), (2, 0x2B4), (0, 0x2B4)])
def test_a_method_that_the_class_lacks(rig: Rig, subch: int, method: int) -> None:
    if method < 0x100:
        method += 0xFC0  # not a host method
    rig.channel().setup().method(subch, method, 0).submit()
    event = rig.fatal()
    assert isinstance(event, ClassError)
    assert (event.subchannel, event.method) == (subch, method)


# -- the outcome of a fault ---------------------------------------------------------------------------------------


def test_a_fault_stops_the_whole_tsg_and_no_other(rig: Rig) -> None:
    rig.gpu.tsg_create(2)
    bad, sister, other, out = rig.channel(), rig.channel(), rig.channel(tsg=2), rig.buffer()
    bad.method(0, HostMethod.ILLEGAL, 0).submit()
    event = rig.fatal()
    assert (event.chid, event.tsg) == (bad.chid, 1)
    sister.release(out.va, 1).submit()
    bad.release(out.va, 1).submit()
    bad.method(0, HostMethod.ILLEGAL, 0).submit()
    assert other.run()
    assert out.u64() == 0
    assert len(rig.of(FatalEvent)) == 1
    # new channels work, in the same group and in a new one
    assert rig.channel().run()
    assert not sister.run(0.02)
    for chid in (bad.chid, sister.chid):
        rig.gpu.channel_destroy(chid)
    rig.gpu.tsg_create(3)
    assert rig.channel(tsg=3).run()
    assert len(rig.of(FatalEvent)) == 1


def test_a_disabled_tsg_waits(rig: Rig) -> None:
    channel, out = rig.channel(), rig.buffer()
    rig.gpu.tsg_disable(1)
    channel.release(out.va, 1).submit()
    assert not rig.wait(lambda: out.u64() == 1, 0.02)
    rig.gpu.tsg_enable(1)
    assert rig.wait(lambda: out.u64() == 1)


def test_a_destroyed_channel_is_silent(rig: Rig) -> None:
    channel, out = rig.channel(), rig.buffer()
    assert channel.run()
    assert rig.gpu.channel_destroy(channel.chid) is False
    channel.release(out.va, 1).submit()
    assert not rig.wait(lambda: out.u64() == 1, 0.02)
    assert rig.gpu.channel_destroy(channel.chid) is False


def test_a_long_pushbuffer_lets_others_go_between(rig: Rig) -> None:
    nops, entries = 1_000_000, 60
    busy, quick, where = rig.channel(), rig.channel(), rig.buffer(8 * nops)
    where.put(struct.pack("<II", method_header(MethodOp.INC, 0, HostMethod.NOP, 1), 0) * nops)
    for _ in range(entries):
        busy.entry(gp_entry(where.va, 2 * nops))
    busy.doorbell()
    assert quick.run()
    assert busy.userd.u32(Userd.GP_GET) < entries
    assert rig.wait(lambda: busy.userd.u32(Userd.GP_GET) >= 1)
