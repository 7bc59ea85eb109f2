"""`python -m tegrad.orin CHIP MEMORY LISTENER LINGER GPU`: become a board. `board.start` runs it."""

from __future__ import annotations

import os
import socket
import sys

from tegrad.hw.chips import CHIPS


def main(chip: str, memory: str, listener: str, linger: str, gpu: str) -> None:
    """Fork the driver process and end; the caller's listening socket is already bound, so it may connect at once."""
    if os.fork():
        os._exit(0)
    from tegrad.orin.server import serve

    with socket.socket(fileno=int(listener)) as sock:
        os.set_inheritable(sock.fileno(), False)
        serve(CHIPS[chip], int(memory), sock, linger=None if linger == "forever" else float(linger), gpu=gpu)


if __name__ == "__main__":
    main(*sys.argv[1:])
