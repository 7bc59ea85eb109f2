"""CUDA C++ or PTX to the cubins that we load: NVIDIA's machine code with the section `.tegrad.ptx` appended.

Works without tinygrad and without a GPU. Results are kept in the user's cache directory, keyed by everything that
decides them: source, architecture, options, compiler version, headers and the layout of our section.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tegrad import kept
from tegrad.nv import cubin, directives, toolchain
from tegrad.nv.directives import Directives
from tegrad.nv.toolchain import CompileFailed, CompilerMissing

__all__ = ["CompileFailed", "CompilerMissing", "compile_cuda", "compile_ptx", "cuda_key", "describe", "ptx_key"]

REVISION = 2
"""Part of every cache key: raise it whenever what we do to the compilers' output changes."""


def cuda_key(arch: str, options: Sequence[str] = ()) -> str:
    """Digest of all that decides a CUDA compilation except its source."""
    nvrtc = toolchain.nvrtc()
    headers = [(str(d), _stamp(d / "cuda_fp16.h")) for d in toolchain.include_dirs()]
    return _digest("cuda", REVISION, nvrtc.version, str(nvrtc.path), _stamp(nvrtc.path), headers, arch, list(options))


def ptx_key(arch: str, options: Sequence[str] = ()) -> str:
    """Digest of all that decides a PTX compilation except its source."""
    linker = toolchain.nvjitlink()
    tools = [(str(path), _stamp(path)) for path in (linker.path, toolchain.search_program("ptxas")) if path]
    return _digest("ptx", REVISION, linker.version, tools, arch, list(options))


def compile_cuda(
    source: str, arch: str, options: Sequence[str] = (), *, dynamic_shared: int | None = None, cache: bool = True
) -> bytes:
    """Compile CUDA C++ holding one `extern "C" __global__` kernel for `arch` (such as `sm_87`).

    `dynamic_shared` is the bytes of `extern __shared__` memory that each block is launched with; left out, the source's
    directive line says it (see `tegrad.nv.directives`). NVIDIA's headers are on the include path. CompileFailed carries
    the compiler's log; CompilerMissing says what to install.
    """
    flags = [*options, *(f"-I{d}" for d in toolchain.include_dirs())]

    def build() -> bytes:
        made = toolchain.nvrtc().compile(source, arch, flags)
        return _finish(made.cubin, f"{wants}{made.ptx}", wants)

    wants = _wants(source, dynamic_shared)
    return _cached((cuda_key(arch, options), source, wants.dynamic_shared), build, cache)


def compile_ptx(
    text: str, arch: str, options: Sequence[str] = (), *, dynamic_shared: int | None = None, cache: bool = True
) -> bytes:
    """Assemble PTX holding one `.entry` for `arch`. As `compile_cuda` otherwise.

    nvJitLink leaves NVIDIA's helpers (64-bit division, exact reciprocal) as functions of their own, which loaders
    would have to link; ptxas puts them into the kernel, so that it assembles the kernels that need them.
    """

    def build() -> bytes:
        linked = toolchain.nvjitlink().compile(text, arch, options)
        if cubin.Cubin(linked).helpers:
            linked = toolchain.ptxas(text, arch)
        return _finish(linked, text, wants)

    wants = _wants(text, dynamic_shared)
    return _cached((ptx_key(arch, options), text, wants.dynamic_shared), build, cache)


def describe() -> str:
    """One line for people: which compilers were found; CompilerMissing when one is not."""
    nvrtc, linker = toolchain.nvrtc(), toolchain.nvjitlink()
    toolchain.require_include_dirs()
    return "NVRTC {}.{} ({}), nvJitLink {}.{}".format(*nvrtc.version, nvrtc.path.parent, *linker.version)


def _wants(source: str, dynamic_shared: int | None) -> Directives:
    wants = directives.parse(source)
    return wants if dynamic_shared is None else replace(wants, dynamic_shared=dynamic_shared)


def _finish(machine_code: bytes, ptx: str, wants: Directives) -> bytes:
    try:
        return cubin.with_ptx(machine_code, ptx, dynamic_shared=wants.dynamic_shared)
    except cubin.BadCubin as error:
        raise CompileFailed(f"{error}.") from error


def _stamp(path: Path) -> list[int]:
    """Size and time of a file: what changes when another version is installed in its place."""
    try:
        status = path.stat()
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def cache_dir() -> Path:
    """Where compiled kernels are kept: `tegrad/cubin` in the user's cache directory (XDG_CACHE_HOME)."""
    return kept.cache_folder() / "tegrad" / "cubin"


def _cached(key: tuple[object, ...], build: Callable[[], bytes], cache: bool) -> bytes:
    if not cache:
        return build()
    path = cache_dir() / f"{_digest(*key)}.cubin"
    if (found := kept.find(path)) is not None:
        return found
    made = build()
    kept.keep(path, made, lasting=True)
    return made
