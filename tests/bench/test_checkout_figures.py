"""The figures that only a checkout can measure, of which an installed package says so."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import checkout_figures as figures

from tegrad.bench import measures
from tegrad.bench.measures import MEASURES
from tegrad.bench.record import RecordError


def _recorded(path: Path, killed: int, survived: int, equivalent: int) -> Path:
    rows: list[dict[str, str]] = [{"outcome": "killed"}] * killed + [{"outcome": "survived"}] * survived
    rows += [{"outcome": "survived", "equivalent": "why"}] * equivalent
    path.write_text(json.dumps({"mutants": rows}))
    return path


def test_equivalent_mutants_count_neither_way(tmp_path: Path) -> None:
    record = figures.mutants_killed(_recorded(tmp_path / "r.json", killed=72, survived=24, equivalent=4))
    assert (record.id, record.unit, record.ours.samples) == ("random-mutants-killed", "%", [75.0])
    assert "of 100 random mutants" in record.what
    assert "(4 equivalent)" in record.what


def test_more_than_a_twentieth_may_not_be_called_equivalent(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="6 of 100 mutants are called equivalent, at most 5% may"):
        figures.mutants_killed(_recorded(tmp_path / "r.json", killed=94, survived=0, equivalent=6))


def test_without_a_run_there_is_no_share_of_mutants(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="makes it"):
        figures.mutants_killed(tmp_path / "none.json")


def test_a_suite_that_fails_has_no_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Makefile").write_text(".venv/.dev check:\n\ttrue\ntest:\n\tfalse\n")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    with pytest.raises(RecordError, match=r"`make test` in .* ended with 2"):
        figures.minutes()
    (tmp_path / "Makefile").write_text(".venv/.dev check test:\n\ttouch $(@F)\n")
    record = MEASURES["ci-minutes"].take()
    assert (record.id, record.unit, record.larger_is_better) == ("ci-minutes", "min", False)
    assert 0 < record.ours.median < 1
    assert {path.name for path in tmp_path.iterdir()} >= {"check", "test"}


def test_it_counts_the_mutants_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "MUTANTS", 3)
    record = MEASURES["gguf-mutants-first"].take()
    assert (record.id, record.unit, record.ours.samples) == ("gguf-mutants-first", "files", [3.0])
    assert record.ours.command == f"{figures.GGUF_FUZZ} --count 3 --seed {figures.FIRST}"


def test_one_that_was_found_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "_told", lambda *_: {"mutants": 6000, "found": 1})
    assert figures.gguf_mutants().ours.samples == [0.0]


def test_a_run_that_ends_without_a_count_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "SEED", "none")
    with pytest.raises(RecordError, match="failed"):
        figures.fuzz_steps()


def test_every_one_can_be_taken_in_a_checkout_and_only_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {id for id, measure in MEASURES.items() if measure.checkout} == set(figures.FIGURES)
    assert MEASURES["ptx-oracle-cases"].ready
    monkeypatch.setattr(measures, "CHECKOUT", tmp_path / "tools" / "checkout_figures.py")
    assert not MEASURES["ptx-oracle-cases"].ready
    told = "in a checkout of the repository only: run `tegrad bench take ptx-oracle-cases` there"
    with pytest.raises(RecordError, match=told):
        MEASURES["ptx-oracle-cases"].take()
