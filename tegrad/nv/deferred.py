"""What tinygrad's NV runtime imports and this machine does not need, left until it is used.

The runtime imports the driver's structures in three versions, of which a machine's driver has one, Mesa's compiler, and
what runs a GPU without a driver: 90,000 lines, a third of the time that a program with tinygrad takes to start.
"""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

from tegrad.nv import TINYGRAD, tinygrad_version
from tegrad.nv.kernel import desktop_driver

AUTOGEN: Final = "tinygrad.runtime.autogen"
VERSIONS: Final = ((610, "nv_610"), (580, "nv_580"), (0, "nv_570"))
"""The driver's structures, by its first version that has them, as tinygrad chooses when it opens a device."""
UNUSED: Final = {
    "tinygrad.renderer.nir": ("NAKRenderer",),
    "tinygrad.runtime.support.nv.nvdev": ("NVDev", "NVMemoryManager"),
    "tinygrad.runtime.support.usb": ("USB3", "CustomASM24Controller", "USBMMIOInterface"),
}
"""Modules, and what the runtime takes from them."""


class Deferred:
    """A module, or what one of its names stands for, imported when it is first used."""

    def __init__(self, module: str, name: str | None = None) -> None:
        self._module, self._name = module, name
        self.__name__ = name or module

    def _real(self) -> Any:
        module = importlib.import_module(self._module)
        return module if self._name is None else getattr(module, self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._real()(*args, **kwargs)

    def __instancecheck__(self, value: object) -> bool:
        return self._module in sys.modules and isinstance(value, self._real())


def structures() -> str:
    """Which of VERSIONS the driver here has; the oldest where there is none."""
    version = desktop_driver()
    return next(name for first, name in VERSIONS if version >= first)


def own_structures() -> Any:
    """The module of them that the runtime goes on with, so that no other is imported beside it."""
    name = structures() if tinygrad_version() == TINYGRAD else VERSIONS[-1][1]
    return importlib.import_module(f"{AUTOGEN}.{name}")


@contextmanager
def deferred() -> Iterator[None]:
    """Import the runtime in here; others import what it does without as ever. Nothing of another release is deferred.

    What the runtime calls the oldest structures, with which it begins, are those that it would go on with.
    """
    if tinygrad_version() != TINYGRAD:
        yield
        return
    autogen: Any = importlib.import_module(AUTOGEN)
    chosen, own = structures(), own_structures()
    names: dict[str, Any] = {name: Deferred(f"{AUTOGEN}.{name}") for name in ("mesa", *(name for _, name in VERSIONS))}
    names |= {VERSIONS[-1][1]: own, chosen: own}
    modules = {module: _holding(module, taken) for module, taken in UNUSED.items() if module not in sys.modules}
    before = {name: vars(autogen)[name] for name in names if name in vars(autogen)}
    vars(autogen).update(names)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in names:
            del vars(autogen)[name]
        vars(autogen).update(before)
        for module in modules:
            del sys.modules[module]


def _holding(module: str, names: tuple[str, ...]) -> ModuleType:
    held = ModuleType(module)
    vars(held).update({name: Deferred(module, name) for name in names})
    return held
