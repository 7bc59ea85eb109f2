"""The host engine's view of a channel: its PBDMA. Fetches GPFIFO entries and pushbuffers, executes host methods, hands
the rest to the engine objects bound to the subchannels.

A channel is a coroutine: it runs until it has to wait and says for what (`Wait`), and the scheduler resumes it then.
Sources: NVIDIA open-gpu-doc clc76f.h, dev_ram and dev_pbdma; the L4T r36.4.3 driver for USERD and interrupt bits.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from tegrad.hw.chips import Chip
from tegrad.hw.classes import HostMethod, MemOp
from tegrad.hw.faults import PbdmaIntr0, PbdmaIntr1
from tegrad.hw.gpfifo import GP_ENTRY_SIZE, VA_LIMIT, GpOpcode, MethodOp, Subchannel, Userd, decode_gp_entry, token
from tegrad.orin import semaphore
from tegrad.orin.events import Awaken, ClassError, GpuEvent, NonStall, Note, PbdmaFault, SyncptIncrement
from tegrad.orin.memory import PAGE, AddressSpace, Fault, HubClient
from tegrad.orin.worker import Job, Worker

if TYPE_CHECKING:
    from tegrad.orin.runlist import Tsg
    from tegrad.orin.scheduler import Scheduler

FIRST_ENGINE_METHOD = 0x100
"""Methods below are the host's own, whatever the subchannel, except SET_OBJECT."""

LONG_SEGMENT_WORDS = 4096
"""Words up to which a segment becomes a list at once; how many are executed in a row before others get a turn."""

GRAPHICS_RUNLIST = 0


class Wait(Enum):
    """What a channel waits for."""

    DOORBELL = auto()
    TURN = auto()
    """Nothing: it only lets other channels go first."""
    WORK = auto()
    """Its own grids and copies."""
    MEMORY = auto()
    """A semaphore that anyone may write, the CPU included."""


Waiting = Generator[Wait, None, None]


class EngineObject(Protocol):
    """A class bound to a subchannel. `unit` tells which engine it is: switching between units waits for idle."""

    unit: str
    class_id: int

    def method(self, offset: int, data: int) -> Waiting | None:
        """Execute one method; the iterator, if any, has to be run to its end before the next one."""

    def bulk(self, offset: int, data: Sequence[int]) -> bool:
        """Execute the same method with all of `data`; False if it has to be done word by word."""


class HostChannel:
    """One channel: GPFIFO, USERD, host method state, bound objects, and the thread that runs its engine work."""

    def __init__(
        self,
        scheduler: Scheduler,
        chip: Chip,
        chid: int,
        tsg: Tsg,
        vm: AddressSpace,
        runlist: int,
        gpfifo_va: int,
        entries: int,
        userd_fd: int,
    ) -> None:
        self.chid = chid
        self.tsg = tsg
        self.vm = vm
        self.chip = chip
        self.runlist = runlist
        self.token = token(chid, runlist)
        self.scheduler = scheduler
        self.worker = Worker(f"gpu-channel-{chid}", vm, self._on_fault, scheduler.changed, scheduler.race)
        self.rung = False
        self.enabled = True
        self.dead = False
        self.state = Wait.DOORBELL
        self.run = self._main()
        # the base register holds bits 39:3; the driver masks the rest silently
        self._base = gpfifo_va & (VA_LIMIT - 1)
        self._entries = entries
        self._map = mmap.mmap(userd_fd, PAGE)
        self._userd = memoryview(self._map).cast("I")
        self._get = 0
        self._objects: list[EngineObject | None] = [None] * 8
        self._unit = ""
        self._sem_lo = self._sem_hi = self._payload_lo = self._payload_hi = 0
        self._old_hi = self._old_lo = self._old_payload = 0
        self._header = self._shadow = self._method = self._data = 0
        self._noted: set[str] = set()
        self._race = scheduler.race

    @property
    def pending(self) -> bool:
        """Whether it was told of work that it has not executed to the end."""
        return not self.dead and (self.rung or self.state is not Wait.DOORBELL)

    def close(self) -> None:
        """Release USERD. The worker is closed by whoever destroys the channel."""
        self.run.close()
        self._userd.release()
        self._map.close()

    # -- what engine objects use --------------------------------------------------------------------------------------

    def emit(self, event: GpuEvent) -> None:
        """Report an event of this channel."""
        self.scheduler.on_event(event)

    def note(self, text: str) -> None:
        """Tell, once, about something that silicon does silently."""
        if text not in self._noted:
            self._noted.add(text)
            self.emit(Note(self.chid, self.tsg.id, text))

    def interrupt(self) -> None:
        """Raise the non-stalling interrupt."""
        self.emit(NonStall(self.chid, self.tsg.id))

    def awaken(self) -> None:
        """Raise the interrupt of a semaphore release that awakens."""
        self.emit(Awaken(self.chid, self.tsg.id))

    def stored(self, syncpt: int | None) -> None:
        """A semaphore has been released: others may go on; `syncpt` is the syncpoint that took it, if one did."""
        if syncpt is not None:
            self.emit(SyncptIncrement(self.chid, self.tsg.id, syncpt))
        self.scheduler.changed()

    def submit(self, job: Job, *, unordered: bool = False) -> None:
        """Queue engine work after what this channel has queued before; `unordered` if nothing waits between."""
        self.worker.submit(job, unordered=unordered)

    def drain(self) -> Waiting:
        """Wait until all engine work of this channel is done."""
        while not self.worker.idle:
            yield Wait.WORK

    def after_drain(self, action: Callable[[], None]) -> Waiting | None:
        """Run `action` when the channel is idle: at once if it is."""
        if self.worker.idle:
            action()
            return None
        return self._drain_then(action)

    def _drain_then(self, action: Callable[[], None]) -> Waiting:
        yield from self.drain()
        action()

    def wait_memory(self, ready: Callable[[], bool]) -> Waiting | None:
        """Block until `ready()`, which looks at memory and may raise a Fault."""
        return None if ready() else self._poll(ready)

    def _poll(self, ready: Callable[[], bool]) -> Waiting:
        while not ready():
            self.settle()
            yield Wait.MEMORY

    def settle(self) -> None:
        """Between two pieces of work: sectors leave the L2, and it tells what it has found."""
        l2 = self.vm.l2
        l2.settle()
        if l2.tell:
            for text in l2.told():
                self.note(text)

    def _on_fault(self, error: BaseException) -> None:
        self.scheduler.fault(self, error)

    # -- GPFIFO -------------------------------------------------------------------------------------------------------

    def _main(self) -> Waiting:
        while True:
            while not self.rung:
                yield Wait.DOORBELL
            yield from self._hesitate()
            self.rung = False
            put = self._put()
            while self._get != put:
                yield from self._entry(self._fetch_entry())
                if self.rung:
                    self.rung, put = False, self._put()
                if self._get != put:
                    yield Wait.TURN

    def _hesitate(self) -> Waiting:
        if self._race is not None and (delay := self._race.fetch_delay()):
            until = time.monotonic() + delay
            while time.monotonic() < until:
                yield Wait.MEMORY

    def _put(self) -> int:
        put = self._userd[Userd.GP_PUT >> 2]
        if put >= self._entries:
            raise self._pbdma(PbdmaIntr0.GPPTR, f"GP_PUT {put} lies outside a ring of {self._entries} entries")
        return put

    def _fetch_entry(self) -> int:
        if self._base + self._entries * GP_ENTRY_SIZE > VA_LIMIT:
            raise self._pbdma(PbdmaIntr0.GPFIFO, f"the GPFIFO at {self._base:#x} ends past 2^40")
        va = self._base + self._get * GP_ENTRY_SIZE
        self.vm.require(va, GP_ENTRY_SIZE, HubClient.HOST, what=f"GPFIFO entry {self._get}")
        return self.vm.quads[va >> 3]

    def _advance(self) -> None:
        self._get = (self._get + 1) % self._entries
        self._userd[Userd.GP_GET >> 2] = self._get

    def _entry(self, raw: int) -> Waiting:
        self._shadow = raw
        entry = decode_gp_entry(raw)
        early = self._race is not None and self._race.early_get()
        if early:
            self._advance()
        if entry.dwords:
            # even the very last word below the limit is out of reach
            if entry.va + 4 * entry.dwords >= VA_LIMIT:
                raise self._pbdma(PbdmaIntr0.GPENTRY, f"{entry.dwords} words at {entry.va:#x} reach past 2^40")
            yield from self._segment(self._fetch(entry.va, entry.dwords))
        elif entry.opcode not in (GpOpcode.NOP, GpOpcode.GP_CRC, GpOpcode.PB_CRC):
            raise self._pbdma(PbdmaIntr0.GPENTRY, f"entry with opcode {entry.opcode} and no length")
        self.settle()
        if not early:
            self._advance()

    def _fetch(self, va: int, dwords: int) -> Sequence[int]:
        """The segment's words as they are now: later stores to it are not seen, as with the hardware's prefetch."""
        self.vm.require(va, 4 * dwords, HubClient.HOST, what="pushbuffer fetch")
        words = self.vm.words[va >> 2 : (va >> 2) + dwords]
        return words.tolist() if dwords <= LONG_SEGMENT_WORDS else memoryview(bytes(words)).cast("I")

    # -- method headers -----------------------------------------------------------------------------------------------

    def _segment(self, words: Sequence[int]) -> Waiting:
        at, end, turn = 0, len(words), LONG_SEGMENT_WORDS
        while at < end:
            header = words[at]
            at += 1
            op, count = header >> 29, header >> 16 & 0x1FFF
            if not op:
                if header and not header >> 16 & 3:
                    raise self._bad_header(header)
                continue  # a NOP or a subdevice mask
            self._header = header
            subch, method = header >> 13 & 7, header << 2 & 0x3FFC
            if op in _WITH_DATA:
                if at + count > end:
                    raise self._pbdma(PbdmaIntr0.PBSEG, f"the segment ends {at + count - end} words before the method")
                data = words[at : at + count]
                at += count
                if op == _NON_INC and count > 2 and self._bulk(subch, method, data):
                    continue
                for word in data:
                    waiting = self._execute(subch, method, word)
                    if waiting is not None:
                        yield from waiting
                    if op == _INC:
                        method = method + 4 & 0x3FFC
                    elif op == _ONE_INC:
                        op, method = _NON_INC, method + 4 & 0x3FFC
            elif op == _IMMEDIATE:
                waiting = self._execute(subch, method, count)
                if waiting is not None:
                    yield from waiting
            elif op == _END_SEGMENT:
                return
            else:
                raise self._bad_header(header)
            if at > turn:
                turn = at + LONG_SEGMENT_WORDS
                yield Wait.TURN

    def _bad_header(self, header: int) -> Fault:
        self._header = header
        return self._pbdma(PbdmaIntr0.PBENTRY, f"method header {header:#010x} has no meaning")

    def _bulk(self, subch: int, method: int, data: Sequence[int]) -> bool:
        target = self._objects[subch]
        return target is not None and target.unit == self._unit and target.bulk(method, data)

    def _execute(self, subch: int, method: int, data: int) -> Waiting | None:
        if method >= FIRST_ENGINE_METHOD:
            target = self._objects[subch]
            if target is not None and target.unit == self._unit:
                return target.method(method, data)
            self._method, self._data = method, data
            return self._first_method(subch, method, data)
        if not method:  # SET_OBJECT
            self._method, self._data = method, data
            return self._set_object(subch, data)
        handler = _HOST_METHODS.get(method)
        self._method, self._data = method, data
        if handler is None:
            raise self._pbdma(PbdmaIntr0.METHOD, f"the host has no method {method:#x}")
        return handler(self, data)

    # -- engine objects -----------------------------------------------------------------------------------------------

    def _require_context(self, subch: int) -> None:
        if self.runlist == GRAPHICS_RUNLIST and subch > Subchannel.COPY:
            raise self._pbdma(PbdmaIntr0.DEVICE, f"subchannel {subch} is for software methods")
        if not self.scheduler.has_context(self.chid):
            raise self._pbdma(None, "engine method without ALLOC_OBJ_CTX", PbdmaIntr1.CTXNOTVALID)

    def _first_method(self, subch: int, method: int, data: int) -> Waiting | None:
        """A method that meets another unit than the one before it, or no object at all."""
        self._require_context(subch)
        target = self._objects[subch]
        if target is None:
            raise Fault(
                ClassError,
                subchannel=subch,
                class_id=0,
                method=method,
                data=data,
                detail="method before SET_OBJECT on its subchannel",
            )
        return self._switch(target, method, data)

    def _switch(self, target: EngineObject, method: int, data: int) -> Waiting:
        yield from self.drain()
        self._unit = target.unit
        waiting = target.method(method, data)
        if waiting is not None:
            yield from waiting

    def _set_object(self, subch: int, data: int) -> Waiting | None:
        self._require_context(subch)
        class_id = data & 0xFFFF
        self._objects[subch] = self.scheduler.bind_object(self, subch, class_id, data)
        return None

    # -- host methods -------------------------------------------------------------------------------------------------

    def _pbdma(self, bit: PbdmaIntr0 | None, detail: str, bit_1: PbdmaIntr1 | None = None) -> Fault:
        return Fault(
            PbdmaFault,
            intr_0=0 if bit is None else 1 << bit,
            intr_1=0 if bit_1 is None else 1 << bit_1,
            header=self._header,
            shadow=self._shadow,
            method=self._method | (self._header >> 13 & 7) << 16,
            data=self._data,
            detail=detail,
        )

    def _nothing(self, data: int) -> None:
        """NOP, CLEAR_FAULTED, operands of MEM_OP; FB_FLUSH only orders what is in order here."""

    def _illegal(self, data: int) -> None:
        raise self._pbdma(PbdmaIntr0.METHOD, "the ILLEGAL method")

    def _non_stall(self, data: int) -> None:
        self.interrupt()

    def _mem_op_d(self, data: int) -> None:
        op = data >> 27
        if op in _PRIVILEGED_MEM_OPS:
            raise self._pbdma(None, f"memory operation {op} is privileged", PbdmaIntr1.HCE_PRIV)
        if op not in _MEM_OPS or op in _MISSING_MEM_OPS.get(self.chip.gpfifo_class, ()):
            raise self._pbdma(None, f"memory operation {op} does not exist", PbdmaIntr1.HCE_RE_ILLEGAL_OP)
        if op == MemOp.L2_SYSMEM_INVALIDATE:
            self.vm.l2.invalidate()
        elif op == MemOp.L2_FLUSH_DIRTY:
            self.vm.l2.write_back()

    def _set_reference(self, data: int) -> Waiting | None:
        def store() -> None:
            self._userd[Userd.REF >> 2] = data

        return self.after_drain(store)

    def _wfi(self, data: int) -> Waiting | None:
        return None if self.worker.idle else self.drain()

    def _yield(self, data: int) -> Waiting | None:
        return self._give_way() if data & 3 == 3 else None

    def _give_way(self) -> Waiting:
        yield Wait.TURN

    def _sem_execute(self, data: int) -> Waiting | None:
        op = data & 7
        wide = bool(data >> 24 & 1)
        va = self._sem_hi << 32 | self._sem_lo
        payload = self._payload_hi << 32 | self._payload_lo if wide else self._payload_lo
        if op in (_SEM_RELEASE, _SEM_REDUCTION):
            reduction = data >> 27 & 15 if op == _SEM_REDUCTION else None
            wait_idle, record, signed = bool(data >> 20 & 1), bool(data >> 25 & 1), not data >> 31
            return self._release(va, payload, wide, record, wait_idle, reduction, signed)
        return self._acquire(op, va, payload, wide)

    def _release(
        self, va: int, payload: int, wide: bool, record: bool, wait_idle: bool, reduction: int | None, signed: bool
    ) -> Waiting | None:
        if va & (15 if record else 7 if wide else 3):
            raise self._pbdma(PbdmaIntr0.SEMAPHORE, f"release of {16 if record else 8} bytes at {va:#x}, misaligned")
        reduce = None
        if reduction is not None:
            reduce = semaphore.HOST_REDUCTIONS.get(reduction)
            if reduce is None or (reduce in (semaphore.INC, semaphore.DEC) and (signed or wide)):
                raise self._pbdma(PbdmaIntr0.SEMAPHORE, f"reduction {reduction} in this format does not exist")

        def store() -> None:
            semaphore.release(
                self, va, payload, HubClient.HOST, wide=wide, stamped=record, reduction=reduce, signed=signed
            )

        if wait_idle:
            return self.after_drain(store)
        store()
        return None

    def _acquire(self, op: int, va: int, payload: int, wide: bool) -> Waiting | None:
        test = semaphore.ACQUIRE_TESTS.get(op)
        if test is None:
            raise self._pbdma(PbdmaIntr0.SEMAPHORE, f"semaphore operation {op} does not exist")
        if wide and va & 7:
            raise self._pbdma(PbdmaIntr0.SEMAPHORE, f"acquire of 8 bytes at {va:#x}, misaligned")
        view, index, width = (self.vm.quads, va >> 3, 64) if wide else (self.vm.words, va >> 2, 32)

        def ready() -> bool:
            self.vm.require(va, width >> 3, HubClient.HOST, what="semaphore acquire")
            return test(view[index], payload, width)

        return self.wait_memory(ready)

    def _semaphore_d(self, data: int) -> Waiting | None:
        va = self._old_hi << 32 | self._old_lo
        op = data & 31
        if op in _OLD_ACQUIRES:
            return self._acquire(_OLD_ACQUIRES[op], va, self._old_payload, False)
        if op not in _OLD_RELEASES:
            raise self._pbdma(PbdmaIntr0.SEMAPHORE, f"semaphore operation {op} does not exist")
        reduction = data >> 27 & 15 if op == _OLD_REDUCTION else None
        # these two bits are the opposite of SEM_EXECUTE's: 0 waits for idle, 0 is the 16-byte record
        return self._release(
            va, self._old_payload, False, not data >> 24 & 1, not data >> 20 & 1, reduction, not data >> 31
        )


def _store(attribute: str, mask: int) -> Callable[[HostChannel, int], None]:
    def handler(channel: HostChannel, data: int) -> None:
        setattr(channel, attribute, data & mask)

    return handler


# plain numbers: members of an IntEnum cost several times as much to look up
_INC, _NON_INC, _ONE_INC = int(MethodOp.INC), int(MethodOp.NON_INC), int(MethodOp.ONE_INC)
_IMMEDIATE, _END_SEGMENT = int(MethodOp.IMMEDIATE), int(MethodOp.END_SEGMENT)
_WITH_DATA = (_INC, _NON_INC, _ONE_INC)

_SEM_RELEASE, _SEM_REDUCTION = 1, 6
_OLD_REDUCTION = 16
_OLD_RELEASES = (2, _OLD_REDUCTION)
_OLD_ACQUIRES = {1: 0, 4: 3, 8: 4}
_PRIVILEGED_MEM_OPS = frozenset((MemOp.MMU_TLB_INVALIDATE, MemOp.MMU_TLB_INVALIDATE_TARGETED, MemOp.MMU_OPERATION))
_MEM_OPS = frozenset(MemOp) - _PRIVILEGED_MEM_OPS
_MISSING_MEM_OPS: Mapping[int, frozenset[int]] = MappingProxyType(
    {0xC86F: frozenset((MemOp.L2_WAIT_FOR_SYS_PENDING_READS,))}
)
"""By host class. On an H200 this one is a PBDMA error (docs/coherence.md)."""

_HOST_METHODS: Mapping[int, Callable[[HostChannel, int], Waiting | None]] = MappingProxyType(
    {
        int(offset): handler
        for offset, handler in (
            (HostMethod.ILLEGAL, HostChannel._illegal),
            (HostMethod.NOP, HostChannel._nothing),
            (HostMethod.SEMAPHOREA, _store("_old_hi", 0xFF)),
            (HostMethod.SEMAPHOREB, _store("_old_lo", 0xFFFFFFFC)),
            (HostMethod.SEMAPHOREC, _store("_old_payload", 0xFFFFFFFF)),
            (HostMethod.SEMAPHORED, HostChannel._semaphore_d),
            (HostMethod.NON_STALL_INTERRUPT, HostChannel._non_stall),
            (HostMethod.FB_FLUSH, HostChannel._nothing),
            (HostMethod.MEM_OP_A, HostChannel._nothing),
            (HostMethod.MEM_OP_B, HostChannel._nothing),
            (HostMethod.MEM_OP_C, HostChannel._nothing),
            (HostMethod.MEM_OP_D, HostChannel._mem_op_d),
            (HostMethod.SET_REFERENCE, HostChannel._set_reference),
            (HostMethod.SEM_ADDR_LO, _store("_sem_lo", 0xFFFFFFFC)),
            (HostMethod.SEM_ADDR_HI, _store("_sem_hi", 0xFF)),
            (HostMethod.SEM_PAYLOAD_LO, _store("_payload_lo", 0xFFFFFFFF)),
            (HostMethod.SEM_PAYLOAD_HI, _store("_payload_hi", 0xFFFFFFFF)),
            (HostMethod.SEM_EXECUTE, HostChannel._sem_execute),
            (HostMethod.WFI, HostChannel._wfi),
            (HostMethod.YIELD, HostChannel._yield),
            (HostMethod.CLEAR_FAULTED, HostChannel._nothing),
        )
    }
)
