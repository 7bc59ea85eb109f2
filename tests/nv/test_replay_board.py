"""Recordings: launches in order under races, runs in flight, tinygrad's work around them, faults, and the end."""

import gc
import threading
from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest
from boards import open_device, use_board
from kernels import program, words
from submissions import held_back, launch

from tegrad.nv.faults import DeviceClosed, DeviceFault
from tegrad.nv.program import LaunchError
from tegrad.nv.replay import DEPENDENCIES, Argument, Dependency, Launch, Number, Recording, RecordingClosed

pytestmark = pytest.mark.board

VALUES = (5, 1, 4, 2, 3)


def mixed(values: list[int], start: int = 0) -> int:
    """What launches of `mix` with these values make of a number, as a signed 32-bit integer."""
    total = reduce(lambda state, value: (state * 3 + value) & 0xFFFFFFFF, values, start)
    return total - (1 << 32) if total >> 31 else total


@pytest.fixture(params=[("agx-orin-64gb:12GiB", 5), ("agx-orin-64gb:11GiB", 6), ("gh100", 7)], ids=["5", "6", "gh100"])
def racing(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device on a board that races."""
    spec, seed = request.param
    with use_board(spec, race=seed):
        yield open_device()


@pytest.fixture
def device(board: str) -> Any:
    """A device on one board that races."""
    return open_device()


def mixes(device: Any, buffer: Any, values: tuple[int, ...] = VALUES) -> list[Launch]:
    """Launches that come out differently in any other order, each of many threads."""
    mix = program(device, "mix")
    return [Launch(mix, (buffer,), (1, 1, 1), (64, 1, 1), (value,)) for value in values]


def zeroed(device: Any) -> Any:
    buffer = device.allocator.alloc(4096)
    buffer.cpu_view()[0:4096] = bytes(4096)
    return buffer


def test_launches_run_in_order_at_every_dependency_and_in_every_run(racing: Any) -> None:
    for dependency in DEPENDENCIES.values():
        buffer = zeroed(racing)
        with Recording(racing, mixes(racing, buffer), dependency) as recording:
            for _ in range(5):
                number = recording.run()
            recording.wait(number)
            assert recording.done >= number
            assert words(buffer, 64) == [mixed(list(VALUES * 5))] * 64


def test_without_a_dependency_launches_change_places(racing: Any) -> None:
    buffer = zeroed(racing)
    with Recording(racing, mixes(racing, buffer, tuple(range(20))), Dependency()) as recording:
        for _ in range(5):
            number = recording.run()
        recording.wait(number)
        assert words(buffer)[0] != mixed(list(range(20)) * 5)


def test_two_recordings_in_turn_keep_their_order_and_their_arguments(racing: Any) -> None:
    buffer = zeroed(racing)
    with (
        Recording(racing, mixes(racing, buffer, (1, 2)), depth=1) as one,
        Recording(racing, mixes(racing, buffer, (7, 8, 9)), depth=1) as two,
    ):
        with held_back(racing):
            one.run(), two.run()
        for _ in range(6):
            one.run(), two.run()
        two.wait()
        assert words(buffer, 64) == [mixed([1, 2, 7, 8, 9] * 7)] * 64


def test_a_run_beyond_the_depth_waits_for_the_first(device: Any) -> None:
    buffer = zeroed(device)
    with Recording(device, mixes(device, buffer), depth=2) as recording, held_back(device):
        first, second = recording.run(), recording.run()
        assert (recording.done < first, second) == (True, first + 1)
        recording.run()
        assert recording.done >= first


def test_each_run_takes_the_inputs_that_it_is_given(racing: Any) -> None:
    """Also while others are in flight, several at once, and at an offset into them."""
    mix, buffers = program(racing, "mix"), [zeroed(racing) for _ in range(3)]
    launches = [Launch(mix, (buffers[0],), values=(value,)) for value in VALUES]
    inputs = [[Argument(0, 0), Argument(2, 0), Argument(4, 0)], [Argument(1, 0, 64), Argument(3, 0, 64)]]
    expected = [[0, 0] for _ in buffers]
    with Recording(racing, launches, depth=2, inputs=inputs) as recording:
        with held_back(racing):
            for turn in range(9):
                first, second = turn % 3, (turn * turn + 1) % 3
                times = 1 + turn % 2
                recording.run(times, (buffers[first].va_addr, buffers[second].va_addr))
                for _ in range(times):
                    for index, value in enumerate(VALUES):
                        state = expected[second if index % 2 else first]
                        state[index % 2] = mixed([value], state[index % 2])
        recording.wait()
        for buffer, (start, after) in zip(buffers, expected, strict=True):
            assert (words(buffer)[0], words(buffer, 17)[16]) == (start, after)


def test_a_recording_is_given_as_many_inputs_as_it_takes(device: Any) -> None:
    buffer = zeroed(device)
    launches, inputs = mixes(device, buffer), [[Argument(0, 0)]]
    with Recording(device, launches, inputs=inputs) as recording:
        for addresses in ((), (buffer.va_addr, buffer.va_addr)):
            with pytest.raises(LaunchError, match="takes 1 inputs"):
                recording.run(1, addresses)
        recording.wait(recording.run(1, (buffer.va_addr,)))
        assert words(buffer)[0] == mixed(list(VALUES))
    with Recording(device, launches) as recording, pytest.raises(LaunchError, match="takes 0 inputs"):
        recording.run(1, (buffer.va_addr,))
    for name in ("chain-lean", "idle-lean", "idle-within"):
        with pytest.raises(LaunchError, match="invalidates constants"):
            Recording(device, launches, DEPENDENCIES[name], inputs=inputs)


def test_each_run_takes_the_numbers_that_it_is_given(racing: Any) -> None:
    """Values and blocks along every axis, one number in several places, also while others are in flight."""
    blocks, buffer = program(racing, "blocks"), zeroed(racing)
    launches = [Launch(blocks, (buffer,), values=(value,)) for value in VALUES]
    numbers = [
        [Number(0, value=0), Number(3, value=0)],
        [Number(1, grid=0), Number(4, grid=1)],
        [Number(2, grid=2), Number(4, grid=0)],
    ]
    expected = np.zeros((4, 8, 8, 4), np.uint32)
    with Recording(racing, launches, DEPENDENCIES["chain"], depth=2, numbers=numbers) as recording:
        with held_back(racing):
            for turn in range(9):
                given = (turn * 7 - 20, 1 + turn % 4, 1 + turn * 3 % 4)
                recording.run(1 + turn % 2, (), given)
                value, first, second = given
                grids = [(1, 1, 1), (first, 1, 1), (1, 1, second), (1, 1, 1), (second, first, 1)]
                values = [value, *VALUES[1:3], value, VALUES[4]]
                for (x, y, z), number in list(zip(grids, values, strict=True)) * (1 + turn % 2):
                    mine = expected[:z, :y, :x]
                    mine[..., 0] = mine[..., 0] * 3 + np.uint32(number & 0xFFFFFFFF)
                    mine[..., 1:] = x, y, z
        recording.wait()
    assert np.array_equal(np.array(words(buffer, 1024)), expected.reshape(-1).astype(np.int32))
    racing.allocator.free(buffer, 4096)


def test_a_number_that_cannot_be_is_refused_and_the_next_one_is_taken(device: Any) -> None:
    blocks, buffer = program(device, "blocks"), zeroed(device)
    launches = [Launch(blocks, (buffer,), values=(1,))]
    numbers = [[Number(0, grid=1)], [Number(0, value=0)]]
    with Recording(device, launches, numbers=numbers) as recording:
        for given in ((), (1,), (1, 2, 3)):
            with pytest.raises(LaunchError, match="takes 2 numbers"):
                recording.run(1, (), given)
        for wrong in (0, -1, 1 << 16):
            with pytest.raises(LaunchError, match=f"the grid is {wrong} along y"):
                recording.run(1, (), (wrong, 5))
        with pytest.raises(LaunchError, match=f"a number of this recording cannot be {1 << 32}"):
            recording.run(1, (), (2, 1 << 32))
        recording.wait(recording.run(1, (), (2, 5)))
        assert words(buffer, 4) == [5, 1, 2, 1]
    with Recording(device, launches) as recording, pytest.raises(LaunchError, match="takes 0 numbers"):
        recording.run(1, (), (1,))
    with pytest.raises(LaunchError, match="invalidates constants"):
        Recording(device, launches, DEPENDENCIES["chain-lean"], numbers=numbers)


def test_runs_are_ordered_among_the_work_of_tinygrad(racing: Any) -> None:
    from tinygrad import Tensor

    numbers = Tensor([1, 2, 3], device="NV").realize()
    buffer = numbers.uop.base.realized._buf
    add = program(racing, "add")
    with Recording(racing, [Launch(add, (buffer,), block=(3, 1, 1), values=(10,))]) as recording:
        for _ in range(3):
            numbers.assign(numbers * 2).realize()
            recording.run()
            launch(add, buffer, 100)
    expected = [1, 2, 3]
    for _ in range(3):
        expected = [2 * value + 10 + (100 if i == 0 else 0) for i, value in enumerate(expected)]
    assert numbers.tolist() == expected


def test_runs_are_ordered_among_graphs_of_tinygrad(racing: Any) -> None:
    from tinygrad import Tensor, TinyJit

    numbers = Tensor([1, 2, 3], device="NV").realize()
    buffer = numbers.uop.base.realized._buf
    double = TinyJit(lambda: numbers.assign((numbers * 2).contiguous() + 1).realize())
    expected = [1, 2, 3]
    with Recording(racing, [Launch(program(racing, "add"), (buffer,), block=(3, 1, 1), values=(10,))]) as recording:
        for _ in range(6):
            double()
            recording.run()
            recording.run()
            expected = [2 * value + 1 + 20 for value in expected]
    assert numbers.tolist() == expected


def test_synchronize_waits_for_a_run(device: Any) -> None:
    buffer = zeroed(device)
    with Recording(device, mixes(device, buffer)) as recording:
        number = recording.run()
        device.synchronize()
        assert recording.done >= number
        assert words(buffer)[0] == mixed(list(VALUES))


def test_threads_may_share_a_recording(device: Any) -> None:
    buffer = zeroed(device)
    with Recording(device, [Launch(program(device, "add"), (buffer,), values=(1,))]) as recording:
        threads = [threading.Thread(target=lambda: [recording.run() for _ in range(20)], daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recording.wait()
        assert words(buffer) == [60]


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier|fault")
def test_a_fault_in_a_run_is_raised_and_stays(device: Any) -> None:
    buffer = zeroed(device)
    wild = program(device, "wild")
    recording = Recording(device, [*mixes(device, buffer), Launch(wild, (buffer,), values=(200,))])
    number = recording.run()
    with pytest.raises(DeviceFault) as caught:
        recording.wait(number)
    assert caught.value.kernel == "wild"
    with pytest.raises(DeviceFault):
        recording.run()
    recording.close()


def test_what_cannot_be_launched_is_refused_when_it_is_recorded(device: Any) -> None:
    buffer = zeroed(device)
    mix = program(device, "mix")
    cases = [
        ([], "at least one launch"),
        ([Launch(mix, (buffer,))], "takes 2 arguments, the launch gives 1"),
        ([Launch(mix, (buffer,), block=(2048, 1, 1), values=(1,))], "block is 2048"),
        ([Launch(mix, (buffer,), grid=(0, 1, 1), values=(1,))], "grid is 0"),
        ([Launch(mix, (buffer,), grid=(1.5, 1, 1), values=(1,))], "three integers"),  # type: ignore[arg-type]
    ]
    before = len(device.iface.memory)
    for launches, why in cases:
        with pytest.raises(LaunchError, match=why):
            Recording(device, launches)
    assert len(device.iface.memory) == before


def test_closing_gives_the_memory_back_once(device: Any) -> None:
    buffer, mix = zeroed(device), program(device, "mix")
    before = len(device.iface.memory)
    recording = Recording(device, [Launch(mix, (buffer,), values=(1,))])
    assert len(device.iface.memory) == before + 1
    recording.run()
    recording.close()
    recording.close()
    assert len(device.iface.memory) == before
    with pytest.raises(RecordingClosed, match="record the launches again"):
        recording.run()
    dropped = Recording(device, [Launch(mix, (buffer,), values=(1,))])
    dropped.run()
    del dropped
    gc.collect()
    assert len(device.iface.memory) == before


def test_a_recording_of_a_closed_device_says_so(device: Any) -> None:
    recording = Recording(device, mixes(device, zeroed(device)))
    device.close()
    with pytest.raises(DeviceClosed):
        recording.run()
    recording.close()
