"""Every command line of the documents runs on the emulated board: here or in the test that is named; or why not."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from page_lines import ROOT, commands

sys.path.extend(str(ROOT / "tests" / folder) for folder in ("hub", "llm", "serve"))
from hub_server import Repository, Server
from processes import marked, running, until
from tiny_llama import LARGE_EPS, TYPE, Shape, letters, rewritten, write

from tegrad import models
from tegrad.kept import cache_folder
from tegrad.orin.board import BoardError
from tegrad.orin.client import board_stop

BOARD = f"pages-{os.getpid()}"
GIVEN = {
    r"\bshared\b": BOARD,
    r"\bCMD\b": "python program.py",
    r"\bFILE$": "calls.json",
    r"\bID\b": "ptx-forms-without-oracle",
    r"(?<=--depth )2000|(?<=-n )200": "20",
    r"\btegrad (?:run|chat)\b(?!.*(?: -n | --max-tokens | --schema )).*": r"\g<0> --max-tokens 8",
    r"(?<=trace diff ).*": "calls.json calls.json",
    r"(?<=-- )\./\w+|\bmy_client\.py": "./program_of_its_own",
    r"\bmy_program\.py": "program.py",
    r"(?<=^tegrad serve )(model\.gguf|SmolLM2|Meta-Llama)\S*": "Llama-3.2-1B-Instruct",
    r"\bkey\.txt": "keys",
    r"^tegrad serve .*": r"\g<0> --port 0",
}
"""What a reader puts in its place: names of boards, files and figures, programs, a port that is free.

What only costs time is less here: tokens, and one model is served for all."""
ELSEWHERE = {
    "tegrad bench figures": "bench/test_figures.py::test_figures_measures_again_what_needs_no_gpu_and_nothing_else",
    "tegrad bench model model.gguf": "bench/test_model_bench.py::test_a_model_is_measured_beside_llama_bench",
    "tegrad bench model model.gguf --vs llama.cpp -o json":
        "bench/test_model_bench.py::test_a_model_is_measured_beside_llama_bench",
    "tegrad conformance": "cli/test_conformance.py::test_a_section_is_judged_and_reported",
    "tegrad eval": "cli/test_eval.py::test_our_kernels_measure_what_the_reference_does",
    "tegrad serve MODEL --context 32768": "serve/test_server.py::server",
    "tegrad serve tegrad/models/small.gguf":
        "serve/test_page_board.py::test_the_program_asks_for_its_key_and_its_end_is_told",
    "tegrad selftest": "diag/test_selftest_board.py::test_with_all_later_stages_still_report_and_the_report_says_why",
    "tegrad selftest --all":
        "diag/test_selftest_board.py::test_with_all_later_stages_still_report_and_the_report_says_why",
}  # fmt: skip
"""Lines that take longer than they tell: a test runs them smaller."""
GPU = "measures a GPU, beside a peer of CUDA's"
NOT_IN_CI = {
    "tegrad bench tinygrad": GPU,
    "tegrad bench kernels": GPU,
    "tegrad bench kernels --static": "compiles the kernels of every plan, for minutes",
    "tegrad conformance --hazardous": "provokes errors, which tests/conformance/test_rules.py has rule by rule",
    "tegrad bench serve": GPU,
    "tegrad bench take launch-median-nv-vs-cuda": GPU,
    "tegrad bench take random-mutants-killed": "counts what a run of mutants left, which takes hours",
    "tegrad selftest --model FILE.gguf": "takes minutes; tests/diag/test_selftest_models.py has the stage",
    "tegrad serve model.gguf --replicas 2": "Ray is installed for the long tests alone",
    "tegrad serve NAME --replicas": "Ray, on several machines",
}
"""What begins a line that does not run here, and why."""
LAST = ("tegrad conformance", "tegrad models rm", "tegrad board stop")
"""What comes last: rules that make the board's log tell of errors, and what ends things."""
CODES = {"tegrad klog --watch": 130}
"""Exit codes that are right beside 0."""
LIMIT_S = 1800.0
"""For all, on a machine that others use, too."""
HUB = {
    "bartowski/Llama-3.2-1B-Instruct-GGUF": ("Q4_K_M", "Q6_K"),
    "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF": ("Q4_K_M",),
    "bartowski/SmolLM2-135M-Instruct-GGUF": ("Q8_0",),
    "Qwen/Qwen3-0.6B-GGUF": ("Q8_0",),
}
"""The repositories of the pages, each file of which is the shipped model here."""
TENSORS = "from tinygrad import Tensor\nprint((Tensor([1, 2, 3], device='NV') + 1).tolist())\n"
ITS_OWN = f"""#!{sys.executable}
import os
print(os.open("/dev/nvhost-ctrl-gpu", os.O_RDWR))
"""
SCHEMA = {"type": "object", "properties": {"name": {"enum": ["Ada", "Eve"]}}, "required": ["name"]}
TOLD = {"model_type": "llama 1B Q6_K", "backends": "CUDA", "n_prompt": 0, "n_gen": 128, "n_depth": 0}
ROW = TOLD | {"samples_ts": [9, 9.1]}
STRACE = 'openat(AT_FDCWD, "/dev/nvmap", O_RDWR) = 3</dev/nvmap>\nclose(3</dev/nvmap>) = 0\n'


def given(line: str) -> str:
    """A line with what its reader puts in."""
    for pattern, value in GIVEN.items():
        line = re.sub(pattern, value, line)
    return line


def place(line: str) -> int:
    """Where a line comes: the board's start, all others in the pages' order, and LAST."""
    found = [at for at, start in enumerate(LAST, 1) if line.startswith(start)]
    return found[0] if found else -line.startswith("tegrad board start")


LINES = sorted({line for _, line in commands()})


def not_in_ci(line: str) -> bool:
    return any(re.match(rf"{re.escape(start)}(?!\S)", line) for start in NOT_IN_CI)


RUN = [line for line in dict.fromkeys(line for _, line in commands()) if line not in ELSEWHERE and not not_in_ci(line)]


@pytest.mark.parametrize(("line", "test"), ELSEWHERE.items(), ids=lambda value: str(value).rpartition("::")[2])
def test_a_line_that_another_test_runs_is_there(line: str, test: str) -> None:
    """The test's file has the words of the command, and the test itself the options."""
    assert line in LINES
    file, _, name = test.partition("::")
    source = (ROOT / "tests" / file).read_text()
    (found,) = (ast.get_source_segment(source, node) or "" for node in ast.walk(ast.parse(source))
                if isinstance(node, ast.FunctionDef) and node.name == name)  # fmt: skip
    for word in shlex.split(line)[1:]:
        if re.fullmatch(r"[a-z]+", word):
            assert re.search(rf"\b{word}\b", source), word
        elif word.startswith("-"):
            assert f'"{word}"' in found, word


def test_every_entry_is_for_a_line() -> None:
    assert [pattern for pattern in GIVEN if not any(re.search(pattern, line) for line in RUN)] == []
    assert [start for start in NOT_IN_CI if not any(line.startswith(start) for line in LINES)] == []
    assert len(RUN) > 60


def prepared(folder: Path) -> None:
    """The files that lines of the pages name."""
    shape = Shape(arch="qwen3", dim=64, ffn=64, heads=2, kv_heads=1, layers=1, eps=LARGE_EPS)
    plain = write(folder / "plain.gguf", shape, TYPE.F16, vocabulary=letters(300))
    rewritten(plain, folder / "qwen3-embedding.gguf", **{"qwen3.pooling_type": 3})
    (folder / "model.gguf").symlink_to(models.SMALL)
    shutil.copytree(ROOT / "results", folder / "results")
    shutil.copy(ROOT / "results/samples/decode-1b-q6k-d0.json", folder / "FILE.json")
    texts = {
        "stdin": "Who made the heaven?\n", "report.txt": "In the beginning", "person.json": json.dumps(SCHEMA),
        "before.json": json.dumps([ROW]), "after.json": json.dumps([ROW]),
        "keys": "secret\n", "program.py": TENSORS, "strace.log": STRACE,
        "bin/tegrad": f"#!{sys.executable}\nfrom tegrad.__main__ import entry\nentry()\n",
        "program_of_its_own": ITS_OWN,
    }  # fmt: skip
    (folder / "bin").mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
    for name in ("bin/tegrad", "program_of_its_own"):
        (folder / name).chmod(0o755)


@pytest.mark.board
@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
@pytest.mark.skipif(shutil.which("cc") is None, reason="the preload library is built by a C compiler (cc)")
def test_every_other_line_runs_here(tmp_path: Path) -> None:
    """In one folder, one process and on one board, with the hub's protocol spoken by a server of ours."""
    pytest.importorskip("huggingface_hub")
    prepared(tmp_path)
    lines = sorted(dict.fromkeys(map(given, RUN)), key=place)
    paths = [tmp_path / "bin", Path(sys.executable).parent]
    with marked() as mark, Server() as hub, (tmp_path / "answers").open("w") as told:
        for name, kinds in HUB.items():
            file = name.partition("/")[2].removesuffix("-GGUF")
            hub.repositories[name] = Repository({f"{file}-{kind}.gguf": models.SMALL.read_bytes() for kind in kinds})
        known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "DEV"))}
        environment = {
            **known, "PATH": os.pathsep.join([*map(str, paths), os.environ["PATH"]]), "TEGRAD_BOARD": BOARD,
            "PYTHONPATH": str(ROOT), "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1",
            "XDG_CACHE_HOME": str(cache_folder()), "XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path),
        }  # fmt: skip
        command = [sys.executable, str(ROOT / "tests/page_lines.py"), json.dumps(lines)]
        try:
            with suppress(subprocess.TimeoutExpired):
                subprocess.run(command, cwd=tmp_path, env=environment, stdout=told, check=False, timeout=LIMIT_S)
            answers = [json.loads(answer) for answer in (tmp_path / "answers").read_text().splitlines()]
            failed = [f"{line}: {code}\n{said}" for line, code, said in answers if code not in (0, CODES.get(line))]
            assert not failed, "\n".join(failed)
            assert [line for line, *_ in answers] == lines
            until(lambda: not running(mark))
        finally:
            with suppress(BoardError):
                board_stop(BOARD)
            for pid in running(mark):
                os.kill(pid, signal.SIGKILL)
