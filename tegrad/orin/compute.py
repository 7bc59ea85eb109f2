"""The compute class as a channel sees it: methods of c7c0 and cbc0, and the context that channels of a TSG share.

Most methods only set state. The ones that do something launch QMDs, invalidate caches, release report semaphores and
write inline data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from tegrad.hw.chips import Chip
from tegrad.hw.classes import ComputeMethod as M
from tegrad.hw.gpfifo import Subchannel
from tegrad.orin import semaphore
from tegrad.orin.grid import Counters, GridRunner, LaunchState
from tegrad.orin.inline import InlineToMemory
from tegrad.orin.launch import LaunchSpec
from tegrad.orin.memory import AddressSpace, HubClient
from tegrad.orin.methods import class_error, require_method
from tegrad.orin.program import Modules

if TYPE_CHECKING:
    from tegrad.orin.host import HostChannel, Waiting

SCHEDULING_ACTIONS = frozenset((2, 3, 9, 10))
"""PCAS actions that launch the QMD: schedule, with invalidate and copy, with prefetch, with all of them."""

INVALIDATING_ACTIONS = frozenset((1, 3, 10))
"""PCAS actions that drop what the QMD cache holds of the QMD, before they do anything else."""

PREFETCH = 8
SILENT_ACTIONS = frozenset((0, 1, PREFETCH))
"""NOP, invalidate and prefetch: they launch nothing."""

DECREMENT_DEPENDENCE, INCREMENT_DEPENDENCE = 7, 12

_STATE = frozenset(
    (
        M.SET_SHADER_SHARED_MEMORY_WINDOW_A,
        M.SET_SHADER_SHARED_MEMORY_WINDOW_B,
        M.SET_SHADER_LOCAL_MEMORY_WINDOW_A,
        M.SET_SHADER_LOCAL_MEMORY_WINDOW_B,
        M.SET_SHADER_LOCAL_MEMORY_A,
        M.SET_SHADER_LOCAL_MEMORY_B,
        M.SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A,
        M.SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_B,
    )
)
"""Methods that a launch depends on."""

_NOT_EMULATED = ("CALL_MME", "LOAD_MME", "NOTIFY", "PERFMON", "SET_MME")
"""Prefixes of methods that do something which this emulation does not; it says so once."""


class ComputeContext:
    """State of the compute class in one TSG and address space."""

    def __init__(self, chip: Chip, vm: AddressSpace, modules: Modules, counters: Counters) -> None:
        self.regs: dict[int, int] = {}
        self.runner = GridRunner(chip, vm, modules, counters)
        self._constants = 0
        self._instructions = 0
        self._state: LaunchState | None = None
        self.pcas_launches = chip.qmd != "V3"
        self.prefetched: dict[int, LaunchSpec] = {}
        """The QMD cache: only while the GPU races does it hold anything."""

    def set(self, offset: int, data: int) -> None:
        """Set a state method."""
        self.regs[offset] = data
        if offset in _STATE:
            self._state = None

    def invalidate(self, *, instructions: bool, constants: bool) -> None:
        """Make launches from now on fetch anew."""
        self._instructions += instructions
        self._constants += constants
        self._state = None

    def pair(self, upper: int, mask: int = 0x1FFFF) -> int:
        """The value of an upper and a lower state method, one after the other."""
        regs = self.regs
        return (regs.get(upper, 0) & mask) << 32 | regs.get(upper + 4, 0)

    def state(self) -> LaunchState:
        """What a launch takes from the context now."""
        if self._state is None:
            self._state = LaunchState(
                shared_window=self.pair(M.SET_SHADER_SHARED_MEMORY_WINDOW_A),
                local_window=self.pair(M.SET_SHADER_LOCAL_MEMORY_WINDOW_A),
                local_memory=self.pair(M.SET_SHADER_LOCAL_MEMORY_A),
                local_per_tpc=self.pair(M.SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A, 0xFF),
                constants=self._constants,
                instructions=self._instructions,
            )
        return self._state


class ComputeObject:
    """The compute class bound to a channel's subchannel."""

    unit = "gr"

    def __init__(self, channel: HostChannel, context: ComputeContext, class_id: int) -> None:
        self.class_id = class_id
        self._channel = channel
        self._context = context
        self._inline = InlineToMemory(channel, class_id, Subchannel.COMPUTE)
        self._plain: set[int] = set()
        """Methods seen so far that only set state."""

    def method(self, offset: int, data: int) -> Waiting | None:
        """Execute one method."""
        if offset not in self._plain:
            handler = _TRIGGERS.get(offset)
            if handler is not None:
                return handler(self, data)
            if self._inline.takes(offset):
                return self._inline.method(offset, data)
            if M.LOAD_INLINE_QMD_DATA <= offset < M.LOAD_INLINE_QMD_DATA + self._context.runner.qmd_size:
                self._inline_qmd(offset - M.LOAD_INLINE_QMD_DATA, data)
                return None
            name = require_method(Subchannel.COMPUTE, self.class_id, offset, data)
            if name.startswith(_NOT_EMULATED):
                self._channel.note(f"compute method {name} is not emulated")
            self._plain.add(offset)
        self._context.set(offset, data)
        return None

    def bulk(self, offset: int, data: Sequence[int]) -> bool:
        """Inline data in one go."""
        return self._inline.bulk(offset, data)

    # -- launches -----------------------------------------------------------------------------------------------------

    def _qmd(self) -> int:
        return self._context.regs.get(M.SEND_PCAS_A, 0) << 8

    def _inline_qmd(self, offset: int, data: int) -> None:
        """A word of a QMD that travels in the pushbuffer: it is stored where SET_INLINE_QMD_ADDRESS says."""
        regs = self._context.regs
        va = (regs.get(M.SET_INLINE_QMD_ADDRESS_A, 0) & 0x1FF) << 40 | regs.get(M.SET_INLINE_QMD_ADDRESS_B, 0) << 8
        self._channel.vm.write(va + offset, data.to_bytes(4, "little"), HubClient.SKED, what="inline QMD")

    def _pcas2(self, data: int) -> None:
        action = data & 15
        context, va, race = self._context, self._qmd(), self._channel.scheduler.race
        if action in INVALIDATING_ACTIONS:
            context.runner.require_idle(va)
            context.prefetched.pop(va, None)
        if action == PREFETCH and race is not None and race.early_qmd():
            context.prefetched[va] = context.runner.read(va)
        if action in SCHEDULING_ACTIONS:
            self._launch(self._qmd())
        elif action in (DECREMENT_DEPENDENCE, INCREMENT_DEPENDENCE):
            self._depend(self._qmd(), -1 if action == DECREMENT_DEPENDENCE else 1)
        elif action not in SILENT_ACTIONS:
            raise self._error(M.SEND_SIGNALING_PCAS2_B, data, f"PCAS action {action} is not emulated")

    def _pcas(self, data: int) -> None:
        """SEND_SIGNALING_PCAS_B: on an Orin Nano it launched nothing, without an error (docs/board.md)."""
        if data & 2 and self._context.pcas_launches:
            self._launch(self._qmd())
        elif data & 2:
            self._channel.note("SEND_SIGNALING_PCAS_B launches nothing on this chip: use SEND_SIGNALING_PCAS2_B")

    def _launch(self, va: int) -> None:
        channel, runner, state = self._channel, self._context.runner, self._context.state()
        race = channel.scheduler.race
        spec = self._context.prefetched.pop(va, None)
        if spec is None and race is not None and race.early_qmd():
            spec = runner.read(va)
        runner.announce(va, channel.worker)
        channel.submit(partial(runner.run, channel, va, state, spec, race), unordered=True)

    def _depend(self, va: int, delta: int) -> None:
        if self._context.runner.depend(va, delta):
            self._launch(va)

    # -- caches -------------------------------------------------------------------------------------------------------

    def _invalidate(self, data: int) -> Waiting | None:
        return self._channel.after_drain(partial(self._invalidate_now, data))

    def _invalidate_now(self, data: int) -> None:
        self._context.invalidate(instructions=bool(data & 1), constants=bool(data >> 12 & 1))

    def _invalidate_qmds(self, data: int) -> None:
        self._context.prefetched.clear()

    def _wait_for_idle(self, data: int) -> Waiting | None:
        return self._channel.drain()

    # -- report semaphores --------------------------------------------------------------------------------------------

    def _error(self, method: int, data: int, detail: str) -> Exception:
        return class_error(Subchannel.COMPUTE, self.class_id, method, data, detail)

    def _report(self, data: int) -> Waiting | None:
        context = self._context
        regs = context.regs
        va = regs.get(M.SET_REPORT_SEMAPHORE_ADDRESS_UPPER, 0) << 32 | regs.get(M.SET_REPORT_SEMAPHORE_ADDRESS_LOWER, 0)
        low, high = regs.get(M.SET_REPORT_SEMAPHORE_PAYLOAD_LOWER, 0), regs.get(M.SET_REPORT_SEMAPHORE_PAYLOAD_UPPER, 0)
        operation, wide = data & 3, bool(data >> 12 & 1)
        payload = high << 32 | low if wide else low
        if operation == 1:
            return self._acquire(va, payload, wide)
        if operation:
            raise self._error(M.REPORT_SEMAPHORE_EXECUTE, data, f"report operation {operation} is not emulated")
        record = {0: 16, 1: 4, 2: 8}.get(data >> 3 & 3, 16)
        reduction = data >> 7 & 7 if data >> 6 & 1 else None
        return self._release(va, payload, record, wide, reduction, bool(data >> 10 & 1), bool(data >> 2 & 1))

    def _report_d(self, data: int) -> Waiting | None:
        regs = self._context.regs
        va = regs.get(M.SET_REPORT_SEMAPHORE_A, 0) << 32 | regs.get(M.SET_REPORT_SEMAPHORE_B, 0)
        if data & 3:
            raise self._error(M.SET_REPORT_SEMAPHORE_D, data, f"report operation {data & 3} is not emulated")
        record = 4 if data >> 28 & 1 else 16
        reduction = data >> 9 & 7 if data >> 3 & 1 else None
        payload = regs.get(M.SET_REPORT_SEMAPHORE_C, 0)
        return self._release(va, payload, record, False, reduction, bool(data >> 17 & 1), bool(data >> 20 & 1))

    def _acquire(self, va: int, payload: int, wide: bool) -> Waiting | None:
        vm = self._channel.vm
        view, index, size = (vm.quads, va >> 3, 8) if wide else (vm.words, va >> 2, 4)

        def ready() -> bool:
            vm.require(va, size, HubClient.FE, what="report semaphore acquire")
            return view[index] == payload

        return self._channel.wait_memory(ready)

    def _release(
        self, va: int, payload: int, record: int, wide: bool, reduction: int | None, signed: bool, awaken: bool
    ) -> Waiting | None:
        if va % record:
            raise self._error(M.REPORT_SEMAPHORE_EXECUTE, record, f"release of {record} bytes at {va:#x}, misaligned")
        reduce = None if reduction is None else semaphore.SHADER_REDUCTIONS[reduction]

        def store() -> None:
            semaphore.release(
                self._channel,
                va,
                payload,
                HubClient.FE,
                wide=wide or record == 8,
                stamped=record == 16,
                reduction=reduce,
                signed=signed,
                what="report semaphore release",
            )
            if awaken:
                self._channel.awaken()

        return self._channel.after_drain(store)


_TRIGGERS: Mapping[int, Callable[[ComputeObject, int], Waiting | None]] = MappingProxyType(
    {
        int(offset): handler
        for offset, handler in (
            (M.WAIT_FOR_IDLE, ComputeObject._wait_for_idle),
            (M.REPORT_SEMAPHORE_EXECUTE, ComputeObject._report),
            (M.SET_REPORT_SEMAPHORE_D, ComputeObject._report_d),
            (M.INVALIDATE_SHADER_CACHES, ComputeObject._invalidate),
            (M.INVALIDATE_SHADER_CACHES_NO_WFI, ComputeObject._invalidate_now),
            (M.INVALIDATE_SKED_CACHES, ComputeObject._invalidate_qmds),
            (M.SEND_SIGNALING_PCAS_B, ComputeObject._pcas),
            (M.SEND_SIGNALING_PCAS2_B, ComputeObject._pcas2),
        )
    }
)
