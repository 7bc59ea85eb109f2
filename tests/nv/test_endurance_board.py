"""Long runs and rough ends on the board: signals, many launches, many cycles, faults, kills, memory at its limit."""

import gc
import os
import signal as signals
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from boards import close_device, open_device, own_counts, use_board
from kernels import program, words
from submissions import launch

from tegrad.hw.chips import CHIPS
from tegrad.hw.faults import NotifierCode
from tegrad.nv.faults import DeviceFault
from tegrad.nv.queues import NVComputeQueue

pytestmark = pytest.mark.board


@pytest.fixture(params=["agx-orin-64gb", "gh100"])
def each_chip(request: pytest.FixtureRequest) -> Iterator[str]:
    with use_board(f"{request.param}:16GiB", race=20) as spec:
        yield spec


def counts(spec: str) -> dict[str, int]:
    from tegrad.orin.client import board_status

    result: dict[str, int] = board_status(spec)["counts"]
    return result


# ---- signals and launches


def test_a_signal_directly_after_a_kernel(each_chip: str) -> None:
    device = open_device()
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    slot = device.allocator.alloc(add.kernargs_alloc_size)
    done = device.new_signal(value=0)
    for i in range(1, 51):
        queue = NVComputeQueue().memory_barrier()
        queue.exec(add, add.fill_kernargs((buffer,), (i,), slot), (1, 1, 1), (1, 1, 1)).signal(done, i).submit(device)
        done.wait(i, timeout=5000)
        assert words(buffer)[0] == i * (i + 1) // 2


def test_two_kernels_a_hundred_times_with_changing_values(each_chip: str) -> None:
    device = open_device()
    buffer = device.allocator.alloc(4096)
    add, store = program(device, "add"), program(device, "store")
    for i in range(100):
        launch(store, buffer, 1000 * i)
        launch(add, buffer, i)
        device.synchronize()
        assert words(buffer)[0] == 1001 * i


def test_ten_thousand_launches_without_a_sync() -> None:
    with use_board("agx-orin-64gb"):
        device = open_device()
        buffer, add = device.allocator.alloc(4096), program(device, "add")
        for i in range(10000):
            launch(add, buffer, i)
        device.synchronize()
        assert words(buffer)[0] == 9999 * 10000 // 2


# ---- open and close


@pytest.mark.parametrize("cycles", [40, pytest.param(200, marks=pytest.mark.long)])
def test_cycles_leave_everything_where_it_was(cycles: int) -> None:
    from tinygrad import Tensor
    from tinygrad.runtime.support.hcq import HCQCompiled

    with use_board("agx-orin-64gb") as spec:

        def cycle() -> None:
            assert (Tensor([1, 2, 3]) + Tensor([4, 5, 6])).numpy().tolist() == [5, 7, 9]
            close_device()

        cycle()
        gc.collect()
        before, board_before = own_counts(), counts(spec)
        assert set(board_before.values()) == {0}
        open_device()
        assert own_counts()["maps"] > before["maps"] + 8
        assert own_counts()["fds"] > before["fds"] + 5
        assert counts(spec)["gpu_mappings"] > 0
        close_device()
        assert own_counts() == before
        for _ in range(cycles):
            cycle()
        gc.collect()
        assert counts(spec) == board_before
        assert own_counts() == before
        assert sum(map(len, HCQCompiled.peer_groups.values())) <= 1


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
def test_a_device_that_faulted_is_closed_and_opened_again(each_chip: str) -> None:
    for _ in range(3):
        device = open_device()
        buffer, wild = device.allocator.alloc(4096), program(device, "wild")
        wild(buffer, vals=(-200,))
        with pytest.raises(DeviceFault) as caught:
            device.synchronize()
        assert caught.value.code == NotifierCode.FIFO_ERROR_MMU_ERR_FLT
        assert "wild" in (caught.value.kernel, *caught.value.in_flight)
        with pytest.raises(DeviceFault):
            launch(wild, buffer, 0)
        device.close()
        assert set(counts(each_chip).values()) == {0}
    device = open_device()
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    launch(add, buffer, 4)
    device.synchronize()
    assert words(buffer)[0] == 4


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
def test_a_store_past_a_buffer_names_it(each_chip: str) -> None:
    device = open_device()
    buffer, store = device.allocator.alloc(4096), program(device, "store")
    store(buffer.offset(4092, 4), local_size=(2, 1, 1), vals=(1,))
    with pytest.raises(DeviceFault, match="after the buffer of 4096 bytes") as caught:
        device.synchronize()
    assert caught.value.address == buffer.va_addr + 4096


CLIENT = """
import sys
sys.path.insert(0, sys.argv[1])
import tegrad.nv
tegrad.nv.install()
from kernels import program
from tinygrad import Device
device = Device["NV"]
buffer, spin = device.allocator.alloc(4096), program(device, "spin")
for _ in range(3):
    spin(buffer, local_size=(32, 1, 1), vals=(2000000000,))
print("running", flush=True)
device.synchronize()
"""


@pytest.mark.klog_errors("unbind")  # a channel that is busy when its process dies
def test_a_killed_client_leaves_the_board_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    from tegrad.orin import board, client

    name = f"kill-{os.getpid()}"
    board.start(CHIPS["agx-orin-64gb"], 4 << 30, name=name, linger=None)  # however long the client takes to come
    try:
        environment = {**os.environ, "TEGRAD_BOARD": name, "DEV": "NV"}
        command = [sys.executable, "-c", CLIENT, str(Path(__file__).parent)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as victim:
            assert victim.stdout is not None
            assert victim.stdout.readline() == "running\n"
            deadline = time.monotonic() + 10
            while client.board_status(name)["gpu"]["doorbells"] < 6 and time.monotonic() < deadline:
                time.sleep(0.02)
            assert counts(name)["channels"] == 2
            victim.send_signal(signals.SIGKILL)
        assert set(counts(name).values()) == {0}
        with use_board(name):
            device = open_device()
            buffer, add = device.allocator.alloc(4096), program(device, "add")
            launch(add, buffer, 7)
            device.synchronize()
            assert words(buffer)[0] == 7
        assert set(counts(name).values()) == {0}
    finally:
        client.board_stop(name)


# ---- memory


@pytest.mark.clang
def test_a_kernel_works_on_a_buffer_of_the_cpu_device() -> None:
    from tinygrad.device import Buffer
    from tinygrad.dtype import dtypes

    with use_board("agx-orin-64gb") as spec:
        device = open_device()
        add = program(device, "add")
        for value in (10, 20):  # the second buffer reuses the memory of the first
            buffer = Buffer("CPU", 64, dtypes.int32, preallocate=True)
            buffer.copy_from(Buffer("PYTHON", 64, dtypes.int32, opaque=memoryview(bytearray(256))))
            launch(add, buffer.get_buf("NV"), value)
            device.synchronize()
            assert buffer.numpy().tolist() == [value] + [0] * 63
            handles = counts(spec)["nvmap_handles"]
            del buffer
            gc.collect()
            device.iface.give_back()
            assert counts(spec)["nvmap_handles"] == handles - 1


def test_memory_that_runs_out_is_a_memory_error_and_not_the_end() -> None:
    from tinygrad import Tensor

    with use_board("agx-orin-64gb:256MiB") as spec:
        device = open_device()
        held: list[Any] = []
        with pytest.raises(MemoryError, match="free tensors") as caught:
            held.extend(device.allocator.alloc(32 << 20) for _ in range(100))
        assert caught.value.__suppress_context__
        assert 4 <= len(held) < 8
        for buffer in held:
            device.allocator.free(buffer, buffer.size)
        big = device.allocator.alloc(96 << 20)  # takes the cached ones back
        device.allocator.free(big, big.size)
        assert (Tensor([1, 2, 3]) + 1).numpy().tolist() == [2, 3, 4]
        close_device()
        assert set(counts(spec).values()) == {0}


def test_a_buffer_beyond_4_gib_is_written_and_read_at_its_end() -> None:
    from tegrad.nv.memory import RESERVE_BYTES, available_memory

    size = (4 << 30) + (1 << 20)
    if available_memory() < size + RESERVE_BYTES + (1 << 30):
        pytest.skip(f"needs {size} bytes of free memory")
    with use_board("agx-orin-64gb"):
        device = open_device()
        buffer, store = device.allocator.alloc(size), program(device, "store")
        launch(store, buffer.offset(size - 4, 4), 77)
        device.synchronize()
        out = bytearray(4)
        device.allocator._copyout(memoryview(out), buffer.offset(size - 4, 4))
        assert int.from_bytes(out, "little") == 77
