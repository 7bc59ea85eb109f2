"""Event fds of a TSG: they become readable when the GPU raises the event. Source: os/linux/ioctl_tsg.c."""

from __future__ import annotations

from tegrad.orin.files import Call, File, Table
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Process, require
from tegrad.orin.tsg import Tsg
from tegrad.orin.tsg_calls import TsgFile
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io


class EventFile(File):
    """An event fd: for poll only. It does not keep its TSG alive."""

    kind = "event"

    def __init__(self, driver: DriverState, process: Process, tsg: Tsg, event: int) -> None:
        super().__init__(driver, process)
        self.event, self._tsg = event, tsg
        tsg.event_files.append(self)

    def release(self) -> None:
        """No event is for it any more."""
        self._tsg.event_files.remove(self)


def event_id_ctrl(file: TsgFile, call: Call) -> None:
    """EVENT_ID_CTRL: a new fd for one of the six events; enabling is the only command."""
    arg = call.arg
    require(arg.event_id < k.NVGPU_IOCTL_CHANNEL_EVENT_ID_MAX)
    require(arg.cmd == k.NVGPU_IOCTL_CHANNEL_EVENT_ID_CMD_ENABLE)
    call.install("event_fd", EventFile(file.driver, file.process, file.tsg, arg.event_id))


HANDLERS: Table = {io.NVGPU_IOCTL_TSG_EVENT_ID_CTRL.request: event_id_ctrl}
