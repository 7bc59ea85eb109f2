"""What went wrong on a Jetson before: what prevents it, what happens without. docs/past-failures.md has the list."""

import ctypes
import faulthandler
import gc
import mmap
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from boards import close_device, open_device, own_counts, use_board
from kernels import program, words
from submissions import held_back, launch

from tegrad.hw.faults import NotifierCode
from tegrad.nv import device as device_module
from tegrad.nv import memory as memory_module
from tegrad.nv import queues, replay, waits
from tegrad.nv.device import NVDevice, UnifiedAllocator
from tegrad.nv.faults import DeviceClosed, DeviceFault, WaitTimeout
from tegrad.nv.graph import NVGraph
from tegrad.nv.iface import TegraIface
from tegrad.nv.program import LaunchError
from tegrad.nv.queues import Fifo, NVComputeQueue, NVCopyQueue
from tegrad.nv.rm import RmError
from tegrad.orin.client import board_status
from tegrad.uapi.errors import DriverError

pytestmark = pytest.mark.board

MIB = 1 << 20
FAULT = "(?i)mmu fault|page fault|sked exception|sm |gr exception|pbdma|error notifier"
"""Lines that a fault leaves in the kernel log."""


@pytest.fixture
def device(board: str) -> Any:
    """The device on a board that races."""
    return open_device()


def gpu_maps(spec: str) -> int:
    count: int = board_status(spec)["counts"]["gpu_mappings"]
    return count


# ---- recordings, one after the other


def fresh_recordings(count: int) -> None:
    """Record, replay and drop functions that share nothing, each with buffers of its own."""
    import numpy as np
    from tinygrad import Tensor, TinyJit

    for _ in range(count):

        @TinyJit
        def step(x: Tensor) -> Tensor:
            return ((x + 3).realize() * 2 - 1).realize()

        for turn in range(4):
            x = Tensor(np.full(64, turn, np.int32)).realize()
            assert step(x).numpy().tolist() == [2 * turn + 5] * 64


def test_sixty_recordings_one_after_the_other(board: str) -> None:
    """The earlier port crashed after 27: what a recording takes is given back."""
    fresh_recordings(3)
    gc.collect()
    before = gpu_maps(board)
    fresh_recordings(60)
    gc.collect()
    open_device().allocator.free_cache()
    assert gpu_maps(board) <= before


def test_recordings_whose_memory_stays_mapped_run_into_the_limit(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UnifiedAllocator, "_do_free", lambda self, buf, options: None)
    fresh_recordings(1)
    before = gpu_maps(board)
    fresh_recordings(10)
    gc.collect()
    open_device().allocator.free_cache()
    assert gpu_maps(board) >= before + 10


# ---- 198 instead of 200


def count_to_200(device: Any) -> int:
    """200 kernels that add one, each filled in where the one before was, as soon as that one's signal is seen."""
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    slot, done = device.allocator.alloc(add.kernargs_alloc_size), device.new_signal(value=0)
    for turn in range(1, 201):
        queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).memory_barrier()
        queue.exec(add, add.fill_kernargs((buffer,), (1,), slot), (1, 1, 1), (1, 1, 1))
        time.sleep(0.003)  # a slow CPU: the slot stays half filled for a while
        queue.signal(done, turn).signal(device.timeline_signal, device.next_timeline()).submit(device)
        done.wait(turn, timeout=1000)
    return words(buffer)[0]


@pytest.mark.parametrize("runs", [1, pytest.param(100, marks=pytest.mark.long)])
def test_two_hundred_additions_make_two_hundred(device: Any, runs: int) -> None:
    assert [count_to_200(device) for _ in range(runs)] == [200] * runs


def test_signals_out_of_a_qmd_that_is_filled_again_are_lost(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """tinygrad's own signals are fields of the QMD: the first that the CPU sees is not the end of it."""
    monkeypatch.setattr(NVComputeQueue, "signal", NVComputeQueue.__mro__[2].signal)
    monkeypatch.setattr(waits, "getenv", lambda name, default: 1000)
    with pytest.raises(WaitTimeout, match="no progress"):
        count_to_200(device)
    close_device()  # while waits are short: the GPU is stuck


# ---- local memory


def spill_into_the_old_local_memory(device: Any) -> tuple[bytes, bytes]:
    """Grow local memory while a kernel with the old one waits; write the memory that was freed; what is there later."""
    device._ensure_has_local_memory(0x240)
    size, spill = device.shader_local_mem.size, program(device, "add")
    spill.qmd.write(shader_local_memory_high_size=device.slm_per_thread)
    buffer, pattern = device.allocator.alloc(4096), b"\x5a" * 4096

    def grow_and_reuse() -> Any:
        device._ensure_has_local_memory(0x1000)
        fresh = device.allocator.alloc(size)
        device.allocator._bytes(fresh)[:4096] = pattern
        return fresh

    with held_back(device):
        launch(spill, buffer, 1)
        fresh = grow_and_reuse()
    return pattern, bytes(device.allocator._bytes(fresh)[:4096])


def test_local_memory_is_nobody_elses_while_a_kernel_spills_into_it(device: Any) -> None:
    written, found = spill_into_the_old_local_memory(device)
    assert found == written


def test_without_the_wait_a_kernel_spills_into_a_tensor(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NVDevice, "_ensure_has_local_memory", device_module._StockDevice._ensure_has_local_memory)
    written, found = spill_into_the_old_local_memory(device)
    assert found != written


# ---- memory of the CPU


class Cpu:
    """A CPU device as far as mapping its memory asks."""

    closed = False

    def _is_cpu(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def cpu_buffer(own: mmap.mmap) -> Any:
    from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

    address = ctypes.addressof(ctypes.c_char.from_buffer(own))
    return HCQBuffer(address, len(own), view=MMIOInterface(address, len(own), fmt="B"), owner=Cpu())


def test_a_kernel_works_in_the_cpus_own_memory(device: Any) -> None:
    own, add = mmap.mmap(-1, 8192), program(device, "add")
    own[4096:4100] = (30).to_bytes(4, "little")
    mapped = device.allocator._map(cpu_buffer(own))
    launch(add, mapped.offset(4096, 4), 12)
    device.synchronize()
    assert int.from_bytes(own[4096:4100], "little") == 42
    device.allocator._unmap(mapped)
    assert int.from_bytes(own[4096:4100], "little") == 42


@pytest.mark.klog_errors(FAULT)
def test_without_a_mapping_the_cpus_address_means_nothing_to_the_gpu(device: Any) -> None:
    add, buffer = program(device, "add"), cpu_buffer(mmap.mmap(-1, 8192))
    launch(add, buffer, 12)
    with pytest.raises(DeviceFault):
        device.synchronize()


# ---- addresses and handles


def recycle(device: Any, count: int) -> list[int]:
    """Allocate and free; every address that was handed out."""
    rng, seen = random.Random(4), []
    for _ in range(count):
        buffer = device.iface.alloc(4096 * rng.randint(1, 16))
        seen.append(buffer.va_addr)
        device.iface.free(buffer)
        device.iface.give_back()
    return seen


def check_recycling(spec: str, count: int) -> None:
    device = open_device()
    recycle(device, 100)
    counts, own = board_status(spec)["counts"], own_counts()
    seen = recycle(device, count)
    assert (board_status(spec)["counts"], own_counts()) == (counts, own)
    assert len(set(seen)) < 64
    assert len(device.iface.memory) < 32


def test_addresses_and_handles_are_used_again(board: str) -> None:
    check_recycling(board, 1500)


@pytest.mark.long
def test_addresses_and_handles_are_used_again_a_hundred_thousand_times(board: str) -> None:
    check_recycling(board, 100_000)


def test_addresses_that_are_not_given_back_run_out(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tegrad.nv.memory import AddressSpace

    device = open_device()
    monkeypatch.setattr(AddressSpace, "unmap", lambda self, va: None)
    assert len(set(recycle(device, 100))) == 100
    assert board_status(board)["counts"]["gpu_mappings"] > 100


# ---- counters that wrap


def set_timeline(device: Any, value: int) -> None:
    device.synchronize()
    device.timeline_value = value
    device.timeline_signal.value = value - 1


def work_across(device: Any, value: int) -> int:
    """Kernels and copies while the timeline passes `value`; how many of 20 additions the copy shows."""
    buffer, copy = device.allocator.alloc(4096), device.allocator.alloc(4096)
    add = program(device, "add")
    set_timeline(device, value - 10)
    for _ in range(20):
        launch(add, buffer, 1)
        queue = NVCopyQueue().wait(device.timeline_signal, device.timeline_value - 1).copy(copy, buffer, 4096)
        queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
        device.synchronize()
    return words(copy)[0]


def test_the_timeline_starts_over_at_2_to_the_31(device: Any) -> None:
    assert work_across(device, 1 << 31) == 20
    assert device.timeline_value < 100
    fresh_recordings(1)


def test_a_timeline_that_never_starts_over_stops_at_2_to_the_32(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy engine's release carries 32 bits."""
    monkeypatch.setattr(NVDevice, "_wrap_timeline_signal", lambda self: None)
    monkeypatch.setattr(waits, "getenv", lambda name, default: 300)
    with pytest.raises((WaitTimeout, ValueError, OverflowError)):
        work_across(device, 1 << 32)


def fill_the_ring(device: Any) -> list[int]:
    """Twice as many submissions as the GPFIFO has entries, while the GPU is held back; each stores its number."""
    count = 2 * device.compute_gpfifo.entries_count
    buffer, store = device.allocator.alloc(4 * count), program(device, "store")
    with held_back(device):
        for i in range(count):
            launch(store, buffer.offset(4 * i, 4), i + 1)
    return words(buffer, count)


def test_the_gpfifo_wraps_around(device: Any) -> None:
    assert fill_the_ring(device) == list(range(1, 2 * device.compute_gpfifo.entries_count + 1))


@pytest.mark.klog_errors(FAULT)
def test_a_ring_that_does_not_wait_loses_submissions(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Fifo.enter

    def enter(self: Any, *given: Any) -> None:
        self._free_from = self.put_value
        stock(self, *given)

    monkeypatch.setattr(Fifo, "enter", enter)
    monkeypatch.setattr(waits, "getenv", lambda name, default: 1000)
    count = 2 * device.compute_gpfifo.entries_count
    with suppress(WaitTimeout, DeviceFault):
        assert fill_the_ring(device) != list(range(1, count + 1))


# ---- copies


def check_copies(device: Any, sizes: list[int]) -> None:
    """By the CPU and by the copy engine, from and to addresses that are multiples of nothing."""
    rng, largest = random.Random(11), max(sizes)
    source, dest = device.allocator.alloc(largest + 64), device.allocator.alloc(largest + 64)
    for size in sizes:
        data, at, to = rng.randbytes(min(size, 1 << 16)) * -(-size // (1 << 16)), rng.randint(1, 31), rng.randint(1, 31)
        data = data[:size]
        device.allocator._copyin(source.offset(at, size), memoryview(data))
        device.allocator._copyin(dest, memoryview(b"\xee" * min(to, 31)))
        queue = NVCopyQueue().wait(device.timeline_signal, device.timeline_value - 1)
        queue.copy(dest.offset(to, size), source.offset(at, size), size)
        queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
        out = bytearray(size)
        device.allocator._copyout(memoryview(out), dest.offset(to, size))
        assert out == data, (size, at, to)
        assert bytes(device.allocator._bytes(dest)[:to]) == b"\xee" * to


def test_copies_of_any_size_at_odd_offsets(device: Any) -> None:
    check_copies(device, [1, 2, 3, 5, 31, 255, 4095, 4096, 4097, 65535, MIB + 1, 16 * MIB - 7])


@pytest.mark.long
def test_copies_of_up_to_a_gigabyte_at_odd_offsets(device: Any) -> None:
    check_copies(device, [256 * MIB + 13, 1024 * MIB])


def test_tensors_without_elements(board: str) -> None:
    import numpy as np
    from tinygrad import Tensor

    empty = Tensor(np.zeros((0, 3), np.float32)).realize()
    assert (empty + 1).numpy().shape == (0, 3)
    assert empty.sum().item() == 0
    assert Tensor.cat(empty, Tensor.ones(2, 3)).sum().item() == 6
    with pytest.raises(AssertionError, match="must be positive"):
        open_device().allocator.alloc(0)


def test_memory_of_no_bytes_is_refused_by_the_driver(board: str) -> None:
    """What a tensor without elements would meet if tinygrad asked for its memory."""
    from tinygrad.device import BufferSpec

    device, before = open_device(), board_status(board)["counts"]
    with pytest.raises(DriverError, match=r"NVMAP_CREATE.*EINVAL.*size must not be 0"):
        device.allocator._alloc(0, BufferSpec())
    assert board_status(board)["counts"] == before


# ---- the limits of a launch


def by_call(prg: Any, buffer: Any, grid: Any, block: Any) -> None:
    prg(buffer, global_size=grid, local_size=block, vals=(0,))


def by_queue(prg: Any, buffer: Any, grid: Any, block: Any) -> None:
    device = prg.dev
    queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).memory_barrier()
    queue.exec(prg, prg.fill_kernargs((buffer,), (0,)), grid, block)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)


ONE = (1, 1, 1)
GRIDS, BLOCKS = ((1 << 17, 1, 1), (1, 65535, 1), (1, 1, 65535)), ((1024, 1, 1), (1, 1024, 1), (16, 1, 64))
AT_THE_LIMIT = [*((grid, ONE) for grid in GRIDS), *((ONE, block) for block in BLOCKS)]
GRIDS_BEYOND = ((1 << 31, 1, 1), (1, 65536, 1), (1, 1, 65536), (0, 1, 1))
BLOCKS_BEYOND = ((1025, 1, 1), (33, 32, 1), (1, 1, 65), (1, 0, 1))
BEYOND = [*((grid, ONE) for grid in GRIDS_BEYOND), *((ONE, block) for block in BLOCKS_BEYOND)]


@pytest.mark.parametrize("start", [by_call, by_queue])
def test_grids_up_to_the_limits_run_and_larger_ones_are_refused(
    device: Any, start: Callable[[Any, Any, Any, Any], None]
) -> None:
    buffer, store = device.allocator.alloc(4096), program(device, "store")
    for grid, block in AT_THE_LIMIT:
        start(store, buffer, grid, block)
    device.synchronize()
    for grid, block in BEYOND:
        with pytest.raises(RuntimeError) as caught:
            start(store, buffer, grid, block)
        assert "must be 1 to" in str(caught.value) or "dims" in str(caught.value) or "threads" in str(caught.value)
    device.synchronize()


def test_a_grid_that_becomes_impossible_in_a_recording_is_refused(device: Any) -> None:
    from tinygrad.dtype import dtypes
    from tinygrad.uop.ops import UOp

    buffer, store = device.allocator.alloc(4096), program(device, "store")
    rows = UOp.variable("rows", 0, 1 << 20, dtype=dtypes.int32)
    kernargs = device.allocator.alloc(store.kernargs_alloc_size)
    queue = NVComputeQueue().memory_barrier()
    queue.exec(store, store.fill_kernargs((buffer,), (7,), kernargs), (1, rows, 1), (1, 1, 1)).bind(device)
    for value in (65536, 0):
        with pytest.raises(LaunchError, match=f"grid is {value} along y"):
            queue.submit(device, {"rows": value})
    assert words(buffer) == [0]
    queue.submit(device, {"rows": 65535})
    device.compute_gpfifo.wait(device.compute_gpfifo.submissions)
    assert words(buffer) == [7]


@pytest.mark.klog_errors(FAULT)
def test_an_empty_grid_stops_the_channel_if_it_gets_there(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queues, "check_size", lambda *args: None)
    by_queue(program(device, "store"), device.allocator.alloc(4096), (0, 1, 1), (1, 1, 1))
    with pytest.raises(DeviceFault) as caught:
        device.synchronize()
    assert caught.value.code == NotifierCode.GR_EXCEPTION


def replay_on_a_misaligned_view(debug: int) -> None:
    """Replay a recording whose kernel loads vectors on an input that starts 4 bytes after a boundary.

    At DEBUG=2 it is tinygrad's graph, and ours below.
    """
    import numpy as np
    from tinygrad import Tensor, TinyJit
    from tinygrad.helpers import Context

    @TinyJit
    def step(x: Tensor) -> Tensor:
        return ((x + 1).realize() * 2).realize()

    data = [Tensor(np.arange(1024, dtype=np.float32)).realize() for _ in range(4)]
    for x in data:
        step(x)
    whole = open_device().allocator.alloc(8192)
    buffer = data[0].uop.base.buffer
    buffer._bufs[buffer.device] = whole.offset(4, 4096)
    with Context(DEBUG=debug):
        step(data[0])
    open_device().synchronize()


@pytest.mark.parametrize("debug", [0, 2])
def test_an_input_that_breaks_the_alignment_is_refused_when_a_recording_is_replayed(board: str, debug: int) -> None:
    with pytest.raises(LaunchError, match="multiples of 16"):
        replay_on_a_misaligned_view(debug)
    open_device().synchronize()


@pytest.mark.klog_errors(FAULT)
@pytest.mark.parametrize("debug", [0, 2])
def test_without_the_check_it_is_a_fault(board: str, monkeypatch: pytest.MonkeyPatch, debug: int) -> None:
    monkeypatch.setattr(NVGraph, "__call__", NVGraph.__mro__[1].__call__)
    monkeypatch.setattr(replay, "check_alignment", lambda *given: None)
    with pytest.raises(DeviceFault, match="misaligned"):
        replay_on_a_misaligned_view(debug)


# ---- caches


def change_and_compute_again(device: Any) -> list[int]:
    """The CPU changes a kernel's data after each run of a plain queue; what the kernel makes of it."""
    buffer, add, seen = device.allocator.alloc(4096), program(device, "add"), []
    for value in (1, 10, 100, 1000):
        device.allocator._copyin(buffer, memoryview(value.to_bytes(4, "little")))
        launch(add, buffer, value)
        device.synchronize()
        out = bytearray(4)
        device.allocator._copyout(memoryview(out), buffer)
        seen.append(int.from_bytes(out, "little"))
    return seen


def test_what_the_cpu_changes_is_what_the_next_kernel_reads(device: Any) -> None:
    assert change_and_compute_again(device) == [2, 20, 200, 2000]


def change_arguments_in_place(device: Any) -> list[int]:
    """Launch a kernel whose arguments the CPU changes where they lie; the sum after each launch."""
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    add.qmd.write(constant_buffer_invalidate_0=0)  # tinygrad's other remedy for this, inside the launch
    slot, sums = device.allocator.alloc(add.kernargs_alloc_size), []
    device.allocator._copyin(buffer, memoryview(bytes(4)))
    for value in (1, 10, 100):
        queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).memory_barrier()
        queue.exec(add, add.fill_kernargs((buffer,), (value,), slot), ONE, ONE)
        queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
        device.synchronize()
        sums.append(words(buffer)[0])
    return sums


@pytest.fixture
def orderly() -> Iterator[Any]:
    """The device on a board that forgets no cache line by itself."""
    with use_board("agx-orin-64gb:8GiB"):
        yield open_device()


def test_arguments_that_the_cpu_changes_in_place_are_read_anew(orderly: Any) -> None:
    assert change_arguments_in_place(orderly) == [1, 11, 111]


def test_without_the_barrier_a_kernel_reads_the_arguments_of_before(
    orderly: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NVComputeQueue, "memory_barrier", lambda self: self)
    assert change_arguments_in_place(orderly) == [1, 2, 3]


# ---- free


def test_what_is_freed_is_unmapped_and_not_before_the_gpu_is_done(board: str) -> None:
    from tinygrad.device import BufferSpec

    device, spec = open_device(), BufferSpec(nolru=True)
    store, buffer = program(device, "store"), device.allocator.alloc(MIB, spec)
    before = gpu_maps(board)
    with held_back(device):
        launch(store, buffer, 5)
        device.allocator.free(buffer, buffer.size, spec)  # waits
        device.iface.give_back()
        assert gpu_maps(board) == before - 1
    device.synchronize()


@pytest.mark.klog_errors(FAULT)
def test_freed_while_in_flight_it_is_a_fault(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinygrad.device import BufferSpec

    device, spec = open_device(), BufferSpec(nolru=True)
    store, buffer = program(device, "store"), device.allocator.alloc(MIB, spec)
    monkeypatch.setattr(NVDevice, "settled", lambda self: not self.closed)
    gate = device.new_signal(value=0)
    queue = NVComputeQueue().wait(gate, 1)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    launch(store, buffer, 5)
    device.allocator.free(buffer, buffer.size, spec)
    device.iface.give_back()
    gate.value = 1
    with pytest.raises(DeviceFault, match="freed"):
        device.synchronize()


def test_memory_used_up_to_the_limit_is_a_memory_error_and_all_of_it_comes_back() -> None:
    with use_board("agx-orin-64gb:128MiB") as spec:
        device = open_device()
        start = board_status(spec)["counts"]
        for _ in range(2):
            held: list[Any] = []
            with pytest.raises(MemoryError, match="free tensors"):
                held.extend(device.iface.alloc(MIB) for _ in range(1000))
            assert len(held) > 64
            for buffer in held:
                device.iface.free(buffer)
            device.iface.give_back()
            assert board_status(spec)["counts"] == start


def need_what_the_cache_holds(device: Any) -> None:
    """Free buffers, which tinygrad keeps for reuse, and ask for more than is left beside them."""
    for buffer in [device.allocator.alloc(16 * MIB) for _ in range(4)]:
        device.allocator.free(buffer, buffer.size)
    large = device.allocator.alloc(80 * MIB)
    device.allocator.free(large, large.size)


def test_buffers_kept_for_reuse_are_given_back_when_memory_runs_out() -> None:
    with use_board("agx-orin-64gb:128MiB"):
        need_what_the_cache_holds(open_device())


def test_without_a_memory_error_nothing_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """tinygrad frees its cache and tries again on MemoryError; the driver's own error ends the work."""
    monkeypatch.setattr(memory_module, "errno", SimpleNamespace(ENOMEM=None))
    with use_board("agx-orin-64gb:128MiB"), pytest.raises(DriverError, match=r"NVMAP_ALLOC.*ENOMEM"):
        need_what_the_cache_holds(open_device())


def test_without_the_undo_every_refused_allocation_keeps_a_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    with use_board("agx-orin-64gb:128MiB") as spec:
        device = open_device()
        before = board_status(spec)["counts"]["nvmap_handles"]
        monkeypatch.setattr(memory_module.Nvmap, "_free_handle", lambda self, handle: None)
        for _ in range(3):
            with pytest.raises(MemoryError):
                device.iface.alloc(256 * MIB)
        assert board_status(spec)["counts"]["nvmap_handles"] == before + 3


# ---- processes, devices, threads


def in_a_child(work: Callable[[], str]) -> str:
    """What `work` answers in a forked child, or its error."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        answer = pipe.read()
    assert os.waitpid(child, 0)[1] == 0
    return answer


@pytest.fixture
def parent(board: str) -> tuple[Any, Any, Any]:
    """A device, a buffer that holds 7, and a kernel, in the parent."""
    device = open_device()
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    launch(add, buffer, 7)
    device.synchronize()
    return device, buffer, add


def test_a_forked_child_is_told_whose_device_it_is(parent: tuple[Any, Any, Any]) -> None:
    device, buffer, add = parent
    uses: list[Callable[[], Any]] = [
        lambda: device.allocator._copyout(memoryview(bytearray(4)), buffer),
        lambda: launch(add, buffer, 1),
        lambda: device.allocator.alloc(4096),
        lambda: device.compute_gpfifo.done,
    ]
    for use in uses:
        told = in_a_child(lambda use=use: str(use()))  # type: ignore[misc]
        assert told.startswith(DeviceClosed.__name__), told
        assert "before fork()" in told
        assert "spawn" in told
    launch(add, buffer, 1)
    device.synchronize()
    assert words(buffer) == [8]


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """A lock that another thread has."""
    has, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            has.set()
            enough.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has.wait(30)
    try:
        yield
    finally:
        enough.set()
        thread.join()


def test_a_child_that_is_forked_while_a_thread_submits_is_told_too(parent: tuple[Any, Any, Any]) -> None:
    """And does not wait for a thread that it does not have."""
    device, buffer, add = parent
    recording = device.record([replay.Launch(add, (buffer,), values=(1,))])

    def work() -> str:
        signal.alarm(30)
        recording.close()
        return str(launch(add, buffer, 1))

    with held(device.lock):
        assert in_a_child(work).startswith(DeviceClosed.__name__)
    recording.close()


def test_a_device_is_closed_after_what_another_thread_submits(parent: tuple[Any, Any, Any]) -> None:
    device, _, _ = parent
    closing = threading.Thread(target=device.close)
    with held(device.lock):
        closing.start()
        closing.join(0.2)
        assert not device.closed
    closing.join(30)
    assert device.closed


def test_two_threads_that_open_the_device_at_once_have_one(board: str) -> None:
    close_device()
    gate, found = threading.Barrier(2), list[Any]()

    def go() -> None:
        gate.wait(30)
        try:
            found.append(open_device())
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=go) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [device_module._opened["NV"]] * 2


def test_an_interrupt_of_a_run_leaves_no_lock_taken() -> None:
    """Python looks for signals after a call of `acquire`, in front of a `try`."""

    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    lock = threading.RLock()
    device = SimpleNamespace(lock=lock, closed=False, error_state=None)
    recording = SimpleNamespace(_device=device, _fifo=None, _slots=[1], _memory=1)
    before = signal.signal(signal.SIGALRM, interrupt)
    rng = random.Random(1)
    try:
        for _ in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(20e-6, 80e-6))
                while True:
                    with suppress(LaunchError):  # takes the lock, and refuses
                        replay.Recording.run(recording, 0)  # type: ignore[arg-type]
            except Interrupt:
                assert not lock._is_owned()  # type: ignore[attr-defined]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_opens_a_device_of_its_own(board: str, parent: tuple[Any, Any, Any]) -> None:
    device, buffer, add = parent
    before = board_status(board)["counts"]

    def own() -> str:
        mine = open_device()
        fresh, kernel = mine.allocator.alloc(4096), program(mine, "add")
        launch(kernel, fresh, 35)
        mine.synchronize()
        answer = str(words(fresh)[0])
        mine.close()
        return answer

    assert in_a_child(own) == "35"
    assert board_status(board)["counts"] == before
    launch(add, buffer, 1)
    device.synchronize()
    assert words(buffer) == [8]


def test_a_child_that_ends_leaves_the_parents_memory_alone(board: str, parent: tuple[Any, Any, Any]) -> None:
    device, buffer, _ = parent
    before = board_status(board)["counts"]
    assert in_a_child(lambda: str(device.close() or device.finalize())) == "None"
    assert board_status(board)["counts"] == before
    assert words(buffer) == [7]


def child_ends(work: Callable[[], object]) -> int:
    """How a forked child that does not know of the fork ends: waitpid's status."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "_opened", {})  # the devices that a child is told about
        if (child := os.fork()) == 0:
            faulthandler.disable()
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            work()
            os._exit(0)
        return os.waitpid(child, 0)[1]


def test_a_child_that_is_not_told_dies_of_the_parents_memory(parent: tuple[Any, Any, Any]) -> None:
    """The driver's mappings are not inherited."""
    device, buffer, _ = parent
    assert os.WTERMSIG(child_ends(lambda: words(buffer))) == signal.SIGSEGV
    assert words(buffer) == [7]
    device.synchronize()


@pytest.mark.klog_errors(FAULT)
def test_a_child_that_is_not_told_frees_the_parents_memory(board: str, parent: tuple[Any, Any, Any]) -> None:
    device, buffer, add = parent
    assert gpu_maps(board) > 0
    assert child_ends(device.iface.device_fini) == 0
    assert gpu_maps(board) == 0
    launch(add, buffer, 1)
    with pytest.raises(DeviceFault):
        device.synchronize()


def test_a_second_device_is_refused_in_one_sentence(board: str) -> None:
    from tinygrad import Device

    with pytest.raises(RmError, match="NV:1 does not exist: a Jetson has one GPU"):
        Device["NV:1"]
    assert Device["NV"] is Device["NV:0"]


def test_without_the_check_a_second_device_takes_the_same_gpu(board: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It opens if it is the first; and then the real one does not, for a reason that says nothing."""
    from tinygrad import Device

    stock = TegraIface.__init__
    monkeypatch.setattr(TegraIface, "__init__", lambda self, dev, number: stock(self, dev, 0))
    second = Device["NV:1"]
    try:
        with pytest.raises(RmError, match="only this GPU's own buffers"):
            Device["NV"]
    finally:
        second.close()


def in_threads(work: Callable[[int], None], count: int = 4) -> list[BaseException]:
    """Run `work` in several threads at once; what they raised."""
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def count_in_threads(device: Any) -> list[int]:
    """Four threads allocate, launch, wait and read at once; what each counted."""
    add, counts = program(device, "add"), [0] * 4

    def work(number: int) -> None:
        buffer = device.allocator.alloc(4096)
        device.allocator._copyin(buffer, memoryview(bytes(4096)))
        for turn in range(60):
            launch(add, buffer, number + 1)
            if turn % 7 == 0:
                device.synchronize()
            device.allocator.free(device.allocator.alloc(8192 << number), 8192 << number)
        out = bytearray(4)
        device.allocator._copyout(memoryview(out), buffer)
        counts[number] = int.from_bytes(out, "little")

    assert in_threads(work) == []
    return counts


def test_threads_share_the_device(device: Any) -> None:
    assert count_in_threads(device) == [60, 120, 180, 240]


def test_timeline_values_that_go_out_of_order_block_the_channel(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the lock is for: a launch waits on the GPU for the value before its own, and a channel runs in order."""
    monkeypatch.setattr(waits, "getenv", lambda name, default: 300)
    early = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1)
    early.signal(device.timeline_signal, device.next_timeline())
    late = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1)
    late.signal(device.timeline_signal, device.next_timeline())
    late.submit(device)
    early.submit(device)
    with pytest.raises(WaitTimeout):
        device.synchronize()
