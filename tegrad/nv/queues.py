"""Queues, signals and submission: how recorded commands reach a channel and how the CPU waits for them.

Every submission ends with a release of the channel's own progress word, a number that counts up. It says what the GPU
has finished with, whatever the recorder signals or does not, and everything that is reused waits for it: GPFIFO
entries, command memory, kernel arguments, and a bound queue whose words are about to be rewritten.
"""

import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tinygrad.runtime import ops_nv
from tinygrad.runtime.support.hcq import HCQBuffer

from tegrad.hw import bank0
from tegrad.hw.classes import HOST
from tegrad.hw.gpfifo import DOORBELL, gp_entry, semaphore
from tegrad.nv import compat, roles
from tegrad.nv.fence import full_barrier
from tegrad.nv.program import check_block, check_size
from tegrad.nv.spec import allocating
from tegrad.nv.waits import SPIN_S, Clock, Waker, seen_soon, wait_until

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice

DOORBELL_WORD = DOORBELL // 4
SUBROUTINE = 1
"""GPFIFO level of our segments, as tinygrad submits them on hardware."""
RELEASE = HOST["SEM_EXECUTE"].pack(operation="RELEASE", release_wfi="EN", payload_size="64BIT")
RELEASE_AT_ONCE = HOST["SEM_EXECUTE"].pack(operation="RELEASE", release_wfi="DIS", payload_size="64BIT")


class NVSignal(ops_nv.NVSignal):  # type: ignore[misc]
    """A signal whose waits sleep, notice faults, and know that a closed device's memory is gone."""

    _word: memoryview | None = None

    @property
    def value(self) -> int:
        """The 64-bit word as it is in memory now."""
        return int(self._mapped()[0])

    @value.setter
    def value(self, new_value: int) -> None:
        self._check_open()
        self.base_buf.cpu_view().view(0, 8, "Q")[0] = new_value

    def wait(self, value: int, timeout: int | None = None) -> None:
        """Return when the signal has reached `value`. See wait_until; a closed device has nothing left to wait for."""
        owner = self.owner
        if owner is not None and owner.closed:
            return
        begun = time.monotonic()
        if owner is None or not seen_soon(self._mapped(), value, owner, begun + SPIN_S):
            wait_until(owner, lambda: self.value, value, timeout, lambda: self._awaited(value), begun, prompt=True)

    def _mapped(self) -> memoryview:
        self._check_open()
        if self._word is None:
            self._word = self.base_buf.cpu_view().view(0, 8, "Q").mv
        return self._word

    def _awaited(self, value: int) -> "tuple[Fifo, int] | None":
        return self.owner.releasing(value) if self.is_timeline and self.owner is not None else None

    @property
    def timestamp(self) -> Any:
        """When the signal was last released, in microseconds of the GPU's clock."""
        self._check_open()
        return super().timestamp

    def __del__(self) -> None:
        if self.should_return and not self.owner.closed:
            super().__del__()

    def _check_open(self) -> None:
        if self.owner is not None and self.owner.closed:
            raise self.owner.gone("this signal belongs to a device that was closed: record the work again")


class Fifo(ops_nv.GPFifo):  # type: ignore[misc]
    """A channel's GPFIFO with its progress word.

    `submissions` counts what went in; the GPU stores the number of each submission when it is done.
    """

    put_value: int

    def __init__(
        self, fifo: ops_nv.GPFifo, device: "NVDevice", progress: HCQBuffer, wakers: Iterable[Waker] = (Clock(),)
    ) -> None:
        super().__init__(fifo.ring, fifo.gpput, fifo.entries_count, fifo.token, fifo.put_value)
        self.device = device
        self._wakers = iter(wakers)
        self.waker = next(self._wakers)
        self.submissions = 0
        self.settle_waker()
        self.progress_va = progress.va_addr
        self.progress: memoryview = progress.cpu_view().view(0, 8, "Q").mv
        """One 64-bit word: `done` as it is in memory, for those who know that the device is open."""
        self._entries: memoryview = fifo.ring.mv
        self._put: memoryview = fifo.gpput.mv
        self._doorbell: Any = getattr(device.gpu_mmio, "mv", device.gpu_mmio)
        self._in_flight: deque[tuple[int, int]] = deque()
        self._free_from = 0
        self._behind_pcie = not getattr(device.iface, "unified_memory", False)
        """Whether GPPut lies in the GPU's own memory, which the doorbell can overtake (docs/notebook.md)."""

    @property
    def done(self) -> int:
        """The number of the last submission that the GPU has finished."""
        if self.device.closed:
            raise self.device.gone("the device was closed while its work was waited for")
        return int(self.progress[0])

    def wait(self, number: int, *, prompt: bool = False) -> None:
        """Return when the GPU has finished submission `number`, `prompt` as `wait_until` has it.

        DeviceFault, DeviceClosed, WaitTimeout.
        """
        begun = time.monotonic()
        if not seen_soon(self.progress, number, self.device, begun + SPIN_S):
            wait_until(
                self.device, lambda: self.done, number, awaited=lambda: (self, number), begun=begun, prompt=prompt
            )

    def settle_waker(self) -> None:
        """Keep the best waker that tells what the GPU has finished. Nothing may be in flight."""
        while not self.waker.works(self.submissions):
            self.waker = next(self._wakers)

    def release(self, number: int, *, idle: bool = False) -> list[int]:
        """The commands that end submission `number`: when the channel is idle, store the number and wake sleepers.

        `idle` if a command before them has waited for that.
        """
        return [*semaphore(RELEASE_AT_ONCE if idle else RELEASE, self.progress_va, number), *self.waker.commands]

    def push(self, segments: list[tuple[int, int]]) -> None:
        """Submit pushbuffer segments (GPU address, dwords), the last of which ends with `release`, by one doorbell."""
        self.enter([gp_entry(va, dwords, level=SUBROUTINE) for va, dwords in segments])

    def enter(self, entries: Sequence[int], submissions: int = 1) -> None:
        """`push` for segments as GPFIFO entries, which are so many submissions: each of them ends with a `release`."""
        put, count, in_flight = self.put_value, self.entries_count, self._in_flight
        while put + len(entries) - self._free_from >= count:
            number, end = in_flight[0]
            self.wait(number)
            in_flight.popleft()
            self._free_from = end
        for entry in entries:
            self._entries[put % count] = entry
            put += 1
        self.put_value = put
        self.submissions = number = self.submissions + submissions
        full_barrier()
        self._put[0] = put % count
        full_barrier()
        self._doorbell[DOORBELL_WORD] = self.token
        if self._behind_pcie:
            # The doorbell may have come before GPPut. A read comes back only after the writes before it have arrived,
            # while the GPU works already; a doorbell after it is then seen, or finds nothing new.
            _ = self._put[0]
            self._doorbell[DOORBELL_WORD] = self.token
        # From here on the GPU works, and what the CPU does costs no time of the submission's.
        in_flight.append((number, put))
        done = self.progress[0]
        while in_flight and in_flight[0][0] <= done:
            self._free_from = in_flight.popleft()[1]


class _Submission:
    """What both queues share: submission, and what must not happen to a queue that was submitted before."""

    _sent: tuple[Fifo, int] | None = None
    _timeline: Any = None

    def signal(self, signal: Any, value: Any = 0) -> Any:
        """Release a signal when everything before is done."""
        if signal.is_timeline:
            self._timeline = value
        return super().signal(signal, value)  # type: ignore[misc]

    def bind(self, dev: "NVDevice") -> Any:
        """Keep the commands in memory of their own."""
        with allocating(roles.PUSHBUFFER):
            return super().bind(dev)  # type: ignore[misc]

    def submit(self, dev: "NVDevice", var_vals: dict[str, int] | None = None) -> Any:
        """Submit; a queue with symbols is first waited for, since their words are rewritten in place."""
        dev.check_usable()
        self._settle()
        with dev.lock:
            return super().submit(dev, var_vals)  # type: ignore[misc]

    def _settle(self) -> None:
        if self._sent is not None and self.syms:  # type: ignore[attr-defined]
            fifo, number = self._sent
            fifo.wait(number)

    def _submit_to_gpfifo(self, dev: "NVDevice", fifo: Fifo) -> None:
        number = fifo.submissions + 1
        end = fifo.release(number)
        words = self._q  # type: ignore[attr-defined]
        if dev is self.binded_device:  # type: ignore[attr-defined]
            segments = [(self.hw_page.va_addr, len(words)), dev.place_commands(array("I", end))]  # type: ignore[attr-defined]
        else:
            segments = [dev.place_commands(array("I", [*words, *end]))]
        fifo.push(segments)
        # The GPU may read these commands and their QMDs from here on: a later command must not edit them.
        self.active_qmd = None
        self._sent = fifo, number
        # A recording's value is a symbol: it gets the timeline's next value when it goes out.
        releases = self._timeline if isinstance(self._timeline, int | None) else dev.timeline_value
        dev.submitted(fifo, number, self.kernels, releases)  # type: ignore[attr-defined]


class NVComputeQueue(_Submission, ops_nv.NVComputeQueue):  # type: ignore[misc]
    """The compute queue. Signals are pushbuffer releases, never fields of a QMD.

    A QMD that releases a signal is still being read when the CPU sees the signal and may rewrite it: on an Orin 198 of
    200 such signals were lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[str] = []
        self._sizes: list[tuple[int, Any, str, int]] = []

    def exec(self, prg: Any, args_state: Any, global_size: Any, local_size: Any) -> Any:
        """Launch a kernel. LaunchError for sizes that cannot run, DeviceClosed for a buffer of a closed device."""
        for buf in args_state.bufs:
            if getattr(buf.owner, "closed", False):
                raise buf.owner.gone("a tensor's memory was released when its device was closed: make it again")
        if all(isinstance(size, int) for size in local_size):
            check_block(prg, local_size)
        for what, sizes in (("grid", global_size), ("block", local_size)):
            for axis, size in enumerate(sizes):
                if isinstance(size, int):
                    check_size(prg, what, axis, size)
                else:
                    self._sizes.append((self._new_sym(size), prg, what, axis))
        self.kernels.append(prg.name)
        # Machine code reads its dimensions from constant bank 0, which nobody else fills.
        dims = *local_size, *global_size
        self.bind_sints_to_mem(*dims, mem=args_state.buf.cpu_view(), fmt="I", offset=bank0.BLOCK_DIM)
        return super().exec(prg, args_state, global_size, local_size)

    def _apply_var_vals(self, var_vals: dict[str, int]) -> None:
        """Fill in the symbols; LaunchError for a grid or block that has become impossible."""
        super()._apply_var_vals(var_vals)
        for index, prg, what, axis in self._sizes:
            check_size(prg, what, axis, self._prev_resolved_syms[index])

    def signal(self, signal: Any, value: Any = 0) -> Any:
        """Release a signal when everything before is done."""
        self.active_qmd = None
        return super().signal(signal, value)


class NVCopyQueue(_Submission, ops_nv.NVCopyQueue):  # type: ignore[misc]
    """The copy queue."""

    kernels: tuple[str, ...] = ()

    def copy(self, dest: HCQBuffer, src: HCQBuffer, copy_size: int) -> Any:
        """Copy bytes between buffers of this GPU, or of the CPU if they were mapped for it."""
        return super().copy(as_mapped(dest), as_mapped(src), copy_size)


def as_mapped(buf: HCQBuffer) -> HCQBuffer:
    """The buffer where the GPU sees it, if it is the CPU's and was mapped; else the buffer itself.

    A GPU's memory is mapped for another one where its own sees it.
    """
    mapped = next((m for device, m in buf.mappings.items() if compat.is_nv(device.device)), None)
    if mapped is not None and compat.is_nv(getattr(buf.owner, "device", "")):
        return buf
    if mapped is None or buf is buf.base:
        return mapped or buf
    return mapped.offset(buf.cpu_view().addr - buf.base.cpu_view().addr, buf.size)
