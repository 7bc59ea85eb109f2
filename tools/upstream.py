"""tinygrad's own tests on this machine's NV device: `python tools/upstream.py SOURCE --renderer PTX --out FILE`.

The tests come from a checkout of tinygrad (or an archive that `git archive` made of one) and are no part of this
repository. They are laid into a temporary folder, the installed tinygrad package over them, and run there by pytest, a
process per suite, with fresh caches. A test that outruns its time kills its worker (upstream's conftest sees to that);
the next one gets a new worker. What the tests said is written down as it comes, so that a suite that is stopped keeps
what it had.

The module is also the pytest plugin that writes it down.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tegrad.bench import record  # noqa: E402

COMMIT = "a9069c177a9da9cca18593edf55acd2e6073cca6"
"""The newest public commit before 0.14.0: sixteen files of the package differ from the wheel's."""
PARTS = ("conftest.py", "pyproject.toml", "test", "tinygrad")
"""What of a checkout the suites need."""
SUITES = (
    "test_tiny",
    "device/test_hcq",
    "backend/test_jit",
    "unit/test_jit",
    "backend/test_linearizer",
    "backend/test_uops",
    "backend/test_graph",
    "backend/test_dtype_alu",
    "backend/test_dtype",
    "backend/test_randomness",
    "unit/test_gguf",
    "backend/test_ops",
)
"""The suites of a backend, as paths below test/."""
ALONE = ("device/test_hcq",)
"""Suites that ask how long something takes: one worker, so that the GPU has no other work."""
OPS = SUITES[-1]
RENDERERS = ("PTX", "CUDA")
SOURCE = "TEGRAD_UPSTREAM"
"""Environment variable with the checkout (or archive) of tinygrad that the figures are measured with."""
BOARD = "agx-orin-64gb"
"""The board that the figures are measured on."""

PEER = "GPU, tinygrad's CUDA"
"""The device of a report whose tests ran through CUDA, in tinygrad as published."""

RUNNER = "python tools/upstream.py"
COMMAND = f"{RUNNER} ${SOURCE} --board {BOARD} --renderer PTX --suite {OPS} -n 2"
"""What the figures measure, as a command."""

TEST_LIMIT_S = 120
SUITE_LIMIT_S = 1800
REPORTS = "TEGRAD_UPSTREAM_REPORTS"
"""Environment variable with the file that the plugin writes to."""
REASON_CHARACTERS = 600
"""Characters kept of a reason: what an assertion of numpy says about two arrays fits."""


# ---- the plugin, in pytest's process


def pytest_configure(config: Any) -> None:
    """Judge tests in the workers, and write reports down in the process that gathers them."""
    if REPORTS in os.environ:
        worker = hasattr(config, "workerinput")
        config.pluginmanager.register(_judge() if worker else Reports(Path(os.environ[REPORTS])))


class Reports:
    """A line of JSON for each test's phase: its id, phase, outcome and reason."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """One phase of one test. A subtest is part of its test, which fails with it."""
        if hasattr(report, "context"):
            return
        outcome = "xfailed" if hasattr(report, "wasxfail") and report.skipped else report.outcome
        if report.when == "setup" and report.passed:
            outcome = "unfinished"
        line = {"id": report.nodeid, "outcome": outcome, "reason": reason(report.longrepr)}
        self._file.write(json.dumps({**line, "seconds": round(report.duration, 3)}) + "\n")

    def pytest_collectreport(self, report: Any) -> None:
        """A module that cannot be imported, or is skipped as a whole, is one result."""
        if not report.passed:
            line = {"id": report.nodeid, "outcome": report.outcome, "reason": reason(report.longrepr), "seconds": 0}
            self._file.write(json.dumps(line) + "\n")


def _judge() -> Any:
    """The plugin by which a test that passed still fails for what it left behind."""
    import pytest

    class Judge:
        @pytest.hookimpl(wrapper=True)
        def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
            report = yield
            # Also asked after a failure: the log's lines about it are not the next test's.
            if report.when == "call" and (found := aftermath()) and report.passed:
                report.outcome, report.longrepr = "failed", found
            return report

    return Judge()


def aftermath() -> str:
    """What the last test left behind: a device in its error state, error lines in the emulated board's kernel log."""
    device = sys.modules.get("tegrad.nv.device")
    opened = device and device._opened.get("NV")
    if not opened:
        return ""
    lines = _errors(opened)
    if opened.error_state is not None:
        return f"passed, but left the device dead: {opened.error_state}"
    return "passed, but the kernel log says: " + "; ".join(lines) if lines else ""


def _errors(opened: Any) -> list[str]:
    """The error lines of the board's kernel log since they were last asked for."""
    if "TEGRAD_BOARD" not in os.environ:  # the log of a real GPU has its other users' errors too
        return []
    from tegrad.diag.klog import Severity

    return [str(line) for line in _log(opened.iface.kernel).new() if line.severity is Severity.ERROR]


@functools.cache
def _log(kernel: Any) -> Any:
    """The log of this worker's board, as far as it was read."""
    from tegrad.diag.klog import KernelLog

    return KernelLog(kernel)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """A test that leaves the device dead must not take the next ones with it."""
    device = sys.modules.get("tegrad.nv.device")
    opened = device and device._opened.get("NV")
    if REPORTS in os.environ and opened and opened.error_state is not None:
        from tegrad.nv import reopen

        try:
            reopen()
        except Exception as error:  # a new worker gets a device of its own
            print(f"{nodeid}: {error}", file=sys.stderr, flush=True)
            os._exit(1)


def reason(longrepr: Any) -> str:
    """What pytest says about a test that did not pass: for a skip its reason, for a failure its exception."""
    if longrepr is None:
        return ""
    if isinstance(longrepr, tuple):
        return str(longrepr[2]).removeprefix("Skipped: ")[:REASON_CHARACTERS]
    crash = getattr(longrepr, "reprcrash", None)
    return str(longrepr if crash is None else crash.message).strip()[:REASON_CHARACTERS]


# ---- what the runner does


def archive(source: Path, commit: str) -> bytes:
    """The tests as a tar file: `source` itself, or what git makes of a repository's commit."""
    if source.is_file():
        return source.read_bytes()
    done = subprocess.run(["git", "-C", str(source), "archive", commit, *PARTS], capture_output=True, check=False)
    if done.returncode:
        said = done.stderr.decode().strip()
        raise record.RecordError(
            f"git finds no {commit} in {source}: {said}; SOURCE is a whole clone of https://github.com/tinygrad/tinygrad"
        )
    return done.stdout


def lay(tar: bytes, folder: Path) -> str:
    """Unpack the tests with the installed tinygrad package over theirs; the commit that git wrote into the archive."""
    with tarfile.open(fileobj=io.BytesIO(tar)) as packed:
        packed.extractall(folder, filter="data")
        commit = packed.pax_headers.get("comment", "unknown")
    package = importlib.util.find_spec("tinygrad")
    if package is None or not package.submodule_search_locations:
        raise record.RecordError("tinygrad is not installed in this environment.")
    shutil.copytree(package.submodule_search_locations[0], folder / "tinygrad", dirs_exist_ok=True)
    return commit


def run_suite(suite: str, folder: Path, environment: dict[str, str], jobs: int, limit: float) -> dict[str, Any]:
    """The results of one suite, an entry of the report."""
    reports = folder / "reports" / (suite.replace("/", "-") + ".jsonl")
    reports.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem, "-p", "no:cacheprovider"]
    command += ["-n", str(jobs), "--tb=short", f"test/{suite}.py"]
    start = time.monotonic()
    with reports.with_suffix(".log").open("wb") as log:
        child = subprocess.Popen(
            command,
            cwd=folder,
            env={**environment, REPORTS: str(reports)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = child.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    result = {"minutes": round((time.monotonic() - start) / 60, 3), **summary(_lines(reports))}
    if code is None:
        result["stopped"] = f"after {limit:.0f} s"
    elif code not in (0, 1):
        result["stopped"] = f"pytest ended with {code}: " + _tail(reports.with_suffix(".log"))
    return result


def summary(lines: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Counts and reasons of the tests that the phases in `lines` belong to; unfinished is what was begun only."""
    rank = ("unfinished", "passed", "xfailed", "skipped", "failed")
    worst: dict[str, tuple[str, str]] = {}
    slow: dict[str, float] = {}
    for line in lines:
        name, outcome = _short(line["id"]), line["outcome"]
        slow[name] = slow.get(name, 0.0) + line["seconds"]
        if name not in worst or rank.index(outcome) > rank.index(worst[name][0]):
            worst[name] = outcome, line["reason"]
    grouped = {outcome: {n: r for n, (o, r) in sorted(worst.items()) if o == outcome} for outcome in rank}
    return {
        "counts": {outcome: len(names) for outcome, names in grouped.items()},
        **{outcome: names for outcome, names in grouped.items() if outcome != "passed"},
        "slowest": dict(sorted(((n, round(s, 1)) for n, s in slow.items()), key=lambda item: -item[1])[:5]),
    }


def _short(nodeid: str) -> str:
    """`test/backend/test_ops.py::TestOps::test_add` without its file, which the suite names."""
    return nodeid.split("::", 1)[-1]


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(ValueError):  # the last line of a process that was killed
            yield json.loads(line)


def _tail(path: Path) -> str:
    return " ".join(path.read_text(errors="replace").split())[-REASON_CHARACTERS:]


def run(
    source: Path,
    renderer: str,
    suites: tuple[str, ...] = SUITES,
    *,
    commit: str = COMMIT,
    jobs: int = 2,
    board: str = "",
    peer: bool = False,
    slow: bool = False,
    test_limit: int = TEST_LIMIT_S,
    suite_limit: float = SUITE_LIMIT_S,
    out: Path | None = None,
) -> dict[str, Any]:
    """Run suites and report them. `out` is rewritten after each suite, so that it holds what is known so far.

    What `out` holds of other suites with the same tests, renderer and device stays: a suite can be run again alone.
    `board` is the spec of the emulated board; without one the tests run on this machine's GPU, with `peer` through
    CUDA and without us. `slow` adds what upstream runs with RUN_SLOW. `suite_limit` in seconds. RecordError where the
    tests or tinygrad are missing.
    """
    with tempfile.TemporaryDirectory(prefix="tegrad-upstream-") as name:
        folder = Path(name)
        found = lay(archive(source, commit), folder)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH", "")])),
            "DEV": f"{'CUDA' if peer else 'NV'}:{renderer}",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "TEST_TIMEOUT": str(test_limit),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // jobs)),  # torch's, for the references
        }
        environment.pop("TEGRAD_BOARD", None)
        if board:
            environment["TEGRAD_BOARD"] = board
        if peer:
            environment["TEGRAD"] = "0"
        if slow:
            environment["RUN_SLOW"] = "1"
        report: dict[str, Any] = {
            "renderer": renderer,
            "device": f"emulated {board}" if board else PEER if peer else "GPU",
            "commit": found,
            "command": _command(renderer, board, peer=peer, slow=slow),
            "jobs": jobs,
            "machine": record.machine(board),
            "versions": {**record.versions(), **_test_versions()},
            "suites": {},
        }
        done = _known(out, report)
        for suite in suites:
            result = run_suite(suite, folder, environment, 1 if suite in ALONE else jobs, suite_limit)
            done[suite] = {"date": record.now(), "sources": report["versions"]["tegrad_sources"], **result}
            report["suites"] = {name: done[name] for name in SUITES if name in done}
            print(f"{suite:26} {result['minutes']:7.2f} min  {result['counts']}", flush=True)
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
                out.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _command(renderer: str, board: str, *, peer: bool, slow: bool) -> str:
    chosen = [*(["--board", board] if board else []), *["--peer"] * peer, *["--slow"] * slow]
    return " ".join([RUNNER, "tinygrad", *chosen, "--renderer", renderer])


def _known(out: Path | None, report: dict[str, Any]) -> dict[str, Any]:
    """The suites of an earlier run of the same tests on the same device."""
    if out is None or not out.exists():
        return {}
    earlier = json.loads(out.read_text())
    same = all(earlier[key] == report[key] for key in ("renderer", "device", "commit"))
    return dict(earlier["suites"]) if same else {}


def _test_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "pytest", "pytest-xdist", "hypothesis"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> None:
    """The command line; exit 1 when a test failed."""
    parser = argparse.ArgumentParser(prog=RUNNER, description=(__doc__ or "").split("\n")[0])
    parser.add_argument("source", type=Path, help="a git repository of tinygrad, or a tar file that git archive made")
    parser.add_argument("--commit", default=COMMIT, help="of the tests; the one before 0.14.0 unless given")
    parser.add_argument(
        "--renderer", choices=RENDERERS, default=RENDERERS[0], help="what tinygrad writes: PTX, or CUDA C"
    )
    parser.add_argument("--board", default="", help="run on an emulated board, such as agx-orin-64gb")
    parser.add_argument("--peer", action="store_true", help="through tinygrad's own CUDA device, without tegrad")
    parser.add_argument("--slow", action="store_true", help="also the tests that upstream runs with RUN_SLOW=1 only")
    parser.add_argument("--suite", action="append", choices=SUITES, help="only this one; may be repeated")
    parser.add_argument("-n", "--jobs", type=int, default=2, help="workers of a suite; 2 unless given")
    parser.add_argument("--test-limit", type=int, default=TEST_LIMIT_S, metavar="SECONDS", help="for a test; 120")
    parser.add_argument("--suite-limit", type=float, default=SUITE_LIMIT_S, metavar="SECONDS", help="for a suite; 1800")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    a = parser.parse_args()
    if a.board and a.peer:
        parser.error("a board has no CUDA: --peer needs a real GPU")
    try:
        report = run(
            a.source,
            a.renderer,
            tuple(a.suite or SUITES),
            commit=a.commit,
            jobs=a.jobs,
            board=a.board,
            peer=a.peer,
            slow=a.slow,
            test_limit=a.test_limit,
            suite_limit=a.suite_limit,
            out=a.out,
        )
    except record.RecordError as error:
        raise SystemExit(f"{RUNNER}: {error}") from error
    bad = any(suite["counts"]["failed"] or "stopped" in suite for suite in report["suites"].values())
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
