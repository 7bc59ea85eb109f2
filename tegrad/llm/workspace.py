"""Buffers that are freed together."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from tegrad.nv import roles
from tegrad.nv.gpu import Buffer, Gpu
from tegrad.nv.spec import MemorySpec

SPEC: Final = MemorySpec(nolru=True, role=roles.WORKSPACE)
ALIGN: Final = 256
"""Bytes that a buffer has at least, and of which parts of one begin at multiples."""


class Workspace:
    """Allocates buffers on a device, of `spec` unless said, and frees all of them at once. MemoryError where one does
    not fit."""

    def __init__(self, device: Gpu, spec: MemorySpec = SPEC) -> None:
        self._device, self._spec = device, spec
        self._undo = ExitStack()

    def take(self, size: int, spec: MemorySpec | None = None) -> Buffer:
        """A buffer of `size` bytes, ALIGN at least."""
        spec = spec or self._spec
        buffer = self._device.allocate(max(size, ALIGN), spec)
        self._undo.callback(self._device.release, buffer, spec)
        return buffer

    def put(self, data: bytes | np.ndarray[Any, Any]) -> Buffer:
        """A buffer that holds these bytes, or those of an array."""
        content = data if isinstance(data, bytes) else np.ascontiguousarray(data).tobytes()
        buffer = self.take(len(content))
        self._device.upload(buffer.offset(0, len(content)), content)
        return buffer

    def callback(self, what: Callable[[], None]) -> None:
        """Close something else with the buffers, before those that are there now."""
        self._undo.callback(what)

    def close(self) -> None:
        """Free everything, the last first. Closing twice is harmless."""
        self._undo.close()
