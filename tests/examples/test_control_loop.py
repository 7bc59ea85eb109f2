"""The example of a recorded control loop, as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "control_loop.py"


@pytest.mark.board
def test_the_recorded_network_keeps_the_pole_upright() -> None:
    environment = {**os.environ, "TEGRAD_BOARD": "agx-orin-64gb", "DEV": "NV"}
    command = [sys.executable, str(SCRIPT), "--steps", "200"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert "it stands" in done.stdout
