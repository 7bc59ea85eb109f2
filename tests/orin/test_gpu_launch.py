"""The compute engine: launch descriptors of both versions, programs, caches, releases, dependents, faults."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest
from gpu_programs import ADD_ONE, HEAD
from gpu_rig import STORE, Buffer, ChannelRig, Rig
from qmd_fields import dependent_fields, release_fields

from tegrad.hw import bank0, ptxsection
from tegrad.hw.classes import ComputeMethod
from tegrad.hw.faults import MmuAccess, MmuClientType, MmuFaultType, SkedBit, WarpEsr
from tegrad.hw.gpfifo import Subchannel
from tegrad.orin.events import Awaken, ClassError, FatalEvent, MmuFault, Note, SkedException, SmException
from tegrad.ptx import PtxFault

M32 = 0xFFFFFFFF
CHIPS = ("agx-orin-64gb", "gh100")

SPIN = (
    HEAD
    + """
.visible .entry spin(.param .u64 p, .param .u64 n)
{
    .reg .b64 %a; .reg .b32 %w; .reg .pred %q;
    ld.param.u64 %a, [p];
LOOP:
    ld.volatile.global.u32 %w, [%a];
    setp.eq.u32 %q, %w, 0;
    @%q bra LOOP;
    ret;
}
"""
)
"""Ends when the word at p is not zero."""

SYMBOL = (
    HEAD
    + """
.global .align 4 .u32 table[4];
.visible .entry symbol(.param .u64 p, .param .u64 n)
{
    .reg .b64 %a; .reg .b64 %t; .reg .b32 %w;
    ld.param.u64 %a, [p];
    mov.u64 %t, table;
    ld.global.u32 %w, [%t+8];
    st.global.u32 [%a], %w;
    ret;
}
"""
)

SHARED = (
    HEAD
    + """
.visible .entry big_shared(.param .u64 p, .param .u64 n)
{
    .reg .b64 %a; .reg .b32 %w;
    .shared .align 4 .b8 tile[4096];
    ld.param.u64 %a, [p];
    mov.u32 %w, 5;
    st.shared.u32 [tile+4092], %w;
    ld.shared.u32 %w, [tile+4092];
    st.global.u32 [%a], %w;
    ret;
}
"""
)


DIMENSIONS = (
    HEAD
    + """
.visible .entry dimensions(.param .u64 p, .param .u64 n)
{
    .reg .b64 %a; .reg .b32 %w; .reg .b32 %o;
    ld.param.u64 %a, [p];
    mov.u32 %w, %ntid.x;   st.global.u32 [%a], %w;
    mov.u32 %w, %ntid.y;   st.global.u32 [%a+4], %w;
    mov.u32 %w, %ntid.z;   st.global.u32 [%a+8], %w;
    mov.u32 %w, %nctaid.x; st.global.u32 [%a+12], %w;
    mov.u32 %w, %nctaid.y; st.global.u32 [%a+16], %w;
    mov.u32 %w, %nctaid.z; st.global.u32 [%a+20], %w;
    atom.global.add.u32 %o, [%a+24], 1;
    ret;
}
"""
)
"""Stores what it reads of its dimensions, and counts its threads."""


def poke(body: str) -> str:
    """A kernel `poke` around some instructions; %a is p, %n is n."""
    return f"""{HEAD}
.visible .entry poke(.param .u64 p, .param .u64 n)
{{
    .reg .b64 %a; .reg .b64 %n; .reg .b32 %w;
    ld.param.u64 %a, [p];
    ld.param.u64 %n, [n];
    mov.u32 %w, 7;
    {body}
    ret;
}}
"""


@pytest.fixture(params=CHIPS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with Rig(request.param) as rig:
        yield rig


@pytest.fixture
def orin() -> Iterator[Rig]:
    with Rig() as rig:
        yield rig


# -- launching -----------------------------------------------------------------------------------------------------


def test_launches_of_one_channel_run_in_order(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    program = rig.program(ADD_ONE, "add_one")
    qmd = rig.qmd(program, rig.arguments(out.va, 0), grid=(8, 1, 1))
    for _ in range(20):
        channel.launch(qmd)
    assert channel.run()
    assert struct.unpack_from("<9I", out.mem) == (20,) * 8 + (0,)


@pytest.mark.parametrize("method", ["pcas", "schedule"])
def test_other_ways_to_schedule(rig: Rig, method: str) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    qmd = rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 3))
    if method == "pcas":
        channel.method(Subchannel.COMPUTE, ComputeMethod.SEND_PCAS_A, qmd >> 8)
        channel.method(Subchannel.COMPUTE, ComputeMethod.SEND_SIGNALING_PCAS_B, 3)
    else:
        channel.launch(qmd, 2)
    channel.launch(qmd, 8)
    assert channel.run()
    silent = method == "pcas" and rig.chip.qmd == "V3"
    assert out.u32() == (0 if silent else 3)
    assert rig.gpu.stats()["launches"] == (0 if silent else 1)
    assert [note.text for note in rig.of(Note) if "launches nothing" in note.text] == [
        "SEND_SIGNALING_PCAS_B launches nothing on this chip: use SEND_SIGNALING_PCAS2_B"
    ] * silent


def test_the_launch_that_ran_on_an_orin_nano(orin: Rig) -> None:
    """No shared memory at all, windows 16 MiB apart below 2^32, action 10, and no group id, membar or configuration."""
    channel, out = orin.channel().setup(), orin.buffer()
    for offset, window in (
        (ComputeMethod.SET_SHADER_SHARED_MEMORY_WINDOW_A, 0xFE000000),
        (ComputeMethod.SET_SHADER_LOCAL_MEMORY_WINDOW_A, 0xFF000000),
    ):
        channel.method(1, offset, 0, window)
    absent = dict.fromkeys(
        ("shared_memory_size", "qmd_group_id", "cwd_membar_type", "max_sm_config_shared_mem_size"), 0
    )
    channel.launch(orin.qmd(orin.program(STORE, "store"), orin.arguments(out.va, 0xCAFE), **absent), 10)
    assert channel.run()
    assert out.u32() == 0xCAFE


def test_symbols_come_from_the_relocated_slots(rig: Rig) -> None:
    channel, out, table = rig.channel().setup(), rig.buffer(), rig.buffer()
    table.put(struct.pack("<4I", 1, 2, 3, 4))
    program = rig.program(SYMBOL, "symbol", symbols={"table": table.va})
    assert channel.launch(rig.qmd(program, rig.arguments(out.va, 0))).run()
    assert out.u32() == 3


def test_parameters_beyond_the_bank_read_as_zero(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    out.put64(77)
    size = rig.param_base + 16 >> 4  # ends before the second parameter's second half: here, after it
    bank = rig.arguments(out.va, 1234)
    short = rig.qmd(rig.program(STORE, "store"), bank, constant_buffer_size_shifted4_0=size - 1)
    assert channel.launch(
        rig.qmd(rig.program(STORE, "store"), bank, at=0xA00, constant_buffer_size_shifted4_0=size)
    ).run()
    assert out.u32() == 1234
    channel.launch(short).submit()
    event = rig.fatal()  # p reads as zero too: the store goes to address 0
    assert isinstance(event, MmuFault)
    assert event.address == 0


def test_dimensions_read_as_constant_bank_0_holds_them(rig: Rig) -> None:
    """The QMD says what runs, the bank what machine code takes for it, the constant cache how old that may be."""
    channel, out = rig.channel().setup(), rig.buffer()
    bank = rig.arguments(out.va, 0)
    shape = {"grid": (2, 3, 1), "cta_thread_dimension0": 5, "cta_thread_dimension1": 4}
    qmd = rig.qmd(rig.program(DIMENSIONS, "dimensions"), bank, constant_buffer_invalidate_0=0, **shape)
    assert channel.launch(qmd).run()
    assert struct.unpack_from("<7I", out.mem) == (5, 4, 1, 2, 3, 1, 120)
    bank.put(bank0.DIMS.pack(7, 6, 5, 4, 3, 2))
    assert channel.launch(qmd).run()
    assert struct.unpack_from("<7I", out.mem) == (5, 4, 1, 2, 3, 1, 240)
    assert invalidate(channel, 0x1000).launch(qmd).run()
    assert struct.unpack_from("<7I", out.mem) == (7, 6, 5, 4, 3, 2, 360)


def test_shared_memory_is_what_the_qmd_allots(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(SHARED, "big_shared"), rig.arguments(out.va, 0)
    assert channel.launch(rig.qmd(program, bank, shared_memory_size=0x400 + 4096)).run()
    assert out.u32() == 5
    channel.launch(rig.qmd(program, bank, shared_memory_size=0x400 + 2048)).submit()
    event = rig.fatal()
    assert isinstance(event, SmException)
    assert event.warp_esr == WarpEsr.OOR_ADDR


def test_a_pushbuffer_release_without_wfi_does_not_wait_for_the_grid(orin: Rig) -> None:
    channel, gate, early = orin.channel().setup(), orin.buffer(), orin.buffer()
    channel.launch(orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0)))
    channel.release(early.va, 1, 1 | 1 << 24).release(early.va + 16, 1).submit()
    assert orin.wait(lambda: early.u64() == 1)
    assert not orin.wait(lambda: early.u64(16) == 1, 0.02)
    gate.put64(1)
    assert orin.wait(lambda: early.u64(16) == 1)


def test_a_running_grid_holds_up_no_other_channel(orin: Rig) -> None:
    busy, other, gate = orin.channel().setup(), orin.channel().setup(), orin.buffer()
    busy.launch(orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0))).submit()
    src, dst = orin.buffer(), orin.buffer()
    src.put(b"x" * 100)
    assert other.copy(src.va, dst.va, 100).run()
    assert other.copy(dst.va, gate.va, 4).run()  # ends the grid
    assert busy.run()
    assert not orin.of(FatalEvent)


def test_a_switch_of_engines_waits_for_idle(orin: Rig) -> None:
    channel, gate, out = orin.channel().setup(), orin.buffer(), orin.buffer()
    channel.launch(orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0)))
    src = orin.buffer()
    src.put64(5)
    channel.copy(src.va, out.va, 8).submit()
    assert not orin.wait(lambda: out.u64() == 5, 0.02)
    gate.put64(1)
    assert orin.wait(lambda: out.u64() == 5)


def test_a_report_semaphore_waits_for_the_grid(orin: Rig) -> None:
    channel, gate, sem = orin.channel().setup(), orin.buffer(), orin.buffer()
    channel.launch(orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0)))
    channel.method(1, ComputeMethod.SET_REPORT_SEMAPHORE_PAYLOAD_LOWER, 9, 1, sem.va & M32, sem.va >> 32)
    channel.method(1, ComputeMethod.REPORT_SEMAPHORE_EXECUTE, 1 << 12 | 2 << 3 | 1 << 2)
    channel.method(1, ComputeMethod.SET_REPORT_SEMAPHORE_A, sem.va >> 32, (sem.va + 16) & M32, 8, 0)
    channel.submit()
    assert not orin.wait(lambda: sem.u64() != 0, 0.02)
    gate.put64(1)
    assert orin.wait(lambda: sem.u64(16) == 8)
    assert sem.u64() == 0x1_0000_0009
    assert sem.u64(24) > 0
    assert orin.of(Awaken)


@pytest.mark.parametrize(
    ("size", "wide", "expected"),
    [
        (0, 0, struct.pack("<QQ", 0x5, 0)),
        (0, 1, struct.pack("<QQ", 0x3_0000_0005, 0)),
        (1, 0, struct.pack("<IIQ", 0x5, M32, M32 << 32 | M32)),
        (2, 0, struct.pack("<QQ", 0x5, M32 << 32 | M32)),
        (2, 1, struct.pack("<QQ", 0x3_0000_0005, M32 << 32 | M32)),
    ],
)
def test_a_report_stores_a_word_two_or_four(orin: Rig, size: int, wide: int, expected: bytes) -> None:
    """SET_REPORT_SEMAPHORE_EXECUTE's STRUCTURE_SIZE and PAYLOAD_SIZE64 (clc7c0.h); the record has a timestamp."""
    channel, sem = orin.channel().setup(), orin.buffer()
    sem.put(b"\xff" * 16)
    channel.method(1, ComputeMethod.SET_REPORT_SEMAPHORE_PAYLOAD_LOWER, 5, 3, sem.va & M32, sem.va >> 32)
    assert channel.method(1, ComputeMethod.REPORT_SEMAPHORE_EXECUTE, wide << 12 | size << 3).run()
    assert sem.mem[:8] == expected[:8]
    assert (sem.mem[8:16] == expected[8:]) == (size != 0)


def test_a_report_whose_payload_was_never_set_stores_zero(orin: Rig) -> None:
    channel, sem = orin.channel().setup(), orin.buffer()
    sem.put(b"\xff" * 16)
    channel.method(1, ComputeMethod.SET_REPORT_SEMAPHORE_ADDRESS_LOWER, sem.va & M32, sem.va >> 32)
    assert channel.method(1, ComputeMethod.REPORT_SEMAPHORE_EXECUTE, 1 << 12 | 2 << 3).run()
    assert sem.u64() == 0


# -- releases and dependents ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chip", "size", "wide", "expected"),
    [
        *((chip, 0, 0, struct.pack("<Q", 5)) for chip in CHIPS),
        *((chip, 0, 1, struct.pack("<Q", 0x3_0000_0005)) for chip in CHIPS),
        *((chip, 1, 0, struct.pack("<II", 5, M32)) for chip in CHIPS),
        *((chip, 2, 0, struct.pack("<Q", 5)) for chip in CHIPS),
        *((chip, 2, 1, struct.pack("<Q", 0x3_0000_0005)) for chip in CHIPS),
    ],
)
def test_qmd_releases(chip: str, size: int, wide: int, expected: bytes) -> None:
    """Version 4 as measured on an H200: the upper half of a payload is zero unless payload64b is set."""
    with Rig(chip) as rig:
        check_releases(rig, size, wide, expected)


def check_releases(rig: Rig, size: int, wide: int, expected: bytes) -> None:
    """Three releases of one form store `expected`, and a timestamp after it in a record of four words only."""
    channel, out, sem = rig.channel().setup(), rig.buffer(), rig.buffer()
    sem.put(struct.pack("<QQQ", (1 << 64) - 1, 0xAAAA, 0xBBBB))
    fields: dict[str, int] = {}
    for i in range(3):
        fields |= release_fields(rig, i, sem.va + 64 * i, 0x3_0000_0005, size=size, wide=wide)
    qmd = rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), **fields)
    channel.launch(qmd).submit()
    assert rig.wait(lambda: sem.u32(128) == 5)
    assert out.u32() == 1
    assert sem.mem[: len(expected)] == expected
    assert (sem.u64(8) == 0xAAAA) == (size != 0)
    assert sem.u64(16) == 0xBBBB


def test_a_v4_release_of_one_word_with_64_bits_stores_nothing() -> None:
    """As measured on an H200: nothing was stored and the launch never ended."""
    with Rig("gh100") as rig:
        channel, out, sem = rig.channel().setup(), rig.buffer(), rig.buffer()
        sem.put(b"\xa5" * 16)
        fields = release_fields(rig, 0, sem.va, 0x3_0000_0005, size=1, wide=1)
        channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), **fields)).submit()
        assert rig.wait(lambda: rig.of(Note))
        assert not channel.run(0.05)
        assert out.u32() == 1
        assert sem.mem[:16] == b"\xa5" * 16
        assert not rig.of(FatalEvent)
        (note,) = rig.of(Note)
        assert isinstance(note, Note)
        assert "stores nothing" in note.text


def test_a_qmd_reduction(rig: Rig) -> None:
    channel, out, sem = rig.channel().setup(), rig.buffer(), rig.buffer()
    sem.put(struct.pack("<I", 40))
    fields = release_fields(rig, 0, sem.va, 2, size=1, reduction_enable=1, reduction_op=0)
    assert channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), **fields)).run()
    assert sem.u32() == 42


def test_a_chain_of_dependents_with_a_release_at_its_end(rig: Rig) -> None:
    channel, out, sem, length = rig.channel().setup(), rig.buffer(), rig.buffer(), 300
    program, banks = rig.program(ADD_ONE, "add_one"), rig.buffer(length * 0x1000)
    following: dict[str, int] = release_fields(rig, 0, sem.va, 1)
    for i in reversed(range(length)):
        bank = Buffer(banks.va + i * 0x1000, 0x1000, -1, memoryview(banks.mem)[i * 0x1000 : (i + 1) * 0x1000])  # type: ignore[arg-type]
        rig.put_arguments(bank, out.va, 0)
        following = dependent_fields(rig, rig.qmd(program, bank, **following))
    qmd = following["dependent_qmd0_pointer"] << 8
    channel.launch(qmd).submit()
    assert rig.wait(lambda: sem.u32() == 1)
    assert out.u32() == length
    assert rig.gpu.stats()["launches"] == length
    bank.mem.release()  # type: ignore[attr-defined]
    del bank


def test_a_dependence_counter_holds_a_qmd_until_it_is_zero(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    program, last = rig.program(STORE, "store"), rig.arguments(out.va, 9)
    waiting = rig.qmd(program, last, dependence_counter=2)
    first = rig.qmd(program, rig.arguments(out.va + 8, 1), **dependent_fields(rig, waiting, 4))
    assert channel.launch(first).run()
    assert (out.u32(), out.u32(8)) == (0, 1)
    assert channel.launch(waiting, 7).run()
    assert out.u32() == 9
    channel.launch(rig.qmd(program, last, at=0xA00), 7).submit()
    event = rig.fatal()
    assert isinstance(event, SkedException)
    assert event.esr == 1 << SkedBit.DEPENDENCE_COUNTER_UNDERFLOW


def test_a_qmd_is_read_when_its_turn_comes(rig: Rig) -> None:
    """Rewriting a descriptor that waits for a grid changes what runs: the first launch's signal is lost."""
    channel, gate, out = rig.channel().setup(), rig.buffer(), rig.buffer()
    channel.launch(rig.qmd(rig.program(SPIN, "spin"), rig.arguments(gate.va, 0)))
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    channel.launch(rig.qmd(program, bank, **release_fields(rig, 0, out.va + 64, 1)))
    channel.submit()
    time.sleep(0.02)
    rig.put_arguments(bank, out.va, 2)
    rig.qmd(program, bank, **release_fields(rig, 0, out.va + 128, 1))
    gate.put64(1)
    assert rig.wait(lambda: out.u32(128) == 1)
    assert (out.u32(), out.u32(64)) == (2, 0)


def test_a_null_grid_only_releases() -> None:
    with Rig("gh100") as rig:
        channel, sem = rig.channel().setup(), rig.buffer()
        qmd = rig.qmd(0, rig.arguments(), qmd_type=1, **release_fields(rig, 0, sem.va, 4))
        assert channel.launch(qmd).run()
        assert sem.u32() == 4


# -- caches --------------------------------------------------------------------------------------------------------


def invalidate(channel: ChannelRig, bits: int, *, wait: bool = False) -> ChannelRig:
    method = ComputeMethod.INVALIDATE_SHADER_CACHES if wait else ComputeMethod.INVALIDATE_SHADER_CACHES_NO_WFI
    return channel.method(Subchannel.COMPUTE, method, bits)


@pytest.mark.parametrize("wait", [False, True])
def test_constants_stay_as_fetched_until_invalidated(rig: Rig, wait: bool) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    stale = rig.qmd(program, bank, constant_buffer_invalidate_0=0)
    fresh = rig.qmd(program, bank, at=0xA00)
    assert channel.launch(stale).run()
    rig.put_arguments(bank, out.va, 2)
    assert channel.launch(stale).run()
    assert out.u32() == 1
    assert channel.launch(fresh).run()
    assert out.u32() == 2
    rig.put_arguments(bank, out.va, 3)
    assert invalidate(channel, 0x1, wait=wait).launch(stale).run()
    assert out.u32() == 2
    assert invalidate(channel, 0x1011, wait=wait).launch(stale).run()
    assert out.u32() == 3
    rig.put_arguments(bank, out.va, 4)
    whole = rig.qmd(program, bank, at=0xC00, constant_buffer_invalidate_0=0, invalidate_shader_constant_cache=1)
    assert channel.launch(whole).run()
    assert out.u32() == 4


def test_an_invalidation_counts_for_launches_after_it_only(rig: Rig) -> None:
    channel, gate, out = rig.channel().setup(), rig.buffer(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    qmd = rig.qmd(program, bank, constant_buffer_invalidate_0=0)
    assert channel.launch(qmd).run()
    rig.put_arguments(bank, out.va, 2)
    spin = rig.qmd(rig.program(SPIN, "spin"), rig.arguments(gate.va, 0))
    keep = rig.qmd(rig.program(ADD_ONE, "add_one"), rig.arguments(out.va, 0))
    invalidate(channel.launch(spin).launch(qmd).launch(keep), 0x1000)
    channel.submit()
    gate.put64(1)
    assert channel.run()
    assert out.u32() == 2  # 1 stored again, then one added: the launch in front saw the old constants


def test_instructions_stay_as_fetched_until_invalidated(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 6)
    qmd = rig.qmd(program, bank)
    assert channel.launch(qmd).run()
    image = next(b for b in rig._buffers if b.va == program)
    image.put(b"\xff" * 64)  # other machine code than the section names
    assert channel.launch(qmd).run()
    assert not rig.of(FatalEvent)
    invalidate(channel, 0x1).launch(qmd).submit()
    event = rig.fatal()
    assert isinstance(event, SmException)
    assert event.warp_esr == WarpEsr.ILLEGAL_INSTR_ENCODING


def test_a_program_freed_too_early_faults_although_it_is_cached(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    program = rig.program(STORE, "store")
    qmd = rig.qmd(program, rig.arguments(out.va, 6))
    assert channel.launch(qmd).run()
    rig.gpu.unmap(1, program, 4096)
    channel.launch(qmd).submit()
    event = rig.fatal()
    assert isinstance(event, MmuFault)
    assert (event.address, event.fault_type) == (program, MmuFaultType.INVALID_PTE)


def test_another_program_at_the_same_address_runs_after_an_invalidation(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    first, second = rig.program(STORE, "store"), rig.program(ADD_ONE, "add_one")
    bank = rig.arguments(out.va, 41)
    assert channel.launch(rig.qmd(first, bank)).run()
    one, two = (next(b for b in rig._buffers if b.va == va) for va in (first, second))
    image = bytearray(two.mem[: min(one.size, two.size)])
    struct.pack_into("<Q", image, image.index(b"\x7f.tegrad.ptx") + 24, first)
    one.put(bytes(image))
    assert invalidate(channel, 0x1).launch(rig.qmd(first, bank)).run()
    assert out.u32() == 42


# -- what is refused -------------------------------------------------------------------------------------------------

SKED_ROWS = [
    ("grid 0", {"grid": 0}, SkedBit.ZERO_CTA_DIMENSION),
    ("block 0", {"cta_thread_dimension1": 0}, SkedBit.ZERO_CTA_DIMENSION),
    ("threads", {"cta_thread_dimension0": 1024, "cta_thread_dimension1": 2}, SkedBit.TOTAL_THREADS),
    ("registers", {"registers": 256}, SkedBit.REGISTER_COUNT),
    ("register file", {"registers": 128, "cta_thread_dimension0": 1024}, SkedBit.CTA_REGISTER_CONSUMPTION),
    ("shared odd", {"shared_memory_size": 0x440}, SkedBit.SHARED_MEMORY_SIZE),
    ("shared too big", {"shared": 128}, SkedBit.SHARED_MEMORY_SIZE),
    ("L1", {"shared_memory_size": 0x8080, "max_sm_config_shared_mem_size": 9}, SkedBit.L1_CONFIG_TOO_SMALL),
    ("bank", {"constant_buffer_size_shifted4_3": 0x1001, "constant_buffer_valid_3": 1}, SkedBit.CONSTANT_BUFFER_SIZE),
    ("local low", {"shader_local_memory_low_size": 8}, SkedBit.LOCAL_MEMORY_LOW_SIZE),
    ("local high", {"shader_local_memory_high_size": 8}, SkedBit.LOCAL_MEMORY_HIGH_SIZE),
    ("local total", {"shader_local_memory_high_size": 0x240}, SkedBit.LOCAL_MEMORY_TOTAL_SIZE),
    ("program", {"program": 64}, SkedBit.PROGRAM_OFFSET),
]


@pytest.mark.parametrize(("change", "bit"), [row[1:] for row in SKED_ROWS], ids=[row[0] for row in SKED_ROWS])
def test_descriptors_that_the_scheduler_refuses(rig: Rig, change: dict[str, int], bit: SkedBit) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    change = dict(change)
    program = rig.program(STORE, "store") + change.pop("program", 0)
    grid = (change.pop("grid", 1), 1, 1)
    if "registers" in change:
        change["register_count_v" if rig.chip.qmd == "V3" else "register_count"] = change.pop("registers")
    if "shared" in change:
        change["shared_memory_size"] = rig.chip.smem_per_cta + 0x400 + change.pop("shared")
    qmd = rig.qmd(program, rig.arguments(out.va, 1), grid=grid, **change)
    channel.launch(qmd).submit()
    event = rig.fatal()
    assert isinstance(event, SkedException)
    if bit in (SkedBit.LOCAL_MEMORY_LOW_SIZE, SkedBit.LOCAL_MEMORY_HIGH_SIZE):
        assert event.esr & 1 << bit
    else:
        assert event.esr == 1 << bit, event
    assert event.qmd == qmd


def test_the_largest_shared_size_is_accepted(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    size = rig.chip.smem_per_cta + 0x400
    config = size // 4096 + 1
    qmd = rig.qmd(
        rig.program(STORE, "store"),
        rig.arguments(out.va, 1),
        shared_memory_size=size,
        max_sm_config_shared_mem_size=config,
    )
    assert channel.launch(qmd).run()
    assert out.u32() == 1


def give_local_memory(channel: ChannelRig, per_thread: int) -> Buffer:
    """Local memory of this many bytes a thread, for the whole chip."""
    rig, chip = channel.rig, channel.rig.chip
    per_tpc = (per_thread * 32 + 0x1FF) // 0x200 * 0x200 * chip.warps_per_sm * chip.sm_per_tpc
    local = rig.buffer(per_tpc * chip.num_gpc * chip.tpc_per_gpc, va=0x2000000000)
    channel.method(1, ComputeMethod.SET_SHADER_LOCAL_MEMORY_A, local.va >> 32, local.va & M32)
    channel.method(1, ComputeMethod.SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A, 0, per_tpc, 0xFF)
    return local


def test_enough_local_memory_is_accepted(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    give_local_memory(channel, 0x240)
    qmd = rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), shader_local_memory_high_size=0x240)
    assert channel.launch(qmd).run()
    assert out.u32() == 1


def test_local_memory_must_be_mapped(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    local = give_local_memory(channel, 0x40)
    rig.gpu.unmap(1, local.va, local.size)
    qmd = rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), shader_local_memory_high_size=0x40)
    channel.launch(qmd).submit()
    event = rig.fatal()
    assert isinstance(event, MmuFault)
    assert (event.address, event.access, event.client_type) == (local.va, MmuAccess.VIRT_WRITE, MmuClientType.GPC)


def test_a_running_kernel_spills_into_the_local_memory_it_started_with(orin: Rig) -> None:
    """What the client puts there meanwhile is lost when the kernel ends, and so is what the kernel had spilled."""
    channel, gate = orin.channel().setup(), orin.buffer()
    local = give_local_memory(channel, 0x40)
    qmd = orin.qmd(
        orin.program(SPIN, "spin"),
        orin.arguments(gate.va, 0),
        shader_local_memory_high_size=0x40,
        cta_thread_dimension0=64,
    )
    channel.launch(qmd).submit()
    assert orin.wait(lambda: local.u64() != 0)
    mine = b"somebody else's tensor".ljust(4096, b".")
    local.put(mine)
    assert not channel.run(0.02)
    assert local.mem[:4096] == mine
    gate.put64(1)
    assert orin.wait(lambda: channel.fence.u64() > 0)
    assert local.mem[:4096] != mine
    (note,) = orin.of(Note)
    assert isinstance(note, Note)
    assert "overwritten" in note.text


def test_grids_that_share_local_memory_do_not_accuse_each_other(orin: Rig) -> None:
    one, two, gate, out = orin.channel().setup(), orin.channel().setup(), orin.buffer(), orin.buffer()
    local = give_local_memory(one, 0x40)
    spin = orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0), shader_local_memory_high_size=0x40)
    one.launch(spin).submit()
    assert orin.wait(lambda: local.u64() != 0)
    qmd = orin.qmd(orin.program(STORE, "store"), orin.arguments(out.va, 1), shader_local_memory_high_size=0x40)
    assert two.launch(qmd).run()
    gate.put64(1)
    assert one.run()
    assert not orin.of(Note)


def test_an_inline_descriptor_is_stored_and_launched(rig: Rig) -> None:
    channel, out, place = rig.channel().setup(), rig.buffer(), rig.buffer()
    bank = rig.arguments(out.va, 5)
    rig.qmd(rig.program(STORE, "store"), bank)
    words = struct.unpack_from(f"<{rig.layout.size // 4}I", bank.mem, 0x800)
    channel.method(1, ComputeMethod.SET_INLINE_QMD_ADDRESS_A, place.va >> 40, place.va >> 8 & M32)
    channel.method(1, ComputeMethod.LOAD_INLINE_QMD_DATA, *words)
    assert channel.launch(place.va).run()
    assert out.u32() == 5
    assert struct.unpack_from(f"<{len(words)}I", place.mem) == words


@pytest.mark.parametrize("action", [1, 3, 10])
def test_an_active_descriptor_may_not_be_invalidated(orin: Rig, action: int) -> None:
    channel, gate = orin.channel().setup(), orin.buffer()
    qmd = orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0))
    gate.put64(1)
    assert channel.launch(qmd, 3).run()
    assert channel.launch(qmd, action).run()
    gate.put64(0)
    channel.launch(qmd).launch(qmd, action).submit()
    event = orin.fatal()
    assert isinstance(event, SkedException)
    assert (event.esr, event.qmd) == (1 << SkedBit.INVALIDATE_ACTIVE_QMD, qmd)


def test_an_action_that_a_dependent_qmd_cannot_have_ends_the_channel(orin: Rig) -> None:
    channel, out = orin.channel().setup(), orin.buffer()
    program = orin.program(STORE, "store")
    dependent = orin.qmd(program, orin.arguments(out.va, 1))
    qmd = orin.qmd(program, orin.arguments(out.va, 2), **dependent_fields(orin, dependent, action=7))
    channel.launch(qmd).submit()
    event = orin.fatal()
    assert isinstance(event, SkedException)
    assert (event.esr, event.qmd) == (1 << SkedBit.QUEUE_SIZE, qmd)


@pytest.mark.parametrize(
    ("shared", "local"), [(0, 0), (0xFE00000000, 0), (0, 0xFD00000000), (0xFE00000000, 0xFE00FF0000)]
)
def test_windows_that_are_missing_or_collide(rig: Rig, shared: int, local: int) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    for offset, window in (
        (ComputeMethod.SET_SHADER_SHARED_MEMORY_WINDOW_A, shared),
        (ComputeMethod.SET_SHADER_LOCAL_MEMORY_WINDOW_A, local),
    ):
        channel.method(1, offset, window >> 32, window & M32)
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1))).submit()
    event = rig.fatal()
    assert isinstance(event, SkedException)
    assert event.esr == 0x01000000


def test_a_qmd_of_another_version_never_completes(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    other = 7 - rig.layout.major
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), qmd_major_version=other)).submit()
    assert rig.wait(lambda: rig.of(Note))
    assert not channel.run(0.05)
    assert not rig.of(FatalEvent)
    (note,) = rig.of(Note)
    assert isinstance(note, Note)
    assert f"version {other}.0" in note.text
    assert rig.gpu.channel_destroy(channel.chid) is True


def test_a_misaligned_release_is_refused(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    fields = release_fields(rig, 0, out.va + 8, 1)
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), **fields)).submit()
    assert isinstance(rig.fatal(), SkedException)


def test_unknown_pcas_actions_are_refused(orin: Rig) -> None:
    orin.channel().setup().launch(orin.arguments().va, 6).submit()
    assert isinstance(orin.fatal(), ClassError)


# -- programs that are not there --------------------------------------------------------------------------------------


def illegal(rig: Rig, program: int) -> SmException:
    out = rig.buffer()
    rig.channel().setup().launch(rig.qmd(program, rig.arguments(out.va, 1))).submit()
    event = rig.fatal()
    assert isinstance(event, SmException)
    assert event.warp_esr == WarpEsr.ILLEGAL_INSTR_ENCODING
    assert out.u32() == 0
    return event


def test_code_without_a_section_is_illegal(rig: Rig) -> None:
    assert "no .tegrad.ptx section" in illegal(rig, rig.buffer().va).detail


def test_overwritten_code_is_illegal(rig: Rig) -> None:
    program = rig.program(STORE, "store")
    next(b for b in rig._buffers if b.va == program).put(b"\0", 17)
    event = illegal(rig, program)
    assert event.pc == program
    assert "not that of kernel store" in event.detail


def test_what_an_earlier_program_left_behind_is_passed_over(rig: Rig) -> None:
    channel, out = rig.channel().setup(), rig.buffer()
    old, new = b"old".ljust(256, b"."), b"new".ljust(256, b".")
    image = rig.buffer(1 << 20)
    for at, name, code, ptx in ((0x400, "store", old, STORE), (0x80000, "add_one", new, ADD_ONE)):
        section = bytearray(ptxsection.pack(name, code, ptx, param_base=rig.param_base))
        struct.pack_into("<Q", section, ptxsection.ENTRY_SLOT, image.va)
        image.put(bytes(section), at)
    image.put(new)
    assert channel.launch(rig.qmd(image.va, rig.arguments(out.va, 7))).run()
    assert out.u32() == 1


def test_code_for_a_later_chip_is_illegal(orin: Rig) -> None:
    program = orin.program(STORE.replace("sm_80", "sm_90a"), "store")
    assert "sm_90" in illegal(orin, program).detail


def test_code_that_the_engine_cannot_run_is_illegal(rig: Rig) -> None:
    program = rig.program(poke("no.such.instruction %w;"), "poke")
    assert "no" in illegal(rig, program).detail


# -- faults ------------------------------------------------------------------------------------------------------------


def run_poke(rig: Rig, body: str, p: int, n: int = 0) -> FatalEvent:
    bank = rig.arguments(p, n)
    rig.channel().setup().launch(rig.qmd(rig.program(poke(body), "poke"), bank)).submit()
    return rig.fatal()


@pytest.mark.parametrize(
    ("body", "access"),
    [
        ("ld.global.u32 %w, [%a];", MmuAccess.VIRT_READ),
        ("st.global.u32 [%a], %w;", MmuAccess.VIRT_WRITE),
    ],
)
def test_a_kernel_access_to_unmapped_memory_faults(rig: Rig, body: str, access: MmuAccess) -> None:
    event = run_poke(rig, body, 0x5000_1234)
    assert isinstance(event, MmuFault)
    assert (event.address, event.access, event.client_type) == (0x5000_1000, access, MmuClientType.GPC)
    assert event.fault_type == MmuFaultType.INVALID_PDE
    assert "poke" in event.detail
    assert "lane 0" in event.detail


def test_the_fault_of_an_atomic_names_its_access_and_its_gpc(orin: Rig) -> None:
    channel, out = orin.channel().setup(), orin.buffer()
    assert channel.launch(orin.qmd(orin.program(STORE, "store"), orin.arguments(out.va, 1))).run()
    (context,) = orin.gpu._tsgs[1].contexts.values()
    fault = PtxFault("unmapped", "k", 3, cta=(9, 0, 0), address=0x5000_1234, access="atomic", size=4)
    event = context.runner._translate(fault, 0x1000).event(1, 2)
    assert isinstance(event, MmuFault)
    assert (event.access, event.address) == (MmuAccess.VIRT_ATOMIC_STRONG, 0x5000_1000)
    assert (event.gpc, event.client) == (1, 0)  # CTA 9 runs on SM 9: the first TPC of the second GPC


def test_a_kernel_store_to_a_read_only_mapping_faults(rig: Rig) -> None:
    out = rig.buffer(writable=False)
    event = run_poke(rig, "st.global.u32 [%a], %w;", out.va)
    assert isinstance(event, MmuFault)
    assert (event.fault_type, event.address) == (MmuFaultType.WRITE_RO_VIOLATION, out.va)


@pytest.mark.parametrize(
    ("body", "offset", "esr"),
    [
        ("ld.global.u32 %w, [%a];", 2, WarpEsr.MISALIGNED_ADDR),
        ("ld.global.u64 %n, [%a];", 4, WarpEsr.MISALIGNED_ADDR),
        ("st.global.u32 [%n], %w;", 0, WarpEsr.INVALID_ADDR_SPACE),
        ("ld.shared.u32 %w, [%w+1];", 0, WarpEsr.OOR_ADDR),
        ("shfl.sync.idx.b32 %w, %w, 0, 31, 2;", 0, WarpEsr.ILLEGAL_INSTR_PARAM),
    ],
)
def test_warp_errors(rig: Rig, body: str, offset: int, esr: WarpEsr) -> None:
    out = rig.buffer()
    event = run_poke(rig, body, out.va + offset, rig.chip.shared_window + 0x200000)
    assert isinstance(event, SmException)
    assert event.warp_esr == esr
    assert event.kernel == "poke"
    assert event.pc > out.va
    assert body.rstrip(";") in event.detail


def test_a_trap_is_an_illegal_instruction(rig: Rig) -> None:
    """As on an H200."""
    event = run_poke(rig, "trap;", 0)
    assert isinstance(event, SmException)
    assert (event.warp_esr, event.global_esr) == (0x9, 0)


@pytest.mark.parametrize(
    ("what", "client_type", "client"),
    [("qmd", MmuClientType.HUB, 29), ("program", MmuClientType.GPC, 17), ("bank", MmuClientType.GPC, 17)],
)
def test_what_a_launch_needs_must_be_mapped(rig: Rig, what: str, client_type: MmuClientType, client: int) -> None:
    channel, out, hole = rig.channel().setup(), rig.buffer(), rig.buffer()
    rig.gpu.unmap(1, hole.va, hole.size)
    bank = rig.arguments(out.va, 1)
    qmd = hole.va if what == "qmd" else rig.qmd(hole.va if what == "program" else rig.program(STORE, "store"), bank)
    if what == "bank":
        fake = Buffer(hole.va, hole.size, -1, bank.mem)
        qmd = rig.qmd(rig.program(STORE, "store"), fake) - hole.va + bank.va
    channel.launch(qmd).submit()
    event = rig.fatal()
    assert isinstance(event, MmuFault)
    assert (event.client_type, event.client) == (client_type, client)
    assert (event.address, event.fault_type) == (hole.va, MmuFaultType.INVALID_PTE)


# -- ending what runs --------------------------------------------------------------------------------------------------


def test_closing_a_channel_aborts_its_grid_and_its_tsg(orin: Rig) -> None:
    busy, sister, gate = orin.channel().setup(), orin.channel(), orin.buffer()
    fields = release_fields(orin, 0, gate.va + 64, 1)
    busy.launch(orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0), **fields)).submit()
    assert orin.wait(lambda: orin.gpu._scheduler.runlist._on)  # its grid runs
    assert orin.gpu.channel_destroy(busy.chid) is True
    assert gate.u32(64) == 0  # what was aborted does not signal
    assert not sister.run(0.02)


def test_closing_an_idle_channel_leaves_its_sisters_alone(orin: Rig) -> None:
    one, two, out = orin.channel().setup(), orin.channel(), orin.buffer()
    assert one.launch(orin.qmd(orin.program(STORE, "store"), orin.arguments(out.va, 1))).run()
    assert orin.gpu.channel_destroy(one.chid) is False
    assert two.run()


def test_a_fault_in_one_channel_ends_its_sisters_grid(orin: Rig) -> None:
    busy, bad, gate = orin.channel().setup(), orin.channel(), orin.buffer()
    busy.launch(orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0))).submit()
    assert orin.wait(lambda: orin.gpu._scheduler.runlist._on)  # its grid runs
    bad.method(0, 4, 0).submit()
    orin.fatal()
    worker = orin.gpu._scheduler._channels[busy.chid].worker
    assert orin.wait(lambda: worker.idle)
    assert len(orin.of(FatalEvent)) == 1


def test_preemption_tells_whether_a_grid_still_runs(orin: Rig) -> None:
    channel, gate = orin.channel().setup(), orin.buffer()
    channel.launch(orin.qmd(orin.program(SPIN, "spin"), orin.arguments(gate.va, 0))).submit()
    assert orin.wait(lambda: orin.gpu.tsg_preempt(1, 0.02) is False)  # once the grid has begun
    gate.put64(1)
    assert orin.gpu.tsg_preempt(1, 5.0) is True


def test_closing_the_gpu_ends_a_grid_that_would_run_for_ever() -> None:
    with Rig() as rig:
        gate = rig.buffer()
        rig.channel().setup().launch(rig.qmd(rig.program(SPIN, "spin"), rig.arguments(gate.va, 0))).submit()
        time.sleep(0.02)
