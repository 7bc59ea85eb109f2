"""Local memory as grids use it: where the client put it, it belongs to the warps that run, who spill into it.

The PTX engine keeps a thread's local variables elsewhere, so what a warp would spill is represented by a mark in the
first bytes of its slot, stored past the L2 when the grid begins and again when it ends. So local memory that is not
mapped faults, a buffer that lies where an older kernel still spills is destroyed, and a kernel whose slots were
overwritten is noted.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tegrad.hw.chips import Chip
from tegrad.hw.faults import MmuAccess
from tegrad.orin.launch import LaunchShape, local_memory_per_tpc
from tegrad.orin.memory import AddressSpace

GPC_CLIENT_T1 = 0
"""The L1 of a GPC's first TPC, as the MMU knows it."""

MARK = 0x5B11_0000_0000_0000

MOST_SHAPES = 64
"""Shapes of grids whose slots are remembered."""

Slots = list[npt.NDArray[np.uint64]]


class Spills(NamedTuple):
    """The slots of a grid's warps, in a few views, and what was stored there: which grid was the last to store."""

    slots: Slots
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
        self._known: dict[tuple[int, int, int, int], Slots] = {}

    def enter(self, va: int, per_tpc: int, shape: LaunchShape) -> Spills | None:
        """A grid begins; None if it has no local memory. MMU fault of the SMs where that is not mapped writable."""
        if not shape.local_per_thread:
            return None
        size = per_tpc * self._tpcs
        if (page := self._vm.bad_page(va, size, True)) is not None:
            raise self._vm.fault(page, MmuAccess.VIRT_WRITE, GPC_CLIENT_T1, gpc=0, detail="local memory")
        spills = Spills(self._slots(va, per_tpc, shape), MARK | next(self._numbers))
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

    def _slots(self, va: int, per_tpc: int, shape: LaunchShape) -> Slots:
        """The first quad of each warp's slot: warps go round the TPCs, as many as fit."""
        room = self._chip.warps_per_sm * self._chip.sm_per_tpc
        per_warp = local_memory_per_tpc(self._chip, shape.local_per_thread) // room
        warps = -(-math.prod(shape.block) // 32) * math.prod(shape.grid)
        mapping = self._vm.mapping_at(va)
        if mapping is None or va + per_tpc * self._tpcs > mapping.va + mapping.size:
            return list(self._by_tpc(va, per_tpc, per_warp, warps))
        key = (self._vm.raw_address(va), per_tpc, per_warp, warps)
        if key not in self._known:
            if len(self._known) >= MOST_SHAPES:
                self._known.clear()
            self._known[key] = self._at_once(*key)
        return self._known[key]

    def _depths(self, warps: int) -> tuple[int, int]:
        """How many TPCs have one slot more than the others, and how many slots those have."""
        each, more = divmod(warps, self._tpcs)
        room = self._chip.warps_per_sm * self._chip.sm_per_tpc
        return (more, each) if each < room else (0, room)

    def _at_once(self, address: int, per_tpc: int, per_warp: int, warps: int) -> Slots:
        """Slots of memory at one host address, as two arrays at most."""
        more, each = self._depths(warps)
        whole = np.ctypeslib.as_array((ctypes.c_uint64 * (per_tpc * self._tpcs // 8)).from_address(address))
        rows = np.lib.stride_tricks.as_strided(
            whole, (self._tpcs, each + (more > 0)), (per_tpc, per_warp), writeable=True
        )
        return [view for view in (rows[:more], rows[more:, :each]) if view.size]

    def _by_tpc(self, va: int, per_tpc: int, per_warp: int, warps: int) -> Iterator[npt.NDArray[np.uint64]]:
        """Slots of memory that several mappings make up."""
        more, each = self._depths(warps)
        for tpc in range(self._tpcs):
            if depth := each + (tpc < more):
                raw = self._vm.raw(va + tpc * per_tpc, depth * per_warp)
                yield np.frombuffer(raw, np.uint64)[:: per_warp // 8]
