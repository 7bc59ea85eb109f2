"""What the calls of a trace are for: discovery, address space, memory, channels, and the steady state after them."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tegrad.hw.gpfifo import DOORBELL
from tegrad.nv.roles import ROLES
from tegrad.uapi.flags import field_text
from tegrad.uapi.ioctls import BY_NAME
from tegrad.uapi.trace import Call

DISCOVERY, SPACE, MEMORY, CHANNELS, STEADY = PHASES = (
    "discovery",
    "address space",
    "memory",
    "channels",
    "steady state",
)

BY_FD = {"ctrl": DISCOVERY, "as": MEMORY, "tsg": CHANNELS, "channel": CHANNELS, "nvmap": MEMORY, "fence": STEADY}
"""The phase of an ioctl by the kind of its fd, and of what else is done to such an fd."""

BY_CALL = {
    "open": DISCOVERY,
    "GPU_ALLOC_AS": SPACE,
    "AS_ALLOC_SPACE": SPACE,
    "AS_FREE_SPACE": SPACE,
    "AS_GET_VA_REGIONS": SPACE,
    "AS_BIND_CHANNEL": CHANNELS,
    "GPU_OPEN_TSG": CHANNELS,
    "GPU_OPEN_CHANNEL": CHANNELS,
    "GPU_REGISTER_BUFFER": MEMORY,
    "GPU_GET_BUFFER_INFO": MEMORY,
    "GPU_FLUSH_L2": MEMORY,
    "doorbell": CHANNELS,
    "doorbell_close": CHANNELS,
    "mmap": MEMORY,
    "munmap": MEMORY,
    "msync": MEMORY,
}
"""The phase of calls that their fd does not tell."""

SET_UP = frozenset({"CHANNEL_SETUP_BIND", "CHANNEL_ALLOC_OBJ_CTX", "CHANNEL_SET_PREEMPTION_MODE", "doorbell"})
SET_UP_SUBJECT = re.compile("CHANNEL_GPFIFO|_COMPUTE_[A-Z]$|DMA_COPY|UVM_REGISTER_CHANNEL|GPFIFO_SCHEDULE|SUBMIT_TOKEN")
"""The last calls before the first submission, and on a desktop what they are about."""
DESKTOP = ("NV_ESC_", "UVM_")

OF_THE_DESKTOP = (
    (SPACE, re.compile("VASPACE|VA_SPACE|RANGE_GROUP|MEMORY_VIRTUAL")),
    (
        CHANNELS,
        re.compile(
            "CHANNEL|FIFO|_COMPUTE_[A-Z]$|DMA_COPY|USERMODE|CONTEXT_SHARE|EVENT|CTXSW|CTX_BUFFER|TIMESLICE|ENGINEID"
        ),
    ),
    (
        MEMORY,
        re.compile(
            "UVM_.*(MAP|RANGE|FREE|MEM|ALLOC|MIGRATE|LOCATION|ACCESS)|MEMORY|VID_?(HEAP|MEM)|ADDR_SPACE|DMABUF|_TO_FD"
        ),
    ),
)
"""The phases of the desktop driver's calls by a part of what they are about; of all others it is discovery."""

CTRL = frozenset({"ctrl", "nvhost-ctrl-gpu"})
"""Names of the node whose mapping is the doorbell page."""


def name_of(call: Call) -> str:
    """The call's name, `doorbell` for the mmap that one is where no Kernel of ours tells."""
    return "doorbell" if call.name == "mmap" and CTRL & set(call.fds.values()) else call.name


def subject_of(call: Call) -> str:
    """What a desktop's call is about: the class of the object that it makes, the command that it gives, or its name."""
    field = next((field for field in ("hClass", "cmd") if field in call.arguments), None)
    return call.name if field is None else field_text(call.name, field, call.arguments[field])


def sets_up(call: Call) -> bool:
    """Whether a call is one of the last before the first submission."""
    if call.name.startswith(DESKTOP):
        return bool(SET_UP_SUBJECT.search(subject_of(call)))
    return name_of(call) in SET_UP


def refusal(call: Call) -> str:
    """With what a call was refused: an errno, or on a desktop the resource manager's status; "" if it was not."""
    status = call.written.get("status") if call.name.startswith(DESKTOP) else None
    return call.error or ("" if status is None else f"status {status:#x}")


def purpose(call: Call) -> str:
    """What a call is for, wherever in the trace it stands."""
    if (name := name_of(call)) in BY_CALL:
        return BY_CALL[name]
    if row := BY_NAME.get(call.name):
        return BY_FD[row.fd_kind]
    if call.name.startswith(DESKTOP):
        return next((phase for phase, part in OF_THE_DESKTOP if part.search(subject_of(call))), DISCOVERY)
    what = next(iter(call.fds.values()), "")
    return MEMORY if what == "dmabuf" else BY_FD.get(what, DISCOVERY)


def submits(call: Call) -> bool:
    """Whether a call gives the GPU work: a store to the doorbell, or the driver's own submission."""
    rung = call.name == "store32" and call.arguments.get("offset") == DOORBELL
    return rung or call.name == "CHANNEL_SUBMIT_GPFIFO"


def start_of_steady(calls: Sequence[Call]) -> int:
    """Where a process's steady state begins: at its first submission, or where the trace shows none after its last
    channel is set up."""
    first = next((i for i, call in enumerate(calls) if submits(call)), None)
    if first is not None:
        return first
    last = max((i for i, call in enumerate(calls) if sets_up(call)), default=None)
    return len(calls) if last is None else last + 1


def phases(calls: Iterable[Call]) -> list[tuple[str, Call]]:
    """Every call with its phase, process by process."""
    found = []
    ordered = sorted(calls, key=lambda call: call.pid)
    for _, mine in groupby(ordered, key=lambda call: call.pid):
        here = list(mine)
        steady = start_of_steady(here)
        found += [(STEADY if i >= steady else purpose(call), call) for i, call in enumerate(here)]
    return found


@dataclass
class Buffers:
    """What nvmap allocations with one tag have in common."""

    count: int = 0
    size: int = 0
    nvmap: Counter[str] = field(default_factory=Counter)
    gpu: Counter[str] = field(default_factory=Counter)


def by_role(calls: Iterable[Call]) -> dict[str, Buffers]:
    """Memory by role: the role's tag is in the flags of its nvmap allocations."""
    found: defaultdict[str, Buffers] = defaultdict(Buffers)
    sizes: dict[tuple[int, object], int] = {}
    roles: dict[tuple[int, object], str] = {}  # of handles
    shared: dict[tuple[int, object], str] = {}  # of dmabuf fds
    for call in calls:
        pid, asked, made = call.pid, call.arguments, call.written
        if call.error:
            continue
        if call.name in ("NVMAP_CREATE", "NVMAP_CREATE_64"):
            handle = made.get("handle", made.get("handle64"))
            sizes[pid, handle] = _number(asked.get("size", asked.get("size64")))
        elif call.name == "NVMAP_ALLOC" and "flags" in asked:
            flags = _number(asked["flags"])
            role = roles[pid, asked.get("handle")] = _role(flags >> 16)
            found[role].count += 1
            found[role].size += sizes.get((pid, asked.get("handle")), 0)
            found[role].nvmap[field_text("NVMAP_ALLOC", "flags", flags & 0xFFFF)] += 1
        elif call.name == "NVMAP_GET_FD":
            shared[pid, made.get("fd")] = roles.get((pid, asked.get("handle")), "")
        elif call.name == "AS_MAP_BUFFER_EX" and (role := shared.get((pid, asked.get("dmabuf_fd")), "")):
            found[role].gpu[field_text(call.name, "flags", _number(asked.get("flags")))] += 1
    return dict(found)


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0


def _role(tag: int) -> str:
    return next((role.name for role in ROLES if role.tag == tag), f"tag {tag:#x}" if tag else "no tag")
