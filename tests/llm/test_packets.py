"""The step in one launch hands vectors on in packets of 128 bits with an epoch: machine code must load them whole."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import SHAPES, TYPE, write

from tegrad.bench.plans import DryDevice, model
from tegrad.hw.chips import CHIPS
from tegrad.llm import programs
from tegrad.llm.cache import KvCache
from tegrad.llm.config import Config
from tegrad.llm.formats import F16, Q8_0
from tegrad.llm.gguf import Gguf
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.state import States
from tegrad.nv.compilers import CompilerMissing
from tegrad.nv.cubin import read_ptx
from tegrad.nv.toolchain import find_program

PACKET = re.compile(r"\bld\.relaxed\.gpu\.global\.v4\.u32\b")
WHOLE = re.compile(r"\bLDG\.E\.128\.STRONG\.GPU\b")


@pytest.mark.parametrize(
    ("name", "kind"),
    [("gemma3", Q8_0), ("olmo2", F16), ("gemma4 small", Q8_0)],
    ids=["gemma3", "olmo2", "gemma4"],
)
@pytest.mark.parametrize("board", ["gh100", "agx-orin-64gb"])
def test_machine_code_has_a_load_of_128_bits_for_each_packet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, board: str, name: str, kind: Any
) -> None:
    """Of a load whose middle words nobody uses ptxas makes two: data may then be older than their epoch."""
    try:
        disassembler = find_program("nvdisasm")
    except CompilerMissing:
        pytest.skip("no nvdisasm")
    made: list[bytes] = []
    compiled = programs.compile_kernel
    monkeypatch.setattr(programs, "compile_kernel", lambda *a, **how: made.append(compiled(*a, **how)) or made[-1])
    device = DryDevice(CHIPS[board])
    with Gguf.open(write(tmp_path / "model.gguf", replace(SHAPES[name], bias=False), TYPE.F16)) as file:
        config = Config.read(file)
    with KvCache(device, config, 64) as cache, PersistentPlan(model(config, kind, device), States(device), cache):
        cubin = made[-1]
    section = read_ptx(cubin)
    assert section is not None
    (tmp_path / "persistent.cubin").write_bytes(cubin)
    code = subprocess.run(
        [disassembler, "-c", tmp_path / "persistent.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert len(WHOLE.findall(code)) >= len(PACKET.findall(section.ptx)) > 10
