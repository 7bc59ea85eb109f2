"""NVDevice and its allocator on the fake driver: copies, mappings, local memory, rings, graphs, open and close."""

import ctypes
import gc
import mmap
from array import array
from typing import Any

import pytest
from fake import FakeKernel
from submissions import empty_submission
from tinygrad.device import BufferSpec
from tinygrad.runtime import ops_nv

from tegrad.nv import device as module
from tegrad.nv import roles
from tegrad.nv.device import KERNARGS_SIZE, PROGRESS_STRIDE
from tegrad.nv.faults import DeviceClosed, DeviceFault, UnsupportedBuffer, WaitTimeout
from tegrad.nv.iface import TegraIface
from tegrad.nv.queues import NVComputeQueue, NVCopyQueue
from tegrad.nv.rings import RingError


def test_copies_are_plain_memory_after_a_sync(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    real = fake_device.synchronize
    monkeypatch.setattr(fake_device, "synchronize", lambda *a, **k: (syncs.append(1), real(*a, **k)))
    buffer = fake_device.allocator.alloc(1000)
    fake_device.allocator._copyin(buffer, memoryview(b"x" * 1000))
    out = bytearray(1000)
    fake_device.allocator._copyout(memoryview(out), buffer)
    assert out == b"x" * 1000
    assert len(syncs) == 2
    assert fake_device.dma_gpfifo.submissions == 1


def test_a_buffer_is_a_memoryview_of_exactly_its_bytes(fake_device: Any) -> None:
    buffer = fake_device.allocator.alloc(1001)
    view = fake_device.allocator._as_buffer(buffer)
    assert len(view) == 1001
    view[1000] = 9
    assert buffer.cpu_view()[1000] == 9
    assert len(fake_device.allocator._as_buffer(buffer.offset(4, 16))) == 16


def test_there_are_no_staging_buffers(fake_device: Any) -> None:
    assert fake_device.allocator.b == []


def test_memory_at_a_given_address_is_refused(fake_device: Any) -> None:
    with pytest.raises(UnsupportedBuffer, match="copy it"):
        fake_device.allocator.alloc(64, BufferSpec(external_ptr=0x1000))


def test_a_cpu_buffer_is_mapped_in_place_and_given_back(fake_kernel: FakeKernel, fake_device: Any) -> None:
    from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

    class Cpu:
        synced = 0

        def _is_cpu(self) -> bool:
            return True

        def synchronize(self) -> None:
            self.synced += 1

    own, cpu = mmap.mmap(-1, 6000), Cpu()
    own[4000:4003] = b"abc"
    address = ctypes.addressof(ctypes.c_char.from_buffer(own))
    buffer = HCQBuffer(address, 6000, view=MMIOInterface(address, 6000), owner=cpu)
    held = fake_kernel.held()
    mapped = fake_device.allocator._map(buffer)
    assert mapped.va_addr != address
    assert ctypes.string_at(fake_kernel.host(mapped.va_addr + 4000), 3) == b"abc"
    fake_device.allocator._unmap(mapped)
    fake_device.iface.give_back()
    fake_kernel.maps.pop(address)
    assert (fake_kernel.held(), cpu.synced) == (held, 1)
    part = fake_device.allocator._map(buffer.offset(4000, 3))
    assert ctypes.string_at(fake_kernel.host(part.va_addr), part.size) == b"abc"
    own[4000:4003] = b"xyz"
    assert ctypes.string_at(fake_kernel.host(part.va_addr), part.size) == b"xyz"
    assert fake_device.allocator._map(buffer.offset(4000, 3)).va_addr == part.va_addr
    fake_device.allocator._unmap(part)
    fake_device.iface.give_back()
    fake_kernel.maps.pop(address)
    assert fake_kernel.held() == held
    assert not buffer.mappings


def test_the_copy_queue_finds_a_mapped_cpu_buffer(fake_kernel: FakeKernel, fake_device: Any) -> None:
    """A CPU address does not fit the GPU's 40 bits, so the copy takes the mapping's."""
    from tinygrad.device import Buffer
    from tinygrad.dtype import dtypes
    from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

    from tegrad.nv.queues import NVCopyQueue

    class Cpu:
        def _is_cpu(self) -> bool:
            return True

        def synchronize(self) -> None:
            pass

    own = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(own))
    cpu = HCQBuffer(address, 8192, view=MMIOInterface(address, 8192), owner=Cpu())
    ours = Buffer("NV", 8192, dtypes.uint8).ensure_allocated()._buf
    mapped = fake_device.allocator._map(cpu)
    for part, va in ((cpu, mapped.va_addr), (cpu.offset(4096, 64), mapped.va_addr + 4096)):
        words = NVCopyQueue().copy(ours, part, 64)._q
        assert (words[1] << 32 | words[2], words[3] << 32 | words[4]) == (va, ours.va_addr)
    assert mapped.va_addr >> 40 == 0
    assert address >> 40 != 0
    fake_device.allocator._unmap(mapped)
    fake_kernel.maps.pop(address)


def test_running_out_of_memory_frees_the_cache_first(fake_kernel: FakeKernel, fake_device: Any) -> None:
    import errno

    buffer = fake_device.allocator.alloc(1 << 20)
    fake_device.allocator.free(buffer, 1 << 20)
    fake_kernel.fail["NVMAP_ALLOC"] = errno.ENOMEM
    handles = len(fake_kernel.handles)
    with pytest.raises(MemoryError):
        fake_device.allocator.alloc(2 << 20)
    assert len(fake_kernel.handles) == handles - 1
    assert fake_device.error_state is None


def test_local_memory_is_replaced_after_a_sync_and_not_cached(fake_kernel: FakeKernel, fake_device: Any) -> None:
    fake_device._ensure_has_local_memory(0x240)
    first = fake_device.shader_local_mem
    sms = fake_device.num_gpcs * fake_device.num_tpc_per_gpc * fake_device.num_sm_per_tpc
    assert first.size >= 0x240 * 32 * 48 * sms
    fake_device._ensure_has_local_memory(0x100)
    assert fake_device.shader_local_mem is first
    fake_device._ensure_has_local_memory(0x1000)
    assert fake_device.slm_per_thread == 0x1000
    fake_device.iface.give_back()
    assert first.va_addr not in fake_kernel.gpu_maps
    assert not any(fake_device.allocator.cache.values())


def test_local_memory_that_cannot_grow_stays_as_it_was(fake_kernel: FakeKernel, fake_device: Any) -> None:
    import errno

    fake_device._ensure_has_local_memory(0x240)
    before = fake_device.shader_local_mem
    fake_kernel.fail["NVMAP_ALLOC"] = errno.ENOMEM
    with pytest.raises(MemoryError):
        fake_device._ensure_has_local_memory(0x1000)
    assert (fake_device.shader_local_mem, fake_device.slm_per_thread) == (before, 0x240)


def test_kernel_arguments_larger_than_their_ring_are_refused(fake_device: Any) -> None:
    with pytest.raises(RingError, match="kernel arguments"):
        fake_device.kernargs_offset_allocator.alloc(KERNARGS_SIZE + 1)


def test_the_stock_allocator_serves_interfaces_without_unified_memory() -> None:
    class Iface:
        unified_memory = False

    class Device:
        iface = Iface()

    with pytest.raises(AttributeError):  # it goes on to ask this device for staging buffers
        module.make_allocator(Device())  # type: ignore[arg-type]


def test_cycles_leave_nothing(fake_kernel: FakeKernel) -> None:
    """Open, launch, close: nothing is held and tinygrad's tables do not grow."""
    from tinygrad import Device, Tensor
    from tinygrad.engine import realize
    from tinygrad.runtime.support.hcq import HCQCompiled

    def cycle() -> tuple[int, ...]:
        (Tensor([1, 2, 3]) + 1).realize()
        Device["NV"].close()
        gc.collect()
        assert set(fake_kernel.held().values()) == {0}
        pools = [len(v) for table in (HCQCompiled.signal_pool, HCQCompiled.signal_pages) for v in table.values()]
        return sum(map(len, HCQCompiled.peer_groups.values())), sum(pools), len(realize.runtime_cache)

    first = cycle()
    assert [cycle() for _ in range(10)] == [first] * 10


@pytest.mark.parametrize(("debug", "launches"), [(0, 2), (2, 1)], ids=["recording", "tinygrad's graph"])
def test_a_recorded_graph_runs_again_and_again(
    fake_kernel: FakeKernel, fake_device: Any, debug: int, launches: int
) -> None:
    """As a recording of ours, or as tinygrad's graph, whose second kernel hangs on the first one's QMD."""
    from tinygrad import Tensor, TinyJit
    from tinygrad.helpers import Context

    @TinyJit
    def step(x: Tensor) -> Tensor:
        return ((x + 1).realize() * 2).realize()

    x = Tensor.empty(16).realize()
    with Context(DEBUG=debug):
        for _ in range(3):
            step(x)
        fake_device.synchronize()
        before = fake_kernel.launches
        submissions = fake_device.compute_gpfifo.submissions
        step(x)
    fake_device.synchronize()
    assert fake_kernel.launches == before + launches
    assert fake_device.compute_gpfifo.submissions == submissions + 1


# ---- channels


def test_each_channel_stores_its_progress_in_a_word_of_its_own(fake_device: Any) -> None:
    page, fifos = fake_device._progress, (fake_device.compute_gpfifo, fake_device.dma_gpfifo)
    assert [fifo.progress_va - page.va_addr for fifo in fifos] == [0, PROGRESS_STRIDE]
    assert page.meta.role is roles.SIGNALS
    fake_device.synchronize()
    before = [fifo.done for fifo in fifos]
    NVComputeQueue().signal(fake_device.new_signal(value=0), 1).submit(fake_device)
    fifos[0].wait(fifos[0].submissions)
    assert [fifo.done for fifo in fifos] == [before[0] + 1, before[1]]


def test_a_channel_where_all_share_an_area_is_tinygrads_with_a_progress_word(
    fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []
    own = fake_device.compute_gpfifo

    def stock(device: Any, *arguments: Any) -> ops_nv.GPFifo:
        asked.append(arguments)
        return ops_nv.GPFifo(own.ring, own.gpput, own.entries_count, 77)

    monkeypatch.delattr(TegraIface, "open_fifo")
    monkeypatch.setattr(module._StockDevice, "_new_gpu_fifo", stock)
    area = object()
    made = fake_device._new_gpu_fifo(area, 1, 2, offset=0x100, entries=64, compute=True, video=True)
    plain = fake_device._new_gpu_fifo(area, 1, 2)
    assert asked == [(area, 1, 2, 0x100, 64, True, True), (area, 1, 2, 0, 0x400, False, False)]
    assert [fifo.token for fifo in (made, plain)] == [77, 77]
    assert fake_device._fifos[2:] == [made, plain]
    assert [fifo.progress_va - fake_device._progress.va_addr for fifo in (made, plain)] == [
        2 * PROGRESS_STRIDE,
        3 * PROGRESS_STRIDE,
    ]
    del fake_device._fifos[2:]


def test_progress_words_are_the_hosts_and_the_cpus_to_read(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hints that tinygrad's interfaces heed, and ours does not."""
    asked: list[dict[str, Any]] = []
    real = fake_device.iface.alloc
    monkeypatch.setattr(fake_device.iface, "alloc", lambda size, **how: (asked.append(how), real(size))[1])
    first, fake_device._progress = fake_device._progress, None
    fake_device._progress_word()
    assert asked == [{"host": True, "cpu_access": True}]
    fake_device.iface.free(fake_device._progress)
    fake_device._progress = first


def test_tinygrads_area_for_gpfifos_goes_back_only_where_channels_have_their_own(
    fake_kernel: FakeKernel, fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fake_device.gpfifo_area is None
    held, area = fake_kernel.held(), fake_device.iface.alloc(4096)
    fake_device.gpfifo_area = area
    assert (fake_device.gpfifo_area, fake_kernel.held()) == (None, held)
    monkeypatch.delattr(TegraIface, "open_fifo")
    kept: Any = object()
    fake_device.gpfifo_area = kept
    assert fake_device.gpfifo_area is kept


def test_the_windows_are_tinygrads_where_the_interface_has_none(
    fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (fake_device.shared_mem_window, fake_device.local_mem_window) == (0xFE00000000, 0xFD00000000)
    fake_device.shared_mem_window, fake_device.local_mem_window = 0x729400000000, 0x729300000000
    assert (fake_device.shared_mem_window, fake_device.local_mem_window) == (0xFE00000000, 0xFD00000000)
    for name in ("shared_mem_window", "local_mem_window"):
        monkeypatch.delattr(TegraIface, name)
    assert (fake_device.shared_mem_window, fake_device.local_mem_window) == (0x729400000000, 0x729300000000)


# ---- submissions


def copied(device: Any) -> None:
    """A submission on the channel for copies."""
    queue = NVCopyQueue().wait(device.timeline_signal, device.timeline_value - 1)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)


def test_commands_lie_one_after_the_other_at_multiples_of_16_bytes(fake_device: Any) -> None:
    places = [fake_device.place_commands(array("I", words)) for words in ([1, 2, 3, 4], [5] * 5, [6])]
    assert fake_device.cmdq_allocator is fake_device._commands
    first = places[0][0]
    assert places == [(first, 4), (first + 16, 5), (first + 48, 1)]
    at = (first - fake_device.cmdq_page.va_addr) // 4
    assert list(fake_device.cmdq[at : at + 13]) == [1, 2, 3, 4, 5, 5, 5, 5, 5, 0, 0, 0, 6]


def test_each_value_of_the_timeline_is_of_the_submission_that_releases_it(fake_device: Any) -> None:
    compute, copies = fake_device.compute_gpfifo, fake_device.dma_gpfifo
    value, before = fake_device.timeline_value, fake_device.submissions
    numbers = compute.submissions, copies.submissions
    for submit in (empty_submission, copied, empty_submission):
        submit(fake_device)
    assert fake_device.submissions == before + 3
    assert [fake_device.releasing(value + i) for i in range(4)] == [
        (compute, numbers[0] + 1),
        (copies, numbers[1] + 1),
        (compute, numbers[0] + 2),
        None,
    ]
    NVComputeQueue().memory_barrier().submit(fake_device)  # which releases none
    assert fake_device.releasing(value + 3) is None


def test_a_submission_keeps_its_commands_and_on_the_compute_channel_the_arguments(
    fake_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both rings may use their memory again when its number is done; its kernels are told of a fault until then."""
    commands: list[Any] = []
    arguments: list[Any] = []
    for ring, kept in ((fake_device._commands, commands), (fake_device._kernargs, arguments)):
        monkeypatch.setattr(ring, "submitted", lambda tag, to=ring.submitted, kept=kept: (kept.append(tag), to(tag)))
    compute, copies = fake_device.compute_gpfifo, fake_device.dma_gpfifo
    empty_submission(fake_device)
    copied(fake_device)
    first, second = (compute, compute.submissions), (copies, copies.submissions)
    assert (commands, arguments) == ([first, second], [first])
    assert [(fifo, number, list(names)) for fifo, number, names in list(fake_device._launches)[-2:]] == [
        (*first, []),
        (*second, []),
    ]


def test_a_recordings_runs_at_once_are_told_by_the_last(fake_device: Any) -> None:
    fifo = fake_device.compute_gpfifo
    fake_device.replayed(fifo, 1007, ["step"], 5003)
    assert fake_device.computed_value == 5003
    assert [fake_device.releasing(value) for value in (5001, 5003, 5004)] == [(fifo, 1005), (fifo, 1007), None]
    assert fake_device._in_flight() == ["step"]
    fake_device._launches.clear()
    fake_device._timeline.clear()


def test_a_device_that_failed_or_is_closed_is_not_settled(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    real = fake_device.synchronize
    monkeypatch.setattr(fake_device, "synchronize", lambda: (waited.append(1), real()))
    assert (fake_device.settled(), waited) == (True, [1])
    with monkeypatch.context() as patch:
        patch.setattr(fake_device, "error_state", DeviceFault(13))
        with pytest.raises(DeviceFault):
            _ = fake_device.kernargs_offset_allocator
        assert (fake_device.settled(), waited) == (False, [1])
    with monkeypatch.context() as patch:
        patch.setattr(fake_device, "closed", True)
        with pytest.raises(DeviceClosed):
            _ = fake_device.kernargs_offset_allocator
        assert (fake_device.settled(), waited) == (False, [1])

    def getenv(key: str) -> None:  # as tinygrad's own, which `wrong_setting` knows by its name
        raise ValueError("invalid literal for int() with base 10: 'x'")

    with monkeypatch.context() as patch:  # a buffer freed as Python ends, by a wrong setting
        patch.setattr(fake_device, "synchronize", lambda: getenv("HCQ_WAIT_TIMEOUT"))
        assert not fake_device.settled()

    def broken() -> None:
        raise ValueError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(fake_device, "synchronize", broken)
        with pytest.raises(ValueError, match="a fault of ours"):
            fake_device.settled()

    def stuck() -> None:
        raise WaitTimeout("no end")

    monkeypatch.setattr(fake_device, "synchronize", stuck)
    assert fake_device.settled() is False


# ---- memory that is not the CPU's too


@pytest.fixture
def apart_device(fake_kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch) -> Any:
    """NVDevice on the fake driver, with the allocator of a GPU that has memory of its own."""
    from tinygrad import Device

    monkeypatch.setattr(TegraIface, "unified_memory", False)
    return Device["NV"]


def test_freeing_after_a_fault_raises_nothing_and_asks_nothing_of_the_driver(
    apart_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is closed on the way out of a DeviceFault hides no reopen() behind a second one."""
    allocator, spec = apart_device.allocator, BufferSpec(nolru=True)
    assert type(allocator) is module.Allocator
    buffer, mapped = (allocator.alloc(4096, spec) for _ in range(2))
    freed: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(apart_device.iface, "free", freed.append)
        apart_device.error_state = DeviceFault(13)
        allocator.free(buffer, buffer.size, spec)
        allocator._unmap(mapped)
        assert freed == []
        apart_device.error_state = None
        allocator.free(buffer, buffer.size, spec)
        allocator._unmap(mapped)
        assert freed == [buffer, mapped]
