"""Operands of kernels on a board, flush to the last or the first byte of their pages, with nothing mapped beyond.

An access past an operand's pages faults; a store into the rest of them is found by `check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

PAGE = 4096
MARK = 0xA5
ALIGN = 16
"""Every operand begins at a multiple of it: what vector accesses need."""


class Operands:
    """Buffers of one device: `flush` is "end" or "start". `free` gives all of them back."""

    def __init__(self, device: Any, flush: str = "end") -> None:
        self.device, self.flush = device, flush
        self._buffers: list[tuple[Any, Any, int, int]] = []
        self._kept = device.allocator.alloc, device.allocator.free

    @contextmanager
    def placing(self) -> Iterator[None]:
        """What the device's allocator gives meanwhile are operands, of zeros; `free` alone gives them back."""

        def alloc(size: int, spec: Any = None) -> Any:
            return self.put(np.zeros(size, np.uint8), cpu_access=True)

        def free(buffer: Any, size: int, spec: Any = None) -> None:
            if not any(buffer is mine for mine, *_ in self._buffers):
                self._kept[1](buffer, size, spec)

        with patch.multiple(self.device.allocator, alloc=alloc, free=free):
            yield

    def put(self, array: np.ndarray, cpu_access: bool = False) -> Any:
        """A buffer that holds the array's bytes."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        size = PAGE << (max(len(data) - 1, 0) // PAGE).bit_length()  # powers of two, which buddies place side by side
        start = (size - len(data)) // ALIGN * ALIGN if self.flush == "end" else 0
        whole = self._lonely(size, cpu_access)
        pages = np.full(size, MARK, np.uint8)
        pages[start : start + len(data)] = data
        self.device.allocator._copyin(whole, memoryview(pages.tobytes()))
        buffer = whole.offset(start, len(data))
        self._buffers.append((buffer, whole, start, len(data)))
        return buffer

    def zeros(self, shape: tuple[int, ...] | int, dtype: Any) -> Any:
        """A buffer of zeros."""
        return self.put(np.zeros(shape, dtype))

    def get(self, buffer: Any, shape: tuple[int, ...] | int, dtype: Any) -> np.ndarray:
        """What a buffer holds now."""
        _, whole, start, length = next(entry for entry in self._buffers if entry[0] is buffer)
        return self._pages(whole)[start : start + length].view(dtype).reshape(shape)

    def check(self) -> None:
        """Nothing of the pages around the operands has changed."""
        for _, whole, start, length in self._buffers:
            pages = self._pages(whole)
            assert (pages[:start] == MARK).all()
            assert (pages[start + length :] == MARK).all()

    def free(self) -> None:
        """Give all buffers back."""
        self.device.synchronize()
        for _, whole, _, _ in self._buffers:
            self._free(whole)
        self._buffers.clear()
        self._unmap()

    def _pages(self, whole: Any) -> np.ndarray:
        self.device.synchronize()
        out = bytearray(whole.size)
        self.device.allocator._copyout(memoryview(out), whole)
        return np.frombuffer(out, np.uint8)

    def _lonely(self, size: int, cpu_access: bool) -> Any:
        """Pages with a hole before and after them, where something else of ours has just been given back."""
        tried: list[Any] = []
        try:
            for _ in range(256):
                tried.append(self._alloc(size, cpu_access))
                at = {buffer.va_addr: buffer for buffer in tried}
                for buffer in tried:
                    if buffer.va_addr - size in at and buffer.va_addr + size in at:
                        tried.remove(buffer)
                        return buffer
            raise AssertionError("the driver places no three buffers side by side")
        finally:
            for other in tried:
                self._free(other)
            self._unmap()

    def _unmap(self) -> None:
        """Let nothing that was freed stay mapped, as a Jetson's buffers do for a while: an access there is to fail."""
        getattr(self.device.iface, "give_back", bool)()

    def _alloc(self, size: int, cpu_access: bool) -> Any:
        from tinygrad.device import BufferSpec

        return self._kept[0](size, BufferSpec(cpu_access=cpu_access, nolru=True))

    def _free(self, buffer: Any) -> None:
        from tinygrad.device import BufferSpec

        self._kept[1](buffer, buffer.size, BufferSpec(nolru=True))
