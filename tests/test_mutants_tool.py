"""tools/mutants: what a mutant changes, how the drawn ones are chosen, and which tests one is held against."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "mutants"

PYTHON = '''
def f(a: int = 2) -> bool:
    """Nothing 1 + 1 in here."""
    g(a)
    if a < 3 and a in (5,):
        return not a
    a += 1
    return f"{a + 1}" == "x"
'''
CUDA = """#define N 4 // 4 < 5
__device__ int f(int a) {
  /* 1 + 1 */
  __syncthreads();
  if (a < 0x10 && !b) return a + 7;  // a > 8
  return "a < 1"[0] * 1.5f;
}
"""


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(TOOL))
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(TOOL)):
            del sys.modules[name]


def test_each_operator_changes_what_it_says_and_nothing_within_text(tool: None) -> None:
    import operators

    found = {(change.operator, change.before, change.after) for change in operators.python(PYTHON)}
    assert found == {
        ("constant", "2", "3"),
        ("drop a call", "g(a)", "pass"),
        ("negate a condition", "a < 3 and a in (5,)", "(not (a < 3 and a in (5,)))"),
        ("and, or", "a < 3 and a in (5,)", "(a < 3 or a in (5,))"),
        ("comparison", "a < 3", "(a <= 3)"),
        ("comparison", "a in (5,)", "(a not in (5,))"),
        ("constant", "3", "4"),
        ("constant", "5", "6"),
        ("return nothing", "return not a", "return None"),
        ("drop a sign", "not a", "(a)"),
        ("arithmetic", "a += 1", "a -= 1"),
        ("constant", "1", "2"),
        ("return nothing", 'return f"{a + 1}" == "x"', "return None"),
        ("comparison", 'f"{a + 1}" == "x"', "(f'{a + 1}' != 'x')"),
    }
    found = {(change.operator, change.before, change.after) for change in operators.cuda(CUDA)}
    assert found == {
        ("drop a call", "__syncthreads();", ";"),
        ("comparison", " < ", " <= "),
        ("constant", "0x10", "0x11"),
        ("and, or", " && ", " || "),
        ("drop a sign", "!", ""),
        ("arithmetic", " + ", " - "),
        ("constant", "7", "8"),
        ("arithmetic", " * ", " / "),
        ("constant", "1.5f", "2.5f"),
        ("constant", "0", "1"),
    }


def test_a_mutant_is_its_file_with_the_change_and_of_no_other_text(tool: None) -> None:
    import operators

    for change in operators.python(PYTHON):
        mutant = operators.apply(PYTHON, change)
        assert mutant != PYTHON
        compile(mutant, "mutant", "exec")
    with pytest.raises(ValueError, match="not what it was"):
        operators.apply(PYTHON.replace("g(a)", "g(b)"), next(c for c in operators.python(PYTHON) if c.before == "g(a)"))


def test_a_seed_draws_so_many_of_each_part_and_none_twice(tool: None) -> None:
    import draw

    rows = draw.draw()
    assert len(rows) == sum(draw.PARTS.values()) == 300
    assert len({(row["file"], row["start"], row["end"], row["after"]) for row in rows}) == 300
    for part in ("nv", "orin", "uapi", "llm"):
        assert sum(row["file"].startswith(f"tegrad/{part}/") and row["file"].endswith(".py") for row in rows) >= 40
    assert sum(row["file"].endswith((".cu", ".cuh")) for row in rows) >= 60


CALLER = """
import os, subprocess, sys
from part import called, uncalled
called()
if os.fork() == 0:
    from part import in_a_child
    in_a_child()
    os._exit(0)
os.wait()
open("kernel.cu").close()
"""
PART = "def called(): pass\ndef uncalled(): pass\ndef in_a_child(): pass\n"


def test_calls_of_every_process_are_recorded_at_once(tool: None, tmp_path: Path) -> None:
    import cover

    (tmp_path / "part.py").write_text(PART)
    (tmp_path / "hook.pth").write_text(cover.hook())
    (tmp_path / "caller.py").write_text(f"import site; site.addsitedir({str(tmp_path)!r})\n{CALLER}")
    (tmp_path / "kernel.cu").touch()
    environment = {**os.environ, "TEGRAD_CALLS": str(tmp_path / "calls"), "TEGRAD_CALLS_ROOT": f"{tmp_path}/"}
    subprocess.run([sys.executable, "caller.py"], cwd=tmp_path, env=environment, check=True)
    found = set((tmp_path / "calls").read_text().splitlines())
    assert {"part.py\t1", "part.py\t3", "kernel.cu\t0"} <= found
    assert "part.py\t2" not in found


GATE = "X = 1\n\n@decorated\ndef f():\n    return 2\n"


def drawn(file: str, text: str, before: str) -> dict[str, Any]:
    """A row of a drawn mutant: a digit that becomes 9."""
    at = text.index(before)
    where = {"start": at, "end": at + 1, "line": text.count("\n", 0, at) + 1}
    return {"file": file, **where, "operator": "constant", "before": before, "after": "9"}


def test_a_mutant_is_held_against_its_modules_own_tests_then_the_quickest(
    tool: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cover
    import run

    (tmp_path / "calls").mkdir()
    (tmp_path / cover.COMMIT).write_text("recorded")
    monkeypatch.setattr(run, "git", lambda *_: GATE)
    called = {
        "tests/slow.py": ["part/gate.py\t3", "part/gate.py\t1", "part/kernels/gates.cu\t0"],
        "tests/quick.py": ["part/gate.py\t3", "part/kernels/gates.cu\t0"],
        "tests/no.py": [],
        "tests/test_gate.py": [],
        "tests/test_gates_open.py": ["part/gate.py\t3"],
        "tests/part/test_other.py": ["part/gate.py\t3", "part/kernels/gates.cu\t0"],
    }
    for test, lines in called.items():
        cover.calls_of(tmp_path, test).write_text("\n".join(lines))
    seconds = dict(zip(called, (5.0, 1.0, 0.1, 7.0, 9.0, 6.0), strict=True))

    def chosen(row: dict[str, Any]) -> list[str]:
        found: list[str] = run.chosen(tmp_path, row, seconds, "drawn")
        return found

    of_function, of_module = drawn("part/gate.py", GATE, "2"), drawn("part/gate.py", GATE, "1")
    own, others = ["tests/test_gate.py"], ["tests/part/test_other.py", "tests/quick.py", "tests/slow.py"]
    assert chosen(of_function) == [*own, "tests/test_gates_open.py", *others]
    assert chosen(of_module) == [*own, "tests/slow.py"]
    assert chosen({"file": "part/kernels/gates.cu"}) == others
    with monkeypatch.context() as patch:  # of a line that is there no more, any function of the file will do
        patch.setattr(run, "placed", lambda *_: None)
        assert chosen(of_function) == [*own, "tests/test_gates_open.py", *others]
    monkeypatch.setattr(run, "MOST_S", 8.5)
    assert chosen(of_function) == [*own, "tests/quick.py"]
    assert chosen({"file": "tegrad/conformance/s2_nvmap.py", "line": 1}) == ["tests/conformance/test_mutants.py"]


def test_what_fails_without_the_mutant_too_has_noticed_nothing(
    tool: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import run

    source = tmp_path / "gate.py"
    source.write_text(GATE)
    monkeypatch.setattr(run, "chosen", lambda *_: ["broken", "good"])
    monkeypatch.setattr(run, "git", lambda *_: GATE)
    monkeypatch.setattr(run, "lay", lambda copy, commit: copy)
    for notices, outcome in (("9", "killed"), ("3", "survived")):
        seen: list[tuple[str, str]] = []

        def killer(copy: Path, cache: Path, test: str, seconds: float, notices: str = notices, seen: Any = seen) -> str:
            seen.append((test, source.read_text()[4]))
            return test if test == "broken" or source.read_text()[4] == notices else ""

        monkeypatch.setattr(run, "_killer", killer)
        row = drawn("gate.py", GATE, "1")
        found = run.held(tmp_path, tmp_path, row, {"broken": 1.0, "good": 2.0}, "drawn")
        assert found["outcome"] == outcome
        assert ("broken", "9") in seen
        assert source.read_text() == GATE
        table = json.loads((tmp_path / f"sound-{tmp_path.name}.json").read_text())
        assert not table[f"{GATE.strip()}:broken"]
        (tmp_path / f"sound-{tmp_path.name}.json").unlink()
    assert "good" not in [test for test, text in seen if text == "1"]  # nothing failed there
