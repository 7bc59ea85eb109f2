"""What a command is given: standard streams, Ctrl-C, the shell's limits. One sentence for what is wrong with them."""

from __future__ import annotations

import errno
import io
import os
import resource
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any, Final, TextIO

from tegrad.__main__ import ENDED_BY_CTRL_C
from tegrad.errors import TegradError

GRACE_S: Final = 1.0
"""Seconds that a command has to clean up after Ctrl-C: a file may block it, or code that looks at no signal."""
AGAIN_S: Final = 0.02
"""Seconds until a Ctrl-C that was dropped comes again: finalizers have ended by then."""

LEAST_ADDRESS_BYTES: Final = 512 << 20
"""Bytes of addresses below which numpy, LLVM or threads may fail anywhere (on two cores a command has loaded all it
needs with 170 MiB; each core more adds a stack and a buffer)."""
LEAST_OPEN_FILES: Final = 16
"""Open files below which tinygrad's own cache fails with a message of its own (a command on the CPU opens 13)."""
SPENT_ADDRESS_BYTES: Final = 32 << 20
"""Bytes of addresses that are as good as none: a thread's stack, a library."""


class OutputError(TegradError, OSError):
    """Standard output takes nothing any more."""

    def __init__(self, code: int) -> None:
        OSError.__init__(self, code, os.strerror(code))

    def __str__(self) -> str:
        remedy = "make room, or send it elsewhere" if self.errno == errno.ENOSPC else "send it elsewhere"
        return f"cannot write to standard output: {self.strerror}; {remedy}"


class _Output(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # whoever read it has seen enough
            raise
        except OSError as error:
            raise OutputError(error.errno or errno.EIO) from None


class _Errors(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:  # nobody can be told
            return len(data)


def prepare() -> None:
    """Streams whose errors can be told, and a Ctrl-C that ends what cannot be interrupted, too.

    Errors: SystemExit with a sentence where a limit, of addresses or files, is below what every command needs.
    """
    _fill()
    sys.stdout = _stream(_Output, 1, sys.stdout, buffered=True)
    sys.stderr = _stream(_Errors, 2, sys.stderr, buffered=False)
    warnings.showwarning = _told
    # With less, libraries would end or abort us without a word.
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < LEAST_ADDRESS_BYTES:
        raise SystemExit(f"tegrad: needs {LEAST_ADDRESS_BYTES >> 20} MiB of addresses: {_address_limit()}")
    if files_limit() < LEAST_OPEN_FILES:
        raise SystemExit(
            f"tegrad: needs {LEAST_OPEN_FILES} open files: `ulimit -n` allows {files_limit()} here: raise it"
        )
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # as it is under nohup, and in the background
        signal.signal(signal.SIGINT, _interrupted)
        sys.unraisablehook = _unraisable


def told(error: Exception) -> Exception:
    """Our own error for one that tinygrad raised when it read a variable, or that its compiler did."""
    if isinstance(error, TegradError | MemoryError):  # an import may need memory that there is none of
        return error
    from tegrad.nv import failing_compiler, wrong_setting

    return (isinstance(error, ValueError) and wrong_setting(error)) or failing_compiler(error) or error


def sentence(error: BaseException) -> str | None:
    """The cause and the next step, where the machine made Python raise; None for whatever is a fault of ours."""
    match error:
        case TegradError():
            return str(error)
        case MemoryError():
            said = f"out of memory: {error}" if str(error) else "out of memory"
            return f"{said}: {_address_limit() or 'choose a smaller model or context'}"
        case OSError():
            return _of_system(error)
        case ImportError() if (error.name or "tegrad").partition(".")[0] != "tegrad":
            from tegrad.installed import pip_install

            return f"the package {error.name} cannot be loaded ({error.msg}): {_address_limit() or pip_install()}"
    return f"out of memory: {_address_limit()}" if _addresses_spent() else None


def _of_system(error: OSError) -> str:
    what = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
    match error.errno:
        case errno.EMFILE | errno.ENFILE:
            return f"{what}: {files_limit()} are allowed here: raise `ulimit -n`"
        case errno.ENOMEM:
            return f"{what}: {_address_limit() or 'end other programs'}"
        case errno.ENOSPC | errno.EDQUOT:
            return f"{what}: make room on the disk"
        case errno.EEXIST | errno.EISDIR | errno.ENOTDIR:
            return f"{what}: choose another place"
    return f"{what}: run tegrad doctor"


def files_limit() -> int:
    """How many files this process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _address_limit() -> str:
    """What to do about a limit of addresses; "" where there is none."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if limit == resource.RLIM_INFINITY else f"`ulimit -v` allows {limit >> 20} MiB here: raise it"


def _addresses_spent() -> bool:
    """Whether this process has come so near to its limit of addresses that whatever failed may have failed by it."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return False
    with open("/proc/self/status") as lines:
        peak = next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmPeak:")), 0)
    return peak + SPENT_ADDRESS_BYTES > limit


def _fill() -> None:
    """Open /dev/null in the place of closed streams, so that no other file gets their numbers; programs that we
    start or become find them closed, as they were."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)  # takes the lowest number; to read from it is an error


def _stream(kind: type[io.FileIO], fd: int, known: Any, *, buffered: bool) -> Any:
    """A text stream to an fd in place of Python's own."""
    encoding, errors = (known.encoding, known.errors) if known is not None else ("utf-8", "backslashreplace")
    lines = not buffered or (known is not None and known.line_buffering)
    raw = kind(fd, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding=encoding, errors=errors, line_buffering=lines)


def _told(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """A warning as one line, like all that we say, without the place in the source that gave it."""
    print(f"tegrad: {message}", file=sys.stderr)


def _interrupted(number: int, frame: FrameType | None) -> None:
    """The first Ctrl-C is Python's KeyboardInterrupt, with a limit to what it may take; the second one ends us."""
    signal.signal(number, lambda *_: os._exit(ENDED_BY_CTRL_C))
    end = threading.Timer(GRACE_S, os._exit, (ENDED_BY_CTRL_C,))
    end.daemon = True
    end.start()
    raise KeyboardInterrupt


def _unraisable(dropped: sys.UnraisableHookArgs) -> None:
    """A Ctrl-C that fell into a finalizer, where Python drops what is raised: it comes once more, after that."""
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)
        return
    signal.signal(signal.SIGINT, _interrupted)
    again = threading.Timer(AGAIN_S, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
    again.daemon = True
    again.start()
