"""Control flow, liveness and divergence of a kernel.

Blocks keep their order in the text; a block's index is the pc that the dispatcher compares. Register sets are Python
integers used as bit sets.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tegrad.ptx.errors import PtxError
from tegrad.ptx.syntax import Addr, Args, Function, Imm, Ins, Label, Not, Operand, Pair, Reg, Special, Sym, Vec

NO_RESULT = frozenset({
    "st", "bra", "bar", "barrier", "ret", "exit", "trap", "brkpt", "red", "membar", "fence", "nanosleep", "cp",
    "prefetch", "prefetchu", "discard", "applypriority", "pmevent", "brx", "call", "stmatrix", "griddepcontrol",
    "setmaxnreg",
})  # fmt: skip
LANE_SPECIALS = frozenset(
    {"%tid", "%laneid", "%lanemask_eq", "%lanemask_lt", "%lanemask_le", "%lanemask_gt", "%lanemask_ge"}
)
PER_LANE = frozenset({
    "atom", "shfl", "match", "vote", "activemask", "redux", "mma", "ldmatrix", "elect", "wgmma", "%bar_result",
})  # fmt: skip
ENDS = {"bra": ("bra", "cond"), "ret": ("exit", "condexit"), "exit": ("exit", "condexit"), "brx": ("brx", "brx")}
"""How an instruction ends its block: without a predicate, and with one."""
SPINNING = frozenset({"atom", "nanosleep"})


def registers(op: Operand, out: list[int]) -> None:
    """Append the registers that an operand names."""
    if isinstance(op, Reg):
        out.append(op.number)
    elif isinstance(op, Addr):
        registers(op.base, out)
    elif isinstance(op, Vec | Args):
        for item in op.items:
            registers(item, out)
    elif isinstance(op, Pair):
        registers(op.first, out)
        registers(op.second, out)
    elif isinstance(op, Not):
        out.append(op.reg.number)


MEMBER_MASK = {"shfl": 4, "vote": 2, "match": 2, "redux": 2, "elect": 1, "bar": 0, "barrier": 0}
"""The operand that names the lanes which must execute a `.sync` instruction together."""
MET = "%"
"""Before a base name: the pseudo instruction by which lanes that waited for others take their result."""
BAR_RESULT = "%bar_result"
"""A pseudo instruction: reads the result of the bar.red before it."""


def _has_result(ins: Ins) -> bool:
    """Whether the first operand is written."""
    if ins.base == "mbarrier":
        return not ({"init", "inval"} & {*ins.mods} or ins.mods[0] in ("expect_tx", "complete_tx"))
    return ins.base not in NO_RESULT


def arrives(ins: Ins) -> bool:
    """Whether it is an arrival at an mbarrier."""
    return ins.base == "mbarrier" and ins.mods[0] in ("arrive", "arrive_drop")


def is_warp_sync(ins: Ins) -> bool:
    """Whether the lanes of a member mask have to converge at this instruction."""
    if ins.base in ("bar", "barrier"):
        return "warp" in ins.mods
    return ins.base in MEMBER_MASK and "sync" in ins.mods


def member_mask(ins: Ins) -> Operand:
    """The operand that is the member mask of a `.sync` instruction."""
    at = MEMBER_MASK[ins.base]
    if at >= len(ins.operands):
        raise PtxError(f"line {ins.line}: {ins.op} has no member mask; the text is damaged")
    return ins.operands[at]


def is_cta_barrier(ins: Ins) -> bool:
    return ins.base in ("bar", "barrier") and "warp" not in ins.mods


def _reduces(ins: Ins) -> bool:
    return is_cta_barrier(ins) and "red" in ins.mods


def defs_uses(ins: Ins) -> tuple[list[int], list[int]]:
    """Registers written and read. A predicated result is read too: lanes without the predicate keep it.

    So are the sums of wgmma.
    """
    defs: list[int] = []
    uses: list[int] = []
    rest = ins.operands
    if rest and (_has_result(ins) or _reduces(ins)):
        if not _reduces(ins):
            registers(rest[0], defs)
        rest = rest[1:]
    for op in rest:
        registers(op, uses)
    if ins.base == "wgmma":
        uses.extend(defs)
    if ins.pred is not None:
        uses.append(ins.pred[0])
        uses.extend(defs)
    return defs, uses


def can_wait(ins: Ins) -> bool:
    """Whether a loop around this instruction may wait for another thread."""
    if ins.base == "mbarrier":
        return ins.mods[0] in ("test_wait", "try_wait")
    return ins.base in SPINNING or (ins.base == "ld" and any(m in ("volatile", "acquire", "relaxed") for m in ins.mods))


@dataclass
class Block:
    """A basic block; `kind` is how it ends: "fall", "bra", "cond", "brx", "exit", "condexit",
    "bar", or "converge" (a `.sync` instruction; the next block is where lanes that had to wait take their result)."""

    index: int
    first_pc: int
    body: list[Ins] = field(default_factory=list)
    kind: str = "fall"
    end: Ins | None = None
    target: int = -1
    targets: list[int] = field(default_factory=list)
    succ: list[int] = field(default_factory=list)
    use: int = 0
    define: int = 0
    live_in: int = 0
    live_out: int = 0
    diverged: bool = False
    spin: bool = False
    pauses: bool = False
    """It ends after an arrival, where a launch with a seed may let other warps go on."""


@dataclass
class Flow:
    """What the code generator needs to know about a kernel."""

    fn: Function
    blocks: list[Block]
    uniform: int = 0
    constants: dict[int, Ins] = field(default_factory=dict)
    cross: int = 0
    spins: bool = False
    converges: bool = False
    joins: dict[int, list[int]] = field(default_factory=dict)
    """Blocks where branches join, and the blocks within those branches at which lanes may wait for others."""

    def is_uniform(self, reg: int) -> bool:
        return bool(self.uniform >> reg & 1)


def _split(fn: Function, converges: frozenset[int]) -> list[Block]:
    """Basic blocks; at the instructions with the body indices `converges` the lanes converge."""
    blocks = [Block(0, 0)]
    labels: dict[str, int] = {}
    pc = 0

    def fresh() -> None:
        if blocks[-1].body or blocks[-1].end is not None:
            blocks.append(Block(len(blocks), pc))

    for index, item in enumerate(fn.body):
        if isinstance(item, Label):
            fresh()
            labels[item.name] = blocks[-1].index
            continue
        if blocks[-1].end is not None:
            fresh()
        block = blocks[-1]
        pc += 1
        if index in converges:
            block.kind, block.end = "converge", item
            taken = [] if item.base in NO_RESULT else [item._replace(base=MET + item.base)]
            blocks += [Block(len(blocks), pc - 1, taken), Block(len(blocks) + 1, pc)]
            continue
        if item.base in ENDS:
            block.kind, block.end = ENDS[item.base][item.pred is not None], item
        elif is_cta_barrier(item):
            block.kind, block.end = "bar", item
            if _reduces(item):
                result = item._replace(base=BAR_RESULT, operands=item.operands[:1])
                blocks.append(Block(len(blocks), pc - 1, [result]))
        else:
            block.body.append(item)
            if arrives(item):
                block.pauses = True
                fresh()
    if blocks[-1].end is None:
        blocks[-1].kind = "exit"
    elif blocks[-1].kind not in ("exit", "bra", "brx"):
        blocks.append(Block(len(blocks), pc, kind="exit"))
    for block in blocks:
        nxt, end = block.index + 1, block.end
        if end is not None and end.base == "bra":
            target = end.operands[0]
            if not isinstance(target, Sym) or target.name not in labels:
                raise PtxError(f"line {end.line}: branch to an unknown label; the text is damaged")
            block.target = labels[target.name]
            block.succ = [block.target] if block.kind == "bra" else sorted({block.target, nxt})
        elif end is not None and end.base == "brx":
            table = end.operands[1]
            names = fn.tables.get(table.name, []) if isinstance(table, Sym) else []
            if not names or any(n not in labels for n in names) or end.pred is not None:
                raise PtxError(f"line {end.line}: {end.op} without its table of targets is not supported")
            block.targets = [labels[n] for n in names]
            block.succ = sorted(set(block.targets))
        elif block.kind == "converge":
            block.succ = [nxt, nxt + 1]
        elif block.kind in ("fall", "bar", "condexit"):
            block.succ = [nxt]
    return blocks


def _liveness(blocks: list[Block]) -> None:
    for block in blocks:
        use = define = 0
        for ins in [*block.body, *([block.end] if block.end else [])]:
            defs, uses = defs_uses(ins)
            for r in uses:
                use |= 1 << r & ~define
            for r in defs:
                define |= 1 << r
        block.use, block.define = use, define
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            out = 0
            for s in block.succ:
                out |= blocks[s].live_in
            live = block.use | (out & ~block.define)
            if live != block.live_in or out != block.live_out:
                block.live_in, block.live_out = live, out
                changed = True


def _constants(fn: Function) -> dict[int, Ins]:
    """Registers written once, by an instruction that reads no register: they are formed where they are used."""
    seen: dict[int, Ins | None] = {}
    for item in fn.body:
        if isinstance(item, Label):
            continue
        defs, uses = defs_uses(item)
        simple = False
        if item.pred is None and not uses and len(item.operands) == 2 and isinstance(item.operands[0], Reg):
            source = item.operands[1]
            if item.base == "mov":
                simple = isinstance(source, Imm) or (
                    isinstance(source, Special) and "clock" not in source.name and "timer" not in source.name
                )
            elif item.base == "ld":
                simple = "param" in item.mods and isinstance(source, Addr) and isinstance(source.base, Sym)
                simple = simple and source.base.name in {p.name for p in fn.params}  # type: ignore[union-attr]
        for r in defs:
            seen[r] = item if simple and r not in seen else None
    return {r: ins for r, ins in seen.items() if ins is not None}


def _post_dominators(blocks: list[Block]) -> list[int]:
    """The immediate post-dominator of each block; len(blocks) is the exit."""
    n = len(blocks)
    everything = (1 << (n + 1)) - 1
    dom = [everything] * n + [1 << n]
    changed = True
    while changed:
        changed = False
        for block in reversed(blocks):
            meet = everything
            for s in block.succ or [n]:
                meet &= dom[s]
            if block.kind == "condexit":
                meet &= dom[n]
            new = meet | 1 << block.index
            if new != dom[block.index]:
                dom[block.index] = new
                changed = True
    out = []
    for block in blocks:
        others = dom[block.index] & ~(1 << block.index)
        best = n
        # The nearest one is post-dominated by all the others.
        bits = others
        while bits:
            low = (bits & -bits).bit_length() - 1
            bits &= bits - 1
            if dom[low] & others == others:
                best = low
                break
        out.append(best)
    return out


def _reach(ways: Sequence[Sequence[int]], start: int, stop: int) -> int:
    """Blocks reachable from start, by those that may follow each, without passing stop, as a bit set."""
    if start == stop:
        return 0
    seen, todo = 1 << start, [start]
    while todo:
        for s in ways[todo.pop()]:
            if s != stop and not seen >> s & 1:
                seen |= 1 << s
                todo.append(s)
    return seen


def _special_lane(op: Operand) -> bool:
    return isinstance(op, Special) and op.name.split(".")[0] in LANE_SPECIALS


class _Divergence:
    """Which registers hold one value for the whole warp, and which blocks run with part of it."""

    def __init__(self, fn: Function, blocks: list[Block]) -> None:
        self.fn, self.blocks = fn, blocks
        self.succ = [block.succ for block in blocks]
        self.divergent = 0
        self.ipdom = _post_dominators(blocks)
        self.branches: set[int] = set()
        self.apart = 0
        self.joins: list[tuple[Block, int, set[int]]] = []
        self.facts: list[tuple[Ins, int, int]] = []
        for b in blocks:
            for ins in [*b.body, *([b.end] if b.end else [])]:
                defs, uses = defs_uses(ins)
                self.facts.append((ins, _bits(defs), _bits(uses)))

    def run(self) -> int:
        n = len(self.fn.regs)
        changed = True
        while changed:
            changed = self.data() | self.control()
        return ((1 << n) - 1) & ~self.divergent

    def data(self) -> bool:
        before = self.divergent
        again = True
        while again:
            start = self.divergent
            for ins, defs, uses in self.facts:
                if defs & ~self.divergent and (uses & self.divergent or self.source(ins)):
                    self.divergent |= defs
            again = self.divergent != start
        return self.divergent != before

    def source(self, ins: Ins) -> bool:
        if arrives(ins):
            return True
        if ins.base in PER_LANE or (ins.base == "ld" and "local" in ins.mods):
            return True
        if ins.base == "ld" and not (
            "param" in ins.mods or "global" in ins.mods or "shared" in ins.mods or "const" in ins.mods
        ):
            return True
        if ins.base in ("cvta", "ld", "mov") and any(
            isinstance(o, Sym | Addr) and self.local_name(o) for o in ins.operands
        ):
            return ins.base == "ld"
        return any(_special_lane(op) for op in ins.operands)

    def local_name(self, op: Operand) -> bool:
        name = (
            op.base.name
            if isinstance(op, Addr) and isinstance(op.base, Sym)
            else op.name
            if isinstance(op, Sym)
            else ""
        )
        return any(v.name == name and v.space in ("local", "param") for v in self.fn.variables)

    def control(self) -> bool:
        changed = False
        for block in self.blocks:
            if block.kind not in ("cond", "condexit", "brx") or block.index in self.branches:
                continue
            assert block.end is not None
            _, uses = defs_uses(block.end)
            if any(self.divergent >> r & 1 for r in uses):
                self.branches.add(block.index)
                changed = True
                if block.kind != "condexit":
                    self.split(block)
        return changed

    def split(self, block: Block) -> None:
        """A divergent branch: mark its region, and the registers whose value depends on the way taken."""
        if self.apart >> block.index & 1:
            return  # all that it reaches is marked
        join = self.ipdom[block.index]
        ways = [_reach(self.succ, s, join) for s in block.succ]
        region = 0
        for way in ways:
            region |= way
        members = [b for b in self.blocks if region >> b.index & 1]
        for b in members:
            b.diverged = True
        poisoned = any(b.index > join or b.kind == "bar" or b.spin for b in members)
        defined = 0
        for b in members:
            defined |= b.define
        if poisoned:
            # Lanes may pass the join one group after the other.
            after = _reach(self.succ, block.index, -1)
            self.apart |= after
            for b in self.blocks:
                if after >> b.index & 1:
                    b.diverged = True
                    defined |= b.define
            self.divergent |= defined
            return
        if join < len(self.blocks):
            self.joins.append((block, join, {b.index + 1 for b in members if b.kind == "converge"}))
        # Where ways meet, a lane's value is that of its own way; so is it where lanes wait while others run.
        shared = 1 << join if join < len(self.blocks) else 0
        for i, way in enumerate(ways):
            rest = own = touched = 0
            for k, other in enumerate(ways):
                rest |= other if k != i else 0
            shared |= way & rest
            for b in members:
                if way >> b.index & 1:
                    own |= b.define
                elif rest >> b.index & 1:
                    touched |= b.define | b.live_in
            self.divergent |= own & touched
        for b in self.blocks:
            if shared >> b.index & 1:
                self.divergent |= defined & b.live_in


def _bits(regs: list[int]) -> int:
    out = 0
    for r in regs:
        out |= 1 << r
    return out


def _mark_spins(blocks: list[Block]) -> bool:
    """Mark the blocks of loops that may wait for another thread."""
    found = False
    waiting = [block for block in blocks if any(can_wait(ins) for ins in block.body)]
    succ = [block.succ for block in blocks]
    pred: list[list[int]] = [[] for _ in blocks]
    for block in blocks:
        for s in block.succ:
            pred[s].append(block.index)
    for block in waiting:
        if not block.spin:  # else it is in the loop of one before it
            both = _reach(succ, block.index, -1) & _reach(pred, block.index, -1)
            loop = [b for b in blocks if both >> b.index & 1]
            looping = any(block.index in b.succ for b in loop)
            for b in loop if looping else []:
                b.spin = found = True
    return found


def _flow(fn: Function, converges: frozenset[int]) -> Flow:
    blocks = _split(fn, converges)
    _liveness(blocks)
    flow = Flow(fn, blocks, converges=bool(converges))
    flow.spins = _mark_spins(blocks)
    flow.constants = _constants(fn)
    divergence = _Divergence(fn, blocks)
    flow.uniform = divergence.run()
    for block, join, waits in divergence.joins:
        if waits and not divergence.apart >> block.index & 1:
            flow.joins[join] = sorted(waits | set(flow.joins.get(join, ())))
    return flow


def _names_all(flow: Flow, ins: Ins) -> bool:
    """Whether the member mask is known to be the whole warp."""
    op = member_mask(ins)
    if isinstance(op, Reg) and op.number in flow.constants:
        op = flow.constants[op.number].operands[1]
    return isinstance(op, Imm) and int(op.value) & 0xFFFFFFFF == 0xFFFFFFFF


def analyse(fn: Function) -> Flow:
    """Split a kernel into blocks and compute what the code generator needs."""
    flow = _flow(fn, frozenset())
    syncs = [(b, ins) for b in flow.blocks for ins in b.body if is_warp_sync(ins)]
    apart = {id(ins) for b, ins in syncs if b.diverged or flow.spins or not _names_all(flow, ins)}
    if apart:
        flow = _flow(fn, frozenset(i for i, item in enumerate(fn.body) if id(item) in apart))
    for block in flow.blocks:
        flow.cross |= block.live_in
    return flow
