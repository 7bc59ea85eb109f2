"""The GPU's L2 as compiled code sees it: sectors of 32 bytes that the GPU has touched are kept apart from memory.

Device memory may be mapped *cached*. Then its GPU addresses hold what the L2 keeps, and memory itself lies a constant
distance on (`Port.DELTA`). A byte per physical sector tells whether it is kept, and whether it is dirty; a frame is
the number of a physical page. Page flags (`Page`) let plain loads pass without a look at any of this: a page that is
kept whole has the flag that loads ask for. All else comes here: `tgx_l2_open` before an access of a warp's lanes,
`tgx_l2_close` after a store or an atomic. Between the two the lock is held, so that no flush falls in between.

The functions with an address and a size are for bulk copies, and for the emulated board's other engines.
"""

from collections.abc import Callable
from enum import IntEnum, IntFlag
from functools import partial, reduce

from tegrad.ptx.check import PAGE_SHIFT, launch_of
from tegrad.ptx.gather import each_lane
from tegrad.ptx.helpers import helper
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.layout import HASH_FACTOR, LANES, Access, Frame, Launch

SECTOR_SHIFT = 5
SECTOR = 1 << SECTOR_SHIFT
PAGE = 1 << PAGE_SHIFT
PAGE_SECTORS = PAGE // SECTOR
WHOLE_PAGE_SECTORS = 8
"""A page of which so many sectors are kept is kept whole from then on: stricter than silicon, and loads are fast."""
MAX_FRAMES = 1 << 24
"""Physical pages that can be told apart: 64 GiB."""
MOST_EVENTS = 4096
"""Reports kept until somebody reads them."""


class Page(IntFlag):
    """The flag byte of a page. The first two are what a warp's access may do without a look at the L2.

    The engines' flags are the same two, higher. CACHED: the address holds what the L2 keeps. MIXED: the same memory is
    mapped cached and volatile, so that every access has to look at its sector.
    """

    READ = 1
    WRITE = 2
    ENGINE_READ = 4
    ENGINE_WRITE = 8
    SLOW_READ = 16
    SLOW_WRITE = 32
    CACHED = 64
    MIXED = 128


class Sector(IntFlag):
    """The state of a physical sector."""

    KEPT = 1
    DIRTY = 2


class Port(IntEnum):
    """Offsets in an address space's structure. `BASE` and `PAGES` as in a launch."""

    CACHE = 0
    DELTA = 8
    FRAMES = 16
    """An i32 per page: its frame, where it is CACHED or MIXED."""
    BASE = 24
    PAGES = 32
    ID = 40
    SIZE = 64


class Cache(IntEnum):
    """Offsets in the structure that all address spaces of a GPU share."""

    LOCK = 0
    MODE = 4
    SECTORS = 8
    COUNTS = 16
    """A byte per frame: how many of its sectors are kept."""
    KEPT = 24
    """How many are kept in all."""
    ORDER = 32
    """Frames in the order in which a first sector of them was kept, an i32 each, MAX_FRAMES of them in a ring."""
    ORDERED = 40
    SHADOW = 48
    """Where all frames lie as the L2 keeps them."""
    CLEAN = 56
    """Frames as memory was when the GPU first stored to them, in mode TELL."""
    EVENTS = 64
    REPORTED = 72
    MASKS = 80
    """An i64 per sector that is not kept: which of its bytes stores that go through have covered, and above, whose they
    are. A sector is kept once stores of a warp with no fence between have covered it [seen on an H200]."""
    STORES = 88
    """Counts what other engines store, in twos."""
    FILLED = 96
    """How many sectors have come to be kept so far."""
    SIZE = 128


class Mode(IntFlag):
    """How the L2 behaves: without BACK stores go through to memory at once; TELL reports what only silicon knows."""

    BACK = 1
    TELL = 2


class Event(IntEnum):
    """Offsets in a report. `TAG` is what the launch, or the engine, was given."""

    KIND = 0
    SIZE = 4
    VA = 8
    TAG = 16
    PORT = 24
    CTA = 32
    WARP = 40
    LANE = 44
    PC = 48
    END = 64


STALE, OVERWRITTEN = 1, 2
"""Kinds of report: a load that did not see what memory held; a dirty sector stored over what the CPU had written."""
NO_LANE = -1
WRITE_BACK, DROP = 1, 2
"""What a sweep does: dirty sectors go to memory; sectors that are not dirty are forgotten."""


def _flag(f: Fn, value: V, bits: int) -> V:
    """Whether any of the bits is set."""
    return f.not_zero(f.and_(value, bits))


class Place:
    """What belongs to an address: its page's flags, its frame, its sector's state, memory and what the L2 keeps."""

    def __init__(self, f: Fn, port: V, va: V) -> None:
        self.f, self.port, self.va = f, port, va
        self.cache = f.load("ptr", port, Port.CACHE)
        page = f.bin("lshr", va, PAGE_SHIFT)
        self.flag_at = f.gep(f.load("ptr", port, Port.PAGES), page)
        self.flags = f.load("i8", self.flag_at)
        index = f.mul(page, 4)
        self.frame = f.resize(f.load("i32", f.gep(f.load("ptr", port, Port.FRAMES), index)), "i64", False)
        sector = f.and_(f.bin("lshr", va, SECTOR_SHIFT), PAGE_SECTORS - 1)
        number = f.or_(f.mul(self.frame, PAGE_SECTORS), sector)
        self.state_at = f.gep(f.load("ptr", self.cache, Cache.SECTORS), number)
        self.mask_at = f.gep(f.load("ptr", self.cache, Cache.MASKS), f.mul(number, 8))
        self.count_at = f.gep(f.load("ptr", self.cache, Cache.COUNTS), self.frame)

    def kept(self, va: V) -> V:
        """Where the L2 keeps the byte at an address of this page."""
        return self._in_frame(Cache.SHADOW, va)

    def clean(self, va: V) -> V:
        """Where the byte lies as memory held it when the GPU stored there first."""
        return self._in_frame(Cache.CLEAN, va)

    def _in_frame(self, array: int, va: V) -> V:
        f = self.f
        offset = f.or_(f.mul(self.frame, PAGE), f.and_(va, PAGE - 1))
        return f.gep(f.load("ptr", self.cache, array), offset)

    def memory(self, va: V) -> V:
        """Where memory itself is, for an address of this page."""
        f = self.f
        distance = f.select(self.cached, f.load("i64", self.port, Port.DELTA), f.const("i64", 0))
        return f.pointer(f.add(f.add(f.load("i64", self.port, Port.BASE), va), distance))

    @property
    def cached(self) -> V:
        return _flag(self.f, self.flags, Page.CACHED)


def _mode(f: Fn, cache: V, bit: int) -> V:
    return _flag(f, f.load("i32", cache, Cache.MODE), bit)


def _copy(f: Fn, to: V, source: V, size: V) -> None:
    f.call("memcpy", "ptr", 1, to, source, size)


def _copy_sector(f: Fn, to: V, source: V) -> None:
    f.store(f.load("i64", source, 0, SECTOR // 8, 1), to, 0, 1)


def _start(f: Fn, va: V) -> V:
    return f.and_(va, -SECTOR)


# -- the lock ---------------------------------------------------------------------------------------------------------


@helper("void", "ptr cache")
def tgx_l2_lock(f: Fn, cache: V) -> None:
    """Take the lock; give way while another thread has it."""
    with f.loop() as (_, end):
        pair = f.name_of("%x")
        f.do(f"{pair} = cmpxchg {f.gep(cache, Cache.LOCK)}, i32 0, i32 1 acquire monotonic, align 4")
        f.leave(f.op("i1", 1, f"extractvalue {{i32, i1}} {pair}, 1"), end)
        f.call("sched_yield", "i32", 1)


@helper("void", "ptr cache")
def tgx_l2_unlock(f: Fn, cache: V) -> None:
    """Give the lock back."""
    f.do(f"store atomic i32 0, {f.gep(cache, Cache.LOCK)} release, align 4")


# -- one access within a sector, with the lock held -------------------------------------------------------------------


@helper("i1", "ptr port, i64 va, i64 size, i32 access")
def tgx_l2_touch(f: Fn, port: V, va: V, size: V, access: V) -> V:
    """An access within a sector is about to happen; whether it is stale."""
    at = Place(f, port, va)
    stale = f.variable(f.const("i1", 0))
    state = f.load("i8", at.state_at)
    cached = at.cached
    kept = _flag(f, state, Sector.KEPT)
    passes = f.and_(f.icmp("eq", access, Access.WRITE), f.not_(_mode(f, at.cache, Mode.BACK)))
    with f.if_(f.and_(f.and_(cached, f.not_(kept)), f.not_(passes))):
        f.call_void("tgx_l2_keep", port, va)
    with f.if_(f.and_(f.and_(cached, kept), _mode(f, at.cache, Mode.TELL)), False):
        reads = f.icmp("ne", access, Access.WRITE)
        with f.if_(f.and_(reads, f.not_(_flag(f, state, Sector.DIRTY)))):
            differ = f.call("memcmp", "i32", 1, at.kept(va), at.memory(va), size)
            f.store(f.not_zero(differ), stale)
    many = f.icmp("uge", f.load("i8", at.count_at), WHOLE_PAGE_SECTORS)
    loads = f.icmp("eq", access, Access.READ)
    with f.if_(f.and_(f.and_(cached, f.and_(many, loads)), f.not_(_mode(f, at.cache, Mode.TELL)))):
        f.call_void("tgx_l2_whole", port, va)
    with f.if_(f.and_(f.not_(cached), f.not_zero(state)), False):
        f.call_void("tgx_l2_forget", port, va)
    return f.load("i1", stale)


@helper("void", "ptr port, i64 va")
def tgx_l2_keep(f: Fn, port: V, va: V) -> None:
    """A sector that is not kept comes from memory."""
    at = Place(f, port, va)
    start = _start(f, va)
    _copy_sector(f, at.kept(start), at.memory(start))
    f.call_void("tgx_l2_count", port, va)


def _counted(f: Fn, at: Place, more: V) -> None:
    """So many more sectors of a page are kept, an i8; the page gets its place in the order if they are its first."""
    count = f.load("i8", at.count_at)
    f.store(f.add(count, more), at.count_at)
    total = f.load("i64", at.cache, Cache.KEPT)
    f.store(f.add(total, f.resize(more, "i64", False)), at.cache, Cache.KEPT)
    filled = f.load("i64", at.cache, Cache.FILLED)
    f.store(f.add(filled, f.resize(more, "i64", False)), at.cache, Cache.FILLED)
    with f.if_(f.is_zero(count)):
        ordered = f.load("i64", at.cache, Cache.ORDERED)
        place = f.mul(f.and_(ordered, MAX_FRAMES - 1), 4)
        f.store(f.cast("trunc", at.frame, "i32"), f.gep(f.load("ptr", at.cache, Cache.ORDER), place))
        f.store(f.add(ordered, 1), at.cache, Cache.ORDERED)


@helper("void", "ptr port, i64 va")
def tgx_l2_count(f: Fn, port: V, va: V) -> None:
    """A sector that was not kept is from now on."""
    at = Place(f, port, va)
    f.do("fence release")  # tgx_l2_peek reads the state without the lock, then what is kept
    f.store(f.const("i8", Sector.KEPT), at.state_at)
    f.store(f.const("i64", 0), at.mask_at)
    _counted(f, at, f.const("i8", 1))


@helper("void", "ptr port, i64 va")
def tgx_l2_whole(f: Fn, port: V, va: V) -> None:
    """Keep all of a page, and let its loads pass."""
    first = f.and_(va, -PAGE)
    at = Place(f, port, first)
    asked = f.and_(at.flags, Page.SLOW_READ | Page.MIXED | Page.READ)
    with f.if_(f.icmp("eq", asked, Page.SLOW_READ)):
        fresh = f.is_zero(f.load("i8", at.count_at))
        with f.if_(fresh):
            _keep_page(f, at, first)
        with f.if_(f.not_(fresh)), f.for_(f.const("i64", PAGE_SECTORS)) as i:
            missing = f.not_(_flag(f, f.load("i8", f.gep(at.state_at, i)), Sector.KEPT))
            with f.if_(missing):
                f.call_void("tgx_l2_keep", port, f.add(first, f.mul(i, SECTOR)))
        f.do(f"store atomic i8 {f.or_(at.flags, Page.READ).ref}, {at.flag_at} release, align 1")


def _keep_page(f: Fn, at: Place, first: V) -> None:
    """Keep all of a page of which nothing is kept."""
    _copy(f, at.kept(first), at.memory(first), f.const("i64", PAGE))
    f.do("fence release")
    _fill(f, at.state_at, Sector.KEPT, PAGE_SECTORS)
    with f.if_(f.not_(_mode(f, at.cache, Mode.BACK))):
        _fill(f, at.mask_at, 0, 8 * PAGE_SECTORS)
    _counted(f, at, f.const("i8", PAGE_SECTORS))


def _fill(f: Fn, to: V, value: int, size: int) -> None:
    f.call("memset", "ptr", 1, to, f.const("i32", value), f.const("i64", size))


@helper("void", "ptr port, i64 va")
def tgx_l2_forget(f: Fn, port: V, va: V) -> None:
    """The sector goes; if it is dirty, to memory first."""
    at = Place(f, port, va)
    with f.if_(_flag(f, f.load("i8", at.state_at), Sector.DIRTY)):
        f.call_void("tgx_l2_write_back", port, va)
    f.store(f.const("i8", 0), at.state_at)
    f.store(f.const("i64", 0), at.mask_at)
    f.store(f.sub(f.load("i8", at.count_at), 1), at.count_at)
    f.store(f.sub(f.load("i64", at.cache, Cache.KEPT), 1), at.cache, Cache.KEPT)


@helper("void", "ptr port, i64 va")
def tgx_l2_write_back(f: Fn, port: V, va: V) -> None:
    """A dirty sector goes to memory and is clean."""
    at = Place(f, port, va)
    start = _start(f, va)
    memory, kept = at.memory(start), at.kept(start)
    with f.if_(_mode(f, at.cache, Mode.TELL), False):
        size = f.const("i64", SECTOR)
        differ = f.call("memcmp", "i32", 1, at.clean(start), memory, size)
        with f.if_(f.not_zero(differ)):
            none = f.const("i64", 0)
            f.call_void("tgx_l2_report", port, f.const("i32", OVERWRITTEN), f.const("i32", SECTOR), start, none,
                        f.const("ptr", 0), f.const("i32", NO_LANE), f.const("i32", 0))  # fmt: skip
    _copy_sector(f, memory, kept)
    f.store(f.const("i8", Sector.KEPT), at.state_at)


def _covered(f: Fn, at: Place, va: V, size: V, whose: V) -> None:
    """A store has gone through to a sector that is not kept: it is, once stores that go together have covered it."""
    one, low = f.const("i64", 1), f.const("i64", 0xFFFFFFFF)
    new = f.bin("shl", f.sub(f.bin("shl", one, size), one), f.and_(va, SECTOR - 1))
    known = f.load("i64", at.mask_at)
    owner = f.bin("shl", whose, 32)
    together = f.icmp("eq", f.and_(known, f.not_(low)), owner)
    mask = f.or_(new, f.select(together, f.and_(known, low), f.const("i64", 0)))
    f.store(f.or_(owner, mask), at.mask_at)
    with f.if_(f.icmp("eq", mask, low)):
        f.call_void("tgx_l2_count", at.port, va)


@helper("void", "ptr port, i64 va, i64 size, i64 whose")
def tgx_l2_stored(f: Fn, port: V, va: V, size: V, whose: V) -> None:
    """An access within a sector has stored to what the L2 keeps.

    Stores with an equal `whose`, of 32 bits and not 0, go together.
    """
    at = Place(f, port, va)
    with f.if_(f.not_(at.cached)):
        f.ret()
    back = _mode(f, at.cache, Mode.BACK)
    state = f.load("i8", at.state_at)
    with f.if_(f.not_(back)):
        _copy(f, at.memory(va), at.kept(va), size)
    with f.if_(f.and_(f.not_(back), f.not_(_flag(f, state, Sector.KEPT)))):
        _covered(f, at, va, size, whose)
    with f.if_(f.and_(back, f.not_(_flag(f, state, Sector.DIRTY)))):
        with f.if_(_mode(f, at.cache, Mode.TELL), False):
            start = _start(f, va)
            _copy_sector(f, at.clean(start), at.memory(start))
        f.store(f.const("i8", Sector.KEPT | Sector.DIRTY), at.state_at)


@helper("void", "ptr port, i32 kind, i32 size, i64 va, i64 tag, ptr frame, i32 lane, i32 pc", "noinline cold")
def tgx_l2_report(f: Fn, port: V, kind: V, size: V, va: V, tag: V, frame: V, lane: V, pc: V) -> None:
    """One more report, unless there is no room."""
    cache = f.load("ptr", port, Port.CACHE)
    count = f.load("i64", cache, Cache.REPORTED)
    f.store(f.add(count, 1), cache, Cache.REPORTED)
    with f.if_(f.icmp("uge", count, MOST_EVENTS)):
        f.ret()
    event = f.gep(f.load("ptr", cache, Cache.EVENTS), f.mul(count, Event.END))
    identity = f.load("i64", port, Port.ID)
    for value, at in ((kind, Event.KIND), (size, Event.SIZE), (va, Event.VA), (tag, Event.TAG),
                      (identity, Event.PORT), (lane, Event.LANE), (pc, Event.PC)):  # fmt: skip
        f.store(value, event, at)
    with f.if_(f.not_zero(frame)):
        f.store(f.load("i64", frame, Frame.CTA), event, Event.CTA)
        f.store(f.load("i32", frame, Frame.WARP), event, Event.WARP)


# -- a warp's lanes ---------------------------------------------------------------------------------------------------


@helper("i1", "ptr port, i64 va")
def tgx_l2_peek(f: Fn, port: V, va: V) -> V:
    """Without the lock, whether a load of a kept sector may simply go on.

    Not where its page could be kept whole: then the locked way makes loads pass from here on.
    """
    flags = f.load("i8", f.load("ptr", port, Port.PAGES), f.bin("lshr", va, PAGE_SHIFT))
    want = Page.SLOW_READ | Page.CACHED
    allowed = f.icmp("eq", f.and_(flags, want), want)
    with f.if_(f.not_(allowed), False):
        f.ret(f.const("i1", 0))
    at = Place(f, port, va)
    few = f.icmp("ult", f.load("i8", at.count_at), WHOLE_PAGE_SECTORS)
    kept = _flag(f, f.load("i8", at.state_at), Sector.KEPT)
    f.do("fence acquire")
    return f.and_(kept, f.or_(few, _flag(f, flags, Page.MIXED)))


class Lanes:
    """What the functions for a warp's lanes have in common."""

    def __init__(self, f: Fn, frame: V, addr: V, mask: V, size: V) -> None:
        self.f, self.addr, self.mask, self.size = f, addr, mask, size
        self.launch = launch_of(f, frame)
        self.port = f.load("ptr", self.launch, Launch.L2)
        self.cache = f.load("ptr", self.port, Port.CACHE)
        self.limit = f.load("i64", self.launch, Launch.LIMIT)
        self.tell = _mode(f, self.cache, Mode.TELL)
        self.first = f.extract(addr, 0)
        self.span = f.mul(size, LANES)

    def in_a_row(self) -> V:
        """Whether all lanes are active and at consecutive places, none of them misaligned."""
        f = self.f
        even = f.add(f.splat(self.first, LANES), f.mul(f.iota("i64", LANES), f.splat(self.size, LANES)))
        apart = f.mask_bits(f.icmp("ne", self.addr, even))
        full = f.and_(f.is_zero(apart), f.icmp("eq", self.mask, -1))
        return f.and_(full, self.aligned(self.first))

    def aligned(self, va: V) -> V:
        f = self.f
        return f.is_zero(f.and_(va, f.sub(self.size, 1)))

    def flags(self, va: V) -> V:
        """The flags of an address's page; it must lie below the limit."""
        f = self.f
        return f.load("i8", f.load("ptr", self.port, Port.PAGES), f.bin("lshr", va, PAGE_SHIFT))

    def row_allows(self, want: V) -> V:
        """Whether consecutive lanes, which reach into two pages at most, are allowed what `want` says, and cached."""
        f = self.f
        last = f.add(self.first, f.sub(self.span, 1))
        out = f.variable(f.const("i1", 0))
        with f.if_(f.and_(f.icmp("ult", last, self.limit), f.icmp("ult", self.first, last))):
            want = f.or_(want, Page.CACHED)
            f.store(f.icmp("eq", f.and_(f.and_(self.flags(self.first), self.flags(last)), want), want), out)
        return f.load("i1", out)

    def whole_sectors(self) -> V:
        """Whether consecutive lanes cover whole sectors, all of them in one page."""
        f = self.f
        last = f.add(self.first, f.sub(self.span, 1))
        page = f.icmp("ult", f.xor(self.first, last), PAGE)
        even = f.is_zero(f.and_(f.or_(self.first, self.span), SECTOR - 1))
        return f.and_(page, even)


@helper("i32", "ptr frame, <32 x i64> addr, i32 mask, i32 info, i32 pc")
def tgx_l2_open(f: Fn, frame: V, addr: V, mask: V, info: V, pc: V) -> V:
    """Lanes that fast checks refused; those that may not.

    If none is left and the access stores, the lock stays taken until tgx_l2_close.
    """
    access = f.and_(f.bin("lshr", info, 16), 0xFF)
    lanes = Lanes(f, frame, addr, mask, f.resize(f.and_(info, 0xFFFF), "i64", False))
    loads = f.icmp("eq", access, Access.READ)
    want = f.select(loads, f.const("i8", Page.SLOW_READ), f.const("i8", Page.SLOW_WRITE))
    with f.if_(f.and_(loads, f.not_(lanes.tell))):
        _peek_lanes(f, lanes)
    f.call_void("tgx_l2_lock", lanes.cache)
    with f.if_(f.and_(f.not_(lanes.tell), lanes.in_a_row())), f.if_(lanes.row_allows(want)):
        _touch_row(f, lanes, access)
        with f.if_(loads):
            f.call_void("tgx_l2_unlock", lanes.cache)
        f.ret(f.const("i32", 0))
    refused = _touch_lanes(f, lanes, want, access, frame, pc)
    with f.if_(f.or_(loads, f.not_zero(refused))):
        f.call_void("tgx_l2_unlock", lanes.cache)
    return refused


def _peek_lanes(f: Fn, lanes: Lanes) -> None:
    """Return at once if all lanes' sectors are kept: what goes meanwhile was loaded before it went."""
    last, kept = f.variable(f.const("i64", -1)), f.variable(f.const("i1", 1))
    with each_lane(f, lanes.mask) as lane:
        va = f.extract(lanes.addr, lane)
        sector = f.bin("lshr", va, SECTOR_SHIFT)
        fresh = f.icmp("ne", sector, f.load("i64", last))
        sound = f.and_(lanes.aligned(va), f.icmp("ult", va, lanes.limit))
        with f.if_(f.not_(sound), False):
            f.store(f.const("i1", 0), kept)
        with f.if_(f.and_(sound, f.and_(fresh, f.load("i1", kept)))):
            f.store(sector, last)
            f.store(f.call("tgx_l2_peek", "i1", 1, lanes.port, va), kept)
    with f.if_(f.load("i1", kept)):
        f.ret(f.const("i32", 0))


def _touch_row(f: Fn, lanes: Lanes, access: V) -> None:
    """Touch the sectors of consecutive lanes of cached memory."""
    loads = f.icmp("eq", access, Access.READ)
    stores = f.icmp("eq", access, Access.WRITE)
    many = f.icmp("uge", lanes.span, WHOLE_PAGE_SECTORS * SECTOR)
    mixed = _flag(f, lanes.flags(lanes.first), Page.MIXED)
    short, slow, done = f.name_of("short"), f.name_of("slow"), f.name_of("done")
    f.condbr(lanes.whole_sectors(), short, slow)
    f.label(short)
    # A store to all of a sector needs nothing of what was there.
    f.leave(stores, done)
    with f.if_(f.and_(f.and_(loads, many), f.not_(mixed))):
        f.call_void("tgx_l2_whole", lanes.port, lanes.first)
        f.br(done)
        f.label(f.name_of("dead"))
    f.br(slow)
    f.label(slow)

    def body(here: V, part: V) -> None:
        f.call("tgx_l2_touch", "i1", 1, lanes.port, here, part, access)

    _sectors(f, lanes.port, lanes.first, lanes.span, body)
    f.br(done)
    f.label(done)


def _stored_row(f: Fn, lanes: Lanes) -> None:
    """Whole sectors of one cached page have been stored to: in one piece through to memory, or dirty from now on."""
    at = Place(f, lanes.port, lanes.first)
    back = _mode(f, at.cache, Mode.BACK)
    with f.if_(f.not_(back)):
        _copy(f, at.memory(lanes.first), at.kept(lanes.first), lanes.span)
    mark = f.select(back, f.const("i8", Sector.KEPT | Sector.DIRTY), f.const("i8", Sector.KEPT))
    with f.for_(f.bin("lshr", lanes.span, SECTOR_SHIFT)) as i:
        state_at = f.gep(at.state_at, i)
        state = f.load("i8", state_at)
        with f.if_(f.not_(_flag(f, state, Sector.KEPT))):
            f.store(f.const("i64", 0), f.gep(at.mask_at, f.mul(i, 8)))
            _counted(f, at, f.const("i8", 1))
        f.store(f.or_(state, mark), state_at)


def _touch_lanes(f: Fn, lanes: Lanes, want: V, access: V, frame: V, pc: V) -> V:
    """Touch each lane's sector; the lanes that may not do what they want."""
    bad, last = f.variable(f.const("i32", 0)), f.variable(f.const("i64", -1))
    allowed = f.alloca("i1")
    with each_lane(f, lanes.mask) as lane:
        va = f.extract(lanes.addr, lane)
        f.store(f.const("i1", 0), allowed)
        with f.if_(f.and_(lanes.aligned(va), f.icmp("ult", va, lanes.limit))):
            f.store(f.not_zero(f.and_(lanes.flags(va), want)), allowed)
        good = f.load("i1", allowed)
        with f.if_(f.not_(good), False):
            f.store(f.or_(f.load("i32", bad), f.bin("shl", f.const("i32", 1), lane)), bad)
        sector = f.bin("lshr", va, SECTOR_SHIFT)
        again = f.and_(f.icmp("eq", sector, f.load("i64", last)), f.not_(lanes.tell))
        with f.if_(f.and_(good, f.not_(again))):
            f.store(sector, last)
            stale = f.call("tgx_l2_touch", "i1", 1, lanes.port, va, lanes.size, access)
            with f.if_(stale, False):
                tag = f.resize(f.load("i32", lanes.launch, Launch.TAG), "i64", False)
                f.call_void("tgx_l2_report", lanes.port, f.const("i32", STALE), f.cast("trunc", lanes.size, "i32"), va,
                            tag, frame, lane, pc)  # fmt: skip
    return f.load("i32", bad)


def _together(f: Fn, launch: V, frame: V) -> V:
    """A number of this launch, this warp and the fences that it has passed; not 0."""
    mixed = f.cast("trunc", f.bin("lshr", f.cast("ptrtoint", frame, "i64"), 6), "i32")
    for value in (f.load("i32", launch, Launch.TAG), f.load("i32", frame, Frame.FENCES)):
        mixed = f.xor(f.mul(mixed, HASH_FACTOR), value)
    odd = f.or_(f.bin("shl", mixed, 1), 1)
    return f.resize(odd, "i64", False)


@helper("void", "ptr frame, <32 x i64> addr, i32 mask, i32 size")
def tgx_l2_close(f: Fn, frame: V, addr: V, mask: V, size: V) -> None:
    """The lanes of an open store or atomic have stored."""
    lanes = Lanes(f, frame, addr, mask, f.resize(size, "i64", False))
    whose = _together(f, lanes.launch, frame)
    row = f.variable(f.const("i1", 0))
    with f.if_(lanes.in_a_row()):
        f.store(lanes.row_allows(f.const("i8", 0)), row)
    in_a_row = f.load("i1", row)
    whole = f.and_(f.and_(in_a_row, f.not_(lanes.tell)), lanes.whole_sectors())
    with f.if_(whole):
        _stored_row(f, lanes)
    with f.if_(f.and_(in_a_row, f.not_(whole))):
        _sectors(f, lanes.port, lanes.first, lanes.span,
                 lambda here, part: f.call_void("tgx_l2_stored", lanes.port, here, part, whose))  # fmt: skip
    last = f.variable(f.const("i64", -1))
    with f.if_(f.not_(in_a_row)), each_lane(f, mask) as lane:
        va = f.extract(addr, lane)
        again = f.icmp("eq", va, f.load("i64", last))
        with f.if_(f.not_(again)):
            f.store(va, last)
            f.call_void("tgx_l2_stored", lanes.port, va, lanes.size, whose)
    f.call_void("tgx_l2_unlock", lanes.cache)


# -- ranges -----------------------------------------------------------------------------------------------------------


def _sectors(
    f: Fn, port: V, va: V, size: V, body: Callable[[V, V], None], page: Callable[[V, V, V], V] | None = None
) -> None:
    """Run the body with address and size of each part of a range that lies in one sector the L2 may keep.

    `page` is asked before, with address, size and flags of the rest of the range that lies in one page: it is true
    where that is done with.
    """
    at, end = f.alloca("i64"), f.add(va, size)
    f.store(va, at)
    pages = f.load("ptr", port, Port.PAGES)
    with f.loop() as (_, done):
        here = f.load("i64", at)
        f.leave(f.icmp("uge", here, end), done)
        after = f.add(_start(f, here), SECTOR)
        stop = f.intr("umin", after, end)
        flags = f.load("i8", pages, f.bin("lshr", here, PAGE_SHIFT))
        f.store(stop, at)
        with f.if_(_flag(f, flags, Page.CACHED | Page.MIXED)):
            if page is None:
                body(here, f.sub(stop, here))
            else:
                last = f.add(f.or_(here, PAGE - 1), 1)
                rest = f.intr("umin", last, end)
                passed = page(here, f.sub(rest, here), flags)
                with f.if_(passed):
                    f.store(rest, at)
                with f.if_(f.not_(passed)):
                    body(here, f.sub(stop, here))


def _passes(f: Fn, here: V, size: V, flags: V) -> V:
    """Whether loads of a page pass: it is kept as a whole."""
    want = f.const("i8", Page.READ | Page.CACHED)
    return f.icmp("eq", f.and_(flags, want), want)


def _touch_range(f: Fn, port: V, va: V, size: V, access: Access, tag: V | None = None) -> None:
    """Touch a range; a load unlocks after it."""
    cache = f.load("ptr", port, Port.CACHE)
    f.call_void("tgx_l2_lock", cache)

    def body(here: V, part: V) -> None:
        stale = f.call("tgx_l2_touch", "i1", 1, port, here, part, f.const("i32", access))
        if tag is not None:
            with f.if_(stale, False):
                f.call_void("tgx_l2_report", port, f.const("i32", STALE), f.cast("trunc", part, "i32"), here, tag,
                            f.const("ptr", 0), f.const("i32", NO_LANE), f.const("i32", 0))  # fmt: skip

    _sectors(f, port, va, size, body, partial(_passes, f) if access == Access.READ else None)
    if access == Access.READ:
        f.call_void("tgx_l2_unlock", cache)


@helper("void", "ptr port, i64 va, i64 size, i64 tag")
def tgx_l2_load(f: Fn, port: V, va: V, size: V, tag: V) -> None:
    """What a range holds is about to be read at its addresses."""
    _touch_range(f, port, va, size, Access.READ, tag)


@helper("void", "ptr port, i64 va, i64 size")
def tgx_l2_begin(f: Fn, port: V, va: V, size: V) -> None:
    """A range is about to be stored to; takes the lock, which tgx_l2_end gives back."""
    _touch_range(f, port, va, size, Access.WRITE)


@helper("void", "ptr port, i64 va, i64 size")
def tgx_l2_end(f: Fn, port: V, va: V, size: V) -> None:
    """The range has been stored to."""
    cache = f.load("ptr", port, Port.CACHE)
    f.store(f.add(f.load("i64", cache, Cache.STORES), 2), cache, Cache.STORES)
    whose = f.and_(f.load("i64", cache, Cache.STORES), 0xFFFFFFFF)
    _sectors(f, port, va, size, lambda here, part: f.call_void("tgx_l2_stored", port, here, part, whose))
    f.call_void("tgx_l2_unlock", f.load("ptr", port, Port.CACHE))


@helper("void", "ptr port, i64 va, i64 size, ptr out")
def tgx_l2_look(f: Fn, port: V, va: V, size: V, out: V) -> None:
    """What a load of the range would see, without being one."""
    cache = f.load("ptr", port, Port.CACHE)
    f.call_void("tgx_l2_lock", cache)
    _copy(f, out, f.pointer(f.add(f.load("i64", port, Port.BASE), va)), size)

    def body(here: V, part: V) -> None:
        at = Place(f, port, here)
        kept = _flag(f, f.load("i8", at.state_at), Sector.KEPT)
        with f.if_(f.and_(at.cached, f.not_(kept))):
            _copy(f, f.gep(out, f.sub(here, va)), at.memory(here), part)

    def page(here: V, part: V, flags: V) -> V:
        """A page is done that is kept as a whole, or of which nothing is kept."""
        at = Place(f, port, here)
        none = f.and_(at.cached, f.is_zero(f.load("i8", at.count_at)))
        with f.if_(none):
            _copy(f, f.gep(out, f.sub(here, va)), at.memory(here), part)
        return f.or_(none, _passes(f, here, part, flags))

    _sectors(f, port, va, size, body, page)
    f.call_void("tgx_l2_unlock", cache)


def _sweep_page(f: Fn, port: V, at: Place, first: V, back: V, drop: V) -> None:
    """Go through the sectors of a page; at once if none of them is dirty."""
    held = [f.load("i64", at.state_at, i, 1, 1) for i in range(0, PAGE_SECTORS, 8)]
    words = reduce(f.or_, held)
    dirty = _flag(f, words, int.from_bytes(bytes([Sector.DIRTY] * 8), "little"))
    with f.if_(f.and_(drop, f.not_(dirty))):
        count = f.load("i8", at.count_at)
        total = f.load("i64", at.cache, Cache.KEPT)
        f.store(f.sub(total, f.resize(count, "i64", False)), at.cache, Cache.KEPT)
        f.store(f.const("i8", 0), at.count_at)
        _fill(f, at.state_at, 0, PAGE_SECTORS)
    with f.if_(dirty), f.for_(f.const("i64", PAGE_SECTORS)) as i:
        here = f.add(first, f.mul(i, SECTOR))
        state_at = f.gep(at.state_at, i)
        with f.if_(f.and_(back, _flag(f, f.load("i8", state_at), Sector.DIRTY))):
            f.call_void("tgx_l2_write_back", port, here)
        clean = f.icmp("eq", f.load("i8", state_at), Sector.KEPT)
        with f.if_(f.and_(drop, clean)):
            f.call_void("tgx_l2_forget", port, here)


@helper("void", "ptr port, i64 va, i64 size, i32 what")
def tgx_l2_sweep(f: Fn, port: V, va: V, size: V, what: V) -> None:
    """Go through the pages of a cached mapping: WRITE_BACK, DROP, or both."""
    back, drop = _flag(f, what, WRITE_BACK), _flag(f, what, DROP)
    cache = f.load("ptr", port, Port.CACHE)
    f.call_void("tgx_l2_lock", cache)
    with f.for_(f.bin("lshr", size, PAGE_SHIFT)) as page:
        first = f.add(va, f.mul(page, PAGE))
        at = Place(f, port, first)
        with f.if_(f.and_(drop, at.cached)):
            flags = f.and_(at.flags, ~Page.READ & 0xFF)
            f.do(f"store atomic {flags}, {at.flag_at} release, align 1")
        kept = f.and_(at.cached, f.not_zero(f.load("i8", at.count_at)))
        with f.if_(kept):
            _sweep_page(f, port, at, first, back, drop)
    f.call_void("tgx_l2_unlock", cache)
