"""`tegrad bench model` and the page of its rows: on a board, with a stand-in for llama-bench beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tegrad import models
from tegrad.bench import report
from tegrad.bench.record import RecordError

ROOT = Path(__file__).parents[2]
PEER = {"model_type": "llama 4M Q6_K", "model_size": 1, "model_n_params": 2, "backends": "CUDA", "n_prompt": 0,
        "n_gen": 4, "n_depth": 0, "avg_ns": 1, "stddev_ns": 0, "stddev_ts": 0.5}  # fmt: skip
FAKE = """#!/bin/sh
echo "$@" >> {log}
echo '{rows}'
"""


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tegrad", "bench", *words]
    known = {**os.environ, **environment}
    return subprocess.run(command, env=known, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.board
def test_a_model_is_measured_beside_llama_bench(tmp_path: Path) -> None:
    """Loading, a prompt, tokens after a depth, two together; the peer's better setting; then the page of all that."""
    program, log = tmp_path / "llama-bench", tmp_path / "log"
    rows = [{**PEER, "avg_ts": speed, "samples_ts": [speed]} for speed in (700.0, 900.0)]
    program.write_text(FAKE.format(log=log, rows=json.dumps(rows)))
    program.chmod(0o755)
    done = run(
        "model", str(models.SMALL), "-p", "8", "-n", "4", "-d", "16", "-r", "2", "-o", "json", "--vs", "llama.cpp",
        TEGRAD_BOARD="agx-orin-64gb", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("these times are the emulation's") == 1
    found = json.loads(done.stdout)
    assert [row["test"] for row in found] == ["load", "pp8 @ d16", "tg4 @ d16", "pp8 @ d16", "tg4 @ d16"]
    assert [row["backends"] for row in found] == ["tegrad"] * 3 + ["CUDA, llama.cpp"] * 2
    assert all(len(row["samples_ts"]) == 2 and row["avg_ts"] > 0 for row in found[1:3])
    assert found[1]["machine"]["sms"] == 16
    assert [row["avg_ts"] for row in found[3:]] == [900, 900]
    assert log.read_text().splitlines()[1] == (
        f"-m {models.SMALL} -p 0 -n 4 -d 16 -ngl 99 -fa 0,1 -ctk f16 -ctv f16 -r 2 -o json"
    )
    (tmp_path / "rows.json").write_text(done.stdout)
    page = report.of_rows([tmp_path / "rows.json"]).html()
    assert page.count("<svg") == 2  # prompts and answers
    assert "pp8 @ d16" in page


@pytest.mark.board
def test_sequences_decode_together(tmp_path: Path) -> None:
    done = run(
        "model", str(models.SMALL), "-p", "0", "-n", "4", "--sequences", "2", "-r", "1", TEGRAD_BOARD="agx-orin-64gb"
    )
    assert done.returncode == 0, done.stderr
    cells = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]
    assert cells[4] == "tg4 x 2"
    assert float(cells[5].split()[0]) > 0


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--sequences", "0"), "at least one sequence decodes"),
        (("-p", "a"), "'a' is no list of numbers"),
        (("-d", "-3"), "-3 is below 0"),
        (("--vs", "vllm"), "the only peer is llama.cpp"),
        (("--vs", "llama.cpp"), "llama-bench is not on the PATH, and TEGRAD_LLAMA names no folder"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(words: tuple[str, ...], why: str) -> None:
    done = run("model", str(models.SMALL), *words, TEGRAD_BOARD="agx-orin-64gb", PATH="/nowhere", COLUMNS="200")
    assert done.returncode != 0
    assert why in re.sub(r"[\s│]+", " ", done.stderr)


def test_the_committed_results_make_a_page_that_asks_no_other_host() -> None:
    page = report.of_results(ROOT / "results").html()
    figures = json.loads((ROOT / "results" / "figures.json").read_text())
    assert all(f"<td>{row['id']}</td>" in page for row in figures)
    assert page.count("<svg") >= 3
    assert not re.search(r"""(?:src|href)=["'](?!#)""", page.replace('xlink:href="#', ""))
    assert "<script" not in page


def test_a_page_has_tinygrads_rows_beside_their_peer(tmp_path: Path) -> None:
    sides = {"ours": {"median": [10.0, 11.0, 12.0]}, "peer": {"median": [44.0, 43.0, 45.0]}}
    record = {"peer": "tinygrad, CUDA", "rows": [{"row": "launch", "unit": "us", **sides}], "machine": {"gpu": "H"}}
    (tmp_path / "record.json").write_text(json.dumps(record, indent=1))
    row = {**PEER, "model_filename": "/models/m.gguf", "avg_ts": 5.0, "samples_ts": [5.0]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    page = report.of_rows([tmp_path / "record.json", tmp_path / "rows.jsonl"])
    assert ("operation", "tinygrad, CUDA", "launch", "44 us", "43 to 45") in page.rows
    assert ("operation", "tinygrad, NV", "launch", "11 us", "10 to 12") in page.rows
    assert page.rows[0][0] == "m.gguf"
    assert page.html().count("<svg") == 2
    assert ">4.00<" in page.html()


def test_the_committed_reports_say_of_which_machine_they_are() -> None:
    for name, machine in (("h200", "NVIDIA H200"), ("board", "emulated agx-orin-64gb")):
        page = (ROOT / "results" / "reports" / f"{name}.html").read_text()
        assert machine in page
        assert "<svg" in page


def test_text_of_a_result_is_no_markup(tmp_path: Path) -> None:
    row = {**PEER, "model_filename": "<b>bold", "avg_ts": 5.0, "samples_ts": [5.0]}
    (tmp_path / "rows").write_text(json.dumps([row]))
    page = report.of_rows([tmp_path / "rows"]).html()
    assert "<b>bold" not in page
    assert "&lt;b&gt;bold" in page


def test_other_files_make_no_page(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("[]")
    with pytest.raises(RecordError, match="these are no rows"):
        report.of_rows([tmp_path / "rows"])
    with pytest.raises(RecordError, match="name a results folder"):
        report.of_results(tmp_path)


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(report.NoPlots, match=r"pip install .*\[bench\]"):
        report._figure(3)
