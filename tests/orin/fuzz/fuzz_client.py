"""A client of the board in a process of its own, which does one small thing at a time as its parent asks.

Every buffer that it fills carries its owner's mark, so that another client's mark in its memory is proof of a leak.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import random
import signal
import socket
import struct
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from tegrad.hw.gpfifo import DOORBELL, Userd, gp_entry
from tegrad.orin.client import BoardKernel
from tegrad.uapi.errors import DriverError
from tegrad.uapi.fields import leaf_fields
from tegrad.uapi.ioctls import BY_NAME, Ioctl, set_field
from tegrad.uapi.kernel import MAP_ANONYMOUS, MAP_PRIVATE

sys.path.insert(0, str(Path(__file__).parents[1] / "driver"))
from driver_user import User

PAGE, ROOM, ENTRIES = 4096, 1 << 16, 64
ANSWER_S = 60.0
POINTERS = {"null": 0, "bad": 0x1000, "kernel": 0xFFFF800000000000}


def mark(number: int) -> int:
    """The word that a client fills its memory with: one that no shifted or half cleared word of another gives."""
    return random.Random(number).getrandbits(31) | 1 << 31


class Died(Exception):
    """The client process ended by itself, or did not answer."""


class Client:
    """The parent's end: a method call is carried out by the process."""

    def __init__(self, spec: str, number: int) -> None:
        self.number = number
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _live(spec, number, theirs)
        theirs.close()
        self._sock = ours
        self._sock.settimeout(ANSWER_S)

    def ask(self, name: str, *arguments: Any) -> Any:
        """What the client's method of this name returns; DriverError as the driver raised it."""
        try:
            _send(self._sock, (name, arguments))
            kind, value = _receive(self._sock)
        except (OSError, EOFError) as error:
            raise Died(f"client {self.number}, asked for {name}{arguments}: {type(error).__name__} {error}") from None
        if kind == "refused":
            raise DriverError(*value)
        if kind == "broken":
            raise Died(f"client {self.number}, asked for {name}{arguments}:\n{value}")
        return value

    def kill(self) -> None:
        """End it without a word."""
        self._sock.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _send(sock: socket.socket, message: object) -> None:
    data = pickle.dumps(message)
    sock.sendall(struct.pack("<I", len(data)) + data)


def _receive(sock: socket.socket) -> Any:
    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = sock.recv(size - len(data))
            if not more:
                raise EOFError("it is gone")
            data += more
        return data

    return pickle.loads(exactly(struct.unpack("<I", exactly(4))[0]))


def _live(spec: str, number: int, sock: socket.socket) -> None:
    """The process's life. Never returns."""
    code = 0
    try:
        worker = Worker(spec, number)
        while True:
            try:
                name, arguments = _receive(sock)
            except EOFError:
                break
            try:
                answer = "done", getattr(worker, name)(*arguments)
            except DriverError as refused:
                answer = "refused", (refused.name, refused.errno)
            except Exception:
                answer = "broken", traceback.format_exc()
            _send(sock, answer)
    except BaseException:
        traceback.print_exc()
        code = 1
    os._exit(code)


class Worker:
    """What a client can do. Everything that the driver refuses is a DriverError."""

    def __init__(self, spec: str, number: int) -> None:
        self.kernel, self.number = BoardKernel(spec), number
        self.user = User(self.kernel)
        self.doorbell = self.kernel.doorbell(self.user.ctrl)
        self.scratch = self.kernel.mmap(-1, ROOM, 3, MAP_PRIVATE | MAP_ANONYMOUS)
        self.maps: list[tuple[int, int]] = []
        self.rings: list[dict[str, int]] = []

    # ---- plain system calls

    def hello(self) -> tuple[int, int]:
        """The fds that every client has: nvmap and ctrl."""
        return self.user.nvmap, self.user.ctrl

    def open(self, path: str) -> int:
        return self.user.open(path)

    def close(self, fd: int) -> None:
        self.user.close(fd)

    def ioctl(self, fd: int, name: str, fields: dict[str, Any], value: int = 0) -> dict[str, int]:
        """Any ioctl with any block; pointer fields are named places. What came back, integers only."""
        row = BY_NAME[name]
        if row.by_value or row.struct is None:
            self.kernel.ioctl(fd, row, value if row.by_value else None)
            return {}
        arg = row.struct()
        for field, content in fields.items():
            set_field(arg, field, POINTERS.get(content, self.scratch) if isinstance(content, str) else content)
        result = self.kernel.ioctl(fd, row, arg)
        found = {field: content for field, content in leaf_fields(arg) if isinstance(content, int)}
        if result == 0:
            self.user.fds += [found[field] for field in row.fds_out if found.get(field, -1) > 2]
        return found

    def raw(self, fd: int, request: int, size: int) -> int:
        """A request number of the caller's making, with a block of that size from the scratch memory."""
        block = type("Block", (ctypes.Structure,), {"_fields_": [("bytes", ctypes.c_uint8 * max(size, 1))]})
        row = Ioctl("RAW", "RAW", "ctrl", request & 0xFF, request, "rw", block)
        return self.kernel.ioctl(fd, row, block.from_buffer_copy(ctypes.string_at(self.scratch, max(size, 1))))

    def fill_scratch(self, words: list[int]) -> None:
        """What the drivers read behind pointers."""
        data = struct.pack(f"<{len(words)}Q", *words)
        ctypes.memmove(self.scratch, data, len(data))

    # ---- memory

    def buffer(self, size: int, flags: int) -> tuple[int, int]:
        """A buffer, mapped, found empty, and marked: its handle and dmabuf fd. AssertionError if it was not empty."""
        made = self.user.buffer(size, flags=0x0900 << 16 | flags)
        self.map(made.fd, size)
        return made.handle, made.fd

    def map(self, fd: int, size: int) -> None:
        """Map a new buffer, which must be empty, and mark its words."""
        address = self.kernel.mmap(fd, size, 3, 1)
        self.maps.append((address, size))
        words = self._words(address, size)
        assert not words.any(), f"new memory holds {words[words != 0][:4]}"
        words[:] = mark(self.number)

    def unmap(self, which: int) -> None:
        if self.maps:
            address, size = self.maps.pop(which % len(self.maps))
            self.kernel.munmap(address, -(-size // PAGE) * PAGE)

    def look(self, clients: int) -> list[int]:
        """Which of the other clients so far have marks in any memory of ours."""
        marks = {mark(number): number for number in range(1, clients + 1) if number != self.number}
        found = (np.intersect1d(self._words(*place), list(marks)) for place in self.maps)
        return [marks[int(word)] for words in found for word in words]

    def poison(self, number: int) -> None:
        """Put another client's mark into our memory: for the tests of the test."""
        self._words(*self.maps[0])[0] = mark(number)

    def _words(self, address: int, size: int) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.ctypeslib.as_array((ctypes.c_uint32 * (size // 4)).from_address(address))

    # ---- the GPU

    def ring(self, vm: int | None) -> dict[str, int]:
        """A channel with both engines, a ring, a pushbuffer and a marked buffer, all mapped."""
        user = self.user
        channel = user.bound_channel(vm=vm)
        arg = user.setup_args(entries=ENTRIES)
        self.kernel.ioctl(channel.fd, BY_NAME["CHANNEL_SETUP_BIND"], arg)
        for class_id in (0xC7C0, 0xC7B5):
            user.object(channel, class_id)
        user.notifier(channel)
        push, data = user.buffer(ROOM), user.buffer(ROOM)
        self.map(data.fd, ROOM)
        made = {
            "fd": channel.fd,
            "tsg": channel.tsg,
            "vm": channel.vm,
            "token": arg.work_submit_token,
            "entries": self._plain(arg.gpfifo_dmabuf_fd),
            "userd": self._plain(arg.userd_dmabuf_fd),
            "push": self.kernel.mmap(push.fd, ROOM, 3, 1),
            "push_va": user.map(channel.vm, push.fd),
            "data_va": user.map(channel.vm, data.fd),
            "at": 0,
            "put": 0,
        }
        self.rings.append(made)
        return made

    def _plain(self, fd: int) -> int:
        return self.kernel.mmap(fd, PAGE, 3, 1)

    def submit(self, which: int, words: list[int], entry: int | None = None, last: bool = False) -> None:
        """Put commands (or a raw GPFIFO entry) into a ring and tell the GPU; `last`: the channel may not survive it."""
        if not self.rings:
            return
        which %= len(self.rings)
        ring = self.rings.pop(which) if last else self.rings[which]
        data = struct.pack(f"<{len(words)}I", *words)
        ring["at"] = 0 if ring["at"] + len(data) > ROOM else ring["at"]
        ctypes.memmove(ring["push"] + ring["at"], data, len(data))
        va = (ring["push_va"] + ring["at"]) % (1 << 40)  # what an entry holds of an address
        raw = gp_entry(va, len(words)) if entry is None else entry
        ctypes.c_uint64.from_address(ring["entries"] + 8 * ring["put"]).value = raw
        ring["at"] += -(-len(data) // 16) * 16
        ring["put"] = (ring["put"] + 1) % ENTRIES
        ctypes.c_uint32.from_address(ring["userd"] + Userd.GP_PUT).value = ring["put"]
        self.doorbell.store32(DOORBELL, ring["token"])

    def store32(self, offset: int, value: int) -> None:
        self.doorbell.store32(offset, value)
