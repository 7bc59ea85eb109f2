"""Kernels of tinygrad's PTX and CUDA renderers give numpy's results; each renderer in a process of its own."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.ptx.tinygrad_programs import PROGRAMS

pytestmark = pytest.mark.board
ROOT = Path(__file__).parents[2]


@cache
def results(renderer: str) -> dict[str, str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.ptx.tinygrad_programs", renderer]
    run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.parametrize("renderer", ["PTX", "CUDA"])
@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_program_agrees_with_numpy(renderer: str, name: str) -> None:
    assert results(renderer)[name] == ""
