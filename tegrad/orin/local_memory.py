"""Local memory as grids use it: where the client put it, it belongs to the warps that run, who spill into it.

The PTX engine keeps a thread's local variables elsewhere, so what a warp would spill is represented by a mark in the
first bytes of its slot, stored past the L2 when the grid begins and again when it ends. So local memory that is not
mapped faults, a buffer that lies where an older kernel still spills is destroyed, and a kernel whose slots were
overwritten is noted.
"""

from __future__ import annotations

import itertools
import threading
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tegrad.hw.chips import Chip
from tegrad.hw.faults import MmuAccess
from tegrad.orin.launch import Shape, local_memory_per_tpc
from tegrad.orin.memory import AddressSpace

GPC_CLIENT_T1 = 0
"""The L1 of a GPC's first TPC, as the MMU knows it."""

MARK = 0x5B11_0000_0000_0000


class Spills(NamedTuple):
    """The slots of a grid's warps, a view per TPC, what was stored there, and which grid was the last to store."""

    slots: list[npt.NDArray[np.uint64]]
    mark: int


class LocalMemory:
    """The local memory of one context. Grids of several channels may be inside at once: they share it."""

    def __init__(self, chip: Chip, vm: AddressSpace) -> None:
        self._chip = chip
        self._vm = vm
        self._tpcs = chip.num_gpc * chip.tpc_per_gpc
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._last = 0

    def enter(self, va: int, per_tpc: int, shape: Shape) -> Spills | None:
        """A grid begins; None if it has no local memory. MMU fault of the SMs where that is not mapped writable."""
        if not shape.local_per_thread:
            return None
        size = per_tpc * self._tpcs
        if (page := self._vm.bad_page(va, size, True)) is not None:
            raise self._vm.fault(page, MmuAccess.VIRT_WRITE, GPC_CLIENT_T1, gpc=0, detail="local memory")
        spills = Spills(list(self._slots(va, per_tpc, shape)), MARK | next(self._numbers))
        self._store(spills)
        return spills

    def leave(self, spills: Spills | None) -> bool:
        """A grid ends; False if somebody has overwritten what it spilled, other grids aside."""
        if spills is None:
            return True
        with self._lock:
            alone = self._last == spills.mark
        intact = not alone or all((slots == spills.mark).all() for slots in spills.slots)
        self._store(spills)
        return intact

    def _store(self, spills: Spills) -> None:
        with self._lock:
            self._last = spills.mark
        for slots in spills.slots:
            slots[:] = spills.mark

    def _slots(self, va: int, per_tpc: int, shape: Shape) -> list[npt.NDArray[np.uint64]]:
        """The first quad of each warp's slot: warps go round the TPCs, as many as fit."""
        room = self._chip.warps_per_sm * self._chip.sm_per_tpc
        per_warp = local_memory_per_tpc(self._chip, shape.local_per_thread) // room
        threads, ctas = np.prod(shape.block, dtype=int), np.prod(shape.grid, dtype=int)
        warps = int(-(-threads // 32) * ctas)
        views = []
        for tpc in range(min(self._tpcs, warps)):
            depth = min(room, -(-(warps - tpc) // self._tpcs))
            start = va + tpc * per_tpc
            raw = self._vm.raw(start, depth * per_warp)
            views.append(np.frombuffer(raw, np.uint64)[:: per_warp // 8])
        return views
