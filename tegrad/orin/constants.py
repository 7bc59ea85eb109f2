"""The constant cache: lines stay as they were fetched until something invalidates them, whatever memory holds then."""

from __future__ import annotations

import threading

from tegrad.orin.memory import GPC_CLIENT_GCC, AddressSpace

LINE_BYTES = 64
MOST_LINES = 2048
"""Lines kept at most: more than silicon keeps, so that a missing invalidation shows."""


class ConstantCache:
    """Lines by address, each with the generation in which it was fetched."""

    def __init__(self, vm: AddressSpace) -> None:
        self._vm = vm
        self._lines: dict[int, tuple[int, bytes]] = {}
        self._lock = threading.Lock()

    def read(self, va: int, size: int, generation: int, *, fresh: bool = False, what: str = "") -> bytes:
        """Bytes [va, va + size) through the cache; lines older than `generation`, or all if `fresh`, are fetched anew.

        MMU fault of the GPC's constant unit for a line that has to be fetched and is not mapped.
        """
        if size <= 0:
            return b""
        lines = self._lines
        parts = []
        start = va & ~(LINE_BYTES - 1)
        for at in range(start, va + size, LINE_BYTES):
            line = lines.get(at)
            if line is None or fresh or line[0] < generation:
                line = (generation, self._vm.read(at, LINE_BYTES, GPC_CLIENT_GCC, gpc=0, what=what))
                with self._lock:  # channels read in threads of their own
                    if len(lines) >= MOST_LINES:
                        lines.pop(next(iter(lines)), None)
                    lines[at] = line
            parts.append(line[1])
        return b"".join(parts)[va - start : va - start + size]
