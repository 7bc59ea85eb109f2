"""The record of the long tests says what the report of pytest says."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import long_tests as long

REPORT = """<testsuites><testsuite>
<testcase classname="tests.nv.test_a" name="test_x[1]" time="12.34"/>
<testcase classname="tests.nv.test_a" name="test_y" time="0.5"><failure message="no">trace</failure></testcase>
</testsuite></testsuites>"""


def test_each_test_has_its_outcome_and_time(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = long.results(tmp_path / "report.xml")
    assert found["passed"] == 1
    assert found["tests"] == {
        "tests/nv/test_a.py::test_x[1]": {"outcome": "passed", "seconds": 12.3},
        "tests/nv/test_a.py::test_y": {"outcome": "failure", "seconds": 0.5},
    }
