"""The client of the emulated board: `BoardKernel`, and the board's status and log.

A device fd is a real fd of this process: it can be closed, duplicated, passed on and inherited like any other. What
runs here of an ioctl is only what must: the argument block is read and written at the caller's address, and the
driver's requests for the caller's memory are answered.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap as mmap_module
import os
import stat
import struct
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from tegrad.hw.gpfifo import USERMODE_SIZE
from tegrad.orin import board, wire
from tegrad.orin.caller import find_vma, if_open, is_buffer, lowest, read_memory, write_memory
from tegrad.orin.connection import Connection, call, connection
from tegrad.orin.inject import Injection
from tegrad.orin.wire import Message, Op
from tegrad.uapi.errors import DriverError
from tegrad.uapi.hints import ioctl_hint
from tegrad.uapi.ioctls import BY_REQUEST, Ioctl, get_field, request_size, set_field
from tegrad.uapi.kernel import MS_SYNC, Arg, check_argument, repeated
from tegrad.uapi.libc import MAP_FAILED, libc

KMSG = "/dev/kmsg"
_MADV_DONTFORK = 10
_MAP_TYPE = 0x3
COPY_BACK_EFAULT = frozenset({"as", "nvmap", "fence"})
"""Drivers that answer EFAULT when the block cannot be stored; the others return how many bytes could not."""
_DEVICE_ERRNO = {errno.ENOTSOCK: errno.ENOTTY, errno.EPIPE: errno.ENODEV, errno.ECONNRESET: errno.ENODEV}


class BoardKernel:
    """The Kernel seam on an emulated board. `linger` and `gpu` are for tests of the board itself."""

    def __init__(self, spec: str, *, linger: float = board.LINGER_S, gpu: str = board.GPU) -> None:
        self.connection = connection(spec, linger=linger, gpu=gpu)

    def open(self, path: str, flags: int = os.O_RDWR | os.O_CLOEXEC) -> int:
        """Open a device node of the board, or its kernel log; starts a private board if it does not run."""
        try:
            if path == KMSG:
                return self._open_log()
            answer = self.connection.call(Message(Op.OPEN, payload=path.encode()))
        except OSError as error:
            raise _error("open", error, {"path": path}) from None
        (fd,) = answer.fds
        assert fd is not None
        fd = lowest(fd)
        os.set_inheritable(fd, not flags & os.O_CLOEXEC)
        return fd

    def _open_log(self) -> int:
        """The log as it is now, in records of /dev/kmsg: priority, sequence, microseconds, flags, text."""
        (fd,) = self.connection.call(Message(Op.LOG, code=1)).fds
        assert fd is not None
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def ioctl(self, fd: int, row: Ioctl, arg: Arg = None) -> int:
        """Make the ioctl, which `repeated` repeats."""
        check_argument(row, arg)

        def attempt() -> int:
            try:
                return _ioctl(self.connection, fd, row, arg)
            except OSError as error:
                code = error.errno or errno.EIO
                return -_DEVICE_ERRNO.get(code, code)

        return repeated(row, fd, arg, attempt)

    def mmap(self, fd: int, size: int, prot: int, flags: int, *, addr: int = 0, offset: int = 0) -> int:
        """Map a buffer, or plain memory with fd -1. The registers of a ctrl fd have no memory here: use `doorbell`."""
        arguments = {"fd": fd, "size": size, "prot": prot, "flags": flags, "addr": addr, "offset": offset}
        try:
            if fd >= 0:
                self._check_mapping(fd, size, prot, offset)
                # The driver shares the memory whatever the caller asks for.
                flags = flags & ~_MAP_TYPE | mmap_module.MAP_SHARED
            result = libc.mmap(addr or None, size, prot, flags, fd, offset)
            if result is None or result == MAP_FAILED:
                raise OSError(ctypes.get_errno(), "mmap")
            if fd >= 0:
                libc.madvise(result, size, _MADV_DONTFORK)
        except OSError as error:
            raise _error("mmap", error, arguments) from None
        return int(result)

    def munmap(self, addr: int, size: int) -> None:
        """Unmap memory."""
        if libc.munmap(addr, size) != 0:
            raise DriverError("munmap", ctypes.get_errno(), {"addr": addr, "size": size})

    def msync(self, addr: int, size: int) -> None:
        """Write mapped memory back: EINVAL for a buffer, since a dmabuf cannot be synced."""
        arguments = {"addr": addr, "size": size}
        if is_buffer(find_vma(addr)):
            raise DriverError("msync", errno.EINVAL, arguments)
        if libc.msync(addr, size, MS_SYNC) != 0:
            raise DriverError("msync", ctypes.get_errno(), arguments)

    def close(self, fd: int) -> None:
        """Close an fd; of a device, its release is over when this returns."""
        try:
            device = stat.S_ISSOCK(os.fstat(fd).st_mode)
            os.close(fd)
        except OSError as error:
            raise _error("close", error, {"fd": fd}) from None
        if device:
            self.connection.sync()

    def doorbell(self, fd: int, size: int = USERMODE_SIZE) -> BoardDoorbell:
        """The usermode registers of a ctrl fd; one at a time per fd (EBUSY)."""
        try:
            answer = call(fd, Message(Op.MMAP_REGISTERS, size, 0), peer=self.connection.pid)
            if answer.code:
                raise OSError(answer.code, os.strerror(answer.code))
        except OSError as error:
            raise _error("mmap", error, {"fd": fd, "size": size}) from None
        pipe, lease = answer.fds
        assert pipe is not None
        assert lease is not None
        return BoardDoorbell(self.connection, pipe, lease, size, json.loads(answer.payload)["class"])

    def exists(self, path: str) -> bool:
        """Whether the board has a device node; asks the board, so a private one is started."""
        return bool(self.connection.call(Message(Op.EXISTS, payload=path.encode())).value)

    def _check_mapping(self, fd: int, size: int, prot: int, offset: int) -> None:
        """The rules of the file's mmap, in the driver's order."""
        written = b"w" if prot & mmap_module.PROT_WRITE else b""
        self.connection.call(Message(Op.MMAP_CHECK, size, offset, written, [fd]))


def _ioctl(conn: Connection, fd: int, row: Ioctl, arg: Arg) -> int:
    """One attempt. Raises OSError with the driver's errno."""
    size = request_size(row.request)
    if isinstance(arg, int) and size:
        return _ioctl_at(conn, fd, row, arg, size)
    payload, value = b"", 0
    if isinstance(arg, int):
        value = arg
    elif arg is not None:
        payload = ctypes.string_at(ctypes.addressof(arg), ctypes.sizeof(arg))
    answer = call(fd, _request(row, arg, payload, value), peer=conn.pid)
    if answer.payload and arg is not None and not isinstance(arg, int):
        ctypes.memmove(ctypes.addressof(arg), answer.payload, min(len(answer.payload), ctypes.sizeof(arg)))
        _take_fds(row, arg, answer)
    if answer.code:
        raise OSError(answer.code, os.strerror(answer.code))
    return answer.value


def _ioctl_at(conn: Connection, fd: int, row: Ioctl, address: int, size: int) -> int:
    """The same with a block at any address: what cannot be read or stored is the driver's to answer."""
    known = BY_REQUEST.get((row.fd_kind, row.request), row)
    payload = read_memory(address, size)
    arg = known.struct.from_buffer_copy(payload) if known.struct is not None and len(payload) == size else None
    answer = call(fd, _request(known, arg, payload, 0), peer=conn.pid)
    if not answer.payload:
        if answer.code:
            raise OSError(answer.code, os.strerror(answer.code))
        return answer.value
    data = answer.payload
    if known.struct is not None:
        arg = known.struct.from_buffer_copy(data)
        _take_fds(known, arg, answer)
        data = bytes(arg)
    left = write_memory(address, data)
    if answer.code:
        raise OSError(answer.code, os.strerror(answer.code))
    if left and known.fd_kind in COPY_BACK_EFAULT:
        raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
    return left or answer.value


def _request(row: Ioctl, arg: Any, payload: bytes, value: int) -> Message:
    """The message of an ioctl, with the caller's fds that its block names."""
    fds = [] if arg is None or isinstance(arg, int) else [if_open(_signed(get_field(arg, name))) for name in row.fds_in]
    return Message(Op.IOCTL, row.request, value, payload, fds)


def _take_fds(row: Ioctl, arg: Any, answer: Message) -> None:
    """Install the new fds of an answer and store their numbers in the block."""
    for name, made in zip(row.fds_out, answer.fds, strict=False):
        assert made is not None
        set_field(arg, name, lowest(made))


def _signed(fd: int) -> int:
    return ctypes.c_int32(fd).value


def _error(name: str, error: OSError, arguments: Mapping[str, object]) -> DriverError:
    code = _DEVICE_ERRNO.get(error.errno or 0, error.errno or 0)
    return DriverError(name, code, arguments, ioctl_hint(name, code))


class BoardDoorbell:
    """The usermode registers: each store is one record in the GPU's doorbell pipe. Not inherited by fork."""

    open: ClassVar[weakref.WeakSet[BoardDoorbell]] = weakref.WeakSet()

    def __init__(self, conn: Connection, pipe: int, lease: int, size: int, class_id: int) -> None:
        self._connection, self._pipe, self._lease, self._size, self._class = conn, pipe, lease, size, class_id
        BoardDoorbell.open.add(self)

    def store32(self, offset: int, value: int) -> None:
        """Write one register; nothing answers, as on hardware, not even when the GPU is gone."""
        self._check(offset)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._pipe, struct.pack("<II", offset, value & 0xFFFFFFFF))

    def load32(self, offset: int) -> int:
        """Read one register: the class id, the timer; everything else is 0."""
        self._check(offset)
        now = time.monotonic_ns() & ~31
        return {0x00: self._class, 0x80: now & 0xFFFFFFFF, 0x84: now >> 32}.get(offset, 0)

    def _check(self, offset: int) -> None:
        if self._pipe < 0:
            raise ValueError("the doorbell page is closed")
        if offset % 4 or not 0 <= offset <= self._size - 4:
            raise ValueError(f"no 32-bit register at offset {offset:#x} of {self._size:#x} bytes")

    def abandon(self) -> None:
        """Let go of the page without a word to the board."""
        for fd in (self._pipe, self._lease):
            if fd >= 0:
                os.close(fd)
        self._pipe = self._lease = -1

    def close(self) -> None:
        """Unmap the page; the board knows when this returns. Closing twice is harmless."""
        if self._pipe >= 0:
            self.abandon()
            self._connection.sync()


def _forked() -> None:
    """Registers are not inherited: a child must not hold its parent's mapping."""
    for doorbell in list(BoardDoorbell.open):
        doorbell.abandon()


os.register_at_fork(after_in_child=_forked)


# ---- around the board -----------------------------------------------------------------------------------------------


def _document(answer: Message) -> Any:
    """The JSON file of an answer."""
    (fd,) = answer.fds
    assert fd is not None
    return json.loads(wire.from_file(fd))


def board_status(spec: str) -> dict[str, Any]:
    """What the board counts: `counts`, `files`, `clients`, `host` (fds and maps of its processes), `gpu` ..."""
    status: dict[str, Any] = _document(connection(spec).call(Message(Op.STATUS)))
    return status


def board_log(spec: str, since: int = 0) -> list[str]:
    """The lines of the board's kernel log from sequence number `since` on, as dmesg shows them."""
    entries = _document(connection(spec).call(Message(Op.LOG, value=since)))
    return [f"[{us / 1e6:12.6f}] {text}" for _, us, _, text in entries]


def board_inject(spec: str, rules: Iterable[Injection]) -> int:
    """Arm injection rules on the board in place of those armed before; how many there are."""
    payload = json.dumps([rule.to_json() for rule in rules]).encode()
    return connection(spec).call(Message(Op.INJECT, payload=payload)).value


def board_stop(spec: str) -> None:
    """End the board; its clients see their fds die."""
    connection(spec).stop()
