"""Section 0: how every driver decodes a command, and moves the argument block."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable
from typing import get_args

from tegrad.conformance.calls import Calls, bound, ctrl
from tegrad.conformance.rig import NVMAP, PAGE, SETUP_FLAGS, VA_END, VA_START, Rig, block, request
from tegrad.conformance.rule import rule, rules
from tegrad.uapi import structs as s
from tegrad.uapi.ioctls import BY_NAME, LAST_NR, MAGIC, MAX_ARG_SIZE, FdKind

KINDS: tuple[FdKind, ...] = tuple(kind for kind in get_args(FdKind) if kind in LAST_NR)
"""The kinds of fd that 0.1 lists."""

KNOWN = {
    "ctrl": "GPU_GET_GPU_TIME",
    "as": "AS_ALLOC_SPACE",
    "tsg": "TSG_SET_TIMESLICE",
    "channel": "CHANNEL_WDT",
    "nvmap": "NVMAP_CREATE",
}
"""A command of each kind that takes a block in."""

ENTRY = {kind: errno.ENOTTY if kind == "nvmap" else errno.EINVAL for kind in KINDS}
"""What an entry function answers to a command that is not its own."""


def fd_of(rig: Rig, kind: FdKind) -> int:
    """A fresh fd of a kind."""
    make: dict[str, Callable[[], int]] = {
        "ctrl": lambda: rig.ctrl,
        "as": rig.address_space,
        "tsg": rig.tsg,
        "channel": rig.open_channel,
        "nvmap": lambda: rig.nvmap,
    }
    return make[kind]()


# ---- 0.1 decoding --------------------------------------------------------------------------------------------------


def _decoding(kind: FdKind) -> None:
    """The rules of one row of the table in 0.1."""
    name, refusal = KNOWN[kind], errno.errorcode[ENTRY[kind]]

    @rule("0.1", f"{kind}: a command with another magic is {refusal}", name=f"{kind}-wrong-magic")
    def wrong_magic(rig: Rig) -> None:
        rig.raw_refuses(ENTRY[kind], fd_of(rig, kind), kind, request(name, magic="Z"))

    @rule("0.1", f"{kind}: a number past the last, {LAST_NR[kind]}, is {refusal}", name=f"{kind}-past-last-nr")
    def past_last(rig: Rig) -> None:
        fd = fd_of(rig, kind)
        rig.raw_refuses(ENTRY[kind], fd, kind, request(name, nr=LAST_NR[kind] + 1))
        rig.raw_refuses(ENTRY[kind], fd, kind, request(name, nr=255))

    @rule("0.1", f"{kind}: a known number with a wrong size or direction is ENOTTY", name=f"{kind}-wrong-size")
    def wrong_size(rig: Rig) -> None:
        fd, size = fd_of(rig, kind), BY_NAME[name].size
        rig.raw_refuses(errno.ENOTTY, fd, kind, request(name, size=size - 4))
        rig.raw_refuses(errno.ENOTTY, fd, kind, request(name, size=size + 4))
        other = "r" if BY_NAME[name].direction != "r" else "w"
        rig.raw_refuses(errno.ENOTTY, fd, kind, request(name, direction=other))

    @rule("0.1", f"{kind}: a block at a bad address is EFAULT", name=f"{kind}-bad-block")
    def bad_block(rig: Rig) -> None:
        fd = fd_of(rig, kind)
        rig.fails(errno.EFAULT, f"{name} at a bad address", lambda: rig.at(fd, name, rig.bad_address()))


def _decoding_nvgpu(kind: FdKind) -> None:
    """The rules of nvgpu's rows alone."""
    name, most = KNOWN[kind], MAX_ARG_SIZE[kind]

    @rule("0.1", f"{kind}: number 0 is EINVAL", name=f"{kind}-nr-0")
    def nr_0(rig: Rig) -> None:
        rig.raw_refuses(errno.EINVAL, fd_of(rig, kind), kind, request(name, nr=0))

    @rule("0.1", f"{kind}: a block of more than {most} bytes is EINVAL", name=f"{kind}-block-too-large")
    def too_large(rig: Rig) -> None:
        fd = fd_of(rig, kind)
        rig.raw_refuses(errno.EINVAL, fd, kind, request(name, size=most + 1))
        if BY_NAME[name].size != most:
            rig.raw_refuses(errno.ENOTTY, fd, kind, request(name, size=most))


for _kind in KINDS:
    _decoding(_kind)
    if _kind in MAX_ARG_SIZE:
        _decoding_nvgpu(_kind)


@rule("0.1", "nvmap: number 0 is CREATE, not refused")
def nvmap_nr_0(rig: Rig) -> None:
    rig.keep_handle(rig.accepts(rig.nvmap, "NVMAP_CREATE", size=PAGE).handle)


@rules(
    "0.1",
    "{kind}: an unknown command writes a line to the kernel log",
    "kind name size",
    [("tsg", "TSG_SET_TIMESLICE", 12), ("nvmap", "NVMAP_ALLOC", 24)],
    name="{kind}-unknown-is-logged",
)
def unknown_is_logged(rig: Rig, kind: FdKind, name: str, size: int) -> None:
    fd, mark = fd_of(rig, kind), rig.log_mark()
    code = request(name, size=size)
    rig.raw(fd, kind, code)
    rig.check(any(f"{code:x}" in line.lower() for line in rig.log_since(mark)), "a line with the command", "none")


# ---- 0.1 the block -------------------------------------------------------------------------------------------------


@rule("0.1", "a command without the W bit finds a zeroed block, whatever the caller's holds")
def read_only_commands_start_zeroed(rig: Rig) -> None:
    arg = s.Timeslice(timeslice_us=77, reserved=77)
    rig.returns(rig.tsg(), "TSG_GET_TIMESLICE", arg)
    rig.equal("the reserved field of GET_TIMESLICE", 0, arg.reserved)


@rule("0.1", "the block is not copied back when the command fails")
def failed_commands_leave_the_block(rig: Rig) -> None:
    arg = s.AllocAs(as_fd=-77, va_range_start=1, reserved=5)
    before = bytes(arg)
    rig.fails(errno.EINVAL, "ALLOC_AS of a bad range", lambda: rig.returns(rig.ctrl, "GPU_ALLOC_AS", arg))
    rig.check(bytes(arg) == before, "the block as it was", "a changed block")


@rules(
    "0.1",
    "{kind}: a block that cannot be stored gives the count of its bytes",
    "kind name",
    [("ctrl", "GPU_GET_GPU_TIME"), ("tsg", "TSG_GET_TIMESLICE"), ("channel", "CHANNEL_GET_TIMEDOUT")],
    name="{kind}-unstorable-block",
)
def unstorable_block(rig: Rig, kind: FdKind, name: str) -> None:
    row = BY_NAME[name]
    fd, address = fd_of(rig, kind), rig.read_only(bytes(block(row, {})))
    left = rig.succeeds(f"{name} returns {row.size}", lambda: rig.at(fd, name, address))
    rig.equal(f"{name} returns", row.size, left)


@rule("0.1", "as: a block that cannot be stored is EFAULT")
def as_unstorable_block(rig: Rig) -> None:
    vm = rig.address_space()
    address = rig.read_only(bytes(s.AsAllocSpace(pages=1, page_size=PAGE)))
    rig.fails(errno.EFAULT, "ALLOC_SPACE in read-only memory", lambda: rig.at(vm, "AS_ALLOC_SPACE", address))


INNER_COPIES = (
    ("GPU_GET_CHARACTERISTICS", "gpu_characteristics_buf_addr", "gpu_characteristics_buf_size", 16),
    ("GPU_GET_TPC_MASKS", "mask_buf_addr", "mask_buf_size", 4),
    ("GPU_GET_FBP_L2_MASKS", "mask_buf_addr", "mask_buf_size", 4),
    ("GPU_GET_ENGINE_INFO", "engine_info_buf_addr", "engine_info_buf_size", 1 << 10),
    ("GPU_VSMS_MAPPING", "vsms_map_buf_addr", "", 0),
)
"""Queries whose result goes to a pointer in their block: the pointer's field, and that of the buffer's size."""


@rules(
    "0.1",
    "{query}: a bad result buffer gives a positive count",
    "name query address_field size_field size",
    [(f"{query}-bad-buffer".lower(), query, *fields) for query, *fields in INNER_COPIES],
)
def bad_buffer(rig: Rig, query: str, address_field: str, size_field: str, size: int) -> None:
    fields = {address_field: rig.bad_address()} | ({size_field: size} if size_field else {})
    arg = block(BY_NAME[query], fields)
    expected = f"{query} returns a positive count"
    left = rig.succeeds(expected, lambda: rig.returns(rig.ctrl, query, arg))
    rig.check(left > 0, expected, left)
    if size_field:
        rig.equal("the size in the block stays", size, getattr(arg, size_field))


# ---- 0.1 what is not looked at -------------------------------------------------------------------------------------


RANGE = {"va_range_start": VA_START, "va_range_end": VA_END}
Calls("0.1", "GPU_ALLOC_AS", ctrl, lambda rig: RANGE, begins="ALLOC_AS ").accepts(
    "alloc-as-ignores-flags", "ignores unknown flags", flags=0xFFFFFFF2
)
Calls("0.1", "AS_ALLOC_SPACE", Rig.address_space, begins="ALLOC_SPACE ").accepts(
    "alloc-space-ignores-flags", "ignores unknown flags", pages=1, page_size=PAGE, flags=0xFFFFFFF0
)
Calls("0.1", "CHANNEL_SETUP_BIND", bound, Rig.rings, begins="SETUP_BIND ").accepts(
    "setup-bind-ignores-flags", "ignores unknown flags", flags=SETUP_FLAGS | 0xFFFF0000
)
Calls("0.1", "CHANNEL_WDT", Rig.open_channel, begins="WDT ").accepts(
    "wdt-ignores-flags", "ignores unknown flags", wdt_status=1 | 0xFFFFFFF0
)


@rule("0.1", "ALLOC_AS does not look at its reserved fields")
def alloc_as_ignores_reserved(rig: Rig) -> None:
    arg = s.AllocAs(va_range_start=VA_START, va_range_end=VA_END, reserved=0xFFFFFFFF)
    ctypes.memset(ctypes.addressof(arg) + s.AllocAs.padding.offset, 0xFF, s.AllocAs.padding.size)
    rig.succeeds("ALLOC_AS succeeds", lambda: rig.returns(rig.ctrl, "GPU_ALLOC_AS", arg))


@rule("0.1", "BIND_CHANNEL_EX does not look at its reserved fields")
def bind_channel_ex_ignores_reserved(rig: Rig) -> None:
    vm, tsg, channel = rig.address_space(), rig.tsg(), rig.open_channel()
    rig.call(vm, "AS_BIND_CHANNEL", channel_fd=channel)
    arg = s.TsgBindChannelEx(channel, 0)
    ctypes.memset(ctypes.addressof(arg) + 8, 0xFF, ctypes.sizeof(arg) - 8)
    rig.succeeds("BIND_CHANNEL_EX succeeds", lambda: rig.returns(tsg, "TSG_BIND_CHANNEL_EX", arg))


@rule("0.1", "a command on an fd of another driver is refused by that driver")
def a_command_on_another_fd(rig: Rig) -> None:
    alloc = request("NVMAP_ALLOC")
    rig.raw_refuses(errno.EINVAL, rig.ctrl, "ctrl", alloc)
    rig.raw_refuses(errno.ENOTTY, rig.open(NVMAP), "nvmap", request("GPU_GET_GPU_TIME"))
    rig.raw_refuses(errno.EINVAL, rig.tsg(), "tsg", request("AS_ALLOC_SPACE"))


assert set(KNOWN) == set(KINDS) <= set(MAGIC)
