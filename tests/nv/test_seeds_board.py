"""What the device promises holds whatever liberties the GPU takes: the same work under many seeds of the racing board.

A few seeds in every run, many more in `make test-long`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import scenarios
from boards import open_device, use_board
from kernels import program, words
from submissions import launch

from tegrad.nv.queues import NVComputeQueue, NVCopyQueue
from tegrad.nv.replay import Launch, Recording

pytestmark = pytest.mark.board

SEEDS = (1, 2, 3, 4)
MANY_SEEDS = tuple(range(5, 65))


def seed_parameters() -> list[Any]:
    """Every seed once; most of them marked long."""
    return [*SEEDS, *(pytest.param(seed, marks=pytest.mark.long) for seed in MANY_SEEDS)]


@pytest.fixture(params=seed_parameters())
def racing(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device on a board that races with a seed of its own."""
    from tegrad.orin.client import board_stop

    with use_board(f"agx-orin-64gb:{8192 + request.param}MiB", race=request.param) as spec:
        yield open_device()
    board_stop(spec)


def computes(device: Any) -> None:
    """Arithmetic, a reduction and a matrix product, against numpy."""
    from tinygrad import Tensor

    rng = np.random.default_rng(1)
    a, b = rng.integers(-8, 8, (2, 24, 24)).astype(np.float32)
    x, y = Tensor(a, device="NV"), Tensor(b, device="NV")
    np.testing.assert_array_equal((x @ y + x).sum(axis=0).numpy(), (a @ b + a).sum(axis=0))


def replays(device: Any) -> None:
    """A recorded graph of three kernels with inputs that change."""
    from tinygrad import Tensor, TinyJit

    step = TinyJit(lambda x: ((x + 1).contiguous() * 3).contiguous().sum().realize())
    for i in range(12):
        assert step(Tensor([i, i + 1, i + 2], device="NV").realize()).item() == 3 * (3 * i + 6)


def writes_and_computes_in_turn(device: Any) -> None:
    """Write, compute, read, change, compute again, on one buffer."""
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    for i in range(20):
        device.allocator._copyin(buffer, memoryview((1000 * i).to_bytes(4, "little")))
        launch(add, buffer, i)
        got = bytearray(4)
        device.allocator._copyout(memoryview(got), buffer)
        assert int.from_bytes(got, "little") == 1001 * i


def reuses_memory(device: Any) -> None:
    """Buffers and programs that are freed while older work may still run, and taken again."""
    store, add = program(device, "store"), program(device, "add")
    for i in range(20):
        buffer = device.allocator.alloc(4096)
        launch(store, buffer, i)
        launch(add, buffer, 100)
        device.synchronize()
        assert words(buffer)[0] == i + 100
        device.allocator.free(buffer, 4096)
        store = program(device, "store")


def copies_beside_kernels(device: Any) -> None:
    """The copy queue and the compute queue on the same data, with signals between them."""
    source, target = device.allocator.alloc(4096), device.allocator.alloc(4096)
    store, add = program(device, "store"), program(device, "add")
    for i in range(1, 15):
        launch(store, source, i)
        copy = NVCopyQueue().wait(device.timeline_signal, device.timeline_value - 1)
        copy.copy(target, source, 64)
        copy.signal(device.timeline_signal, device.next_timeline()).submit(device)
        launch(add, target, 1000)
        device.synchronize()
        assert words(target)[0] == i + 1000


def signals_after_kernels(device: Any) -> None:
    """A signal of its own after each kernel."""
    buffer, store, signal = device.allocator.alloc(4096), program(device, "store"), device.new_signal(value=0)
    for i in range(1, 30):
        queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).memory_barrier()
        queue.exec(store, store.fill_kernargs((buffer,), (i,)), (1, 1, 1), (1, 1, 1)).signal(signal, i)
        queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
        signal.wait(i)
        assert words(buffer)[0] == i


def records_launches(device: Any) -> None:
    """Recordings of dependent launches, run in turn and among launches of tinygrad's."""
    buffer, add, mix = device.allocator.alloc(4096), program(device, "add"), program(device, "mix")
    device.allocator._copyin(buffer, memoryview(bytes(4)))
    expected = 0
    with (
        Recording(device, [Launch(mix, (buffer,), values=(value,)) for value in (1, 2, 3)]) as one,
        Recording(device, [Launch(mix, (buffer,), values=(value,)) for value in (5, 7)], depth=1) as two,
    ):
        for turn in range(12):
            for recording, values in ((one, (1, 2, 3)), (two, (5, 7))):
                recording.run()
                for value in values:
                    expected = (expected * 3 + value) % (1 << 32)
            if turn % 4 == 3:
                launch(add, buffer, turn)
                expected += turn
        device.synchronize()
        assert words(buffer)[0] % (1 << 32) == expected % (1 << 32)


def grows_local_memory(device: Any) -> None:
    """Kernels that spill more and more, one after the other; what lies in memory freed meanwhile stays whole."""
    spills = [program(device, f"spill{size}") for size in (16, 64)]
    buffer = device.allocator.alloc(4096)
    for step, spill in enumerate(itertools.islice(itertools.cycle(spills), 6)):
        spill(buffer, global_size=(8, 1, 1), local_size=(64, 1, 1), vals=(step,))
        mine = device.allocator.alloc(1 << 20)
        device.allocator._copyin(mine, memoryview(bytes([step]) * (1 << 20)))
        device.synchronize()
        assert bytes(device.allocator._as_buffer(mine)) == bytes([step]) * (1 << 20)
        device.allocator.free(mine, 1 << 20)


def equal(expected: object, scenario: Callable[[], object]) -> Callable[[Any], None]:
    """A scenario of the remedies' tests, with what comes of it where the remedies are in place."""

    def run(device: Any) -> None:
        assert scenario() == expected

    run.__name__ = scenario.__name__
    return run


SCENARIOS: list[Callable[[Any], None]] = [
    computes,
    replays,
    writes_and_computes_in_turn,
    reuses_memory,
    copies_beside_kernels,
    signals_after_kernels,
    grows_local_memory,
    records_launches,
    equal(21, scenarios.run_twice_with_two_values),
    equal([1] * 1000, scenarios.count_by_stride),
    equal(500, scenarios.overwrite_what_a_kernel_reads),
    equal(7, scenarios.read_what_a_kernel_writes),
]


def test_the_device_keeps_its_promises_under_any_seed(racing: Any) -> None:
    for scenario in SCENARIOS:
        scenario(racing)
