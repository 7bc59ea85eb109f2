"""Control flow of a warp: the dispatcher, jumps, branches and tables of targets.

`mask_slot` holds the lanes that run, `other_slot` the lowest pc at which other lanes wait: control stays in direct
jumps while it is below that. Lanes that wait have their pc in the frame; `park` and `suspend` put it there.
"""

from tegrad.ptx.analysis import Block, Flow
from tegrad.ptx.convergence import nobody_runs
from tegrad.ptx.helpers import helper
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.layout import LANES, SPIN_COST, Frame, Status

NOBODY = 0xFFFFFFFF


class Dispatcher:
    """The part of the emitter that moves lanes between blocks."""

    def __init__(self, f: Fn, flow: Flow) -> None:
        self.f: Fn = f
        self.flow: Flow = flow
        self.frame: V = f.args[0]
        self.block: Block = flow.blocks[0]
        self.mask: V = f.const("i32", 0)
        self.mask_slot, self.other_slot, self.next_slot = (f.alloca("i32") for _ in range(3))

    def start(self) -> None:
        """The way into the function."""
        f = self.f
        # A warp that starts, or waited as a whole, goes on at the block RESUME - 1 without the dispatcher.
        resume = f.load("i32", self.frame, Frame.RESUME)
        f.condbr(f.is_zero(resume), "dispatch", "resume", False)
        f.label("resume")
        f.store(f.const("i32", 0), self.frame, Frame.RESUME)
        f.store(f.load("i32", self.frame, Frame.LIVE), self.mask_slot)
        f.store(f.const("i32", NOBODY), self.other_slot)
        targets = [0] + [b.succ[0] for b in self.flow.blocks if b.kind == "bar" and not b.diverged]
        cases = " ".join(f"i32 {t + 1}, label %b{t}" for t in sorted(set(targets)))
        f.do(f"switch {resume}, label %wrong [{cases}]")

    def dispatcher(self) -> None:
        """Choose the lanes at the lowest pc; and the places where lanes are parked and the function is left."""
        f, frame = self.f, self.frame
        f.label("park")
        m = f.mask_vec(f.load("i32", self.mask_slot))
        pcs = f.load("i32", frame, Frame.PCS, LANES, 64)
        f.store(f.select(m, f.load("i32", self.next_slot), pcs), frame, Frame.PCS, 64)
        f.br("dispatch")
        f.label("dispatch")
        live = f.load("i32", frame, Frame.LIVE)
        active = f.and_(live, f.not_(f.load("i32", frame, Frame.BLOCKED)))
        f.condbr(f.is_zero(active), "idle", "choose")
        f.label("idle")
        if self.flow.converges:
            nobody_runs(f, frame)
        done = f.is_zero(live)
        f.ret(f.select(done, f.const("i32", Status.EXIT), f.const("i32", Status.BARRIER)))
        f.label("choose")
        lanes = f.mask_vec(active)
        pcs = f.load("i32", frame, Frame.PCS, LANES, 64)
        rotate = f.load("i32", frame, Frame.ROTATE) if self.flow.spins else f.const("i32", 0)
        keys = f.sub(pcs, rotate) if self.flow.spins else pcs
        key = self.lowest(f.select(lanes, keys, NOBODY))
        chosen = f.and_(lanes, f.icmp("eq", keys, key))
        rest = f.and_(lanes, f.not_(chosen))
        if self.flow.spins:
            # Back to the lowest pc once all lanes run together.
            alone = f.is_zero(f.mask_bits(rest))
            f.store(f.select(alone, f.const("i32", 0), rotate), frame, Frame.ROTATE)
        f.store(self.lowest(f.select(rest, keys, NOBODY)), self.other_slot)
        f.store(f.mask_bits(chosen), self.mask_slot)
        pc = f.add(key, rotate) if self.flow.spins else key
        cases = " ".join(f"i32 {b.index}, label %b{b.index}" for b in self.flow.blocks)
        f.do(f"switch {pc}, label %wrong [{cases}]")
        f.label("wrong")
        f.do("unreachable")
        f.label("suspend")
        m = f.mask_vec(f.load("i32", self.mask_slot))
        pcs = f.load("i32", frame, Frame.PCS, LANES, 64)
        f.store(f.select(m, f.load("i32", self.next_slot), pcs), frame, Frame.PCS, 64)
        f.ret(f.const("i32", Status.YIELD))
        f.label("leave")
        live = f.and_(f.load("i32", frame, Frame.LIVE), f.not_(f.load("i32", self.mask_slot)))
        f.store(live, frame, Frame.LIVE)
        f.condbr(f.is_zero(live), "gone", "dispatch")
        f.label("gone")
        f.ret(f.const("i32", Status.EXIT))

    def lowest(self, v: V) -> V:
        """The unsigned minimum over the lanes."""
        return self.f.call("llvm.vector.reduce.umin.v32i32", "i32", 1, v, pure=True)

    def table(self, block: Block, index: V) -> None:
        """brx.idx: every lane's pc from the table, then the dispatcher."""
        f = self.f
        index = f.splat(index, LANES)
        target = f.const("i32", block.targets[-1], LANES)
        for i, t in enumerate(block.targets[:-1]):
            target = f.select(f.icmp("eq", index, i), f.const("i32", t), target)
        pcs = f.load("i32", self.frame, Frame.PCS, LANES, 64)
        f.store(f.select(f.mask_vec(self.mask), target, pcs), self.frame, Frame.PCS, 64)
        budget = f.sub(f.load("i32", self.frame, Frame.BUDGET), SPIN_COST if block.spin else 1)
        f.store(budget, self.frame, Frame.BUDGET)
        stop = f.name_of("stop")
        f.condbr(f.icmp("slt", budget, f.const("i32", 0)), stop, "dispatch", False)
        f.label(stop)
        f.ret(f.const("i32", Status.YIELD))

    def jump(self, target: int) -> None:
        """Go to a block with all lanes of the mask."""
        f = self.f
        back = target <= self.block.index
        if back:
            spin = self.block.spin
            budget = f.sub(f.load("i32", self.frame, Frame.BUDGET), SPIN_COST if spin else 1)
            f.store(budget, self.frame, Frame.BUDGET)
            f.store(f.const("i32", target), self.next_slot)
            stop, go = f.name_of("stop"), f.name_of("go")
            f.condbr(f.icmp("slt", budget, f.const("i32", 0)), stop, go, False)
            f.label(stop)
            if spin:
                # Let the next group of lanes run first when the warp is resumed.
                f.store(f.const("i32", self.block.index + 1), self.frame, Frame.ROTATE)
            f.br("suspend")
            f.label(go)
        if not self.block.diverged:
            f.br(f"b{target}")
            return
        if not back:
            f.store(f.const("i32", target), self.next_slot)
        key = f.const("i32", target)
        if self.flow.spins:
            key = f.sub(key, f.load("i32", self.frame, Frame.ROTATE))
        f.condbr(f.icmp("ult", key, f.load("i32", self.other_slot)), f"b{target}", "park")

    def pause(self, target: int) -> None:
        """Now and then, with a seed, let other warps go on before the block with all lanes of the mask."""
        f, go = self.f, self.f.name_of("go")
        f.store(f.const("i32", target), self.next_slot)
        f.condbr(f.call("tgx_async_pause", "i1", 1, self.frame), "suspend", go, False)
        f.label(go)

    def branch(self, p: V, target: int | None, nxt: int) -> None:
        """A conditional branch; target None is the end of the thread."""
        f = self.f
        if target is not None and self.is_exit(target):
            target = None
        if target == nxt:
            self.jump(nxt)
            return
        if p.n == 1:
            taken, fall = f.name_of("taken"), f.name_of("fall")
            f.condbr(p, taken, fall)
            f.label(taken)
            if target is None:
                f.br("leave")
            else:
                self.jump(target)
            f.label(fall)
            self.jump(nxt)
            return
        bits = f.mask_bits(p)
        go, stay = f.and_(self.mask, bits), f.and_(self.mask, f.not_(bits))
        if target is None:
            self.branch_out(go, stay, nxt)
        else:
            self.branch_apart(go, stay, target, nxt)

    def is_exit(self, target: int) -> bool:
        block = self.flow.blocks[target]
        return block.kind == "exit" and not block.body

    def branch_out(self, go: V, stay: V, nxt: int) -> None:
        """Some lanes end here."""
        f = self.f
        f.store(f.and_(f.load("i32", self.frame, Frame.LIVE), f.not_(go)), self.frame, Frame.LIVE)
        f.store(stay, self.mask_slot)
        some = f.name_of("some")
        f.condbr(f.is_zero(stay), "dispatch", some)
        f.label(some)
        self.jump(nxt)

    def branch_apart(self, go: V, stay: V, target: int, nxt: int) -> None:
        """All lanes one way: a jump. Else the lanes with the higher target wait."""
        f = self.f
        none, some, all_, apart = (f.name_of(h) for h in ("none", "some", "all", "apart"))
        f.condbr(f.is_zero(go), none, some)
        f.label(none)
        self.jump(nxt)
        f.label(some)
        f.condbr(f.is_zero(stay), all_, apart)
        f.label(all_)
        self.jump(target)
        f.label(apart)
        low, high = min(target, nxt), max(target, nxt)
        wait, run = (stay, go) if low == target else (go, stay)
        f.call_void("tgx_apart", self.frame, wait, f.const("i32", high))
        f.store(run, self.mask_slot)
        if self.flow.spins:
            f.store(f.const("i32", low), self.next_slot)
            f.br("park")
            return
        f.store(f.intr("umin", f.load("i32", self.other_slot), f.const("i32", high)), self.other_slot)
        was, self.block.diverged = self.block.diverged, True
        self.jump(low)
        self.block.diverged = was


@helper("void", "ptr frame, i32 mask, i32 pc")
def tgx_apart(f: Fn, frame: V, mask: V, pc: V) -> None:
    """Lanes wait at a pc."""
    pcs = f.load("i32", frame, Frame.PCS, LANES, 64)
    f.store(f.select(f.mask_vec(mask), pc, pcs), frame, Frame.PCS, 64)
