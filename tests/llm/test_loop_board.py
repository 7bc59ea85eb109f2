"""The decode loop with a step of two small kernels: tokens, order, limits, interruptions, faults, nothing left."""

import gc
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import close_device

from tegrad.llm import loop as module
from tegrad.llm import programs
from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.loop import Loop, LoopError
from tegrad.llm.state import RING, State, States
from tegrad.nv import compilers
from tegrad.nv.faults import DeviceClosed, DeviceFault
from tegrad.nv.replay import DEPENDENCIES, Launch, Place, repeated, up_to

pytestmark = pytest.mark.board

VOCAB = 1009
KERNELS = """
extern "C" __global__ void think(State *state, int *work) {
    work[0] = (state->token * 7 + state->position * 3 + (int)state->seed_lo + 11) % VOCAB;
    if (state->token == DEADLY) *(volatile int *)(1ull << 38) = 1;
}
extern "C" __global__ void linger(volatile int *work) { for (int i = 0; i < 300000; i++) work[1] = i; }
extern "C" __global__ void say(State *state, Entry *ring, int *work) { publish_token(state, ring, work[0]); }
"""
DEADLY = VOCAB + 1


def load(device: Any, name: str, buffers: int) -> Any:
    """One of the kernels of the step."""
    from tinygrad.device import TinyELF
    from tinygrad.dtype import dtypes
    from tinygrad.helpers import Target

    own = next(part for part in KERNELS.split('extern "C"') if f"void {name}(" in part)
    macros = f"#define VOCAB {VOCAB}\n#define DEADLY {DEADLY}\n#define RING {RING}\n"
    image = compilers.compile_cuda(f'{macros}{programs.source("state.cuh")}extern "C"{own}', device.arch)
    signature = tuple((f"p{at}", at, dtypes.char, (1,)) for at in range(buffers))
    return device.runtime(TinyELF(image, name, Target("NV", arch=device.arch), signature))


def expected(token: int, position: int, count: int, seed: int = 0) -> list[int]:
    """What the step makes of a token, again and again."""
    found = []
    for at in range(position, position + count):
        token = (token * 7 + at * 3 + seed + 11) % VOCAB
        found.append(token)
    return found


def open_device() -> Any:
    from tinygrad import Device

    return Device["NV"]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A device on a board that races, with the seed that a test asks for."""
    seed = getattr(request, "param", 3)
    import tegrad.nv

    tegrad.nv.install()
    close_device()
    monkeypatch.setenv("TEGRAD_BOARD", f"agx-orin-64gb:{17 + seed}GiB")
    monkeypatch.setenv("TEGRAD_RACE", str(seed))
    monkeypatch.setenv("DEV", "NV")
    yield open_device()
    close_device()


@pytest.fixture
def states(device: Any) -> Iterator[States]:
    states = States(device, slots=2)
    yield states
    states.close()


def step(device: Any, states: States) -> list[Launch]:
    """The launches of one step. What the kernels hand each other lies in the second sequence's state."""
    work = states.states.offset(64, 64)
    think, say = load(device, "think", 2), load(device, "say", 3)
    return [Launch(think, (states.states, work)), Launch(say, (states.states, states.rings, work))]


@pytest.fixture
def loop(device: Any, states: States) -> Iterator[Loop]:
    loop = Loop(device, step(device, states), states)
    yield loop
    loop.close()


@pytest.mark.parametrize("device", [3, 4, 5], indirect=True)
def test_tokens_come_in_order_for_any_prompt(loop: Loop) -> None:
    assert list(loop.stream([5], 0, 1000, 20)) == expected(5, 0, 20)
    assert list(loop.stream([1, 2, 3, 8], 10, 1000, 7, seed=100)) == expected(8, 13, 7, 100)
    assert list(loop.stream([9], 0, 1000, 1)) == expected(9, 0, 1)


@pytest.mark.parametrize("steps_per_submission", [2, 3])
def test_runs_of_several_steps_publish_the_same_tokens(device: Any, states: States, steps_per_submission: int) -> None:
    loop = Loop(
        device,
        step(device, states),
        states,
        dependency=DEPENDENCIES["chain-lean"],
        steps_per_submission=steps_per_submission,
    )
    assert list(loop.stream([5], 0, 1000, 20)) == expected(5, 0, 20)
    assert list(loop.stream([1, 2, 3, 8], 10, 1000, 7, seed=100)) == expected(8, 13, 7, 100)
    assert list(itertools.islice(loop.stream([9], 0, 1000), 4)) == expected(9, 0, 4)
    assert list(loop.stream([1, 2, 3], 4, 12)) == expected(3, 6, 6)
    assert list(loop.stream([9], 0, 1000, 1)) == expected(9, 0, 1)
    loop.close()


def test_each_of_several_steps_in_a_run_is_ordered_as_if_alone() -> None:
    form = repeated(up_to(DEPENDENCIES["chain-lean"], 2), 3)
    alone = up_to(DEPENDENCIES["chain-lean"], 2)
    for index in range(9):
        assert form.fields(Place(index, 9)) == alone.fields(Place(index % 3, 3))
    assert [form.fields(Place(index, 9))["cwd_membar_type"] for index in (1, 2, 4, 5, 8)] == [3, 1, 3, 1, 1]


def test_a_prompt_longer_than_the_ring_is_fed_in_parts(loop: Loop) -> None:
    prompt = [token % VOCAB for token in range(RING + 3)]
    assert list(loop.stream(prompt, 2, 4000, 3)) == expected(prompt[-1], RING + 4, 3)


def test_more_tokens_than_the_ring_holds_come_through_it(loop: Loop) -> None:
    assert list(loop.stream([5], 0, 4000, RING + 9)) == expected(5, 0, RING + 9)


def test_the_context_ends_a_stream(loop: Loop, states: States) -> None:
    assert list(loop.stream([1, 2, 3], 4, 12)) == expected(3, 6, 6)
    state = states.read(0)
    assert (state.stop, state.position, state.written) == (1, 11, 8)
    with pytest.raises(ContextError, match="3 tokens at position 10 do not fit a context of 12"):
        next(loop.stream([1, 2, 3], 10, 12))


def test_steps_beyond_the_limit_change_nothing(loop: Loop, states: States) -> None:
    states.begin(0, [7], 3, 5)
    for _ in range(5):
        number = loop.recording.run()
    loop.recording.wait(number)
    assert [states.token(0, count) for count in (1, 2, 3)] == [*expected(7, 3, 2), None]
    state = states.read(0)
    assert (state.stop, state.position, state.token) == (1, 4, expected(7, 3, 1)[0])


def test_a_settled_loop_has_no_step_that_still_runs_after_its_token(device: Any, states: States) -> None:
    linger = Launch(load(device, "linger", 1), (states.states.offset(64, 64),))
    loop = Loop(device, [*step(device, states), linger], states)
    fifo = loop.recording._fifo
    assert list(loop.stream([5], 0, 1000, 2)) == expected(5, 0, 2)
    last = fifo.submissions
    loop.settle()
    assert fifo.done >= last
    loop.close()


def test_two_steps_are_in_flight_while_a_token_is_read(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKEN_DELAY_S", 0.0)
    monkeypatch.setattr(module, "LATE_WAKE_S", 1e-9)
    loop._pace.knows(1e-3, 32)
    fifo = loop.recording._fifo
    before, seen = fifo.submissions, []
    for count, _ in enumerate(loop.stream([5], 0, 1000, 6), 1):
        seen.append(fifo.submissions - before - count)
    assert all(2 <= ahead <= 3 or ahead == 6 - count for count, ahead in enumerate(seen, 1))
    assert fifo.submissions - before == 6


def test_a_few_more_are_in_flight_where_steps_are_short(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKEN_DELAY_S", 1e3)
    fifo = loop.recording._fifo
    before = fifo.submissions
    for count, token in enumerate(loop.stream([5], 0, 1000, 40), 1):
        assert token == expected(5, 0, 40)[count - 1]
        assert fifo.submissions - before - count <= 3 * module.TOKENS_TOGETHER
    assert fifo.submissions - before == 40


def test_a_reader_that_stops_early_leaves_a_loop_that_goes_on(loop: Loop) -> None:
    stream = loop.stream([5], 0, 1000)
    assert list(itertools.islice(stream, 3)) == expected(5, 0, 3)
    stream.close()
    assert list(loop.stream([6, 7], 3, 1000, 4)) == expected(7, 4, 4)


def test_an_interrupt_while_waiting_leaves_a_loop_that_goes_on(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = loop.stream([5], 0, 1000, 100)
    next(stream)
    with monkeypatch.context() as patch:

        def interrupt(*given: int) -> None:
            raise KeyboardInterrupt

        patch.setattr(loop.states, "tokens", interrupt)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    assert list(loop.stream([6], 0, 1000, 4)) == expected(6, 0, 4)


def test_a_stream_that_another_replaced_is_over(loop: Loop) -> None:
    first = loop.stream([5], 0, 1000)
    next(first)
    assert next(loop.stream([6], 0, 1000)) == expected(6, 0, 1)[0]
    with pytest.raises(LoopError, match="another stream"):
        next(first)


def test_a_step_that_hands_over_nothing_is_an_error(device: Any, states: States) -> None:
    loop = Loop(device, step(device, states)[:1], states)
    with pytest.raises(LoopError, match="without publishing a token"):
        next(loop.stream([5], 0, 1000))
    loop.close()


@pytest.mark.klog_errors("(?i)fault|error notifier")
def test_a_fault_in_a_step_is_raised_at_its_token(loop: Loop) -> None:
    with pytest.raises(DeviceFault) as caught:
        list(loop.stream([5, DEADLY], 0, 1000, 5))
    assert caught.value.kernel == "think"
    with pytest.raises(DeviceFault):
        list(loop.stream([5], 0, 1000, 5))


def test_a_closed_device_ends_a_stream(device: Any, loop: Loop) -> None:
    stream = loop.stream([5], 0, 1000)
    next(stream)
    device.close()
    with pytest.raises(DeviceClosed):
        for _ in stream:
            pass


def test_a_loop_leaves_nothing_on_the_device(device: Any) -> None:
    load(device, "think", 2)  # the first program brings local memory, which stays
    gc.collect()
    before = len(device.iface.memory)
    states = States(device, slots=2)
    loop = Loop(device, step(device, states), states)
    next(loop.stream([5], 0, 1000))
    loop.close()
    states.close()
    del loop
    gc.collect()
    assert len(device.iface.memory) == before


def test_more_tokens_than_the_ring_holds_cannot_be_left_in_it(states: States) -> None:
    for tokens in ([], [1] * (RING + 1)):
        with pytest.raises(ModelError, match="give 1 to"):
            states.begin(0, tokens, 0, 10)
    assert bytes(states.read(0)) == bytes(State(stop=1))
