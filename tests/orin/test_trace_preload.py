"""`tegrad trace --preload`: what the library before libc writes down is what the board was asked."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from exec_programs import built_client
from tinygrad.runtime.autogen import nv_570, nv_580

from tegrad.diag.trace.reading import calls
from tegrad.hw.chips import CHIPS
from tegrad.orin import board
from tegrad.orin.client import board_status, board_stop
from tegrad.uapi import desktop
from tegrad.uapi.ioctls import BY_NAME, ROWS
from tegrad.uapi.trace import Call

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="the preload library is built by a C compiler (cc)")


def trace(out: Path, *command: str, **more: str) -> tuple[subprocess.CompletedProcess[str], list[Call]]:
    """Run a program under `tegrad trace --preload`: what it did, and its calls."""
    variables = {k: v for k, v in os.environ.items() if k != "TEGRAD_BOARD"} | {"PYTHONPATH": str(ROOT)} | more
    line = [sys.executable, "-m", "tegrad", "trace", "--preload", "--json", "-o", str(out), "--", *command]
    done = subprocess.run(line, env=variables, capture_output=True, text=True, timeout=300, check=False)
    return done, list(calls(out.read_text().splitlines()))


@pytest.fixture
def shared() -> Iterator[str]:
    """A board that nobody has used."""
    name = f"trace-{os.getpid()}"
    board.start(CHIPS["agx-orin-64gb"], 4 << 30, name=name, linger=None)
    yield name
    board_stop(name)


def seen(found: list[Call]) -> Counter[str]:
    """The calls that a board sees, by type: not those of memory alone, nor opens of what it does not have."""
    names = (c.name for c in found if not (c.name == "open" and "igpu1" in str(c.arguments["path"])))
    return Counter(name for name in names if name in BY_NAME or name in ("open", "mmap", "ioctl"))


def test_calls_of_a_c_program_its_child_and_what_it_becomes_are_those_that_the_board_counts(
    tmp_path: Path, shared: str
) -> None:
    done, found = trace(tmp_path / "calls", built_client(tmp_path), TEGRAD_BOARD=shared)
    assert done.returncode == 3, done.stdout + done.stderr
    assert seen(found) == board_status(shared)["calls"]
    assert len({call.pid for call in found}) > 1
    assert {call.error for call in found if call.name == "NVMAP_CREATE"} >= {"", "EFAULT"}
    assert sum(call.name == "store32" and call.arguments["offset"] == 0x90 for call in found) > 1


@pytest.mark.board
def test_both_ways_to_trace_a_program_see_the_same_and_the_board_counts_it(tmp_path: Path, shared: str) -> None:
    ours = tmp_path / "ours"
    bringup = str(ROOT / "examples" / "bringup.py")
    done, found = trace(tmp_path / "calls", sys.executable, bringup, TEGRAD_BOARD=shared, TEGRAD_TRACE=str(ours))
    assert done.stdout.splitlines()[-1] == "21/21 passed", done.stdout + done.stderr
    assert seen(found) == board_status(shared)["calls"]
    decoded = list(calls(ours.read_text().splitlines()))
    assert [plain(call) for call in found if plain(call)] == [plain(call) for call in decoded if plain(call)]


def plain(call: Call) -> Any:
    """What both say of a call: of an mmap of the registers ours says something else; None of what only one has."""
    if call.name in BY_NAME:
        return call.name, dict(call.arguments), dict(call.written), call.result, call.error, dict(call.fds)
    if call.name == "store32":
        return call.name, dict(call.arguments)
    return (call.name, call.arguments.get("fd"), call.error) if call.name in ("open", "close") else None


FORKS = """
import fcntl, os, sys
from tegrad.uapi.ioctls import ROWS

def every(fd):
    for row in ROWS:
        try:
            fcntl.ioctl(fd, row.request, bytes(row.size) if row.struct else 0)
        except OSError:
            pass

fd = os.eventfd(0)
every(fd)
if not (child := os.fork()):
    every(fd)
    os._exit(0)
os.waitpid(child, 0)
os.close(fd)
try:
    os.open("/dev/nvgpu/none", os.O_RDWR)
except OSError:
    sys.exit(7)
"""
"""Every row on a file that refuses it, in a child too; then a node that is not there."""


def test_without_a_board_calls_go_to_this_machine(tmp_path: Path) -> None:
    done, found = trace(tmp_path / "calls", sys.executable, "-c", FORKS)
    assert done.returncode == 7, done.stderr
    counted = Counter(call.name for call in found)
    assert counted == {**{row.name: 2 for row in ROWS}, "close": 1, "open": 1}
    assert {call.error for call in found if call.name in BY_NAME} == {"ENOTTY"}
    assert [call.error for call in found if call.name == "open"] == ["ENOENT"]


def test_without_a_board_a_node_opened_as_a_stream_is_seen(tmp_path: Path) -> None:
    opens = 'import ctypes; ctypes.CDLL(None).fopen(b"/dev/nvhost-none", b"r+")'
    done, found = trace(tmp_path / "calls", sys.executable, "-c", opens)
    assert done.returncode == 0, done.stderr
    assert [(call.name, call.arguments, call.error) for call in found] == [
        ("open", {"path": "/dev/nvhost-none", "flags": os.O_RDWR}, "ENOENT")
    ]


def test_a_program_that_cannot_take_the_library_says_why() -> None:
    line = [sys.executable, "-m", "tegrad", "trace", "--preload", "no-such-program"]
    done = subprocess.run(line, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert "there is no program 'no-such-program'" in done.stderr


# ---- NVIDIA's desktop driver -----------------------------------------------------------------------------------------


def test_the_desktops_numbers_are_nvidias() -> None:
    for table in (desktop.ESCAPES, desktop.UVM, desktop.CLASSES):
        assert {number: getattr(nv_570, name) for number, name in table.items()} == {n: n for n in table}
    for number, name in desktop.COMMANDS.items():
        assert getattr(nv_580, name, number) == number, name
        of_a_class = re.match("NV([0-9A-F]{4})_", name)
        assert of_a_class is None or int(of_a_class[1], 16) == number >> 16, name


def test_the_desktops_fields_are_where_nvidia_has_them() -> None:
    structs = {
        "NV_ESC_RM_ALLOC": nv_570.NVOS64_PARAMETERS,
        "NV_ESC_RM_CONTROL": nv_570.NVOS54_PARAMETERS,
        "NV_ESC_RM_FREE": nv_570.NVOS00_PARAMETERS,
        "NV_ESC_RM_ALLOC_MEMORY": nv_570.NVOS02_PARAMETERS,
        "NV_ESC_RM_MAP_MEMORY": nv_570.NVOS33_PARAMETERS,
        "NV_ESC_RM_MAP_MEMORY_DMA": nv_570.NVOS46_PARAMETERS,
        "NV_ESC_RM_DUP_OBJECT": nv_570.NVOS55_PARAMETERS,
        "NV_ESC_REGISTER_FD": nv_570.nv_ioctl_register_fd_t,
    }
    for name, fields in desktop.BLOCKS.items():
        offsets = {field: offset for field, _, offset, *_ in structs[name]._real_fields_}
        assert {field: offsets[field] for field in fields} == fields, name


def test_the_resource_managers_status_is_where_nvidia_has_it() -> None:
    """In both drivers' layouts, for every size that one of them has; some blocks have an fd after them, in 8 bytes."""
    structs = {
        "NVOS21_PARAMETERS": ("NV_ESC_RM_ALLOC", 0),
        "NVOS64_PARAMETERS": ("NV_ESC_RM_ALLOC", 0),
        "NVOS02_PARAMETERS": ("NV_ESC_RM_ALLOC_MEMORY", 8),
        "NVOS54_PARAMETERS": ("NV_ESC_RM_CONTROL", 0),
        "NVOS00_PARAMETERS": ("NV_ESC_RM_FREE", 0),
        "NVOS55_PARAMETERS": ("NV_ESC_RM_DUP_OBJECT", 0),
        "NVOS32_PARAMETERS": ("NV_ESC_RM_VID_HEAP_CONTROL", 0),
        "NVOS33_PARAMETERS": ("NV_ESC_RM_MAP_MEMORY", 8),
        "NVOS34_PARAMETERS": ("NV_ESC_RM_UNMAP_MEMORY", 0),
        "NVOS46_PARAMETERS": ("NV_ESC_RM_MAP_MEMORY_DMA", 0),
        "NVOS47_PARAMETERS": ("NV_ESC_RM_UNMAP_MEMORY_DMA", 0),
        "NVOS56_PARAMETERS": ("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", 0),
        "nv_ioctl_alloc_os_event_t": ("NV_ESC_ALLOC_OS_EVENT", 0),
    }
    found = {}
    for struct, (name, more) in structs.items():
        for kind in (getattr(driver, struct) for driver in (nv_570, nv_580)):
            (at,) = (offset for field, _, offset, *_ in kind._real_fields_ if field.lower() == "status")
            found[name, ctypes.sizeof(kind) + more] = at
    assert found == desktop.STATUS
    for with_fd in (nv_570.nv_ioctl_nvos02_parameters_with_fd, nv_580.nv_ioctl_nvos33_parameters_with_fd):
        assert (ctypes.sizeof(with_fd), with_fd._real_fields_[0][2]) == (56, 0)


def record(request: int, before: bytes = b"", after: bytes = b"", path: str = "/dev/nvidiactl") -> str:
    told = {"fd": 3, "request": request, "value": 0, "path": path, "before": before.hex(), "after": after.hex()}
    return json.dumps({"call": "ioctl", "pid": 7, "thread": 7, "start": 1.0, "seconds": 0.0, **told, "result": 0})


def test_the_desktops_calls_are_named_with_size_and_class() -> None:
    asked = nv_570.NVOS21_PARAMETERS(hRoot=1, hObjectParent=1, hClass=nv_570.AMPERE_CHANNEL_GPFIFO_A)
    made = nv_570.NVOS21_PARAMETERS(hRoot=1, hObjectParent=1, hObjectNew=5, hClass=asked.hClass, status=0x57)
    lines = [
        record(0xC020462B, bytes(asked), bytes(made)),
        record(0xC0404657, bytes(nv_580.NVOS46_PARAMETERS()), bytes(nv_580.NVOS46_PARAMETERS(status=0x1F))),
        record(0xC020462A, asked := bytes(nv_570.NVOS54_PARAMETERS(cmd=0x503C0102)), asked),
        record(0xC00446C9, b"\x04\0\0\0", b"\x04\0\0\0"),
        record(0x30000001, path="/dev/nvidia-uvm"),
        record(75, path="/dev/nvidia-uvm"),
        record(0xC00846FF),
    ]
    assert [str(call).rsplit(" [", 1)[0] for call in calls(lines)] == [
        "NV_ESC_RM_ALLOC(fd=3<nvidiactl>, size=32, hRoot=1, hObjectParent=1, hObjectNew=0, "
        "hClass=AMPERE_CHANNEL_GPFIFO_A) = 0 -> hObjectNew=5, status=87",
        "NV_ESC_RM_MAP_MEMORY_DMA(fd=3<nvidiactl>, size=64, hClient=0, hDevice=0, hDma=0, hMemory=0) = 0 -> status=31",
        "NV_ESC_RM_CONTROL(fd=3<nvidiactl>, size=32, hClient=0, hObject=0, cmd=NV503C_CTRL_CMD_REGISTER_VA_SPACE, "
        "paramsSize=0) = 0",
        "NV_ESC_REGISTER_FD(fd=3<nvidiactl>, size=4, ctl_fd=4) = 0",
        "UVM_INITIALIZE(fd=3<nvidia-uvm>) = 0",
        "UVM_MM_INITIALIZE(fd=3<nvidia-uvm>) = 0",
        "ioctl(fd=3<nvidiactl>, request=0xc00846ff, size=8) = 0",
    ]
