"""Opening a device of tinygrad's, so that what is wrong with it is said in one sentence."""

from __future__ import annotations

import os

from tinygrad import Device

from tegrad.errors import TegradError
from tegrad.nv import wrong_setting


class DeviceError(TegradError):
    """The chosen device does not open."""


class NoSuchDevice(DeviceError):
    """What DEV, or an option, names is no device of tinygrad's, or no way to run it."""

    exit_code = 2


def open_device(name: str | None = None) -> str:
    """Open a device, the one that DEV names unless said; returns its name and architecture, such as "NV sm_87"."""
    try:
        name = name or Device.DEFAULT
        if (kind := name.partition(":")[0].upper()) not in Device._devices:
            raise NoSuchDevice(f"there is no device {kind}: choose (DEV=) one of {', '.join(Device._devices)}")
        device = Device[name]
        _ = device.renderer  # chosen now, so that a wrong choice is told
    except TegradError:
        raise
    except Exception as error:  # tinygrad raises whatever its runtimes do, several of them in a group
        raise _reason(name or os.environ.get("DEV", ""), error) from error
    return " ".join(filter(None, (name, getattr(device, "arch", None))))


def _reason(name: str, error: Exception) -> TegradError:
    """Our own error inside a group if there is one, else one that tells all causes."""
    causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    for cause in causes:
        if isinstance(cause, TegradError):
            return cause
        if isinstance(cause, ValueError) and (setting := wrong_setting(cause)) is not None:
            return setting
    said = "; ".join(str(cause) or type(cause).__name__ for cause in causes)
    if any(" has no renderer " in str(cause) or " has no interface " in str(cause) for cause in causes):
        return NoSuchDevice(f"DEV={os.environ.get('DEV', name)} cannot be: {said}; set DEV={name}")
    return DeviceError(f"cannot open the device {name}: {said}: run tegrad doctor")
