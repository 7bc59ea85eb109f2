"""The drivers' common state, and how one ioctl is carried out: decode, inject, handler, copy back.

Nothing here knows of sockets: `server` brings calls and takes answers.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from tegrad.hw.chips import Chip
from tegrad.hw.faults import NotifierCode
from tegrad.orin import as_calls, channel, ctrl, nvmap, recovery, syncpoint, tsg
from tegrad.orin.address_space import AddressSpace
from tegrad.orin.channel import MAX_CHANNELS, DriverChannel
from tegrad.orin.clocks import Arbiter
from tegrad.orin.events import GpuEvent
from tegrad.orin.files import (
    DECODERS,
    FOREIGN,
    Call,
    Errno,
    File,
    Foreign,
    Process,
    Steps,
    Table,
    Until,
    reads_caller,
    require,
)
from tegrad.orin.inject import Injector, Strike
from tegrad.orin.klog import KernelLog
from tegrad.orin.link import GpuError, GpuLost, Link
from tegrad.orin.metadata import Registry
from tegrad.orin.nodes import NODES
from tegrad.orin.nvmap import Buffer, Memory, NvmapState
from tegrad.orin.sharing import Instance
from tegrad.orin.syncpoint import Syncpoints
from tegrad.orin.tsg import Tsg
from tegrad.uapi import ioctls as io
from tegrad.uapi.ioctls import BY_REQUEST, Ioctl, request_size

HANDLERS: Mapping[str, Table] = {
    "ctrl": ctrl.HANDLERS,
    "as": as_calls.HANDLERS,
    "tsg": tsg.HANDLERS,
    "channel": channel.HANDLERS,
    "nvmap": nvmap.HANDLERS,
    "fence": syncpoint.HANDLERS,
}

IOC_WRITE_BIT = 1 << 30
"""The W bit of a request number: the driver reads the caller's block."""

UNPOWERED_EINVAL = (
    io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS,
    io.NVGPU_GPU_IOCTL_SET_MMUDEBUG_MODE,
    io.NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO,
)
"""Calls that answer EINVAL when the GPU cannot be powered on; the others pass the reason on."""

LETTING_GO = frozenset(
    {"vm_destroy", "unmap", "syncpoint_free", "tsg_destroy", "channel_destroy", "tsg_abort", "stats"}
)
"""Calls of the GPU that succeed without one: whatever they are about is gone already."""


class Driver:
    """One board's nvgpu, nvmap and host1x-fence drivers, and the GPU process below them."""

    def __init__(self, chip: Chip, memory_limit: int, *, board_id: str, gpu: str) -> None:
        self.chip = chip
        self.log = KernelLog()
        self.inject = Injector()
        self.memory = Memory(memory_limit, board_id)
        self.nvmap = NvmapState()
        self.syncpoints = Syncpoints()
        self.vms: dict[int, AddressSpace] = {}
        self.tsgs: dict[int, Tsg] = {}
        self.channels: dict[int, DriverChannel] = {}
        self.free_chids = list(range(MAX_CHANNELS))
        self.clock = Arbiter(chip)
        self.metadata = Registry()
        self.sched_open = False
        self.instances: dict[int, Instance] = {}
        self._vm_ids = itertools.count(1)
        self._instances = itertools.count(1)
        self._gpu_factory = gpu
        # The driver keeps both ends, so that doorbells survive a GPU process and none is lost in between.
        self._doorbell_read, self.doorbell = os.pipe2(os.O_CLOEXEC)
        self.gpu = Link(chip, self._doorbell_read, factory=gpu)
        self._resetting = False
        self.on_new_gpu: Callable[[], None] = lambda: None  # its events come from another socket
        self.quiesced = False  # the driver gave up on the GPU: every call that needs it is ENODEV

    def close(self) -> None:
        """End the GPU process."""
        self.gpu.close()

    def new_vm_id(self) -> int:
        """A number for a new address space."""
        return next(self._vm_ids)

    def new_instance_id(self) -> int:
        """A number for a new ctrl fd."""
        return next(self._instances)

    # ---- files ---------------------------------------------------------------------------------------------------

    def open(self, path: str, process: Process) -> File:
        """Open a device node. Errno(ENOENT) for one the board does not have."""
        node = NODES.get(path)
        if node is None:
            raise Errno(errno.ENOENT)
        return node(self, process)

    def resolve(self, fd: int, files: Mapping[tuple[int, int], File]) -> File | Buffer | Foreign:
        """What an fd from a client is: one of our files (by the inode of its client's end), a buffer, or neither."""
        stat = os.fstat(fd)
        return files.get((stat.st_dev, stat.st_ino)) or self.memory.find(fd, stat) or FOREIGN

    # ---- ioctls --------------------------------------------------------------------------------------------------

    def row(self, file: File, request: int, readable: int) -> Ioctl:
        """The row of a request on this kind of file; the errno of a driver that does not have it.

        `readable`: how many bytes of the caller's block could be read.
        """
        decoder = DECODERS.get(file.kind)
        if decoder is None:
            raise Errno(errno.ENOTTY)
        decoder.check(request)
        # The nvgpu drivers copy the block in before they look which command it is; nvmap's handlers do it themselves.
        require(file.kind == "nvmap" or not request & IOC_WRITE_BIT or readable >= request_size(request), errno.EFAULT)
        row = BY_REQUEST.get((file.kind, request))
        if row is None or request not in HANDLERS[file.kind]:
            if file.kind == "tsg":
                self.log.error("nvgpu_ioctl_tsg_dev_ioctl", f"unrecognized tsg gpu ioctl cmd: 0x{request:x}")
            elif file.kind == "nvmap":
                self.log.nvmap(f"Unknown NVMAP_IOC = 0x{request:x}")
            raise Errno(errno.ENOTTY)
        require(not reads_caller(row) or readable >= row.size, errno.EFAULT)
        return row

    def begin(self, file: File, call: Call) -> Steps | int | None:
        """Carry out one call: its result, or the steps that lead there."""
        if self.quiesced and file.kind not in ("nvmap", "fence"):
            raise Errno(errno.EINVAL if call.row in UNPOWERED_EINVAL else errno.ENODEV)
        strike = self.inject.strike(call.row.name)
        if strike is not None:
            return self._struck(file, call, strike)
        return HANDLERS[file.kind][call.row.request](file, call)

    def _struck(self, file: File, call: Call, strike: Strike) -> Steps:
        """A call that an injection rule hit."""
        if strike.stall:
            yield Until(None, time.monotonic() + strike.stall)
        if strike.errno:
            raise Errno(strike.errno)
        outcome = HANDLERS[file.kind][call.row.request](file, call)
        if outcome is not None and not isinstance(outcome, int):
            outcome = yield from outcome
        for name, value in strike.answer.items():
            setattr(call.arg, name, value)
        return outcome

    # ---- the GPU -------------------------------------------------------------------------------------------------

    def tell_gpu(self, method: str, *args: object, fd: int | None = None) -> Any:
        """Call the GPU. Record first, then tell: when the GPU is lost on the way, the replay tells the new one.

        Raises GpuError when the GPU has no room for what is asked, Errno(ENODEV) when there is no GPU any more.
        """
        try:
            if not self.quiesced:
                return self.gpu.call(method, *args, fd=fd)
        except GpuLost as lost:
            if self._resetting:
                raise
            self.reset_gpu(str(lost))
        require(not self.quiesced or method in LETTING_GO, errno.ENODEV)
        return None

    def poll_gpu(self) -> None:
        """Act on what the GPU reported."""
        events, lost = self.gpu.poll()
        for event in events:
            self.handle(event)
        if lost:
            self.reset_gpu("the GPU process is gone")

    def handle(self, event: GpuEvent) -> None:
        """Act on one event."""
        recovery.handle(self, event)

    def recover(self, group: Tsg, code: NotifierCode) -> None:
        """A TSG has failed, or is made to: stop it and tell its channels."""
        recovery.recover(self, group, code)

    def reset_gpu(self, why: str) -> None:
        """The GPU process is lost: a new one, every channel dead, memory and mappings as they were."""
        for event in self.gpu.poll()[0]:  # its last words
            self.handle(event)
        self.log.board(f"GPU reset ({why})")
        # One that never answered a call is not going to do better the next time.
        self.quiesced = not self.gpu.answered
        self.gpu.close()
        self._resetting = True
        try:
            if not self.quiesced:
                self.gpu = Link(self.chip, self._doorbell_read, factory=self._gpu_factory)
                self.on_new_gpu()
                for vm in self.vms.values():
                    vm.replay()
                for group in self.tsgs.values():
                    group.replay()
        except (GpuLost, GpuError) as failure:
            self.log.board(f"GPU reset failed: {failure}")
            self.quiesced = True
        finally:
            self._resetting = False
        if self.quiesced:
            self.log.error("nvgpu_sw_quiesce", "SW quiesce: the GPU does not come back; restart the board")
        for group in self.tsgs.values():
            for dead in group.channels:
                dead.running = False
            self.recover(group, NotifierCode.FIFO_ERROR_IDLE_TIMEOUT)

    def counts(self) -> dict[str, int]:
        """How many of each object the drivers hold."""
        clients = self.nvmap.clients.values()
        return {
            "nvmap_handles": sum(len(c.handles) for c in clients),
            "dmabufs": len(self.memory.buffers),
            "memory_bytes": self.memory.taken,
            "address_spaces": len(self.vms),
            "gpu_mappings": sum(len(vm.mappings) for vm in self.vms.values()),
            "kernel_mappings": sum(len(vm.kernel_mappings) + len(vm.syncpoints) for vm in self.vms.values()),
            "areas": sum(len(vm.areas) for vm in self.vms.values()),
            "instances": len(self.instances),
            "share_tokens": sum(len(i.tokens) for i in self.instances.values()),
            "event_files": sum(len(g.event_files) for g in self.tsgs.values()),
            "tsgs": len(self.tsgs),
            "channels": len(self.channels),
            "syncpoints": len(self.syncpoints.used),
            "fences": len(self.syncpoints.fences),
        }
