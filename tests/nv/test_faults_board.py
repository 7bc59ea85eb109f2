"""Every kind of fault that a kernel or a client can make, on the board: what the exception says, and how it goes on."""

import errno
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from boards import open_device, use_board
from kernels import program, words

import tegrad.nv
from tegrad.hw.classes import ComputeMethod, HostMethod
from tegrad.hw.faults import NotifierCode
from tegrad.nv import kernlog
from tegrad.nv.faults import DeviceClosed, DeviceFault
from tegrad.nv.queues import NVComputeQueue, NVCopyQueue
from tegrad.uapi.errors import DriverError

pytestmark = [pytest.mark.board, pytest.mark.klog_errors(".")]  # faults are what it is about

MMU, GR, PBDMA = NotifierCode.FIFO_ERROR_MMU_ERR_FLT, NotifierCode.GR_EXCEPTION, NotifierCode.PBDMA_ERROR


@pytest.fixture(autouse=True, params=["agx-orin-64gb", "gh100"])
def each_chip(request: pytest.FixtureRequest) -> Iterator[str]:
    with use_board(f"{request.param}:16GiB", race=20) as spec:
        yield spec


def launch(device: Any, name: str, value: int = 1, threads: int = 1) -> Any:
    """Start one of the small kernels on a fresh buffer of a page; the buffer."""
    buffer = device.allocator.alloc(4096)
    program(device, name)(buffer, local_size=(threads, 1, 1), vals=(value,))
    return buffer


def fault_of(device: Any) -> DeviceFault:
    """The exception that the wait raises. The wait may last for ever, so it is the notifier that ends it."""
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            device.timeline_signal.wait(device.timeline_value - 1, timeout=10**9)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(30)
    assert raised, "the wait did not notice the fault"
    assert isinstance(raised[0], DeviceFault), raised[0]
    return raised[0]


# ---- what a kernel does


def test_a_store_past_a_buffer(each_chip: str) -> None:
    device = open_device()
    buffer = device.allocator.alloc(4096)
    program(device, "store")(buffer.offset(4092, 4), local_size=(7, 1, 1), vals=(1,))
    fault = fault_of(device)
    assert (fault.code, fault.kernel, fault.address) == (MMU, "store", buffer.va_addr + 4096)
    assert f"byte 0x1000, after the buffer of 4096 bytes at {buffer.va_addr:#x}" in str(fault)
    assert "virt write (invalid p" in str(fault)
    assert "gpc client t1_" in str(fault)
    assert "thread (1, 0, 0) (warp 0, lane 1)" in str(fault)


def test_a_load_from_memory_that_was_freed(each_chip: str) -> None:
    from tinygrad.device import BufferSpec

    device = open_device()
    spec = BufferSpec(nolru=True)
    buffer, add = device.allocator.alloc(4096, spec), program(device, "add")
    device.allocator.free(buffer, 4096, spec)
    device.iface.give_back()
    add(buffer.offset(64, 4), vals=(1,))
    fault = fault_of(device)
    assert (fault.code, fault.kernel, fault.address) == (MMU, "add", buffer.va_addr + 64)
    assert f"byte 0x40 of a buffer of 4096 bytes at {buffer.va_addr:#x} that was freed" in str(fault)
    assert "virt read (invalid pte)" in str(fault)


def test_a_misaligned_store(each_chip: str) -> None:
    device = open_device()
    buffer = launch(device, "crooked", 2)
    fault = fault_of(device)
    assert (fault.code, fault.kernel, fault.address) == (GR, "crooked", buffer.va_addr + 2)
    assert "misaligned addr" in str(fault)
    assert f"byte 0x2, in the buffer of 4096 bytes at {buffer.va_addr:#x}" in str(fault)
    assert fault.thread is not None
    assert fault.sm_errors[0].warp_esr & 0xFFFF == 0xF


def test_a_store_into_a_shader_window(each_chip: str) -> None:
    device = open_device()
    launch(device, "window", device.shared_mem_window + (2 << 28) >> 28)
    fault = fault_of(device)
    assert (fault.code, fault.kernel) == (GR, "window")
    assert "out of range" in str(fault) or "oor addr" in str(fault) or "invalid addr space" in str(fault)


def test_a_trap(each_chip: str) -> None:
    device = open_device()
    launch(device, "trap")
    fault = fault_of(device)
    assert (fault.code, fault.kernel) == (GR, "trap")
    assert "SM 0: illegal instr encoding" in str(fault)


def test_an_older_kernel_in_flight_is_told_apart(each_chip: str) -> None:
    device = open_device()
    buffer = device.allocator.alloc(4096)
    spin, wild, add = (program(device, name) for name in ("spin", "wild", "add"))
    device.synchronize()
    for made, value in ((spin, 2000000), (wild, -300), (add, 1)):
        made(buffer, vals=(value,))
    fault = fault_of(device)
    assert fault.kernel == "wild"
    assert {"wild", "add"} <= set(fault.in_flight)


# ---- what a client does


def no_windows(queue: Any, device: Any) -> None:
    queue.nvm(1, ComputeMethod.SET_SHADER_SHARED_MEMORY_WINDOW_A, 0, 0)
    store = program(device, "store")
    queue.exec(store, store.fill_kernargs((device.allocator.alloc(4096),), (1,)), (1, 1, 1), (1, 1, 1))


def wrong_class(queue: Any, device: Any) -> None:
    queue.nvm(1, HostMethod.SET_OBJECT, device.iface.dma_class)


def unknown_host_method(queue: Any, device: Any) -> None:
    queue.nvm(0, HostMethod.ILLEGAL, 0)


def unmapped_semaphore(queue: Any, device: Any) -> None:
    queue.nvm(0, HostMethod.SEM_ADDR_LO, 0x1000, 0, 0, 0, 1)


CLIENT_MISTAKES: list[tuple[Callable[[Any, Any], None], NotifierCode, str]] = [
    (no_windows, GR, "launch refused: memory window overlap"),
    (wrong_class, GR, "class error"),
    (unknown_host_method, PBDMA, "PBDMA intr method"),
    (unmapped_semaphore, MMU, "by hub client host"),
]


@pytest.mark.parametrize(("mistake", "code", "text"), CLIENT_MISTAKES, ids=lambda v: getattr(v, "__name__", None))
def test_a_mistake_of_the_client(
    mistake: Callable[[Any, Any], None], code: NotifierCode, text: str, each_chip: str
) -> None:
    device = open_device()
    queue = NVComputeQueue()
    mistake(queue, device)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    fault = fault_of(device)
    assert fault.code == code
    assert text in str(fault)


def test_a_copy_from_memory_that_was_freed(each_chip: str) -> None:
    from tinygrad.device import BufferSpec

    device = open_device()
    spec = BufferSpec(nolru=True)
    source, target = device.allocator.alloc(4096, spec), device.allocator.alloc(4096)
    device.allocator.free(source, 4096, spec)
    device.iface.give_back()
    queue = NVCopyQueue().copy(target, source, 64)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    fault = fault_of(device)
    assert (fault.code, fault.kernel, fault.address) == (MMU, None, source.va_addr)
    assert "hub client grcopy" in str(fault)
    assert f"a buffer of 4096 bytes at {source.va_addr:#x} that was freed" in str(fault)


def test_without_the_kernel_log_the_kernel_is_still_named(each_chip: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for most users of a Jetson: by the program counter of an SM's record, or as the only one in flight."""

    def refuse(kernel: Any, since: int = 0) -> Any:
        raise DriverError("open", errno.EPERM)

    monkeypatch.setattr(kernlog, "records", refuse)
    for name, value, code in (("crooked", 2, GR), ("wild", -300, MMU)):
        device = tegrad.nv.reopen()
        launch(device, name, value)
        fault = fault_of(device)
        assert (fault.code, fault.kernel, fault.address, fault.log) == (code, name, None, ())


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_kernel_of_a_recorded_graph_is_named(each_chip: str) -> None:
    """All kernels of a graph go out together: the log tells which one it was. The graph itself ends in silence."""
    from tinygrad import Tensor, TinyJit

    device = open_device()
    data = Tensor([1.0, 2.0, 3.0], device="NV").realize()
    step = TinyJit(lambda x: ((x + 1).contiguous() * 3).contiguous().sum().realize())
    for _ in range(3):
        step(data)
    device.synchronize()
    inner = data.uop.buffer._buf
    device.iface._space.unmap(inner.va_addr)  # what a buffer freed too early is to the GPU
    step(data)
    fault = fault_of(device)
    assert (fault.code, fault.address) == (MMU, inner.va_addr)
    assert fault.kernel in fault.in_flight
    del step
    gc.collect()


# ---- the way on


def fail_and_reopen(each_chip: str) -> None:
    """Work, a fault, and work on the new device; the old one's tensors, programs and graphs say what they are."""
    from tinygrad import Tensor, TinyJit

    device = open_device()
    tensor = (Tensor([1, 2, 3], device="NV") + 1).realize()
    plus_one = TinyJit(lambda x: (x + 1).realize())
    for _ in range(3):
        assert plus_one(tensor).tolist() == [3, 4, 5]
    store = program(device, "store")
    launch(device, "wild", -300)
    with pytest.raises(DeviceFault):
        device.synchronize()
    again = tegrad.nv.reopen()
    assert again is not device
    assert open_device() is again
    for use in (tensor.tolist, lambda: (tensor + 1).tolist(), lambda: plus_one(tensor)):
        with pytest.raises(DeviceClosed):
            use()
    with pytest.raises(DeviceClosed):
        store(again.allocator.alloc(64), vals=(1,))
    buffer = launch(again, "add", 4)
    again.synchronize()
    assert words(buffer)[0] == 4
    assert (Tensor([1.5], device="NV") * 2).tolist() == [3.0]


def test_the_device_is_opened_again_in_the_same_process(each_chip: str) -> None:
    for _ in range(3):
        fail_and_reopen(each_chip)


def test_reopening_leaves_nothing_of_the_old_device(each_chip: str) -> None:
    from tegrad.orin.client import board_status

    def held() -> dict[str, int]:
        gc.collect()
        counts: dict[str, int] = board_status(each_chip)["counts"]
        return counts

    tegrad.nv.reopen()
    before = held()
    for _ in range(3):
        launch(open_device(), "wild", -300)
        tegrad.nv.reopen()
        assert held() == before


def test_random_numbers_go_on_after_a_reopening(each_chip: str) -> None:
    """tinygrad keeps each device's seed and counter as tensors, which end with the device."""
    from tinygrad import Tensor

    for _ in range(2):
        assert len(set(Tensor.rand(8, device="NV").tolist())) > 1
        tegrad.nv.reopen()


def test_a_device_that_is_well_or_closed_can_be_reopened_too(each_chip: str) -> None:
    first = tegrad.nv.reopen()
    second = tegrad.nv.reopen("nv")
    assert first is not second
    second.close()
    assert tegrad.nv.reopen() is open_device()
