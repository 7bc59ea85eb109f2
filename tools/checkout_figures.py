"""The figures that only a checkout can measure: `tegrad bench take ID` in one, for each id of FIGURES.

What they measure lies outside the package: the oracles' records and comparisons, the rules and their mutants, what is
tried at random, the suite itself (here and on emulated aarch64), tinygrad's own tests, and an older commit.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "tools"))

import upstream  # noqa: E402

from tegrad.bench.record import Record, RecordError, Side, make  # noqa: E402

PTX, NVGPU = "python -m tests.ptx.oracle.comparison", "python -m tests.orin.nvgpu_oracle.comparison"
COVERAGE = "python -m tests.ptx.oracle.coverage"
CAMPAIGN = "python tests/conformance/campaign.py"
FUZZ, STEPS, SEED = "python tests/orin/fuzz/run.py", 1_000_000, 1
GGUF_FUZZ, MUTANTS, FIRST = "python tests/llm/gguf_fuzz/gguf_run.py", 6000, 20_261_123
SERVED, FIRST_SERVED = 2400, 20_271_126
"""How many mutants are run or served, and the seed of the first; those of the suite and of the repairs are others."""
REQUEST_FUZZ, REQUESTS, ROUND = "python tests/serve/request_fuzz.py", 10_000, 20_261_125
"""How many requests to a server, and the seed of the first round; the suite has others."""
AARCH64, AARCH64_RUN = ROOT / "results" / "aarch64.json", "make test-aarch64"
RANDOM_MUTANTS, MUTANTS_RUN = ROOT / "results" / "random-mutants.json", "python tools/mutants/run.py"
EQUIVALENT_SHARE = 0.05
"""The most that may be called equivalent, each with a proof: mutants that change nothing that a test could see."""


@functools.cache
def _told(command: str) -> dict[str, Any]:
    """The JSON of the last line that a command prints, once a process. RecordError where there is none."""
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False
    )
    try:
        found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise RecordError(f"`{command}` failed in {ROOT}: what it printed says why") from None
    return found


def _recorded(path: Path, command: str) -> dict[str, Any]:
    """What a run that takes hours has left. RecordError where it is no record."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is no record of a run ({error}); `{command}` makes it") from error
    return found


def _counted(id: str, what: str, unit: str, command: str, value: float, **more: Any) -> Record:
    return make(id, what, unit, Side("tegrad", command, [float(value)]), **more)


# ---- the oracles


def ptx_cases() -> Record:
    """Inputs of instruction forms whose results a GPU recorded, each of one lane, one warp or one block."""
    what = "cases of PTX instruction forms, recorded on an H200 and compared with the engine"
    return _counted("ptx-oracle-cases", what, "cases", PTX, _told(PTX)["cases"])


def ptx_mismatches() -> Record:
    """Cases that differ by more than the ISA's documented errors or the stated tolerance of a sum."""
    what = "recorded cases in which the engine differs beyond documented errors and stated tolerances"
    return _counted("ptx-oracle-mismatches", what, "cases", PTX, _told(PTX)["mismatches"], larger_is_better=False)


def ptx_uncovered() -> Record:
    """Opcodes that tinygrad's or tegrad's kernels use and that no recorded form of the oracle has."""
    what = "instruction forms that kernels use and that nothing recorded on a GPU has"
    missing = len(_told(COVERAGE)["unrecorded"])
    return _counted("ptx-forms-without-oracle", what, "forms", COVERAGE, missing, larger_is_better=False)


def nvgpu_cases() -> Record:
    """Sequences of questions to nvgpu's own code, built for user space, whose answers are recorded."""
    what = "random cases that nvgpu's own code answered, compared with the board"
    return _counted("nvgpu-oracle-cases", what, "cases", NVGPU, _told(NVGPU)["cases"])


def nvgpu_mismatches() -> Record:
    """Cases of which the board answers a step otherwise."""
    what = "recorded cases of nvgpu's own code in which the board answers otherwise"
    return _counted("nvgpu-oracle-mismatches", what, "cases", NVGPU, _told(NVGPU)["mismatches"], larger_is_better=False)


# ---- rules and their mutants


def _campaign() -> dict[str, Any]:
    """What a run of all rules and all mutants counted. RecordError where a rule does not hold."""
    found = _told(CAMPAIGN)
    if found["broken"]:
        raise RecordError(f"the board breaks {', '.join(found['broken'])}: repair it before measuring")
    return found


def rules() -> Record:
    """Rules of the driver's facts that the board keeps."""
    what = "rules of the driver's facts, all kept by the board"
    return _counted("conformance-rules", what, "rules", CAMPAIGN, _campaign()["rules"])


def rule_mutants_killed() -> Record:
    """Percent of the mutants that their rule notices; a rule without a mutant counts as a mutant that lives."""
    found = _campaign()
    what, share = (
        f"mutants of the board that their rule notices, of {found['mutants']}",
        found["killed"] / found["mutants"],
    )
    return _counted(
        "conformance-mutants-killed", what, "percent", CAMPAIGN, 100.0 * share, limit=100.0, limit_note="all of them"
    )


# ---- what is tried at random


def fuzz_steps() -> Record:
    """Steps of a run without a failure. Takes twenty minutes; RecordError where a step fails."""
    what = "random steps of three clients on the emulated board: no crash, no leak, no memory of another"
    command = f"{FUZZ} --steps {STEPS} --seed {SEED}"
    return _counted("board-fuzz-steps", what, "steps", command, _told(command)["steps"])


def gguf_mutants() -> Record:
    """Mutants of GGUF files of which none was found to do what it must not; 0 where one was. Takes some minutes."""
    what = "damaged and hostile GGUF files, all refused in a sentence or run within 10 s and 1 GiB; 0 if one was not"
    command = f"{GGUF_FUZZ} --count {MUTANTS} --seed {FIRST}"
    found = _told(command)
    return _counted("gguf-mutants-first", what, "files", command, 0 if found["found"] else found["mutants"])


def gguf_mutants_served() -> Record:
    """Mutants of three families of which none was found to harm a server; 0 where one was. Takes minutes."""
    what = (
        "damaged and hostile GGUF files of llama, qwen3 and gemma3, listed and all refused in a sentence or served, "
        "within 40 s and 1 GiB; 0 if one was not"
    )
    command = f"{GGUF_FUZZ} --count {SERVED} --seed {FIRST_SERVED} --serve"
    found = _told(command)
    return _counted("gguf-mutants-families", what, "files", command, 0 if found["found"] else found["mutants"])


def requests() -> Record:
    """Requests to a server of which none was found to be answered as it must not be; 0 where one was. Minutes."""
    what = (
        "requests by schemathesis to `tegrad serve` on the board, no 500, no hang, no other's text; 0 if there was one"
    )
    command = f"{REQUEST_FUZZ} --count {REQUESTS} --seed {ROUND}"
    found = _told(command)
    gpu = f"board {upstream.BOARD}"
    return _counted(
        "serve-fuzz-requests", what, "requests", command, 0 if found["found"] else found["requests"], gpu=gpu
    )


# ---- the suite


def minutes() -> Record:
    """Minutes that `make check` and `make test` take, the .venv made before. RecordError: one fails."""
    _made("make .venv/.dev")
    start = time.monotonic()
    _made("make check")
    _made("make test")
    took = (time.monotonic() - start) / 60
    what = "linters and tests of a clean checkout"
    return _counted("ci-minutes", what, "min", "make check && make test", took, larger_is_better=False)


def _made(command: str) -> None:
    done = subprocess.run(command.split(), cwd=ROOT, check=False)
    if done.returncode:
        raise RecordError(f"`{command}` in {ROOT} ended with {done.returncode}")


def mutants_killed(path: Path = RANDOM_MUTANTS) -> Record:
    """Percent of the random mutants that tests notice, out of the record that tools/mutants writes.

    Mutants that are proved equivalent do not count; RecordError where there are more of them than EQUIVALENT_SHARE.
    """
    rows: list[dict[str, Any]] = _recorded(path, MUTANTS_RUN)["mutants"]
    killed = sum(row["outcome"] == "killed" for row in rows)
    equivalent = sum(row["outcome"] != "killed" and "equivalent" in row for row in rows)
    if equivalent > EQUIVALENT_SHARE * len(rows):
        raise RecordError(
            f"{equivalent} of {len(rows)} mutants are called equivalent, at most {EQUIVALENT_SHARE:.0%} may"
        )
    what = (
        f"of {len(rows)} random mutants, drawn before any was run, those that a test notices ({equivalent} equivalent)"
    )
    return _counted("random-mutants-killed", what, "%", MUTANTS_RUN, 100 * killed / (len(rows) - equivalent))


def aarch64(verb: str, *kinds: str, path: Path = AARCH64) -> Record:
    """Tests that "passed" or "failed" on emulated aarch64, the sum of these kinds, out of the last run's record."""
    found = _recorded(path, AARCH64_RUN)
    what = f"tests that {verb} on aarch64: Debian {found['debian']} under qemu-user"
    count, better = sum(found["totals"][kind] for kind in kinds), verb == "passed"
    made = _counted(f"aarch64-tests-{verb}", what, "tests", AARCH64_RUN, count, larger_is_better=better)
    machine = {**found["machine"], "python": found["python"].removeprefix("Python "), "gpu": "", "driver": ""}
    return dataclasses.replace(made, machine=machine, date=found["ended"])


# ---- tinygrad's own tests


@functools.cache
def _ops() -> dict[str, Any]:
    """One run of test_ops on the board by the PTX renderer, two workers, nothing cached."""
    if upstream.SOURCE not in os.environ:
        raise RecordError(f"{upstream.SOURCE} must name a checkout of tinygrad with the commit {upstream.COMMIT}")
    report = upstream.run(Path(os.environ[upstream.SOURCE]), "PTX", (upstream.OPS,), board=upstream.BOARD)
    result: dict[str, Any] = report["suites"][upstream.OPS]
    if "stopped" in result or not result["counts"]["passed"]:
        raise RecordError(f"test_ops did not run to its end: {result.get('stopped', result['failed'])}")
    return result


def _of_ops(id: str, what: str, unit: str, value: float) -> Record:
    what = f"upstream's test_ops on the board, PTX renderer{what}"
    return _counted(id, what, unit, upstream.COMMAND, value, larger_is_better=False, gpu=f"board {upstream.BOARD}")


def ops_minutes() -> Record:
    """Minutes of upstream's test_ops on the board: two workers, PTX renderer, cold caches."""
    what = f", 2 workers, cold: {_ops()['counts']['passed']} tests passed"
    return _of_ops("upstream-test-ops-board-minutes", what, "min", _ops()["minutes"])


def ops_failed() -> Record:
    """Tests of upstream's test_ops that fail on the board."""
    counts = _ops()["counts"]
    what = f": tests that fail, of {sum(counts.values())}"
    return _of_ops("upstream-test-ops-board-failed", what, "tests", counts["failed"])


# ---- what the board's L2 costs

BEFORE = "TEGRAD_BEFORE"
"""Environment variable with a checkout of the commit before the L2, 362fa92."""
ROUNDS, TOKENS = 7, 256
MODES = ("through", "back")
L2_COMMAND = f"tegrad run 'In the beginning' --max-tokens {TOKENS} --temperature 0"


def _environment(tree: Path, mode: str) -> dict[str, str]:
    """What makes a tree's package run, with cached memory and the mode's stores; as it is by default for ''."""
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    environment.pop("TEGRAD_BOARD", None)
    if mode:
        environment |= {"TEGRAD_MEMORY": "cached", "TEGRAD_L2": mode}
    return environment


def _tegrad(tree: Path, environment: dict[str, str], *arguments: str) -> str:
    """The output of one of a tree's commands. RecordError if it fails."""
    command = [sys.executable, "-m", "tegrad", *arguments]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RecordError(f"tegrad {' '.join(arguments)} failed in {tree}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout


@contextmanager
def _board(tree: Path, mode: str) -> Iterator[dict[str, str]]:
    """A board of a tree, and the environment of its users."""
    environment, name = _environment(tree, mode), f"l2cost-{uuid.uuid4().hex[:8]}"
    _tegrad(tree, environment, "board", "start", name, "--chip", upstream.BOARD)
    try:
        yield {**environment, "TEGRAD_BOARD": name}
    finally:
        _tegrad(tree, environment, "board", "stop", name)


def _speed(tree: Path, mode: str) -> float:
    """Tokens per second of the shipped model, kernels and compiled code at hand."""
    with _board(tree, mode) as environment:
        run = ("run", "In the beginning", "--max-tokens", str(TOKENS), "--temperature", "0", "--json")
        _tegrad(tree, environment, *run)
        return float(json.loads(_tegrad(tree, environment, *run).strip().splitlines()[-1])["tok_s"])


def _ops_minutes(tree: Path, mode: str, source: Path) -> float:
    """Minutes of upstream's test_ops."""
    tool = tree / "tools" / "upstream.py"
    runner = [str(tool)] if tool.exists() else ["-m", "tegrad.bench.upstream"]  # where the commit before had it
    with tempfile.TemporaryDirectory(prefix="tegrad-l2cost-") as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, *runner, str(source), "--board", upstream.BOARD,
                   "--renderer", "PTX", "--suite", upstream.OPS, "-n", "2", "--out", str(out)]  # fmt: skip
        subprocess.run(command, cwd=tree, env=_environment(tree, mode), capture_output=True, check=False)
        result = json.loads(out.read_text())["suites"][upstream.OPS] if out.exists() else {}
    if not result or "stopped" in result or result["counts"]["failed"]:
        raise RecordError(f"test_ops failed in {tree}, stores {mode or 'of before'}: {str(result)[:500]}")
    return float(result["minutes"])


def l2_cost() -> Record:
    """Percent by which the model is slower, or test_ops takes longer, than before the L2: the worst of four.

    Both trees run the same work in turn, the old one as it was, the new one with cached memory and either stores.
    """
    for variable, what in ((BEFORE, "the commit before the L2, 362fa92"), (upstream.SOURCE, "tinygrad")):
        if variable not in os.environ:
            raise RecordError(f"{variable} must name a checkout of {what}")
    before, source = (Path(os.environ[variable]).absolute() for variable in (BEFORE, upstream.SOURCE))
    ways = {"": before, **dict.fromkeys(MODES, ROOT)}
    speeds: dict[str, list[float]] = {mode: [] for mode in ways}
    for _ in range(ROUNDS):
        for mode, tree in ways.items():
            speeds[mode].append(_speed(tree, mode))
            print(f"stores {mode or 'of before'}: {speeds[mode][-1]:.1f} tok/s", flush=True)
    minutes = {}
    for mode, tree in ways.items():
        minutes[mode] = _ops_minutes(tree, mode, source)
        print(f"stores {mode or 'of before'}: test_ops in {minutes[mode]:.2f} min", flush=True)
    slower = {mode: 100 * (1 - median(speeds[mode]) / median(speeds[""])) for mode in MODES}
    longer = {mode: 100 * (minutes[mode] / minutes[""] - 1) for mode in MODES}
    told = "; ".join(
        f"stores {mode}: the shipped model {slower[mode]:.1f}% slower ({median(speeds['']):.1f} and "
        f"{median(speeds[mode]):.1f} tok/s, medians of {ROUNDS}), test_ops {longer[mode]:.1f}% longer "
        f"({minutes['']:.2f} and {minutes[mode]:.2f} min)"
        for mode in MODES
    )
    what = f"cost of the board's L2 against the commit before it, the worst of four; cached memory, {told}"
    worst = max(*slower.values(), *longer.values())
    command, gpu = f"{L2_COMMAND}; {upstream.COMMAND}", f"board {upstream.BOARD}"
    return _counted("board-l2-cost-percent", what, "percent", command, worst, larger_is_better=False, gpu=gpu)


FIGURES: Final[Mapping[str, Callable[[], Record]]] = {
    "ptx-oracle-cases": ptx_cases,
    "ptx-oracle-mismatches": ptx_mismatches,
    "ptx-forms-without-oracle": ptx_uncovered,
    "nvgpu-oracle-cases": nvgpu_cases,
    "nvgpu-oracle-mismatches": nvgpu_mismatches,
    "aarch64-tests-passed": lambda: aarch64("passed", "passed"),
    "aarch64-tests-failed": lambda: aarch64("failed", "failed", "killed"),
    "conformance-rules": rules,
    "conformance-mutants-killed": rule_mutants_killed,
    "ci-minutes": minutes,
    "random-mutants-killed": mutants_killed,
    "board-fuzz-steps": fuzz_steps,
    "gguf-mutants-first": gguf_mutants,
    "gguf-mutants-families": gguf_mutants_served,
    "serve-fuzz-requests": requests,
    "upstream-test-ops-board-minutes": ops_minutes,
    "board-l2-cost-percent": l2_cost,
    "upstream-test-ops-board-failed": ops_failed,
}
