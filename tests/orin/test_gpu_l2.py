"""The L2 of cached mappings: what an H200 showed, case by case (docs/coherence.md), and what nvgpu says of flushes."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator

import pytest
from gpu_rig import PAGE, Buffer, ChannelRig, Rig

from tegrad.hw.classes import HostMethod, MemOp
from tegrad.hw.gpfifo import gp_entry
from tegrad.orin.events import Note, PbdmaFault
from tegrad.orin.host import Wait
from tegrad.ptx.l2 import Mode

THROUGH, BACK = Mode(0), Mode.BACK
HEAD = ".version 7.5\n.target sm_80\n.address_size 64\n"
FORMS = ("ld.global.cg", "ld.volatile.global", "ld.relaxed.sys.global", "ld.acquire.sys.global", "ld", "ld.global.nc")


def _kernel(name: str, body: str) -> str:
    """A kernel of one thread with two addresses, %p and %q."""
    return f"""{HEAD}.visible .entry {name}(.param .u64 p, .param .u64 q)
{{
    .reg .b64 %p; .reg .b64 %q; .reg .b64 %r; .reg .b32 %w; .reg .b32 %v; .reg .b32 %t; .reg .pred %c;
    ld.param.u64 %p, [p];
    ld.param.u64 %q, [q];
    mov.u32 %t, %tid.x;
{body}
    ret;
}}
"""


class Case:
    """Memory mapped cached (`kept`), results mapped volatile (`out`), and kernels that move words between them."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.channel: ChannelRig = rig.channel().setup()
        self.kept, self.out = rig.buffer(cached=True, label="the kept one"), rig.buffer()
        self._programs: dict[str, int] = {}

    def cpu(self, value: int, offset: int = 0, buffer: Buffer | None = None) -> None:
        """The CPU stores a word."""
        (buffer or self.kept).put(struct.pack("<I", value), offset)

    def run(self, name: str, body: str, first: int, second: int, threads: int = 1, wait: bool = True) -> None:
        """Run a kernel on two addresses."""
        if name not in self._programs:
            self._programs[name] = self.rig.program(_kernel(name, body), name)
        bank = self.rig.arguments(first, second)
        qmd = self.rig.qmd(self._programs[name], bank, cta_thread_dimension0=threads)
        self.channel.launch(qmd)
        if wait:
            assert self.channel.run()
        else:
            self.channel.submit()

    def load(self, offset: int = 0, form: str = "ld.global.cg", buffer: Buffer | None = None) -> int:
        """What a kernel reads."""
        at = (buffer or self.kept).va + offset
        self.run(form.replace(".", "_"), f"{form}.u32 %w, [%q];\nst.global.u32 [%p], %w;", self.out.va, at)
        return self.out.u32()

    def store(self, value: int, offset: int = 0, form: str = "st.global", buffer: Buffer | None = None) -> None:
        """A kernel stores a word."""
        at = (buffer or self.kept).va + offset
        self.run(f"{form.replace('.', '_')}{value}", f"{form}.u32 [%q], {value};", self.out.va, at)

    def add(self, value: int, offset: int = 0, buffer: Buffer | None = None) -> int:
        """A kernel adds atomically; what it found."""
        at = (buffer or self.kept).va + offset
        body = f"atom.global.add.u32 %w, [%q], {value};\nst.global.u32 [%p], %w;"
        self.run(f"add{value}", body, self.out.va, at)
        return self.out.u32()

    def mem_op(self, op: int) -> None:
        """MEM_OP_D in the pushbuffer."""
        self.channel.method(0, HostMethod.MEM_OP_A, 0, 0, 0, op << 27)
        assert self.channel.run()


@pytest.fixture(params=("agx-orin-64gb", "gh100"))
def through(request: pytest.FixtureRequest) -> Iterator[Case]:
    with Rig(request.param, l2_mode=THROUGH) as rig:
        yield Case(rig)


@pytest.fixture
def case() -> Iterator[Case]:
    with Rig(l2_mode=THROUGH) as rig:
        yield Case(rig)


@pytest.fixture
def back() -> Iterator[Case]:
    with Rig(l2_mode=BACK) as rig:
        yield Case(rig)


def counted(case: Case, kernel: str) -> tuple[int, int]:
    """What came into the L2 while a kernel ran, in sectors, and what was reported then."""
    count = case.rig.gpu._counters.kernels[kernel]
    return count.l2_fills, count.l2_reports


def test_sectors_that_come_into_the_l2_are_counted_by_kernel(case: Case) -> None:
    for offset, fills in ((0, 1), (4, 1), (32, 2), (0, 2)):
        case.load(offset)
        assert counted(case, "ld_global_cg") == (fills, 0)
    case.mem_op(MemOp.L2_SYSMEM_INVALIDATE)
    case.load()
    assert counted(case, "ld_global_cg") == (3, 0)


def test_stale_loads_are_counted_by_kernel_where_the_l2_tells_of_them() -> None:
    with Rig(l2_mode=Mode.TELL) as rig:
        case = Case(rig)
        case.cpu(1)
        case.load()
        assert counted(case, "ld_global_cg") == (1, 0)
        case.cpu(2)
        case.load()
        assert counted(case, "ld_global_cg") == (1, 1)


# -- loads ------------------------------------------------------------------------------------------------------------


def test_what_a_kernel_has_loaded_stays_whatever_the_cpu_stores(through: Case) -> None:
    seen = []
    for value in (1, 2, 3):
        through.cpu(value)
        seen.append(through.load())
    assert seen == [1, 1, 1]


@pytest.mark.parametrize("form", FORMS)
def test_no_form_of_load_sees_past_what_is_kept(case: Case, form: str) -> None:
    case.cpu(1)
    case.load()
    case.cpu(2)
    assert case.load(form=form) == 1


def test_volatile_mappings_are_coherent(case: Case) -> None:
    plain = case.rig.buffer()
    seen = []
    for value in (1, 2, 3):
        case.cpu(value, buffer=plain)
        seen.append(case.load(buffer=plain))
    assert seen == [1, 2, 3]


def test_the_grain_is_the_sector_not_the_line(through: Case) -> None:
    for offset in (0, 16, 64):
        through.cpu(1, offset)
    through.load()
    through.cpu(9, 16)
    through.cpu(9, 64)
    assert (through.load(16), through.load(64)) == (1, 9)


def test_a_page_of_which_much_is_kept_is_kept_whole(case: Case) -> None:
    case.run("wide", "mul.wide.u32 %r, %t, 16;\nadd.u64 %q, %q, %r;\nld.global.u32 %w, [%q];", 0, case.kept.va, 32)
    case.cpu(9, PAGE - 4)
    assert case.load(PAGE - 4) == 0


def test_a_polling_kernel_never_sees_the_cpu(case: Case) -> None:
    case.load()
    body = "LOOP:\nld.volatile.global.u32 %w, [%q];\nsetp.eq.u32 %c, %w, 0;\n@%c bra LOOP;"
    case.run("poll", body, 0, case.kept.va, wait=False)
    case.cpu(1)
    case.channel.release(case.out.va, 7).submit()
    time.sleep(0.1)
    assert case.out.u32() == 0
    case.rig.gpu.flush_l2(True)
    assert case.rig.wait(lambda: case.out.u32() == 7)


def test_vectors_bytes_and_scattered_lanes_go_through_it_too(case: Case) -> None:
    body = "mul.wide.u32 %r, %t, 36;\nadd.u64 %q, %q, %r;\nld.global.u8 %w, [%q];\nmul.wide.u32 %r, %t, 4;\n"
    body += "add.u64 %p, %p, %r;\nst.global.u32 [%p], %w;"
    case.kept.put(bytes(range(1, 33)) * 8)
    case.run("bytes", body, case.out.va, case.kept.va, 7)
    case.kept.put(bytes(256))
    case.run("bytes", body, case.out.va, case.kept.va, 7)
    assert [case.out.u32(4 * i) for i in range(7)] == [36 * i % 32 + 1 for i in range(7)]
    four = "ld.global.v4.u32 {%w, %v, %t, %w}, [%q];\nst.global.v4.u32 [%p], {%w, %v, %t, %w};"
    case.run("four", four, case.out.va, case.kept.va)
    assert case.out.u32(4) == int.from_bytes(bytes((5, 6, 7, 8)), "little")


# -- stores, through --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["st.global", "st.volatile.global", "st.release.sys.global", "st"])
def test_stores_reach_the_cpu_while_the_kernel_runs_and_overwrite_nothing_later(case: Case, form: str) -> None:
    body = f"{form}.u32 [%q], 7;\nLOOP:\nld.volatile.global.u32 %w, [%p];\nsetp.eq.u32 %c, %w, 0;\n@%c bra LOOP;\n"
    case.cpu(0, 0, case.out)
    case.run("runs", body + "st.global.u32 [%q+8], 8;", case.out.va, case.kept.va, wait=False)
    assert case.rig.wait(lambda: case.kept.u32() == 7)
    case.cpu(99)
    case.cpu(98, 4)
    case.cpu(1, 0, case.out)
    assert case.channel.run()
    assert [case.kept.u32(4 * i) for i in range(3)] == [99, 98, 8]
    case.rig.gpu.flush_l2(True)
    assert [case.kept.u32(4 * i) for i in range(3)] == [99, 98, 8]


def test_a_store_to_a_kept_sector_changes_it_and_others_go_through(through: Case) -> None:
    through.store(5)
    through.cpu(6)
    assert through.load() == 6
    through.store(5)
    through.cpu(7)
    through.cpu(7, 4)
    assert (through.load(), through.load(4)) == (5, 0)


def test_stores_that_cover_a_sector_keep_it(through: Case) -> None:
    halves = ["st.global.v4.u32 [%q], {%t, %t, %t, %t};", "st.global.v4.u32 [%q+16], {%t, %t, %t, %t};"]
    row = "mul.wide.u32 %r, %t, 4;\nadd.u64 %q, %q, %r;\nst.global.u32 [%q], 0;"
    through.run("at_once", "\n".join(halves), 0, through.kept.va)
    through.run("a_row", row, 0, through.kept.va + 256, 32)
    through.run("fenced", "\nmembar.sys;\n".join(halves), 0, through.kept.va + 64)
    for half, body in enumerate(halves):
        through.run(f"half{half}", body, 0, through.kept.va + 128)
    for offset in (0, 64, 128, 256):
        through.cpu(9, offset)
    assert [through.load(offset) for offset in (0, 256, 64, 128)] == [0, 0, 9, 9]


def test_atomics_keep_the_whole_sector(through: Case) -> None:
    through.add(1)
    through.cpu(9, 4)
    assert through.load(4) == 0


def test_atomics_work_on_the_kept_value_and_write_the_wrong_sum_through(through: Case) -> None:
    through.cpu(1)
    through.load()
    through.cpu(100)
    assert through.add(10) == 1
    assert through.kept.u32() == 11


# -- flushes ----------------------------------------------------------------------------------------------------------


def _stale(case: Case) -> None:
    case.cpu(1)
    case.load()
    case.cpu(2)


def test_sysmem_invalidation_in_the_pushbuffer_ends_staleness(through: Case) -> None:
    _stale(through)
    through.mem_op(MemOp.L2_SYSMEM_INVALIDATE)
    assert through.load() == 2


@pytest.mark.parametrize("op", [MemOp.MEMBAR, MemOp.L2_PEERMEM_INVALIDATE, MemOp.L2_FLUSH_DIRTY])
def test_other_memory_operations_leave_what_is_kept(through: Case, op: MemOp) -> None:
    _stale(through)
    through.mem_op(op)
    assert through.load() == 1


def test_hopper_has_no_wait_for_pending_reads() -> None:
    for chip, faults in (("agx-orin-64gb", 0), ("gh100", 1)):
        with Rig(chip) as rig:
            channel = rig.channel().setup()
            channel.method(0, HostMethod.MEM_OP_A, 0, 0, 0, MemOp.L2_WAIT_FOR_SYS_PENDING_READS << 27)
            if faults:
                channel.submit()
                assert rig.wait(lambda: rig.of(PbdmaFault))
            else:
                assert channel.run()
            assert len(rig.of(PbdmaFault)) == faults


def test_a_flush_invalidates_only_if_it_is_told_to(case: Case) -> None:
    _stale(case)
    case.rig.gpu.flush_l2(False)
    assert case.load() == 1
    case.rig.gpu.flush_l2(True)
    assert case.load() == 2


def test_unmapping_anything_invalidates_everything(case: Case) -> None:
    other = case.rig.buffer()
    _stale(case)
    case.rig.gpu.unmap(1, other.va, other.size)
    assert case.load() == 2


def test_a_fresh_mapping_has_nothing_kept(case: Case) -> None:
    _stale(case)
    again = case.rig.buffer(of=case.kept, cached=True)
    assert case.load(buffer=again) == 1, "the same physical sector"
    fresh = case.rig.buffer(cached=True)
    case.cpu(4, buffer=fresh)
    assert case.load(buffer=fresh) == 4


def test_a_full_l2_forgets_the_oldest() -> None:
    with Rig("agx-orin-64gb", l2_mode=THROUGH) as rig:
        case = Case(rig)
        _stale(case)
        size = rig.chip.l2_bytes + (1 << 20)
        large, target = rig.buffer(size, cached=True), rig.buffer(size)
        case.channel.copy(large.va, target.va, size)
        assert case.channel.run()
        assert rig.gpu.l2.kept <= rig.chip.l2_bytes
        assert case.load() == 2


def test_what_is_evicted_is_the_oldest_and_nothing_between_it() -> None:
    with Rig(l2_mode=THROUGH) as rig:
        case = Case(rig)
        case.kept = rig.buffer(3 * PAGE, cached=True)
        for page in (0, 2, 1):
            case.cpu(1, page * PAGE)
            assert case.load(page * PAGE) == 1
            case.cpu(2, page * PAGE)
        sectors = rig.gpu.l2.kept // 32
        rig.gpu.l2._evict(sectors * 2 // 3)
        assert rig.gpu.l2.kept // 32 == sectors // 3
        assert [case.load(page * PAGE) for page in range(3)] == [2, 1, 2]


def test_sectors_leave_by_themselves_under_a_seed() -> None:
    outcomes = set()
    for seed in range(6):
        with Rig(l2_mode=THROUGH, race_seed=seed) as rig:
            case = Case(rig)
            for _ in range(6):
                _stale(case)
                outcomes.add(case.load())
    assert outcomes == {1, 2}


# -- stores that stay -------------------------------------------------------------------------------------------------


def test_a_store_that_stays_is_not_seen_by_the_cpu_until_a_flush(back: Case) -> None:
    back.store(7)
    assert back.kept.u32() == 0
    assert back.load() == 7
    back.rig.gpu.flush_l2(False)
    assert back.kept.u32() == 7


@pytest.mark.parametrize("how", ["mem_op", "unmap", "flush"])
def test_a_dirty_sector_overwrites_what_the_cpu_has_written(back: Case, how: str) -> None:
    back.store(7)
    back.cpu(99)
    back.cpu(98, 4)
    back.cpu(97, 32)
    if how == "mem_op":
        back.mem_op(MemOp.L2_FLUSH_DIRTY)
    elif how == "unmap":
        back.rig.gpu.unmap(1, back.out.va, back.out.size)
    else:
        back.rig.gpu.flush_l2(True)
    assert [back.kept.u32(at) for at in (0, 4, 32)] == [7, 0, 97]


def test_an_invalidation_alone_leaves_dirty_sectors(back: Case) -> None:
    back.store(7)
    back.mem_op(MemOp.L2_SYSMEM_INVALIDATE)
    assert (back.kept.u32(), back.load()) == (0, 7)


def test_a_release_into_cached_memory_stays_in_the_l2(back: Case) -> None:
    back.channel.release(back.kept.va, 5)
    assert back.channel.run()
    assert back.kept.u32() == 0
    assert back.load() == 5


def test_nothing_is_lost_when_a_buffer_goes(back: Case) -> None:
    back.store(7)
    back.rig.gpu.unmap(1, back.kept.va, back.kept.size)
    assert back.kept.u32() == 7
    assert back.rig.gpu.l2.kept == 0


# -- both kinds of mapping of the same memory -------------------------------------------------------------------------


def test_a_volatile_load_sees_memory_and_the_kept_sector_goes(through: Case) -> None:
    plain = through.rig.buffer(of=through.kept)
    through.cpu(1)
    through.load()
    through.cpu(2)
    seen = [through.load(), through.load(buffer=plain), through.load()]
    assert seen == [1, 2, 2]


def test_volatile_stores_and_atomics_work_on_memory(through: Case) -> None:
    plain = through.rig.buffer(of=through.kept)
    through.cpu(6)
    through.load()
    through.cpu(7)
    assert through.add(100, buffer=plain) == 7
    assert (through.kept.u32(), through.load()) == (107, 107)
    through.cpu(1)
    through.store(8, buffer=plain)
    assert through.load() == 8


def test_a_volatile_load_of_a_neighbour_takes_the_sector_and_a_kept_neighbour_is_stale(through: Case) -> None:
    plain = through.rig.buffer(of=through.kept)
    _stale(through)
    through.load(4, buffer=plain)
    assert through.load() == 2
    through.cpu(3)
    through.load(4)
    assert through.load() == 2


def test_another_address_space_meets_the_same_sectors(case: Case) -> None:
    case.rig.gpu.vm_create(2)
    case.rig.gpu.tsg_create(2)
    other = case.rig.buffer(of=case.kept, cached=True, vm=2)
    _stale(case)
    channel = case.rig.channel(tsg=2, vm=2).setup()
    out = case.rig.buffer(vm=2)
    channel.copy(other.va, out.va, 4)
    assert channel.run()
    assert out.u32() == 1


# -- the other engines ------------------------------------------------------------------------------------------------


def test_the_copy_engine_reads_what_is_kept(through: Case) -> None:
    seen = []
    for value in (1, 2, 3):
        through.cpu(value)
        through.channel.copy(through.kept.va, through.out.va, 64)
        assert through.channel.run()
        seen.append(through.out.u32())
    assert seen == [1, 1, 1]


def test_a_pushbuffer_is_fetched_as_it_was(through: Case) -> None:
    channel, seen = through.channel, []
    assert channel.run()

    def rewritten(value: int) -> None:
        channel.release(through.out.va, value)
        words = channel.words
        channel.words = []
        through.kept.put(struct.pack(f"<{len(words)}I", *words))
        channel.entry(gp_entry(through.kept.va, len(words)))
        assert channel.run()
        seen.append(through.out.u32())

    for value in (1, 2, 3):
        rewritten(value)
    through.mem_op(MemOp.L2_SYSMEM_INVALIDATE)
    rewritten(4)
    assert seen == [1, 1, 1, 4]


def test_a_gpfifo_in_kept_memory_gives_its_first_entries_only(through: Case) -> None:
    channel = through.rig.channel(cached=True).setup()
    assert channel.run(), "the first entry, and three beside it in its sector"
    channel.release(through.out.va, 7)
    assert not channel.run(0.3)
    assert through.out.u32() == 0


def test_an_acquire_of_a_kept_word_never_ends(through: Case) -> None:
    channel = through.channel
    channel.acquire(through.kept.va, 5).release(through.out.va, 1).submit()
    host = through.rig.gpu._scheduler.channel(channel.chid)
    assert through.rig.wait(lambda: host is not None and host.state is Wait.MEMORY)  # it has looked
    through.kept.put64(5)
    time.sleep(0.15)
    assert through.out.u32() == 0
    through.rig.gpu.flush_l2(True)
    assert through.rig.wait(lambda: through.out.u32() == 1)


def test_kernel_arguments_are_fetched_through_it(through: Case) -> None:
    rig = through.rig
    program = rig.program(_kernel("word", "cvt.u32.u64 %w, %q;\nst.global.u32 [%p], %w;"), "word")
    bank, seen = rig.buffer(cached=True), []
    for value in (11, 22, 11, 22):
        rig.put_arguments(bank, through.out.va, value)
        descriptor = rig.qmd(program, bank, at=0x800)
        through.channel.launch(descriptor)
        assert through.channel.run()
        seen.append(through.out.u32())
    through.mem_op(MemOp.L2_SYSMEM_INVALIDATE)
    through.channel.launch(descriptor)
    assert through.channel.run()
    assert [*seen, through.out.u32()] == [11, 11, 11, 11, 22]


# -- reports ----------------------------------------------------------------------------------------------------------


def test_it_tells_who_read_what_stale() -> None:
    with Rig(l2_mode=Mode.TELL) as rig:
        case = Case(rig)
        _stale(case)
        case.load(form="ld.volatile.global")
        assert rig.wait(lambda: rig.of(Note))
        (note,) = rig.of(Note)
        assert isinstance(note, Note)
        assert "stale load of 4 bytes of the kept one" in note.text
        assert f"{case.kept.va:#x} + 0x0" in note.text
        assert "kernel ld_volatile_global, CTA 0, thread 0" in note.text
        assert rig.gpu.l2.reports() == []  # each is told once
        case.channel.copy(case.kept.va, case.out.va, 4)
        assert case.channel.run()
        assert rig.wait(lambda: any("copy source" in event.text for event in rig.of(Note)))  # type: ignore[attr-defined]


def test_it_tells_which_store_of_the_cpu_was_overwritten() -> None:
    with Rig(l2_mode=Mode.TELL | BACK) as rig:
        case = Case(rig)
        case.store(7)
        case.cpu(99, 4)
        case.mem_op(MemOp.L2_FLUSH_DIRTY)
        assert rig.wait(lambda: rig.of(Note))
        (note,) = rig.of(Note)
        assert isinstance(note, Note)
        assert "a dirty sector of the kept one" in note.text
        assert "stored over what the CPU had written" in note.text
