"""Sampling on the board: what numpy keeps is kept, draws are those of the reference, and steps end as they should."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import sampling_reference as reference
from operands import Operands
from sampling_rig import NARROW, VOCAB, WIDE, Rig, random_logits

from tegrad.llm import sampling
from tegrad.llm.errors import ModelError
from tegrad.llm.sampler import BIASES, LIKELIEST
from tegrad.llm.sampling import CHUNK, HISTORY, RECORDS, Logprobs, Settings, ending

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


def test_a_border_among_equal_logits_lies_where_numpy_has_it(rig: Any) -> None:
    """All that is kept is equally likely, so that tokens at the border are drawn; every other has biases."""
    settings = [
        Settings(1e6, top_k=140 + slot if slot % 3 else 0, top_p=0.3 if slot % 3 != 1 else 1.0,
                 biases=((VOCAB - 1, 9.0), (2, 9.0)) if slot % 2 else ())
        for slot in range(32)
    ]  # fmt: skip
    made = rig(settings, random_logits(len(settings)))
    for slot in range(len(settings)):
        made.begin(slot, seed=slot)
    for step in range(4):
        logits = np.round(random_logits(len(settings), seed=step) / 3)
        made.step(logits)
        rows = [reference.adjusted(row, one, []) for row, one in zip(logits, settings, strict=True)]
        assert made.tokens() == [reference.draw(rows[s], settings[s], s, step) for s in range(len(settings))]


@pytest.mark.parametrize(
    "vocab", [CHUNK + 1, *(pytest.param(vocab, marks=pytest.mark.long) for vocab in (CHUNK, 2 * CHUNK + 1))]
)
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
            row = reference.adjusted(logits[slot], one, texts[slot])
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


SOME = np.random.default_rng(11)


def some_biases(count: int) -> tuple[tuple[int, float], ...]:
    """Biases of tokens all over the vocabulary, its last one too; every tenth is a ban."""
    tokens = [VOCAB - 1, *SOME.choice(VOCAB - 1, count - 1, replace=False).tolist()]
    return tuple((token, -np.inf if at % 10 == 9 else float(SOME.normal(0, 6))) for at, token in enumerate(tokens))


def test_biases_come_before_penalties_in_every_kind_of_sampling(rig: Any) -> None:
    """As many as there may be, or one, in all kinds of sampling, and slots without beside them."""
    settings = [
        one for at, kind in enumerate([Settings(), *NARROW, *WIDE, *PENALTIES])
        for one in (replace(kind, biases=some_biases(1 if at % 3 == 0 else BIASES)), kind)
    ]  # fmt: skip
    made = rig(settings, random_logits(len(settings)))
    texts = [[0] for _ in settings]
    for slot in range(len(settings)):
        made.begin(slot, seed=slot)
    for step in range(3):
        logits = random_logits(len(settings), seed=step)
        made.step(logits)
        for slot, one in enumerate(settings):
            row = reference.adjusted(logits[slot], one, texts[slot])
            texts[slot].append(reference.draw(row, one, slot, step))
        assert made.tokens() == [text[-1] for text in texts]


@pytest.mark.parametrize("at", [0, BIASES - 1])
def test_the_first_and_the_last_bias_of_the_list_count(rig: Any, at: int) -> None:
    biases = tuple((5 * token, 99.0 if token == at else 1.0) for token in range(BIASES))
    settings = [replace(one, biases=biases) for one in (Settings(), *NARROW, *WIDE)]
    made = rig(settings, random_logits(len(settings)))
    for slot in range(len(settings)):
        made.begin(slot)
    made.step()
    assert made.tokens() == [5 * at] * len(settings)


def test_a_slot_that_is_set_anew_has_nothing_of_the_sequence_before(rig: Any) -> None:
    logits = random_logits(2)
    likeliest = int(logits[0].argmax())
    made = rig([Settings(biases=((likeliest, -np.inf),), masked=True, logprobs=1), Settings()], logits)
    made.begin(0)
    made.mask(0, 1, None)
    made.step()
    assert made.tokens()[0] == int(np.argsort(-logits[0])[1])
    made.sampling.set(0, Settings(masked=True, logprobs=1))
    made.begin(0)
    made.step()
    assert made.states.read(0).written == 0
    made.mask(0, 1, None)
    made.step()
    assert made.tokens()[0] == likeliest
    assert made.sampling.logprobs(0, 1).likeliest == ((likeliest, made.sampling.logprobs(0, 1).taken),)


def near(found: Logprobs, expected: Logprobs) -> bool:
    """Equal tokens, and equal numbers as far as float32 goes."""
    ours, theirs = (
        [found.taken, *(p for _, p in found.likeliest)],
        [expected.taken, *(p for _, p in expected.likeliest)],
    )
    tokens = [[token for token, _ in one.likeliest] for one in (found, expected)]
    return tokens[0] == tokens[1] and bool(np.allclose(ours, theirs, rtol=0, atol=2e-5))


def test_log_probabilities_are_of_the_models_own_logits(rig: Any) -> None:
    """Whatever changes and filters them, in every kind of sampling, with none to all likeliest; some do not ask."""
    kinds = [Settings(), *NARROW, *WIDE, *PENALTIES]
    settings = [replace(kind, logprobs=at % (LIKELIEST + 1), biases=some_biases(40)) for at, kind in enumerate(kinds)]
    settings += [Settings(logprobs=LIKELIEST), Settings(), Settings(0.5)]
    made = rig(settings, random_logits(len(settings)))
    for slot in range(len(settings)):
        made.begin(slot, position=slot, seed=slot)
    for step in range(1, 4):
        logits = random_logits(len(settings), seed=step)
        if step == 3:
            logits = np.round(logits)
        made.step(logits)
        for slot, (one, token) in enumerate(zip(settings, made.tokens(), strict=True)):
            if one.logprobs is None:
                with pytest.raises(ModelError, match=f"no log-probabilities of token {step}"):
                    made.sampling.logprobs(slot, step)
            else:
                assert near(made.sampling.logprobs(slot, step), Logprobs.of(logits[slot], token, one.logprobs))


def test_a_sequence_that_stands_still_keeps_what_was_told_of_its_last_tokens(rig: Any) -> None:
    made = rig([Settings(logprobs=3)] * 2, random_logits(2), ends=(7,))
    for slot in range(2):
        made.begin(slot)
    told = []
    for step in range(RECORDS + 2):
        logits = random_logits(2, seed=step)
        logits[0, 7] = 50 if step == 1 else -50
        made.step(logits)
        told.append(Logprobs.of(logits[0], 7 if step == 1 else made.tokens()[0], 3))
    assert made.states.read(0).written == 2
    assert [near(made.sampling.logprobs(0, 1 + at), told[at]) for at in range(2)] == [True, True]
    last = made.states.read(1).written
    assert made.sampling.logprobs(1, last - RECORDS + 1)
    with pytest.raises(ModelError, match="the last 4 are kept"):
        made.sampling.logprobs(1, last - RECORDS)


def test_masks_leave_only_what_they_allow_in_every_kind_of_sampling(rig: Any) -> None:
    """A mask of few tokens, fewer than a top-k, one of half, one of a single token, and None for all."""
    kinds = [Settings(), *NARROW, *WIDE, *PENALTIES]
    settings = [replace(kind, masked=at % 2 == 0) for at, kind in enumerate(kinds * 3)]
    made = rig(settings, random_logits(len(settings)))
    texts = [[0] for _ in settings]
    for slot in range(len(settings)):
        made.begin(slot, seed=slot)
    for step in range(4):
        logits = random_logits(len(settings), seed=step)
        allowed: list[np.ndarray | None] = [None] * len(settings)
        for slot, one in enumerate(settings):
            if one.masked:
                share = (9, VOCAB // 2, 1, None)[(slot // 2 + step) % 4]
                if share is not None:
                    allowed[slot] = chosen = np.zeros(VOCAB, bool)
                    chosen[SOME.choice(VOCAB, share, replace=False)] = True
                made.mask(slot, step + 1, allowed[slot])
        made.step(logits)
        for slot, one in enumerate(settings):
            row = reference.adjusted(logits[slot], one, texts[slot], allowed[slot])
            texts[slot].append(reference.draw(row, one, slot, step))
        assert made.tokens() == [text[-1] for text in texts]


@pytest.mark.parametrize(
    "one", [Settings(), Settings(0.9, top_k=9), Settings(0.9), Settings(0.9, top_p=0.9, top_k=300)]
)
def test_a_mask_of_no_token_gives_none(rig: Any, one: Settings) -> None:
    made = rig([replace(one, masked=True), one], random_logits(2))
    for slot in range(2):
        made.begin(slot)
    made.mask(0, 1, np.zeros(VOCAB, bool))
    made.step()
    assert made.states.token(0, 1) == 0xFFFFFFFF
    assert made.states.token(1, 1) == reference.draw(random_logits(2)[1], one, 0, 0)


def test_a_sequence_without_its_mask_stands_still_and_no_other_does(rig: Any) -> None:
    """Also where the mask of another token is there. What it draws later is what it would have drawn."""
    kinds = [Settings(), *NARROW[:3], *WIDE[:5]]
    settings = [replace(kind, masked=at % 2 == 0, logprobs=2) for at, kind in enumerate(kinds)]
    made = rig(settings, random_logits(len(settings)))
    expected = [reference.draw(row, one, 5, 0) for row, one in zip(random_logits(len(settings)), settings, strict=True)]
    for slot in range(len(settings)):
        made.begin(slot, seed=5)
    for slot in range(0, len(settings), 2):
        made.mask(slot, 2, None)
    made.step()
    assert [made.states.read(slot).written for slot in range(len(settings))] == [at % 2 for at in range(len(settings))]
    for slot in range(0, len(settings), 2):
        made.mask(slot, 1, None)
    made.step()
    assert [made.states.token(slot, 1) for slot in range(len(settings))] == expected
    for slot in range(0, len(settings), 2):
        assert near(made.sampling.logprobs(slot, 1), Logprobs.of(random_logits(len(settings))[slot], expected[slot], 2))


def test_a_step_waits_for_the_mask_that_the_host_still_makes(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MASK_WAIT_NS", 2_000_000_000_000)
    made = rig([Settings(masked=True)], random_logits(1))
    made.begin(0)
    only = np.arange(VOCAB) == 1234
    late = threading.Timer(1.0, made.mask, (0, 1, only))
    late.start()
    made.step()
    assert made.tokens() == [1234]
    late.join()


def test_a_step_has_the_launches_that_its_sequences_need() -> None:
    greedy, masked = Settings(), Settings(masked=True)
    assert ending([greedy], VOCAB) == ("greedy_rows",)
    assert ending([Settings(0.5, top_k=3), greedy], VOCAB) == ("greedy_rows", "sample")
    assert ending([masked, Settings(logprobs=0)], VOCAB) == ("masks", "greedy_rows", "sample", "logprobs")
    assert ending([Settings(biases=((1, 1.0),))], VOCAB) == ("sample",)
    assert ending([Settings(0.5), Settings(0.5, top_p=0.5)], VOCAB) == (0, 4, 5, 6, 7)


def test_masks_and_biases_of_another_vocabulary_are_refused(rig: Any) -> None:
    made = rig([Settings(masked=True)], random_logits(1))
    with pytest.raises(ModelError, match="a vocabulary of 2603 takes 328"):
        made.sampling.mask(0, 1, bytes(327))
    for token in (-1, VOCAB):
        with pytest.raises(ModelError, match=f"token {token}, outside of the vocabulary of {VOCAB}"):
            made.sampling.set(0, Settings(biases=((token, 1.0),)))


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
        {"biases": ((1, float("nan")),)},
        {"biases": ((1, float("inf")),)},
        {"biases": ((1, 1.0), (1, 2.0))},
        {"biases": tuple((token, 1.0) for token in range(BIASES + 1))},
        {"logprobs": -1},
        {"logprobs": LIKELIEST + 1},
    ],
)
def test_settings_without_meaning_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="cannot sample"):
        Settings(**settings)
