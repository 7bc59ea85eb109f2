"""Opening a device of tinygrad's, so that what is wrong with it is said in one sentence."""

from __future__ import annotations

import errno
import os
from typing import Final

from tinygrad import Device

from tegrad.errors import TegradError
from tegrad.nv import compat, reopen, wrong_setting

STORES: Final = frozenset({"DISK", "NPY", "NULL", "RDMA", "TINYFS"})
"""Devices of tinygrad's that keep bytes, or nothing at all, and compute nothing that can be read."""
SPENT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT})
"""Errors that tell of the machine, whichever device is opened."""


class DeviceError(TegradError):
    """The chosen device does not open."""


class NoSuchDevice(DeviceError):
    """What DEV, or an option, names is no device of tinygrad's, or no way to run it."""

    exit_code = 2


def open_device(name: str | None = None) -> str:
    """Open a device, the one that DEV names unless said; returns its name and architecture, such as "NV sm_87".

    One that a fault has made unusable is closed, with all that belonged to it, and opened anew.
    """
    try:
        name = name or Device.DEFAULT
        kind, known = name.partition(":")[0].upper(), [each for each in compat.known_devices() if each not in STORES]
        if kind in STORES:
            raise NoSuchDevice(f"the device {kind} computes nothing: choose (DEV=) one of {', '.join(known)}")
        if kind not in known:
            raise NoSuchDevice(f"there is no device {kind}: choose (DEV=) one of {', '.join(known)}")
        device = Device[name] if usable(name) else reopen(name)
        _ = device.renderer  # chosen now, so that a wrong choice is told
    except TegradError:
        raise
    except Exception as error:  # tinygrad raises whatever its runtimes do, several of them in a group
        raise _reason(name or os.environ.get("DEV", ""), error) from error
    return " ".join(filter(None, (name, getattr(device, "arch", None))))


def usable(name: str | None = None) -> bool:
    """Whether a device that was opened can do more work: no fault has ended that."""
    try:
        if (check := getattr(Device[name or Device.DEFAULT], "check_usable", None)) is not None:
            check()
    except TegradError:
        return False
    return True


def _reason(name: str, error: Exception) -> TegradError | OSError:
    """Our own error inside a group if there is one, or the machine's, else one that tells all causes."""
    causes = error.exceptions if isinstance(error, ExceptionGroup) else (error,)
    for cause in causes:
        if isinstance(cause, TegradError):
            return cause
        if isinstance(cause, ValueError) and (setting := wrong_setting(cause)) is not None:
            return setting
        if isinstance(cause, OSError) and cause.errno in SPENT:
            return cause
    said = "; ".join(str(cause) or type(cause).__name__ for cause in causes)
    wanted = os.environ.get("DEV", name)
    unread = wanted.count(":") > 1 and any(isinstance(cause, ValueError) for cause in causes)  # its architecture
    if unread or any(" has no renderer " in str(cause) or " has no interface " in str(cause) for cause in causes):
        return NoSuchDevice(f"DEV={wanted} cannot be: {said}; set DEV={name}")
    if any(" is deprecated, use " in str(cause) for cause in causes):  # a variable that DEV has taken the place of
        return NoSuchDevice(f"cannot open the device {name}: {said}")
    return DeviceError(f"cannot open the device {name}: {said}: run tegrad doctor")
