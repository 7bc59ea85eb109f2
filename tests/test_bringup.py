"""examples/bringup.py on the emulated board: every check passes, nothing stays behind, tinygrad stays out."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "bringup.py"
CHECKS = 21

COUNTED = """
import json, sys
sys.path.insert(0, {examples!r})
import bringup
from tegrad.orin.client import BoardKernel, board_status

spec = {board!r}
kernel = BoardKernel(spec)
kernel.close(kernel.open("/dev/nvmap"))
before = board_status(spec)["counts"]
ok = all([bringup.Bringup(kernel).run() for _ in range(3)])
kernel.close(kernel.open("/dev/nvmap"))
after = board_status(spec)["counts"]
print(json.dumps([ok, before, after, [m for m in sys.modules if m.split(".")[0] == "tinygrad"]]))
"""


@dataclass(frozen=True)
class Result:
    """A finished run."""

    returncode: int
    stdout: str
    stderr: str


def run(*command: str, board: str = "") -> Result:
    env = {k: v for k, v in os.environ.items() if k != "TEGRAD_BOARD"} | {"PYTHONPATH": str(ROOT)}
    if board:
        env["TEGRAD_BOARD"] = board
    # Files, not pipes: the board lingers after its last client, and a pipe would stay open as long.
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = subprocess.run([sys.executable, *command], stdout=out, stderr=err, timeout=180, env=env, cwd=ROOT)
        out.seek(0)
        err.seek(0)
        return Result(code.returncode, out.read(), err.read())


@pytest.mark.board
@pytest.mark.parametrize("board", ["agx-orin-64gb", "gh100"])
def test_every_check_passes_on_the_board(board: str) -> None:
    result = run(str(SCRIPT), board=board)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert lines[-1] == f"{CHECKS}/{CHECKS} passed"
    assert [line for line in lines[:-1] if not line.startswith("ok ")] == []
    assert result.stderr == ""


@pytest.mark.board
def test_three_runs_leave_the_board_as_it_was_and_tinygrad_out() -> None:
    result = run("-c", COUNTED.format(examples=str(SCRIPT.parent), board="agx-orin-64gb"))
    assert result.returncode == 0, result.stdout + result.stderr
    ok, before, after, tinygrad = json.loads(result.stdout.splitlines()[-1])
    assert ok
    assert after == before
    assert tinygrad == []


@pytest.mark.board
def test_trace_shows_every_call_decoded() -> None:
    result = run(str(SCRIPT), "--trace", board="agx-orin-64gb")
    assert result.returncode == 0, result.stdout + result.stderr
    for piece in (
        "CHANNEL_SETUP_BIND(fd=",
        "flags=DETERMINISTIC|USERMODE_SUPPORT",
        "class_num=AMPERE_COMPUTE_B",
        "wdt_status=DISABLE_WDT",
        "store32(offset=144, value=511, chid=511, runlist=0) = ok",
        "heap_mask=IOVMM, flags=INNER_CACHEABLE|tag=0x900",
        "= EBUSY",
    ):
        assert piece in result.stderr


@pytest.mark.skipif(Path("/dev/nvgpu/igpu0/ctrl").exists(), reason="this machine has the device nodes")
def test_without_a_gpu_it_says_what_to_do_and_fails() -> None:
    result = run(str(SCRIPT))
    assert result.returncode == 1
    assert "TEGRAD_BOARD=agx-orin-64gb" in result.stdout
    assert result.stdout.splitlines()[-1] == f"1/{CHECKS} passed"  # the release
    assert result.stderr == ""


FAULTS = """
import contextlib, io, json, sys
sys.path.insert(0, {examples!r})
import bringup
from tegrad.orin.client import BoardKernel, board_inject, board_status
from tegrad.orin.inject import Injection
from tegrad.uapi.trace import Tracer

bringup.BUFFER_SIZES, bringup.ELEMENTS = (4096,), 1000
spec = {board!r}
kernel = BoardKernel(spec)

def counts():
    kernel.close(kernel.open("/dev/nvmap"))
    return board_status(spec)["counts"]

def run(kernel):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        ok = bringup.Bringup(kernel).run()
    return ok, out.getvalue().splitlines()

tracer = Tracer(kernel)
before = counts()
assert run(tracer)[0]
names = sorted({{call.name for call in tracer.calls if call.name.isupper()}})
found = {{}}
for name in names:
    board_inject(spec, [Injection(name, errno=5, nth=1)])
    ok, lines = run(kernel)
    board_inject(spec, [])
    failed = [line for line in lines if line.startswith("FAILED")]
    found[name] = [ok, failed[0] if failed else "", counts() == before]
print(json.dumps([run(kernel)[0], found]))
"""


@pytest.mark.board
@pytest.mark.klog_errors("sm |GR exception|error notifier set to 13")  # code in a window that could not be reserved
def test_whichever_call_fails_is_named_and_nothing_stays_behind() -> None:
    """Each ioctl that the checks make is refused once, in a run of its own."""
    result = run("-c", FAULTS.format(examples=str(SCRIPT.parent), board="agx-orin-64gb"))
    assert result.returncode == 0, result.stdout + result.stderr
    works_again, found = json.loads(result.stdout.splitlines()[-1])
    assert works_again
    assert len(found) > 20
    for name, (ok, first, clean) in found.items():
        assert not ok, name
        assert f"{name}(fd=" in first, (name, first)
        assert "EIO" in first, (name, first)
        assert clean, name


DEATH = """
import sys
sys.path.insert(0, {examples!r})
import bringup
from bringup_gpu import CheckFailed
from tegrad.orin.client import BoardKernel

bringup.BUFFER_SIZES = ()
checks = bringup.Bringup(BoardKernel({board!r}))
for name, check in checks.checks():
    checks.check(name, check)
    if name == "NOP push":
        break
try:
    checks.channel.run([0x00000001 << 29 | 1 << 16 | 5 << 13 | 0x40, 0])  # a method for a software subchannel
except CheckFailed as error:
    print(error)
print(checks.channel.timed_out())
checks.undo.close()
"""


@pytest.mark.board
@pytest.mark.klog_errors("(?i)pbdma|error notifier set to 32")
def test_a_channel_that_dies_says_why() -> None:
    result = run("-c", DEATH.format(examples=str(SCRIPT.parent), board="agx-orin-64gb"))
    assert result.returncode == 0, result.stdout + result.stderr
    *_, reason, timed_out = result.stdout.splitlines()
    assert "the channel died waiting for semaphore value 2: code 32, PBDMA error" in reason
    assert timed_out == "1"
