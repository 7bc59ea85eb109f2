"""The contract with tinygrad: what is replaced, and which private names are used, stands in nv/compat.py alone."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tegrad
import tegrad.nv
from tegrad.nv import compat

PACKAGE = Path(tegrad.__file__).parent
SOURCES = [path for path in PACKAGE.rglob("*.py") if path.name != "compat.py"]
PRIVATE = {path.rpartition(".")[2] for path in compat.PRIVATE}
PRIVATE |= {path.rpartition(".")[2] for path in compat.REPLACED if "._" in path}
Scan = Callable[[ast.AST], Iterator[str]]
OURS = {"_tegrad_installed"}
"""Attributes of ours in tinygrad's modules."""
HAVE = """
import importlib, inspect, json, sys
from tegrad.nv import compat
found = {}
for path in json.load(sys.stdin):
    owner, name = compat.found(path)
    there = hasattr(owner, name) or inspect.isclass(owner) and f"self.{name}" in inspect.getsource(owner)
    found[path] = [bool(there), getattr(getattr(owner, name, None), "__module__", None) or ""]
print(json.dumps(found))
"""


def looked_up(before: str, **variables: str) -> dict[str, list[Any]]:
    """Of every name whether it is there, and which module it is from, in a process of its own."""
    paths = json.dumps([*compat.REPLACED, *compat.PROFILED, *compat.PRIVATE])
    done = subprocess.run(
        [sys.executable, "-c", before + HAVE],
        input=paths, env={**os.environ, **variables}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found: dict[str, list[Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_release_has_every_name() -> None:
    found = looked_up("import tinygrad.runtime.ops_nv, tinygrad.codegen.opt.heuristic\n", TEGRAD="0")
    assert found.keys() == {*compat.REPLACED, *compat.PROFILED, *compat.PRIVATE}
    assert not [path for path, (there, _) in found.items() if not there]
    assert not [path for path, (_, module) in found.items() if module.startswith("tegrad")]


def test_every_name_to_be_replaced_is_ours_afterwards() -> None:
    found = looked_up("import tegrad.nv; tegrad.nv.install()\n")
    listed = {f"{compat.NV}.NVDevice.ifaces"}
    stock = [path for path in compat.REPLACED if path not in listed and not found[path][1].startswith("tegrad")]
    assert not stock
    tegrad.nv.install()
    owner, name = compat.found(*listed)
    assert [one.__name__ for one in getattr(owner, name)][:2] == ["TegraIface", "NVKIface"]


def test_a_name_that_is_not_listed_cannot_be_replaced() -> None:
    with pytest.raises(KeyError, match=r"tinygrad.helpers.getenv is not among the names that tegrad replaces"):
        compat.replace("tinygrad.helpers.getenv", None)


def test_what_was_replaced_can_be_had_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from tinygrad import helpers

    path = "tinygrad.helpers.colored"
    stock = helpers.colored
    monkeypatch.setattr(compat, "REPLACED", {path: "for this test"})
    monkeypatch.setattr(compat, "_published", {})
    try:
        for ours in (len, str):
            compat.replace(path, ours)
            assert helpers.colored is ours
            assert compat.published(path) is stock
    finally:
        compat.restore(path)
    assert helpers.colored is stock


def private_uses(tree: ast.AST) -> Iterator[str]:
    """Private names of tinygrad's that a source reads, calls or imports; a method that overrides one may call it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tinygrad"):
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE:
            of = node.value
            own = isinstance(of, ast.Name) and of.id in ("self", "cls")
            above = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "super"
            if not own and not above:
                yield node.attr


def assigned(tree: ast.AST) -> Iterator[str]:
    """Attributes of modules and classes imported from tinygrad that a source puts something in the place of."""
    taken = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tinygrad"
        for alias in node.names
    } | {"ops_nv"}
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else []
        flat = [one for target in targets for one in (target.elts if isinstance(target, ast.Tuple) else [target])]
        for target in flat:
            root = target
            while isinstance(root, ast.Attribute):
                root = root.value
            parts = ast.unparse(target).split(".")
            theirs = isinstance(target, ast.Attribute) and isinstance(root, ast.Name) and root.id in taken
            if theirs and parts[-1] not in OURS | {"value"}:  # a ContextVar's value is for everybody to set
                yield ".".join(parts)


@pytest.mark.parametrize(("of", "source", "wanted"), [
    (private_uses, "x = buffer._buf", ["_buf"]),
    (private_uses, "from tinygrad.dtype import _to_np_dtype", ["_to_np_dtype"]),
    (private_uses, "def f(self): return super()._copyin(self._base)", []),
    (assigned, "from tinygrad.engine import jit\njit.f = g", ["jit.f"]),
    (assigned, "from tinygrad.uop.ops import UOp\nUOp.a, UOp.b = c, d", ["UOp.a", "UOp.b"]),
    (assigned, "from tinygrad.helpers import DEBUG\nDEBUG.value = 2", []),
])  # fmt: skip
def test_the_scans_see_what_they_look_for(
    of: Callable[[ast.AST], Iterator[str]], source: str, wanted: list[str]
) -> None:
    assert list(of(ast.parse(source))) == wanted


@pytest.mark.parametrize("scan", [private_uses, assigned])
def test_no_other_module_uses_a_private_name_or_replaces_one(scan: Scan) -> None:
    found = {str(path.relative_to(PACKAGE)): sorted(scan(ast.parse(path.read_text()))) for path in SOURCES}
    assert not {path: names for path, names in found.items() if names}


def overridden(ours: type) -> Iterator[tuple[str, Any, Any]]:
    """Methods of a class of ours that take the place of one of tinygrad's: name, ours, tinygrad's."""
    for name, value in vars(ours).items():
        if inspect.isfunction(value) and (name == "__init__" or not name.startswith("__")):
            theirs = next((vars(base)[name] for base in ours.__mro__[1:] if name in vars(base)), None)
            if inspect.isfunction(theirs) and theirs.__module__.startswith("tinygrad"):
                yield name, value, theirs


def test_methods_that_override_take_what_tinygrad_gives_them() -> None:
    tegrad.nv.install()
    modules = [module for name, module in sys.modules.items() if name.startswith("tegrad.nv.")]
    classes = {
        thing for module in modules for thing in vars(module).values()
        if inspect.isclass(thing) and thing.__module__.startswith("tegrad")
    }  # fmt: skip
    seen, wrong = 0, []
    for one in classes:
        for name, ours, theirs in overridden(one):
            seen += 1
            wanted = inspect.signature(theirs).parameters.values()
            if name == "__init__" or any(one.kind is one.VAR_POSITIONAL for one in wanted):
                continue
            try:
                inspect.signature(ours).bind(*(one.name for one in wanted if one.kind is one.POSITIONAL_OR_KEYWORD))
            except TypeError as error:
                wrong.append(f"{ours.__qualname__}: {error}")
    assert seen > 40
    assert not wrong
