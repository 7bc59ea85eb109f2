"""A conversation's tokens are those of its cache, whatever was closed, cut short, overtaken or taken back before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from tiny_llama import TYPE, Shape, write

from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.engine import LONGER_PROMPT_TOKENS, Engine
from tegrad.llm.errors import ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.loop import LoopError
from tegrad.llm.prefill import Prefill
from tegrad.llm.reference import Reference
from tegrad.llm.sampler import Logprobs, Sampler
from tegrad.llm.sampling import Sampling, Settings
from tegrad.llm.state import State, States

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=1400)
STEPPED = {
    "rows of 32": (replace(SHAPE, dim=32, ffn=48, heads=2, kv_heads=1, context=128), TYPE.F32),
    "rows of 288": (replace(SHAPE, dim=288, ffn=576, heads=6, kv_heads=3, context=128), TYPE.F16),
    "F32 matrices": (replace(SHAPE, context=128), TYPE.F32),
}
"""Models that the kernels for prompts refuse."""
F32_OUTPUT = {"attn_output": TYPE.Q6_K, "output.w": TYPE.F32}
"""A model of which they refuse the logits of many tokens alone."""
PROMPT = [5, 9, 77, 100, 3, 8, 1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("conversation") / "model.gguf", SHAPE, TYPE.Q6_K)


@pytest.fixture(scope="module")
def shared(path: Path, device: str) -> Iterator[Engine]:
    with Gguf.open(path) as file, Engine(file, device=device, short=8, chunks=(128,)) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """The engine without any tokens."""
    shared.reset()
    return shared


def other_text(engine: Engine) -> None:
    """Leave another text's keys and values in the cache: zeros might hide that a token's are missing."""
    engine.feed_all([(11 * at + 2) % 300 for at in range(100)])
    engine.reset()


@pytest.mark.parametrize(
    ("count", "kinds"), [(17, {}), pytest.param(40, {}, marks=pytest.mark.long), (64, {}), (65, {}), (65, F32_OUTPUT)]
)
def test_a_prompt_is_fed_alike_whatever_came_before(
    tmp_path: Path, device: str, count: int, kinds: dict[str, TYPE]
) -> None:
    """Not a bit of its logits differs where the kernels for chunks were loaded by a longer text before.

    Nor where they refused the logits of each of its tokens.
    """
    prompt, long = [(5 * at + 3) % 200 for at in range(count)], [(7 * at) % 200 for at in range(200)]
    path = write(tmp_path / "model.gguf", SHAPE, TYPE.Q6_K, kinds=kinds)
    found = []
    for before in (False, True):
        with Gguf.open(path) as file, Engine(file, device=device, chunks=(128,)) as engine:
            if before:
                engine.feed_all(long if not kinds else long[:3])
                engine.reset()
                list(engine.generate(long, Sampler(0), 2))
                engine.reset()
                assert engine._prefill is not None
            logits = engine.feed(prompt)
            assert before or (engine._prefill is not None) == (count > LONGER_PROMPT_TOKENS)
            engine.reset()
            found.append((logits.tobytes(), list(engine.generate(prompt, Settings(0.9, top_k=20), 5, seed=3))))
    assert found[0] == found[1]


@pytest.mark.parametrize("count", [7, 30], ids=["in steps", "in chunks"])
def test_a_limit_of_no_tokens_leaves_the_whole_prompt_in_the_cache(engine: Engine, count: int) -> None:
    prompt = [(7 * at) % 300 for at in range(count)]
    expected = engine.feed([*prompt, 9])
    engine.reset()
    other_text(engine)
    assert list(engine.generate(prompt, Sampler(0.5), 0)) == []
    assert engine.tokens == prompt
    after = engine.feed([9])
    assert np.sqrt(((after - expected) ** 2).mean()) < 0.03 * expected.std()


@pytest.mark.parametrize("count", [7, 30], ids=["in steps", "in chunks"])
def test_a_prompt_that_is_interrupted_is_none_of_the_tokens(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    def interrupted(*_: int) -> list[int]:
        raise KeyboardInterrupt

    prompt = [(7 * at) % 300 for at in range(count)]
    expected = list(engine.generate(prompt, Sampler(0), 4))
    engine.reset()
    other_text(engine)
    with monkeypatch.context() as patch:
        patch.setattr(engine._states, "tokens", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(engine.generate(prompt, Sampler(0)))
    assert engine.tokens == []
    assert list(engine.generate(prompt, Sampler(0), 4)) == expected
    assert engine.tokens == [*prompt, *expected[:-1]]


LATER: dict[str, Callable[[Engine], Any]] = {
    "generate": lambda engine: next(engine.generate([20, 21], Sampler(0.9, top_k=40, seed=3))),
    "feed": lambda engine: engine.feed([20, 21]),
    "feed_all": lambda engine: engine.feed_all([20, 21]),
    "reset": lambda engine: engine.reset(3),
}


@pytest.mark.parametrize("use", LATER.values(), ids=LATER)
def test_a_stream_is_over_once_the_conversation_is_used_otherwise(engine: Engine, use: Callable[[Engine], Any]) -> None:
    older = engine.generate(PROMPT, Sampler(0))
    first = [next(older), next(older)]
    use(engine)
    kept = list(engine.tokens)
    with pytest.raises(LoopError, match="used otherwise meanwhile: this stream is over"):
        next(older)
    assert engine.tokens == kept
    assert kept[: len(PROMPT) + 1] == [*PROMPT, first[0]][: len(kept)]


def test_an_older_stream_takes_nothing_from_a_newer_one(engine: Engine) -> None:
    sampler = Settings(0.9, top_k=40)
    list(engine.generate(PROMPT, Sampler(0), 2))
    alone = list(engine.generate([20, 21], sampler, 6, seed=3))
    engine.reset()
    older = engine.generate(PROMPT, Sampler(0))
    next(older), next(older)
    newer = engine.generate([20, 21], sampler, 6, seed=3)
    found = [next(newer)]
    with pytest.raises(LoopError):
        next(older)
    assert [*found, *newer] == alone
    assert engine.tokens[-7:] == [20, 21, *alone[:-1]]


@pytest.mark.parametrize(("shape", "kind"), STEPPED.values(), ids=STEPPED)
def test_prompts_of_models_that_only_decode_are_fed_a_step_each(
    tmp_path: Path, device: str, shape: Shape, kind: TYPE
) -> None:
    path = write(tmp_path / "model.gguf", shape, kind)
    prompt = [(7 * at) % 300 for at in range(80)]
    expected = Reference(path).logits(prompt)
    with Gguf.open(path) as file, Engine(file, device=device) as engine:
        assert next(engine.generate(prompt, Sampler(0))) == expected[-1].argmax()
        assert engine.tokens == prompt
        assert next(engine.generate([9], Sampler(0))) == Reference(path).logits([*prompt, 9])[-1].argmax()
    with Gguf.open(path) as file, Engine(file, device=device) as engine:
        every = np.concatenate([engine.feed_all(prompt[:5]), engine.feed_all(prompt[5:])])
        assert np.sqrt(((every - expected) ** 2).mean()) < 0.03 * expected.std()
        assert engine.tokens == prompt


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_prompts_of_f32_matrices_are_as_exact_as_steps(tmp_path: Path, device: str, arch: str) -> None:
    """Products of halves err 2.5 times as much; a batch, which has no others, says so."""
    kv_heads = 4 if arch == "gpt2" else SHAPE.kv_heads
    path = write(tmp_path / "model.gguf", replace(SHAPE, arch=arch, kv_heads=kv_heads, context=128), TYPE.F32)
    prompt = [(7 * at) % 300 for at in range(30)]
    expected = Reference(path).logits(prompt)
    with Gguf.open(path) as file, Engine(file, device=device, short=8) as engine:
        assert np.abs(engine.feed_all(prompt) - expected).mean() < 3e-4 * expected.std()
        with Batch(engine.model, slots=1, positions=48, sizes=(32,)) as batch:
            with pytest.raises(UnsupportedModelError, match="F32 matrices are not run"):
                batch.join(prompt)
            assert batch.members == ()


def test_penalties_look_at_the_tokens_that_a_reset_kept(engine: Engine) -> None:
    """The device remembers 1,024 positions: those that a reset takes back have pushed the first ones out."""
    kept, settings = [(7 * at) % 300 for at in range(40)], Settings(repeat=1.8)
    engine.feed_all(kept)
    expected = list(engine.generate([9], settings, 8))
    engine.reset(keep=40)
    engine.feed_all([(11 * at + 2) % 300 for at in range(1200)])
    engine.reset(keep=40)
    assert list(engine.generate([9], settings, 8)) == expected


@pytest.mark.parametrize("count", [1, 7, 30], ids=["one token", "in steps", "in chunks"])
def test_steps_with_a_part_of_the_hosts_say_what_steps_that_run_ahead_say(engine: Engine, count: int) -> None:
    prompt, settings = [(7 * at) % 300 for at in range(count)], Settings(0.9, top_k=40, repeat=1.3)
    for kind in (Settings(), settings):
        engine.reset()
        expected = list(engine.generate(prompt, kind, 6, seed=3))
        assert engine.logprobs == []
        engine.reset()
        other_text(engine)
        assert list(engine.generate(prompt, kind, 6, seed=3, mask=lambda _: None)) == expected
        assert engine.tokens == [*prompt, *expected[:-1]]
        engine.reset()
        assert list(engine.generate(prompt, replace(kind, logprobs=2), 6, seed=3)) == expected
        assert len(engine.logprobs) == 6


def test_log_probabilities_are_those_of_the_steps_logits(engine: Engine) -> None:
    tokens = list(engine.generate(PROMPT, Settings(0.8, biases=((11, 3.0),), logprobs=5), 6, seed=1))
    found = engine.logprobs
    engine.reset()
    for fed, token, told in zip([PROMPT, *([token] for token in tokens)], tokens, found, strict=False):
        expected = Logprobs.of(engine.feed(fed), token, 5)
        assert abs(told.taken - expected.taken) < 1e-4
        assert [each for each, _ in told.likeliest] == [each for each, _ in expected.likeliest]
    assert len(found) == 6


def test_a_mask_decides_what_is_said_and_one_that_leaves_nothing_is_an_error(engine: Engine) -> None:
    word = [17, 300, 0, 31, 32, 299]

    def allowed(written: Sequence[int]) -> bytes:
        every = np.arange(SHAPE.vocab) == word[len(written)] if len(written) < len(word) else np.zeros(SHAPE.vocab)
        bits = np.packbits(every.astype(bool), bitorder="little").tobytes()
        return bits.ljust(-(-SHAPE.vocab // 32) * 4, b"\0")

    for settings in (Settings(), Settings(0.9), Settings(1.2, top_k=5)):
        engine.reset()
        assert list(engine.generate(PROMPT, settings, len(word), mask=allowed)) == word
        assert engine.tokens == [*PROMPT, *word[:-1]]
        assert list(engine.generate([9], settings, 9, frozenset({31}), mask=allowed)) == word[:4]
        with pytest.raises(ModelError, match="the mask and the biases leave none"):
            list(engine.generate([9], settings, 9, mask=allowed))
        kept = list(engine.tokens)
        with pytest.raises(ModelError, match="the mask and the biases leave none"):
            next(engine.generate(PROMPT, settings, mask=lambda _: allowed([0] * 6)))
        assert engine.tokens == kept


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose logits are not numbers."""
    sound = tiny_llama.weights
    with pytest.MonkeyPatch.context() as patch:
        nan = {"output_norm.weight": np.full(SHAPE.dim, np.nan, np.float32)}
        patch.setattr(tiny_llama, "weights", lambda *given: sound(*given) | nan)
        return write(tmp_path_factory.mktemp("broken") / "model.gguf", SHAPE, TYPE.Q6_K)


BROKEN = (Settings(), Settings(repeat=1.5), Settings(0.5, top_k=20), Settings(0.5, top_p=0.95), Settings(0.5))


def test_logits_that_are_not_numbers_are_an_error_and_no_tokens(broken: Path, device: str) -> None:
    with Gguf.open(broken) as file, Engine(file, device=device) as engine:
        for settings in BROKEN:
            with pytest.raises(ModelError, match="broken; download or convert it again"):
                next(engine.generate(PROMPT, settings))
            assert engine.tokens == []
        with Batch(engine.model, slots=1, positions=48, sizes=(8,)) as batch:
            member = batch.join(PROMPT)
            assert batch.step() == []
            assert "the model's logits are not numbers" in str(member.error)
            assert member.finished
            assert (member.tokens, batch.members) == ([], ())


def test_a_closed_engine_says_so_and_another_one_on_its_device_goes_on(path: Path, engine: Engine) -> None:
    expected = list(engine.generate(PROMPT, Sampler(0), 3))
    with Gguf.open(path) as file, Engine(file) as closed:
        begun = closed.generate(PROMPT, Sampler(0))
        next(begun)
    uses: list[Callable[[], Any]] = [
        lambda: next(begun),
        lambda: closed.feed([1]),
        lambda: closed.feed_all([1]),
        lambda: next(closed.generate([1], Sampler(0))),
        lambda: next(closed.generate([1], Sampler(0.5))),
    ]
    for use in uses:
        with pytest.raises(ModelError, match="this engine was closed: make a new one"):
            use()
    engine.reset()
    assert list(engine.generate(PROMPT, Sampler(0), 3)) == expected


def test_a_closed_batch_says_so_and_leaving_it_is_harmless(engine: Engine) -> None:
    with Batch(engine.model, slots=1, positions=48, sizes=(8,)) as batch:
        member = batch.join(PROMPT)
        batch.step()
    batch.leave(member)
    for use in (batch.step, lambda: batch.join(PROMPT)):
        with pytest.raises(ModelError, match="this batch was closed: make a new one"):
            use()


def test_what_an_engine_is_made_of_is_not_written_once_it_is_closed(engine: Engine) -> None:
    with KvCache(engine.device, engine.config, 48) as cache, Prefill(engine.model, cache, sizes=(8,)) as prefill:
        pass
    states, sampling = States(engine.device), Sampling(engine.device, SHAPE.vocab)
    states.close()
    sampling.close()
    uses: list[Callable[[], Any]] = [
        lambda: prefill.run(PROMPT),
        lambda: prefill.score(PROMPT),
        lambda: states.write(0, State()),
        lambda: states.begin(0, [1], 0, 9),
        lambda: states.read(0),
        lambda: states.token(0, 1),
        lambda: sampling.set(0, Settings()),
        lambda: sampling.remember(0, [1], 0),
    ]
    for use in uses:
        with pytest.raises(ModelError, match="closed: make"):
            use()
