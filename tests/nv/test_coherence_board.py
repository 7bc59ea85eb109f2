"""On a board whose L2 is not coherent with the CPU: both policies compute what they should.

Without the table, or without the flushes, they do not. Stores of the GPU go through L2, or stay in it.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from boards import close_device, use_board
from kernels import program

import tegrad
from tegrad import models
from tegrad.llm.engine import Engine
from tegrad.llm.errors import ModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.sampling import Settings
from tegrad.nv import roles, waits
from tegrad.nv.coherence import Coherence
from tegrad.nv.faults import DeviceFault, WaitTimeout
from tegrad.nv.memory import AddressSpace, Memory, Nvmap
from tegrad.nv.queues import NVComputeQueue
from tegrad.nv.roles import Policy, Role
from tegrad.nv.spec import MemorySpec

pytestmark = pytest.mark.board

BOARDS = {"through": "agx-orin-64gb:21GiB", "back": "agx-orin-64gb:22GiB"}
"""By how stores behave; a size of its own keeps a board apart from the others."""
ONCE = {"global_size": (1, 1, 1), "local_size": (1, 1, 1)}


@pytest.fixture(params=BOARDS)
def stores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How the board's L2 treats stores: they go "through", or come "back" to memory later."""
    monkeypatch.setenv("TEGRAD_L2", request.param)
    with use_board(BOARDS[request.param]):
        yield request.param


def opened() -> Any:
    from tinygrad import Device

    return Device["NV"]


def one_line() -> list[int]:
    """Twice, so that everything that is written once is written again."""
    from tinygrad import Tensor

    first: list[int] = (Tensor([1, 2, 3]) + Tensor([4, 5, 6])).numpy().tolist()
    again: list[int] = (Tensor([2, 2, 3]) + Tensor([4, 5, 6])).numpy().tolist()
    return first + again


def recorded() -> list[int]:
    """A recording with three inputs."""
    outputs = []
    with tegrad.record(lambda x: (x + 1).contiguous(), np.zeros(1, np.int32)) as made:
        for value in (1, 20, 300):
            made.inputs[0][:] = value
            made.run()
            outputs.append(int(made.outputs[0][0]))
    return outputs


def jitted() -> list[int]:
    """A TinyJit of one kernel and one of two, each with an input that changes and one that the CPU writes anew."""
    from tinygrad import Tensor, TinyJit

    outputs, kept = [], Tensor([0], device="NV").realize()
    one = TinyJit(lambda x: (x + kept).realize())
    two = TinyJit(lambda x: ((x + kept).realize() * 2).realize())
    for value in (1, 20, 300, 4000):
        kept.uop.base.realized.copy_from(Tensor([value], device="PYTHON").realize().uop.base.realized)
        outputs += [int(function(Tensor([7 * value]).realize()).item()) for function in (one, two)]
    return outputs


def gated() -> list[int]:
    """The GPU waits for a signal that the CPU sets later, twice."""
    device, passed = opened(), []
    for _ in range(2):
        gate = device.new_signal(value=0)
        queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).wait(gate, 1)
        queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
        time.sleep(0.05)
        gate.value = 1
        device.synchronize()
        passed.append(int(gate.value))
    return passed


def text() -> list[int]:
    """Tokens of the shipped model, and the likeliest after them as the host samples it, twice."""
    with Gguf.open(models.SMALL) as file, Engine(file, device="NV") as engine:
        tokens: list[int] = []
        for prompt in ([3, 4, 5], [7, 8]):
            tokens += engine.generate(prompt, Settings(), 3)
            tokens.append(int(engine.feed([11]).argmax()))
        return tokens


EXPECTED: dict[Callable[[], list[int]], list[int]] = {
    one_line: [5, 7, 9, 6, 7, 9],
    recorded: [2, 21, 301],
    jitted: [8, 16, 160, 320, 2400, 4800, 32000, 64000],
    gated: [1, 1],
}
TEXT: list[list[int]] = []
"""What the model wrote first; it is the same on every board, under every policy."""


@pytest.mark.parametrize("policy", Policy)
def test_both_policies_compute_what_they_should(stores: str, monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    monkeypatch.setenv("TEGRAD_MEMORY", policy)
    assert {work: work() for work in EXPECTED} == EXPECTED
    TEXT.append(text())
    assert TEXT[-1] == TEXT[0]


# ---- the table


def wrong(work: Callable[[], list[int]], expected: list[int]) -> bool:
    """Whether work comes out wrong, or never ends."""
    try:
        return work() != expected
    except (WaitTimeout, DeviceFault, ModelError):
        return True


def cache_anyway(monkeypatch: pytest.MonkeyPatch, role: Role) -> None:
    """Let L2 keep what one role's buffers hold, without the client's knowledge."""
    alloc, map_, now = Nvmap.alloc, AddressSpace.map, [roles.TENSORS]

    def allocated(self: Nvmap, size: int, given: Role = roles.TENSORS, space: AddressSpace | None = None) -> Memory:
        now[0] = given
        return alloc(self, size, given, space)

    monkeypatch.setattr(Nvmap, "alloc", allocated)
    monkeypatch.setattr(
        AddressSpace, "map", lambda self, fd, flags=0: map_(self, fd, flags | roles.CACHED * (now[0] is role))
    )


@pytest.mark.parametrize(
    ("role", "work"),
    [
        (roles.PUSHBUFFER, one_line),
        (roles.ARGUMENTS, one_line),
        (roles.SIGNALS, gated),
        (roles.TENSORS, recorded),
        (roles.RECORDING, recorded),
        (roles.RECORDING, jitted),
    ],
    ids=lambda given: getattr(given, "name", None) or given.__name__,
)
@pytest.mark.klog_errors(".*")
def test_a_role_that_the_cpu_touches_must_be_volatile(
    stores: str, monkeypatch: pytest.MonkeyPatch, role: Role, work: Callable[[], list[int]]
) -> None:
    monkeypatch.setattr(waits, "getenv", lambda name, default: 300)
    cache_anyway(monkeypatch, role)
    assert wrong(work, EXPECTED[work])


@pytest.mark.parametrize(
    ("stores", "role"),
    [("through", roles.STATE), ("back", roles.STATE), ("back", roles.LOGITS)],  # the CPU writes no logits
    ids=lambda given: getattr(given, "name", given),
    indirect=["stores"],
)
@pytest.mark.klog_errors(".*")
def test_what_a_model_shares_with_the_cpu_must_be_volatile(
    stores: str, monkeypatch: pytest.MonkeyPatch, role: Role
) -> None:
    expected = TEXT[0] if TEXT else text()
    close_device()
    monkeypatch.setattr(waits, "getenv", lambda name, default: 1000)
    cache_anyway(monkeypatch, role)
    assert wrong(text, expected)


# ---- the flushes


@pytest.fixture
def kept(stores: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Any]]:
    """A device under the second policy, and a buffer that L2 keeps."""
    monkeypatch.setenv("TEGRAD_MEMORY", "cached")
    device, spec = opened(), MemorySpec(nolru=True, role=roles.WORKSPACE)
    buffer = device.allocator.alloc(4096, spec)
    yield device, buffer
    device.allocator.free(buffer, 4096, spec)


def number(device: Any, buffer: Any) -> int:
    out = bytearray(4)
    device.allocator._copyout(memoryview(out), buffer)
    return int.from_bytes(out, "little")


def put(device: Any, buffer: Any, value: int) -> None:
    device.allocator._copyin(buffer, memoryview(value.to_bytes(4, "little")))


def told(device: Any, buffer: Any) -> list[int]:
    """What the CPU reads of a word: after the GPU's store; after its own; after the GPU has added one to that.

    The GPU has read it before: a store alone does not make L2 keep it.
    """
    program(device, "add")(buffer, **ONCE, vals=(0,))
    program(device, "store")(buffer, **ONCE, vals=(7,))
    seen = [number(device, buffer)]
    put(device, buffer, 100)
    seen.append(number(device, buffer))
    program(device, "add")(buffer, **ONCE, vals=(1,))
    return [*seen, number(device, buffer)]


def test_cpu_and_gpu_see_each_others_stores_in_cached_memory(kept: tuple[Any, Any]) -> None:
    assert told(*kept) == [7, 100, 101]


def test_without_flushes_they_do_not(kept: tuple[Any, Any], stores: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Coherence, "before_cpu", lambda self, memories: None)
    assert told(*kept) == ([7, 100, 8] if stores == "through" else [0, 100, 100])


def test_memory_that_is_written_again_is_read_anew(kept: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file's bytes are that go to memory in use: many pieces, one flush in front of them."""
    device, buffer = kept
    add = program(device, "add")
    put(device, buffer, 5)
    add(buffer, **ONCE, vals=(1,))
    (memory,) = device.allocator.lend([buffer])
    memory[:4] = (50).to_bytes(4, "little")
    add(buffer, **ONCE, vals=(1,))
    assert number(device, buffer) == 51
    add(buffer, **ONCE, vals=(0,))
    monkeypatch.setattr(Coherence, "before_cpu", lambda self, memories: None)
    device.synchronize()
    (memory,) = device.allocator.lend([buffer])
    memory[:4] = (90).to_bytes(4, "little")
    add(buffer, **ONCE, vals=(1,))
    monkeypatch.undo()
    assert number(device, buffer) == 52
