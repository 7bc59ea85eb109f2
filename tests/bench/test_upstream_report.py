"""docs/upstream-tests.md says what results/upstream holds, and every failure in there has been judged."""

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import upstream_report as report
from upstream import PEER

ROOT = Path(__file__).resolve().parents[2]


def made(failed: dict[str, str], **result: Any) -> dict[str, Any]:
    """A report of one suite."""
    counts = {"passed": 3, "failed": len(failed), "skipped": 1, "xfailed": 0}
    suite = {"minutes": 1.25, "counts": counts, "failed": failed, "skipped": {"T::s": "not | here"}, **result}
    suite |= {"date": "2026-01-02T03:04:05Z", "sources": "0123"}
    return {
        "renderer": "PTX", "device": "emulated agx-orin-64gb", "commit": "a9069c177a9d", "jobs": 2,
        "machine": {"cpu": "x", "cores": 2, "gpu": "", "python": "3.11"}, "versions": {},
        "suites": {"device/test_hcq": suite},
    }  # fmt: skip


def test_counts_failures_and_skips_are_told() -> None:
    text = report.tables([made({"TestHCQ::test_speed_exec_time": "assert 2 <= 1"})])
    assert "| device/test_hcq | 3, 1, 1, 0 |" in text
    assert "| minutes | 1.2 |" in text
    assert "| device/test_hcq: test_speed_exec_time | board, PTX | the emulator's speed. " in text
    assert "| not   here | 1 |" in text


def test_a_failure_that_nobody_judged_stands_out() -> None:
    text = report.tables([made({"TestHCQ::test_new": "assert a | b"}, stopped="after 5 s")])
    assert "| device/test_hcq: test_new | board, PTX | **not judged**: assert a \\| b |" in text
    assert "(the suite did not end) | board, PTX | **not judged**: after 5 s |" in text


def test_an_excuse_of_the_emulator_is_none_on_a_gpu() -> None:
    test = ("device/test_hcq", "TestHCQ::test_speed_exec_time")
    assert report.verdict(*test, "emulated agx-orin-64gb") is not None
    assert report.verdict(*test, "GPU") is None


def gpu(device: str, **outcomes: dict[str, str]) -> dict[str, Any]:
    """A report of one suite on a GPU."""
    made_one = made({})
    suite = {**made_one["suites"]["device/test_hcq"], "failed": {}, "skipped": {}, **outcomes}
    machine = {**made_one["machine"], "gpu": "H200"}
    return {**made_one, "device": device, "machine": machine, "suites": {"backend/test_ops": suite}}


def test_what_cuda_does_otherwise_is_listed_and_what_it_does_alike_is_not() -> None:
    ours = gpu("GPU", failed={"T::test_a": "x", "T::test_both": "x"}, skipped={"T::test_b": "no half"})
    peer = gpu(PEER, failed={"T::test_both": "y", "T::test_c": "z"}, skipped={"T::test_b": "no half"})
    assert [*report.differences(ours, peer)] == [
        ("backend/test_ops", "T::test_a", "failed", "passed"),
        ("backend/test_ops", "T::test_c", "passed", "failed"),
    ]
    text = report.tables([ours, peer])
    assert "| backend/test_ops: test_a | PTX | failed | passed |" in text
    assert "| backend/test_ops | 3, 0, 1, 0 | 3, 0, 1, 0 |" in text
    assert "H200 through CUDA, PTX" in text
    assert "test_c | H200 through CUDA" not in text  # a failure of the peer's is not one that we explain


def test_no_difference_is_told_too() -> None:
    assert "every test had the same outcome" in report.tables([gpu("GPU"), gpu(PEER)])
    assert "outcome" not in report.tables([gpu("GPU")])


@pytest.mark.parametrize("result", report.load(report.RESULTS), ids=report.machine)
def test_no_recorded_failure_is_ours(result: dict[str, Any]) -> None:
    for suite, test, why in report.failures(result):
        found = report.verdict(suite, test, result["device"])
        assert found is not None, f"{suite} {test}: {why}"
        assert not found.whose.startswith("ours")


def test_the_page_says_what_the_results_say() -> None:
    text = (ROOT / report.PAGE).read_text()
    assert report.page(text, report.load(report.RESULTS)) == text, "run `python tools/upstream_report.py`"
