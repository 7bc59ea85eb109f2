"""What the user sees when the GPU fails: one exception with kernel, buffer and address where they are known.

A fault kills the channel group: nothing un-faults it. The way on is `tegrad.nv.reopen()`, in the same process: it
closes the device and opens a new one. What belonged to the old one (tensors, programs, recorded graphs) raises
DeviceClosed.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tegrad.errors import TegradError
from tegrad.hw.faults import NOTIFIER_TEXT, RM_ERROR_TEXT, WarpEsr
from tegrad.nv.kernlog import FaultReport

WARP_ESR_CODE = 0xFFFF

FREED_REMEMBERED = 256
"""Buffers that a fault in freed memory can be told by."""


class DeviceClosed(TegradError, RuntimeError):
    """Something of a device that was closed is used: a tensor, a program, a recorded graph."""


class NoDevice(TegradError, RuntimeError):
    """No driver on this machine answers for an NV device; the text has one reason for each that was tried."""


class UnsupportedDriver(NoDevice):
    """This machine's driver is of a release that tegrad does not drive, or was never tried on (uapi.releases)."""


class UnsupportedBuffer(TegradError, RuntimeError):
    """Memory of a kind that this device cannot work on."""


class WaitTimeout(TegradError, RuntimeError):
    """The GPU made no progress for the time a wait allows, and reports no error."""


@dataclass(frozen=True, slots=True)
class SmError:
    """The exception one SM reports: its ESR words, the warp's program counter, and the address it accessed, if told."""

    sm: int
    global_esr: int
    warp_esr: int
    pc: int
    address: int | None = None

    @property
    def reason(self) -> str:
        """The warp error in words."""
        code = self.warp_esr & WARP_ESR_CODE
        known = code in WarpEsr._value2member_map_
        return WarpEsr(code).name.lower().replace("_", " ") if known else f"warp error {code:#x}"


class DeviceFault(TegradError, RuntimeError):
    """The GPU stopped the work of this process.

    `code` is the error notifier's, or None where only the driver's time-out flag or a debugger tells. `kernel` is the
    name of the kernel that failed: by its program counter, by the log, or because no other was in flight; `in_flight`
    the kernels that were submitted and not finished, oldest first; `address` where it failed, as far as the driver
    tells, and `buffer` which allocation that address lies in or next to; `thread` the thread that did it, where
    something below tells; `sm_errors` what the SMs report; `log` the driver's lines about this fault; `report` what a
    desktop driver's debugger said when a wait had ended.
    """

    def __init__(
        self,
        code: int | None,
        *,
        kernel: str | None = None,
        in_flight: Sequence[str] = (),
        buffer: str | None = None,
        sm_errors: Sequence[SmError] = (),
        found: FaultReport | None = None,
        report: str = "",
    ) -> None:
        self.code = code
        self.kernel = kernel
        self.in_flight = tuple(in_flight)
        self.address = fault_address(found, sm_errors)
        self.buffer = buffer
        self.thread = found.thread if found else None
        self.sm_errors = tuple(sm_errors)
        self.log = found.lines if found else ()
        self.report = report
        self._reason = found.reason if found else ""
        super().__init__(self._text())

    def _what(self) -> str:
        """The kind of fault: by its code, else by what there is besides."""
        if self.code is not None:
            return NOTIFIER_TEXT.get(self.code) or RM_ERROR_TEXT.get(self.code, f"error {self.code}")
        if self.report:
            return self.report.replace("\n", ", ")
        if self.sm_errors:
            return "SM exception"
        return "MMU fault" if self.address is not None else "the driver gave the channel up"

    def _text(self) -> str:
        reasons = sorted({f"SM {e.sm}: {e.reason}" for e in self.sm_errors if e.warp_esr & WARP_ESR_CODE})
        parts = [f"GPU fault: {self._what()}", *([self._reason] if self._reason else []), *reasons]
        if self.address is not None:
            parts.append(f"address {self.address:#x}" + (f" ({self.buffer})" if self.buffer else ""))
        if self.kernel is not None:
            parts.append(f"in kernel {self.kernel}")
        elif self.in_flight:
            shown = ", ".join(self.in_flight[:3])
            more = len(self.in_flight) - 3
            parts.append(f"in flight: {shown}" + (f" and {more} more" if more > 0 else ""))
        if self.thread is not None:
            parts.append(self.thread)
        return "; ".join(parts) + ": go on with tegrad.nv.reopen(); dmesg shows the driver's report"


class DriverGone(DeviceFault):
    """The driver does not answer any more, and nothing of ours is left in it."""

    def __init__(self, *, emulated: bool, in_flight: Sequence[str] = ()) -> None:
        self._emulated = emulated
        super().__init__(None, in_flight=in_flight)

    def _text(self) -> str:
        if self._emulated:
            return (
                "the emulated board is gone, since its process was ended, by somebody or for lack of memory: start the "
                "program again; TEGRAD_BOARD_DEBUG=1 shows what the board says"
            )
        return "the GPU is gone, since its driver is shutting down or gave up on it: see dmesg, then reboot"


def fault_address(found: FaultReport | None, errors: Iterable[SmError]) -> int | None:
    """Where it failed: by the report, else by the first SM that tells."""
    if found is not None and found.address is not None:
        return found.address
    return next((error.address for error in errors if error.address is not None), None)


Place = tuple[int, int]
"""GPU address and size of a buffer, in bytes."""


def describe_address(address: int, buffers: Collection[Place], freed: Iterable[Place]) -> str | None:
    """Which buffer an address lies in, or next to, in words; None without buffers. `freed` begins with the latest."""
    if all(_distance(buffer, address) for buffer in buffers):
        for va, size in freed:
            if not _distance((va, size), address):
                return f"byte {address - va:#x} of a buffer of {size} bytes at {va:#x} that was freed"
    if not buffers:
        return None
    va, size = min(buffers, key=lambda buffer: _distance(buffer, address))
    offset, what = address - va, f"the buffer of {size} bytes at {va:#x}"
    if offset < 0:
        return f"{-offset:#x} bytes in front of {what}"
    return f"byte {offset:#x}, {'in' if offset < size else 'after'} {what}"


def _distance(buffer: Place, address: int) -> int:
    """Bytes from an address to the nearest byte of a buffer; 0 inside."""
    va, size = buffer
    return max(va - address, address - (va + size - 1), 0)
