"""Tests in several processes: longest files first, a crash is told, and no test inherits a device from another."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from balance import longest_first

ROOT = Path(__file__).parents[1]

TESTS = {
    "test_short.py": "def test_one(): pass\ndef test_two(): pass\ndef test_three(): pass\n",
    "test_long.py": "import os\ndef test_before(): pass\ndef test_crash(): os.abort()\ndef test_after(): pass\n",
}


def test_files_that_take_longest_come_first_and_stay_whole() -> None:
    nodes = ["a.py::1", "a.py::2", "b.py::1", "c.py::1", "c.py::2"]
    assert [nodes[at] for at in longest_first(nodes, {"c.py": 9, "b.py": 3})] == [*nodes[3:], nodes[2], *nodes[:2]]


def test_a_crash_is_a_failure_of_the_test_that_ran_and_leaves_no_logs(tmp_path: Path) -> None:
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)
    logs = tmp_path / "logs"
    logs.mkdir()
    shared = re.search(r"^SHARED := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert shared is not None
    options = shared[1].replace("$(WORKERS)", "2").split()
    plugins = ["-p", "balance", "-p", "klog_checker", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *options, *plugins, "--rootdir", str(tmp_path), str(tmp_path)],
        env={**environment, "PYTHONPATH": path, "TMPDIR": str(logs)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "crashed while running 'test_long.py::test_crash'" in done.stdout
    assert re.search(r"^FAILED .*test_long\.py::test_crash( - .*)?$", done.stdout, re.MULTILINE)  # CI: with the cause
    assert "1 failed" in done.stdout
    assert "busy: gw" in done.stdout
    assert not list(logs.glob("tegrad-board-logs-*"))


def test_fast_leaves_out_the_files_that_take_long() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "--fast", "tests/ptx/oracle", "tests/hw"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    collected = {line.partition("::")[0] for line in done.stdout.splitlines() if "::" in line}
    assert "tests/hw/test_fault_codes.py" in collected
    assert "tests/ptx/oracle/test_oracle.py" not in collected  # the longest of them


@pytest.mark.parametrize("time", ["first", "second"])
def test_no_test_inherits_the_device_that_tinygrad_chose_before(time: str) -> None:
    from tinygrad import Device

    devices: dict[str, Any] = Device.__dict__
    assert "_select_device" not in devices
    assert os.environ.get("DEV") != "NULL"
    devices["_select_device"] = os.environ["DEV"] = "NULL"  # as tinygrad does with what it finds
