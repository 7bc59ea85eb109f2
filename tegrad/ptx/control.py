"""Barriers and other instructions that end or suspend a warp (PTX ISA 9.7.12, 9.7.13)."""

from typing import TYPE_CHECKING

from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import LANES, Access, Frame, Slot, Status, fault_info
from tegrad.ptx.rules import U32, Handler, mod
from tegrad.ptx.syntax import Ins, Operand

if TYPE_CHECKING:
    from tegrad.ptx.emitter import Emitter


def emit_arrive(module: Module) -> None:
    """tgx_arrive(frame, mask, barrier, threads, block): count lanes in at a barrier, and block them if they wait."""
    params = [("ptr", "frame"), ("i32", "mask"), ("i32", "id"), ("i32", "threads"), ("i32", "block")]
    f = Fn(module, "tgx_arrive", "void", params, "nounwind")
    frame, mask, which, threads, block = f.args
    slot = f.load("ptr", frame, Frame.SLOT)
    which = f.and_(which, f.const("i32", 15))
    offset = f.resize(f.mul(which, f.const("i32", 4)), "i64", False)
    at = f.gep(slot, offset)
    arrived = f.add(f.load("i32", at, Slot.ARRIVED), f.intr("ctpop", mask))
    f.store(arrived, at, Slot.ARRIVED)
    f.store(threads, at, Slot.EXPECTED)
    bit = f.bin("shl", f.const("i32", 1), which)
    f.store(f.or_(f.load("i32", slot, Slot.PENDING), bit), slot, Slot.PENDING)
    waiting = f.and_(mask, block)
    mine = f.gep(frame, offset)
    f.store(f.or_(f.load("i32", mine, Frame.BAR_MASK), waiting), mine, Frame.BAR_MASK)
    f.store(f.or_(f.load("i32", frame, Frame.BLOCKED), waiting), frame, Frame.BLOCKED)
    f.ret()
    f.finish()


def scalar(e: "Emitter", op: Operand) -> V:
    """A u32 operand that is the same for all running lanes."""
    v = e.read(op, U32)
    return v if v.n == 1 else e.f.extract(v, e.f.intr_flag("cttz", e.mask, False))


def barrier(e: "Emitter", ins: Ins) -> None:
    """bar.sync and bar.arrive: the end of a block; the warp is suspended until the barrier opens."""
    f = e.f
    if mod(ins, "red") or mod(ins, "cluster"):
        raise NotImplementedError
    zero = f.const("i32", 0)
    which = scalar(e, ins.operands[0]) if ins.operands else zero
    threads = scalar(e, ins.operands[1]) if len(ins.operands) > 1 else zero
    waits = not mod(ins, "arrive")
    lanes = e.lanes(ins)
    nxt = e.block.succ[0]
    e.flush()
    f.call_void("tgx_arrive", e.frame, lanes, which, threads, f.const("i32", -1 if waits else 0))
    f.store(f.const("i32", nxt), e.next_slot)
    if e.block.diverged or not waits or ins.pred is not None:
        f.br("park")
        return
    f.store(f.const("i32", nxt, LANES), e.frame, Frame.PCS, 64)
    f.ret(f.const("i32", Status.BARRIER))


def trap(e: "Emitter", ins: Ins) -> None:
    """trap: the launch ends with a fault."""
    f = e.f
    lanes = e.lanes(ins)
    some, go = f.name_of("trap"), f.name_of("go")
    f.condbr(f.icmp("ne", lanes, f.const("i32", 0)), some, go, False)
    f.label(some)
    lane = f.intr_flag("cttz", lanes, False)
    info = f.const("i32", fault_info(0, Access.TRAP, 0))
    f.call_void("tgx_fault", e.frame, f.const("i64", 0), lane, info, f.const("i32", e.pc))
    f.br(go)
    f.label(go)


def nothing(e: "Emitter", ins: Ins) -> None:
    """No effect on results."""


HANDLERS: dict[str, Handler] = {"bar": barrier, "barrier": barrier, "trap": trap, "pmevent": nothing, "brkpt": trap}
