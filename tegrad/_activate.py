"""Lazy activation: when tinygrad imports its NV runtime, tegrad's device takes its place there.

An installed tegrad has a `.pth` file that imports this module, which Python reads at every start. That costs well under
a millisecond (so nothing is imported here that is not loaded already, not even typing) and does nothing until the
module `tinygrad.runtime.ops_nv` is imported. `TEGRAD=0` turns it off.
"""

import os
import sys
from _thread import _local

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

TARGET = "tinygrad.runtime.ops_nv"
OURS = "tegrad.nv."
_loading = _local()


def enabled() -> bool:
    """False when the user turned activation off with TEGRAD=0."""
    return os.environ.get("TEGRAD", "") != "0"


class _Finder:
    """Wraps the loader of tinygrad's NV runtime and of our own modules that build on it; leaves all others alone."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """The usual spec with our loader around its own; None for a module that is no concern of ours."""
        if name != TARGET and not name.startswith(OURS):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
                return spec
        return None


class _Loader:
    """The usual loader, and then tegrad's installation if this was the outermost of the modules concerned.

    A module of ours that imports the runtime is not ready while the runtime loads: installing waits for its end.
    """

    def __init__(self, loader: "Any") -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "ModuleType") -> None:
        """Run the module; install once the runtime is loaded and nothing of ours is half loaded."""
        depth = getattr(_loading, "depth", 0)
        _loading.depth = depth + 1
        try:
            if module.__name__ == TARGET and enabled():
                from tegrad.nv import require
                from tegrad.nv.deferred import deferred

                require()
                with deferred():
                    self._loader.exec_module(module)
            else:
                self._loader.exec_module(module)
        finally:
            _loading.depth = depth
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        if depth == 0 and TARGET in sys.modules and enabled():
            _install()


class paused:
    """While this is entered, what is imported installs nothing."""

    def __enter__(self) -> None:
        _loading.depth = getattr(_loading, "depth", 0) + 1

    def __exit__(self, *_: object) -> None:
        _loading.depth -= 1


def _install() -> None:
    """Install; where that does not fit, say so and leave tinygrad as it is."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
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
