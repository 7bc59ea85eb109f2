"""docs/upstream-tests.md from results/upstream/*.json: `python tools/upstream_report.py`.

The tables between the page's two marks are computed. What a person has to say is one row of VERDICTS for each failure:
whose it is, and why.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from upstream import PEER  # noqa: E402

RESULTS = ROOT / "results" / "upstream"
PAGE = ROOT / "docs" / "upstream-tests.md"
BEGIN, END = "<!-- computed from results/upstream -->", "<!-- end of what is computed -->"

Report = dict[str, Any]


@dataclass(frozen=True)
class Verdict:
    """Whose a failure is: of tests that match `test` (suite and name), on a device whose name begins with `device`."""

    test: str
    device: str
    whose: str
    evidence: str


VERDICTS = (
    Verdict(
        r"device/test_hcq TestHCQ::test_speed_(copy_bandwidth|exec_time)",
        "emulated",
        "the emulator's speed",
        "The test wants 10 GB/s and 100 us of a real GPU. Of an emulator it asks neither, and knows one by an "
        "interface whose name begins with MOCK; ours cannot be called that (tinygrad would compile differently).",
    ),
    Verdict(
        r"unit/test_gguf .*",
        "",
        "no network",
        "The test downloads a model from huggingface.co: `urlopen error`. The suite's other tests, which make their "
        "data, pass.",
    ),
    Verdict(
        r"backend/test_uops TestBitcastBufferView::test_(load|store)",
        "",
        "upstream's",
        "The kernel is written by hand to read 8 bytes at byte 4 of a buffer through `(unsigned long*)(data0+1)`. "
        "NVIDIA GPUs need natural alignment (PTX ISA, 'Addresses as operands'): a misaligned-address fault on the "
        "board and, since faults of all its SMs are read, on the H200 (docs/notebook.md). What tinygrad makes of "
        "tensors is copied first (tests/nv/test_codegen.py); the PTX renderer skips the test.",
    ),
    Verdict(
        r"backend/test_dtype_alu TestDTypeALU::test_fp8e5m2",
        "GPU",
        "upstream's",
        "Its CUDA renderer makes an fp8 by the constructor of `__nv_fp8_e5m2`, which saturates (cuda_fp8.hpp: "
        "`__NV_SATFINITE`); the test, whose inputs are drawn at random, expects infinity for 0 + infinity.",
    ),
)


def verdict(suite: str, test: str, device: str) -> Verdict | None:
    """The row of a failure; None for one that nobody has judged."""
    name = f"{suite} {test}"
    return next((v for v in VERDICTS if re.fullmatch(v.test, name) and device.startswith(v.device)), None)


def load(folder: Path = RESULTS) -> list[Report]:
    """Every report, the board's first."""
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted(reports, key=lambda r: (r["device"].startswith("GPU"), r["device"] == PEER, r["renderer"] != "PTX"))


def machine(report: Report) -> str:
    """What the tests ran on, and through which renderer; tinygrad's own CUDA device is named."""
    if not report["device"].startswith("GPU"):
        return f"board, {report['renderer']}"
    through = " through CUDA" if report["device"] == PEER else ""
    return f"{report['machine']['gpu']}{through}, {report['renderer']}"


def failures(report: Report) -> Iterator[tuple[str, str, str]]:
    """(suite, test, reason) of every failure of ours; a suite that did not end is one."""
    if report["device"] == PEER:
        return
    for suite, result in report["suites"].items():
        yield from ((suite, test, why) for test, why in result["failed"].items())
        if "stopped" in result:
            yield suite, "(the suite did not end)", result["stopped"]


def tables(reports: list[Report]) -> str:
    """The computed part of the page."""
    parts = [_counts, _failures, _differences, _skips, _circumstances]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := [*part(reports)]))


def _counts(reports: list[Report]) -> Iterator[str]:
    yield "Passed, failed, skipped, and tests that upstream expects to fail:"
    yield ""
    yield "| suite | " + " | ".join(map(machine, reports)) + " |"
    yield "|---" * (len(reports) + 1) + "|"
    for suite in dict.fromkeys(s for r in reports for s in r["suites"]):
        yield f"| {suite} | " + " | ".join(_cell(r["suites"].get(suite)) for r in reports) + " |"
    yield "| minutes | " + " | ".join(f"{sum(s['minutes'] for s in r['suites'].values()):.1f}" for r in reports) + " |"


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not run"
    c = result["counts"]
    return f"{c['passed']}, {c['failed']}, {c['skipped']}, {c['xfailed']}" + (
        " (stopped)" if "stopped" in result else ""
    )


def _failures(reports: list[Report]) -> Iterator[str]:
    where: dict[tuple[str, str, str], list[str]] = {}
    for report in reports:
        for suite, test, why in failures(report):
            found = verdict(suite, test, report["device"])
            whose = f"{found.whose}. {found.evidence}" if found else f"**not judged**: {why}"
            where.setdefault((suite, test, whose), []).append(machine(report))
    if not where:
        yield "No test fails."
        return
    yield "| failure | where | whose, and why |"
    yield "|---|---|---|"
    merged: dict[tuple[str, str, str], list[str]] = {}
    for (suite, test, whose), machines in where.items():
        merged.setdefault((suite, "; ".join(machines), whose), []).append(test.split("::")[-1])
    for (suite, machines_, whose), tests in merged.items():
        text = whose.replace("|", "\\|").replace("\n", " ")
        yield f"| {suite}: {', '.join(tests)} | {machines_} | {text} |"


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    """What came of a suite's tests, but for those that passed: a report does not name them."""
    return {test: kind for kind in ("failed", "skipped", "xfailed", "unfinished") for test in result.get(kind, {})}


def differences(ours: Report, peer: Report) -> Iterator[tuple[str, str, str, str]]:
    """(suite, test, outcome through NV, outcome through CUDA) wherever these differ in suites that both ran."""
    for suite in ours["suites"].keys() & peer["suites"].keys():
        left, right = (outcomes(report["suites"][suite]) for report in (ours, peer))
        for test in sorted(left.keys() | right.keys()):
            pair = left.get(test, "passed"), right.get(test, "passed")
            if pair[0] != pair[1]:
                yield suite, test, *pair


def _differences(reports: list[Report]) -> Iterator[str]:
    ours = {report["renderer"]: report for report in reports if report["device"] == "GPU"}
    pairs = [(ours[r["renderer"]], r) for r in reports if r["device"] == PEER and r["renderer"] in ours]
    if not pairs:
        return
    rows = sorted((*row, ours["renderer"]) for ours, peer in pairs for row in differences(ours, peer))
    if not rows:
        yield "Through NV and through tinygrad's own CUDA device every test had the same outcome."
        return
    yield "Tests whose outcome through NV is another than through tinygrad's own CUDA device, on the same GPU:"
    yield ""
    yield "| test | renderer | through NV | through CUDA |"
    yield "|---|---|---|---|"
    for suite, test, left, right, renderer in rows:
        yield f"| {suite}: {test.split('::')[-1]} | {renderer} | {left} | {right} |"


def _skips(reports: list[Report]) -> Iterator[str]:
    counts = [Counter(why for s in r["suites"].values() for why in s["skipped"].values()) for r in reports]
    yield "Why tests are skipped, by upstream's own conditions:"
    yield ""
    yield "| reason | " + " | ".join(map(machine, reports)) + " |"
    yield "|---" * (len(reports) + 1) + "|"
    for why in sorted(set().union(*counts)):
        yield f"| {why.replace('|', ' ') or '(none given)'} | " + " | ".join(str(c[why]) for c in counts) + " |"


def _circumstances(reports: list[Report]) -> Iterator[str]:
    yield "| | " + " | ".join(map(machine, reports)) + " |"
    yield "|---" * (len(reports) + 1) + "|"
    rows: dict[str, Callable[[Report], Any]] = {
        "dates": lambda r: ", ".join(sorted({s["date"][:10] for s in r["suites"].values()})),
        "commit of the tests": lambda r: r["commit"][:10],
        "processor": lambda r: f"{r['machine']['cpu']}, {r['machine']['cores']} cores",
        "workers": lambda r: r["jobs"],
        "python, torch": lambda r: f"{r['machine']['python']}, {r['versions'].get('torch', '')}",
        "our sources": lambda r: ", ".join(dict.fromkeys(s["sources"] for s in r["suites"].values())),
    }
    for name, value in rows.items():
        yield f"| {name} | " + " | ".join(str(value(r)) for r in reports) + " |"


def page(text: str, reports: list[Report]) -> str:
    """The page with its computed part made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(reports)}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(), load()))
