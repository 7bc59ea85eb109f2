"""`tegrad trace`: what a program writes of its calls, and how that is read and shown."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from trace_programs import NULL, call, tegrad

from tegrad.diag.trace.phases import BY_CALL, STEADY, phases
from tegrad.diag.trace.reading import calls
from tegrad.diag.trace.views import VIEWS
from tegrad.errors import SettingError
from tegrad.nv.kernel import pick_kernel
from tegrad.nv.roles import NVMAP_TAG, PUSHBUFFER, WEIGHTS
from tegrad.uapi import constants as c
from tegrad.uapi.ioctls import BY_NAME
from tegrad.uapi.kernel import LinuxKernel
from tegrad.uapi.trace import Call
from tegrad.uapi.tracefile import from_json, sink, to_json


def test_without_the_variable_a_kernel_is_picked_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEGRAD_TRACE", raising=False)
    monkeypatch.delenv("TEGRAD_BOARD", raising=False)
    assert type(pick_kernel()) is LinuxKernel


def test_a_command_is_traced_with_its_children_and_keeps_output_and_exit_code() -> None:
    done = tegrad("trace", "--", sys.executable, "-c", NULL)
    assert (done.returncode, done.stdout) == (41, "told\n"), done.stderr
    told = re.findall(r"^(\d+) (\d\.\d{6}) (.*) \[\d+ us\]$", done.stderr, re.MULTILINE)
    assert len(told) == done.stderr.count("\n")
    parent, child = told[0][0], told[2][0]
    fd = re.search(r"= (\d+)<null>$", told[0][2])
    assert fd is not None
    create = f"NVMAP_CREATE(fd={fd[1]}<null>, size=0x1000) = ENOTTY"
    assert [(pid, text) for pid, _, text in told] == [
        (parent, f"open(path='/dev/null', flags=0x80002) = {fd[0][2:]}"),
        (parent, create),
        (child, create),
        (parent, f"close(fd={fd[1]}<null>) = ok"),
    ]
    assert parent != child
    assert [float(at) for _, at, _ in told] == sorted(float(at) for _, at, _ in told)


def test_json_lines_are_a_trace_again(tmp_path: Path) -> None:
    out = tmp_path / "calls"
    done = tegrad("trace", "--json", "-o", str(out), "--", sys.executable, "-c", NULL)
    assert (done.returncode, done.stderr) == (41, "")
    lines = out.read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["open", "NVMAP_CREATE", "NVMAP_CREATE", "close"]
    assert list(VIEWS["json"](calls(lines))) == lines


def test_a_command_ended_by_a_signal_or_missing_has_the_shells_code() -> None:
    ended = tegrad("trace", "--", "sh", "-c", "kill -9 $$")
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGKILL, "")
    missing = tegrad("trace", "no-such-program")
    assert missing.returncode == 127
    assert missing.stderr.startswith("tegrad: there is no program 'no-such-program'")


WAITS = """
import time
from tegrad.nv.kernel import pick_kernel
print(pick_kernel().exists("/"), flush=True)
time.sleep(99)
"""


@pytest.mark.parametrize(("number", "whole"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_a_signal_ends_the_command_and_what_it_did_is_told(number: signal.Signals, whole: bool, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tegrad", "trace", "--", sys.executable, "-c", WAITS]
    variables = {k: v for k, v in os.environ.items() if k != "TEGRAD_BOARD"} | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        line, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as traced:
        assert traced.stdout is not None
        assert traced.stdout.readline() == "True\n"
        (os.killpg if whole else os.kill)(traced.pid, number)
        _, told = traced.communicate(timeout=60)
    assert traced.returncode == 128 + number
    assert "exists(path='/') = 1" in told
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_is_named() -> None:
    done = tegrad("trace", "decode", "/nowhere")
    assert done.returncode == 2
    assert "/nowhere: No such file or directory" in done.stderr


def test_two_views_at_once_are_refused() -> None:
    done = tegrad("trace", "--json", "--summary", "true")
    assert done.returncode == 2
    assert "choose one of --json, --summary" in done.stderr


def test_a_trace_that_cannot_be_written_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot be written"):
        sink(str(tmp_path / "none" / "calls"))


def test_a_program_does_not_see_that_its_trace_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    write = sink(str(path))
    path.unlink()
    write(call("close", fd=3))
    assert not path.exists()


def test_a_line_that_is_cut_off_is_passed_over() -> None:
    whole = to_json(call("close", fd=3))
    assert [c.name for c in calls([whole[:-9], "[1]", '{"name": "close"}', whole])] == ["close"]


def test_a_call_comes_back_from_its_line() -> None:
    made = replace(call("AS_REMAP", {"samples": (b"\1\2",)}, fd=3), fds={3: "as"})
    back = from_json(json.loads(to_json(made)))
    assert back == replace(made, written={"samples": ("0102",)})


def opened(path: str, fd: int) -> Call:
    return call("open", path=path, result=fd)


def test_fds_have_names_from_where_they_are_made_until_they_are_closed() -> None:
    made = [
        opened("/dev/nvgpu/igpu0/ctrl", 3),
        call("GPU_OPEN_CHANNEL", {"channel_fd": 9}, fd=3),
        call("NVMAP_GET_FD", {"fd": 8}, fd=5, handle=1),
        call("CHANNEL_SETUP_BIND", fd=9, gpfifo_dmabuf_fd=8),
        call("close", fd=9),
        call("munmap", addr=4096, size=4096),
        call("mmap", fd=9),
    ]
    shown = list(calls(map(to_json, made)))
    assert [dict(one.fds) for one in shown] == [
        {3: "ctrl"},
        {3: "ctrl", 9: "channel"},
        {5: "nvmap", 8: "dmabuf"},
        {9: "channel", 8: "dmabuf"},
        {9: "channel"},
        {},
        {},
    ]
    assert str(shown[3]).startswith("CHANNEL_SETUP_BIND(fd=9<channel>, gpfifo_dmabuf_fd=8<dmabuf>) = 0")


SESSION = [
    opened("/dev/nvgpu/igpu0/ctrl", 3),
    call("GPU_GET_CHARACTERISTICS", fd=3),
    call("GPU_ALLOC_AS", {"as_fd": 4}, fd=3),
    call("NVMAP_CREATE", {"handle": 1}, fd=5, size=8192),
    call("NVMAP_ALLOC", fd=5, handle=1, flags=PUSHBUFFER.tag << 16 | c.NVMAP_HANDLE_INNER_CACHEABLE),
    call("NVMAP_GET_FD", {"fd": 6}, fd=5, handle=1),
    call("AS_MAP_BUFFER_EX", {"offset": 1 << 32}, fd=4, dmabuf_fd=6),
    call("NVMAP_CREATE", {"handle": 2}, fd=5, size=4096),
    call("NVMAP_ALLOC", fd=5, handle=2, flags=WEIGHTS.tag << 16 | c.NVMAP_HANDLE_INNER_CACHEABLE),
    call("NVMAP_GET_FD", {"fd": 7}, fd=5, handle=2),
    call("AS_MAP_BUFFER_EX", fd=4, dmabuf_fd=7, flags=c.NVGPU_AS_MAP_BUFFER_FLAGS_CACHEABLE),
    call("NVMAP_CREATE", error="ENOMEM", fd=5, size=4096),
    call("GPU_OPEN_CHANNEL", {"channel_fd": 8}, fd=3),
    call("CHANNEL_SETUP_BIND", fd=8),
]
SUBMISSION = call("store32", offset=0x90, value=1, chid=1, runlist=0)


def shown(view: str, *made: Call) -> list[str]:
    return list(VIEWS[view](calls(map(to_json, made))))


def test_calls_with_a_phase_of_their_own_are_calls_that_there_are() -> None:
    assert [name for name in BY_CALL if name.isupper() and name not in BY_NAME] == []


def test_a_summary_counts_by_phase_and_tells_the_flags_of_each_role() -> None:
    assert shown("summary", *SESSION, SUBMISSION, call("NVMAP_CREATE", fd=5, size=4096)) == [
        "phase            calls  failed    seconds",
        "discovery            2       0   0.000002",
        "    open 1, GPU_GET_CHARACTERISTICS 1",
        "address space        1       0   0.000001",
        "    GPU_ALLOC_AS 1",
        "memory               9       1   0.000009",
        "    NVMAP_CREATE 3, NVMAP_ALLOC 2, NVMAP_GET_FD 2, AS_MAP_BUFFER_EX 2",
        "channels             2       0   0.000002",
        "    GPU_OPEN_CHANNEL 1, CHANNEL_SETUP_BIND 1",
        "steady state         2       0   0.000002",
        "    store32 1, NVMAP_CREATE 1",
        "all                 16       1",
        "\nmemory               buffers          bytes  nvmap                          GPU mappings",
        "pushbuffer                 1          8,192  INNER_CACHEABLE                0x0",
        "weights                    1          4,096  INNER_CACHEABLE                CACHEABLE",
    ]


def test_memory_of_another_program_has_its_tag() -> None:
    tag = NVMAP_TAG + 0x80
    told = shown(
        "summary", call("NVMAP_ALLOC", fd=5, handle=1, flags=tag << 16), call("NVMAP_ALLOC", fd=5, handle=2, flags=1)
    )
    assert [line.split()[:2] for line in told[-2:]] == [["no", "tag"], ["tag", f"{tag:#x}"]]


def test_where_no_submission_shows_the_steady_state_follows_the_last_channel() -> None:
    wait = call("CHANNEL_WAIT", fd=8)
    found = phases(calls(map(to_json, [*SESSION, wait])))
    assert [one.name for phase, one in found if phase == STEADY] == ["CHANNEL_WAIT"]
    assert any("no submission shows" in line for line in shown("summary", *SESSION, wait))
    registers = call("mmap", fd=3, size=0x10000)
    assert not [one for phase, one in phases(calls(map(to_json, [*SESSION, registers]))) if phase == STEADY]


def test_calls_of_a_desktop_have_phases_by_name_and_class() -> None:
    made = [
        opened("/dev/nvidiactl", 3),
        call("NV_ESC_CHECK_VERSION_STR", fd=3),
        *(
            call("NV_ESC_RM_ALLOC", fd=3, hClass=number)
            for number in (0x80, 0x90F1, 0x70, 0x3E, 0xA06C, 0xC86F, 0xCBC0)
        ),
        call("UVM_REGISTER_GPU_VASPACE", fd=4),
        call("UVM_CREATE_EXTERNAL_RANGE", fd=4),
        call("NV_ESC_RM_MAP_MEMORY", fd=3),
        call("UVM_REGISTER_CHANNEL", fd=4),
        call("NV_ESC_RM_CONTROL", fd=3),
    ]
    names = {"discovery": "d", "address space": "a", "memory": "m", "channels": "c", "steady state": "s"}
    assert "".join(names[phase] for phase, _ in phases(calls(map(to_json, made)))) == "dddaamcccammcs"


def test_what_a_desktop_is_asked_for_is_known_by_the_command() -> None:
    commands = (0x13E, 0x20800131, 0xD01, 0x503C0102, 0x503C0104, 0x906F0101, 0xA06C0101, 0xC36F0108, 0x20808159)
    made = [call("NV_ESC_RM_CONTROL", fd=3, cmd=number) for number in commands]
    made.insert(1, call("NV_ESC_RM_ALLOC", fd=3, hClass=0xCB33))
    names = {"discovery": "d", "address space": "a", "memory": "m", "channels": "c", "steady state": "s"}
    assert "".join(names[phase] for phase, _ in phases(calls(map(to_json, made)))) == "dddmamcccs"


def test_what_the_resource_manager_refuses_has_failed() -> None:
    file = opened("/dev/nvidiactl", 3)
    made = [call("NV_ESC_RM_MAP_MEMORY", fd=3, hMemory=handle) for handle in (5, 6)]
    refused = replace(made[0], written={"status": 0x57})
    told = shown("summary", file, *made, refused)
    assert [line.split()[-3:-1] for line in told if line.startswith("memory")] == [["3", "1"]]
    assert told[-1].split() == ["all", "4", "1"]
    assert shown("diagram", file, *made, refused)[-2:] == [
        "    P7->>T_nvidiactl: NV_ESC_RM_MAP_MEMORY x2 = ok",
        "    P7-xT_nvidiactl: NV_ESC_RM_MAP_MEMORY(fd=3[nvidiactl], hMemory=5) = status 0x57",
    ]


def test_a_diagram_has_one_line_for_a_desktops_file_however_often_it_is_opened() -> None:
    told = shown("diagram", *(opened("/dev/nvidia0", fd) for fd in (3, 4, 5)))
    assert [line for line in told if "participant T" in line] == ["    participant T_nvidia0 as nvidia0"]


def test_a_diagram_has_an_arrow_for_each_row_of_calls() -> None:
    told = shown("diagram", *SESSION[:2], *[SESSION[3]] * 3, SESSION[-3], SUBMISSION)
    assert told == [
        "sequenceDiagram",
        "    participant P7 as process 7",
        "    participant T_ctrl as ctrl",
        "    participant T_nvmap as nvmap",
        "    participant T_doorbell as doorbell",
        "    Note over P7: discovery",
        "    P7->>T_ctrl: open(path='/dev/nvgpu/igpu0/ctrl') = 3[ctrl]",
        "    P7->>T_ctrl: GPU_GET_CHARACTERISTICS(fd=3[ctrl]) = 0",
        "    Note over P7: memory",
        "    P7->>T_nvmap: NVMAP_CREATE x3 = ok",
        "    P7-xT_nvmap: NVMAP_CREATE(fd=5[nvmap], size=0x1000) = ENOMEM",
        "    Note over P7: steady state",
        "    P7->>T_doorbell: store32(offset=144, value=1, chid=1, runlist=0) = 0",
    ]
