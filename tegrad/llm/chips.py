"""What our kernels do otherwise on each chip: a row a chip, by its architecture. hw/chips.py has what the chip is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from tegrad.hw.chips import by_arch

Role = Literal["qkv", "output", "gate", "down", "logits"]
"""A product's place in a decode step."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What to aim at for a role.

    Rows of a CTA; items of a warp, and how many of them in flight at most; warps of a CTA at most; CTAs of an SM at
    least; whether activations are kept in registers; whether the number of warps shall divide the items, where rows are
    no whole segments.
    """

    rows: int = 16
    items: int = 2
    ahead: int = 4
    warps: int = 16
    ctas: int = 1
    keep: bool = True
    even: bool = False


@dataclass(frozen=True, slots=True)
class ChipKernels:
    """How kernels are launched on a chip, and which of them it has."""

    products: Mapping[Role, Tuning]
    """Of a decode step."""
    attention_warps: tuple[int, ...]
    """Of a CTA of several sequences' attention: the first whose sums fit shared memory."""
    deep_group: int
    """Query heads on a KV head up to which a lane of one sequence's attention has eight rows in flight, else four."""
    overlaps: bool
    """Launches may overlap (griddepcontrol, the QMD's latch), and a step in one launch needs no record of a first boot
    that shows it right and quicker."""
    wgmma: bool
    """Products of many tokens take Hopper's own instructions."""
    flash_warps: int = 4
    """Of a block of a prompt's attention where heads have 128 elements."""
    flash_tiles: Mapping[int, int] = field(default_factory=dict)
    """Positions of a tile of a prompt's attention by Hopper's own instructions, by a head's elements: those for which
    they are taken, where keys and values are halves."""
    chunks: tuple[int, ...] = ()
    """Tokens of chunks of prompts, beside those that every chip has."""


WARPS: Final = (8, 4)
"""Of a CTA of attention: the first that 32 KiB of shared memory for their sums allow. For one sequence on Hopper they
have twice the rows in flight that 12 have registers for, which is quicker; an Orin's SM needs no more to keep its
memory busy."""

_SM_90: Final[Mapping[Role, Tuning]] = {
    "qkv": Tuning(items=1, even=True),
    "output": Tuning(items=1, even=True),
    "gate": Tuning(items=4, ahead=2, warps=8, ctas=3, even=True),
    "down": Tuning(items=4, even=True),
    "logits": Tuning(rows=64, items=8, ahead=2, warps=8, ctas=3),
}
"""A product with about as many CTAs as the chip has SMs asks for all its weights at once; a larger one keeps 80 KB an
SM in flight, in CTAs that end at different times. One or two rows in flight a warp were best in an experiment on an
H200; `tegrad bench products --sweep` tries the others."""

_SM_87: Final[Mapping[Role, Tuning]] = {
    "qkv": Tuning(items=2, ahead=2, warps=8, ctas=2),
    "output": Tuning(items=2, ahead=2, warps=8, ctas=2),
    "gate": Tuning(items=4, ahead=2, warps=8, ctas=2),
    "down": Tuning(items=8, ahead=2, warps=8, ctas=3),
    "logits": Tuning(rows=64, items=8, ahead=2, warps=8, ctas=3),
}
"""An SM's share of the bandwidth is 13 GB/s or less: little needs to be in flight, and every product has many CTAs for
each SM. Calculated, not measured."""

TUNED: Final[Mapping[str, ChipKernels]] = {
    "sm_87": ChipKernels(_SM_87, WARPS, 2, overlaps=False, wgmma=False),
    "sm_90": ChipKernels(
        _SM_90, (12, *WARPS), 4, overlaps=True, wgmma=True, flash_warps=8,
        flash_tiles={64: 128, 128: 128, 256: 64}, chunks=(64, 256, 2048),
    ),
}  # fmt: skip
"""By architecture."""

LEAST_SHARED_BYTES: Final = 100 << 10
"""Bytes of an SM's shared memory of chips that hw/chips.py lacks: compute capabilities 8.6 and 8.9 have least (CUDA
programming guide)."""
OVERLAPS_FROM: Final = 90
"""Compute capability from which launches may overlap."""


def capability(arch: str) -> int:
    """90 of "sm_90"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def shared_bytes(arch: str) -> int:
    """Bytes of an SM's shared memory; of a chip that hw/chips.py lacks, what every chip has."""
    return chip.smem_per_sm if (chip := by_arch(arch)) is not None else LEAST_SHARED_BYTES


def kernels_of(arch: str) -> ChipKernels:
    """A chip's row; for one without a tuning what is right on all of them, and quick on none."""
    if (found := TUNED.get(arch)) is not None:
        return found
    return ChipKernels(_SM_90, WARPS, 2, capability(arch) >= OVERLAPS_FROM, wgmma=False)
