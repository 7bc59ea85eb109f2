"""What the board's L2 costs: how much slower the board is than at the commit before it had one.

Both trees run the same work in turn, the old one as it was, the new one with cached memory and either kind of stores:
the shipped model, and upstream's test_ops. The figure is the largest of the four costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from tegrad.bench import upstream
from tegrad.bench.oracle import ROOT
from tegrad.bench.record import Record, RecordError, Side, make

BEFORE = "TEGRAD_BEFORE"
"""Environment variable with a checkout of the commit before the L2, 362fa92."""
ROUNDS, TOKENS = 7, 256
MODES = ("through", "back")
COMMAND = f"tegrad run 'In the beginning' --max-tokens {TOKENS} --temperature 0"
ID = "board-l2-cost-percent"


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


def _minutes(tree: Path, mode: str, source: Path) -> float:
    """Minutes of upstream's test_ops."""
    with tempfile.TemporaryDirectory(prefix="tegrad-l2cost-") as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "tegrad.bench.upstream", str(source), "--board", upstream.BOARD,
                   "--renderer", "PTX", "--suite", upstream.OPS, "-n", "2", "--out", str(out)]  # fmt: skip
        subprocess.run(command, cwd=tree, env=_environment(tree, mode), capture_output=True, check=False)
        result = json.loads(out.read_text())["suites"][upstream.OPS] if out.exists() else {}
    if not result or "stopped" in result or result["counts"]["failed"]:
        raise RecordError(f"test_ops failed in {tree}, stores {mode or 'of before'}: {str(result)[:500]}")
    return float(result["minutes"])


def _paths() -> tuple[Path, Path]:
    """The checkouts of the commit before, and of tinygrad."""
    for variable, what in ((BEFORE, "the commit before the L2, 362fa92"), (upstream.SOURCE, "tinygrad")):
        if variable not in os.environ:
            raise RecordError(f"{variable} must name a checkout of {what}")
    return Path(os.environ[BEFORE]).absolute(), Path(os.environ[upstream.SOURCE]).absolute()


def cost() -> Record:
    """Percent by which the model is slower, or test_ops takes longer, than before the L2: the worst of four."""
    before, source = _paths()
    ways = {"": before, **dict.fromkeys(MODES, ROOT)}
    speeds: dict[str, list[float]] = {mode: [] for mode in ways}
    for _ in range(ROUNDS):
        for mode, tree in ways.items():
            speeds[mode].append(_speed(tree, mode))
            print(f"stores {mode or 'of before'}: {speeds[mode][-1]:.1f} tok/s", flush=True)
    minutes = {}
    for mode, tree in ways.items():
        minutes[mode] = _minutes(tree, mode, source)
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
    side = Side("tegrad", f"{COMMAND}; {upstream.COMMAND}", [max(*slower.values(), *longer.values())])
    return make(ID, what, "percent", side, larger_is_better=False, gpu=f"board {upstream.BOARD}")
