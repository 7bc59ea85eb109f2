"""tinygrad's NV device on this machine: Jetson Orin, Hopper, and the emulated board.

`install()` is the one place that touches tinygrad. `compilers` and the modules below it work without tinygrad.
"""

import importlib
import importlib.metadata
from typing import Any

from tegrad.errors import TegradError

__all__ = ["TINYGRAD", "InstallError", "install", "reopen"]

TINYGRAD = "0.14.0"
"""The tinygrad release that this package is made for."""


class InstallError(TegradError):
    """tinygrad on this machine is not the release that tegrad is made for, or was used before tegrad came."""


def _check_tinygrad() -> None:
    try:
        found = importlib.metadata.version("tinygrad")
    except importlib.metadata.PackageNotFoundError as error:
        raise InstallError(f"tinygrad is not installed: pip install tinygrad=={TINYGRAD}.") from error
    if found != TINYGRAD:
        raise InstallError(f"tinygrad {found} does not fit, tegrad needs {TINYGRAD}: pip install tinygrad=={TINYGRAD}.")


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

    from tegrad.nv import device, hopper, iface, program, qmd, renderers

    device.bind()
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
