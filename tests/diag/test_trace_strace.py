"""`tegrad trace decode`: which calls strace's log has, whatever form it gives them."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from trace_programs import tegrad

from tegrad.diag.trace.reading import calls
from tegrad.uapi import structs as s
from tegrad.uapi.ioctls import ROWS
from tegrad.uapi.trace import Call

ALLOC_AS = "GPU_ALLOC_AS"
CTRL = "/dev/nvgpu/igpu0/ctrl"


def read(*lines: str) -> list[Call]:
    return list(calls(line + "\n" for line in lines))


def told(*lines: str) -> list[str]:
    return [str(call).rsplit(" [", 1)[0] for call in read(*lines)]


@pytest.mark.parametrize(
    "request_", ["_IOC(_IOC_READ|_IOC_WRITE, 0x47, 0x8, 0x40)", "0xc0404708", "_IOC(3, 71, 8, 64)"]
)
@pytest.mark.parametrize(
    ("before", "pid", "start"),
    [
        ("", 0, 0.0),
        ("1234  ", 1234, 0.0),
        ("[pid  1234] ", 1234, 0.0),
        ("1234  12:00:01.500000 ", 1234, 43201.5),
        ("1234 1764136800.25 ", 1234, 1764136800.25),
    ],
)
@pytest.mark.parametrize(("after", "seconds"), [("", 0.0), (" <0.000250>", 0.00025)])
def test_a_request_is_named_in_every_form_of_a_line(
    request_: str, before: str, pid: int, start: float, after: str, seconds: float
) -> None:
    (call,) = read(f"{before}ioctl(3<{CTRL}>, {request_}, 0x7ffe10) = 0{after}")
    assert (call.name, call.result, call.fds) == (ALLOC_AS, 0, {3: "ctrl"})
    assert (call.pid, call.start, call.seconds) == (pid, start, seconds)


OPENED = f'7  openat(AT_FDCWD</w>, "{CTRL}", O_RDWR|O_CLOEXEC) = 3<{CTRL}>'
HEXED = "".join(f"\\x{ord(letter):02x}" for letter in CTRL)


@pytest.mark.parametrize(
    "line",
    [
        f'7  openat(AT_FDCWD</w>, "{CTRL}", O_RDWR|O_CLOEXEC) = 3<{CTRL}<char 505:1>>',  # -yy
        f'7  openat(-100 /* AT_FDCWD */</w>, "{CTRL}", 0x80002 /* O_RDWR|O_CLOEXEC */) = 3<{CTRL}>',  # -X verbose
        f'7  openat(AT_FDCWD<\\x2f\\x77>, "{HEXED}", O_RDWR|O_CLOEXEC) = 3<{HEXED}>',  # -xx
        OPENED.replace("openat", "[00007f85b871bd6b] openat"),  # -i
        OPENED.replace("openat", "[ 257] openat"),  # -n
        OPENED.replace("7 ", "7<python> "),  # -Y
        OPENED.replace("7  ", "[pid     7<python>] "),
        OPENED.replace("openat", "    0.000193 openat"),  # -r
    ],
)
def test_a_file_is_named_whatever_else_strace_was_asked_for(line: str) -> None:
    (opened, call) = read(line, "7  ioctl(3, 0xc0404708, 0x7ffe10) = 0")
    assert (opened.name, opened.pid, opened.fds) == ("open", 7, {3: "ctrl"})
    assert opened.arguments == {"path": CTRL, "flags": 0x80002}
    assert (call.name, call.fds) == (ALLOC_AS, {3: "ctrl"})


def test_a_request_is_read_beside_its_name() -> None:
    line = f"ioctl(3<{CTRL}<char 505:1>>, 0xc0404708 /* _IOC(_IOC_READ|_IOC_WRITE, 0x47, 0x8, 0x40) */, 0x7ffe10) = 0"
    assert [call.name for call in read(line)] == [ALLOC_AS]
    assert [call.name for call in read(f"     0.000193 {SPLIT}")] == [ALLOC_AS]  # -r without -f


def test_a_terminal_is_none_of_ours_where_its_path_is_not_told() -> None:
    assert not told("ioctl(0, SNDCTL_TMR_STOP or TCSETSW, {B38400 opost isig icanon echo ...}) = 0")


def test_a_failed_call_has_its_errno() -> None:
    line = f"ioctl(3<{CTRL}>, _IOC(_IOC_READ|_IOC_WRITE, 0x47, 0x8, 0x40), NULL) = -1 EFAULT (Bad address)"
    assert told(line) == ["GPU_ALLOC_AS(fd=3<ctrl>) = EFAULT"]


def test_a_block_of_bytes_is_decoded() -> None:
    block = "".join(f"\\x{byte:02x}" for byte in bytes(s.AllocAs(flags=2, va_range_end=0xFF00000000)))
    line = f'ioctl(3, 0xc0404708, "{block}") = 0'
    assert told(line) == [f"GPU_ALLOC_AS(fd=3<ctrl>, {'flags=UNIFIED_VA, '}va_range_end=0xff00000000) = 0"]
    assert "flags" not in told(line.replace('")', '"...)'))[0]


def test_a_number_that_is_passed_by_value_is_the_argument() -> None:
    assert told("ioctl(4</dev/nvmap>, _IOC(_IOC_NONE, 0x4e, 0x4, 0), 0x80000015) = 0") == [
        "NVMAP_FREE(fd=4<nvmap>, arg=0x80000015) = 0"
    ]


def test_names_that_strace_has_for_other_drivers_are_ours_on_no_terminal() -> None:
    enable = "ioctl(5<anon_inode:nvgpu-tsg>, SNDCTL_TMR_STOP or TCSETSW, NULL) = 0"
    assert told(enable, enable.replace("anon_inode:nvgpu-tsg", "/dev/pts/0")) == ["TSG_ENABLE(fd=5<tsg>) = 0"]


SPLIT = f"ioctl(3<{CTRL}>, _IOC(_IOC_READ|_IOC_WRITE, 0x47, 0x8, 0x40), 0x7ffe10) = 0"


@pytest.mark.parametrize("at", [SPLIT.index(", 0x7"), SPLIT.index(" 0x7"), SPLIT.index(") = 0")])
def test_calls_that_interrupt_each_other_are_put_together(at: int) -> None:
    begun = f"7  {SPLIT[:at]} <unfinished ...>"
    other = f"8  {SPLIT.replace('3<', '4<')}"
    assert [(c.pid, c.name) for c in read(begun, other, f"7  <... ioctl resumed>{SPLIT[at:]}")] == [
        (8, ALLOC_AS),
        (7, ALLOC_AS),
    ]


def test_files_and_mappings_of_the_drivers_are_followed_and_no_others() -> None:
    lines = (
        f'7  openat(AT_FDCWD</work>, "{CTRL}", O_RDWR|O_CLOEXEC) = 3<{CTRL}>',
        '7  openat(AT_FDCWD</work>, "/etc/passwd", O_RDONLY) = 4</etc/passwd>',
        f"7  mmap(NULL, 65536, PROT_READ|PROT_WRITE, MAP_SHARED|MAP_FIXED, 3<{CTRL}>, 0) = 0x7f0000010000",
        "7  mmap(NULL, 4096, PROT_READ, MAP_PRIVATE, 4</etc/passwd>, 0) = 0x7f0000020000",
        "7  mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE|MAP_ANONYMOUS|MAP_NORESERVE, -1, 0) = 0x7f0000030000",
        "7  mmap(NULL, 8192, PROT_READ, MAP_SHARED, 9</dmabuf:x>, 0x1000) = 0x7f0000040000",
        "7  munmap(0x7f0000010000, 65536) = 0",
        "7  munmap(0x7f0000020000, 4096) = 0",
        "7  close(4</etc/passwd>) = 0",
        f"7  close(3<{CTRL}>) = 0",
        "7  +++ exited with 0 +++",
        "strace: Process 8 attached",
    )
    assert told(*lines) == [
        f"open(path='{CTRL}', flags=0x80002) = 3<ctrl>",
        "mmap(fd=3<ctrl>, size=0x10000, prot=3, flags=17, addr=0, offset=0) = 0x7f0000010000",
        "mmap(fd=9<dmabuf>, size=0x2000, prot=1, flags=1, addr=0, offset=0x1000) = 0x7f0000040000",
        "munmap(addr=0x7f0000010000, size=0x10000) = 0",
        "close(fd=3<ctrl>) = 0",
    ]
    without_paths = [line.replace(f"<{CTRL}>", "").replace("</etc/passwd>", "") for line in lines]
    assert told(*without_paths)[-1] == "close(fd=3<ctrl>) = 0"


PROGRAM = """
import os, threading
from tegrad.uapi import ioctls, kernel
from tegrad.uapi.errors import DriverError

linux = kernel.LinuxKernel()
fd = linux.open("/dev/null")

def every(times):
    for i, row in enumerate(ioctls.ROWS):
        for _ in range(times + i % 3):
            try:
                linux.ioctl(fd, row, 0x80000015 if row.by_value else row.struct() if row.struct else None)
            except DriverError:
                pass

others = [threading.Thread(target=every, args=(1,)) for _ in range(3)]
for other in others:
    other.start()
if not (child := os.fork()):
    every(2)
    os._exit(0)
os.waitpid(child, 0)
for other in others:
    other.join()
"""
"""Every row of the drivers on /dev/null, in three threads once, twice or three times, in a child once more."""


@pytest.mark.strace
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed (apt install strace)")
@pytest.mark.parametrize("options", ["-f -y -v", "-f -X raw -ttt -T"])
def test_every_call_on_null_is_counted_by_its_type(options: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    traced = ["strace", *options.split(), "-e", "trace=openat,ioctl,mmap,munmap,close", "-o", str(log)]
    done = subprocess.run([*traced, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    if "ptrace" in done.stderr.lower() and done.returncode:
        pytest.skip(f"strace may not trace here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0, done.stderr
    with open(log) as lines:
        counted = Counter(call.name for call in calls(lines))
    closed = counted.pop("close", 0)
    assert counted == {row.name: 3 * (1 + i % 3) + 2 + i % 3 for i, row in enumerate(ROWS)}
    assert closed == 0
    shown = tegrad("trace", "decode", "--summary", str(log))
    assert f"NVMAP_CREATE {counted['NVMAP_CREATE']}" in shown.stdout, shown.stderr
    assert f"{'all':14} {counted.total():7} {counted.total():7}\n" in shown.stdout
