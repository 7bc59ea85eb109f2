"""Bulk copies and mbarriers: when bytes arrive, who is told, what is refused, and what ends a launch."""

import struct

import numpy as np
import pytest

from tegrad import ptx

RNG = np.random.default_rng(90)
PAGE = 4096
SEEDS = range(1, 9)


def module(body: str, shared: int = 2048, target: str = "sm_90") -> ptx.LoadedKernel:
    """A kernel of three pointers: %out, %in and %more; %t is the thread, %first a predicate of thread 0."""
    return ptx.load(
        f""".version 8.5
.target {target}
.address_size 64
.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2)
{{
.reg .b64 %out, %in, %more, %o, %a, %st; .reg .b32 %t, %w, %x, %y, %z, %m; .reg .pred %first, %p, %q;
.shared .align 16 .b8 sm[{shared}]; .shared .align 8 .b64 bar; .shared .align 8 .b64 two;
ld.param.u64 %out, [p0]; ld.param.u64 %in, [p1]; ld.param.u64 %more, [p2];
mov.u32 %t, %tid.x; setp.eq.u32 %first, %t, 0; shr.u32 %w, %t, 5; mul.wide.u32 %o, %t, 4;
shl.b32 %m, %t, 2; mov.u32 %x, sm; add.u32 %m, %m, %x; add.u64 %o, %o, %out;
{body}
ret;
}}""",
        None,
    ).kernels["k"]


def aligned(size: int, fill: int = 0) -> np.ndarray:
    raw = np.full(size + PAGE, fill, np.uint8)
    return raw[-raw.ctypes.data % PAGE :][:size]


INIT = "@%first mbarrier.init.shared.b64 [bar], 1; @%first fence.mbarrier_init.release.cluster; bar.sync 0;"
FETCH = """@%first mbarrier.arrive.expect_tx.shared.b64 _, [bar], 512;
@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [sm], [%in], 512, [bar];"""
AWAIT = "@L: mbarrier.{wait}.parity.shared.b64 %p, [bar], 0; @!%p bra @L;".replace("@L", "AGAIN")


def early_and_late(seed: int, fetch: str = FETCH) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What threads read of a slot before they wait for its copy, what they read after, and what was copied."""
    k = module(
        f"""st.shared.u32 [%m], 7; {INIT} {fetch} bar.sync 0; ld.shared.u32 %y, [%m]; st.global.u32 [%o], %y;
        bar.sync 0; {AWAIT.replace("{wait}", "try_wait")} ld.shared.u32 %y, [%m]; st.global.u32 [%o+512], %y;"""
    )
    source, out = aligned(512).view(np.uint32), np.zeros(256, np.uint32)
    source[:] = RNG.integers(8, 1 << 32, 128)
    stats = k.launch((1, 1, 1), (128, 1, 1), [out, source, 0], seed=seed)
    assert stats.bytes_read == 512 + 2 * 512
    return out[:128], out[128:], source


@pytest.mark.parametrize("space", ["shared::cluster", "shared::cta"])
def test_a_copy_is_not_there_before_it_is_waited_for(space: str) -> None:
    before, after, source = early_and_late(0, FETCH.replace("shared::cluster", space))
    assert (before == 7).all()
    assert (after == source).all()


def test_with_seeds_a_copy_may_be_there_at_once() -> None:
    seen = set()
    for seed in SEEDS:
        before, after, source = early_and_late(seed)
        assert (after == source).all()
        assert (before == 7).all() or (before == source).all()
        seen.add(bool((before == 7).all()))
    assert seen == {True, False}


def test_copies_of_one_mbarrier_come_in_any_order() -> None:
    """A wait that fails lets one of them land, so that who looks too early finds some; with seeds any of them."""
    k = module(
        f"""st.shared.u32 [%m], 7; {INIT}
        @%first mbarrier.arrive.expect_tx.shared.b64 _, [bar], 512; mov.u32 %x, sm;
        {
            "".join(
                f'''@%first cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes
                     [%x+{16 * i}], [%in+{16 * i}], 16, [bar];'''
                for i in range(32)
            )
        }
        bar.sync 0; mbarrier.test_wait.parity.shared.b64 %p, [bar], 0;
        ld.shared.u32 %y, [%m]; st.global.u32 [%o], %y;
        {AWAIT.replace("{wait}", "test_wait")} ld.shared.u32 %y, [%m]; st.global.u32 [%o+512], %y;"""
    )
    source = aligned(512).view(np.uint32)
    source[:] = RNG.integers(8, 1 << 32, 128)
    orders = set()
    for seed in (0, *SEEDS):
        out = np.zeros(256, np.uint32)
        k.launch((1, 1, 1), (128, 1, 1), [out, source, 0], seed=seed)
        assert (out[128:] == source).all()
        there = out[:4] != 7
        orders.add(tuple(np.flatnonzero(out[:32:4] != 7)))
        assert seed or (there.all() and (out[4:32] == 7).all())
    assert len(orders) > 2


TILES = 37
RIGHT = {
    "await": "WAIT: mbarrier.test_wait.parity.shared.b64 %p, [%full], %odd; @!%p bra WAIT;",
    "free": "xor.b32 %odd, %odd, 1; FREE: mbarrier.test_wait.parity.shared.b64 %p, [%free], %odd; @!%p bra FREE;",
    "read": "ld.shared.u32 %y, [%x]; mbarrier.arrive.shared.b64 _, [%free];",
}
MISTAKES = {
    "reads before the tile is there": {
        "await": "ld.shared.u32 %y, [%x];" + RIGHT["await"],
        "read": "mbarrier.arrive.shared.b64 _, [%free];",
    },
    "lets go of the slot before it reads it": {
        "read": "mbarrier.arrive.shared.b64 _, [%free]; ld.shared.u32 %y, [%x];"
    },
}


def ring(**parts: str) -> bool:
    """Whether three warps, without a wait for each other, sum up all tiles that a fourth one copies to two slots."""
    part = {**RIGHT, **parts}
    k = module(
        f"""
        .shared .align 8 .b64 empty; .shared .align 8 .b64 empty2; .reg .b32 %n, %slot, %odd, %full, %free, %at, %s;
        @%first mbarrier.init.shared.b64 [bar], 1; @%first mbarrier.init.shared.b64 [two], 1;
        @%first mbarrier.init.shared.b64 [empty], 96; @%first mbarrier.init.shared.b64 [empty2], 96;
        @%first fence.mbarrier_init.release.cluster; bar.sync 0; mov.u32 %n, 0; mov.u32 %s, 0;
        TILE: and.b32 %slot, %n, 1; shr.u32 %odd, %n, 1; and.b32 %odd, %odd, 1;
        setp.eq.u32 %p, %slot, 1; mov.u32 %x, bar; mov.u32 %y, two; selp.u32 %full, %y, %x, %p;
        mov.u32 %x, empty; mov.u32 %y, empty2; selp.u32 %free, %y, %x, %p;
        mov.u32 %at, sm; mad.lo.u32 %at, %slot, 512, %at;
        setp.eq.u32 %p, %w, 3; @%p bra FILL;
        mad.lo.u32 %x, %t, 4, %at; {part["await"]} {part["read"]} mad.lo.u32 %s, %s, 3, %y; bra NEXT;
        FILL: and.b32 %x, %t, 31; setp.ne.u32 %p, %x, 0; @%p bra NEXT; {part["free"]}
        mbarrier.arrive.expect_tx.shared.b64 _, [%full], 512; mul.wide.u32 %a, %n, 512; add.u64 %a, %a, %in;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%at], [%a], 512, [%full];
        NEXT: add.u32 %n, %n, 1; setp.lt.u32 %p, %n, {TILES}; @%p bra TILE;
        st.global.u32 [%o], %s;"""
    )
    source = aligned(512 * TILES).view(np.uint32)
    source[:] = RNG.integers(0, 1 << 32, 128 * TILES)
    wanted = np.zeros(96, np.uint32)
    for tile in source.reshape(TILES, 128)[:, :96]:
        wanted = wanted * np.uint32(3) + tile
    for seed in (0, *SEEDS):
        out = np.zeros(128, np.uint32)
        k.launch((1, 1, 1), (128, 1, 1), [out, source, 0], seed=seed)
        if (out[:96] != wanted).any():
            return False
    return True


@pytest.mark.parametrize("wait", ["test_wait", "try_wait"])
def test_waiting_warps_let_the_one_they_wait_for_run(wait: str) -> None:
    assert ring(**{name: text.replace("test_wait", wait) for name, text in RIGHT.items()})


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_ring_show(mistake: str) -> None:
    assert not ring(**MISTAKES[mistake])


def test_a_copy_to_global_memory_reads_its_source_late_and_only_then() -> None:
    k = module(
        """st.shared.u32 [%m], %t; fence.proxy.async.shared::cta; bar.sync 0; mov.u32 %x, sm;
        @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [sm], 256;
        @%first cp.async.bulk.commit_group;
        @%first cp.async.bulk.global.shared::cta.bulk_group [%out+256], [%x+256], 256;
        @%first cp.async.bulk.commit_group;
        @%first cp.async.bulk.wait_group.read 1;
        bar.sync 0; st.shared.u32 [%m], 9; bar.sync 0;
        @%first ld.global.u32 %y, [%out+256]; @%first st.global.u32 [%more], %y;
        @%first cp.async.bulk.wait_group 0;"""
    )
    out, seen = aligned(512, 0xFF).view(np.uint32), np.zeros(1, np.uint32)
    assert k.launch((1, 1, 1), (128, 1, 1), [out, 0, seen]).bytes_written == 128 * 8 + 512 + 4
    assert (out[:64] == np.arange(64)).all(), "of the group that was waited for, what it held when it was copied"
    assert (out[64:] == 9).all(), "of the other one, what was there when it was read"
    assert seen[0] == 0xFFFFFFFF


def test_a_copy_that_nobody_waits_for_comes_all_the_same() -> None:
    """Another CTA polls what it brings; and at the end of the grid all of it is there."""
    k = module(
        """.reg .b32 %c; mov.u32 %c, %ctaid.x; st.shared.u32 [%m], 5; fence.proxy.async; bar.sync 0;
        setp.eq.u32 %p, %c, 1; @%p bra POLL;
        @%first cp.async.bulk.global.shared::cta.bulk_group [%out], [sm], 128;
        @%first cp.async.bulk.global.shared::cta.bulk_group [%more], [sm], 128;
        STAY: ld.volatile.global.u32 %y, [%in]; setp.eq.u32 %p, %y, 0; @%p bra STAY;
        @%first cp.async.bulk.global.shared::cta.bulk_group [%out+128], [sm], 128;
        ret;
        POLL: ld.volatile.global.u32 %y, [%out]; setp.ne.u32 %p, %y, 5; @%p bra POLL;
        st.global.u32 [%in], 1;"""
    )
    out, flag, more = (aligned(256).view(np.uint32) for _ in range(3))
    k.launch((2, 1, 1), (32, 1, 1), [out, flag, more], threads=1)
    assert (out == 5).all()
    assert (more[:32] == 5).all()


def test_copies_of_16_bytes_arrive_at_an_mbarrier() -> None:
    """Warp 0 copies and arrives for each of its lanes; warp 1 waits, and finds nothing before."""
    for noinc, count in ((".noinc", 32), ("", 1)):
        k = module(
            f"""st.shared.u32 [%m], 7; @%first mbarrier.init.shared.b64 [bar], {count}; bar.sync 0;
            setp.eq.u32 %p, %w, 1; @%p bra READ;
            mad.lo.u32 %x, %t, 12, %m; mul.wide.u32 %a, %t, 16; add.u64 %a, %a, %in;
            cp.async.cg.shared.global [%x], [%a], 16; cp.async.mbarrier.arrive{noinc}.shared.b64 [bar];
            bar.sync 0; {"@%first mbarrier.arrive.shared.b64 %st, [bar];" if count == 1 else ""} ret;
            READ: bar.sync 0; ld.shared.u32 %y, [%m]; st.global.u32 [%o], %y;
            {AWAIT.replace("{wait}", "test_wait")} ld.shared.u32 %y, [%m]; st.global.u32 [%o+256], %y;""",
            target="sm_80",
        )
        source, out = aligned(512).view(np.uint32), np.zeros(128, np.uint32)
        source[:] = RNG.integers(8, 1 << 32, 128)
        k.launch((1, 1, 1), (64, 1, 1), [out, source, 0])
        assert (out[32:64] == 7).all()
        assert (out[96:] == source[32:64]).all()


def test_generic_addresses_name_the_same_objects() -> None:
    k = module(
        """.reg .b64 %g; cvt.u64.u32 %g, bar; cvta.shared.u64 %g, %g; @%first mbarrier.init.b64 [%g], 3; bar.sync 0;
        mbarrier.arrive.noComplete.b64 %st, [%g], 2; mbarrier.pending_count.b64 %x, %st;
        mbarrier.arrive.b64 %st, [%g]; mbarrier.test_wait.b64 %p, [%g], %st; selp.u32 %y, 1, 0, %p;
        mbarrier.try_wait.parity.shared.b64 %q, [bar], 1; selp.u32 %z, 1, 0, %q;
        mad.lo.u32 %x, %x, 4, %y; mad.lo.u32 %x, %z, 2, %x; st.global.u32 [%o], %x;""".replace(
            "cvt.u64.u32 %g, bar;", "mov.u32 %x, bar; cvt.u64.u32 %g, %x;"
        )
    )
    out = np.zeros(1, np.uint32)
    k.launch((1, 1, 1), (1, 1, 1), [out, 0, 0])
    assert out[0] == 3 * 4 + 1, "three were pending; the phase is over, and the one before it is not the last one"


FAULTS = {
    "the copy's target": ("[%x+8], [%in], 16, [bar]", "misaligned", "write"),
    "the copy's source": ("[%x], [%in+8], 16, [bar]", "misaligned", "read"),
    "the copy's size": ("[%x], [%in], 24, [bar]", "misaligned", "read"),
    "its object": ("[%x], [%in], 16, [%x+20]", "misaligned", "atomic"),
    "beyond shared memory": ("[%x+2032], [%in], 1024, [bar]", "out-of-range", "write"),
    "an object beyond shared memory": ("[%x], [%in], 16, [%x+4096]", "out-of-range", "atomic"),
    "an unmapped page": ("[%x], [%in+3072], 2048, [bar]", "unmapped", "read"),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_copy_that_silicon_refuses_ends_the_launch(what: str) -> None:
    operands, kind, access = FAULTS[what]
    bulk = f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes {operands};"
    k = module(f"mov.u32 %x, sm; {INIT} @%first {bulk}")
    memory, pages = aligned(8 * PAGE), np.zeros(8, np.uint8)
    pages[2] = 3
    with pytest.raises(ptx.PtxFault) as caught:
        k.launch((1, 1, 1), (64, 1, 1), struct.pack("<QQQ", 0, 2 * PAGE, 0),
                 memory=ptx.Memory(memory.ctypes.data, pages.ctypes.data, 8 * PAGE))  # fmt: skip
    fault = caught.value
    assert (fault.kind, fault.access, fault.lane, fault.warp) == (kind, access, 0, 0)
    assert "cp.async.bulk" in fault.source
    if kind == "unmapped":
        assert fault.address == 3 * PAGE


def test_a_cta_that_ends_before_its_copy_has_come_ends_the_launch() -> None:
    """On silicon it would write to shared memory that is another CTA's by then."""
    source = aligned(512)
    with pytest.raises(ptx.PtxFault, match=r"illegal .* cp\.async\.bulk"):
        module(f"{INIT} {FETCH}").launch((1, 1, 1), (32, 1, 1), [0, source, 0])


def test_a_copy_into_read_only_memory_ends_the_launch() -> None:
    k = module("@%first cp.async.bulk.global.shared::cta.bulk_group [%in+4080], [sm], 32;")
    memory, pages = aligned(4 * PAGE), np.array([0, 3, 1, 0], np.uint8)
    with pytest.raises(ptx.PtxFault) as caught:
        k.launch((1, 1, 1), (32, 1, 1), struct.pack("<QQQ", 0, PAGE, 0),
                 memory=ptx.Memory(memory.ctypes.data, pages.ctypes.data, 4 * PAGE))  # fmt: skip
    assert (caught.value.kind, caught.value.address) == ("read-only", 2 * PAGE)


ILLEGAL = {
    "no object": "mbarrier.arrive.shared.b64 %st, [two];",
    "an object that was given up": "mbarrier.inval.shared.b64 [bar]; mbarrier.arrive.shared.b64 %st, [bar];",
    "a wait without an object": "mbarrier.test_wait.parity.shared.b64 %p, [two], 0;",
    "more arrivals than are pending": "mbarrier.arrive.shared.b64 %st, [bar], 2;",
    "too many bytes": "mbarrier.expect_tx.relaxed.cta.shared.b64 [bar], 1048576;",
    "no arrivals to wait for": "mbarrier.init.shared.b64 [two], 0;",
    "too many arrivals to wait for": "mbarrier.init.shared.b64 [two], 1048576;",
}


@pytest.mark.parametrize("what", ILLEGAL)
def test_what_the_isa_leaves_undefined_ends_the_launch(what: str) -> None:
    with pytest.raises(ptx.PtxFault, match="mbarrier") as caught:
        module(f"{INIT} @%first bra GO; ret; GO: {ILLEGAL[what]}").launch((1, 1, 1), (32, 1, 1), [0, 0, 0])
    assert caught.value.kind == "illegal"


def test_memory_may_be_anything_after_an_object_was_given_up() -> None:
    k = module(
        f"""{INIT} @%first mbarrier.inval.shared.b64 [bar]; bar.sync 0; st.shared.u32 [bar], 17; bar.sync 0;
        @%first mbarrier.init.shared.b64 [bar], 32; bar.sync 0; mbarrier.arrive.shared.b64 %st, [bar];
        mbarrier.test_wait.parity.shared.b64 %p, [bar], 0; selp.u32 %y, 1, 0, %p; st.global.u32 [%o], %y;"""
    )
    out = np.zeros(32, np.uint32)
    k.launch((1, 1, 1), (32, 1, 1), [out, 0, 0])
    assert (out == 1).all()


FORMS = """mbarrier.init.shared.b64 [%x], %y;
mbarrier.inval.shared::cta.b64 [%x];
mbarrier.arrive.shared.b64 %st, [%x];
mbarrier.arrive.shared.b64 %st, [%x], %y;
mbarrier.arrive.noComplete.shared.b64 %st, [%x], %y;
mbarrier.arrive.release.cta.shared::cta.b64 %st, [%x];
mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%x];
mbarrier.arrive.expect_tx.shared.b64 _, [%x], %y;
mbarrier.expect_tx.relaxed.cta.shared.b64 [%x], %y;
mbarrier.complete_tx.shared.b64 [%x], %y;
mbarrier.arrive_drop.shared.b64 %st, [%x];
mbarrier.arrive_drop.shared.b64 %st, [%x], %y;
mbarrier.arrive_drop.expect_tx.shared.b64 %st, [%x], %y;
mbarrier.test_wait.shared.b64 %p, [%x], %st;
mbarrier.test_wait.parity.acquire.cluster.shared::cta.b64 %p, [%x], %y;
mbarrier.try_wait.shared.b64 %p, [%x], %st;
mbarrier.try_wait.parity.shared.b64 %p, [%x], %y, %y;
mbarrier.pending_count.b64 %y, %st;
cp.async.mbarrier.arrive.noinc.shared.b64 [%x];
fence.mbarrier_init.release.cluster;
fence.proxy.async;
fence.proxy.async.shared::cta;
fence.proxy.alias;
fence.acq_rel.cluster;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%x], [%a], %y, [%x];
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%x], [%a], %y, [%x], %st;
cp.async.bulk.global.shared::cta.bulk_group [%a], [%x], %y;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 1;
cp.async.bulk.prefetch.L2.global [%a], %y;
createpolicy.fractional.L2::evict_first.b64 %st, 1.0;""".splitlines()


@pytest.mark.board
@pytest.mark.parametrize("target", ["sm_87", "sm_90"])
def test_forms_of_a_younger_chip_are_refused_as_nvidias_assembler_does(target: str) -> None:
    from tegrad.nv.toolchain import CompileFailed, nvjitlink

    def refusal(text: str, ours: bool) -> str:
        try:
            ptx.load(text, None) if ours else nvjitlink().compile(text, target)
        except (ptx.PtxError, CompileFailed) as error:
            return str(error)
        return ""

    refused = 0
    for form in FORMS:
        text = module(form).module.source.text.replace("sm_90", target)
        said = refusal(text, True)
        assert bool(said) == bool(refusal(text, False)), form
        assert not said or form.split()[0].rstrip(";") in said
        refused += bool(said)
    assert refused == (len(FORMS) - 11 if target == "sm_87" else 0)


@pytest.mark.parametrize(
    "form",
    [
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%x], [%a], 16, [%x], %h;",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%x], [%x], 16, [%x];",
        "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes [%x], [%a, {%y}], [%x];",
        "fence.proxy.tensormap::generic.release.gpu;",
    ],
)
def test_what_needs_other_ctas_or_tensor_maps_is_refused_by_name(form: str) -> None:
    with pytest.raises(ptx.PtxError, match=form.split()[0].rstrip(";").replace(".", r"\.")):
        module(f".reg .b16 %h; {form}")
