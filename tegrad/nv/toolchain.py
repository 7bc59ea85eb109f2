"""Where NVIDIA's compilers are, and the few calls that we make to them.

They are looked for in the `nvidia-*` wheels of this Python (the cu12 and the cu13 layout), then in an installed CUDA
toolkit, then in the system's own directories. The first of these that has all of them is taken whole, since headers,
compilers and assembler of one release belong together: torch, for one, brings a part of CUDA 13. No environment
variable is needed; CUDA_HOME and CUDA_PATH, where set, name a toolkit that is to be used before all others. Nothing
here needs tinygrad or a GPU.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from tegrad.errors import TegradError
from tegrad.installed import pip_install


class CompilerMissing(TegradError):
    """A compiler or its headers are not on this machine."""


class CompileFailed(TegradError):
    """A compiler refused its input; the message holds its log."""


Layout: TypeAlias = tuple[Path, ...]
"""Directories whose `lib`, `include` and `bin` were installed together."""


def _wheels(entries: Iterable[str]) -> Iterator[Layout]:
    """Of every directory that Python imports from: `nvidia/<component>` (cu12 wheels), and each `nvidia/cu13`."""
    for entry in dict.fromkeys(entries):
        base = Path(entry or ".") / "nvidia"
        if base.is_dir():
            found = sorted(p for p in base.iterdir() if p.is_dir() and not p.name.startswith("__"))
            yield tuple(p for p in found if not re.fullmatch(r"cu\d+", p.name))
            yield from ((p,) for p in found if re.fullmatch(r"cu\d+", p.name))


def _toolkits() -> Iterator[Layout]:
    fixed = [Path("/usr/local/cuda"), Path("/opt/cuda")]
    versioned = sorted(Path("/usr/local").glob("cuda-*"), key=lambda p: _version_key(p.name), reverse=True)
    yield from map(_toolkit, [*fixed, *versioned])
    yield (Path("/usr"),)


def _toolkit(root: Path) -> Layout:
    return (root, *sorted(root.glob("targets/*")))


def _is_whole(layout: Layout) -> bool:
    """Whether it has all that we call, and what NVRTC itself loads."""
    files = ("include/cuda_fp16.h", "include/crt/mma.h", "bin/ptxas")
    has_files = all(any((root / name).is_file() for root in layout) for name in files)
    return has_files and all(any(_libraries_in(stem, layout)) for stem in ("nvrtc", "nvrtc-builtins", "nvJitLink"))


def _version_key(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", text))


def roots() -> list[Path]:
    """Directories that hold `lib`, `include` and `bin` of NVIDIA's compilers, in the order of preference.

    What the user names, then the first layout that has everything; where none has, all that there are.
    """
    return list(_roots(_chosen(), tuple(sys.path)))


def _chosen() -> tuple[str, ...]:
    return tuple(value for name in ("CUDA_HOME", "CUDA_PATH") if (value := os.environ.get(name)))


@functools.cache
def _roots(chosen: tuple[str, ...], entries: tuple[str, ...], *, everything: bool = False) -> tuple[Path, ...]:
    """Looked for once: each kernel asks, and a folder is not installed while a process runs."""
    layouts = [*_wheels(entries), *_toolkits()]
    whole = None if everything else next((layout for layout in layouts if _is_whole(layout)), None)
    layouts = [*map(_toolkit, map(Path, chosen)), *([whole] if whole else layouts)]
    return tuple(root for root in dict.fromkeys(itertools.chain(*layouts)) if root.is_dir())


def _libraries_in(stem: str, roots: Iterable[Path]) -> Iterator[Path]:
    """Files of a shared library, the newest of each directory first; static stubs and linker scripts are none."""
    pattern = re.compile(rf"lib{stem}\.so(\.\d+)*")
    for root in roots:
        for folder in (root / "lib64", root / "lib", *sorted(root.glob("lib/*-linux-gnu"))):
            if folder.is_dir():
                found = [p for p in folder.iterdir() if pattern.fullmatch(p.name) and p.stat().st_size > 4096]
                yield from sorted(found, key=lambda p: _version_key(p.name), reverse=True)


def _load(stem: str, wheel: str) -> tuple[Path, ctypes.CDLL]:
    refused = []
    for path in _libraries_in(stem, roots()):
        try:
            return path, ctypes.CDLL(str(path))
        except OSError as error:
            refused.append(f"{path}: {error}")
    detail = f" ({'; '.join(refused)})" if refused else ""
    raise CompilerMissing(
        f"lib{stem}.so was not found{detail}: install {wheel} ({pip_install('compilers')}) "
        "or a CUDA toolkit (set CUDA_HOME)"
    )


def search_program(name: str) -> Path | None:
    """Path of a program such as `ptxas`, or None. One that no layout needs (nvdisasm) may be of any."""
    return _search_program(name, (*roots(), *_roots(_chosen(), tuple(sys.path), everything=True)))


@functools.cache
def _search_program(name: str, roots: tuple[Path, ...]) -> Path | None:
    return next((path for root in roots if (path := root / "bin" / name).is_file()), None)


def find_program(name: str) -> Path:
    """Path of a compiler program such as `ptxas`; CompilerMissing when there is none."""
    if path := search_program(name):
        return path
    remedy = f"{pip_install('compilers')} or a CUDA toolkit (set CUDA_HOME)"
    raise CompilerMissing(f"{name} was not found: install it with {remedy}")


def ptxas(ptx: str, arch: str) -> bytes:
    """Assemble PTX with the program ptxas; CompileFailed carries its messages."""
    with tempfile.TemporaryDirectory(prefix="tegrad-") as folder:
        made = Path(folder) / "kernel.cubin"
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [str(find_program("ptxas")), f"-arch={arch}", "-o", str(made), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CompileFailed(f"ptxas failed for {arch}:\n{done.stderr.strip()}")
        return made.read_bytes()


def include_dirs() -> tuple[Path, ...]:
    """Directories of NVIDIA's device headers: the first with `cuda_fp16.h`, and where apart, those of crt and CCCL."""
    return _include_dirs(tuple(roots()))


@functools.cache
def _include_dirs(roots: tuple[Path, ...]) -> tuple[Path, ...]:
    found: dict[Path, None] = {}
    for marker in ("cuda_fp16.h", "crt/mma.h", "cccl/cuda/std/utility"):
        for root in roots:
            if (root / "include" / marker).is_file():
                found[root / "include"] = None
                if marker.startswith("cccl/"):
                    found[root / "include" / "cccl"] = None
                break
    return tuple(found)


def require_include_dirs() -> tuple[Path, ...]:
    """`include_dirs`, or CompilerMissing when there are no headers at all."""
    if not (dirs := include_dirs()):
        remedy = f"{pip_install('compilers')} or a CUDA toolkit"
        raise CompilerMissing(f"NVIDIA's headers (cuda_fp16.h) were not found: {remedy}")
    return dirs


_Call = Callable[..., int]


def _fetch(handle: object, size_of: _Call, read: _Call) -> bytes:
    """The two-step reads of both libraries: ask for the size, then for the bytes."""
    size = ctypes.c_size_t()
    if size_of(handle, ctypes.byref(size)) or not size.value:
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    return b"" if read(handle, buffer) else ctypes.string_at(buffer, size.value)


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace").strip()


def _strings(options: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(options))(*[o.encode() for o in options])


def check_arch(arch: str) -> None:
    """CompileFailed for what is no real architecture: nvJitLink 13 crashes on such a name."""
    if not re.fullmatch(r"sm_\d{2,3}[af]?", arch):
        raise CompileFailed(f"{arch!r} is no GPU architecture: they are called sm_87, sm_90 and so on")


@dataclass(frozen=True)
class Compiled:
    """What NVRTC made of one source: PTX text and machine code."""

    ptx: str
    cubin: bytes


class Nvrtc:
    """NVRTC: CUDA C++ to PTX and a cubin."""

    def __init__(self) -> None:
        self.path, self._lib = _load("nvrtc", "nvidia-cuda-nvrtc-cu12")
        # NVRTC opens its builtins by name, which finds what is loaded; by itself the one of the 13.0 wheels finds none.
        with contextlib.suppress(StopIteration, OSError):
            ctypes.CDLL(str(next(_libraries_in("nvrtc-builtins", [self.path.parent.parent]))))
        self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)
        # NVRTC 13 has a cache of its own, and loads libcuda to find its place.
        self._quiet = ["-no-cache"] if self.version >= (13, 0) else []

    def compile(self, source: str, arch: str, options: Sequence[str] = (), *, name: str = "kernel.cu") -> Compiled:
        """Compile for a real architecture such as `sm_87`; CompileFailed carries NVRTC's log."""
        check_arch(arch)
        lib, program = self._lib, ctypes.c_void_p()
        self._check(lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None))
        try:
            flags = [f"--gpu-architecture={arch}", *self._quiet, *options]
            status = lib.nvrtcCompileProgram(program, len(flags), _strings(flags))
            if status:
                log = _text(_fetch(program, lib.nvrtcGetProgramLogSize, lib.nvrtcGetProgramLog))
                self._check(status, f" while compiling for {arch}:\n{log}")
            return Compiled(
                ptx=_text(_fetch(program, lib.nvrtcGetPTXSize, lib.nvrtcGetPTX)),
                cubin=_fetch(program, lib.nvrtcGetCUBINSize, lib.nvrtcGetCUBIN),
            )
        finally:
            lib.nvrtcDestroyProgram(ctypes.byref(program))

    def _check(self, status: int, context: str = "") -> None:
        if status:
            raise CompileFailed(f"NVRTC: {self._lib.nvrtcGetErrorString(status).decode()}{context}")


class NvJitLink:
    """nvJitLink: PTX to a cubin."""

    _INPUT_PTX = 2  # nvJitLinkInputType, nvJitLink.h

    def __init__(self) -> None:
        self.path, self._lib = _load("nvJitLink", "nvidia-nvjitlink-cu12")
        major, minor = ctypes.c_uint(), ctypes.c_uint()
        self._entry("nvJitLinkVersion")(ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def _entry(self, name: str) -> _Call:
        """The exported symbols carry the release (`__nvJitLinkCreate_12_6`) behind the plain ones of newer releases."""
        try:
            return getattr(self._lib, name)  # type: ignore[no-any-return]
        except AttributeError as error:
            raise CompilerMissing(f"{self.path} lacks {name}: install nvidia-nvjitlink-cu12 12.3 or later") from error

    def compile(self, ptx: str, arch: str, options: Sequence[str] = (), *, name: str = "kernel.ptx") -> bytes:
        """Assemble and link PTX for a real architecture; CompileFailed carries the log."""
        check_arch(arch)
        handle = ctypes.c_void_p()
        # With its cache on, nvJitLink loads libcuda and initialises the driver just to name the cache's place.
        flags, data = [f"-arch={arch}", "-no-cache", *options], ptx.encode()
        self._check(self._entry("nvJitLinkCreate")(ctypes.byref(handle), len(flags), _strings(flags)), handle)
        try:
            add = self._entry("nvJitLinkAddData")
            size = ctypes.c_size_t(len(data))
            self._check(add(handle, self._INPUT_PTX, data, size, name.encode()), handle)
            self._check(self._entry("nvJitLinkComplete")(handle), handle)
            cubin = _fetch(handle, self._entry("nvJitLinkGetLinkedCubinSize"), self._entry("nvJitLinkGetLinkedCubin"))
        finally:
            self._entry("nvJitLinkDestroy")(ctypes.byref(handle))
        if not cubin:
            raise CompileFailed(f"nvJitLink made no cubin for {arch}")
        return cubin

    def _check(self, status: int, handle: ctypes.c_void_p) -> None:
        if status:
            log = ""
            if handle.value:
                log = _text(
                    _fetch(handle, self._entry("nvJitLinkGetErrorLogSize"), self._entry("nvJitLinkGetErrorLog"))
                )
            raise CompileFailed(f"nvJitLink failed with code {status}:\n{log}")


@functools.cache
def nvrtc() -> Nvrtc:
    """The NVRTC of this process, loaded once; CompilerMissing when there is none."""
    return Nvrtc()


@functools.cache
def nvjitlink() -> NvJitLink:
    """The nvJitLink of this process, loaded once; CompilerMissing when there is none."""
    return NvJitLink()
