"""Mutants: a small change to the board's code or tables that drops one rule, made in running processes and taken back.

    Edit("tegrad.orin.nvmap.alloc", old, new)    the function with `old` (once in its source) replaced by `new`
    Start("tegrad.orin.nvmap.alloc", statement)  the function with a statement before its first one
    Item("tegrad.orin.nodes.NODES", key, new)    a table's entry; key and new are Python expressions ("" deletes)
    Value("tegrad.orin.nvmap.MAX_NUMNODES", new) a module's or class's attribute; not for names that others imported

Expressions and new source see the names of the module. A function keeps its identity: only its code is swapped, so
tables that hold it need no change.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import sys
import textwrap
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

Undo = Callable[[], None]
_ABSENT = object()


@dataclass(frozen=True)
class Edit:
    """A function or method, by dotted name, with a piece of its source replaced."""

    target: str
    old: str
    new: str

    def apply(self, *, load: bool) -> Undo:
        _, found = resolve(self.target, load=load)
        function = _function(found)
        source = _source(function)
        if source.count(self.old) != 1:
            times = source.count(self.old)
            raise ValueError(f"{self.old!r} occurs {times} times in {function.__qualname__}, not once")
        return _swap(function, _definition(source.replace(self.old, self.new)))


@dataclass(frozen=True)
class Start:
    """A function or method, by dotted name, that begins with one more statement."""

    target: str
    statement: str

    def apply(self, *, load: bool) -> Undo:
        _, found = resolve(self.target, load=load)
        function = _function(found)
        definition = _definition(_source(function))
        definition.body[:0] = ast.parse(self.statement).body
        return _swap(function, definition)


@dataclass(frozen=True)
class Item:
    """An entry of a table (a dict, or a read-only view of one, or a list)."""

    target: str
    key: str
    new: str

    def apply(self, *, load: bool) -> Undo:
        module, table = resolve(self.target, load=load)
        if isinstance(table, types.MappingProxyType):
            table = _behind(table)
        key = eval(self.key, vars(module))
        before = table[key] if not isinstance(table, dict) else table.get(key, _ABSENT)
        if self.new:
            table[key] = eval(self.new, vars(module))
        else:
            del table[key]

        def undo() -> None:
            if before is _ABSENT:
                del table[key]
            else:
                table[key] = before

        return undo


@dataclass(frozen=True)
class Value:
    """An attribute of a module, a class or an object in one."""

    target: str
    new: str

    def apply(self, *, load: bool) -> Undo:
        owner_name, _, name = self.target.rpartition(".")
        module, owner = resolve(owner_name, load=load)
        before = getattr(owner, name)
        _set(owner, name, eval(self.new, vars(module)))
        return lambda: _set(owner, name, before)


Mutation = Edit | Start | Item | Value
Mutant = Mutation | tuple[Mutation, ...]
"""One mutation, or several that drop a rule together."""
_KINDS: dict[str, type[Any]] = {"Edit": Edit, "Start": Start, "Item": Item, "Value": Value}


def mutations(mutant: Mutant) -> tuple[Mutation, ...]:
    """A mutant's mutations."""
    return mutant if isinstance(mutant, tuple) else (mutant,)


def pack(mutant: Mutant) -> str:
    """Mutations as text, to send to another process."""
    return json.dumps([{"kind": type(one).__name__, **asdict(one)} for one in mutations(mutant)])


class Applied:
    """What is applied in this process; `change` takes it back first."""

    def __init__(self) -> None:
        self._undo: list[Undo] = []

    def change(self, packed: str, *, load: bool = False, only: tuple[str, ...] = ()) -> int:
        """Apply packed mutations in place of those applied before; how many could be applied here.

        Those of modules that this process has not loaded are left out, unless `load`; so are those outside `only`.
        """
        while self._undo:
            self._undo.pop()()
        for fields in json.loads(packed):
            one: Mutation = _KINDS[fields.pop("kind")](**fields)
            if only and not one.target.startswith(only):
                continue
            try:
                self._undo.append(one.apply(load=load))
            except NotLoaded:
                continue
        return len(self._undo)


class NotLoaded(Exception):
    """The module of a target is not loaded in this process."""


def resolve(target: str, *, load: bool) -> tuple[types.ModuleType, Any]:
    """The module of a dotted name, and the object. NotLoaded, unless `load` imports it."""
    parts = target.split(".")
    for cut in range(len(parts), 1, -1):
        name = ".".join(parts[:cut])
        module = sys.modules.get(name)
        if module is None and load:
            try:
                module = importlib.import_module(name)
            except ModuleNotFoundError:
                continue
        if module is None:
            continue
        if cut == 2 and len(parts) > 2 and not hasattr(module, parts[2]):
            break
        found: Any = module
        for part in parts[cut:]:
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        return module, found
    raise NotLoaded(target)


def _function(found: Any) -> types.FunctionType:
    """The plain function behind whatever decorators made of it."""
    if isinstance(found, property):
        found = found.fget
    if isinstance(found, functools.cached_property):
        found = found.func
    if isinstance(found, (staticmethod, classmethod)):
        found = found.__func__
    found = inspect.unwrap(found)
    if not isinstance(found, types.FunctionType):
        raise TypeError(f"{found!r} is no function")
    return found


def _source(function: types.FunctionType) -> str:
    return textwrap.dedent(inspect.getsource(function))


def _definition(source: str) -> ast.FunctionDef:
    """A function's syntax tree, without decorators."""
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef)
    definition.decorator_list = []
    return definition


def _swap(function: types.FunctionType, definition: ast.FunctionDef) -> Undo:
    """Give a function the code of a definition."""
    tree = ast.Module([definition], [])
    free = function.__code__.co_freevars
    if free:  # zero-argument super, and variables of an outer function
        outer = ast.parse(f"def _outer({', '.join(free)}):\n    return {definition.name}").body[0]
        assert isinstance(outer, ast.FunctionDef)
        outer.body.insert(0, definition)
        tree.body = [outer]
    names = dict(function.__globals__)
    annotations = 1 << 24  # from __future__ import annotations
    code = compile(ast.fix_missing_locations(tree), f"<mutant of {function.__qualname__}>", "exec", annotations, True)
    exec(code, names)
    made = names["_outer"](*free) if free else names[definition.name]
    before = function.__code__
    function.__code__ = made.__code__

    def undo() -> None:
        function.__code__ = before

    return undo


def _behind(view: Any) -> Any:
    """The dict behind a read-only view."""
    import gc

    (found,) = [one for one in gc.get_referents(view) if isinstance(one, dict)]
    return found


def _set(owner: Any, name: str, value: object) -> None:
    if inspect.isclass(owner) or isinstance(owner, types.ModuleType):
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)  # a frozen dataclass
