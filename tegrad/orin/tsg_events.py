"""Event fds of a TSG: they become readable when the GPU raises the event. Source: os/linux/ioctl_tsg.c."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tegrad.orin.files import Call, File, Process, require
from tegrad.uapi import constants as k

if TYPE_CHECKING:
    from tegrad.orin.driver import Driver
    from tegrad.orin.tsg import Tsg, TsgFile


class EventFile(File):
    """An event fd: for poll only. It does not keep its TSG alive."""

    kind = "event"

    def __init__(self, driver: Driver, process: Process, tsg: Tsg, event: int) -> None:
        super().__init__(driver, process)
        self.event, self._tsg = event, tsg
        tsg.event_files.append(self)

    def release(self) -> None:
        """No event is for it any more."""
        self._tsg.event_files.remove(self)


def post(tsg: Tsg, event: int) -> None:
    """Raise an event of a TSG."""
    for file in tsg.event_files:
        if file.event == event:
            file.make_readable()


def event_id_ctrl(file: TsgFile, call: Call) -> None:
    """EVENT_ID_CTRL: a new fd for one of the six events; enabling is the only command."""
    arg = call.arg
    require(arg.event_id < k.NVGPU_IOCTL_CHANNEL_EVENT_ID_MAX)
    require(arg.cmd == k.NVGPU_IOCTL_CHANNEL_EVENT_ID_CMD_ENABLE)
    call.install("event_fd", EventFile(file.driver, file.process, file.tsg, arg.event_id))
