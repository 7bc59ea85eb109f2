"""The figure of hostile GGUF files counts mutants, and is 0 as soon as one was found."""

import pytest

from tegrad.bench import fuzz
from tegrad.bench.measures import MEASURES
from tegrad.bench.record import RecordError


def test_it_counts_the_mutants_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "MUTANTS", 3)
    record = MEASURES["gguf-mutants-first"].take()
    assert (record.id, record.unit, record.ours.samples) == ("gguf-mutants-first", "files", [3.0])
    assert record.ours.command == f"python {fuzz.GGUF_RUN} --count 3 --seed {fuzz.FIRST}"


def test_one_that_was_found_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "_run", lambda *_: {"mutants": 6000, "found": 1})
    assert fuzz.gguf_mutants().ours.samples == [0.0]


def test_a_run_that_ends_without_a_count_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "SEED", "none")
    with pytest.raises(RecordError, match="failed"):
        fuzz.steps()
    monkeypatch.setattr(fuzz, "RUN", "tests/nowhere.py")
    with pytest.raises(RecordError, match="in a checkout"):
        fuzz.steps()
