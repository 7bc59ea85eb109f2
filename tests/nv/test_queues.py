"""Submission and waiting: progress, full rings, bound queues, waits that end early on a fault and sleep when long."""

import errno
import threading
import time
from typing import Any

import pytest
from fake import FakeKernel
from submissions import empty_submission

from tegrad.nv import device as device_module
from tegrad.nv import waits
from tegrad.nv.faults import DeviceClosed, DeviceFault, WaitTimeout
from tegrad.nv.fence import full_barrier
from tegrad.nv.queues import NVComputeQueue, NVCopyQueue
from tegrad.nv.rings import Ring, RingError
from tegrad.nv.waits import wait_until


def test_the_barrier_can_be_called() -> None:
    assert full_barrier() is None


def test_progress_follows_every_submission(fake_device: Any) -> None:
    fifo = fake_device.compute_gpfifo
    before = fifo.submissions
    signal = fake_device.new_signal(value=0)
    NVComputeQueue().signal(signal, 5).submit(fake_device)
    fifo.wait(before + 1)
    assert (fifo.submissions, fifo.done, signal.value) == (before + 1, before + 1, 5)


class Noting:
    """A register or a word that notes who touches it."""

    def __init__(self, name: str, notes: list[str], under: Any) -> None:
        self.name, self.notes, self.under = name, notes, under

    def __setitem__(self, index: int, value: int) -> None:
        self.notes.append(f"write {self.name}")
        self.under[index] = value

    def __getitem__(self, index: int) -> Any:
        self.notes.append(f"read {self.name}")
        return self.under[index]


@pytest.mark.parametrize(
    ("behind_pcie", "order"),
    [
        (True, ["write put", "write doorbell", "read put", "write doorbell"]),
        (False, ["write put", "write doorbell"]),
    ],
)
def test_a_second_doorbell_follows_a_read_of_put_where_that_lies_behind_pcie(
    fake_device: Any, behind_pcie: bool, order: list[str]
) -> None:
    notes: list[str] = []
    fifo = fake_device.compute_gpfifo
    fake_device.synchronize()
    fifo._behind_pcie = behind_pcie
    fifo._put = Noting("put", notes, fifo._put)
    fifo._doorbell = Noting("doorbell", notes, fifo._doorbell)
    empty_submission(fake_device)
    assert notes == order


def test_memory_of_a_jetson_is_not_behind_pcie(fake_device: Any) -> None:
    assert not fake_device.compute_gpfifo._behind_pcie


def test_more_submissions_than_the_gpfifo_holds_wait_for_room(fake_kernel: FakeKernel, fake_device: Any) -> None:
    fake_kernel.paused = True
    fifo = fake_device.compute_gpfifo
    free = fifo.entries_count - 1
    fake_device.synchronize()
    for _ in range(free):
        empty_submission(fake_device)
    blocked = threading.Thread(target=empty_submission, args=(fake_device,), daemon=True)
    blocked.start()
    blocked.join(0.1)
    assert blocked.is_alive()
    assert (fifo.put_value - fake_kernel.channels[0].get) % fifo.entries_count == free
    fake_kernel.paused = False
    blocked.join(10)
    fake_device.synchronize()


def test_command_memory_is_not_reused_in_flight(fake_kernel: FakeKernel, fake_device: Any) -> None:
    """Wrap the ring of commands several times with a GPU that lags behind; every value must arrive in order."""
    fake_device.synchronize()
    fake_device._commands = Ring(32 << 10, fake_device._commands.base, device_module._wait, "command memory")
    signal = fake_device.new_signal(value=0)
    nop = 0x20000000 | 0x08 >> 2  # a method header that carries no word
    seen = []
    for value in range(1, 120):
        queue = NVComputeQueue().wait(signal, value - 1)
        queue._q += [nop] * 600
        queue.signal(signal, value).submit(fake_device)
        seen.append(signal.value)
    signal.wait(119)
    assert seen == sorted(seen)
    assert seen[0] < 119


def test_a_bound_queue_is_not_rewritten_before_its_last_run(fake_kernel: FakeKernel, fake_device: Any) -> None:
    from tinygrad.dtype import dtypes
    from tinygrad.uop.ops import UOp

    value = UOp.variable("value", 0, 0xFFFFFFFF, dtype=dtypes.uint32)
    gate, signal = fake_device.new_signal(value=0), fake_device.new_signal(value=0)
    queue = NVComputeQueue().wait(gate, 1).signal(signal, value)
    queue.bind(fake_device)
    queue.submit(fake_device, {"value": 11})
    later = threading.Thread(target=queue.submit, args=(fake_device, {"value": 22}), daemon=True)
    later.start()
    later.join(0.1)
    assert later.is_alive()
    gate.value = 1
    later.join(10)
    signal.wait(22)


def test_a_command_after_submit_does_not_edit_a_qmd_in_flight(fake_device: Any) -> None:
    queue = NVComputeQueue()
    queue.active_qmd = object()
    queue.submit(fake_device)
    assert queue.active_qmd is None


def test_copies_run_on_their_own_channel(fake_device: Any) -> None:
    source, dest = fake_device.allocator.alloc(5000), fake_device.allocator.alloc(5000)
    source.cpu_view()[:4] = b"abcd"
    queue = NVCopyQueue().wait(fake_device.timeline_signal, fake_device.timeline_value - 1).copy(dest, source, 5000)
    queue.signal(fake_device.timeline_signal, fake_device.next_timeline()).submit(fake_device)
    fake_device.synchronize()
    assert bytes(dest.cpu_view()[:4]) == b"abcd"
    assert fake_device.dma_gpfifo.submissions >= 2


def test_arguments_wait_for_the_kernel_and_not_for_a_copy_in_between(fake_device: Any) -> None:
    """A slot that is filled before a copy goes out belongs to the launch after it."""
    ring = fake_device.kernargs_offset_allocator
    fake_device.synchronize()
    ring.alloc(ring.size // 2)
    NVCopyQueue().signal(fake_device.new_signal(value=0), 1).submit(fake_device)
    ring.alloc(ring.size // 2 - 256)
    with pytest.raises(RingError, match="not submitted"):
        ring.alloc(ring.size // 2)
    empty_submission(fake_device)
    ring.alloc(ring.size // 2)


# ---- waits


def test_a_short_wait_polls_and_a_long_one_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    real = time.sleep

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        real(seconds)

    monkeypatch.setattr(waits.time, "sleep", sleep)
    values = iter([0, 0, 1])
    with monkeypatch.context() as still:
        still.setattr(waits.time, "monotonic", lambda: 1.0)  # a busy machine's time would pass
        wait_until(None, lambda: next(values), 1)
    assert slept == []
    start = time.monotonic()
    wait_until(None, lambda: int(time.monotonic() > start + 0.03), 1)
    assert slept == sorted(slept)
    assert max(slept) <= waits.SLEEP_MAX_S


@pytest.mark.parametrize("values", [[1], [0, 0, 1]])
def test_a_wait_ends_with_a_barrier(monkeypatch: pytest.MonkeyPatch, values: list[int]) -> None:
    order: list[object] = []
    monkeypatch.setattr(waits, "full_barrier", lambda: order.append("barrier"))
    wait_until(None, lambda: order.append(values.pop(0)) or order[-1], 1)
    assert order[-2:] == [1, "barrier"]


def test_a_wait_for_a_submission_ends_with_a_barrier(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[object] = []
    fifo = fake_device.compute_gpfifo
    fake_device.synchronize()
    fifo.wait(fifo.submissions)
    monkeypatch.setattr(waits, "full_barrier", lambda: order.append("barrier"))
    fifo.progress = Noting("progress", order, fifo.progress)  # type: ignore[arg-type]
    fifo.wait(fifo.submissions)
    assert order == ["read progress", "barrier"]


def test_a_wait_that_has_polled_sleeps_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(waits.time, "sleep", slept.append)
    values = iter([0, 0, 1])
    wait_until(None, lambda: next(values), 1, begun=time.monotonic() - 1)
    assert len(slept) == 1


@pytest.mark.parametrize(("waited", "sleeps"), [(0.0, 0), (waits.SPIN_S * 0.99, 0), (waits.SPIN_S, 1)])
def test_a_wait_sleeps_as_soon_as_its_polling_time_is_over(
    waited: float, sleeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(waits.time, "sleep", slept.append)
    monkeypatch.setattr(waits.time, "monotonic", lambda: waited)
    values = iter([0, 0, 1])
    wait_until(None, lambda: next(values), 1, begun=0.0)
    assert len(slept) == sleeps


def test_a_wait_for_a_submission_polls_and_then_sleeps_for_it(fake_kernel: FakeKernel, fake_device: Any) -> None:
    fifo, slept = fake_device.compute_gpfifo, []

    class Waker(waits.Clock):
        def sleep(self, number: int, seconds: float) -> bool:
            slept.append(number)
            fake_kernel.paused = False
            return False

    fake_device.synchronize()
    fifo.waker, fake_kernel.paused = Waker(), True
    empty_submission(fake_device)
    fifo.wait(fifo.submissions)
    assert (set(slept), fifo.done) == ({fifo.submissions}, fifo.submissions)


def test_a_wait_for_a_submission_of_a_closed_device_says_so(fake_device: Any) -> None:
    fifo = fake_device.compute_gpfifo
    fake_device.close()
    with pytest.raises(DeviceClosed):
        fifo.wait(fifo.submissions)


def test_a_submission_frees_the_entries_of_those_that_are_done(fake_device: Any) -> None:
    fifo = fake_device.compute_gpfifo
    for _ in range(3):
        empty_submission(fake_device)
        fifo.wait(fifo.submissions)
    put = fifo.put_value
    empty_submission(fake_device)
    assert fifo._free_from >= put
    assert len(fifo._in_flight) <= 1


def test_a_wait_without_progress_ends(fake_kernel: FakeKernel, fake_device: Any) -> None:
    values = iter(range(1000))
    with pytest.raises(WaitTimeout, match=r"no progress for 0\.02 s"):
        wait_until(fake_device, lambda: 0, 1, timeout_ms=20)
    wait_until(fake_device, lambda: next(values), 900, timeout_ms=20)


def test_a_timeout_names_what_is_in_flight(fake_kernel: FakeKernel, fake_device: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(waits, "getenv", lambda name, default: 50)
    fake_kernel.paused = True
    queue = NVComputeQueue()
    queue.kernels.append("matmul")
    queue.signal(fake_device.timeline_signal, fake_device.next_timeline()).submit(fake_device)
    with pytest.raises(WaitTimeout, match="; in flight: matmul"):
        fake_device.synchronize()
    with pytest.raises(WaitTimeout, match="; in flight: matmul"):
        fake_device.synchronize()


@pytest.mark.parametrize("code", [31, 13, None])
def test_a_fault_ends_a_wait_at_once(fake_kernel: FakeKernel, fake_device: Any, code: int | None) -> None:
    fake_kernel.kill(code)
    empty_submission(fake_device)
    start = time.monotonic()
    with pytest.raises(DeviceFault) as caught:
        fake_device.synchronize()
    assert time.monotonic() - start < 10  # not the 30 s that a wait may take
    assert caught.value.code == code


def test_after_a_fault_everything_raises_it_and_a_new_device_works(fake_kernel: FakeKernel, fake_device: Any) -> None:
    from tinygrad import Device

    buffer = fake_device.allocator.alloc(4096)
    fake_kernel.kill(31)
    empty_submission(fake_device)
    with pytest.raises(DeviceFault, match="MMU fault"):
        fake_device.synchronize()
    for use in (lambda: empty_submission(fake_device), fake_device.synchronize, lambda: fake_device.allocator.alloc(8)):
        with pytest.raises(DeviceFault):
            use()
    fake_device.allocator.free(buffer, 4096)
    fake_device.close()
    assert set(fake_kernel.held().values()) == {0}
    again = Device["NV"]
    assert again is not fake_device
    empty_submission(again)
    again.synchronize()


def test_what_belongs_to_a_closed_device_says_so(fake_device: Any) -> None:
    buffer, signal = fake_device.allocator.alloc(4096), fake_device.new_signal(value=3)
    assert signal.value == 3
    fake_device.close()
    fake_device.close()
    for use in (
        lambda: fake_device.allocator._copyin(buffer, memoryview(bytearray(4))),
        lambda: fake_device.allocator.alloc(4096),
        lambda: empty_submission(fake_device),
        lambda: signal.value,
        lambda: signal.timestamp,
        lambda: setattr(signal, "value", 1),
    ):
        with pytest.raises(DeviceClosed):
            use()
    signal.wait(100)
    fake_device.allocator.free(buffer, 4096)


def test_a_signal_that_is_gone_leaves_its_place_to_another_of_its_device(fake_device: Any) -> None:
    from tinygrad import Device

    kept = fake_device.new_signal(value=7)
    places = {fake_device.new_signal(value=at).value_addr for at in range(1000)}
    assert len(places) == 1
    assert kept.value_addr not in places
    assert kept.value == 7
    fake_device.close()
    again = Device["NV"]
    free = list(again.signal_pool[again.peer_group])
    del kept
    assert again.signal_pool[again.peer_group] == free, "memory of a closed device is nobody's"


def test_closing_survives_a_driver_that_fails(fake_kernel: FakeKernel, fake_device: Any) -> None:
    from tegrad.uapi.errors import DriverError

    fake_kernel.fail["AS_UNMAP_BUFFER"] = errno.EIO
    with pytest.raises(DriverError):
        fake_device.close()
    fake_kernel.gpu_maps.clear()
    assert set(fake_kernel.held().values()) == {0}
