"""The peers of the decode figures on the same model file, at their best settings: llama.cpp, and tinygrad 0.13.

llama.cpp's programs are `llama-bench`, `llama-batched-bench` and `llama-completion`, built from the sources in PyPI's
llama-cpp-python (docs/benchmarks.md tells how). TEGRAD_LLAMA names their folder.

tinygrad 0.13 decodes by its own `tinygrad.llm` through CUDA, in a process that finds it there and leaves tegrad off.
TEGRAD_TINYGRAD013 names a folder with that wheel's contents (`python -m zipfile -e tinygrad-0.13.0-py3-none-any.whl
FOLDER`).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from tegrad.bench.record import RecordError, Side, output

LLAMA_FOLDER = "TEGRAD_LLAMA"
"""Environment variable with the folder of llama.cpp's programs and libraries."""
LLAMA = "llama.cpp"
CUBLAS = "force-cublas"
"""A folder there, with libraries that were built with GGML_CUDA_FORCE_CUBLAS."""
REPETITIONS = 5
CONTEXT = 4096
"""Positions for the first token: by itself it takes all that the model was trained for, and clears them."""
LLAMA_TIMEOUT_S = 300


def program(name: str) -> Path:
    """The path of one of llama.cpp's programs, in the folder that is named, or on the PATH; RecordError elsewhere."""
    folder = os.environ.get(LLAMA_FOLDER)
    if not folder and (found := shutil.which(name)):
        return Path(found)
    if not folder:
        raise RecordError(
            f"{name} is not on the PATH, and {LLAMA_FOLDER} names no folder: build it as docs/benchmarks.md says"
        )
    path = Path(folder) / name
    if not path.is_file():
        raise RecordError(f"{path} is missing: build it as docs/benchmarks.md says")
    return path


def run(name: str, arguments: Sequence[str], build: str = "") -> str:
    """What a program prints, with the libraries of another `build` first; RecordError with its last words where it
    fails, or where it takes too long."""
    path = program(name)
    shown = f"{name} {shlex.join(arguments)}"
    return output([str(path), *arguments], shown, LLAMA_TIMEOUT_S, env=environment(path, build))


def environment(path: Path, build: str = "") -> dict[str, str]:
    """Ours, with the libraries beside a program found, those of another `build` first."""
    folders = [str(path.parent / build), str(path.parent)] if build else [str(path.parent)]
    return {**os.environ, "LD_LIBRARY_PATH": ":".join([*folders, os.environ.get("LD_LIBRARY_PATH", "")])}


def decode(model: Path, *, depth: int = 0, tokens: int = 128) -> Side:
    """Tokens per second of decoding one sequence after `depth` tokens, with flash attention or without."""
    fixed = ["-ngl", "99", "-p", "0", "-n", str(tokens), "-d", str(depth)]
    return _best(model, [[*fixed, "-fa", fa] for fa in ("1", "0")])


def prefill(model: Path, tokens: int = 512) -> Side:
    """Tokens per second of a prompt, at the better batch; by cuBLAS too, where that build is there."""
    fixed = ["-ngl", "99", "-p", str(tokens), "-n", "0"]
    batches = sorted({tokens, max(tokens, 2048)})
    builds = ("", CUBLAS) if (program("llama-bench").parent / CUBLAS).is_dir() else ("",)
    return _best(model, [[*fixed, "-fa", "1", "-b", str(b), "-ub", str(b)] for b in batches], builds)


def batch(model: Path, sequences: int, tokens: int = 128, *, prompt: int = 8, kind: str = "f16") -> Side:
    """Tokens per second of all of several sequences together, after a prompt each; `kind` is the cache's."""
    context = sequences * (tokens + prompt + 8)
    arguments = ["-m", str(model), "-ngl", "99", "-fa", "on", "-c", str(context), "-b", "2048", "-ub", "2048"]
    arguments += ["-npp", str(prompt), "-ntg", str(tokens), "-npl", str(sequences), "--output-format", "jsonl"]
    arguments += ["-ctk", kind, "-ctv", kind] if kind != "f16" else []
    speeds = [_batched(run("llama-batched-bench", arguments)) for _ in range(3)]
    return Side(LLAMA, shown("llama-batched-bench", arguments, model), speeds)


def _batched(text: str) -> float:
    rows = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    if not rows:
        raise RecordError(f"llama-batched-bench printed no row: {text.strip()[-200:]!r}")
    return float(rows[-1]["speed_tg"])


def first_token(model: Path, prompt: str) -> Side:
    """Seconds from the start of the process to its end after one token, the model's file in the page cache."""
    arguments = ["-m", str(model), "-ngl", "99", "-fa", "on", "-c", str(CONTEXT), "--no-warmup"]
    arguments += ["-no-cnv", "-n", "1", "--temp", "0", "-p", prompt]
    samples = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        run("llama-completion", arguments)
        samples.append(time.perf_counter() - start)
    return Side(LLAMA, shown("llama-completion", arguments, model), samples)


def _best(model: Path, settings: Iterable[Sequence[str]], builds: Sequence[str] = ("",)) -> Side:
    """The fastest of several settings and builds of llama-bench, by the median of its repetitions."""
    sides = []
    for arguments, build in product(settings, builds):
        full = ["-m", str(model), *arguments, "-r", str(REPETITIONS), "-o", "json"]
        samples = tests(run("llama-bench", full, build))[-1]["samples_ts"]
        text = shown("llama-bench", full, model)
        sides.append(Side(LLAMA, f"LD_LIBRARY_PATH={build} {text}" if build else text, samples))
    return max(sides, key=lambda side: side.median)


def tests(text: str) -> list[dict[str, Any]]:
    """The tests in llama-bench's JSON, one at least, each with its speeds; RecordError for anything else."""
    try:
        found = [{**test, "samples_ts": list(map(float, test["samples_ts"]))} for test in json.loads(text)]
    except (ValueError, LookupError, TypeError) as error:
        raise RecordError(f"llama-bench printed no result ({error}): {text.strip()[-200:]!r}") from error
    if not found:
        raise RecordError("llama-bench printed no result: its list is empty")
    return found


def shown(name: str, arguments: Sequence[str], model: Path) -> str:
    """The command without the folders of this machine."""
    return shlex.join([name, *(model.name if argument == str(model) else argument for argument in arguments)])


# ---- tinygrad 0.13


TINYGRAD_FOLDER: Final = "TEGRAD_TINYGRAD013"
TINYGRAD: Final = "tinygrad 0.13"
TINYGRAD_TOKENS: Final = 64
WARM_UP_TOKENS: Final = 8
"""Tokens that are not counted: its steps are compiled and recorded during the first few."""
TINYGRAD_TIMEOUT_S: Final = 240
TINYGRAD_FORMS: Final = ("0", "1")
"""REALIZE: weights stay packed, or are expanded to halves once."""
_SPEED: Final = re.compile(r"([\d.]+) tok/s")


def tinygrad_folder() -> Path | None:
    """Where tinygrad 0.13 lies, if anybody said; RecordError where it does not."""
    named = os.environ.get(TINYGRAD_FOLDER)
    if not named:
        return None
    path = Path(named)
    if not (path / "tinygrad" / "llm" / "cli.py").is_file():
        raise RecordError(
            f"{TINYGRAD_FOLDER} is {path}, which holds no tinygrad/llm: unpack tinygrad 0.13's wheel there"
        )
    return path


def tinygrad_decode(model: Path, device: str = "CUDA") -> Side | None:
    """Tokens per second of each token after the first few, in the faster form; None where no folder is named."""
    if (where := tinygrad_folder()) is None:
        return None
    sides = [_run_tinygrad(model, where, device, form) for form in TINYGRAD_FORMS]
    return max(sides, key=lambda side: side.median)


def _run_tinygrad(model: Path, where: Path, device: str, form: str) -> Side:
    count = TINYGRAD_TOKENS + WARM_UP_TOKENS
    arguments = ["-m", "tinygrad.llm", "--model", str(model.absolute()), "--benchmark", str(count)]
    ours = ("TEGRAD_", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = {**kept, "PYTHONPATH": str(where), "DEV": device, "REALIZE": form, "CACHEDB": str(where / "cache.db")}
    environment["TEGRAD"] = "0"  # an installed tegrad would change this tinygrad too
    said = output(
        [sys.executable, *arguments], f"{TINYGRAD} (REALIZE={form})", TINYGRAD_TIMEOUT_S, env=environment, cwd=where
    )
    shown = shlex.join(["python", *arguments]).replace(str(model.absolute()), model.name)
    return Side(TINYGRAD, f"DEV={device} REALIZE={form} {shown}", tinygrad_speeds(said))


def tinygrad_speeds(text: str) -> list[float]:
    """Tokens per second of each token after the first few, as `--benchmark` prints them."""
    found = [float(speed) for speed in _SPEED.findall(text)][WARM_UP_TOKENS:]
    if not found:
        raise RecordError(f"{TINYGRAD} printed no speeds: {text.strip()[-200:]!r}")
    return found
