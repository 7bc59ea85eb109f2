"""The bench of grammars: masks can be made of its vocabulary, and both speeds are taken of one model."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tegrad.bench import decode, grammar
from tegrad.bench.grammar import PEOPLE, Words
from tegrad.llm.grammar import Masks
from tegrad.llm.tokenizer import Kind

sys.path.append(str(Path(__file__).parents[1] / "llm"))

from tiny_llama import TYPE, Shape, write

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=256)


@pytest.mark.parametrize("size", [301, 32000, 128256])
def test_the_vocabulary_has_every_byte_and_no_piece_twice(size: int) -> None:
    words = Words(size)
    pieces = [words.piece(token, special=True) for token in range(size)]
    assert len(words) == len(set(pieces)) == size
    assert {bytes((byte,)) for byte in range(256)} <= set(pieces)
    assert words.kinds[-1] == Kind.CONTROL
    for text in ('[{"name": "Ruth", "age": 7', "漢字 é\n\n"):
        assert words.decode(words.encode(text)) == text


def test_a_large_vocabulary_has_long_pieces() -> None:
    words = Words(128256)
    assert len(words.encode('"name": "Jerusalem and the Philistines"')) < 12


def test_random_tokens_that_masks_allow_are_people_and_the_answer_does_not_end() -> None:
    words, rng = Words(32000), np.random.default_rng(1)
    mask, tokens = Masks(words).mask(PEOPLE), list[int]()
    for _ in range(200):
        bits = np.unpackbits(np.frombuffer(mask(tokens) or b"", np.uint8), bitorder="little")
        tokens.append(int(rng.choice(np.flatnonzero(bits))))
    assert words.eos not in tokens
    said = words.decode(tokens)
    first, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
    assert set(first) == {"name", "age", "tribe", "sons", "king"}


@pytest.mark.board
def test_the_figure_is_the_speed_with_masks_to_that_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K)
    for name, value in (("TEGRAD_BOARD", "agx-orin-64gb"), ("DEV", "NV")):
        monkeypatch.setenv(name, value)
    for name, number in (("SAMPLE_TOKENS", 4), ("REPETITIONS", 1)):
        monkeypatch.setattr(decode, name, number)
    monkeypatch.setattr(decode, "provide", lambda name: path)
    taken = []
    speeds = grammar.speeds
    monkeypatch.setattr(grammar, "speeds", lambda *given, **how: taken.append(speeds(*given, **how)) or taken[-1])
    record = decode.take("grammar-decode-share")
    assert record.ours.samples == taken[0].shares
    assert len(taken[0].masked) == len(taken[0].free) == 2
    assert len(taken[0].mask_us) == 2 * 5
    assert min(taken[0].masked + taken[0].free + taken[0].mask_us) > 0
    assert record.peer is None
