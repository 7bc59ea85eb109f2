"""Run the campaign (tests/tegra) on the NV device there is, and keep the outcome as JSON.

    python tests/hardware/campaign.py OUT.json [pytest's options]

Needs pytest besides what the NV device needs, and clang for tinygrad's CPU device. Best alone on the machine: each test
looks at the kernel log, which is everybody's.
"""

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from case_record import write_record

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
CHOSEN = ("tests/tegra", "-m", "not long")


def outcome(test: ElementTree.Element) -> dict[str, Any]:
    """One test of pytest's report: name, outcome, seconds, what it measured, and why it did not pass."""
    noted = {one.get("name", ""): one.get("value") for one in test.iter("property")}
    wrong = next((e for kind in ("failure", "error", "skipped") if (e := test.find(kind)) is not None), None)
    return {
        "case": f"{test.get('classname', '').removeprefix('tests.tegra.')}::{test.get('name')}",
        "outcome": "passed" if wrong is None else wrong.tag,
        "seconds": round(float(test.get("time", 0)), 1),
        **({"noted": noted} if noted else {}),
        "said": [] if wrong is None else wrong.get("message", "").splitlines()[:3],
    }


def main(path: Path, options: list[str]) -> int:
    """Run, record, and say pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", *CHOSEN, f"--junitxml={report}", *options]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        tests = [outcome(test) for test in ElementTree.parse(report).iter("testcase")]
    write_record(path, tests, 'pytest tests/tegra -m "not long"')
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
