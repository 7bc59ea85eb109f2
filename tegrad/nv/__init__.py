"""tinygrad's NV device on this machine: Jetson Orin, Hopper, and the emulated board.

`install()` is the one place that touches tinygrad. `compilers` and the modules below it work without tinygrad.
"""

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from tegrad.errors import TegradError

__all__ = ["TINYGRAD", "InstallError", "install", "reopen"]

TINYGRAD = "0.14.0"
"""The tinygrad release that this package is made for."""


class InstallError(TegradError):
    """tinygrad on this machine is not the release that tegrad is made for, or was used before tegrad came."""


def _check_tinygrad() -> None:
    found = tinygrad_version()
    if found is None:
        raise InstallError(f"tinygrad is not installed: pip install tinygrad=={TINYGRAD}.")
    if found != TINYGRAD:
        raise InstallError(f"tinygrad {found} does not fit, tegrad needs {TINYGRAD}: pip install tinygrad=={TINYGRAD}.")


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
    _check_tinygrad()
    ops_nv: Any = importlib.import_module("tinygrad.runtime.ops_nv")
    if getattr(ops_nv, "_tegrad_installed", False):
        return
    opened = importlib.import_module("tinygrad.device").Device._opened_devices
    if any(name.split(":")[0] == "NV" for name in opened):
        raise InstallError("tinygrad's NV device is already open: import tegrad before the first use of it.")

    from tegrad.nv import device, hopper, iface, program, qmd, renderers, search

    device.bind()
    search.install()
    others = [known for known in ops_nv.NVDevice.ifaces if known.__name__ not in ("TegraIface", "NVKIface")]
    ops_nv.NVDevice.ifaces = [iface.TegraIface, hopper.NVKIface, *others]
    ops_nv.CUDARenderer, ops_nv.PTXRenderer = renderers.NVCUDARenderer, renderers.NVPTXRenderer
    ops_nv.QMD, ops_nv.NVProgram, ops_nv.elf_loader = qmd.QMD, program.NVProgram, program.load_elf
    ops_nv._tegrad_installed = True


def reopen(device: str = "NV") -> Any:
    """Close tinygrad's NV device and open a new one, in this process: the way on after a fault. See device.reopen."""
    install()
    from tegrad.nv.device import reopen as again

    return again(device)
