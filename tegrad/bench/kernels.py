"""What the compilers made of our kernels: `tegrad bench kernels --static`.

For each kernel of a model's plans and for each chip: registers, local memory, shared memory, how many blocks an SM
holds, widths of its loads from global memory; and for a token: launches, bytes of weights, and instructions. Those are
counted by the PTX engine on some of a launch's blocks, and scaled by the machine code's length against the PTX's.

What machine code is made of, NVIDIA's disassembler tells: nvdisasm comes with a CUDA toolkit or with NVIDIA's wheel
nvidia-cuda-nvdisasm. The units and their rates are the table "Throughput of Native Arithmetic Instructions" of the CUDA
C++ Programming Guide, in instructions of a warp.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from tegrad.bench import models, plans
from tegrad.bench.plans import DryDevice, DryProgram
from tegrad.bench.record import now, versions
from tegrad.hw.chips import Chip
from tegrad.llm.formats import PLAIN, SET
from tegrad.llm.packed import PackedMatrix, PackedModel
from tegrad.nv.program import SHARED_RESERVE, shared_usage
from tegrad.nv.replay import Launch
from tegrad.nv.toolchain import CompilerMissing, find_program
from tegrad.ptx import PtxError, PtxFault

PIPES: Final[Mapping[str, float]] = {
    "alu": 2, "fma": 4, "imad": 2, "convert": 0.5, "memory": 1, "tensor": 1, "other": 4,
}  # fmt: skip
"""Instructions of a warp that an SM takes per cycle, compute capabilities 8.6 to 9.0.

"alu": logic, shifts, integer addition, dp4a: 64 lanes; "fma": float32: 128; "imad": integer multiplication: 64;
"convert": conversions and special functions: 16; "memory": loads and stores: 32; "tensor": mma, whose cycles depend on
its shape.
"""

_UNITS: Final[tuple[tuple[str, str], ...]] = (
    ("tensor", "[HIBDQ]*MMA|WARPGROUP|WGMMA"),
    ("memory", "LD|ST|ATOM|RED|CCTL|SHFL|UBLK"),
    ("convert", "I2F|F2I|F2F|I2I|FRND|MUFU|POPC|FLO|BREV|S2R"),
    ("fma", "FFMA|FMUL|FADD|FCHK|HFMA2|HMUL2|HADD2"),
    ("imad", "IMAD|IMUL"),
    ("alu", "P?LOP|SHF|SHL|SHR|V?IADD|LEA|[IF]SETP|[IFV]I?MNMX|PRMT|F?SEL|IDP|MOV|IABS|BMSK|SGXT|HSET|R2P|P2R|CS2R"),
)
_LINE: Final = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.MULTILINE)
_FILLER: Final = ("NOP", "BRA")


@dataclass(frozen=True, slots=True)
class Code:
    """The instructions of one kernel as they stand in memory, without the filling at its end."""

    instructions: int
    units: Mapping[str, int]
    loads: Mapping[int, int] = field(default_factory=dict)
    """Loads from global memory by bits a lane; those of asynchronous copies and bulk copies (0) are among them."""
    stores: Mapping[int, int] = field(default_factory=dict)
    local: int = 0
    """Loads and stores of local memory: spills, or arrays that are indexed by variables."""


def parse_code(text: str) -> Code:
    """Count the instructions of nvdisasm's text."""
    found = [match.groups() for match in _LINE.finditer(text)]
    while found and found[-1][0].split(".")[0] in _FILLER:
        found.pop()
    units: Counter[str] = Counter()
    loads: Counter[int] = Counter()
    stores: Counter[int] = Counter()
    local = 0
    for name, _ in found:
        base = name.split(".")[0]
        units[unit(base)] += 1
        if base in ("LDG", "LDGSTS"):
            loads[_width(name)] += 1
        elif base == "UBLKCP":
            loads[0] += 1
        elif base == "STG":
            stores[_width(name)] += 1
        elif base in ("LDL", "STL"):
            local += 1
    return Code(len(found), dict(units), dict(sorted(loads.items())), dict(sorted(stores.items())), local)


def unit(base: str) -> str:
    """The unit that an instruction goes to, by its name without suffixes."""
    return next((name for name, pattern in _UNITS if re.match(pattern, base)), "other")


def _width(name: str) -> int:
    """Bits a lane of a memory instruction."""
    parts = name.split(".")
    for part, bits in (("128", 128), ("64", 64), ("U16", 16), ("S16", 16), ("U8", 8), ("S8", 8)):
        if part in parts:
            return bits
    return 32


def disassembler_version() -> str:
    """The disassembler's version, or an empty string where there is none."""
    try:
        said = subprocess.run([str(find_program("nvdisasm")), "--version"], capture_output=True, text=True, check=True)
    except CompilerMissing:
        return ""
    found = re.search(r"V([\d.]+)", said.stdout)
    return found[1] if found else ""


# ---- the table


_REGISTER_UNIT: Final = 256
"""A warp's registers are given out in such groups (CUDA occupancy calculator, compute capabilities 8 and 9)."""
SAMPLE_BLOCKS: Final = 4
"""Blocks of a large grid that are executed to count instructions."""
MOST_LANE_INSTRUCTIONS: Final = 50_000_000
"""PTX instructions of lanes that are executed for a launch at most."""
TOGETHER: Final = frozenset({"persistent"})
"""Kernels whose blocks wait for each other: they need a GPU that holds all of them."""


@dataclass(frozen=True, slots=True)
class KernelRow:
    """A row of the table: one kernel as one plan launches it on one chip."""

    name: str
    chip: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    launches: int
    """Of a token, or of a chunk."""
    registers: int
    stack: int
    """Bytes of local memory a thread: anything but 0 is a spill, or an array indexed by a variable."""
    shared: int
    """Bytes a block, with the hardware's own."""
    blocks_per_sm: int
    warps_per_sm: int
    occupancy: float
    """Of the warps that an SM holds at most."""
    waves: float
    """The grid's blocks over those that all SMs hold at once."""
    weight_bytes: int
    """Of one launch."""
    code: Code | None
    """None where there is no disassembler."""
    instructions: int | None
    """Machine instructions of all warps in one launch; None where the PTX engine does not run the kernel."""
    input_bytes: int = 0
    """Of the vector that every block reads for a product, at most; 0 where the kernel is none."""

    @property
    def per_token(self) -> tuple[int, int | None]:
        """Bytes of weights and instructions of all launches."""
        return (
            self.weight_bytes * self.launches,
            None if self.instructions is None else self.instructions * self.launches,
        )


def resident(chip: Chip, registers: int, shared: int, threads: int) -> int:
    """Blocks that an SM holds at once; `shared` with the hardware's own."""
    warps = -(-threads // 32)
    per_warp = -(-registers * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    # Each of an SM's four parts holds a quarter of the registers, and whole warps.
    limits = [chip.blocks_per_sm, chip.warps_per_sm // warps]
    if per_warp:
        limits.append(chip.regs_per_sm // 4 // per_warp * 4 // warps)
    limits.append(chip.smem_per_sm // max(shared, SHARED_RESERVE))
    return max(0, min(limits))


def table(chip: Chip, launches: Sequence[Launch], model: PackedModel | None = None) -> list[KernelRow]:
    """A row for each kernel, grid and block among launches on a `DryDevice`, in the order of their first use."""
    weights = {} if model is None else plans.by_address(model)
    return [_row(chip, group, weights) for group in plans.groups(launches)]


def _row(chip: Chip, group: Sequence[Launch], weights: Mapping[int, PackedMatrix]) -> KernelRow:
    launch = group[0]
    program: DryProgram = launch.program
    cubin, name = program.cubin, program.name
    threads = launch.block[0] * launch.block[1] * launch.block[2]
    blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
    registers, shared = cubin.registers(name), shared_usage(cubin, name)
    held = resident(chip, registers, shared, threads)
    warps = held * -(-threads // 32)
    code = disassembled(program)
    return KernelRow(
        name=name,
        chip=chip.name,
        grid=launch.grid,
        block=launch.block,
        launches=len(group),
        registers=registers,
        stack=cubin.stack(name),
        shared=shared,
        blocks_per_sm=held,
        warps_per_sm=warps,
        occupancy=warps / chip.warps_per_sm,
        waves=blocks / (held * chip.sm_count) if held else float("inf"),
        weight_bytes=weight_bytes(launch, weights),
        code=code,
        instructions=None if code is None else executed(launch, code),
        input_bytes=input_bytes(launch, weights),
    )


def weight_bytes(launch: Launch, weights: Mapping[int, PackedMatrix]) -> int:
    """Bytes of the matrices that a launch reads; of a table, a row. A step in one launch reads all of them."""
    if launch.program.name in TOGETHER:
        return sum(matrix.nbytes for matrix in weights.values())
    read = {buffer.va_addr: weights[buffer.va_addr] for buffer in launch.buffers if buffer.va_addr in weights}
    if launch.program.name.startswith(("embed", "inputs")):
        return sum(matrix.kind.row_bytes(matrix.columns) for matrix in read.values())
    return sum(matrix.nbytes for matrix in read.values())


def input_bytes(launch: Launch, weights: Mapping[int, PackedMatrix]) -> int:
    """Bytes of the vector that a block of `matvec` stages: int8 with a scale and a sum of squares a SET, or floats."""
    if launch.program.name != "matvec":
        return 0
    read = [weights[buffer.va_addr] for buffer in launch.buffers if buffer.va_addr in weights]
    return max((m.columns * 4 if m.kind in PLAIN else m.columns + 8 * (m.columns // SET) for m in read), default=0)


def disassembled(program: DryProgram) -> Code | None:
    """A program's machine code in numbers, or None where there is no disassembler."""
    try:
        tool = find_program("nvdisasm")
    except CompilerMissing:
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.lib)
        file.flush()
        done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=True)
    return parse_code(done.stdout)


def executed(launch: Launch, code: Code) -> int | None:
    """Machine instructions of all warps of a launch: its PTX instructions, executed, times machine code per PTX.

    Blocks are executed on the buffers as they are: all of them where that is little work, else the first few, which
    stand for the rest. None for a kernel whose blocks wait for each other, and for what the engine does not know.
    """
    if launch.program.name in TOGETHER:
        return None
    try:
        kernel = launch.program.ptx.kernels[launch.program.name]
        blocks = launch.grid[0] * launch.grid[1] * launch.grid[2]
        ran, lanes = 1, _execute(launch, kernel, (1, 1, 1))
        if blocks > 1 and lanes * blocks < MOST_LANE_INSTRUCTIONS:
            ran, lanes = blocks, _execute(launch, kernel, launch.grid)
        elif blocks > 1:
            ran = min(launch.grid[0], SAMPLE_BLOCKS)
            lanes = _execute(launch, kernel, (ran, 1, 1))
    except (PtxError, PtxFault):
        return None
    return round(lanes / 32 * blocks / ran * code.instructions / len(kernel.pcs))


def _execute(launch: Launch, kernel: Any, grid: tuple[int, int, int]) -> int:
    arguments = [buffer.va_addr for buffer in launch.buffers] + list(launch.values)
    dims = (launch.block, launch.grid)
    stats = kernel.launch(grid, launch.block, arguments, dims=dims, shared=launch.program.dynamic_shared)
    return int(stats.instructions)


COLUMNS: Final = (
    "kernel", "grid", "block", "launches", "regs", "stack", "shared", "blocks/SM", "warps/SM", "waves", "loads by bits",
    "code", "MB a token", "Minstr a token",
)  # fmt: skip


def cells(row: KernelRow) -> tuple[str, ...]:
    """A row as text, in the order of COLUMNS."""
    weights, instructions = row.per_token
    loads = " ".join(f"{bits or 'bulk'}:{number}" for bits, number in row.code.loads.items()) if row.code else "?"
    return (
        row.name, "x".join(map(str, row.grid)), "x".join(map(str, row.block)), str(row.launches), str(row.registers),
        str(row.stack), str(row.shared), str(row.blocks_per_sm), str(row.warps_per_sm), f"{row.waves:.2f}", loads,
        str(row.code.instructions) if row.code else "?", f"{weights / 1e6:.1f}",
        "?" if instructions is None else f"{instructions / 1e6:.2f}",
    )  # fmt: skip


def text(rows: Sequence[KernelRow]) -> str:
    """The table as aligned columns."""
    lines = [COLUMNS, *(cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def plan_table(chip: Chip, name: str, plan: str) -> list[KernelRow]:
    """The table of one plan of a model such as "1b-q6k", compiled for a chip."""
    shape, formats = models.parse(name)[0], models.formats(name)
    made, launches = plans.launches(plan, shape.config, formats, DryDevice(chip), shape.tied)
    return table(chip, launches, made)


CHIPS_SHOWN: Final = ("agx-orin-64gb", "gh100")


def document(name: str, tables: Mapping[str, Mapping[str, Sequence[KernelRow]]]) -> dict[str, Any]:
    """Tables of a model by chip and plan, for results/kernels-static.json."""
    return {
        "model": name,
        "date": now(),
        "versions": versions(),
        "disassembler": disassembler_version(),
        "tables": {
            chip: {plan: [asdict(row) for row in rows] for plan, rows in by_plan.items()}
            for chip, by_plan in tables.items()
        },
    }
