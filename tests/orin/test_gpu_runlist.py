"""Which TSG's grids are on the engine: time slices, preemption by mode, and switches that do not happen."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from gpu_programs import SPIN
from gpu_rig import STORE, ChannelRig, Rig

from tegrad.orin.events import ContextSwitchTimeout, FatalEvent
from tegrad.orin.runlist import (
    HIGH,
    LOW,
    MEDIUM,
    STARVED_FACTOR,
    TIMEOUT_PERIOD_S,
    Patience,
    Preemption,
    Runlist,
    Tsg,
    order,
)
from tegrad.ptx import AbortFlag

WFI, CTA, CILP = 1, 2, 4


@pytest.fixture
def orin() -> Iterator[Rig]:
    with Rig() as rig:
        rig.gpu.tsg_create(2)
        yield rig


def spinning(rig: Rig, tsg: int = 1, *, mode: int = WFI, grid: int = 1) -> tuple[ChannelRig, Any]:
    """A channel whose grid runs until its gate's first word is set."""
    rig.gpu.tsg_preemption(tsg, mode)
    channel, gate = rig.channel(tsg=tsg).setup(), rig.buffer()
    qmd = rig.qmd(rig.program(SPIN, "spin"), rig.arguments(gate.va, 0), grid=(grid, 1, 1))
    channel.launch(qmd).release(gate.va + 128, 1).submit()
    assert rig.wait(lambda: gate.u32(64))
    return channel, gate


def storing(rig: Rig, tsg: int = 2) -> tuple[ChannelRig, Any]:
    """A channel that has launched a grid which stores 1."""
    channel, out = rig.channel(tsg=tsg).setup(), rig.buffer()
    channel.launch(rig.qmd(rig.program(STORE, "store"), rig.arguments(out.va, 1))).submit()
    return channel, out


def test_a_grid_that_can_be_preempted_does_not_starve_another_group(orin: Rig) -> None:
    _, gate = spinning(orin, mode=CILP)
    _, out = storing(orin)
    assert orin.wait(lambda: out.u32() == 1)
    seen = gate.u32(64)
    assert orin.wait(lambda: gate.u32(64) > seen)  # and it goes on
    gate.put64(1)
    assert orin.wait(lambda: gate.u32(128) == 1)
    assert not orin.of(FatalEvent)


def test_two_endless_grids_take_turns(orin: Rig) -> None:
    """Each gets on again and again, and never while the other does."""
    _, one = spinning(orin, 1, mode=CILP)
    _, two = spinning(orin, 2, mode=CILP)
    for _ in range(3):
        before = one.u32(64), two.u32(64)
        assert orin.wait(lambda: one.u32(64) > before[0] and two.u32(64) > before[1])  # noqa: B023
    assert not orin.of(ContextSwitchTimeout)


def test_a_grid_that_cannot_be_preempted_keeps_the_engine_and_that_is_told(orin: Rig) -> None:
    _, gate = spinning(orin, mode=WFI)
    _, out = storing(orin)
    assert orin.wait(lambda: len(orin.of(ContextSwitchTimeout)) >= 2)
    assert {event.tsg for event in orin.of(ContextSwitchTimeout)} == {1}
    assert out.u32() == 0
    gate.put64(1)
    assert orin.wait(lambda: out.u32() == 1)


def test_alone_a_grid_may_run_for_ever(orin: Rig) -> None:
    _, gate = spinning(orin, mode=WFI)
    assert not orin.wait(lambda: orin.of(ContextSwitchTimeout), 0.4)
    gate.put64(1)


def test_between_ctas_the_ones_that_have_begun_keep_the_engine(orin: Rig) -> None:
    _, gate = spinning(orin, mode=CTA, grid=4)
    _, out = storing(orin)
    assert orin.wait(lambda: orin.of(ContextSwitchTimeout))
    assert out.u32() == 0
    gate.put64(1)
    assert orin.wait(lambda: out.u32() == 1 and gate.u32(128) == 1)


def test_groups_of_one_channel_each_do_not_wait_for_each_others_host_methods(orin: Rig) -> None:
    _, gate = spinning(orin, mode=WFI)
    assert orin.channel(tsg=2).run()
    gate.put64(1)


def test_channels_of_one_group_run_side_by_side(orin: Rig) -> None:
    _, gate = spinning(orin, mode=WFI)
    _, out = storing(orin, tsg=1)
    assert orin.wait(lambda: out.u32() == 1)
    gate.put64(1)


@pytest.mark.parametrize(("mode", "gives_way"), [(WFI, False), (CTA, False), (CILP, True)])
def test_preempt_tells_whether_the_grid_gave_way(orin: Rig, mode: int, gives_way: bool) -> None:
    _, gate = spinning(orin, mode=mode)
    assert orin.gpu.tsg_preempt(1) is gives_way
    seen = gate.u32(64)
    assert orin.wait(lambda: gate.u32(64) > seen)
    gate.put64(1)
    assert orin.wait(lambda: gate.u32(128) == 1)


def test_a_disabled_group_that_was_preempted_stays_off_until_it_is_enabled(orin: Rig) -> None:
    _, gate = spinning(orin, mode=CILP)
    orin.gpu.tsg_disable(1)
    assert orin.gpu.tsg_preempt(1)
    seen = gate.u32(64)
    time.sleep(0.02)
    assert gate.u32(64) == seen
    orin.gpu.tsg_enable(1)
    assert orin.wait(lambda: gate.u32(64) > seen)
    gate.put64(1)


def test_a_disabled_group_runs_on_until_its_time_slice_is_over(orin: Rig) -> None:
    _, gate = spinning(orin, mode=CILP)
    orin.gpu.tsg_disable(1)
    seen = gate.u32(64)
    assert orin.wait(lambda: gate.u32(64) > seen)
    channel, out = storing(orin)
    assert orin.wait(lambda: out.u32() == 1)
    seen = gate.u32(64)
    time.sleep(0.02)
    assert gate.u32(64) == seen
    assert channel.run()


def test_channels_are_enabled_one_by_one(orin: Rig) -> None:
    one, two = orin.channel(), orin.channel()
    orin.gpu.tsg_disable(1)
    orin.gpu.channel_enable(two.chid, True)
    assert two.run()
    assert not one.run(0.02)
    orin.gpu.channel_enable(one.chid, True)
    assert orin.wait(lambda: one.fence.u64() == 1)


def test_a_group_that_is_aborted_leaves_the_engine_to_others(orin: Rig) -> None:
    spinning(orin, mode=WFI)
    _, out = storing(orin)
    orin.gpu.tsg_abort(1)
    assert orin.wait(lambda: out.u32() == 1)
    assert not orin.of(FatalEvent)


def test_closing_a_channel_in_the_middle_of_a_grid_leaves_its_sisters_alone(orin: Rig) -> None:
    channel, gate = spinning(orin, mode=CILP)
    sister = orin.channel()
    assert orin.gpu.channel_destroy(channel.chid) is False
    seen = gate.u32(64)
    assert sister.run()
    assert gate.u32(64) == seen


def test_busy_is_a_channel_whose_work_hangs_in_the_host(orin: Rig) -> None:
    waits, idle, gate = orin.channel(), orin.channel(), orin.buffer()
    assert idle.run()
    waits.acquire(gate.va, 1).submit()
    assert orin.wait(lambda: orin.gpu.channel_busy(waits.chid))
    assert not orin.gpu.channel_busy(idle.chid)
    gate.put64(1)
    assert orin.wait(lambda: not orin.gpu.channel_busy(waits.chid))


# ---- the order -------------------------------------------------------------------------------------------------------


def group(number: int, level: int, *, timeslice: float = 0.001, mode: Preemption = Preemption.WFI) -> Tsg:
    made = Tsg(number, level=level, timeslice=timeslice, preemption=mode)
    made.channels[0] = SimpleNamespace(enabled=True)  # type: ignore[assignment]
    return made


def test_a_keeper_that_comes_late_finds_first_that_the_grids_gave_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kept the board's thread from the CPU for longer than a period has kept no TSG on the engine."""
    groups = [group(1, LOW), group(2, LOW)]
    groups[0].preemption = Preemption.CILP
    told: list[Tsg] = []
    runlist = Runlist(lambda: groups, told.append)
    stopping: Any = SimpleNamespace(is_set=False, running=1, pause=lambda **_: None, resume=lambda: None)
    real = runlist._lock.wait

    def late(seconds: float | None = None) -> bool:
        if threading.current_thread().name == "gpu-runlist" and stopping.running and runlist._leaving:
            stopping.running = 0
            time.sleep(STARVED_FACTOR * TIMEOUT_PERIOD_S + 0.05)
        return real(seconds)

    monkeypatch.setattr(runlist._lock, "wait", late)
    with runlist.grid(groups[0], stopping), runlist.grid(groups[1], AbortFlag()) as came:
        assert came
    assert told == []
    runlist.close()


def test_a_grid_that_ended_while_it_was_asked_to_give_way_does_not_stop_the_next_of_its_channel() -> None:
    """The flag is the channel's, and nobody was left to take the wish back: its next grid waited for ever."""
    groups = [group(1, LOW), group(2, LOW)]
    groups[0].preemption = Preemption.CILP
    runlist = Runlist(lambda: groups, lambda tsg: None)
    paused = threading.Event()
    flag: Any = SimpleNamespace(is_set=False, running=1, pause=lambda **_: paused.set(), resume=paused.clear)
    other = threading.Thread(target=lambda: _once(runlist, groups[1]), daemon=True)
    with runlist.grid(groups[0], flag):
        other.start()
        assert paused.wait(20)
    other.join(20)
    with runlist.grid(groups[0], flag) as came:
        assert came
        assert not paused.is_set()
    runlist.close()


def _once(runlist: Runlist, tsg: Tsg) -> None:
    with runlist.grid(tsg, AbortFlag()):
        pass


def test_time_to_give_way_counts_where_the_board_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: now[0], process_time=lambda: now[1])
    monkeypatch.setattr("tegrad.orin.runlist.time", clock)
    over = []
    for passed, computed in ((0.09, 0.2), (0.11, 0.2), (0.11, 0.01), (0.39, 0.01), (0.41, 0.01)):
        now = [5.0, 2.0]
        patience = Patience(0.1)
        now = [5.0 + passed, 2.0 + computed]
        over.append(patience.over)
    assert over == [False, True, False, False, True]


def test_higher_levels_stand_between_the_lower_ones() -> None:
    groups = [group(1, LOW), group(2, LOW), group(3, MEDIUM), group(4, HIGH)]
    assert [g.id for g in order(groups)] == [4, 3, 4, 1, 4, 3, 4, 2]
    assert [g.id for g in order(groups[2:])] == [4, 3]
    assert [g.id for g in order(groups[3:])] == [4]
    assert order([]) == []


def test_levels_and_time_slices_share_the_engine_out() -> None:
    """Grids of four groups queue up for ever; who had the engine how often follows the order."""
    groups = [group(1, LOW), group(2, LOW), group(3, HIGH)]
    runlist = Runlist(lambda: groups, lambda tsg: None)
    stop, turns = threading.Event(), []

    def run(tsg: Tsg) -> None:
        flag = AbortFlag()
        while not stop.is_set():
            with runlist.grid(tsg, flag):
                if not turns or turns[-1] != tsg.id:
                    turns.append(tsg.id)
                time.sleep(0.002)

    threads = [threading.Thread(target=run, args=(tsg,), daemon=True) for tsg in groups for _ in range(2)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while len(turns) < 60 and time.monotonic() < deadline:
        time.sleep(0.005)
    stop.set()
    for thread in threads:
        thread.join(20)
    settled = turns[20:60]
    assert settled.count(3) > settled.count(1) > 0
    assert settled.count(2) > 0
    runlist.close()


def test_a_grid_that_has_not_come_yet_does_not_run() -> None:
    """Its channel still reads its program, or compiles it, and goes without its group's end."""
    runlist = Runlist(list, lambda tsg: None)
    assert runlist.off(AbortFlag())


def test_a_group_is_looked_at_while_it_gets_another_channel() -> None:
    class Channel:
        @property
        def enabled(self) -> bool:
            tsg.channels[len(tsg.channels)] = Channel()  # type: ignore[assignment]
            return False

    tsg = Tsg(1)
    tsg.channels[0] = Channel()  # type: ignore[assignment]
    assert not tsg.enabled
