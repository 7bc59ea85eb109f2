"""The functions that compiled kernels call, such as `tgx_fault`: who writes each of them.

Most have a Python function of their name that writes their body, below their LLVM signature (`helper`). Where a name
also says what the function does, as in `tgx_ld_global_b32x4`, one writer has all whose names begin alike (`family`).
"""

from collections.abc import Callable
from functools import wraps

from tegrad.ptx.ir import Fn, Module, V

Body = Callable[..., V | None]
"""Writes a function's body for `f` and its parameters, and gives the value that it returns, if any."""
Writer = Callable[[Module], None]
Family = Callable[[Module, str], None]
"""Writes the function of a name."""

PLAIN: dict[str, Writer] = {}
FAMILIES: dict[str, Family] = {}
"""By the beginning of a name."""


def function(ret: str, params: str, attrs: str = "nounwind") -> Callable[[Body], Writer]:
    """Make what writes a whole function, named as its body's, of what writes the body."""

    def made(body: Body) -> Writer:
        @wraps(body)
        def write(module: Module) -> None:
            f = Fn(module, body.__name__, ret, params, attrs)
            f.ret(body(f, *f.args))
            f.finish()

        return write

    return made


def helper(ret: str, params: str, attrs: str = "nounwind") -> Callable[[Body], Writer]:
    """`function`, of which a kernel can have the address by its name."""

    def kept(body: Body) -> Writer:
        PLAIN[body.__name__] = function(ret, params, attrs)(body)
        return PLAIN[body.__name__]

    return kept


def family(*beginnings: str) -> Callable[[Family], Family]:
    """Make a function the writer of those whose names begin like this."""

    def kept(write: Family) -> Family:
        FAMILIES.update(dict.fromkeys(beginnings, write))
        return write

    return kept


def writer(name: str) -> Writer:
    """What writes the function of this name. KeyError where nothing does."""
    if name in PLAIN:
        return PLAIN[name]
    write = next((write for beginning, write in FAMILIES.items() if name.startswith(beginning)), None)
    if write is None:
        raise KeyError(name)
    return lambda module: write(module, name)
