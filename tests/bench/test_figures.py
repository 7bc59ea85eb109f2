"""Figures come out of samples files by arithmetic, and an edited row is found."""

import json
import os
from pathlib import Path

import pytest

from tegrad.bench import figures
from tegrad.bench.figures import Results, row
from tegrad.bench.record import Record, RecordError, Side, make, source_digest
from tegrad.models import SMALL

REPOSITORY = Path(__file__).parents[2]


def record(**changes: object) -> Record:
    arguments: dict = {
        "id": "decode",
        "what": "tokens per second",
        "unit": "tok/s",
        "ours": Side("tegrad", "tegrad run", [90.0, 110.0, 100.0]),
        "peer": Side("llama.cpp", "llama-bench -fa 1", [50.0, 40.0, 60.0]),
        "limit": 400.0,
    }
    return make(**(arguments | changes))


def test_row_takes_medians_and_ratio_for_larger_is_better() -> None:
    figure = row(record(), "samples/decode.json", "0" * 64)
    assert (figure["ours"], figure["peer"], figure["ratio"], figure["limit_share"]) == (100.0, 50.0, 2.0, 0.25)
    assert figure["spread"] == [90.0, 110.0]


def test_ratio_is_larger_for_us_when_less_is_better() -> None:
    times = record(larger_is_better=False, ours=Side("tegrad", "", [2.0]), peer=Side("other", "", [6.0]), limit=1.0)
    figure = row(times, "", "")
    assert (figure["ratio"], figure["limit_share"]) == (3.0, 0.5)


def test_no_peer_and_no_limit_leave_those_columns_empty() -> None:
    figure = row(record(peer=None, limit=None), "", "")
    assert figure["peer"] is figure["ratio"] is figure["limit_share"] is figure["peer_name"] is None


def test_record_survives_the_disk(tmp_path: Path) -> None:
    original = record()
    original.dump(tmp_path / "decode.json")
    assert Record.load(tmp_path / "decode.json") == original


def test_an_edited_row_is_stale_until_recomputed(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(record())
    assert results.stale() == []
    rows = json.loads(results.table.read_text())
    rows[0]["ours"] = 9000
    results.table.write_text(json.dumps(rows))
    assert results.stale() == ["decode"]
    results.recompute()
    assert results.stale() == []


def test_edited_samples_change_the_hash(tmp_path: Path) -> None:
    results = Results(tmp_path)
    results.add(record())
    path = results.samples / "decode.json"
    path.write_text(path.read_text().replace("110.0", "111.0"))
    assert results.stale() == ["decode"]


def test_a_folder_without_figures_is_no_good_one(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="--results"):
        Results(tmp_path).require()
    results = Results(tmp_path)
    results.add(record())
    results.require()


def test_a_broken_samples_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    (tmp_path / "samples" / "x.json").write_text("{")
    with pytest.raises(RecordError, match=r"x\.json"):
        Results(tmp_path).recompute()


def test_empty_samples_are_refused() -> None:
    with pytest.raises(RecordError, match="no samples"):
        record(ours=Side("tegrad", "", []))


def test_record_names_versions_sources_and_machine() -> None:
    fresh = record()
    assert fresh.versions["tegrad_sources"] == source_digest()
    assert fresh.versions["tinygrad"] == "0.14.0"
    assert fresh.machine["cores"] >= 1
    assert fresh.date.endswith("Z")


def test_record_tells_what_nvidia_smi_knows_and_leaves_out_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$@" > "$0.asked"\necho "NVIDIA H200, 580.1, 345, [N/A], 1980, 3201"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    found = record().machine
    assert (found["gpu"], found["driver"]) == ("NVIDIA H200", "580.1")
    assert found["clocks_mhz"] == {"sm": 345.0, "max.sm": 1980.0, "max.mem": 3201.0}
    assert "clocks.mem,clocks.max.sm" in (tmp_path / "nvidia-smi.asked").read_text()


def test_the_committed_table_is_what_its_samples_give() -> None:
    assert Results(REPOSITORY / "results").stale() == []


def test_figures_measures_again_what_needs_no_gpu_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tegrad.bench import measures
    from tegrad.cli.bench import figures

    def none() -> Record:
        raise AssertionError("needs a GPU")

    table = {
        "here": measures.Measure("here", "", False, lambda: record(id="here")),
        "there": measures.Measure("there", "", True, none),
    }
    monkeypatch.setattr(measures, "MEASURES", table)
    Results(tmp_path).add(record(id="there"))
    figures(tmp_path)
    assert [r["id"] for r in Results(tmp_path).stored()] == ["here", "there"]


def test_a_figure_goes_into_a_file_or_a_folder_and_a_wrong_one_is_told_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from tegrad.bench import measures
    from tegrad.cli import bench

    taken: list[str] = []
    table = {"x": measures.Measure("x", "", False, lambda: taken.append("x") or record(id="x"))}
    monkeypatch.setattr(measures, "MEASURES", table)
    for out in (tmp_path, tmp_path / "y.json"):
        assert CliRunner().invoke(bench.app, ["take", "x", "--out", str(out)]).exit_code == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "y.json"]
    said = CliRunner().invoke(bench.app, ["take", "x", "--out", str(tmp_path / "nowhere" / "y.json")])
    assert (said.exit_code, "--out" in said.output, taken) == (2, True, ["x", "x"])


@pytest.mark.parametrize("words", [["decode"], ["tinygrad"], ["perplexity", str(SMALL)], ["serve", "same", "1b-q6k"]])
def test_a_file_is_no_folder_for_samples_and_nothing_is_measured(tmp_path: Path, words: list[str]) -> None:
    from typer.testing import CliRunner

    from tegrad.cli import bench

    taken = tmp_path / "there"
    taken.write_text("")
    said = CliRunner().invoke(bench.app, [*words, "--out", str(taken)])
    assert (said.exit_code, "Invalid value for '--out'" in said.output) == (2, True), said.output


def test_readmes_table_is_what_the_rows_give() -> None:
    page = figures.readme_beside(REPOSITORY / "results")
    assert figures.with_table(page.read_text(), Results(REPOSITORY / "results").stored()) == page.read_text()


def test_a_typed_number_and_a_figure_that_lacks_are_noticed() -> None:
    rows = Results(REPOSITORY / "results").stored()
    text = figures.readme_beside(REPOSITORY / "results").read_text()
    wrong = text.replace(f"| {figures.README_ROWS[0][0]} | ", f"| {figures.README_ROWS[0][0]} | 1")
    assert wrong != text
    assert figures.with_table(wrong, rows) == text
    with pytest.raises(RecordError, match="needs the figures decode-1b-q6k-d0"):
        figures.readme_table([row for row in rows if row["id"] != "decode-1b-q6k-d0"])
    with pytest.raises(RecordError, match="no place for the table"):
        figures.with_table(text.replace(figures.END, ""), rows)


def test_counts_are_not_rounded() -> None:
    assert figures._round(273608.0) == 273608.0
    assert figures._round(2900.123456) == 2900.1


def test_readmes_rows_say_when_and_at_which_commit_they_were_taken() -> None:
    commits = {"decode-3b-q6k": None, "decode-8b-q4k-d0": "1234567890"}
    rows = [
        stored | {"date": "2026-01-02T03:04:05Z", "commit": commits.get(stored["id"], "abcdefghijk")}
        for stored in Results(REPOSITORY / "results").stored()
    ]
    table = figures.readme_table(rows).splitlines()
    lines = {line.split("|")[1].strip(): line.split("|")[-2].strip() for line in table}
    assert lines["one sequence, 128 tokens"] == "2026-01-02 at abcdefg"
    assert lines["3B Q6_K, 8B Q4_K, 8B Q6_K"] == "2026-01-02, 2026-01-02 at 1234567, 2026-01-02 at abcdefg"
    assert lines["in Q4_K, Q8_0, F16"] == "2026-01-02 at abcdefg"
