"""The suite under the second memory policy, in both store modes of the board's L2: `make test-policies`.

Folder after folder, each in a process of its own; what came of each is kept in results/memory-policies.json. Named
folders (`python tools/policies.py tests/llm --stores back`) replace only their own rows.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tegrad.bench import record  # noqa: E402

RESULT = ROOT / "results" / "memory-policies.json"
POLICY, STORES = "cached", ("through", "back")
CHOSEN = "not hardware and not long"
TESTS = [f"tests/{path.name}" for path in sorted((ROOT / "tests").iterdir()) if any(path.glob("**/test_*.py"))]
TESTS += [f"tests/{path.name}" for path in sorted((ROOT / "tests").glob("test_*.py"))]


def commit() -> str:
    """The commit that is checked out, with a + where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    name = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True).stdout
    changed = subprocess.run([*git, "status", "--porcelain", "-uno"], capture_output=True, check=True).stdout
    return name.strip() + "+" * bool(changed)


def outcome(folder: str, stores: str) -> dict[str, Any]:
    """Run the tests of a folder; how many passed, failed and were skipped."""
    environment = {**os.environ, "TEGRAD_MEMORY": POLICY, "TEGRAD_L2": stores}
    with tempfile.NamedTemporaryFile(suffix=".xml") as report:
        command = [sys.executable, "-m", "pytest", "-q", "-m", CHOSEN, f"--junitxml={report.name}", folder]
        code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
        suites = list(ET.parse(report.name).getroot().iter("testsuite")) if os.path.getsize(report.name) else []
    counts = {name: sum(int(suite.get(name, 0)) for suite in suites) for name in ("tests", "failures", "errors")}
    skipped = sum(int(suite.get("skipped", 0)) for suite in suites)
    failed = counts["failures"] + counts["errors"]
    row = {"policy": POLICY, "stores": stores, "tests": folder, "passed": counts["tests"] - failed - skipped}
    # A process that died has no report: that is a failure, too; 5 says that there was nothing to run.
    row |= {"failed": failed or int(code not in (0, 5)), "skipped": skipped}
    return row | {"date": record.now(), "commit": commit()}


def main() -> int:
    """Run, keep, and say whether all passed."""
    parser = argparse.ArgumentParser(prog="python tools/policies.py", description=f"Writes {RESULT.name}.")
    parser.add_argument("tests", nargs="*", default=TESTS, help="folders or files; all, unless given")
    parser.add_argument("--stores", choices=STORES, action="append", help="one store mode; both, unless given")
    given = parser.parse_args()
    failed = 0
    for stores in given.stores or STORES:
        for folder in given.tests:
            row = outcome(folder.rstrip("/"), stores)
            keep(row)
            failed += row["failed"]
    return int(failed > 0)


def keep(row: dict[str, Any]) -> None:
    """Put a row in the place of an earlier one of the same tests."""
    rows = json.loads(RESULT.read_text())["rows"] if RESULT.exists() else []

    def place(one: dict[str, Any]) -> tuple[str, ...]:
        return tuple(one[name] for name in ("policy", "stores", "tests"))

    rows = sorted([*(one for one in rows if place(one) != place(row)), row], key=place)
    made = {"command": "make test-policies", "machine": record.machine(), "versions": record.versions(), "rows": rows}
    RESULT.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
