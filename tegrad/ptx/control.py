"""Barriers and other instructions that end or suspend a warp (PTX ISA 9.7.12, 9.7.13)."""

from collections.abc import Iterable
from typing import Protocol

from tegrad.ptx.analysis import BAR_RESULT, Block
from tegrad.ptx.helpers import family, helper
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import Access, Frame, Slot, Status, fault_info
from tegrad.ptx.lowering import Lowering
from tegrad.ptx.rules import PRED, U32, Handler, mod, nothing
from tegrad.ptx.syntax import Imm, Ins, Operand


@helper("void", "ptr frame, i32 mask, i32 id, i32 threads, i32 block")
def tgx_arrive(f: Fn, frame: V, mask: V, which: V, threads: V, block: V) -> None:
    """Count lanes in at a barrier, and block them if they wait."""
    slot = f.load("ptr", frame, Frame.SLOT)
    which = f.and_(which, 15)
    at = f.word(slot, which)
    arrived = f.add(f.load("i32", at, Slot.ARRIVED), f.intr("ctpop", mask))
    f.store(arrived, at, Slot.ARRIVED)
    f.store(threads, at, Slot.EXPECTED)
    bit = f.bin("shl", f.const("i32", 1), which)
    f.store(f.or_(f.load("i32", slot, Slot.PENDING), bit), slot, Slot.PENDING)
    waiting = f.and_(mask, block)
    mine = f.word(frame, which)
    f.store(f.or_(f.load("i32", mine, Frame.BAR_MASK), waiting), mine, Frame.BAR_MASK)
    f.store(f.or_(f.load("i32", frame, Frame.BLOCKED), waiting), frame, Frame.BLOCKED)


REDUCE = "tgx_reduce_"
REDUCTIONS = ("popc", "and", "or")


@family(REDUCE)
def emit_arrive_reduce(module: Module, name: str) -> None:
    """tgx_reduce_*(frame, mask, barrier, bits): add the predicates of a bar.red; called before tgx_arrive."""
    op = name.removeprefix(REDUCE)
    f = Fn(module, name, "void", "ptr frame, i32 mask, i32 id, i32 bits", "nounwind")
    frame, mask, which, bits = f.args
    at = f.word(f.load("ptr", frame, Frame.SLOT), f.and_(which, 15))
    first = f.is_zero(f.load("i32", at, Slot.ARRIVED))
    before = f.select(first, f.const("i32", 1 if op == "and" else 0), f.load("i32", at, Slot.REDUCE))
    own = f.and_(bits, mask)
    if op == "popc":
        after = f.add(before, f.intr("ctpop", own))
    elif op == "and":
        after = f.and_(before, f.resize(f.icmp("eq", own, mask), "i32", False))
    else:
        after = f.or_(before, f.resize(f.not_zero(own), "i32", False))
    f.store(after, at, Slot.REDUCE)
    f.ret()
    f.finish()


ALL_BARRIERS = 16


def barriers(body: Iterable[Ins]) -> int:
    """Barriers of a block that a kernel needs: up to the highest it names, all of them for a number in a register."""
    count = 0
    for ins in body:
        if ins.base not in ("bar", "barrier") or mod(ins, "warp", "cluster"):
            continue
        operands = ins.operands[1:] if mod(ins, "red") else ins.operands
        if operands and not isinstance(operands[0], Imm):
            return ALL_BARRIERS
        count = max(count, 1 + (int(operands[0].value) if operands and isinstance(operands[0], Imm) else 0))
    return count


def scalar(e: Lowering, op: Operand) -> V:
    """A u32 operand that is the same for all running lanes."""
    v = e.read(op, U32)
    return v if v.n == 1 else e.f.extract(v, e.f.intr_flag("cttz", e.mask, False))


class EndsBlock(Lowering, Protocol):
    """An instruction that ends a block says where its lanes go on, after what later blocks read is stored."""

    block: Block
    next_slot: V
    """Where the pc of lanes that wait is put before a jump to `park`."""

    def flush(self) -> None:
        """Store what later blocks read."""


def barrier(e: EndsBlock, ins: Ins) -> None:
    """bar.sync and bar.arrive: the end of a block; the warp is suspended until the barrier opens."""
    f = e.f
    if mod(ins, "warp"):
        return
    if mod(ins, "cluster"):
        raise NotImplementedError
    zero = f.const("i32", 0)
    operands = ins.operands[1:-1] if mod(ins, "red") else ins.operands
    which = scalar(e, operands[0]) if operands else zero
    threads = scalar(e, operands[1]) if len(operands) > 1 else zero
    if mod(ins, "red"):
        bits = e.bits_of(e.read(ins.operands[-1], PRED))
        f.call_void(f"{REDUCE}{next(m for m in ins.mods if m in REDUCTIONS)}", e.frame, e.lanes(ins), which, bits)
        f.store(f.and_(which, 15), e.frame, Frame.RED_BARRIER)
    waits = not mod(ins, "arrive")
    lanes = e.lanes(ins)
    nxt = e.block.succ[0]
    e.flush()
    f.call_void("tgx_arrive", e.frame, lanes, which, threads, f.const("i32", -1 if waits else 0))
    f.store(f.const("i32", nxt), e.next_slot)
    if e.block.diverged or not waits or ins.pred is not None:
        f.br("park")
        return
    f.store(f.const("i32", nxt + 1), e.frame, Frame.RESUME)
    f.ret(f.const("i32", Status.BARRIER))


def barrier_result(e: Lowering, ins: Ins) -> None:
    """What bar.red gave, read when the warp goes on after it."""
    f = e.f
    # The barrier's number is not kept: the block before set it aside in the frame.
    which = f.load("i32", e.frame, Frame.RED_BARRIER)
    at = f.word(f.load("ptr", e.frame, Frame.SLOT), which)
    v = f.load("i32", at, Slot.RESULT)
    if mod(ins, "popc"):
        e.write(ins.operands[0], v, U32, ins)
    else:
        e.write(ins.operands[0], f.not_zero(v), PRED, ins)


def trap(e: Lowering, ins: Ins) -> None:
    """trap: the launch ends with a fault."""
    f = e.f
    lanes = e.lanes(ins)
    some, go = f.name_of("trap"), f.name_of("go")
    f.condbr(f.not_zero(lanes), some, go, False)
    f.label(some)
    lane = f.intr_flag("cttz", lanes, False)
    info = f.const("i32", fault_info(0, Access.TRAP, 0))
    f.call_void("tgx_fault", e.frame, f.const("i64", 0), lane, info, f.const("i32", e.pc))
    f.br(go)
    f.label(go)


HANDLERS: dict[str, Handler[EndsBlock]] = {
    "bar": barrier, "barrier": barrier, "trap": trap, "pmevent": nothing, "brkpt": trap,
    BAR_RESULT: barrier_result,
}  # fmt: skip
