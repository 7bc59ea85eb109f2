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
import secrets
import socket
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from tegrad.hw.gpfifo import USERMODE_SIZE
from tegrad.orin import board, wire
from tegrad.orin.board import BoardError, parse_spec
from tegrad.orin.inject import Rule
from tegrad.orin.wire import Message, Op
from tegrad.uapi.errors import DriverError, ioctl_error
from tegrad.uapi.hints import ioctl_hint
from tegrad.uapi.ioctls import Ioctl, get_field, set_field
from tegrad.uapi.kernel import AGAIN_LIMIT_S, AGAIN_PAUSE_S, Arg

_libc = ctypes.CDLL(None, use_errno=True)
for _name in ("process_vm_readv", "process_vm_writev"):
    _function = getattr(_libc, _name)
    _function.argtypes = (
        ctypes.c_int,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_void_p,
        ctypes.c_ulong,
        ctypes.c_ulong,
    )
    _function.restype = ctypes.c_ssize_t
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
KMSG = "/dev/kmsg"
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_DONTFORK = 10
_MAP_TYPE = 0x3
_DEVICE_ERRNO = {errno.ENOTSOCK: errno.ENOTTY, errno.EPIPE: errno.ENODEV, errno.ECONNRESET: errno.ENODEV}


# ---- this process ---------------------------------------------------------------------------------------------------


class _Me:
    """This process as the board knows it; a forked child is another one."""

    token = secrets.token_hex(8)

    @classmethod
    def renew(cls) -> None:
        cls.token = secrets.token_hex(8)


def _forked() -> None:
    global _connections_lock
    _Me.renew()
    _connections_lock = threading.Lock()
    for known in _connections.values():
        known.forked()
    for doorbell in list(BoardDoorbell.open):
        doorbell.abandon()


def _comm() -> str:
    with contextlib.suppress(OSError):
        return Path("/proc/self/comm").read_text().strip()
    return "?"


def _read_memory(address: int, size: int) -> bytes:
    """As many bytes of this process's memory from `address` on as are readable."""
    data = ctypes.create_string_buffer(size)
    done = _transfer(_libc.process_vm_readv, ctypes.addressof(data), address, size)
    return data.raw[:done]


def _write_memory(address: int, data: bytes) -> int:
    """Store bytes at an address of this process; how many could not be."""
    source = ctypes.create_string_buffer(data, len(data))
    return len(data) - _transfer(_libc.process_vm_writev, ctypes.addressof(source), address, len(data))


def _transfer(call: Any, local: int, remote: int, size: int) -> int:
    """One process_vm_* call on ourselves, whose remote side may be bad; page by page, as it stops between vectors."""
    pages: list[int] = []
    at = remote
    while at < remote + size:
        step = min(4096 - at % 4096, remote + size - at)
        pages += [at & 0xFFFFFFFFFFFFFFFF, step]
        at += step
    near = (ctypes.c_uint64 * 2)(local, size)
    far = (ctypes.c_uint64 * len(pages))(*pages)
    done: int = call(os.getpid(), ctypes.byref(near), 1, ctypes.byref(far), len(pages) // 2, 0)
    return max(done, 0)


def _find_vma(address: int) -> bytes:
    """The area of our memory map that holds an address, as JSON; empty if none does."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, inode, *path = line.split(None, 5)
        low, high = (int(part, 16) for part in span.split("-"))
        if low <= address < high:
            facts = {"start": low, "end": high, "offset": int(offset, 16), "inode": int(inode)}
            return json.dumps({**facts, "path": path[0] if path else ""}).encode()
    return b""


# ---- one call -------------------------------------------------------------------------------------------------------


def _call(fd: int, request: Message, *, peer: int | None = None) -> Message:
    """Send a request on a socket and serve the board until the answer comes. Raises OSError.

    With `peer`, the fd may be anything of the caller's: nothing is written to it unless that process made it.
    """
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)
        try:
            if peer is not None and not _made_by(sock, peer):
                raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
            wire.send(sock, request, reply=far.fileno())
        finally:
            sock.detach()
            far.close()
        while True:
            got = wire.receive(near)
            if got is None:
                raise OSError(errno.EPIPE, "the board is gone")
            answer = got[0]
            if answer.op == Op.DONE:
                return answer
            wire.send(near, _serve(answer))


def _made_by(sock: socket.socket, pid: int) -> bool:
    """Whether an fd is a device fd of the board whose driver has this pid. OSError(ENOTSOCK) if it is no socket."""
    kind = sock.getsockopt(socket.SOL_SOCKET, socket.SO_DOMAIN), sock.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE)
    return kind == (socket.AF_UNIX, socket.SOCK_SEQPACKET) and board.peer(sock)[0] == pid


def _serve(message: Message) -> Message:
    """Do for the driver what only this process can."""
    if message.op == Op.COPY_IN:
        return Message(Op.COPIED, payload=_read_memory(message.value, message.code))
    if message.op == Op.COPY_OUT:
        return Message(Op.COPIED, code=_write_memory(message.value, message.payload))
    if message.op == Op.GET_FILE:
        return Message(Op.COPIED, fds=[_if_open(message.value)])
    if message.op == Op.CLOSE_FD:
        with contextlib.suppress(OSError):
            os.close(message.value)
        return Message(Op.COPIED)
    if message.op == Op.FIND_VMA:
        return Message(Op.COPIED, payload=_find_vma(message.value))
    raise OSError(errno.EPROTO, f"the board asks for something unknown ({message.op})")


def _if_open(fd: int) -> int | None:
    try:
        os.fstat(fd)
    except (OSError, OverflowError):
        return None
    return fd


def _lowest(fd: int) -> int:
    """The same file under the lowest free number, as the kernel hands out fds."""
    import fcntl

    lowest = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    if lowest > fd:
        os.close(lowest)
        return fd
    os.close(fd)
    return lowest


# ---- the board's session -----------------------------------------------------------------------------------------


class Connection:
    """This process's session with one board, started on first use; a forked child gets its own."""

    def __init__(self, spec: str, *, linger: float = board.LINGER_S, gpu: str = board.GPU) -> None:
        self.spec, self._linger, self._gpu = parse_spec(spec), linger, gpu
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._address = board.named_address(spec) if self.spec.chip is None else b""
        self.facts: dict[str, Any] = {}

    def sync(self) -> None:
        """Wait until the board has seen everything that we closed. A board that is gone has."""
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                _call(sock.fileno(), Message(Op.SYNC))

    def call(self, request: Message) -> Message:
        """A request to the board itself; starts a private one when there is none. Raises OSError, BoardError."""
        for attempt in (1, 2):
            sock = self._session()
            try:
                answer = _call(sock.fileno(), request)
            except (BrokenPipeError, ConnectionResetError):
                self._forget(sock)
                if attempt == 2:
                    raise
            else:
                if answer.code:
                    raise OSError(answer.code, os.strerror(answer.code))
                return answer
        raise AssertionError

    def stop(self, seconds: float = 10.0) -> None:
        """End the board and wait until it is gone. BoardError if that takes too long."""
        self.call(Message(Op.STOP))
        sock = self._session()
        sock.settimeout(seconds)
        try:
            while sock.recv(1):
                pass
        except TimeoutError:
            raise BoardError(f"board {self.spec.text!r} does not stop; kill process {self.pid}") from None
        except OSError:
            pass
        self._forget(sock)

    @property
    def pid(self) -> int:
        """The driver process, once there is a session."""
        return int(self.facts.get("pid", 0))

    @property
    def address(self) -> bytes:
        """Where the board listens; empty before a private one is started."""
        return self._address

    def _session(self) -> socket.socket:
        with self._lock:
            if self._sock is not None:
                return self._sock
            sock = board.connect(self._address) if self._address else None
            if sock is None:
                if self.spec.chip is None:
                    hint = f"start it with `tegrad board start {self.spec.text}`"
                    raise BoardError(f"no board named {self.spec.text!r} is running; {hint}")
                self._address = board.start(self.spec.chip, self.spec.memory, linger=self._linger, gpu=self._gpu)
                sock = board.connect(self._address)
                if sock is None:
                    raise BoardError("the emulated board ended right after its start")
            me = {"token": _Me.token, "pid": os.getpid(), "comm": _comm()}
            hello = _call(sock.fileno(), Message(Op.HELLO, payload=json.dumps(me).encode()))
            self.facts = json.loads(hello.payload)
            self._sock = sock
            return sock

    def forked(self) -> None:
        """We are a child now: the session and whatever lock a thread held are the parent's."""
        self._lock = threading.Lock()
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _forget(self, sock: socket.socket) -> None:
        with self._lock:
            if self._sock is sock:
                self._sock = None
        sock.close()


_connections: dict[str, Connection] = {}
_connections_lock = threading.Lock()


def connection(spec: str, *, linger: float = board.LINGER_S, gpu: str = board.GPU) -> Connection:
    """This process's one connection to the board of a spec; the first to ask decides how that is started."""
    with _connections_lock:
        if spec not in _connections:
            _connections[spec] = Connection(spec, linger=linger, gpu=gpu)
        return _connections[spec]


# ---- the Kernel -----------------------------------------------------------------------------------------------------


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
        fd = _lowest(fd)
        os.set_inheritable(fd, not flags & os.O_CLOEXEC)
        return fd

    def _open_log(self) -> int:
        """The log as it is now, in records of /dev/kmsg: priority, sequence, microseconds, flags, text."""
        fd = os.memfd_create("kmsg")
        lines = _document(self.connection.call(Message(Op.LOG, value=0)))
        os.write(fd, "".join(f"3,{sequence},0,-;{line}\n" for sequence, line in lines).encode())
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    def ioctl(self, fd: int, row: Ioctl, arg: Arg = None) -> int:
        """Make the ioctl; EINTR is repeated at once, EAGAIN for up to AGAIN_LIMIT_S."""
        if row.by_value:
            if arg is not None and not isinstance(arg, int):
                raise TypeError(f"{row.name} takes an integer, got {type(arg).__name__}")
        elif (row.struct is None) != (arg is None) or (row.struct is not None and not isinstance(arg, row.struct)):
            wanted = "no argument" if row.struct is None else row.struct.__name__
            raise TypeError(f"{row.name} takes {wanted}, got {type(arg).__name__}")
        deadline = 0.0
        while True:
            try:
                return _ioctl(self.connection, fd, row, arg)
            except OSError as error:
                code = _DEVICE_ERRNO.get(error.errno or 0, error.errno or 0)
            if code == errno.EINTR:
                continue
            if code == errno.EAGAIN:
                now = time.monotonic()
                deadline = deadline or now + AGAIN_LIMIT_S
                if now < deadline:
                    time.sleep(AGAIN_PAUSE_S)
                    continue
            raise ioctl_error(row, fd, arg, code)

    def mmap(self, fd: int, size: int, prot: int, flags: int, *, addr: int = 0, offset: int = 0) -> int:
        """Map a buffer, or plain memory with fd -1. The registers of a ctrl fd have no memory here: use `doorbell`."""
        arguments = {"fd": fd, "size": size, "prot": prot, "flags": flags, "addr": addr, "offset": offset}
        try:
            if fd >= 0:
                self._check_mapping(fd, size, prot, offset)
                # The driver shares the memory whatever the caller asks for.
                flags = flags & ~_MAP_TYPE | mmap_module.MAP_SHARED
            result = _libc.mmap(addr or None, size, prot, flags, fd, offset)
            if result is None or result == _MAP_FAILED:
                raise OSError(ctypes.get_errno(), "mmap")
            if fd >= 0:
                _libc.madvise(result, size, _MADV_DONTFORK)
        except OSError as error:
            raise _error("mmap", error, arguments) from None
        return int(result)

    def munmap(self, addr: int, size: int) -> None:
        """Unmap memory."""
        if _libc.munmap(addr, size) != 0:
            raise DriverError("munmap", ctypes.get_errno(), {"addr": addr, "size": size})

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
            answer = _call(fd, Message(Op.MMAP_REGISTERS, size, 0), peer=self.connection.pid)
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
    payload, fds, value = b"", [], 0
    if isinstance(arg, int):
        value = arg
    elif arg is not None:
        payload = ctypes.string_at(ctypes.addressof(arg), ctypes.sizeof(arg))
        fds = [_if_open(ctypes.c_int32(get_field(arg, name)).value) for name in row.fds_in]
    answer = _call(fd, Message(Op.IOCTL, row.request, value, payload, fds), peer=conn.pid)
    if answer.code:
        raise OSError(answer.code, os.strerror(answer.code))
    if answer.payload and arg is not None and not isinstance(arg, int):
        ctypes.memmove(ctypes.addressof(arg), answer.payload, min(len(answer.payload), ctypes.sizeof(arg)))
        for name, made in zip(row.fds_out, answer.fds, strict=False):
            assert made is not None
            set_field(arg, name, _lowest(made))
    return answer.value


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
    """The lines of the board's kernel log from sequence number `since` on."""
    return [line for _, line in _document(connection(spec).call(Message(Op.LOG, value=since)))]


def board_inject(spec: str, rules: Iterable[Rule]) -> int:
    """Arm injection rules on the board in place of those armed before; how many there are."""
    payload = json.dumps([rule.to_json() for rule in rules]).encode()
    return connection(spec).call(Message(Op.INJECT, payload=payload)).value


def board_stop(spec: str) -> None:
    """End the board; its clients see their fds die."""
    connection(spec).stop()
