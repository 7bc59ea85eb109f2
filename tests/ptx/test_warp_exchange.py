"""Lanes exchange values as the PTX document says: shfl, vote, match, redux, activemask, against plain loops."""

import numpy as np
import pytest

from tests.ptx.lanes import run

RNG = np.random.default_rng(3)
LANES = range(32)


def shuffled(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """Source lane and predicate, from the pseudo-code of shfl in the PTX document."""
    bval, cval, segmask = b & 0x1F, c & 0x1F, c >> 8 & 0x1F
    max_lane = (lane & segmask) | (cval & ~segmask)
    min_lane = lane & segmask
    if mode == "up":
        j, ok = lane - bval, lane - bval >= max_lane
    elif mode == "down":
        j, ok = lane + bval, lane + bval <= max_lane
    elif mode == "bfly":
        j, ok = lane ^ bval, lane ^ bval <= max_lane
    else:
        j = min_lane | (bval & ~segmask)
        ok = j <= max_lane
    return (j if ok else lane), ok


@pytest.mark.parametrize("mode", ["up", "down", "bfly", "idx"])
@pytest.mark.parametrize("constant", [True, False])
def test_shfl_follows_the_pseudo_code(mode: str, constant: bool) -> None:
    a = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    for b, c in [(1, 31), (16, 31), (3, 0x1C07), (5, 0x181F), (31, 0x0F0F), (2, 0)]:
        if mode == "up":
            c &= 0x1F00
        at, clamp = (str(b), str(c)) if constant else ("%x1", "%x2")
        body = f"shfl.sync.{mode}.b32 %d|%p, %x0, {at}, {clamp}, -1; @!%p xor.b32 %d, %d, -1;"
        got = run(body, a, np.full(32, b, np.uint32), np.full(32, c, np.uint32))
        moves = [shuffled(mode, i, b, c) for i in LANES]
        want = np.array([a[j] if ok else a[j] ^ 0xFFFFFFFF for j, ok in moves], np.uint32)
        assert (got == want).all(), (b, c)


def test_shfl_idx_takes_a_lane_of_its_own_from_each_lane() -> None:
    a, b = RNG.integers(0, 1 << 32, 32, dtype=np.uint32), RNG.integers(0, 32, 32).astype(np.uint32)
    assert (run("shfl.sync.idx.b32 %d, %x0, %x1, 31, -1;", a, b) == a[b]).all()


@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x0000FFFF, 0xF0F0F0F1])
def test_votes_count_the_member_lanes(mask: int) -> None:
    x = RNG.integers(0, 2, 32).astype(np.uint32)
    bits = sum(int(v) << i for i, v in enumerate(x)) & mask
    enter = f"mov.u32 %t0, {mask}; shr.u32 %t1, %t0, %i; and.b32 %t1, %t1, 1; setp.eq.u32 %q, %t1, 0; @%q bra E; "
    setp = "setp.ne.u32 %p, %x0, 0; "
    ballot = run(f"{setp}{enter} vote.sync.ballot.b32 %d, %p, {mask}; E:", x)
    assert all(ballot[i] == (bits if mask >> i & 1 else 0) for i in LANES)
    for kind, want in (("all", bits == mask), ("any", bits != 0), ("uni", bits in (0, mask))):
        got = run(f"{setp}{enter} vote.sync.{kind}.pred %p, %p, {mask}; selp.u32 %d, 1, 2, %p; E:", x)
        assert all(got[i] == ((1 if want else 2) if mask >> i & 1 else 0) for i in LANES), kind


def test_vote_takes_a_negated_predicate() -> None:
    x = RNG.integers(0, 2, 32).astype(np.uint32)
    want = sum(int(not v) << i for i, v in enumerate(x))
    assert (run("setp.ne.u32 %p, %x0, 0; vote.sync.ballot.b32 %d, !%p, -1;", x) == want).all()


def test_match_any_groups_equal_values() -> None:
    x = RNG.integers(0, 5, 32).astype(np.uint32)
    want = [sum(int(x[j] == x[i]) << j for j in LANES) for i in LANES]
    assert run("match.any.sync.b32 %d, %x0, -1;", x).tolist() == want
    wide = "cvt.u64.u32 %w, %x0; shl.b64 %w, %w, 33; match.any.sync.b64 %d, %w, -1;"
    assert run(wide, x, regs=".reg .b64 %w;").tolist() == want


@pytest.mark.parametrize("same", [True, False])
def test_match_all_tells_whether_all_are_equal(same: bool) -> None:
    x = np.full(32, 9, np.uint32)
    x[17] += not same
    got = run("match.all.sync.b32 %d|%p, %x0, -1; @%p xor.b32 %d, %d, 255;", x)
    assert (got == (0xFFFFFF00 if same else 0)).all()


@pytest.mark.parametrize(
    "op", ["add.u32", "add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "and.b32", "or.b32", "xor.b32"]
)
def test_redux_combines_the_warp(op: str) -> None:
    x = RNG.integers(0, 1 << 32, 32, dtype=np.uint32)
    values = x.astype(np.int64) if "u" in op else x.view(np.int32).astype(np.int64)
    fn = {
        "add": np.sum, "min": np.min, "max": np.max, "and": np.bitwise_and.reduce, "or": np.bitwise_or.reduce,
        "xor": np.bitwise_xor.reduce,
    }[op[:-4]]  # fmt: skip
    want = int(fn(values if op[-3] != "b" else x.astype(np.int64))) & 0xFFFFFFFF
    assert (run(f"redux.sync.{op} %d, %x0, -1;", x) == want).all()


def test_activemask_is_the_lanes_that_run() -> None:
    got = run("setp.lt.u32 %p, %i, 5; @!%p bra E; activemask.b32 %d; E:")
    assert (got == np.where(np.arange(32) < 5, 31, 0)).all()


def test_activemask_of_a_partial_warp() -> None:
    assert (run("activemask.b32 %d;", threads=40)[32:] == 255).all()


def test_lane_masks() -> None:
    i = np.arange(32, dtype=np.uint64)
    one = np.uint64(1) << i
    for name, want in (("eq", one), ("lt", one - 1), ("le", 2 * one - 1), ("gt", ~(2 * one - 1)), ("ge", ~(one - 1))):
        assert (run(f"mov.u32 %d, %lanemask_{name};") == (want & np.uint64(0xFFFFFFFF)).astype(np.uint32)).all(), name


def test_warp_sync_lets_one_branch_wait_for_the_other() -> None:
    """Each half stores, meets, and reads what the other half stored, from two sides of a branch."""
    body = """
      .shared .b32 s[32];
      mov.u32 %t0, s; mad.lo.u32 %t1, %i, 4, %t0; xor.b32 %t2, %i, 16; mad.lo.u32 %t2, %t2, 4, %t0;
      setp.lt.u32 %p, %i, 16;
      @%p bra A;
      mul.lo.u32 %t3, %i, 7; st.shared.u32 [%t1], %t3; bar.warp.sync -1; ld.shared.u32 %d, [%t2]; bra E;
      A: mul.lo.u32 %t3, %i, 7; st.shared.u32 [%t1], %t3; bar.warp.sync -1; ld.shared.u32 %d, [%t2];
      E:
    """
    assert (run(body) == (np.arange(32) ^ 16) * 7).all()


def test_shfl_waits_for_lanes_that_come_later() -> None:
    """Lanes that skip a loop arrive at the shuffle first and wait for the others."""
    body = """
      mov.u32 %t0, 0; mov.u32 %t1, 100; setp.lt.u32 %p, %i, 8; @%p bra S;
      L: add.u32 %t1, %t1, 1; add.u32 %t0, %t0, 1; setp.lt.u32 %q, %t0, %i; @%q bra L;
      S: shfl.sync.bfly.b32 %d, %t1, 31, 31, -1;
    """
    trips = np.array([100 + (0 if i < 8 else i) for i in LANES])
    assert (run(body) == trips[::-1]).all()


@pytest.mark.parametrize(("op", "want"), [("popc.u32", 70), ("and.pred", 0), ("or.pred", 1)])
def test_barrier_reduction_over_the_cta(op: str, want: int) -> None:
    dest, after = ("%d", "") if op.startswith("popc") else ("%p", "selp.u32 %d, 1, 0, %p;")
    body = f"setp.lt.u32 %q, %i, 70; bar.red.{op} {dest}, 0, %q; {after}"
    assert (run(body, threads=96) == want).all()


@pytest.mark.parametrize("x", range(4))
def test_branch_table(x: int) -> None:
    body = """
      and.b32 %t0, %i, 3; add.u32 %t0, %t0, %x0; and.b32 %t0, %t0, 3;
      ts: .branchtargets A, B, C, D;
      brx.idx %t0, ts;
      A: mov.u32 %d, 10; bra E;
      B: mov.u32 %d, 20; bra E;
      C: mov.u32 %d, 30; bra E;
      D: mov.u32 %d, 40;
      E: add.u32 %d, %d, 1;
    """
    got = run(body, np.full(32, x, np.uint32))
    assert (got == ((np.arange(32) + x) % 4 + 1) * 10 + 1).all()
