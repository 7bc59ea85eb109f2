"""A GPU that executes nothing: it records what it is told, and doorbell writes make it raise events."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable

from tegrad.hw.chips import Chip
from tegrad.orin import events as ev

# Doorbell registers that mean something to the fake only.
FAULT, NON_STALL, SYNCPT, DIE, SM_ERROR, STUCK, AWAKEN = 0x1000, 0x1004, 0x1008, 0x100C, 0x1010, 0x1014, 0x1018


class BrokenGpu:
    """One that does not come up."""

    def __init__(self, *_: object) -> None:
        raise RuntimeError("no silicon today")


class FakeGpu:
    """The interface of `tegrad.orin.gpu.Gpu`."""

    def __init__(self, chip: Chip, on_event: Callable[[ev.GpuEvent], None], doorbell_fd: int) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.rung: list[int] = []
        self.channels: dict[int, int] = {}
        self.mapped: dict[tuple[int, int], int] = {}
        self._on_event = on_event
        threading.Thread(target=self._listen, args=(doorbell_fd,), daemon=True).start()

    def _listen(self, fd: int) -> None:
        while True:
            offset, value = struct.unpack("<II", os.read(fd, 8))
            chid = value & 0xFFF
            tsg = self.channels.get(chid, 0)
            if offset == FAULT:
                self._on_event(ev.MmuFault(chid, tsg, 0x123000, 2, 1, 0, 3, gpc=1, detail="fake"))
            elif offset == SM_ERROR:
                self._on_event(ev.SmException(chid, tsg, 0, 1, 2, 4, 0x10010, 0x2000, "kern", "fake"))
            elif offset == NON_STALL:
                self._on_event(ev.NonStall(chid, tsg))
            elif offset == AWAKEN:
                self._on_event(ev.Awaken(chid, tsg))
            elif offset == STUCK:
                self._on_event(ev.ContextSwitchTimeout(-1, tsg))
            elif offset == SYNCPT:
                self._on_event(ev.SyncptIncrement(0, 0, value))
            elif offset == DIE:
                os._exit(9)
            else:
                self.rung.append(value)

    def map(
        self, vm: int, va: int, size: int, fd: int, offset: int, writable: bool, cached: bool = False, label: str = ""
    ) -> None:
        self.calls.append(("map", vm, va, size, offset, writable, cached, label))
        self.mapped[vm, va] = size

    def unmap(self, vm: int, va: int, size: int) -> None:
        del self.mapped[vm, va]

    def vm_destroy(self, vm: int) -> None:
        self.mapped = {place: size for place, size in self.mapped.items() if place[0] != vm}

    def channel_create(self, chid: int, tsg: int, vm: int, runlist: int, va: int, entries: int, userd: int) -> None:
        self.channels[chid] = tsg

    def channel_destroy(self, chid: int) -> None:
        del self.channels[chid]

    def stats(self) -> dict[str, object]:
        objects = sum(call[0] == "object_ctx" for call in self.calls)
        return {"rung": self.rung, "objects": objects, "mapped": len(self.mapped), "channels": len(self.channels)}

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args: self.calls.append((name, *args))


class SlowNote(ev.Note):
    """One that takes its time on the way to the driver."""

    def __reduce__(self) -> tuple[object, ...]:
        time.sleep(0.05)
        return ev.Note, (-1, -1, "slow")


class LastWords(FakeGpu):
    """One on which a channel faults as it is destroyed, which is reported late."""

    def channel_destroy(self, chid: int) -> None:
        self._on_event(SlowNote(-1, -1, ""))
        self._on_event(ev.MmuFault(chid, self.channels[chid], 0x123000, 2, 1, 0, 3, gpc=1, detail="fake"))
        super().channel_destroy(chid)
