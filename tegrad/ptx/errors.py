"""Errors of the PTX engine: text that cannot be loaded, and kernels that stopped."""

from dataclasses import dataclass

from tegrad.errors import TegradError


class PtxError(TegradError):
    """The PTX text cannot be executed: a syntax error or an instruction that the engine does not know."""


@dataclass
class PtxFault(TegradError):
    """A launch ended early: the first fault of the grid, or an abort.

    `kind` is one of "unmapped", "read-only", "misaligned", "address-space", "out-of-range", "illegal", "trap",
    "timeout" and "aborted". `pc` is the index of the instruction in the kernel, `source` its PTX text, `thread` the
    thread's index in its CTA (x, y, z), `address` the address as the kernel formed it, `size` the bytes of the access.
    """

    kind: str
    kernel: str = ""
    pc: int = 0
    source: str = ""
    cta: tuple[int, int, int] = (0, 0, 0)
    warp: int = 0
    lane: int = 0
    thread: tuple[int, int, int] = (0, 0, 0)
    address: int = 0
    access: str = ""
    size: int = 0

    def __str__(self) -> str:
        if self.kind == "aborted":
            return f"kernel {self.kernel} was aborted before its grid was done; launch it again"
        where = (
            f"CTA {self.cta}, thread {self.thread} (warp {self.warp}, lane {self.lane}), pc {self.pc}: {self.source}"
        )
        what = f"{self.access} of {self.size} bytes at {self.address:#x}" if self.access else self.kind
        return f"{self.kind} in kernel {self.kernel}: {what}; {where}; check the address that the kernel forms there"
