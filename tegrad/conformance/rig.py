"""The rig of a rule: a driver client over the Kernel seam that expects, refuses, and gives everything back.

`call` is for set-up: what it is refused is an error of the rule's set-up. `accepts`, `refuses` and `equal` are the
rule: what they find is a difference. Whatever comes into being through the rig (fds in arguments too) is released when
the rule ends, the last made first, also when it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno as errno_module
import mmap
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Self, TypeVar

from tegrad.conformance.process import Child, ChildFunction
from tegrad.conformance.rule import Differs, NotApplicable
from tegrad.hw.gpfifo import USERMODE_SIZE
from tegrad.uapi import constants as k
from tegrad.uapi.errors import DriverError
from tegrad.uapi.ioctls import BY_NAME, MAGIC, FdKind, Ioctl, get_field, request_number, set_field
from tegrad.uapi.kernel import (
    MAP_ANONYMOUS,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_NONE,
    PROT_READ,
    PROT_WRITE,
    Doorbell,
    Kernel,
)
from tegrad.uapi.kmsg import LogRecord, records
from tegrad.uapi.libc import libc
from tegrad.uapi.structs import GpuCharacteristics, GpuGetCharacteristics

CTRL, NVMAP, FENCE = "/dev/nvgpu/igpu0/ctrl", "/dev/nvmap", "/dev/host1x-fence"
LEGACY_CTRL = "/dev/nvhost-ctrl-gpu"
PAGE = mmap.PAGESIZE
RW = PROT_READ | PROT_WRITE
VA_START, VA_END = 0x200000, 0xFF00000000
TAG = 0x0900
CACHED = TAG << 16 | k.NVMAP_HANDLE_INNER_CACHEABLE
VOLATILE = 0
"""Flags of a GPU mapping of which L2 keeps no lines: CPU and GPU see each other's stores in it."""
SETUP_FLAGS = k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_USERMODE_SUPPORT | k.NVGPU_CHANNEL_SETUP_BIND_FLAGS_DETERMINISTIC
Fields = Mapping[str, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Buffer:
    """An nvmap handle and a dmabuf fd of it; `size` is what was asked for."""

    handle: int
    fd: int
    size: int


class Mapped:
    """Mapped memory of the driver, as bytes and little-endian words. `close` unmaps it; twice is harmless."""

    def __init__(self, kernel: Kernel, address: int, size: int) -> None:
        self._kernel, self.address, self.size, self.open = kernel, address, size, True

    def read(self, offset: int = 0, size: int = 1) -> bytes:
        """Bytes at an offset."""
        return ctypes.string_at(self.address + offset, size)

    def write(self, data: bytes, offset: int = 0) -> None:
        """Store bytes at an offset."""
        ctypes.memmove(self.address + offset, data, len(data))

    def u32(self, offset: int = 0) -> int:
        """A word, read by one load."""
        return ctypes.c_uint32.from_address(self.address + offset).value

    def u64(self, offset: int = 0) -> int:
        """A double word, read by one load."""
        return ctypes.c_uint64.from_address(self.address + offset).value

    def put32(self, value: int, offset: int = 0) -> None:
        """Store a word by one store."""
        ctypes.c_uint32.from_address(self.address + offset).value = value

    def put64(self, value: int, offset: int = 0) -> None:
        """Store a double word by one store."""
        ctypes.c_uint64.from_address(self.address + offset).value = value

    def close(self) -> None:
        """Unmap it."""
        if self.open:
            self.open = False
            self._kernel.munmap(self.address, self.size)


@dataclass(slots=True)
class RigChannel:
    """A channel with its TSG, its address space and, after SETUP_BIND, its rings and its doorbell token."""

    fd: int
    tsg: int
    vm: int
    token: int = -1
    gpfifo: Buffer | None = None
    userd: Buffer | None = None
    entries: int = 0


@dataclass(frozen=True, slots=True)
class Raw:
    """What a raw ioctl did: its return value (0 if it failed), its errno (0 if not), the block afterwards."""

    value: int
    errno: int
    data: bytes


class Rig:
    """A client of the driver for one rule, and a context manager that releases what it made.

    `patience`: seconds until what must happen is taken not to happen. `hazardous`: whether it may make the GPU fail.
    """

    def __init__(self, kernel: Kernel, *, patience: float = 10.0, hazardous: bool = True) -> None:
        self.kernel, self.patience, self._hazardous = kernel, patience, hazardous
        self._stack = ExitStack()
        self._fds: list[int] = []
        self._handles: list[tuple[int, int]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give everything back: mappings and processes first, then handles, then fds, the last made first."""
        try:
            self._stack.close()
        finally:
            while self._handles:
                nvmap, handle = self._handles.pop()
                if nvmap in self._fds:
                    with contextlib.suppress(DriverError):
                        self.kernel.ioctl(nvmap, BY_NAME["NVMAP_FREE"], handle)
            while self._fds:
                with contextlib.suppress(DriverError):  # one that the kernel closed for the rule
                    self.kernel.close(self._fds.pop())

    def at_end(self, action: Callable[..., object], *args: object) -> None:
        """Do something when the rule ends, before fds are closed."""
        self._stack.callback(action, *args)

    # ---- judging -------------------------------------------------------------------------------------------------

    def equal(self, what: str, expected: object, seen: object) -> None:
        """The rule: two values are the same. Numbers are shown in hexadecimal too."""
        if expected != seen:
            raise Differs(f"{what} {_shown(expected)}", _shown(seen))

    def check(self, condition: object, expected: str, seen: object) -> None:
        """The rule: a condition holds; `expected` says which, `seen` what was there."""
        if not condition:
            raise Differs(expected, _shown(seen))

    def hazard(self) -> None:
        """What follows makes the GPU fail: RuntimeError unless the rule is marked so."""
        if not self._hazardous:
            raise RuntimeError("the rule makes the GPU fail and is not marked hazardous")

    def need(self, condition: object, reason: str) -> None:
        """The rule is not applicable on this machine unless the condition holds."""
        if not condition:
            raise NotApplicable(reason)

    def eventually(self, condition: Callable[[], object], expected: str, seen: object = "it did not come") -> None:
        """The rule: a condition comes true before patience ends."""
        if not self.wait(condition):
            raise Differs(expected, seen() if callable(seen) else seen)

    def wait(self, condition: Callable[[], object], seconds: float | None = None) -> bool:
        """Look until a condition is true; False if it does not become so in time (by default, before patience ends)."""
        deadline = time.monotonic() + (self.patience if seconds is None else seconds)
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    # ---- ioctls --------------------------------------------------------------------------------------------------

    def call(self, fd: int, name: str, fields: Fields | None = None, /, *, value: int = 0, **more: int) -> Any:
        """Make an ioctl (`NVMAP_ALLOC`) for set-up; its argument block as the driver left it.

        `fields` (dotted names allowed) and keywords fill the block, `value` is a by-value argument. New fds in the
        block are kept.
        """
        row = BY_NAME[name]
        arg = None if row.by_value or row.struct is None else block(row, {**(fields or {}), **more})
        self.returns(fd, row, value if row.by_value else arg)
        return arg

    def returns(self, fd: int, row: str | Ioctl, arg: Any = None) -> int:
        """Make an ioctl with a block of one's own; what it returned (a positive count means a bad user pointer)."""
        row = BY_NAME[row] if isinstance(row, str) else row
        result = self.kernel.ioctl(fd, row, arg)
        if arg is not None and not isinstance(arg, int) and result == 0:
            for field in row.fds_out:
                made = get_field(arg, field)
                if made > 2:  # a driver that answers without an fd leaves a number there that is not ours
                    self.keep(made)
        return result

    def accepts(self, fd: int, name: str, fields: Fields | None = None, /, *, value: int = 0, **more: int) -> Any:
        """The rule: this ioctl succeeds. Its block."""
        return self.succeeds(f"{name} succeeds", lambda: self.call(fd, name, fields, value=value, **more))

    def refuses(
        self, number: int | tuple[int, ...], fd: int, name: str, fields: Fields | None = None, /, **more: int
    ) -> None:
        """The rule: this ioctl fails with this errno (or one of these)."""
        self.fails(number, name, lambda: self.call(fd, name, fields, **more))

    def succeeds(self, expected: str, attempt: Callable[[], T]) -> T:
        """The rule: an attempt is not refused. What it returned."""
        try:
            return attempt()
        except DriverError as error:
            raise Differs(expected, error.code) from None

    def fails(self, number: int | tuple[int, ...], what: str, attempt: Callable[[], object]) -> None:
        """The rule: an attempt fails with this errno (or one of these)."""
        numbers = number if isinstance(number, tuple) else (number,)
        expected = f"{what}: {' or '.join(code(n) for n in numbers)}"
        try:
            attempt()
        except DriverError as error:
            if error.errno not in numbers:
                raise Differs(expected, error.code) from None
            return
        raise Differs(expected, "success")

    def at(self, fd: int, name: str, address: int) -> int:
        """Make an ioctl whose block lies at any address of this process; what it returned."""
        return self.kernel.ioctl(fd, replace(BY_NAME[name], by_value=True, struct=None), address)

    def raw(self, fd: int, kind: FdKind, request: int, data: bytes = b"") -> Raw:
        """Make an ioctl with any request code, on an fd of this kind; the block is as long as the code says, or more.

        Its new fds cannot be known: use it for what is refused, or for calls that make none.
        """
        size = max(request >> 16 & 0x3FFF, len(data), 1)

        class Block(ctypes.Structure):
            _fields_ = (("bytes", ctypes.c_uint8 * size),)

        row = Ioctl(f"{kind} {request:#010x}", "", kind, request & 0xFF, request, "rw", Block)
        arg = Block()
        ctypes.memmove(ctypes.byref(arg), data, len(data))
        try:
            value = self.kernel.ioctl(fd, row, arg)
        except DriverError as error:
            return Raw(0, error.errno or 0, bytes(arg.bytes))
        return Raw(value, 0, bytes(arg.bytes))

    def raw_refuses(self, number: int, fd: int, kind: FdKind, request: int) -> None:
        """The rule: this request code is refused with this errno."""
        done = self.raw(fd, kind, request)
        if done.errno != number:
            raise Differs(f"{request:#010x} on a {kind} fd: {code(number)}", code(done.errno))

    # ---- fds and memory ------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int = os.O_RDWR | os.O_CLOEXEC) -> int:
        """Open a device node."""
        return self.keep(self.kernel.open(path, flags))

    def keep(self, fd: int) -> int:
        """Close this fd when the rule ends."""
        self._fds.append(fd)
        return fd

    def close(self, fd: int) -> None:
        """Close an fd now."""
        self.forget(fd)
        self.kernel.close(fd)

    def forget(self, fd: int) -> None:
        """The fd is somebody else's, or gone."""
        if fd in self._fds:
            self._fds.remove(fd)

    @cached_property
    def ctrl(self) -> int:
        """An fd of the ctrl node."""
        return self.open_ctrl()

    def open_ctrl(self) -> int:
        """A new fd of the ctrl node; not applicable where there is none."""
        path = CTRL if self.kernel.exists(CTRL) else LEGACY_CTRL
        self.need(self.kernel.exists(path), f"no {CTRL}")
        return self.open(path)

    @cached_property
    def nvmap(self) -> int:
        """An fd of /dev/nvmap; not applicable where there is none."""
        self.need(self.kernel.exists(NVMAP), f"no {NVMAP}")
        return self.open(NVMAP)

    def mmap(
        self, fd: int, size: int, prot: int = RW, flags: int = MAP_SHARED, *, addr: int = 0, offset: int = 0
    ) -> Mapped:
        """Map memory of an fd."""
        made = Mapped(self.kernel, self.kernel.mmap(fd, size, prot, flags, addr=addr, offset=offset), size)
        self.at_end(made.close)
        return made

    def refuses_mmap(self, number: int, fd: int, size: int, *, offset: int = 0) -> None:
        """The rule: this mmap fails with this errno."""
        self.fails(number, f"mmap of {size:#x} bytes at {offset:#x}", lambda: self.mmap(fd, size, offset=offset))

    def doorbell(self, fd: int | None = None, size: int = USERMODE_SIZE) -> Doorbell:
        """Map the usermode registers of a ctrl fd (the rig's own by default)."""
        made = self.kernel.doorbell(self.ctrl if fd is None else fd, size)
        self.at_end(made.close)
        return made

    def memory(self, size: int) -> Mapped:
        """Plain zeroed memory of this process."""
        return self.mmap(-1, (size + PAGE - 1) // PAGE * PAGE, RW, MAP_PRIVATE | MAP_ANONYMOUS)

    def bad_address(self) -> int:
        """The address of a page that can neither be read nor written."""
        return self.edge(b"")

    def edge(self, data: bytes) -> int:
        """The address of data right below a page that can neither be read nor written."""
        pages, at = self.memory(2 * PAGE), PAGE - len(data)
        pages.write(data, at)
        _protect(pages.address + PAGE, PROT_NONE)
        return pages.address + at

    def read_only(self, data: bytes) -> int:
        """The address of data that can be read and not written."""
        page = self.memory(PAGE)
        page.write(data)
        _protect(page.address, PROT_READ)
        return page.address

    # ---- things of the driver ------------------------------------------------------------------------------------

    def handle(self, size: int = PAGE, *, nvmap: int | None = None) -> int:
        """An nvmap handle without memory."""
        nvmap = self.nvmap if nvmap is None else nvmap
        return self.keep_handle(int(self.call(nvmap, "NVMAP_CREATE_64", size64=size).handle64), nvmap=nvmap)

    def keep_handle(self, handle: int, *, nvmap: int | None = None) -> int:
        """Free a handle once more when the rule ends."""
        self._handles.append((self.nvmap if nvmap is None else nvmap, handle))
        return handle

    def alloc(self, handle: int, *, flags: int = CACHED, heap: int = k.NVMAP_HEAP_IOVMM, align: int = PAGE) -> None:
        """Give a handle its memory."""
        self.call(self.nvmap, "NVMAP_ALLOC", handle=handle, heap_mask=heap, flags=flags, align=align, numa_nid=-1)

    def get_fd(self, handle: int) -> int:
        """A new dmabuf fd of a handle."""
        return int(self.call(self.nvmap, "NVMAP_GET_FD", handle=handle).fd)

    def read_only_handle(self, handle: int) -> int:
        """A duplicate of a handle that user space cannot write through."""
        fields = {"handle": handle, "access_flags": k.NVMAP_HANDLE_RO}
        return self.keep_handle(int(self.call(self.nvmap, "NVMAP_DUP_HANDLE", fields).dup_handle))

    def free(self, handle: int) -> None:
        """FREE a handle (any number) once."""
        self.call(self.nvmap, "NVMAP_FREE", value=handle)

    def buffer(self, size: int = PAGE, *, allocate: bool = True, flags: int = CACHED) -> Buffer:
        """A buffer of system memory, with a dmabuf fd."""
        handle = self.handle(size)
        if allocate:
            self.alloc(handle, flags=flags)
        return Buffer(handle, self.get_fd(handle), size)

    def mapped(self, buffer: Buffer) -> Mapped:
        """A whole buffer, mapped into this process."""
        return self.mmap(buffer.fd, buffer.size)

    def characteristics(self, ctrl: int | None = None) -> GpuCharacteristics:
        """What GET_CHARACTERISTICS says of the GPU, through the rig's own ctrl fd or another."""
        found = GpuCharacteristics()
        where = GpuGetCharacteristics(ctypes.sizeof(found), ctypes.addressof(found))
        self.returns(self.ctrl if ctrl is None else ctrl, "GPU_GET_CHARACTERISTICS", where)
        return found

    def instance_id(self, ctrl: int | None = None) -> int:
        """What tells the opens of the ctrl node apart: that of the rig's own ctrl fd, or another."""
        return int(self.characteristics(ctrl).device_instance_id)

    def address_space(self, start: int = VA_START, end: int = VA_END) -> int:
        """An address space fd."""
        return int(self.call(self.ctrl, "GPU_ALLOC_AS", va_range_start=start, va_range_end=end).as_fd)

    def reserve(self, vm: int, size: int, at: int | None = None, *, flags: int = 0) -> int:
        """An ALLOC_SPACE area, fixed where `at` is given; its address."""
        flags |= 0 if at is None else k.NVGPU_AS_ALLOC_SPACE_FLAGS_FIXED_OFFSET
        fields = {"pages": size // PAGE, "page_size": PAGE, "flags": flags, "o_a.offset": at or 0}
        return int(self.call(vm, "AS_ALLOC_SPACE", fields).o_a.offset)

    def map(self, vm: int, fd: int, *, flags: int = VOLATILE, **fields: int) -> int:
        """Map a dmabuf on the GPU; its address. `fields` of MAP_BUFFER_EX change what a usual client passes."""
        return int(self.call(vm, "AS_MAP_BUFFER_EX", map_fields(fd, flags=flags, **fields)).offset)

    def unmap(self, vm: int, va: int) -> None:
        """Unmap a buffer from the GPU."""
        self.call(vm, "AS_UNMAP_BUFFER", offset=va)

    def tsg(self) -> int:
        """A TSG fd."""
        return int(self.call(self.ctrl, "GPU_OPEN_TSG").tsg_fd)

    def open_channel(self) -> int:
        """A channel fd, bound to nothing."""
        return int(self.call(self.ctrl, "GPU_OPEN_CHANNEL", {"in_.runlist_id": -1}).channel_fd)

    def bind(self, vm: int, tsg: int, channel: int, *, veid: int = 0) -> None:
        """Bind a channel to an address space and to a TSG, in that order."""
        self.call(vm, "AS_BIND_CHANNEL", channel_fd=channel)
        self.call(tsg, "TSG_BIND_CHANNEL_EX", channel_fd=channel, subcontext_id=veid)

    def bound_channel(self, *, vm: int | None = None, tsg: int | None = None) -> RigChannel:
        """A channel in an address space and a TSG, with its watchdog off, before SETUP_BIND."""
        vm = self.address_space() if vm is None else vm
        tsg = self.tsg() if tsg is None else tsg
        fd = self.open_channel()
        self.bind(vm, tsg, fd)
        self.call(fd, "CHANNEL_WDT", wdt_status=k.NVGPU_IOCTL_CHANNEL_DISABLE_WDT)
        return RigChannel(fd, tsg, vm)

    def rings(self, *, entries: int = 512, **fields: int) -> dict[str, int]:
        """The fields of a SETUP_BIND that works, with rings of its own; `fields` change them."""
        made = {"num_gpfifo_entries": entries, "flags": SETUP_FLAGS}
        made["gpfifo_dmabuf_fd"] = self.buffer(max(PAGE, entries * 8)).fd
        made["userd_dmabuf_fd"] = self.buffer().fd
        return made | fields

    def channel_ready(self, *, vm: int | None = None, tsg: int | None = None, entries: int = 512) -> RigChannel:
        """A channel that only needs its doorbell, with its rings."""
        made = self.bound_channel(vm=vm, tsg=tsg)
        made.gpfifo, made.userd, made.entries = self.buffer(max(PAGE, entries * 8)), self.buffer(), entries
        done = self.call(
            made.fd,
            "CHANNEL_SETUP_BIND",
            num_gpfifo_entries=entries,
            flags=SETUP_FLAGS,
            gpfifo_dmabuf_fd=made.gpfifo.fd,
            userd_dmabuf_fd=made.userd.fd,
        )
        made.token = int(done.work_submit_token)
        return made

    def timed_out(self, channel: int) -> int:
        """What GET_TIMEDOUT says of a channel fd."""
        return int(self.call(channel, "CHANNEL_GET_TIMEDOUT").value)

    # ---- the kernel log ------------------------------------------------------------------------------------------

    def log_mark(self) -> int:
        """Where the kernel log ends now. Not applicable where it may not be read."""
        return max((record.sequence + 1 for record in self._log()), default=0)

    def log_since(self, mark: int) -> list[str]:
        """The lines that the kernel logged from a mark on."""
        return [record.text for record in self._log(mark)]

    def _log(self, since: int = 0) -> list[LogRecord]:
        try:
            return list(records(self.kernel, since))
        except DriverError as error:
            raise NotApplicable(f"the kernel log cannot be read ({error.code})") from None

    # ---- other processes -----------------------------------------------------------------------------------------

    def child(self, function: ChildFunction) -> Child:
        """Fork a process that runs `function(its rig, its end of the line)`; killed when the rule ends."""
        made = Child(self, function)
        self.at_end(made.close)
        return made

    def in_child(self) -> Rig:
        """In a forked child: a rig of its own, the parent's fds closed."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        return Rig(self.kernel, patience=self.patience, hazardous=self._hazardous)


def code(number: int) -> str:
    """The name of an errno; `success` for 0."""
    return errno_module.errorcode.get(number, str(number)) if number else "success"


def block(row: Ioctl, fields: Fields) -> Any:
    """The argument block of a row with these fields; KeyError-like AttributeError for one that it does not have."""
    assert row.struct is not None
    arg = row.struct()
    for name, value in fields.items():
        get_field(arg, name)  # a struct takes unknown attributes silently
        set_field(arg, name, value)
    return arg


def map_fields(fd: int, *, flags: int = VOLATILE, **fields: int) -> dict[str, int]:
    """The fields of MAP_BUFFER_EX as a usual client passes them; `fields` change them."""
    return {"flags": flags, "compr_kind": -1, "incompr_kind": 0, "dmabuf_fd": fd} | fields


def _protect(page: int, prot: int) -> None:
    if libc.mprotect(page, PAGE, prot):
        raise OSError(ctypes.get_errno(), "mprotect")


def request(name: str, *, nr: int | None = None, size: int | None = None, magic: str = "", direction: str = "") -> int:
    """The request code of an ioctl, with parts of it changed."""
    row = BY_NAME[name]
    return request_number(
        magic or MAGIC[row.fd_kind],
        row.nr if nr is None else nr,
        direction or row.direction,  # type: ignore[arg-type]
        row.size if size is None else size,
    )


def _shown(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 9:
        return f"{value} ({value:#x})"
    return str(value)
