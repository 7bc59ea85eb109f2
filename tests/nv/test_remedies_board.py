"""Every remedy the device brings is needed: with it a scenario works, without it the board fails as hardware does.

The board's GPU races: it reads QMDs late and starts grids late. Remedies are taken away here only, by patching.
"""

import dataclasses
import errno
from typing import Any

import pytest
from boards import close_device, open_device, use_board
from kernels import program, words
from scenarios import (
    count_by_stride,
    overwrite_what_a_kernel_reads,
    read_what_a_kernel_writes,
    run_twice_with_two_values,
)
from submissions import held_back, launch

from tegrad.hw.faults import NotifierCode
from tegrad.nv import device as device_module
from tegrad.nv import iface as iface_module
from tegrad.nv import memory as memory_module
from tegrad.nv import roles
from tegrad.nv.device import NVDevice, UnifiedAllocator
from tegrad.nv.faults import DeviceFault
from tegrad.nv.iface import TegraIface
from tegrad.nv.launch import Launcher
from tegrad.nv.queues import NVComputeQueue
from tegrad.uapi.errors import DriverError

pytestmark = pytest.mark.board


# ---- the shader windows


def compute_something() -> list[int]:
    from tinygrad import Tensor

    result: list[int] = (Tensor([1, 2, 3]) + Tensor([4, 5, 6])).numpy().tolist()
    return result


@pytest.mark.klog_errors("sm |GR exception|error notifier")
def test_without_reserved_windows_buffers_disappear_behind_them(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_something() == [5, 7, 9]
    close_device()
    monkeypatch.setattr(memory_module.AddressSpace, "reserve", lambda self, start, size: None)
    with pytest.raises(DeviceFault, match="invalid addr space") as caught:
        compute_something()
    assert caught.value.code == NotifierCode.GR_EXCEPTION
    assert caught.value.kernel is not None


# ---- GPFIFOs


def test_one_gpfifo_area_shared_at_an_offset_is_refused(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compute_something() == [5, 7, 9]
    close_device()
    monkeypatch.delattr(TegraIface, "open_fifo")
    with pytest.raises(DriverError) as caught:
        open_device()
    assert (caught.value.name, caught.value.errno) == ("CHANNEL_SETUP_BIND", errno.EINVAL)


@pytest.mark.klog_errors("(?i)pbdma|mmu fault|page fault|error notifier")
def test_a_driver_range_above_2_to_the_40_kills_the_channel(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 3 MiB GPFIFO buffer is accepted either way; it works only where the driver's range ends below 2^40."""
    stock = TegraIface._channel_memory
    big = 3 << 20
    monkeypatch.setattr(
        TegraIface,
        "_channel_memory",
        lambda self, size, role: stock(self, big if role in (roles.GPFIFO, roles.USERD) else size, role),
    )
    monkeypatch.setattr(device_module, "len", lambda ring: min(len(ring), iface_module.GPFIFO_ENTRIES), raising=False)
    assert compute_something() == [5, 7, 9]
    close_device()
    chip_of = iface_module._chip
    monkeypatch.setattr(iface_module, "_chip", lambda sm: dataclasses.replace(chip_of(sm), va_end=0xFFFFE00000))
    with pytest.raises(DeviceFault) as caught:
        compute_something()
    assert caught.value.code in (NotifierCode.FIFO_ERROR_MMU_ERR_FLT, NotifierCode.PBDMA_ERROR)


# ---- nvmap


def test_untagged_buffers_are_reported_in_the_kernel_log(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tegrad.orin.client import board_log

    def complaints() -> list[str]:
        return [line for line in board_log(board) if "tag" in line]

    before = complaints()
    assert compute_something() == [5, 7, 9]
    assert complaints() == before
    close_device()
    monkeypatch.setattr(roles.Role, "tag", 0)
    assert compute_something() == [5, 7, 9]
    assert len(complaints()) == len(before) + 1


# ---- QMDs and queues


def test_a_bound_queue_keeps_its_values_until_they_are_read(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_twice_with_two_values() == 21
    monkeypatch.setattr(NVComputeQueue, "_settle", lambda self: None)
    assert run_twice_with_two_values() == 40


def signal_after_submit() -> tuple[int, int]:
    """Submit a kernel while the GPU is held back, then signal from the same queue without submitting again.

    What the signal is when the kernel is done, and again after the queue's own words went out.
    """
    device = open_device()
    buffer, store = device.allocator.alloc(4096), program(device, "store")
    signal = device.new_signal(value=0)
    queue = NVComputeQueue().memory_barrier()
    with held_back(device):
        queue.exec(store, store.fill_kernargs((buffer,), (3,)), (1, 1, 1), (1, 1, 1)).submit(device)
        queue.signal(signal, 5)
    device.compute_gpfifo.wait(device.compute_gpfifo.submissions)
    assert words(buffer) == [3]
    early = signal.value
    queue.submit(device)
    device.compute_gpfifo.wait(device.compute_gpfifo.submissions)
    return early, signal.value


def test_a_qmd_is_not_rewritten_after_it_was_submitted(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert signal_after_submit() == (0, 5)
    close_device()
    stock = NVComputeQueue._submit_to_gpfifo

    def keep_qmd(self: Any, dev: Any, fifo: Any) -> None:
        qmd = self.active_qmd
        stock(self, dev, fifo)
        self.active_qmd = qmd

    monkeypatch.setattr(NVComputeQueue, "_submit_to_gpfifo", keep_qmd)
    monkeypatch.setattr(NVComputeQueue, "signal", NVComputeQueue.__mro__[2].signal)  # tinygrad's own
    assert signal_after_submit()[0] == 5


# ---- kernel arguments


def run_ahead(launches: int) -> list[int]:
    """Store 1, 2, 3, ... into consecutive words while the GPU is held back; the ring of arguments holds far less."""
    device = open_device()
    buffer, store = device.allocator.alloc(4 * launches), program(device, "store")
    with held_back(device):
        for i in range(launches):
            launch(store, buffer.offset(4 * i, 4), i + 1)
    return words(buffer, launches)


def test_kernel_arguments_are_not_reused_in_flight(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinygrad.runtime.support.memory import BumpAllocator

    class Careless(BumpAllocator):  # type: ignore[misc]
        def __init__(self, size: int, base: int, wait: Any, name: str) -> None:
            super().__init__(size, base)

        def submitted(self, tag: Any) -> None:
            pass

    monkeypatch.setattr(device_module, "KERNARGS_SIZE", 64 << 10)
    assert run_ahead(100) == list(range(1, 101))
    close_device()
    monkeypatch.setattr(device_module, "Ring", Careless)
    assert run_ahead(100) != list(range(1, 101))


@pytest.mark.parametrize("chip", ["agx-orin-64gb:16GiB", "gh100"])
def test_machine_code_knows_its_dimensions(chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with use_board(chip, race=20):
        assert count_by_stride() == [1] * 1000
        close_device()
        monkeypatch.setattr(Launcher, "launch", lambda self, *args: False)  # which fills them in beforehand
        monkeypatch.setattr(NVComputeQueue, "exec", NVComputeQueue.__mro__[2].exec)  # tinygrad's own
        assert count_by_stride()[64:] == [0] * 936


# ---- copies


def test_a_copy_waits_for_the_kernels_before_it(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert overwrite_what_a_kernel_reads() == 500

    def without_sync(self: Any, dest: Any, src: memoryview) -> None:
        self._bytes(dest)[: src.nbytes] = src

    monkeypatch.setattr(UnifiedAllocator, "_copyin", without_sync)
    assert overwrite_what_a_kernel_reads() == 510


def test_a_result_is_read_after_the_kernel_that_writes_it(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_what_a_kernel_writes() == 7

    def without_sync(self: Any, dest: memoryview, src: Any) -> None:
        dest[:] = self._bytes(src)[: dest.nbytes]

    monkeypatch.setattr(UnifiedAllocator, "_copyout", without_sync)
    assert read_what_a_kernel_writes() == 1


def test_the_device_class_is_ours(board: str) -> None:
    assert isinstance(open_device(), NVDevice)
