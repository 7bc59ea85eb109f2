"""Sampling on the board: what numpy keeps is kept, draws are those of the reference, and steps end as they should."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sampling_reference as reference
from operands import Operands
from sampling_rig import NARROW, VOCAB, WIDE, Rig, random_logits

from tegrad.llm.errors import ModelError
from tegrad.llm.sampling import CHUNK, HISTORY, Settings

pytestmark = pytest.mark.board

PENALTIES = (
    Settings(0.0, repeat=1.3, frequency=0.7),
    Settings(0.9, top_k=20, repeat=1.2, presence=0.5, frequency=0.4, last_n=10),
    Settings(0.9, top_p=0.9, presence=-0.5, frequency=1.0),
    Settings(1.0, top_k=300, repeat=0.8, last_n=HISTORY),
)


@pytest.fixture
def rig(operands: Operands) -> Iterator[Any]:
    """Makes rigs; all of their buffers, states and work space as well, are operands."""
    made: list[Rig] = []

    def make(*args: Any, **kwargs: Any) -> Rig:
        with operands.placing():
            made.append(Rig(operands, *args, **kwargs))
        return made[-1]

    yield make
    with operands.placing():
        for one in made:
            one.close()


@pytest.mark.parametrize("best", [True, False], ids=["of the best of 32", "of all"])
def test_greedy_takes_the_likeliest_and_of_equals_the_first(rig: Any, best: bool) -> None:
    logits = random_logits(4)
    logits[1, [77, 78, 1400, 2602]] = 50
    logits[2] = -7
    logits[3, 2602] = 50
    made = rig([Settings()] * 4, logits)
    for slot in range(4):
        made.begin(slot)
    made.step(greedy=best)
    assert made.tokens() == [int(np.argmax(logits[0])), 77, 0, 2602]
    if not best:  # the counters are as they were
        others = random_logits(4, seed=7)
        made.step(others)
        assert made.tokens() == others.argmax(1).tolist()


def test_every_mix_of_filters_draws_what_the_twin_draws(rig: Any) -> None:
    """Slots with settings of all kinds in one step, over several steps: the kernels leave alone what is not theirs."""
    settings = [*NARROW, *WIDE] * 3
    made = rig(settings, random_logits(len(settings)))
    seeds = [slot * 0x123456789 for slot in range(len(settings))]
    for slot, seed in enumerate(seeds):
        made.begin(slot, position=slot, seed=seed)
    for step in range(3):
        logits = random_logits(len(settings), seed=step)
        made.step(logits)
        expected = [reference.draw(logits[s], settings[s], seeds[s], s + step) for s in range(len(settings))]
        assert made.tokens() == expected


def test_equal_logits_are_kept_by_their_index(rig: Any) -> None:
    """Logits of few values: every border lies among equal ones."""
    settings = [*NARROW, *WIDE]
    made = rig(settings, random_logits(len(settings)))
    for slot in range(len(settings)):
        made.begin(slot, seed=slot)
    for step in range(3):
        logits = np.round(random_logits(len(settings), seed=step))
        made.step(logits)
        assert made.tokens() == [reference.draw(logits[s], settings[s], s, step) for s in range(len(settings))]


@pytest.mark.parametrize("vocab", [CHUNK, CHUNK + 1, 2 * CHUNK + 1])
def test_the_last_token_of_any_vocabulary_is_drawn_where_it_is_the_likeliest(rig: Any, vocab: int) -> None:
    settings = [Settings(), Settings(0.8, top_k=5), Settings(0.8), Settings(0.8, top_p=0.9)]
    logits = random_logits(len(settings), vocab)
    logits[:, -1] = 60
    made = rig(settings, logits)
    for slot in range(len(settings)):
        made.begin(slot)
    made.step()
    assert made.tokens() == [vocab - 1] * len(settings)


@pytest.mark.parametrize("one", [NARROW[1], Settings(1.0, top_p=0.9, min_p=0.2)], ids=["narrow", "wide"])
def test_the_kept_set_is_numpys(rig: Any, one: Settings) -> None:
    """At a huge temperature all that is kept is equally likely: many draws find all of it and nothing else."""
    hot = Settings(1e6, one.top_p, one.min_p, one.top_k)
    slots = 96
    logits = np.tile(random_logits(1) / 3, (slots, 1))
    made = rig([hot] * slots, logits)
    for slot in range(slots):
        made.begin(slot, seed=slot)
    drawn: set[int] = set()
    for _ in range(9):
        made.step()
        drawn |= set(made.tokens())
    assert drawn == set(reference.kept(logits[0].astype(np.float64), hot)[0].tolist())
    assert len(drawn) > 20


@pytest.mark.parametrize("one", [Settings(0.8, top_k=12), Settings(0.8, top_p=0.97)], ids=["narrow", "wide"])
def test_draws_follow_the_probabilities(rig: Any, one: Settings) -> None:
    slots, steps = 128, 12
    logits = np.full((1, VOCAB), -40, np.float32)
    logits[0, 5::200] = np.linspace(-2, 2, len(logits[0, 5::200]))
    made = rig([one] * slots, np.tile(logits, (slots, 1)))
    for slot in range(slots):
        made.begin(slot, seed=1000 + slot)
    tokens, chances = reference.kept(logits[0].astype(np.float64), one)
    drawn: list[int] = []
    for _ in range(steps):
        made.step()
        drawn += made.tokens()
    seen = np.array([drawn.count(token) for token in tokens])
    assert seen.sum() == slots * steps
    expected = chances * slots * steps
    square = float(((seen - expected) ** 2 / expected).sum())
    assert square < len(tokens) + 4 * np.sqrt(2 * len(tokens))  # four standard deviations above the mean


def test_penalties_follow_the_text(rig: Any) -> None:
    """A text of 24 tokens, from a prompt that the host fed, across the end of the history's ring."""
    made = rig(PENALTIES, random_logits(len(PENALTIES)))
    start = 2 * HISTORY - 8
    prompt = [int(token) for token in np.random.default_rng(5).integers(0, 40, start + 1)]
    texts = [list(prompt) for _ in PENALTIES]
    for slot in range(len(PENALTIES)):
        made.sampling.remember(slot, prompt[:-1], 0)
        made.begin(slot, position=start, seed=9, token=prompt[-1])
    logits = np.full((len(PENALTIES), VOCAB), -9, np.float32)
    logits[:, :40] = random_logits(len(PENALTIES), 40)
    for step in range(24):
        made.step(logits)
        for slot, one in enumerate(PENALTIES):
            row = reference.penalized(logits[slot], one, texts[slot])
            texts[slot].append(reference.draw(row, one, 9, start + step))
        assert made.tokens() == [text[-1] for text in texts]
    assert len(set(texts[0][start:])) > 3


def test_equal_seeds_draw_equally_whatever_launches_do_it(rig: Any) -> None:
    """A top-k of 100 in one launch, one of 129 or none over logits with 100 of any weight in several."""
    logits = np.full((6, VOCAB), -300, np.float32)
    logits[:, 7:107] = random_logits(1, 100)
    settings = [Settings(1.0, top_k=100), Settings(1.0, top_k=129), Settings(1.0)] * 2
    made = rig(settings, logits)
    for slot in range(6):
        made.begin(slot, seed=slot // 3)
    rows = []
    for _ in range(8):
        made.step(logits)
        rows.append(made.tokens())
    texts = list(zip(*rows, strict=True))
    assert texts[0] == texts[1] == texts[2] != texts[3] == texts[4] == texts[5]


def test_a_step_ends_as_the_state_says(rig: Any) -> None:
    """Stopped by an end token, by the limit, forced to another token, not active, and going on."""
    settings = [Settings(), Settings(1.0, top_k=3), Settings(1.0), Settings(), Settings(1.0, top_p=0.5)]
    logits = random_logits(5)
    logits[:, 1234] = 100
    for ends, stopped in (((1234,), True), ((1, 1235), False)):
        for greedy in (False, True):
            made = rig(settings if not greedy else [Settings()] * 5, logits, ends=ends)
            made.begin(0, position=5)
            made.begin(1, position=6, limit=7)
            made.states.begin(2, [4, 1234, 9], 7, 100)
            made.begin(4)
            made.step(logits, greedy=greedy)
            made.step(logits, greedy=greedy)
            seen = [made.states.read(slot) for slot in range(5)]
            assert [s.stop for s in seen] == [stopped, 1, 0, 1, stopped]
            assert [s.written for s in seen] == [1 if stopped else 2, 1, 2, 0, 1 if stopped else 2]
            assert [s.position for s in seen] == [6 if stopped else 7, 6, 9, 0, 1 if stopped else 2]
            assert seen[2].token == 9
            assert [made.states.token(slot, 1) for slot in range(5)] == [1234, 1234, 1234, None, 1234]


def test_the_largest_vocabularies_and_ties_without_end(rig: Any) -> None:
    """More candidates than the last CTA holds at a time: all logits equal, then all different."""
    vocab = 140_000
    one = Settings(1.0, top_k=128)
    made = rig([one], np.zeros((1, vocab), np.float32))
    for seed in range(3):
        made.begin(0, seed=seed)
        made.step()
        assert made.tokens() == [reference.draw(np.zeros(vocab), one, seed, 0)]
    logits = random_logits(1, vocab)
    for seed in range(3):
        made.begin(0, seed=seed)
        made.step(logits)
        assert made.tokens() == [reference.draw(logits[0], one, seed, 0)]


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": 1e-6},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": 2},
        {"top_k": -1},
        {"repeat": 0},
        {"frequency": float("inf")},
        {"last_n": HISTORY + 1},
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ModelError, match="cannot sample"):
        Settings(**settings)  # type: ignore[arg-type]
