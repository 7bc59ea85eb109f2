"""The table of kernels: what is read from machine code, how many blocks fit, and that nothing of ours spills."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_type_hints

import pytest

import tegrad.llm
from tegrad.bench import kernels, plans
from tegrad.bench.kernels import KernelRow, cells, executed, resident, table, text
from tegrad.bench.models import SHAPES
from tegrad.bench.plans import DryDevice, DryProgram, matrices
from tegrad.cli import bench
from tegrad.hw.chips import CHIPS, Chip
from tegrad.llm.config import Config
from tegrad.llm.formats import BF16, F16, PACKED, Q4_K, Q6_K, Q8_0, BlockType
from tegrad.llm.packed import SPEC
from tegrad.llm.programs import load_kernel
from tegrad.nv.replay import Launch
from tegrad.nv.toolchain import search_program

pytestmark = pytest.mark.board

ORIN, HOPPER = CHIPS["agx-orin-64gb"], CHIPS["gh100"]
SMALL = replace(SHAPES["1b"].config, layers=2, vocab=4096)
LOCAL = {
    64: {"persistent-near": 24, "persistent-far": 24},
    128: {"persistent-near": 16, "persistent": 40, "persistent-far": 136},
}
"""Bytes of local memory that a thread of the step in one launch has, by the width of heads and by plan: attention in
what registers 416 to 640 threads leave it. No other kernel has any."""
LISTING = """
        /*0000*/                   MOV R1, c[0x0][0x28] ;
        /*0010*/                   S2R R33, SR_TID.X ;
.L_x_6:
        /*0020*/               @P0 EXIT ;
        /*0030*/              @!PT LDG.E.U16 R2, [R4.64] ;
        /*0040*/                   LDG.E.128.CONSTANT R4, [R26.64+0x10] ;
        /*0050*/              @!P1 LDGSTS.E.BYPASS.128 [R3], [R6.64] ;
        /*0060*/                   IDP.4A.U8.S8 R0, R1, R2, R3 ;
        /*0070*/                   LOP3.LUT R0, R33, 0x1f, RZ, 0xc0, !PT ;
        /*0080*/                   FFMA R1, R2, R3, R4 ;
        /*0090*/                   IMAD.WIDE.U32 R16, R0, 0x10, RZ ;
        /*00a0*/                   I2FP.F32.S32 R1, R2 ;
        /*00b0*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*00c0*/                   STL [R1+0x4], R3 ;
        /*00d0*/                   STG.E.64 [R4.64], R2 ;
        /*00e0*/                   EXIT ;
.L_x_7:
        /*00f0*/                   BRA `(.L_x_7) ;
        /*0100*/                   NOP;
        /*0110*/                   NOP;
"""


def test_machine_code_is_counted_by_unit_and_width() -> None:
    code = kernels.parse_code(LISTING)
    assert code.instructions == 15
    assert code.units == {"alu": 3, "convert": 2, "other": 2, "memory": 5, "fma": 1, "imad": 1, "tensor": 1}
    assert (code.loads, code.stores, code.local) == ({16: 1, 128: 2}, {64: 1}, 1)


@pytest.mark.parametrize(
    ("chip", "registers", "shared", "threads", "blocks"),
    [
        (ORIN, 32, 1024, 1024, 1),  # 48 warps hold one block of 32
        (ORIN, 40, 1024, 256, 6),  # warps
        (ORIN, 64, 1024, 256, 4),  # registers
        (ORIN, 255, 1024, 256, 1),
        (ORIN, 16, 83 << 10, 64, 1),  # shared memory
        (ORIN, 16, 82 << 10, 64, 2),
        (ORIN, 16, 1024, 32, 16),  # blocks
        (HOPPER, 16, 1024, 32, 32),
        (HOPPER, 64, 1024, 256, 4),
        (HOPPER, 168, 1024, 384, 1),  # 12 warps of a quarter's three
    ],
)
def test_blocks_of_an_sm_are_limited_by_what_runs_out(
    chip: Chip, registers: int, shared: int, threads: int, blocks: int
) -> None:
    assert resident(chip, registers, shared, threads) == blocks


def plan_rows(chip: Chip, plan: str, kind: BlockType) -> tuple[list[KernelRow], int]:
    """A plan's table, and the bytes of the model's matrices."""
    device = DryDevice(chip)
    made, launches = plans.launches(plan, SMALL, kind, device)
    rows = table(chip, launches, made)
    assert sum(row.launches for row in rows) == len(launches)
    return rows, sum(matrix.nbytes for matrix in matrices(made))


def test_a_tokens_kernels_read_every_weight_once_and_spill_nothing() -> None:
    rows, size = plan_rows(ORIN, "decode", Q6_K)
    embedding_row = 2048 // 256 * 210
    assert sum(row.per_token[0] for row in rows) == size + embedding_row
    assert [row.name for row in rows if row.stack] == []
    products = [row for row in rows if row.name == "matvec"]
    assert sum(row.launches for row in products) == 2 * 4 + 1
    assert all(row.blocks_per_sm >= 1 and row.waves > 0 for row in rows)
    lines = text(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert len({len(line) for line in lines}) == 1
    if search_program("nvdisasm"):
        for row in products:
            assert row.code is not None
            assert row.code.local == 0
            assert row.code.loads[128] > 0
            # A warp takes a segment of 2048 weights in some hundred instructions.
            assert row.instructions is not None
            assert 60 < row.instructions / (row.weight_bytes / 1680) < 400


def test_executed_instructions_grow_with_the_grid() -> None:
    device = DryDevice(ORIN)
    program = load_kernel(device, "repack", buffers=1, values=1, FORMAT="Q6_K", WARPS=8)
    pcs = len(program.ptx.kernels["repack"].pcs)
    code = kernels.Code(2 * pcs, {})  # twice as long as its PTX

    def run(blocks: int) -> int:
        buffer = device.allocate(blocks * 8 * 1680, SPEC)
        found = executed(Launch(program, (buffer,), (blocks, 1, 1), (256, 1, 1), (8 * blocks,)), code)
        assert found is not None
        return found

    # 8 warps a block; its straight code runs once or twice (a loop loads 16 bytes a lane, four times).
    assert pcs * 8 < run(1) / 2 < 2 * pcs * 8
    assert run(64) == pytest.approx(64 * run(1), abs=64)
    assert run(100_000) == pytest.approx(100_000 * run(1), rel=1e-3)  # of which a few are executed


def test_cells_of_a_kernel_that_was_not_disassembled_say_so() -> None:
    row = KernelRow("k", "c", (1, 1, 1), (32, 1, 1), 2, 8, 0, 1024, 16, 16, 0.3, 0.1, 1000, None, None)
    assert row.per_token == (2000, None)
    assert cells(row)[-4:] == ("?", "?", "0.0", "?")


def programs(chip: Chip, plan: str, kind: BlockType, config: Config = SMALL) -> dict[bytes, DryProgram]:
    """The distinct kernels of a plan."""
    _, launches = plans.launches(plan, config, kind, DryDevice(chip))
    return {launch.program.lib: launch.program for launch in launches}


@pytest.mark.long
@pytest.mark.parametrize("chip", [ORIN, HOPPER], ids=lambda chip: chip.arch)
@pytest.mark.parametrize("kind", [*PACKED, F16], ids=lambda kind: kind.name)
def test_no_kernel_of_any_plan_spills_but_the_step_in_one_launch(chip: Chip, kind: BlockType) -> None:
    for plan in plans.plans_of(chip.arch, kind):
        for program in programs(chip, plan, kind).values():
            assert program.cubin.stack(program.name) <= LOCAL[64].get(plan, 0), (plan, program.name)


@pytest.mark.long
@pytest.mark.parametrize("chip", [ORIN, HOPPER], ids=lambda chip: chip.arch)
@pytest.mark.parametrize(("shape", "kind"), [("gemma3-4b", Q4_K), ("gemma3-1b", Q8_0), ("gemma2-2b", Q6_K)])
def test_no_kernel_of_a_gemma_spills(chip: Chip, shape: str, kind: BlockType) -> None:
    config = replace(SHAPES[shape], layers=6, vocab=4096).config
    for plan in ("decode", "batch8", "batch32", "prefill"):
        for program in programs(chip, plan, kind, config).values():
            assert program.cubin.stack(program.name) == 0, (plan, program.name)


@pytest.mark.long
@pytest.mark.parametrize("chip", [ORIN, HOPPER], ids=lambda chip: chip.arch)
@pytest.mark.parametrize(("shape", "kind"), [("8b", Q4_K), ("qwen3-0.6b", Q8_0)], ids=["8b", "qwen3-0.6b"])
def test_the_step_in_one_launch_keeps_little_of_wide_heads_in_local_memory(
    chip: Chip, shape: str, kind: BlockType
) -> None:
    config = replace(SHAPES[shape].config, layers=2, vocab=4096)
    for plan, most in LOCAL[128].items():
        [program] = programs(chip, plan, kind, config).values()
        assert program.cubin.stack(program.name) <= most, plan


def test_a_step_of_eight_sequences_keeps_nothing_in_local_memory() -> None:
    """A choice between the two sides of the cache once put both there."""
    made = programs(ORIN, "batch8", Q6_K).values()
    assert {program.name: program.cubin.stack(program.name) for program in made if program.name == "attention"} == {
        "attention": 0
    }


def test_the_help_of_the_command_names_every_plan() -> None:
    option = get_type_hints(bench.kernels, include_extras=True)["plan"].__metadata__[0]
    assert re.findall(r"[\w-]+", option.help.split(";")[0].replace(" or ", " ")) == list(plans.PLANS)


@pytest.mark.long
def test_every_kernel_is_in_a_plan() -> None:
    folder = Path(tegrad.llm.__file__).parent / "kernels"
    found = [*(programs(HOPPER, plan, Q6_K) for plan in plans.PLANS), programs(HOPPER, "load", BF16)]
    found.append(programs(ORIN, "prefill", Q6_K))
    for shape, kind in (("gemma3-1b", Q8_0), ("starcoder2-3b", Q4_K)):  # norms after blocks, and layer norms
        found.append(programs(HOPPER, "decode", kind, replace(SHAPES[shape], layers=6, vocab=4096).config))
    for shape in ("gemma4-e2b", "lfm2-1.2b", "qwen3.5-0.8b"):  # own inputs, convolutions, delta nets
        config = replace(SHAPES[shape], vocab=4096).config
        found += [programs(HOPPER, plan, Q8_0, config) for plan in ("decode", "prefill", "batch8")]
    used = {program.name for each in found for program in each.values()}
    # The first three are for rows of no whole segments, gate and up in two formats, and delta nets' floats, which
    # tests/llm compile. The last two are recordings of their own, between the plans.
    others = {"gemm_small_m", "times_rows", "floats_rows", "admit", "chunk"}
    assert used | others == {path.stem for path in folder.glob("*.cu")}
