"""The checks of an access: alignment, bounds and page flags, for a range or for each lane; and the fault record."""

from collections.abc import Callable
from dataclasses import dataclass

from tegrad.ptx.gather import gather
from tegrad.ptx.helpers import helper
from tegrad.ptx.ir import Fn, V, mangle
from tegrad.ptx.layout import LANES, Access, Frame, Launch, Space, fault_info

SPACES = {"global": Space.GLOBAL, "shared": Space.SHARED, "local": Space.LOCAL, "generic": Space.GENERIC}
PAGE_SHIFT = 12
FLAGS_AT_ONCE = 64
"""Page flags read at once."""
NEAR_PAGES = 1024
"""Lanes whose pages are at most this far apart have all flags in between read instead of their own gathered."""


@dataclass(frozen=True)
class AccessShape:
    """What an access moves per lane: n elements of `bits`."""

    space: str
    bits: int
    n: int
    access: Access

    @property
    def el(self) -> str:
        return f"i{self.bits}"

    @property
    def step(self) -> int:
        return self.bits // 8 * self.n

    @property
    def address_el(self) -> str:
        return "i32" if self.space == "shared" else "i64"

    @property
    def shared_by_ctas(self) -> bool:
        """Whether other host threads may store there meanwhile."""
        return self.space in ("global", "generic")

    @property
    def info(self) -> int:
        return fault_info(SPACES[self.space], self.access, self.step)

    @property
    def flag(self) -> int:
        """The page flag that the access needs."""
        return 1 if self.access == Access.READ else 2


def launch_of(f: Fn, frame: V) -> V:
    return f.load("ptr", frame, Frame.LAUNCH)


@helper("void", "ptr frame, i64 addr, i32 lane, i32 info, i32 pc", "noinline cold")
def tgx_fault(f: Fn, frame: V, addr: V, lane: V, info: V, pc: V) -> None:
    """Keep the first fault of the launch and stop this warp."""
    launch = launch_of(f, frame)
    state = f.gep(launch, Launch.FAULT_STATE)
    pair = f.name_of("%x")
    f.do(f"{pair} = cmpxchg {state}, i32 0, i32 1 seq_cst seq_cst, align 4")
    won = f.op("i1", 1, f"extractvalue {{i32, i1}} {pair}, 1")
    with f.if_(won):
        f.store(pc, launch, Launch.FAULT_PC)
        f.store(lane, launch, Launch.FAULT_LANE)
        f.store(f.load("i32", frame, Frame.WARP), launch, Launch.FAULT_WARP)
        f.store(f.load("i64", frame, Frame.CTA), launch, Launch.FAULT_CTA)
        f.store(addr, launch, Launch.FAULT_ADDRESS)
        f.store(info, launch, Launch.FAULT_INFO)
        f.do(f"store atomic i32 2, {state} release, align 4")
    f.store(f.const("i32", 1), frame, Frame.FAULTED)
    f.store(f.const("i32", -1), frame, Frame.BUDGET)


class Checker:
    """Emits the checks of one access shape: the scalar range check and the check of each lane."""

    def __init__(self, f: Fn, frame: V, shape: AccessShape) -> None:
        self.f, self.frame, self.shape = f, frame, shape
        self.launch = launch_of(f, frame)
        if shape.space in ("global", "generic"):
            self.base = f.load("i64", self.launch, Launch.MEM_BASE)
            self.pages = f.load("ptr", self.launch, Launch.PAGES)
            self.limit = f.load("i64", self.launch, Launch.LIMIT)
        elif shape.space == "shared":
            self.base = f.load("i64", frame, Frame.SHARED)
            self.size = f.load("i32", self.launch, Launch.SHARED_SIZE)
        else:
            self.base = f.load("i64", frame, Frame.LOCAL)
            self.size = f.load("i32", self.launch, Launch.LOCAL_SIZE)

    def aligned(self, a: V) -> V:
        f = self.f
        return f.is_zero(f.and_(a, self.shape.step - 1))

    def flags_ok(self, flags: V) -> V:
        want = self.f.like(flags, self.shape.flag)
        return self.f.not_zero(self.f.and_(flags, want))

    def range(self, low: V, last: V) -> V:
        """Whether the bytes low..last (two scalars, at most two pages apart) may be accessed."""
        f = self.f
        good = self.aligned(low)
        if self.shape.space == "shared":
            return f.and_(f.and_(good, f.icmp("ult", last, self.size)), f.icmp("ule", low, last))
        good = f.and_(good, f.and_(f.icmp("ult", last, self.limit), f.icmp("ule", low, last)))
        return self.paged(good, lambda: f.and_(self.page(low), self.page(last)))

    def page(self, a: V) -> V:
        f = self.f
        return self.flags_ok(f.load("i8", self.pages, f.bin("lshr", a, PAGE_SHIFT)))

    def paged(self, good: V, flags: Callable[[], V]) -> V:
        """`good` and, where there is a page table, the flags (read only if good)."""
        f = self.f
        slot = f.variable(good)
        any_good = good if good.n == 1 else f.not_zero(f.mask_bits(good))
        need = f.and_(any_good, f.not_zero(self.pages))
        with f.if_(need):
            f.store(f.and_(good, flags()), slot)
            self.after_flags()
        return f.load("i1", slot, n=good.n)

    def after_flags(self) -> None:
        """What a page's flag promises was stored before it (l2.py); x86 loads in order and needs no instruction."""
        if self.shape.access == Access.READ:
            self.f.do("fence acquire")

    def lanes(self, addr: V, active: V) -> V:
        """For each lane whether its access is allowed; `active` limits what is looked at."""
        f = self.f
        good = f.and_(active, self.aligned(addr))
        if self.shape.space in ("shared", "local"):
            size = f.resize(self.size, addr.el, False)
            room = f.sub(size, self.shape.step)
            fits = f.icmp("uge", size, self.shape.step)
            return f.and_(f.and_(good, f.icmp("ule", addr, room)), fits)
        good = f.and_(good, f.icmp("ult", addr, self.limit))
        return self.paged(good, lambda: self.page_lanes(addr, good))

    def page_lanes(self, addr: V, good: V) -> V:
        """Page flags of each lane: read as vectors if the lanes' pages lie near each other, else gathered."""
        f = self.f
        number = f.bin("lshr", addr, PAGE_SHIFT)
        low = self.reduce("umin", f.select(good, number, -1))
        high = self.reduce("umax", f.select(good, number, 0))
        out = f.variable(good)
        near = f.alloca("i1")
        f.store(f.icmp("ule", f.sub(high, low), NEAR_PAGES), near)
        with f.if_(f.load("i1", near)):
            f.store(self.all_pages(low, high), near)
        with f.if_(f.not_(f.load("i1", near))):
            words = gather(f, self.pages, f.and_(number, -4), good, "i32")
            shift = f.cast("trunc", f.bin("shl", f.and_(number, 3), 3), "i32")
            f.store(self.flags_ok(f.bin("lshr", words, shift)), out)
        return f.load("i1", out, n=LANES)

    def reduce(self, op: str, v: V) -> V:
        return self.f.call(f"llvm.vector.reduce.{op}.{mangle(v)}", v.el, 1, v, pure=True)

    def all_pages(self, low: V, high: V) -> V:
        """Whether every page from low to high has the flag."""
        return self.flags_ok(self.flags_of(low, high))

    def flags_of(self, low: V, high: V) -> V:
        """What all pages from low to high allow. Reads aligned blocks, none beyond the table."""
        f = self.f
        table = f.cast("ptrtoint", self.pages, "i64")
        first, last = f.add(table, low), f.add(table, high)
        at, both = f.alloca("i64"), f.alloca(f"<{FLAGS_AT_ONCE} x i8>", FLAGS_AT_ONCE)
        f.store(f.and_(first, -FLAGS_AT_ONCE), at)
        f.store(f.const("i8", -1, FLAGS_AT_ONCE), both, 0, FLAGS_AT_ONCE)
        index = f.iota("i8", FLAGS_AT_ONCE)
        with f.loop() as (_, end):
            here = f.load("i64", at)
            f.leave(f.icmp("ugt", here, last), end)
            flags = f.load("i8", f.pointer(here), 0, FLAGS_AT_ONCE, FLAGS_AT_ONCE)
            skip = f.cast("trunc", f.intr("usub.sat", first, here), "i8")
            until = f.cast("trunc", f.intr("umin", f.sub(last, here), FLAGS_AT_ONCE - 1), "i8")
            asked = f.and_(f.icmp("uge", index, skip), f.icmp("ule", index, until))
            so_far = f.load("i8", both, 0, FLAGS_AT_ONCE, FLAGS_AT_ONCE)
            f.store(f.and_(so_far, f.select(asked, flags, -1)), both, 0, FLAGS_AT_ONCE)
            f.store(f.add(here, FLAGS_AT_ONCE), at)
        return self.reduce("and", f.load("i8", both, 0, FLAGS_AT_ONCE, FLAGS_AT_ONCE))

    def inside(self, low: V, last: V) -> V:
        """Whether the bytes low..last lie below the limit, near enough for `span`."""
        f = self.f
        good = f.and_(f.icmp("ult", last, self.limit), f.icmp("ule", low, last))
        return f.and_(good, f.icmp("ult", f.sub(last, low), NEAR_PAGES << PAGE_SHIFT))

    def span(self, low: V, last: V) -> V:
        """The flags (i32) that all pages of the bytes low..last have."""
        f = self.f
        first, end = (f.bin("lshr", a, PAGE_SHIFT) for a in (low, last))
        flags = f.alloca("i8")
        f.store(f.and_(f.load("i8", self.pages, first), f.load("i8", self.pages, end)), flags)
        with f.if_(f.icmp("ugt", f.sub(end, first), 1)):
            f.store(self.flags_of(first, end), flags)
        self.after_flags()
        return f.resize(f.load("i8", flags), "i32", False)

    def host(self, addr: V) -> V:
        """Host addresses (i64) of allowed addresses."""
        f = self.f
        wide = f.resize(addr, "i64", False)
        host = f.add(wide, self.base)
        if self.shape.space == "local":
            size = f.resize(self.size, "i64", False)
            host = f.add(host, f.mul(f.iota("i64", LANES), size))
        return host
