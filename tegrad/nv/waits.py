"""How the CPU waits for the GPU: it polls a moment, then sleeps until the driver wakes it.

A sleeper is woken by what the GPU does at the end of every submission: it moves a syncpoint on, and a fence over that
syncpoint becomes readable (`FenceWaker`); or it interrupts, and the driver looks at the word that a CHANNEL_WAIT names
(`InterruptWaker`). Where the driver has neither, the CPU sleeps for short times (`Clock`). A channel that dies wakes
its sleepers too, and the notifier tells the difference. Each way is tried when a channel is made, and again when the
channel's first submission is done: one that does not tell of it by then gives way to the next.

The facts: syncpoint shims and user syncpoints, L4T r36.4.3 nvgpu (hal/sync, os/linux/ioctl_channel.c); fences,
host1x-fence. None of it has been run on a Jetson.
"""

import ctypes
import select
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Protocol

from tinygrad.helpers import getenv

from tegrad.hw.classes import HOST, HostMethod
from tegrad.hw.gpfifo import MethodOp, method_header, semaphore
from tegrad.nv.faults import WaitTimeout
from tegrad.nv.fence import full_barrier
from tegrad.uapi import ioctls
from tegrad.uapi.errors import DriverError
from tegrad.uapi.kernel import Kernel
from tegrad.uapi.structs import GetUserSyncpoint, Host1xCreateFence

if TYPE_CHECKING:
    from tegrad.nv.channel import Channel
    from tegrad.nv.device import NVDevice
    from tegrad.nv.queues import Fifo

FENCE_NODE = "/dev/host1x-fence"
SPIN_S = 50e-6
"""How long a wait polls before it starts to sleep."""
READS_PER_LOOK = range(8)
"""Reads between two looks at the clock."""
SLEEP_SHARE = 1 / 8
"""A sleep by the clock lasts this share of the time waited so far: such a wait ends at most an eighth late."""
PROMPT_SHARE = 1 / 256
PROMPT_S = 3e-3
"""For this long a prompt wait without a waker only lets other threads run between two looks; then it sleeps, too."""
SLEEP_MAX_S = 1e-3
DRIVER_CHECK_S = 20e-3
"""How often a wait asks the driver whether the channel still lives, unless the interface has a `driver_check_s`, and
the longest sleep; the notifier in memory is read at every turn."""
TRIAL_MS = 100
"""How long a fence that is already reached may take to say so when it is tried."""
SHIM_STORE = HOST["SEM_EXECUTE"].pack(operation="RELEASE", release_wfi="EN", payload_size="32BIT")

PR_SET_TIMERSLACK, PR_GET_TIMERSLACK = 29, 30
"""Of linux/prctl.h: nanoseconds of the calling thread."""
_prctl: Any = ctypes.CDLL(None).prctl
_prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


class Waker(Protocol):
    """What wakes a CPU that sleeps until a channel has finished a submission."""

    @property
    def commands(self) -> Sequence[int]:
        """What ends every submission, after the release of its progress word."""

    def works(self, done: int) -> bool:
        """Whether it tells that `done` submissions are done, as they are while no others have been made."""

    def sleep(self, number: int, seconds: float) -> bool:
        """Sleep until submission `number` is done, or up to `seconds`; it may end early.

        False where the driver did not let us, and nothing was slept.
        """


class Clock:
    """No help from the driver: the waits sleep by the clock."""

    commands: Sequence[int] = ()

    def works(self, done: int) -> bool:
        """A clock always works."""
        return True

    def sleep(self, number: int, seconds: float) -> bool:
        """Nothing to sleep on."""
        return False


class FenceWaker:
    """A user syncpoint that every submission moves on by one, and host1x fences over it.

    Nothing is slept on before a fence has told of an increment of the GPU's. nvgpu gives a syncpoint no address (0)
    where it was built without support for that, and a release to 0 is an MMU fault.
    """

    def __init__(self, kernel: Kernel, node: int, point: GetUserSyncpoint) -> None:
        self._kernel, self._node, self._id, self._start = kernel, node, point.syncpoint_id, point.syncpoint_max
        self._addressed, self._seen = bool(point.gpu_va), False
        self.commands = semaphore(SHIM_STORE, point.gpu_va, 0)

    def works(self, done: int) -> bool:
        """Whether a reached fence says so and, once the GPU has moved the syncpoint, the next one does not."""
        if not self._addressed:
            return False
        with suppress(DriverError):
            reached = self._poll(done, TRIAL_MS)
            self._seen = bool(done) and reached and not self._poll(done + 1, 0)
            return self._seen if done else reached
        return False

    def sleep(self, number: int, seconds: float) -> bool:
        """Sleep on a fence that is reached when `number` submissions are done."""
        if not self._seen:
            return False
        with suppress(DriverError):
            self._poll(number, max(1, int(seconds * 1000)))
            return True
        return False

    def _poll(self, number: int, ms: int) -> bool:
        arg = Host1xCreateFence(id=self._id, threshold=(self._start + number) & 0xFFFFFFFF)
        self._kernel.ioctl(self._node, ioctls.HOST1X_IOCTL_CREATE_FENCE, arg)
        try:
            poll = select.poll()
            poll.register(arg.fence_fd, select.POLLIN)
            return bool(poll.poll(ms))
        finally:
            self._kernel.close(arg.fence_fd)


class InterruptWaker:
    """CHANNEL_WAIT on the progress word, which the driver looks at when the channel interrupts.

    It waits for equality, so a submission that was overtaken by the next one is seen when the time is up.
    """

    commands = (method_header(MethodOp.INC, 0, HostMethod.NON_STALL_INTERRUPT, 1), 0)

    def __init__(self, channel: "Channel", export: Callable[[], AbstractContextManager[int]], offset: int) -> None:
        """`export` gives a dmabuf fd of the progress words' buffer, `offset` is the channel's word in it."""
        self._channel, self._export, self._offset = channel, export, offset

    def works(self, done: int) -> bool:
        """Whether the driver waits for the word's value of now."""
        return self.sleep(done, TRIAL_MS / 1000)

    def sleep(self, number: int, seconds: float) -> bool:
        """Sleep in the driver until the word is `number`."""
        with suppress(DriverError), self._export() as fd:
            return self._channel.wait(fd, self._offset, number & 0xFFFFFFFF, max(1, int(seconds * 1000)))
        return False


Awaited = Callable[[], "tuple[Fifo, int] | None"]
"""Names a submission whose end a wait may sleep for, as things are now."""


def wait_until(
    device: "NVDevice | None",
    read: Callable[[], int],
    value: int,
    timeout_ms: int | None = None,
    awaited: Awaited = lambda: None,
    begun: float | None = None,
    prompt: bool = False,
) -> None:
    """Return when `read()` has reached `value`: poll briefly, then sleep for the submission that `awaited` names.

    Without one, sleep longer and longer, up to SLEEP_MAX_S. A `prompt` wait, as CUDA's users know `synchronize`, first
    polls at the expense of a core. DeviceFault as soon as the device reports one; WaitTimeout
    when `read()` has not moved for `timeout_ms` (HCQDEV_WAIT_TIMEOUT_MS, 30 s, by default). `begun` is when polling
    began (time.monotonic()), if that was before.
    """
    if (seen := read()) < value:
        start = time.monotonic() if begun is None else begun
        with prompt_sleeps() if prompt else nullcontext():
            _turns(device, read, value, seen, timeout_ms, awaited, start, prompt)
    full_barrier()  # what the GPU wrote before the value must not have been read earlier


def seen_soon(word: memoryview, value: int, device: "NVDevice", until: float) -> bool:
    """Poll a word of memory until it has reached `value`: False at the time `until`, or when the device is closed.

    The wait of a control loop, whose answer is a few microseconds away: a turn is one read and no call.
    """
    while not device.closed:
        for _ in READS_PER_LOOK:
            if word[0] >= value:
                full_barrier()  # what the GPU wrote before the value must not have been read earlier
                return True
        if time.monotonic() >= until:
            break
    return False


@contextmanager
def prompt_sleeps() -> Iterator[None]:
    """Let this thread's sleeps end when they are due: Linux adds up to 50 us (timer slack, prctl(2)), also to 0."""
    before = _prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0)
    if before <= 0:  # refused, or more than an int holds: then it could not be put back
        yield
        return
    _prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        yield
    finally:
        _prctl(PR_SET_TIMERSLACK, before, 0, 0, 0)


def _turns(
    device: "NVDevice | None",
    read: Callable[[], int],
    value: int,
    seen: int,
    timeout_ms: int | None,
    awaited: Awaited,
    start: float,
    prompt: bool,
) -> None:
    limit = (timeout_ms or getenv("HCQDEV_WAIT_TIMEOUT_MS", 30000)) / 1000
    check_s = DRIVER_CHECK_S if device is None else getattr(device.iface, "driver_check_s", DRIVER_CHECK_S)
    moved = asked = start
    while (now := read()) < value:
        clock = time.monotonic()
        if now != seen:
            seen, moved = now, clock
        if clock - start < SPIN_S:
            continue
        if device is not None:
            device.check_fault(ask_driver=clock - asked > check_s)
            asked = clock if clock - asked > check_s else asked
        if clock - moved > limit:
            raise WaitTimeout(
                f"the GPU made no progress for {limit:g} s: a signal is at {now}, not {value}; "
                "a longer kernel needs HCQDEV_WAIT_TIMEOUT_MS, otherwise look at the kernel log (dmesg)"
            )
        _sleep(awaited(), clock - start, prompt)


def _sleep(awaited: "tuple[Fifo, int] | None", waited: float, prompt: bool) -> None:
    if awaited is not None:
        fifo, number = awaited
        if fifo.waker.sleep(number, DRIVER_CHECK_S) and fifo.done >= number:
            return
    if prompt and waited < PROMPT_S:
        time.sleep(0)
    else:
        time.sleep(min(waited * (PROMPT_SHARE if prompt else SLEEP_SHARE), SLEEP_MAX_S))
