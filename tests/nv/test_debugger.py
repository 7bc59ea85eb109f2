"""Faults behind NVIDIA's resource manager are found while waiting: by a notifier in memory, else by the debugger."""

import ctypes
import threading
from collections import deque
from typing import Any

import pytest
from fake import FakeKernel
from tinygrad.runtime import ops_nv
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.hw.faults import NOTIFIER_FORMAT, NotifierCode
from tegrad.nv import waits
from tegrad.nv.faults import DeviceFault, WaitTimeout
from tegrad.nv.hopper import NVKIface
from tegrad.nv.queues import NVComputeQueue

nv = ops_nv.nv_gpu
SMS = 132
GPFIFO, COPY, MEMORY = 0xC86F, 0xC8B5, 0x5C000001
HEALTH = ("channel_error", "timed_out", "failed_sms", "fault_report", "describe_address")


class Rm:
    """The resource manager: two channels with error memory, a debugger, SMs with their states."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.memory = (ctypes.c_uint8 * 4096)()
        self.warp_esr = [0] * SMS
        self.global_esr = [0] * SMS
        self.address = 0
        self.mmu: tuple[int, int, int] | None = None
        self.refuses: set[int] = set()
        self.asked: list[tuple[int, int]] = []
        """First SM and number of SMs of each question."""
        self.mapped: list[tuple[Any, ...]] = []
        monkeypatch.setattr(ops_nv.NVKIface, "rm_alloc", lambda *args: 77)
        monkeypatch.setattr(ops_nv.NVKIface, "rm_control", self._control)
        monkeypatch.setattr(NVKIface, "_gpu_map_to_cpu", self._map)
        self.iface = NVKIface.__new__(NVKIface)
        self.iface._buffers, self.iface._freed = {}, deque()
        self.iface.gpfifo_class = GPFIFO
        self.iface.dev = type("Device", (), {"iface": self.iface, "subdevice": 2, "debugger": 3, "debug_channel": 4})()

    def open_channel(self) -> int:
        """What NVDevice does for one."""
        params = nv.NV_CHANNELGPFIFO_ALLOCATION_PARAMETERS(hObjectError=MEMORY)
        return int(self.iface.rm_alloc(1, GPFIFO, params))

    def write(self, code: int, status: int = 0xFFFF) -> None:
        """Recover a channel: the notifier's record."""
        NOTIFIER_FORMAT.pack_into(self.memory, 0, 1, code, 1, status)

    def _map(self, handle: int, size: int, system: bool = False) -> int:
        if "map" in self.refuses:
            raise RuntimeError("_gpu_map_to_cpu returned an error")
        self.mapped.append((handle, size, system))
        return ctypes.addressof(self.memory)

    def _control(self, obj: int, cmd: int, params: Any = None, **kwargs: Any) -> Any:
        if cmd in self.refuses:
            raise RuntimeError("rm_control returned an error")
        if cmd == nv.NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER:
            assert obj == 2
            params.numSm = SMS
        elif cmd == nv.NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES:
            assert (obj, params.hTargetChannel) == (3, 4)
            self._states(params)
        elif cmd == nv.NV83DE_CTRL_CMD_DEBUG_READ_MMU_FAULT_INFO:
            assert self.mmu is not None
            entry = params.mmuFaultInfoList[0]
            entry.faultAddress, entry.faultType, entry.accessType = self.mmu
            params.count = 1
        else:
            raise AssertionError(hex(cmd))
        return params

    def _states(self, params: Any) -> None:
        first, count = params.startingSM, params.numSMsToRead
        assert 0 < count <= nv.NV83DE_CTRL_DEBUG_MAX_SMS_PER_CALL
        assert first + count <= SMS
        self.asked.append((first, count))
        params.mmuFault.valid = self.mmu is not None
        for number in range(count):
            state = params.smErrorStateArray[number]
            state.hwwWarpEsr, state.hwwGlobalEsr = self.warp_esr[first + number], self.global_esr[first + number]
            state.hwwWarpEsrPc64 = 0x7000
            state.hwwEsrAddr = self.address if state.hwwWarpEsr else 0


@pytest.fixture
def rm(monkeypatch: pytest.MonkeyPatch) -> Rm:
    return Rm(monkeypatch)


@pytest.fixture
def device(rm: Rm, fake_kernel: FakeKernel, fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A device whose GPU runs nothing any more, with a kernel on its way and its health told by the RM."""
    rm.open_channel()
    return stuck(rm, fake_kernel, fake_device, monkeypatch)


@pytest.fixture
def without_notifier(rm: Rm, fake_kernel: FakeKernel, fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same, where error memory cannot be mapped."""
    rm.refuses.add("map")  # type: ignore[arg-type]
    rm.open_channel()
    return stuck(rm, fake_kernel, fake_device, monkeypatch)


def stuck(rm: Rm, fake_kernel: FakeKernel, fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in HEALTH:
        monkeypatch.setattr(fake_device.iface, name, getattr(rm.iface, name))
    monkeypatch.setattr(fake_device.iface, "driver_check_s", 0.001, raising=False)
    fake_kernel.paused = True
    queue = NVComputeQueue()
    queue.kernels.append("softmax")
    queue.signal(fake_device.timeline_signal, fake_device.next_timeline()).submit(fake_device)
    return fake_device


def fault_of(device: Any) -> DeviceFault:
    with pytest.raises(DeviceFault) as caught:
        device.synchronize()
    return caught.value


def test_the_error_notifier_of_a_channel_is_read_while_waiting(rm: Rm, device: Any) -> None:
    rm.write(NotifierCode.FIFO_ERROR_MMU_ERR_FLT)
    rm.mmu = (0xDEAD0000, 2, 1)
    fault = fault_of(device)
    assert (fault.code, fault.address, fault.kernel) == (31, 0xDEAD0000, "softmax")
    assert "GPU fault: MMU fault; virt write (invalid pte); address 0xdead0000; in kernel softmax" in str(fault)
    assert rm.mapped == [(MEMORY, 4096, True)]


def test_reading_the_notifier_asks_nothing(rm: Rm) -> None:
    rm.open_channel()
    assert rm.iface.channel_error() is None
    rm.write(NotifierCode.GR_EXCEPTION, status=0)
    assert rm.iface.channel_error() is None
    rm.write(NotifierCode.GR_EXCEPTION)
    assert rm.iface.channel_error() == NotifierCode.GR_EXCEPTION
    assert rm.asked == []


def test_codes_that_only_the_resource_manager_has_are_named(rm: Rm, device: Any) -> None:
    rm.write(45)
    assert "channel removed after another one's error" in str(fault_of(device))


def test_the_notifiers_fault_has_what_the_sms_tell(rm: Rm, device: Any) -> None:
    """On any SM: a call reads 100 of them at most. In numbers of an H200."""
    rm.warp_esr[124], rm.global_esr[124], rm.address = 0x0501000F, 0x4, 0x2014400004
    rm.iface._buffers[0x2014400000] = 256
    rm.write(NotifierCode.GR_EXCEPTION)
    fault = fault_of(device)
    assert (fault.code, fault.kernel, fault.address) == (13, "softmax", 0x2014400004)
    assert [(error.sm, error.reason) for error in fault.sm_errors] == [(124, "misaligned addr")]
    assert "address 0x2014400004 (byte 0x4, in the buffer of 256 bytes at 0x2014400000)" in str(fault)
    assert rm.asked[:2] == [(0, 100), (100, 32)]


def test_a_wait_with_a_notifier_asks_the_debugger_only_when_its_time_is_up(
    rm: Rm, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rm.warp_esr[117] = 0x000F
    monkeypatch.setattr(rm.iface._debugger, "stopped", lambda: pytest.fail("asked while waiting"))
    monkeypatch.setattr(waits, "getenv", lambda name, default: 100)
    fault = fault_of(device)
    assert (fault.code, fault.kernel) == (None, "softmax")
    assert "GPU fault: SM exception; SM 117: misaligned addr; in kernel softmax" in str(fault)


def test_an_exception_is_found_by_the_debugger_where_there_is_no_notifier(rm: Rm, without_notifier: Any) -> None:
    rm.warp_esr[117] = 0x000F
    fault = fault_of(without_notifier)
    assert (fault.code, fault.kernel) == (None, "softmax")
    assert [(error.sm, error.reason) for error in fault.sm_errors] == [(117, "misaligned addr")]
    assert "GPU fault: SM exception; SM 117: misaligned addr; in kernel softmax" in str(fault)


def test_an_mmu_fault_is_found_by_the_debugger_where_there_is_no_notifier(rm: Rm, without_notifier: Any) -> None:
    rm.mmu = (0x1000, 0, 0)
    assert "GPU fault: MMU fault; virt read (invalid pde); address 0x1000" in str(fault_of(without_notifier))


def test_a_state_that_stops_no_kernel_is_no_fault(rm: Rm) -> None:
    rm.global_esr[5] = 1 << 1
    assert not rm.iface.timed_out()
    rm.global_esr[5] = 1 << 4
    assert rm.iface.timed_out()


def test_a_resource_manager_that_refuses_is_asked_once(
    rm: Rm, without_notifier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the wait ends as it did: when its time is up."""
    asked = []
    rm.refuses.add(nv.NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES)
    stock = rm.iface._debugger.stopped
    monkeypatch.setattr(rm.iface._debugger, "stopped", lambda: asked.append(1) or stock())
    monkeypatch.setattr(waits, "getenv", lambda name, default: 100)
    with pytest.raises(WaitTimeout, match="no progress"):
        without_notifier.synchronize()
    assert asked == [1]


def test_without_the_number_of_sms_those_of_one_call_are_read(rm: Rm) -> None:
    rm.refuses.add(nv.NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER)
    rm.warp_esr[117] = 0x000F
    assert not rm.iface.timed_out()
    assert rm.asked == [(0, 100)]


@pytest.mark.parametrize(("after_s", "asked"), [(0.001, True), (3600.0, False)])
def test_a_wait_asks_the_debugger_only_when_it_has_waited(
    rm: Rm,
    without_notifier: Any,
    fake_kernel: FakeKernel,
    monkeypatch: pytest.MonkeyPatch,
    after_s: float,
    asked: bool,
) -> None:
    monkeypatch.setattr(without_notifier.iface, "driver_check_s", after_s)
    opener = threading.Timer(0.1, lambda: setattr(fake_kernel, "paused", False))
    opener.start()
    without_notifier.synchronize()
    opener.join()
    assert bool(rm.asked) == asked


def test_an_address_is_told_by_its_buffer(rm: Rm, monkeypatch: pytest.MonkeyPatch) -> None:
    start = ops_nv.NVKIface.low_uvm_vaddr_allocator.base
    given = HCQBuffer(start, 4096, owner=rm.iface.dev)
    monkeypatch.setattr(ops_nv.NVKIface, "alloc", lambda *args, **kwargs: given)
    monkeypatch.setattr(ops_nv.NVKIface, "free", lambda *args: None)
    rm.iface.alloc(4096, cpu_access=True)
    assert rm.iface.describe_address(start + 8) == f"byte 0x8, in the buffer of 4096 bytes at {start:#x}"
    assert rm.iface.describe_address(0x100000) is None
    rm.iface.free(given)
    told = rm.iface.describe_address(start + 8)
    assert told == f"byte 0x8 of a buffer of 4096 bytes at {start:#x} that was freed"


def test_error_memory_that_cannot_be_mapped_is_done_without(rm: Rm) -> None:
    rm.refuses.add("map")  # type: ignore[arg-type]
    assert rm.open_channel() == 77
    rm.write(NotifierCode.GR_EXCEPTION)
    assert rm.iface.channel_error() is None


def test_error_memory_that_says_so_from_the_start_is_not_believed(rm: Rm) -> None:
    rm.write(NotifierCode.GR_EXCEPTION)
    rm.open_channel()
    assert rm.iface.channel_error() is None


def test_other_objects_have_no_notifier(rm: Rm) -> None:
    assert rm.iface.rm_alloc(1, COPY) == 77
    assert rm.mapped == []
