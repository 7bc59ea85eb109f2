"""The long tests' results as data: `python tools/long_tests.py REPORT.xml...`, after

pytest -q -m "long and not hardware" -n 2 --junitxml REPORT.xml

or after this for one folder of tests after the other, with a report each; or, after some of them alone, `python
tools/long_tests.py REPORT.xml --again`, which keeps them beside the others.
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


def results(*reports: Path) -> dict[str, Any]:
    """Outcome and seconds of each test in JUnit reports and what it counted, with the machine and the versions."""
    tests = {}
    for case in (case for report in reports for case in ET.parse(report).getroot().iter("testcase")):
        outcome = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        counted = {str(one.get("name")): one.get("value") for one in case.iter("property")}
        tests[name] = {"outcome": outcome, "seconds": round(float(case.get("time", 0)), 1), **counted}
    versions = record.versions()
    return {
        "command": COMMAND,
        "date": record.now(),
        "commit": record.History(ROOT).head(versions["tegrad_sources"]) or None,
        "machine": record.machine(),
        "versions": versions,
        "passed": sum(test["outcome"] == "passed" for test in tests.values()),
        "tests": tests,
    }


def again(kept: dict[str, Any], *reports: Path) -> dict[str, Any]:
    """A record with reports of some tests in it, which takes the place of what was kept of these."""
    fresh = results(*reports)
    del fresh["command"]
    others = [
        run | {"tests": left}
        for run in kept.get("again", [])
        if (left := {name: test for name, test in run["tests"].items() if name not in fresh["tests"]})
    ]
    return kept | {"again": [*others, fresh]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python tools/long_tests.py", description=f"Writes {RESULT.name}.")
    parser.add_argument("reports", type=Path, nargs="+", metavar="REPORT.xml", help="what pytest --junitxml wrote")
    parser.add_argument("--again", action="store_true", help="some tests alone, beside what is there of the others")
    options = parser.parse_args()
    kept = json.loads(RESULT.read_text()) if options.again else {}
    made = again(kept, *options.reports) if options.again else results(*options.reports)
    RESULT.write_text(json.dumps(made, indent=1) + "\n")
