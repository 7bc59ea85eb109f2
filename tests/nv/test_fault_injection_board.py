"""Every call that the NV device makes of the operating system is made to fail, each time it is made, in each way.

Whatever fails: one clear error of ours, nothing left open on either side, and the next device works. The failures are
made in this process, in front of the board; a part of them is made by the board itself, to the same effect.
"""

import ctypes
import errno
import gc
import mmap
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from boards import own_counts, use_board
from failing import Call, FailingKernel, Site, failing, sites
from kernels import program, words

from tegrad.errors import TegradError
from tegrad.nv import memory, waits
from tegrad.nv.device import _opened
from tegrad.nv.faults import DeviceFault
from tegrad.orin.client import board_inject, board_status
from tegrad.orin.inject import Injection
from tegrad.uapi.errors import DriverError
from tegrad.uapi.ioctls import BY_NAME

pytestmark = [
    pytest.mark.board,
    pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier"),
]  # one scenario is a fault

SPEC = "agx-orin-64gb:4GiB"
DYING = errno.ENODEV
"""What every call that powers the GPU answers when the driver is going away (nvgpu-driver.md 0.1)."""
ERRORS: dict[str, tuple[int, ...]] = {
    "open /dev/nvmap": (errno.ENOENT, errno.EACCES, errno.EMFILE, errno.ENOMEM),
    "open /dev/nvgpu/igpu0/ctrl": (errno.EACCES, DYING, errno.ENOMEM, errno.EMFILE),
    "open /dev/host1x-fence": (errno.ENOENT, errno.EACCES, errno.EMFILE),
    "open /dev/kmsg": (errno.EPERM, errno.EMFILE),
    "close": (errno.EIO,),
    "mmap": (errno.ENOMEM, errno.EPERM, errno.EINVAL),
    "munmap": (errno.ENOMEM,),
    "doorbell": (errno.EBUSY, errno.ENOSYS, DYING, errno.ENOMEM),
    "doorbell.close": (errno.ENOMEM,),
    "NVMAP_CREATE": (errno.EINVAL, errno.ENOMEM),
    "NVMAP_CREATE_64": (errno.EINVAL, errno.ENOMEM),
    "NVMAP_ALLOC": (errno.EINVAL, errno.EEXIST, errno.ENOMEM),
    "NVMAP_SET_TAG_LABEL": (errno.EINVAL, errno.ENOMEM, errno.ENOTTY),
    "NVMAP_GET_FD": (errno.EBADF, errno.EINVAL, errno.EMFILE),
    "NVMAP_FREE": (errno.ENOTTY,),  # practically never fails; another driver release might not know it
    "GPU_GET_CHARACTERISTICS": (errno.EINVAL,),
    "GPU_ALLOC_AS": (errno.EINVAL, errno.ENOMEM, errno.EMFILE),
    "GPU_OPEN_TSG": (errno.EINVAL, errno.ENOMEM, errno.EMFILE),
    "GPU_OPEN_CHANNEL": (errno.EINVAL, errno.ENOMEM, errno.EMFILE, DYING),
    "GPU_NUM_VSMS": (DYING,),
    "GPU_GET_TPC_MASKS": (DYING,),
    "GPU_CLK_SET_INFO": (errno.EINVAL, errno.EMFILE),
    "GPU_FLUSH_L2": (errno.EINVAL, DYING),
    "AS_ALLOC_SPACE": (errno.EINVAL, errno.ENOMEM),
    "AS_MAP_BUFFER_EX": (errno.EBADF, errno.EINVAL, errno.ENOMEM),
    "AS_UNMAP_BUFFER": (DYING,),
    "AS_MAP_BUFFER_BATCH": (errno.ENOTTY, errno.EFAULT, DYING),
    "AS_BIND_CHANNEL": (errno.EINVAL, DYING),
    "TSG_CREATE_SUBCONTEXT": (errno.EINVAL, errno.ENOSPC),
    "TSG_BIND_CHANNEL_EX": (errno.EPERM, errno.EINVAL),
    "TSG_READ_SINGLE_SM_ERROR_STATE": (errno.EINVAL, DYING),
    "CHANNEL_WDT": (errno.EINVAL, errno.ETIMEDOUT),
    "CHANNEL_SETUP_BIND": (errno.EINVAL, errno.EEXIST, errno.EBADF, errno.ENOMEM, errno.ETIMEDOUT),
    "CHANNEL_SET_ERROR_NOTIFIER": (errno.EINVAL, errno.ENOMEM, errno.ETIMEDOUT),
    "CHANNEL_ALLOC_OBJ_CTX": (errno.EINVAL, errno.ENOMEM, errno.ETIMEDOUT),
    "CHANNEL_SET_PREEMPTION_MODE": (errno.EINVAL, errno.ETIMEDOUT),
    "CHANNEL_GET_TIMEDOUT": (errno.ETIMEDOUT, errno.ENOTTY),
    "CHANNEL_GET_USER_SYNCPOINT": (errno.ENOMEM, errno.ENOTTY),
    "CHANNEL_WAIT": (errno.ETIMEDOUT, errno.EINTR, errno.EINVAL, errno.ENOTTY),
    "HOST1X_CREATE_FENCE": (errno.EINVAL, errno.ENOMEM, errno.EMFILE, errno.ENOTTY),
}
"""The errors each call may give, from the driver's facts (nvgpu-driver.md, by the section that describes the call)."""

OPTIONAL = {
    "CHANNEL_SET_PREEMPTION_MODE",
    "AS_MAP_BUFFER_BATCH",
    "open /dev/host1x-fence",
    "open /dev/kmsg",
    "GPU_CLK_SET_INFO",
    "NVMAP_SET_TAG_LABEL",
    "CHANNEL_GET_USER_SYNCPOINT",
    "CHANNEL_WAIT",
    "HOST1X_CREATE_FENCE",
    "TSG_READ_SINGLE_SM_ERROR_STATE",
}
"""What the device does without."""
RETRIED = {"NVMAP_CREATE", "NVMAP_CREATE_64", "NVMAP_ALLOC", "mmap", "AS_MAP_BUFFER_EX"}
"""Where memory that runs out may be had after the cached buffers were given back."""
BY_CLOCK = {"CHANNEL_WAIT", "HOST1X_CREATE_FENCE", "CHANNEL_GET_TIMEDOUT", "close", "NVMAP_GET_FD", "open /dev/kmsg"}
"""Calls that a wait makes: how many there are depends on how long it lasts."""

Scenario = Callable[[], None]


class Cpu:
    """A CPU device as far as mapping its memory asks."""

    def _is_cpu(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def map_cpu_memory(device: Any) -> None:
    """Map two pages of the process's own memory for the GPU and unmap them."""
    from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

    own = mmap.mmap(-1, 8192)
    address = ctypes.addressof(ctypes.c_char.from_buffer(own))
    mapped = device.allocator._map(HCQBuffer(address, 8192, view=MMIOInterface(address, 8192), owner=Cpu()))
    device.allocator._unmap(mapped)


def life_of_a_device() -> None:
    """Open, load, allocate, launch, wait, map the CPU's memory, grow local memory, free, close."""
    from tinygrad import Device
    from tinygrad.device import BufferSpec
    from tinygrad.runtime.ops_nv import nv_gpu

    device = Device["NV"]
    spin = program(device, "spin")
    buffer = device.allocator.alloc(8 << 20, BufferSpec(nolru=True))
    spin(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(1_000_000,))
    device.check_fault(ask_driver=True)  # what a wait does now and then
    device.synchronize()
    device.iface.rm_control(device.subdevice, nv_gpu.NV2080_CTRL_CMD_FB_FLUSH_GPU_CACHE)
    map_cpu_memory(device)
    device._ensure_has_local_memory(0x1000)
    device.allocator.free(buffer, buffer.size, BufferSpec(nolru=True))
    device.allocator.free_cache()
    device.close()


def death_of_a_device() -> None:
    """Open, run into a fault, close."""
    from tinygrad import Device

    device = Device["NV"]
    buffer, wild = device.allocator.alloc(4096), program(device, "wild")
    wild(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(700,))
    with pytest.raises(DeviceFault, match="wild"):
        device.synchronize()
    device.close()


def opening() -> None:
    from tinygrad import Device

    _ = Device["NV"]


def next_device_works() -> None:
    from tinygrad import Device

    device = Device["NV"]
    buffer, add = device.allocator.alloc(4096), program(device, "add")
    add(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(7,))
    device.synchronize()
    assert words(buffer) == [7]
    device.close()


SCENARIOS: dict[str, tuple[Scenario, dict[str, int]]] = {
    "life": (life_of_a_device, {}),
    "life without fences and batches": (
        life_of_a_device,
        {"open /dev/host1x-fence": errno.ENOENT, "AS_MAP_BUFFER_BATCH": errno.ENOTTY},
    ),
    "death": (death_of_a_device, {}),
    "no GPU": (opening, {"GPU_GET_CHARACTERISTICS": errno.EINVAL}),
    "no mappings": (opening, {"AS_MAP_BUFFER_EX": errno.EINVAL}),
    "a close that fails": (opening, {"close 2": errno.EIO}),
}
"""What is done, and which calls fail in any case. Where opening fails, it is the way back that is made to fail."""


@pytest.fixture(autouse=True)
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A board; waits that ask the driver often, and CREATE_64 for buffers that a test can afford."""
    monkeypatch.setattr(waits, "DRIVER_CHECK_S", 1e-3)
    monkeypatch.setattr(memory, "CREATE_64_SIZE", 8 << 20)
    with use_board(SPEC):
        yield


def held() -> dict[str, dict[str, int]]:
    """What this process and the board hold."""
    return {"here": own_counts(), "board": board_status(SPEC)["counts"]}


def chain(error: BaseException) -> list[BaseException]:
    """The error and what is printed above it."""
    found = [error]
    while True:
        last = found[-1]
        above = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if above is None:
            return found
        found.append(above)


def unclear(error: BaseException) -> Iterator[str]:
    """What is missing of one error of ours with its cause and the next step, and at most the driver's own behind it."""
    if len(chain(error)) > 2 or not all(isinstance(e, TegradError | MemoryError) for e in chain(error)):
        yield f"noise: {chain(error)!r}"
    if isinstance(error, DriverError) and not error.hint:
        yield f"no next step: {error}"
    if isinstance(error, MemoryError) and "free tensors" not in str(error):
        yield f"no next step: {error}"


def may_go_through(call: Call, code: int) -> bool:
    """Whether the device can do its work though this call fails so."""
    retried = call.name in RETRIED and code == errno.ENOMEM
    dead_anyway = call.name == "CHANNEL_GET_TIMEDOUT" and code == errno.ETIMEDOUT
    in_the_log = call.site is not None and call.site[0] == "kmsg.py"
    return call.name in OPTIONAL or retried or dead_anyway or in_the_log or call.asleep


def lacking(missing: dict[str, int], call: Call) -> int:
    """The errno of a call that fails in any case: every one of that name, or one by its number; else 0."""
    return missing.get(call.name, 0) or missing.get(f"{call.name} {call.nth}", 0)


def strike(scenario: str, wanted: Call, code: int) -> tuple[BaseException | None, FailingKernel]:
    """Run a scenario with one call failing; what came of it, after the device was closed."""
    run, missing = SCENARIOS[scenario]

    def fail(call: Call) -> int:
        return code if call == wanted else lacking(missing, call)

    error: BaseException | None = None
    with failing(fail) as kernel:
        try:
            run()
        except Exception as caught:
            error = caught
        if (opened := _opened.get("NV")) is not None:
            assert not opened.closed, f"a closed device stands in the way: {wanted}, {error!r}"
            opened.close()
        kernel.clean_up()
    return error, kernel


def recorded(scenario: str) -> list[Call]:
    """The calls that a scenario makes when nothing fails but what is missing."""
    error, kernel = strike(scenario, Call("", 0, None), 0)
    assert (error is None) == (SCENARIOS[scenario][0] is not opening), repr(error)
    return [call for call in kernel.calls if not lacking(SCENARIOS[scenario][1], call)]


def test_the_scenarios_reach_every_call_of_the_kernel() -> None:
    reached = {call.site for name in SCENARIOS for call in recorded(name)}
    assert sites() - reached == set()


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_whatever_fails_is_told_clearly_and_leaves_nothing(scenario: str) -> None:
    calls = recorded(scenario)
    known = {(call.name, call.site) for call in recorded("life")} if scenario != "life" else set()
    sweep(scenario, list(bounded(calls, known)))


@pytest.mark.long
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_use_fails_in_every_way(scenario: str) -> None:
    sweep(scenario, [(call, code) for call in recorded(scenario) for code in ERRORS[call.name]])


def bounded(calls: list[Call], known: set[tuple[str, Site | None]]) -> Iterator[tuple[Call, int]]:
    """Every use of every call with one errno, in turns, and the first use from each line with all of them.

    Of calls that another scenario is made of, the first use from each line with one errno.
    """
    seen: set[tuple[str, Site | None]] = set()
    for call in calls:
        place, codes = (call.name, call.site), ERRORS[call.name]
        one = codes[call.nth % len(codes)]
        if place not in seen:
            yield from ((call, code) for code in ([one] if place in known else codes))
        elif not known:
            yield call, one
        seen.add(place)


def sweep(scenario: str, strikes: list[tuple[Call, int]]) -> None:
    """Let each of these calls fail, one at a time; every run opens the device again, in the same process."""
    next_device_works()
    before = held()
    assert set(before["board"].values()) == {0}
    found: list[str] = []
    for wanted, code in strikes:
        error, kernel = strike(scenario, wanted, code)
        what = f"{wanted}, {errno.errorcode[code]}: {error!r}"
        found += [f"{what}: {why}" for why in complaints(scenario, wanted, code, error, kernel)]
        error = None
        if held() != before and (gc.collect(), held())[1] != before:
            found.append(f"{what}: leaves {held()}")
            break
    assert found == []
    next_device_works()


def complaints(
    scenario: str, wanted: Call, code: int, error: BaseException | None, kernel: FailingKernel
) -> Iterator[str]:
    """What is not as it should be about the way an error was told."""
    if wanted not in kernel.struck:
        if wanted.name not in BY_CLOCK:
            yield "not reached"
    elif error is None:
        if not may_go_through(wanted, code):
            yield "hidden"
    else:
        yield from unclear(error)
        if wanted.name in OPTIONAL and SCENARIOS[scenario][0] is not opening:
            yield "the device can do without it"


def told(error: BaseException | None) -> tuple[str, ...]:
    """What an error tells, without numbers that differ from run to run."""
    return () if error is None else (type(error).__name__, getattr(error, "name", ""), str(getattr(error, "errno", "")))


def test_what_the_board_refuses_by_itself_is_told_the_same() -> None:
    calls = recorded("life")
    before = held()
    first = {call.name: call for call in reversed(calls) if call.name in BY_NAME}
    assert len(first) > 25
    for call in first.values():
        code = ERRORS[call.name][-1]
        here, _ = strike("life", call, code)
        board_inject(SPEC, [Injection(call.name, errno=code, nth=1)])
        there, _ = strike("life", Call("", 0, None), 0)
        board_inject(SPEC, [])
        assert told(here) == told(there), call
        here = there = None
        assert held() == before, call
