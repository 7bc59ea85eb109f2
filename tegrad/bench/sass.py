"""What a kernel's machine code is made of, by NVIDIA's disassembler: instructions by unit, and accesses to memory.

nvdisasm comes with a CUDA toolkit or with NVIDIA's wheel nvidia-cuda-nvdisasm. The units and their rates are the table
"Throughput of Native Arithmetic Instructions" of the CUDA C++ Programming Guide, in instructions of a warp.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tegrad.nv.toolchain import CompilerMissing, find_program

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


def read(cubin: bytes) -> Code:
    """Disassemble a cubin of one kernel; CompilerMissing where there is no nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(find_program("nvdisasm")), "-c", file.name]
        return parse(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def parse(text: str) -> Code:
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


def version() -> str:
    """The disassembler's version, or an empty string where there is none."""
    try:
        said = subprocess.run([str(find_program("nvdisasm")), "--version"], capture_output=True, text=True, check=True)
    except CompilerMissing:
        return ""
    found = re.search(r"V([\d.]+)", said.stdout)
    return found[1] if found else ""
