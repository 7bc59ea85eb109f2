"""`python -m tegrad.orin CHIP MEMORY LISTENER LINGER GPU`: become a board. `board.start` runs it."""

from __future__ import annotations

import os
import socket
import sys
from typing import NoReturn

from tegrad.errors import SettingError
from tegrad.hw.chips import CHIPS
from tegrad.orin.board import raise_limits


def check_settings() -> None:
    """SettingError for a value of TEGRAD_RACE or TEGRAD_L2 that means nothing.

    The GPU process reads them when it starts, after a client's first ioctl: then all that the client sees is ENODEV.
    """
    from tegrad.orin.race import Race

    Race.from_environment()
    if os.environ.get("TEGRAD_L2"):  # the module loads the compiler, which takes longer than a board's start
        from tegrad.orin.l2 import mode_from_environment

        mode_from_environment()


def _end(why: str) -> NoReturn:
    """Tell `board.start` which setting is wrong."""
    print(why, file=sys.stderr)
    sys.exit(SettingError.exit_code)


def main(chip: str, memory: str, listener: str, linger: str, gpu: str) -> None:
    """Fork the driver process and end; the caller's listening socket is already bound, so it may connect at once.

    The board's own stderr goes nowhere unless TEGRAD_BOARD_DEBUG is set; what matters is in its kernel log. If
    TEGRAD_BOARD_LOG names a folder, the log is kept there in a file.
    """
    from tegrad.orin.klog import copy_file
    from tegrad.orin.server import serve

    folder = os.environ.get("TEGRAD_BOARD_LOG")
    try:
        check_settings()
        log_copy = copy_file(folder, board_ends=linger != "forever") if folder else None
    except SettingError as error:
        _end(str(error))
    except OSError as error:
        _end(
            f"TEGRAD_BOARD_LOG={folder} takes no log: {error.strerror}; name a folder that can be written, or unset it"
        )
    if os.fork():
        os._exit(0)
    os.chdir("/")
    raise_limits()
    if not os.environ.get("TEGRAD_BOARD_DEBUG"):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 2)
    with socket.socket(fileno=int(listener)) as sock:
        os.set_inheritable(sock.fileno(), False)
        patience = None if linger == "forever" else float(linger)
        serve(CHIPS[chip], int(memory), sock, linger=patience, gpu=gpu, log_copy=log_copy)


if __name__ == "__main__":
    main(*sys.argv[1:])
