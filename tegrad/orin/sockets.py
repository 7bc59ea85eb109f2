"""Who is connected to a board, and the files that they have open: all that its sockets stand for.

`server` hears of them and acts; calls in progress and requests to the board reach this and no more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from tegrad.orin import wire
from tegrad.orin.buffers import Buffer
from tegrad.orin.ctrl import CtrlFile
from tegrad.orin.driver import Driver
from tegrad.orin.files import File, Foreign
from tegrad.orin.steps import Errno, Process
from tegrad.orin.wire import Message


@dataclass(slots=True)
class Lease:
    """A client's mapping of the usermode registers; its hang-up is the munmap. It keeps the ctrl file alive."""

    sock: socket.socket
    file: CtrlFile


@dataclass(slots=True)
class Session:
    """A client process's connection."""

    sock: socket.socket
    process: Process | None = None


class Sockets:
    """A board's clients. `linger`: seconds for which it stays when nothing is open, None for ever."""

    def __init__(self, driver: Driver, linger: float | None) -> None:
        self.driver, self.linger = driver, linger
        self.epoll = select.epoll()
        self.sessions: dict[int, Session] = {}
        self.files: dict[int, File] = {}  # by fd of our end
        self.by_inode: dict[tuple[int, int], File] = {}  # by device and inode of the client's end
        self.leases: dict[int, Lease] = {}
        self.kept: set[int] = set()  # processes (pidfds) that a private board outlasts
        self.stopping = False

    def watch(self, sock: socket.socket) -> None:
        """Hear of messages and of the hang-up on a socket."""
        sock.setblocking(False)
        self.epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def unwatch(self, sock: socket.socket) -> None:
        """Hear of it no more."""
        self.epoll.unregister(sock.fileno())

    def forget(self, sock: socket.socket) -> None:
        """Hear of it no more, and close it."""
        self.unwatch(sock)
        sock.close()

    def keep(self, pidfd: int) -> None:
        """Outlast a process; takes its pidfd over."""
        self.epoll.register(pidfd, select.EPOLLIN)
        self.kept.add(pidfd)

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """A new pair of sockets, of whose first we hear. Errno where there is no fd for them."""
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.watch(ours)
        except OSError as full:
            raise Errno(full.errno or errno.EMFILE) from None
        return ours, theirs

    def give(self, file: File) -> socket.socket:
        """The client's end of a new file's fd. Errno where there is none, and the file is the caller's to release."""
        ours, theirs = self.pair()
        stat = os.fstat(theirs.fileno())
        file.sock, file.inode = ours, (stat.st_dev, stat.st_ino)
        self.files[ours.fileno()] = self.by_inode[file.inode] = file
        if file.readable:
            file.make_readable()
        return theirs

    def resolve(self, fd: int, held: list[Buffer]) -> File | Buffer | Foreign:
        """What an fd from a client is; a buffer's reference is added to `held`. Errno where no fd is left for it."""
        try:
            found = self.driver.resolve(fd, self.by_inode)
        except OSError as full:
            raise Errno(full.errno or errno.EMFILE) from None
        if isinstance(found, Buffer):
            held.append(found)
        return found

    def put(self, file: File) -> None:
        """Release a file whose fds are all closed, once no call is in progress on it."""
        if file.sock is None and file.calls == 0:
            self.unbroken(file.release)

    def unbroken(self, action: Callable[[], None]) -> None:
        """Do what no client waits for; a bug of the board is told in its log, and the others are served on."""
        try:
            action()
        except Exception as bug:
            for line in traceback.format_exception(bug):
                self.driver.state.log.board(line.rstrip())


def deliver(sock: socket.socket, message: Message) -> None:
    """Send an answer; whoever does not wait for it any more does not matter."""
    with contextlib.suppress(OSError):
        wire.send(sock, message)
