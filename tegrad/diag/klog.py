"""What the kernel log says about the GPU: lines sorted into errors, warnings, known harmless ones and information.

`KernelLog` reads, `expect_clean` is the checker for tests and scripts, a context manager and a decorator alike:

    with expect_clean():
        model.generate()          # KernelLogError if the drivers logged an error meanwhile

    @expect_clean(allow=r"sked exception")
    def test_a_launch_that_must_fail(): ...
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ContextDecorator
from enum import StrEnum
from types import TracebackType
from typing import NamedTuple, Self

from tegrad.errors import TegradError
from tegrad.nv.kernel import CTRL_NODE, DESKTOP_NODE, pick_kernel
from tegrad.uapi.kernel import Kernel
from tegrad.uapi.kmsg import LogRecord, records

POLL_S = 0.1
LEVEL_ERROR, LEVEL_WARNING = 3, 4  # syslog levels


class Severity(StrEnum):
    """How much a line matters."""

    ERROR = "error"
    WARNING = "warning"
    HARMLESS = "harmless"
    INFO = "info"


OURS = re.compile(
    r"\bnvgpu\b|\bnvmap\b|\bgk20a\b|17000000\.gpu|\bhost1x\b|arm-smmu.*17000000|^board: |\bNVRM\b", re.IGNORECASE
)
"""What makes a line one of the GPU's: its drivers, its SMMU faults, the board's own notes, the desktop driver."""

MEANINGS: Mapping[Severity, Mapping[str, str]] = {
    Severity.HARMLESS: {  # a working client causes these (L4T r36.4.3, seen on AGX Orin)
        r"all allocations must have a tag": "an nvmap client allocates without a tag; once per client",
        r"gr_init_commit_rtv_cb": "an address range above the graphics limit; compute does not care",
        r"error reporting is not supported": "no safety services on this board",
        r"CE engine not idle": "follows an earlier error",
        r"unknown nvmap_ioc": "an ioctl that this nvmap does not have was tried",
        r"unrecognized \w+ gpu ioctl": "an ioctl that this nvgpu does not have was tried",
        r"setup_bind:\d+ .*fail\s*$": "a channel's set-up was refused; the client got the errno",
    },
    Severity.ERROR: {  # the GPU or the driver gave something up
        r"\[MMU FAULT\]|page fault|mmu fault": "an address that is not mapped, or not for that access",
        r"arm-smmu.*(fault|error)": "an access that the system MMU refused",
        r"sm machine check|sm hww|sm err state": "a kernel did what an SM refuses",
        r"sked exception": "a launch descriptor (QMD) that the scheduler refuses",
        r"class error|invalid class|illegal (notify|method)": "a method that the engine does not have",
        r"PBDMA intr|pbdma_intr_": "a broken pushbuffer or GPFIFO entry",
        r"semaphore acquire timeout": "a semaphore that nobody released",
        r"ctxnotvalid": "engine methods on a channel without an object context",
        r"ce launch error|ce: inst": "a copy that the engine refuses",
        r"ctxsw timeout|unbind failed": "a context that did not leave the engine in its time",
        r"job on channel \d+ timed out": "the channel's watchdog expired",
        r"error notifier set to \d+": "a channel died; the code is its error notifier's",
        r"GR exception": "the graphics and compute engine stopped a channel",
        r"quiesce": "the GPU does not come back; reboot",
        r"^board: GPU reset": "the emulated GPU died and was started again",
        r"\bXid\b": "the desktop driver reports a GPU error",
    },
    Severity.WARNING: {
        r"references left": "a channel is closed while something still uses it",
        r"out of memory|alloc\w* fail": "the driver found no memory",
    },
}
"""How bad lines are that match a pattern, and what they mean to a user. Patterns are searched in order; a line that
none matches is judged by its `[ERR]` mark or its level."""


class LogLine(NamedTuple):
    """A record of the GPU's, how much it matters, and what it means ("" where only its level is known)."""

    record: LogRecord
    severity: Severity
    meaning: str

    def __str__(self) -> str:
        return f"[{self.record.us / 1e6:12.6f}] {self.record.text}"


class KernelLogError(TegradError):
    """The drivers logged an error where none was expected."""


def classify(record: LogRecord) -> LogLine | None:
    """The line that a record is, or None where it is not the GPU's."""
    if not OURS.search(record.text):
        return None
    for severity, rows in MEANINGS.items():
        for pattern, meaning in rows.items():
            if re.search(pattern, record.text, re.IGNORECASE):
                return LogLine(record, severity, meaning)
    if record.text.startswith("board: "):
        return LogLine(record, Severity.INFO, "a note of the emulation")
    marked = "[ERR]" in record.text or ("[INFO]" not in record.text and record.level <= LEVEL_ERROR)
    if marked:
        return LogLine(record, Severity.ERROR, "")
    return LogLine(record, Severity.WARNING if record.level == LEVEL_WARNING else Severity.INFO, "")


class KernelLog:
    """The GPU's lines of one kernel's log. `kernel` is the one that the NV device would use, unless given."""

    def __init__(self, kernel: Kernel | None = None) -> None:
        self._kernel = kernel or pick_kernel()
        self._next = 0
        self.records = 0
        """Read so far, whosever they are."""
        self.lines = 0
        """The GPU's among them."""

    def new(self) -> list[LogLine]:
        """Lines since the last call; all that are kept, the first time. DriverError where the log may not be read."""
        return list(self._lines())

    @property
    def driver(self) -> bool:
        """Whether a GPU's driver is there that could write to it."""
        return any(self._kernel.exists(node) for node in (CTRL_NODE, DESKTOP_NODE))

    def watch(self) -> Iterator[LogLine]:
        """Lines as they come, without end."""
        while True:
            yield from self._lines(follow=True)
            time.sleep(POLL_S)  # a board's log is a copy, of which there is a newer one

    def _lines(self, *, follow: bool = False) -> Iterator[LogLine]:
        for record in records(self._kernel, self._next, follow=follow):
            self._next = record.sequence + 1
            self.records += 1
            if line := classify(record):
                self.lines += 1
                yield line


class expect_clean(ContextDecorator):
    """Raise KernelLogError at the end if the drivers logged an error meanwhile, whatever else went wrong.

    `allow` is a regular expression for error lines that are expected. Inside a `with`, `lines` grows by `collect()`.
    An exception of the block is not replaced: the lines are added to it as a note.
    """

    def __init__(self, kernel: Kernel | None = None, *, allow: str | None = None) -> None:
        self._given = kernel
        self._allow = re.compile(allow) if allow else None
        self.lines: list[LogLine] = []

    def _recreate_cm(self) -> expect_clean:
        """A decorated function gets a checker of its own for each call."""
        return expect_clean(self._given, allow=self._allow.pattern if self._allow else None)

    def __enter__(self) -> Self:
        self._log = KernelLog(self._given)
        self._log.new()
        return self

    def collect(self) -> list[LogLine]:
        """Every line since the block began."""
        self.lines += self._log.new()
        return self.lines

    def unexpected(self) -> list[LogLine]:
        """The error lines so far that are not allowed."""
        return [
            line
            for line in self.collect()
            if line.severity is Severity.ERROR and not (self._allow and self._allow.search(line.record.text))
        ]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        bad = self.unexpected()
        if not bad:
            return
        text = "\n".join(f"  {line}" + (f"  ({line.meaning})" if line.meaning else "") for line in bad)
        if error is not None:
            error.add_note(f"meanwhile the kernel log said:\n{text}")
        else:
            raise KernelLogError(f"the kernel log has {len(bad)} error lines, of which this is the first:\n{text}")
