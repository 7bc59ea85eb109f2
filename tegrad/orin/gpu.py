"""The GPU of the emulated board: address spaces, channels and engines behind the calls that its driver makes.

Usable by itself: map memfds, create a channel, write a doorbell record into the pipe. `events` says what comes back.

    memory      address spaces, page flags, MMU faults       compute      the compute class: launches, invalidations
    l2          what cached mappings show of memory
    scheduler   doorbells, turns, faults                     launch       QMDs decoded, what SKED refuses
    runlist     TSGs, their time slices, preemption          grid         runs grids, releases, dependents
    host        rings, pushbuffers, host methods
    worker      a channel's thread for grids and copies      program      instruction cache: code -> PTX kernel
    semaphore   releases, acquires, reductions               constants    constant cache
    copy_engine copies, fills, semaphores                    inline       data in the pushbuffer
    race        liberties that silicon may take              events       what is reported
    local_memory where warps spill

Not emulated, and refused or noted where it matters: block-linear memory, graphics and 2D methods, macros (MME), queue
QMDs, clusters, render enable, traps. Only grids are bound to their TSG's time slice: host methods and
copies of all TSGs go on side by side. The L1 data cache is always coherent. A kernel's store to a syncpoint's shim is
an MMU fault; semaphore releases there count. Reductions are not atomic against a grid's own atomics.

Inferred, not observed: fault types and clients of host accesses, what a misaligned release of a QMD or a report does,
the copy engine's error codes, that a ring with a base above 2^40 is fetched from the address without its upper bits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict

from tegrad.hw.chips import Chip
from tegrad.hw.gpfifo import Subchannel
from tegrad.orin.compute import ComputeContext, ComputeObject
from tegrad.orin.copy_engine import CopyObject
from tegrad.orin.events import GpuEvent
from tegrad.orin.grid import Counters
from tegrad.orin.host import GRAPHICS_RUNLIST, EngineObject, HostChannel
from tegrad.orin.inline import InlineToMemory
from tegrad.orin.l2 import L2
from tegrad.orin.memory import PAGE_SHIFT, AddressSpace
from tegrad.orin.methods import class_error
from tegrad.orin.program import Modules
from tegrad.orin.race import Race
from tegrad.orin.runlist import Preemption, Tsg
from tegrad.orin.scheduler import PREEMPT_SECONDS, Scheduler
from tegrad.ptx.l2 import Mode

SHIM_BYTES = 0x10000
"""Bytes of a syncpoint's shim page."""


def _within(space: AddressSpace, va: int, size: int) -> int:
    """How many bytes of a range an address space reaches."""
    return min(size, space.span - va)


class _Inert:
    """The graphics and 2D classes: they bind, and have no methods here."""

    unit = "gr"

    def __init__(self, class_id: int, subchannel: int) -> None:
        self.class_id = class_id
        self._subchannel = subchannel

    def method(self, offset: int, data: int) -> None:
        raise class_error(self._subchannel, self.class_id, offset, data, "graphics methods are not emulated")

    def bulk(self, offset: int, data: object) -> bool:
        return False


class Gpu:
    """One GPU. Methods are called by the driver, one at a time, and return when the change is in force.

    `on_event` gets every `GpuEvent`, from the engine threads; it must neither block nor call back. `doorbell_fd` is the
    read end of a pipe of 8-byte records (offset, value), one per store to the usermode page; it stays the caller's.
    With a `race_seed`, here or in the environment, engines take the liberties that silicon may take (see `race`).
    `l2_mode` is how the L2 behaves (see `l2`), unless the environment is to say.
    """

    def __init__(
        self,
        chip: Chip,
        on_event: Callable[[GpuEvent], None],
        doorbell_fd: int,
        *,
        race_seed: int | None = None,
        l2_mode: Mode | None = None,
    ) -> None:
        self.chip = chip
        self._vms: dict[int, AddressSpace] = {}
        self._tsgs: dict[int, Tsg] = {}
        self._counters = Counters()
        self._modules = Modules()
        self._lock = threading.Lock()
        race = Race.from_environment() if race_seed is None else Race(race_seed)
        self.l2 = L2(chip.l2_bytes, l2_mode, None if race is None else race.evictions_seed())
        self._scheduler = Scheduler(on_event, doorbell_fd, self._bind, lambda: tuple(self._tsgs.values()), race)

    # -- address spaces -----------------------------------------------------------------------------------------------

    def vm_create(self, vm: int) -> None:
        """Make an address space. OutOfAddresses if the host has no room for one more.

        It reaches as far as anything can run: a channel fetches its ring, which lies after the client's range, by 40
        bits of address. What is mapped beyond is accepted and never seen.
        """
        self._vms[vm] = AddressSpace(vm, l2=self.l2)

    def vm_destroy(self, vm: int) -> None:
        """Drop an address space with all its mappings. Its channels are gone already."""
        self.l2.flush()
        space = self._vms.pop(vm)
        with self._scheduler.exclusive():
            for tsg in self._tsgs.values():
                tsg.contexts.pop(vm, None)
        space.close()

    def map(
        self, vm: int, va: int, size: int, fd: int, offset: int, writable: bool, cached: bool = False, label: str = ""
    ) -> None:
        """Map `size` bytes of a memfd from `offset` at `va`. The fd may be closed afterwards.

        `cached`: the L2 keeps what is touched there; `label` names the buffer in its reports.
        """
        space = self._vms[vm]
        if (within := _within(space, va, size)) > 0:
            space.map(va, within, fd, offset, writable, cached, label)

    def sparse(self, vm: int, va: int, size: int, unmaps: bool = False) -> None:
        """Let [va, va + size) read as zero and take stores without an effect, whatever was mapped there.

        Where that `unmaps` something, the L2 is flushed and invalidated, as by `unmap`.
        """
        space = self._vms[vm]
        if unmaps:
            self.l2.flush()
        if (within := _within(space, va, size)) > 0:
            space.sparse(va, within)

    def unmap(self, vm: int, va: int, size: int) -> None:
        """Unmap: later accesses fault, also those of a running grid. The whole L2 is flushed and invalidated."""
        space = self._vms[vm]
        self.l2.flush()
        if (within := _within(space, va, size)) > 0:
            space.unmap(va, within)

    def flush_l2(self, invalidate: bool) -> None:
        """Dirty sectors go to memory; with `invalidate` nothing is kept any more."""
        self.l2.write_back()
        if invalidate:
            self.l2.invalidate()

    def syncpoint(self, syncpt: int, vm: int, va: int) -> None:
        """Make semaphore releases to the shim at `va` increment a syncpoint."""
        pages = range(va >> PAGE_SHIFT, va + SHIM_BYTES >> PAGE_SHIFT)
        self._vms[vm].syncpoints |= dict.fromkeys(pages, syncpt)

    def syncpoint_free(self, syncpt: int) -> None:
        """Forget a syncpoint's shims."""
        for space in self._vms.values():
            space.syncpoints = {page: number for page, number in space.syncpoints.items() if number != syncpt}

    # -- TSGs ---------------------------------------------------------------------------------------------------------

    def tsg_create(self, tsg: int) -> None:
        """Make a channel group."""
        self._tsgs[tsg] = Tsg(tsg)

    def tsg_destroy(self, tsg: int) -> None:
        """Drop a channel group. Its channels are gone already."""
        self._tsgs.pop(tsg)

    def tsg_enable(self, tsg: int) -> None:
        """Enable all its channels."""
        self._scheduler.enable(self._tsgs[tsg].channels.values(), True)

    def tsg_disable(self, tsg: int) -> None:
        """Disable all its channels: grids that run go on until their time slice is over."""
        self._scheduler.enable(self._tsgs[tsg].channels.values(), False)

    def tsg_preempt(self, tsg: int, seconds: float = PREEMPT_SECONDS) -> bool:
        """Take the group off the engine once; False if its work does not give way within `seconds`."""
        return self._scheduler.preempt(self._tsgs[tsg], seconds)

    def tsg_schedule(self, tsg: int, timeslice_us: int, level: int) -> None:
        """Set the group's time slice and interleave level."""
        with self._scheduler.exclusive():
            group = self._tsgs[tsg]
            group.timeslice, group.level = timeslice_us / 1e6, level

    def tsg_preemption(self, tsg: int, mode: int) -> None:
        """Set how the group's grids give way: 1 WFI, 2 CTA, 4 CILP."""
        with self._scheduler.exclusive():
            self._tsgs[tsg].preemption = Preemption(mode)

    def tsg_abort(self, tsg: int) -> None:
        """Stop all its channels for good, what runs included. Unknown ids are fine."""
        with self._scheduler.exclusive():
            if group := self._tsgs.get(tsg):
                self._scheduler.kill(group)

    # -- channels -----------------------------------------------------------------------------------------------------

    def channel_create(
        self, chid: int, tsg: int, vm: int, runlist: int, gpfifo_va: int, entries: int, userd_fd: int
    ) -> None:
        """Bring a channel into service. USERD is the first page of `userd_fd`, which may be closed afterwards."""
        self._scheduler.add(
            HostChannel(
                self._scheduler, self.chip, chid, self._tsgs[tsg], self._vms[vm], runlist, gpfifo_va, entries, userd_fd
            )
        )

    def channel_destroy(self, chid: int) -> bool:
        """Stop a channel and drop it, its contexts included; returns when it is off the engines.

        A grid that runs is preempted and dropped. If it does not give way in 100 ms it is aborted, and with it the
        whole TSG: True then. Unknown ids are fine.
        """
        return self._scheduler.remove(chid)

    def channel_enable(self, chid: int, on: bool) -> None:
        """Let the host load this channel, or load it no more. Unknown ids are fine."""
        if channel := self._scheduler.channel(chid):
            self._scheduler.enable((channel,), on)

    def channel_busy(self, chid: int) -> bool:
        """Whether the channel has fetched work that it has not executed, or waits in the middle of it."""
        channel = self._scheduler.channel(chid)
        return channel is not None and channel.pending

    def object_ctx(self, chid: int, class_id: int) -> None:
        """Give the channel an engine context; before, engine methods fault."""
        self._scheduler.add_context(chid, class_id)

    # -- the rest -----------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, object]:
        """Counts: launches, instructions, bytes, in all and by kernel; copies; doorbells; mappings by address space."""
        kernels = {name: asdict(count) for name, count in list(self._counters.kernels.items())}
        return {
            "doorbells": self._scheduler.doorbells,
            "launches": sum(k["launches"] for k in kernels.values()),
            "instructions": sum(k["instructions"] for k in kernels.values()),
            "bytes_read": sum(k["bytes_read"] for k in kernels.values()),
            "bytes_written": sum(k["bytes_written"] for k in kernels.values()),
            "copies": self._counters.copies,
            "bytes_copied": self._counters.bytes_copied,
            "kernels": kernels,
            "vms": {vm: space.counts() for vm, space in list(self._vms.items())},
        }

    def close(self) -> None:
        """Stop everything and give all memory back."""
        self._scheduler.close()
        for vm in list(self._vms):
            self.vm_destroy(vm)
        self.l2.close()

    def _bind(self, channel: HostChannel, subchannel: int, class_id: int, data: int) -> EngineObject:
        """The engine object for SET_OBJECT; class error where the class is not the subchannel's."""
        chip = self.chip
        if channel.runlist != GRAPHICS_RUNLIST or subchannel == Subchannel.COPY:
            wanted = chip.dma_class
        else:
            wanted = (chip.threed_class, chip.compute_class, chip.i2m_class, chip.twod_class)[subchannel]
        if class_id != wanted:
            detail = f"class {class_id:#06x} on subchannel {subchannel}, which takes {wanted:#06x}"
            raise class_error(subchannel, class_id, 0, data, detail)
        if class_id == chip.dma_class:
            return CopyObject(channel, class_id, subchannel, self._counters)
        if class_id == chip.compute_class:
            return ComputeObject(channel, self._context(channel), class_id)
        if class_id == chip.i2m_class:
            return InlineToMemory(channel, class_id, subchannel)
        return _Inert(class_id, subchannel)

    def _context(self, channel: HostChannel) -> ComputeContext:
        contexts = channel.tsg.contexts
        context = contexts.get(channel.vm.vm)
        if context is None:
            context = ComputeContext(self.chip, channel.vm, self._modules, self._counters)
            contexts[channel.vm.vm] = context
        return context
