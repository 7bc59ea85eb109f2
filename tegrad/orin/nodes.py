"""The device nodes of a board: what opening each of them makes.

nvgpu has every node under a new and a legacy name (os/linux/ioctl.c, dev_node_list). Those that no compute client needs
open, so that a program which looks for them finds them, and take none of their own commands.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping

from tegrad.orin.channel_calls import ChannelFile
from tegrad.orin.ctrl import CtrlFile
from tegrad.orin.fences import FenceNode
from tegrad.orin.files import File
from tegrad.orin.nvmap import NvmapFile
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Errno, Process, require
from tegrad.orin.tsg import Tsg
from tegrad.orin.tsg_calls import TsgFile

Opener = Callable[[DriverState, Process], File]


def open_as(driver: DriverState, process: Process) -> File:
    """The as node asks for the default big page size, which Orin has disabled."""
    raise Errno(errno.EINVAL)


def open_channel(driver: DriverState, process: Process) -> File:
    """A channel on the graphics runlist, as OPEN_CHANNEL with -1 gives."""
    return ChannelFile(driver, process, -1)


def open_tsg(driver: DriverState, process: Process) -> File:
    """A TSG of its own."""
    return TsgFile(driver, process, Tsg(driver))


class OtherFile(File):
    """An fd of a node whose commands the board does not have."""

    kind = "other"


class SchedFile(File):
    """The fd of the sched node, which has one at a time."""

    kind = "sched"

    def __init__(self, driver: DriverState, process: Process) -> None:
        require(not driver.sched_open, errno.EBUSY)
        super().__init__(driver, process)
        driver.sched_open = True

    def release(self) -> None:
        """The next may open it."""
        self.driver.sched_open = False


GPU_NODES: Mapping[str, Opener] = {
    "as": open_as,
    "channel": open_channel,
    "ctrl": CtrlFile,
    "tsg": open_tsg,
    "sched": SchedFile,
    "power": OtherFile,
    "ctxsw": OtherFile,
    "dbg": OtherFile,
    "prof": OtherFile,
    "prof-ctx": OtherFile,
    "prof-dev": OtherFile,
    "nvsched": OtherFile,
    "nvsched_ctrl_fifo": OtherFile,
}
"""nvgpu's nodes by their short names."""


def legacy(name: str) -> str:
    """The old path of a node of nvgpu."""
    return "/dev/nvhost-gpu" if name == "channel" else f"/dev/nvhost-{name}-gpu"


NODES: Mapping[str, Opener] = {
    "/dev/nvmap": NvmapFile,
    "/dev/host1x-fence": FenceNode,
    **{f"/dev/nvgpu/igpu0/{name}": opener for name, opener in GPU_NODES.items()},
    **{legacy(name): opener for name, opener in GPU_NODES.items()},
}
"""Every path that can be opened."""
