"""llama.cpp's llama-bench on the same file, at its best settings: found, run alone, and what it printed."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tegrad.conformance.process import bound
from tegrad.errors import TegradError

NAME = "llama-bench"
SETTINGS = ("-ngl", "99", "-fa", "1")
"""All layers on the GPU and flash attention, which are its best; its batches are those of its defaults."""
REPETITIONS = 5
TIMEOUT_S = 900
HOW_TO_GET = (
    "build it from llama.cpp's sources (cmake -B build -DGGML_CUDA=ON && cmake --build build --target llama-bench), "
    "then name it with --llama-bench PATH or put it on the PATH"
)


class PeerError(TegradError):
    """llama-bench is not to be had, does not end, fails or prints something else than its JSON."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What llama-bench printed: tokens per second, medians of its repetitions, and what it was."""

    decode: float
    prefill: float
    flags: str
    backend: str
    build: str


def find(asked: str) -> str:
    """The program: the one that was asked for, else the one on the PATH. PeerError says how to get it."""
    if found := asked or shutil.which(NAME):
        return found
    raise PeerError(f"no {NAME} on the PATH: {HOW_TO_GET}")


def measure(program: str, model: Path, prompt: int, tokens: int) -> Peer:
    """Run it once for a prompt and for decoding; nothing else may use the GPU meanwhile. PeerError."""
    flags = [*SETTINGS, "-p", str(prompt), "-n", str(tokens), "-r", str(REPETITIONS)]
    libraries = os.pathsep.join(filter(None, (str(Path(program).parent), os.environ.get("LD_LIBRARY_PATH"))))
    try:
        done = subprocess.run(
            [program, "-m", str(model), *flags, "-o", "json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=TIMEOUT_S,
            env={**os.environ, "LD_LIBRARY_PATH": libraries},
            preexec_fn=bound(),
        )
    except subprocess.TimeoutExpired:
        raise PeerError(f"{NAME} did not end within {TIMEOUT_S} s: try it by itself") from None
    except OSError as error:
        raise PeerError(f"{program} does not start: {error.strerror}: {HOW_TO_GET}") from None
    said = done.stderr.decode(errors="replace").strip()[-300:]
    if done.returncode:
        raise PeerError(f"{NAME} {shlex.join(flags)} ended with {done.returncode}: {said}")
    return parsed(done.stdout.decode(errors="replace"), prompt, tokens, shlex.join(flags))


def parsed(text: str, prompt: int, tokens: int, flags: str) -> Peer:
    """Its JSON, a list with an object for each test, which tells n_prompt, n_gen and samples_ts. PeerError."""
    try:
        tests: list[dict[str, Any]] = json.loads(text)
        first = tests[0]
        return Peer(
            _median(tests, 0, tokens),
            _median(tests, prompt, 0),
            flags,
            str(first.get("backends", "?")),
            f"{first.get('build_commit', '?')} ({first.get('build_number', '?')})",
        )
    except (ValueError, LookupError, TypeError, AttributeError, StopIteration, statistics.StatisticsError) as error:
        raise PeerError(f"{NAME} printed no result ({type(error).__name__}): {text.strip()[-200:]!r}") from None


def _median(tests: list[dict[str, Any]], prompt: int, tokens: int) -> float:
    test = next(one for one in tests if (one["n_prompt"], one["n_gen"]) == (prompt, tokens))
    return statistics.median(float(speed) for speed in test["samples_ts"])
