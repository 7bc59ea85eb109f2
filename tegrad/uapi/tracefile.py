"""What a trace looks like on disk: one JSON object a line, written by every process that makes calls.

A line is a call (`Call`'s fields), or says who a process is: `{"process": pid, "parent": pid, "command": [...]}`. Lines
are appended whole, so that processes and threads share a file, and a reader may follow it.
"""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict

from tegrad.errors import SettingError
from tegrad.uapi.trace import Call

DRIVER_FILES = ("/dev/nvgpu", "/dev/nvhost", "/dev/nvmap", "/dev/nvidia", "/dev/host1x-fence")
"""What the paths of the GPU's drivers begin with."""


def append(path: str, line: str) -> None:
    """Append a line to a trace, which must be there; one that is gone or full is nothing that the program should see.

    No fd is kept: the program may close all that it does not know, and use their numbers again.
    """
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)


def sink(path: str) -> Callable[[Call], None]:
    """Where a Tracer of this process, and of those that it forks, puts its calls. The file is made if it is not there.

    SettingError where it cannot be.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise SettingError(f"the trace {path} cannot be written: {error.strerror}") from None
    told = [0]

    def write(call: Call) -> None:
        if told[0] != call.pid:
            told[0] = call.pid
            append(path, json.dumps({"process": call.pid, "parent": os.getppid(), "command": sys.orig_argv}))
        append(path, to_json(call))

    return write


def to_json(call: Call) -> str:
    """A call as a line."""
    return json.dumps(asdict(call), default=lambda value: value.hex())


def from_json(line: Mapping[str, object]) -> Call:
    """A call from a line that was parsed. TypeError, AttributeError where it is none."""
    values = dict(line)
    for part in ("arguments", "written"):
        fields = values[part]
        assert isinstance(fields, dict)
        values[part] = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    fds = values.get("fds", {})
    assert isinstance(fds, dict)
    values["fds"] = {int(fd): what for fd, what in fds.items()}
    return Call(**values)  # type: ignore[arg-type]
