"""Layers that attend within a window keep no more positions than that takes, and a conversation goes on nonetheless."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_steps import far
from tiny_llama import SHAPES, TYPE, write
from tinygrad import dtypes

from tegrad.bench.plans import DryDevice
from tegrad.hw.chips import CHIPS
from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.config import Config
from tegrad.llm.engine import Engine
from tegrad.llm.gguf import Gguf
from tegrad.llm.model import Model
from tegrad.llm.numerics import capped
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.reference import Reference
from tegrad.llm.sampling import Settings
from tegrad.llm.session import Session
from tegrad.llm.tokenizer import Tokenizer

CONTEXT, CHUNK, ROWS = 200, 16, 64
CAPPED = {**SHAPES["gemma3"].extra, "gemma3.final_logit_softcapping": 60.0}
GEMMA = replace(SHAPES["gemma3"], dim=64, ffn=64, heads=2, head_dim=64, context=CONTEXT, vocab=96, extra=CAPPED)
"""Two layers with windows of 9 positions, one without; and logits that are capped about where they are."""
TOKENS = np.random.default_rng(3).integers(0, GEMMA.vocab, CONTEXT).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("windows") / "model.gguf", GEMMA, TYPE.F16)


@pytest.fixture(scope="module")
def expected(path: Path) -> np.ndarray:
    return Reference(path).logits(TOKENS)


def test_the_cap_counts(path: Path, expected: np.ndarray) -> None:
    """So that the other tests are tests of it too."""
    assert far(expected, 60 * np.arctanh(expected / 60)) > 0.5
    assert np.abs(expected).max() < 59.9


@pytest.fixture(scope="module")
def engine(path: Path, device: str) -> Iterator[Engine]:
    with Gguf.open(path) as file, Engine(file, CONTEXT, device=device, short=8, chunks=(CHUNK,)) as made:
        yield made


def config(path: Path) -> Config:
    with Gguf.open(path) as file:
        return Config.read(file)


def test_a_ring_holds_the_window_and_a_chunk_in_whole_tiles(path: Path) -> None:
    device = DryDevice(CHIPS["gh100"])
    with KvCache(device, config(path), CONTEXT, ahead=CHUNK) as cache:
        assert [layer.rows for layer in cache.layers] == [ROWS, ROWS, CONTEXT]
    with KvCache(device, config(path), 40) as cache:
        assert [layer.rows for layer in cache.layers] == [40, 40, 40]


def test_a_ring_says_what_it_has_lost(path: Path) -> None:
    """Of 64 rows 9 are a window's: a sequence goes on wherever 56 positions or fewer have been written since."""
    with KvCache(DryDevice(CHIPS["gh100"]), config(path), CONTEXT, slots=2, ahead=CHUNK) as cache:
        rings = cache.rings
        rings.wrote(150, 1)
        assert rings.holds(150)
        assert [rings.holds(position, 1) for position in (0, 9, 93, 94, 150)] == [False, False, False, True, True]
        rings.wrote(100, 1)
        assert not rings.holds(93, 1)
        rings.begin(1)
        assert rings.holds(0, 1)


@pytest.mark.board
def test_a_conversation_goes_on_around_the_ring_and_back_to_what_it_has_lost(
    engine: Engine, expected: np.ndarray
) -> None:
    """Prompts in chunks and steps, to positions that a ring of 64 has twice over; then from where one still has what
    is attended to, and from where it has not."""
    engine.reset()
    for first, last in ((0, 100), (100, 103), (103, 150)):
        assert far(engine.feed(TOKENS[first:last]), expected[last - 1]) < 0.02
    before = engine._prompts().cache.rings.holds
    assert (before(120), before(60)) == (True, False)
    for keep, more in ((120, 3), (60, 2), (30, 12), (0, 5)):
        engine.reset(keep)
        assert far(engine.feed(TOKENS[keep : keep + more]), expected[keep + more - 1]) < 0.02
        assert engine.tokens == TOKENS[: keep + more]


@pytest.mark.board
def test_logits_of_every_token_are_those_of_a_prompt_that_a_ring_has_lost(engine: Engine, expected: np.ndarray) -> None:
    engine.reset()
    engine.feed(TOKENS[:130])
    engine.reset(20)
    assert far(engine.feed_all(TOKENS[20:60]), expected[20:60]) < 0.02
    assert far(engine.feed(TOKENS[60:61]), expected[60]) < 0.02


@pytest.mark.board
def test_states_after_the_last_norm_are_what_logits_are_made_of(
    engine: Engine, path: Path, expected: np.ndarray
) -> None:
    """Whose last layer's addition is still to be made when a prompt ends."""
    states = engine.hidden(TOKENS[:40])
    logits = capped(states @ Reference(path).weights["token_embd.weight"].T, 60.0)
    assert far(logits, expected[:40]) < 0.02


@pytest.mark.board
def test_generated_tokens_are_the_likeliest_beyond_the_window(engine: Engine, path: Path) -> None:
    engine.reset()
    tokens = [*TOKENS[:5], *engine.generate(TOKENS[:5], Settings(), 90)]
    logits = Reference(path).logits(tokens)[4:-1]
    chosen = logits[np.arange(90), tokens[5:]]
    assert (logits.max(axis=1) - chosen <= 0.02 * logits.std()).all()


@pytest.mark.board
@pytest.mark.long
def test_sequences_of_a_batch_go_around_their_rings(path: Path, device: str, expected: np.ndarray) -> None:
    from tegrad.llm.packed import PackedModel
    from tegrad.llm.rows import floats

    with (
        PackedModel.load(path, device) as model,
        Batch(model, slots=2, positions=CONTEXT, sizes=(CHUNK,)) as batch,
    ):
        other = batch.join(TOKENS[:100])
        for count in (140, 90):
            member = batch.join(TOKENS[:count], limit=count)
            while not member.finished:
                batch.step()
            assert other.tokens
            assert not other.finished
            logits = floats(model.device, batch.logits, 2 * GEMMA.vocab).reshape(2, -1)
            assert far(logits[member.slot], expected[count - 1]) < 0.02


def test_chunks_that_a_ring_does_not_take_are_refused(path: Path) -> None:
    from tegrad.bench import plans
    from tegrad.llm.formats import F16

    device: Any = DryDevice(CHIPS["gh100"])
    made = plans.model(config(path), F16, device)
    with (
        KvCache(device, made.config, CONTEXT, ahead=CHUNK) as cache,
        pytest.raises(ValueError, match="chunks of 32 tokens go into a cache whose rings take 16"),
    ):
        Prefill(made, cache, sizes=(CHUNK, 2 * CHUNK))


def test_layers_that_attend_alike_share_a_kernel(path: Path) -> None:
    from tegrad.bench import plans
    from tegrad.llm.formats import F16
    from tegrad.llm.state import States

    device: Any = DryDevice(CHIPS["gh100"])
    made = plans.model(config(path), F16, device)
    plan = DecodePlan(made, States(device), KvCache(device, made.config, CONTEXT, ahead=CHUNK))
    attention = [named.launch.program for named in plan.named if named.kind == "attention"]
    assert attention[0] is attention[1]
    assert attention[0] is not attention[2]


@pytest.mark.board
def test_tinygrads_operations_go_around_their_rings_too(path: Path, device: str, expected: np.ndarray) -> None:
    running = Session(Model.load(path, device), CONTEXT, cache_dtype=dtypes.float32, chunk=CHUNK, short=8)
    assert [layer.shape[1] for layer in running._cache.layers] == [ROWS, ROWS, CONTEXT + CHUNK]
    assert far(running.feed_all(TOKENS[:150]), expected[:150]) < 0.02
    for at in range(150, 153):
        assert far(running.feed(TOKENS[at : at + 1]), expected[at]) < 0.02
    for keep, more in ((140, 1), (30, 2)):  # all that is attended to is there, and is not
        running.reset(keep)
        assert far(running.feed(TOKENS[keep : keep + more]), expected[keep + more - 1]) < 0.02
        assert running.tokens == TOKENS[: keep + more]


@pytest.mark.board
@pytest.mark.long
def test_a_published_gemma_reads_a_text_of_more_than_its_rings(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 270M in Q4_K_M, whose windows are of 512 positions: a prompt, steps, and back to what rings have lost."""
    from real_models import fetched

    monkeypatch.setenv("HCQDEV_WAIT_TIMEOUT_MS", "600000")
    path, count = fetched("gemma3"), 1100
    text = (Path(__file__).parents[2] / "docs" / "llm.md").read_text()
    tokens = Tokenizer.load(path).encode(text[: 8 * count])[: count + 3]
    exact = Reference(path).logits(tokens)
    with Gguf.open(path) as file, Engine(file, 2048, device=device, short=8) as engine:

        def near(logits: np.ndarray, at: int) -> None:
            far = 0.03 * exact[at].std()
            assert (logits - exact[at]).std() < far
            assert exact[at].max() - exact[at][logits.argmax()] < far  # the text, a page of ours, may have ties

        near(engine.feed(tokens[:count]), count - 1)
        for at in range(count, count + 3):
            near(engine.feed(tokens[at : at + 1]), at)
        engine.reset(520)
        near(engine.feed(tokens[520:530]), 529)
        assert not engine._prompts().lost
