"""The figures of the tests themselves: random mutants that they notice, minutes that they take."""

import json
from pathlib import Path

import pytest

from tegrad.bench import suite
from tegrad.bench.measures import MEASURES
from tegrad.bench.record import RecordError


def _recorded(path: Path, killed: int, survived: int, equivalent: int) -> Path:
    rows: list[dict[str, str]] = [{"outcome": "killed"}] * killed + [{"outcome": "survived"}] * survived
    rows += [{"outcome": "survived", "equivalent": "why"}] * equivalent
    path.write_text(json.dumps({"mutants": rows}))
    return path


def test_equivalent_mutants_count_neither_way(tmp_path: Path) -> None:
    record = suite.mutants_killed(_recorded(tmp_path / "r.json", killed=72, survived=24, equivalent=4))
    assert (record.id, record.unit, record.ours.samples) == ("random-mutants-killed", "%", [75.0])
    assert "of 100 random mutants" in record.what
    assert "(4 equivalent)" in record.what


def test_more_than_a_twentieth_may_not_be_called_equivalent(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="6 of 100 mutants are called equivalent, at most 5% may"):
        suite.mutants_killed(_recorded(tmp_path / "r.json", killed=94, survived=0, equivalent=6))


def test_without_a_run_there_is_no_share_of_mutants(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="makes it, in a checkout"):
        suite.mutants_killed(tmp_path / "none.json")


def test_a_suite_that_fails_has_no_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "Makefile").write_text(".venv/.dev check:\n\ttrue\ntest:\n\tfalse\n")
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    with pytest.raises(RecordError, match=r"`make test` in .* ended with 2"):
        suite.minutes()
    (tmp_path / "Makefile").write_text(".venv/.dev check test:\n\ttouch $(@F)\n")
    record = MEASURES["ci-minutes"].take()
    assert (record.id, record.unit, record.larger_is_better) == ("ci-minutes", "min", False)
    assert 0 < record.ours.median < 1
    assert {path.name for path in tmp_path.iterdir()} >= {"check", "test"}
