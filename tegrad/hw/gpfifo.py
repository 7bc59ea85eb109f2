"""How work reaches a channel: GPFIFO entries, the USERD block, method headers, work-submit tokens, the doorbell.

Sources: NVIDIA open-gpu-doc clc76f.h (entry, header and USERD formats); L4T r36.4.3 nvgpu hw_ram_ga10b.h (USERD),
usermode_tu104.c (token, doorbell), dev_usermode of open-gpu-doc (timer registers).
"""

from dataclasses import dataclass
from enum import IntEnum

from tegrad.hw.class_tables import HostMethod

GP_ENTRY_SIZE = 8
"""Bytes of one GPFIFO entry."""

MAX_SEGMENT_DWORDS = (1 << 21) - 1
"""Longest pushbuffer segment that one entry can name."""

VA_LIMIT = 1 << 40
"""Pushbuffer segments and the GPFIFO itself must end at or below this address."""

USERD_SIZE = 512
"""Bytes of the USERD block that the hardware uses, at offset 0 of the buffer."""

USERMODE_SIZE = 0x10000
"""Bytes of the usermode register region that mmap of the ctrl fd maps."""

DOORBELL = 0x90
"""Offset of the doorbell in the usermode region: write a work-submit token to make the host look at GP_PUT."""

USERMODE_CLASS_ID = 0x00
"""Offset of the usermode class id (bits 15:0)."""

TIME_0, TIME_1 = 0x80, 0x84
"""Offsets of the GPU time in nanoseconds, low (bits 4:0 are zero) and high word."""


class Userd(IntEnum):
    """Byte offsets in USERD. The client writes GP_PUT; everything else belongs to the hardware."""

    PUT = 0x40
    GET = 0x44
    REF = 0x48
    PUT_HI = 0x4C
    TOP_LEVEL_GET = 0x58
    TOP_LEVEL_GET_HI = 0x5C
    GET_HI = 0x60
    GP_GET = 0x88
    GP_PUT = 0x8C


class Subchannel(IntEnum):
    """Which engine object a method goes to, on the graphics runlist. 5 to 7 are software and kill the channel."""

    GRAPHICS = 0
    COMPUTE = 1
    INLINE_TO_MEMORY = 2
    TWOD = 3
    COPY = 4


class MethodOp(IntEnum):
    """The operation of a method header (bits 31:29). 2 and 6 are invalid; 0 with TERT_OP 0 and no count is a NOP."""

    SUBDEVICE = 0
    INC = 1
    NON_INC = 3
    IMMEDIATE = 4
    ONE_INC = 5
    END_SEGMENT = 7


class GpOpcode(IntEnum):
    """What an entry of length 0 means (bits 7:0 of its second word)."""

    NOP = 0
    ILLEGAL = 1
    GP_CRC = 2
    PB_CRC = 3


@dataclass(frozen=True, slots=True)
class GpEntry:
    """A decoded GPFIFO entry. `opcode` counts only where `dwords` is 0, `va` only where it is not.

    `level` 1 is a subroutine, `sync` waits for the previous segment before fetching, `fetch` 1 is conditional.
    """

    va: int
    dwords: int
    level: int = 0
    sync: bool = False
    opcode: int = 0
    fetch: int = 0


def gp_entry(va: int, dwords: int, *, sync: bool = False, level: int = 0, fetch: int = 0) -> int:
    """The 64-bit GPFIFO entry for `dwords` words of pushbuffer at GPU address `va`.

    ValueError for an address that is not a multiple of 4 or a segment that is empty, too long or ends past 2^40.
    """
    if va % 4 or not 0 < dwords <= MAX_SEGMENT_DWORDS or not 0 <= va <= VA_LIMIT - 4 * dwords:
        raise ValueError(f"no GPFIFO entry holds {dwords} words at {va:#x}")
    return va | (fetch & 1) | (level & 1) << 41 | dwords << 42 | int(sync) << 63


def decode_gp_entry(entry: int) -> GpEntry:
    """Take a 64-bit GPFIFO entry apart."""
    dwords = entry >> 42 & MAX_SEGMENT_DWORDS
    return GpEntry(
        va=entry & (VA_LIMIT - 4) if dwords else 0,
        dwords=dwords,
        level=entry >> 41 & 1,
        sync=bool(entry >> 63 & 1),
        opcode=0 if dwords else entry >> 32 & 0xFF,
        fetch=entry & 1,
    )


@dataclass(frozen=True, slots=True)
class Header:
    """A decoded method header. `count` words follow, except for IMMEDIATE, where it is the data itself.

    `op` is a plain number because the two invalid operations must be representable. `method` is a byte offset.
    """

    op: int
    subch: int
    method: int
    count: int


def method_header(op: int, subch: int, method_offset: int, count_or_data: int) -> int:
    """The 32-bit method header; `method_offset` in bytes, 13 bits of count (or data for IMMEDIATE).

    ValueError for anything the header cannot hold.
    """
    if method_offset % 4 or not 0 <= method_offset < 0x4000 or not 0 <= count_or_data < 0x2000 or not 0 <= subch < 8:
        raise ValueError(
            f"no header for method {method_offset:#x}, subchannel {subch}, count or data {count_or_data:#x}"
        )
    return int(op) << 29 | count_or_data << 16 | subch << 13 | method_offset >> 2


SEMAPHORE_HEADER = method_header(MethodOp.INC, 0, HostMethod.SEM_ADDR_LO, 5)


def semaphore(operation: int, va: int, value: int) -> tuple[int, ...]:
    """Words for a host semaphore operation (a SEM_EXECUTE word) on 64 bits at `va`."""
    return (SEMAPHORE_HEADER, va & 0xFFFFFFFF, va >> 32, value & 0xFFFFFFFF, value >> 32, operation)


def decode_header(word: int) -> Header:
    """Take a 32-bit method header apart."""
    return Header(op=word >> 29, subch=word >> 13 & 7, method=(word & 0xFFF) << 2, count=word >> 16 & 0x1FFF)


def token(chid: int, runlist: int) -> int:
    """The work-submit token that rings channel `chid` of `runlist`: chid in bits 11:0, runlist in 22:16."""
    return (chid & 0xFFF) | (runlist & 0x7F) << 16


def decode_token(value: int) -> tuple[int, int]:
    """(chid, runlist) of a work-submit token."""
    return value & 0xFFF, value >> 16 & 0x7F
