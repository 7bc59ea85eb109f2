"""Opening tinygrad's default device, so that what is wrong with it is said in one sentence."""

from __future__ import annotations

import os

from tinygrad import Device

from tegrad.errors import TegradError


class DeviceError(TegradError):
    """The chosen device does not open."""


def open_default() -> str:
    """Open the device that DEV names; returns its name and architecture, such as "NV sm_87"."""
    try:
        device = Device[Device.DEFAULT]
    except TegradError:
        raise
    except Exception as error:  # tinygrad raises whatever its runtimes do, several of them in a group
        raise _reason(error) from error
    return " ".join(filter(None, (Device.DEFAULT, getattr(device, "arch", None))))


def _reason(error: Exception) -> TegradError:
    """Our own error inside a group if there is one, else one that tells all causes."""
    causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    for cause in causes:
        if isinstance(cause, TegradError):
            return cause
    said = "; ".join(str(cause) or type(cause).__name__ for cause in causes)
    return DeviceError(f"cannot open the device {os.environ.get('DEV', '')}: {said}: run tegrad doctor")
