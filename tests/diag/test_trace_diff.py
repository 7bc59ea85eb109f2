"""`tegrad trace diff`: what two traces do otherwise, and nothing of what differs from run to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from trace_programs import call, tegrad

from tegrad.diag.trace.diff import diff
from tegrad.diag.trace.reading import calls
from tegrad.uapi import constants as c
from tegrad.uapi.trace import Call
from tegrad.uapi.tracefile import to_json

CTRL = "/dev/nvgpu/igpu0/ctrl"


def session(shift: int = 0, **asked: int) -> list[Call]:
    """A few calls; `shift` moves every number that a run chooses."""
    ctrl, space, nvmap, shared, handle = (n + shift for n in (3, 4, 5, 6, 0x80000000))
    return [
        call("open", path=CTRL, flags=2, result=ctrl),
        call("GPU_ALLOC_AS", {"as_fd": space}, fd=ctrl, va_range_end=1 << 36),
        call("open", path="/dev/nvmap", flags=2, result=nvmap),
        call("NVMAP_CREATE", {"handle": handle}, fd=nvmap, size=4096),
        call("NVMAP_ALLOC", fd=nvmap, handle=handle, **{"flags": c.NVMAP_HANDLE_INNER_CACHEABLE, **asked}),
        call("NVMAP_GET_FD", {"fd": shared}, fd=nvmap, handle=handle),
        call("mmap", fd=shared, size=4096, addr=shift << 12, result=0x7F0000000000 + shift),
        call("AS_MAP_BUFFER_EX", {"offset": shift << 12}, fd=space, dmabuf_fd=shared, offset=shift << 12),
        call("GPU_GET_CHARACTERISTICS", fd=ctrl, gpu_characteristics_buf_addr=0x7F00 + shift),
    ]


def lines(a: list[Call], b: list[Call]) -> list[str]:
    return list(diff(*(calls(map(to_json, made)) for made in (a, b))))


def test_numbers_of_a_run_are_no_difference() -> None:
    assert lines(session(), session(0x40)) == []


def test_an_argument_that_differs_is_told_by_name() -> None:
    assert lines(session(), session(1, flags=c.NVMAP_HANDLE_WRITE_COMBINE, align=4096)) == [
        "! 5, 5: NVMAP_ALLOC: flags: INNER_CACHEABLE | WRITE_COMBINE, align: 0 | 0x1000"
    ]


def test_calls_that_one_trace_has_are_told_in_their_place() -> None:
    more = session(1)
    more.insert(4, call("NVMAP_SET_TAG_LABEL", fd=6, tag=9))
    more[-1] = replace(more[-1], error="EINVAL", result=None)
    assert lines(session(), more) == [
        "+ 5: NVMAP_SET_TAG_LABEL(fd=6<nvmap>, tag=9) = 0",
        "- 9: GPU_GET_CHARACTERISTICS(fd=3<ctrl>, gpu_characteristics_buf_addr=0x7f00) = 0",
        "+ 10: GPU_GET_CHARACTERISTICS(fd=4<ctrl>, gpu_characteristics_buf_addr=0x7f01) = EINVAL",
    ]


def test_another_file_behind_an_fd_is_a_difference() -> None:
    made = [call("open", path=f"/dev/{name}", result=3) for name in ("nvmap", "nvhost-gpu")]
    found = lines([made[0], call("close", fd=3)], [made[1], call("close", fd=3)])
    assert [line[0] for line in found] == ["-", "-", "+", "+"]


def test_an_argument_that_is_another_kind_of_fd_is_a_difference() -> None:
    other = session()
    other[7] = replace(other[7], arguments={**other[7].arguments, "dmabuf_fd": 4})
    assert lines(session(), other) == ["! 8, 8: AS_MAP_BUFFER_EX: dmabuf_fd: dmabuf | as"]


def test_processes_are_compared_in_the_order_in_which_they_begin() -> None:
    other = [replace(one, pid=9) for one in session()]
    mixed = [one for pair in zip(session(), other, strict=True) for one in pair]
    assert lines(mixed, session() + other) == []
    assert lines(mixed, session(1))[0] == "process 2: 9 and none"


def test_what_a_recorder_cannot_see_is_no_difference() -> None:
    ours = [
        call("exists", path=CTRL, result=1),
        *session(),
        call("doorbell", fd=3, size=0x10000),
        call("store32", offset=0x90, value=1),
        call("doorbell_close"),
    ]
    strace = [
        f'openat(AT_FDCWD, "{CTRL}", O_RDWR) = 3<{CTRL}>',
        "ioctl(3, 0xc0404708, 0x7ffe10) = 0",
        'openat(AT_FDCWD, "/dev/nvmap", O_RDWR) = 5</dev/nvmap>',
        "ioctl(5, 0xc0084e00, 0x7ffe10) = 0",
        "ioctl(5, 0x40144e03, 0x7ffe10) = 0",
        "ioctl(5, 0xc0084e0f, 0x7ffe10) = 0",
        "mmap(NULL, 4096, PROT_NONE, MAP_FILE, 6</dmabuf:x>, 0) = 0x7f0000000000",
        "ioctl(4</dev/nvgpu/as>, 0xc0284107, 0x7ffe10) = 0",
        "ioctl(3, 0xc0104705, 0x7ffe10) = 0",
        f"mmap(NULL, 65536, PROT_NONE, MAP_FILE, 3<{CTRL}>, 0) = 0x7f0000010000",
        "munmap(0x7f0000010000, 65536) = 0",
    ]
    seen = list(calls(strace))
    assert [one.name for one in seen if one.name.isupper()] == [one.name for one in session() if one.name.isupper()]
    assert [line for line in diff(calls(map(to_json, ours)), seen) if line[0] != "!"] == []


@pytest.mark.parametrize(("flags", "code"), [(0, 1), (c.NVMAP_HANDLE_INNER_CACHEABLE, 0)])
def test_the_command_ends_with_1_where_traces_differ(tmp_path: Path, flags: int, code: int) -> None:
    for name, made in (("a", session()), ("b", session(2, flags=flags))):
        (tmp_path / name).write_text("".join(to_json(one) + "\n" for one in made))
    done = tegrad("trace", "diff", str(tmp_path / "a"), str(tmp_path / "b"))
    assert (done.returncode, done.stdout.startswith("! 5, 5: NVMAP_ALLOC")) == (code, bool(code)), done.stderr
