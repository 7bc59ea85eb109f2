"""The program `tegrad`; `python -m tegrad` is the same."""

import os
import signal

ENDED_BY_CTRL_C = 130


def entry() -> None:
    """Run the command. While it is imported, Ctrl-C ends the process without a word."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(ENDED_BY_CTRL_C))
    from tegrad.cli import entry as program

    program()


if __name__ == "__main__":
    entry()
