"""What a fault says: the kernel by its program counter, the address by the kernel log, and all of it in words."""

import errno
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


def test_the_last_fault_of_our_channels_counts() -> None:
    kernel = FakeKernel()
    kernel.log = [fault_line(511, 0x1000), fault_line(511, 0x2000), fault_line(400, 0x3000), "something else"]
    assert kernlog.fault_address(kernel, [510, 511]) == 0x2000
    assert kernlog.fault_address(kernel, [5]) is None
    assert kernel.fds == {}


def test_a_log_that_may_not_be_read_is_no_error() -> None:
    kernel = FakeKernel()
    kernel.fail["open"] = errno.EPERM
    assert kernlog.fault_address(kernel, [511]) is None


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
    assert f"behind the buffer of 4096 bytes at {buffer.va_addr:#x}" in str(fault)
    assert "MMU fault" in str(fault)
    assert "in flight: reduce" in str(fault)


def test_other_faults_take_no_address_from_an_old_line(fake_kernel: FakeKernel, fake_device: Any) -> None:
    fake_kernel.log = [fault_line(511, 0x1000)]
    fake_kernel.kill(NotifierCode.GR_EXCEPTION)
    NVComputeQueue().signal(fake_device.timeline_signal, fake_device.next_timeline()).submit(fake_device)
    with pytest.raises(DeviceFault) as caught:
        fake_device.synchronize()
    assert caught.value.address is None


def test_the_text_tells_reason_kernel_and_next_step() -> None:
    fault = DeviceFault(13, kernel="softmax", in_flight=["a", "b"], sm_errors=[SmError(3, 0, 0x0F, 0x1000)])
    text = str(fault)
    assert "misaligned addr" in text
    assert "in kernel softmax" in text
    assert "Close the device and open it again" in text


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
