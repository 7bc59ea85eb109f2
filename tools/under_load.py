"""The whole suite on a machine that others keep busy: `python tools/under_load.py`, best in a fresh clone.

Beside `make test` run processes that compute without an end. What came of it is kept in results/under-load-suite.json,
with the load averages that the kernel told meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

from policies import commit  # noqa: E402

from tegrad.bench import record  # noqa: E402

RESULT = ROOT / "results" / "under-load-suite.json"
LOAD = 8
SAMPLE_S = 10.0
COUNTS = ("tests", "failures", "errors", "skipped")


@contextmanager
def busy(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """So many processes that compute, until the block ends."""
    spin = "while True: pass"
    processes = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def watched(command: Sequence[str]) -> tuple[int, list[float]]:
    """Run a command; its exit code, and the load averages (one minute) while it ran."""
    loads: list[float] = []
    with subprocess.Popen(command, cwd=ROOT) as running:
        try:
            while True:
                try:
                    return running.wait(SAMPLE_S), loads
                except subprocess.TimeoutExpired:
                    loads.append(os.getloadavg()[0])
        except BaseException:
            running.terminate()
            raise


def counts(report: Path) -> dict[str, int]:
    """What pytest's report tells; nothing where there is none."""
    if not report.exists():
        return {}
    suites = list(ET.parse(report).getroot().iter("testsuite"))
    return {name: sum(int(suite.get(name, 0)) for suite in suites) for name in COUNTS}


def main() -> int:
    """Run under load, keep, and say whether all passed."""
    parser = argparse.ArgumentParser(prog="python tools/under_load.py", description=f"Writes {RESULT.name}.")
    parser.add_argument("--load", type=int, default=LOAD, help=f"busy processes beside the tests; {LOAD} unless given")
    given = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, busy(given.load):
        report = Path(folder) / "report.xml"
        code, loads = watched(["make", "test", f"MORE=--junitxml={report}"])
        found = counts(report)
    minutes = (time.monotonic() - start) / 60
    row = {
        "command": f"python tools/under_load.py --load {given.load}",
        "commit": commit(),
        "date": record.now(),
        "machine": record.machine(),
        "versions": record.versions(),
        "exit_code": code,
        **found,
        "minutes": round(minutes, 1),
        "load": {"least": min(loads), "median": statistics.median(loads), "most": max(loads)} if loads else {},
    }
    RESULT.write_text(json.dumps(row, indent=1) + "\n")
    print(json.dumps({name: row[name] for name in ("exit_code", "minutes", "load")} | found))
    return int(bool(code))


if __name__ == "__main__":
    sys.exit(main())
