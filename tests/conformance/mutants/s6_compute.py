"""Mutants of sections 6.4 to 6.8."""

from mutation import Edit, Item, Mutant, Value

HOST = "tegrad.orin.host."
CHANNEL = HOST + "HostChannel."
SEMAPHORE = "tegrad.orin.semaphore."
COMPUTE = "tegrad.orin.compute."
OBJECT = COMPUTE + "ComputeObject."
GRID = "tegrad.orin.grid.GridRunner."
LAUNCH = "tegrad.orin.launch."
COPY = "tegrad.orin.copy_engine.CopyObject."

SEGMENT, EXECUTE = CHANNEL + "_segment", CHANNEL + "_execute"


def method(name: str, handler: str = "") -> Item:
    """A host method with another handler, or none."""
    return Item(HOST + "_HOST_METHODS", f"int(HostMethod.{name})", handler)


def schedules(change: str) -> Value:
    """Other actions launch."""
    return Value(COMPUTE + "SCHEDULING_ACTIONS", f"SCHEDULING_ACTIONS {change}")


HEADERS: dict[str, Mutant | list[Mutant]] = {
    "6.4/inc": Edit(SEGMENT, "if op == _INC:", "if op == _INC and subch != 3:"),
    "6.4/non-inc": Edit(SEGMENT, "if op == _INC:", "if op in (_INC, _NON_INC):"),
    "6.4/one-inc": Edit(SEGMENT, "_NON_INC, method + 4 & 0x3FFC", "_NON_INC, method"),
    "6.4/immediate": Edit(
        SEGMENT, "self._execute(subch, method, count)", "self._execute(subch, method, count & 0xFFF)"
    ),
    "6.4/end-segment": Edit(SEGMENT, "op == _END_SEGMENT:", "op == -1:"),
    "6.4/zero-word": Edit(SEGMENT, "if header and not header >> 16 & 3:", "if not header >> 16 & 3:"),
    "6.4/subdevice-mask": Edit(SEGMENT, "if header and not header >> 16 & 3:", "if header:"),
    "6.4/count-zero": Edit(SEGMENT, "words[at : at + count]", "words[at : at + max(count, 1)]"),
    "6.4/op-2": Edit(SEGMENT, "elif op == _IMMEDIATE:", "elif op in (_IMMEDIATE, 2):"),
    "6.4/op-6": Edit(SEGMENT, "elif op == _IMMEDIATE:", "elif op in (_IMMEDIATE, 6):"),
    "6.4/host-methods-ignore-the-subchannel": Edit(
        EXECUTE, "if method >= FIRST_ENGINE_METHOD:", "if method >= FIRST_ENGINE_METHOD or subch == 7:"
    ),
    **{
        f"6.4/subchannel-{i}": Edit(CHANNEL + "_require_context", "subch > Subchannel.COPY", f"subch in {rest}")
        for i, rest in ((5, (6, 7)), (6, (5, 7)), (7, (5, 6)))
    },
    "6.4/method-before-set-object": Edit(
        CHANNEL + "_first_method",
        "if target is None:",
        "if target is None:\n        return None\n    if target is None:",
    ),
    "6.4/switching-waits": (
        Edit(CHANNEL + "_switch", "yield from self.drain()", "yield from ()"),
        Edit(COPY + "_launch", "elif small and self._channel.worker.idle:", "elif small:"),
    ),
}

REDUCED = {
    "imin": (0, "_MAX"),
    "imin-unsigned": (0, "_MAX"),
    "imax": (1, "_MIN"),
    "ixor": (2, "_OR"),
    "iand": (3, "_OR"),
    "ior": (4, "_XOR"),
    "iadd": (5, "_OR"),
    "inc": (6, "_dec"),
    "dec": (7, "_inc"),
}

HOST_METHODS: dict[str, Mutant | list[Mutant]] = {
    "6.5/harmless-methods": [method(name) for name in ("NOP", "YIELD", "CLEAR_FAULTED", "MEM_OP_A")],
    "6.5/yield-tsg": method("YIELD"),
    **{f"6.5/mem-op-{op:#x}": Value(HOST + "_MEM_OPS", f"_MEM_OPS - {{{op}}}") for op in (5, 0xE, 0x10)},
    "6.5/tlb-invalidate": (
        Value(HOST + "_PRIVILEGED_MEM_OPS", "frozenset()"),
        Value(HOST + "_MEM_OPS", "_MEM_OPS | {9}"),
    ),
    "6.5/illegal": method("ILLEGAL", "HostChannel._nothing"),
    "6.5/no-such-host-method": Edit(
        EXECUTE, 'raise self._pbdma(PbdmaIntr0.METHOD, f"the host has no method {method:#x}")', "return None"
    ),
    "6.5/reference": Edit(CHANNEL + "_set_reference", "] = data", "] = 0"),
    "6.5/reference-waits": Edit(CHANNEL + "_set_reference", "self.after_drain(store)", "store()"),
    "6.5/wfi": Edit(CHANNEL + "_wfi", "else self.drain()", "else None"),
    "6.5/release-wfi": Edit(CHANNEL + "_release", "if wait_idle:", "if False:"),
    "6.5/release-without-wfi": Edit(CHANNEL + "_release", "if wait_idle:", "if True:"),
    "6.5/release-32": Edit(SEMAPHORE + "release", "if wide or stamped:", "if True:"),
    "6.5/release-64": Edit(CHANNEL + "_sem_execute", "bool(data >> 24 & 1)", "False"),
    "6.5/release-stamped": Edit(SEMAPHORE + "release", "vm.quads[va + 8 >> 3] = gpu_time()", "pass"),
    "6.5/field-sequence": Edit(SEMAPHORE + "release", "payload &= (1 << width) - 1", "payload &= 0xFFFFFFFF"),
    "6.5/legacy-semaphore": method("SEMAPHORED", "HostChannel._nothing"),
    **{
        f"6.5/{name}": Item(SEMAPHORE + "ACQUIRE_TESTS", str(op), "lambda value, payload, width: True")
        for name, op in (("equal", 0), ("at-least-unsigned", 2), ("circular", 3), ("and", 4), ("nor", 5))
    },
    "6.5/acquire-polls": Edit(
        CHANNEL + "_poll", "while not ready():", 'raise self._pbdma(PbdmaIntr0.ACQUIRE, "")\n    while not ready():'
    ),
    "6.5/acquire-alignment": Edit(CHANNEL + "_acquire", "if wide and va & 7:", "if va & 7:"),
    **{f"6.5/reduction-{name}": Item(SEMAPHORE + "HOST_REDUCTIONS", str(op), to) for name, (op, to) in REDUCED.items()},
    "6.5/wide-release-alignment": Edit(CHANNEL + "_release", "7 if wide else 3", "3"),
    "6.5/stamped-release-alignment": Edit(CHANNEL + "_release", "15 if record else", "7 if record else"),
    "6.5/signed-inc": Edit(CHANNEL + "_release", "(signed or wide)", "wide"),
    "6.5/no-such-semaphore-operation": Item(SEMAPHORE + "ACQUIRE_TESTS", "7", "lambda value, payload, width: True"),
    "6.5/non-stall-interrupt": method("NON_STALL_INTERRUPT", "HostChannel._nothing"),
}

COMPUTE_CLASS: dict[str, Mutant | list[Mutant]] = {
    **{f"6.6/action-{action:#x}": schedules(f"- {{{action}}}") for action in (2, 3, 9, 0xA)},
    **{f"6.6/action-{action}": schedules(f"| {{{action}}}") for action in (1, 8)},
    "6.6/pcas-b": Edit(OBJECT + "_pcas", "and self._context.pcas_launches", ""),
    "6.6/near-windows": Value(LAUNCH + "WINDOWS_APART", "1 << 25"),
    "6.6/decrement-dependence": Edit(OBJECT + "_pcas2", "-1 if action", "-2 if action"),
    "6.6/increment-dependence": Edit(OBJECT + "_pcas2", "DECREMENT_DEPENDENCE else 1", "DECREMENT_DEPENDENCE else 0"),
    "6.6/wait-for-idle": Edit(OBJECT + "_wait_for_idle", "self._channel.drain()", "None"),
    "6.6/constants-wfi": Edit(OBJECT + "_invalidate_now", "bool(data >> 12 & 1)", "False"),
    "6.6/constants-no-wfi": Edit(OBJECT + "_invalidate_now", "bool(data >> 12 & 1)", "False"),
    "6.6/instructions": Edit(OBJECT + "_invalidate_now", "bool(data & 1)", "False"),
    "6.6/report-semaphore": Edit(OBJECT + "_release", "self._channel.after_drain(store)", "store()"),
    "6.6/legacy-report": Edit(OBJECT + "_report_d", "regs.get(M.SET_REPORT_SEMAPHORE_C, 0)", "0"),
    "6.6/inline-data": Edit("tegrad.orin.inline.InlineToMemory._finish", "va + line * pitch", "va"),
    "6.6/inline-qmd": Edit(OBJECT + "_inline_qmd", "va + offset", "va + min(offset, 128)"),
}

RELEASES = LAUNCH + "_releases_v3"
REDUCES = {
    "add": (0, "_OR"),
    "min": (1, "_MAX"),
    "max": (2, "_MIN"),
    "inc": (3, "_dec"),
    "dec": (4, "_inc"),
    "and": (5, "_OR"),
    "or": (6, "_AND"),
    "xor": (7, "_OR"),
}

QMD: dict[str, Mutant | list[Mutant]] = {
    "6.7/dimensions": [
        Edit(GRID + "_grid", "shape.grid,", "(*shape.grid[:2], 1),"),
        Edit(GRID + "_grid", "shape.block,", "(*shape.block[:2], 1),"),
    ],
    "6.7/dimension-words": Edit(GRID + "_dims", "words[:3], words[3:]", "spec.shape.block, spec.shape.grid"),
    "6.7/parameter-base": Edit(GRID + "_grid", "section.param_base,", "section.param_base + 8,"),
    "6.7/bank-invalidate": Edit(GRID + "_bank", "shape.invalidate_bank or", ""),
    "6.7/cache-invalidate": Edit(GRID + "_bank", "or shape.invalidate_constants", ""),
    "6.7/instruction-invalidate": Edit(GRID + "_grid", "shape.invalidate_instructions or", ""),
    **{
        f"6.7/release-{i}": Edit(RELEASES, "for i in range(3):", f"for i in {rest}:")
        for i, rest in ((0, (1, 2)), (1, (0, 2)), (2, (0, 1)))
    },
    "6.7/release-four-words": Item(LAUNCH + "_RECORDS_V3", "(0, False)", "4"),
    "6.7/release-one-word": Item(LAUNCH + "_RECORDS_V3", "(1, False)", "8"),
    "6.7/release-two-words": Item(LAUNCH + "_RECORDS_V3", "(2, False)", "4"),
    "6.7/release-payload-64": Edit(LAUNCH + "_release", 'bool(get(f"{prefix}payload64b{suffix}"))', "False"),
    **{f"6.7/reduce-{name}": Item(SEMAPHORE + "SHADER_REDUCTIONS", str(op), to) for name, (op, to) in REDUCES.items()},
    "6.7/reduce-max-signed": Edit(LAUNCH + "_release", 'bool(get(f"{prefix}reduction_format{suffix}") & 1)', "False"),
    "6.7/dependent": Edit(LAUNCH + "_dependents_v3", 'if get("dependent_qmd0_enable"):', "if False:"),
    "6.7/dependent-counter": Edit(GRID + "_due", "self.depend(va, -1)", "self.depend(va, -2)"),
    "6.7/shared-memory": Edit(GRID + "_dynamic_shared", "- RESERVED_SHARED", "- 2 * RESERVED_SHARED"),
    "6.7/no-shared-memory": Edit(GRID + "_check", "shape.refusals,", "shape.refusals | (shape.shared <= 1024) << 21,"),
    "6.7/release-address": Edit(LAUNCH + "_release", "va=get.pair(upper, lower)", "va=get(lower)"),
}

COPY_CLASS: dict[str, Mutant | list[Mutant]] = {
    "6.8/copy-non-pipelined": [
        Edit(COPY + "_run", "if copy.launch & 3:", "if copy.launch & 1:"),
        Edit(COPY + "_linear", "vm.copy(dst, src,", "vm.copy(dst + 1, src,"),
    ],
    "6.8/copy-pipelined": Edit(COPY + "_run", "if copy.launch & 3:", "if copy.launch & 2:"),
    "6.8/multi-line": Edit(COPY + "_launch", "if data >> 9 & 1 else 1", "if False else 1"),
    "6.8/single-line": Edit(COPY + "_launch", "if data >> 9 & 1 else 1", "if True else 1"),
    "6.8/fill": Edit(COPY + "_remap_line", "elif pick in (CONST_A, CONST_B):", "elif pick == CONST_B:"),
    "6.8/copy-semaphore-one-word": Edit(COPY + "_release", "stamped=kind == FOUR_WORDS", "stamped=True"),
    "6.8/copy-semaphore-stamped": Edit(COPY + "_release", "stamped=kind == FOUR_WORDS", "stamped=False"),
    "6.8/copy-semaphore-64": Edit(COPY + "_release", "bool(copy.launch >> 27 & 1)", "False"),
    "6.8/copy-semaphore-reduction": Edit(COPY + "_release", "if copy.launch >> 19 & 1:", "if False:"),
    "6.8/copy-interrupt": Edit(COPY + "_run", "if copy.launch >> 5 & 3:", "if False:"),
    "6.8/physical": Edit(COPY + "_transfer", "if copy.launch >> 12 & 3:", "if False:"),
}

MUTANTS: dict[str, Mutant | list[Mutant]] = {**HEADERS, **HOST_METHODS, **COMPUTE_CLASS, **QMD, **COPY_CLASS}
