"""Copies between the user's memory and a GPU's own, through staging memory that the copy engine reaches.

The CPU's copy between the user's memory and staging memory limits their speed, not the bus. So a large copy is cut into
chunks: several threads move some of them while the copy engine transfers others, and one doorbell submits as many
chunks as there are free areas of staging memory. Each chunk is a submission, whose number tells when its area may be
used again; only the last one takes a value of the timeline.

This is for GPUs with memory of their own; on a Jetson a copy is one memmove (`device.UnifiedAllocator`).
"""

from __future__ import annotations

import gc
import os
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import addressof, c_char, memmove
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from tegrad.errors import TegradError
from tegrad.hw.classes import COPY, CopyMethod
from tegrad.hw.gpfifo import MethodOp, Subchannel, gp_entry, method_header, semaphore
from tegrad.nv.fence import full_barrier
from tegrad.nv.queues import RELEASE, SUBROUTINE
from tegrad.nv.replay import ACQUIRE, TIMELINE_RELEASE
from tegrad.nv.waits import prompt_sleeps

if TYPE_CHECKING:
    from tegrad.nv.device import NVDevice

MB: Final = 1 << 20
SMALL_BYTES: Final = MB
"""The largest small copy: it uses one area of staging memory and no plan."""
PIECE_BYTES: Final = MB // 4
"""A small copy out goes in pieces of this size: the CPU moves one while the engine copies the next."""
HELPED_BYTES: Final = MB // 2
"""From this size on, a thread moves the last quarter of a small copy in, while the caller moves the rest."""
POLL_LIMIT_S: Final = 0.002
"""For how many seconds a copy polls for its next chunk before it sleeps."""


class Plan(NamedTuple):
    """How a large copy is done: the most bytes of a chunk, how many threads move chunks, and whether the calling thread
    takes its turn with them."""

    chunk: int
    threads: int
    caller: bool = False


def plan(size: int) -> Plan:
    """How a copy of `size` bytes, more than SMALL_BYTES, is done. More threads than needed slow each other down
    (measured on an H200's host, docs/notebook.md). There may be fewer threads than this asks for (`movers`)."""
    if size <= 4 * MB:
        return Plan(MB, 2, caller=True)
    if size <= 32 * MB:
        return Plan(MB, 4)
    return Plan(2 * MB, 8)


_OFFSETS: Final = method_header(MethodOp.INC, Subchannel.COPY, CopyMethod.OFFSET_IN_UPPER, 4)
_LENGTH: Final = method_header(MethodOp.INC, Subchannel.COPY, CopyMethod.LINE_LENGTH_IN, 1)
_LAUNCH: Final = method_header(MethodOp.INC, Subchannel.COPY, CopyMethod.LAUNCH_DMA, 1)
_LOW: Final = 0xFFFFFFFF
_COPY: Final = COPY["LAUNCH_DMA"].pack(
    data_transfer_type="NON_PIPELINED", src_memory_layout="PITCH", dst_memory_layout="PITCH"
)


class Movers:
    """Threads that copy within the host's memory: `memmove` runs without the GIL."""

    def __init__(self, count: int) -> None:
        self._jobs = [SimpleQueue[tuple[int, int, int, SimpleQueue[int], int]]() for _ in range(count)]
        for number, jobs in enumerate(self._jobs):
            threading.Thread(target=self._work, args=(jobs,), name=f"tegrad copy {number}", daemon=True).start()

    def __len__(self) -> int:
        return len(self._jobs)

    @staticmethod
    def _work(jobs: SimpleQueue[tuple[int, int, int, SimpleQueue[int], int]]) -> None:
        while True:
            to, start, size, done, tag = jobs.get()
            if size:
                memmove(to, start, size)
            done.put(tag)

    def move(self, who: int, to: int, start: int, size: int, done: SimpleQueue[int], tag: int) -> None:
        """Have thread `who` copy `size` bytes from `start` to `to`; it puts `tag` into `done` when it has."""
        self._jobs[who].put((to, start, size, done, tag))

    def settle(self, count: int) -> None:
        """Return when the first `count` threads have done all that they were given before, whoever was told of it."""
        done = SimpleQueue[int]()
        for who in range(count):
            self.move(who, 0, 0, 0, done, who)
        for _ in range(count):
            done.get()


_movers: Movers | None = None


def movers() -> Movers:
    """The threads of this process, started at the first call: up to 8, and no more than half of the CPUs it may use."""
    global _movers
    if _movers is None:
        _movers = Movers(max(1, min(8, len(os.sched_getaffinity(0)) // 2)))
    return _movers


class Uncollected:
    """Keeps Python's garbage collector from running while anybody is at a copy, in whatever thread.

    What it finds may give memory back: that waits for the GPU, and with it for a copy that waits for us, and it takes
    the device's lock, so that a thread of a copy would wait for the caller, who waits for the thread.
    """

    def __init__(self) -> None:
        self._lock, self._enabled = threading.Lock(), False
        self._within: set[int] = set()

    def begin(self, who: int) -> None:
        """No collections until `who` ends."""
        with self._lock:
            if not self._within:
                self._enabled = gc.isenabled()
            self._within.add(who)
            gc.disable()

    def end(self, who: int) -> None:
        """Once more does no harm."""
        with self._lock:
            self._within.discard(who)
            if not self._within and self._enabled:
                gc.enable()
                self._enabled = False

    def forget(self) -> None:
        """Nobody is at a copy any more, in a child process."""
        self._lock = threading.Lock()
        for who in list(self._within):
            self.end(who)


uncollected = Uncollected()


def _forget() -> None:
    global _movers
    _movers = None  # a child has none of its parent's threads
    uncollected.forget()


os.register_at_fork(after_in_child=_forget)


class _Move:
    """One large copy: its chunks, and which thread moves each between the user's memory and staging memory.

    `user` is the address of the user's memory, `area` the bytes of an area of staging memory.
    """

    def __init__(self, size: int, out: bool, user: int, area: int) -> None:
        chunk, self._threads, caller = plan(size)
        chunk = min(chunk, area)
        self.chunks = [(at, min(chunk, size - at)) for at in range(0, size, chunk)]
        self._out, self._user = out, user
        self._caller = caller
        self._own: deque[tuple[int, int]] = deque()
        """Chunks that the caller has still to move: the chunk's number, and the address of its area."""
        self._done: SimpleQueue[int] = SimpleQueue()
        self._moved: set[int] = set()
        self._threads = min(self._threads, len(movers()))

    def _ends(self, number: int, staging: int) -> tuple[int, int, int]:
        at, size = self.chunks[number]
        return (self._user + at, staging, size) if self._out else (staging, self._user + at, size)

    def give(self, number: int, staging: int) -> None:
        """Have a thread begin to move a chunk, or note it as the caller's. The engine must be done with the area at the
        address `staging`.

        Where the caller takes turns with the threads, it moves the first chunk of each turn of a copy in, which is
        moved before a thread would wake, and the last of each turn of a copy out.
        """
        turn = (number if self._out else number - 1) % (self._threads + self._caller)
        if turn < self._threads:
            movers().move(turn, *self._ends(number, staging), self._done, number)
        else:
            self._own.append((number, staging))

    def finish(self, number: int) -> None:
        """Return when a chunk that was given has been moved; until then the caller moves its own chunks."""
        while number not in self._moved:
            if self._own:
                own, staging = self._own.popleft()
                memmove(*self._ends(own, staging))
                self._moved.add(own)
            else:
                self._moved.add(self._done.get())

    def finished(self, number: int) -> bool:
        """Whether a chunk has been moved; does not wait."""
        while not self._done.empty():
            self._moved.add(self._done.get())
        return number in self._moved

    def settle(self) -> None:
        """Return when no thread works on this copy any more, wherever it was interrupted."""
        movers().settle(self._threads)


class Gate:
    """A semaphore in host memory: the copy engine waits at it until the CPU has counted it up."""

    def __init__(self, device: NVDevice) -> None:
        self._signal = device.new_signal()  # whose word is ours as long as it lives
        self._va = self._signal.value_addr
        self._word: memoryview = self._signal.base_buf.cpu_view().view(0, 8, "Q").mv
        self._opened = self._asked = int(self._word[0])

    def wait(self) -> tuple[int, ...]:
        """Command words by which the engine waits for one more opening than the wait before."""
        self._asked += 1
        return semaphore(ACQUIRE, self._va, self._asked)

    def open(self, count: int) -> None:
        """Let the engine pass the first `count` waits since `open_all`. It sees what the CPU stored before."""
        full_barrier()
        self._word[0] = self._opened + count

    def open_all(self) -> None:
        """Let the engine pass all waits."""
        full_barrier()
        self._word[0] = self._opened = self._asked


class Staging:
    """Copies of one device through areas of staging memory. Calls come under the device's lock.

    `areas` are buffers in host memory that the copy engine reaches.
    """

    def __init__(self, device: NVDevice, areas: Sequence[Any]) -> None:
        self._device, self._fifo = device, device.dma_gpfifo
        self._length = min(area.size for area in areas)
        self._small = min(SMALL_BYTES, self._length)
        self._areas = [(area.va_addr, area.cpu_view().addr) for area in areas]
        self._busy = [0] * len(areas)
        """By area, the number of the submission that used it last."""
        self._next = 0
        self._gate = Gate(device)
        self._sending = (0, 0)
        """A submission's number, and the timeline's next value when it has gone out."""

    def copy_in(self, dest: Any, source: memoryview) -> None:
        """Copy `source` to the GPU's memory. Returns when the source may change again, which is before the engine is
        done. DeviceFault, WaitTimeout."""
        size, user = source.nbytes, _address(source)
        if size > self._small:
            with self._moving(_Move(size, False, user, self._length)) as move:
                self._move_in(move, dest)
        elif size >= HELPED_BYTES:
            self._gated_in(dest, user, size)
        else:
            area = self._own_area()
            staging, cpu = self._areas[area]
            memmove(cpu, user, size)
            self._submit([(dest.va_addr, staging, size, area)], last=True)

    def _gated_in(self, dest: Any, user: int, size: int) -> None:
        """A small copy whose commands go out first: the engine waits for each piece until the CPU has moved it."""
        area = self._own_area()
        staging, cpu = self._areas[area]
        own, done, moved = size - size // 4, SimpleQueue[int](), False
        pieces = [(0, own // 2), (own // 2, own - own // 2)]
        try:
            movers().move(0, cpu + own, user + own, size - own, done, 0)
            every = [*pieces, (own, size - own)]
            self._submit_gated([(dest.va_addr + at, staging + at, length) for at, length in every], area)
            for count, (at, length) in enumerate(pieces, 1):
                memmove(cpu + at, user + at, length)
                self._gate.open(count)
            done.get()
            moved = True
        finally:  # whatever happens, no thread stays in the caller's memory, and the engine does not wait for ever
            try:
                if not moved:
                    movers().settle(1)
            finally:
                self._gate.open_all()

    def recover(self) -> None:
        """After a copy that was interrupted, wherever that was. Once more does no harm.

        What went out counts as sent, what did not go out keeps no area, and the engine waits for nobody.
        """
        self._gate.open_all()
        number, value = self._sending
        if self._fifo.submissions >= number:
            self._device.timeline_value = max(self._device.timeline_value, value)
        self._busy = [min(busy, self._fifo.submissions) for busy in self._busy]

    def _move_in(self, move: _Move, dest: Any) -> None:
        """Give chunks to the threads as areas come free, and submit each as it is moved, in order."""
        count, given, sent = len(move.chunks), 0, 0
        used: list[int] = []
        while sent < count:
            while given < count and given - sent < len(self._areas) and (given == sent or self._free(self._next)):
                area = self._turn()
                self._wait(self._busy[area])
                used.append(area)
                move.give(given, self._areas[area][1])
                given += 1
            first = sent
            while sent < given and (sent == first or move.finished(sent)):
                move.finish(sent)
                sent += 1
            self._submit(
                [
                    (dest.va_addr + at, self._areas[area][0], size, area)
                    for (at, size), area in zip(move.chunks[first:sent], used[first:sent], strict=True)
                ],
                last=sent == count,
            )

    def copy_out(self, dest: memoryview, source: Any) -> None:
        """Copy from the GPU's memory; returns when `dest` is filled.

        DeviceFault, WaitTimeout; TypeError if `dest` is read-only.
        """
        if dest.readonly:
            raise TypeError("cannot modify read-only memory")
        if (size := dest.nbytes) <= self._small:
            area = self._own_area()
            staging, cpu = self._areas[area]
            pieces = [(at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)]
            user, before = _address(dest), self._fifo.submissions
            self._submit([(staging + at, source.va_addr + at, length, area) for at, length in pieces], last=True)
            for number, (at, length) in enumerate(pieces, before + 1):
                self._fifo.wait(number, prompt=True)
                memmove(user + at, cpu + at, length)
            return
        with self._moving(_Move(dest.nbytes, True, _address(dest), self._length)) as move:
            self._move_out(move, source)

    def _move_out(self, move: _Move, source: Any) -> None:
        """Submit chunks as areas come free, and give each to the threads when the engine has copied it, in order."""
        count, sent, given, free = len(move.chunks), 0, 0, 0
        used: list[int] = []
        while free < count:
            room = min(len(self._areas) - (sent - free), count - sent)
            if room and (given == sent or room >= len(self._areas) // 4):
                areas = [self._turn() for _ in range(room)]
                used += areas
                for area in areas:
                    self._wait(self._busy[area])
                self._submit(
                    [
                        (self._areas[area][0], source.va_addr + at, size, area)
                        for (at, size), area in zip(move.chunks[sent : sent + room], areas, strict=True)
                    ],
                    last=sent + room == count,
                )
                sent += room
            if given < sent:
                self._wait(self._busy[used[given]])
                move.give(given, self._areas[used[given]][1])
                given += 1
            idle = given == count or (given == sent and sent - free == len(self._areas))
            while free < given and (idle or move.finished(free)):
                move.finish(free)  # areas come free in their order
                free, idle = free + 1, given == count

    @contextmanager
    def _moving(self, move: _Move) -> Iterator[_Move]:
        """Around a large copy: however it ends, no thread touches the memory after that, and after an error the engine
        does not either."""
        self._start_over()
        try:
            with prompt_sleeps():
                yield move
        except BaseException:
            move.settle()
            with suppress(TegradError):  # of a device that failed, the first error is the one to tell
                self._fifo.wait(self._fifo.submissions)
            raise

    def _start_over(self) -> None:
        """Begin with the first area again if it is free."""
        if self._free(0):
            self._next = 0  # what a CPU has used last, its caches have

    def _own_area(self) -> int:
        """An area for a small copy, once the engine is done with it."""
        self._start_over()
        area = self._turn()
        if not self._free(area):
            self._fifo.wait(self._busy[area], prompt=True)
        return area

    def _turn(self) -> int:
        """The next area, in turn."""
        area = self._next
        self._next = (area + 1) % len(self._areas)
        return area

    def _free(self, area: int) -> bool:
        """Whether the engine is done with an area."""
        done: int = self._fifo.progress[0]
        return done >= self._busy[area]

    def _wait(self, number: int) -> None:
        """Return when a submission is done: poll, letting other threads take the GIL, then sleep."""
        progress, until = self._fifo.progress, time.monotonic() + POLL_LIMIT_S
        while progress[0] < number:
            time.sleep(0)
            if time.monotonic() > until:
                self._fifo.wait(number, prompt=True)

    def _submit(self, copies: Sequence[tuple[int, int, int, int]], last: bool) -> None:
        """Submit copies (to, from, bytes, area) with one doorbell, each with a submission number of its own. `last`:
        they end the whole copy."""
        number, words = self._fifo.submissions, list[int]()
        for to, start, size, area in copies:
            if words:
                words += semaphore(RELEASE, self._fifo.progress_va, number)
            words += _copy(to, start, size)
            self._busy[area] = number = number + 1
        self._send(words, number, last)

    def _submit_gated(self, copies: Sequence[tuple[int, int, int]], area: int) -> None:
        """Submit copies (to, from, bytes) as one submission; the engine waits at the gate before each."""
        words = list[int]()
        for copy in copies:
            words += self._gate.wait()
            words += _copy(*copy)
        self._busy[area] = number = self._fifo.submissions + 1
        self._send(words, number, last=True)

    def _send(self, words: list[int], number: int, last: bool) -> None:
        """Send command words that end with submission `number`; they run after all work submitted before. `last`: their
        end takes the timeline's next value."""
        device, fifo = self._device, self._fifo
        value, signal = device.timeline_value, device.timeline_signal.value_addr
        words = [*semaphore(ACQUIRE, signal, value - 1), *words]
        if last:
            words += semaphore(TIMELINE_RELEASE, signal, value)
        words += fifo.release(number)
        va, count = device.place_commands(array("I", words))
        self._sending = number, value + last
        fifo.enter([gp_entry(va, count, level=SUBROUTINE)], number - fifo.submissions)
        if last:
            device.next_timeline()
        device.submitted(fifo, number, (), value if last else None)


def _copy(to: int, start: int, size: int) -> tuple[int, ...]:
    """Command words by which the copy engine copies `size` bytes."""
    return (_OFFSETS, start >> 32, start & _LOW, to >> 32, to & _LOW, _LENGTH, size, _LAUNCH, _COPY)


def _address(view: memoryview) -> int:
    """The address of a view's bytes, read-only views included."""
    with suppress(TypeError, ValueError):  # of a view that is read-only, or has no bytes
        return addressof(c_char.from_buffer(view))
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address
