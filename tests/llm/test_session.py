"""A session continues, rewinds, stops and refuses as it says."""

from pathlib import Path

import numpy as np
import pytest
from tiny_llama import TYPE, Shape, write

from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.generate import Reply
from tegrad.llm.model import Model
from tegrad.llm.reference import Reference
from tegrad.llm.sampler import Logprobs, Sampler
from tegrad.llm.session import Session
from tegrad.llm.tokenizer import Tokenizer

pytestmark = pytest.mark.board

SHAPE = Shape(dim=64, ffn=64, heads=2, kv_heads=1, layers=1, context=40)
PROMPT = [5, 9, 77, 100, 3, 8, 1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("session") / "model.gguf", SHAPE, TYPE.Q8_0)


@pytest.fixture(scope="module")
def session(path: Path, device: str) -> Session:
    return Session(Model.load(path, device), chunk=8, short=4)


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


def test_greedy_tokens_are_the_references(session: Session, reference: Reference) -> None:
    session.reset()
    tokens = list(session.generate(PROMPT, Sampler(0), 20))
    logits = reference.logits(PROMPT + tokens)
    assert tokens == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
    assert session.tokens == PROMPT + tokens[:-1]


def test_rewound_tokens_leave_no_trace(session: Session, reference: Reference) -> None:
    session.reset()
    session.feed([200, 201, 202, 203, 204, 205, 206, 207, 208, 209])
    session.reset(keep=3)
    logits = session.feed(PROMPT)
    assert np.allclose(logits, reference.logits([200, 201, 202, *PROMPT])[-1], atol=0.02)


def test_masks_and_log_probabilities_are_as_the_engines(session: Session, reference: Reference) -> None:
    even = np.packbits(np.arange(SHAPE.vocab) % 2 == 0, bitorder="little").tobytes()
    session.reset()
    tokens = list(session.generate(PROMPT, Sampler(1.5, seed=1, logprobs=2), 8, mask=lambda _: even))
    assert {token % 2 for token in tokens} == {0}
    logits = reference.logits([*PROMPT, *tokens[:-1]])[len(PROMPT) - 1 :]
    for row, token, found in zip(logits, tokens, session.logprobs, strict=True):
        expected = Logprobs.of(row, token, 2)
        assert abs(found.taken - expected.taken) < 0.05
        assert found.likeliest[0][0] == expected.likeliest[0][0]
    session.reset()
    asked: list[list[int]] = []
    said = list(session.generate(PROMPT, Sampler(0), 3, mask=lambda written: asked.append(list(written))))
    assert asked == [said[:at] for at in range(3)]


def test_a_stop_ends_the_tokens_and_is_the_last(session: Session) -> None:
    session.reset()
    tokens = list(session.generate(PROMPT, Sampler(0), 20))
    stop = tokens[7]
    session.reset()
    assert list(session.generate(PROMPT, Sampler(0), 20, frozenset({stop}))) == tokens[: tokens.index(stop) + 1]


def test_a_full_context_ends_the_tokens(session: Session) -> None:
    session.reset()
    tokens = list(session.generate(PROMPT, Sampler(0)))
    assert len(session.tokens) == SHAPE.context
    assert len(tokens) == SHAPE.context - len(PROMPT) + 1


def test_what_does_not_fit_is_refused_before_anything_is_computed(session: Session) -> None:
    session.reset()
    session.feed(PROMPT)
    for tokens, error in (([1] * 34, ContextError), ([], ModelError), ([SHAPE.vocab], ModelError), ([-1], ModelError)):
        with pytest.raises(error):
            session.feed(tokens)
        assert session.tokens == PROMPT


def test_a_reply_streams_text_and_knows_its_figures(session: Session, path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    session.reset()
    reply = Reply(session, tokenizer, tokenizer.encode("the"), Sampler(1.0, seed=3), 12)
    text = "".join(reply)
    assert text == tokenizer.decode(reply.tokens)
    assert reply.ended in ("limit", "stop")
    assert reply.first_token is not None
    assert reply.first_token > 0
    assert reply.tokens_per_second is not None
    assert reply.tokens_per_second > 0


def test_a_reply_ends_in_front_of_a_string_that_stops_it(session: Session, path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    session.reset()
    unstopped = Reply(session, tokenizer, tokenizer.encode("the"), Sampler(1.0, seed=3), 12)
    whole = "".join(unstopped)
    middle = whole[len(whole) // 2 :][:3]
    session.reset()
    reply = Reply(session, tokenizer, tokenizer.encode("the"), Sampler(1.0, seed=3), 12, ("never said", middle))
    assert "".join(reply) == whole[: whole.index(middle)]
    assert reply.ended == "stop"
    assert reply.tokens == unstopped.tokens[: len(reply.tokens)]
    assert len(reply.tokens) < 12


def test_two_sessions_of_one_model_do_not_mix(session: Session, reference: Reference) -> None:
    other = Session(session.model, chunk=8, short=4)
    session.reset()
    for at, token in enumerate(PROMPT):
        session.feed([token])
        other.feed([PROMPT[-1 - at]])
    assert np.allclose(session.feed([4]), reference.logits([*PROMPT, 4])[-1], atol=0.02)
    assert np.allclose(other.feed([4]), reference.logits([*PROMPT[::-1], 4])[-1], atol=0.02)
