"""The copy engine: lines, fills, remapped components, semaphores, refusals."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator

import numpy as np
import pytest
from gpu_rig import ChannelRig, Rig
from hypothesis import given, settings
from hypothesis import strategies as st

from tegrad.hw.classes import CopyMethod
from tegrad.hw.faults import MmuAccess, MmuFaultType
from tegrad.hw.gpfifo import Subchannel
from tegrad.orin.events import CeError, MmuFault, NonStall

M32 = 0xFFFFFFFF
PITCH = 0x182
REMAP = 1 << 10
LINES = 1 << 9


@pytest.fixture(params=["agx-orin-64gb", "gh100"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(request.param) as rig:
        yield rig


@pytest.fixture(scope="module")
def shared() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


def ce(channel: ChannelRig, method: int, *data: int) -> ChannelRig:
    return channel.method(Subchannel.COPY, method, *data)


def test_lines_with_pitches(rig: Rig) -> None:
    channel, src, dst = rig.channel().setup(), rig.buffer(1 << 16), rig.buffer(1 << 16)
    data = os.urandom(1 << 16)
    src.put(data)
    ce(channel, CopyMethod.PITCH_IN, 100, 200)
    ce(channel, CopyMethod.LINE_COUNT, 30)
    assert channel.copy(src.va + 1, dst.va + 2, 50, PITCH | LINES).run()
    for line in range(30):
        at = 2 + 200 * line
        assert dst.mem[at : at + 50] == data[1 + 100 * line : 51 + 100 * line]
        assert dst.mem[at + 50 : at + 200] == bytes(150)
    assert dst.mem[2 + 30 * 200 : 2 + 31 * 200] == bytes(200)


def test_without_multi_line_there_is_one_line(rig: Rig) -> None:
    channel, src, dst = rig.channel().setup(), rig.buffer(), rig.buffer()
    src.put(b"\1" * 4096)
    ce(channel, CopyMethod.LINE_COUNT, 30)
    assert channel.copy(src.va, dst.va, 50).run()
    assert dst.mem[:51] == b"\1" * 50 + b"\0"


def test_a_large_copy_and_what_follows_it_keep_their_order(rig: Rig) -> None:
    channel, src, dst = rig.channel().setup(), rig.buffer(8 << 20), rig.buffer(8 << 20)
    data = os.urandom(1 << 16) * 128
    src.put(data)
    channel.copy(src.va, dst.va, 8 << 20).copy(dst.va + (8 << 20) - 64, dst.va, 64)
    assert channel.run()
    assert dst.mem[:64] == data[-64:]
    assert dst.mem[64:] == data[64:]
    assert rig.gpu.stats()["bytes_copied"] == (8 << 20) + 64


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 4),
    sources=st.integers(1, 4),
    picks=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    length=st.integers(1, 40),
    lines=st.integers(1, 4),
    seed=st.integers(0, 1 << 30),
)
def test_remap_equals_its_definition(
    shared: Rig, size: int, sources: int, picks: list[int], length: int, lines: int, seed: int
) -> None:
    picks = [pick if pick >= 4 else pick % sources for pick in picks]
    rig, random = shared, np.random.default_rng(seed)
    channel, src, dst = rig.channel().setup(), rig.buffer(), rig.buffer()
    source, target = random.bytes(4096), bytearray(random.bytes(4096))
    consts = [int(c) for c in random.integers(0, 1 << 32, 2)]
    src.put(source)
    dst.put(bytes(target))
    pitch_in, pitch_out = length * sources * size + 3, length * len(picks) * size + 5
    components = size - 1 << 16 | sources - 1 << 20 | len(picks) - 1 << 24
    for i, pick in enumerate(picks):
        components |= pick << 4 * i
    ce(channel, CopyMethod.PITCH_IN, pitch_in, pitch_out)
    ce(channel, CopyMethod.LINE_COUNT, lines)
    ce(channel, CopyMethod.SET_REMAP_CONST_A, *consts, components)
    assert channel.copy(src.va, dst.va, length, PITCH | LINES | REMAP).run()
    for line in range(lines):
        for element in range(length):
            for i, pick in enumerate(picks):
                at = line * pitch_out + (element * len(picks) + i) * size
                if pick < 4:
                    start = line * pitch_in + (element * sources + pick) * size
                    target[at : at + size] = source[start : start + size]
                elif pick < 6:
                    target[at : at + size] = consts[pick - 4].to_bytes(4, "little")[:size]
    assert dst.mem[:] == bytes(target)
    rig.gpu.channel_destroy(channel.chid)


def test_a_fill_needs_no_source(rig: Rig) -> None:
    channel, dst = rig.channel().setup(), rig.buffer(1 << 20)
    ce(channel, CopyMethod.SET_REMAP_CONST_A, 0xCAFE1234, 0, 4 | 3 << 16)
    assert channel.copy(0, dst.va, (1 << 18) - 1, PITCH | REMAP).run()
    assert dst.mem[:] == struct.pack("<I", 0xCAFE1234) * ((1 << 18) - 1) + bytes(4)


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (1 << 3, struct.pack("<II", 5, M32)),
        (1 << 3 | 1 << 27, struct.pack("<Q", 0x3_0000_0005)),
        (2 << 3, struct.pack("<Q", 5)),
        (2 << 3 | 1 << 27, struct.pack("<Q", 0x3_0000_0005)),
        (1 << 3 | 1 << 19 | 5 << 14 | 1 << 18, struct.pack("<II", 4, M32)),
    ],
)
def test_semaphores(rig: Rig, launch: int, expected: bytes) -> None:
    channel, sem = rig.channel().setup(), rig.buffer()
    sem.put(struct.pack("<QQQ", (1 << 64) - 1, 0xAAAA, 0xBBBB))
    ce(channel, CopyMethod.SET_SEMAPHORE_A, sem.va >> 32, sem.va & M32, 5, 3)
    ce(channel, CopyMethod.LAUNCH_DMA, launch | 1 << 2 | 2 << 5)
    assert channel.run()
    assert sem.mem[: len(expected)] == expected
    assert (sem.u64(8) == 0xAAAA) == (launch & 0x18 == 1 << 3)
    assert sem.u64(16) == 0xBBBB
    assert rig.of(NonStall)


def test_a_float_reduction(rig: Rig) -> None:
    channel, sem = rig.channel().setup(), rig.buffer()
    sem.put(struct.pack("<f", 1.5))
    payload = struct.unpack("<I", struct.pack("<f", 2.25))[0]
    ce(channel, CopyMethod.SET_SEMAPHORE_A, sem.va >> 32, sem.va & M32, payload)
    assert ce(channel, CopyMethod.LAUNCH_DMA, 1 << 3 | 1 << 19 | 10 << 14).run()
    assert struct.unpack_from("<f", sem.mem)[0] == 3.75


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_an_unmapped_side_faults(rig: Rig, write: bool, large: bool) -> None:
    channel, there, hole = rig.channel().setup(), rig.buffer(1 << 20), rig.buffer(1 << 20)
    size = 1 << 20 if large else 4096
    rig.gpu.unmap(1, hole.va + size - 4096, 4096)
    src, dst = (there.va, hole.va) if write else (hole.va, there.va)
    channel.copy(src, dst, size).submit()
    event = rig.fatal()
    assert isinstance(event, MmuFault)
    assert (event.address, event.fault_type) == (hole.va + size - 4096, MmuFaultType.INVALID_PTE)
    assert event.access == (MmuAccess.VIRT_WRITE if write else MmuAccess.VIRT_READ)
    assert (event.client, event.engine) == (24, 15)


@pytest.mark.parametrize(
    ("launch", "components"),
    [(0x2, 0), (PITCH | 1 << 12, 0), (PITCH | 1 << 13, 0), (PITCH | REMAP, 7), (PITCH | REMAP, 1), (3 << 3, 0)],
    ids=["block-linear", "physical source", "physical target", "component 7", "missing component", "conditional"],
)
def test_what_the_engine_refuses(rig: Rig, launch: int, components: int) -> None:
    channel, buffer = rig.channel().setup(), rig.buffer()
    ce(channel, CopyMethod.SET_REMAP_COMPONENTS, components)
    channel.copy(buffer.va, buffer.va + 64, 16, launch).submit()
    assert isinstance(rig.fatal(), CeError)


@pytest.mark.parametrize(("kind", "offset"), [(2 << 3, 8), (1 << 3, 2), (1 << 3 | 1 << 27, 4)])
def test_a_misaligned_semaphore_is_refused(rig: Rig, kind: int, offset: int) -> None:
    channel, sem = rig.channel().setup(), rig.buffer()
    ce(channel, CopyMethod.SET_SEMAPHORE_A, sem.va >> 32, (sem.va & M32) + offset, 1)
    ce(channel, CopyMethod.LAUNCH_DMA, kind).submit()
    assert isinstance(rig.fatal(), CeError)


def test_a_copy_runlist_takes_the_copy_class_on_any_subchannel() -> None:
    with Rig() as rig:
        channel, src, dst = rig.channel(runlist=1), rig.buffer(), rig.buffer()
        src.put(b"abc")
        channel.method(0, 0, rig.chip.dma_class)
        channel.method(0, CopyMethod.OFFSET_IN_UPPER, src.va >> 32, src.va & M32, dst.va >> 32, dst.va & M32)
        channel.method(0, CopyMethod.LINE_LENGTH_IN, 3).method(0, CopyMethod.LAUNCH_DMA, PITCH)
        assert channel.run()
        assert dst.mem[:3] == b"abc"
