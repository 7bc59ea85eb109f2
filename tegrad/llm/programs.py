"""Our CUDA C kernels: a source of this package, compiled for a device's chip and loaded as a program.

A source `kernels/NAME.cu` holds one kernel, called NAME; what several share lies in `kernels/*.cuh`, and `formats.cuh`
is made of the table of formats. Sizes and formats are macros, so that every model has kernels of its own. Compiled
kernels are kept on disk (`tegrad.nv.compilers`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib import resources
from typing import Any, Final, TypeAlias

from tegrad.llm import formats
from tegrad.nv.compilers import CompileFailed, compile_cuda
from tegrad.nv.gpu import Gpu
from tegrad.nv.memory import available_memory

OPTIONS: Final = ("--std=c++17",)
_ONCE: Final = "#pragma once"
_INCLUDE: Final = re.compile(r'^#include "([\w.]+)"[ \t]*$', re.MULTILINE)


@functools.cache
def source(file: str) -> str:
    """The text of `kernels/FILE` with our headers in their places, once those that say so: the cache's key must see all
    of it."""
    return _expand(file, set())


def _expand(file: str, seen: set[str]) -> str:
    text = (
        formats.header() if file == formats.HEADER else (resources.files("tegrad.llm") / "kernels" / file).read_text()
    )
    if _ONCE in text:
        seen.add(file)

    def included(match: re.Match[str]) -> str:
        name = match[1]
        after = text.count("\n", 0, match.end()) + 2
        return "" if name in seen else f'#line 1 "{name}"\n{_expand(name, seen)}\n#line {after} "{file}"'

    return _INCLUDE.sub(included, text)


def compile_kernel(name: str, arch: str, *, dynamic_shared: int | None = None, **defines: object) -> bytes:
    """The cubin of kernel `name` for a chip such as `sm_87`, with macros defined; CompileFailed carries the log."""
    macros = [f"-D{key}={int(value) if isinstance(value, bool) else value}" for key, value in sorted(defines.items())]
    return compile_cuda(source(f"{name}.cu"), arch, (*OPTIONS, *macros), dynamic_shared=dynamic_shared)


def load_kernel(
    device: Gpu,
    name: str,
    *,
    buffers: int,
    values: int = 0,
    dynamic_shared: int | None = None,
    features: str = "",
    cubin: bytes | None = None,
    **defines: object,
) -> Any:
    """Kernel `name` as a program of an opened NV device: `buffers` pointers, then `values` 32-bit integers.

    `features` "a" compiles for the chip's very architecture (sm_90a), with instructions that no other one has. `cubin`
    is what was compiled of this already.
    """
    lib = cubin or compile_kernel(name, device.arch + features, dynamic_shared=dynamic_shared, **defines)
    return device.load_program(lib, name, buffers, values)


MOST_COMPILERS: Final = 8
"""Kernels that are compiled at once."""
COMPILER_BYTES: Final = 400 << 20
"""Memory of one that is compiled, as NVRTC 12.6 was seen to take on x86-64."""
Key: TypeAlias = tuple[str, str, tuple[tuple[str, Any], ...]]
"""A kernel's name, architecture, and how it is compiled."""
_noted: ContextVar[set[Key] | None] = ContextVar("_noted", default=None)
"""Kernels that Programs were asked for and did not load."""
_ready: Final[dict[Key, bytes]] = {}
"""Cubins that wait to be loaded."""


@contextmanager
def compiled_together() -> Iterator[None]:
    """At its end, the kernels that Programs were asked for within it are compiled side by side.

    Within it a kernel that is not loaded yet is None, so that launches can be made but not recorded. One that does not
    compile says so when it is loaded. CompilerMissing.
    """
    noted: set[Key] = set()
    token = _noted.set(noted)
    try:
        yield
    finally:
        _noted.reset(token)
    if not (noted := noted - _ready.keys()):
        return
    if (workers := min(compilers(), len(noted))) == 1:
        return  # they are compiled as they are loaded
    pool = ThreadPoolExecutor(workers, "tegrad-compiler")
    try:
        _ready.update({key: made for key, made in zip(noted, pool.map(_compiled, noted), strict=True) if made})
    finally:
        pool.shutdown(cancel_futures=True)
    with suppress(AttributeError):  # not every libc has it
        ctypes.CDLL(None).malloc_trim(0)  # what NVRTC freed, which is much where the GPU shares the memory


def compilers() -> int:
    """How many kernels are compiled at once: one for each core, in half of the memory that is free."""
    room = available_memory() // 2 // COMPILER_BYTES
    return max(1, min(MOST_COMPILERS, len(os.sched_getaffinity(0)), room))


def _compiled(key: Key) -> bytes | None:
    name, arch, how = key
    with suppress(CompileFailed):
        return compile_kernel(name, arch, **dict(how))
    return None


class Programs:
    """The kernels of one opened device, each loaded once; call it as `load_kernel` without the device."""

    def __init__(self, device: Gpu) -> None:
        self.device = device
        self._loaded: dict[tuple[object, ...], Any] = {}

    def __call__(self, name: str, **how: Any) -> Any:
        """The program of kernel `name`."""
        loaded = (name, *sorted(how.items()))
        if loaded in self._loaded:
            return self._loaded[loaded]
        given = {key: how.pop(key) for key in ("buffers", "values", "features") if key in how}
        key = name, self.device.arch + given.get("features", ""), tuple(sorted(how.items()))
        if (noted := _noted.get()) is not None:
            noted.add(key)
            return None
        made = self._loaded[loaded] = load_kernel(self.device, name, cubin=_ready.pop(key, None), **given, **how)
        return made
