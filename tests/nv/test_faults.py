"""What a fault says: the kernel by its program counter, the address by the kernel log, and all of it in words."""

import errno
import sys
import threading
import time
from collections import deque
from functools import partial
from typing import Any

import pytest
from fake import FakeKernel

from tegrad.hw.faults import NotifierCode
from tegrad.nv import kernlog
from tegrad.nv.faults import DeviceFault, SmError
from tegrad.nv.queues import NVComputeQueue

LINE = "nvgpu: 17000000.gpu gv11b_fb_mmu_fault_info_dump:288  [ERR]  [MMU FAULT] mmu engine id:  64, ch id:  {}, "
TAIL = "fault addr: {:#x}, fault addr aperture: 0, fault type: invalid pte, access type: virt read"


def fault_line(channel: int, address: int) -> str:
    return LINE.format(channel) + TAIL.format(address)


def notifier_line(code: int, channel: int) -> str:
    start = "nvgpu: 17000000.gpu nvgpu_set_err_notifier_locked:129  [ERR]  "
    return f"{start}error notifier set to {code} for ch {channel} owned by python3"


BYSTANDER = (fault_line(400, 0x3000), notifier_line(31, 400), "something else")
"""Another process's fault."""


def test_the_last_fault_of_our_channels_counts() -> None:
    kernel = FakeKernel()
    kernel.log = [fault_line(511, 0x1000), fault_line(511, 0x2000), notifier_line(31, 511), *BYSTANDER]
    found = kernlog.fault_report(kernel, [510, 511])
    assert found is not None
    assert (found.address, len(found.lines)) == (0x1000, 3)
    assert found.reason == "virt read (invalid pte)"
    assert kernlog.fault_report(kernel, [5]) is None
    assert kernel.fds == {}


def test_a_fault_before_the_position_is_not_ours() -> None:
    kernel = FakeKernel()
    kernel.log = [fault_line(511, 0x1000), notifier_line(31, 511)]
    start = kernlog.position(kernel)
    assert kernlog.fault_report(kernel, [511], start) is None
    kernel.log += [fault_line(511, 0x7000), notifier_line(31, 511)]
    found = kernlog.fault_report(kernel, [511], start)
    assert found is not None
    assert found.address == 0x7000


REASONS = [
    (["sked exception: esr 0x01800000"], "launch refused: zero cta dimension, memory window overlap"),
    (["PBDMA intr gpptr Error", "pbdma_intr_0(0):0x00004000 PBH: 0"], "PBDMA intr gpptr"),
    (
        ["class error 0x0000c7b5, offset 0x00000000, sub_chan 1"],
        "class error 0x0000c7b5, offset 0x00000000, sub_chan 1",
    ),
    (["ctxnotvalid pbdma_intr_1(0):0x80000000"], "ctxnotvalid"),
    (["a line of another shape"], ""),
]


@pytest.mark.parametrize(("lines", "reason"), REASONS)
def test_the_reason_is_the_drivers(lines: list[str], reason: str) -> None:
    kernel = FakeKernel()
    kernel.log = [*lines, notifier_line(13, 511)]
    found = kernlog.fault_report(kernel, [511])
    assert found is not None
    assert (found.reason, found.address, found.kernel, found.thread) == (reason, None, None, None)


def test_the_end_of_a_block_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notifier is written before the line about it: a reader that is quick finds an older fault, or none."""
    kernel = FakeKernel()
    kernel.log = ["sked exception: esr 0x01000000"]

    def sleep(_: float) -> None:
        kernel.log.append(notifier_line(13, 511))

    monkeypatch.setattr(kernlog.time, "sleep", sleep)
    found = kernlog.fault_report(kernel, [511])
    assert found is not None
    assert "memory window overlap" in found.reason


def test_a_log_that_may_not_be_read_is_no_error() -> None:
    kernel = FakeKernel()
    kernel.fail["open"] = errno.EPERM
    assert kernlog.fault_report(kernel, [511]) is None
    assert kernlog.position(kernel) == 0


def test_an_mmu_fault_names_address_and_buffer(fake_kernel: FakeKernel, fake_device: Any) -> None:
    buffer = fake_device.allocator.alloc(4096)
    fake_kernel.log = [fault_line(511, buffer.va_addr + 0x1000)]
    queue = NVComputeQueue()
    queue.kernels.append("reduce")
    fake_kernel.kill(NotifierCode.FIFO_ERROR_MMU_ERR_FLT)
    queue.signal(fake_device.timeline_signal, fake_device.next_timeline()).submit(fake_device)
    with pytest.raises(DeviceFault) as caught:
        fake_device.synchronize()
    fault = caught.value
    assert (fault.address, fault.in_flight) == (buffer.va_addr + 0x1000, ("reduce",))
    assert f"after the buffer of 4096 bytes at {buffer.va_addr:#x}" in str(fault)
    assert "MMU fault" in str(fault)
    assert "in kernel reduce" in str(fault)


def test_other_faults_take_no_address_from_an_old_line(fake_kernel: FakeKernel) -> None:
    fake_kernel.log = [fault_line(511, 0x1000), notifier_line(31, 511)]
    from tinygrad import Device

    device = Device["NV"]
    fake_kernel.kill(NotifierCode.GR_EXCEPTION)
    NVComputeQueue().signal(device.timeline_signal, device.next_timeline()).submit(device)
    with pytest.raises(DeviceFault) as caught:
        device.synchronize()
    assert caught.value.address is None


def test_the_only_kernel_in_flight_is_the_one(fake_kernel: FakeKernel, fake_device: Any) -> None:
    queue = NVComputeQueue()
    queue.kernels.append("reduce")
    fake_kernel.kill(NotifierCode.GR_EXCEPTION)
    queue.signal(fake_device.timeline_signal, fake_device.next_timeline()).submit(fake_device)
    with pytest.raises(DeviceFault, match="in kernel reduce") as caught:
        fake_device.synchronize()
    assert caught.value.kernel == "reduce"


def test_the_text_tells_reason_kernel_and_next_step() -> None:
    fault = DeviceFault(13, kernel="softmax", in_flight=["a", "b"], sm_errors=[SmError(3, 0, 0x0F, 0x1000)])
    text = str(fault)
    assert "misaligned addr" in text
    assert "in kernel softmax" in text
    assert "tegrad.nv.reopen()" in text


def test_many_kernels_in_flight_are_counted() -> None:
    assert "a, b, c and 2 more" in str(DeviceFault(31, in_flight=list("abcde")))


@pytest.mark.parametrize(
    ("esr", "reason"), [(0x10, "invalid addr space"), (0x2000F, "misaligned addr"), (0x7777, "warp error 0x7777")]
)
def test_warp_errors_in_words(esr: int, reason: str) -> None:
    assert SmError(0, 0, esr, 0).reason == reason


def test_a_notifier_written_between_two_looks_gives_the_fault_its_code(
    fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([None, NotifierCode.FIFO_ERROR_MMU_ERR_FLT])
    monkeypatch.setattr(fake_device.iface, "channel_error", lambda: next(looks))
    monkeypatch.setattr(fake_device.iface, "timed_out", lambda: True)
    with pytest.raises(DeviceFault) as caught:
        fake_device.check_fault(ask_driver=True)
    assert caught.value.code == NotifierCode.FIFO_ERROR_MMU_ERR_FLT


class Work:
    """A program, or the memory of one."""

    name, va, size, va_addr = "mine", 0x1000, 0, 0

    @property
    def lib_gpu(self) -> "Work":
        return self


def launches(device: Any) -> None:
    device._launches.append((device.compute_gpfifo, 0, ()))


def loads(device: Any, kept: deque[Work]) -> None:
    kept.append(Work())
    with device.lock:
        device._programs.add(kept[-1])


def buffers(device: Any) -> None:
    device.iface._freed.append((0x1000, 0))
    device.iface.memory[-1] = Work()
    del device.iface.memory[-1]


@pytest.mark.parametrize("what", ["launches", "loads", "buffers"])
def test_a_fault_is_told_while_other_threads_go_on(fake_device: Any, what: str) -> None:
    """What they submit, load and free changes the tables that the report is read from."""
    kept: deque[Work] = deque(maxlen=3)
    change, ask = {
        "launches": (partial(launches, fake_device), fake_device._in_flight),
        "loads": (partial(loads, fake_device, kept), partial(fake_device._kernel_at, 1)),
        "buffers": (partial(buffers, fake_device), partial(fake_device.iface.describe_address, 0x7FFFFFFF00)),
    }[what]
    for _ in range(64):
        change()
    ended = threading.Event()

    def go_on() -> None:
        while not ended.is_set():
            change()

    thread, interval = threading.Thread(target=go_on), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        until = time.monotonic() + 0.4
        while time.monotonic() < until:
            ask()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
        fake_device._programs.clear()
