"""What the user sees when the GPU fails: one exception with kernel, buffer and address where they are known.

A fault kills the channel group: nothing un-faults it. The way on is to close the device and open it again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tegrad.errors import TegradError
from tegrad.hw.faults import NOTIFIER_TEXT, WarpEsr

WARP_ESR_CODE = 0xFFFF


class DeviceClosed(TegradError, RuntimeError):
    """Something of a device that was closed is used: a tensor, a program, a recorded graph."""


class UnsupportedBuffer(TegradError, RuntimeError):
    """Memory of a kind that this device cannot work on."""


class WaitTimeout(TegradError, RuntimeError):
    """The GPU made no progress for the time a wait allows, and reports no error."""


@dataclass(frozen=True, slots=True)
class SmError:
    """The exception one SM reports: its ESR words and the program counter of the warp."""

    sm: int
    global_esr: int
    warp_esr: int
    pc: int

    @property
    def reason(self) -> str:
        """The warp error in words."""
        code = self.warp_esr & WARP_ESR_CODE
        known = code in WarpEsr._value2member_map_
        return WarpEsr(code).name.lower().replace("_", " ") if known else f"warp error {code:#x}"


class DeviceFault(TegradError, RuntimeError):
    """The GPU stopped the work of this process.

    `code` is the error notifier's, or None where only the driver's time-out flag tells; `kernel` the name of the kernel
    whose code was running, if the program counter tells; `in_flight` the kernels that were submitted and not finished,
    oldest first; `address` and `buffer` where the kernel log tells; `sm_errors` what the SMs report; `report` what a
    desktop driver's debugger says.
    """

    def __init__(
        self,
        code: int | None,
        *,
        kernel: str | None = None,
        in_flight: Sequence[str] = (),
        address: int | None = None,
        buffer: str | None = None,
        sm_errors: Sequence[SmError] = (),
        report: str = "",
    ) -> None:
        self.code = code
        self.kernel = kernel
        self.in_flight = tuple(in_flight)
        self.address = address
        self.buffer = buffer
        self.sm_errors = tuple(sm_errors)
        self.report = report
        super().__init__(self._text())

    def _text(self) -> str:
        gone = self.report.replace("\n", ", ") or "the driver gave the channel up"
        what = NOTIFIER_TEXT.get(self.code, f"error {self.code}") if self.code is not None else gone
        reasons = sorted({error.reason for error in self.sm_errors if error.warp_esr & WARP_ESR_CODE})
        parts = [f"GPU fault: {what}"]
        if reasons:
            parts.append(f"SM: {', '.join(reasons)}")
        if self.address is not None:
            parts.append(f"address {self.address:#x}" + (f" ({self.buffer})" if self.buffer else ""))
        if self.kernel is not None:
            parts.append(f"in kernel {self.kernel}")
        elif self.in_flight:
            shown = ", ".join(self.in_flight[:3])
            more = len(self.in_flight) - 3
            parts.append(f"in flight: {shown}" + (f" and {more} more" if more > 0 else ""))
        return "; ".join(parts) + ". Close the device and open it again; dmesg shows the driver's report."
