"""Runs in every process of a test, by a .pth file: which functions were called, and which kernels' sources were read.

Appends `FILE<tab>LINE` to the file that TEGRAD_CALLS names when a function is first called; LINE is where it begins, 0
for a source that was read. Each line is written at once, since the board's processes end by signals.
"""

import os
import sys
import threading
from types import CodeType, FrameType
from typing import Any


def install(path: str, root: str) -> None:
    """Begin to record calls of functions below `root`."""
    seen: set[CodeType] = set()
    read: set[str] = set()

    def tell(file: str, line: int) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            os.write(fd, f"{os.path.relpath(file, root)}\t{line}\n".encode())
        finally:
            os.close(fd)

    def called(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if code not in seen:
            seen.add(code)
            if code.co_filename.startswith(root):
                tell(code.co_filename, code.co_firstlineno)

    def opened(event: str, arguments: tuple[Any, ...]) -> None:
        path = str(arguments[0]) if event == "open" else ""
        if path.endswith((".cu", ".cuh")) and path not in read:
            read.add(path)
            tell(os.path.abspath(path), 0)

    sys.addaudithook(opened)
    threading.settrace(called)
    sys.settrace(called)


if "TEGRAD_CALLS" in os.environ:
    install(os.environ["TEGRAD_CALLS"], os.environ["TEGRAD_CALLS_ROOT"])
