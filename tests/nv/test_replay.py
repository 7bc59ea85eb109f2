"""What a run of a recording does on the CPU: a number, one GPFIFO entry, the doorbell, and nothing else."""

import errno
from typing import Any

import pytest
from fake import FakeKernel
from kernels import program
from submissions import empty_submission

from tegrad.hw.classes import HOST, ComputeMethod, HostMethod
from tegrad.hw.gpfifo import MethodOp, Subchannel, decode_gp_entry, method_header, semaphore
from tegrad.nv.faults import DeviceClosed, DeviceFault
from tegrad.nv.program import LaunchError
from tegrad.nv.qmd import QMD
from tegrad.nv.queues import NVCopyQueue
from tegrad.nv.replay import (
    AHEAD,
    BARRIER,
    CHAIN,
    DEPENDENCIES,
    EARLY,
    GPU_MEMBAR,
    LEAN,
    QMD_STRIDE,
    SYSMEMBAR,
    TIMELINE_RELEASE,
    Dependency,
    Launch,
    Place,
    Recording,
    RecordingClosed,
    _commands,
    _lay_out,
    _Layout,
    immediate,
    latched,
    lean,
    repeated,
    up_to,
)

pytestmark = pytest.mark.board


@pytest.fixture
def recording(fake_device: Any) -> Any:
    """Three launches that the fake GPU counts."""
    add = program(fake_device, "add")
    buffer = fake_device.allocator.alloc(4096)
    with Recording(fake_device, [Launch(add, (buffer,), values=(i,)) for i in range(3)], depth=2) as recording:
        yield recording


def test_a_run_rings_once_and_calls_no_driver(fake_kernel: FakeKernel, fake_device: Any, recording: Any) -> None:
    recording.wait(recording.run())
    doorbell = fake_device.gpu_mmio.doorbell
    calls, rings, launches = len(fake_kernel.calls), doorbell.rings, fake_kernel.launches
    held, head = fake_kernel.held(), fake_device._commands._head
    for _ in range(10):
        number = recording.run()
        while recording.done < number:
            pass
    assert (len(fake_kernel.calls), doorbell.rings) == (calls, rings + 10)
    assert fake_kernel.launches == launches + 10  # of each chain, the first is sent
    assert (fake_kernel.held(), fake_device._commands._head) == (held, head)


def test_several_runs_take_one_doorbell(fake_kernel: FakeKernel, fake_device: Any, recording: Any) -> None:
    recording.wait(recording.run())
    fifo, doorbell = fake_device.compute_gpfifo, fake_device.gpu_mmio.doorbell
    rings, launches, put = doorbell.rings, fake_kernel.launches, fifo.put_value
    value = fake_device.timeline_value
    last = recording.run(2)
    recording.wait(last)
    assert last == fifo.submissions
    assert (doorbell.rings, fifo.put_value) == (rings + 1, put + 2)
    assert fake_kernel.launches == launches + 2
    assert (fake_device.timeline_value, fake_device.timeline_signal.value) == (value + 2, value + 1)
    assert fake_device.releasing(value) == (fifo, last - 1)
    for times in (0, 3):
        with pytest.raises(LaunchError, match="takes 1 to 2"):
            recording.run(times)


def test_a_run_is_one_gpfifo_entry_until_something_else_went_out(fake_device: Any, recording: Any) -> None:
    fifo = fake_device.compute_gpfifo
    recording.run()
    put = fifo.put_value
    recording.run()
    assert fifo.put_value == put + 1
    empty_submission(fake_device)
    recording.run()
    assert fifo.put_value == put + 3  # the submission's, and the run, which the channel's order puts after it
    queue = NVCopyQueue().wait(fake_device.timeline_signal, fake_device.timeline_value - 1)
    queue.signal(fake_device.timeline_signal, fake_device.next_timeline()).submit(fake_device)
    recording.run()
    assert fifo.put_value == put + 5  # a wait for the other channel's, and the run
    recording.run()
    assert fifo.put_value == put + 6


def test_a_run_in_flight_is_not_rewritten(
    fake_kernel: FakeKernel, fake_device: Any, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo, memory = fake_device.compute_gpfifo, recording._memory
    fifo.wait(fifo.submissions)
    fake_kernel.paused = True
    first = recording.run()
    recording.run()
    in_flight = bytes(memory.cpu_view()[0 : memory.size])
    waited: list[tuple[int, bool]] = []

    def wait(number: int) -> None:
        waited.append((number, bytes(memory.cpu_view()[0 : memory.size]) == in_flight))
        fake_kernel.paused = False
        type(fifo).wait(fifo, number)

    monkeypatch.setattr(fifo, "wait", wait)
    recording.run()
    assert waited == [(first, True)]
    assert bytes(memory.cpu_view()[0 : memory.size]) != in_flight


@pytest.mark.parametrize(
    ("first", "again", "awaited"), [(3, 1, 1), (3, 2, 2), (3, 3, 3), (2, 1, 0), (2, 2, 1), (1, 2, 0)]
)
def test_runs_wait_for_those_whose_memory_they_take_and_for_no_more(
    fake_kernel: FakeKernel,
    fake_device: Any,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    again: int,
    awaited: int,
) -> None:
    """Of a recording with room for three: `first` runs in flight, and `again` as many at once."""
    launch = Launch(program(fake_device, "add"), (fake_device.allocator.alloc(4096),), values=(1,))
    with Recording(fake_device, [launch], depth=3) as recording:
        fifo = fake_device.compute_gpfifo
        fake_device.synchronize()
        fake_kernel.paused = True
        begun = fifo.submissions
        recording.run(first)
        waited: list[int] = []

        def wait(number: int) -> None:
            waited.append(number)
            fake_kernel.paused = False
            type(fifo).wait(fifo, number)

        monkeypatch.setattr(fifo, "wait", wait)
        recording.run(again)
        assert waited == [begun + awaited][: awaited > 0]
        fake_kernel.paused = False


def test_a_recording_of_a_closed_or_failed_device_does_not_run(
    fake_device: Any, recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    submissions = fake_device.compute_gpfifo.submissions
    for name, value, error in (("error_state", DeviceFault(13), DeviceFault), ("closed", True, DeviceClosed)):
        with monkeypatch.context() as patch:
            patch.setattr(fake_device, name, value)
            with pytest.raises(error):
                recording.run()
    recording.close()
    with pytest.raises(RecordingClosed, match="record the launches again"):
        recording.run()
    assert fake_device.compute_gpfifo.submissions == submissions


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", DEPENDENCIES)
def test_each_run_in_flight_has_whole_commands_of_its_own(fake_device: Any, name: str, count: int) -> None:
    """The launches, the releases of timeline and channel at multiples of 8, with the run's own value and number."""
    add, buffer, depth = program(fake_device, "add"), fake_device.allocator.alloc(4096), 3
    launches = [Launch(add, (buffer,), values=(i,)) for i in range(count)]
    with Recording(fake_device, launches, DEPENDENCIES[name], depth=depth) as recording:
        memory, layout = recording._memory, _lay_out(recording.launches)
        assert memory is not None
        recording.wait(recording.run(depth))  # what follows goes out without a wait for something else
        fifo, signal = fake_device.compute_gpfifo, fake_device.timeline_signal
        value, put, begun = fake_device.timeline_value, fifo.put_value, fifo.submissions
        recording.wait(last := recording.run(depth))
        assert (last, fifo.put_value) == (begun + depth, put + depth)
        assert fake_device.timeline_value == value + depth
        taken = []
        for run in range(depth):
            entry = decode_gp_entry(int(fifo.ring.mv[(put + run) % fifo.entries_count]))
            at = entry.va - memory.va_addr
            words = memory.cpu_view().view(at, 4 * entry.dwords, "I").mv.tolist()
            expected = _commands(DEPENDENCIES[name], layout, memory.va_addr)
            assert (at + 4 * len(expected) + 4) % 8 == 0
            expected += semaphore(TIMELINE_RELEASE, signal.base_buf.va_addr, value + run)
            expected += fifo.release(begun + 1 + run, idle=True)
            assert words == expected
            taken.append((at, at + 4 * entry.dwords))
        ends = [layout.size, *(end for _, end in taken)]
        assert all(0 <= start - end <= 8 for end, (start, _) in zip(ends, taken, strict=False))
        assert 0 <= memory.size - taken[-1][1] <= 8


def test_runs_follow_a_timeline_that_starts_over(fake_device: Any, recording: Any) -> None:
    """tinygrad then takes another signal: each of the runs in flight stores to that."""
    recording.wait(recording.run(2))
    before = fake_device.timeline_signal
    for _ in range(2):  # there, and back to the first
        fake_device._wrap_timeline_signal()
        for value in range(1, 4):
            recording.wait(recording.run())
            assert fake_device.timeline_signal.value == value
    assert fake_device.timeline_signal is before


def test_a_run_waits_for_other_work_on_a_timeline_that_started_over(fake_device: Any, recording: Any) -> None:
    """Also where its value is the one that the last run on the old timeline left behind."""
    recording.wait(recording.run())
    last, fifo = fake_device.computed_value, fake_device.compute_gpfifo
    fake_device._wrap_timeline_signal()
    while fake_device.timeline_value <= last:
        empty_submission(fake_device, NVCopyQueue)
    put = fifo.put_value
    recording.run()
    assert fifo.put_value == put + 2  # a wait for the timeline, and the run


@pytest.mark.parametrize("name", DEPENDENCIES)
def test_every_launch_reads_memory_anew_and_a_run_ends_after_a_membar_of_the_system(
    fake_device: Any, name: str
) -> None:
    """What the CPU stored between runs is read, and what any launch stored is seen when the timeline says so."""
    add, buffer = program(fake_device, "add"), fake_device.allocator.alloc(4096)
    launches = [Launch(add, (buffer,), values=(i,)) for i in range(3)]
    with Recording(fake_device, launches, DEPENDENCIES[name], depth=1) as recording:
        fake_device.synchronize()
        layout = _lay_out(recording.launches)
        image = bytearray(recording._memory.cpu_view()[0 : recording._memory.size])  # type: ignore[union-attr]
        for at in layout.qmds:
            qmd = QMD(fake_device, view=memoryview(image)[at : at + QMD_STRIDE])
            assert qmd.read("invalidate_shader_data_cache") == 1
            assert qmd.read("cwd_membar_type") in (SYSMEMBAR, GPU_MEMBAR)
        words = memoryview(image[layout.size :]).cast("I").tolist()
        sent = immediate(ComputeMethod.SEND_SIGNALING_PCAS2_B, 9)
        assert words.index(TIMELINE_RELEASE) > max(at for at, word in enumerate(words) if word == sent)
        assert HOST["SEM_EXECUTE"].decode(TIMELINE_RELEASE)["RELEASE_WFI"] == 1


# ---- dependencies, as what they put into QMDs and commands


def places(count: int) -> list[Place]:
    """All places of a recording."""
    return [Place(index, count) for index in range(count)]


def test_a_semaphores_words_have_the_halves_of_address_and_value_in_the_hosts_order() -> None:
    header = method_header(MethodOp.INC, 0, HostMethod.SEM_ADDR_LO, 5)
    assert semaphore(9, 0x12_FFFF_FFFD, 0x8000_0001_FFFF_FFFE) == (
        header,
        0xFFFF_FFFD,
        0x12,
        0xFFFF_FFFE,
        0x8000_0001,
        9,
    )


def test_a_launch_is_one_thread_without_arguments_unless_told() -> None:
    assert Launch("program", ()) == Launch("program", (), (1, 1, 1), (1, 1, 1), ())


def test_only_the_last_of_lean_launches_is_seen_outside_of_the_gpu_and_of_within_none() -> None:
    for form, last in (
        (DEPENDENCIES["chain-lean"], SYSMEMBAR),
        (DEPENDENCIES["idle-lean"], SYSMEMBAR),
        (None, GPU_MEMBAR),
    ):
        made = [(form or DEPENDENCIES["idle-within"]).fields(place) for place in places(3)]
        assert made == [{**LEAN, "cwd_membar_type": kind} for kind in (GPU_MEMBAR, GPU_MEMBAR, last)]
    for name in ("chain", "idle", "host-wfi"):
        assert [dict(DEPENDENCIES[name].fields(place)) for place in places(2)] == [{}, {}]


def test_launches_of_a_chain_are_started_by_those_before_and_others_are_sent_in_turn() -> None:
    layout = _Layout(banks=[0, 0x700, 0xE00], qmds=[0x100, 0x800, 0xF00], size=0x1500)
    va = 0x12_3400_0000
    send = method_header(MethodOp.INC, Subchannel.COMPUTE, ComputeMethod.SEND_PCAS_A, 1)
    action = method_header(MethodOp.IMMEDIATE, Subchannel.COMPUTE, ComputeMethod.SEND_SIGNALING_PCAS2_B, 9)
    sent = [[send, va + at >> 8, action] for at in layout.qmds]
    assert _commands(DEPENDENCIES["chain"], layout, va) == [*BARRIER, *sent[0]]
    assert _commands(DEPENDENCIES["chain-lean"], layout, va) == sent[0]
    assert _commands(Dependency(), layout, va) == [word for words in sent for word in words]
    for name, subchannel, method in (
        ("idle-lean", Subchannel.COMPUTE, ComputeMethod.WAIT_FOR_IDLE),
        ("idle-within", Subchannel.COMPUTE, ComputeMethod.WAIT_FOR_IDLE),
        ("host-wfi", 0, HostMethod.WFI),
    ):
        wait = method_header(MethodOp.IMMEDIATE, subchannel, method, 0)
        expected = [*sent[0], wait, *sent[1], wait, *sent[2]]
        assert _commands(DEPENDENCIES[name], layout, va) == [*DEPENDENCIES[name].start, *expected]
    asked: list[Place] = []

    def between(place: Place) -> list[int]:
        asked.append(place)
        return [3]

    form = Dependency(start=(1, 2), between=between)
    assert _commands(form, layout, va) == [1, 2, *sent[0], 3, *sent[1], 3, *sent[2]]
    assert asked == places(3)[1:]


def test_each_latched_launch_arrives_at_its_own_latch_and_waits_on_the_one_before() -> None:
    def latches(place: Place) -> dict[str, int]:
        return {name: value for name, value in latched(place, extra=7).items() if name not in lean(place)}

    common = {"arrive_at_latch_valid": 1, "latch_acquire_invalidate_shader_data_cache": 1, "extra": 7}
    first, second, third = places(3)
    assert latches(first) == {**common, "arrive_at_latch_id": 1}
    assert latches(second) == {
        **common,
        "arrive_at_latch_id": 2,
        "wait_on_latch_valid": 1,
        "wait_on_latch_id": 1,
    }
    assert latches(third)["wait_on_latch_id"] == 2
    assert lean(third).items() <= latched(third).items()
    assert dict(AHEAD.fields(second)) == {**latched(second), "enable_program_pre_exit": 1}


@pytest.mark.parametrize(("dependent", "rest"), [(CHAIN, "chain-lean"), (None, "idle-lean")])
def test_a_form_up_to_some_launch_leaves_the_last_of_them_whole_and_the_rest_to_a_stream(
    dependent: Any, rest: str
) -> None:
    early = dict.fromkeys(EARLY, 1)
    form = Dependency(dependent, fields=lambda place: {**early, "of": place.index}, between=lambda place: [place.index])
    made = up_to(form, 2)
    one, two, three, four = places(4)
    assert made.fields(one) == {**early, "of": 0}
    assert made.fields(two) == {**dict.fromkeys(EARLY, 0), "of": 1}
    assert [made.fields(place) for place in (three, four)] == [lean(three), lean(four)]
    assert (made.between(one), made.between(two)) == ([0], [1])
    assert made.between(three) == DEPENDENCIES[rest].between(three)
    assert made.dependent is dependent
    assert up_to(Dependency(dependent), 2).fields(two) == {}  # what a form does not set is left alone


def test_repeated_launches_stand_as_if_alone() -> None:
    made = repeated(
        Dependency(
            fields=lambda place: {"at": place.index, "of": place.count}, between=lambda place: [*range(place.index)]
        ),
        3,
    )
    assert [made.fields(place) for place in places(6)] == [{"at": at, "of": 3} for at in (0, 1, 2) * 2]
    assert [made.between(place) for place in places(6)] == [[], [0], [0, 1]] * 2


@pytest.mark.parametrize("depth", [0, -1])
def test_a_recording_has_room_for_a_run(fake_device: Any, depth: int) -> None:
    launch = Launch(program(fake_device, "add"), (fake_device.allocator.alloc(4096),), values=(1,))
    with pytest.raises(LaunchError, match="a depth of at least 1"):
        Recording(fake_device, [launch], depth=depth)


def test_a_recording_that_has_not_run_is_not_waited_for(fake_device: Any, recording: Any) -> None:
    fake_device.synchronize()
    recording.wait()


def test_memory_goes_back_when_its_last_command_is_done(fake_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeline says that a run is over while the release of the progress word is still to be read from it."""
    add, buffer = program(fake_device, "add"), fake_device.allocator.alloc(4096)
    recording = Recording(fake_device, [Launch(add, (buffer,), values=(1,))])
    number, order = recording.run(), []
    fifo, allocator = fake_device.compute_gpfifo, fake_device.allocator
    wait, free = fifo.wait, allocator.free
    monkeypatch.setattr(fifo, "wait", lambda number: (order.append(number), wait(number)))
    monkeypatch.setattr(allocator, "free", lambda *given: (order.append("free"), free(*given)))
    recording.close()
    assert order[:2] == [number, "free"]


def test_a_recording_that_fails_leaves_nothing(fake_kernel: FakeKernel, fake_device: Any) -> None:
    add, buffer = program(fake_device, "add"), fake_device.allocator.alloc(4096)
    fake_device.synchronize()
    held = fake_kernel.held()
    launches = [Launch(add, (buffer,), values=(1,))]
    for name, error in (("NVMAP_ALLOC", MemoryError), ("mmap", MemoryError), ("AS_MAP_BUFFER_EX", MemoryError)):
        fake_kernel.fail = {name: errno.ENOMEM}
        with pytest.raises(error):
            Recording(fake_device, launches)
        fake_kernel.fail = {}
        fake_device.iface.give_back()
        assert fake_kernel.held() == held

    def fields(place: Place) -> dict[str, int]:
        raise ValueError("no such field")

    with pytest.raises(ValueError, match="no such field"):
        Recording(fake_device, launches, Dependency(fields=fields))
    fake_device.iface.give_back()
    assert fake_kernel.held() == held
