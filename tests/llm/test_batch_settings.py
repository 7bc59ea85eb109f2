"""What a sequence of a batch has of its own: settings, biases, log-probabilities, masks; none of it touches others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from sampling_rig import bits
from tiny_llama import TYPE, Shape

from tegrad.llm import batch as batch_module
from tegrad.llm.batch import Batch, Member
from tegrad.llm.engine import Engine
from tegrad.llm.errors import ModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.packed import PackedModel
from tegrad.llm.reference import Reference
from tegrad.llm.sampling import Logprobs, Settings
from tegrad.llm.state import State, States
from tegrad.nv.replay import DEPENDENCIES, Place

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1)
TOKENS = np.random.default_rng(1).integers(0, SHAPE.vocab, 32).tolist()
COUNT = 6


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("models") / "model.gguf", SHAPE, TYPE.Q8_0)


@pytest.fixture(scope="module")
def model(device: str, path: Path) -> Iterator[PackedModel]:
    with PackedModel.load(path, device) as made:
        yield made


@pytest.fixture(scope="module")
def batch(model: PackedModel) -> Iterator[Batch]:
    """One that computes the same logits alone and together, so that what differs is how tokens are drawn."""
    with Batch(model, slots=8, positions=48, sizes=(32,), same=True) as made:
        yield made


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test leaves the module's batch as it found it."""
    yield
    if "batch" in request.fixturenames:
        made = request.getfixturevalue("batch")
        for member in made.members:
            made.leave(member)
        made._fresh.clear()


def joined(batch: Batch, at: int, settings: Settings, count: int = COUNT) -> Member:
    """A sequence of `count` tokens after a prompt of its own."""
    prompt = TOKENS[at : at + 5]
    return batch.join(prompt, len(prompt) + count - 1, settings, seed=at)


def decoded(batch: Batch, *members: Member, masks: Callable[[Member], bytes | None] = lambda _: None) -> None:
    """Until these have finished, with a mask as soon as one is needed."""
    while not all(member.finished for member in members):
        for member in batch.members:
            if member.waits:
                batch.mask(member, masks(member))
        batch.step()


VARIED = (
    Settings(),
    Settings(0.9, top_k=20),
    Settings(0.7, top_k=30, logprobs=3),
    Settings(1.1, top_p=0.9, biases=((5, 4.0), (6, -np.inf))),
    Settings(0.0, repeat=1.3, logprobs=0),
    Settings(1.5, masked=True),
    Settings(0.0, biases=((7, 100.0),), logprobs=20),
)


def test_sequences_of_all_kinds_draw_together_what_each_draws_alone(batch: Batch) -> None:
    alone = []
    for at, settings in enumerate(VARIED):
        decoded(batch, member := joined(batch, at, settings))
        alone.append((member.tokens, member.logprobs))
    members = [joined(batch, at, settings) for at, settings in enumerate(VARIED)]
    decoded(batch, *members)
    assert [(member.tokens, member.logprobs) for member in members] == alone
    assert [len(member.tokens) for member in members] == [COUNT] * len(VARIED)
    assert members[6].tokens == [7] * COUNT


def test_other_values_need_no_other_recording(batch: Batch) -> None:
    """One sequence of each kind after the other, and then others in their slots with other values of every field."""
    kinds = [Settings(0.5, top_k=7), Settings(0.9, top_k=128, repeat=1.2, last_n=3, biases=((9, 1.0),))]
    decoded(batch, joined(batch, 0, Settings()), joined(batch, 1, kinds[0]))
    made = dict(batch._recordings)
    for at in range(3):
        decoded(batch, joined(batch, at, Settings()), joined(batch, at, kinds[1]), joined(batch, at, kinds[0]))
    decoded(batch, joined(batch, 9, kinds[1]))
    assert made.items() <= batch._recordings.items()
    assert set(batch._recordings) - set(made) <= {(8, ("greedy_rows",)), (8, ("sample",))}


def test_log_probabilities_are_the_models(batch: Batch, path: Path) -> None:
    member = joined(batch, 3, Settings(0.8, biases=((11, 3.0),), logprobs=5))
    decoded(batch, member)
    logits = Reference(path).logits([*TOKENS[3:8], *member.tokens[:-1]])[4:]
    assert len(member.logprobs) == len(member.tokens) == len(logits)
    for row, token, found in zip(logits, member.tokens, member.logprobs, strict=True):
        expected = Logprobs.of(row, token)
        assert abs(found.taken - expected.taken) < 0.02 * row.std()
        assert len(found.likeliest) == 5
        for other, value in found.likeliest:
            assert abs(value - Logprobs.of(row, other).taken) < 0.02 * row.std()


def test_a_masked_sequence_writes_what_its_masks_allow(batch: Batch) -> None:
    """One token each, or the even ones; beside it sequences go on that have none."""
    word = [17, 300, 0, 31, 32, 299]
    masked, even = joined(batch, 0, Settings(masked=True)), joined(batch, 2, Settings(0.9, masked=True))
    free = joined(batch, 1, Settings(0.9, top_k=20))
    every = np.arange(SHAPE.vocab)
    decoded(
        batch, masked, even, free,
        masks=lambda one: bits(every == word[len(one.tokens)] if one is masked else every % 2 == 0),
    )  # fmt: skip
    assert masked.tokens == word
    assert {token % 2 for token in even.tokens} == {0}
    decoded(batch, alone := joined(batch, 1, Settings(0.9, top_k=20)))
    assert free.tokens == alone.tokens


def test_a_masked_sequence_is_over_at_its_limit_even_if_its_state_was_looked_at_before(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in flight may make the last token between the look at the state and that at the token; a mask for one
    more, which no grammar may have, was asked for then."""
    read, word = States.read, [17, 300, 0, 31, 32, 299]

    def before(states: States, slot: int) -> State:
        state = read(states, slot)
        state.stop = 0
        return state

    monkeypatch.setattr(States, "read", before)
    masked = joined(batch, 0, Settings(masked=True))
    decoded(batch, masked, masks=lambda one: bits(np.arange(SHAPE.vocab) == word[len(one.tokens)]))
    assert masked.tokens == word


def test_a_late_mask_holds_up_its_own_sequence_only(batch: Batch) -> None:
    settings = Settings(1.0, top_p=0.95, masked=True, logprobs=2)
    decoded(batch, prompt := joined(batch, 4, settings))
    late, free = joined(batch, 4, settings), batch.join([5], 48)
    for number in range(1, COUNT + 1):
        for _ in range(2):
            assert [member for member, _ in batch.step()] == [free]
        batch.mask(late, None)
        while len(late.tokens) < number:
            batch.step()
    assert (late.tokens, late.logprobs) == (prompt.tokens, prompt.logprobs)
    decoded(batch, late, free)
    decoded(batch, alone := batch.join([5], 48))
    assert free.tokens == alone.tokens


def test_a_token_that_ends_a_masked_sequence_and_comes_after_the_look_at_its_state_is_its_last(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step in flight makes it between the two looks, where a mask came too late for the one before."""
    with Batch(model, slots=2, positions=48, sizes=(32,), ends=(7,)) as batch:
        member = batch.join([1, 2], 40, Settings(masked=True))
        batch.mask(member, bits(np.arange(SHAPE.vocab) == 7))
        monkeypatch.setattr(batch.states, "read", lambda slot: State())
        assert batch.step() == [(member, 7)]
        assert member.finished


def test_a_token_whose_log_probabilities_a_step_in_flight_still_makes_comes_with_them(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launch that samples tells it first, where a mask came between two looks."""
    member, real, looks = joined(batch, 0, Settings(masked=True, logprobs=2), 2), batch.states.token, []

    def token(slot: int, number: int) -> int | None:
        looks.append(number)
        if len(looks) == 1:
            return 7
        batch.mask(member, None)
        return real(slot, number)

    monkeypatch.setattr(batch.states, "token", token)
    [(came, told)] = batch.step()
    assert (came, told) == (member, real(member.slot, 1))
    assert len(member.logprobs) == len(member.tokens) == 1
    assert looks[:2] == [1, 1]


def test_where_all_wait_for_masks_the_step_says_so_and_a_mask_lets_them_go_on(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_module, "MASK_PATIENCE_S", 0.05)
    member = joined(batch, 0, Settings(masked=True), 2)
    with pytest.raises(ModelError, match=r"no mask came in 0\.05 s"):
        batch.step()
    decoded(batch, member)
    assert len(member.tokens) == 2


def test_a_sequence_that_is_cancelled_while_it_waits_gives_its_slot_back(batch: Batch) -> None:
    waiting, other = joined(batch, 0, Settings(masked=True)), joined(batch, 1, Settings())
    batch.step()
    batch.leave(waiting)
    batch.mask(waiting, None)  # too late, and harmless
    following = joined(batch, 2, Settings(masked=True))
    decoded(batch, other, following)
    assert (waiting.tokens, len(following.tokens)) == ([], COUNT)


def test_a_mask_without_a_token_ends_its_own_sequence_with_an_error(batch: Batch) -> None:
    stuck, other = joined(batch, 0, Settings(masked=True)), joined(batch, 1, Settings())
    decoded(batch, stuck, other, masks=lambda one: bits(np.full(SHAPE.vocab, len(one.tokens) < 2)))
    assert len(stuck.tokens) == 2
    assert "mask and biases leave none" in str(stuck.error)
    assert (len(other.tokens), other.error) == (COUNT, None)


def test_what_does_not_fit_a_sequence_is_refused(batch: Batch, path: Path, device: str) -> None:
    with pytest.raises(ModelError, match="token 301, outside of the vocabulary"):
        batch.join([1], settings=Settings(biases=((SHAPE.vocab, 1.0),)))
    assert batch.members == ()
    with pytest.raises(ModelError, match="join it with Settings"):
        batch.mask(batch.join([1]), None)
    with Gguf.open(path) as file, Engine(file, device=device) as engine:
        first = next(engine.generate(TOKENS[:3], Settings()))
        engine.reset()
        assert next(engine.generate(TOKENS[:3], Settings(biases=((first, -np.inf),)))) != first


def test_launches_that_sample_do_not_begin_early(model: PackedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not wait by themselves, as the others of a step that overlaps do."""
    early = replace(DEPENDENCIES["chain-lean"], fields=lambda place: {"pre_exit_at_last_cta_launch": 1})
    forms = []
    record = model.device.record
    with Batch(model, slots=1, positions=48, sizes=(8,), dependency=early, overlap=True) as batch:
        monkeypatch.setattr(
            model.device, "record", lambda *given, **how: forms.append(given) or record(given[0], **how), raising=False
        )
        decoded(batch, batch.join([5, 6], 3, Settings(0.5, top_p=0.5)))
    launches, form = forms[-1]
    fields = [
        form.fields(Place(at, len(launches))).get("pre_exit_at_last_cta_launch", 0) for at in range(len(launches))
    ]
    assert fields == [1] * (len(launches) - 6) + [0] * 6
