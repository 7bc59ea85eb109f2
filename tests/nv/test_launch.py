"""Launches from prepared memory send what a queue sends, wait for what may be elsewhere, and refuse what it refuses."""

import gc
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from boards import open_device
from fake import FakeKernel
from kernels import program, words
from submissions import held_back, launch

from tegrad.hw.chips import CHIPS
from tegrad.hw.classes import ComputeMethod, HostMethod
from tegrad.hw.gpfifo import MethodOp, decode_header
from tegrad.hw.qmd import LAYOUTS, Qmd
from tegrad.nv.faults import DeviceClosed
from tegrad.nv.launch import BANK_FIELDS, MOST_SIZES, Launcher
from tegrad.nv.program import LaunchError
from tegrad.nv.queues import RELEASE, RELEASE_AT_ONCE, Fifo, NVComputeQueue, NVCopyQueue
from tegrad.nv.replay import ACQUIRE, Launch, Recording

pytestmark = pytest.mark.board

MIXED = """extern "C" __global__ void mixed(int *a, float *b, short s, long long l, unsigned char c, int i) {
  a[0] = s + i + (int)l + c; b[0] = 1; }"""


@pytest.fixture(params=["agx-orin-64gb", "gh100"])
def chip(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """NVDevice on the fake driver of each chip, whose GPU stands still."""
    from boards import close_device
    from tinygrad.helpers import Context

    import tegrad.nv
    from tegrad.nv import iface

    tegrad.nv.install()
    close_device()
    monkeypatch.delenv("TEGRAD_BOARD", raising=False)
    kernel = FakeKernel(chip=CHIPS[request.param])
    monkeypatch.setattr(iface, "pick_kernel", lambda: kernel)
    with Context(DEV="NV"):
        yield open_device()
        close_device()
    kernel.stop()


def mixed(device: Any) -> Any:
    """A kernel with arguments of all sizes."""
    from tinygrad.device import TinyELF
    from tinygrad.dtype import dtypes
    from tinygrad.helpers import Target

    from tegrad.nv import compilers

    kinds = (dtypes.int32, dtypes.float32, dtypes.int16, dtypes.int64, dtypes.uint8, dtypes.int32)
    signature = tuple((f"p{i}", i, kind, ()) for i, kind in enumerate(kinds))
    image = compilers.compile_cuda(MIXED, device.arch)
    return device.runtime(TinyELF(image, "mixed", Target(device="NV", arch=device.arch), signature))


def sent(device: Any, prg: Any, *buffers: Any, **given: Any) -> tuple[bytes, dict[str, int], list[int]]:
    """Launch: the constant bank and the QMD's fields, but for where they lie, and the words of the commands."""
    commands = device._commands._head
    prg(*buffers, **given)
    number, names = device._launches[-1][1:]
    assert (number, list(names)) == (device.compute_gpfifo.submissions, [prg.name])
    end = device._kernargs._head % device.kernargs_buf.size or device.kernargs_buf.size
    slot = bytes(device.kernargs_buf.cpu_view()[end - prg.kernargs_alloc_size : end])
    at = -(-prg.constbufs[0][1] // 256) * 256
    layout = next(layout for layout in LAYOUTS.values() if layout.major == prg.qmd.ver)
    fields = dict(Qmd(layout, bytearray(slot[at : at + layout.size])).items())
    bank = device.kernargs_buf.va_addr + end - prg.kernargs_alloc_size
    low, shift = BANK_FIELDS[prg.qmd.ver]
    assert fields.pop(low) == bank >> shift & 0xFFFFFFFF
    first, last = -(-commands // 16) * 16, device._commands._head
    page = bytes(device.cmdq_page.cpu_view()[first % device._commands.size :][: last - first])
    return slot[: prg.constbufs[0][1]], fields, memoryview(page).cast("I").tolist()


def methods(commands: list[int]) -> list[tuple[int, int, int]]:
    """Subchannel, method and data of each that the words send."""
    found, at = [], 0
    while at < len(commands):
        header, at = decode_header(commands[at]), at + 1
        if header.op == MethodOp.IMMEDIATE:
            found.append((header.subch, header.method, header.count))
            continue
        found += [(header.subch, header.method + 4 * i, commands[at + i]) for i in range(header.count)]
        at += header.count
    return found


def same(method: int, data: int) -> int | None:
    """What must be the same in two launches: not where the QMD is, nor the numbers stored at the end.

    The second release of an end need not wait until the engine is idle where the first has.
    """
    if method in (ComputeMethod.SEND_PCAS_A, HostMethod.SEM_PAYLOAD_LO):
        return None
    return RELEASE if data == RELEASE_AT_ONCE else data


def test_a_launch_sends_what_a_queue_sends(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, prg = random.Random(1), mixed(chip)
    buffers = [chip.allocator.alloc(4096) for _ in range(4)]
    for _ in range(40):
        given = {
            "global_size": tuple(rng.randint(1, 500) for _ in range(3)),
            "local_size": [rng.randint(1, 16), rng.randint(1, 8), rng.randint(1, 4)],
            "vals": (rng.randint(-(1 << 15), (1 << 15) - 1), rng.getrandbits(62) - (1 << 61), rng.getrandbits(8), -7),
        }
        pair = rng.sample(buffers, 2)
        bank, fields, commands = sent(chip, prg, *pair, **given)
        with monkeypatch.context() as patch:
            patch.setattr(Launcher, "launch", lambda self, *given: False)
            by_queue, its_fields, its_commands = sent(chip, prg, *pair, **given)
        assert (bank, fields) == (by_queue, its_fields)
        ours, theirs = methods(commands), methods(its_commands)
        at = next(i for i, (_, method, _) in enumerate(theirs) if method == HostMethod.SEM_EXECUTE)
        assert theirs[at][2] == ACQUIRE  # of the timeline, which the launch does without
        rest = [found for found in theirs[at + 1 :] if found[1] != HostMethod.NON_STALL_INTERRUPT]
        assert [(sub, method, same(method, data)) for sub, method, data in ours] == [
            (sub, method, same(method, data)) for sub, method, data in rest
        ]


def test_sizes_come_and_go_and_the_arguments_stay_right(chip: Any) -> None:
    prg, buffers = mixed(chip), [chip.allocator.alloc(4096) for _ in range(2)]
    for turn in range(3 * MOST_SIZES):
        grid = (turn % (2 * MOST_SIZES) + 1, 1, 1)
        bank, fields, _ = sent(chip, prg, *buffers, global_size=grid, local_size=(32, 1, 1), vals=(1, 2, 3, turn))
        assert fields["cta_raster_width" if prg.qmd.ver == 3 else "grid_width"] == grid[0]
        assert int.from_bytes(bank[-4:], "little") == turn


def test_what_is_written_to_a_programs_qmd_holds_for_its_next_launch(chip: Any) -> None:
    prg, buffers = mixed(chip), [chip.allocator.alloc(4096) for _ in range(2)]
    given = {"local_size": (32, 1, 1), "vals": (1, 2, 3, 4)}
    assert sent(chip, prg, *buffers, **given)[1]["barrier_count"] == 1
    prg.qmd.write(barrier_count=7)
    assert sent(chip, prg, *buffers, **given)[1]["barrier_count"] == 7


def test_an_integer_that_does_not_fit_is_refused_as_ever(chip: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prg, buffers = mixed(chip), [chip.allocator.alloc(4096) for _ in range(2)]
    errors = []
    for vals in ((1 << 15, 0, 0, 0), (0, 0, 256, 0), (0, 0, -1, 0)):
        with pytest.raises(ValueError, match="invalid value") as here:
            prg(*buffers, vals=vals)
        with monkeypatch.context() as patch:
            patch.setattr(Launcher, "launch", lambda self, *given: False)
            with pytest.raises(ValueError, match="invalid value") as there:
                prg(*buffers, vals=vals)
        errors.append((here.type, str(here.value)) == (there.type, str(there.value)))
    assert errors == [True] * 3
    sent(chip, prg, *buffers, vals=(1, 2, 3, 4))


def test_sizes_that_cannot_be_are_refused(chip: Any) -> None:
    prg, buffer = program(chip, "add"), chip.allocator.alloc(4096)
    submissions = chip.compute_gpfifo.submissions
    for sizes in ({"local_size": (1025, 1, 1)}, {"global_size": (0, 1, 1)}, {"global_size": (1, 70000, 1)}):
        for _ in range(2):
            with pytest.raises(RuntimeError):
                prg(buffer, vals=(1,), **sizes)
    assert chip.compute_gpfifo.submissions == submissions
    with pytest.raises(LaunchError, match="the grid is 0"):
        prg(buffer, vals=(1,), global_size=(0, 1, 1))


def test_a_program_goes_with_the_last_that_has_it(fake_device: Any) -> None:
    """Not when Python's collector comes by: a search loads thousands."""
    add, buffer = program(fake_device, "add"), fake_device.allocator.alloc(4096)
    add(buffer, vals=(1,))
    fake_device.synchronize()
    known = weakref.ref(add)
    gc.disable()
    try:
        del add
        assert known() is None
    finally:
        gc.enable()


def test_buffers_of_a_closed_device_are_refused(fake_device: Any) -> None:
    import tegrad.nv

    buffer = fake_device.allocator.alloc(4096)
    old = program(fake_device, "add")
    old(buffer, vals=(1,))
    again = tegrad.nv.reopen()
    with pytest.raises(DeviceClosed):
        program(again, "add")(buffer, vals=(1,))
    with pytest.raises(DeviceClosed):
        old(again.allocator.alloc(4096), vals=(1,))


# ---- on a board that races


@pytest.fixture
def device(board: str) -> Any:
    """A device on a board that races."""
    return open_device()


def zeroed(device: Any) -> Any:
    buffer = device.allocator.alloc(4096)
    buffer.cpu_view()[0:4096] = bytes(4096)
    return buffer


def test_launches_run_in_the_order_of_all_channels(device: Any) -> None:
    """A launch waits for the copy before it, which another channel makes, and the copy for the launch."""
    add, here, there = program(device, "add"), zeroed(device), zeroed(device)
    with held_back(device):
        for turn in range(20):
            launch(add, here, turn)
            launch(add, here, 1)
            queue = NVCopyQueue().wait(device.timeline_signal, device.timeline_value - 1).copy(there, here, 4)
            queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
            launch(add, there, 100)
            launch(add, here, words(here)[0])  # 0, as long as nothing has run
    assert (words(here)[0], words(there)[0]) == (sum(range(20)) + 20, sum(range(20)) + 20 + 100)


def test_without_the_wait_a_launch_overtakes_a_copy(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add, here, there = program(device, "add"), zeroed(device), zeroed(device)
    launch(add, here, 5)
    device.synchronize()

    def without(self: Any, entries: Any, *given: Any) -> None:
        stock(self, entries[-1:], *given)

    stock, gate = Fifo.enter, device.new_signal(value=0)
    queue = NVCopyQueue().wait(gate, 1).copy(there, here, 4)
    queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
    monkeypatch.setattr(Fifo, "enter", without)
    launch(add, there, 100)
    device.compute_gpfifo.wait(device.compute_gpfifo.submissions)
    gate.value = 1
    device.dma_gpfifo.wait(device.dma_gpfifo.submissions)
    assert words(there)[0] == 5  # the copy came last
    device.timeline_signal.value = device.timeline_value - 1  # which the copy's release has turned back


@pytest.mark.parametrize("recorded", [False, True], ids=["launch", "recording"])
def test_a_launch_that_is_interrupted_at_the_doorbell_is_waited_for(
    device: Any, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """The GPU is at work then. Its value of the timeline given to the next launch would be there too early."""
    add, here, stock = program(device, "add"), zeroed(device), Fifo.enter
    recording = Recording(device, [Launch(add, (here,), values=(5,))]) if recorded else None
    run = recording.run if recording is not None else lambda: launch(add, here, 5)

    def interrupted(self: Any, *given: Any) -> None:
        stock(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Fifo, "enter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    device.compute_gpfifo.wait(device.compute_gpfifo.submissions)
    assert device.timeline_signal.value == device.timeline_value - 1  # nothing that is still to come
    run()
    launch(add, here, 100)
    device.synchronize()
    assert words(here)[0] == 110
    if recording is not None:
        recording.close()


def test_launches_and_queues_alternate(device: Any) -> None:
    mix, state = program(device, "mix"), zeroed(device)
    expected = 0
    for turn in range(30):
        launch(mix, state, turn)
        queue = NVComputeQueue().wait(device.timeline_signal, device.timeline_value - 1).memory_barrier()
        queue.exec(mix, mix.fill_kernargs((state,), (7,)), (1, 1, 1), (1, 1, 1))
        queue.signal(device.timeline_signal, device.next_timeline()).submit(device)
        expected = ((expected * 3 + turn) * 3 + 7) & 0xFFFFFFFF
    device.synchronize()
    assert words(state)[0] & 0xFFFFFFFF == expected


def test_a_launch_that_is_waited_for_is_timed(device: Any) -> None:
    add, state = program(device, "add"), zeroed(device)
    launch(add, state, 1)
    seconds = add(state, vals=(2,), wait=True)
    assert seconds is not None
    assert seconds > 0
    assert words(state)[0] == 3


def test_threads_may_launch_at_once(device: Any) -> None:
    add, state = program(device, "add"), zeroed(device)

    def work() -> None:
        for _ in range(50):
            launch(add, state, 1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    device.synchronize()
    assert words(state)[0] == 200
