"""The copy engine: classes c7b5 and c8b5. Pitch-linear copies, fills by remapped components, semaphores.

LAUNCH_DMA takes the state of the moment; the copy then runs in order with the channel's other engine work.
Source: NVIDIA open-gpu-doc clc7b5.h, clc8b5.h.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tegrad.hw.classes import CopyMethod as M
from tegrad.orin import semaphore
from tegrad.orin.events import CeError
from tegrad.orin.grid import Counters
from tegrad.orin.memory import Fault, HubClient
from tegrad.orin.methods import require_method
from tegrad.orin.race import Race

if TYPE_CHECKING:
    from tegrad.orin.host import HostChannel, Waiting

INLINE_COPY_BYTES = 1 << 18
"""Copies up to this many bytes are done by the host engine's thread when nothing is before them."""

INVALID_CONFIG, UNALIGNED_SEMAPHORE, PRIVILEGED = 1, 2, 3
"""Error codes of ours: silicon's are not public."""

PIPELINED = 1
"""DATA_TRANSFER_TYPE of a copy that does not wait for those before it."""

ONE_WORD, FOUR_WORDS, CONDITIONAL = 1, 2, 3
CONST_A, CONST_B, NO_WRITE = 4, 5, 6


class Copy(NamedTuple):
    """State of one LAUNCH_DMA."""

    launch: int
    src: int
    dst: int
    pitch_in: int
    pitch_out: int
    length: int
    lines: int
    components: int
    consts: tuple[int, int]
    semaphore: int
    payload: int


def _error(code: int, detail: str) -> Fault:
    return Fault(CeError, code=code, detail=detail)


class CopyObject:
    """A copy class bound to a channel's subchannel."""

    unit = "ce"

    def __init__(self, channel: HostChannel, class_id: int, subchannel: int, counters: Counters) -> None:
        self.class_id = class_id
        self._channel = channel
        self._subchannel = subchannel
        self._counters = counters
        self._regs: dict[int, int] = {}
        self._known: set[int] = set()

    def method(self, offset: int, data: int) -> Waiting | None:
        """Execute one method."""
        if offset == M.LAUNCH_DMA:
            self._launch(data)
            return None
        if offset not in self._known:
            require_method(self._subchannel, self.class_id, offset, data)
            self._known.add(offset)
        self._regs[offset] = data
        return None

    def bulk(self, offset: int, data: Sequence[int]) -> bool:
        """Nothing here gains from many words at once."""
        return False

    def _pair(self, upper: int) -> int:
        # the fields are 17 bits on Ampere and 25 on Hopper; neither drops a bit of a valid address
        return (self._regs.get(upper, 0) & 0x1FFFFFF) << 32 | self._regs.get(upper + 4, 0)

    def _launch(self, data: int) -> None:
        get = self._regs.get
        copy = Copy(
            launch=data,
            src=self._pair(M.OFFSET_IN_UPPER),
            dst=self._pair(M.OFFSET_OUT_UPPER),
            pitch_in=get(M.PITCH_IN, 0),
            pitch_out=get(M.PITCH_OUT, 0),
            length=get(M.LINE_LENGTH_IN, 0),
            lines=get(M.LINE_COUNT, 0) if data >> 9 & 1 else 1,
            components=get(M.SET_REMAP_COMPONENTS, 0),
            consts=(get(M.SET_REMAP_CONST_A, 0), get(M.SET_REMAP_CONST_B, 0)),
            semaphore=self._pair(M.SET_SEMAPHORE_A),
            payload=get(M.SET_SEMAPHORE_PAYLOAD_UPPER, 0) << 32 | get(M.SET_SEMAPHORE_PAYLOAD, 0),
        )
        small = not data & 3 or copy.length * copy.lines <= INLINE_COPY_BYTES
        race = self._channel.scheduler.race
        if race is not None:
            self._channel.submit(partial(self._run_late, copy, race), unordered=data & 3 == PIPELINED)
        elif small and self._channel.worker.idle:
            self._run(copy)
        else:
            self._channel.submit(partial(self._run, copy))

    def _run_late(self, copy: Copy, race: Race) -> None:
        time.sleep(race.launch_delay())
        hasty = bool(copy.launch >> 3 & 3) and not copy.launch >> 2 & 1 and race.early_release()
        if hasty:
            self._release(copy)
            time.sleep(race.launch_delay())
        self._run(copy, released=hasty)

    def _run(self, copy: Copy, *, released: bool = False) -> None:
        """Copy, then release, unless that was done before."""
        if copy.launch & 3:
            self._transfer(copy)
        if copy.launch >> 3 & 3 and not released:
            self._release(copy)
        self._channel.settle()
        self._channel.scheduler.changed()
        if copy.launch >> 5 & 3:
            self._channel.interrupt()

    # -- data ---------------------------------------------------------------------------------------------------------

    def _transfer(self, copy: Copy) -> None:
        if copy.launch >> 12 & 3:
            raise _error(PRIVILEGED, "physical addresses are for the driver alone: use virtual ones")
        if not copy.launch >> 7 & copy.launch >> 8 & 1:
            raise _error(INVALID_CONFIG, "block-linear copies are not emulated: set the pitch layout on both sides")
        if copy.launch >> 10 & 1:
            self._remap(copy)
        else:
            self._linear(copy)

    def _linear(self, copy: Copy) -> None:
        vm = self._channel.vm
        for line in range(copy.lines):
            src, dst = copy.src + line * copy.pitch_in, copy.dst + line * copy.pitch_out
            vm.require(src, copy.length, HubClient.GRCOPY, what="copy source")
            vm.require(dst, copy.length, HubClient.GRCOPY, write=True, what="copy destination")
            vm.copy(dst, src, copy.length)
        self._counters.copied(copy.length * copy.lines)

    def _remap(self, copy: Copy) -> None:
        """Lines of elements: each element's components come from the source, from a constant, or stay."""
        c = copy.components
        size = (c >> 16 & 3) + 1
        sources, targets = (c >> 20 & 3) + 1, (c >> 24 & 3) + 1
        picks = [c >> 4 * i & 7 for i in range(targets)]
        if any(pick > NO_WRITE or (pick < CONST_A and pick >= sources) for pick in picks):
            raise _error(INVALID_CONFIG, f"component selection {c:#x} has no meaning")
        for line in range(copy.lines):
            src, dst = copy.src + line * copy.pitch_in, copy.dst + line * copy.pitch_out
            self._remap_line(copy, src, dst, size, sources, picks)
        self._counters.copied(copy.length * copy.lines * targets * size)

    def _remap_line(self, copy: Copy, src: int, dst: int, size: int, sources: int, picks: list[int]) -> None:
        vm = self._channel.vm
        span = copy.length * len(picks) * size
        vm.require(dst, span, HubClient.GRCOPY, write=True, what="fill or remap destination")
        taken = None
        if any(pick < CONST_A for pick in picks):
            raw = vm.read(src, copy.length * sources * size, HubClient.GRCOPY, what="remap source")
            taken = np.frombuffer(raw, np.uint8).reshape(copy.length, sources, size)
        with vm.storing(dst, span):
            out = np.frombuffer(vm.bytes[dst : dst + span], np.uint8).reshape(copy.length, len(picks), size)
            for i, pick in enumerate(picks):
                if pick < CONST_A and taken is not None:
                    out[:, i] = taken[:, pick]
                elif pick in (CONST_A, CONST_B):
                    out[:, i] = np.frombuffer(copy.consts[pick - CONST_A].to_bytes(4, "little")[:size], np.uint8)

    # -- semaphore ----------------------------------------------------------------------------------------------------

    def _release(self, copy: Copy) -> None:
        kind, wide = copy.launch >> 3 & 3, bool(copy.launch >> 27 & 1)
        if kind == CONDITIONAL:
            raise _error(INVALID_CONFIG, "conditional interrupt semaphores are not emulated")
        record = 16 if kind == FOUR_WORDS else 8 if wide else 4
        if copy.semaphore % record:
            raise _error(UNALIGNED_SEMAPHORE, f"semaphore of {record} bytes at {copy.semaphore:#x}, misaligned")
        reduction = None
        if copy.launch >> 19 & 1:
            reduction = semaphore.COPY_REDUCTIONS.get(copy.launch >> 14 & 15)
            if reduction is None:
                raise _error(INVALID_CONFIG, f"semaphore reduction {copy.launch >> 14 & 15} does not exist")
        semaphore.release(
            self._channel,
            copy.semaphore,
            copy.payload if wide else copy.payload & 0xFFFFFFFF,
            HubClient.GRCOPY,
            wide=wide,
            stamped=kind == FOUR_WORDS,
            reduction=reduction,
            signed=not copy.launch >> 18 & 1,
            what="copy engine's semaphore",
        )
