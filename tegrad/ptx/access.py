"""Memory helpers called by compiled kernels: one LLVM function per state space, element width and vector length.

Each checks alignment, bounds and page flags of every active lane before it touches memory, has fast paths for
consecutive lanes and for one common address, and records the first faulting lane. After a fault a warp's accesses are
suppressed until it leaves at its next back edge or exit.
"""

from collections.abc import Callable

from tegrad.ptx.check import AccessShape, Checker, launch_of
from tegrad.ptx.gather import gather_any, interleave, masked_load, masked_store, replicate, scatter_any
from tegrad.ptx.helpers import family
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import LANES, Access, Frame, Launch


def last_first(f: Fn, n: int, load: Callable[[int], V]) -> list[V]:
    """The words of a vector, the last of them loaded first, and stored last.

    Silicon sees 16 aligned bytes whole [inferred: kernels that poll such packets run]. Here, who finds a mark in the
    last word has the words before it as they were stored with the mark.
    """
    words = []
    for i in reversed(range(n)):
        words.append(load(i))
        f.in_order()
    return words[::-1]


class Transfer:
    """A function that loads or stores an element of each lane, or several, which go through memory.

    `where` are its parameters, besides the values and `more`.
    """

    def __init__(self, module: Module, name: str, shape: AccessShape, store: bool, where: str, more: str = "") -> None:
        self.shape, self.store = shape, store
        by_register = shape.n == 1
        if store:
            more += f", <32 x {shape.el}> value" if by_register else ", ptr value"
        elif not by_register:
            more += ", ptr out"
        self.ret = f"<32 x {shape.el}>" if by_register and not store else "void"
        self.f = Fn(module, name, self.ret, where + more, "nounwind")
        count = len(where.split(", "))
        self.where, self.rest = self.f.args[:count], self.f.args[count:]
        self.bytes = LANES * shape.bits // 8

    def values(self) -> list[V]:
        """The values to store."""
        if self.shape.n == 1:
            return self.rest
        return [self.f.load(self.shape.el, self.rest[0], i * self.bytes, LANES, 4) for i in range(self.shape.n)]

    def give(self, vs: list[V]) -> None:
        """Return the loaded values."""
        if self.shape.n == 1:
            self.f.ret(vs[0])
            return
        for i, v in enumerate(vs):
            self.f.store(v, self.rest[0], i * self.bytes, 4)
        self.f.ret()

    def give_row(self, row: V) -> None:
        """Return the loaded values, which lie side by side for each lane."""
        n = self.shape.n
        self.give([self.f.shuffle(row, None, range(k, LANES * n, n)) if n > 1 else row for k in range(n)])

    def pass_on(self, name: str, *where: V) -> None:
        """Let another one do it."""
        f = self.f
        if self.ret == "void":
            f.call_void(name, *where, *self.rest)
            f.ret()
        else:
            f.ret(f.call(name, self.shape.el, LANES, *where, *self.rest))


class Helper(Transfer):
    """One memory helper being written: its paths share the frame, the mask and the result slot.

    With `fallback`, the name of a helper for the general case, this one only has the path for consecutive lanes from
    lane 0 on, which then needs no stack.
    """

    def __init__(
        self, module: Module, name: str, shape: AccessShape, store: bool, fallback: str = "", more: str = ""
    ) -> None:
        where = f"ptr frame, <32 x {shape.address_el}> addr, i32 mask, i32 pc"
        super().__init__(module, name, shape, store, where, more)
        self.fallback = fallback
        self.frame, self.addr, self.mask, self.pc = self.where
        self.in_global: V | None = None
        self.opened: V | None = None

    def leave_empty(self) -> None:
        """Return without an effect."""
        if self.store:
            self.f.ret()
        else:
            self.give([self.f.const(self.shape.el, 0, LANES)] * self.shape.n)

    def build(self) -> None:
        """Write the whole function."""
        self.body()
        self.f.finish()

    def short(self) -> None:
        """The path for consecutive lanes; everything else is the fallback's."""
        f = self.f
        self.active = f.mask_vec(self.mask)
        sound = f.is_zero(f.load("i32", self.frame, Frame.FAULTED))
        leading = f.not_zero(f.and_(self.mask, 1))
        work, other = f.name_of("work"), f.name_of("other")
        f.condbr(f.and_(sound, leading), work, other, True)
        f.label(work)
        self.check = Checker(f, self.frame, self.shape)
        self.consecutive(other)
        f.br(other)
        f.label(other)
        self.pass_on(self.fallback, *self.where)

    def body(self) -> None:
        f = self.f
        if self.fallback:
            self.short()
            return
        faulted = f.load("i32", self.frame, Frame.FAULTED)
        idle = f.or_(f.not_zero(faulted), f.is_zero(self.mask))
        self.active = f.mask_vec(self.mask)
        work, empty, slow = f.name_of("work"), f.name_of("empty"), f.name_of("slow")
        f.condbr(idle, empty, work, False)
        f.label(empty)
        self.leave_empty()
        f.label(work)
        if self.shape.space == "generic":
            self.generic()
            return
        self.check = Checker(f, self.frame, self.shape)
        if self.shape.space != "local":
            # With lane 0 active, the short helper has tried that already.
            f.leave(f.not_zero(f.and_(self.mask, 1)), slow)
            self.consecutive(slow)
        f.br(slow)
        f.label(slow)
        if self.shape.space != "local" and not self.store:
            self.common()
        good = self.check.lanes(self.addr, self.active)
        self.by_lane(self.check.host(self.addr), good)

    def consecutive(self, slow: str) -> None:
        """Lane i at a0 + i * step: one range check, one vector access."""
        f, s = self.f, self.shape
        first, low = self.first_active()
        start = f.sub(low, f.mul(f.resize(first, low.el, False), s.step))
        off = f.and_(self.active, f.icmp("ne", self.addr, f.add(start, f.iota(low.el, LANES, s.step))))
        f.leave(f.not_zero(f.mask_bits(off)), slow)
        top = f.sub(f.const("i32", 31), f.intr_flag("ctlz", self.mask, False))
        last = f.add(f.add(start, f.mul(f.resize(top, low.el, False), s.step)), s.step - 1)
        good = self.check.range(low, last)
        f.leave(f.not_(good), slow)
        # Lanes below the first active one may lie before offset 0: sign-extend.
        p = f.pointer(f.add(f.cast("sext", start, "i64"), self.check.base))
        full, part = f.name_of("full"), f.name_of("part")
        f.condbr(f.icmp("eq", self.mask, -1), full, part)
        n = LANES * s.n
        for label, masked in ((full, False), (part, True)):
            f.label(label)
            active = replicate(f, self.active, s.n) if masked else None
            if self.store:
                value = interleave(f, self.values())
                if active is None:
                    f.store(value, p, 0, s.bits // 8)
                else:
                    masked_store(f, value, p, active, s.bits // 8)
                f.ret()
            else:
                load = (
                    f.load(s.el, p, 0, n, s.bits // 8, once=s.shared_by_ctas)
                    if active is None
                    else masked_load(f, s.el, n, p, active, s.bits // 8)
                )
                self.give_row(load)

    def first_active(self) -> tuple[V, V]:
        """The first active lane and its address; lane 0, the usual one, needs no detour through the stack."""
        f = self.f
        if self.fallback:
            return f.const("i32", 0), f.extract(self.addr, 0)
        first = f.intr_flag("cttz", self.mask, False)
        slot = f.alloca(self.addr.el)
        f.store(f.extract(self.addr, 0), slot)
        with f.if_(f.not_zero(first), False):
            f.store(f.extract(self.addr, first), slot)
        return first, f.load(self.addr.el, slot)

    def common(self) -> None:
        """All lanes at one address: one scalar load."""
        f, s = self.f, self.shape
        _, low = self.first_active()
        off = f.and_(self.active, f.icmp("ne", self.addr, low))
        lanes = f.name_of("lanes")
        f.leave(f.not_zero(f.mask_bits(off)), lanes)
        good = self.check.range(low, f.add(low, s.step - 1))
        f.leave(f.not_(good), lanes)
        host = f.add(f.resize(low, "i64", False), self.check.base)
        p = f.pointer(host)
        self.give(last_first(f, s.n, lambda i: f.splat(f.load(s.el, p, i * s.bits // 8, once=True), LANES)))
        f.label(lanes)

    def by_lane(self, host: V, good: V) -> None:
        """Any addresses: fault on the first lane that is not good, else gather or scatter."""
        f, s = self.f, self.shape
        self.fault_unless(self.open(good))
        hosts = [f.add(host, i * s.bits // 8) for i in range(s.n)]
        if self.store:
            for h, v in zip(hosts, self.values(), strict=True):
                scatter_any(f, h, self.active, v)
                f.in_order()
            self.close()
            f.ret()
        else:
            self.give(last_first(f, s.n, lambda i: gather_any(f, hosts[i], self.active, s.el)))

    def open(self, good: V) -> V:
        """Ask the L2 for the lanes of global memory that are not good: those that are then."""
        f, s = self.f, self.shape
        if s.space not in ("global", "generic"):
            return good
        lanes = self.mask if self.in_global is None else f.mask_bits(self.in_global)
        asked = f.and_(f.and_(f.mask_bits(f.not_(good)), lanes), self.mask)
        out, opened = f.alloca("i32"), f.alloca("i32")
        f.store(f.mask_bits(good), out)
        f.store(f.const("i32", 0), opened)
        cached = f.not_zero(f.load("i64", launch_of(f, self.frame), Launch.L2))
        with f.if_(f.and_(cached, f.not_zero(asked)), False):
            # Refused lanes of other spaces fault in any case: then nothing may stay open.
            elsewhere = f.and_(f.and_(f.mask_bits(f.not_(good)), self.mask), f.not_(lanes))
            with f.if_(f.is_zero(elsewhere)):
                info = f.const("i32", s.info)
                bad = f.call("tgx_l2_open", "i32", 1, self.frame, self.addr, asked, info, self.pc)
                fine = f.and_(asked, f.not_(bad))
                f.store(f.or_(f.mask_bits(good), fine), out)
                f.store(f.select(f.is_zero(bad), fine, f.const("i32", 0)), opened)
        self.opened = opened
        return f.mask_vec(f.load("i32", out))

    def close(self) -> None:
        """A store or an atomic is done: tell the L2 if it was opened for some lanes."""
        f = self.f
        if self.opened is None:
            return
        lanes = f.load("i32", self.opened)
        with f.if_(f.not_zero(lanes), False):
            f.call_void("tgx_l2_close", self.frame, self.addr, lanes, f.const("i32", self.shape.step))

    def fault_unless(self, good: V) -> None:
        """Report the first active lane that is not good and return without an effect."""
        f, s = self.f, self.shape
        bad = f.and_(f.mask_bits(f.not_(good)), self.mask)
        fault, fine = f.name_of("fault"), f.name_of("fine")
        f.condbr(f.not_zero(bad), fault, fine, False)
        f.label(fault)
        lane = f.intr_flag("cttz", bad, False)
        where = f.resize(f.extract(self.addr, lane), "i64", False)
        f.call_void("tgx_fault", self.frame, where, lane, f.const("i32", s.info), self.pc)
        self.leave_empty()
        f.label(fine)

    def generic(self) -> None:
        """Lanes inside a window go to shared or local memory, the others to global memory."""
        f, s = self.f, self.shape
        launch = launch_of(f, self.frame)
        size = f.load("i64", launch, Launch.WINDOW_SIZE)
        shared = f.sub(self.addr, f.load("i64", launch, Launch.SHARED_WINDOW))
        local = f.sub(self.addr, f.load("i64", launch, Launch.LOCAL_WINDOW))
        in_shared = f.and_(self.active, f.icmp("ult", shared, size))
        in_local = f.and_(self.active, f.icmp("ult", local, size))
        inside = f.mask_bits(f.or_(in_shared, in_local))
        if s.access == Access.ATOMIC:
            self.generic_lanes(in_shared, in_local, shared, local)
            return
        some, none = f.name_of("some"), f.name_of("none")
        f.condbr(f.not_zero(inside), some, none)
        f.label(none)
        self.pass_on(helper_name("st" if self.store else "ld", "global", s.bits, s.n), *self.where)
        f.label(some)
        self.generic_lanes(in_shared, in_local, shared, local)

    def generic_lanes(self, in_shared: V, in_local: V, shared: V, local: V) -> None:
        """Each lane checked and translated in its own space."""
        f, s = self.f, self.shape
        good, host = f.const("i1", 0, LANES), f.const("i64", 0, LANES)
        in_global = self.in_global = f.and_(self.active, f.not_(f.or_(in_shared, in_local)))
        for space, lanes, addr in (
            ("shared", in_shared, shared),
            ("local", in_local, local),
            ("global", in_global, self.addr),
        ):
            check = Checker(f, self.frame, AccessShape(space, s.bits, s.n, s.access))
            good = f.or_(good, check.lanes(addr, lanes))
            host = f.select(lanes, check.host(addr), host)
        self.by_lane(host, good)


def emit_uniform(module: Module, space: str, bits: int, n: int) -> None:
    """Write `tgx_ldu_{space}_b{bits}x{n}`: a load whose address is one scalar for the warp."""
    shape = AccessShape(space, bits, n, Access.READ)
    params = f"ptr frame, {shape.address_el} addr, i32 mask, i32 pc" + (", ptr out" if n > 1 else "")
    f = Fn(module, helper_name("ldu", space, bits, n), shape.el if n == 1 else "void", params, "nounwind")
    frame, addr, mask, pc, *out = f.args

    def give(vs: list[V]) -> None:
        for i, v in enumerate(vs if out else []):
            f.store(v, out[0], i * bits // 8)
        f.ret(None if out else vs[0])

    check = Checker(f, frame, shape)
    idle = f.or_(f.load("i32", frame, Frame.FAULTED), f.resize(f.is_zero(mask), "i32", False))
    good = check.range(addr, f.add(addr, shape.step - 1))
    work, fault, empty = f.name_of("work"), f.name_of("fault"), f.name_of("empty")
    if space == "global":
        passed = f.variable(good)
        cached = f.not_zero(f.load("i64", launch_of(f, frame), Launch.L2))
        asked = f.and_(f.and_(cached, f.not_(good)), f.is_zero(idle))
        with f.if_(asked, False):
            one = f.and_(mask, f.sub(f.const("i32", 0), mask))
            info = f.const("i32", shape.info)
            bad = f.call("tgx_l2_open", "i32", 1, frame, f.splat(addr, LANES), one, info, pc)
            f.store(f.is_zero(bad), passed)
        good = f.load("i1", passed)
    f.condbr(f.and_(good, f.is_zero(idle)), work, empty, True)
    f.label(work)
    p = f.pointer(f.add(f.resize(addr, "i64", False), check.base))
    give(last_first(f, n, lambda i: f.load(shape.el, p, i * bits // 8, once=True)))
    f.label(empty)
    over = f.name_of("over")
    f.condbr(f.is_zero(idle), fault, over)
    f.label(fault)
    lane = f.intr_flag("cttz", mask, False)
    f.call_void("tgx_fault", frame, f.resize(addr, "i64", False), lane, f.const("i32", shape.info), pc)
    f.br(over)
    f.label(over)
    give([f.const(shape.el, 0)] * n)
    f.finish()


def helper_name(kind: str, space: str, bits: int, n: int) -> str:
    return f"tgx_{kind}_{space}_b{bits}x{n}"


def sizes(name: str) -> tuple[int, int]:
    """Bits of an element, and how many there are, by the end of a helper's name."""
    bits, n = name.rpartition("_b")[2].split("x")
    return int(bits), int(n)


@family("tgx_ld_", "tgx_st_", "tgx_ldu_", "tgx_ldany_", "tgx_stany_")
def emit_access(module: Module, name: str) -> None:
    """Write the helper `tgx_{ld,st,ldu,ldany,stany}_{space}_b{bits}x{n}`."""
    _, kind, space, _ = name.split("_")
    bits, n = sizes(name)
    if kind == "ldu":
        emit_uniform(module, space, bits, n)
        return
    access = Access.READ if kind.startswith("ld") else Access.WRITE
    general = (
        helper_name(kind + "any", space, bits, n) if kind in ("ld", "st") and space in ("global", "shared") else ""
    )
    shape = AccessShape(space, bits, n, access)
    Helper(module, name, shape, kind.startswith("st"), general).build()
