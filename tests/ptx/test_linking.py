"""Compiled code links and runs wherever in the process it lands."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("far_apart.py")
ROOT = SCRIPT.parents[2]
PROCESSES = 2


def test_code_runs_however_far_from_what_it_calls(tmp_path: Path) -> None:
    """LLVM's older linker ended the process here: it maps the sections of an object apart from each other."""
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    runs = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(PROCESSES)
    ]
    try:
        ended = [(run.communicate(timeout=120), run.returncode) for run in runs]
    finally:
        for run in runs:
            run.kill()
    for (said, errors), code in ended:
        assert code == 0, errors[-4000:]
        far, pairs = map(int, said.split())
        assert far > pairs // 4
