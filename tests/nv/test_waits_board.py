"""Waits on the board: the CPU sleeps while the GPU works, and wakes for its end, for a fault and for Ctrl-C."""

import errno
import signal as signals
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from boards import use_board
from failing import failing
from kernels import program, words

from tegrad.hw.faults import NotifierCode
from tegrad.nv import waits
from tegrad.nv.faults import DeviceFault, WaitTimeout
from tegrad.nv.queues import NVComputeQueue, NVCopyQueue
from tegrad.orin.client import board_inject
from tegrad.orin.inject import Injection
from tegrad.uapi import constants
from tegrad.uapi.structs import GetUserSyncpoint

pytestmark = pytest.mark.board

MISSING = {
    "FenceWaker": {},
    "InterruptWaker": {"open /dev/host1x-fence": errno.ENOENT},
    "Clock": {"CHANNEL_GET_USER_SYNCPOINT": errno.ENOMEM, "CHANNEL_WAIT": errno.ENOTTY},
}
"""How the CPU sleeps, by what the driver lacks."""
ASLEEP = 0.12
"""A process that sleeps computes less than this share of its time; one that spins, more, whoever else computes."""
LONG_S = 60.0
"""So long that a test which waits for it is stuck."""


@contextmanager
def device_that_sleeps_by(kind: str) -> Iterator[Any]:
    from tinygrad import Device

    with use_board("agx-orin-64gb:4GiB"), failing(lambda call: MISSING[kind].get(call.name, 0)):
        device = Device["NV"]
        assert {type(fifo.waker).__name__ for fifo in (device.compute_gpfifo, device.dma_gpfifo)} == {kind}
        yield device
        device.close()


def always(ioctl: str, **strike: Any) -> Injection:
    return Injection(ioctl, probability=1, times=0, **strike)


NO_ADDRESS = always("CHANNEL_GET_USER_SYNCPOINT", answer={"gpu_va": 0})
NEVER_MOVES = always("CHANNEL_GET_USER_SYNCPOINT", answer={"syncpoint_id": 900, "syncpoint_max": 0})
ALWAYS_REACHED = always("CHANNEL_GET_USER_SYNCPOINT", answer={"syncpoint_max": (1 << 32) - 1000})
NO_WAITING = always("CHANNEL_WAIT", errno=errno.ENOTTY)


@pytest.mark.parametrize(
    ("rules", "kind"),
    [
        ([NO_ADDRESS], "InterruptWaker"),
        ([NEVER_MOVES], "InterruptWaker"),
        ([ALWAYS_REACHED], "InterruptWaker"),
        ([always("HOST1X_CREATE_FENCE", errno=errno.EINVAL)], "InterruptWaker"),
        ([NO_ADDRESS, NO_WAITING], "Clock"),
        ([NEVER_MOVES, NO_WAITING], "Clock"),
    ],
)
def test_a_syncpoint_that_tells_nothing_is_not_slept_on(rules: list[Injection], kind: str) -> None:
    from tinygrad import Device

    with use_board("agx-orin-64gb:4GiB") as spec:
        board_inject(spec, rules)
        try:
            device = Device["NV"]
        finally:
            board_inject(spec, [])
        assert {type(fifo.waker).__name__ for fifo in (device.compute_gpfifo, device.dma_gpfifo)} == {kind}
        assert len(device.compute_gpfifo.release(1)) == 6 + len(device.compute_gpfifo.waker.commands)
        buffer, add = device.allocator.alloc(4096), program(device, "add")
        add(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(7,))
        device.synchronize()
        assert words(buffer) == [7]


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
def test_a_release_to_a_syncpoint_without_an_address_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinygrad import Device

    def open_and_work() -> None:
        program(Device["NV"], "add")(Device["NV"].allocator.alloc(4096), vals=(7,))
        Device["NV"].synchronize()

    monkeypatch.setattr(waits.FenceWaker, "works", lambda self, done: True)
    with use_board("agx-orin-64gb:4GiB") as spec:
        board_inject(spec, [NO_ADDRESS])
        try:
            with pytest.raises(DeviceFault):
                open_and_work()
        finally:
            board_inject(spec, [])


def test_a_fence_is_not_slept_on_before_an_increment_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def poll(self: Any, number: int, ms: int) -> bool:
        asked.append(number)
        return number <= 3

    monkeypatch.setattr(waits.FenceWaker, "_poll", poll)
    waker = waits.FenceWaker(None, 0, GetUserSyncpoint(gpu_va=0x1000))  # type: ignore[arg-type]
    assert waker.works(0)
    assert not waker.sleep(1, 1.0)
    assert asked == [0]
    assert waker.works(3)
    assert waker.sleep(4, 1.0)
    assert asked == [0, 3, 4, 4]


@pytest.mark.parametrize(
    ("refusals", "granted"),
    [(0, "NVGPU_COMPUTE_PREEMPTION_MODE_CILP"), (1, "NVGPU_COMPUTE_PREEMPTION_MODE_CTA"), (2, "")],
)
def test_a_refused_preemption_mode_gives_way_to_the_next(refusals: int, granted: str) -> None:
    from tinygrad import Device

    with use_board("agx-orin-64gb:4GiB") as spec:
        if refusals:
            rule = Injection("CHANNEL_SET_PREEMPTION_MODE", errno=errno.EINVAL, probability=1, times=refusals)
            board_inject(spec, [rule])
        device = Device["NV"]
        assert device.iface.preemption == (getattr(constants, granted) if granted else 0)
        buffer, add = device.allocator.alloc(4096), program(device, "add")
        add(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(7,))
        device.synchronize()
        assert words(buffer) == [7]
        board_inject(spec, [])


@pytest.fixture(params=["FenceWaker", "InterruptWaker"])
def sleeper(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device whose waits the driver wakes."""
    with device_that_sleeps_by(request.param) as device:
        yield device


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep for ever unless woken."""
    monkeypatch.setattr(waits, "DRIVER_CHECK_S", LONG_S)


def behind_a_gate(device: Any, queue_type: Any = NVComputeQueue) -> Any:
    """Hold the GPU back until the signal that is returned becomes 1; later submissions wait behind it."""
    gate = device.new_signal(value=0)
    queue = queue_type().wait(device.timeline_signal, device.timeline_value - 1).wait(gate, 1)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    return gate


def while_asleep(device: Any, act: Callable[[], object], sleeps: list[int]) -> threading.Thread:
    """Do something once the waiter has gone to sleep."""
    for fifo in (device.compute_gpfifo, device.dma_gpfifo):
        real = fifo.waker.sleep

        def sleep(number: int, seconds: float, real: Any = real) -> bool:
            sleeps.append(number)
            return bool(real(number, seconds))

        fifo.waker.sleep = sleep

    def actor() -> None:
        while not sleeps:
            time.sleep(0.001)
        time.sleep(0.1)
        act()

    thread = threading.Thread(target=actor, daemon=True)
    thread.start()
    return thread


def opened_while_asleep(device: Any, gate: Any, sleeps: list[int]) -> threading.Thread:
    """Open the gate once the waiter has gone to sleep."""
    return while_asleep(device, lambda: setattr(gate, "value", 1), sleeps)


@pytest.mark.parametrize("queue_type", [NVComputeQueue, NVCopyQueue])
def test_the_end_of_the_work_wakes_the_sleeper(sleeper: Any, endless: None, queue_type: Any) -> None:
    start, sleeps = time.monotonic(), []  # type: ignore[var-annotated]
    opener = opened_while_asleep(sleeper, behind_a_gate(sleeper, queue_type), sleeps)
    sleeper.synchronize()
    opener.join(10)
    assert time.monotonic() - start < LONG_S
    assert 1 <= len(sleeps) < 10


def test_a_sleeper_wakes_for_what_it_waits_for_and_not_for_all_that_follows(sleeper: Any, endless: None) -> None:
    first, value = behind_a_gate(sleeper), sleeper.timeline_value - 1
    second = behind_a_gate(sleeper)
    opener = opened_while_asleep(sleeper, first, [])
    sleeper.timeline_signal.wait(value)
    assert sleeper.compute_gpfifo.done < sleeper.compute_gpfifo.submissions
    second.value = 1
    opener.join(10)
    sleeper.synchronize()


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
def test_a_fault_wakes_the_sleeper(sleeper: Any, endless: None) -> None:
    buffer, wild = sleeper.allocator.alloc(4096), program(sleeper, "wild")
    gate, start = behind_a_gate(sleeper), time.monotonic()
    wild(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(700,))
    opened_while_asleep(sleeper, gate, [])
    with pytest.raises(DeviceFault) as caught:
        sleeper.synchronize()
    assert caught.value.code == NotifierCode.FIFO_ERROR_MMU_ERR_FLT
    assert time.monotonic() - start < LONG_S


def test_ctrl_c_ends_the_sleep_and_the_device_goes_on(sleeper: Any) -> None:
    gate, value = behind_a_gate(sleeper), sleeper.timeline_value - 1
    main = threading.main_thread().ident
    assert main is not None
    presser = while_asleep(sleeper, lambda: signals.pthread_kill(main, signals.SIGINT), [])
    with pytest.raises(KeyboardInterrupt):
        sleeper.synchronize()
    presser.join()
    assert sleeper.timeline_signal.value < value
    gate.value = 1
    sleeper.synchronize()
    buffer, add = sleeper.allocator.alloc(4096), program(sleeper, "add")
    add(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(7,))
    sleeper.synchronize()
    assert words(buffer) == [7]


@pytest.mark.parametrize("kind", MISSING)
def test_a_wait_without_progress_ends_though_it_sleeps(kind: str) -> None:
    with device_that_sleeps_by(kind) as device:
        gate = behind_a_gate(device)
        with pytest.raises(WaitTimeout):
            device.timeline_signal.wait(device.timeline_value - 1, timeout=100)
        gate.value = 1
        device.synchronize()


class Share(NamedTuple):
    """Of the time that a wait took."""

    computed: float
    """In which this process computed."""
    wanted: float
    """In which this thread computed or would have if others had not: all of it if it spins, whatever else runs here."""


def share_of_a_wait(device: Any) -> Share:
    """What a wait for a kernel of half a second or more costs."""
    buffer, spin = device.allocator.alloc(4096), program(device, "spin")
    rounds, elapsed = 10_000_000, 0.0
    while elapsed < 0.5:
        spin(buffer, global_size=(1, 1, 1), local_size=(32, 1, 1), vals=(rounds,))
        start, cpu, runnable = time.monotonic(), time.process_time(), runnable_s()
        device.synchronize()
        elapsed, used = time.monotonic() - start, time.process_time() - cpu
        wanted = runnable_s() - runnable
        rounds *= 4
    return Share(used / elapsed, wanted / elapsed)


def runnable_s() -> float:
    """Seconds in which this thread ran or waited for a CPU (proc(5), /proc/PID/schedstat)."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


@pytest.mark.parametrize("kind", MISSING)
def test_a_wait_for_a_long_kernel_costs_next_to_no_cpu_time(kind: str) -> None:
    with device_that_sleeps_by(kind) as device:
        assert share_of_a_wait(device).computed < ASLEEP


def test_a_wait_that_only_spins_costs_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "SPIN_S", LONG_S)
    with device_that_sleeps_by("Clock") as device:
        assert share_of_a_wait(device).wanted > 1 - ASLEEP
