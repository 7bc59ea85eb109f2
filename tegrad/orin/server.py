"""The driver process: one thread, one epoll, every client's sockets.

Order is what a kernel gives: hang-ups (closes) that happened before a call was made are completed before it runs,
since one poll delivers both and hang-ups go first; so a close followed by an open is synchronous. Of each socket one
message is taken per poll. A handler that waits for its caller or for time is suspended, and others are served
meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import socket
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

from tegrad.hw.chips import Chip
from tegrad.orin import nvmap, wire
from tegrad.orin.ctrl import CtrlFile, mmap_registers_check
from tegrad.orin.driver import NODES, Driver
from tegrad.orin.files import (
    Call,
    CloseFd,
    CopyIn,
    CopyOut,
    Errno,
    File,
    FindVma,
    Foreign,
    GetFile,
    Process,
    Steps,
    Until,
    Vma,
    block,
    writes_caller,
)
from tegrad.orin.inject import Rule
from tegrad.orin.nvmap import Buffer, NvmapFile
from tegrad.orin.wire import Message, Op

EVENTS_PER_POLL = 1 << 16
_SPOILED = select.EPOLLHUP | select.EPOLLERR | select.EPOLLRDHUP


class _Closes(Protocol):
    def close(self) -> None: ...


@dataclass(slots=True)
class Session:
    """A client process's connection: it opens nodes and asks about the board."""

    sock: socket.socket
    process: Process | None = None


@dataclass(slots=True)
class Lease:
    """A client's mapping of the usermode registers; its hang-up is the munmap. It keeps the ctrl file alive."""

    sock: socket.socket
    file: CtrlFile


@dataclass(slots=True)
class Pending:
    """A call whose handler waits."""

    file: File
    call: Call
    reply: socket.socket
    held: list[Buffer]
    steps: Steps | None = None
    waiting: Any = None
    deadline: float | None = None


class Server:
    """Serves one board: for ever if `linger` is None, else until its processes are gone or had nothing open so long."""

    def __init__(self, chip: Chip, memory: int, listener: socket.socket, *, linger: float | None, gpu: str) -> None:
        self.listener, self.linger = listener, linger
        self.name = listener.getsockname()
        self.board_id = os.urandom(6).hex()
        self.driver = Driver(chip, memory, self.board_id, gpu=gpu)
        self.driver.gpu_replaced = self._watch_gpu  # type: ignore[method-assign]
        self.epoll = select.epoll()
        self.sessions: dict[int, Session] = {}
        self.files: dict[int, File] = {}  # by fd of our end
        self.by_inode: dict[int, File] = {}  # by inode of the client's end
        self.leases: dict[int, Lease] = {}
        self.pending: dict[int, Pending] = {}  # by fd of the reply socket
        self.timers: list[Pending] = []
        self.stopping = False
        self._idle_since: float | None = time.monotonic()
        self._met = False
        self._gpu_fd = -1
        listener.setblocking(False)
        self.epoll.register(listener.fileno(), select.EPOLLIN)
        self._watch_gpu()

    # ---- the loop ------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until stopped or idle for long enough."""
        try:
            while not self.stopping:
                ready = self.epoll.poll(self._patience(), EVENTS_PER_POLL)
                self._hang_ups(ready)
                for fd, events in ready:
                    if events & select.EPOLLIN:
                        self._readable(fd)
                self._expire()
                if self._idle():
                    return
        finally:
            self.driver.close()

    def _hang_ups(self, ready: list[tuple[int, int]]) -> None:
        """Everything whose other side is gone: mappings first, then files in the order they were opened."""
        gone = [fd for fd, events in ready if events & _SPOILED]
        for fd in gone:
            if fd in self.leases:
                self._end_lease(fd)
            elif fd in self.pending:
                self._abandon(self.pending[fd])
            elif fd in self.sessions:
                self._drain(fd, self._session_message)
                self._forget(self.sessions.pop(fd).sock)
        files = sorted((fd for fd in gone if fd in self.files), key=lambda fd: self.files[fd].serial)
        for fd in files:
            self._drain(fd, self._file_message)
            file = self.files.pop(fd)
            assert file.sock is not None
            self._forget(file.sock)
            file.sock = None
            del self.by_inode[file.inode]
            self._put(file)

    def _drain(self, fd: int, take: Callable[[int], bool]) -> None:
        """Messages sent before the hang-up still count."""
        while fd in self.files or fd in self.sessions:
            if not take(fd):
                return

    def _readable(self, fd: int) -> None:
        if fd == self.listener.fileno():
            self._accept()
        elif fd == self._gpu_fd:
            self.driver.poll_gpu()
        elif fd in self.files:
            self._file_message(fd)
        elif fd in self.sessions:
            self._session_message(fd)
        elif fd in self.pending:
            self._answer(self.pending[fd])

    def _patience(self) -> float | None:
        deadlines = [p.deadline for p in self.timers if p.deadline is not None]
        if self._idle_since is not None and self.linger is not None:
            deadlines.append(self._idle_since + self.linger)
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def _expire(self) -> None:
        now = time.monotonic()
        for pending in [p for p in self.timers if p.deadline is not None and p.deadline <= now]:
            self._resume(pending, False)

    def _idle(self) -> bool:
        """Whether a private board may go: nobody can come back, or nothing was open for long enough."""
        if self.files or self.leases or self.linger is None:
            self._idle_since = None
            return False
        if self._met and not self.sessions:
            return True
        now = time.monotonic()
        self._idle_since = self._idle_since or now
        return now - self._idle_since >= self.linger

    def _watch_gpu(self) -> None:
        self._gpu_fd = self.driver.gpu.events.fileno()
        self.epoll.register(self._gpu_fd, select.EPOLLIN)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self.listener.accept()
            uid = int.from_bytes(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], "little")
            if uid not in (os.getuid(), 0):
                sock.close()
                return
            self._watch(sock)
            self.sessions[sock.fileno()] = Session(sock)
            self._met = True

    def _watch(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.epoll.register(sock.fileno(), select.EPOLLIN | select.EPOLLRDHUP)

    def _forget(self, sock: socket.socket) -> None:
        self.epoll.unregister(sock.fileno())
        sock.close()

    def _put(self, file: File) -> None:
        """Release a file whose fds are all closed, once no call is in progress on it."""
        if file.sock is None and file.calls == 0:
            file.release()

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

    def _reply(self, sock: socket.socket, message: Message) -> None:
        with contextlib.suppress(OSError):
            wire.send(sock, message)

    def _file_message(self, fd: int) -> bool:
        file = self.files[fd]
        assert file.sock is not None
        got = self._receive(file.sock)
        if got is None:
            return False
        message, reply = got
        if message.op == Op.IOCTL:
            self._ioctl(file, message, reply)
            return True
        with reply:
            message.close_fds()
            if message.op == Op.MMAP_REGISTERS:
                self._map_registers(file, message, reply)
            else:
                self._reply(reply, Message(Op.DONE, errno.EPROTO))
        return True

    def _ioctl(self, file: File, message: Message, reply: socket.socket) -> None:
        held: list[Buffer] = []
        try:
            found = [None if fd is None else self._resolve(fd, held) for fd in message.fds]
            message.close_fds()
            row = self.driver.row(file, message.code)
            call = Call(row, block(row, message.payload), message.value, dict(zip(row.fds_in, found, strict=False)))
        except Errno as refusal:
            with reply:
                self._reply(reply, Message(Op.DONE, refusal.number))
            for buffer in held:
                buffer.drop()
            return
        file.calls += 1
        pending = Pending(file, call, reply, held)
        try:
            outcome = self.driver.begin(file, call)
        except Errno as refusal:
            self._finish(pending, refusal.number, 0)
        except Exception as bug:
            self._broken(pending, bug)
        else:
            if outcome is None or isinstance(outcome, int):
                self._finish(pending, 0, outcome or 0)
            else:
                pending.steps = outcome
                self._advance(pending, None)

    def _resolve(self, fd: int, held: list[Buffer]) -> File | Buffer | Foreign:
        found = self.driver.resolve(fd, self.by_inode)
        if isinstance(found, Buffer):
            held.append(found)
        return found

    # ---- a call in progress --------------------------------------------------------------------------------------

    def _advance(self, pending: Pending, value: Any) -> None:
        """Run the handler to its next wait or to its end."""
        assert pending.steps is not None
        try:
            wait = pending.steps.send(value)
        except StopIteration as end:
            self._finish(pending, 0, end.value or 0)
        except Errno as refusal:
            self._finish(pending, refusal.number, 0)
        except Exception as bug:
            self._broken(pending, bug)
        else:
            self._suspend(pending, wait)

    def _broken(self, pending: Pending, bug: Exception) -> None:
        """A handler failed in a way that no driver does: say so, and keep serving the others."""
        for line in traceback.format_exception(bug):
            self.driver.log.board(f"{pending.call.row.name}: {line.rstrip()}")
        self._finish(pending, errno.EIO, 0)

    def _suspend(self, pending: Pending, wait: Any) -> None:
        pending.waiting = wait
        fd = pending.reply.fileno()
        if fd not in self.pending:
            self.pending[fd] = pending
            self._watch(pending.reply)
        if isinstance(wait, Until):
            pending.deadline = wait.deadline
            self.timers.append(pending)
            if wait.queue is not None:
                wait.queue.waiters.append(lambda: self._resume(pending, True))
        elif isinstance(wait, CopyIn):
            self._reply(pending.reply, Message(Op.COPY_IN, wait.size, wait.address))
        elif isinstance(wait, CopyOut):
            self._reply(pending.reply, Message(Op.COPY_OUT, 0, wait.address, wait.data))
        elif isinstance(wait, GetFile):
            self._reply(pending.reply, Message(Op.GET_FILE, 0, wait.fd))
        elif isinstance(wait, CloseFd):
            self._reply(pending.reply, Message(Op.CLOSE_FD, 0, wait.fd))
        elif isinstance(wait, FindVma):
            self._reply(pending.reply, Message(Op.FIND_VMA, 0, wait.address))

    def _resume(self, pending: Pending, value: bool) -> None:
        """A timer or a wake-up: only for a call that still waits for it."""
        if pending in self.timers:
            self.timers.remove(pending)
            pending.deadline = None
            self._advance(pending, value)

    def _answer(self, pending: Pending) -> None:
        """What the caller's side says to COPY_IN and its like."""
        try:
            got = wire.receive(pending.reply)
        except OSError:
            return
        if got is None:
            return
        message, wait = got[0], pending.waiting
        try:
            if isinstance(wait, CopyIn):
                value: Any = message.payload
            elif isinstance(wait, CopyOut):
                value = message.code
            elif isinstance(wait, GetFile):
                fd = message.fds[0] if message.fds else None
                value = None if fd is None else self._resolve(fd, pending.held)
            elif isinstance(wait, FindVma):
                value = Vma(**json.loads(message.payload)) if message.payload else None
            else:
                value = None
        finally:
            message.close_fds()
        self._advance(pending, value)

    def _abandon(self, pending: Pending) -> None:
        """The caller died in the middle of a call."""
        assert pending.steps is not None
        pending.steps.close()
        self._finish(pending, errno.EINTR, 0)

    def _finish(self, pending: Pending, code: int, value: int) -> None:
        call, file = pending.call, pending.file
        fds: list[int] = []
        ends: list[socket.socket] = []
        payload = b""
        if code == 0:
            for name in call.row.fds_out:
                made = call.new.get(name)
                if isinstance(made, File):
                    end = self._give(made)
                    ends.append(end)
                    fds.append(end.fileno())
                elif made is not None:
                    fds.append(made)
            if call.arg is not None and (call.copy_back or writes_caller(call.row)) and (not value or call.copy_back):
                payload = ctypes.string_at(ctypes.addressof(call.arg), ctypes.sizeof(call.arg))
        else:
            for made in call.new.values():
                if isinstance(made, File):
                    made.release()
        if pending in self.timers:
            self.timers.remove(pending)
        if self.pending.pop(pending.reply.fileno(), None) is not None:
            self.epoll.unregister(pending.reply.fileno())
        self._reply(pending.reply, Message(Op.DONE, code, value, payload, fds))
        pending.reply.close()
        for end in ends:
            end.close()
        for buffer in pending.held:
            buffer.drop()
        file.calls -= 1
        self._put(file)

    def _give(self, file: File) -> socket.socket:
        """The client's end of a new file's fd."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        file.sock, file.inode = ours, os.fstat(theirs.fileno()).st_ino
        self._watch(ours)
        self.files[ours.fileno()] = self.by_inode[file.inode] = file
        if file.readable:
            file.make_readable()
        return theirs

    # ---- the usermode registers ----------------------------------------------------------------------------------

    def _map_registers(self, file: File, message: Message, reply: socket.socket) -> None:
        try:
            if not isinstance(file, CtrlFile):
                raise Errno(errno.EPERM if isinstance(file, NvmapFile) else errno.ENODEV)
            mmap_registers_check(file, message.code, message.value)
        except Errno as refusal:
            self._reply(reply, Message(Op.DONE, refusal.number))
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        file.registers_mapped = True
        file.calls += 1
        self._watch(ours)
        self.leases[ours.fileno()] = Lease(ours, file)
        facts = json.dumps({"class": self.driver.chip.usermode_class}).encode()
        with theirs:
            self._reply(reply, Message(Op.DONE, 0, 0, facts, [self.driver.doorbell, theirs.fileno()]))

    def _end_lease(self, fd: int) -> None:
        lease = self.leases.pop(fd)
        self._forget(lease.sock)
        lease.file.registers_mapped = False
        lease.file.calls -= 1
        self._put(lease.file)

    # ---- sessions ------------------------------------------------------------------------------------------------

    def _session_message(self, fd: int) -> bool:
        session = self.sessions[fd]
        got = self._receive(session.sock)
        if got is None:
            return False
        message, reply = got
        with reply:
            end: _Closes | None = None
            try:
                answer, end = self._session_call(session, message)
            except Errno as refusal:
                answer = Message(Op.DONE, refusal.number)
            except Exception as nonsense:
                self.driver.log.board(f"a client sent nonsense: {type(nonsense).__name__}: {nonsense}")
                answer = Message(Op.DONE, errno.EPROTO)
            finally:
                message.close_fds()
            self._reply(reply, answer)
            if end is not None:
                end.close()
        return True

    def _session_call(self, session: Session, message: Message) -> tuple[Message, _Closes | None]:
        """The answer, and what to close once it is sent."""
        if message.op == Op.HELLO:
            session.process = Process(**json.loads(message.payload))
            facts = {"pid": os.getpid(), "chip": self.driver.chip.name, "memory": self.driver.memory.limit}
            return Message(Op.DONE, payload=json.dumps(facts).encode()), None
        if message.op == Op.OPEN:
            if session.process is None:
                raise Errno(errno.EPROTO)
            end = self._give(self.driver.open(message.payload.decode(), session.process))
            return Message(Op.DONE, fds=[end.fileno()]), end
        if message.op == Op.EXISTS:
            return Message(Op.DONE, value=int(message.payload.decode() in NODES)), None
        if message.op == Op.MMAP_CHECK:
            self._mmap_check(message)
            return Message(Op.DONE), None
        if message.op == Op.SYNC:
            return Message(Op.DONE), None
        if message.op == Op.STATUS:
            return self._document(self.status())
        if message.op == Op.LOG:
            return self._document(self.driver.log.since(message.value))
        if message.op == Op.INJECT:
            rules = [Rule(**rule) for rule in json.loads(message.payload)]
            return Message(Op.DONE, value=self.driver.inject.arm(rules)), None
        if message.op == Op.STOP:
            self.stopping = True
            return Message(Op.DONE), None
        raise Errno(errno.EPROTO)

    def _mmap_check(self, message: Message) -> None:
        """mmap of something that is not one of our sockets: a buffer's rules, or none of our business."""
        fd = message.fds[0]
        if fd is None:
            raise Errno(errno.EBADF)
        held: list[Buffer] = []
        found = self._resolve(fd, held)
        try:
            if isinstance(found, CtrlFile):
                # The registers have no memory here; a client that wants them asks for the doorbell.
                mmap_registers_check(found, message.code, message.value)
            if not isinstance(found, Buffer):
                raise Errno(errno.EPERM if isinstance(found, NvmapFile) else errno.ENODEV)
            nvmap.mmap_check(found, message.code, message.value, write=message.payload == b"w")
        finally:
            for buffer in held:
                buffer.drop()

    def _document(self, content: object) -> tuple[Message, _Closes]:
        """An answer of any length, as a file."""
        file = os.fdopen(wire.to_file(json.dumps(content).encode()), "rb")
        return Message(Op.DONE, fds=[file.fileno()]), file

    def status(self) -> dict[str, Any]:
        """What `board_status` gives: the board, its clients, and everything it counts."""
        kinds: dict[str, int] = {}
        for file in self.files.values():
            kinds[file.kind] = kinds.get(file.kind, 0) + 1
        processes = {f.process.token: f.process for f in self.files.values()}
        processes |= {s.process.token: s.process for s in self.sessions.values() if s.process}
        gpu = self.driver.gpu.pid
        return {
            "chip": self.driver.chip.name,
            "memory_limit": self.driver.memory.limit,
            "linger": self.linger,
            "pids": {"driver": os.getpid(), "gpu": gpu},
            "clients": [asdict(p) for p in processes.values()],
            "sessions": len(self.sessions),
            "files": kinds,
            "doorbell_mappings": len(self.leases),
            "counts": self.driver.counts(),
            "gpu": self.driver.tell_gpu("stats"),
            "host": {name: _host_counts(pid) for name, pid in (("driver", os.getpid()), ("gpu", gpu))},
        }


def _host_counts(pid: int) -> dict[str, int]:
    """Open fds and memory areas of one of the board's processes."""
    try:
        return {
            "fds": len(os.listdir(f"/proc/{pid}/fd")),
            "maps": Path(f"/proc/{pid}/maps").read_text().count("\n"),
        }
    except OSError:
        return {"fds": 0, "maps": 0}


def serve(chip: Chip, memory: int, listener: socket.socket, *, linger: float | None, gpu: str) -> NoReturn:
    """Be the driver process until it is time to go. Sockets are left to the exit: their end is the process's end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    server = Server(chip, memory, listener, linger=linger, gpu=gpu)
    server.run()
    os._exit(0)
