"""The peers on the same model file: llama.cpp, for its speed and for its logits, and tinygrad 0.13 for its speed.

Speed is measured at a peer's best settings. llama.cpp's programs are `llama-bench`, `llama-batched-bench` and
`llama-completion`, built from the sources in PyPI's llama-cpp-python (docs/benchmarks.md tells how). TEGRAD_LLAMA names
their folder.

Logits are the library's: on the CPU that of the package `cyllama`, on a GPU that of `llama-cpp-python` built with
GGML_CUDA. Neither is imported before a model is opened.

tinygrad 0.13 decodes by its own `tinygrad.llm` through CUDA, in a process that finds it there and leaves tegrad off.
TEGRAD_TINYGRAD013 names a folder with that wheel's contents (`python -m zipfile -e tinygrad-0.13.0-py3-none-any.whl
FOLDER`).
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

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
    batches = (tokens, 2048) if tokens < 2048 else (2048, 4096)
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


# ---- llama.cpp's logits


F32, F16, Q8_0 = 0, 1, 8
"""ggml's type numbers."""
FLASH_ATTENTION: Final = 1
"""LLAMA_FLASH_ATTN_TYPE_ENABLED."""


class CpuLlama:
    """A model in llama.cpp on the CPU, closed at the end of a `with`. ImportError where cyllama is missing.

    It gives logits of every position, without flash attention unless packed values need it.
    """

    def __init__(self, path: Path, context: int = 128, keys: int = F32, values: int = F32, threads: int = 1) -> None:
        from cyllama.llama import llama_cpp as lib

        class Model(lib.LlamaModel):  # type: ignore[misc]
            """cyllama 0.2.18 reads its model's `n_vocab` for the size of the logits, and does not define it."""

            @property
            def n_vocab(self) -> int:
                return int(self.get_vocab().n_vocab)

        lib.disable_logging()
        params = lib.LlamaModelParams()
        params.use_mmap = False
        self._lib = lib
        self.model = Model(path_model=str(path), params=params, verbose=False)
        self.vocab = self.model.get_vocab()
        self._params = lib.LlamaContextParams()
        self._params.n_ctx = self._params.n_batch = self._params.n_ubatch = context
        self._params.type_k, self._params.type_v = keys, values
        self._params.flash_attn_type = FLASH_ATTENTION if values == Q8_0 else 0
        # They spin while they wait for another: one, unless the machine is ours alone.
        self._params.n_threads = self._params.n_threads_batch = threads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()

    def logits(self, tokens: Sequence[int], first: int = 0) -> np.ndarray:
        """Logits (len(tokens), vocab) after each token, the first of which is at the position `first`."""
        context = self._lib.LlamaContext(model=self.model, params=self._params, verbose=False)
        try:
            batch = self._lib.LlamaBatch(n_tokens=len(tokens), embd=0, n_seq_max=1)
            batch.set_batch(list(tokens), first, True)
            context.decode(batch)
            logits = np.empty((len(tokens), self.model.n_vocab), np.float32)
            for at in range(len(tokens)):  # one after the other: each is a list of Python's numbers
                logits[at] = context.get_logits_ith(at)
            return logits
        finally:
            context.close()


class GpuLlama:
    """A model in llama.cpp, all of it on the GPU, freed at the end of a `with`: logits of every position.

    With 1 `at_once` it takes a text by steps, with more by prompts, which other kernels compute. It rounds a product's
    activations by 32 values, where the CPU's build rounds by 256 for the K formats. RecordError if the library was
    built without CUDA; ImportError where llama-cpp-python is missing, RuntimeError where its library is.
    """

    def __init__(self, path: Path, context: int, keys: int, values: int, at_once: int) -> None:
        from llama_cpp import llama_cpp as lib

        _silence(lib)
        lib.llama_backend_init()
        if not lib.llama_supports_gpu_offload():
            raise RecordError(
                "llama-cpp-python is built without CUDA: CMAKE_ARGS=-DGGML_CUDA=on pip install llama-cpp-python"
            )
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 999
        self._lib = lib
        self.model: Any = lib.llama_model_load_from_file(str(path).encode(), params)
        if not self.model:
            raise RecordError(f"llama.cpp cannot load {path}")
        self._size = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)))
        self._params = lib.llama_context_default_params()
        self._params.n_ctx = self._params.n_batch = context
        self._params.n_ubatch = at_once
        self._params.type_k, self._params.type_v, self._params.flash_attn_type = keys, values, FLASH_ATTENTION

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.llama_model_free(self.model)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits (len(tokens), vocab) after each token; RecordError if they do not fit."""
        lib = self._lib
        context = lib.llama_init_from_model(self.model, self._params)
        if not context:
            raise RecordError("llama.cpp has no context of that size on this GPU")
        batch = lib.llama_batch_init(len(tokens), 0, 1)
        try:
            batch.n_tokens = len(tokens)
            for at, token in enumerate(tokens):
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, at, 1, 0
                batch.logits[at] = True
            if error := lib.llama_decode(context, batch):
                raise RecordError(f"llama.cpp cannot decode: llama_decode returned {error}")
            return np.ctypeslib.as_array(lib.llama_get_logits(context), (len(tokens), self._size)).copy()
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)


@cache
def _silence(lib: Any) -> Any:
    """Give the library, which logs to stderr, something that does not; the cache keeps it for as long as it may."""
    silent = lib.llama_log_callback(lambda level, text, user_data: None)
    lib.llama_log_set(silent, ctypes.c_void_p(0))
    return silent


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
