"""Runs launches: reads the QMD when its turn comes, checks it, runs the grid, releases semaphores, launches dependents.

Everything here happens in a channel's worker thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from tegrad.hw import bank0
from tegrad.hw.chips import Chip
from tegrad.hw.faults import MMU_CLIENTS_GPC, MmuAccess, SkedBit, WarpEsr
from tegrad.hw.qmd import LAYOUTS
from tegrad.orin import semaphore
from tegrad.orin.constants import ConstantCache
from tegrad.orin.events import NonStall, SkedException, SmException
from tegrad.orin.launch import (
    RESERVED_SHARED,
    LaunchShape,
    LaunchSpec,
    Release,
    decoder,
    local_memory_per_tpc,
    window_size,
    windows_overlap,
)
from tegrad.orin.local_memory import LocalMemory
from tegrad.orin.memory import AddressSpace, Fault, HubClient
from tegrad.orin.program import IllegalCode, Modules, Program, ProgramCache
from tegrad.orin.race import Race
from tegrad.ptx import Dim, Memory, PtxError, PtxFault, Stats, Windows

if TYPE_CHECKING:
    from tegrad.orin.host import HostChannel
    from tegrad.orin.worker import Worker

INSTRUCTION_BYTES = 16
"""Bytes of a machine instruction, for the program counter of a report."""

SCHEDULE, INVALIDATE_COPY_SCHEDULE, DECREMENT_DEPENDENCE = 1, 3, 4
"""Actions on a dependent QMD that are emulated."""

STUCK_POLL_S = 0.005


class LaunchState(NamedTuple):
    """The context's state as it was when the launch method was executed."""

    shared_window: int
    local_window: int
    local_memory: int
    """Where warps keep their local memory; `local_per_tpc` bytes of it belong to each TPC."""
    local_per_tpc: int
    constants: int
    """Generation of the constant cache; `instructions` that of the instruction cache."""
    instructions: int


@dataclass(slots=True)
class KernelCount:
    """What one kernel has done so far."""

    launches: int = 0
    instructions: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    l2_fills: int = 0
    """Sectors that came into the L2 meanwhile: of memory that it may keep, what it did not have."""
    l2_reports: int = 0
    """Stale loads, and stores over what the CPU had written, where the L2 tells of them (`TEGRAD_L2=tell`)."""

    def add(self, stats: Stats, fills: int, reports: int) -> None:
        """Count one more launch."""
        self.l2_fills += fills
        self.l2_reports += reports
        self.launches += 1
        self.instructions += stats.instructions
        self.bytes_read += stats.bytes_read
        self.bytes_written += stats.bytes_written


@dataclass(slots=True)
class Counters:
    """Work of the whole GPU, by kernel name."""

    kernels: dict[str, KernelCount] = field(default_factory=dict)
    copies: int = 0
    bytes_copied: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def launched(self, name: str, stats: Stats, fills: int, reports: int) -> None:
        """Count a grid that has ended."""
        with self._lock:
            self.kernels.setdefault(name, KernelCount()).add(stats, fills, reports)

    def copied(self, size: int) -> None:
        """Count a copy."""
        with self._lock:
            self.copies += 1
            self.bytes_copied += size


_WARP_ERRORS: Mapping[str, WarpEsr] = MappingProxyType(
    {
        "misaligned": WarpEsr.MISALIGNED_ADDR,
        "address-space": WarpEsr.INVALID_ADDR_SPACE,
        "out-of-range": WarpEsr.OOR_ADDR,
        "illegal": WarpEsr.ILLEGAL_INSTR_ENCODING,
        "trap": WarpEsr.ILLEGAL_INSTR_ENCODING,
        "missing-lanes": WarpEsr.ILLEGAL_INSTR_PARAM,
        "unnamed-lanes": WarpEsr.ILLEGAL_INSTR_PARAM,
    }
)
"""Warp error by the kind of a PTX fault; "unmapped" and "read-only" are MMU faults.

A trap without a debugger is an illegal instruction on an H200 (docs/notebook.md); inferred for ga10b.
Wrong member masks are undefined in PTX, and a GPU reports nothing: that they end the launch, and how, is the board's
choice.
"""

_T1_CLIENTS = {name: number for number, name in MMU_CLIENTS_GPC.items()}

_MMU_ACCESS: Mapping[str, MmuAccess] = MappingProxyType(
    {"write": MmuAccess.VIRT_WRITE, "atomic": MmuAccess.VIRT_ATOMIC_STRONG}
)


class GridRunner:
    """Runs launches of one compute context. Several channels' workers may be inside at once."""

    def __init__(self, chip: Chip, vm: AddressSpace, modules: Modules, counters: Counters) -> None:
        self._chip = chip
        self._vm = vm
        self._decode = decoder(chip)
        self.qmd_size = LAYOUTS[chip.qmd].size
        self._major = LAYOUTS[chip.qmd].major
        self._constants = ConstantCache(vm)
        self._programs = ProgramCache(vm, chip, modules)
        self._counters = counters
        self._per_gpc = chip.tpc_per_gpc * chip.sm_per_tpc
        self._memory = Memory(base=vm.base, pages=vm.pages, limit=vm.span, l2=vm.port.address)
        self._waiting: dict[int, int] = {}
        self._active: dict[int, list[Worker]] = {}
        """QMDs that wait or run, with the workers that have them."""
        self._lock = threading.Lock()
        self._local = LocalMemory(chip, vm)

    def read(self, va: int) -> LaunchSpec:
        """The QMD at `va`, as memory holds it now."""
        return self._decode(self._vm.read(va, self.qmd_size, HubClient.SKED, what="QMD fetch"))

    def run(
        self, channel: HostChannel, va: int, state: LaunchState, spec: LaunchSpec | None, race: Race | None
    ) -> None:
        """Run the QMD at `va` and all that it launches in turn. `spec` if it has been read already."""
        try:
            self._run(channel, va, state, spec, race)
        finally:
            with self._lock:
                self._active[va].remove(channel.worker)
                if not self._active[va]:
                    del self._active[va]

    def announce(self, va: int, worker: Worker) -> None:
        """The QMD at `va` has been scheduled: `run` follows in this worker's thread, unless that is stopped."""
        with self._lock:
            self._active.setdefault(va, []).append(worker)

    def require_idle(self, va: int) -> None:
        """Raise the SKED exception of an invalidation if the QMD at `va` waits or runs."""
        with self._lock:
            active = any(not worker.stopping for worker in self._active.get(va, ()))
        if active:
            esr = 1 << SkedBit.INVALIDATE_ACTIVE_QMD
            raise Fault(SkedException, esr=esr, qmd=va, detail=f"the QMD at {va:#x} is invalidated while it is active")

    def _run(
        self, channel: HostChannel, va: int, state: LaunchState, spec: LaunchSpec | None, race: Race | None
    ) -> None:
        if race is not None:
            time.sleep(race.launch_delay())
        queue: deque[tuple[int, LaunchSpec | None]] = deque([(va, spec)])
        while queue and not channel.worker.stopping:
            va, spec = queue.popleft()
            spec = spec or self.read(va)
            early = {d.va: self.read(d.va) for d in spec.dependents if race is not None and race.early_qmd()}
            loose = race is not None and not spec.shape.membar and race.early_release()
            hasty = [release for release in spec.releases if loose and not release.membar and release.record]
            for release in hasty:
                self._release(channel, va, release)
            if not self._grid(channel, va, state, spec, race):
                return
            for index, release in enumerate(spec.releases):
                if index and race is not None and (delay := race.late_release()):
                    time.sleep(delay)
                    found = self.read(va).releases[index : index + 1]
                    if not found:
                        continue
                    (release,) = found
                if not release.record:
                    self._stuck(channel, f"the QMD at {va:#x} has a release of a form that stores nothing")
                    return
                if release not in hasty:
                    self._release(channel, va, release)
            for dependent in spec.dependents:
                if self._due(dependent.va, dependent.action, va):
                    queue.append((dependent.va, early.get(dependent.va)))

    # -- one grid -----------------------------------------------------------------------------------------------------

    def _grid(self, channel: HostChannel, va: int, state: LaunchState, spec: LaunchSpec, race: Race | None) -> bool:
        """Run the grid of a QMD; False if it was aborted."""
        shape = spec.shape
        if shape.version[0] != self._major:
            # Taken silently [measured on an H200].
            major, minor = shape.version
            self._stuck(channel, f"the QMD at {va:#x} has version {major}.{minor}, this chip takes {self._major}")
            return False
        self._check(va, state, shape)
        if shape.empty:
            return True
        hidden = window_size(self._chip, state.shared_window, state.local_window)
        for window in (state.shared_window, state.local_window):
            self._vm.hide(window, hidden)
        try:
            fresh = shape.invalidate_instructions or (race is not None and race.forgets())
            program = self._programs.fetch(shape.program, state.instructions, fresh=fresh)
        except (IllegalCode, PtxError) as error:
            raise self._sm_exception(WarpEsr.ILLEGAL_INSTR_ENCODING, shape.program, "", str(error)) from error
        kernel, section = program.kernel, program.section
        forgets = race is not None and race.forgets()
        args = self._bank(spec, state, section.param_base, kernel.param_size, kernel.name, forgets)
        dims = self._dims(spec, state, kernel.name, forgets) if kernel.reads_dims else None
        dynamic = self._dynamic_shared(shape, program)
        self._barriers(shape, program)
        spills = self._local.enter(state.local_memory, state.local_per_tpc, shape)
        try:
            kernel.compile()  # which is not the engine's time
            with channel.scheduler.runlist.grid(channel.tsg, channel.worker.abort) as came:
                if not came:
                    return False
                l2 = self._vm.l2
                filled, untold = l2.filled, l2.untold
                stats = kernel.launch(
                    shape.grid,
                    shape.block,
                    args,
                    dims=dims,
                    memory=self._memory,
                    shared=dynamic,
                    symbols=section.symbols,
                    windows=Windows(state.shared_window, state.local_window, hidden),
                    abort=channel.worker.abort,
                    seed=race.copies_seed() if race is not None and kernel.draws else 0,
                    tag=l2.launch(kernel.name),
                )
                filled, untold = l2.filled - filled, max(0, l2.untold - untold)
        except PtxFault as fault:
            if fault.kind == "aborted" and channel.worker.stopping:
                return False
            raise self._translate(fault, shape.program) from fault
        except PtxError as error:
            raise self._sm_exception(WarpEsr.ILLEGAL_INSTR_ENCODING, shape.program, kernel.name, str(error)) from error
        channel.settle()
        if not self._local.leave(spills):
            channel.note(f"local memory of kernel {kernel.name} was overwritten while it ran: what it spilled is lost")
        self._counters.launched(kernel.name, stats, filled, untold)
        return True

    def _stuck(self, channel: HostChannel, why: str) -> None:
        """A launch that never completes: wait until the channel is stopped."""
        channel.note(f"{why}: it never completes")
        with channel.scheduler.runlist.grid(channel.tsg, channel.worker.abort):
            while not channel.worker.abort.is_set:
                time.sleep(STUCK_POLL_S)

    def _check(self, va: int, state: LaunchState, shape: LaunchShape) -> None:
        esr, why = shape.refusals, [shape.why] if shape.why else []
        if not shape.empty:
            shared, local = state.shared_window, state.local_window
            if windows_overlap(shared, local):
                esr |= 1 << SkedBit.MEMORY_WINDOW_OVERLAP
                why.append(f"shared window {shared:#x} and local window {local:#x} are missing or collide")
            if local_memory_per_tpc(self._chip, shape.local_per_thread) > state.local_per_tpc:
                esr |= 1 << SkedBit.LOCAL_MEMORY_TOTAL_SIZE
                why.append(
                    f"{shape.local_per_thread} bytes of local memory a thread exceed {state.local_per_tpc} a TPC"
                )
        if esr:
            raise Fault(SkedException, esr=esr, qmd=va, detail="; ".join(why))

    def _bank(self, spec: LaunchSpec, state: LaunchState, offset: int, size: int, name: str, forgets: bool) -> bytes:
        """Bytes of constant bank 0 as the constant cache holds them, zero where the bank does not reach."""
        shape = spec.shape
        held = max(0, min(size, shape.bank_size - offset)) if shape.bank_valid else 0
        fresh = shape.invalidate_bank or shape.invalidate_constants or forgets
        what = f"constant bank 0 of kernel {name}"
        data = self._constants.read(spec.bank + offset, held, state.constants, fresh=fresh, what=what)
        return data.ljust(size, b"\0")

    def _dims(self, spec: LaunchSpec, state: LaunchState, name: str, forgets: bool) -> tuple[Dim, Dim]:
        """blockDim and gridDim as machine code reads them: what the client stored, whatever the QMD says."""
        words = bank0.DIMS.unpack(self._bank(spec, state, bank0.BLOCK_DIM, bank0.DIMS.size, name, forgets))
        return words[:3], words[3:]

    def _dynamic_shared(self, shape: LaunchShape, program: Program) -> int:
        """Bytes of shared memory beyond what the kernel declares."""
        dynamic = shape.shared - RESERVED_SHARED - program.kernel.static_shared
        if dynamic < 0:
            detail = f"{program.kernel.static_shared} bytes of shared memory declared, the QMD allots {shape.shared}"
            raise self._sm_exception(WarpEsr.OOR_ADDR, shape.program, program.kernel.name, detail)
        return dynamic

    def _barriers(self, shape: LaunchShape, program: Program) -> None:
        """A barrier beyond those that the QMD grants is an illegal parameter [measured on an H200]; here, at once."""
        if program.kernel.barriers > shape.barriers:
            detail = f"{program.kernel.barriers} barriers used, the QMD grants {shape.barriers}"
            raise self._sm_exception(WarpEsr.ILLEGAL_INSTR_PARAM, shape.program, program.kernel.name, detail)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _sm_exception(self, code: WarpEsr, pc: int, kernel: str, detail: str, sm: int = 0) -> Fault:
        return Fault(
            SmException,
            gpc=sm // self._per_gpc,
            tpc=sm % self._per_gpc // self._chip.sm_per_tpc,
            sm=sm,
            global_esr=0,
            warp_esr=int(code),
            pc=pc,
            kernel=kernel,
            detail=detail,
        )

    def _translate(self, fault: PtxFault, program: int) -> Fault:
        sm = sum(fault.cta) % self._chip.sm_count
        if fault.kind in ("unmapped", "read-only"):
            access = _MMU_ACCESS.get(fault.access, MmuAccess.VIRT_READ)
            page = self._vm.bad_page(fault.address, max(1, fault.size), access is not MmuAccess.VIRT_READ)
            tpc = sm // self._chip.sm_per_tpc % self._chip.tpc_per_gpc
            address, gpc = fault.address if page is None else page, sm // self._per_gpc
            return self._vm.fault(address, access, _T1_CLIENTS[f"t1_{tpc}"], gpc=gpc, detail=str(fault))
        pc = program + INSTRUCTION_BYTES * fault.pc
        code = _WARP_ERRORS.get(fault.kind, WarpEsr.ILLEGAL_INSTR_ENCODING)
        return self._sm_exception(code, pc, fault.kernel, str(fault), sm)

    # -- the end of a grid --------------------------------------------------------------------------------------------

    def _release(self, channel: HostChannel, va: int, release: Release) -> None:
        if release.va % release.record:
            esr = 1 << SkedBit.PCAS_WITH_SEMAPHORE
            detail = f"QMD release of {release.record} bytes at {release.va:#x}, misaligned"
            raise Fault(SkedException, esr=esr, qmd=va, detail=detail)
        reduction = None if release.reduction is None else semaphore.SHADER_REDUCTIONS[release.reduction]
        semaphore.release(
            channel,
            release.va,
            release.payload,
            HubClient.SKED,
            wide=release.wide or release.record == 8,
            stamped=release.record == 16,
            reduction=reduction,
            signed=release.signed,
            what="QMD release",
        )
        if release.trap:
            channel.emit(NonStall(channel.chid, channel.tsg.id))

    def _due(self, va: int, action: int, parent: int) -> bool:
        """Whether the dependent QMD is to be launched now."""
        if action in (SCHEDULE, INVALIDATE_COPY_SCHEDULE):
            return True
        if action == DECREMENT_DEPENDENCE:
            return self.depend(va, -1)
        raise Fault(
            SkedException,
            esr=1 << SkedBit.QUEUE_SIZE,
            qmd=parent,
            detail=f"action {action} on a dependent QMD is not emulated",
        )

    def depend(self, va: int, delta: int) -> bool:
        """Change a QMD's dependence counter, which starts as the QMD says; True when it has come down to zero."""
        with self._lock:  # parents end in threads of their own
            count = self._waiting.get(va)
            count = (self.read(va).dependence if count is None else count) + delta
            if count > 0:
                self._waiting[va] = count
            elif count == 0:
                self._waiting.pop(va, None)
        if count < 0:
            raise Fault(
                SkedException,
                esr=1 << SkedBit.DEPENDENCE_COUNTER_UNDERFLOW,
                qmd=va,
                detail=f"the dependence counter of the QMD at {va:#x} falls below zero",
            )
        return count == 0
