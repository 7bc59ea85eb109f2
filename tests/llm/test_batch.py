"""Sequences of a batch on the board: prompts in chunks between steps, beginnings in common, room, the same answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from tiny_llama import TYPE, Shape

from tegrad.llm.batch import Batch, Member
from tegrad.llm.cache import BLOCK_POSITIONS, SPEC
from tegrad.llm.engine import Engine
from tegrad.llm.errors import NoRoom
from tegrad.llm.gguf import Gguf
from tegrad.llm.packed import PackedModel
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Reference
from tegrad.llm.rows import floats
from tegrad.llm.sampling import Settings

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=2048, heads=4, kv_heads=2, vocab=301, layers=2, context=256)
"""Its batches have 8 or 16 slots and 192 positions where nothing asks for others: each number has its own kernels."""
TEXT = np.random.default_rng(7).integers(0, SHAPE.vocab, 200).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("models") / "model.gguf", SHAPE, TYPE.Q6_K)


@pytest.fixture(scope="module")
def model(device: str, path: Path) -> Iterator[PackedModel]:
    with PackedModel.load(path, device) as made:
        yield made


def finish(batch: Batch, *members: Member) -> list[list[int]]:
    """The tokens of sequences, all of them."""
    while not all(member.finished for member in members):
        batch.step()
    return [member.tokens for member in members]


def answered(batch: Batch, prompt: Sequence[int], count: int = 6) -> list[int]:
    """The likeliest tokens after a prompt."""
    return finish(batch, batch.join(prompt, len(prompt) + count - 1))[0]


def test_a_long_prompt_does_not_stop_the_others(model: PackedModel, path: Path) -> None:
    """While it goes in, a chunk a step, another sequence has a token of every step; a short one behind it passes it."""
    with Batch(model, slots=8, positions=192, sizes=(8,)) as batch:
        first = batch.join(TEXT[:3])
        batch.step()
        long, short = batch.join(TEXT[:60], 61), batch.join(TEXT[5:10], 11)
        order = []
        while not long.tokens:
            came = [member for member, _ in batch.step()]
            assert first in came
            order += came
        assert len(first.tokens) >= 8
        assert order.index(short) < order.index(long)
        tokens = [*TEXT[:60], *long.tokens, *finish(batch, long)[0][1:]]
    logits = Reference(path).logits(tokens)
    for at in range(60, len(tokens)):
        assert logits[at - 1].max() - logits[at - 1][tokens[at]] < 0.02 * logits[at - 1].std()


def test_a_prompt_goes_in_the_largest_chunks_while_it_is_alone(
    model: PackedModel, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside another sequence in those that nobody waits for long; its answer is the same."""
    monkeypatch.setattr("tegrad.llm.batch.MOST_PADDED", 8)
    with Batch(model, slots=8, positions=192, sizes=(8, 40), share=False) as batch:
        sizes, run = [], batch.prefill.run

        def noted(part: Sequence[int], *given: Any, **how: Any) -> None:
            sizes.append(len(part))
            run(part, *given, **how)

        monkeypatch.setattr(batch.prefill, "run", noted)
        alone = answered(batch, TEXT[:50])
        assert sizes == [40, 9]
        batch.join(TEXT[:3])
        batch.step()
        sizes.clear()
        long = batch.join(TEXT[:50], 55)
        finish(batch, long)
        assert sizes == [8] * 6 + [1]
        assert long.tokens == alone


def test_no_request_waits_for_a_compiler_once_a_batch_is_warm(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Batch(model, slots=8, positions=192, sizes=(8,)) as batch:
        batch.warm()
        monkeypatch.setattr("tegrad.llm.programs.compile_kernel", lambda *given, **how: pytest.fail(f"{given} {how}"))
        first = batch.join(TEXT[:3], 8)
        batch.step()
        finish(batch, first, batch.join(TEXT[:12], 16, Settings(temperature=1.0), seed=3))


def test_prompts_that_begin_alike_have_blocks_in_common(model: PackedModel) -> None:
    """Also those that join at once, of which each fills what no other has yet; and later ones, whoever has left."""
    prompts = [TEXT[:150], [*TEXT[:140], 5, 6, 7], [*TEXT[:128], 9], TEXT[70:150]]
    with Batch(model, slots=8, positions=192, sizes=(64,), share=False) as batch:
        members = [batch.join(prompt, len(prompt) + 4) for prompt in prompts]
        apart = finish(batch, *members)
        assert [member.reused for member in members] == [0] * 4
    with Batch(model, slots=8, positions=192, sizes=(64,)) as batch:
        members = [batch.join(prompt, len(prompt) + 4) for prompt in prompts]
        assert finish(batch, *members) == apart
        assert [member.reused for member in members] == [64, 64, 128, 0]
        again = [batch.join(prompt, len(prompt) + 4) for prompt in prompts]
        assert finish(batch, *again) == apart
        assert [member.reused for member in again] == [128, 128, 128, 64]


def test_a_sequence_alone_has_the_step_of_a_conversation(model: PackedModel, path: Path, device: str) -> None:
    """Bit by bit, from blocks in any order; with masks, draws and log-probabilities, and between steps with others."""
    settings, prompt = Settings(0.8, top_k=30, logprobs=2, masked=True), TEXT[:150]
    everything = bytes(memoryview(np.full(-(-SHAPE.vocab // 32), 2**32 - 1, np.uint32)))

    def drawn(batch: Batch, *, beside: bool) -> Member:
        member = batch.join(prompt, len(prompt) + 7, settings, seed=5)
        other = batch.join(TEXT[9:13], 16) if beside else None
        while not member.finished:
            if member.waits:
                batch.mask(member, everything)
            batch.step()
            if other is not None and len(member.tokens) == 4:
                batch.leave(other)
        return member

    with Batch(model, slots=16, positions=192, sizes=(16, 64)) as batch:
        finish(batch, batch.join(TEXT[100:180], 90), batch.join(TEXT[30:100], 80))
        mixed, alone = drawn(batch, beside=True), drawn(batch, beside=False)
        assert [mixed.slot, alone.slot] == [0, 0]
        assert {width for width, _ in batch._recordings} == {1, 8}
        assert mixed.tokens[:4] == alone.tokens[:4]
        assert mixed.logprobs != alone.logprobs
    with Gguf.open(path) as file, Engine(file, 192, device=device, plan=DecodePlan, chunks=(16, 64)) as engine:
        drawn_there = list(engine.generate(prompt, replace(settings, masked=False), 8, seed=5))
        assert (drawn_there, engine.logprobs) == (alone.tokens, alone.logprobs)


def test_who_finds_no_room_takes_none_and_no_memory_is_asked_for_later(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    alloc = model.device.allocate

    def counted(size: int, spec: Any) -> Any:
        if spec is SPEC:
            asked.append(size)
        return alloc(size, spec)

    monkeypatch.setattr(model.device, "allocate", counted)
    with Batch(model, slots=8, positions=192, blocks=4, sizes=(64,)) as batch:
        assert sum(asked) == 2 * 2 * SHAPE.layers * 4 * BLOCK_POSITIONS * SHAPE.kv_heads * SHAPE.width
        first = batch.join(TEXT[:130], 140)  # three blocks
        with pytest.raises(NoRoom, match="2 blocks of 64 positions are needed, 1 are free"):
            batch.join(TEXT[7:80], 128)
        second = batch.join(TEXT[7:60], 64)
        batch.step()
        batch.leave(first)
        third = batch.join(TEXT[7:80], 128)
        assert third.slot != second.slot
        finish(batch, second, third)
        assert batch.pool.free == 4
        assert answered(batch, TEXT[:4]) == answered(batch, TEXT[:4])
        assert len(asked) == 2 * SHAPE.layers


def test_who_leaves_in_the_middle_of_a_prompt_or_of_steps_leaves_nothing_behind(model: PackedModel) -> None:
    """Slots and blocks are used again at once, while steps that still sample for the ones before are in flight."""
    prompts = [TEXT[at : at + 40] for at in range(4)]
    with Batch(model, slots=1, positions=192, sizes=(8,)) as batch:
        expected = [answered(batch, prompt) for prompt in prompts]
    with Batch(model, slots=8, positions=192, sizes=(8,), share=False) as batch:
        others = [batch.join(TEXT[at : at + 2]) for at in range(6)]  # two slots are left
        found = []
        for steps, prompt in enumerate(prompts):
            gone = batch.join(TEXT[100:140])
            staying = batch.join(prompt, len(prompt) + 5)
            for _ in range(2 * steps):
                batch.step()
            batch.leave(gone)
            assert len(batch.members) == len(others) + 1
            other = batch.join(prompts[0], len(prompts[0]) + 5)
            assert {staying.slot, other.slot} == {6, 7}
            found.append(finish(batch, staying, other))
        assert found == [[tokens, expected[0]] for tokens in expected]


@pytest.mark.parametrize("same", [True, False])
def test_the_same_logits_alone_among_others_and_with_any_part_of_a_prompt_found(model: PackedModel, same: bool) -> None:
    """Bit by bit with `same`; without, widths of steps and sizes of chunks show."""
    prompt, found, reused = TEXT[:150], [], []

    def last_logits(batch: Batch) -> None:
        member = batch.join(prompt, len(prompt) + 3)
        finish(batch, member)
        reused.append(member.reused)
        rows = floats(model.device, batch.logits, batch.slots * SHAPE.vocab).reshape(batch.slots, -1)
        found.append((rows[member.slot].tobytes(), tuple(member.tokens)))

    with Batch(model, slots=16, positions=192, sizes=(16, 64), same=same) as batch:
        last_logits(batch)
        last_logits(batch)
        for at in range(9):
            batch.join(TEXT[at : 20 + 11 * at])
            batch.step()
        last_logits(batch)
    with Batch(model, slots=16, positions=192, sizes=(16, 64), same=same) as batch:
        batch.join([*TEXT[:70], 1, 2, 3])
        for at in range(5):
            batch.join(TEXT[at : 30 + at])
        last_logits(batch)
    assert reused == [0, 128, 128, 64]
    assert (len(set(found)) == 1) is same
