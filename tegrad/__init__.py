"""tegrad: tinygrad's NV backend on Jetson Orin and Hopper, GGUF language models, and an emulated Orin."""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 (a checkout is used without being installed)
    from tegrad._python import complaint

    raise ImportError(complaint())

from tegrad import _activate as _activate
from tegrad.errors import TegradError

TYPE_CHECKING = False  # importing typing would cost every start of Python, since the .pth file imports this
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tegrad.llm.api import LLM, Reply
    from tegrad.nv.record import Recorded

__version__ = "0.1.0"

__all__ = ["LLM", "Reply", "TegradError", "__version__", "choose_device", "record"]


def __getattr__(name: str) -> Any:
    """What only programs that use models need, imported when it is first named."""
    if name not in ("LLM", "Reply"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tegrad.hub.cache import located
    from tegrad.llm import api

    api.located = located
    return getattr(api, name)


def choose_device(device: str | None = None) -> None:
    """Settle where this program runs; call it before tinygrad is imported. NV unless `device` or DEV says otherwise,
    an emulated Orin if there is no GPU, which a line on stderr tells. InstallError, SettingError."""
    from tegrad.llm.start import choose_device as choose

    choose(device)


def record(function: Callable[..., Any], *examples: Any) -> Recorded:
    """Record a tinygrad function for replay on the NV device. See tegrad.nv.record.record and docs/record.md."""
    from tegrad.nv import install

    install()
    from tegrad.nv.record import record as recorded

    return recorded(function, *examples)
