"""Memory that other host threads store to is read once: no compiler may read a packet's words at two times."""

from __future__ import annotations

import platform
import re
from itertools import pairwise

import pytest

from tegrad.ptx import jit
from tegrad.ptx.helpers import writer
from tegrad.ptx.ir import Module

llvm = pytest.importorskip("llvmlite.binding")
_LOAD = re.compile(r"\s+v?mov\w+\s+(-?\d*)\((%r[a-ds]\w+|%r\d+),(%r\w+)\), %([xyz])mm\d+")
_BYTES = {"x": 16, "y": 32, "z": 64}


def assembly(name: str, cpu: str) -> str:
    """A helper's code for a processor of this name."""
    module = Module()
    writer(name)(module)
    jit.host()
    parsed = llvm.parse_assembly(module.text())
    target = llvm.Target.from_triple("x86_64-unknown-linux-gnu")
    machine = target.create_target_machine(cpu=cpu, opt=2, reloc="pic", codemodel="small", jit=True)
    parsed.triple = "x86_64-unknown-linux-gnu"
    parsed.data_layout = str(machine.target_data)
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(parsed, builder)
    return str(machine.emit_assembly(parsed))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="looks at x86-64 code")
@pytest.mark.parametrize("cpu", ["haswell", "znver3", "skylake-avx512"])
@pytest.mark.parametrize("name", ["tgx_ldv_global_b32x4", "tgx_ldv_global_b32x2"])
def test_a_row_of_lanes_is_read_once(name: str, cpu: str) -> None:
    reads: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for line in assembly(name, cpu).splitlines():
        if found := _LOAD.fullmatch(line):
            at = int(found[1] or 0)
            reads.setdefault((found[2], found[3]), []).append((at, at + _BYTES[found[4]]))
    row = max(reads.values(), key=len)
    row.sort()
    assert row[0][0] == 0
    assert all(end <= start for (_, end), (start, _) in pairwise(row)), row
