"""A kernel to LLVM IR: one function that runs one warp until it exits, waits at a barrier or yields.

Within a basic block registers are SSA values; those that live across blocks are kept in the warp's frame. A register
that holds one value for the whole warp is a scalar. `mask` is the set of lanes that run; `other` is the lowest pc at
which other lanes wait: control stays in direct jumps while it is below that.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tegrad.ptx import shared
from tegrad.ptx.analysis import Block, analyse
from tegrad.ptx.convergence import converge, hold, keys
from tegrad.ptx.dispatch import Dispatcher
from tegrad.ptx.errors import PtxError
from tegrad.ptx.gather import keep
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import LANES, STACK_ALIGN, Frame, Launch
from tegrad.ptx.placement import Layout
from tegrad.ptx.rules import U32, Handler, OpRule, unsupported
from tegrad.ptx.specials import TABLE as SPECIALS
from tegrad.ptx.syntax import Function, Imm, Ins, Not, Operand, Reg, Source, Special, Sym, Vec
from tegrad.ptx.types import EL_BITS, Ty
from tegrad.ptx.view import Group, View, groups


class Emitter(Dispatcher):
    """Writes the LLVM function of one kernel."""

    def __init__(self, source: Source, fn: Function, find: Callable[[Ins], "OpRule | Handler[Emitter]"]) -> None:
        self.source, self.kernel, self.find = source, fn, find
        self.module = Module(STACK_ALIGN)
        super().__init__(Fn(self.module, "tgx_warp", "i32", "ptr frame"), analyse(fn))
        self.layout = Layout(source, fn, self.flow)
        self.symbols, self.globals = self.layout.symbols, self.layout.globals
        self.copy_queue, self.room = self.layout.queue, self.layout.warpgroup
        self.params = {p.name: p for p in fn.params}
        self.launch: V
        self.values: dict[int, V] = {}
        self.dirty: set[int] = set()
        self.pc = 0
        self.carry: V | None = None
        self.groups: dict[int, Group] = {}
        self.views: list[V] = []
        self.reads_dims = False
        self.asynchronous = False
        """Whether it has mbarriers or bulk copies; `arrives`: whether its cp.async arrive at an mbarrier."""
        self.arrives = False
        self.keys = keys(fn.body)
        self.counters = [[_length(b), 0, 0] for b in self.flow.blocks]

    # -- the function --------------------------------------------------------------------------------------------
    def emit(self) -> Module:
        """Write everything; raises PtxError for an instruction that is not known."""
        f = self.f
        self.launch = f.load("ptr", self.frame, Frame.LAUNCH)
        self.counts = f.load("ptr", self.frame, Frame.COUNTS)
        self.param_base = f.load("ptr", self.launch, Launch.PARAMS)
        self.symbol_base = f.load("ptr", self.launch, Launch.SYMBOLS)
        self.start()
        self.dispatcher()
        for block in self.flow.blocks:
            self.emit_block(block)
        f.finish()
        return self.module

    def emit_block(self, block: Block) -> None:
        f = self.f
        self.block, self.values, self.pc = block, {}, block.first_pc
        self.dirty.clear()
        self.carry = None
        f.label(f"b{block.index}")
        self.mask = f.load("i32", self.mask_slot)
        if block.index in self.flow.joins:
            hold(self, block, self.flow.joins[block.index])
        self.count(block.index, self.mask)
        self.groups = {block.first_pc + index: group for index, group in groups(block).items()}
        for ins in block.body:
            self.instruction(ins)
            self.pc += 1
        self.terminator(block)

    def count(self, index: int, mask: V) -> None:
        """Add the number of lanes to a counter."""
        f = self.f
        lanes = f.resize(f.intr("ctpop", mask), "i64", False)
        at = f.gep(self.counts, 8 * index)
        f.store(f.add(f.load("i64", at), lanes), at)

    def account(self, ins: Ins, size: int, write: bool) -> None:
        """Account for an access: with its block, or with a counter of its own if it is predicated."""
        index = self.block.index
        if ins.pred is not None:
            index = len(self.counters)
            self.counters.append([0, 0, 0])
            self.count(index, self.lanes(ins))
        self.counters[index][2 if write else 1] += size

    def account_dynamic(self, lanes: V, sizes: V, write: bool) -> None:
        """Account for the lanes' bytes with a counter of their own."""
        f, index = self.f, len(self.counters)
        self.counters.append([0, int(not write), int(write)])
        asked = f.cast("zext", f.select(f.mask_vec(lanes), sizes, 0), "i64")
        total = f.call(f"llvm.vector.reduce.add.v{LANES}i64", "i64", 1, asked, pure=True)
        at = f.gep(self.counts, 8 * index)
        f.store(f.add(f.load("i64", at), total), at)

    def view(self, register: int) -> V | None:
        """The view of the group that the current access belongs to, filled if this is the first.

        None for an access of no group, and where the register has one address for the whole warp.
        """
        group = self.groups.get(self.pc)
        if group is None:
            return None
        base = self.f.bits(self.get(register), "i64")
        if base.n == 1:
            return None
        if group.view is None:
            # Views of different blocks share their memory.
            used = sum(g.view is not None for g in {id(g): g for g in self.groups.values()}.values())
            if used == len(self.views):
                self.views.append(self.f.alloca(f"[{View.SIZE} x i8]", 64))
            group.view = self.views[used]
            low, size = (self.f.const("i64", x) for x in (group.low, group.high - group.low))
            self.f.call_void("tgx_view", self.frame, group.view, base, self.mask, low, size)
        return group.view

    def instruction(self, ins: Ins) -> None:
        op = self.find(ins)
        with _known(ins):
            if isinstance(op, OpRule):
                result, sources = op.signature(ins)
                if len(ins.operands) != len(sources) + 1:
                    raise PtxError(
                        f"line {ins.line}: {ins.op} has {len(ins.operands)} operands, not {len(sources) + 1}"
                    )
                values = [self.read(o, t) for o, t in zip(ins.operands[1:], sources, strict=True)]
                self.write(ins.operands[0], shared.applied(self.f, op, ins, values), result, ins)
            else:
                op(self, ins)

    # -- operands ------------------------------------------------------------------------------------------------
    def lanes(self, ins: Ins) -> V:
        """The i32 mask of the lanes that execute an instruction."""
        if ins.pred is None:
            return self.mask
        return self.f.and_(self.mask, self.bits_of(self.predicate(ins.pred)))

    def predicate(self, pred: tuple[int, bool]) -> V:
        v = self.get(pred[0])
        return self.f.not_(v) if pred[1] else v

    def bits_of(self, v: V) -> V:
        """A predicate as an i32 mask."""
        return self.f.cast("sext", v, "i32") if v.n == 1 else self.f.mask_bits(v)

    def get(self, reg: int) -> V:
        """The current value of a register, in whatever type it was produced."""
        v = self.values.get(reg)
        if v is None:
            ty = self.kernel.regs[reg]
            constant = self.flow.constants.get(reg)
            if constant is not None:
                v = self.form(constant, ty)
            elif reg not in self.layout.slots:
                v = self.f.const(ty.iel, 0)
            elif self.flow.is_uniform(reg):
                v = self.load_scalar(reg, ty)
            elif ty.kind == "p":
                v = self.f.mask_vec(self.f.load("i32", self.frame, self.layout.slots[reg]))
            else:
                align = min(64, ty.bits // 8 * LANES)
                v = self.f.load(ty.iel, self.frame, self.layout.slots[reg], LANES, align)
            self.values[reg] = v
        return v

    def load_scalar(self, reg: int, ty: Ty) -> V:
        at = self.layout.slots[reg]
        if ty.kind == "p":
            return self.f.cast("trunc", self.f.load("i8", self.frame, at), "i1")
        return self.f.load(ty.iel, self.frame, at)

    def form(self, ins: Ins, ty: Ty) -> V:
        """The value of a register that is written once, by an instruction without register sources."""
        source = ins.operands[1]
        if ins.base == "mov":
            return self.as_type(self.read(source, ins.types[-1]), ty)
        target, from_param = ins.operands[0], self.find(ins)
        assert isinstance(target, Reg)
        assert not isinstance(from_param, OpRule)
        from_param(self, ins)
        self.dirty.discard(target.number)
        return self.values[target.number]

    def read(self, op: Operand, ty: Ty) -> V:
        """An operand as a value of the element type of `ty`; scalar where the whole warp has one value."""
        f = self.f
        if isinstance(op, Reg):
            return self.as_type(self.get(op.number), ty)
        if isinstance(op, Imm):
            return self.immediate(op, ty)
        if isinstance(op, Not):
            return f.not_(self.get(op.reg.number))
        if isinstance(op, Special):
            return self.as_type(self.special(op.name), ty)
        if isinstance(op, Sym):
            return self.as_type(self.address_of(op), ty)
        if isinstance(op, Vec):
            return self.packed([self.read(o, _part(ty, len(op.items))) for o in op.items], ty)
        raise NotImplementedError

    def special(self, name: str) -> V:
        source = SPECIALS.get(name)
        if source is None:
            raise PtxError(f"special register {name} is not supported by the PTX engine")
        self.reads_dims |= name.startswith(("%ntid", "%nctaid"))
        return source(self)

    def immediate(self, op: Imm, ty: Ty) -> V:
        f = self.f
        if ty.kind == "f":
            return f.const(ty.el, op.value)
        if ty.kind == "p":
            return f.const("i1", bool(op.value))
        if op.bits:
            el = "double" if ty.bits == 64 else "float"
            return self.resize_bits(f.bits(f.const(el, op.value), f"i{EL_BITS[el]}"), ty)
        return f.const(ty.iel, int(op.value))

    def resize_bits(self, v: V, ty: Ty) -> V:
        return self.f.resize(v, ty.iel, False)

    def as_type(self, v: V, ty: Ty) -> V:
        """A register's value as a type: equal widths are reinterpreted, others cut or extended."""
        f = self.f
        if v.el == ty.el:
            return v
        have = EL_BITS[v.el]
        if ty.kind == "p" or v.el == "i1":
            raise NotImplementedError
        if have == ty.bits:
            return f.bits(v, ty.el)
        v = f.resize(f.bits(v, f"i{have}"), ty.iel, ty.signed)
        return f.bits(v, ty.el)

    def packed(self, parts: list[V], ty: Ty) -> V:
        """{a, b, ...} as one value, the first part lowest."""
        f = self.f
        out: V | None = None
        for i, p in enumerate(parts):
            wide = f.resize(f.bits(p, f"i{EL_BITS[p.el]}"), ty.iel, False)
            if i:
                wide = f.bin("shl", wide, i * EL_BITS[p.el])
            out = wide if out is None else f.or_(out, wide)
        assert out is not None
        return f.bits(out, ty.el)

    def write(self, op: Operand, v: V, ty: Ty, ins: Ins) -> None:
        """Give a register (or the parts of a vector operand) a value of type `ty`."""
        if op is None:
            return
        f = self.f
        if isinstance(op, Vec):
            size = ty.bits // len(op.items)
            part = _part(ty, len(op.items))
            whole = f.bits(v, ty.iel)
            for i, o in enumerate(op.items):
                moved = f.bin("lshr", whole, i * size) if i else whole
                self.write(o, f.resize(moved, f"i{size}", False), part, ins)
            return
        if not isinstance(op, Reg):
            raise NotImplementedError
        reg_ty = self.kernel.regs[op.number]
        have = EL_BITS[v.el]
        if (reg_ty.kind == "p") != (v.el == "i1"):
            raise NotImplementedError
        if have != reg_ty.bits:
            v = f.resize(f.bits(v, f"i{have}"), reg_ty.iel, ty.signed)
        if ins.pred is not None:
            old = self.get(op.number)
            if old.el != v.el:
                old = f.bits(old, v.el)
            v = f.select(self.predicate(ins.pred), v, old)
        self.values[op.number] = v
        self.dirty.add(op.number)

    def address_of(self, sym: Sym) -> V:
        """The value of a variable's name in mov: an offset in its space, or an address in global memory."""
        f = self.f
        place = self.symbols.get(sym.name)
        if place is None:
            param = self.params.get(sym.name)
            if param is not None:
                return f.const("i64", param.offset + sym.offset)
            raise PtxError(f"unknown name {sym.name} in kernel {self.kernel.name}")
        space, at = place
        if space in ("shared", "local"):
            return f.const("i64", at + sym.offset)
        return f.add(f.load("i64", self.symbol_base, 8 * at), sym.offset)

    # -- ends of blocks ------------------------------------------------------------------------------------------
    def flush(self) -> None:
        """Store what later blocks read."""
        f = self.f
        for r in sorted(self.dirty):
            if not self.block.live_out >> r & 1 or r in self.flow.constants:
                continue
            ty, at, v = self.kernel.regs[r], self.layout.slots[r], self.values[r]
            if self.flow.is_uniform(r):
                assert v.n == 1, (self.kernel.name, r, v)
                f.store(f.cast("zext", v, "i8") if ty.kind == "p" else v, self.frame, at)
            elif ty.kind == "p":
                bits = self.bits_of(v)
                if self.block.diverged:
                    old = f.load("i32", self.frame, at)
                    bits = f.or_(f.and_(old, f.not_(self.mask)), f.and_(bits, self.mask))
                f.store(bits, self.frame, at)
            elif self.block.diverged:
                keep(f, v, self.frame, at, self.mask)
            else:
                f.store(f.splat(v, LANES), self.frame, at, min(64, ty.bits // 8 * LANES))
        self.dirty.clear()

    def terminator(self, block: Block) -> None:
        end = block.end
        if block.kind == "exit":
            self.f.br("leave")
        elif end is None:
            self.flush()
            if block.pauses:
                self.pause(block.succ[0])
            self.jump(block.succ[0])
        elif block.kind == "bra":
            self.flush()
            self.jump(block.target)
        elif block.kind == "bar":
            self.instruction(end)
        elif block.kind == "converge":
            with _known(end):
                converge(self, end)
        elif block.kind == "brx":
            index = self.read(end.operands[0], U32)
            self.flush()
            self.table(block, index)
        else:
            assert end.pred is not None
            p = self.predicate(end.pred)
            self.flush()
            self.branch(p, block.target if block.kind == "cond" else None, block.index + 1)


@contextmanager
def _known(ins: Ins) -> Iterator[None]:
    """What the tables have no place for is an instruction that is not supported."""
    try:
        yield
    except (LookupError, ValueError, StopIteration, NotImplementedError) as e:
        raise PtxError(unsupported(ins)) from e


def _length(block: Block) -> int:
    """The instructions of a block, without pseudo ones."""
    pseudo = sum(i.base.startswith("%") for i in block.body)
    return len(block.body) - pseudo + (block.end is not None)


def _part(ty: Ty, count: int) -> Ty:
    bits = ty.bits // count
    return Ty(f"b{bits}", bits, "b", f"i{bits}")
