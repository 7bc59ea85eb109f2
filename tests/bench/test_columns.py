"""Rows with llama-bench's columns: names of tests, fields, and each form that they are written in."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tegrad import models
from tegrad.bench import columns
from tegrad.bench.columns import Case, Subject, row
from tegrad.bench.model import cases

SUBJECT = Subject(Path("/models/a.gguf"), "llama 1.24B Q6_K", 1_021_000_000, 1_235_814_400, 16)
ABOUT = {"backends": "tegrad", "build_commit": "0.1.0", "build_number": 0, "cpu_info": "c", "gpu_info": "g",
         "type_k": "f16", "type_v": "f16", "test_time": "2026-11-26T00:00:00Z", "machine": {}}  # fmt: skip


TOKENS = Case(generated=128)


def made(case: Case = TOKENS, seconds: tuple[float, ...] = (0.5, 0.25)) -> dict[str, Any]:
    return row(SUBJECT, case, seconds, ABOUT)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(prompt=512), "pp512"),
        (Case(generated=128, depth=4096), "tg128 @ d4096"),
        (Case(generated=128, sequences=8), "tg128 x 8"),
        (Case(), "load"),
    ],
)
def test_a_test_is_called_as_llama_bench_calls_it(case: Case, name: str) -> None:
    assert str(case) == columns.test_of(made(case)) == name


def test_a_row_of_llama_bench_gets_its_name_from_its_numbers() -> None:
    assert columns.test_of({"n_prompt": 512, "n_gen": 0, "n_depth": 0}) == "pp512"
    assert columns.test_of({"n_prompt": 0, "n_gen": 64, "n_depth": 8}) == "tg64 @ d8"


def test_speeds_are_means_of_speeds_and_not_of_times() -> None:
    found = made()
    assert found["samples_ts"] == [256, 512]
    assert (found["avg_ts"], found["avg_ns"]) == (384, 375_000_000)
    assert found["stddev_ts"] == pytest.approx(181.02, abs=0.01)
    assert made(seconds=(0.5,))["stddev_ns"] == 0


def test_all_sequences_tokens_count() -> None:
    assert made(Case(generated=128, sequences=8), (1.0,))["avg_ts"] == 1024


def test_a_prompt_or_tokens_of_none_leave_a_kind_out() -> None:
    assert list(map(str, cases([0], [128], [0], [1]))) == ["tg128"]
    assert list(map(str, cases([64, 512], [128], [0, 32], [1, 4]))) == [
        "pp64", "pp512", "pp64 @ d32", "pp512 @ d32", "tg128", "tg128 @ d32", "tg128 x 4", "tg128 x 4 @ d32",
    ]  # fmt: skip


def test_markdown_reads_as_llama_benchs() -> None:
    text = "".join(columns.markdown(iter([made(), made(Case(), (1.25,))]))).splitlines()
    assert [cell.strip() for cell in text[0].strip("|").split("|")] == list(columns.WIDTHS)
    assert text[1].replace(" ", "") == "|------------------------------|---------:|---------:|----------|" + (
        "--------------:|-------------------:|"
    )
    assert [cell.strip() for cell in text[2].strip("|").split("|")] == [
        "llama 1.24B Q6_K", "973.70 MiB", "1.24 B", "tegrad", "tg128", "384.00 ± 181.02",
    ]  # fmt: skip
    assert text[3].split("|")[-2].strip() == "1.25 s ± 0.00"
    assert len({len(line) for line in text}) == 1


def test_csv_quotes_every_field_under_llama_benchs_names() -> None:
    text = "".join(columns.comma_separated(iter([made()])))
    head, values = csv.reader(io.StringIO(text))
    found = dict(zip(head, values, strict=True))
    assert (found["avg_ts"], found["n_gen"], found["test"]) == ("384.0", "128", "tg128")
    assert text.startswith('"build_commit","build_number"')


def test_json_and_lines_hold_the_same_rows_and_none_is_a_list_too() -> None:
    rows = [made(), made(Case(prompt=7))]
    assert json.loads("".join(columns.json_list(iter(rows)))) == json.loads(json.dumps(rows))
    assert [json.loads(line) for line in columns.json_lines(iter(rows))] == json.loads(json.dumps(rows))
    assert json.loads("".join(columns.json_list(iter([])))) == []


def test_a_models_header_names_it() -> None:
    found = Subject.of(models.SMALL)
    assert (found.type, found.layers) == ("llama 4M Q6_K", 6)
    assert found.bytes < models.SMALL.stat().st_size
