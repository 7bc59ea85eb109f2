"""Section 2: /dev/nvmap."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from dataclasses import replace
from pathlib import Path

from tegrad.conformance.calls import NO_FD, Calls, ctrl, nvmap
from tegrad.conformance.process import Peer
from tegrad.conformance.rig import CACHED, PAGE, RW, TAG, Mapped, Rig
from tegrad.conformance.rule import Differs, rule, rules
from tegrad.uapi import constants as k
from tegrad.uapi import structs as s
from tegrad.uapi.errors import DriverError
from tegrad.uapi.ioctls import BY_NAME
from tegrad.uapi.kernel import MAP_ANONYMOUS, MAP_FIXED, MAP_PRIVATE, MAP_SHARED, PROT_NONE, PROT_READ

IOVMM = k.NVMAP_HEAP_IOVMM
UNKNOWN = 0x8FFFFFFF
"""A handle that nobody has."""


def alloc_fields(handle: int, **fields: int) -> dict[str, int]:
    """The fields of an ALLOC that works; `fields` change them."""
    usual = {"handle": handle, "heap_mask": IOVMM, "flags": CACHED, "align": PAGE, "numa_nid": -1}
    return usual | fields


def parameters(rig: Rig, handle: int) -> s.HandleParameters:
    """What PARAMETERS says of a handle."""
    found = rig.call(rig.nvmap, "NVMAP_PARAMETERS", handle=handle)
    assert isinstance(found, s.HandleParameters)
    return found


def heap_params(rig: Rig, mask: int) -> s.QueryHeapParams:
    """What QUERY_HEAP_PARAMS says of a heap."""
    found = rig.accepts(rig.nvmap, "NVMAP_QUERY_HEAP_PARAMS", heap_mask=mask, total=5, free=5, granule_size=5)
    assert isinstance(found, s.QueryHeapParams)
    return found


def known(rig: Rig, handle: int) -> bool:
    """Whether this process has a handle."""
    try:
        parameters(rig, handle)
    except DriverError as error:
        if error.errno != errno.ENODEV:
            raise
        return False
    return True


def rw_fields(handle: int, address: int, size: int = 4) -> dict[str, int]:
    """The fields of a READ or WRITE of one element at offset 0."""
    return {
        "addr": address,
        "handle": handle,
        "elem_size": size,
        "hmem_stride": size,
        "user_stride": size,
        "count": 1,
    }


def rw_usual(rig: Rig) -> dict[str, int]:
    """The fields of a READ or WRITE of four bytes of a one-page buffer."""
    return rw_fields(rig.buffer().handle, rig.memory(PAGE).address)


READ_WRITE = ("NVMAP_READ", "NVMAP_WRITE")


def read_only(rig: Rig) -> int:
    """A duplicate of a buffer's handle that user space cannot write through."""
    return rig.read_only_handle(rig.buffer().handle)


# ---- 2.2 CREATE ----------------------------------------------------------------------------------------------------


Calls("2.2", "NVMAP_CREATE", nvmap).refuses("create-size-0", "size 0 is", errno.EINVAL, size=0)
Calls("2.2", "NVMAP_CREATE_64", nvmap).refuses("create-64-size-0", "size 0 is", errno.EINVAL, size64=0)


@rule("2.2", "CREATE takes a 32-bit size and gives the handle in the second word")
def create_in_second_word(rig: Rig) -> None:
    made = rig.accepts(rig.nvmap, "NVMAP_CREATE", size=2 * PAGE)
    rig.keep_handle(made.handle)
    rig.check(known(rig, made.handle), "a handle of this process", made.handle)


@rule("2.2", "CREATE_64 takes more than 4 GiB and gives the handle in the first word")
def create_64_in_first_word(rig: Rig) -> None:
    size = (4 << 30) + PAGE
    made = rig.accepts(rig.nvmap, "NVMAP_CREATE_64", size64=size)
    rig.keep_handle(made.handle64)
    rig.equal("the dmabuf's size", size, os.lseek(rig.get_fd(made.handle64), 0, os.SEEK_END))


@rule("2.2", "the dmabuf's size is rounded up to 4096, and is known before ALLOC")
def size_is_rounded_up(rig: Rig) -> None:
    for asked, got in ((1, PAGE), (PAGE, PAGE), (PAGE + 1, 2 * PAGE)):
        rig.equal(f"the size of {asked} bytes", got, os.lseek(rig.get_fd(rig.handle(asked)), 0, os.SEEK_END))


@rule("2.2", "a new handle is write-combined until ALLOC says otherwise")
def new_handle_is_write_combined(rig: Rig) -> None:
    rig.equal("coherency", k.NVMAP_HANDLE_WRITE_COMBINE, parameters(rig, rig.handle()).coherency)


@rule("2.2", "handle numbers rise from 2^31 - 1, and are not used again")
def handles_rise(rig: Rig) -> None:
    first = rig.handle()
    rig.check(first >= (1 << 31) - 1, "a handle of 2^31 - 1 or more", first)
    rig.free(first)
    second = rig.handle()
    rig.check(second > first, f"a handle above {first:#x}", second)


@rule("2.2", "the handle index is one for all processes")
def handle_index_is_global(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> int:
        return own.handle()

    before = rig.handle()
    elsewhere = rig.child(other).result()
    after = rig.handle()
    rig.check(before < elsewhere < after, "rising handles", [hex(one) for one in (before, elsewhere, after)])


@rule("2.2", "a handle is looked up in its own process only")
def handles_are_per_process(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> None:
        own.refuses(errno.EINVAL, own.nvmap, "NVMAP_ALLOC", alloc_fields(handle))

    handle = rig.handle()
    rig.child(other).result()
    rig.accepts(rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle))


Calls("2.2", "NVMAP_GET_FD", nvmap, begins="GET_FD ").accepts(
    "get-fd-before-alloc", "works before ALLOC", handle=Rig.handle
)
Calls("2.2", READ_WRITE, nvmap, rw_usual, begins="READ and WRITE ").refuses(
    "read-write-before-alloc", "of a handle without memory are", errno.EPERM, handle=Rig.handle
)


@rule("2.2", "the GPU cannot map a handle without memory: ENOMEM")
def gpu_map_before_alloc(rig: Rig) -> None:
    fd, vm = rig.get_fd(rig.handle()), rig.address_space()
    rig.fails(errno.ENOMEM, "MAP_BUFFER_EX of a handle without memory", lambda: rig.map(vm, fd))


# ---- 2.3 ALLOC -----------------------------------------------------------------------------------------------------


ALLOC = Calls("2.3", "NVMAP_ALLOC", nvmap, lambda rig: alloc_fields(rig.handle()))
ALLOC.refuses("align-not-power-of-two", "an align that is not a power of two is", errno.EINVAL, align=3)
ALLOC.accepts("align-0", "align 0 is allowed", align=0)
ALLOC.refuses("handle-0", "handle 0 is", errno.EINVAL, handle=0)
ALLOC.refuses("numa-node-too-large", "a numa_nid past MAX_NUMNODES is", errno.EINVAL, numa_nid=1 << 20)
ALLOC.refuses("numa-node-negative", "a numa_nid below -1 is", errno.EINVAL, numa_nid=-2)
ALLOC.accepts("numa-node-0", "numa_nid 0 passes", numa_nid=0)
ALLOC.accepts("numa-node-any", "numa_nid -1 passes", numa_nid=-1)
ALLOC.refuses("unknown-handle", "a handle that the process does not have is", errno.EINVAL, handle=UNKNOWN)
ALLOC.refuses("no-heap", "an empty heap mask is", errno.ENOMEM, heap_mask=0)
ALLOC.refuses("sysmem-heap", "bit 31, SYSMEM of other trees, is", errno.ENOMEM, heap_mask=1 << 31)
ALLOC.refuses("absent-heap", "a carveout that does not exist is", errno.ENOMEM, heap_mask=k.NVMAP_HEAP_CARVEOUT_TSEC)
ALLOC.refuses(
    "ivm-and-another", "IVM beside another heap is", errno.EINVAL, heap_mask=k.NVMAP_HEAP_CARVEOUT_IVM | IOVMM
)
ALLOC.refuses(
    "vidmem-and-another", "VIDMEM beside another heap is", errno.EINVAL, heap_mask=k.NVMAP_HEAP_CARVEOUT_VIDMEM | IOVMM
)
ALLOC.refuses("alloc-twice", "a handle that has its memory is", errno.EEXIST, handle=lambda rig: rig.buffer().handle)


@rule("2.3", "ALLOC: a size past the machine's memory is ENOMEM")
def more_than_all_memory(rig: Rig) -> None:
    total = heap_params(rig, IOVMM).total
    handle = rig.handle(total + (1 << 30))
    rig.refuses(errno.ENOMEM, rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle))


@rule("2.3", "ALLOC looks at align and numa_nid before it looks at the handle's memory")
def arguments_before_memory(rig: Rig) -> None:
    handle = rig.buffer().handle
    rig.refuses(errno.EINVAL, rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle, align=3))
    rig.refuses(errno.EINVAL, rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle, numa_nid=-2))


@rule("2.3", "ALLOC looks for the handle before it looks at the heaps")
def handle_before_heap(rig: Rig) -> None:
    rig.refuses(errno.EINVAL, rig.nvmap, "NVMAP_ALLOC", alloc_fields(UNKNOWN, heap_mask=0))


@rule("2.3", "ALLOC says EEXIST before it looks at the heaps")
def memory_before_heap(rig: Rig) -> None:
    rig.refuses(errno.EEXIST, rig.nvmap, "NVMAP_ALLOC", alloc_fields(rig.buffer().handle, heap_mask=0))


@rule("2.3", "a handle whose ALLOC failed can be allocated")
def alloc_after_failure(rig: Rig) -> None:
    handle = rig.handle()
    with_no_heap = alloc_fields(handle, heap_mask=0)
    rig.fails(errno.ENOMEM, "ALLOC without a heap", lambda: rig.call(rig.nvmap, "NVMAP_ALLOC", with_no_heap))
    rig.accepts(rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle))


def _tag_lines(rig: Rig, *tags: int) -> int:
    """How many lines about tags a fresh client's allocations with these tags write."""

    def other(own: Rig, peer: Peer) -> int:
        mark = own.log_mark()
        for tag in tags:
            flags = tag << 16 | k.NVMAP_HANDLE_INNER_CACHEABLE
            own.accepts(own.nvmap, "NVMAP_ALLOC", alloc_fields(own.handle(), flags=flags))
        return sum("tag" in line for line in own.log_since(mark))

    return int(rig.child(other).result())


@rule("2.3", "ALLOC: tag 0 is no error, and one error line per client")
def no_tag_is_logged_once(rig: Rig) -> None:
    rig.equal("lines about tags", 1, _tag_lines(rig, 0, 0, 0))


@rule("2.3", "ALLOC: any tag but 0 is not logged")
def a_tag_is_not_logged(rig: Rig) -> None:
    rig.equal("lines about tags", 0, _tag_lines(rig, TAG, 1))


@rule("2.3", "the GENERIC heap falls back to system pages")
def generic_falls_back(rig: Rig) -> None:
    heaps = rig.call(rig.nvmap, "NVMAP_GET_AVAILABLE_HEAPS").heaps
    rig.need(not heaps & k.NVMAP_HEAP_CARVEOUT_GENERIC, "there is a generic carveout")
    handle = rig.handle()
    rig.accepts(rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle, heap_mask=k.NVMAP_HEAP_CARVEOUT_GENERIC))
    rig.equal("the heap", IOVMM, parameters(rig, handle).heap)


@rule("2.3", "bits 1:0 of the flags are the cache attribute; other flags leave it alone")
def cache_attribute(rig: Rig) -> None:
    for flags in (0, 1, 2, 3, 4 | 1, 8 | 2, 32 | 2):
        handle = rig.handle()
        rig.alloc(handle, flags=TAG << 16 | flags)
        rig.equal(f"the attribute of flags {flags}", flags & 3, parameters(rig, handle).coherency & 3)


@rule("2.3", "the effective alignment is the larger of align and 4096")
def alignment(rig: Rig) -> None:
    for asked, got in ((0, PAGE), (16, PAGE), (1 << 16, 1 << 16)):
        handle = rig.handle()
        rig.alloc(handle, align=asked)
        rig.equal(f"the alignment of align {asked}", got, parameters(rig, handle).align)


@rule("2.3", "memory is zeroed when it is allocated, also where another buffer was before")
def memory_is_zeroed(rig: Rig) -> None:
    for _ in range(4):
        buffer = rig.buffer(4 * PAGE)
        memory = rig.mapped(buffer)
        rig.check(memory.read(0, 4 * PAGE) == bytes(4 * PAGE), "zeroes", "other bytes")
        memory.write(b"\xa5" * 4 * PAGE)
        memory.close()
        rig.close(buffer.fd)
        rig.free(buffer.handle)


# ---- 2.4 GET_FD, FROM_FD -------------------------------------------------------------------------------------------


@rule("2.4", "GET_FD makes a new fd each time")
def get_fd_is_new(rig: Rig) -> None:
    handle = rig.handle()
    first, second = rig.get_fd(handle), rig.get_fd(handle)
    rig.check(first != second, "two numbers", first)


@rule("2.4", "GET_FD's fd is close-on-exec")
def get_fd_is_cloexec(rig: Rig) -> None:
    rig.check(not os.get_inheritable(rig.get_fd(rig.handle())), "O_CLOEXEC", "an inheritable fd")


GET_FD = Calls("2.4", "NVMAP_GET_FD", nvmap, begins="GET_FD of ")
GET_FD.refuses("get-fd-of-nothing", "a number that is neither handle nor fd is", errno.EBADF, handle=NO_FD)
GET_FD.refuses("get-fd-of-another-fd", "an fd that is no dma-buf is", errno.EINVAL, handle=ctrl)
GET_FD.refuses("get-fd-of-own-dmabuf", "an nvmap dma-buf's fd is", errno.EINVAL, handle=lambda rig: rig.buffer().fd)


@rule("2.4", "GET_FD at the limit of open files is EMFILE")
def get_fd_at_the_limit(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> None:
        handle = own.handle()
        soft = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        while len(fill) < 1000:
            try:
                fill.append(os.dup(own.nvmap))
            except OSError:
                break
        own.refuses(errno.EMFILE, own.nvmap, "NVMAP_GET_FD", handle=handle)
        for fd in fill:
            os.close(fd)

    fill: list[int] = []
    rig.child(other).result()


@rule("2.4", "FROM_FD makes a handle over the same memory")
def from_fd_same_memory(rig: Rig) -> None:
    buffer = rig.buffer()
    rig.mapped(buffer).put32(0x1234)
    rig.free(buffer.handle)
    handle = rig.keep_handle(rig.accepts(rig.nvmap, "NVMAP_FROM_FD", fd=buffer.fd).handle)
    rig.equal("the word", 0x1234, rig.mmap(rig.get_fd(handle), PAGE).u32())


Calls("2.4", "NVMAP_FROM_FD", nvmap, begins="FROM_FD of ").refuses(
    "from-fd-before-alloc", "a buffer without memory is", errno.EINVAL, fd=lambda rig: rig.get_fd(rig.handle())
)


@rule("2.4", "another process that imports a buffer gets another handle over the same memory")
def from_fd_elsewhere(rig: Rig) -> None:
    def other(own: Rig, peer: Peer) -> int:
        _, (fd,) = peer.receive()
        handle = own.keep_handle(own.call(own.nvmap, "NVMAP_FROM_FD", fd=own.keep(fd)).handle)
        memory = own.mmap(own.get_fd(handle), PAGE)
        own.equal("the word of the first process", 0x5678, memory.u32())
        memory.put32(0x9ABC)
        return handle

    buffer = rig.buffer()
    memory = rig.mapped(buffer)
    memory.put32(0x5678)
    child = rig.child(other)
    child.peer.send(None, buffer.fd)
    rig.check(child.result() != buffer.handle, "another handle", buffer.handle)
    rig.equal("the word of the second process", 0x9ABC, memory.u32())


# ---- 2.5 mmap ------------------------------------------------------------------------------------------------------


@rule("2.5", "mmap past the dmabuf's size is EINVAL")
def mmap_past_the_end(rig: Rig) -> None:
    fd = rig.buffer(2 * PAGE).fd
    rig.refuses_mmap(errno.EINVAL, fd, 2 * PAGE + 1)
    rig.refuses_mmap(errno.EINVAL, fd, 2 * PAGE, offset=PAGE)


@rule("2.5", "mmap reaches up to the rounded size")
def mmap_of_the_rounded_size(rig: Rig) -> None:
    fd = rig.buffer(PAGE + 1).fd
    _mapped(rig, fd, 2 * PAGE).put32(1, 2 * PAGE - 4)


@rule("2.5", "mmap at an offset that is not a page's is EINVAL")
def mmap_at_an_odd_offset(rig: Rig) -> None:
    rig.refuses_mmap(errno.EINVAL, rig.buffer(2 * PAGE).fd, PAGE, offset=100)


@rule("2.5", "mmap of a handle without memory is EPERM")
def mmap_before_alloc(rig: Rig) -> None:
    rig.refuses_mmap(errno.EPERM, rig.get_fd(rig.handle()), PAGE)


@rule("2.5", "mmap for writing of a read-only duplicate is EACCES; ALLOC's flag for such memory changes nothing")
def mmap_of_read_only_memory(rig: Rig) -> None:
    rig.refuses_mmap(errno.EACCES, rig.get_fd(read_only(rig)), PAGE)
    _mapped(rig, rig.buffer(flags=CACHED | k.NVMAP_HANDLE_RO).fd, PAGE).put32(1)


@rule("2.5", "mmap for reading of a read-only duplicate succeeds")
def mmap_for_reading_of_read_only_memory(rig: Rig) -> None:
    fd = rig.get_fd(read_only(rig))
    rig.equal("the word", 0, _mapped(rig, fd, PAGE, PROT_READ).u32())


@rule("2.5", "a mapping is not inherited by fork")
def mapping_is_not_inherited(rig: Rig) -> None:
    memory = rig.mapped(rig.buffer())
    rig.equal("the parent can read", True, _readable(memory.address))
    rig.equal("the child can read", False, rig.child(lambda own, peer: _readable(memory.address)).result())


@rule("2.5", "MAP_PRIVATE is treated as shared")
def map_private_is_shared(rig: Rig) -> None:
    buffer = rig.buffer()
    private, shared = rig.mmap(buffer.fd, PAGE, flags=MAP_PRIVATE), rig.mapped(buffer)
    private.put32(7)
    rig.equal("the word through another mapping", 7, shared.u32())


@rule("2.5", "MAP_FIXED over a reserved range works")
def map_fixed(rig: Rig) -> None:
    buffer = rig.buffer(2 * PAGE)
    rig.mapped(buffer).put32(9, PAGE)
    place = rig.mmap(-1, 4 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS).address
    at = rig.kernel.mmap(buffer.fd, PAGE, PROT_READ, MAP_SHARED | MAP_FIXED, addr=place + PAGE, offset=PAGE)
    rig.equal("the address", place + PAGE, at)
    rig.equal("the word", 9, ctypes.c_uint32.from_address(at).value)


@rule("2.5", "several mappings of one buffer are the same memory")
def mappings_alias(rig: Rig) -> None:
    buffer = rig.buffer(2 * PAGE)
    one, two, part = rig.mapped(buffer), rig.mapped(buffer), rig.mmap(buffer.fd, PAGE, offset=PAGE)
    one.put32(5, PAGE)
    rig.equal("the words", (5, 5), (two.u32(PAGE), part.u32()))


@rule("2.5", "msync of a mapping is EINVAL")
def msync(rig: Rig) -> None:
    memory = rig.mapped(rig.buffer())
    rig.fails(errno.EINVAL, "msync", lambda: rig.kernel.msync(memory.address, memory.size))


@rule("2.5", "a mapping outlives the fd and the handle")
def mapping_outlives_fd_and_handle(rig: Rig) -> None:
    buffer = rig.buffer()
    memory = rig.mapped(buffer)
    memory.put32(3)
    rig.close(buffer.fd)
    rig.free(buffer.handle)
    rig.equal("a readable mapping", True, _readable(memory.address))
    rig.equal("the word", 3, memory.u32())


def _mapped(rig: Rig, fd: int, size: int, prot: int = RW) -> Mapped:
    """The rule: this mmap succeeds."""
    return rig.succeeds(f"mmap of {size:#x} bytes succeeds", lambda: rig.mmap(fd, size, prot))


def _readable(address: int) -> bool:
    """Whether this process can read an address, found out without dying of it."""
    out, into = os.pipe()
    try:
        return int(_libc.write(into, address, 4)) == 4
    finally:
        os.close(out)
        os.close(into)


_libc = ctypes.CDLL(None, use_errno=True)
_libc.write.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_libc.write.restype = ctypes.c_ssize_t

# ---- 2.6 FREE ------------------------------------------------------------------------------------------------------


@rule("2.6", "FREE of 0 succeeds")
def free_0(rig: Rig) -> None:
    rig.accepts(rig.nvmap, "NVMAP_FREE", value=0)


@rule("2.6", "FREE of an unknown handle succeeds")
def free_unknown(rig: Rig) -> None:
    rig.accepts(rig.nvmap, "NVMAP_FREE", value=UNKNOWN)
    rig.accepts(rig.nvmap, "NVMAP_FREE", value=NO_FD)


@rule("2.6", "FREE takes the handle by value and drops it")
def free_drops(rig: Rig) -> None:
    handle = rig.handle()
    rig.free(handle)
    rig.refuses(errno.EINVAL, rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle))


@rule("2.6", "FREE of a dmabuf fd's number closes the fd")
def free_of_an_fd(rig: Rig) -> None:
    fd = rig.get_fd(rig.handle())
    rig.forget(fd)
    rig.free(fd)
    try:
        os.fstat(fd)
    except OSError:
        return
    os.close(fd)
    raise Differs("a closed fd", "an open one")


@rule("2.6", "FROM_FD on an own buffer makes another handle, and FREE takes the one that it names")
def free_is_counted(rig: Rig) -> None:
    buffer = rig.buffer()
    second = rig.keep_handle(rig.call(rig.nvmap, "NVMAP_FROM_FD", fd=buffer.fd).handle)
    rig.check(second != buffer.handle, "another handle", second)
    rig.free(buffer.handle)
    rig.equal("the first known after its FREE", False, known(rig, buffer.handle))
    rig.equal("the second known", True, known(rig, second))


# ---- 2.7 READ, WRITE -----------------------------------------------------------------------------------------------


ELEMENTS = Calls("2.7", READ_WRITE, nvmap, rw_usual, begins="READ and WRITE: ")
ELEMENTS.refuses("addr-0", "addr 0 is", errno.EINVAL, addr=0)
ELEMENTS.refuses("count-0", "count 0 is", errno.EINVAL, count=0)
ELEMENTS.refuses("elem-size-0", "elem_size 0 is", errno.EINVAL, elem_size=0)
ELEMENTS.refuses("unknown-handle", "a handle that the process does not have is", errno.EINVAL, handle=UNKNOWN)
ELEMENTS.refuses(
    "element-past-the-size",
    "an element larger than the buffer is",
    errno.EINVAL,
    elem_size=8192,
    hmem_stride=8192,
    user_stride=8192,
)
ELEMENTS.refuses("offset-at-the-end", "an offset at the end is", errno.EINVAL, offset=PAGE)
ELEMENTS.refuses(
    "element-past-the-buffers-stride", "an element larger than the buffer's stride is", errno.EINVAL, hmem_stride=3
)
ELEMENTS.refuses(
    "element-past-the-users-stride", "an element larger than the user's stride is", errno.EINVAL, user_stride=3
)
ELEMENTS.refuses(
    "end-past-the-size", "a strided end past the buffer is", errno.EINVAL, offset=4, hmem_stride=2048, count=3
)
Calls("2.7", "NVMAP_READ", nvmap, rw_usual, begins="READ ").accepts(
    "read-of-read-only-memory", "of a read-only duplicate succeeds", handle=read_only
)


@rule("2.7", "WRITE to a read-only duplicate is EPERM; ALLOC's flag for such memory changes nothing")
def write_to_read_only_memory(rig: Rig) -> None:
    rig.refuses(errno.EPERM, rig.nvmap, "NVMAP_WRITE", rw_fields(read_only(rig), rig.memory(PAGE).address))
    handle = rig.buffer(flags=CACHED | k.NVMAP_HANDLE_RO).handle
    rig.accepts(rig.nvmap, "NVMAP_WRITE", rw_fields(handle, rig.memory(PAGE).address))


@rules(
    "2.7",
    "{way} a bad address is EINTR, and count the bytes left of that element",
    "way name ioctl",
    [
        ("READ to", "read-to-a-bad-address", "NVMAP_READ"),
        ("WRITE from", "write-from-a-bad-address", "NVMAP_WRITE"),
    ],
)
def leftover(rig: Rig, ioctl: str) -> None:
    """Of a transfer of 64 bytes, 16 of which have a good address, the bytes left come back."""
    arg = s.RwHandle(**rw_fields(rig.buffer().handle, rig.edge(bytes(16)), 64))
    once = replace(BY_NAME[ioctl], sleeps=True)  # EINTR is not a signal's here: not to be repeated
    rig.fails(errno.EINTR, ioctl, lambda: rig.returns(rig.nvmap, once, arg))
    rig.check(48 <= arg.count < 64, "48 bytes left, or some more", arg.count)


@rule("2.7", "READ and WRITE write the bytes moved back into count")
def count_is_bytes_moved(rig: Rig) -> None:
    memory, handle = rig.memory(PAGE), rig.buffer().handle
    for name in ("NVMAP_WRITE", "NVMAP_READ"):
        fields = rw_fields(handle, memory.address, 4) | {"hmem_stride": 8, "user_stride": 8, "count": 3}
        rig.equal(f"count after {name}", 12, rig.call(rig.nvmap, name, fields).count)


@rule("2.7", "WRITE and READ move elements by both strides")
def strides(rig: Rig) -> None:
    buffer = rig.buffer()
    memory, mapped = rig.memory(PAGE), rig.mapped(buffer)
    memory.write(b"ab..cd..ef..")
    fields = rw_fields(buffer.handle, memory.address, 2) | {
        "hmem_stride": 3,
        "user_stride": 4,
        "count": 3,
        "offset": 16,
    }
    rig.call(rig.nvmap, "NVMAP_WRITE", fields)
    rig.equal("the buffer", b"ab\0cd\0ef\0", mapped.read(16, 9))
    fields = rw_fields(buffer.handle, memory.address + 64, 8) | {"offset": 16}
    rig.call(rig.nvmap, "NVMAP_READ", fields)
    rig.equal("what READ gives", b"ab\0cd\0ef", memory.read(64, 8))


# ---- 2.8 cache maintenance -----------------------------------------------------------------------------------------


def cache_fields(rig: Rig) -> tuple[dict[str, int], Mapped]:
    """The fields of a CACHE of a whole mapped buffer, and the mapping."""
    buffer = rig.buffer(2 * PAGE)
    memory = rig.mapped(buffer)
    return {"addr": memory.address, "handle": buffer.handle, "len": buffer.size, "op": k.NVMAP_CACHE_OP_WB}, memory


CACHE = ("NVMAP_CACHE", "NVMAP_CACHE_64")
OPS = Calls("2.8", CACHE, nvmap, lambda rig: cache_fields(rig)[0])
OPS.refuses("addr-0", "addr 0 is", errno.EINVAL, addr=0)
OPS.refuses("op-past-2", "an op past 2 is", errno.EINVAL, op=3)
OPS.refuses("unknown-handle", "an unknown handle is", errno.EINVAL, handle=UNKNOWN)
OPS.refuses(
    "no-nvmap-memory",
    "an address of other memory is",
    errno.EADDRNOTAVAIL,
    addr=lambda rig: rig.memory(2 * PAGE).address,
)
OPS.refuses(
    "another-handle",
    "an address of another handle's mapping is",
    errno.EFAULT,
    handle=lambda rig: rig.buffer(2 * PAGE).handle,
)


@rule("2.8", "CACHE: a length past the mapping's end is EADDRNOTAVAIL")
def past_the_mapping(rig: Rig) -> None:
    good, memory = cache_fields(rig)
    for row in CACHE:
        rig.refuses(errno.EADDRNOTAVAIL, rig.nvmap, row, good | {"addr": memory.address + PAGE, "len": PAGE + 64})


@rule("2.8", "CACHE takes all three ops, in both sizes")
def cache_ops(rig: Rig) -> None:
    good, memory = cache_fields(rig)
    memory.put32(1)
    for op in range(3):
        for row in CACHE:
            rig.accepts(rig.nvmap, row, good | {"op": op})


@rule("2.8", "an invalidate cleans first: what the CPU wrote is not lost")
def invalidate_cleans(rig: Rig) -> None:
    good, memory = cache_fields(rig)
    memory.put32(0x77)
    rig.accepts(rig.nvmap, "NVMAP_CACHE", good | {"op": k.NVMAP_CACHE_OP_INV})
    rig.equal("the word", 0x77, memory.u32())


@rule("2.8", "CACHE of uncached or write-combined memory succeeds")
def cache_of_uncached_memory(rig: Rig) -> None:
    for flags in (k.NVMAP_HANDLE_UNCACHEABLE, k.NVMAP_HANDLE_WRITE_COMBINE):
        buffer = rig.buffer(flags=TAG << 16 | flags)
        at = rig.mapped(buffer).address
        rig.accepts(rig.nvmap, "NVMAP_CACHE", addr=at, handle=buffer.handle, len=PAGE, op=k.NVMAP_CACHE_OP_WB)


def _cache_list(rig: Rig, **fields: int) -> dict[str, int]:
    lists = rig.memory(PAGE)
    lists.put32(rig.buffer().handle)
    lists.put32(PAGE, 128)
    return {
        "handles": lists.address,
        "offsets": lists.address + 64,
        "sizes": lists.address + 128,
        "nr": 1,
        "op": 0,
    } | fields


@rule("2.8", "CACHE_LIST with sane arguments succeeds")
def cache_list(rig: Rig) -> None:
    rig.accepts(rig.nvmap, "NVMAP_CACHE_LIST", _cache_list(rig))


@rule("2.8", "CACHE_LIST with senseless arguments is EINVAL")
def cache_list_senseless(rig: Rig) -> None:
    for name, value in (("handles", 0), ("offsets", 0), ("sizes", 0), ("nr", 0)):
        rig.refuses(errno.EINVAL, rig.nvmap, "NVMAP_CACHE_LIST", _cache_list(rig, **{name: value}))


# ---- 2.9 queries ---------------------------------------------------------------------------------------------------


@rule("2.9", "GET_AVAILABLE_HEAPS lists carveouts only, never IOVMM")
def available_heaps_are_carveouts(rig: Rig) -> None:
    heaps = rig.accepts(rig.nvmap, "NVMAP_GET_AVAILABLE_HEAPS").heaps
    rig.check(heaps and not heaps & ~k.NVMAP_HEAP_CARVEOUT_MASK, "carveouts", heaps)


@rule("2.9", "GET_AVAILABLE_HEAPS is 0x10000004 on an AGX Orin 64 GB")
def available_heaps_of_agx_orin(rig: Rig) -> None:
    model = Path("/proc/device-tree/model")
    text = model.read_text() if model.exists() else "AGX Orin"
    rig.need("AGX Orin" in text, f"this is {text}")
    rig.equal("the heaps", 0x10000004, rig.call(rig.nvmap, "NVMAP_GET_AVAILABLE_HEAPS").heaps)


def _absent(rig: Rig) -> int:
    """A carveout that this machine does not have."""
    heaps = int(rig.call(rig.nvmap, "NVMAP_GET_AVAILABLE_HEAPS").heaps)
    rig.need(not heaps & k.NVMAP_HEAP_CARVEOUT_TSEC, "this machine has every carveout that a rule knows")
    return k.NVMAP_HEAP_CARVEOUT_TSEC


HEAP_SIZE = Calls("2.9", "NVMAP_GET_HEAP_SIZE", nvmap, begins="GET_HEAP_SIZE of ")
HEAP_SIZE.refuses("heap-size-of-system-memory", "system memory is", errno.ENODEV, heap=IOVMM)
HEAP_SIZE.refuses("heap-size-of-an-absent-carveout", "a carveout that does not exist is", errno.ENODEV, heap=_absent)
Calls("2.9", "NVMAP_QUERY_HEAP_PARAMS", nvmap, begins="QUERY_HEAP_PARAMS of ").refuses(
    "heap-params-of-an-absent-carveout", "a carveout that does not exist is", errno.ENODEV, heap_mask=_absent
)
Calls("2.9", "NVMAP_PARAMETERS", nvmap, begins="PARAMETERS of ").refuses(
    "parameters-of-an-unknown-handle", "an unknown handle is", errno.ENODEV, handle=UNKNOWN
)


@rule("2.9", "GET_HEAP_SIZE of a carveout is its size")
def heap_size_of_a_carveout(rig: Rig) -> None:
    heaps = int(rig.call(rig.nvmap, "NVMAP_GET_AVAILABLE_HEAPS").heaps)
    rig.need(heaps, "there is no carveout")
    found = rig.accepts(rig.nvmap, "NVMAP_GET_HEAP_SIZE", heap=heaps & -heaps, size=5).size
    rig.check(found % PAGE == 0, "whole pages", found)


@rule("2.9", "QUERY_HEAP_PARAMS of system memory: free of total, in pages of 4096")
def heap_params_of_system_memory(rig: Rig) -> None:
    found = heap_params(rig, IOVMM)
    rig.check(found.total % PAGE == 0 < found.total, "a total in pages", found.total)
    rig.check(0 < found.free <= found.total, f"free memory of {found.total:#x}", found.free)
    rig.equal("granule and largest block", (PAGE, PAGE), (found.granule_size, found.largest_free_block))


@rule("2.9", "QUERY_HEAP_PARAMS of system memory: the total is the machine's RAM")
def heap_params_total(rig: Rig) -> None:
    total = heap_params(rig, IOVMM).total
    handle = rig.handle(total + PAGE)
    rig.refuses(errno.ENOMEM, rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle))
    rig.check(total >= 1 << 30, "a machine's memory", total)


@rule("2.9", "QUERY_HEAP_PARAMS of no heap succeeds with zeroes")
def heap_params_of_nothing(rig: Rig) -> None:
    found = heap_params(rig, 0)
    rig.equal("total, free, granule", (0, 0, 0), (found.total, found.free, found.granule_size))


@rule("2.9", "PARAMETERS tells size, align, heap, no peer, and that system memory is not contiguous; no import id")
def parameters_of_a_buffer(rig: Rig) -> None:
    handle = rig.handle(3 * PAGE)
    rig.alloc(handle, align=1 << 13)
    found = rig.call(rig.nvmap, "NVMAP_PARAMETERS", handle=handle, import_id=77)
    rig.equal("the import id, which was the caller's", 77, found.import_id)
    seen = (found.size, found.align, found.heap, found.contig, found.heap_number)
    rig.equal("the parameters", (3 * PAGE, 1 << 13, IOVMM, 0, 0xFFFFFFFF), seen)


for _gone in ("PARAM", "FROM_ID", "GET_ID"):  # commands that the header has and the driver has not
    Calls("2.9", f"NVMAP_{_gone}", nvmap, begins=f"NVMAP_{_gone} ").refuses(
        _gone.lower().replace("_", "-"), "is", errno.ENOTTY
    )


@rule("2.9", "nvmap reads the block of its queries, though they are declared as reading nothing")
def queries_read_their_block(rig: Rig) -> None:
    rig.check(heap_params(rig, IOVMM).total > 0, "the total of the heap in the block", 0)
    handle = rig.handle(5 * PAGE)
    rig.equal("the size of the handle in the block", 5 * PAGE, parameters(rig, handle).size)
