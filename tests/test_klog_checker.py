"""A board's error line fails the test during which it came, whichever process the board belongs to."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

CHILD = """
import os, signal, sys
from tegrad.orin.client import BoardKernel, board_log, board_status

spec = sys.argv[1] if sys.argv[0] == "-c" and sys.argv[1:] else "orin-nano-8gb:64M"
kernel = BoardKernel(spec)
kernel.close(kernel.open("/dev/nvmap"))
os.kill(board_status(spec)["pids"]["gpu"], signal.SIGKILL)
while not any("GPU reset" in line for line in board_log(spec)):
    pass
"""
QUIET = """
from tegrad.orin.client import BoardKernel

kernel = BoardKernel("orin-nano-8gb:64M")
kernel.close(kernel.open("/dev/nvmap"))
"""

TESTS = f"""
import os, subprocess, sys

import pytest

def start(code, *arguments):
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)

@pytest.fixture(scope="module")
def shared():
    name = f"klog-checker-{{os.getpid()}}"
    tegrad = [sys.executable, "-m", "tegrad", "board"]
    subprocess.run([*tegrad, "start", name], check=True)
    yield name
    subprocess.run([*tegrad, "stop", name], check=True)

def test_child():
    start({CHILD!r})

@pytest.mark.klog_errors("GPU reset")
def test_announced():
    start({CHILD!r})

@pytest.mark.klog_errors("MMU FAULT")
def test_announced_otherwise():
    start({CHILD!r})

def test_grandchild():
    start("import subprocess, sys; subprocess.run([sys.executable, '-c', " + repr({CHILD!r}) + "], check=True)")

def test_shared_while_quiet(shared):
    pass

def test_shared(shared):
    start({CHILD!r}, shared)

def test_this_process():
    exec({CHILD!r}, {{}})

def test_quiet():
    start({QUIET!r})
"""


@pytest.mark.board
def test_an_error_line_of_any_board_fails_the_test_during_which_it_came(tmp_path: Path) -> None:
    inner = tmp_path / "test_inner.py"
    inner.write_text(TESTS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    options = ["-rA", "-p", "no:cacheprovider", "-p", "klog_checker", "-c", str(ROOT / "pyproject.toml")]
    command = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(inner)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    failed = sorted(re.findall(r"^ERROR .*::test_(\w+)", done.stdout, re.MULTILINE))
    assert failed == ["announced_otherwise", "child", "grandchild", "shared", "this_process"], done.stdout
    assert "8 passed, 5 errors" in done.stdout
    assert "board: GPU reset" in done.stdout
