"""Which classes an engine object may have: the chip's own and, from Kepler on, those that the driver family knows.

Source: L4T r36.4.2 nvgpu, hal/class/class_ga10b.c and those it falls back to; executed for 16-bit numbers, see
tests/orin/nvgpu_oracle.
"""

from __future__ import annotations

from tegrad.hw.chips import Chip

OLDER = frozenset(
    {0x902D, 0xA0B5, 0xA140, 0xB06F, 0xB0B5, 0xB197, 0xB1C0, 0xC06F, 0xC097, 0xC0B5, 0xC0C0}
    | {0xC36F, 0xC397, 0xC3B5, 0xC3C0, 0xC46F, 0xC4B7, 0xC597, 0xC5B5, 0xC5C0, 0xC637}
)
OLDER_GRAPHICS = frozenset((0xB197, 0xC097, 0xC397, 0xC597))
OLDER_COMPUTE = frozenset((0xC3C0, 0xC5C0))


def known(chip: Chip, number: int) -> bool:
    """Whether ALLOC_OBJ_CTX takes a class at all."""
    own = (chip.compute_class, chip.dma_class, chip.gpfifo_class, chip.threed_class, chip.twod_class, chip.i2m_class)
    return number in own or number in OLDER


def draws(chip: Chip, number: int) -> bool:
    """Whether it is a graphics class."""
    return number == chip.threed_class or number in OLDER_GRAPHICS


def computes(chip: Chip, number: int) -> bool:
    """Whether it is a compute class."""
    return number == chip.compute_class or number in OLDER_COMPUTE
