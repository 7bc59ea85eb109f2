"""The PTX modules that a board keeps: each compiled once, the one that was not used longest goes first."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from tegrad.orin import constants, program
from tegrad.orin.constants import LINE_BYTES, ConstantCache
from tegrad.orin.program import IllegalCode, Modules


def _section(name: str) -> Any:
    return SimpleNamespace(name=name, ptx=f"text of {name}")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that were compiled, in order; each has one kernel, named by its last word."""
    texts: list[str] = []

    def load(text: str) -> Any:
        texts.append(text)
        return SimpleNamespace(kernels={text.split()[-1]: object()})

    monkeypatch.setattr(program, "load", load)
    return texts


def test_a_module_is_compiled_once(loaded: list[str]) -> None:
    modules = Modules()
    assert modules.kernel(_section("a")) is modules.kernel(_section("a"))
    assert loaded == ["text of a"]


def test_the_module_that_was_not_used_longest_goes_first(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "MOST_MODULES", 2)
    modules = Modules()
    for name in ("a", "b", "a", "c", "a", "c"):
        modules.kernel(_section(name))
    assert loaded == ["text of a", "text of b", "text of c"]
    modules.kernel(_section("b"))
    modules.kernel(_section("c"))
    modules.kernel(_section("a"))
    assert loaded[3:] == ["text of b", "text of a"]


def test_a_module_without_the_kernel_is_told(loaded: list[str]) -> None:
    section = SimpleNamespace(name="a", ptx="text of b")
    with pytest.raises(IllegalCode, match="has no entry of that name, only b"):
        Modules().kernel(section)  # type: ignore[arg-type]


def test_what_channels_keep_together_changes_under_a_lock(loaded: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their workers are threads: modules, and lines of the constant cache, of which the oldest goes."""

    class Watched(OrderedDict[Any, Any]):
        def __setitem__(self, key: Any, value: Any) -> None:
            assert owner._lock.locked()
            super().__setitem__(key, value)

        def popitem(self, last: bool = True) -> Any:
            assert owner._lock.locked()
            return super().popitem(last)

        def pop(self, *key: Any) -> Any:
            assert owner._lock.locked()
            return super().pop(*key)

    monkeypatch.setattr(program, "MOST_MODULES", 1)
    monkeypatch.setattr(constants, "MOST_LINES", 1)
    owner: Any = Modules()
    owner._kernels = Watched()
    owner.kernel(_section("a"))
    owner.kernel(_section("b"))
    assert [name for name, _ in owner._kernels] == ["b"]
    space: Any = SimpleNamespace(read=lambda at, size, client, **how: bytes(size))
    owner = ConstantCache(space)
    owner._lines = Watched()
    assert owner.read(0, 2 * LINE_BYTES, 1) == bytes(2 * LINE_BYTES)
    assert list(owner._lines) == [LINE_BYTES]
