"""GPU address spaces: what is mapped, what a fault says, and that nothing takes the process down or leaks."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from gpu_programs import HEAD
from gpu_rig import PAGE, STORE, Buffer, ChannelRig, Rig
from hypothesis import given, settings
from hypothesis import strategies as st

from tegrad.hw.faults import MmuFaultType
from tegrad.orin.events import FatalEvent, MmuFault
from tegrad.orin.memory import DEFAULT_SPAN, AddressSpace, Fault, OutOfAddresses

SCRUB = (
    HEAD
    + """
.visible .entry scrub(.param .u64 p, .param .u64 n)
{
    .reg .b64 %a; .reg .b32 %w; .reg .pred %q;
    ld.param.u64 %a, [p];
    mov.u32 %w, 0;
LOOP:
    st.global.u32 [%a], %w;
    add.u32 %w, %w, 1;
    setp.ne.u32 %q, %w, 0;
    @%q bra LOOP;
    ret;
}
"""
)
"""Stores to p four thousand million times."""


@pytest.fixture
def space() -> Iterator[AddressSpace]:
    space = AddressSpace(1)
    yield space
    space.close()


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 64 * PAGE)
    yield fd
    os.close(fd)


def test_memory_is_the_buffers(space: AddressSpace, fd: int) -> None:
    space.map(0xFFFFA00000, 4 * PAGE, fd, PAGE, True)
    space.map(0x40000000, 4 * PAGE, fd, 0, True)
    space.write(0xFFFFA00000 + 5, b"hello", 6)
    assert os.pread(fd, 5, PAGE + 5) == b"hello"
    assert space.read(0x40000000 + PAGE + 5, 5, 6) == b"hello"


def test_an_address_space_that_is_made_by_itself_has_an_l2_that_keeps_stores(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEGRAD_L2", "back")
    space = AddressSpace(1)
    space.map(0x40000000, 4 * PAGE, fd, 0, True, cached=True)
    space.write(0x40000000, b"stored", 6)
    space.l2.settle()
    assert os.pread(fd, 6, 0) == bytes(6)
    assert space.read(0x40000000, 6, 6) == b"stored"
    space.l2.write_back()
    assert os.pread(fd, 6, 0) == b"stored"
    space.close()


def test_sizes_are_rounded_to_pages_and_checked_against_the_buffer(space: AddressSpace, fd: int) -> None:
    space.map(0x1000, 5, fd, 0, True)
    assert space.bad_page(0x1000, PAGE, True) is None
    assert space.bad_page(0x1000, PAGE + 1, True) == 0x2000
    for va, size, offset in (
        (0x10000, 65 * PAGE, 0),
        (0x10000, PAGE, 64 * PAGE),
        (0x10010, PAGE, 0),
        (0x10000, PAGE, 8),
    ):
        with pytest.raises(ValueError, match=r"map|smaller"):
            space.map(va, size, fd, offset, True)
    with pytest.raises(ValueError, match="map"):
        space.map(DEFAULT_SPAN, PAGE, fd, 0, True)


def test_addresses_above_40_bits(space: AddressSpace, fd: int) -> None:
    space.map(0x100_0020_0000, PAGE, fd, 0, True)
    space.quads[0x100_0020_0008 >> 3] = 7
    assert os.pread(fd, 8, 8) == (7).to_bytes(8, "little")
    wide = AddressSpace(2, 1 << 44)
    wide.map((1 << 44) - PAGE, PAGE, fd, 0, True)
    assert wide.read((1 << 44) - PAGE + 8, 1, 6) == b"\7"
    wide.close()
    with pytest.raises(OutOfAddresses, match="va_end"):
        AddressSpace(3, 1 << 48)


@pytest.mark.parametrize("write", [False, True])
def test_a_fault_tells_the_first_bad_page_and_why(space: AddressSpace, fd: int, write: bool) -> None:
    space.map(0x40000000, 4 * PAGE, fd, 0, False)
    space.map(0x40004000, 4 * PAGE, fd, 0, True)
    space.map(0x40009000, PAGE, fd, 0, True)
    with pytest.raises(Fault) as caught:
        space.require(0x40003FFF, 3 * PAGE if write else 6 * PAGE, 6, write=write)
    event = caught.value.event(1, 2)
    assert isinstance(event, MmuFault)
    assert (event.chid, event.tsg, event.access) == (1, 2, int(write))
    expected = (0x40003000, MmuFaultType.WRITE_RO_VIOLATION) if write else (0x40008000, MmuFaultType.INVALID_PTE)
    assert (event.address, event.fault_type) == expected
    with pytest.raises(Fault) as caught:
        space.require(0x40200000, 1, 6)
    assert caught.value.details["fault_type"] == MmuFaultType.INVALID_PDE
    with pytest.raises(Fault):
        space.require(space.span - 4, 8, 6)
    space.require(0x40200000, 0, 6)


def test_a_shader_window_hides_memory_from_kernels_only(space: AddressSpace, fd: int) -> None:
    space.map(0x40000000, 4 * PAGE, fd, 0, True)
    space.hide(0x40001000, 2 * PAGE)
    space.map(0x40002000 + 2 * PAGE, PAGE, fd, 0, False)
    space.hide(0x40004000, PAGE)
    seen = [space.flags[(0x40000000 >> 12) + page] & 3 for page in range(5)]
    assert seen == [3, 0, 0, 3, 0]
    space.require(0x40000000, 4 * PAGE, 6, write=True)
    space.require(0x40004000, PAGE, 6)
    space.unmap(0x40001000, PAGE)
    space.map(0x40001000, PAGE, fd, 0, True)
    assert space.flags[0x40001000 >> 12] & 3 == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 31), st.integers(1, 16), st.booleans()), max_size=25))
def test_flags_follow_any_sequence_of_maps_and_unmaps(steps: list[tuple[bool, int, int, bool]]) -> None:
    space, fd = AddressSpace(1), os.memfd_create("model")
    os.ftruncate(fd, 64 * PAGE)
    os.pwrite(fd, bytes(range(64)), 0)
    model = dict.fromkeys(range(64), 0)
    for do_map, first, count, writable in steps:
        pages = range(first, first + count)
        space.enter() if first % 3 == 0 else None
        if do_map and not any(model[p] for p in pages):
            space.map(first * PAGE, count * PAGE, fd, 0, writable)
            model |= dict.fromkeys(pages, 3 if writable else 1)
        elif not do_map:
            space.unmap(first * PAGE, count * PAGE)
            model |= dict.fromkeys(pages, 0)
        space.leave() if first % 3 == 0 else None
        for page, flags in model.items():
            assert space.flags[page] & 3 == flags
            assert (space.bad_page(page * PAGE, 1, True) is None) == (flags == 3)
    mapped = [p for p, flags in model.items() if flags]
    for page in mapped:
        space.read(page * PAGE, 8, 6)
    space.close()
    os.close(fd)


def test_host_pages_of_an_unmapped_buffer_go_when_nobody_is_inside(space: AddressSpace, fd: int) -> None:
    def held() -> int:
        with open("/proc/self/maps") as maps:
            return sum("/memfd:test" in line for line in maps)

    space.map(0x1000, PAGE, fd, 0, True)
    space.map(0x3000, PAGE, fd, 0, True)
    space.enter()
    space.unmap(0x1000, PAGE)
    space.unmap(0x3000, PAGE)
    assert space.bad_page(0x1000, 1, False) == 0x1000
    space.words[0x1000 >> 2] = 5  # an engine that was already past its check
    assert held() == 2
    space.map(0x3000, PAGE, fd, PAGE, True)
    space.leave()
    assert held() == 1
    assert space.read(0x3000, 4, 6) == bytes(4)


def test_mapping_at_finds_the_buffer_around_an_address(space: AddressSpace, fd: int) -> None:
    space.map(0x40000000, 4 * PAGE, fd, 0, True)
    space.map(0x30000000, PAGE, fd, 0, False)
    found = space.mapping_at(0x40003FFF)
    assert found is not None
    assert (found.va, found.size, found.writable) == (0x40000000, 4 * PAGE, True)
    assert space.mapping_at(0x40004000) is None
    assert space.mapping_at(0x2FFFFFFF) is None
    assert space.counts() == {"mappings": 2, "bytes": 5 * PAGE}
    space.unmap(0x40000000, 4 * PAGE)
    assert space.counts() == {"mappings": 1, "bytes": PAGE}


def test_a_buffer_unmapped_under_a_running_grid_faults() -> None:
    with Rig() as rig:
        channel, out = rig.channel().setup(), rig.buffer()
        channel.launch(rig.qmd(rig.program(SCRUB, "scrub"), rig.arguments(out.va, 0))).submit()
        assert rig.wait(lambda: out.u32() > 1000)
        rig.gpu.unmap(1, out.va, out.size)
        assert rig.wait(lambda: rig.of(FatalEvent))
        (event,) = rig.of(FatalEvent)
        assert isinstance(event, MmuFault)
        assert (event.address, event.fault_type) == (out.va, MmuFaultType.INVALID_PTE)


def test_a_buffer_mapped_in_place_of_another_is_seen_by_a_running_grid() -> None:
    with Rig() as rig:
        channel, old = rig.channel().setup(), rig.buffer()
        channel.launch(rig.qmd(rig.program(SCRUB, "scrub"), rig.arguments(old.va, 0))).submit()
        assert rig.wait(lambda: old.u32() > 1000)
        new = rig.buffer(va=old.va)
        assert rig.wait(lambda: new.u32() > 1000)
        seen = old.u32()
        time.sleep(0.01)
        assert old.u32() == seen
        assert not rig.of(FatalEvent)


def test_two_address_spaces_are_apart() -> None:
    with Rig() as rig:
        rig.gpu.vm_create(2)
        rig.gpu.tsg_create(2)
        here = rig.buffer(va=0x70000000)
        there = rig.buffer(va=0x70000000, vm=2)
        ring, userd = rig.buffer(vm=2), rig.buffer(vm=2)
        pushed: Buffer = rig.buffer(vm=2)
        rig.gpu.channel_create(7, 2, 2, 0, ring.va, 64, userd.fd)
        channel = ChannelRig(rig, 7, 0, ring, userd, 64)
        channel._pushed = pushed
        channel.release(0x70000000, 5).submit()
        assert rig.wait(lambda: there.u64() == 5)
        assert here.u64() == 0


def counts() -> tuple[int, int, list[str]]:
    """Open fds, maps, names of our threads."""
    with open("/proc/self/maps") as maps:
        names = [thread.name for thread in threading.enumerate() if thread.name.startswith("gpu-")]
        return len(os.listdir("/proc/self/fd")), len(maps.readlines()), names


def test_nothing_leaks() -> None:
    def cycle() -> None:
        with Rig() as rig:
            channel = rig.channel().setup()
            src, dst = rig.buffer(1 << 20), rig.buffer(1 << 20)
            assert channel.copy(src.va, dst.va, 1 << 20).run()
            rig.gpu.unmap(1, src.va, src.size)
            rig.gpu.channel_destroy(channel.chid)
            rig.gpu.tsg_destroy(1)
            rig.gpu.vm_destroy(1)

    for _ in range(5):
        cycle()
    before = counts()
    for _ in range(100):
        cycle()
    after = counts()
    assert (after[0], after[2]) == (before[0], [])
    assert after[1] <= before[1] + 8  # the allocator's own


def test_channels_of_one_gpu_leave_nothing_behind() -> None:
    with Rig() as rig:

        def cycle(vm: int) -> None:
            rig.gpu.vm_create(vm)
            rig.gpu.tsg_create(vm)
            ring, userd = rig.buffer(vm=vm), rig.buffer(vm=vm)
            rig.gpu.channel_create(7, vm, vm, 0, ring.va, 64, userd.fd)
            rig.gpu.object_ctx(7, 0xC7C0)
            rig.gpu.channel_destroy(7)
            rig.gpu.tsg_destroy(vm)
            rig.gpu.vm_destroy(vm)
            for buffer in rig._buffers[-2:]:
                buffer.mem.close()
                os.close(buffer.fd)
            del rig._buffers[-2:]

        for vm in range(2, 10):
            cycle(vm)
        before = counts()
        for vm in range(10, 210):
            cycle(vm)
        after = counts()
        assert (after[0], after[2]) == (before[0], ["gpu-host"])
        assert after[1] <= before[1] + 8


def test_unmapping_drops_what_mappings_have_in_its_range_and_no_more(space: AddressSpace, fd: int) -> None:
    for page in (1, 3, 5, 7, 12):
        space.map(page * PAGE, 2 * PAGE, fd, 0, True)
    space.unmap(4 * PAGE, 4 * PAGE)
    assert space.counts() == {"mappings": 4, "bytes": 6 * PAGE}
    kept = (1, 2, 3, 8, 12, 13)
    assert [space.mapping_at(page * PAGE) is not None for page in range(14)] == [p in kept for p in range(14)]
    space.unmap(0, PAGE)
    space.unmap(20 * PAGE, PAGE)
    assert space.counts()["mappings"] == 4


def test_thousands_of_buffers_come_and_go_quickly(space: AddressSpace, fd: int) -> None:
    start = time.process_time()
    for i in range(4000):
        space.map(0x10000000 + i * 2 * PAGE, PAGE, fd, 0, True)
    for i in range(4000):
        space.unmap(0x10000000 + (i * 7919 % 4000) * 2 * PAGE, PAGE)
    assert space.counts()["mappings"] == 0
    assert time.process_time() - start < 5  # CPU time: nothing scans all mappings each time


def test_sparse_pages_read_as_zero_and_drop_what_is_stored(space: AddressSpace) -> None:
    space.sparse(0x40000000, 16 * PAGE)
    assert space.read(0x40000000, 16 * PAGE, 6) == bytes(16 * PAGE)
    space.enter()
    space.write(0x40001000, b"hello", 6)
    space.leave()
    assert space.read(0x40001000, 5, 6) == bytes(5)
    space.write(0x40001000, b"hello", 6)
    assert space.read(0x40001000, 5, 6) == bytes(5)
    space.unmap(0x40000000, 16 * PAGE)
    with pytest.raises(Fault):
        space.read(0x40001000, 5, 6)


def test_a_buffer_in_a_sparse_area_keeps_its_bytes_and_leaves_zeros(space: AddressSpace, fd: int) -> None:
    space.sparse(0x40000000, 16 * PAGE)
    space.map(0x40002000, 2 * PAGE, fd, 0, True)
    space.map(0x40003000, PAGE, fd, 8 * PAGE, True)
    space.enter()
    space.write(0x40003000, b"hello", 6)
    space.leave()
    assert os.pread(fd, 5, 8 * PAGE) == space.read(0x40003000, 5, 6) == b"hello"
    space.sparse(0x40003000, PAGE)
    assert space.read(0x40003000, 5, 6) == bytes(5)
    assert os.pread(fd, 5, 8 * PAGE) == b"hello"
    space.unmap(0x40000000, 16 * PAGE)
    assert space.counts()["mappings"] == 0


def test_a_kernel_reads_zero_from_a_sparse_area() -> None:
    with Rig() as rig:
        rig.gpu.sparse(1, 0x40000000, 1 << 20)
        channel, bank = rig.channel().setup(), rig.arguments(0x40000100, 77)
        program, out = rig.program(STORE, "store"), rig.buffer()
        assert channel.launch(rig.qmd(program, bank)).run()
        assert channel.copy(0x40000100, out.va, 4).run()
        assert out.u32() == 0


def test_what_lies_beyond_an_address_space_is_accepted() -> None:
    with Rig() as rig:
        for va in (DEFAULT_SPAN, (1 << 48) + PAGE):
            buffer = rig.buffer(va=va)
            rig.gpu.unmap(1, va, buffer.size)
        straddling = rig.buffer(2 * PAGE, va=DEFAULT_SPAN - PAGE)
        rig.gpu.unmap(1, straddling.va, straddling.size)


SECOND_MAPPINGS = """
import os, threading
from tegrad.orin.l2 import L2
from tegrad.orin.memory import AddressSpace, Fault, HubClient
from tegrad.ptx.l2 import Mode

def mapped(space, va, fd, cached, meanwhile):
    views = space._map_views
    def between(mapping, fd):
        other = threading.Thread(target=meanwhile)
        other.start()
        other.join()
        views(mapping, fd)
    space._map_views = between
    space.map(va, PAGE, fd, 0, True, cached, "buffer")

def reads():
    try:
        first.read(2 * PAGE, 4, HubClient.HOST)
    except Fault:
        print("an MMU fault")

PAGE, l2, fd = 1 << 16, L2(1 << 20, Mode(0)), os.memfd_create("buffer")
os.ftruncate(fd, PAGE)
first, second = AddressSpace(1, l2=l2), AddressSpace(2, l2=l2)
first.map(PAGE, PAGE, fd, 0, True, True, "buffer")
first.read(PAGE, 4, HubClient.HOST)
mapped(second, PAGE, fd, True, l2.invalidate)
print("emptied")
mapped(first, 2 * PAGE, fd, False, reads)
"""


def test_another_engine_meets_a_mapping_that_is_only_being_made() -> None:
    """One that empties the L2 goes past it, one that accesses it has an MMU fault: neither takes the GPU down."""
    done = subprocess.run([sys.executable, "-c", SECOND_MAPPINGS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()) == (0, ["emptied", "an MMU fault"]), done.stderr
