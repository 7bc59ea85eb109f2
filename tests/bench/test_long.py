"""The record of the long tests says what the report of pytest says."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import long_tests as long

REPORT = """<testsuites><testsuite>
<testcase classname="tests.nv.test_a" name="test_x[1]" time="12.34">
<properties><property name="calls" value="100"/></properties></testcase>
<testcase classname="tests.nv.test_a" name="test_y" time="0.5"><failure message="no">trace</failure></testcase>
</testsuite></testsuites>"""


def test_each_test_has_its_outcome_and_time(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    found = long.results(tmp_path / "report.xml")
    assert found["passed"] == 1
    assert found["tests"] == {
        "tests/nv/test_a.py::test_x[1]": {"outcome": "passed", "seconds": 12.3, "calls": "100"},
        "tests/nv/test_a.py::test_y": {"outcome": "failure", "seconds": 0.5},
    }


def test_reports_of_several_folders_are_one_record(tmp_path: Path) -> None:
    (tmp_path / "nv.xml").write_text(REPORT)
    (tmp_path / "ptx.xml").write_text(REPORT.replace("tests.nv", "tests.ptx"))
    found = long.results(tmp_path / "nv.xml", tmp_path / "ptx.xml")
    assert (found["passed"], len(found["tests"])) == (2, 4)


def test_some_tests_alone_stand_beside_the_others(tmp_path: Path) -> None:
    (tmp_path / "report.xml").write_text(REPORT)
    kept = {"passed": 7, "tests": {"a": {}}, "again": [{"tests": {"b": {}, "tests/nv/test_a.py::test_y": {}}}]}
    made = long.again(kept, tmp_path / "report.xml")
    assert (made["passed"], made["tests"]) == (7, {"a": {}})
    first, fresh = made["again"]
    assert first["tests"] == {"b": {}}
    assert fresh["tests"] == long.results(tmp_path / "report.xml")["tests"]
