"""Command lines of ours in the documents: where they stand, and what runs them one after the other in one process."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
BEFORE = re.compile(r"[A-Z_0-9]+=\S* +|[^#]*? \| (?=tegrad )")
"""What may stand before a command: variables, what is piped into it."""
ENDS = re.compile(r"\s{2,}|\s#|\s[|&;<>]\s?|\s\(")
"""Where a command line in a document ends: notes behind it, a pipe, another command."""


def commands() -> Iterator[tuple[str, str]]:
    """Every command line of ours in a page's blocks: where, and its words."""
    for page in PAGES:
        for kind, block in BLOCK.findall(page.read_text()):
            if kind not in ("", "console", "sh"):
                continue
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                words = line.strip().removeprefix("$ ")
                while found := BEFORE.match(words):
                    words = words[found.end() :]
                if words.startswith("tegrad "):
                    yield page.name, ENDS.split(words)[0]


OWN_PROCESS = {
    "tegrad board exec ": None,
    "tegrad --install-completion": None,
    "tegrad klog --watch": r"\n",
    "tegrad serve ": r"serving at (\S+)",
}
"""Lines that become another program, need a shell around them, or go on until Ctrl-C: it comes when they say this."""
LIMIT_S = 300.0


def unknown_call() -> None:
    """What the kernel log of the board that TEGRAD_BOARD names has a line for, each time."""
    from tegrad.orin.client import BoardKernel
    from tegrad.uapi import ioctls, structs
    from tegrad.uapi.errors import DriverError

    kernel = BoardKernel(os.environ["TEGRAD_BOARD"])
    fd = kernel.open("/dev/nvmap")
    with suppress(DriverError):
        kernel.ioctl(fd, ioctls.NVMAP_IOC_GET_ID, structs.CreateHandle())
    kernel.close(fd)


def by_hand(line: str, begun: str | None, printed: IO[bytes]) -> int:
    """Run a line in a shell; what goes on by itself gets Ctrl-C when it has begun. The exit code."""
    shell = ["bash", "-c", f"{line}\nexit $?"]
    process = subprocess.Popen(shell, stdout=printed, stderr=printed, start_new_session=True)
    end = time.monotonic() + LIMIT_S
    try:
        while begun and process.poll() is None and time.monotonic() < end:
            if found := re.search(begun, Path(printed.name).read_text()):
                if found.groups():
                    urllib.request.urlopen(f"{found[1]}/health").close()
                os.killpg(process.pid, signal.SIGINT)
                break
            if line.startswith("tegrad klog"):
                unknown_call()
            time.sleep(0.2)
        return process.wait(max(0.0, end - time.monotonic()))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def in_process(line: str) -> int:
    """Run a line as the program does, without a process for it. The exit code."""
    from tegrad import cli

    kept, argv = dict(os.environ), sys.argv
    sys.argv = shlex.split(line)
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code) if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv = argv
        os.environ.clear()
        os.environ.update(kept)
    return 0


def main() -> None:
    """Run the lines of a JSON list (the first argument); of each a JSON list: it, its exit code, what it said."""
    answers = os.fdopen(os.dup(1), "w")
    for line in json.loads(sys.argv[1]):
        with tempfile.NamedTemporaryFile() as printed, Path("stdin").open("rb") as given:
            for file, fd in ((given, 0), (printed, 1), (printed, 2)):
                os.dup2(file.fileno(), fd)
            sys.stdin = os.fdopen(0, closefd=False)
            own = [begun for start, begun in OWN_PROCESS.items() if line.startswith(start)]
            try:
                code = by_hand(line, own[0], printed) if own else in_process(line)
            except BaseException:
                traceback.print_exc()
                code = -1
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            print(json.dumps([line, code, Path(printed.name).read_text(errors="replace")]), file=answers, flush=True)


if __name__ == "__main__":
    main()
