"""One page that a C program and this one share: samples one way, poses the other, with no system call on the way.

driver.c has the same layout. Each side writes its own cache lines, and a number last, which says that what it counts is
there; the other side polls that number. C orders its stores and loads by release and acquire. Here a full barrier does,
and a field of 8 bytes is stored by one instruction.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from odometer import Pose

from tegrad.nv.fence import full_barrier

SPIN_S, SLEEP_S = 0.005, 0.0002
"""How long a core burns for the next sample before it sleeps, and how long each sleep is."""
PATIENCE_S = 120.0
"""A C program that sends nothing for so long is gone."""


class Page(ctypes.Structure):
    """Three cache lines of 64 bytes: whether we are there; what C writes; what we write."""

    _fields_ = (
        ("ready", ctypes.c_uint64), ("_line0", ctypes.c_uint64 * 7),
        ("sample", ctypes.c_uint64), ("sample_ns", ctypes.c_uint64), ("imu", ctypes.c_float * 6),
        ("stop", ctypes.c_uint64), ("_line1", ctypes.c_uint64 * 2),
        ("pose", ctypes.c_uint64), ("pose_ns", ctypes.c_uint64), ("x", ctypes.c_double), ("y", ctypes.c_double),
        ("heading", ctypes.c_double), ("speed", ctypes.c_double), ("turn", ctypes.c_double),
    )  # fmt: skip


@contextmanager
def shared(file: Path) -> Iterator[Page]:
    """A new page in this file, which is removed at the end."""
    fresh = file.with_name(file.name + ".new")
    with open(fresh, "w+b") as opened:
        opened.truncate(mmap.PAGESIZE)
        memory = mmap.mmap(opened.fileno(), mmap.PAGESIZE)
    os.replace(fresh, file)
    try:
        yield Page.from_buffer(memory)
    finally:
        file.unlink(missing_ok=True)


def samples(page: Page) -> Iterator[np.ndarray]:
    """Each sample (6,) when it comes, until C says stop. TimeoutError."""
    seen, imu = 0, np.frombuffer(page.imu, np.float32)
    page.ready = 1
    while True:
        came = time.perf_counter()
        while page.sample == seen:
            if page.stop:
                return
            waited = time.perf_counter() - came
            if waited > PATIENCE_S:
                raise TimeoutError(f"no sample came within {PATIENCE_S:.0f} s")
            if waited > SPIN_S:
                time.sleep(SLEEP_S)
        seen = page.sample
        full_barrier()
        yield imu


def answer(page: Page, pose: Pose, speed: float, turn: float) -> None:
    """The pose after the sample that came last."""
    page.x, page.y, page.heading = pose.x, pose.y, pose.heading
    page.speed, page.turn, page.pose_ns = speed, turn, time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    full_barrier()
    page.pose = page.sample
