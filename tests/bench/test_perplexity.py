"""Perplexity is that of all windows together, of the same tokens on both sides; figures are of long texts."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tegrad.bench import perplexity
from tegrad.bench.measures import MEASURES
from tegrad.bench.perplexity import TOKENS, WINDOW, Perplexity, Window
from tegrad.bench.record import RecordError
from tegrad.llm.reference import Reference
from tegrad.llm.tokenizer import Tokenizer
from tegrad.models import HELD_OUT, SMALL


def test_windows_are_the_text_each_behind_a_begin_token() -> None:
    tokenizer, texts = Tokenizer.load(SMALL), perplexity.windows(SMALL, 2 * WINDOW + 9)
    assert [len(text) for text in texts] == [WINDOW, WINDOW, 9]
    whole = tokenizer.encode(HELD_OUT.read_text().replace("\f", "\n"), bos=False, special=False)
    assert [token for text in texts for token in text[1:]] == whole[: 2 * WINDOW + 9 - 3]
    assert {text[0] for text in texts} == {tokenizer.bos}
    with pytest.raises(RecordError, match=r"small\.held-out\.txt has [0-9]+ tokens: ask for fewer"):
        perplexity.windows(SMALL, 10_000_000)


def test_a_perplexity_is_of_all_predicted_tokens() -> None:
    found = Perplexity.of([Window(3, 1.0, 2.0), Window(1, 2.0, 1.0)], 6)
    assert (found.tokens, found.predicted) == (6, 4)
    assert found.ours == pytest.approx(math.exp(5 / 4))
    assert found.llama_cpp == pytest.approx(math.exp(7 / 4))
    assert found.ratio == pytest.approx(math.exp(0.5))


def test_both_sides_are_asked_for_the_same_tokens() -> None:
    """The exact logits are within a thousandth of llama.cpp's cost; uniform ones cost the vocabulary's logarithm."""
    pytest.importorskip("cyllama", reason="cyllama is not installed")
    texts, reference = perplexity.windows(SMALL, 96), Reference(SMALL)
    (exact,) = perplexity.compare(SMALL, reference.logits, texts, 1)
    assert exact.tokens == 95
    assert exact.ours == pytest.approx(exact.llama_cpp, rel=2e-3)
    vocab = reference.config.vocab
    (uniform,) = perplexity.compare(SMALL, lambda tokens: np.zeros((len(tokens), vocab)), texts, 1)
    assert uniform.ours == pytest.approx(math.log(vocab))
    assert uniform.llama_cpp == exact.llama_cpp


def test_a_figure_takes_a_long_text_and_divides_llama_cpps_by_ours() -> None:
    pytest.importorskip("cyllama", reason="cyllama is not installed")
    with pytest.raises(RecordError, match=f"takes {TOKENS:,} tokens at least, not 512"):
        perplexity.record("smollm2", Perplexity(512, 511, 10.0, 11.0), "command")
    record = perplexity.record("smollm2", Perplexity(TOKENS, TOKENS - 32, 10.0, 11.0), "command")
    assert (record.id, record.ours.median, record.larger_is_better) == ("ppl-smollm2", 10.0, False)
    assert record.peer is not None
    assert record.peer.median == 11.0


def test_a_row_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    table = tmp_path / "folder that is made" / "perplexity.json"
    for ours, device in ((9.0, "board"), (8.0, "board"), (7.0, "GPU")):
        perplexity.merge(table, "smollm2", device, "kernels", Perplexity(512, 511, ours, 8.0))
    rows = json.loads(table.read_text())["rows"]
    assert [(row["device"], row["ours"], row["ratio"]) for row in rows] == [("GPU", 7.0, 8 / 7), ("board", 8.0, 1.0)]
    table.write_text("[]")
    with pytest.raises(RecordError, match="is no table of rows"):
        perplexity.merge(table, "smollm2", "board", "kernels", Perplexity(512, 511, 9.0, 8.0))


def test_taking_a_figure_without_its_file_says_where_it_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(perplexity.FOLDER, raising=False)
    with pytest.raises(RecordError, match=r"ppl-gemma3 needs gemma-3-270m-q4_k_m\.gguf .* TEGRAD_PUBLISHED"):
        MEASURES["ppl-gemma3"].take()
    monkeypatch.setenv(perplexity.FOLDER, str(tmp_path))
    (tmp_path / perplexity.PUBLISHED["gemma3"].file).write_bytes(b"another")
    with pytest.raises(RecordError, match=r"is not Gemma 3 270M in Q4_K_M: fetch it by tools/published\.py"):
        MEASURES["ppl-gemma3"].take()
