"""The driver process: one thread, one epoll, every client's sockets.

Order is what a kernel gives: hang-ups (closes) that happened before a call was made are completed before it runs,
since one poll delivers both and hang-ups go first; so a close followed by an open is synchronous. Of each socket one
message is taken per poll. A handler that waits for its caller or for time is suspended, and others are served
meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from typing import NoReturn

from tegrad.hw.chips import Chip
from tegrad.orin import wire
from tegrad.orin.board import peer
from tegrad.orin.calls import Calls
from tegrad.orin.ctrl import CtrlFile, mmap_registers_check
from tegrad.orin.driver import Driver
from tegrad.orin.files import File
from tegrad.orin.nvmap import NvmapFile
from tegrad.orin.sessions import carry_out
from tegrad.orin.sockets import Lease, Session, Sockets, deliver
from tegrad.orin.steps import Errno
from tegrad.orin.wire import Message, Op

EVENTS_PER_POLL = 1 << 16
_SPOILED = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class Server:
    """Serves one board: for ever if `linger` is None, else until its processes are gone or had nothing open so long.

    Of its processes, those of `keep` need nothing open.
    """

    def __init__(self, chip: Chip, memory: int, listener: socket.socket, *, linger: float | None, gpu: str) -> None:
        self.listener = listener
        self.driver = Driver(chip, memory, board_id=os.urandom(6).hex(), gpu=gpu)
        self.driver.on_new_gpu = self._watch_gpu
        self.sockets = Sockets(self.driver, linger)
        self.calls = Calls(self.sockets)
        self._idle_since: float | None = time.monotonic()
        self._met = False
        self._gpu_fd = -1
        listener.setblocking(False)
        self.sockets.epoll.register(listener.fileno(), select.EPOLLIN)
        self._watch_gpu()

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped or idle for long enough.

        The listener is closed first, before the exit closes clients' sockets too: a board that they saw end is not
        found running.
        """
        try:
            while not self.sockets.stopping:
                ready = self.sockets.epoll.poll(self._patience(), EVENTS_PER_POLL)
                self._hang_ups(ready)
                for fd, events in ready:
                    if events & select.EPOLLIN:
                        self._readable(fd)
                self.calls.expire()
                if self._idle():
                    return
        finally:
            self.listener.close()  # or whoever connects while the GPU ends would be let in, and told nothing
            self.driver.close()

    def _hang_ups(self, ready: list[tuple[int, int]]) -> None:
        """Everything whose other side is gone: mappings first, then files in the order they were opened."""
        gone = [fd for fd, events in ready if events & _SPOILED]
        for fd in gone:
            if fd in self.sockets.leases:
                self._end_lease(fd)
            elif fd in self.calls:
                self.calls.abandon(fd)
            elif fd in self.sockets.sessions:
                self._drain(fd, self._session_message)
                self.sockets.forget(self.sockets.sessions.pop(fd).sock)
        files = sorted((fd for fd in gone if fd in self.sockets.files), key=lambda fd: self.sockets.files[fd].serial)
        for fd in files:
            self._drain(fd, self._file_message)
            file = self.sockets.files.pop(fd)
            assert file.sock is not None
            self.sockets.forget(file.sock)
            file.sock = None
            del self.sockets.by_inode[file.inode]
            self.sockets.put(file)

    def _drain(self, fd: int, take: Callable[[int], bool]) -> None:
        """Messages sent before the hang-up still count."""
        while fd in self.sockets.files or fd in self.sockets.sessions:
            if not take(fd):
                return

    def _readable(self, fd: int) -> None:
        if fd == self.listener.fileno():
            self._accept()
        elif fd == self._gpu_fd and not self.driver.state.quiesced:  # its number is somebody else's then
            self.sockets.unbroken(self.driver.poll_gpu)
        elif fd in self.sockets.files:
            self._file_message(fd)
        elif fd in self.sockets.sessions:
            self._session_message(fd)
        elif fd in self.calls:
            self.calls.answered(fd)
        elif fd in self.sockets.kept:
            self._let_go(fd)

    def _patience(self) -> float | None:
        """How long poll may sleep, in seconds."""
        linger = self.sockets.linger
        end = None if self._idle_since is None or linger is None else self._idle_since + linger
        deadlines = [at for at in (self.calls.next_deadline(), end) if at is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _idle(self) -> bool:
        """Whether a private board may go: nobody can come back, or nothing was open for long enough."""
        if self.sockets.files or self.sockets.leases or self.sockets.kept or self.sockets.linger is None:
            self._idle_since = None
            return False
        if self._met and not self.sockets.sessions:
            return True
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        return now - self._idle_since >= self.sockets.linger

    def _watch_gpu(self) -> None:
        self._gpu_fd = self.driver.state.gpu.events.fileno()
        self.sockets.epoll.register(self._gpu_fd, select.EPOLLIN)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.listener.accept()
            if peer(sock)[1] not in (os.getuid(), 0):
                sock.close()
                return
            self.sockets.watch(sock)
            self.sockets.sessions[sock.fileno()] = Session(sock)
            self._met = True

    def _let_go(self, pidfd: int) -> None:
        self.sockets.kept.remove(pidfd)
        self.sockets.epoll.unregister(pidfd)
        os.close(pidfd)

    # ---- messages ------------------------------------------------------------------------------------------------

    def _receive(self, sock: socket.socket) -> tuple[Message, socket.socket] | None:
        """The next request and where its answer goes; None when there is none."""
        try:
            got = wire.receive(sock, with_reply=True)
        except (OSError, struct.error, IndexError):
            return None
        if got is None:
            return None
        message, reply = got
        if reply is None:
            message.close_fds()
            return None
        return message, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=reply)

    def _file_message(self, fd: int) -> bool:
        file = self.sockets.files[fd]
        assert file.sock is not None
        got = self._receive(file.sock)
        if got is None:
            return False
        message, reply = got
        if message.op == Op.IOCTL:
            self.calls.begin(file, message, reply)
            return True
        with reply:
            message.close_fds()
            if message.op == Op.MMAP_REGISTERS:
                self.driver.state.calls["mmap"] += 1
                self._map_registers(file, message, reply)
            else:
                deliver(reply, Message(Op.DONE, errno.EPROTO))
        return True

    # ---- the usermode registers ----------------------------------------------------------------------------------

    def _map_registers(self, file: File, message: Message, reply: socket.socket) -> None:
        try:
            if not isinstance(file, CtrlFile):
                raise Errno(errno.EPERM if isinstance(file, NvmapFile) else errno.ENODEV)
            mmap_registers_check(file, message.code, message.value)
            ours, theirs = self.sockets.pair()
        except Errno as refusal:
            deliver(reply, Message(Op.DONE, refusal.number))
            return
        file.registers_mapped = True
        file.calls += 1
        self.sockets.leases[ours.fileno()] = Lease(ours, file)
        facts = json.dumps({"class": self.driver.state.chip.usermode_class}).encode()
        with theirs:
            deliver(reply, Message(Op.DONE, 0, 0, facts, [self.driver.doorbell, theirs.fileno()]))

    def _end_lease(self, fd: int) -> None:
        lease = self.sockets.leases.pop(fd)
        self.sockets.forget(lease.sock)
        lease.file.registers_mapped = False
        lease.file.calls -= 1
        self.sockets.put(lease.file)

    # ---- sessions ------------------------------------------------------------------------------------------------

    def _session_message(self, fd: int) -> bool:
        session = self.sockets.sessions[fd]
        got = self._receive(session.sock)
        if got is None:
            return False
        message, reply = got
        with reply:
            answer, end = carry_out(self.sockets, session, message)
            deliver(reply, answer)
            if end is not None:
                end.close()
        return True


def serve(
    chip: Chip, memory: int, listener: socket.socket, *, linger: float | None, gpu: str, log_copy: int | None = None
) -> NoReturn:
    """Be the driver process until it is time to go.

    `log_copy` is a file that gets every line of the kernel log.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    server = Server(chip, memory, listener, linger=linger, gpu=gpu)
    if log_copy is not None:
        server.driver.state.log.copy_to(log_copy)
    server.run()
    os._exit(0)
