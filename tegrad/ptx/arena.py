"""Memory for resident CTAs, and the host threads that run them."""

import ctypes
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np

from tegrad.ptx.layout import Worker

MAX_SLOTS = 4096
MAX_BYTES = 1 << 36
"""Address space one worker may reserve; pages are only touched by CTAs that are resident."""


class Arena:
    """One worker's slots and counters."""

    def __init__(self, stride: int, slots: int, counters: int) -> None:
        self.stride = stride
        self.slots, self.map = _reserve(stride, max(1, min(slots, MAX_SLOTS, MAX_BYTES // stride)))
        self.counters = np.zeros(counters, np.int64)
        self.struct = (ctypes.c_uint64 * (Worker.SIZE // 8))()
        base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.struct[Worker.SLOTS // 8] = base
        self.struct[Worker.STRIDE // 8] = stride
        self.struct[Worker.COUNT // 8] = self.slots
        self.struct[Worker.COUNTS // 8] = self.counters.ctypes.data
        self.address = ctypes.addressof(self.struct)


def _reserve(stride: int, slots: int) -> tuple[int, mmap.mmap]:
    """Address space for slots; fewer of them where the system does not allow that much."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    while True:
        try:
            return slots, mmap.mmap(-1, stride * slots, flags=flags)
        except OSError:
            if slots == 1:
                raise
            slots //= 2


class Job:
    """A launch that helper threads may join until it is closed."""

    def __init__(self, run: Callable[[int], None], places: int) -> None:
        self.run, self.places = run, places
        self.taken = 0
        self.lock = threading.Lock()
        self.idle = threading.Condition(self.lock)
        self.inside = 0
        self.closed = False

    def enter(self) -> int | None:
        """The index of a helper's place (from 1), or None if there is none left."""
        with self.lock:
            if self.closed or self.taken >= self.places:
                return None
            self.taken += 1
            self.inside += 1
            return self.taken

    def leave(self) -> None:
        with self.lock:
            self.inside -= 1
            self.idle.notify_all()

    def close(self) -> None:
        """Let no helper in any more and wait for those inside."""
        with self.lock:
            self.closed = True
            while self.inside:
                self.idle.wait()


class Pool:
    """Daemon threads that help launches; a launch never waits for a helper that has not begun."""

    def __init__(self) -> None:
        self.lock = threading.Condition()
        self.jobs: list[Job] = []
        self.threads = 0
        self.pid = os.getpid()

    def offer(self, job: Job) -> None:
        with self.lock:
            while self.threads < job.places:
                self.threads += 1
                threading.Thread(target=self.work, name="ptx", daemon=True).start()
            self.jobs.append(job)
            self.lock.notify(job.places)

    def withdraw(self, job: Job) -> None:
        with self.lock:
            if job in self.jobs:
                self.jobs.remove(job)

    def work(self) -> None:
        while True:
            with self.lock:
                while not self.jobs:
                    self.lock.wait()
                job = self.jobs[0]
                place = job.enter()
                if place is None or place == job.places:
                    self.jobs.remove(job)
            if place is not None:
                try:
                    job.run(place)
                finally:
                    job.leave()


_pool: Pool | None = None


def pool() -> Pool:
    """The process's pool; a forked child gets its own."""
    global _pool
    if _pool is None or _pool.pid != os.getpid():
        _pool = Pool()
    return _pool
