"""The measurements of `tegrad eval`: nothing counted twice, nothing left out, exact for models that are known."""

from collections.abc import Iterator, Sequence
from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tegrad.llm.errors import ModelError
from tegrad.llm.quality import EngineRunner, Window, loss, negative_log_likelihood, sample, windows, words
from tegrad.llm.sampler import Sampler

BOS, EOS, VOCAB = 256, 257, 258


class Bytes:
    """A tokenizer of one token a byte."""

    bos: int | None = BOS
    eos: int | None = EOS
    stops = frozenset([EOS])

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        return [BOS] * bool(bos) + list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode()


class Uniform:
    """Gives every token the same chance."""

    def __init__(self, context: int) -> None:
        self.context = context
        self.longest = 0

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        self.longest = max(self.longest, len(tokens))
        return np.zeros((len(tokens), VOCAB), np.float32)


class Parrot(Uniform):
    """Writes the same text again and again, and expects it."""

    def __init__(self, text: str, context: int = 10_000) -> None:
        super().__init__(context)
        self.text = [*text.encode(), EOS]

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        logits = super().score(tokens)
        logits[np.arange(len(tokens)), self.text[: len(tokens)]] = 50
        return logits

    def generate(self, prompt: Sequence[int], sampler: Sampler, limit: int, stops: frozenset[int]) -> Iterator[int]:
        assert list(prompt) == [BOS]
        yield from self.text[:limit]


@given(length=st.integers(1, 400), context=st.integers(2, 70))
def test_windows_predict_every_token_once(length, context):
    document = [BOS, *range(1000, 1000 + length)]
    predicted: list[int] = []
    for window in windows(document, BOS, context):
        assert window.tokens[0] == BOS
        assert 1 <= window.known < len(window.tokens) <= context + 1
        known = window.tokens[1 : window.known]
        assert known == predicted[len(predicted) - len(known) :]
        predicted += window.tokens[window.known :]
    assert predicted == document[1:]


def test_a_short_document_is_one_window():
    assert list(windows([BOS, 1, 2], BOS, 512)) == [Window([BOS, 1, 2], 1)]


@pytest.mark.parametrize("text", ["short", "a text that is longer than one window of the context", "häßlich"])
def test_a_uniform_model_costs_the_entropy_of_its_vocabulary(text):
    model = Uniform(16)
    *_, cost = loss(model, Bytes(), [text, text])
    size = len(text.encode())
    assert (cost.tokens, cost.text_bytes) == (2 * size + 2, 2 * size)
    assert cost.bits_per_byte == pytest.approx(log2(VOCAB) * (size + 1) / size)
    assert model.longest <= model.context


def test_a_model_that_knows_the_text_costs_nothing():
    text = "In the beginning"
    *_, cost = loss(Parrot(text), Bytes(), [text])
    assert cost.bits_per_byte < 1e-9


def test_likelihood_survives_large_logits():
    logits = np.array([[1e4, 0.0], [0.0, 1e4]], np.float32)
    np.testing.assert_allclose(negative_log_likelihood(logits, [0, 0]), [0, 1e4])


def test_samples_have_the_wanted_tokens_and_no_half_words():
    written = list(sample(Parrot("and it was so"), Bytes(), Sampler(), 14 + 7))
    assert written == [("and it was so", 14), ("and it", 7)]


def test_one_word_that_was_cut_off_is_no_word():
    assert list(sample(Parrot("firmament"), Bytes(), Sampler(), 4)) == [("", 4)]


def test_words_are_runs_of_letters_with_their_apostrophes():
    assert words("The doves' eyes, LORD's 12 well-beloved (Noël)_x") == [
        "The", "doves", "eyes", "LORD's", "well", "beloved", "Noël", "x",
    ]  # fmt: skip


def test_a_model_without_a_begin_mark_is_refused():
    tokenizer = Bytes()
    tokenizer.bos = None
    with pytest.raises(ModelError, match="begin-of-text"):
        next(loss(Uniform(8), tokenizer, ["text"]))
    with pytest.raises(ModelError, match="begin-of-text"):
        next(sample(Parrot("x"), tokenizer, Sampler(), 1))


def test_each_text_of_an_engine_has_a_seed_of_its_own():
    """The device draws by seed and position: with the sampler's alone all texts would be one."""
    seeds: list[int | None] = []

    class Engine:
        context = 16

        def reset(self) -> None: ...

        def generate(self, prompt, sampler, limit, stops, *, seed):
            seeds.append(seed)
            return iter([EOS])

    for sampler in (Sampler(1.0, seed=7), Sampler(1.0, seed=7), Sampler(1.0, seed=8), Sampler(1.0)):
        list(sample(EngineRunner(Engine()), Bytes(), sampler, 3))
    assert seeds[:3] == seeds[3:6]
    assert len(set(seeds[:3] + seeds[6:9])) == 6
    assert all(0 <= seed < 1 << 64 for seed in seeds[:9])
    assert seeds[9:] == [None] * 3
