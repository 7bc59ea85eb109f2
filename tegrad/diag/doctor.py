"""Findings about one machine: each check looks at one thing and says what to do where it is missing."""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tegrad
from tegrad.installed import pip_install
from tegrad.nv import TINYGRAD

JETSON_NODES = ("/dev/nvgpu/igpu0/ctrl", "/dev/nvmap")
NVIDIA_NODES = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0")
BOARD_MEMORY = 2 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: `missing` stops something from working, `warn` only limits it."""

    name: str
    state: Literal["ok", "warn", "missing"]
    detail: str
    remedy: str = ""


def findings() -> list[Finding]:
    """All checks, in the order in which a user would fix them."""
    return [finding for check in CHECKS for finding in check()]


def runnable(found: list[Finding]) -> str:
    """What models run on here: "Jetson", "NVIDIA GPU", "emulated board", or "" where nothing does."""
    state = {f.name: f.state for f in found}
    if state["tinygrad"] != "ok" or state["compilers"] != "ok":
        return ""
    return next((label for name, label in DEVICES.items() if state.get(name) == "ok"), "")


DEVICES = {"jetson": "Jetson", "nvidia": "NVIDIA GPU", "board": "emulated board"}


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    detail = f"Python {version} on {platform.machine()}, tegrad {tegrad.__version__}"
    yield Finding("python", "ok" if good else "missing", detail, "" if good else "install Python 3.11 or newer")


def _tinygrad() -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("tinygrad")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("tinygrad", "missing", "not installed", f"pip install tinygrad=={TINYGRAD}")
        return
    fits = version == TINYGRAD
    remedy = "" if fits else f"pip install tinygrad=={TINYGRAD} (tegrad is made for that version)"
    yield Finding("tinygrad", "ok" if fits else "missing", f"tinygrad {version}", remedy)


def _compilers() -> Iterator[Finding]:
    from tegrad.errors import TegradError
    from tegrad.nv.compilers import describe

    try:
        yield Finding("compilers", "ok", describe())
    except TegradError as error:
        yield Finding("compilers", "missing", str(error), f"{pip_install('compilers')}, or install a CUDA toolkit")


def _nodes(name: str, what: str, nodes: tuple[str, ...], absent: str) -> Iterator[Finding]:
    """A driver's device nodes: present and open to this user, present but closed, or absent."""
    there = [node for node in nodes if os.path.exists(node)]
    if not there:
        yield Finding(name, "warn", absent)
        return
    if len(there) < len(nodes):
        lacking = ", ".join(sorted(set(nodes) - set(there)))
        yield Finding(name, "warn", f"{what}: {lacking} is missing", "load the driver's modules")
        return
    closed = [node for node in there if not os.access(node, os.R_OK | os.W_OK)]
    if closed:
        group = Path(closed[0]).group()
        yield Finding(name, "warn", f"{what}: no permission for {closed[0]}", f"sudo usermod -aG {group} $USER")
        return
    yield Finding(name, "ok", f"{what}: {', '.join(there)}")


def _jetson() -> Iterator[Finding]:
    model = Path("/proc/device-tree/model")
    name = model.read_bytes().rstrip(b"\0").decode() if model.exists() else "Jetson"
    yield from _nodes("jetson", name, JETSON_NODES, "no Jetson GPU driver (/dev/nvgpu, /dev/nvmap) on this machine")


def _nvidia() -> Iterator[Finding]:
    yield from _nodes("nvidia", "NVIDIA driver", NVIDIA_NODES, "no NVIDIA desktop or server driver on this machine")


def _board() -> Iterator[Finding]:
    if importlib.util.find_spec("llvmlite") is None:
        yield Finding("board", "warn", "the emulated board needs llvmlite", pip_install("board"))
        return
    free = _available_memory()
    if free < BOARD_MEMORY:
        yield Finding("board", "warn", f"the emulated board wants 2 GiB of free memory, {free >> 20} MiB are left")
        return
    version = importlib.metadata.version("llvmlite")
    yield Finding("board", "ok", f"emulated Orin available (llvmlite {version}, {free >> 30} GiB of memory free)")


def _available_memory() -> int:
    """MemAvailable in bytes."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable"))
    return int(line.split()[1]) << 10


def _model() -> Iterator[Finding]:
    models = sorted((Path(tegrad.__file__).parent / "models").glob("*.gguf"))
    if models:
        yield Finding("model", "ok", f"shipped model {models[0].name} ({models[0].stat().st_size / 1e6:.1f} MB)")
    else:
        yield Finding("model", "warn", "no model ships with this checkout", "name a GGUF file: tegrad run model.gguf")


def _extras() -> Iterator[Finding]:
    """What only tinygrad's own CPU device wants; our paths do without."""
    clang = shutil.which("clang")
    yield Finding("clang", "ok" if clang else "warn", clang or "not found; only tinygrad's CPU device needs it")
    atomic = ctypes.util.find_library("atomic")
    yield Finding(
        "libatomic", "ok" if atomic else "warn", atomic or "not found; only tinygrad's stock NV path needs it"
    )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _tinygrad,
    _compilers,
    _jetson,
    _nvidia,
    _board,
    _model,
    _extras,
)
