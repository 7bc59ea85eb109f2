"""Compiling opens NVIDIA's compilers and nothing of its user-mode driver."""

import shutil
import subprocess
import sys

import pytest

COMPILE = """
from tegrad.nv import compilers
compilers.compile_cuda('extern "C" __global__ void k(int *o) { o[0] = 1; }', "sm_87", cache=False)
compilers.compile_ptx('.version 7.5\\n.target sm_87\\n.address_size 64\\n.visible .entry k() { ret; }', "sm_87")
"""


@pytest.mark.strace
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_compilers_never_look_for_libcuda() -> None:
    command = ["strace", "-f", "-e", "trace=openat", sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    opened = [line for line in done.stderr.splitlines() if "openat(" in line]
    assert any("libnvrtc" in line for line in opened)
    assert any("libnvJitLink" in line for line in opened)
    assert [line for line in opened if "libcuda.so" in line] == []
