"""The examples are scripts: their folders are where their own modules are found, as when they run."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTE = "tegrad: no GPU found, running on an emulated agx-orin-64gb (TEGRAD_BOARD, or DEV, chooses another)\n"

sys.path[:0] = [str(EXAMPLES), str(EXAMPLES / "odometry")]


@pytest.fixture
def shell(tmp_path: Path) -> Callable[[str], str]:
    """Runs a line as a user types it in a checkout with no variable set, and gives what it printed.

    It must end well and say nothing but that the GPU is emulated. What it writes lies in the test's own folder.
    """
    (tmp_path / "examples").symlink_to(EXAMPLES)
    variables = {name: value for name, value in os.environ.items() if name not in ("DEV", "TEGRAD_BOARD")}
    variables["PATH"] = f"{Path(sys.executable).parent}:{variables['PATH']}"
    variables["PYTHONPATH"] = str(EXAMPLES.parent)

    def run(line: str) -> str:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=variables, capture_output=True, text=True, check=False, timeout=900
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stderr in ("", NOTE)
        return done.stdout

    return run
