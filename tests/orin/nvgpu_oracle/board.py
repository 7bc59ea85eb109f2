"""The board's answers: its driver modules, called as its server calls them, with nothing behind the line to the GPU."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tegrad.hw import gpfifo
from tegrad.hw.chips import CHIPS
from tegrad.hw.faults import read_notifier
from tegrad.orin import as_calls, driver, engine_classes, recovery, runlist
from tegrad.orin.address_space import AddressSpace
from tegrad.orin.as_file import AsFile, alloc_as
from tegrad.orin.buffers import Buffer
from tegrad.orin.channel import NOTIFIER_SIZE, Notifier
from tegrad.orin.channel_calls import ChannelFile
from tegrad.orin.driver import Driver
from tegrad.orin.events import ContextSwitchTimeout, PbdmaFault
from tegrad.orin.files import Call, File
from tegrad.orin.preemption import COMPUTE_WFI
from tegrad.orin.semaphore import ACQUIRE_TESTS
from tegrad.orin.steps import Errno, Process
from tegrad.orin.tsg import Tsg
from tegrad.orin.tsg_calls import TsgFile
from tegrad.uapi import constants as k
from tegrad.uapi import ioctls as io
from tegrad.uapi.ioctls import Ioctl
from tests.orin.nvgpu_oracle.record import Case

CHIP = CHIPS["agx-orin-64gb"]
RANGE = (0x200000, 0xFF00000000)
RING_BYTES = 8 << 20
CIRCULAR = 3
"""The semaphore acquire that compares over the wrap."""
PROCESS = Process("oracle", 1, "oracle")


class Line:
    """In place of the line to a GPU process: what the driver says is kept, and nothing is ever wrong."""

    answered = True

    def __init__(self, *_: object, **__: object) -> None:
        self.told: list[tuple[Any, ...]] = []

    def call(self, method: str, *args: object, fd: int | None = None) -> None:
        self.told.append((method, *args))

    def poll(self) -> tuple[list[Any], bool]:
        return [], False

    def close(self) -> None:
        pass


@contextmanager
def board() -> Iterator[Board]:
    """A board's drivers, for one case."""
    with mock.patch.object(driver, "Link", Line), mock.patch.object(as_calls, "SYNC_UNMAP_S", 0.0):
        made = Board()
        try:
            yield made
        finally:
            made.close()


class Board:
    """The objects of a case, named by the order in which its steps made them."""

    def __init__(self) -> None:
        self.driver = Driver(CHIP, 1 << 46, board_id="oracle", gpu="")
        self.state = self.driver.state
        self.line: Line = self.state.gpu  # type: ignore[assignment]
        self.groups: list[TsgFile] = []
        self.channels: list[ChannelFile] = []
        self.buffers: dict[int, Buffer] = {}
        self.unwritable: set[int] = set()
        """Of them those whose fds cannot be written through."""
        self.spaces: dict[int, AsFile] = {}

    def close(self) -> None:
        """Give the host back what the drivers hold of it."""
        for buffer in [*self.state.memory.buffers.values()]:
            buffer.close()
        for fd in (self.state.syncpoints.fd, self.driver.doorbell, self.driver._doorbell_read):
            os.close(fd)

    def ioctl(
        self,
        file: File,
        row: Ioctl,
        files: Mapping[str, Any] | None = None,
        unwritable: frozenset[str] = frozenset(),
        **fields: int,
    ) -> Any:
        """Carry out a call; its argument block. Errno where it fails."""
        arg = row.struct() if row.struct is not None else None
        for name, value in fields.items():
            if name == "value":
                arg.value = value
            else:
                setattr(arg, name, value)
        steps = self.driver.begin(file, Call(row, arg, files=dict(files or {}), unwritable=unwritable))
        if steps is not None and not isinstance(steps, int):
            for _ in steps:
                pass
        return arg

    def space(self, number: int = 0) -> AsFile:
        """The address space of this number, made when it is first used."""
        if number not in self.spaces:
            self.spaces[number] = AsFile(self.state, PROCESS, alloc_as(self.state, 0, *RANGE, 0))
        return self.spaces[number]

    @property
    def vm(self) -> AddressSpace:
        return self.space().vm

    def buffer(self, number: int, size: int = RING_BYTES, *, read_only: bool = False) -> Buffer:
        """The buffer of this number, made when it is first used."""
        if number not in self.buffers:
            made = self.state.memory.create(size)
            made.allocated = True
            self.unwritable |= {number} if read_only else set()
            self.buffers[number] = made.hold()
        return self.buffers[number]


# ---- address spaces -------------------------------------------------------------------------------------------------


def _address(va: int | None) -> str:
    return hex(va) if va else "none"


def make_space(b: Board, start: int, end: int) -> str:
    b.spaces[0] = AsFile(b.state, PROCESS, alloc_as(b.state, 0, start, end, 0))
    return "made"


def bounds(b: Board, page: int, start: int, end: int, split: int) -> str:
    vm = alloc_as(b.state, page, start, end, split)
    ranges = (vm.user.start, vm.user.end, vm.kernel.start, vm.kernel.end)
    return " ".join(map(hex, ranges))


def allocate(b: Board, size: int) -> str:
    return _address(b.vm.user.allocate(size))


def fixed(b: Board, base: int, size: int) -> str:
    return _address(base if b.vm.user.allocate_fixed(base, size) else None)


def free(b: Board, va: int) -> str:
    b.vm.user.free(va)
    return "0"


def kernel(b: Board, size: int) -> str:
    return _address(b.vm.kernel.allocate(size))


def kernel_free(b: Board, va: int) -> str:
    b.vm.kernel.free(va)
    return "0"


def area(b: Board, pages: int, page_size: int, flags: int, va: int) -> str:
    row = io.NVGPU_AS_IOCTL_ALLOC_SPACE
    arg = row.struct(pages=pages, page_size=page_size, flags=flags)
    arg.o_a.offset = va
    as_calls.alloc_space(b.space(), Call(row, arg))
    return _address(arg.o_a.offset)


def release(b: Board, va: int) -> str:
    b.ioctl(b.space(), io.NVGPU_AS_IOCTL_FREE_SPACE, offset=va)
    return "0"


def make_buffer(b: Board, number: int, size: int, read_only: int, physical: int) -> str:
    b.buffer(number, size, read_only=bool(read_only))
    return "0"


def map_buffer(b: Board, number: int, flags: int, va: int, offset: int, size: int, compr: int, incompr: int) -> str:
    fields = {"compr_kind": compr, "incompr_kind": incompr, "buffer_offset": offset, "mapping_size": size, "offset": va}
    unwritable = frozenset({"dmabuf_fd"} if number in b.unwritable else ())
    files = {"dmabuf_fd": b.buffer(number)}
    arg = b.ioctl(b.space(), io.NVGPU_AS_IOCTL_MAP_BUFFER_EX, files, unwritable=unwritable, flags=flags, **fields)
    return _address(arg.offset)


def unmap(b: Board, va: int) -> str:
    b.ioctl(b.space(), io.NVGPU_AS_IOCTL_UNMAP_BUFFER, offset=va)
    return "0"


def mappings(b: Board) -> str:
    return " ".join(f"{va:#x}+{one.size:#x}" for va, one in sorted(b.vm.mappings.items()))


def pte(b: Board, va: int) -> str:
    return _address(b.vm.entry_at(va).word)


# ---- groups, channels, objects --------------------------------------------------------------------------------------


def open_group(b: Board) -> str:
    b.groups.append(TsgFile(b.state, PROCESS, Tsg(b.state)))
    return str(b.groups[-1].tsg.id)


def open_channel(b: Board, number: int) -> str:
    file = ChannelFile(b.state, PROCESS, -1)
    file.channel.runlist = number  # of an engine that OPEN_CHANNEL does not give
    b.channels.append(file)
    at = (len(b.channels) - 1) * NOTIFIER_SIZE
    file.channel.set_notifier(Notifier(b.buffer(-1).hold(), at))
    return str(file.channel.chid)


def bind_space(b: Board, channel: int, space: int) -> str:
    b.ioctl(b.space(space), io.NVGPU_AS_IOCTL_BIND_CHANNEL, {"channel_fd": b.channels[channel]})
    return "0"


def subcontext(b: Board, group: int, kind: int, space: int) -> str:
    row = io.NVGPU_TSG_IOCTL_CREATE_SUBCONTEXT
    return str(b.ioctl(b.groups[group], row, {"as_fd": b.space(space)}, type=kind).veid)


def delete_subcontext(b: Board, group: int, veid: int) -> str:
    b.ioctl(b.groups[group], io.NVGPU_TSG_IOCTL_DELETE_SUBCONTEXT, veid=veid)
    return "0"


def bind(b: Board, group: int, channel: int, veid: int) -> str:
    file = b.channels[channel]
    if veid < 0:
        b.ioctl(b.groups[group], io.NVGPU_TSG_IOCTL_BIND_CHANNEL, {"value": file})
    else:
        b.ioctl(b.groups[group], io.NVGPU_TSG_IOCTL_BIND_CHANNEL_EX, {"channel_fd": file}, subcontext_id=veid)
    return "0"


def unbind(b: Board, group: int, channel: int) -> str:
    b.ioctl(b.groups[group], io.NVGPU_TSG_IOCTL_UNBIND_CHANNEL, {"value": b.channels[channel]})
    return "0"


def close(b: Board, channel: int) -> str:
    b.channels[channel].release()
    return "0"


def drop(b: Board, group: int) -> str:
    file = b.groups[group]
    file.release()
    return str(int(file.tsg.id in b.state.tsgs))


def _serves(b: Board, channel: int) -> int:
    return 1 - int(b.ioctl(b.channels[channel], io.NVGPU_IOCTL_CHANNEL_GET_TIMEDOUT).value)


def serves(b: Board, channel: int) -> str:
    return str(_serves(b, channel))


def members(b: Board, group: int) -> str:
    found = b.groups[group].tsg.channels
    return " ".join([str(len(found)), *(f"{one.chid}:{one.veid}" for one in found)])


def level(b: Board, group: int, value: int) -> str:
    b.ioctl(b.groups[group], io.NVGPU_IOCTL_TSG_SET_RUNLIST_INTERLEAVE, level=value)
    return "0"


def timeslice(b: Board, group: int, us: int) -> str:
    b.ioctl(b.groups[group], io.NVGPU_IOCTL_TSG_SET_TIMESLICE, timeslice_us=us)
    return "0"


def get_timeslice(b: Board, group: int) -> str:
    return str(b.ioctl(b.groups[group], io.NVGPU_IOCTL_TSG_GET_TIMESLICE).timeslice_us)


def run_order(b: Board) -> str:
    """The GPU's runlist of what the driver has told it of each group that has channels."""
    entries: list[runlist.Tsg] = []
    for tsg in b.state.tsgs.values():
        levels = [args[-1] for method, *args in b.line.told if method == "tsg_schedule" and args[0] == tsg.id]
        if tsg.channels:
            entries.append(runlist.Tsg(tsg.id, level=levels[-1] if levels else runlist.LOW))
    return " ".join(["order", *(str(entry.id) for entry in runlist.order(entries))])


def watchdog(b: Board, channel: int, on: int) -> str:
    status = k.NVGPU_IOCTL_CHANNEL_ENABLE_WDT if on else k.NVGPU_IOCTL_CHANNEL_DISABLE_WDT
    b.ioctl(b.channels[channel], io.NVGPU_IOCTL_CHANNEL_WDT, wdt_status=status)
    return "0"


def set_up(b: Board, channel: int, entries: int, flags: int, error: int, no_memory: int) -> str:
    """SETUP_BIND. `error`: what its buffers, which are os/linux's matter, are refused with."""
    ring, userd = b.buffer(0), b.buffer(1)
    ring.allocated = error != -errno.ENOMEM
    fields = {"gpfifo_dmabuf_fd": 1, "userd_dmabuf_fd": 1, "gpfifo_dmabuf_offset": 4096 * (error == -errno.EINVAL)}
    arg = b.ioctl(
        b.channels[channel],
        io.NVGPU_IOCTL_CHANNEL_SETUP_BIND,
        {"gpfifo_dmabuf_fd": ring, "userd_dmabuf_fd": userd},
        num_gpfifo_entries=entries,
        flags=flags,
        **fields,
    )
    return hex(arg.work_submit_token)


# ---- faults ---------------------------------------------------------------------------------------------------------


def _learned(b: Board) -> str:
    """Of each channel: the code in its notifier, and whether it may still work."""
    found = []
    for i in range(len(b.channels)):
        record = os.pread(b.buffer(-1).fd, NOTIFIER_SIZE, i * NOTIFIER_SIZE)
        found.append(f"{read_notifier(record).info32}:{_serves(b, i)}")
    return " ".join(found)


def limit(b: Board, channel: int, ms: int) -> str:
    b.ioctl(b.channels[channel], io.NVGPU_IOCTL_CHANNEL_SET_TIMEOUT, timeout=ms)
    return "0"


def period(b: Board) -> str:
    seen = len(b.state.log.since(0))
    recovery.handle(b.state, ContextSwitchTimeout(-1, b.groups[0].tsg.id))
    lines = "\n".join(entry.text for entry in b.state.log.since(seen))
    told = re.search(r"awaiting ack ms=(\d+)", lines)
    return f"{told[1] if told else '-'} {_learned(b)}"


def reset(b: Board, channel: int) -> str:
    b.ioctl(b.channels[channel], io.NVGPU_IOCTL_CHANNEL_FORCE_RESET)
    return f"0 {_learned(b)}"


def host(b: Board, intr_0: int, intr_1: int) -> str:
    """An interrupt of the host engine that runs the first group."""
    tsg = b.groups[0].tsg.id
    b.line.told.clear()
    recovery.handle(b.state, PbdmaFault(-1, tsg, intr_0, intr_1))
    return f"{int(('tsg_abort', tsg) in b.line.told)} {_learned(b)}"


# ---- numbers --------------------------------------------------------------------------------------------------------


def released(b: Board, threshold: int, value: int) -> str:
    """Of a syncpoint and of a semaphore that the host acquires over the wrap."""
    b.state.syncpoints.values[1] = value
    found = {b.state.syncpoints.reached(1, threshold), ACQUIRE_TESTS[CIRCULAR](value, threshold, 32)}
    return "/".join(str(int(one)) for one in sorted(found))


def token(b: Board, chid: int, runlist_id: int) -> str:
    return hex(gpfifo.token(chid, runlist_id))


def is_class(b: Board, number: int) -> str:
    tests = (engine_classes.known, engine_classes.computes, engine_classes.draws)
    return " ".join(str(int(test(CHIP, number))) for test in tests)


def engine_object(b: Board, channel: int, number: int, flags: int) -> str:
    b.ioctl(b.channels[channel], io.NVGPU_IOCTL_CHANNEL_ALLOC_OBJ_CTX, class_num=number, flags=flags)
    return "0"


def modes(b: Board, channel: int, graphics: int, compute: int) -> str:
    fields = {"graphics_preempt_mode": graphics, "compute_preempt_mode": compute}
    b.ioctl(b.channels[channel], io.NVGPU_IOCTL_CHANNEL_SET_PREEMPTION_MODE, **fields)
    return "0"


def image(b: Board) -> str:
    """The first group's graphics and compute mode, and what the GPU was told of the compute mode's image above WFI."""
    modes = b.groups[0].tsg.modes
    given = [args[-1] for method, *args in b.line.told if method == "tsg_preemption"]
    compute = given[-1] if given else 0
    return f"{modes.graphics} {modes.compute} {compute * (compute > COMPUTE_WFI)}"


OPERATIONS: Mapping[str, Callable[..., str]] = {
    "space": make_space,
    "bounds": bounds,
    "alloc": allocate,
    "fixed": fixed,
    "free": free,
    "kernel": kernel,
    "kfree": kernel_free,
    "area": area,
    "release": release,
    "buffer": make_buffer,
    "map": map_buffer,
    "unmap": unmap,
    "mappings": mappings,
    "pte": pte,
    "tsg": open_group,
    "channel": open_channel,
    "as": bind_space,
    "sub": subcontext,
    "del": delete_subcontext,
    "bind": bind,
    "unbind": unbind,
    "close": close,
    "drop": drop,
    "serves": serves,
    "members": members,
    "level": level,
    "timeslice": timeslice,
    "gettimeslice": get_timeslice,
    "runlist": run_order,
    "wdt": watchdog,
    "setup": set_up,
    "limit": limit,
    "period": period,
    "reset": reset,
    "host": host,
    "released": released,
    "token": token,
    "is": is_class,
    "object": engine_object,
    "modes": modes,
    "image": image,
}
"""By the name that a step has."""


GIVERS = ("alloc", "fixed", "kernel", "area", "map")
"""Steps that answer an address."""


def number(word: str, case: Case) -> int:
    """A step's number: as it stands, or `$3+64`, 64 bytes after the address that step 3 gave (or 0)."""
    if not word.startswith("$"):
        return int(word, 0)
    step, _, after = word[1:].partition("+")
    answer = case.answers[int(step)]
    gave = case.steps[int(step)].split()[0] in GIVERS and answer.startswith("0x")
    return (int(answer, 16) if gave else 0) + int(after or "0")


def replay(case: Case) -> list[str]:
    """The board's answer to each step of a case, as the oracle would print it."""
    found = []
    with board() as b:
        for step in case.steps:
            operation, *words = step.split()
            try:
                answer = OPERATIONS[operation](b, *(number(word, case) for word in words))
            except Errno as refused:
                answer = str(-refused.number)
            found.append(answer)
    return found
