"""Integer and bit instructions (PTX ISA 9.7.1, 9.7.2 and 9.7.8)."""

from tegrad.ptx.ir import Fn, V
from tegrad.ptx.rules import U32, Apply, OpRule, Signature, mod, same, wide
from tegrad.ptx.syntax import Ins
from tegrad.ptx.types import EL_BITS, TYPES, Ty


def _full(f: Fn, ins: Ins, a: V, b: V) -> V:
    """The product in twice the width."""
    t = ins.types[-1]
    big = wide(t).iel
    return f.mul(f.resize(a, big, t.signed), f.resize(b, big, t.signed))


def high(f: Fn, v: V, el: str) -> V:
    """The upper half of a double-width value."""
    return f.resize(f.bin("lshr", v, EL_BITS[el]), el, False)


def mul(f: Fn, ins: Ins, a: V, b: V) -> V:
    if mod(ins, "wide"):
        return _full(f, ins, a, b)
    if mod(ins, "hi"):
        return high(f, _full(f, ins, a, b), a.el)
    return f.mul(a, b)


def _mul_signature(count: int) -> Signature:
    def signature(ins: Ins) -> tuple[Ty, tuple[Ty, ...]]:
        t = ins.types[-1]
        big = wide(t) if mod(ins, "wide") else t
        return big, (t, t, big)[:count]

    return signature


def mul24(f: Fn, ins: Ins, a: V, b: V) -> V:
    signed = ins.types[-1].signed
    cut = [f.bin("ashr" if signed else "lshr", f.bin("shl", x, 8), 8) for x in (a, b)]
    full = f.mul(*(f.resize(x, "i64", signed) for x in cut))
    return f.resize(f.bin("lshr", full, 16) if mod(ins, "hi") else full, "i32", False)


def add(f: Fn, ins: Ins, a: V, b: V) -> V:
    return f.intr("sadd.sat", a, b) if mod(ins, "sat") else f.add(a, b)


def sub(f: Fn, ins: Ins, a: V, b: V) -> V:
    return f.intr("ssub.sat", a, b) if mod(ins, "sat") else f.sub(a, b)


def quotient(op: str) -> Apply:
    """Division without LLVM's undefined cases. PTX leaves x/0 and x % 0 open; the GPU gives all ones for both."""

    def apply(f: Fn, ins: Ins, a: V, b: V) -> V:
        signed = ins.types[-1].signed
        a, b = f.same(a, b)
        zero = f.is_zero(b)
        unsafe = zero
        if signed:
            lowest = f.like(a, 1 << (EL_BITS[a.el] - 1))
            unsafe = f.or_(zero, f.and_(f.icmp("eq", a, lowest), f.icmp("eq", b, -1)))
        safe = f.select(unsafe, f.like(b, 1), b)
        out = f.bin(("s" if signed else "u") + op, a, safe)
        return f.select(zero, f.like(a, -1), out)

    return apply


def pick(name: str) -> Apply:
    """min or max by the type's sign; `.relu` clamps at zero."""

    def apply(f: Fn, ins: Ins, a: V, b: V) -> V:
        out = f.intr(("s" if ins.types[-1].signed else "u") + name, a, b)
        return f.intr("smax", out, 0) if mod(ins, "relu") else out

    return apply


def shift(op: str) -> Apply:
    """Shifts clamp: past the width they give zero, or the sign for shr.s."""

    def apply(f: Fn, ins: Ins, a: V, b: V) -> V:
        t = ins.types[-1]
        kind = "ashr" if op == "shr" and t.signed else {"shl": "shl", "shr": "lshr"}[op]
        a, b = f.same(a, b)
        if not b.ref.startswith("%"):
            return _constant_shift(f, kind, t, a, b)
        top = f.like(b, t.bits - 1)
        if kind == "ashr":
            return f.bin(kind, a, f.resize(f.intr("umin", b, top), a.el, False))
        inside = f.icmp("ule", b, top)
        amount = f.resize(f.select(inside, b, 0), a.el, False)
        return f.select(inside, f.bin(kind, a, amount), f.like(a, 0))

    return apply


def _constant_shift(f: Fn, kind: str, t: Ty, a: V, b: V) -> V:
    text = b.ref if b.n == 1 or not b.ref.startswith("splat") else b.ref[b.ref.index("(") + 1 : -1].split()[1]
    amount = 0 if text == "zeroinitializer" else int(text) & 0xFFFFFFFF
    if amount >= t.bits:
        if kind != "ashr":
            return f.like(a, 0)
        amount = t.bits - 1
    return f.bin(kind, a, amount)


def shf(f: Fn, ins: Ins, a: V, b: V, c: V) -> V:
    """Funnel shift of b:a; .l gives the upper word of the left shift, .r the lower of the right shift."""
    a, b, c = f.same(a, b, c)
    if mod(ins, "wrap"):
        return f.intr("fshl", b, a, c) if mod(ins, "l") else f.intr("fshr", b, a, c)
    amount = f.resize(f.intr("umin", c, 32), "i64", False)
    both = f.or_(f.bin("shl", f.resize(b, "i64", False), 32), f.resize(a, "i64", False))
    if mod(ins, "l"):
        return high(f, f.bin("shl", both, amount), "i32")
    return f.resize(f.bin("lshr", both, amount), "i32", False)


def logic(op: str) -> Apply:
    return lambda f, ins, a, b: f.bin(op, a, b)


def lop3(f: Fn, ins: Ins, a: V, b: V, c: V, table: V) -> V:
    """Any function of three bits, as a sum of products of its truth table."""
    a, b, c, table = f.same(a, b, c, table)
    out = f.like(a, 0)
    for i in range(8):
        term = [x if i >> k & 1 else f.not_(x) for x, k in ((a, 2), (b, 1), (c, 0))]
        wanted = f.bin("ashr", f.bin("shl", table, 31 - i), 31)
        out = f.or_(out, f.and_(f.and_(f.and_(term[0], term[1]), term[2]), wanted))
    return out


def fns(f: Fn, ins: Ins, mask: V, base: V, offset: V) -> V:
    """Position of the nth set bit from a base on, upwards or (as if reversed) downwards; all ones if there is none."""
    mask, base, offset = f.same(mask, base, offset)
    back = f.icmp("slt", offset, 0)
    rest = f.sub(f.intr_flag("abs", offset, False), 1)
    start = f.select(back, f.sub(f.like(base, 31), base), base)
    word = f.select(back, f.intr("bitreverse", mask), mask)
    word = f.and_(word, f.bin("shl", f.like(word, -1), f.and_(start, 31)))
    out, seen = f.like(word, -1), f.like(word, 0)
    for i in range(32):
        bit = f.and_(f.bin("lshr", word, i), 1)
        hit = f.and_(f.not_zero(bit), f.icmp("eq", seen, rest))
        out = f.select(hit, f.like(out, i), out)
        seen = f.add(seen, bit)
    found = f.icmp("ne", out, -1)
    out = f.select(f.and_(back, found), f.sub(f.like(out, 31), out), out)
    own = f.and_(f.bin("lshr", mask, f.and_(base, 31)), 1)
    here = f.select(f.not_zero(own), base, -1)
    return f.select(f.is_zero(offset), here, out)


def szext(f: Fn, ins: Ins, a: V, count: V) -> V:
    """Sign or zero extension of the lowest bits; .clamp leaves 32 and more alone, .wrap counts modulo 32."""
    a, count = f.same(a, count)
    low = f.and_(count, 31)
    above = f.bin("shl", f.like(a, -1), low)
    large = f.icmp("ugt", count, 31)
    if mod(ins, "clamp"):
        above = f.select(large, f.like(a, 0), above)
    out = f.and_(a, f.not_(above))
    if not ins.types[-1].signed:
        return out
    last = f.and_(f.sub(low, 1), 31)
    bit = f.and_(f.bin("lshr", a, last), 1)
    minus = f.and_(f.not_zero(bit), f.not_zero(low))
    return f.select(minus, f.or_(out, above), out)


def bmsk(f: Fn, ins: Ins, start: V, count: V) -> V:
    """A mask of `count` ones from a start bit on; .clamp fills to the top, .wrap takes both amounts modulo 32."""
    start, count = f.same(start, count)
    at, size = (f.and_(v, 31) for v in (start, count))
    top, total = f.like(at, -1), f.add(at, size)
    low = f.bin("shl", top, at)
    full = f.icmp("ugt", total, 31)
    if mod(ins, "clamp"):
        outside = f.icmp("ugt", start, 31)
        low = f.select(outside, f.like(low, 0), low)
        full = f.or_(full, f.or_(outside, f.icmp("ugt", count, 31)))
    high = f.select(full, f.like(low, 0), f.bin("shl", top, f.and_(total, 31)))
    return f.and_(low, f.not_(high))


def bfind(f: Fn, ins: Ins, a: V) -> V:
    """Position of the highest bit (for signed: that differs from the sign), or all ones; .shiftamt: from the top."""
    if ins.types[-1].signed:
        a = f.select(f.icmp("slt", a, 0), f.not_(a), a)
    lead = f.intr_flag("ctlz", a, False)
    out = lead if mod(ins, "shiftamt") else f.sub(f.like(a, EL_BITS[a.el] - 1), lead)
    return f.resize(f.select(f.is_zero(a), f.like(a, -1), out), "i32", False)


def _amounts(f: Fn, el: str, pos: V, length: V) -> tuple[V, V]:
    """Start and length as the GPU reads them beyond 255: of 32 bits modulo 256, of 64 bits as they are."""
    if el == "i64":
        return f.intr("umin", pos, 255), f.intr("umin", length, 255)
    return f.and_(pos, 0xFF), f.and_(length, 0xFF)


def _field(f: Fn, el: str, pos: V, length: V) -> tuple[V, V]:
    """Start and mask of a bit field; both amounts clamp at the width."""
    bits = EL_BITS[el]
    inside = f.icmp("ult", length, bits)
    amount = f.resize(f.select(inside, length, 0), el, False)
    one = f.like(amount, 1)
    ones = f.select(inside, f.sub(f.bin("shl", one, amount), one), -1)
    return pos, ones


def _shift_or_zero(f: Fn, op: str, a: V, pos: V) -> V:
    bits = EL_BITS[a.el]
    inside = f.icmp("ult", pos, bits)
    amount = f.resize(f.select(inside, pos, 0), a.el, False)
    return f.select(inside, f.bin(op, a, amount), f.like(a, 0))


def bfe(f: Fn, ins: Ins, a: V, pos: V, length: V) -> V:
    a, pos, length = f.same(a, pos, length)
    t = ins.types[-1]
    pos, size = _amounts(f, a.el, pos, length)
    pos, ones = _field(f, a.el, pos, size)
    out = f.and_(_shift_or_zero(f, "lshr", a, pos), ones)
    if not t.signed:
        return out
    # The sign is the bit at min(pos + len - 1, width - 1); with length 0 the result is 0.
    last = f.intr("umin", f.add(pos, f.sub(size, 1)), t.bits - 1)
    sign = f.and_(f.bin("lshr", a, f.resize(last, a.el, False)), 1)
    filled = f.or_(out, f.mul(f.not_(ones), sign))
    kept = f.select(f.icmp("ugt", f.add(pos, size), t.bits), _sign_fill(f, a, out, pos, sign), filled)
    return f.select(f.is_zero(size), f.like(a, 0), kept)


def _sign_fill(f: Fn, a: V, out: V, pos: V, sign: V) -> V:
    """Fill the bits that lie past the top of the source."""
    low = _shift_or_zero(f, "lshr", f.like(a, -1), pos)
    return f.or_(out, f.mul(f.not_(low), sign))


def bfi(f: Fn, ins: Ins, a: V, b: V, pos: V, length: V) -> V:
    a, b, pos, length = f.same(a, b, pos, length)
    pos, ones = _field(f, a.el, *_amounts(f, a.el, pos, length))
    hole = _shift_or_zero(f, "shl", ones, pos)
    return f.or_(f.and_(b, f.not_(hole)), f.and_(_shift_or_zero(f, "shl", a, pos), hole))


_PRMT_MODES = {
    "f4e": [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]],
    "b4e": [[0, 7, 6, 5], [1, 0, 7, 6], [2, 1, 0, 7], [3, 2, 1, 0]],
    "rc8": [[0] * 4, [1] * 4, [2] * 4, [3] * 4],
    "ecl": [[0, 1, 2, 3], [1, 1, 2, 3], [2, 2, 2, 3], [3, 3, 3, 3]],
    "ecr": [[0, 0, 0, 0], [0, 1, 1, 1], [0, 1, 2, 2], [0, 1, 2, 3]],
    "rc16": [[0, 1, 0, 1], [2, 3, 2, 3], [0, 1, 0, 1], [2, 3, 2, 3]],
}


def prmt(f: Fn, ins: Ins, a: V, b: V, c: V) -> V:
    """Bytes of b:a chosen by nibbles of c; bit 3 of a nibble replicates the byte's sign."""
    mode = next((m for m in ins.mods if m in _PRMT_MODES), None)
    a, b, c = f.same(a, b, c)
    out = f.like(a, 0)
    for i in range(4):
        if mode:
            rows = _PRMT_MODES[mode]
            sel = f.and_(c, 3)
            pick_ = f.like(c, rows[3][i])
            for k in range(3):
                pick_ = f.select(f.icmp("eq", sel, k), f.like(c, rows[k][i]), pick_)
        else:
            pick_ = f.and_(f.bin("lshr", c, 4 * i), 15)
        word = f.select(f.not_zero(f.and_(pick_, 4)), b, a)
        up = f.bin("shl", f.and_(f.xor(pick_, 3), 3), 3)
        top = f.bin("shl", word, up)  # the byte as the highest one
        if not mode:  # of a sign 7 bits more are shifted out
            sign = f.sub(f.like(pick_, 0), f.bin("lshr", pick_, 3))
            top = f.bin("ashr", top, f.and_(sign, 7))
        byte = f.bin("lshr", top, 24)
        out = f.or_(out, f.bin("shl", byte, 8 * i))
    return out


def _dp(f: Fn, ins: Ins, a: V, b: V, c: V, parts: list[tuple[int, int, int, int]]) -> V:
    """Sum of products of fields: (shift, width) of a and of b."""
    for sa, wa, sb, wb in parts:
        xs = []
        for v, at, width, ty in ((a, sa, wa, ins.types[0]), (b, sb, wb, ins.types[1])):
            top = f.bin("shl", v, 32 - width - at)
            xs.append(f.bin("ashr" if ty.signed else "lshr", top, 32 - width))
        c = f.add(f.mul(*xs), c)
    return c


def dp4a(f: Fn, ins: Ins, a: V, b: V, c: V) -> V:
    return _dp(f, ins, a, b, c, [(8 * i, 8, 8 * i, 8) for i in range(4)])


def dp2a(f: Fn, ins: Ins, a: V, b: V, c: V) -> V:
    first = 2 if mod(ins, "hi") else 0
    return _dp(f, ins, a, b, c, [(16 * i, 16, 8 * (first + i), 8) for i in range(2)])


def _sources(result: Ty | None, *types: Ty | None) -> Signature:
    """A signature; None stands for the instruction's type."""

    def signature(ins: Ins) -> tuple[Ty, tuple[Ty, ...]]:
        t = ins.types[-1]
        return result or t, tuple(x or t for x in types)

    return signature


def sad(f: Fn, ins: Ins, a: V, b: V, c: V) -> V:
    kind = "s" if ins.types[-1].signed else "u"
    return f.add(f.sub(f.intr(kind + "max", a, b), f.intr(kind + "min", a, b)), c)


S32 = TYPES["s32"]
RULES: dict[str, OpRule] = {
    "add": OpRule(same(2), add),
    "sub": OpRule(same(2), sub),
    "mul": OpRule(_mul_signature(2), mul),
    "mad": OpRule(_mul_signature(3), lambda f, ins, a, b, c: add(f, ins, mul(f, ins, a, b), c)),
    "mul24": OpRule(same(2), mul24),
    "mad24": OpRule(same(3), lambda f, ins, a, b, c: add(f, ins, mul24(f, ins, a, b), c)),
    "sad": OpRule(same(3), sad),
    "div": OpRule(same(2), quotient("div")),
    "rem": OpRule(same(2), quotient("rem")),
    "abs": OpRule(same(1), lambda f, ins, a: f.intr_flag("abs", a, False)),
    "neg": OpRule(same(1), lambda f, ins, a: f.sub(f.like(a, 0), a)),
    "min": OpRule(same(2), pick("min")),
    "max": OpRule(same(2), pick("max")),
    "shl": OpRule(_sources(None, None, U32), shift("shl")),
    "shr": OpRule(_sources(None, None, U32), shift("shr")),
    "shf": OpRule(same(3), shf),
    **{op: OpRule(same(2), logic(op)) for op in ("and", "or", "xor")},
    "not": OpRule(same(1), lambda f, ins, a: f.not_(a)),
    "cnot": OpRule(same(1), lambda f, ins, a: f.resize(f.is_zero(a), a.el, False)),
    "lop3": OpRule(same(4), lop3),
    "popc": OpRule(_sources(U32, None), lambda f, ins, a: f.resize(f.intr("ctpop", a), "i32", False)),
    "clz": OpRule(_sources(U32, None), lambda f, ins, a: f.resize(f.intr_flag("ctlz", a, False), "i32", False)),
    "fns": OpRule(_sources(U32, U32, U32, S32), fns),
    "szext": OpRule(_sources(None, None, U32), szext),
    "bmsk": OpRule(_sources(None, U32, U32), bmsk),
    "brev": OpRule(same(1), lambda f, ins, a: f.intr("bitreverse", a)),
    "bfind": OpRule(_sources(U32, None), bfind),
    "bfe": OpRule(_sources(None, None, U32, U32), bfe),
    "bfi": OpRule(_sources(None, None, None, U32, U32), bfi),
    "prmt": OpRule(same(3), prmt),
    "dp4a": OpRule(lambda ins: (ins.types[-1], (U32, U32, S32)), dp4a),
    "dp2a": OpRule(lambda ins: (ins.types[-1], (U32, U32, S32)), dp2a),
}
