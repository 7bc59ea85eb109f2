"""Several clients that do random things to one board, and what must hold whatever they do.

An action takes the world and a `Draw`, from which all its choices come; so one table serves hypothesis, which shrinks,
and the seeded run, which is fast.
"""

from __future__ import annotations

import errno
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from fuzz_client import ENTRIES, PAGE, ROOM, Client
from fuzz_client import Died as Died

from tegrad.hw.chips import CHIPS
from tegrad.hw.classes import BY_CLASS, CopyMethod, HostMethod
from tegrad.hw.gpfifo import MethodOp, Subchannel, method_header
from tegrad.orin.client import BoardKernel, board_log, board_status
from tegrad.uapi.errors import DriverError
from tegrad.uapi.fields import UNIONS, leaf_fields
from tegrad.uapi.ioctls import ROWS, Ioctl

CHIP = CHIPS["agx-orin-64gb"]
SPEC = "agx-orin-64gb:1GiB"
CLIENTS = 3
NODES = (
    "/dev/nvmap",
    "/dev/nvgpu/igpu0/ctrl",
    "/dev/host1x-fence",
    "/dev/nvgpu/igpu0/channel",
    "/dev/nvgpu/igpu0/tsg",
    "/dev/null",
)
_NAMES = """EPERM ENOENT EINTR ENXIO EBADF EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST ENODEV EINVAL EMFILE ENOTTY
ENOSPC EADDRNOTAVAIL ETIMEDOUT ENOSYS EOPNOTSUPP ERANGE EOVERFLOW E2BIG ENODATA ECANCELED"""
ERRNOS = frozenset(getattr(errno, name) for name in _NAMES.split())
"""What a driver may answer. EIO is not among them: the board answers it when a handler breaks."""
WORDS = (0, 1, 2, 3, 4, 7, 8, 15, 16, 63, 64, 255, 256, 511, 512, 4095, 4096, 4097, 65536, 1 << 20, 1 << 21, 1 << 31)
WIDE = (
    *WORDS,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 32,
    0x200000,
    0xFEFFE00000,
    0xFF00000000,
    1 << 40,
    1 << 48,
    (1 << 64) - 1,
)
SLOW = ("timeout", "timeout_ms")


class Draw:
    """Choices out of a source of numbers."""

    def __init__(self, number: Callable[[int], int]) -> None:
        self.below = number

    def pick(self, options: Any) -> Any:
        """One of several things; None of nothing."""
        return options[self.below(len(options))] if options else None

    def chance(self, percent: int) -> bool:
        return self.below(100) < percent


def seeded(seed: int) -> Draw:
    return Draw(random.Random(seed).randrange)


class Seat:
    """One client and what is known to be its own."""

    def __init__(self, client: Client) -> None:
        self.client = client
        nvmap, ctrl = client.ask("hello")
        self.fds: dict[str, list[int]] = {"nvmap": [nvmap], "ctrl": [ctrl], "dmabuf": []}
        self.handles: list[int] = []
        self.addresses: list[tuple[int, int]] = []
        self.rings: list[dict[str, int]] = []

    def any_fd(self, draw: Draw, kind: str | None = None) -> int:
        """An fd of a kind, or of another one, or no fd at all."""
        if kind is None or draw.chance(10):
            kind = draw.pick(list(self.fds))
        found: int | None = draw.pick(self.fds.get(kind, []))
        return 900 + draw.below(50) if found is None or draw.chance(2) else found


class World:
    """The board, its clients, and the count of what was done."""

    def __init__(self, spec: str = SPEC) -> None:
        self.spec, self.numbers, self.done, self.refused = spec, 0, Counter[str](), Counter[str]()
        self.tried, self.worked = Counter[str](), Counter[str]()
        self.kernel = BoardKernel(spec)
        self._keep = self.kernel.open("/dev/host1x-fence")
        self.before = board_status(spec)
        self._logged = len(board_log(spec))
        self.seats = [self.new_seat() for _ in range(CLIENTS)]

    def new_seat(self) -> Seat:
        self.numbers += 1
        return Seat(Client(self.spec, self.numbers))

    def step(self, name: str, draw: Draw) -> None:
        """Do one thing. What the driver may refuse it may refuse; anything else is a failure."""
        seat = draw.pick(self.seats)
        try:
            ACTIONS[name](self, seat, draw)
            self.done[name] += 1
        except DriverError as refused:
            if refused.errno not in ERRNOS:
                raise AssertionError(f"{name}: no driver answers {refused}") from refused
            self.refused[name] += 1

    def check(self) -> None:
        """The board stands as it stood, its handlers and its GPU broke nowhere, and nobody sees another's memory."""
        status = board_status(self.spec)
        assert status["pids"] == self.before["pids"], "the board or its GPU was started anew"
        lines = board_log(self.spec, self._logged)
        broken = [
            line
            for line in lines
            if "Traceback" in line or "GPU reset" in line or "nonsense" in line or "defect" in line
        ]
        assert not broken, "\n".join(lines[-60:])
        for seat in self.seats:
            seen = seat.client.ask("look", self.numbers)
            assert not seen, f"client {seat.client.number} sees the memory of {seen}"

    def end(self) -> None:
        """With all clients gone, the board holds what it held before."""
        self.check()
        for seat in self.seats:
            seat.client.kill()
        self.seats = []
        after = board_status(self.spec)
        for part in ("counts", "files", "pids"):
            assert after[part] == self.before[part]
        end = time.monotonic() + 10
        while any(of["fds"] > self.before["host"][name]["fds"] for name, of in after["host"].items()):
            assert time.monotonic() < end, after["host"]
            time.sleep(0.02)  # what is on its way from one of the board's processes to the other is open until then
            after = board_status(self.spec)
        self.kernel.close(self._keep)


# ---- actions


def open_node(world: World, seat: Seat, draw: Draw) -> None:
    path = draw.pick(NODES)
    kind = path.rsplit("/", 1)[1].removeprefix("host1x-")
    seat.fds.setdefault(kind, []).append(seat.client.ask("open", path))


def close_fd(world: World, seat: Seat, draw: Draw) -> None:
    kind = draw.pick(list(seat.fds))
    first = 1 if kind in ("nvmap", "ctrl") else 0  # the client itself needs those two
    if len(seat.fds[kind]) > first:
        fd = seat.fds[kind].pop(first + draw.below(len(seat.fds[kind]) - first))
        seat.client.ask("close", fd)


def any_ioctl(world: World, seat: Seat, draw: Draw) -> None:
    """An ioctl with a block that makes some sense, but for up to two of its fields."""
    row = draw.pick(ROWS)
    names = [] if row.struct is None else leaves(row)
    wild = {draw.pick(names) for _ in range(draw.pick([0, 0, 1, 1, 2]))}
    wild = {name for name in wild if name and not name.endswith(SLOW)}
    fields = {name: anything(draw) if name in wild else sensible(row, name, seat, draw) for name in names}
    value = draw.pick([0, *seat.handles, 1 << 31]) if row.by_value else 0
    world.tried[row.name] += 1
    found = seat.client.ask("ioctl", seat.any_fd(draw, row.fd_kind), row.name, fields, value)
    world.worked[row.name] += 1
    for field in row.fds_out:
        if found.get(field, -1) > 2:
            seat.fds.setdefault(KINDS.get(row.name, "other"), []).append(found[field])
    if row.name in ("NVMAP_CREATE", "NVMAP_CREATE_64"):
        seat.handles.append(found["handle64" if row.name.endswith("64") else "handle"])


KINDS = {
    "GPU_ALLOC_AS": "as",
    "GPU_OPEN_TSG": "tsg",
    "GPU_OPEN_CHANNEL": "channel",
    "CHANNEL_OPEN": "channel",
    "NVMAP_GET_FD": "dmabuf",
}
"""What kind of fd an ioctl gives."""


def leaves(row: Ioctl) -> list[str]:
    """Dotted names of the integer members of a row's block; of a union, those that the driver reads."""
    assert row.struct is not None
    if row.name in UNIONS:
        return sorted(UNIONS[row.name][0])
    return [name for name, value in leaf_fields(row.struct()) if isinstance(value, int) and name != "value"]


SENSE: Mapping[str, tuple[int, ...]] = {
    "va_range_start": (0x200000,),
    "va_range_end": (0xFF00000000, 0x10000000),
    "va_range_split": (0,),
    "big_page_size": (0,),
    "page_size": (PAGE,),
    "pages": (1, 16, 512),
    "class_num": (CHIP.compute_class, CHIP.dma_class, CHIP.gpfifo_class),
    "runlist_id": (-1, 0),
    "heap_mask": (1 << 30, 1 << 30, 1),
    "numa_nid": (-1,),
    "align": (0, PAGE),
    "size": (16, PAGE, ROOM),
    "size64": (PAGE, ROOM),
    "num_gpfifo_entries": (ENTRIES,),
    "flags": (0, 0, 1, 2, 3, 4, 5, 0x0900 << 16 | 2),
    "wdt_status": (1, 2),
    "compr_kind": (-1,),
    "elem_size": (1, 64),
    "hmem_stride": (64,),
    "user_stride": (64,),
    "count": (1, 4),
    "threshold": (0, 1, 2),
    "timeslice_us": (1000, 2000),
    "level": (0, 1, 2),
    "cmd": (0, 1, 2),
    "op": (0, 1, 2),
    "len": (64, PAGE),
    "compute_preempt_mode": (1, 4),
    "num_entries": (0, 1),
    "subcontext_id": (0, 1, 2),
    "veid": (0, 1, 2),
    "sm_id": (0, 1),
}
"""What a client that means well puts into the fields of these names; 0 into others."""


def sensible(row: Ioctl, name: str, seat: Seat, draw: Draw) -> Any:
    """What this client could mean by a field."""
    last = name.rsplit(".", 1)[-1]
    if name in row.pointers:
        return draw.pick(["scratch"] * 8 + ["null", "bad", "kernel"])
    if last.endswith(SLOW):
        return 1 + draw.below(3)  # ms; 0 is for ever to some
    if name in row.fds_in or last.endswith("_fd") or last == "fd":
        return seat.any_fd(draw, FDS.get(last, "dmabuf"))
    if "handle" in last and seat.handles:
        return draw.pick(seat.handles)
    if last == "offset" and seat.addresses and draw.chance(60):
        return draw.pick(seat.addresses)[1]
    return draw.pick(SENSE.get(last, (0, 0, 1)))


FDS = {"channel_fd": "channel", "tsg_fd": "tsg", "as_fd": "as", "nvmap_fd": "nvmap", "subcontext_fd": "as"}
"""What kind of fd a field of this name wants; a dmabuf otherwise."""


def anything(draw: Draw) -> int:
    return int(draw.pick(WIDE)) if draw.chance(90) else draw.below(1 << 62)


def odd_request(world: World, seat: Seat, draw: Draw) -> None:
    """A right or wrong magic and number with a size of its own."""
    row = draw.pick(ROWS)
    size = draw.pick([0, 1, 4, 8, 16, 24, 40, 64, 104, 264, 512])
    request = row.request & 0xC000FFFF | size << 16
    if draw.chance(30):
        request = draw.below(1 << 32) & ~(0x3FFF << 16) | size << 16
    seat.client.ask("raw", seat.any_fd(draw, row.fd_kind), request, size)


def scratch(world: World, seat: Seat, draw: Draw) -> None:
    words = [draw.pick([*WIDE, *(v for _, v in seat.addresses), *seat.fds["dmabuf"]]) for _ in range(16)]
    seat.client.ask("fill_scratch", words)


def new_buffer(world: World, seat: Seat, draw: Draw) -> None:
    size = draw.pick([PAGE, PAGE, ROOM, 3 * PAGE, 1 << 19, 2 << 30])
    handle, fd = seat.client.ask("buffer", size, draw.below(4))
    seat.handles.append(handle)
    seat.fds["dmabuf"].append(fd)


def free_handle(world: World, seat: Seat, draw: Draw) -> None:
    if seat.handles:
        handle = seat.handles.pop(draw.below(len(seat.handles)))
        seat.client.ask("ioctl", seat.fds["nvmap"][0], "NVMAP_FREE", {}, handle)


def map_buffer(world: World, seat: Seat, draw: Draw) -> None:
    vm = seat.any_fd(draw, "as")
    flags = draw.pick([4, 4, 4 | 1 << 10, 0, 1, 5, 0x20, 1 << 7])
    at = draw.pick(WIDE) if flags & 1 else 0
    fields = {
        "flags": flags,
        "compr_kind": -1,
        "dmabuf_fd": seat.any_fd(draw, "dmabuf"),
        "page_size": 4096,
        "offset": at,
    }
    found = seat.client.ask("ioctl", vm, "AS_MAP_BUFFER_EX", fields)
    seat.addresses.append((vm, found["offset"]))


def unmap_buffer(world: World, seat: Seat, draw: Draw) -> None:
    vm, va = draw.pick(seat.addresses) or (seat.any_fd(draw, "as"), draw.pick(WIDE))
    seat.client.ask("ioctl", vm, "AS_UNMAP_BUFFER", {"offset": va})


def unmap_cpu(world: World, seat: Seat, draw: Draw) -> None:
    seat.client.ask("unmap", draw.below(64))


def new_ring(world: World, seat: Seat, draw: Draw) -> None:
    vm = draw.pick(seat.fds.get("as", [])) if draw.chance(50) else None
    made = seat.client.ask("ring", vm)
    seat.rings.append(made)
    for kind, name in (("channel", "fd"), ("tsg", "tsg"), ("as", "vm")):
        if made[name] not in seat.fds.setdefault(kind, []):
            seat.fds[kind].append(made[name])
    seat.addresses += [(made["vm"], made["push_va"]), (made["vm"], made["data_va"])]


def everywhere(world: World, draw: Draw) -> int:
    """An address that means something to some client."""
    known = [va for seat in world.seats for _, va in seat.addresses]
    return int(draw.pick([*known, *known, *WIDE]) + draw.pick([0, 0, 0, 4, 64, PAGE, ROOM - 4])) & ((1 << 64) - 1)


def submit_copy(world: World, seat: Seat, draw: Draw) -> None:
    """A copy from anywhere to anywhere: what it reads must be ours, or nothing."""
    own = [va for _, va in seat.addresses]
    src, dst = (draw.pick(own) if own and draw.chance(80) else everywhere(world, draw) for _ in range(2))
    size = draw.pick([1, 4, 64, PAGE])
    words = [method_header(MethodOp.INC, Subchannel.COPY, HostMethod.SET_OBJECT, 1), 0xC7B5]
    address = [src >> 32 & 0xFFFFFF, src & 0xFFFFFFFF, dst >> 32 & 0xFFFFFF, dst & 0xFFFFFFFF]
    words += [method_header(MethodOp.INC, Subchannel.COPY, CopyMethod.OFFSET_IN_UPPER, 4), *address]
    words += [method_header(MethodOp.INC, Subchannel.COPY, CopyMethod.LINE_LENGTH_IN, 1), size]
    words += [method_header(MethodOp.INC, Subchannel.COPY, CopyMethod.LAUNCH_DMA, 1), 0x182]
    seat.client.ask("submit", draw.below(64), words)


def submit_methods(world: World, seat: Seat, draw: Draw) -> None:
    """Methods that exist, with data that need not make sense."""
    words: list[int] = []
    for _ in range(1 + draw.below(6)):
        subchannel, class_id = draw.pick(
            [(0, CHIP.gpfifo_class), (Subchannel.COMPUTE, CHIP.compute_class), (Subchannel.COPY, CHIP.dma_class)]
        )
        offset = draw.pick([m.offset for m in BY_CLASS[class_id].values() if m.offset])
        words += [
            method_header(MethodOp.INC, subchannel, offset, 1),
            everywhere(world, draw) >> draw.pick([0, 8, 32]) & 0xFFFFFFFF,
        ]
    seat.client.ask("submit", draw.below(64), words, None, True)


def submit_noise(world: World, seat: Seat, draw: Draw) -> None:
    """Words, or a GPFIFO entry, without any meaning."""
    words = [draw.below(1 << 32) for _ in range(1 + draw.below(6))]
    seat.client.ask("submit", draw.below(64), words, draw.below(1 << 63) if draw.chance(30) else None, True)


def ring_the_bell(world: World, seat: Seat, draw: Draw) -> None:
    """Any token, other clients' too: at worst their channel looks at its own ring."""
    tokens = [ring["token"] for other in world.seats for ring in other.rings]
    seat.client.ask("store32", 0x90, draw.pick([*tokens, *WORDS]))


def kill_client(world: World, seat: Seat, draw: Draw) -> None:
    seat.client.kill()
    world.seats[world.seats.index(seat)] = world.new_seat()


Action = Callable[[World, Seat, Draw], None]
ACTIONS: Mapping[str, Action] = {
    action.__name__: action
    for action in (
        open_node,
        close_fd,
        any_ioctl,
        odd_request,
        scratch,
        new_buffer,
        free_handle,
        map_buffer,
        unmap_buffer,
        unmap_cpu,
        new_ring,
        submit_copy,
        submit_methods,
        submit_noise,
        ring_the_bell,
        kill_client,
    )
}
WEIGHTS = {
    "any_ioctl": 40,
    "odd_request": 6,
    "map_buffer": 8,
    "submit_copy": 20,
    "submit_methods": 2,
    "submit_noise": 1,
    "kill_client": 1,
}
"""How often the seeded run takes an action; 4 for the others."""


def run(seed: int, steps: int, every: int = 64) -> World:
    """A seeded run. The clients are replaced now and then, so that nobody runs into the limit of open files."""
    world, draw = World(), seeded(seed)
    names = [name for name in ACTIONS for _ in range(WEIGHTS.get(name, 4))]
    try:
        for number in range(steps):
            world.step(draw.pick(names), draw)
            if number % every == every - 1:
                world.check()
        world.end()
    finally:
        for seat in world.seats:
            seat.client.kill()
    return world
