"""Compiles and runs a kernel on the device that models run on, which no look at files and versions can replace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile

from tegrad.diag.finding import Finding
from tegrad.installed import search_path
from tegrad.nv.kernel import BOARD_VARIABLE

LIMIT_S = 120.0
PATIENCE = "HCQDEV_WAIT_TIMEOUT_MS"
"""tinygrad's variable: where a GPU may take longer, so may this."""
BOARD = "agx-orin-64gb"
CODE = """
import json, sys, time
from tegrad.errors import TegradError
from tegrad.nv import compilers
from tegrad.nv.exercise import one_liner
source = '#include <cuda_fp16.h>\\nextern "C" __global__ void twice(__half *a) { *a += *a; }'
marks = [time.perf_counter()]
try:
    for step in (lambda: compilers.compile_cuda(source, "sm_87"), one_liner, one_liner):
        step()
        marks.append(time.perf_counter())
except TegradError as error:
    sys.exit(str(error))
print(json.dumps([after - before for before, after in zip(marks, marks[1:])]))
"""
"""CUDA C with NVIDIA's headers, then tinygrad's one-liner, each compiled anew, and that again; prints the seconds."""


def run(label: str, *, emulated: bool) -> Finding:
    """Run it in a process of its own, with empty caches; `label` names the device."""
    with tempfile.TemporaryDirectory(prefix="tegrad-doctor-") as folder:
        environment = {**os.environ, "XDG_CACHE_HOME": folder, "CACHEDB": os.path.join(folder, "cache.db")}
        limit = _limit(environment.get(PATIENCE, ""))
        environment["PYTHONPATH"] = search_path()
        if emulated:
            environment.setdefault(BOARD_VARIABLE, BOARD)
        try:
            done = subprocess.run(
                [sys.executable, "-c", CODE], env=environment, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", check=False, timeout=limit,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return _failed(label, f"no end within {limit:g} s")
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return _failed(label, said[-1] if "Traceback" in done.stderr else " ".join(said) or f"code {done.returncode}")
    cuda, first, again = json.loads(done.stdout.splitlines()[-1])
    times = f"CUDA C compiled in {cuda:.2f} s, the first sum took {first:.2f} s, the next {1e3 * again:.1f} ms"
    return Finding("kernel", "ok", f"compiled and ran on the {label}: [1, 2, 3] + [4, 5, 6] = [5, 7, 9]; {times}")


def _limit(patience: str) -> float:
    """Seconds that it may take; tinygrad itself refuses what is no number."""
    return max(LIMIT_S, int(patience) / 1000) if patience.isdecimal() else LIMIT_S


def _failed(label: str, why: str) -> Finding:
    return Finding("kernel", "missing", f"a kernel on the {label}: {why}", "`tegrad selftest` tells which part fails")
