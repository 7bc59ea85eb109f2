"""Findings about one machine: each check looks at one thing and says what to do where it is missing."""

from __future__ import annotations

import ctypes.util
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import tegrad
from tegrad import machine
from tegrad._python import complaint
from tegrad.diag import drivers, performance, smoke
from tegrad.diag.finding import Finding
from tegrad.installed import lacking_llvmlite, pip_install
from tegrad.nv import TINYGRAD
from tegrad.uapi.releases import ROOT, tegra

BOARD_MEMORY = 2 << 30


def findings(root: Path = ROOT) -> list[Finding]:
    """All checks, in the order in which a user would fix them; `root` is the folder that holds /proc, /dev and /etc.

    The last one runs a kernel, where everything before says that kernels run on this machine.
    """
    found = [finding for check in CHECKS for finding in check(root)]
    if root == ROOT and (label := runnable(found)):
        found.append(smoke.run(label, emulated=label == DEVICES["board"][0]))
    return found


def runnable(found: list[Finding]) -> str:
    """What models run on here: "Jetson", "NVIDIA GPU", "emulated board", or "" where nothing does."""
    state = {f.name: f.state for f in found}
    if state["tinygrad"] != "ok" or state["compilers"] != "ok" or state.get("kernel") == "missing":
        return ""
    for name, (label, stoppers) in DEVICES.items():
        if state.get(name) == "ok" and "missing" not in map(state.get, stoppers):
            return label
    return ""


DEVICES = {
    "jetson": ("Jetson", ("release", "memory")),
    "nvidia": ("NVIDIA GPU", ("driver", "mig")),
    "board": ("emulated board", ("memory",)),
}
"""Of each device's finding, what is run on, and the findings that stop it where they are missing."""


def _python(root: Path) -> Iterator[Finding]:
    detail = f"Python {platform.python_version()} on {platform.machine()}, tegrad {tegrad.__version__}"
    remedy = complaint()
    yield Finding("python", "missing" if remedy else "ok", detail, remedy)


def _tinygrad(root: Path) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("tinygrad")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("tinygrad", "missing", "not installed", f"pip install tinygrad=={TINYGRAD}")
        return
    fits = version == TINYGRAD
    remedy = "" if fits else f"pip install tinygrad=={TINYGRAD} (tegrad is made for that version)"
    yield Finding("tinygrad", "ok" if fits else "missing", f"tinygrad {version}", remedy)


def _compilers(root: Path) -> Iterator[Finding]:
    from tegrad.errors import TegradError
    from tegrad.nv.compilers import describe

    try:
        yield Finding("compilers", "ok", describe())
    except TegradError as error:
        yield Finding("compilers", "missing", str(error), f"{pip_install('compilers')}, or install a CUDA toolkit")


def _board(root: Path) -> Iterator[Finding]:
    if lacking := lacking_llvmlite():
        yield Finding("board", "warn", f"the emulated board needs {lacking}", pip_install("board"))
        return
    try:
        importlib.import_module("llvmlite.binding")
    except (ImportError, OSError) as error:  # a wheel of another machine, half an installation
        again = pip_install("board").replace("pip install", "pip install --force-reinstall")
        yield Finding("board", "warn", f"the emulated board needs llvmlite, which cannot be loaded: {error}", again)
        return
    free = machine.memory().get("MemAvailable", 0)
    if free < BOARD_MEMORY:
        yield Finding("board", "warn", f"the emulated board wants 2 GiB of free memory, {free >> 20} MiB are left")
        return
    version = importlib.metadata.version("llvmlite")
    yield Finding("board", "ok", f"emulated Orin available (llvmlite {version}, {free >> 30} GiB of memory free)")


def _memory(root: Path) -> Iterator[Finding]:
    """Which kind of memory a Jetson's client takes, and who decides that."""
    from tegrad.nv import memory_record, roles

    asked = os.environ.get(roles.VARIABLE, "")
    if not (asked or tegra(root)):
        return
    try:
        policy = roles.policy()
    except roles.PolicyError as error:
        yield Finding("memory", "missing", str(error), f"unset {roles.VARIABLE}")
        return
    record = memory_record.of_this_device()
    if asked:
        yield Finding("memory", "ok", f"{policy} memory, as {roles.VARIABLE} says")
    elif record:
        yield Finding("memory", "ok", f"{policy} memory, by the first boot's record of {record.date}: {record.why}")
    else:
        yield Finding(
            "memory", "ok", f"{policy} memory, the default; `tegrad selftest` measures whether cached is faster"
        )


def _model(root: Path) -> Iterator[Finding]:
    models = sorted((Path(tegrad.__file__).parent / "models").glob("*.gguf"))
    if models:
        yield Finding("model", "ok", f"shipped model {models[0].name} ({models[0].stat().st_size / 1e6:.1f} MB)")
    else:
        yield Finding("model", "warn", "no model ships with this checkout", "name a GGUF file: tegrad run model.gguf")


def _extras(root: Path) -> Iterator[Finding]:
    """What only tinygrad's own CPU device wants; our paths do without."""
    clang = shutil.which("clang")
    yield Finding("clang", "ok" if clang else "warn", clang or "not found; only tinygrad's CPU device needs it")
    atomic = ctypes.util.find_library("atomic")
    yield Finding(
        "libatomic", "ok" if atomic else "warn", atomic or "not found; only tinygrad's stock NV path needs it"
    )


CHECKS: tuple[Callable[[Path], Iterator[Finding]], ...] = (
    _python,
    _tinygrad,
    _compilers,
    drivers.release,
    drivers.jetson,
    drivers.driver,
    drivers.nvidia,
    drivers.mig,
    drivers.container,
    _board,
    _memory,
    *performance.CHECKS,
    _model,
    _extras,
)
