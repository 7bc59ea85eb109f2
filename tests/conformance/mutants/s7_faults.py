"""Mutants of section 7."""

from mutation import Edit, Item, Mutant, Start, Value

CHANNEL_CALLS = "tegrad.orin.channel_calls."
TSG = "tegrad.orin.tsg."
RECOVERY = "tegrad.orin.recovery."
DRIVER = "tegrad.orin.channel."
HOST = "tegrad.orin.host.HostChannel."
GRID = "tegrad.orin.grid."
RUNNER = GRID + "GridRunner."
OVERLAP = "tegrad.orin.launch.windows_overlap"
SCHEDULER = "tegrad.orin.scheduler.Scheduler."
MEMORY = "tegrad.orin.memory."
SPACE = MEMORY + "AddressSpace."
COPY = "tegrad.orin.copy_engine.CopyObject."

ONLY_THE_CHANNEL = (
    Edit(SCHEDULER + "_stop", "self.kill(tsg)", "channel.dead = True"),
    Edit("tegrad.orin.gpu.Gpu.tsg_abort", "self._tsgs.get(tsg)", "None"),
    Edit(DRIVER + "DriverChannel.kill", "self.stop()", "pass"),
)
"""The GPU stops the channel that failed, and no other of its TSG."""
ZEROS_PASS = Start("tegrad.orin.methods.require_method", "if not data: return 'NO_OPERATION'")
"""A method that does not exist is one that does nothing, given a zero."""


def every_group(pause: str) -> Edit:
    """A fault of one TSG kills all, one after the other."""
    all_of_them = f"[(t.recover(code){pause}) for t in [*driver.tsgs.values()]]"
    return Edit(RECOVERY + "handle", "tsg.recover(code)", all_of_them)


OUTCOME: dict[str, Mutant | list[Mutant]] = {
    "7.1/every-notifier": Edit(TSG + "Tsg.recover", "list(self.channels)", "list(self.channels)[1:]"),
    "7.1/every-timedout": Edit(TSG + "Tsg.recover", "list(self.channels)", "list(self.channels)[1:]"),
    "7.1/other-groups": [every_group(""), every_group(", __import__('time').sleep(0.1)")],
    "7.1/sister-grid": ONLY_THE_CHANNEL,
    "7.1/doorbells-are-ignored": ONLY_THE_CHANNEL,
    "7.1/wait-when-dead": Edit("tegrad.orin.waiting.wait", "require(channel.serviceable, errno.ETIMEDOUT)", "pass"),
    "7.1/submit-when-dead": Edit(
        CHANNEL_CALLS + "submit_gpfifo", "require(file.channel.serviceable, errno.ETIMEDOUT)", "pass"
    ),
    "7.1/waiter-is-woken": Edit(DRIVER + "DriverChannel.fault", "self.wake()", "pass"),
    "7.1/syncpoint-is-safe": Edit(DRIVER + "DriverChannel.kill", "self.syncpoint.make_safe()", "pass"),
    "7.1/the-rest-works": Edit(
        SCHEDULER + "_stop",
        "self.kill(tsg)",
        "self.kill(tsg)\n    [channel.vm.unmap(m.va, m.size) for m in list(channel.vm._mappings)]",
    ),
    "7.1/way-on": Edit(
        CHANNEL_CALLS + "enable",
        'file.driver.tell_gpu("channel_enable", file.channel.chid, True)',
        "file.channel.faulted = 0",
    ),
}

NOTIFIER: dict[str, Mutant | list[Mutant]] = {
    "7.2/status": Edit(DRIVER + "Notifier.set", 'pack("<H", NOTIFIER_ERROR)', 'pack("<H", 1)'),
    "7.2/wall-clock": Edit(DRIVER + "Notifier.set", "time.time_ns()", "time.monotonic_ns()"),
    "7.2/info16": Edit(
        DRIVER + "Notifier.set", 'pack("<QI", time.time_ns(), code)', 'pack("<QIH", time.time_ns(), code, 0)'
    ),
    "7.2/first-error-stays": Edit(DRIVER + "Notifier.set", "if status == NOTIFIER_ERROR:", "if False:"),
    "7.2/cleared-status": Edit(
        DRIVER + "Notifier.set", "if status == NOTIFIER_ERROR:", "if any(os.pread(self.buffer.fd, 4, self.offset + 8)):"
    ),
    "7.2/registered-again": Edit(
        DRIVER + "Notifier.clear", "os.pwrite(self.buffer.fd, bytes(NOTIFIER_SIZE), self.offset)", "pass"
    ),
    "7.2/force-reset": Edit(
        CHANNEL_CALLS + "force_reset", "NotifierCode.RESETCHANNEL_VERIF_ERROR", "NotifierCode.PBDMA_ERROR"
    ),
    "7.2/illegal-method": [Edit(RECOVERY + "illegal_method", "GR_ILLEGAL_NOTIFY", "GR_EXCEPTION"), ZEROS_PASS],
    "7.2/refused-copy": Edit(RECOVERY + "ce_error", "return NotifierCode.CE_ERROR", "return NotifierCode.GR_EXCEPTION"),
}

LOG: dict[str, Mutant | list[Mutant]] = {
    "7.3/mmu-first-line": [
        Edit(SPACE + "fault", "address=va & ~(PAGE - 1),", "address=va + 0x10,"),
        Edit(RECOVERY + "mmu_fault", "ch id:  {event.chid}", "ch id:  {event.chid - 1}"),
    ],
    "7.3/mmu-second-line": Edit(RECOVERY + "mmu_fault", '"gpc" if event.client_type == 0 else "hub"', '"hub"'),
    "7.3/mmu-summary": Edit(RECOVERY + "mmu_fault", "page fault: err_type={event.fault_type},", "page fault: "),
    "7.3/mmu-tsg": Edit(RECOVERY + "mmu_fault", "TSG {event.tsg}: mmu fault", "mmu fault"),
    "7.3/notifier-line": Edit(TSG + "Tsg.recover", "error notifier set to {int(code)} for ch", "error notifier of ch"),
    "7.3/no-notifier-no-line": Edit(TSG + "Tsg.recover", "if channel.fault(code):", "if channel.fault(code) or 1:"),
    "7.3/access-load": Edit(RUNNER + "_translate", "fault.access, MmuAccess.VIRT_READ)", "fault.access, 1)"),
    "7.3/access-store": Item(GRID + "_MMU_ACCESS", '"write"', "MmuAccess.VIRT_READ"),
    "7.3/access-atomic": Item(GRID + "_MMU_ACCESS", '"atomic"', "MmuAccess.VIRT_WRITE"),
    "7.3/invalid-pte": Edit(SPACE + "fault_type", "MmuFaultType.INVALID_PTE if", "MmuFaultType.LIMIT_VIOLATION if"),
    "7.3/sm-lines": Edit(RECOVERY + "sm_exception", "sm machine check err.", "sm."),
    "7.3/sked-line": Edit(RECOVERY + "sked_exception", "sked exception: esr 0x{event.esr:08x}", "sked exception"),
    "7.3/class-error-line": Edit(RECOVERY + "class_error", 'f"class error 0x', 'f"0x'),
    "7.3/illegal-method-line": [
        Edit(RECOVERY + "illegal_method", "illegal method: invalid method class", "class"),
        ZEROS_PASS,
    ],
    "7.3/pbdma-lines": Edit(RECOVERY + "pbdma_fault", "SHADOW: {event.shadow:08x} ", ""),
    "7.3/pbdma-header": Edit(RECOVERY + "pbdma_fault", "PBH: {event.header:08x}", "PBH: {event.data:08x}"),
    "7.3/ce-line": Edit(RECOVERY + "ce_error", "ce launch error interrupt", "ce interrupt"),
}

CHECK = RUNNER + "_check"


def accepted(bit: int) -> Edit:
    """SKED does not mind."""
    return Edit(CHECK, "shape.refusals,", f"shape.refusals & ~(1 << {bit}),")


def another_bit(bit: int) -> Edit:
    """SKED refuses it, but says something else: what it refuses here is not fit to run."""
    swapped = f"(shape.refusals & ~(1 << {bit}) | 1 << 30 if shape.refusals else 0),"
    return Edit(CHECK, "shape.refusals,", swapped)


SKED: dict[str, Mutant | list[Mutant]] = {
    "7.4/sked-bank": accepted(7),
    "7.4/sked-local-low": accepted(9),
    "7.4/sked-local-high": accepted(10),
    "7.4/sked-local-total": Edit(CHECK, "> state.local_per_tpc:", "> 1 << 60:"),
    "7.4/sked-registers": accepted(13),
    "7.4/sked-threads": another_bit(18),
    "7.4/sked-shared-step": accepted(21),
    "7.4/sked-shared-most": another_bit(21),
    "7.4/sked-grid-zero": another_bit(23),
    "7.4/sked-block-zero": another_bit(23),
    "7.4/sked-l1-config": accepted(25),
    "7.4/sked-register-file": accepted(26),
    "7.4/sked-program": accepted(20),
    "7.4/sked-dependence": Edit(RUNNER + "depend", "if count < 0:", "if False:"),
    "7.4/sked-active": Edit(RUNNER + "require_idle", "SkedBit.INVALIDATE_ACTIVE_QMD", "SkedBit.QUEUE_SIZE"),
    "7.4/sked-overlap": Edit(OVERLAP, "abs(shared - local) < WINDOWS_APART", "False"),
}

CODES: dict[str, Mutant | list[Mutant]] = {
    "7.4/misaligned": Item(GRID + "_WARP_ERRORS", '"misaligned"', "WarpEsr.OOR_ADDR"),
    "7.4/out-of-range": Edit(RUNNER + "_dynamic_shared", "WarpEsr.OOR_ADDR", "WarpEsr.MISALIGNED_ADDR"),
    "7.4/illegal-instruction": Edit(
        RUNNER + "_grid", 'WarpEsr.ILLEGAL_INSTR_ENCODING, shape.program, "",', 'WarpEsr.NONE, shape.program, "",'
    ),
    "7.4/trap": Item(GRID + "_WARP_ERRORS", '"trap"', "WarpEsr.NONE"),
    "7.4/warp-pc": Edit(RUNNER + "_translate", "program + INSTRUCTION_BYTES * fault.pc", "fault.pc"),
    "7.4/one-record": Edit(
        RECOVERY + "sm_exception", "tsg.sm_errors[event.sm] =", "tsg.sm_errors[5] = tsg.sm_errors[event.sm] ="
    ),
    "7.4/no-record": Edit(
        RECOVERY + "handle",
        "if tsg is not None and code is not None:",
        "if tsg is not None and code is not None:\n            tsg.sm_errors[0] = TsgSmErrorStateRecord(4, 0)",
    ),
    "7.4/gpentry": Edit(HOST + "_entry", "entry.opcode not in (", "entry.opcode not in (1, "),
    "7.4/pbseg": Edit(HOST + "_segment", "if at + count > end:", "if at + count > end + 1000:"),
}

MISTAKES: dict[str, Mutant | list[Mutant]] = {
    "7.5/qmd-unmapped": Edit(RUNNER + "read", "HubClient.SKED", "HubClient.HOST"),
    "7.5/pointer-unmapped": Edit(RUNNER + "_translate", '("unmapped", "read-only")', '("read-only",)'),
    "7.5/read-only": Edit(SPACE + "fault_type", "MmuFaultType.WRITE_RO_VIOLATION", "MmuFaultType.INVALID_PTE"),
    "7.5/read-only-load": Edit(
        "tegrad.orin.l2.flags_of",
        "read | write | Page.READ | (Page.WRITE if mapping.writable else 0)",
        "(read | write | Page.READ | Page.WRITE) if mapping.writable else 0",
    ),
    "7.5/read-only-copy": Edit(COPY + "_linear", 'write=True, what="copy destination"', 'what="copy destination"'),
    "7.5/pushbuffer-unmapped": Edit(HOST + "_fetch", "HubClient.HOST", "HubClient.FE"),
    "7.5/no-windows": Edit(OVERLAP, "not shared or not local or abs", "shared and local and abs"),
    "7.5/window-buffer": Edit(RUNNER + "_grid", "self._vm.hide(window, hidden)", "pass"),
    "7.5/window-buffer-copy": Value(MEMORY + "_ENGINES_ONLY", "bytes(256)"),
    **{
        f"7.5/wrong-class-{i}": Edit("tegrad.orin.gpu.Gpu._bind", "if class_id != wanted:", "if False:") for i in (1, 4)
    },
    "7.5/no-context": Edit(HOST + "_require_context", "if not self.scheduler.has_context(self.chid):", "if False:"),
    "7.5/gpptr": Edit(HOST + "_put", "PbdmaIntr0.GPPTR", "PbdmaIntr0.GPENTRY"),
    "7.5/stamped-at-8": Edit(HOST + "_release", "15 if record else", "7 if record else"),
    "7.5/unmapped-while-running": Start(SPACE + "unmap", "return"),
    "7.5/closed-while-running": Edit(
        SCHEDULER + "remove",
        "channel.worker.close()",
        "channel.worker.close(), [self._stop(c, ValueError()) for c in [*self._channels.values()]]",
    ),
    "7.5/silent-wait": Edit(
        HOST + "_poll", "while not ready():", 'raise self._pbdma(PbdmaIntr0.ACQUIRE, "")\n    while not ready():'
    ),
    "7.5/copy-unmapped": Edit(COPY + "_linear", 'HubClient.GRCOPY, what="copy source"', 'HubClient.FE, what="source"'),
    "7.5/program-unmapped": Edit(
        "tegrad.orin.program.ProgramCache._require", "GPC_CLIENT_GCC, gpc=0,", "GPC_CLIENT_GCC, gpc=None,"
    ),
    "7.5/local-unmapped": Edit(
        "tegrad.orin.local_memory.LocalMemory.enter", "if not shape.local_per_thread:", "if True:"
    ),
    "7.5/copy-semaphore-misaligned": Edit(COPY + "_release", "if copy.semaphore % record:", "if False:"),
}

RUNLIST = "tegrad.orin.runlist.Runlist."
STUCK = RECOVERY + "context_switch_timeout"

LIMITS: dict[str, Mutant | list[Mutant]] = {
    "5.8/stuck-switch": [
        Edit(STUCK, "channel.stuck_ms += CONTEXT_SWITCH_PERIOD_MS", "pass"),
        Edit(
            STUCK,
            "NotifierCode.FIFO_ERROR_IDLE_TIMEOUT",
            "NotifierCode.RESETCHANNEL_VERIF_ERROR",
        ),
    ],
    "5.8/alone-on-the-engine": (
        Edit(RUNLIST + "_settle", "self._owner in self._held or self._contended()", "True"),
        Edit(RUNLIST + "_due", "if not self._contended():", "if False:"),
    ),
    "5.8/giving-way": Edit(RUNLIST + "_give_way", "if owner.preemption > Preemption.WFI:", "if False:"),
}

MUTANTS: dict[str, Mutant | list[Mutant]] = {**LIMITS, **OUTCOME, **NOTIFIER, **LOG, **SKED, **CODES, **MISTAKES}
