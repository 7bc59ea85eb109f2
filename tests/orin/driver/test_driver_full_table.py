"""A driver that may have no more fds: whoever asks for one is told so, and everybody is served on."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from driver_user import CTRL, NVMAP, SPEC, User, refused

from tegrad.orin.client import board_status
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

pytestmark = pytest.mark.usefixtures("settled")
PAGE = 4096


@contextlib.contextmanager
def room_for(fds: int) -> Iterator[None]:
    """The driver may have so many fds beside those that it has now."""
    pid = board_status(SPEC)["pids"]["driver"]
    end = time.monotonic() + 60
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":  # it still closes some
        assert time.monotonic() < end, "the driver does not sleep"
    used = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
    free = (number for number in itertools.count() if number not in used)
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (next(itertools.islice(free, fds, None)), hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("fds", [1, 2])
@pytest.mark.parametrize("make", [User.tsg, User.address_space, User.open_channel])
def test_a_file_that_finds_no_fd_is_refused_to_its_caller(user: User, make: Callable[[User], int], fds: int) -> None:
    """One fd of the driver's is for the answer; a file takes two while it is made."""
    with room_for(fds):
        with refused(errno.EMFILE):
            make(user)
        user.free(0)  # the driver goes on
    make(user)


@pytest.mark.parametrize("path", [NVMAP, CTRL])
def test_a_device_that_finds_no_fd_is_not_opened(user: User, path: str) -> None:
    with room_for(1), refused(errno.EMFILE):
        user.open(path)
    user.close(user.open(path))


def test_registers_that_find_no_fd_are_not_mapped(user: User) -> None:
    with room_for(1), refused(errno.EMFILE):
        user.kernel.doorbell(user.ctrl)  # type: ignore[attr-defined]
    user.kernel.doorbell(user.ctrl).close()  # type: ignore[attr-defined]


def only_ours(user: User) -> int:
    """A buffer of which the driver keeps no fd."""
    buffer = user.buffer(PAGE)
    user.free(buffer.handle)
    return buffer.fd


def test_a_buffer_that_finds_no_fd_is_not_mapped(user: User) -> None:
    """The driver has one for the answer and one that came with the call, and none to keep."""
    vm, fd = user.address_space(), only_ours(user)
    with room_for(2):
        for _ in range(3):  # the fds of a refused call are closed
            with refused(errno.EMFILE):
                user.map(vm, fd)
    user.unmap(vm, user.map(vm, fd))


@pytest.mark.parametrize("fds", [1, 2])
def test_a_buffer_in_the_callers_memory_that_finds_no_fd_is_not_mapped(user: User, fds: int) -> None:
    """The driver asks for it in the midst of the call: it cannot keep it, or not even get it."""
    vm, fd = user.address_space(), only_ours(user)
    sparse = s.AsAllocSpace(pages=1, page_size=PAGE, flags=k.NVGPU_AS_ALLOC_SPACE_FLAGS_SPARSE)
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_ALLOC_SPACE, sparse)
    op = s.AsRemapOp(
        flags=k.NVGPU_AS_REMAP_OP_FLAGS_PAGESIZE_4K,
        compr_kind=-1,
        mem_handle=fd,
        virt_offset_in_pages=sparse.o_a.offset // PAGE,
        num_pages=1,
    )

    def remap() -> None:
        user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_REMAP, s.AsRemap(ops=ctypes.addressof(op), num_ops=1))

    with room_for(fds):
        for _ in range(3):
            with refused(errno.EMFILE):
                remap()
    remap()
