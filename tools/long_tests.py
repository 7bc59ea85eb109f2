"""The long tests' results as data: `python tools/long_tests.py REPORT.xml`, after

pytest -q -m "long and not hardware" -n 2 --junitxml REPORT.xml
"""

from __future__ import annotations

import argparse
import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tegrad.bench import record  # noqa: E402

RESULT = ROOT / "results" / "long-tests.json"
COMMAND = 'pytest -q -m "long and not hardware" -n 2'


def results(report: Path) -> dict[str, Any]:
    """Outcome and seconds of each test in a JUnit report, with the machine and the versions."""
    tests = {}
    for case in ET.parse(report).getroot().iter("testcase"):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        tests[name] = {"outcome": outcome, "seconds": round(float(case.get("time", 0)), 1)}
    return {
        "command": COMMAND,
        "date": record.now(),
        "machine": record.machine(),
        "versions": record.versions(),
        "passed": sum(test["outcome"] == "passed" for test in tests.values()),
        "tests": tests,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python tools/long_tests.py", description=f"Writes {RESULT.name}.")
    parser.add_argument("report", type=Path, metavar="REPORT.xml", help="what pytest --junitxml wrote")
    RESULT.write_text(json.dumps(results(parser.parse_args().report), indent=1) + "\n")
