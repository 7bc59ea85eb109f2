"""What a client process may ask of the board itself: open nodes, check a mapping, status, log, injection, stop."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from tegrad.orin import nvmap, wire
from tegrad.orin.buffers import Buffer
from tegrad.orin.ctrl import CtrlFile, mmap_registers_check
from tegrad.orin.inject import Injection
from tegrad.orin.klog import Entry
from tegrad.orin.nodes import NODES
from tegrad.orin.nvmap import NvmapFile
from tegrad.orin.sockets import Session, Sockets
from tegrad.orin.steps import Errno, Process, needed
from tegrad.orin.wire import Message, Op


class Closes(Protocol):
    """Something to close once the answer that carries it is sent."""

    def close(self) -> None: ...


Answer = tuple[Message, Closes | None]
DONE: Answer = (Message(Op.DONE), None)


def hello(sockets: Sockets, session: Session, message: Message) -> Answer:
    """Who the process is; what the board is."""
    session.process = Process(**json.loads(message.payload))
    driver = sockets.driver.state
    facts = {
        "pid": os.getpid(),
        "chip": driver.chip.name,
        "memory": driver.memory.limit,
        "buffers": driver.memory.name,
    }
    return Message(Op.DONE, payload=json.dumps(facts).encode()), None


def open_node(sockets: Sockets, session: Session, message: Message) -> Answer:
    """A device fd."""
    sockets.driver.state.calls["open"] += 1
    process = needed(session.process, errno.EPROTO)
    file = sockets.driver.open(message.payload.decode(), process)
    try:
        end = sockets.give(file)
    except Errno:
        file.release()
        raise
    return Message(Op.DONE, fds=[end.fileno()]), end


def exists(sockets: Sockets, session: Session, message: Message) -> Answer:
    """Whether there is such a node."""
    return Message(Op.DONE, value=int(message.payload.decode() in NODES)), None


def check_mapping(sockets: Sockets, session: Session, message: Message) -> Answer:
    """The checks of mmap on any of the board's fds; the client maps what passes by itself."""
    sockets.driver.state.calls["mmap"] += 1
    fd = needed(message.fds[0], errno.EBADF)
    held: list[Buffer] = []
    found = sockets.resolve(fd, held)
    try:
        if isinstance(found, CtrlFile):
            # The registers have no memory here; a client that wants them asks for the doorbell.
            mmap_registers_check(found, message.code, message.value)
        if not isinstance(found, Buffer):
            raise Errno(errno.EPERM if isinstance(found, NvmapFile) else errno.ENODEV)
        nvmap.mmap_check(found, fd, message.code, message.value, write=message.payload == b"w")
    finally:
        for buffer in held:
            buffer.drop()
    return DONE


def sync(sockets: Sockets, session: Session, message: Message) -> Answer:
    """Nothing: every hang-up before this message is completed by now."""
    return DONE


def status(sockets: Sockets, session: Session, message: Message) -> Answer:
    """Everything that is counted."""
    return _document(board_status(sockets))


def log(sockets: Sockets, session: Session, message: Message) -> Answer:
    """The kernel log from a sequence number on."""
    entries = sockets.driver.state.log.since(message.value)
    if message.code:
        return _file("".join(Entry(*entry).record() for entry in entries).encode())
    return _document(entries)


def inject(sockets: Sockets, session: Session, message: Message) -> Answer:
    """Arm injection rules."""
    rules = [Injection(**rule) for rule in json.loads(message.payload)]
    return Message(Op.DONE, value=sockets.driver.inject.arm(rules)), None


def stop(sockets: Sockets, session: Session, message: Message) -> Answer:
    """End the board after this answer."""
    sockets.stopping = True
    return DONE


def keep(sockets: Sockets, session: Session, message: Message) -> Answer:
    """Last as long as a process."""
    sockets.keep(os.dup(needed(message.fds[0], errno.EBADF)))
    return DONE


SESSION_CALLS: Mapping[int, Callable[[Sockets, Session, Message], Answer]] = {
    Op.HELLO: hello,
    Op.OPEN: open_node,
    Op.EXISTS: exists,
    Op.MMAP_CHECK: check_mapping,
    Op.SYNC: sync,
    Op.STATUS: status,
    Op.LOG: log,
    Op.INJECT: inject,
    Op.STOP: stop,
    Op.KEEP: keep,
}


def carry_out(sockets: Sockets, session: Session, message: Message) -> Answer:
    """One request of a session. A client that sends nonsense gets EPROTO and harms nobody."""
    try:
        return SESSION_CALLS[message.op](sockets, session, message)
    except Errno as refusal:
        return Message(Op.DONE, refusal.number), None
    except Exception as nonsense:
        sockets.driver.state.log.board(f"a client sent nonsense: {type(nonsense).__name__}: {nonsense}")
        return Message(Op.DONE, errno.EPROTO), None
    finally:
        message.close_fds()


def _document(content: object) -> Answer:
    """An answer of any length, as a file."""
    return _file(json.dumps(content).encode())


def _file(content: bytes) -> Answer:
    """The same of bytes."""
    file = os.fdopen(wire.to_file(content), "rb")
    return Message(Op.DONE, fds=[file.fileno()]), file


def board_status(sockets: Sockets) -> dict[str, Any]:
    """The board, its clients, and everything it counts."""
    driver = sockets.driver.state
    kinds: dict[str, int] = {}
    for file in sockets.files.values():
        kinds[file.kind] = kinds.get(file.kind, 0) + 1
    processes = {f.process.token: f.process for f in sockets.files.values()}
    processes |= {s.process.token: s.process for s in sockets.sessions.values() if s.process}
    pids = {"driver": os.getpid(), "gpu": driver.gpu.pid}
    return {
        "chip": driver.chip.name,
        "memory_limit": driver.memory.limit,
        "linger": sockets.linger,
        "pids": pids,
        "clients": [asdict(p) for p in processes.values()],
        "sessions": len(sockets.sessions),
        "files": kinds,
        "doorbell_mappings": len(sockets.leases),
        "counts": driver.counts(),
        "calls": dict(sorted(driver.calls.items())),
        "gpu": driver.tell_gpu("stats"),
        "host": {name: _host_counts(pid) for name, pid in pids.items()},
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
