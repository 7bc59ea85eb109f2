"""What a page table entry of ga10b's MMU says of a page, as the driver writes it from a map's flags and kind.

Volatile: the GPU's L2 keeps nothing of the page. The aperture tells whether an access snoops the CPU's caches.
Source: L4T r36.4.2 nvgpu, hal/mm/gmmu/gmmu_ga10b_fusa.c (ga10b_update_pte), common/mm/gmmu/page_table.c and
hw_gmmu_ga10b.h; executed, see tests/orin/nvgpu_oracle.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from tegrad.uapi import constants as k

VALID, VOLATILE, READ_ONLY = 1 << 0, 1 << 3, 1 << 6
APERTURE_SHIFT, KIND_SHIFT = 1, 56


class Aperture(IntEnum):
    """Where the page lies. An integrated GPU has no memory of its own (0)."""

    NONE = 0
    SYSTEM_COHERENT = 2
    SYSTEM = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One page table entry, without its address."""

    valid: bool = False
    aperture: Aperture = Aperture.NONE
    volatile: bool = False
    read_only: bool = False
    kind: int = 0

    @property
    def word(self) -> int:
        """The 64 bits of the entry, those of the address zero."""
        bits = VALID * self.valid | VOLATILE * self.volatile | READ_ONLY * self.read_only
        return bits | self.aperture << APERTURE_SHIFT | self.kind << KIND_SHIFT


EMPTY = Entry()
SPARSE = Entry(volatile=True)
"""Of a page in a sparse area with nothing behind it: it reads as zero, and stores to it are dropped."""


def entry(flags: int, kind: int, *, read_only: bool) -> Entry:
    """The entry of a page that MAP_BUFFER_EX maps with these flags and this kind.

    An entry that is not to be valid (UNMAPPED_PTE) and not cached has the read-only bit in place of the volatile one.
    """
    valid = not flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_UNMAPPED_PTE
    cached = bool(flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE)
    coherent = flags & k.NVGPU_AS_MAP_BUFFER_FLAGS_SYSTEM_COHERENT
    return Entry(
        valid,
        Aperture.SYSTEM_COHERENT if coherent else Aperture.SYSTEM,
        volatile=valid and not cached,
        read_only=read_only or not (valid or cached),
        kind=kind & 0xFF,
    )
