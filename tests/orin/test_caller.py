"""The caller's side of a call: its memory, its memory map and its fds, as the driver asks for them."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tegrad.orin.caller import PAGE, find_vma, if_open, is_buffer, lowest, read_memory, serve, write_memory
from tegrad.orin.wire import Message, Op
from tegrad.uapi.kernel import (
    MAP_ANONYMOUS,
    MAP_FIXED,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
    LinuxKernel,
)

PAGES = 4
UNKNOWN_FD = 1 << 20


def file_of(name: str | Path) -> int:
    """A file of as many pages, each filled with its number; of a name in memory, or a path."""
    fd = os.memfd_create(name) if isinstance(name, str) else os.open(name, os.O_RDWR | os.O_CREAT)
    os.write(fd, b"".join(bytes([page]) * PAGE for page in range(PAGES)))
    return fd


class Area:
    """Two pages of a file, from its second on, between pages of which nothing can be read."""

    def __init__(self, fd: int) -> None:
        linux, anonymous = LinuxKernel(), MAP_PRIVATE | MAP_ANONYMOUS
        self.around = linux.mmap(-1, 4 * PAGE, PROT_NONE, anonymous)
        self.start, self.end = self.around + PAGE, self.around + 3 * PAGE
        flags = MAP_SHARED | MAP_FIXED
        linux.mmap(fd, 2 * PAGE, PROT_READ | PROT_WRITE, flags, addr=self.start, offset=PAGE)
        self.fd, self.inode = fd, os.fstat(fd).st_ino

    def close(self) -> None:
        LinuxKernel().munmap(self.around, 4 * PAGE)
        os.close(self.fd)


@pytest.fixture
def area() -> Iterator[Area]:
    made = Area(file_of("nvmap:7"))
    yield made
    made.close()


# -- the memory map --------------------------------------------------------------------------------------------------


def test_an_area_is_found_by_each_of_its_addresses_and_by_no_other(area: Area) -> None:
    facts = {
        "start": area.start,
        "end": area.end,
        "offset": PAGE,
        "inode": area.inode,
        "path": "/memfd:nvmap:7 (deleted)",
    }
    for address in (area.start, area.start + 1, area.start + PAGE, area.end - 1):
        assert find_vma(address) == facts
    for address in (area.start - 1, area.end):
        beside = find_vma(address)
        assert beside is not None
        assert (beside["inode"], beside["path"]) == (0, "")
        assert not is_buffer(beside)


def test_an_address_in_no_area_has_none() -> None:
    assert find_vma(0) is None
    assert find_vma((1 << 64) - 1) is None
    assert not is_buffer(None)


def test_a_path_with_spaces_comes_whole(tmp_path: Path) -> None:
    path = tmp_path / "two  words"
    found = Area(file_of(path))
    try:
        assert find_vma(found.start) == {
            "start": found.start,
            "end": found.end,
            "offset": PAGE,
            "inode": found.inode,
            "path": str(path),
        }
    finally:
        found.close()


def test_only_a_mapped_buffer_is_one(area: Area) -> None:
    assert is_buffer(find_vma(area.start))
    other = Area(file_of("other"))
    try:
        assert not is_buffer(find_vma(other.start))
    finally:
        other.close()


def test_the_driver_is_told_an_area_in_json_or_nothing(area: Area) -> None:
    answer = serve(Message(Op.FIND_VMA, value=area.start))
    assert answer.op == Op.COPIED
    assert json.loads(answer.payload) == find_vma(area.start)
    assert serve(Message(Op.FIND_VMA, value=0)) == Message(Op.COPIED)


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "size", "readable"),
    [
        (0, 0, 0),
        (0, 1, 1),
        (0, 2 * PAGE, 2 * PAGE),
        (5, PAGE, PAGE),  # over the end of a page
        (PAGE - 1, 2, 2),
        (PAGE + 1, PAGE, PAGE - 1),  # into the next page
        (2 * PAGE - 3, 2 * PAGE, 3),
        (2 * PAGE, 1, 0),
        (-1, 4, 0),
    ],
)
def test_memory_is_read_and_written_up_to_the_first_bad_page(area: Area, at: int, size: int, readable: int) -> None:
    content = bytes([1]) * PAGE + bytes([2]) * PAGE
    assert read_memory(area.start + at, size) == content[max(at, 0) :][:readable]
    answer = serve(Message(Op.COPY_IN, size, area.start + at))
    assert answer == Message(Op.COPIED, payload=content[max(at, 0) :][:readable])
    data = bytes(0x80 | i & 0x7F for i in range(size))
    assert write_memory(area.start + at, data) == size - readable
    written = ctypes.string_at(area.start, 2 * PAGE)
    head = content[: max(at, 0)] + data[:readable]
    assert written == head + content[len(head) :]
    ctypes.memmove(area.start, content, 2 * PAGE)
    assert serve(Message(Op.COPY_OUT, 0, area.start + at, data)) == Message(Op.COPIED, code=size - readable)
    assert ctypes.string_at(area.start, 2 * PAGE) == written


def test_copies_leave_no_fd(area: Area) -> None:
    before = os.listdir("/proc/self/fd")
    read_memory(area.start, 2 * PAGE)
    read_memory(area.end, 8)
    write_memory(area.start, bytes(2 * PAGE))
    write_memory(area.end, bytes(8))
    assert os.listdir("/proc/self/fd") == before


def test_read_only_memory_is_not_written() -> None:
    with mmap.mmap(-1, PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as own:
        address = ctypes.addressof(ctypes.c_char.from_buffer(own))
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), PAGE, mmap.PROT_READ)
        try:
            assert write_memory(address + 8, b"abc") == 3
            assert read_memory(address + 8, 3) == bytes(3)
        finally:
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), PAGE, mmap.PROT_READ | mmap.PROT_WRITE)


# -- fds -------------------------------------------------------------------------------------------------------------


def test_only_an_open_fd_is_given() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    assert if_open(fd) == fd
    assert serve(Message(Op.GET_FILE, value=fd)) == Message(Op.COPIED, fds=[fd])
    assert serve(Message(Op.CLOSE_FD, value=fd)) == Message(Op.COPIED)
    assert if_open(fd) is None
    assert serve(Message(Op.GET_FILE, value=fd)) == Message(Op.COPIED, fds=[None])
    for none in (-1, UNKNOWN_FD, 1 << 40):
        assert if_open(none) is None


def test_an_fd_that_is_closed_already_is_closed() -> None:
    assert serve(Message(Op.CLOSE_FD, value=UNKNOWN_FD)) == Message(Op.COPIED)


def test_a_file_gets_the_lowest_free_number_and_keeps_no_other() -> None:
    low, high = os.open("/dev/null", os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)
    file = os.fstat(high)
    assert lowest(high) == high  # nothing below it is free
    os.close(low)
    moved = lowest(high)
    assert (moved, os.fstat(moved)) == (low, file)
    assert not os.get_inheritable(moved)
    assert if_open(high) is None
    os.close(moved)


def test_a_file_gets_number_0_where_that_is_free() -> None:
    standard, file = os.dup(0), os.open("/dev/zero", os.O_RDONLY)
    try:
        os.close(0)
        assert lowest(file) == 0
        assert if_open(file) is None
    finally:
        os.dup2(standard, 0)
        os.close(standard)


def test_an_unknown_question_is_an_error() -> None:
    with pytest.raises(OSError, match=f"unknown.*{int(Op.DONE)}") as caught:
        serve(Message(Op.DONE))
    assert caught.value.errno == errno.EPROTO
