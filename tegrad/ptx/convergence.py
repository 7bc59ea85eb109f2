"""Lanes of a member mask converge before they execute a `.sync` instruction of the warp (PTX ISA 9.7.9.6, 9.7.13).

The ISA makes a lane wait until all lanes of its mask that have not exited execute an instruction with the same
qualifiers and the same mask. It does not say that it is the same place in the text: since Volta the two sides of a
branch may exchange values, and lanes of one instruction may have different masks. Lanes that are all there go on at
once (`converge`). Else each leaves what it gives, its mask and the instruction's key in the frame and waits; whoever
comes last has the results of the whole group computed there (`tgx_settle`), so that lanes take theirs when they run on.

What the ISA leaves undefined ends the launch: a lane that its own mask does not name, and lanes that wait for others
which cannot come.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from tegrad.ptx.analysis import Block, is_warp_sync, member_mask
from tegrad.ptx.control import EndsBlock
from tegrad.ptx.gather import keep
from tegrad.ptx.helpers import helper
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.layout import LANES, Access, Frame, Status, WarpState, fault_info
from tegrad.ptx.parser import split_op
from tegrad.ptx.rules import U32
from tegrad.ptx.syntax import Function, Ins, Label, Sym
from tegrad.ptx.types import TYPES
from tegrad.ptx.warp import REDUCTIONS, Action, action, give, permute, reduce

ACTION_BITS = 8
"""A key is the instruction's action below its number among the kernel's different instructions."""


def branch_around(fn: Function) -> Function:
    """The function with branches in place of the predicates of `.sync` instructions: lanes without it do not come."""
    if not any(isinstance(i, Ins) and i.pred is not None and is_warp_sync(i) for i in fn.body):
        return fn
    body: list[Ins | Label] = []
    for index, item in enumerate(fn.body):
        if isinstance(item, Label) or item.pred is None or not is_warp_sync(item):
            body.append(item)
            continue
        register, negated = item.pred
        after = f"$past{index}"
        jump = Ins("bra", *split_op("bra"), (Sym(after),), (register, not negated), item.line)
        body += [jump, item._replace(pred=None), Label(after)]
    return replace(fn, body=body)


def keys(body: Iterable[Ins | Label]) -> dict[str, int]:
    """A number for each instruction by its qualifiers; lanes converge at equal ones."""
    names = sorted({i.op for i in body if isinstance(i, Ins) and is_warp_sync(i)})
    return {name: number << ACTION_BITS for number, name in enumerate(names)}


class Converging(EndsBlock, Protocol):
    """Lanes that are all there execute the instruction at once; the others' way must find the same values after it."""

    keys: dict[str, int]
    values: dict[int, V]

    def instruction(self, ins: Ins) -> None:
        """Write an instruction."""

    def jump(self, target: int) -> None:
        """Go to a block with all lanes of the mask."""


def converge(e: Converging, ins: Ins) -> None:
    """The end of a block that is a `.sync` instruction: execute it if all its members are here, else wait for them."""
    f = e.f
    e.flush()
    members = e.read(member_mask(ins), U32)
    first = members if members.n == 1 else f.extract(members, f.intr_flag("cttz", e.mask, False))
    whole = f.icmp("eq", f.and_(first, f.load("i32", e.frame, Frame.LIVE)), e.mask)
    if members.n > 1:
        others = f.and_(f.mask_bits(f.icmp("ne", members, first)), e.mask)
        whole = f.and_(whole, f.is_zero(others))
    result, after = e.block.succ
    wait, go = f.name_of("wait"), f.name_of("go")
    f.condbr(whole, go, wait, True)
    f.label(wait)
    known = dict(e.values)
    given, source = give(e, ins)
    keep(f, given, e.frame, Frame.CONVERGE_VALUE, e.mask)
    keep(f, source, e.frame, Frame.CONVERGE_FROM, e.mask)
    key = f.const("i32", e.keys[ins.op] | action(ins))
    f.call_void("tgx_converge", e.frame, e.mask, f.splat(members, LANES), key, f.const("i32", e.pc))
    f.store(f.const("i32", result), e.next_slot)
    f.br("park")
    e.values = known
    f.label(go)
    e.instruction(ins)
    e.flush()
    e.jump(after)


def _keep(f: Fn, frame: V, mask: V, at: int, v: V) -> None:
    """Store the values of some lanes in the frame."""
    v = f.splat(v, LANES)
    f.store(f.select(f.mask_vec(mask), v, f.load(v.el, frame, at, LANES, 64)), frame, at, 64)


@helper("void", "ptr frame, i32 mask, <32 x i32> members, i32 key, i32 pc")
def tgx_converge(f: Fn, frame: V, mask: V, members: V, key: V, pc: V) -> None:
    """Lanes arrive, each with its mask; those that are complete go on."""
    for at, v in ((Frame.CONVERGE_MASK, members), (Frame.CONVERGE_KEY, key), (Frame.CONVERGE_PC, pc)):
        _keep(f, frame, mask, at, v)
    for at in (Frame.MET, Frame.BLOCKED):
        f.store(f.or_(f.load("i32", frame, at), mask), frame, at)
    own = f.and_(members, f.bin("shl", f.const("i32", 1, LANES), f.iota("i32", LANES)))
    outside = f.and_(f.mask_bits(f.is_zero(own)), mask)
    with f.if_(f.not_zero(outside), False):
        lane = f.intr_flag("cttz", outside, False)
        _fault(f, frame, Access.OUTSIDE, lane, f.extract(members, lane), outside, pc)
    f.call("tgx_settle", "i1", 1, frame)


def _group(f: Fn, frame: V, lane: V) -> tuple[V, V, V]:
    """The lanes that wait with the mask and the key of one of them; the mask and the key."""
    masks, numbers = (f.load("i32", frame, at, LANES, 64) for at in (Frame.CONVERGE_MASK, Frame.CONVERGE_KEY))
    mask, key = f.extract(masks, lane), f.extract(numbers, lane)
    equal = f.and_(f.icmp("eq", masks, mask), f.icmp("eq", numbers, key))
    return f.and_(f.mask_bits(equal), f.load("i32", frame, Frame.MET)), mask, key


def _missing(f: Fn, frame: V, mask: V, group: V) -> V:
    return f.and_(f.and_(mask, f.load("i32", frame, Frame.LIVE)), f.not_(group))


@helper("i1", "ptr frame")
def tgx_settle(f: Fn, frame: V) -> V:
    """Let the groups go on that are complete; whether there was one."""
    zero = f.const("i32", 0)
    rest, some = f.alloca("i32"), f.alloca("i1")
    f.store(f.load("i32", frame, Frame.MET), rest)
    f.store(f.const("i1", 0), some)
    with f.loop() as (_, end):
        left = f.load("i32", rest)
        f.leave(f.is_zero(left), end)
        group, mask, key = _group(f, frame, f.intr_flag("cttz", left, False))
        f.store(f.and_(left, f.not_(group)), rest)
        with f.if_(f.is_zero(_missing(f, frame, mask, group))):
            _deliver(f, frame, group, f.and_(key, (1 << ACTION_BITS) - 1))
            # Lanes held where branches join look again.
            f.store(f.and_(f.load("i32", frame, Frame.MET), f.not_(group)), frame, Frame.MET)
            free = f.or_(group, f.load("i32", frame, Frame.HELD))
            f.store(f.and_(f.load("i32", frame, Frame.BLOCKED), f.not_(free)), frame, Frame.BLOCKED)
            f.store(zero, frame, Frame.HELD)
            f.store(f.const("i1", 1), some)
    return f.load("i1", some)


def _deliver(f: Fn, frame: V, group: V, which: V) -> None:
    """Compute what each lane of a group gets, from what all of them gave."""
    given = f.load("i64", frame, Frame.CONVERGE_VALUE, LANES, 64)
    words = f.cast("trunc", given, "i32")
    out = f.alloca("<32 x i32>", 64)
    f.store(f.splat(f.intr_flag("cttz", group, False), LANES), out, 0, 64)

    def when(number: int, result: V) -> None:
        f.store(f.select(f.icmp("eq", which, number), result, f.load("i32", out, 0, LANES, 64)), out)

    when(Action.SHFL, permute(f, words, f.load("i32", frame, Frame.CONVERGE_FROM, LANES, 64)))
    when(Action.VOTE, f.splat(f.and_(f.mask_bits(f.not_zero(words)), group), LANES))
    when(Action.MATCH, f.call("tgx_match_b64", "i32", LANES, given, group))
    for number, (op, ty) in enumerate(REDUCTIONS, Action.REDUX):
        when(number, f.splat(reduce(f, op, TYPES[ty], words, group), LANES))
    _keep(f, frame, group, Frame.CONVERGE_RESULT, f.load("i32", out, 0, LANES, 64))
    _keep(f, frame, group, Frame.CONVERGE_GROUP, group)


def _fault(f: Fn, frame: V, access: Access, lane: V, mask: V, lanes: V, pc: V) -> None:
    """End the launch; the address of the fault is the member mask, and above it the lanes that are wrong."""
    wide, high = (f.resize(v, "i64", False) for v in (mask, lanes))
    address = f.or_(wide, f.bin("shl", high, 32))
    f.call_void("tgx_fault", frame, address, lane, f.const("i32", fault_info(0, access, 0)), pc)


@helper("void", "ptr frame", "nounwind cold")
def tgx_unconverged(f: Fn, frame: V) -> None:
    """End the launch because the lanes that wait will never be complete."""
    lane = f.intr_flag("cttz", f.load("i32", frame, Frame.MET), False)
    group, mask, _ = _group(f, frame, lane)
    pc = f.extract(f.load("i32", frame, Frame.CONVERGE_PC, LANES, 64), lane)
    _fault(f, frame, Access.MISSING, lane, mask, _missing(f, frame, mask, group), pc)


@helper("i1", "ptr frames, i64 size, i32 count", "nounwind cold")
def tgx_stuck(f: Fn, frames: V, size: V, count: V) -> V:
    """Whether the warps of a CTA wait for barriers that lanes which wait for others of their warp would have to reach;
    the launch is then ended."""
    with f.for_(count) as w:
        state = f.load("i32", f.element(frames, w, size), Frame.STATE)
        with f.if_(f.icmp("eq", state, WarpState.READY)):
            f.ret(f.const("i1", 0))
    with f.for_(count) as w:
        frame = f.element(frames, w, size)
        waits = f.not_zero(f.load("i32", frame, Frame.MET))
        with f.if_(f.and_(waits, f.not_zero(f.load("i32", frame, Frame.LIVE)))):
            f.call_void("tgx_unconverged", frame)
            f.ret(f.const("i1", 1))
    return f.const("i1", 0)


def nobody_runs(f: Fn, frame: V) -> None:
    """In the dispatcher, where no lane can run: go on with groups that became complete because lanes have exited."""
    met = f.load("i32", frame, Frame.MET)
    with f.if_(f.not_zero(met)):
        with f.if_(f.call("tgx_settle", "i1", 1, frame)):
            f.br("dispatch")
        # A barrier of the block may still bring the lanes that are missing.
        converging = f.or_(met, f.load("i32", frame, Frame.HELD))
        with f.if_(f.is_zero(f.and_(f.load("i32", frame, Frame.LIVE), f.not_(converging)))):
            f.call_void("tgx_unconverged", frame)
            f.ret(f.const("i32", Status.YIELD))


def hold(e: EndsBlock, block: Block, waits: list[int]) -> None:
    """At the start of a block where branches join: lanes do not pass it while others wait within the branches.

    Nothing after it is made for some of the lanes only. `waits` are the blocks at which lanes of the branches wait."""
    f, frame = e.f, e.frame
    met = f.load("i32", frame, Frame.MET)
    with f.if_(f.not_zero(met), False):
        pcs = f.load("i32", frame, Frame.PCS, LANES, 64)
        inside = f.icmp("eq", pcs, waits[0])
        for at in waits[1:]:
            inside = f.or_(inside, f.icmp("eq", pcs, at))
        with f.if_(f.not_zero(f.and_(f.mask_bits(inside), met))):
            for at in (Frame.HELD, Frame.BLOCKED):
                f.store(f.or_(f.load("i32", frame, at), e.mask), frame, at)
            f.call("tgx_settle", "i1", 1, frame)
            f.store(f.const("i32", block.index), e.next_slot)
            f.br("park")
