"""Errors of the PTX engine: text that cannot be loaded, and kernels that stopped."""

from dataclasses import dataclass

from tegrad.errors import TegradError


class PtxError(TegradError):
    """The PTX text cannot be executed: a syntax error or an instruction that the engine does not know."""


_LANES = {
    "missing-lanes": (
        "wait at another instruction or are past the place where the branches join",
        "name those lanes only that come to this instruction, or let all lanes that are named come",
    ),
    "unnamed-lanes": ("execute it but are not in their mask", "name every lane that executes it"),
}


@dataclass
class PtxFault(TegradError):
    """A launch ended early: the first fault of the grid, or an abort.

    `kind` is one of "unmapped", "read-only", "misaligned", "address-space", "out-of-range", "illegal", "trap",
    "missing-lanes", "unnamed-lanes", "timeout" and "aborted". `pc` is the index of the instruction in the kernel,
    `source` its PTX text, `thread` the thread's index in its CTA (x, y, z), `address` the address as the kernel formed
    it, `size` the bytes of the access.
    Of "missing-lanes" and "unnamed-lanes" the address is a member mask, and above it the lanes that are wrong.
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
        if self.kind in _LANES:
            what, cure = _LANES[self.kind]
            mask, wrong = self.address & 0xFFFFFFFF, self.address >> 32
            lanes = ", ".join(str(i) for i in range(32) if wrong >> i & 1)
            return f"{self.kind} in kernel {self.kernel}: member mask {mask:#x}: lanes {lanes} {what}; {where}; {cure}"
        what = f"{self.access} of {self.size} bytes at {self.address:#x}" if self.access else self.kind
        return f"{self.kind} in kernel {self.kernel}: {what}; {where}; check the address that the kernel forms there"
