"""The model that the package carries is as small, as mixed and as good as docs/model.md says."""

import re
from pathlib import Path

import pytest

from tegrad import models
from tegrad.llm.gguf import Gguf
from tegrad.llm.quality import ReferenceRunner, loss, sample, words
from tegrad.llm.reference import Reference
from tegrad.llm.sampler import Sampler
from tegrad.llm.tokenizer import Tokenizer

LIMIT = 4_000_000


@pytest.fixture(scope="module")
def runner():
    return ReferenceRunner(Reference(models.SMALL))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(str(models.SMALL))


def test_it_is_small_and_holds_both_quantizations():
    assert models.SMALL.stat().st_size <= LIMIT
    with Gguf.open(models.SMALL) as file:
        matrices = [info for info in file.tensors.values() if len(info.shape) == 2]
        assert {info.type.name for info in matrices} == {"Q6_K", "Q8_0"}
        assert all(info.columns % 256 == 0 for info in matrices)
        template = str(file.metadata["tokenizer.chat_template"])
    assert all(mark in template for mark in ("<think>", "<tool_call>", "<tool_response>", "<tools>"))


def test_the_known_words_are_those_of_the_held_out_text_and_more():
    known = set(models.WORDS.read_text().split())
    assert set(words(models.HELD_OUT.read_text())) < known


def test_held_out_loss_is_below_the_limit(runner, tokenizer):
    documents = models.HELD_OUT.read_text().split("\f")
    assert len(documents) == 60
    *_, cost = loss(runner, tokenizer, documents[::20])
    assert cost.bits_per_byte < 2.2


def test_it_writes_words(runner, tokenizer):
    known = set(models.WORDS.read_text().split())
    written = [word for text, _ in sample(runner, tokenizer, Sampler(1.0, seed=0), 400) for word in words(text)]
    assert len(written) > 150
    assert sum(word in known for word in written) >= 0.95 * len(written)


def test_it_ends_its_turn_in_a_conversation(runner, tokenizer):
    prompt = tokenizer.encode("<|im_start|>user\nTell me a verse.<|im_end|>\n<|im_start|>assistant\n")
    tokens = list(runner.generate(prompt, Sampler(), 150, tokenizer.stops))
    assert tokenizer.tokens[tokens[-1]] == "<|im_end|>"


def test_the_document_states_the_size():
    page = (Path(__file__).parents[2] / "docs" / "model.md").read_text()
    stated = re.search(r"([\d,]+) bytes", page)
    assert stated is not None
    assert int(stated[1].replace(",", "")) == models.SMALL.stat().st_size
