"""Copies through staging memory, on a board whose memory stands for the host's and the GPU's own."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from boards import open_device
from tinygrad.device import BufferSpec

from tegrad.nv import copies, queues, waits
from tegrad.nv.copies import Movers, Plan, Staging
from tegrad.nv.device import Allocator
from tegrad.nv.queues import NVSignal
from tegrad.nv.spec import role_of

pytestmark = pytest.mark.board

AREA = 1 << 14


@pytest.fixture
def device(board: str) -> Any:
    return open_device()


@pytest.fixture
def movers(monkeypatch: pytest.MonkeyPatch) -> Movers:
    """Four threads, however many CPUs there are."""
    made = Movers(4)
    monkeypatch.setattr(copies, "_movers", made)
    return made


@pytest.fixture
def staging(device: Any) -> Iterator[Staging]:
    spec = BufferSpec(host=True, cpu_access=True)
    areas = [device.allocator.alloc(AREA, spec) for _ in range(3)]
    yield Staging(device, areas)
    device.synchronize()
    for area in areas:
        device.allocator.free(area, AREA, spec)


def planned(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> None:
    monkeypatch.setattr(copies, "plan", lambda size: plan)


@pytest.mark.parametrize(
    "plan",
    [Plan(AREA // 2, 1), Plan(AREA, 2), Plan(AREA, 4), Plan(AREA // 2, 1, True), Plan(AREA, 3, True)],
    ids=str,
)
@pytest.mark.parametrize("size", [1, AREA, AREA + 1, 3 * AREA, 11 * AREA + 5])
def test_what_is_copied_in_comes_out(
    staging: Staging, device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch, plan: Plan, size: int
) -> None:
    """More chunks than areas too, each of which is used again and again."""
    planned(monkeypatch, plan)
    buffer = device.allocator.alloc(size)
    try:
        for seed in range(3):
            data = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
            found = np.zeros(size, np.uint8)
            with device.lock:
                staging.copy_in(buffer, memoryview(data.tobytes()))  # which cannot be written to
                staging.copy_out(memoryview(found), buffer)
            assert np.array_equal(found, data)
    finally:
        device.allocator.free(buffer, size)


def test_an_area_is_not_written_to_while_a_slow_thread_still_reads_it(
    staging: Staging, device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first chunk's thread waits until all others have had their turn, as far as they may."""
    planned(monkeypatch, Plan(AREA, 4))
    size = 8 * AREA
    others = threading.Semaphore(0)
    real, first = copies.memmove, threading.Event()

    def memmove(to: int, start: int, count: int) -> None:
        if not first.is_set():
            first.set()
            for _ in range(2):  # as many as there are areas beside its own
                assert others.acquire(timeout=60)
            real(to, start, count)
        else:
            real(to, start, count)
            others.release()

    data = np.random.default_rng(1).integers(0, 256, size, dtype=np.uint8)
    buffer = device.allocator.alloc(size)
    with device.lock:
        staging.copy_in(buffer, memoryview(data))
        monkeypatch.setattr(copies, "memmove", memmove)
        found = np.zeros(size, np.uint8)
        staging.copy_out(memoryview(found), buffer)
    assert np.array_equal(found, data)
    device.allocator.free(buffer, size)


def test_a_copy_is_one_value_of_the_timeline_and_comes_after_what_was_submitted(
    staging: Staging, device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, Plan(AREA, 2))
    buffer = device.allocator.alloc(5 * AREA)
    before = device.timeline_value
    with device.lock:
        staging.copy_in(buffer, memoryview(bytes(5 * AREA)))
    assert device.timeline_value == before + 1
    device.synchronize()
    assert device.timeline_signal.value == before
    device.allocator.free(buffer, 5 * AREA)


@pytest.mark.parametrize("out", [False, True], ids=["in", "out"])
def test_a_copy_that_is_interrupted_leaves_no_thread_in_the_callers_memory(
    staging: Staging, device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch, out: bool
) -> None:
    planned(monkeypatch, Plan(AREA, 2))
    real, begun, ended = copies.memmove, threading.Semaphore(0), []

    def memmove(to: int, start: int, size: int) -> None:
        begun.release()
        time.sleep(0.3)
        real(to, start, size)
        ended.append(to)

    def interrupted(*_: Any) -> None:
        assert begun.acquire(timeout=60)
        raise KeyboardInterrupt

    monkeypatch.setattr(copies, "memmove", memmove)
    monkeypatch.setattr(copies._Move, "finish", interrupted)
    buffer, memory = device.allocator.alloc(3 * AREA), memoryview(bytearray(3 * AREA))
    copy, ends = (staging.copy_out, (memory, buffer)) if out else (staging.copy_in, (buffer, memory))
    with device.lock, pytest.raises(KeyboardInterrupt):
        copy(*ends)
    assert len(ended) == 3  # all that were given
    device.allocator.free(buffer, 3 * AREA)


def test_a_forked_process_starts_threads_of_its_own(movers: Movers) -> None:
    copies._forget()
    assert copies._movers is None
    assert copies.movers() is not movers


def test_more_memory_gets_more_threads() -> None:
    plans = [copies.plan(size) for size in (copies.SMALL_BYTES + 1, 16 << 20, 256 << 20)]
    assert 0 < plans[0].threads < plans[1].threads < plans[2].threads
    assert all(plan.chunk <= 2 << 20 for plan in plans)  # as much as tinygrad's staging buffers hold


class Apart(Allocator):
    """The allocator of a GPU with memory of its own, on a board that has none."""

    def _alloc(self, size: int, options: BufferSpec) -> Any:
        return self.dev.iface.alloc(size, role=role_of(options))


def test_tinygrads_own_copies_and_ours_know_of_each_other(
    device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share the staging buffers: ours wait for what tinygrad's still use, and tinygrad's for ours."""
    planned(monkeypatch, Plan(AREA, 2))
    made = Apart(device, batch_size=AREA, batch_cnt=3)
    buffer = made._alloc(5 * AREA, BufferSpec())
    data = np.random.default_rng(2).integers(0, 256, 5 * AREA, dtype=np.uint8)
    found = np.zeros_like(data)
    queue = device.hw_copy_queue_t().wait(device.timeline_signal, device.timeline_value - 1)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    made.b_timeline[1] = device.timeline_value - 1
    waited, wait = [], NVSignal.wait

    def seen(signal: NVSignal, value: int, timeout: int | None = None) -> None:
        waited.append(value)
        wait(signal, value, timeout)

    monkeypatch.setattr(NVSignal, "wait", seen)
    of_tinygrads = device.timeline_value - 1
    made._copyin(buffer, memoryview(data))
    assert of_tinygrads in waited
    assert made.b_timeline == [device.timeline_value - 1] * 3
    made._copyout(memoryview(found), buffer)
    assert np.array_equal(found, data)
    device.synchronize()
    for one in (buffer, *made.b):
        device.iface.free(one)


def slack() -> int:
    return int(waits._prctl(waits.PR_GET_TIMERSLACK, 0, 0, 0, 0))


def test_a_caller_who_moves_the_chunks_does_not_sleep_while_the_engine_is_soon_done(
    staging: Staging, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sleep of 0 takes 60 us, twice what the engine needs for 1 MB."""
    monkeypatch.setattr(copies, "PIECE_BYTES", AREA // 4)
    monkeypatch.setattr(queues, "SPIN_S", 60.0)
    buffer, found = device.allocator.alloc(AREA), bytearray(AREA)
    data = np.random.default_rng(2).bytes(AREA)
    with monkeypatch.context() as patch, device.lock:
        patch.setattr(copies.time, "sleep", None)
        for _ in range(5):  # more than there are areas
            staging.copy_in(buffer, memoryview(data))
        staging.copy_out(memoryview(found), buffer)
    assert found == data
    device.allocator.free(buffer, AREA)


@pytest.mark.parametrize("told", [-1, 0, 3_000_000_000 - (1 << 32)])
def test_a_timer_slack_that_cannot_be_put_back_stays(told: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than an int holds came back as 584 years."""
    asked: list[int] = []
    monkeypatch.setattr(waits, "_prctl", lambda what, *_: asked.append(what) or told)
    with waits.prompt_sleeps():
        pass
    assert asked == [waits.PR_GET_TIMERSLACK]


def test_sleeps_are_prompt_while_threads_move_chunks_and_as_they_were_after_it(
    staging: Staging, device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(monkeypatch, Plan(AREA, 2))
    before, seen = slack(), set()
    real = copies._Move.give

    def give(*given: Any) -> None:
        seen.add(slack())
        real(*given)

    monkeypatch.setattr(copies._Move, "give", give)
    buffer = device.allocator.alloc(5 * AREA)
    with device.lock:
        staging.copy_in(buffer, memoryview(bytes(5 * AREA)))
    assert (seen, slack()) == ({1}, before)
    monkeypatch.setattr(copies._Move, "give", None)
    with device.lock, pytest.raises(TypeError):
        staging.copy_in(buffer, memoryview(bytes(5 * AREA)))
    assert slack() == before
    device.synchronize()
    device.allocator.free(buffer, 5 * AREA)


@pytest.mark.parametrize("out", [False, True], ids=["in", "out"])
def test_the_caller_moves_its_share_beside_the_threads(
    staging: Staging, device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch, out: bool
) -> None:
    """In, it moves the first chunk, for which the engine waits; out, the one that arrives last of each round."""
    planned(monkeypatch, Plan(AREA, 2, caller=True))
    real, moved = copies.memmove, {}
    base: list[int] = []

    def memmove(to: int, start: int, size: int) -> None:
        chunk = ((to if out else start) - base[0]) // AREA
        moved[chunk] = threading.current_thread() is threading.main_thread()
        real(to, start, size)

    buffer, memory = device.allocator.alloc(6 * AREA), memoryview(bytearray(6 * AREA))
    base.append(copies._address(memory))
    monkeypatch.setattr(copies, "memmove", memmove)
    with device.lock:
        staging.copy_out(memory, buffer) if out else staging.copy_in(buffer, memory)
    own = {2, 5} if out else {0, 3}
    assert moved == {chunk: chunk in own for chunk in range(6)}
    device.synchronize()
    device.allocator.free(buffer, 6 * AREA)


@pytest.fixture
def one_area(device: Any) -> Iterator[Staging]:
    """Staging of an area that takes small copies of all sizes."""
    spec = BufferSpec(host=True, cpu_access=True)
    area = device.allocator.alloc(copies.SMALL_BYTES, spec)
    yield Staging(device, [area])
    device.synchronize()
    device.allocator.free(area, copies.SMALL_BYTES, spec)


@pytest.mark.parametrize("slow", ["thread", "caller"])
@pytest.mark.parametrize("size", [copies.HELPED_BYTES - 1, copies.HELPED_BYTES, copies.HELPED_BYTES + 1, copies.MB])
def test_a_small_copy_is_right_whoever_is_slow(
    one_area: Staging, device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch, size: int, slow: str
) -> None:
    """Each copy's bytes are others, so that a piece that goes out before it was moved shows."""
    real, caller = copies.memmove, threading.current_thread()

    def memmove(to: int, start: int, count: int) -> None:
        if (threading.current_thread() is caller) == (slow == "caller"):
            time.sleep(0.02)
        real(to, start, count)

    monkeypatch.setattr(copies, "memmove", memmove)
    buffer = device.allocator.alloc(size)
    for seed in range(3):
        data, found = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8), np.zeros(size, np.uint8)
        with device.lock:
            one_area.copy_in(buffer, memoryview(data))
            one_area.copy_out(memoryview(found), buffer)
        assert np.array_equal(found, data)
    device.allocator.free(buffer, size)


@pytest.mark.parametrize("after", range(3))
def test_the_engine_does_not_wait_for_ever_for_a_small_copy_that_is_interrupted(
    one_area: Staging, device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """Whichever of the caller's moves it is."""
    caller, calls, real = threading.current_thread(), [], copies.memmove

    def memmove(to: int, start: int, count: int) -> None:
        if threading.current_thread() is caller:
            calls.append(to)
            if len(calls) > after:
                raise KeyboardInterrupt
        real(to, start, count)

    buffer = device.allocator.alloc(copies.MB)
    data, found = np.full(copies.MB, 7, np.uint8), np.zeros(copies.MB, np.uint8)
    with monkeypatch.context() as patched, device.lock:
        patched.setattr(copies, "memmove", memmove)
        if after < 2:  # the caller's pieces
            with pytest.raises(KeyboardInterrupt):
                one_area.copy_in(buffer, memoryview(data))
        else:
            one_area.copy_in(buffer, memoryview(data))
    device.synchronize()
    with device.lock:
        one_area.copy_in(buffer, memoryview(data))
        one_area.copy_out(memoryview(found), buffer)
    assert np.array_equal(found, data)
    device.allocator.free(buffer, copies.MB)


class Cycle:
    """What only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("size", [copies.HELPED_BYTES, 3 * copies.MB], ids=["gated", "planned"])
@pytest.mark.parametrize("whose", ["caller", "thread"])
def test_nothing_is_collected_while_a_copy_is_under_way(
    device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch, size: int, whose: str
) -> None:
    """A program that is collected has its memory given back, which waits for the GPU and takes the device's lock.

    The caller's own copy would then wait for its own rest, and a thread of it for the caller, who waits for the thread.
    """
    real, caller = copies.memmove, threading.current_thread()
    under_way, freed, thresholds = False, list[bool](), gc.get_threshold()

    def memmove(to: int, start: int, count: int) -> None:
        if (threading.current_thread() is caller) == (whose == "caller"):
            weakref.finalize(Cycle(), lambda: freed.append(under_way))
            gc.set_threshold(1)
            _ = [[] for _ in range(200)]  # enough for a collection
            gc.set_threshold(*thresholds)
        real(to, start, count)

    monkeypatch.setattr(copies, "memmove", memmove)
    planned(monkeypatch, Plan(copies.MB, 2, caller=True))
    made = Apart(device, batch_size=copies.MB, batch_cnt=3)
    buffer = made._alloc(size, BufferSpec())
    for copy in (made._copyin, lambda to, data: made._copyout(data, to)):
        under_way = True
        copy(buffer, memoryview(bytearray(size)))
        under_way = False
    gc.collect()
    assert gc.isenabled()
    assert freed
    assert not any(freed)
    device.synchronize()
    for one in (buffer, *made.b):
        device.iface.free(one)


def test_collections_go_on_when_the_last_copy_of_several_ends() -> None:
    copies.uncollected.begin(1)
    copies.uncollected.begin(2)
    copies.uncollected.end(2)
    copies.uncollected.end(2)
    assert not gc.isenabled()
    copies.uncollected.end(1)
    assert gc.isenabled()
    gc.disable()
    try:
        copies.uncollected.begin(1)
        copies.uncollected.end(1)
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()


def test_a_child_process_collects_though_its_parent_was_at_a_copy() -> None:
    copies.uncollected.begin(1)
    child = os.fork()
    if not child:
        os._exit(0 if gc.isenabled() else 1)
    copies.uncollected.end(1)
    assert os.waitpid(child, 0)[1] == 0


# ---- interrupts


def test_a_copy_may_be_interrupted_anywhere(device: Any, movers: Movers, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each of the first lines that it comes by, and at fewer of those after; the next copy is right then."""
    planned(monkeypatch, Plan(copies.HELPED_BYTES, 2, caller=True))
    made = Apart(device, batch_size=copies.MB, batch_cnt=3)
    sizes = (copies.HELPED_BYTES, copies.MB + 1)
    buffer = made._alloc(max(sizes), BufferSpec())
    data = {size: np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8) for size in sizes}
    for size, out in ((size, out) for size in sizes for out in (False, True)):
        line = ended = 0
        while not ended:
            line += 1 + line // 20
            try:
                with interrupted_at(line):
                    given = memoryview(bytearray(size))
                    made._copyout(given, buffer) if out else made._copyin(buffer, given)
                ended = 1
            except KeyboardInterrupt:
                pass
            found = np.zeros(size, np.uint8)
            made._copyin(buffer, memoryview(data[size]))
            made._copyout(memoryview(found), buffer)
            assert np.array_equal(found, data[size]), (size, out, line)
            assert gc.isenabled()
        assert line > 20
    device.synchronize()
    for one in (buffer, *made.b):
        device.iface.free(one)


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """KeyboardInterrupt at the so many'th line that is run of nv/copies.py.

    But for where a lock is left by a `with`: Python looks for signals after calls, a trace sees the line itself.
    """
    left, apart = line, [one.__code__ for one in (copies.Uncollected.begin, copies.Uncollected.end)]

    def trace(frame: Any, event: str, what: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != copies.__file__ or frame.f_code in apart:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def test_memory_that_cannot_be_written_to_is_no_end_of_a_copy(staging: Staging, device: Any, movers: Movers) -> None:
    buffer, memory = device.allocator.alloc(4), bytes(4)
    with device.lock:
        staging.copy_in(buffer, memoryview(b"abcd"))
        with pytest.raises(TypeError, match="read-only"):
            staging.copy_out(memoryview(memory), buffer)
    assert memory == bytes(4)
    device.allocator.free(buffer, 4)


def test_after_a_read_that_failed_the_staging_buffers_are_used_again(device: Any, movers: Movers) -> None:
    class Disk:
        """Fails when a buffer was taken for it."""

        allocator: Any = None

        def _copyout_sharded(self, source: Any, size: int, take: Any, **how: Any) -> Iterator[Any]:
            assert take() is not None
            raise OSError("the disk is gone")
            yield

    class Source:
        device = Disk()

    Source.device.allocator = Source.device
    made = Apart(device, batch_size=AREA, batch_cnt=3)
    buffer = made._alloc(AREA, BufferSpec())
    with pytest.raises(OSError, match="the disk is gone"):
        made.copy_from_disk(buffer, Source(), AREA)
    assert max(made.b_timeline) < device.timeline_value
    found = bytearray(AREA)
    made._copyin(buffer, memoryview(bytes(range(256)) * (AREA // 256)))
    made._copyout(memoryview(found), buffer)
    assert found == bytes(range(256)) * (AREA // 256)
    device.synchronize()
    for one in (buffer, *made.b):
        device.iface.free(one)
