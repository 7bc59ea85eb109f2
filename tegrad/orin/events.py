"""What the GPU reports to its driver: interrupts and faults, as data.

A fatal event means that the TSG has already been stopped; the driver writes notifiers and log lines and marks the
channels. Events are delivered from the GPU's engine threads, in the order in which they happened; a receiver must
neither block nor call the GPU back.

Numbers are the hardware's own (`tegrad.hw.faults` names them); `detail` is for people: what the emulated GPU knows and
silicon does not tell.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuEvent:
    """Anything that a channel caused."""

    chid: int
    tsg: int


@dataclass(frozen=True, slots=True)
class FatalEvent(GpuEvent):
    """A fault that has stopped the whole TSG."""


@dataclass(frozen=True, slots=True)
class MmuFault(FatalEvent):
    """An access that the address space does not allow. `address` is that of the page (low 12 bits zero).

    `fault_type`, `access`, `client_type` (0 GPC, 1 hub) and `client` as in the fault buffer; `engine` is the MMU engine
    id, `gpc` the cluster of a GPC client.
    """

    address: int
    fault_type: int
    access: int
    client_type: int
    client: int
    gpc: int = 0
    engine: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SmException(FatalEvent):
    """A warp that a streaming multiprocessor had to stop.

    `sm` counts over the whole chip, as READ_SINGLE_SM_ERROR_STATE does. `warp_esr` holds the code in its low 16 bits.
    `pc` is the GPU address of the instruction as far as the emulation can tell: the program's address plus 16 bytes for
    each PTX instruction before it.
    """

    gpc: int
    tpc: int
    sm: int
    global_esr: int
    warp_esr: int
    pc: int
    kernel: str = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class SkedException(FatalEvent):
    """A launch descriptor that the scheduler refused: `esr` is its exception register."""

    esr: int
    qmd: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class PbdmaFault(FatalEvent):
    """The host engine could not go on: bits of PBDMA_INTR_0 or PBDMA_INTR_1, and the registers that the driver prints.

    `header` is the method header, `shadow` the GPFIFO entry, `method` the method offset with its subchannel in bits
    18:16, `data` the method's data word.
    """

    intr_0: int
    intr_1: int = 0
    header: int = 0
    shadow: int = 0
    method: int = 0
    data: int = 0
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ClassError(FatalEvent):
    """A class that the subchannel does not take, or a method that the class cannot take with this data."""

    subchannel: int
    class_id: int
    method: int
    data: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class IllegalMethod(ClassError):
    """A method that the class on its subchannel does not have at all."""


@dataclass(frozen=True, slots=True)
class CeError(FatalEvent):
    """A launch that the copy engine refused; `code` is its error code."""

    code: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class TsgAborted(FatalEvent):
    """A TSG that a defect of the emulation has stopped."""

    detail: str = ""


@dataclass(frozen=True, slots=True)
class NonStall(GpuEvent):
    """A non-stalling interrupt: wakes whoever waits for a semaphore, on any channel."""


@dataclass(frozen=True, slots=True)
class Awaken(GpuEvent):
    """A semaphore release with the awaken bit: wakes whoever waits for a semaphore on this channel."""


@dataclass(frozen=True, slots=True)
class ContextSwitchTimeout(GpuEvent):
    """A TSG that was to leave the engine has not, for one more period. Nothing has been stopped."""


@dataclass(frozen=True, slots=True)
class SyncptIncrement(GpuEvent):
    """A store to a syncpoint's shim page: the syncpoint moves on by one."""

    syncpt: int


@dataclass(frozen=True, slots=True)
class Note(GpuEvent):
    """Something that silicon does silently and a user of the emulation wants to know. Never an error."""

    text: str
