"""Section 2: /dev/nvmap."""

from __future__ import annotations

import errno

from tegrad.conformance.rig import CACHED, Rig
from tegrad.conformance.rule import rule
from tegrad.uapi import constants as k

IOVMM = k.NVMAP_HEAP_IOVMM


@rule("2.3", "ALLOC: an align that is not a power of two is EINVAL")
def align_not_power_of_two(rig: Rig) -> None:
    handle = rig.handle()
    rig.refuses(errno.EINVAL, rig.nvmap, "NVMAP_ALLOC", alloc_fields(handle, align=3))


def alloc_fields(handle: int, **fields: int) -> dict[str, int]:
    """The fields of an ALLOC that works; `fields` change them."""
    usual = {"handle": handle, "heap_mask": IOVMM, "flags": CACHED, "align": 4096, "numa_nid": -1}
    return usual | fields
