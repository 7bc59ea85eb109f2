"""REMAP on the board: what is wrong by itself is refused before anything that it names is looked at."""

from __future__ import annotations

import ctypes
import errno

import pytest
from driver_user import VA_END, User, refused

from tegrad.orin import connection
from tegrad.orin.address_space import KERNEL_SIZE
from tegrad.orin.wire import Message, Op
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi import structs as s

WINDOW = 0xFE00000000
PAGE = 4096
PAGES = (VA_END + KERNEL_SIZE) // PAGE
"""Of an address space, the driver's range above the client's included."""


@pytest.mark.parametrize("field", ["num_pages", "mem_offset_in_pages", "virt_offset_in_pages"])
def test_a_number_beyond_the_address_space_is_refused_before_the_buffer_is_looked_at(user: User, field: str) -> None:
    """One up to there is refused for the buffer, which has no memory."""
    vm, fd = user.address_space(), user.buffer(allocate=False).fd
    sparse = s.AsAllocSpace(
        pages=16,
        page_size=PAGE,
        flags=k.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET | k.NVGPU_AS_ALLOC_SPACE_FLAGS_SPARSE,
    )
    sparse.o_a.offset = WINDOW
    user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_ALLOC_SPACE, sparse)
    first = s.AsRemapOp(
        flags=k.NVGPU_AS_REMAP_OP_FLAGS_PAGESIZE_4K,
        compr_kind=-1,
        mem_handle=fd,
        virt_offset_in_pages=WINDOW // PAGE,
        num_pages=1,
    )
    for number, error in ((PAGES, errno.ENOMEM), (PAGES + 1, errno.EINVAL)):
        second = s.AsRemapOp.from_buffer_copy(bytes(first))
        setattr(second, field, number)
        ops = (s.AsRemapOp * 2)(first, second)
        with refused(error):
            user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_REMAP, s.AsRemap(ops=ctypes.addressof(ops), num_ops=2))


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("again", [False, True])
def test_an_area_that_is_freed_meanwhile_takes_no_buffer(
    user: User, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    """While the driver waits for the caller to tell which buffer; another area may lie there then."""
    vm, fd, serve, asked = user.address_space(), user.buffer().fd, connection.serve, list[int]()

    def alloc() -> None:
        flags = k.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET | k.NVGPU_AS_ALLOC_SPACE_FLAGS_SPARSE
        sparse = s.AsAllocSpace(pages=16, page_size=PAGE, flags=flags)
        sparse.o_a.offset = WINDOW
        user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_ALLOC_SPACE, sparse)

    def free_first(question: Message) -> Message:
        if question.op == Op.GET_FILE and not asked:
            asked.append(question.value)
            space = s.AsFreeSpace(offset=WINDOW, pages=16, page_size=PAGE)
            user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_FREE_SPACE, space)
            if again:
                alloc()
        return serve(question)

    alloc()
    op = s.AsRemapOp(
        flags=k.NVGPU_AS_REMAP_OP_FLAGS_PAGESIZE_4K,
        compr_kind=-1,
        mem_handle=fd,
        virt_offset_in_pages=WINDOW // PAGE,
        num_pages=1,
    )
    monkeypatch.setattr(connection, "serve", free_first)
    with refused(errno.EINVAL):
        user.kernel.ioctl(vm, io.NVGPU_AS_IOCTL_REMAP, s.AsRemap(ops=ctypes.addressof(op), num_ops=1))
    assert asked == [fd]
