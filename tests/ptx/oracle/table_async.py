"""mbarrier objects, copies that arrive at them, bulk copies and their fences (PTX ISA 9.7.9.25, 9.7.13.15).

An object lies in the lane's 16 bytes of shared memory, what is copied 512 bytes on. Every form gives its object up
at the end. Each has a model beside it, in `MODELS`: plain Python that gives a case's results from its sources.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.oracle import models
from tests.ptx.oracle.form import BYTES, THREADS, Form, rows

SECTION = "9.7.13.15"
PATTERN = 0xDEADBEE0
Model = Callable[..., Any]
MODELS: dict[str, Model] = {}
"""By form: its results, from the sources of a lane, or from those of a warp or block as arrays."""


class Object:
    """An mbarrier object."""

    def __init__(self, count: int) -> None:
        self.pending = self.expected = count
        self.tx = self.phase = 0

    def arrive(self, count: int = 1, tx: int = 0, drops: int = 0) -> tuple[int, int]:
        """Count arrivals; the arrivals that were pending and the phase before."""
        before = self.pending, self.phase
        self.tx += tx
        self.pending -= count
        self.expected -= drops
        assert self.pending >= 0
        self._end()
        return before

    def bytes(self, count: int) -> None:
        """Expect bytes, or complete some where negative."""
        self.tx += count
        self._end()

    def over(self, phase: int) -> int:
        """Whether the phase of this parity is complete."""
        return int(self.phase % 2 != phase % 2)

    def _end(self) -> None:
        if self.pending == self.tx == 0:
            self.phase += 1
            self.pending = self.expected


def made(patterns: str, sources: str, results: str, text: str, model: Model, **more: Any) -> list[Form]:
    """Forms of one text that gives its object up at the end, with their model."""
    forms = rows(SECTION, patterns, sources, results, text=f"{REGISTERS} {text} {GIVE_UP}", **more)
    MODELS.update((form.name, model) for form in forms)
    return forms


def expected(form: Form) -> list[np.ndarray]:
    """What a form's model gives for all threads, as the results are stored."""
    sources, threads = models.sources(form), THREADS[form.scope]
    by_thread = [
        s.reshape(form.threads, -1) if t.startswith("blob") else s for s, t in zip(sources, form.sources, strict=True)
    ]
    columns: list[list[Any]] = [[] for _ in form.results]
    for case in range(form.cases):
        own = [s[case * threads : (case + 1) * threads] for s in by_thread]
        plain = form.scope == "lane"
        given = [s[0] if s.ndim > 1 else int(s[0]) for s in own] if plain else own
        for column, value in zip(columns, MODELS[form.name](*given), strict=True):
            column.extend([value] if plain else value)
    kinds = [np.uint8 if t.startswith("blob") else models.WORDS[BYTES[t]] for t in form.results]
    return [np.array(column, kind) for column, kind in zip(columns, kinds, strict=True)]


def words(blob: np.ndarray) -> list[int]:
    """A blob as 32-bit words."""
    return [int(w) for w in np.ascontiguousarray(blob).view(np.uint32)]


REGISTERS = ".reg .b32 %n, %k, %i, %x; .reg .b64 %st, %u; .reg .pred %y;"
GIVE_UP = "mbarrier.inval.shared.b64 [%m];"
INIT = "mbarrier.init.shared.b64 [%m], %n;"
GENERIC = "cvt.u64.u32 %u, %m; cvta.shared.u64 %u, %u;"
COUNT = "and.b32 %n, %s0, 0xfffff; max.u32 %n, %n, 2;"
PART = "sub.u32 %k, %n, 1; rem.u32 %k, %s1, %k; add.u32 %k, %k, 1;"
REST = "sub.u32 %n, %n, %k;"
FEW = "and.b32 %n, %s0, 3; add.u32 %n, %n, 1;"
PENDING = "mbarrier.arrive.noComplete.shared.b64 %st, [%m], 1; mbarrier.pending_count.b64 {to}, %st;"
TEST = "mbarrier.test_wait.parity.shared.b64 {to}, [%m], {phase};"
BOTH = TEST.format(to="%d0", phase=0) + TEST.format(to="%d1", phase=1)
WAIT = "@@wait: mbarrier.test_wait.parity.shared.b64 %y, [%m], 0; @!%y bra @@wait;"
MOST = 7
ONE = "mbarrier.arrive.shared.b64 _, [%m];"


def count_of(s0: int) -> int:
    return max(s0 & 0xFFFFF, 2)


def part_of(n: int, s1: int) -> int:
    return s1 % (n - 1) + 1


def some(op: str, amount: str = "%k") -> str:
    """`amount` times, up to MOST."""
    return "".join(f"setp.gt.u32 %y, {amount}, {i}; @%y {op}" for i in range(MOST))


def parities(model: Callable[[int, int], Object]) -> Model:
    return lambda s0, s1: (lambda o: (o.over(0), o.over(1)))(model(s0, s1))


def after(count: int, arrivals: int, **more: int) -> Object:
    o = Object(count)
    for _ in range(arrivals):
        o.arrive(**more)
    return o


def counted() -> list[Form]:
    """New objects, arrivals of many kinds, and what is pending."""
    out = made(
        "mbarrier.init{.shared,.shared::cta}.b64",
        "u32",
        "u32",
        f"{COUNT} {{op}} [%m], %n; {PENDING.format(to='%d0')}",
        lambda s0: (count_of(s0),),
    )
    out += made(
        "mbarrier.init.b64",
        "u32",
        "u32",
        f"{COUNT} {GENERIC} {{op}} [%u], %n; {PENDING.format(to='%d0')}",
        lambda s0: (count_of(s0),),
        tag="generic",
    )
    out += made(
        "mbarrier.inval{.shared,.shared::cta}.b64",
        "u32 u32",
        "u32 u32",
        f"{COUNT} {PART} add.u32 %k, %k, 1; {INIT} {{op}} [%m]; st.shared.u32 [%m], %s1;"
        "ld.shared.u32 %d0, [%m];"
        f"mbarrier.init.shared.b64 [%m], %k; {PENDING.format(to='%d1')}",
        lambda s0, s1: (s1, part_of(count_of(s0), s1) + 1),
    )
    noted = "{op} %st, [%m], %k; mbarrier.pending_count.b64 %d0, %st;" + TEST.format(to="%d1", phase=0)
    out += made(
        "mbarrier.{arrive,arrive_drop}.noComplete.shared.b64",
        "u32 u32",
        "u32 pred",
        f"{COUNT} {PART} {INIT} {noted}",
        lambda s0, s1: (count_of(s0), 0),
    )
    out += made(
        "mbarrier.pending_count.b64",
        "u32 u32",
        "u32",
        f"{COUNT} min.u32 %n, %n, 0xffffe; {PART} add.u32 %n, %n, 1; {INIT}"
        "mbarrier.arrive.noComplete.shared.b64 %st, [%m], %k;"
        "mbarrier.arrive.noComplete.shared.b64 %st, [%m], 1; {op} %d0, %st;",
        lambda s0, s1: (lambda n: (n + 1 - part_of(n, s1),))(min(count_of(s0), 0xFFFFE)),
    )
    few = f"{FEW} and.b32 %k, %s1, {MOST}; {INIT}"
    again = parities(lambda s0, s1: after((s0 & 3) + 1, s1 & MOST))
    for op, arch in (
        ("arrive.shared", 80),
        ("arrive.shared::cta", 80),
        ("arrive.release.cta.shared::cta", 80),
        ("arrive.release.cluster.shared::cta", 90),
        ("arrive.release.cluster.shared::cluster", 90),
        ("arrive.shared::cluster", 90),
    ):
        out += made(
            f"mbarrier.{op}.b64", "u32 u32", "pred pred", f"{few} {some('{op} _, [%m];')} {BOTH}", again, arch=arch
        )
    out += made(
        "mbarrier.arrive.b64",
        "u32 u32",
        "pred pred",
        f"{few} {GENERIC} {some('{op} %st, [%u];')} {BOTH}",
        again,
        tag="generic",
    )
    for space in ("shared", "shared::cta", "release.cta.shared::cta"):
        out += made(
            f"mbarrier.arrive.{space}.b64",
            "u32 u32",
            "pred pred",
            f"{COUNT} {PART} {INIT} {{op}} %st, [%m], %k; {TEST.format(to='%d0', phase=0)} {REST}"
            f"{{op}} %st, [%m], %n; {TEST.format(to='%d1', phase=0)}",
            lambda s0, s1: (0, 1),
            arch=90,
            tag="of a count",
        )
    # After one arrival that is dropped the object expects one less.
    dropped = f"{few} add.u32 %n, %n, 1; {INIT}"
    out += made(
        "mbarrier.arrive_drop{.shared,.shared::cta,.release.cta.shared::cta}.b64",
        "u32 u32",
        "pred pred",
        f"{dropped} {{op}} %st, [%m]; {some(ONE)} {BOTH}",
        parities(lambda s0, s1: _dropped((s0 & 3) + 2, 1, s1 & MOST)),
    )
    out += made(
        "mbarrier.arrive_drop.shared.b64",
        "u32 u32",
        "pred pred",
        f"{dropped} sub.u32 %n, %n, 1; {{op}} %st, [%m], %n; {some(ONE)} {BOTH}",
        parities(lambda s0, s1: _dropped((s0 & 3) + 2, (s0 & 3) + 1, s1 & MOST)),
        arch=90,
        tag="of a count",
    )
    return out


def _dropped(count: int, drops: int, arrivals: int) -> Object:
    o = Object(count)
    o.arrive(drops, drops=drops)
    for _ in range(arrivals):
        o.arrive()
    return o


def waited() -> list[Form]:
    """Waits for a state, whose phase is this one or the last, and for a parity."""
    first = f"{FEW} and.b32 %k, %s1, {MOST}; {INIT} {some(ONE)}"
    by_state = (
        f"{first} mbarrier.arrive.shared.b64 %st, [%m]; rem.u32 %k, %s2, %n;{some(ONE)} {{op}} %d0, [%m], %st{{tail}};"
    )
    by_parity = f"{first} and.b32 %k, %s2, 1; {{op}} %d0, [%m], %k{{tail}};"

    def state(s0: int, s1: int, s2: int) -> tuple[int]:
        o = after((s0 & 3) + 1, s1 & MOST)
        _, phase = o.arrive()
        for _ in range(s2 % ((s0 & 3) + 1)):
            o.arrive()
        return (int(o.phase > phase),)

    def parity(s0: int, s1: int, s2: int) -> tuple[int]:
        return (after((s0 & 3) + 1, s1 & MOST).over(s2 & 1),)

    out = []
    for kind, text, model in (("", by_state, state), (".parity", by_parity, parity)):
        for op, arch in (("test_wait", 80), ("try_wait", 90)):
            for how in (".shared", ".shared::cta", ".acquire.cta.shared::cta", ".acquire.cluster.shared::cta"):
                least = 90 if "cluster" in how else arch
                out += made(
                    f"mbarrier.{op}{kind}{how}.b64",
                    "u32 u32 u32",
                    "pred",
                    text.replace("{tail}", ""),
                    model,
                    arch=least,
                )
        out += made(
            f"mbarrier.try_wait{kind}.shared.b64",
            "u32 u32 u32",
            "pred",
            text.replace("{tail}", ", 40"),
            model,
            arch=90,
            tag="with a time",
        )
        generic = text.replace("{tail}", "").replace("[%m], %st;", "[%u], %st;").replace("[%m], %k;", "[%u], %k;")
        out += made(
            f"mbarrier.test_wait{kind}.b64", "u32 u32 u32", "pred", f"{GENERIC} {generic}", model, tag="generic"
        )
    return out


def bytes_expected() -> list[Form]:
    """Transactions: bytes that are expected, and completed in two parts."""
    tests = [TEST.format(to=f"%d{i}", phase=0) for i in range(3)]
    done = "mbarrier.complete_tx.shared.b64 [%m], {n};"
    one = f"{COUNT} {PART} mbarrier.init.shared.b64 [%m], 1;"
    two = f"{COUNT} {PART} mbarrier.init.shared.b64 [%m], 2;"
    finish = f"{tests[0]} {done.format(n='%k')} {tests[1]} {REST} {done.format(n='%n')} {tests[2]}"

    def both(s0: int, s1: int) -> tuple[int, int, int]:
        return 0, 0, 1

    out = []
    for op in (
        "arrive.expect_tx.shared",
        "arrive.expect_tx.shared::cta",
        "arrive.expect_tx.release.cta.shared::cta",
        "arrive.expect_tx.release.cluster.shared::cluster",
    ):
        out += made(
            f"mbarrier.{op}.b64", "u32 u32", "pred pred pred", f"{one} {{op}} _, [%m], %n; {finish}", both, arch=90
        )
    out += made(
        "mbarrier.arrive.expect_tx.b64",
        "u32 u32",
        "pred pred pred",
        f"{one} {GENERIC} {{op}} %st, [%u], %n; {finish}",
        both,
        arch=90,
        tag="generic",
    )
    out += made(
        "mbarrier.arrive_drop.expect_tx.shared.b64",
        "u32 u32",
        "pred pred pred",
        f"{two} mbarrier.arrive.shared.b64 _, [%m]; {{op}} %st, [%m], %n; {finish}",
        both,
        arch=90,
    )
    out += made(
        "mbarrier.expect_tx{.shared,.relaxed.cta.shared::cta,.relaxed.cluster.shared::cluster}.b64",
        "u32 u32",
        "pred pred pred",
        f"{two} {{op}} [%m], %n; mbarrier.arrive.shared.b64 _, [%m], 2; {finish}",
        both,
        arch=90,
    )
    out += made(
        "mbarrier.complete_tx{.shared,.relaxed.cta.shared::cta,.relaxed.cluster.shared::cluster}.b64",
        "u32 u32",
        "pred pred pred",
        f"{one} mbarrier.arrive.expect_tx.shared.b64 _, [%m], %n; {tests[0]} {{op}} [%m], %k;"
        f"{tests[1]} {REST} {{op}} [%m], %n; {tests[2]}",
        both,
        arch=90,
        tag="in parts",
    )
    out += made(
        "mbarrier.complete_tx.shared.b64",
        "u32 u32",
        "pred pred pred",
        f"{two} {{op}} [%m], %k; mbarrier.arrive.shared.b64 _, [%m]; {tests[0]}"
        f"mbarrier.arrive.expect_tx.shared.b64 _, [%m], %n; {tests[1]} {REST} {{op}} [%m], %n; {tests[2]}",
        both,
        arch=90,
        tag="before they are expected",
    )
    return out


FILL = "".join(f"st.shared.b32 [%m+{512 + 4 * i}], {PATTERN + i};" for i in range(4))
READ = "".join(f"ld.shared.b32 %d{i}, [%m+{512 + 4 * i}];" for i in range(4))
READY = f"mbarrier.init.shared.b64 [%m], 1; fence.mbarrier_init.release.cluster; {FILL} fence.proxy.async;"
WHOLLY = "cp.async.bulk.wait_group 0"
POLICY = "createpolicy.fractional.L2::{kind}.b64 %st, 1.0;"
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
STORE = "cp.async.bulk.global.shared::cta.bulk_group"
KEPT = "st.shared.v4.b32 [%m+512], {%s0, %s1, %s2, %s3}; fence.proxy.async.shared::cta;"
WHOLE = (
    f"mov.u32 %x, %laneid; shl.b32 %i, %x, 4; cvt.u64.u32 %u, %i; sub.u64 %u, %p0, %u; sub.u32 %i, %m, %i; {FILL}"
    "and.b32 %k, %s1, 31; add.u32 %k, %k, 1; shl.b32 %k, %k, 4; setp.eq.u32 %y, %x, 0;"
    "@%y mbarrier.init.shared.b64 [%m], 1; @%y fence.mbarrier_init.release.cluster; fence.proxy.async;"
    "bar.warp.sync 0xffffffff; @%y mbarrier.arrive.expect_tx.shared.b64 _, [%m], %k;"
    "@%y {op} [%m+512], [%u], %k, [%m]; @@wait: mbarrier.{wait}.parity.shared.b64 %y, [%i], 0; @!%y bra @@wait;"
    f"{READ} bar.warp.sync 0xffffffff; setp.ne.u32 %y, %x, 0; @%y mbarrier.init.shared.b64 [%m], 1;"
)
"""The first lane copies some of what the warp's lanes have side by side; all wait for its object."""


def _whole(blobs: np.ndarray, sizes: np.ndarray) -> list[np.ndarray]:
    found = np.tile(np.arange(PATTERN, PATTERN + 4, dtype=np.uint32), (32, 1))
    count = int(sizes[0] & 31) + 1
    found[:count] = np.ascontiguousarray(blobs).view(np.uint32)[:count]
    return list(found.T)


def copied() -> list[Form]:
    """Copies of 16 bytes by lanes that arrive at an object; bulk copies both ways, their groups and the prefetch."""
    out = []
    lanes = f"{FILL} cp.async.cg.shared.global [%m+512], [%p0], 16;"
    for noinc in ("", ".noinc"):
        # Without .noinc the arrival is counted out before, so that one of our own has to come.
        own = "" if noinc else "mbarrier.arrive.shared.b64 _, [%m];"
        for space in (".shared", ".shared::cta"):
            out += made(
                f"cp.async.mbarrier.arrive{noinc}{space}.b64",
                "blob16",
                "b32 b32 b32 b32",
                f"mbarrier.init.shared.b64 [%m], 1; {lanes} {{op}} [%m]; {own} {WAIT} {READ}",
                words,
            )
    bulk = (
        f"{READY} mbarrier.arrive.expect_tx.shared.b64 _, [%m], 16;"
        f"{{op}} [%m+512], [%p0], 16, [%m]{{tail}}; {WAIT} {READ}"
    )
    out += made(LOAD, "blob16", "b32 b32 b32 b32", bulk.replace("{tail}", ""), words, arch=90)
    for kind in ("evict_first", "evict_last"):
        out += made(
            f"{LOAD}.L2::cache_hint",
            "blob16",
            "b32 b32 b32 b32",
            POLICY.format(kind=kind) + bulk.replace("{tail}", ", %st"),
            words,
            arch=90,
            tag=kind,
        )
    for wait in ("test_wait", "try_wait"):
        out += made(
            LOAD,
            "blob16 u32:wlow",
            "b32 b32 b32 b32",
            WHOLE.replace("{wait}", wait),
            _whole,
            arch=90,
            scope="warp",
            tag=f"for a warp, {wait}",
        )
    stored = f"mbarrier.init.shared.b64 [%m], 1; {KEPT}"
    one = f"{stored} {{op}} [%q0], [%m+512], 16{{tail}}; cp.async.bulk.commit_group; {{wait}};"
    values = "b32 b32 b32 b32"
    for wait in (WHOLLY, "cp.async.bulk.wait_group.read 0"):
        text = one.replace("{tail}", "").replace("{wait}", wait)
        out += made(STORE, values, "blob16", text, _blob, arch=90, rule="bits", tag=wait.removeprefix("cp.async.bulk."))
    out += made(
        f"{STORE}.L2::cache_hint",
        values,
        "blob16",
        POLICY.format(kind="evict_first") + one.replace("{tail}", ", %st").replace("{wait}", WHOLLY),
        _blob,
        arch=90,
        rule="bits",
    )
    # The first group is read before its source is stored over; the second one's wait ends both.
    groups = (
        f"{stored} {STORE} [%q0], [%m+512], 16; cp.async.bulk.commit_group;"
        f"{STORE} [%q1], [%m+512], 16; cp.async.bulk.commit_group;"
        "{op} 1; {op} 0;"
    )
    out += made(
        "cp.async.bulk.wait_group{,.read}",
        values,
        "blob16 blob16",
        groups,
        lambda *v: _blob(*v) * 2,
        arch=90,
        rule="bits",
        tag="two groups",
    )
    fetch = "mbarrier.init.shared.b64 [%m], 1; {op} [%p0], 16{tail}; ld.global.b32 %d0, [%p0];"
    out += made(
        "cp.async.bulk.prefetch.L2.global",
        "blob16",
        "b32",
        fetch.replace("{tail}", ""),
        lambda blob: words(blob)[:1],
        arch=90,
    )
    out += made(
        "cp.async.bulk.prefetch.L2.global.L2::cache_hint",
        "blob16",
        "b32",
        POLICY.format(kind="evict_last") + fetch.replace("{tail}", ", %st"),
        lambda blob: words(blob)[:1],
        arch=90,
    )
    return out


def _blob(*values: int) -> tuple[np.ndarray]:
    return (np.array(values, np.uint32).view(np.uint8),)


BLOCK = (
    "setp.eq.u32 %y, %th, 0; @%y mbarrier.init.shared.b64 [%sm+8], 128; bar.sync 0; st.shared.b32 [%m], %s0;"
    "mbarrier.arrive.shared.b64 %st, [%sm+8]; @@wait: {op} %y, [%sm+8], %st; @!%y bra @@wait;"
    "xor.b32 %i, %th, 127; mad.lo.u32 %i, %i, 16, %sm; ld.shared.b32 %d0, [%i]; bar.sync 0;"
    "setp.eq.u32 %y, %th, 0; @%y mbarrier.inval.shared.b64 [%sm+8]; bar.sync 0; mbarrier.init.shared.b64 [%m], 1;"
)
"""Each thread reads what the one on the other side of the block stored before it arrived."""
FENCED = "mbarrier.init.shared.b64 [%m], 1; st.global.b32 [%c], %s0; {op}; ld.global.b32 %d0, [%c];"

FORMS = [
    *counted(),
    *waited(),
    *bytes_expected(),
    *copied(),
    *made("mbarrier.test_wait.shared.b64", "b32", "b32", BLOCK, lambda s: [s[::-1]], scope="cta", tag="of a block"),
    *made(
        "mbarrier.try_wait.shared.b64", "b32", "b32", BLOCK, lambda s: [s[::-1]], scope="cta", tag="of a block", arch=90
    ),
    *made("fence.mbarrier_init.release.cluster fence.acq_rel.cluster", "b32", "b32", FENCED, lambda s: (s,), arch=90),
    *made("fence.proxy.async{,.global,.shared::cta,.shared::cluster}", "b32", "b32", FENCED, lambda s: (s,), arch=90),
]
