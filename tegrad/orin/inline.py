"""Inline-to-memory: data that travels in the pushbuffer. Part of the compute class, and class a140 by itself."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tegrad.hw.classes import ComputeMethod as M
from tegrad.orin import semaphore
from tegrad.orin.memory import HubClient
from tegrad.orin.methods import class_error, illegal_method

if TYPE_CHECKING:
    from tegrad.orin.host import HostChannel, Waiting

PITCH = 1
"""DST_MEMORY_LAYOUT of LAUNCH_DMA; 0 is block-linear, which is for textures."""

RELEASE_SEMAPHORE = 2

_METHODS = frozenset(
    (
        M.LINE_LENGTH_IN,
        M.LINE_COUNT,
        M.OFFSET_OUT_UPPER,
        M.OFFSET_OUT,
        M.PITCH_OUT,
        M.LAUNCH_DMA,
        M.LOAD_INLINE_DATA,
        M.SET_I2M_SEMAPHORE_A,
        M.SET_I2M_SEMAPHORE_B,
        M.SET_I2M_SEMAPHORE_C,
    )
)


class InlineToMemory:
    """Lines of inline data, each padded to whole words, written to pitch-linear memory when the last word has come."""

    unit = "gr"

    def __init__(self, channel: HostChannel, class_id: int, subchannel: int) -> None:
        self.class_id = class_id
        self._channel = channel
        self._subchannel = subchannel
        self._regs: dict[int, int] = {}
        self._words: list[int] = []
        self._missing = 0
        self._launch = 0

    def takes(self, offset: int) -> bool:
        """Whether a method belongs to this unit."""
        return offset in _METHODS

    def method(self, offset: int, data: int) -> Waiting | None:
        """Execute one method."""
        if offset == M.LOAD_INLINE_DATA:
            self._load((data,))
        elif offset == M.LAUNCH_DMA:
            self._start(data)
        elif offset in _METHODS:
            self._regs[offset] = data
        elif offset not in (M.NO_OPERATION, M.WAIT_FOR_IDLE):
            raise illegal_method(self._subchannel, self.class_id, offset, data)
        return None

    def bulk(self, offset: int, data: Sequence[int]) -> bool:
        """Take many words of inline data at once."""
        if offset != M.LOAD_INLINE_DATA:
            return False
        self._load(data)
        return True

    def _pair(self, upper: int, lower: int) -> int:
        return (self._regs.get(upper, 0) & 0x1FFFFFF) << 32 | self._regs.get(lower, 0)

    def _line_words(self) -> int:
        return (self._regs.get(M.LINE_LENGTH_IN, 0) + 3) // 4

    def _start(self, data: int) -> None:
        if not data & PITCH or data & 2:
            raise class_error(
                self._subchannel,
                self.class_id,
                M.LAUNCH_DMA,
                data,
                "inline data to block-linear memory, or with a reduction, is not emulated",
            )
        self._launch = data
        self._words.clear()
        self._missing = self._line_words() * self._regs.get(M.LINE_COUNT, 0)
        if not self._missing:
            self._finish()

    def _load(self, data: Sequence[int]) -> None:
        if len(data) > self._missing:
            raise class_error(
                self._subchannel, self.class_id, M.LOAD_INLINE_DATA, data[-1], "more inline data than was announced"
            )
        self._words.extend(data)
        self._missing -= len(data)
        if not self._missing:
            self._finish()

    def _finish(self) -> None:
        raw = array("I", self._words).tobytes()
        length, step = self._regs.get(M.LINE_LENGTH_IN, 0), 4 * self._line_words()
        va, pitch = self._pair(M.OFFSET_OUT_UPPER, M.OFFSET_OUT), self._regs.get(M.PITCH_OUT, 0)
        for line in range(self._regs.get(M.LINE_COUNT, 0)):
            data = raw[line * step : line * step + length]
            self._channel.vm.write(va + line * pitch, data, HubClient.FE, what="inline data")
        self._words.clear()
        self._complete()

    def _complete(self) -> None:
        channel = self._channel
        channel.stored(None)
        if self._launch >> 4 & 3 == RELEASE_SEMAPHORE:
            va = self._pair(M.SET_I2M_SEMAPHORE_A, M.SET_I2M_SEMAPHORE_B)
            record = 4 if self._launch >> 12 & 1 else 16
            if va % record:
                raise class_error(self._subchannel, self.class_id, M.LAUNCH_DMA, self._launch, "semaphore misaligned")
            payload = self._regs.get(M.SET_I2M_SEMAPHORE_C, 0)
            semaphore.release(channel, va, payload, HubClient.FE, stamped=record == 16)
        if self._launch >> 8 & 3 == 1:
            channel.interrupt()
