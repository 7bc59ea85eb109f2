"""Lazy activation: when tinygrad imports its NV runtime, tegrad's device takes its place there.

An installed tegrad has a `.pth` file that imports this module, which Python reads at every start. That costs well under
a millisecond (so nothing is imported here that is not loaded already, not even typing) and does nothing until the
module `tinygrad.runtime.ops_nv` is imported. `TEGRAD=0` turns it off.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

TARGET = "tinygrad.runtime.ops_nv"


def enabled() -> bool:
    """False when the user turned activation off with TEGRAD=0."""
    return os.environ.get("TEGRAD", "") != "0"


class _Finder:
    """A finder that looks at one import, once, and makes its loader do one step more."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The usual spec of tinygrad's NV runtime with our loader around its own; None for every other module."""
        if name != TARGET:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        for finder in sys.meta_path:
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """tinygrad's own loader, and then tegrad's installation."""

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Run the module, then install tegrad into it."""
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        _install()


def _install() -> None:
    """Install; where that does not fit, say so and leave tinygrad as it is."""
    from tegrad.errors import TegradError

    try:
        from tegrad.nv import install

        install()
    except TegradError as error:
        import warnings

        warnings.warn(f"tegrad is not active: {error}", RuntimeWarning, stacklevel=2)


def activate() -> None:
    """Install tegrad into tinygrad's NV runtime: now if that is imported, else as soon as it is. Idempotent."""
    if not enabled():
        return
    if TARGET in sys.modules:
        _install()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


activate()
