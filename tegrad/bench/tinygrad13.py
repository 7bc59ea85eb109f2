"""The second peer: tinygrad 0.13's own `tinygrad.llm` through CUDA, in an environment of its own.

TEGRAD_TINYGRAD013 names a folder with that wheel's contents (`python -m zipfile -e tinygrad-0.13.0-py3-none-any.whl
FOLDER`). It runs in a process that finds tinygrad there and leaves tegrad off.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Final

from tegrad.bench.record import RecordError, Side

FOLDER: Final = "TEGRAD_TINYGRAD013"
NAME: Final = "tinygrad 0.13"
TOKENS: Final = 64
WARM_UP_TOKENS: Final = 8
"""Tokens that are not counted: its steps are compiled and recorded during the first few."""
TIMEOUT_S: Final = 240
FORMS: Final = ("0", "1")
"""REALIZE: weights stay packed, or are expanded to halves once."""
_SPEED: Final = re.compile(r"([\d.]+) tok/s")


def folder() -> Path | None:
    """Where tinygrad 0.13 lies, if anybody said; RecordError where it does not."""
    named = os.environ.get(FOLDER)
    if not named:
        return None
    path = Path(named)
    if not (path / "tinygrad" / "llm" / "cli.py").is_file():
        raise RecordError(f"{FOLDER} is {path}, which holds no tinygrad/llm: unpack tinygrad 0.13's wheel there")
    return path


def decode(model: Path, device: str = "CUDA") -> Side | None:
    """Tokens per second of each token after the first few, in the faster form; None where FOLDER is not set."""
    if (where := folder()) is None:
        return None
    sides = [_run(model, where, device, form) for form in FORMS]
    return max(sides, key=lambda side: side.median)


def _run(model: Path, where: Path, device: str, form: str) -> Side:
    count = TOKENS + WARM_UP_TOKENS
    arguments = ["-m", "tinygrad.llm", "--model", str(model.absolute()), "--benchmark", str(count)]
    ours = ("TEGRAD_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = {**kept, "PYTHONPATH": str(where), "DEV": device, "REALIZE": form, "CACHEDB": str(where / "cache.db")}
    environment["TEGRAD"] = "0"  # an installed tegrad would change this tinygrad too
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
        env=environment,
        cwd=where,
    )
    if done.returncode:
        raise RecordError(f"{NAME} (REALIZE={form}) ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    shown = shlex.join(["python", *arguments]).replace(str(model.absolute()), model.name)
    return Side(NAME, f"DEV={device} REALIZE={form} {shown}", speeds(done.stdout))


def speeds(text: str) -> list[float]:
    """Tokens per second of each token after the first few, as `--benchmark` prints them."""
    found = [float(speed) for speed in _SPEED.findall(text)][WARM_UP_TOKENS:]
    if not found:
        raise RecordError(f"{NAME} printed no speeds: {text.strip()[-200:]!r}")
    return found
