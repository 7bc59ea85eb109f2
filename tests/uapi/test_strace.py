"""Under strace: the exact system calls that LinuxKernel makes, number for number."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.strace,
    pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed (apt install strace)"),
]

DATA = Path(__file__).parents[1] / "data" / "uapi.json"

CHILD = """
import os, sys
from tegrad.uapi import ioctls, kernel, structs
from tegrad.uapi.errors import DriverError

linux = kernel.LinuxKernel()
fd = linux.open("/dev/null")
os.write(2, b"BEGIN")
for row in ioctls.ROWS:
    try:
        linux.ioctl(fd, row, 0x80000015 if row.by_value else row.struct() if row.struct else None)
    except DriverError:
        pass
memory = os.memfd_create("test")
os.ftruncate(memory, 0x10000)
area = linux.mmap(-1, 0x20000, kernel.PROT_NONE, kernel.MAP_PRIVATE | kernel.MAP_ANONYMOUS)
linux.mmap(memory, 0x2000, kernel.PROT_READ, kernel.MAP_SHARED | kernel.MAP_FIXED, addr=area, offset=0x1000)
bell = linux.doorbell(memory)
bell.store32(0x90, 511)
bell.close()
linux.munmap(area, 0x20000)
linux.close(memory)
os.write(2, b"END")
print(fd, memory, area)
"""


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], int, int, int]:
    """(system calls between the markers, fd of /dev/null, fd of the memfd, address of the area)."""
    log = tmp_path_factory.mktemp("strace") / "log"
    calls = "trace=openat,open,ioctl,mmap,munmap,close,write"
    command = ["strace", "-X", "raw", "-e", calls, "-e", "raw=ioctl", "-o", str(log), sys.executable, "-c", CHILD]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    if "ptrace" in result.stderr.lower() and result.returncode != 0:
        pytest.skip(f"strace may not trace here: {result.stderr.strip()[:200]}")
    assert result.returncode == 0, result.stderr
    lines = log.read_text().splitlines()
    assert any(re.match(r'openat\((-100|0xffffff9c), "/dev/null", 0x80002\)', line) for line in lines), (
        "O_RDWR|O_CLOEXEC"
    )
    begin = next(i for i, line in enumerate(lines) if '"BEGIN"' in line)
    end = next(i for i, line in enumerate(lines) if '"END"' in line)
    null, memory, area = map(int, result.stdout.split())
    return lines[begin + 1 : end], null, memory, area


def test_one_ioctl_per_row_with_the_headers_request(traced: tuple[list[str], int, int, int]) -> None:
    lines, null, _, _ = traced
    made = [
        tuple(int(x, 16) for x in m.groups())
        for m in map(re.compile(r"ioctl\((\w+), (\w+), (\w+)\)").match, lines)
        if m
    ]
    source = json.loads(DATA.read_text())["ioctls"]
    expected = {r["request"] for r in source.values() if r["type"] in "GATHNX" and "nvgpu-nvs.h" not in r["src"]}
    assert {fd for fd, _, _ in made} == {null}
    assert sorted(request for _, request, _ in made) == sorted(expected)
    for _, request, argument in made:
        if request == source["NVMAP_IOC_FREE"]["request"]:
            assert argument == 0x80000015, "the handle goes by value"
        else:
            assert bool(argument) == bool(request >> 16 & 0x3FFF), "a pointer exactly where there is an argument"


def test_mappings_have_the_exact_flags(traced: tuple[list[str], int, int, int]) -> None:
    lines, _, memory, area = traced
    fixed = rf"mmap\({area:#x}, 8192, 0x1, 0x11, {memory}, 0x1000\) = {area:#x}"
    assert any(re.match(fixed, line) for line in lines), "MAP_SHARED|MAP_FIXED"
    bell = [m for m in (re.match(rf"mmap\(NULL, 65536, 0x3, 0x1, {memory}, 0\) += (\w+)", line) for line in lines) if m]
    assert len(bell) == 1, "PROT_READ|PROT_WRITE, MAP_SHARED, the whole page"
    assert any(line.startswith(f"munmap({bell[0][1]}, 65536)") for line in lines)
    assert any(line.startswith(f"munmap({area:#x}, 131072)") for line in lines)
    assert any(re.match(rf"close\({memory}\) += 0", line) for line in lines)


def test_nothing_else_is_called(traced: tuple[list[str], int, int, int]) -> None:
    """A store to the doorbell is no system call, and opening a node opens nothing besides."""
    lines, *_ = traced
    assert not [line for line in lines if line.startswith(("open", "write"))]
    assert len([line for line in lines if line.startswith("mmap")]) <= 4  # 3 of ours, 1 the allocator may need
