"""Programs whose calls are traced, and calls made up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tegrad.uapi.trace import Call

ROOT = Path(__file__).parents[2]

NULL = """
import os, sys
from tegrad.nv.kernel import pick_kernel
from tegrad.uapi import ioctls as io, structs as s
from tegrad.uapi.errors import DriverError

kernel = pick_kernel()
fd = kernel.open("/dev/null")
def create():
    try:
        kernel.ioctl(fd, io.NVMAP_IOC_CREATE, s.CreateHandle(size=4096))
    except DriverError:
        pass
create()
if not (child := os.fork()):
    create()
    os._exit(0)
os.waitpid(child, 0)
kernel.close(fd)
print("told")
sys.exit(41)
"""
"""Opens /dev/null, makes an ioctl that it refuses, does so again in a child, and ends with 41."""


def tegrad(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command of ours without a board."""
    variables = {k: v for k, v in os.environ.items() if k != "TEGRAD_BOARD"} | {"PYTHONPATH": str(ROOT)} | more
    line = [sys.executable, "-m", "tegrad", *words]
    return subprocess.run(line, env=variables, capture_output=True, text=True, timeout=120, check=False)


def call(
    name: str, written: dict[str, object] | None = None, *, result: int = 0, error: str = "", **asked: object
) -> Call:
    """A call that process 7 made."""
    return Call(name, asked, written or {}, None if error else result, error, 1e-6, pid=7, thread=7, start=100.0)
