"""TEGRAD_PROFILE: a program's kernels, copies, waits and host work are written as it ends, with a board's counts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.board

PROGRAM = """
import sys
import numpy as np
from tinygrad import Tensor, TinyJit, Device
import tegrad
from tegrad.nv.iface import TegraIface

TegraIface.unified_memory = "apart" not in sys.argv
a = Tensor(np.ones((8, 8), np.float32)).realize()

@TinyJit
def f(x):
    return ((x @ a).relu().realize() @ a).realize()

for _ in range(4):
    y = f(Tensor(np.ones((8, 8), np.float32)).realize())
assert (y.numpy() == 64).all()
with tegrad.record(lambda x: x + 1, np.zeros(16, np.float32)) as recorded:
    for _ in range(3):
        recorded.run()
    assert recorded.outputs[0].tolist() == [1] * 16
if "closed" in sys.argv:
    Device["NV"].close()
"""


def profiled(folder: Path, *words: str, board: str = "agx-orin-64gb", program: str = PROGRAM) -> Any:
    (path := folder / "program.py").write_text(program)
    environment = {**os.environ, "DEV": "NV", "TEGRAD_BOARD": board, "TEGRAD_PROFILE": str(folder)}
    done = subprocess.run([sys.executable, str(path), *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (told,) = (json.loads(file.read_text()) for file in folder.glob("*.json"))
    assert told["command"] == [str(path), *words]
    return told


@pytest.mark.parametrize(
    ("words", "board"), [((), "agx-orin-64gb"), (("closed",), "agx-orin-64gb"), (("apart",), "gh100")],
    ids=["to its end", "closed before", "memory of its own"],
)  # fmt: skip
def test_every_kernel_copy_and_wait_of_a_program_is_told(tmp_path: Path, words: tuple[str, ...], board: str) -> None:
    told = profiled(tmp_path, *words, board=board)
    assert told["board"] == board
    kinds: dict[str, list[Any]] = {}
    for kind, *span in told["spans"]:
        kinds.setdefault(kind, []).append(span)
    kernels = [(name, size) for _, name, _, _, size in kinds["kernel"]]
    launched = {name: counts["launches"] for name, counts in told["counts"].items()}
    assert {name: sum(one == name for one, _ in kernels) for name, _ in kernels} == launched
    (recorded,) = {name for name in launched if name.startswith("E_")}
    assert launched[recorded] >= 3
    products = [size for name, size in kernels if name != recorded]
    assert products == [3 * 8 * 8 * 4] * 2 * 4
    assert all(counts["instructions"] and counts["bytes_read"] for counts in told["counts"].values())
    copied = [(name, size) for _, name, _, _, size in kinds["copy"]]
    assert ("NPY -> NV" if board != "gh100" else "TINY -> NV", 256) in copied
    assert ("NV -> TINY", 256) in copied
    assert kinds["wait"]
    assert any(name == "realize" for _, name, *_ in kinds["host"])
    begins = [span[2] for spans in kinds.values() for span in spans]
    assert max(begins) - min(begins) < 600e6, "one clock"
    assert all(span[3] >= 0 for spans in kinds.values() for span in spans)


def test_a_program_that_opens_no_device_leaves_nothing(tmp_path: Path) -> None:
    (path := tmp_path / "program.py").write_text("import tegrad.nv; tegrad.nv.install()")
    environment = {**os.environ, "TEGRAD_PROFILE": str(tmp_path)}
    done = subprocess.run([sys.executable, str(path)], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert list(tmp_path.glob("*.json")) == []


def test_a_folder_that_is_none_is_told() -> None:
    environment = {**os.environ, "TEGRAD_PROFILE": "/nowhere"}
    command = [sys.executable, "-c", "import tegrad.nv; tegrad.nv.install()"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "TEGRAD_PROFILE=/nowhere is no folder: make it, or unset the variable" in done.stderr
