"""`python -m tegrad.orin CHIP MEMORY LISTENER LINGER GPU`: become a board. `board.start` runs it."""

from __future__ import annotations

import os
import socket
import sys

from tegrad.hw.chips import CHIPS


def main(chip: str, memory: str, listener: str, linger: str, gpu: str) -> None:
    """Fork the driver process and end; the caller's listening socket is already bound, so it may connect at once.

    The board's own stderr goes nowhere unless TEGRAD_BOARD_DEBUG is set; what matters is in its kernel log. If
    TEGRAD_BOARD_LOG names a folder, the log is kept there in a file.
    """
    from tegrad.orin.klog import copy_file
    from tegrad.orin.server import serve

    folder = os.environ.get("TEGRAD_BOARD_LOG")
    log_copy = copy_file(folder, board_ends=linger != "forever") if folder else None
    if os.fork():
        os._exit(0)
    os.chdir("/")
    if not os.environ.get("TEGRAD_BOARD_DEBUG"):
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), 2)
    with socket.socket(fileno=int(listener)) as sock:
        os.set_inheritable(sock.fileno(), False)
        patience = None if linger == "forever" else float(linger)
        serve(CHIPS[chip], int(memory), sock, linger=patience, gpu=gpu, log_copy=log_copy)


if __name__ == "__main__":
    main(*sys.argv[1:])
