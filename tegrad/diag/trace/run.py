"""Running a command and following the trace that it writes."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tegrad.errors import TegradError

LOOK_S = 0.05
"""How long what was written may wait to be seen."""


class NoCommand(TegradError):
    """The command cannot be run; the shell's code for that."""

    exit_code = 127


class Traced:
    """A command that runs, with the trace that it writes to the file that `variable` names.

    The trace ends with the command, though processes that it started may go on. `code` is then its exit code, 128 and
    the signal's number if one ended it.
    """

    def __init__(self, command: Sequence[str], variable: str, more: Mapping[str, str]) -> None:
        self.command, self.variable, self.more = command, variable, more
        self.code = 0

    def lines(self) -> Iterator[str]:
        """The trace's lines as they are written. NoCommand."""
        program = shutil.which(self.command[0])
        if program is None:
            raise NoCommand(f"there is no program {self.command[0]!r}: give a path, or a name that PATH finds")
        with tempfile.TemporaryDirectory(prefix="tegrad-trace-") as folder:
            path = Path(folder) / "calls"
            path.touch()
            variables = {**os.environ, **self.more, self.variable: str(path)}
            try:
                process = subprocess.Popen([program, *self.command[1:]], env=variables)
            except OSError as error:
                raise NoCommand(f"{program} cannot be run: {error.strerror}") from None
            with _signals_for(process), open(path, "rb") as file:
                yield from _follow(file, process)
            self.code = 128 - process.returncode if process.returncode < 0 else process.returncode


@contextmanager
def _signals_for(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Meanwhile Ctrl-C is left to the command, which the terminal sends it to as well; SIGTERM and SIGHUP end it."""
    before = {signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        before[number] = signal.signal(number, lambda *_: process.terminate())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:  # nobody reads any more
            with suppress(ProcessLookupError):
                process.terminate()
            process.wait()


def _follow(file: BinaryIO, process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Whole lines of a file that grows, until the process has ended and all is read."""
    ended, rest = False, b""
    poll = select.poll()
    pidfd = os.pidfd_open(process.pid)
    poll.register(pidfd, select.POLLIN)
    try:
        while not ended:
            ended = bool(poll.poll(LOOK_S * 1000))
            *whole, rest = (rest + file.read()).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)
    finally:
        os.close(pidfd)
    process.wait()
