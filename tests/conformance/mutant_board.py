"""A board that can be mutated while it runs: an ordinary one whose driver and GPU take one more request.

`python mutant_board.py CHIP MEMORY LISTENER` becomes its driver process, as `python -m tegrad.orin` does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from mutation import Applied, Mutant, mutations, pack

from tegrad.conformance.rule import Rule
from tegrad.conformance.run import PATIENCE_S, Outcome, Overdue, judge, limited
from tegrad.hw.chips import CHIPS
from tegrad.orin import board
from tegrad.orin.client import BoardKernel, board_log, board_status, board_stop
from tegrad.orin.wire import Message

MUTATE = 200
CHIP = "agx-orin-64gb"
MEMORY = 6 << 30
LINGER_S = 600.0
ANSWER_S = 20.0
"""How long a board that works may take to say how it is, or to end."""
CLIENT_SIDE = ("tegrad.orin.client.", "tegrad.orin.caller.")
"""Modules of the board that run in the client's process."""


class MutableBoard:
    """A board of this process, with its Kernel; `mutate` changes it, `stop` ends it."""

    def __init__(self) -> None:
        self.name = ""
        self._starts = itertools.count()
        self._here = Applied()
        self._start()

    def _start(self) -> None:
        self.name = f"mutable-{os.getpid()}-{next(self._starts)}"  # the last one may still be on its way out
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with listener:
            listener.bind(board.named_address(self.name))
            listener.listen(8)
            here = str(Path(__file__).parent)
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, *map(os.path.abspath, sys.path)])}
            subprocess.run(
                [sys.executable, __file__, CHIP, str(MEMORY), str(listener.fileno())],
                pass_fds=(listener.fileno(),),
                env=environment,
                check=True,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
            )
        self.kernel = BoardKernel(self.name)
        self.kernel.exists("/dev/nvmap")  # a session of ours: a board ends with the last of them

    def mutate(self, mutant: Mutant = ()) -> None:
        """Apply a mutant in every process of the board, in place of the one applied before. ValueError if nowhere."""
        packed = pack(mutant)
        applied = self._here.change(packed, only=CLIENT_SIDE)
        try:
            answer = self.kernel.connection.call(Message(MUTATE, payload=packed.encode()))
        except (OSError, board.BoardError):  # the last mutant was the board's end
            self._start()
            answer = self.kernel.connection.call(Message(MUTATE, payload=packed.encode()))
        failure, elsewhere = json.loads(answer.payload)
        if failure or applied + elsewhere < len(mutations(mutant)):
            self.mutate()
            raise ValueError(failure or f"{mutant} names nothing that the board has loaded")

    def judge(self, rule: Rule, *, patience: float = PATIENCE_S) -> Outcome:
        """What comes of a rule on the board as it is now."""
        return judge(rule, self.kernel, limit=30, patience=patience)

    def sound(self) -> bool:
        """Whether the board is as good as new: it answers, nothing open, nothing held, the GPU alive."""
        try:
            with limited(ANSWER_S):
                status = board_status(self.name)
        except (OSError, board.BoardError, Overdue):
            return False
        return not status["files"] and not any(status["counts"].values()) and status["gpu"] is not None

    def ready(self) -> None:
        """A new board in place of one that is not as good as new: what a test did to it is not the next one's."""
        if not self.sound():
            self.restart()

    def restart(self) -> None:
        """End the board and start it afresh."""
        self.stop()
        self._start()

    def log(self) -> list[str]:
        """The board's kernel log."""
        return board_log(self.name)

    def stop(self) -> None:
        """End the board, by force if it does not hear."""
        self._here.change("[]")
        pid = self.kernel.connection.pid
        try:
            with limited(ANSWER_S):
                board_stop(self.name)
        except Overdue:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        except (OSError, board.BoardError):
            pass  # it is gone already


def main(chip: str, memory: str, listener: str) -> None:
    """Fork the driver process and end."""
    from typing import Any

    from tegrad.orin import sessions
    from tegrad.orin.server import serve
    from tegrad.orin.sockets import Session, Sockets
    from tegrad.orin.wire import Op

    if os.fork():
        os._exit(0)
    applied = Applied()

    def mutate(sockets: Sockets, session: Session, message: Message) -> sessions.Answer:
        try:
            here = applied.change(message.payload.decode())
            there = sockets.driver.state.tell_gpu("mutate", message.payload.decode())
            answer: list[Any] = ["", here + (there or 0)]
        except Exception as error:
            answer = [f"{type(error).__name__}: {error}", 0]
        return Message(Op.DONE, payload=json.dumps(answer).encode()), None

    calls: Any = sessions.SESSION_CALLS
    calls[MUTATE] = mutate
    os.chdir("/")
    if not os.environ.get("TEGRAD_BOARD_DEBUG"):
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, 1)
        os.dup2(null, 2)
    with socket.socket(fileno=int(listener)) as sock:
        os.set_inheritable(sock.fileno(), False)
        serve(CHIPS[chip], int(memory), sock, linger=LINGER_S, gpu="mutant_gpu:MutantGpu")


if __name__ == "__main__":
    main(*sys.argv[1:])
