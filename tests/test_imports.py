"""Imports follow the arrows of the design, downward only; tinygrad is imported where it may be."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "tegrad"

ALLOWED = {
    "hw": set(),
    "ptx": set(),
    "uapi": {"hw"},
    "orin": {"hw", "uapi", "ptx"},
    "nv": {"hw", "uapi"},
    "llm": {"nv", "hw"},
    "bench": {"hw", "uapi", "ptx", "nv", "llm", "diag"},
    "diag": {"hw", "uapi", "nv", "llm", "conformance"},
    "hub": {"llm"},
    "serve": {"hub", "llm"},
    "chat": {"hub", "llm"},
    "conformance": {"hw", "uapi", "nv"},
}
"""What each part may import of the others, besides itself and tegrad.errors. cli may import everything."""

LAZY = {("nv/kernel.py", "orin.client")}
"""Imports that break the rule on purpose, inside a function: the one place that picks the emulated board."""

ANYWHERE = {"_python", "errors", "installed", "machine", "models"}
TINYGRAD = {"nv", "llm", "bench"}
"""Parts that may import tinygrad; cli reaches it through them."""


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """(absolute dotted name, whether at module level) of everything a file imports, type-checking imports included."""
    tree = ast.parse(path.read_text(), filename=str(path))
    nested = {
        id(n) for f in ast.walk(tree) if isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef)) for n in ast.walk(f)
    }
    package = ("tegrad", *path.relative_to(ROOT).parent.parts)
    for node in ast.walk(tree):
        top = id(node) not in nested
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            yield from ((f"{module}.{alias.name}", top) for alias in node.names)


def violations(path: Path) -> list[str]:
    where = path.relative_to(ROOT).as_posix()
    part = where.split("/")[0] if "/" in where else ""
    found = []
    for name, top in imports(path):
        if name.split(".")[0] == "tinygrad" and part and part not in TINYGRAD:
            found.append(f"{where} imports {name}: tinygrad belongs in {', '.join(sorted(TINYGRAD))}")
        if name.split(".")[0] != "tegrad" or part in ("", "cli") or name == "tegrad":
            continue
        target = name.split(".")[1]
        is_part = (ROOT / target).is_dir()
        if not is_part or target == part or target in ANYWHERE or target in ALLOWED.get(part, set()):
            continue
        if not top and any(where == file and name.startswith(f"tegrad.{module}") for file, module in LAZY):
            continue
        found.append(f"{where} imports {name}: {part} may import only {sorted(ALLOWED.get(part, set())) or 'nothing'}")
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_imports_follow_the_arrows(path: Path) -> None:
    assert violations(path) == []


def test_every_part_has_a_rule() -> None:
    parts = {p.name for p in ROOT.iterdir() if (p / "__init__.py").exists()}
    assert parts - set(ALLOWED) - {"cli", "models"} == set()


@pytest.mark.parametrize(
    ("where", "source"),
    [
        ("hw/x.py", "from tegrad.uapi import structs"),
        ("hw/x.py", "from ..uapi import structs"),
        ("ptx/x.py", "import tegrad.hw.chips"),
        ("uapi/x.py", "def f():\n    import tegrad.orin.client"),
        ("nv/device.py", "def f():\n    from tegrad.orin import client"),
        ("nv/kernel.py", "from tegrad.orin import client"),
        ("orin/x.py", "import tinygrad.helpers"),
    ],
)
def test_a_forbidden_import_is_found(where: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "tegrad"
    for part in ALLOWED:
        (root / part).mkdir(parents=True)
    (root / where).write_text(source)
    monkeypatch.setitem(globals(), "ROOT", root)
    assert len(violations(root / where)) == 1


TESTS = Path(__file__).parent
IN_A_STRING = re.compile(r"\b(?:from|import)\s+([\w.]+)")


def imports_of_tests(source: str, tests: set[str]) -> list[str]:
    """The modules of tests that a file imports, itself or in a program that it writes as a string."""
    found = []
    named = tests.intersection(re.findall(r"\btest_\w+", source))
    for node in ast.walk(ast.parse(source)) if named else ():
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module or ''}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = IN_A_STRING.findall(node.value)
        else:
            continue
        found += [part for name in names for part in name.split(".") if part in tests]
    return found


def test_no_module_of_tests_is_imported_by_another() -> None:
    """What several need is a fixture, or a module beside them that is no test: a test file may change on its own."""
    files = sorted(TESTS.rglob("*.py"))
    tests = {path.stem for path in files if path.stem.startswith("test_")}
    found = {path: imports_of_tests(path.read_text(), tests - {path.stem}) for path in files}
    assert {path.relative_to(TESTS).as_posix(): names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import test_a",
        "import tests.nv.test_a as a",
        "from test_a import helper",
        "from . import test_a",
        "def f():\n    from tests.nv.test_a import helper",
        "PROGRAM = 'import sys; from test_a import helper'",
    ],
)
def test_an_import_of_a_test_is_found(source: str) -> None:
    assert imports_of_tests(source, {"test_a"}) == ["test_a"]
    assert imports_of_tests(source, {"test_b"}) == []


def test_every_test_file_has_a_name_of_its_own() -> None:
    """pytest knows a file in a folder that is no package by its name alone."""
    files = Path(__file__).parent.rglob("test_*.py")
    seen = Counter(path.name for path in files if not (path.parent / "__init__.py").exists())
    assert [name for name, count in seen.items() if count > 1] == []


def test_no_other_test_takes_a_board_of_the_drivers_tests() -> None:
    """A process starts the board of a spec once; tests/orin starts its boards in ways of its own."""
    tests = Path(__file__).parent
    users: dict[str, set[str]] = {"orin": set(), "": set()}
    for path in tests.rglob("*.py"):
        part = "orin" if path.is_relative_to(tests / "orin") else ""
        users[part] |= set(re.findall(r'"([a-z0-9-]+:\d+[MG]iB)"', path.read_text()))
    assert users["orin"]
    assert sorted(users["orin"] & users[""]) == []


@pytest.mark.parametrize("folder", ["tegrad/bench", "examples", "examples/odometry", "tools", "tools/aarch64"])
def test_no_module_beside_a_script_hides_one_of_pythons_own(folder: str) -> None:
    """A script's folder comes first where it imports: `token.py` beside rows.py ended every process of a bench."""
    names = {path.stem for path in (ROOT.parent / folder).glob("*.py")}
    assert names
    assert sorted(names & sys.stdlib_module_names) == []
