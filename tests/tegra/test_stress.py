"""Eight ways to keep a GPU busy: bounded here, at full length in `make test-long`."""

import gc
import threading
from typing import Any

import numpy as np
import pytest
from harness import driver_fds, driver_maps, fill, words
from kernels import program

pytestmark = pytest.mark.board

MIB = 1 << 20
LENGTH = pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.long)], ids=["short", "full"])


def zeroed(device: Any, size: int = 4096) -> Any:
    """A buffer of zeros; a plain allocation may be an old buffer."""
    buffer = device.allocator.alloc(size)
    fill(buffer, bytearray(size))
    return buffer


def launch(prg: Any, buffer: Any, value: int, block: int = 1) -> None:
    prg(buffer, global_size=(1, 1, 1), local_size=(block, 1, 1), vals=(value,))


@LENGTH
def test_ten_thousand_launches(device: Any, full: bool) -> None:
    add, buffer = program(device, "add"), zeroed(device)
    count = 100_000 if full else 10_000
    for _ in range(count):
        launch(add, buffer, 1)
    device.synchronize()
    assert words(buffer)[0] == count


@LENGTH
def test_signal_chains(device: Any, full: bool) -> None:
    """Compute and copy queues that wait for each other's signals, a step of a chain each."""
    from tinygrad.device import BufferSpec

    from tegrad.nv.queues import NVComputeQueue, NVCopyQueue

    add, source, target = program(device, "add"), zeroed(device), zeroed(device)
    computed, copied = device.new_signal(value=0), device.new_signal(value=0)
    steps, room = 2000 if full else 200, add.kernargs_alloc_size
    arguments = device.allocator.alloc(room * steps, BufferSpec(cpu_access=True, nolru=True))
    for step in range(1, steps + 1):
        state = add.fill_kernargs((source,), (step,), arguments.offset(room * (step - 1), room))
        compute = NVComputeQueue().wait(copied, step - 1).memory_barrier()
        compute.exec(add, state, (1, 1, 1), (1, 1, 1)).signal(computed, step).submit(device)
        copy = NVCopyQueue().wait(computed, step)
        copy.copy(target, source, 4096).signal(copied, step).submit(device)
    copied.wait(steps)
    assert words(target)[0] == words(source)[0] == steps * (steps + 1) // 2


@LENGTH
def test_sustained_matmul(full: bool) -> None:
    """A rotation applied again and again keeps every vector's length and comes back after a full turn."""
    from tinygrad import Tensor, TinyJit

    turns, parts, size = (20 if full else 2), 60, 64
    angle = 2 * np.pi / parts
    rotation = np.eye(size, dtype=np.float32)
    for i in range(0, size, 2):
        rotation[i : i + 2, i : i + 2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    matrix, start = Tensor(rotation).realize(), np.random.default_rng(0).standard_normal((size, 48)).astype(np.float32)

    @TinyJit
    def step(x: Any) -> Any:
        return (matrix @ x).realize()

    x = Tensor(start).realize()
    for _ in range(turns * parts):
        x = step(x).clone().realize()
    np.testing.assert_allclose(x.numpy(), start, atol=1e-4 * turns)


@LENGTH
def test_mixed_compute_and_copy(full: bool) -> None:
    """Data goes in and comes out between kernels, each time other data."""
    from tinygrad import Tensor

    rng = np.random.default_rng(1)
    kept = Tensor.zeros(5000).contiguous().realize()
    expected = np.zeros(5000)
    for _ in range(500 if full else 40):
        fresh = rng.integers(-8, 8, 5000).astype(np.float32)
        kept.assign(kept * 0.5 + Tensor(fresh)).realize()
        expected = expected * 0.5 + fresh
        np.testing.assert_allclose(kept.numpy(), expected, rtol=1e-5, atol=1e-5)


@LENGTH
def test_backpressure(device: Any, full: bool) -> None:
    """Kernels come faster than they run: rings fill, the caller waits, nothing is lost or reordered."""
    spin, add, buffer = program(device, "spin"), program(device, "add"), zeroed(device)
    expected = 0
    for i in range(3000 if full else 300):
        launch(spin, buffer, 200)
        for turn in range(200):
            expected = (expected * 3 + turn) & 0xFFFFFFFF
        launch(add, buffer, i)
        expected = (expected + i) & 0xFFFFFFFF
    device.synchronize()
    assert words(buffer)[0] & 0xFFFFFFFF == expected


SHARED = """
extern "C" __global__ void reverse(int *state, int value) {
    extern __shared__ int tile[];
    int *mine = state + blockIdx.x * blockDim.x;
    for (int turn = 0; turn < value; turn++) {
        tile[threadIdx.x] = mine[threadIdx.x];
        __syncthreads();
        mine[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x] + 1;
        __syncthreads();
    }
}
"""


@LENGTH
def test_shared_memory(device: Any, full: bool) -> None:
    """Blocks that exchange their words through shared memory, turn after turn."""
    from tinygrad.device import TinyELF
    from tinygrad.dtype import dtypes
    from tinygrad.helpers import Target

    from tegrad.nv import compilers

    source = SHARED.replace("extern __shared__ int tile[]", "__shared__ int tile[256]")
    signature = (("state", 0, dtypes.int32, ()), ("value", 1, dtypes.int32, ()))
    image = compilers.compile_cuda(source, device.arch)
    reverse = device.runtime(TinyELF(image, "reverse", Target(device="NV", arch=device.arch), signature))
    blocks, turns = 64, 1001 if full else 101
    buffer = zeroed(device, blocks * 256 * 4)
    start = np.arange(blocks * 256, dtype=np.int32).reshape(blocks, 256)
    fill(buffer, bytearray(start.tobytes()))
    reverse(buffer, global_size=(blocks, 1, 1), local_size=(256, 1, 1), vals=(turns,))
    device.synchronize()
    got = np.array(words(buffer, blocks * 256), dtype=np.int32).reshape(blocks, 256)
    assert (got == start[:, ::-1] + turns).all()  # an odd number of turns


@LENGTH
def test_concurrent_operations(device: Any, full: bool) -> None:
    """Threads that use the device at once, each with its own buffer, get their own results."""
    add, failures = program(device, "add"), []
    turns = 2000 if full else 150

    def work(seed: int) -> None:
        try:
            buffer, total = zeroed(device), 0
            for turn in range(turns):
                launch(add, buffer, seed + turn)
                total += seed + turn
                if turn % 10 == 9:
                    assert words(buffer)[0] == total, f"thread {seed}, turn {turn}"
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert failures == []


@LENGTH
def test_memory_churn(device: Any, full: bool) -> None:
    """Buffers of many sizes come and go in random order; each keeps its mark, and in the end nothing is left."""
    rng = np.random.default_rng(2)
    device.allocator.free_cache()
    gc.collect()
    fds, maps = driver_fds(), driver_maps()
    live: list[tuple[Any, int, int]] = []

    def drop(index: int) -> None:
        buffer, size, mark = live.pop(index)
        assert words(buffer)[0] == mark
        device.allocator.free(buffer, size)

    for mark in range(20_000 if full else 1000):
        if len(live) == 64:
            drop(int(rng.integers(64)))
        size = int(rng.integers(4, 2 * MIB))
        buffer = device.allocator.alloc(size)
        fill(buffer, bytearray(mark.to_bytes(4, "little")))
        live.append((buffer, size, mark))
    while live:
        drop(len(live) - 1)
    device.allocator.free_cache()
    assert (driver_fds(), driver_maps()) == (fds, maps)
