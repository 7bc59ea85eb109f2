"""How one request travels to a board, and a process's session with one: against a board that is a thread here."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import itertools
import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tegrad.orin import board, wire
from tegrad.orin import connection as module
from tegrad.orin.board import BoardError
from tegrad.orin.connection import Connection, Me, call, connection
from tegrad.orin.wire import Message, Op

PRIVATE = "agx-orin-64gb:96MiB"
"""A private board that is never started."""
FACTS = {"pid": 4711, "chip": "agx-orin-64gb"}
numbers = itertools.count()

Answer = Callable[[socket.socket, Message], Message | None]
"""What a request is answered; None hangs up on this call."""


def serve(sock: socket.socket, answer: Answer, seen: list[Message]) -> None:
    """Answer requests on a socket until it ends."""
    with sock:
        while True:
            try:
                got = wire.receive(sock, with_reply=True)
            except OSError:
                return
            if got is None:
                return
            message, reply = got
            assert reply is not None
            seen.append(message)
            with socket.socket(fileno=reply) as back:
                if (made := answer(back, message)) is not None:
                    wire.send(back, made)


class SmallBoard:
    """Listens like a board, and answers a session's requests."""

    def __init__(self) -> None:
        self.address = b"\0tegrad-test-" + f"{os.getpid()}-{next(numbers)}".encode()
        self.seen: list[Message] = []
        self.sessions: list[socket.socket] = []
        self._ending = threading.Lock()
        self.answer: Answer = lambda back, message: Message(Op.DONE, value=8)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address)
        self._listener.listen(8)
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                session, _ = self._listener.accept()
            except OSError:
                return
            self.sessions.append(session)
            thread = threading.Thread(target=serve, args=(session.dup(), self._answer, self.seen), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, back: socket.socket, message: Message) -> Message | None:
        if message.op == Op.HELLO:
            return Message(Op.DONE, payload=json.dumps(FACTS).encode())
        return self.answer(back, message)

    def hang_up(self) -> None:
        """End the sessions; where two threads do, the second waits until they have ended."""
        with self._ending:
            for session in self.sessions:
                session.shutdown(socket.SHUT_RDWR)
                session.close()
            self.sessions.clear()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self.hang_up()
        for thread in self._threads:
            thread.join()

    def ops(self) -> list[int]:
        return [message.op for message in self.seen]


@pytest.fixture
def small() -> Iterator[SmallBoard]:
    made = SmallBoard()
    yield made
    made.close()


@pytest.fixture
def started(small: SmallBoard, monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """How boards were started, each of which is the small one."""
    starts: list[tuple[object, ...]] = []

    def start(chip: object, memory: int, **more: object) -> bytes:
        starts.append((chip, memory, more))
        return small.address

    monkeypatch.setattr(board, "start", start)
    return starts


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """A device fd, as this process makes one, and its driver's end."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        yield near, far


# -- one request -----------------------------------------------------------------------------------------------------


def nothing_came(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        sock.recv(1)
    except BlockingIOError:
        return True
    return False


def test_nothing_is_written_to_a_socket_that_is_no_device_fd_of_this_board(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    """One of another kind, or of the kind and made by another process."""
    made = [(pair, 1)]
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        made.append((socket.socketpair(socket.AF_UNIX, kind), os.getpid()))
    for (near, far), peer in made:
        with near, far:
            with pytest.raises(OSError, match=os.strerror(errno.ENOTTY)) as caught:
                call(near.fileno(), Message(Op.IOCTL), peer=peer)
            assert caught.value.errno == errno.ENOTTY
            assert nothing_came(far)


def test_a_socket_of_another_family_is_no_device_fd() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp, pytest.raises(OSError) as caught:  # noqa: PT011
        call(udp.fileno(), Message(Op.IOCTL), peer=os.getpid())
    assert caught.value.errno == errno.ENOTTY


def test_what_is_no_socket_is_none_and_stays_open() -> None:
    read, write = os.pipe()
    try:
        for peer in (os.getpid(), None):
            with pytest.raises(OSError, match=os.strerror(errno.ENOTSOCK)) as caught:
                call(write, Message(Op.IOCTL), peer=peer)
            assert caught.value.errno == errno.ENOTSOCK
        os.write(write, b"ours")
        assert os.read(read, 8) == b"ours"
    finally:
        os.close(read)
        os.close(write)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # nobody could close what was made when the signal came
def test_a_signal_in_the_midst_of_a_call_leaves_the_callers_fd_open(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exception comes when a socket object has just been made for the fd, and destroys that."""
    near, _ = pair
    made, seen = socket.socket.__init__, list[int]()

    def interrupted(self: socket.socket, *args: int, **more: int) -> None:
        made(self, *args, **more)
        if os.path.sameopenfile(self.fileno(), near.fileno()):
            seen.append(self.fileno())
            raise KeyboardInterrupt

    gc.collect()  # what tests before this one left open would be closed in its midst
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(socket.socket, "__init__", interrupted)
    with contextlib.suppress(KeyboardInterrupt):
        call(near.fileno(), Message(Op.IOCTL))
    monkeypatch.undo()
    gc.collect()
    assert len(seen) == 1
    os.fstat(near.fileno())
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("checked", [True, False])
def test_a_call_serves_the_driver_until_its_answer_comes(
    pair: tuple[socket.socket, socket.socket], checked: bool
) -> None:
    memory = ctypes.create_string_buffer(b"what the caller has", 32)
    copied: list[Message] = []
    seen: list[Message] = []

    def answer(back: socket.socket, message: Message) -> Message:
        for question in (
            Message(Op.COPY_IN, 19, ctypes.addressof(memory)),
            Message(Op.COPY_OUT, 0, ctypes.addressof(memory), b"told"),
        ):
            wire.send(back, question)
            got = wire.receive(back)
            assert got is not None
            copied.append(got[0])
        return Message(Op.DONE, value=message.value + 1)

    near, far = pair
    thread = threading.Thread(target=serve, args=(far.dup(), answer, seen), daemon=True)
    thread.start()
    gc.collect()  # what tests before this one left open would be closed in its midst
    before = len(os.listdir("/proc/self/fd"))
    done = call(near.fileno(), Message(Op.IOCTL, 7, 41), peer=os.getpid() if checked else None)
    assert (done.op, done.value) == (Op.DONE, 42)
    assert [(message.op, message.code) for message in seen] == [(Op.IOCTL, 7)]
    assert [message.payload for message in copied] == [b"what the caller has", b""]
    assert memory.value == b"told the caller has"
    near.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert len(os.listdir("/proc/self/fd")) == before - 1  # the driver's end; of ours none


def test_a_board_that_goes_in_the_middle_of_a_call_is_a_broken_pipe(pair: tuple[socket.socket, socket.socket]) -> None:
    near, far = pair
    thread = threading.Thread(target=serve, args=(far.dup(), lambda *_: None, []), daemon=True)
    thread.start()
    with pytest.raises(BrokenPipeError, match="the board is gone"):
        call(near.fileno(), Message(Op.IOCTL))
    near.shutdown(socket.SHUT_RDWR)
    thread.join()


# -- a session -------------------------------------------------------------------------------------------------------


def test_the_first_request_starts_a_private_board_and_says_who_we_are(
    small: SmallBoard, started: list[tuple[object, ...]]
) -> None:
    made = Connection(PRIVATE, linger=3.0, gpu="a:B")
    assert (made.pid, made.address, started) == (0, b"", [])
    made.sync()  # there is nothing to wait for
    for _ in range(2):
        assert made.call(Message(Op.EXISTS, payload=b"/dev/nvmap")).value == 8
    assert started == [(made.spec.chip, 96 << 20, {"linger": 3.0, "gpu": "a:B"})]
    assert (made.pid, made.facts, made.address) == (4711, FACTS, small.address)
    assert small.ops() == [Op.HELLO, Op.EXISTS, Op.EXISTS]
    me = {"token": Me.token, "pid": os.getpid(), "comm": Path("/proc/self/comm").read_text().strip()}
    assert json.loads(small.seen[0].payload) == me
    made.sync()
    assert small.ops()[-1] == Op.SYNC


def test_a_process_without_a_name_says_so(
    small: SmallBoard, started: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Path", lambda _: Path("/nowhere/comm"))
    Connection(PRIVATE).call(Message(Op.EXISTS))
    assert json.loads(small.seen[0].payload)["comm"] == "?"


def test_an_errno_of_the_board_is_raised(small: SmallBoard, started: list[tuple[object, ...]]) -> None:
    small.answer = lambda back, message: Message(Op.DONE, code=errno.ENODEV)
    with pytest.raises(OSError, match=os.strerror(errno.ENODEV)) as caught:
        Connection(PRIVATE).call(Message(Op.OPEN))
    assert caught.value.errno == errno.ENODEV
    assert small.ops() == [Op.HELLO, Op.OPEN]


def test_a_board_that_ended_is_reached_again_where_it_was(small: SmallBoard, started: list[tuple[object, ...]]) -> None:
    made = Connection(PRIVATE)
    made.call(Message(Op.EXISTS))
    small.hang_up()
    made.sync()  # a board that is gone has seen everything
    assert made.call(Message(Op.EXISTS)).value == 8
    assert small.ops() == [Op.HELLO, Op.EXISTS] * 2
    assert len(started) == 1


def test_a_board_that_is_gone_twice_is_an_error(small: SmallBoard, started: list[tuple[object, ...]]) -> None:
    made = Connection(PRIVATE)
    small.answer = lambda back, message: None
    with pytest.raises(BrokenPipeError):
        made.call(Message(Op.EXISTS))
    assert small.ops() == [Op.HELLO, Op.EXISTS] * 2
    small.answer = lambda back, message: Message(Op.DONE, value=9)
    assert made.call(Message(Op.EXISTS)).value == 9


@pytest.mark.parametrize("reused", [False, True])
def test_a_session_that_another_thread_closes_is_begun_anew(
    small: SmallBoard, started: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch, reused: bool
) -> None:
    """The board is gone, as that one has found, and this thread has fetched the session; its number may be a file's."""
    made, pair = Connection(PRIVATE), socket.socketpair
    made.call(Message(Op.EXISTS))
    closed: list[int] = []

    def close_late(*how: int) -> tuple[socket.socket, socket.socket]:
        monkeypatch.setattr(socket, "socketpair", pair)
        ends, sock = pair(*how), made._sock
        assert sock is not None
        closed.append(sock.fileno())
        made._forget(sock)
        if reused:
            os.dup2(null.fileno(), closed[-1])
        return ends

    with open(os.devnull) as null:
        monkeypatch.setattr(socket, "socketpair", close_late)
        assert made.call(Message(Op.EXISTS)).value == 8
        monkeypatch.setattr(socket, "socketpair", close_late)
        made.sync()
    assert len(closed) == 2
    assert small.ops() == [Op.HELLO, Op.EXISTS] * 2
    if reused:
        for fd in closed:
            os.close(fd)


def test_a_board_that_listens_no_more_is_started_anew(started: list[tuple[object, ...]], small: SmallBoard) -> None:
    made = Connection(PRIVATE)
    made._address = b"\0tegrad-test-nobody"
    assert made.call(Message(Op.EXISTS)).value == 8
    assert len(started) == 1


def test_a_board_that_ends_before_it_lets_us_in_is_started_anew(
    small: SmallBoard, started: list[tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listener has taken the connection, and is closed before anybody accepts it."""
    made, connect = Connection(PRIVATE), board.connect
    made._address = small.address + b"-ending"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as ending:
        ending.bind(made._address)
        ending.listen(1)
        late: list[socket.socket] = []

        def connect_late(address: bytes) -> socket.socket | None:
            sock = connect(address)
            ending.close()
            if sock is not None:
                late.append(sock)
            return sock

        monkeypatch.setattr(board, "connect", connect_late)
        assert made.call(Message(Op.EXISTS)).value == 8
    assert small.ops() == [Op.HELLO, Op.EXISTS]
    assert len(started) == 1
    assert [sock.fileno() == -1 for sock in late] == [True, False]  # the one that led nowhere is closed


def test_a_board_that_ends_at_once_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "start", lambda *_, **__: b"\0tegrad-test-nobody")
    with pytest.raises(BoardError, match="ended right after its start"):
        Connection(PRIVATE).call(Message(Op.EXISTS))


def test_a_shared_board_is_not_started(small: SmallBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BoardError, match="no board named 'nobody-has-this'"):
        Connection("nobody-has-this").call(Message(Op.EXISTS))
    monkeypatch.setattr(board, "named_address", lambda name: small.address)
    assert Connection("has-one").call(Message(Op.EXISTS)).value == 8


def test_stopping_returns_when_the_board_has_hung_up(small: SmallBoard, started: list[tuple[object, ...]]) -> None:
    made = Connection(PRIVATE)
    made.call(Message(Op.EXISTS))
    (session,) = small.sessions
    ended: list[bool] = []
    sock = made._sock
    assert sock is not None

    def end() -> None:
        ended.append(True)
        small.hang_up()

    def stop(back: socket.socket, message: Message) -> Message:
        session.send(b"more")  # whatever still comes is no end
        threading.Timer(0.05, end).start()
        return Message(Op.DONE)

    small.answer = stop
    made.stop()
    assert small.ops() == [Op.HELLO, Op.EXISTS, Op.STOP]
    assert ended
    assert (made._sock, sock.fileno()) == (None, -1)


def test_a_board_that_does_not_stop_is_named_with_its_process(
    small: SmallBoard, started: list[tuple[object, ...]]
) -> None:
    with pytest.raises(BoardError, match=f"board '{PRIVATE}' does not stop: kill process 4711"):
        Connection(PRIVATE).stop(0.01)


def test_a_child_leaves_the_session_to_its_parent(small: SmallBoard, started: list[tuple[object, ...]]) -> None:
    made = Connection(PRIVATE)
    made.forked()  # nothing to leave
    made.call(Message(Op.EXISTS))
    sock, lock = made._sock, made._lock
    assert sock is not None
    lock.acquire()  # as a thread of the parent did
    made.forked()
    assert sock.fileno() == -1
    assert made.call(Message(Op.EXISTS)).value == 8
    assert small.ops() == [Op.HELLO, Op.EXISTS] * 2


def test_a_child_is_another_client_with_sessions_of_its_own(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lock another thread held when it was forked."""
    made, token = Connection(PRIVATE), Me.token
    made._sock = pair[0]
    monkeypatch.setattr(module, "_connections", {PRIVATE: made})
    monkeypatch.setattr(module, "_connections_lock", threading.Lock())
    read, write = os.pipe()
    with module._connections_lock:
        if not (child := os.fork()):
            signal.alarm(60)  # a child that hangs is ended
            known = connection(PRIVATE) is made
            os.write(write, json.dumps([Me.token, known, made._sock is None]).encode())
            os._exit(0)
    os.close(write)
    told, known, left = json.loads(os.read(read, 1024) or b"[]")
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert (known, left) == (True, True)
    assert (len(told), len(token), told != token, Me.token) == (16, 16, True, token)
    assert int(told, 16) >= 0
    assert (made._sock, pair[0].fileno() >= 0) == (pair[0], True)


def test_a_process_has_one_connection_to_a_board_which_its_first_user_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_connections", {})
    first = connection(PRIVATE, linger=0.5, gpu="a:B")
    assert connection(PRIVATE) is first
    assert connection(PRIVATE, linger=0.5, gpu="a:B") is first
    for other in ({"linger": 0.25, "gpu": "a:B"}, {"linger": 0.5, "gpu": "a:C"}, {"linger": 0.5}, {"gpu": "a:B"}):
        with pytest.raises(BoardError, match=f"the board of '{PRIVATE}' was started in another way"):
            connection(PRIVATE, **other)  # type: ignore[arg-type]
    assert first.start == (0.5, "a:B")
    assert connection("agx-orin-64gb:97MiB") is not first
