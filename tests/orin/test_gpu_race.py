"""The mode that provokes races: programs that synchronise pass under every seed, and each classic mistake shows."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from gpu_programs import ADD_ONE
from gpu_rig import STORE, Rig
from qmd_fields import dependent_fields, release_fields

from tegrad.errors import TegradError
from tegrad.hw.classes import ComputeMethod, CopyMethod, HostMethod
from tegrad.hw.gpfifo import Subchannel, Userd
from tegrad.orin import copy_engine, grid
from tegrad.orin.board import BoardError
from tegrad.orin.connection import Connection
from tegrad.orin.events import FatalEvent
from tegrad.orin.race import Race
from tegrad.orin.wire import Message, Op

SEEDS = range(4)


def caught(mistake: Callable[[Rig], bool], seeds: int) -> bool:
    """Whether the outcome is wrong under one of so many seeds."""
    for seed in range(seeds):
        with Rig(race_seed=seed) as rig:
            wrong = not mistake(rig)
            assert not rig.of(FatalEvent)
        if wrong:
            return True
    return False


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("chip", ["agx-orin-64gb", "gh100"])
def test_a_program_that_waits_is_right_under_any_seed(chip: str, seed: int) -> None:
    with Rig(chip, race_seed=seed) as rig:
        channel, out, src = rig.channel().setup(), rig.buffer(), rig.buffer()
        add, store = rig.program(ADD_ONE, "add_one"), rig.program(STORE, "store")
        for i in range(10):
            bank = rig.arguments(out.va, i)
            add_qmd = rig.qmd(add, bank, at=0xA00)
            channel.launch(rig.qmd(store, bank)).method(0, HostMethod.WFI, 0).launch(add_qmd)
            channel.method(1, ComputeMethod.WAIT_FOR_IDLE, 0)
            channel.launch(rig.qmd(add, bank, at=0xC00, **dependent_fields(rig, add_qmd)))
            channel.copy(out.va, src.va, 4)
            assert channel.run()
            assert out.u32() == src.u32() == i + 3


@pytest.mark.parametrize("barrier", ["cwd_membar_type", "release0_membar_type"])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_barrier_orders_stores_before_the_release(barrier: str, seed: int) -> None:
    with Rig(race_seed=seed) as rig:
        channel, out = rig.channel().setup(), rig.buffer()
        program, bank = rig.program(STORE, "store"), rig.arguments()
        for i in range(1, 20):
            rig.put_arguments(bank, out.va, i)
            fields = release_fields(rig, 0, out.va + 64, i)
            channel.launch(rig.qmd(program, bank, **fields, **{barrier: 1})).submit()
            assert rig.wait(lambda i=i: out.u32(64) == i)
            assert out.u32() == i
            assert channel.run()


# -- the liberties: each scenario is wrong under some seed, and right under every one if it waits properly -----------


def _reuse_arguments(rig: Rig, proper: bool) -> bool:
    """Two launches through one constant bank; properly the first is waited for."""
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    qmd = rig.qmd(program, bank)
    channel.launch(qmd).submit()
    assert not proper or channel.run()
    rig.put_arguments(bank, out.va + 4, 2)
    assert channel.launch(qmd).run()
    return (out.u32(), out.u32(4)) == (1, 2)


def _signal_in_the_qmd(rig: Rig, proper: bool) -> bool:
    """A release written into the descriptor after it was submitted; properly before."""
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    fields = release_fields(rig, 0, out.va + 64, 1)
    channel.launch(rig.qmd(program, bank, **(fields if proper else {}))).submit()
    time.sleep(0.02)
    rig.qmd(program, bank, **fields)
    assert channel.run()
    return out.u32(64) == 1


def _next_qmd_in_its_place(rig: Rig, proper: bool) -> bool:
    """The next launch's descriptor in the place of one that was submitted; properly that one is over."""
    channel, out = rig.channel().setup(), rig.buffer()
    store, add, bank = rig.program(STORE, "store"), rig.program(ADD_ONE, "add_one"), rig.arguments(out.va, 10)
    channel.launch(rig.qmd(store, bank)).submit()
    assert not proper or channel.run()
    channel.launch(rig.qmd(add, bank))
    assert channel.run()
    return out.u32() == 11


def _prefetched_qmd(rig: Rig, proper: bool) -> bool:
    """A descriptor changed after it was prefetched; properly it is scheduled by an action that invalidates it."""
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank, other = rig.program(STORE, "store"), rig.arguments(out.va, 1), rig.arguments(out.va, 2)
    qmd = rig.qmd(program, bank)
    assert channel.launch(qmd, 8).run()
    bank.put(bytes(other.mem[:0x800]))
    changed = rig.qmd(program, other)
    bank.put(bytes(other.mem[changed - other.va : changed - other.va + rig.layout.size]), qmd - bank.va)
    rig.put_arguments(bank, out.va, 1)
    assert channel.launch(qmd, 10 if proper else 2).run()
    return out.u32() == 2


def _reuse_pushbuffer(rig: Rig, proper: bool) -> bool:
    """Command memory written again after the doorbell; properly after a wait."""
    channel, out = rig.channel(), rig.buffer()
    channel.release(out.va, 1).submit()
    assert not proper or rig.wait(lambda: out.u64() == 1)
    at = channel._at
    channel._at = 0
    channel.release(out.va + 64, 1).submit()
    channel._at = max(at, channel._at)
    assert channel.run()
    return (out.u64(), out.u64(64)) == (1, 1)


def _trust_gp_get(rig: Rig, proper: bool) -> bool:
    """Taking GP_GET == GP_PUT for the end of the work; properly a release tells."""
    channel, out = rig.channel().setup(), rig.buffer()
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1)))
    assert channel.run() if proper else channel.submit()
    assert rig.wait(lambda: channel.userd.u32(Userd.GP_GET) == channel.put)
    done = out.u32() == 1
    assert channel.run()
    return done


def _pushbuffer_release(rig: Rig, proper: bool) -> bool:
    """A pushbuffer release taken for the end of the grid; properly it waits for idle."""
    channel, out = rig.channel().setup(), rig.buffer()
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1)))
    channel.release(out.va + 64, 1, 1 | 1 << 24 | proper << 20).submit()
    assert rig.wait(lambda: out.u64(64) == 1)
    done = out.u32() == 1
    assert channel.run()
    return done


def _grids_in_a_row(rig: Rig, proper: bool) -> bool:
    """A grid that needs the one before it; properly with a wait for idle between them."""
    channel, out = rig.channel().setup(), rig.buffer()
    store, add, bank = rig.program(STORE, "store"), rig.program(ADD_ONE, "add_one"), rig.arguments(out.va, 10)
    channel.launch(rig.qmd(store, bank))
    if proper:
        channel.method(0, HostMethod.WFI, 0)
    assert channel.launch(rig.qmd(add, bank, at=0xA00)).run()
    return out.u32() == 11


def _qmd_release(rig: Rig, proper: bool) -> bool:
    """A release in the descriptor, taken for a sign that the grid's stores have arrived; properly with a membar."""
    channel, out = rig.channel().setup(), rig.buffer()
    fields = release_fields(rig, 0, out.va + 64, 1) | {"cwd_membar_type": int(proper)}
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1), **fields)).submit()
    assert rig.wait(lambda: out.u32(64) == 1)
    done = out.u32() == 1
    assert channel.run()
    return done


def _copy_after_a_grid_of_another_channel(rig: Rig, proper: bool) -> bool:
    """A copy of what a grid stores, in a channel of its own; properly it acquires what the grid's channel releases."""
    compute, copy, out = rig.channel().setup(), rig.channel().setup(), rig.buffer()
    compute.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 7)))
    compute.release(out.va + 128, 1).submit()
    if proper:
        copy.acquire(out.va + 128, 1)
    assert copy.copy(out.va, out.va + 64, 4).run()
    assert compute.run()
    return out.u32(64) == 7


def _grid_after_a_copy_of_another_channel(rig: Rig, proper: bool) -> bool:
    """The other way round: a grid adds to what a copy brings."""
    compute, copy, out = rig.channel().setup(), rig.channel().setup(), rig.buffer()
    qmd = rig.qmd(rig.program(ADD_ONE, "add_one"), rig.arguments(out.va, 0))  # before the copy is under way
    out.put64(41, 64)
    copy.copy(out.va + 64, out.va, 4).release(out.va + 128, 1).submit()
    if proper:
        compute.acquire(out.va + 128, 1)
    assert compute.launch(qmd).run()
    assert copy.run()
    return out.u32() == 42


def _pipelined_copies(rig: Rig, proper: bool) -> bool:
    """A copy of what the one before it brings; properly it is not pipelined (0x182), so it waits for that one."""
    channel, out = rig.channel().setup(), rig.buffer()
    out.put64(5)
    launch = 0x182 if proper else 0x181
    channel.copy(out.va, out.va + 64, 4, launch)
    assert channel.copy(out.va + 64, out.va + 128, 4, launch).run()
    return out.u32(128) == 5


def _copy_semaphore(rig: Rig, proper: bool) -> bool:
    """The copy engine's semaphore taken for the end of the copy; properly the copy flushes before it."""
    channel, out = rig.channel().setup(), rig.buffer()
    out.put64(5)
    channel.method(Subchannel.COPY, CopyMethod.SET_SEMAPHORE_A, out.va >> 32, out.va + 128 & 0xFFFFFFFF, 1)
    channel.copy(out.va, out.va + 64, 4, 0x182 | 1 << 3 | proper << 2).submit()
    assert rig.wait(lambda: out.u32(128) == 1)
    done = out.u32(64) == 5
    assert channel.run()
    return done


def _changed_constants(rig: Rig, proper: bool) -> bool:
    """Arguments changed between two launches; properly the constant caches are invalidated for the second."""
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    qmd = rig.qmd(program, bank, constant_buffer_invalidate_0=0)
    assert channel.launch(qmd).run()
    rig.put_arguments(bank, out.va, 2)
    if proper:
        channel.method(1, ComputeMethod.INVALIDATE_SHADER_CACHES_NO_WFI, 0x1000)
    assert channel.launch(qmd).run()
    return out.u32() == 2


def _relying_on_a_cache(rig: Rig, proper: bool) -> bool:
    """Arguments changed under a cache that may keep the old ones and need not; properly they lie elsewhere."""
    channel, out = rig.channel().setup(), rig.buffer()
    program, bank = rig.program(STORE, "store"), rig.arguments(out.va, 1)
    qmd = rig.qmd(program, bank, constant_buffer_invalidate_0=0)
    right = True
    for i in range(4):
        right &= bool(channel.launch(qmd).run()) and out.u32() == 1
        if not proper:
            rig.put_arguments(bank, out.va, i + 2)
    return right


def _changed_code(rig: Rig, proper: bool) -> bool:
    """Another program where one was; properly the instruction caches are invalidated before it runs."""
    channel, out = rig.channel().setup(), rig.buffer()
    first, second = rig.program(STORE, "store"), rig.program(ADD_ONE, "add_one")
    bank = rig.arguments(out.va, 41)
    qmd = rig.qmd(first, bank)
    assert channel.launch(qmd).run()
    one, two = (next(b for b in rig._buffers if b.va == va) for va in (first, second))
    image = bytearray(two.mem[: min(one.size, two.size)])
    struct.pack_into("<Q", image, image.index(b"\x7f.tegrad.ptx") + 24, first)
    one.put(bytes(image))
    if proper:
        channel.method(1, ComputeMethod.INVALIDATE_SHADER_CACHES_NO_WFI, 0x1)
    assert channel.launch(qmd).run()
    return out.u32() == 42


SCENARIOS: list[Callable[[Rig, bool], bool]] = [
    _reuse_arguments,
    _signal_in_the_qmd,
    _next_qmd_in_its_place,
    _prefetched_qmd,
    _reuse_pushbuffer,
    _trust_gp_get,
    _pushbuffer_release,
    _grids_in_a_row,
    _qmd_release,
    _copy_after_a_grid_of_another_channel,
    _grid_after_a_copy_of_another_channel,
    _pipelined_copies,
    _copy_semaphore,
    _changed_constants,
    _relying_on_a_cache,
    _changed_code,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__.strip("_"))
def test_a_missing_wait_shows_under_some_seed(scenario: Callable[[Rig, bool], bool]) -> None:
    assert caught(lambda rig: scenario(rig, False), 100)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda f: f.__name__.strip("_"))
def test_the_proper_wait_holds_under_every_seed(scenario: Callable[[Rig, bool], bool]) -> None:
    assert not caught(lambda rig: scenario(rig, True), 8)


BULK = """
.version 8.5
.target sm_90
.address_size 64
.visible .entry bulk(.param .u64 p, .param .u64 s)
{
    .reg .b64 %p, %s; .reg .b32 %x; .reg .pred %q; .shared .align 16 .b8 slot[16]; .shared .align 8 .b64 bar;
    ld.param.u64 %p, [p]; ld.param.u64 %s, [s];
    mbarrier.init.shared.b64 [bar], 1; st.shared.u32 [slot], 7; fence.proxy.async;
    mbarrier.arrive.expect_tx.shared.b64 _, [bar], 16;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [slot], [%s], 16, [bar];
    ld.shared.u32 %x, [slot]; st.global.u32 [%p], %x;
    wait: mbarrier.try_wait.parity.shared.b64 %q, [bar], 0; @!%q bra wait;
    ld.shared.u32 %x, [slot]; st.global.u32 [%p+4], %x;
    ret;
}
"""


def test_a_kernels_bulk_copy_is_there_early_or_late_but_after_its_wait() -> None:
    early = set()
    for seed in range(12):
        with Rig("gh100", race_seed=seed) as rig:
            channel, out, src = rig.channel().setup(), rig.buffer(), rig.buffer()
            src.put(struct.pack("<I", 9))
            channel.launch(rig.qmd(rig.program(BULK, "bulk"), rig.arguments(out.va, src.va), shared_memory_size=2048))
            assert channel.run()
            assert out.u32(4) == 9
            early.add(out.u32())
    assert early == {7, 9}


def test_the_same_seed_draws_alike() -> None:
    one, two, other = Race(5), Race(5), Race(6)
    draws = [[r.launch_delay() for _ in range(20)] for r in (one, two, other)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(("variable", "value"), [("TEGRAD_RACE", "x"), ("TEGRAD_L2", "back,front")])
def test_a_setting_that_means_nothing_keeps_a_board_from_starting_and_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(BoardError, match=f"did not start: {variable}="):
        Connection("agx-orin-64gb:1GiB").call(Message(Op.SYNC))


def test_the_environment_turns_the_mode_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEGRAD_RACE", raising=False)
    assert Race.from_environment() is None
    monkeypatch.setenv("TEGRAD_RACE", "5")
    race = Race.from_environment()
    assert race is not None
    assert race.launch_delay() == Race(5).launch_delay()
    monkeypatch.setenv("TEGRAD_RACE", "often")
    with pytest.raises(TegradError, match="whole number"):
        Race.from_environment()


@pytest.mark.parametrize("what", ["copy", "kernel"])
def test_a_seed_makes_what_is_launched_late(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    for module in (copy_engine, grid):
        monkeypatch.setattr(module, "time", SimpleNamespace(sleep=slept.append, monotonic=time.monotonic))
    with Rig(race_seed=3) as rig:
        channel, src, dst = rig.channel().setup(), rig.buffer(), rig.buffer()
        for _ in range(4):
            if what == "copy":
                channel.copy(src.va, dst.va, 8)
            else:
                channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(dst.va, 1)))
        assert channel.run()
        assert rig.wait(lambda: len(slept) >= 4)
        assert all(delay >= 0 for delay in slept)
        assert any(slept)
