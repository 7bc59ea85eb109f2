"""Lanes named in one member mask converge, whatever branch they come by; those that cannot are reported."""

import random
import re

import numpy as np
import pytest

from tegrad.ptx import PtxError, PtxFault
from tests.ptx.lanes import run

LANE = np.arange(32, dtype=np.uint32)
X = np.random.default_rng(7).integers(0, 1 << 32, 32, dtype=np.uint32)


def sides(then: str, otherwise: str, test: str = "setp.lt.u32 %p, %i, 16;") -> str:
    """`then` for the lanes that pass the test, `otherwise` for the others."""
    return f"{test} @%p bra A; {otherwise} bra E; A: {then} E:"


def both(op: str) -> str:
    """One instruction on each side of a branch, with the value in a register of its own."""
    a, b = op.replace("%v", "%t1"), op.replace("%v", "%t2")
    return sides(f"add.u32 %t1, %x0, 1; {a}", f"add.u32 %t2, %x0, 2; {b}")


GIVEN = X + np.where(LANE < 16, 1, 2).astype(np.uint32)


def fault_of(body: str) -> PtxFault:
    with pytest.raises(PtxFault) as caught:
        run(body.replace(";", ";\n"), X)
    return caught.value


def lanes_of(fault: PtxFault) -> tuple[int, int]:
    """The member mask, and the lanes that are wrong."""
    return fault.address & 0xFFFFFFFF, fault.address >> 32


def test_a_shuffle_crosses_the_two_sides_of_a_branch() -> None:
    assert (run(both("shfl.sync.bfly.b32 %d, %v, 16, 31, -1;"), X) == GIVEN[LANE ^ 16]).all()


def test_each_side_of_a_branch_reads_the_lanes_that_it_asks_for() -> None:
    body = sides(
        "shfl.sync.idx.b32 %d, %x0, 20, 31, -1;", "xor.b32 %t0, %i, 17; shfl.sync.idx.b32 %d, %x0, %t0, 31, -1;"
    )
    assert (run(body, X) == np.where(LANE < 16, X[20], X[LANE ^ 17])).all()


def test_the_range_of_a_shuffle_is_told_to_lanes_that_waited() -> None:
    body = both("shfl.sync.down.b32 %d|%q, %v, 3, 31, -1; @!%q xor.b32 %d, %d, -1;")
    want = np.where(LANE < 29, GIVEN[np.minimum(LANE + 3, 31)], ~GIVEN)
    assert (run(body, X) == want).all()


def test_votes_cross_the_two_sides_of_a_branch() -> None:
    bits = sum(int(v & 4 != 0) << i for i, v in enumerate(GIVEN))
    test = "and.b32 %t3, %v, 4; setp.ne.u32 %q, %t3, 0;"
    assert (run(both(f"{test} vote.sync.ballot.b32 %d, %q, -1;"), X) == bits).all()
    for kind, want in (("all", 0), ("any", 1), ("uni", 0)):
        got = run(both(f"{test} vote.sync.{kind}.pred %q, %q, -1; selp.u32 %d, 1, 0, %q;"), X)
        assert (got == want).all(), kind


@pytest.mark.parametrize("op", ["add.s32", "min.u32", "min.s32", "max.u32", "max.s32", "xor.b32"])
def test_reductions_cross_the_two_sides_of_a_branch(op: str) -> None:
    values = GIVEN.view(np.int32) if "s32" in op else GIVEN
    fn = {"add": np.add, "min": np.minimum, "max": np.maximum, "xor": np.bitwise_xor}[op[:3]]
    want = int(fn.reduce(values)) & 0xFFFFFFFF
    assert (run(both(f"redux.sync.{op} %d, %v, -1;"), X) == want).all()


@pytest.mark.parametrize("bits", [32, 64])
def test_matches_cross_the_two_sides_of_a_branch(bits: int) -> None:
    few = (LANE * 7 % 3).astype(np.uint32)
    wide = "cvt.u64.u32 %w, %x0; shl.b64 %w, %w, 33;" if bits == 64 else ""
    value = "%w" if bits == 64 else "%x0"
    any_, all_ = (f"match.{k}.sync.b{bits} %d, {value}, -1;" for k in ("any", "all"))
    want = [sum(int(few[j] == few[i]) << j for j in range(32)) for i in range(32)]
    regs = ".reg .b64 %w;"
    assert run(wide + sides(any_, any_), few, regs=regs).tolist() == want
    assert (run(wide + sides(all_, all_), few, regs=regs) == 0).all()
    assert (run(wide + sides(all_, all_), np.full(32, 5, np.uint32), regs=regs) == 0xFFFFFFFF).all()


def test_lanes_run_ahead_once_converged_and_give_new_values() -> None:
    """The first half converges again, among itself, before the second half has read what the first meeting gave."""
    again = "shfl.sync.bfly.b32 %t1, %d, 1, 31, 0xffff; shfl.sync.bfly.b32 %d, %t1, 2, 31, 0xffff;"
    body = sides(
        "shfl.sync.bfly.b32 %d, %x0, 16, 31, -1;",
        f"shfl.sync.bfly.b32 %d, %x0, 16, 31, -1; {again}",
        "setp.ge.u32 %p, %i, 16;",
    )
    assert (run(body, X) == np.where(LANE < 16, X[LANE ^ 19], X[LANE ^ 16])).all()


def test_lanes_of_one_instruction_have_masks_of_their_own() -> None:
    body = "and.b32 %t0, %i, 24; mov.u32 %t1, 255; shl.b32 %t1, %t1, %t0; {op} %d, {source}, %t1;"
    groups = X.reshape(4, 8)
    got = run(body.format(op="redux.sync.add.u32", source="%x0"), X)
    assert (got.reshape(4, 8) == groups.sum(1, dtype=np.uint32)[:, None]).all()
    odd = "and.b32 %t2, %x0, 1; setp.eq.u32 %p, %t2, 1;"
    got = run(odd + body.format(op="vote.sync.ballot.b32", source="%p"), X)
    want = [sum(int(v & 1) << i for i, v in enumerate(X) if i // 8 == k) for k in range(4)]
    assert (got.reshape(4, 8) == np.array(want, np.uint32)[:, None]).all()


def test_lanes_that_have_exited_are_not_waited_for() -> None:
    leave = "setp.ge.u32 %p, %i, 20; @%p bra G; bra H; G: exit; H:"
    got = run(f"{leave} redux.sync.add.u32 %d, %i, -1;", X)
    assert (got[:20] == 190).all()
    assert (got[20:] == 0).all()


def test_lanes_that_wait_go_on_when_the_others_exit() -> None:
    assert (run(sides("redux.sync.add.u32 %d, %i, -1;", "exit;"), X)[:16] == 120).all()


def test_lanes_at_a_join_wait_for_lanes_within_the_branch() -> None:
    """Lanes 0-7 meet 16-31 across the outer branch; 8-15 must not pass the inner join meanwhile."""
    mask = "0xffff00ff"
    inner = f"setp.lt.u32 %q, %i, 8; @!%q bra J; redux.sync.add.u32 %d, %i, {mask}; J: add.u32 %d, %d, 1000;"
    body = sides(f"redux.sync.add.u32 %d, %i, {mask};", inner, "setp.ge.u32 %p, %i, 16;")
    total = sum(range(8)) + sum(range(16, 32))
    assert (run(body, X) == np.where(LANE < 8, total + 1000, np.where(LANE < 16, 1000, total))).all()


def test_a_predicate_keeps_lanes_away() -> None:
    got = run("setp.lt.u32 %p, %i, 8; @%p redux.sync.add.u32 %d, %i, 255;", X)
    assert (got == np.where(LANE < 8, 28, 0)).all()


UNCONVERGED = {
    "others went on past the branch": (sides("shfl.sync.bfly.b32 %d, %x0, 1, 31, -1;", ""), -1, 0xFFFF0000),
    "other qualifiers": (
        sides("shfl.sync.bfly.b32 %d, %x0, 1, 31, -1;", "shfl.sync.down.b32 %d, %x0, 1, 31, -1;"), -1, 0xFFFF0000
    ),
    "another mask": (
        sides("shfl.sync.bfly.b32 %d, %x0, 1, 31, 0xfffff;", "shfl.sync.bfly.b32 %d, %x0, 1, 31, -1;"), 0xFFFFF, 0xF0000
    ),
    "without the predicate": ("setp.lt.u32 %p, %i, 8; @%p vote.sync.ballot.b32 %d, %p, -1;", -1, 0xFFFFFF00),
    "at a barrier of the block": (sides("shfl.sync.bfly.b32 %d, %x0, 1, 31, -1;", "bar.sync 0;"), -1, 0xFFFF0000),
    "left a loop": (
        "mov.u32 %t0, 0; L: shfl.sync.bfly.b32 %d, %x0, 1, 31, -1; add.u32 %t0, %t0, 1; setp.lt.u32 %p, %t0, %i;"
        " @%p bra L;", -1, 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNCONVERGED)
def test_lanes_that_cannot_come_are_reported(name: str) -> None:
    body, mask, missing = UNCONVERGED[name]
    fault = fault_of(body)
    assert fault.kind == "missing-lanes"
    assert lanes_of(fault) == (mask & 0xFFFFFFFF, missing)
    assert re.search(r"shfl\.sync\.bfly|vote\.sync", fault.source)


@pytest.mark.parametrize("mask", ["0xffff", "%t0"])
def test_lanes_outside_their_mask_are_reported(mask: str) -> None:
    fault = fault_of(
        f"mov.u32 %t0, %x0; and.b32 %t0, %t0, 0; add.u32 %t0, %t0, 0xffff; shfl.sync.bfly.b32 %d, %x0, 1, 31, {mask};"
    )
    assert (fault.kind, lanes_of(fault)) == ("unnamed-lanes", (0xFFFF, 0xFFFF0000))


def test_the_report_names_kernel_instruction_mask_and_lanes() -> None:
    text = str(fault_of(sides("shfl.sync.bfly.b32 %d, %x0, 1, 31, 0x1ffff;", "")))
    assert re.search(r"kernel k: member mask 0x1ffff: lanes 16 .*shfl\.sync\.bfly\.b32 %d, %x0, 1, 31, 0x1ffff", text)


def test_lanes_wait_for_others_at_a_barrier_that_opens() -> None:
    """Half of two warps waits for the other half, which waits at a barrier for a third warp."""
    body = """
      and.b32 %t0, %i, 16; setp.eq.u32 %p, %t0, 0; setp.lt.u32 %q, %i, 64; and.pred %p, %p, %q; @%p bra A;
      barrier.sync 1, 64; @!%q bra E;
      A: redux.sync.add.u32 %d, %i, -1;
      E:
    """
    got = run(body, threads=96)
    assert (got == np.repeat([496, 496 + 32 * 32, 0], 32)).all()


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (sides("redux.sync.min.f32 %d, %x0, -1;", ""), "redux.sync.min.f32 is not supported"),
        (sides("bar.warp.sync;", ""), "bar.warp.sync has no member mask"),
    ],
)
def test_what_cannot_meet_is_refused_by_name(body: str, why: str) -> None:
    with pytest.raises(PtxError, match=why):
        run(body, X)


class Tree:
    """Random branches over lane numbers; each leaf changes the value in a way of its own and meets the other leaves."""

    def __init__(self, seed: int) -> None:
        self.rng, self.labels, self.text = random.Random(seed), 0, ""
        self.values = X.copy()

    def step(self) -> None:
        """One meeting of every lane: of the warp, or of each half with a mask of its own."""
        self.halves = self.rng.random() < 0.5
        self.turn = self.rng.randrange(1, 16)
        self.branch(np.full(32, True), 3)
        self.values = self.values[LANE ^ self.turn if self.halves else LANE ^ (self.turn + 16)]

    def branch(self, inside: np.ndarray, depth: int) -> None:
        if not depth or self.rng.random() < 0.2:
            self.leaf(inside)
            return
        self.labels += 1
        mark, bits = self.labels, self.rng.randrange(1, 32)
        self.text += f"and.b32 %t0, %i, {bits}; setp.ne.u32 %p, %t0, 0; @%p bra T{mark};\n"
        self.branch(inside & (LANE & bits == 0), depth - 1)
        self.text += f"bra J{mark}; T{mark}:\n"
        self.branch(inside & (LANE & bits != 0), depth - 1)
        self.text += f"J{mark}:\n"

    def leaf(self, inside: np.ndarray) -> None:
        more = self.rng.randrange(1 << 16)
        self.values = np.where(inside, self.values + more, self.values).astype(np.uint32)
        turn, mask = (self.turn, "%t7") if self.halves else (self.turn + 16, "-1")
        name = self.rng.choice(["%t1", "%t2", "%t3"])
        self.text += f"add.u32 {name}, %d, {more}; shfl.sync.bfly.b32 %d, {name}, {turn}, 31, {mask};\n"


@pytest.mark.parametrize("seed", range(6))
def test_random_branches_meet(seed: int) -> None:
    tree = Tree(seed)
    for _ in range(5):
        tree.step()
    halves = "and.b32 %t0, %i, 16; mov.u32 %t7, 0xffff; shl.b32 %t7, %t7, %t0; mov.u32 %d, %x0;\n"
    assert (run(halves + tree.text, X) == tree.values).all()
