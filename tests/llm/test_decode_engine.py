"""The engine continues, rewinds, stops and refuses as a session does; prompts in chunks are prompts token by token."""

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_llama import TYPE, Shape, write

from tegrad.llm import engine as module
from tegrad.llm.engine import Engine, suits_named
from tegrad.llm.errors import ContextError, ModelError, OutOfMemory, UnsupportedModelError
from tegrad.llm.generate import Reply
from tegrad.llm.gguf import Gguf
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.sampler import Sampler
from tegrad.llm.sampling import Settings
from tegrad.llm.tokenizer import Tokenizer
from tegrad.nv.faults import DeviceClosed

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2, context=48)
PROMPT = [5, 9, 77, 100, 3, 8, 1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("engine") / "model.gguf", SHAPE, TYPE.Q6_K, kinds={"attn_v": TYPE.Q4_K})


@pytest.fixture(scope="module")
def shared(path: Path, device: str) -> Iterator[Engine]:
    with Gguf.open(path) as file, Engine(file, device=device, short=8, chunks=(16,)) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """The engine without any tokens."""
    shared.reset()
    return shared


def test_logits_are_the_references_but_for_rounded_activations(engine: Engine, path: Path) -> None:
    reference = Reference(path).logits(PROMPT)
    for at in range(len(PROMPT)):
        difference = engine.feed(PROMPT[at : at + 1]) - reference[at]
        assert np.sqrt((difference**2).mean()) < 0.03 * reference.std()
    assert engine.tokens == PROMPT


def test_steps_that_are_submitted_together_leave_the_logits_of_the_last_token(
    engine: Engine, path: Path, device: str
) -> None:
    expected, prompt = engine.feed(PROMPT[:3]), PROMPT[:3]
    with Gguf.open(path) as file, Engine(file, device=device, steps_per_submission=2) as pairs:
        np.testing.assert_array_equal(pairs.feed(prompt), expected)
        assert len(list(pairs.generate([1], Settings(), 3))) == 3


def test_greedy_tokens_are_the_largest_logits(engine: Engine) -> None:
    tokens = list(engine.generate(PROMPT, Sampler(0), 12))
    assert engine.tokens == PROMPT + tokens[:-1]
    engine.reset()
    logits = [engine.feed(PROMPT), *(engine.feed([token]) for token in tokens[:-1])]
    assert tokens == [int(one.argmax()) for one in logits]


def test_a_prompt_in_chunks_is_the_prompt_token_by_token(engine: Engine) -> None:
    prompt = [(7 * at) % 300 for at in range(30)]
    whole = engine.feed(prompt)
    engine.reset()
    for at in range(0, 30, 5):
        parts = engine.feed(prompt[at : at + 5])
    assert np.sqrt(((whole - parts) ** 2).mean()) < 0.03 * parts.std()


def test_a_prompt_in_chunks_computes_no_logits_but_those_of_its_last_token(engine: Engine) -> None:
    engine.feed([(7 * at) % 300 for at in range(30)])
    assert engine._prefill is not None
    assert (0, False, False) not in engine._prefill._recordings  # 0: the logits of a chunk's last token


def test_all_logits_of_a_text_are_the_references_and_it_goes_on(engine: Engine, path: Path) -> None:
    """30 tokens in two chunks, the second after a step in flight; prompts round activations to halves, not to int8."""
    text = [(7 * at) % 300 for at in range(30)]
    expected = Reference(path).logits([*text, 9])
    logits = np.concatenate([engine.feed_all(text[:5]), engine.feed(text[5:6])[None], engine.feed_all(text[6:])])
    error = np.abs(logits - expected[:30]).max(axis=1) / expected.std()
    assert np.delete(error, 5).max() < 0.1 > error[:5].max() * 5
    assert engine.tokens == text
    assert np.sqrt(((engine.feed([9]) - expected[30]) ** 2).mean()) < 0.03 * expected.std()
    with pytest.raises(ContextError, match="shorten"):
        engine.feed_all([1] * 18)
    with pytest.raises(ModelError, match="at least one"):
        engine.feed_all([])


def test_a_conversation_goes_on_and_rewinds(engine: Engine) -> None:
    first = list(engine.generate(PROMPT, Sampler(0), 5))
    second = list(engine.generate([first[-1], 20, 21], Sampler(0), 5))
    engine.reset()
    assert list(engine.generate([*PROMPT, *first, 20, 21], Sampler(0), 5)) == second
    engine.reset(keep=len(PROMPT))
    assert list(engine.generate([*first, 20, 21], Sampler(0), 5)) == second


def test_a_stop_ends_the_tokens_and_is_the_last(engine: Engine) -> None:
    tokens = list(engine.generate(PROMPT, Sampler(0), 12))
    stop = tokens[5]
    engine.reset()
    expected = tokens[: tokens.index(stop) + 1]
    assert list(engine.generate(PROMPT, Sampler(0), 12, frozenset({stop}))) == expected
    assert engine.tokens == PROMPT + expected[:-1]


@pytest.mark.parametrize(
    "settings",
    [{"top_k": 40}, pytest.param({"top_p": 0.95}, marks=pytest.mark.long), pytest.param({}, marks=pytest.mark.long)],
    ids=str,
)
def test_equal_seeds_draw_equal_tokens(engine: Engine, settings: dict[str, Any]) -> None:
    def drawn(sampler: Sampler | Settings, **seed: int) -> list[int]:
        engine.reset()
        return list(engine.generate(PROMPT, sampler, 12, **seed))

    warm = drawn(Sampler(1.5, **settings, seed=3))
    assert drawn(Settings(1.5, **settings), seed=3) == warm
    assert drawn(Sampler(1.5, **settings, seed=4)) != warm
    assert len({tuple(drawn(Sampler(1.5, **settings))) for _ in range(3)}) == 3


def test_the_context_ends_the_tokens(engine: Engine) -> None:
    tokens = list(engine.generate(PROMPT, Sampler(0)))
    assert len(tokens) == engine.context - len(PROMPT) + 1
    assert engine.tokens == PROMPT + tokens[:-1]
    with pytest.raises(ContextError, match="49 tokens exceed the context of 48: shorten the prompt"):
        engine.feed([1])


@pytest.mark.parametrize(("tokens", "why"), [([], "nothing to continue"), ([301], "outside of the vocabulary of 301")])
def test_tokens_that_cannot_be_fed_are_refused(engine: Engine, tokens: list[int], why: str) -> None:
    with pytest.raises(ModelError, match=why):
        engine.feed(tokens)
    with pytest.raises(ModelError, match=why):
        next(engine.generate(tokens, Sampler(0)))


def test_a_reply_reads_it_as_a_session(engine: Engine, path: Path) -> None:
    with Gguf.open(path) as file:
        reply = Reply(engine, Tokenizer(file), PROMPT, Sampler(0), 6)
    list(reply)
    assert (len(reply.tokens), reply.ended) == (6, "limit")
    assert reply.first_token is not None


def test_an_engine_leaves_nothing_on_the_device(path: Path, shared: Engine) -> None:
    held = len(shared.device.iface.memory)
    with Gguf.open(path) as file:
        with Engine(file) as engine:
            next(engine.generate(PROMPT, Sampler(0)))
            next(engine.generate(PROMPT, Sampler(1, top_k=40, seed=2)))
        engine.close()
        del engine
        gc.collect()
        assert len(shared.device.iface.memory) == held
        for error, seen in ((MemoryError("full."), OutOfMemory), (UnsupportedModelError("odd"), UnsupportedModelError)):

            def plan(*given: Any, error: Exception = error) -> DecodePlan:
                raise error

            with pytest.raises(seen):
                Engine(file, plan=plan)
        assert len(shared.device.iface.memory) == held


@pytest.mark.parametrize(
    ("device", "arch", "fits"),
    [
        ("NV", "sm_87", True),
        ("NV:1", "sm_90a", True),
        ("NV", "sm_75", False),
        ("CPU", None, False),
        ("CUDA", "sm_90", False),
    ],
)
def test_our_kernels_run_on_nv_from_ampere_on(
    monkeypatch: pytest.MonkeyPatch, device: str, arch: str | None, fits: bool
) -> None:
    monkeypatch.setattr("tegrad.llm.engine.opened", lambda name: SimpleNamespace(device=name, arch=arch))
    assert suits_named(device) == fits


def test_an_engine_whose_device_was_closed_says_so_and_closes(path: Path, shared: Engine) -> None:
    """The last test of this file: the others' engine goes with the device."""
    stream = shared.generate([5], Sampler(0))
    shared.reset()
    next(stream)
    shared.device.close()
    with pytest.raises(DeviceClosed):
        list(stream)
    with pytest.raises(DeviceClosed):
        shared.feed([5])
    shared.close()
    with Gguf.open(path) as file, Engine(file) as anew:
        assert len(list(anew.generate(PROMPT, Sampler(0), 3))) == 3


def test_longer_prompts_take_steps_where_these_take_less_than_kernels_for_chunks(path: Path, device: str) -> None:
    with Gguf.open(path) as file, Engine(file, device=device, chunks=(16,)) as engine:
        assert engine._steps_at_most == module.LONGER_PROMPT_TOKENS
        engine._bytes = 10**12
        assert engine._steps_at_most == module.SHORT_PROMPT_TOKENS
    with Gguf.open(path) as file, Engine(file, device=device, short=3) as engine:
        assert engine._steps_at_most == 3
