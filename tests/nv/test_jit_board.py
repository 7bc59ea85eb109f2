"""TinyJit on the board: every call is a replay with the inputs of now, and what cannot be one runs as tinygrad does."""

import gc
import os
import pickle
import pickletools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from boards import close_device, open_device, use_board
from submissions import held_back

import tegrad.nv
from tegrad.nv import jit, waits
from tegrad.nv.faults import DeviceClosed, DeviceFault
from tegrad.nv.queues import Fifo

pytestmark = pytest.mark.board


@pytest.fixture(params=[("agx-orin-64gb:12GiB", 5), ("gh100", 7)], ids=["5", "gh100"])
def racing(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device on a board that races."""
    spec, seed = request.param
    with use_board(spec, race=seed):
        yield open_device()


@pytest.fixture
def device(board: str) -> Any:
    """A device on one board that races."""
    return open_device()


def tensor(*values: int) -> Any:
    from tinygrad import Tensor

    return Tensor(np.array(values, np.int32), device="NV").realize()


def jitted(function: Any, *inputs: Any, calls: int = 2) -> Any:
    """A TinyJit that has captured."""
    from tinygrad import TinyJit

    made = TinyJit(function)
    for _ in range(calls):
        made(*inputs)
    return made


def replays(made: Any) -> list[jit._Replay]:
    """The recordings of a TinyJit."""
    found = made.captured.__dict__.get(jit.REPLAYS)
    return [step for step in found.steps if isinstance(step, jit._Replay)] if found else []


# ---- inputs


def test_one_kernel_and_many_compute_with_the_inputs_of_now(racing: Any) -> None:
    one = jitted(lambda a, b: (a * 3 + b).realize(), tensor(1, 2), tensor(3, 4))
    many = jitted(lambda a, b: ((a + b).realize() * a).realize() - b, tensor(1, 2), tensor(3, 4))
    assert [len(step.recording.launches) for made in (one, many) for step in replays(made)] == [1, 3]
    for turn in range(8):
        a, b = tensor(turn, 7), tensor(5, turn * turn)
        assert one(a, b).tolist() == [3 * turn + 5, 21 + turn * turn]
        assert many(a, b).tolist() == [(turn + 5) * turn - 5, (7 + turn * turn) * 7 - turn * turn]


def test_a_call_is_one_submission(device: Any) -> None:
    """Also beyond the kernels that tinygrad puts into one graph."""

    def forty(x: Any) -> Any:
        for _ in range(40):
            x = (x + 1).contiguous().realize()
        return x

    fifo = device.compute_gpfifo
    for function, given, count in ((forty, tensor(1), 40), (lambda x: (x + 1).realize(), tensor(1), 1)):
        made = jitted(function, given)
        submissions, put = fifo.submissions, fifo.put_value
        for _ in range(5):
            result = made(given)
        assert (fifo.submissions, fifo.put_value) == (submissions + 5, put + 5)
        assert [len(step.recording.launches) for step in replays(made)] == [count]
        assert result.tolist() == [1 + count]


def test_parts_of_an_input_follow_it(racing: Any) -> None:
    """tinygrad's own graph keeps what they were when it was made: a repair."""
    from tinygrad.helpers import Context

    made = jitted(lambda x: ((x[4:8].contiguous() + 1).realize(), (x[8:12] + x[12:]).realize()), tensor(*range(16)))
    for turn in range(4):
        start = 100 * turn
        with Context(DEBUG=0 if turn % 2 else 2):  # through graphs, and replayed
            first, second = made(tensor(*range(start, start + 16)))
        assert first.tolist() == [start + i + 5 for i in range(4)]
        assert second.tolist() == [2 * start + 20 + 2 * i for i in range(4)]


def test_an_input_that_the_function_assigns_changes(racing: Any) -> None:
    made = jitted(lambda x: x.assign(x * 2 + 1).realize(), tensor(0, 0))
    for _ in range(3):
        x = tensor(1, 5)
        made(x)
        made(x)
        assert x.tolist() == [7, 23]


def test_an_output_given_as_an_input_is_read_before_it_is_written(racing: Any) -> None:
    made = jitted(lambda x: ((x + 1).realize() * 2).realize(), tensor(1))
    x, expected = tensor(1), 1
    for _ in range(6):
        x, expected = made(x), (expected + 1) * 2
    assert x.tolist() == [expected]


def test_state_goes_on_from_call_to_call_among_other_work(racing: Any) -> None:
    state = tensor(1)
    made = jitted(lambda x: state.assign((state * 3).contiguous() + x).realize(), tensor(0))
    expected = state.tolist()[0]
    for turn in range(10):
        made(tensor(turn))
        expected = expected * 3 + turn
        if turn % 3 == 0:
            state.assign(state + 1).realize()
            expected += 1
    assert state.tolist() == [(expected + (1 << 31)) % (1 << 32) - (1 << 31)]


# ---- calls in flight


def run_ahead(device: Any) -> list[int]:
    """Calls with an input each, while the GPU is held back; afterwards, what each of them added to the state."""
    sums = tensor(*[0] * 16)
    places = [tensor(*[int(at == place) for at in range(16)]) for place in range(12)]
    made = jitted(lambda x: sums.assign(sums + x).realize(), places[0], calls=3)
    sums.assign(tensor(*[0] * 16)).realize()
    device.synchronize()
    with held_back(device):
        for turn, place in enumerate(places):
            for _ in range(turn + 1):
                made(place)
    return list(sums.tolist())


def test_arguments_of_a_call_in_flight_are_not_overwritten(racing: Any) -> None:
    assert run_ahead(racing) == [*range(1, 13), 0, 0, 0, 0]


def test_without_the_wait_they_are(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fifo, "wait", lambda self, number: None)
    assert run_ahead(device) != [*range(1, 13), 0, 0, 0, 0]


def test_an_input_that_is_freed_in_flight_is_read_before_it_is_used_again(racing: Any) -> None:
    made = jitted(lambda x: (x + 1).realize(), tensor(*range(64)), calls=3)
    for turn in range(5):
        with held_back(racing, 0.05):
            result = made(tensor(*range(turn, turn + 64)))
            gc.collect()
            others = [tensor(*[-1] * 64) for _ in range(3)]  # one of them gets its memory
        assert result.tolist() == list(range(turn + 1, turn + 65))
        assert others[0].tolist() == [-1] * 64


def test_threads_may_call_at_once(device: Any) -> None:
    total = tensor(0)
    made = jitted(lambda x: total.assign(total + x).realize(), tensor(0), calls=3)
    given = [tensor(1), tensor(10), tensor(100)]
    before = total.tolist()[0]

    def work(x: Any) -> None:
        for _ in range(30):
            made(x)

    threads = [threading.Thread(target=work, args=(x,)) for x in given]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert total.tolist() == [before + 30 * 111]


# ---- what is not replayed


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("tegrad: not replayed")]


def test_what_a_recording_cannot_hold_runs_between_and_says_so(racing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from tinygrad import Tensor
    from tinygrad.helpers import Context

    def function(x: Any) -> Any:
        first = (x + 1).realize()
        there = first.to("PYTHON").realize()
        back = there.to("NV").realize()
        return ((back * 2).realize() + first).realize()

    with Context(DEBUG=1):
        made = jitted(function, tensor(1, 2))
    lines = said(capsys)
    assert len(lines) == 2
    assert all("COPY" in line and "a copy" in line for line in lines)
    assert [len(step.recording.launches) for step in replays(made)] == [1, 2]
    for turn in range(4):
        assert made(tensor(turn, 3)).tolist() == [3 * (turn + 1), 12]
    assert said(capsys) == []
    elsewhere = Tensor([1, 2], device="PYTHON").realize()
    with Context(DEBUG=1):
        jitted(lambda: (elsewhere + 1).realize())
    assert said(capsys) == []  # nothing of this device's


def test_what_variables_make_are_numbers_of_each_run(racing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from tinygrad import TinyJit, UOp
    from tinygrad.helpers import Context

    total = TinyJit(lambda x: (x.sum() + 1).realize())
    data, count = tensor(*range(10)), UOp.variable("count", 1, 10)
    with Context(DEBUG=1):
        for n in (*range(1, 11), 4, 4, 9):
            assert total(data[: count.bind(n)]).item() == sum(range(n)) + 1
    assert said(capsys) == []
    (step,) = replays(total)
    assert len(step.numbers) == 1


KINDS = {
    "beyond 32 bits": [(1 << 40, None)],
    "negative, 64 bits": [((-(1 << 40), 1 << 40), "int64")],
    "64 bits after 32": [(200, "int32"), (1 << 40, "int64")],
    "32 bits after 64": [(1 << 40, "int64"), (200, "int32")],
    "bytes side by side": [(200, "uint8"), (200, "uint8")],
    "a byte, a half word, 64 bits": [(200, "uint8"), (200, "int16"), (1 << 40, "int64")],
}
"""Ranges of variables and their types; None: tinygrad's choice."""


@pytest.mark.parametrize("kinds", KINDS.values(), ids=KINDS)
def test_a_number_has_its_own_width_and_place(kinds: list[tuple[Any, str | None]], device: Any) -> None:
    """Each was stored as 32 bits behind the one before: high words were lost, others never changed."""
    from tinygrad import TinyJit, UOp, dtypes

    bounds = [bound if isinstance(bound, tuple) else (0, bound) for bound, _ in kinds]
    variables = [
        UOp.variable(f"v{at}", *bound, *([getattr(dtypes, kind)] if kind else []))
        for at, (bound, (_, kind)) in enumerate(zip(bounds, kinds, strict=True))
    ]
    data = tensor(1, 2, 3).cast("int64").realize()
    made = TinyJit(
        lambda x, *given: sum((n.cast("int64") * 1000**at for at, n in enumerate(given)), x).contiguous().realize()
    )
    rng = np.random.default_rng(1)
    for _ in range(8):
        values = [int(rng.integers(low, high, endpoint=True)) for low, high in bounds]
        expected = [one + sum(value * 1000**at for at, value in enumerate(values)) for one in (1, 2, 3)]
        bound = [variable.bind(value) for variable, value in zip(variables, values, strict=True)]
        assert made(data, *bound).tolist() == expected
    assert len(replays(made)) == 1


def test_a_number_that_is_not_whole_is_tinygrads(device: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """It was truncated, and its bits taken for a float's."""
    from tinygrad import TinyJit, UOp, dtypes
    from tinygrad.helpers import Context

    by = UOp.variable("by", 0.0, 4.0, dtypes.float32)
    made = TinyJit(lambda x, by: (x.float() * by).contiguous().realize())
    with Context(DEBUG=1):
        for value in (1.5, 2.5, 0.5, 3.5):
            bound = by.bind(UOp.const(value, dtypes.float32))
            assert made(tensor(2, 4), bound).tolist() == [2 * value, 4 * value]
    assert any("whole numbers" in line for line in said(capsys))


def test_a_variable_that_is_missing_is_tinygrads_error(device: Any) -> None:
    from tinygrad import TinyJit, UOp

    made, by = TinyJit(lambda x, by: (x + by).realize()), UOp.variable("by", 0, 9)
    for value in (1, 2, 3):
        assert made(tensor(5), by.bind(value)).item() == 5 + value
    with pytest.raises(Exception, match="by") as raised:
        made(tensor(5), UOp.variable("other", 0, 9).bind(3))
    assert raised.type is not TypeError


def test_blocks_follow_a_variable(racing: Any) -> None:
    """What lies beyond them stays as an earlier call left it."""
    from tinygrad import TinyJit, UOp
    from tinygrad.helpers import Context

    made, rows = TinyJit(lambda x: ((x + 1) * 3).contiguous().realize()), UOp.variable("rows", 1, 40)
    expected = np.zeros(40 * 8, np.int32)
    with Context(NOOPT=1):
        for turn, n in enumerate((40, 40, 3, 3, 40, 1, 17, 39, 2)):
            data = tensor(*range(turn, turn + 40 * 8)).reshape(40, 8)
            out = made(data[: rows.bind(n)])
            expected[: n * 8] = (np.arange(turn, turn + n * 8) + 1) * 3
            if turn > 1:  # from here on it is one buffer
                assert np.array_equal(out.uop.base.buffer.numpy(), expected)
    (step,) = replays(made)
    assert any(patch.grids for patch in step.recording._numbers)


def test_a_kernel_whose_block_size_changes_is_run_by_tinygrad() -> None:
    from types import SimpleNamespace as Made

    from tinygrad.uop.ops import Ops, UOp

    info = Made(local_size=(UOp.variable("threads", 1, 8), 1, 1))
    kernel: Any = Made(src=(Made(op=Ops.PROGRAM, arg=info),))
    with pytest.raises(jit._Unheld, match="block size depends"):
        jit._launch(None, kernel, (), {"threads": 2})


def test_a_network_of_many_kernels_waits_for_each(racing: Any) -> None:
    """More launches than wait by commands, each of which reads what the one before wrote, beside a variable."""
    from tinygrad import TinyJit, UOp

    def function(x: Any, by: Any) -> Any:
        for turn in range(8):
            x = (x * 3 + (x.flip(0) if turn % 2 else by)).contiguous().realize()
        return x

    made, by = TinyJit(function), UOp.variable("by", 1, 99)
    for turn in range(6):
        given = np.arange(turn, turn + 4096, dtype=np.int32)
        found = made(tensor(*given), by.bind(turn + 1)).numpy()
        with np.errstate(over="ignore"):
            for step in range(8):
                given = given * np.int32(3) + (given[::-1] if step % 2 else np.int32(turn + 1))
        assert np.array_equal(found, given)
    (replay,) = replays(made)
    assert len(replay.recording.launches) > jit.FEW_LAUNCHES


@pytest.mark.parametrize(("variable", "value"), [("DEBUG", 2), ("PROFILE", 1), ("JIT", 2)])
def test_while_each_kernel_is_told_of_tinygrad_runs_them(device: Any, variable: str, value: int) -> None:
    from tinygrad.helpers import Context

    made = jitted(lambda x: ((x + 1).realize() * 2).realize(), tensor(1))
    (step,) = replays(made)
    for turn in range(3):
        with Context(**{variable: value}):
            before = step.recording._last
            assert made(tensor(turn)).tolist() == [2 * turn + 2]
            assert step.recording._last == before
        assert made(tensor(turn + 1)).tolist() == [2 * turn + 4]
        assert step.recording._last > before


def test_a_kernel_that_cannot_be_recorded_is_launched(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **more: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(jit, "Recording", full)
    made = jitted(lambda x: ((x + 1).realize() * 2).realize(), tensor(1))
    assert not replays(made)
    assert made(tensor(5)).tolist() == [12]


@pytest.mark.parametrize("size", [100, 37])
def test_it_counts_what_tinygrad_counts(device: Any, size: int) -> None:
    from tinygrad import UOp
    from tinygrad.helpers import Context, GlobalCounters

    count, data = UOp.variable("count", 1, 100), tensor(*range(100))
    made = jitted(lambda x, y: ((x + 1).realize() * 2 + y.sum()).realize(), data, data.clone()[: count.bind(50)])
    given, counted = (data, data.clone().realize()[: count.bind(size)]), []
    for level in (1, 0):
        with Context(PROFILE=level):
            GlobalCounters.reset()
            made(*given)
            counted.append((GlobalCounters.kernel_count, GlobalCounters.global_ops, GlobalCounters.global_mem))
    assert counted[0] == counted[1]
    assert counted[0][1] > 0
    assert replays(made)


# ---- memory


def test_what_was_freed_is_recorded_anew(device: Any) -> None:
    made = jitted(lambda x: ((x + 1).realize() * 2).realize(), tensor(1))
    for turn in range(3):
        made(tensor(1))
        made.captured.free_intermediates()
        assert replays(made) == []
        kept = [tensor(7) for _ in range(4)]  # on the memory that is free now
        assert made(tensor(turn)).tolist() == [2 * turn + 2]
        assert [one.tolist() for one in kept] == [[7]] * 4


def test_a_captured_function_travels_as_tinygrads(device: Any) -> None:
    """Its pickle names tinygrad's class, and what comes of it is replayed."""
    made = jitted(lambda x: ((x + 1).realize() * 2).realize(), tensor(1))
    made(tensor(1))
    data = pickle.dumps(made)
    named = {str(argument) for _, argument, _ in pickletools.genops(data) if isinstance(argument, str)}
    assert {"tinygrad.engine.jit", "CapturedJit"} <= named
    assert not [name for name in named if name.startswith("tegrad")]
    again = pickle.loads(data)
    for turn in range(3):
        assert again(tensor(turn)).tolist() == [2 * turn + 2]
    assert [len(step.recording.launches) for step in replays(again)] == [2]


# ---- faults and the end


@pytest.mark.klog_errors("(?i)sm |GR exception|mmu fault|page fault|error notifier")
def test_a_fault_in_a_replay_is_told(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "getenv", lambda name, default: 1000)
    made = jitted(lambda x: (x + 1).realize(), tensor(1), calls=3)
    x = tensor(1)
    buffer = x.uop.base.buffer
    buffer._bufs[buffer.device].va_addr = 0x100000  # below everything that is mapped
    made(x)
    with pytest.raises(DeviceFault) as caught:
        device.synchronize()
    assert caught.value.kernel in [launch.program.name for launch in replays(made)[0].recording.launches]
    with pytest.raises(DeviceFault):
        made(x)
    tegrad.nv.reopen()
    with pytest.raises(DeviceClosed):
        made(x)
    fresh = jitted(lambda x: (x + 1).realize(), tensor(1), calls=3)
    assert fresh(tensor(4)).tolist() == [5]
    with pytest.raises(DeviceClosed):
        fresh(x)
    with pytest.raises(DeviceClosed):
        made(tensor(4))


def test_a_closed_device_says_so(device: Any) -> None:
    made, x = jitted(lambda x: (x + 1).realize(), tensor(1), calls=3), tensor(1)
    close_device()
    with pytest.raises(DeviceClosed):
        made(x)


def test_a_child_process_does_not_replay_its_parents(device: Any) -> None:
    made, x = jitted(lambda x: (x + 1).realize(), tensor(1), calls=3), tensor(1)
    if (child := os.fork()) == 0:
        try:
            made(x)
        except DeviceClosed:
            os._exit(7)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert made(tensor(3)).tolist() == [4]
