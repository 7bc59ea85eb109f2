"""The messages between a client and the board: how an ioctl travels, and how the driver reaches the caller's memory.

An emulated device fd is one end of a SOCK_SEQPACKET pair; so is a process's session with the board. A request travels
on it, carrying one end of a socket pair made for this call alone: the answer comes back there. So any number of
threads, forked children and holders of a duplicated fd may call at once, and the death of either side is a hang-up
for the other.

While a call is in progress the board may ask the caller to read or write its own memory (`COPY_IN`, `COPY_OUT`), as
the kernel's copy_from_user and copy_to_user do: only the caller's side knows which of its addresses are good.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Op(IntEnum):
    """What a message asks or answers."""

    # on a device fd
    IOCTL = 1  # code: request number, value: by-value argument, payload: argument block, slots: fds of the argument
    MMAP_REGISTERS = 2  # ctrl fd: code: length, value: offset -> fds [doorbell pipe, lease], payload: JSON facts
    # on a session
    HELLO = 16  # payload: JSON {token, pid, comm} -> payload: JSON facts
    OPEN = 17  # payload: path -> fds [device]
    EXISTS = 18  # payload: path -> value 0 or 1
    MMAP_CHECK = 19  # slots [dmabuf], code: length, value: offset, payload: b"w" for PROT_WRITE
    SYNC = 20  # every hang-up that came before is completed
    STATUS = 21  # -> fds [file]: JSON
    LOG = 22  # value: first sequence number wanted, code: 0 JSON, 1 records of /dev/kmsg -> fds [file]
    INJECT = 23  # payload: JSON list of rules -> value: how many are armed
    STOP = 24  # end the board
    KEEP = 25  # slots [pidfd]: a private board lasts as long as that process
    # on the socket of one call
    DONE = 32  # code: errno or 0, value: the return value, payload: argument block to store, slots: new fds
    COPY_IN = 33  # code: length, value: user address -> COPIED with payload
    COPY_OUT = 34  # value: user address, payload: bytes -> COPIED
    COPIED = 35  # the caller's answer; code: bytes that could not be copied
    GET_FILE = 36  # value: fd number -> COPIED with the fd, if it is open
    CLOSE_FD = 37  # value: fd number -> COPIED
    FIND_VMA = 38  # value: user address -> COPIED with a JSON area of the caller's memory map


HEADER = struct.Struct("<HHQQ")
CHUNK = 1 << 16  # bytes of user memory per message, well below the socket's buffer
MAX_MESSAGE = HEADER.size + CHUNK + 256
MAX_FDS = 16
_FD_BYTES = socket.CMSG_SPACE(MAX_FDS * 4)
ABSENT = 0xFF
BUFFER_NAME = "nvmap"
"""How the memfd of a buffer is called, before the board's id."""
# As plain integers: the enumerations cost microseconds a message.
_NOSIGNAL, _CLOEXEC, _TRUNCATED = int(socket.MSG_NOSIGNAL), int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_SOCKET, _RIGHTS = int(socket.SOL_SOCKET), int(socket.SCM_RIGHTS)


@dataclass(slots=True)
class Message:
    """One message. `fds` has an entry per slot: an open fd, owned by the receiver, or None if there was none."""

    op: int
    code: int = 0
    value: int = 0
    payload: bytes = b""
    fds: Sequence[int | None] = ()

    def close_fds(self) -> None:
        """Close every fd that came with the message."""
        for fd in self.fds:
            if fd is not None:
                os.close(fd)
        self.fds = ()


def to_file(data: bytes) -> int:
    """Bytes of any length as an fd to pass along; the caller closes it."""
    fd = os.memfd_create("tegrad-message", os.MFD_CLOEXEC)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)
    return fd


def from_file(fd: int) -> bytes:
    """What `to_file` packed; closes the fd."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read()


def send(sock: socket.socket, message: Message, *, reply: int | None = None) -> None:
    """Send one message; its fds are duplicated into the receiver. `reply` goes first: the end that takes the answer.

    Raises OSError: EBADF for an fd that is not open, EPIPE when the receiver is gone.
    """
    slots = bytearray(len(message.fds))
    passed = [] if reply is None else [reply]
    for i, fd in enumerate(message.fds):
        slots[i] = ABSENT if fd is None else len(passed)
        if fd is not None:
            passed.append(fd)
    head = HEADER.pack(message.op, len(slots), message.code, message.value & 0xFFFFFFFFFFFFFFFF)
    parts: list[bytes] = [head, bytes(slots), message.payload]
    if passed:
        sock.sendmsg(parts, [(_SOCKET, _RIGHTS, struct.pack(f"{len(passed)}i", *passed))], _NOSIGNAL)
    else:
        sock.sendmsg(parts, [], _NOSIGNAL)


def receive(sock: socket.socket, *, with_reply: bool = False) -> tuple[Message, int | None] | None:
    """The next message, and the reply fd where one was sent; None when the other side has hung up.

    Every fd arrives close-on-exec. Raises OSError(EMFILE) where the receiver's fd table could not take them.
    """
    data, ancillary, flags, _ = sock.recvmsg(MAX_MESSAGE, _FD_BYTES, _CLOEXEC)
    if not data:
        return None
    passed: list[int] = []
    for level, kind, raw in ancillary:
        if level == _SOCKET and kind == _RIGHTS:
            passed += struct.unpack(f"{len(raw) // 4}i", raw[: len(raw) // 4 * 4])
    op, slots, code, value = HEADER.unpack_from(data)
    body = HEADER.size + slots
    reply = passed[0] if with_reply and passed else None
    if flags & _TRUNCATED:
        for fd in passed:
            os.close(fd)
        raise OSError(24, "too many open files for the fds of a message")
    fds = [None if s == ABSENT else passed[s] for s in data[HEADER.size : body]]
    return Message(op, code, value, data[body:], fds), reply
