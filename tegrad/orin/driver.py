"""One board's drivers: which handler an ioctl goes to (decode, inject, handler), and the life of the GPU below.

Nothing here knows of sockets: `server` brings calls and takes answers. Handlers know only of `state`.
"""

from __future__ import annotations

import errno
import os
import time
from collections import ChainMap
from collections.abc import Callable, Mapping

from tegrad.hw.chips import Chip
from tegrad.hw.faults import NotifierCode
from tegrad.orin import (
    as_calls,
    channel_calls,
    clocks,
    ctrl,
    fences,
    metadata,
    nvmap,
    recovery,
    remap,
    share_calls,
    topology,
    tsg_calls,
    tsg_events,
    waiting,
)
from tegrad.orin.arbiter import Arbiter
from tegrad.orin.buffers import Buffer, Memory
from tegrad.orin.files import DECODERS, FOREIGN, Call, File, Foreign, Handler, reads_caller
from tegrad.orin.inject import Injection, Injector
from tegrad.orin.link import GpuError, GpuLost, Link
from tegrad.orin.nodes import NODES
from tegrad.orin.state import DriverState
from tegrad.orin.steps import Errno, Process, Steps, Until, require
from tegrad.uapi import ioctls as io
from tegrad.uapi.ioctls import BY_REQUEST, Ioctl, request_size

HANDLERS: Mapping[str, Mapping[int, Handler]] = {
    "ctrl": ChainMap(ctrl.HANDLERS, topology.HANDLERS, clocks.HANDLERS, metadata.HANDLERS),
    "as": ChainMap(as_calls.HANDLERS, remap.HANDLERS),
    "tsg": ChainMap(tsg_calls.HANDLERS, tsg_events.HANDLERS, share_calls.HANDLERS),
    "channel": ChainMap(channel_calls.HANDLERS, waiting.HANDLERS),
    "nvmap": nvmap.HANDLERS,
    "fence": fences.HANDLERS,
}
"""The handler of each request number, by kind of file."""

IOC_WRITE_BIT = 1 << 30
"""The W bit of a request number: the driver reads the caller's block."""

UNPOWERED_EINVAL = (
    io.NVGPU_GPU_IOCTL_GET_CHARACTERISTICS,
    io.NVGPU_GPU_IOCTL_SET_MMUDEBUG_MODE,
    io.NVGPU_GPU_IOCTL_GET_CPU_TIME_CORRELATION_INFO,
)
"""Calls that answer EINVAL when the GPU cannot be powered on; the others pass the reason on."""


class Driver:
    """One board's drivers: what they keep (`state`), how a call reaches its handler, and the life of the GPU below."""

    def __init__(self, chip: Chip, memory_limit: int, *, board_id: str, gpu: str) -> None:
        self.inject = Injector()
        self.on_new_gpu: Callable[[], None] = lambda: None  # its events come from another socket
        self._gpu_factory = gpu
        self._resetting = self._hearing = False
        # The driver keeps both ends, so that doorbells survive a GPU process and none is lost in between.
        self._doorbell_read, self.doorbell = os.pipe2(os.O_CLOEXEC)
        link = Link(chip, self._doorbell_read, factory=gpu)
        self.state = DriverState(chip, Memory(memory_limit, board_id), link, self._lost, Arbiter(chip))
        self.state.on_ending = self._hear

    def close(self) -> None:
        """End the GPU process."""
        self.state.gpu.close()

    # ---- files ---------------------------------------------------------------------------------------------------

    def open(self, path: str, process: Process) -> File:
        """Open a device node. Errno(ENOENT) for one the board does not have."""
        node = NODES.get(path)
        if node is None:
            raise Errno(errno.ENOENT)
        return node(self.state, process)

    def resolve(self, fd: int, files: Mapping[tuple[int, int], File]) -> File | Buffer | Foreign:
        """What an fd from a client is: one of our files (by the inode of its client's end), a buffer, or neither."""
        stat = os.fstat(fd)
        return files.get((stat.st_dev, stat.st_ino)) or self.state.memory.find(fd, stat) or FOREIGN

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
                self.state.log.error("nvgpu_ioctl_tsg_dev_ioctl", f"unrecognized tsg gpu ioctl cmd: 0x{request:x}")
            elif file.kind == "nvmap":
                self.state.log.nvmap(f"Unknown NVMAP_IOC = 0x{request:x}")
            raise Errno(errno.ENOTTY)
        require(not reads_caller(row) or readable >= row.size, errno.EFAULT)
        return row

    def begin(self, file: File, call: Call) -> Steps | int | None:
        """Carry out one call: its result, or the steps that lead there."""
        if self.state.quiesced and file.kind not in ("nvmap", "fence"):
            raise Errno(errno.EINVAL if call.row in UNPOWERED_EINVAL else errno.ENODEV)
        strike = self.inject.strike(call.row.name)
        if strike is not None:
            return self._struck(file, call, strike)
        return HANDLERS[file.kind][call.row.request](file, call)

    def _struck(self, file: File, call: Call, strike: Injection) -> Steps:
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

    def poll_gpu(self) -> None:
        """Act on what the GPU reported."""
        if self._hear():
            self.reset_gpu("the GPU process is gone")

    def _hear(self) -> bool:
        """Act on the GPU's reports; whether it is gone. What it reports meanwhile is heard after them."""
        if self._hearing:
            return False
        self._hearing = True
        try:
            events, lost = self.state.gpu.poll()
            for event in events:
                recovery.handle(self.state, event)
        finally:
            self._hearing = False
        return lost

    def _lost(self, lost: GpuLost) -> None:
        """The GPU did not answer a call: nothing helps while it is replaced."""
        if self._resetting:
            raise lost
        self.reset_gpu(str(lost))

    def reset_gpu(self, why: str) -> None:
        """The GPU process is lost: a new one, every channel dead, memory and mappings as they were."""
        state = self.state
        for event in state.gpu.poll()[0]:  # its last words
            recovery.handle(state, event)
        state.log.board(f"GPU reset ({why})")
        # One that never answered a call is not going to do better the next time.
        state.quiesced = not state.gpu.answered
        state.gpu.close()
        self._resetting = True
        try:
            if not state.quiesced:
                state.gpu = Link(state.chip, self._doorbell_read, factory=self._gpu_factory)
                self.on_new_gpu()
                for vm in state.vms.values():
                    vm.replay()
                for group in list(state.tsgs.values()):
                    group.replay()
        except (GpuLost, GpuError) as failure:
            state.log.board(f"GPU reset failed: {failure}")
            state.quiesced = True
        finally:
            self._resetting = False
        if state.quiesced:
            state.log.error("nvgpu_sw_quiesce", "SW quiesce: the GPU does not come back; restart the board")
        for group in list(state.tsgs.values()):  # a wait that ends may be the last to hold a group
            for dead in group.channels:
                dead.running = False
            group.recover(NotifierCode.FIFO_ERROR_IDLE_TIMEOUT)
