"""The estimate is arithmetic that can be checked, and its rule holds for what was measured on an H200."""

from dataclasses import replace

import pytest

from tegrad.bench import limits
from tegrad.bench.kernels import Code, KernelRow
from tegrad.bench.limits import ASSUMPTIONS, CHECKS, Assumption, Work, checked, estimates, step_us
from tegrad.hw.chips import CHIPS
from tegrad.nv.toolchain import search_program

ORIN = CHIPS["agx-orin-64gb"]


def row(**changes: object) -> KernelRow:
    """A kernel of 16 launches that read 1 MB each with a million instructions, half of them for the alu."""
    code = Code(100, {"alu": 50, "fma": 50})
    made = KernelRow(
        "matvec", ORIN.name, (64, 1, 1), (256, 1, 1), 16, 64, 0, 1024, 4, 32, 0.7, 1.0, 1_000_000, code, 1_000_000
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_instructions_take_as_long_as_the_busiest_unit_or_the_issue() -> None:
    # 16 SMs: 62,500 instructions each; half for the alu at 2 a cycle, all of them at 4 a cycle.
    assert limits.cycles(ORIN, row()) == 62_500 / 4
    assert limits.cycles(ORIN, row(code=Code(100, {"alu": 80, "fma": 20}))) == 62_500 * 0.8 / 2
    assert limits.cycles(ORIN, row(instructions=None)) == 0


def test_a_launch_takes_its_bytes_or_its_instructions_and_a_boundary() -> None:
    by_bytes, by_cycles = Work("a", 2, 204_800.0, 10.0), Work("b", 1, 10.0, 1_300.0)
    half, all_ = Assumption(0.5, (0, 0), ""), Assumption(1.0, (0, 0), "")
    assert step_us(ORIN, [by_bytes], 5.0, half) == pytest.approx(2 * (5 + 2))
    assert step_us(ORIN, [by_cycles], 3.0) == pytest.approx(3 + 1)
    assert step_us(ORIN, [by_bytes, by_cycles], 0.0, all_) == pytest.approx(2 + 1)


def test_what_blocks_read_again_comes_from_volatile_memory_each_time_and_else_from_l2() -> None:
    work = Work("a", 2, 102_400.0, again=102_400.0)
    for again, us in ((True, 2.0), (False, 1.0)):
        assert step_us(ORIN, [work], 1.0, Assumption(0.5, (0, 0), "", again=again)) == pytest.approx(2 * (1 + us))
    matvec = row(grid=(192, 1, 1), input_bytes=12288)
    assert limits.reread(matvec) == 191 * 12288
    volatile, cached = (limits.estimate(ORIN, [matvec], memory) for memory in (limits.VOLATILE, limits.CACHED))
    assert limits.estimate(ORIN, [matvec]) == volatile  # the policy where no record says otherwise
    assert (cached.again_bytes, volatile.again_bytes) == (0, 16 * 191 * 12288)
    assert volatile.weight_bytes == cached.weight_bytes == 16e6
    assert volatile.tokens_per_second < cached.tokens_per_second


def test_each_jetson_has_a_row_for_each_kind_of_memory_that_says_what_it_assumes() -> None:
    for name, rows in ASSUMPTIONS.items():
        kinds = [one.memory for one in rows]
        assert kinds == (["volatile", "cached"] if "orin" in name else [""])
        assert len({one.source for one in rows}) == len(rows)
    assert "ASSUMED" in limits.assumption(ORIN).source


def test_an_estimate_spans_what_a_boundary_may_cost() -> None:
    made = limits.estimate(ORIN, [row()])
    slow, fast = made.tokens_per_second
    assert slow < fast
    assert made.launches == 16
    assert made.step_us[1] - made.step_us[0] == pytest.approx(16 * 5)
    assert made.bytes_us == pytest.approx(16e6 / (204_800 * 0.78))
    assert made.issue_us == pytest.approx(16 * 15_625 / 1300)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.what)
def test_the_rule_holds_for_what_was_measured(check: limits.Check) -> None:
    """Within a quarter of the range; what a graph with attention took it underestimates most."""
    low, high = check.measured_us
    assert 0.75 * high < checked(check) < 1.1 * low


@pytest.mark.board
@pytest.mark.long
@pytest.mark.skipif(not search_program("nvdisasm"), reason="no nvdisasm")
def test_the_range_of_an_h200_holds_what_its_plan_of_many_kernels_took() -> None:
    """From the kernels as they are compiled for it, not from rows of a check: 1,993 to 2,015 tok/s were measured."""
    [check] = (check for check in CHECKS if check.what == "our decode step, 83 launches")
    [made], (low, high) = estimates(CHIPS["gh100"]), check.measured_us
    assert made.launches == 83
    assert made.step_us[0] < low
    assert high < made.step_us[1]
