"""wgmma: the asynchronous product of a warpgroup (PTX ISA 9.7.15), as each of its warps computes it.

A product of 64 x N sums is four of 16 x N: a warp has its 16 rows of A, in its registers or in shared memory, and all
of B. What `.sync` holds together is the warp, and what other warps stored is ordered by barriers of their own; so warps
do not wait for each other here.

A product is queued when it is issued and runs at its wait, as late as the rules allow, so that code which stores over
its matrices too early shows it. Until the wait its sums are kept in the warp's frame and its registers hold POISON. A
full queue lets the oldest product run early. A launch with a seed draws: half of the products run at once, with all
before them, which shows matrices that are not there yet.
"""

from dataclasses import dataclass, replace
from typing import Final, Protocol

from tegrad.ptx.analysis import defs_uses
from tegrad.ptx.check import launch_of
from tegrad.ptx.helpers import family, helper
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import ALL_LANES, HASH_FACTOR, LANES, Access, Frame, Launch, Space, fault_info
from tegrad.ptx.lowering import Lowering
from tegrad.ptx.matrix import ROW, accumulators, elements, multiply_add, packed
from tegrad.ptx.rules import PRED, Handler, mod
from tegrad.ptx.syntax import Function, Imm, Ins, Label, Operand, Reg, Vec, items
from tegrad.ptx.types import TYPES, Ty

TARGET: Final = "sm_90a"
POISON: Final = 0x7FFF7FFF
"""What registers of sums hold until the wait: NaN as a float or as two halves."""
BEGIN: Final = "%warpgroup"
"""A pseudo instruction: at the start of a kernel no product is under way; with registers, these are undefined; with
`spoil`, the products under way are, which have these as fragments."""
REGISTER_BYTES: Final = 4 * LANES
"""Bytes of a register of all lanes."""
MOST_QUEUED: Final = 32
HEAD, COUNT, GROUP, RANDOM, SPOILT, STATES = 0, 4, 8, 12, 16, 64
"""Counters of the queue, the state of its draws, whether fragments of products under way were written; then the ring.

Each list of sums has two words of its own: how many products are under way, and whether one has run since the wait. So
has each list of fragments, of which only the first counts."""
CODE, SUMS, STATE, A, B, FLAGS, OCTETS, OF_GROUP, PC, READS, REGISTERS = 0, 8, 16, 24, 32, 40, 44, 48, 52, 56, 64
ENTRY_BYTES: Final = REGISTERS + 4 * REGISTER_BYTES
ADD, NEGATE = 1, 2
"""Flags of a product: the sums are added to, the product's sign is changed."""
MASKS: Final = {0: 0, 1: 7, 2: 3, 3: 1}
"""Which address bits from 7 on change those from 4 on, by the descriptor's swizzle: none, 128, 64 and 32 bytes."""
HALVES, FP8, INTEGERS = ("f16", "bf16"), ("e4m3", "e5m2"), ("s8", "u8")


@dataclass(frozen=True)
class Form:
    """What decides how a product is computed. `a_at` is "r" for registers; else "s", or "t" for M-major."""

    a: Ty
    b: Ty
    acc: Ty
    saturate: bool
    a_at: str
    b_at: str

    @property
    def name(self) -> str:
        how = "sat" if self.saturate else "wrap"
        return f"tgx_wgmma_m64_{self.a.name}_{self.b.name}_{self.acc.name}_{how}_{self.a_at}{self.b_at}"

    @property
    def k(self) -> int:
        return 256 // self.a.bits

    @property
    def per(self) -> int:
        """Elements of A in a register."""
        return 32 // self.a.bits

    @property
    def el(self) -> str:
        """What elements are multiplied as."""
        return "i32" if self.a.name in INTEGERS else "float"

    @property
    def dot(self) -> str:
        return f"tgx_wgmma_dot_{self.k}_{self.acc.name}_{'sat' if self.saturate else 'wrap'}"

    @property
    def block_registers(self) -> int:
        """Registers of sums for eight columns."""
        return 2 if self.acc.name == "f16" else 4


def parse_name(name: str) -> Form:
    """The form of a helper's name."""
    a, b, acc, how, at = name.split("_")[3:]
    return Form(TYPES[a], TYPES[b], TYPES[acc], how == "sat", at[0], at[1])


def octet_name(t: Ty, at: str) -> str:
    return f"tgx_wgmma_octet_{t.name}_{at}"


# ---- shared memory


def _strides(f: Fn, descriptor: V, transposed: bool) -> tuple[V, V, V]:
    """Bytes (i32) from row to row within eight, from 16 bytes to the next 16 of a row, and the swizzle's mask.

    Rows are those of the layout: along K-major matrices rows of A or columns of B, of the others steps of k.
    """
    mode = f.resize(f.bin("lshr", descriptor, 62), "i32", False)
    mask = f.const("i32", 0)
    for value, bits in MASKS.items():
        mask = f.select(f.icmp("eq", mode, value), f.const("i32", bits), mask)
    row = f.mul(f.add(mask, 1), 16)
    plain = f.is_zero(mode)
    step = f.const("i32", 16) if transposed else f.select(plain, _field(f, descriptor, 16), f.const("i32", 16))
    return row, step, mask


def _field(f: Fn, descriptor: V, at: int) -> V:
    """An address or distance of a descriptor: 14 bits, in units of 16."""
    raw = f.resize(f.bin("lshr", descriptor, at) if at else descriptor, "i32", False)
    return f.bin("shl", f.and_(raw, 0x3FFF), 4)


def _places(f: Fn, descriptor: V, octet: V, transposed: bool) -> V:
    """Addresses (i32) of the 16 pieces of 16 bytes that hold eight rows of A, or columns of B, and all k.

    K-major: piece 2r + c is row r, the c-th half of k. Else piece k holds eight elements of step k.
    """
    start, lead, stride = (_field(f, descriptor, at) for at in (0, 16, 32))
    row, step, mask = _strides(f, descriptor, transposed)
    index = f.iota("i32", 16)
    one = f.const("i32", 1)
    if not transposed:
        first = f.add(start, f.mul(octet, stride))
        inner = f.add(f.mul(f.bin("lshr", index, 1), row), f.mul(f.and_(index, 1), step))
    else:
        # Rows of a swizzled pattern are as wide as the swizzle; without one, the two distances change places.
        wide = f.add(mask, one)
        plain = f.is_zero(mask)
        across, down = f.select(plain, stride, lead), f.select(plain, lead, stride)
        first = f.add(start, f.mul(f.and_(octet, mask), 16))
        first = f.add(first, f.mul(f.bin("udiv", octet, wide), across))
        inner = f.add(f.mul(f.and_(index, 7), row), f.mul(f.bin("lshr", index, 3), down))
    at = f.add(first, inner)
    turned = f.and_(f.bin("lshr", at, 7), mask)
    return f.xor(at, f.bin("shl", turned, 4))


@family("tgx_wgmma_octet_")
def emit_octet(module: Module, name: str) -> None:
    """tgx_wgmma_octet_*(frame, descriptor, octet, out, pc): eight rows of A, or columns of B, from shared memory.

    `out` gets for each k a vector of eight, as numbers to multiply. A piece outside of shared memory, a base offset and
    a pattern that does not begin where it repeats are faults; then `out` is not written, and the result is false.
    """
    _, _, _, kind, at = name.split("_")
    t = TYPES[kind]
    f = Fn(module, name, "i1", "ptr frame, i64 descriptor, i32 octet, ptr out, i32 pc", "nounwind")
    frame, descriptor, octet, out, pc = f.args
    places = _places(f, descriptor, octet, at == "t")
    size = f.load("i32", launch_of(f, frame), Launch.SHARED_SIZE)
    high = f.call("llvm.vector.reduce.umax.v16i32", "i32", 1, places, pure=True)
    inside = f.and_(f.icmp("ult", high, size), f.icmp("ule", f.add(high, 16), size))
    _, _, mask = _strides(f, descriptor, False)
    phase = f.and_(f.bin("lshr", _field(f, descriptor, 0), 7), mask)
    offset = f.and_(f.bin("lshr", descriptor, 49), 7)
    known = f.and_(f.is_zero(phase), f.is_zero(offset))
    for good, info in ((known, fault_info(0, Access.ILLEGAL, 0)), (inside, fault_info(Space.SHARED, Access.READ, 1))):
        with f.if_(f.not_(good), False):
            where = f.resize(high, "i64", False)
            f.call_void("tgx_fault", frame, where, f.const("i32", 0), f.const("i32", info), pc)
            f.ret(f.const("i1", 0))
            f.label(f.name_of("never"))
    shared = f.pointer(f.load("i64", frame, Frame.SHARED))
    count = 128 // t.bits
    pieces = [
        _numbers(f, f.load(t.iel, shared, f.resize(f.extract(places, i), "i64", False), count, 16), t)
        for i in range(16)
    ]
    if at == "t":
        vectors = pieces
    else:
        vectors = [v for half in range(2) for v in _turned(f, [pieces[2 * r + half] for r in range(8)])]
    for k, v in enumerate(vectors):
        f.store(v, out, 32 * k, 32)
    f.ret(f.const("i1", 1))
    f.finish()


def _numbers(f: Fn, v: V, t: Ty) -> V:
    """Elements as they are multiplied."""
    words = f.resize(v, "i32", False)
    return elements(f, words, t)[0]


def _turned(f: Fn, rows: list[V]) -> list[V]:
    """Vectors of the first elements, of the second ones, ... of eight vectors."""
    count = rows[0].n
    while len(rows) > 1:
        pairs = zip(rows[::2], rows[1::2], strict=True)
        rows = [f.shuffle(a, b, list(range(2 * a.n))) for a, b in pairs]
    return [f.shuffle(rows[0], None, [r * count + i for r in range(8)]) for i in range(count)]


# ---- products


@family("tgx_wgmma_dot_")
def emit_dot(module: Module, name: str) -> None:
    """tgx_wgmma_dot_K_ACC_HOW(rows, columns, sums, keep): 16 x 8 sums of the fragments' layout, added to if `keep`.

    `rows` has two vectors of all lanes for each k, `columns` one of eight. Products are added in order of k.
    """
    _, _, _, depth, kind, how = name.split("_")
    acc, el = TYPES[kind], "i32" if kind == "s32" else "float"
    f = Fn(module, name, "void", "ptr rows, ptr columns, ptr sums, i1 keep", "nounwind")
    rows, columns, sums, keep = f.args
    registers = 2 if kind == "f16" else 4
    old = [f.load("i32", sums, REGISTER_BYTES * i, LANES, 64) for i in range(registers)]
    start = [f.select(keep, v, 0) for v in accumulators(f, old, acc)]
    total = [f.like(v, 0) for v in start] if how == "sat" else start
    pick = [[2 * (lane % 4) + c for lane in range(LANES)] for c in range(2)]
    for k in range(int(depth)):
        eight = f.load(el, columns, 32 * k, 8, 32)
        for c in range(2):
            column = f.shuffle(eight, None, pick[c])
            for h in range(2):
                row = f.load(el, rows, REGISTER_BYTES * (2 * k + h), LANES, 64)
                at = 2 * h + c
                total[at] = multiply_add(f, row, column, total[at])
    if how == "sat":
        total = [f.intr("sadd.sat", v, c) for v, c in zip(total, start, strict=True)]
    for i, v in enumerate(packed(f, total, acc)):
        f.store(v, sums, REGISTER_BYTES * i, 64)
    f.ret()
    f.finish()


@family("tgx_wgmma_m64_")
def emit_product(module: Module, name: str) -> None:
    """tgx_wgmma_m64_*(frame, product): run a queued product of this warp's rows."""
    form = parse_name(name)
    f = Fn(module, name, "void", "ptr frame, ptr product", "nounwind")
    frame, entry = f.args
    rows = f.alloca(f"[{2 * form.k * REGISTER_BYTES} x i8]", 64)
    columns = f.alloca(f"[{32 * form.k} x i8]", 64)
    pc, flags = f.load("i32", entry, PC), f.load("i32", entry, FLAGS)
    if form.a_at == "r":
        _rows_of_registers(f, form, entry, rows)
    else:
        _rows_of_memory(f, form, frame, f.load("i64", entry, A), rows, columns, pc)
    if form.el == "float":
        sign = f.bin("shl", f.and_(flags, NEGATE), 30)
        for i in range(2 * form.k):
            f.store(f.xor(f.load("i32", rows, REGISTER_BYTES * i, LANES, 64), sign), rows, REGISTER_BYTES * i, 64)
    keep = f.not_zero(f.and_(flags, ADD))
    sums, b = f.load("ptr", entry, SUMS), f.load("i64", entry, B)
    with f.for_(f.load("i32", entry, OCTETS)) as octet:
        good = f.call(octet_name(form.b, form.b_at), "i1", 1, frame, b, octet, columns, pc)
        _or_leave(f, good)
        at = f.mul(f.resize(octet, "i64", False), form.block_registers * REGISTER_BYTES)
        f.call_void(form.dot, rows, columns, f.gep(sums, at), keep)
    f.ret()
    f.finish()


def _or_leave(f: Fn, good: V) -> None:
    with f.if_(f.not_(good), False):
        f.ret()
        f.label(f.name_of("never"))


def _rows_of_registers(f: Fn, form: Form, entry: V, rows: V) -> None:
    """Register r has rows g and g + 8 by turns; a thread's `per` elements of it follow those of the thread before."""
    held = [elements(f, f.load("i32", entry, REGISTERS + REGISTER_BYTES * r, LANES, 64), form.a) for r in range(4)]
    for k in range(form.k):
        half, thread, i = k // (4 * form.per), k % (4 * form.per) // form.per, k % form.per
        for h in range(2):
            f.store(f.shuffle(held[2 * half + h][i], None, ROW[thread]), rows, REGISTER_BYTES * (2 * k + h), 64)


def _rows_of_memory(f: Fn, form: Form, frame: V, a: V, rows: V, eight: V, pc: V) -> None:
    warp = f.and_(f.load("i32", frame, Frame.WARP), 3)
    spread = [lane // 4 for lane in range(LANES)]
    for h in range(2):
        octet = f.add(f.mul(warp, 2), h)
        _or_leave(f, f.call(octet_name(form.a, form.a_at), "i1", 1, frame, a, octet, eight, pc))
        for k in range(form.k):
            one = f.load(form.el, eight, 32 * k, 8, 32)
            f.store(f.shuffle(one, None, spread), rows, REGISTER_BYTES * (2 * k + h), 64)


# ---- the queue


def _entry(f: Fn, queue: V, index: V) -> V:
    """The entry at an index that may have run past the end of the ring; the ring follows the states."""
    wrapped = f.bin("urem", index, MOST_QUEUED)
    return f.element(f.gep(queue, STATES), wrapped, ENTRY_BYTES)


@helper("void", "ptr frame, ptr queue")
def tgx_wgmma_land(f: Fn, frame: V, queue: V) -> None:
    """Run the oldest product."""
    head = f.load("i32", queue, HEAD)
    entry = _entry(f, queue, head)
    with f.if_(f.is_zero(f.load("i32", frame, Frame.FAULTED))):
        f.do(f"call void {f.load('ptr', entry, CODE).ref}({frame}, {entry})")
    state, reads = f.load("ptr", entry, STATE), f.load("ptr", entry, READS)
    for words in (state, reads):
        f.store(f.sub(f.load("i32", words), 1), words)
    f.store(f.const("i32", 1), state, 4)
    f.store(f.bin("urem", f.add(head, 1), MOST_QUEUED), queue, HEAD)
    f.store(f.sub(f.load("i32", queue, COUNT), 1), queue, COUNT)


@helper("ptr", "ptr frame, ptr queue, ptr code, ptr sums, ptr state, ptr reads, i64 a, i64 b, i32 flags, i32 octets, "
               "i32 pc, i32 lanes")  # fmt: skip
def tgx_wgmma_push(f: Fn, *given: V) -> V:
    """Queue a product.

    Returns where A's registers go. Less than a whole warp, or than a whole warpgroup, is a fault.
    """
    frame, queue, code, sums, state, reads, a, b, flags, octets, pc, lanes = given
    last = f.or_(f.load("i32", frame, Frame.WARP), 3)
    whole = f.icmp("ult", last, f.load("i32", launch_of(f, frame), Launch.WARPS))
    together = f.and_(whole, f.icmp("eq", lanes, ALL_LANES))
    with f.if_(f.not_(together), False):
        info = f.const("i32", fault_info(0, Access.ILLEGAL, 0))
        f.call_void("tgx_fault", frame, f.const("i64", 0), f.const("i32", 0), info, pc)
    with f.if_(f.icmp("eq", f.load("i32", queue, COUNT), MOST_QUEUED)):
        f.call_void("tgx_wgmma_land", frame, queue)
    count = f.load("i32", queue, COUNT)
    entry = _entry(f, queue, f.add(f.load("i32", queue, HEAD), count))
    for value, at in (
        (code, CODE), (sums, SUMS), (state, STATE), (reads, READS), (a, A), (b, B), (flags, FLAGS), (octets, OCTETS),
        (f.load("i32", queue, GROUP), OF_GROUP), (pc, PC),
    ):  # fmt: skip
        f.store(value, entry, at)
    f.store(f.add(count, 1), queue, COUNT)
    for words in (state, reads):
        f.store(f.add(f.load("i32", words), 1), words)
    return f.gep(entry, REGISTERS)


@helper("void", "ptr frame, ptr queue, i32 keep")
def tgx_wgmma_wait(f: Fn, frame: V, queue: V, keep: V) -> None:
    """Run all but the products of the newest `keep` groups; -1 also open ones."""
    limit = f.sub(f.load("i32", queue, GROUP), keep)
    with f.loop() as (_, end):
        f.leave(f.is_zero(f.load("i32", queue, COUNT)), end)
        entry = _entry(f, queue, f.load("i32", queue, HEAD))
        f.leave(f.icmp("sge", f.load("i32", entry, OF_GROUP), limit), end)
        f.call_void("tgx_wgmma_land", frame, queue)


@helper("void", "ptr frame, ptr queue")
def tgx_wgmma_soon(f: Fn, frame: V, queue: V) -> None:
    """With a seed, run all products in half of the cases."""
    seen = x = f.load("i32", queue, RANDOM)
    for op, by in (("shl", 13), ("lshr", 17), ("shl", 5)):
        x = f.xor(x, f.bin(op, x, by))
    f.store(x, queue, RANDOM)
    hit = f.icmp("slt", f.mul(x, HASH_FACTOR), f.const("i32", 0))
    with f.if_(f.and_(hit, f.not_zero(seen))):
        f.call_void("tgx_wgmma_wait", frame, queue, f.const("i32", -1))


# ---- instructions


def prepare(fn: Function) -> Function:
    """The function with its waits naming the registers that they write; the same object without wgmma.

    Registers of A and of sums that were written with no fence after them are undefined to a product: it finds POISON.
    What writes registers of A tells the products under way.
    """
    if not any(isinstance(i, Ins) and i.base == "wgmma" for i in fn.body):
        return fn
    straight = not any(isinstance(i, Label) for i in fn.body)
    pending = {} if straight else dict.fromkeys(lists_of(fn, 0), False)
    body: list[Ins | Label] = [Ins(BEGIN, BEGIN, (), (), (), None, 0)]
    loose: set[int] = set()
    fragments = {r for one in lists_of(fn, 1) for r in one}
    for i in fn.body:
        if isinstance(i, Label):
            loose.clear()
        elif i.base != "wgmma":
            written = defs_uses(i)[0]
            loose.update(written)
            if read := tuple(Reg(r) for r in written if r in fragments):
                body.append(i)
                i = Ins(BEGIN, BEGIN, ("spoil",), (), (None, Vec(read)), None, i.line)
        elif "mma_async" in i.mods and len(i.operands) > 1:
            registers = _numbers_of(i.operands[0])
            if unready := tuple(Reg(r) for r in registers if r in loose):
                body.append(Ins(BEGIN, BEGIN, (), (), (Vec(unready),), None, i.line))
                loose.difference_update(registers)
            pending[registers] = False
            i = i._replace(operands=(i.operands[0], _without(i.operands[1], loose), *i.operands[2:]))
        elif "fence" in i.mods:
            loose.clear()
        elif "commit_group" in i.mods:
            pending = dict.fromkeys(pending, True)
        elif "wait_group" in i.mods and i.operands:
            count = i.operands[0]
            every = dict.fromkeys(r for one in pending for r in one)
            i = i._replace(operands=(Vec(tuple(Reg(r) for r in every)), count))
            if straight and isinstance(count, Imm) and count.value == 0:
                pending = {one: False for one, committed in pending.items() if not committed}
        body.append(i)
    return replace(fn, body=body)


def _without(a: Operand, loose: set[int]) -> Operand:
    """A's registers, POISON in place of some."""
    if not isinstance(a, Vec):
        return a
    return Vec(tuple(Imm(POISON) if isinstance(o, Reg) and o.number in loose else o for o in a.items))


def lists_of(fn: Function, index: int) -> list[tuple[int, ...]]:
    """The lists of registers that products name as their sums (operand 0) or fragments (operand 1), each once."""
    found: dict[tuple[int, ...], None] = {}
    for i in fn.body:
        if isinstance(i, Ins) and i.base == "wgmma" and "mma_async" in i.mods and len(i.operands) > 1:
            found[_numbers_of(i.operands[index])] = None
    return list(found)


def _numbers_of(op: Operand) -> tuple[int, ...]:
    return tuple(o.number for o in items(op) if isinstance(o, Reg))


def _shows(fn: Function) -> bool:
    """Whether a kernel may show its matrices to the asynchronous proxy: by a fence, or by copies that belong to it."""
    return any(
        isinstance(i, Ins) and ((i.base == "fence" and mod(i, "async")) or (i.base == "cp" and mod(i, "bulk")))
        for i in fn.body
    )


class Room:
    """Where a kernel's products are kept in a warp's frame: the queue, and the sums of each list after it.

    Where nothing shows matrices to products (`unseen`), all sums are POISON.
    """

    def __init__(self, fn: Function, at: int) -> None:
        self.at = at
        self.lists, self.fragments = lists_of(fn, 0), lists_of(fn, 1)
        used = any(isinstance(i, Ins) and i.base == "wgmma" for i in fn.body)
        states = -(-8 * len(self.lists + self.fragments) // 64) * 64
        self.queue = at + states
        self.end = self.queue + STATES + MOST_QUEUED * ENTRY_BYTES if used else at
        self.unseen = used and not _shows(fn)
        self.sums: list[int] = []
        for one in self.lists:
            self.sums.append(self.end)
            self.end += REGISTER_BYTES * len(one)

    def state(self, index: int) -> int:
        """Where the words of a list of sums are; those of fragments follow."""
        return self.at + 8 * index

    def reads(self, fragments: tuple[int, ...]) -> int:
        """Where the words of a list of fragments are."""
        return self.state(len(self.lists) + self.fragments.index(fragments))


class Products(Lowering, Protocol):
    """Products wait in the frame, in room whose size depends on all of a kernel's products."""

    @property
    def room(self) -> Room: ...


def begin(e: Products, ins: Ins) -> None:
    """No product is under way; or, with registers, these are POISON, or the products are that read them."""
    room, zero = e.room, e.f.const("i32", 0)
    if mod(ins, "spoil"):
        written = set(_numbers_of(ins.operands[1]))
        spoilt = e.f.load("i32", e.frame, room.queue + SPOILT)
        for one in room.fragments:
            if written.intersection(one):
                spoilt = e.f.or_(spoilt, e.f.load("i32", e.frame, room.reads(one)))
        e.f.store(spoilt, e.frame, room.queue + SPOILT)
        return
    if ins.operands:
        for o in items(ins.operands[0]):
            e.write(o, e.f.const("i32", POISON, LANES), TYPES["b32"], ins)
        return
    for at in (HEAD, COUNT, GROUP, SPOILT):
        e.f.store(zero, e.frame, room.queue + at)
    seed, warp = e.f.load("i32", e.launch, Launch.SEED), e.f.load("i32", e.frame, Frame.WARP)
    own = e.f.add(e.f.mul(e.f.load("i32", e.frame, Frame.CTA), 64), warp)
    mixed = e.f.or_(e.f.xor(e.f.mul(seed, HASH_FACTOR), e.f.mul(own, 2)), 1)
    drawn = e.f.select(e.f.is_zero(seed), zero, mixed)
    e.f.store(drawn, e.frame, room.queue + RANDOM)
    for i in range(len(room.lists + room.fragments)):
        e.f.store(zero, e.frame, room.state(i))
        e.f.store(zero, e.frame, room.state(i) + 4)


def wgmma(e: Products, ins: Ins) -> None:
    """wgmma.fence, .commit_group, .wait_group and .mma_async."""
    f = e.f
    if e.source.target != TARGET or ins.pred is not None or not mod(ins, "sync") or not mod(ins, "aligned"):
        raise NotImplementedError
    room = e.room
    queue = f.gep(e.frame, room.queue)
    if mod(ins, "fence"):
        return
    if mod(ins, "commit_group"):
        f.store(f.add(f.load("i32", queue, GROUP), 1), queue, GROUP)
    elif mod(ins, "wait_group"):
        count = ins.operands[1]
        if not isinstance(count, Imm):
            raise NotImplementedError
        named = set(_numbers_of(ins.operands[0]))
        _wait(e, ins, int(count.value), [i for i, one in enumerate(room.lists) if named.issuperset(one)])
    elif mod(ins, "mma_async"):
        _issue(e, ins)
    else:
        raise NotImplementedError


def _wait(e: Products, ins: Ins, keep: int, lists: list[int]) -> None:
    """Run what is waited for; those of the lists of which no product is left under way get their sums."""
    f, room = e.f, e.room
    queue, zero = f.gep(e.frame, room.queue), f.const("i32", 0)
    f.call_void("tgx_wgmma_wait", e.frame, queue, f.const("i32", keep))
    spoilt = f.load("i32", queue, SPOILT)
    wrong = f.const("i1", 1) if room.unseen else f.not_zero(spoilt)
    f.store(f.select(f.is_zero(f.load("i32", queue, COUNT)), zero, spoilt), queue, SPOILT)
    for i in lists:
        left, ran = (f.load("i32", e.frame, room.state(i) + at) for at in (0, 4))
        done = f.and_(f.is_zero(left), f.not_zero(ran))
        f.store(f.select(done, zero, ran), e.frame, room.state(i) + 4)
        for at, number in enumerate(room.lists[i]):
            old = f.splat(f.bits(e.get(number), "i32"), LANES)
            new = f.load("i32", e.frame, room.sums[i] + REGISTER_BYTES * at, LANES, 64)
            new = f.select(wrong, f.like(new, POISON), new)
            e.write(Reg(number), f.select(done, new, old), TYPES["b32"], ins)


def _issue(e: Products, ins: Ins) -> None:
    f, room = e.f, e.room
    form, octets, rest = _form(ins)
    registers = _numbers_of(ins.operands[0])
    if len(registers) != form.block_registers * octets or len(set(registers)) != len(registers):
        raise NotImplementedError
    index = room.lists.index(registers)
    if others := [i for i, one in enumerate(room.lists) if i != index and set(registers) & set(one)]:
        # Sums that other lists share: what is under way may end at any time, so let it end now.
        _wait(e, ins, -1, [*others, index])
    sums, state = f.gep(e.frame, room.sums[index]), f.gep(e.frame, room.state(index))
    held = [f.splat(f.bits(e.get(r), "i32"), LANES) for r in registers]
    busy = f.or_(f.load("i32", state), f.load("i32", state, 4))
    a = [f.splat(e.read(o, TYPES["b32"]), LANES) for o in items(ins.operands[1])] if form.a_at == "r" else []
    left = f.const("i64", 0) if a else _descriptor(e, ins.operands[1])
    reads = f.gep(e.frame, room.reads(_numbers_of(ins.operands[1])))
    arguments = [
        f.function(form.name, "void", "ptr", "ptr"), sums, state, reads, left, _descriptor(e, ins.operands[2]),
        _flags(e, ins, rest), f.const("i32", octets), f.const("i32", e.pc), e.mask,
    ]  # fmt: skip
    with f.if_(f.is_zero(busy)):
        for i, v in enumerate(held):
            f.store(v, sums, REGISTER_BYTES * i, 64)
    to = f.call("tgx_wgmma_push", "ptr", 1, e.frame, f.gep(e.frame, room.queue), *arguments)
    for i, v in enumerate(a):
        f.store(v, to, REGISTER_BYTES * i, 64)
    f.call_void("tgx_wgmma_soon", e.frame, f.gep(e.frame, room.queue))
    for r in registers:
        e.write(Reg(r), f.const("i32", POISON, LANES), TYPES["b32"], ins)


def _form(ins: Ins) -> tuple[Form, int, tuple[Operand, ...]]:
    """The form, the number of eights of columns, and the operands from scale-d on; NotImplementedError for others."""
    if len(ins.types) != 3 or mod(ins, "sp") or len(ins.operands) < 4:
        raise NotImplementedError
    acc, a, b = ins.types
    shape = next(m for m in ins.mods if m.startswith("m64n"))
    n, k = (int(x) for x in shape.removeprefix("m64n").split("k"))
    rest = ins.operands[3:]
    in_registers = isinstance(ins.operands[1], Vec)
    if in_registers and len(items(ins.operands[1])) != 4:
        raise NotImplementedError
    sums = {
        **dict.fromkeys([("f16", "f16"), *((x, y) for x in FP8 for y in FP8)], ("f16", "f32")),
        ("bf16", "bf16"): ("f32",), ("tf32", "tf32"): ("f32",),
        **dict.fromkeys([(x, y) for x in INTEGERS for y in INTEGERS], ("s32",)),
    }.get((a.name, b.name), ())  # fmt: skip
    bits = 32 if a.name == "tf32" else a.bits
    integer = a.name in INTEGERS
    columns = range(8, 257, 8) if not integer else (8, 24, *range(16, 257, 16))
    if acc.name not in sums or k != 256 // bits or n not in columns or (mod(ins, "satfinite") and not integer):
        raise NotImplementedError
    turns = (0 if in_registers else 1) + 1 if a.name in HALVES else 0
    if len(rest) != 1 + (0 if integer else 2) + turns:
        raise NotImplementedError
    turned = [_immediate(o, (0, 1)) for o in rest[3:]]
    b_at = "t" if turned and turned[-1] else "s"
    a_at = "r" if in_registers else "t" if turned and turned[0] else "s"
    return Form(a, b, acc, mod(ins, "satfinite"), a_at, b_at), n // 8, rest


def _immediate(op: Operand, allowed: tuple[int, int]) -> int:
    if not isinstance(op, Imm) or op.value not in allowed:
        raise NotImplementedError
    return int(op.value)


def _flags(e: Products, ins: Ins, rest: tuple[Operand, ...]) -> V:
    """The flags of a product: scale-d is a predicate, imm-scale-a and imm-scale-b are 1 or -1."""
    f = e.f
    keep = _first(e, e.read(rest[0], PRED))
    sign = 1
    for o in rest[1:3]:
        sign *= _immediate(o, (-1, 1))
    flags = f.select(keep, f.const("i32", ADD), f.const("i32", 0))
    return f.or_(flags, NEGATE if sign < 0 else 0)


def _descriptor(e: Products, op: Operand) -> V:
    if not isinstance(op, Reg):
        raise NotImplementedError
    return _first(e, e.read(op, TYPES["b64"]))


def _first(e: Products, v: V) -> V:
    """A value that is the same in all lanes."""
    return v if v.n == 1 else e.f.extract(v, 0)


HANDLERS: dict[str, Handler[Products]] = {"wgmma": wgmma, BEGIN: begin}
