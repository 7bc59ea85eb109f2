"""The stages of a start come one after the other, and the program says what it says without them."""

import functools
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "start_stages.py"
LINE = re.compile(r" *(\d+) ms \(\+ *\d+, CPU \+ *\d+\) (.*)")

sys.path.insert(0, str(TOOL.parent))
import start_stages  # noqa: E402


def test_every_stage_is_there() -> None:
    """The tool leaves out what an older commit does not have; of this one it has all."""
    for module, names in start_stages.STAGES.items():
        for name in names:
            assert callable(functools.reduce(getattr, name.split("."), importlib.import_module(module)))


@pytest.mark.board
@pytest.mark.parametrize("tree", [(), ("--tree", str(ROOT))])
def test_each_stage_of_a_run_has_its_time(tree: tuple[str, ...]) -> None:
    command = [sys.executable, str(TOOL), *tree, "run", "In the beginning", "--max-tokens", "1", "--temperature", "0"]
    environment = {**os.environ, "TEGRAD_BOARD": "agx-orin-64gb"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[:1]) == (0, ["of"]), done.stderr
    found = [match.groups() for line in done.stderr.splitlines() if (match := LINE.fullmatch(line))]
    times, names = [int(at) for at, _ in found], [name for _, name in found]
    assert times == sorted(times)
    assert [names[0], names[1], names[-1]] == ["python", "tegrad.cli", "_exit"]
    for stage in ("run", "open_device", "__init__", "encode", "_allocate", "load_kernel", "generate", "finalize"):
        assert names.index(f"> {stage}") < names.index(f"< {stage}")
