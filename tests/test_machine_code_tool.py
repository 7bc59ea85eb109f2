"""Hashes of machine code: a name does not count, everything else that a kernel is does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import machine_code

from tegrad.bench.plans import DryProgram
from tegrad.nv.compilers import compile_cuda

SOURCE = """
extern "C" __global__ void NAME(int *out) {
    __shared__ int tile[32];
    tile[threadIdx.x] = VALUE * out[threadIdx.x + 1];
    __syncthreads();
    out[0] = tile[out[1] & 31];
}
"""


class Elf:
    """A compiled kernel as `DryProgram` takes it."""

    signature = ()

    def __init__(self, name: str, value: int) -> None:
        self.name, self.lib = name, compile_cuda(SOURCE.replace("NAME", name).replace("VALUE", str(value)), "sm_87")


def row(name: str, value: int) -> dict[str, Any]:
    elf: Any = Elf(name, value)
    return machine_code.described(DryProgram(elf))


def test_a_kernel_by_another_name_is_the_same_and_other_instructions_are_not() -> None:
    first, renamed, other = row("first", 3), row("second_of_them", 3), row("first", 5)
    assert first["name"] != renamed["name"]
    assert machine_code.masked(first) == machine_code.masked(renamed)
    assert first["code"] != other["code"]
    assert first["shared"] >= 128


@pytest.mark.parametrize("key", ["code", "registers", "stack", "shared"])
def test_what_changed_is_told_by_its_place(key: str) -> None:
    before = {"name": "matvec", "code": "a", "registers": 40, "stack": 0, "shared": 1024}
    after = {**before, "name": "product", key: "b"}
    assert [*machine_code.differences({"orin decode": [before]}, {"orin decode": [after]})] == [
        "orin decode: gone: matvec", "orin decode: new: product",
    ]  # fmt: skip
    renamed = {**before, "name": "product"}
    assert not [*machine_code.differences({"orin decode": [before]}, {"orin decode": [renamed]})]


def test_a_plan_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It found no kernels, all of which were what they were."""
    monkeypatch.setattr(sys, "argv", ["machine_code.py", "--plan", "one"])
    with pytest.raises(SystemExit) as ended:
        machine_code.main()
    assert ended.value.code == 2
    assert "invalid choice: 'one'" in capsys.readouterr().err


def test_named_models_are_written_beside_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kept = {"commit": "before", "plans": {"orin a decode": [{"name": "old"}], "orin b decode": [{"name": "old"}]}}
    path = tmp_path / "machine-code.json"
    path.write_text(json.dumps(kept))
    monkeypatch.setattr(machine_code, "RESULT", path)
    monkeypatch.setattr(machine_code, "gathered", lambda names, plan: {f"orin {names[0]} decode": [{"name": "new"}]})
    monkeypatch.setattr(sys, "argv", ["machine_code.py", "--write", "b"])
    assert machine_code.main() == 0
    written = json.loads(path.read_text())
    assert written["plans"] == {"orin a decode": [{"name": "old"}], "orin b decode": [{"name": "new"}]}
    assert written["commit"] == "before"
    assert [*written["again"]] == ["b"]
