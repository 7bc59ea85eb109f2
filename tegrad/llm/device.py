"""Opening a device of tinygrad's, so that what is wrong with it is said in one sentence."""

from __future__ import annotations

import os

from tinygrad import Device

from tegrad.errors import TegradError


class DeviceError(TegradError):
    """The chosen device does not open."""


def open_device(name: str | None = None) -> str:
    """Open a device, the one that DEV names unless said; returns its name and architecture, such as "NV sm_87"."""
    try:
        name = name or Device.DEFAULT
        device = Device[name]
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
    said = "; ".join(str(cause) or type(cause).__name__ for cause in causes)
    return DeviceError(f"cannot open the device {name}: {said}: run tegrad doctor")
