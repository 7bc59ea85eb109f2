"""tinygrad's NV device on this machine: Jetson Orin, Hopper, and the emulated board.

`install()` is the one place that touches tinygrad. `compilers` and the modules below it work without tinygrad.
"""

import importlib
import importlib.util
import os
from pathlib import Path
from types import FrameType
from typing import Any

from tegrad import _activate
from tegrad.errors import SettingError, TegradError

__all__ = [
    "TINYGRAD",
    "InstallError",
    "failing_compiler",
    "import_tinygrad",
    "install",
    "reopen",
    "require",
    "wrong_setting",
]

TINYGRAD = "0.14.0"
"""The tinygrad release that this package is made for."""


class InstallError(TegradError):
    """tinygrad on this machine is not the release that tegrad is made for, or was used before tegrad came."""


def require() -> None:
    """InstallError where only tegrad could open NV (a Jetson's drivers, a board that was asked for) and tinygrad is
    another release than ours."""
    from tegrad.nv.kernel import CTRL_NODE, emulated

    if emulated() or os.path.exists(CTRL_NODE):
        _check_tinygrad()


def _check_tinygrad() -> None:
    found = tinygrad_version()
    if found is None:
        raise InstallError(f"tinygrad is not installed: pip install tinygrad=={TINYGRAD}")
    if found != TINYGRAD:
        raise InstallError(f"tinygrad {found} does not fit, tegrad needs {TINYGRAD}: pip install tinygrad=={TINYGRAD}")


def import_tinygrad(module: str = "tinygrad") -> Any:
    """A module of tinygrad's. InstallError without our release of it; SettingError where a variable of the
    environment keeps it from being imported."""
    _check_tinygrad()
    try:
        return importlib.import_module(module)
    except ValueError as error:
        raise wrong_setting(error) or error from error
    except RuntimeError as error:
        if "target string" not in str(error):
            raise
        raise SettingError(f"DEV={os.environ.get('DEV', '')} names no device: {error}") from error


def wrong_setting(error: ValueError) -> SettingError | None:
    """What to tell of an error that tinygrad's reading of a variable made, at its import or later; None of another."""
    if (frame := _raised_in("getenv", error)) is None or not isinstance(name := frame.f_locals.get("key"), str):
        return None
    return SettingError(f"tinygrad takes no {name}={os.environ.get(name)}: set it to a number, or unset it")


def failing_compiler(error: Exception) -> SettingError | None:
    """What to tell of an error that a compiler of tinygrad's own made where DEV names it; None of another."""
    wanted = os.environ.get("DEV", "")
    if not wanted or "NV" in wanted.partition(":")[0] or _raised_in("compile_cached", error) is None:
        return None
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return SettingError(f"the compiler of DEV={wanted} fails on this machine ({said[:200]}): choose another DEV")


def _raised_in(function: str, error: Exception) -> FrameType | None:
    """The outermost frame of a function that an error passed."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_name != function:
        trace = trace.tb_next
    return trace.tb_frame if trace is not None else None


def tinygrad_version() -> str | None:
    """tinygrad's release here, or None where it is not installed."""
    spec = importlib.util.find_spec("tinygrad")
    if spec is not None and spec.origin is not None:
        beside = Path(spec.origin).parent.parent / f"tinygrad-{TINYGRAD}.dist-info"
        if beside.is_dir():  # as it is nearly always; to ask importlib.metadata takes 20 ms of imports
            return TINYGRAD
    from importlib import metadata

    try:
        return metadata.version("tinygrad")
    except metadata.PackageNotFoundError:
        return None


def install() -> None:
    """Put tegrad's device, queues, programs, renderers and interfaces into tinygrad's NV runtime. Idempotent.

    Must run before the first `Device["NV"]`; importing tegrad, or having it installed, does that. InstallError when
    tinygrad is missing, is another release, or has its NV device open already.
    """
    with _activate.paused():  # what is wrong is said once
        _install(import_tinygrad("tinygrad.runtime.ops_nv"))


def _install(ops_nv: Any) -> None:
    if getattr(ops_nv, "_tegrad_installed", False):
        return
    from tegrad.nv import compat

    if any(map(compat.is_nv, compat.opened_devices())):
        raise InstallError("tinygrad's NV device is already open: import tegrad before the first use of it")

    from tegrad.nv import device, diskcache, hopper, iface, jit, program, qmd, renderers

    device.bind()
    jit.install()
    diskcache.install()
    others = [known for known in ops_nv.NVDevice.ifaces if known.__name__ not in ("TegraIface", "NVKIface")]
    ours = {
        "NVDevice.ifaces": [iface.TegraIface, hopper.NVKIface, *others], "QMD": qmd.QMD,
        "NVProgram": program.NVProgram, "elf_loader": program.load_elf,
        "CUDARenderer": renderers.NVCUDARenderer, "PTXRenderer": renderers.NVPTXRenderer,
    }  # fmt: skip
    for name, one in ours.items():
        compat.replace(f"{compat.NV}.{name}", one)
    ops_nv._tegrad_installed = True
    from tegrad.nv.kernel import PROFILE_VARIABLE

    if folder := os.environ.get(PROFILE_VARIABLE):
        from tegrad.nv import profiling

        profiling.begin(folder)


def reopen(device: str = "NV") -> Any:
    """Close tinygrad's NV device and open a new one, in this process: the way on after a fault. See device.reopen."""
    install()
    from tegrad.nv.device import reopen as again

    return again(device)
