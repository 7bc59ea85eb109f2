"""Prompts in chunks and batches of sequences give the logits of the reference, on the board."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from decode_steps import far
from tiny_llama import TYPE, Shape

from tegrad.llm import prefill as prefill_module
from tegrad.llm.batch import MOST_SLOTS, Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.engine import Engine
from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.packed import PackedModel
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import CHUNKS, Prefill, chunk_sizes, split
from tegrad.llm.reference import Reference
from tegrad.llm.rows import floats
from tegrad.llm.sampling import Settings
from tegrad.llm.state import LOGITS_SPEC, STATE_SPEC, State, States
from tegrad.llm.workspace import SPEC
from tegrad.nv.replay import Recording

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=2)


def test_a_prompt_is_split_into_few_chunks() -> None:
    assert list(split(700, (32, 128, 512))) == [512, 512]
    assert list(split(560, (32, 128, 512))) == [512, 128]
    assert list(split(33, (32, 128, 512))) == [128]
    assert list(split(1, (32, 128, 512))) == [32]


def test_large_chunks_are_always_full() -> None:
    """On Hopper, and where the context fills one."""
    sizes = chunk_sizes("sm_90", 4096)
    assert sizes == (32, 64, 128, 256, 512, 2048)
    assert chunk_sizes("sm_90", 2047) == chunk_sizes("sm_90", 100) == sizes[:-1]
    assert chunk_sizes("sm_87", 8192) == CHUNKS
    assert list(split(2047, sizes)) == [512, 512, 512, 512]
    assert list(split(2048, sizes)) == [2048]
    assert list(split(2700, sizes)) == [2048, 512, 256]
    assert list(split(4200, sizes)) == [2048, 2048, 128]
    assert list(split(2100, sizes)) == [2048, 64]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("models") / "model.gguf"
    return tiny_llama.write(target, SHAPE, TYPE.Q6_K, kinds={"attn_v": TYPE.Q4_K})


@pytest.fixture(scope="module")
def model(device: str, path: Path) -> Iterator[PackedModel]:
    with PackedModel.load(path, device) as made:
        yield made


@pytest.fixture(scope="module")
def reference(path: Path) -> Reference:
    return Reference(path)


TOKENS = np.random.default_rng(1).integers(0, SHAPE.vocab, 32).tolist()


def test_chunks_of_a_prompt_give_the_references_logits(model: PackedModel, reference: Reference) -> None:
    """11 + 20 tokens in chunks of 8: full ones and padded ones, of which the later see the earlier.

    A decode step that follows them finds their keys and values: its int8 activations err more.
    """
    expected = reference.logits(TOKENS)
    with KvCache(model.device, model.config, 48) as cache, Prefill(model, cache, sizes=(8,)) as prefill:
        for first, last in ((0, 11), (11, 31)):
            prefill.run(TOKENS[first:last], first)
            assert far(floats(model.device, prefill.logits, SHAPE.vocab), expected[last - 1]) < 0.02
        states = States(model.device)
        states.write(0, State(position=31, token=TOKENS[31], limit=48, active=1))
        with DecodePlan(model, states, cache) as plan, Recording(model.device, plan.launches) as step:
            step.run()
            assert far(floats(model.device, plan.logits, SHAPE.vocab), expected[31]) < 0.1
        states.close()


@pytest.mark.parametrize(("room", "size"), [(0, 8), (16 * 4 * SHAPE.vocab - 1, 8), (16 * 4 * SHAPE.vocab, 16)])
def test_logits_of_every_token_take_the_room_they_may_and_that_of_the_smallest_chunk_in_any_case(
    model: PackedModel, reference: Reference, monkeypatch: pytest.MonkeyPatch, room: int, size: int
) -> None:
    monkeypatch.setattr(prefill_module, "MOST_LOGITS_BYTES", room)
    expected = reference.logits(TOKENS)
    with KvCache(model.device, model.config, 48) as cache, Prefill(model, cache, sizes=(8, 16)) as prefill:
        for first, last in ((0, 19), (19, 32)):
            found = prefill.score(TOKENS[first:last], first)
            assert far(found, expected[first:last]) < 0.02
        assert prefill._scores is not None
        assert prefill._scores.size == 4 * size * SHAPE.vocab


def test_what_a_prefill_took_is_given_back_when_it_is_closed(
    model: PackedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator, held = model.device.allocator, list[int]()
    alloc, free = allocator.alloc, allocator.free

    def taking(size: int, spec: Any = None, **more: Any) -> Any:
        buffer = alloc(size, spec, **more)
        if spec in (SPEC, STATE_SPEC, LOGITS_SPEC):  # the others are kernels, which a device keeps
            held.append(buffer.va_addr)
        return buffer

    def giving(buffer: Any, *given: Any, **more: Any) -> None:
        if buffer.va_addr in held:
            held.remove(buffer.va_addr)
        free(buffer, *given, **more)

    with KvCache(model.device, model.config, 48) as cache, monkeypatch.context() as patch:
        patch.setattr(allocator, "alloc", taking)
        patch.setattr(allocator, "free", giving)
        prefill = Prefill(model, cache, sizes=(8,))
        prefill.run(TOKENS[:9])
        assert len(held) > 8
        prefill.close()
        assert held == []
        prefill.close()


def test_sequences_join_and_leave_between_steps(model: PackedModel, reference: Reference) -> None:
    """Each gets the tokens that it would get alone; slots are used again, and a full batch takes no more."""

    def alone(prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        while len(tokens) < len(prompt) + count:
            tokens.append(int(reference.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]

    prompts = [TOKENS[:7], TOKENS[7:9], TOKENS[20:21], TOKENS[9:14]]
    expected = [alone(prompt, 6) for prompt in prompts]
    with Batch(model, slots=3, positions=48, sizes=(8,)) as batch:
        first, second = batch.join(prompts[0]), batch.join(prompts[1], limit=len(prompts[1]) + 3)
        for _ in range(2):
            batch.step()
        third = batch.join(prompts[2])
        with pytest.raises(ModelError, match="all 3 slots"):
            batch.join(prompts[3])
        while not second.finished:
            batch.step()
        assert second.tokens == expected[1][:4]  # the last of them would stand at its limit
        fourth = batch.join(prompts[3])
        assert fourth.slot == second.slot
        while len(fourth.tokens) < 6:
            assert batch.step()
        batch.leave(first)
        assert [first.tokens[:6], third.tokens[:6], fourth.tokens[:6]] == [expected[0], expected[2], expected[3]]
        assert batch.members == (third, fourth)


def decoded(batch: Batch, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """The tokens of prompts that decode together, `count` each unless something ends them."""
    members = [batch.join(prompt, len(prompt) + count - 1) for prompt in prompts]
    while batch.members:
        batch.step()
    return [member.tokens for member in members]


def test_an_end_of_text_ends_the_sequences_that_draw_it(model: PackedModel) -> None:
    prompts = [TOKENS[:7], TOKENS[7:9]]
    with Batch(model, slots=2, positions=48, sizes=(8,)) as batch:
        whole, other = decoded(batch, prompts, 6)
    end = whole[3]
    assert end not in other
    with Batch(model, slots=2, positions=48, sizes=(8,), ends=(300, end)) as batch:
        assert decoded(batch, prompts, 6) == [whole[: whole.index(end) + 1], other]


@pytest.mark.long
def test_as_many_sequences_as_a_batch_takes_decode_as_the_reference_does(
    model: PackedModel, reference: Reference
) -> None:
    """Prompts of 1 to 32 tokens, two slots each, one a step: all decode until the last has some tokens."""
    prompts = [TOKENS[at // 2 :] for at in range(MOST_SLOTS)]
    with Batch(model, slots=MOST_SLOTS, positions=128, sizes=(32,)) as batch:
        assert batch.widths == (1, 8, 16, 24, 32, 40, 48, 56, 64)
        members = [batch.join(prompt) for prompt in prompts]
        while not all(len(member.tokens) >= 4 for member in members):
            batch.step()
    for prompt, member in zip(prompts, members, strict=True):
        text = [*prompt, *member.tokens]
        expected = reference.logits(text[:-1])
        for at in range(len(prompt), len(text)):
            assert expected[at - 1].max() - expected[at - 1][text[at]] < 0.02 * expected.std()


MIXED = (
    Settings(),
    Settings(0.9, top_k=20),
    Settings(1.1, top_p=0.9),
    Settings(0.8, min_p=0.05, presence=0.4, frequency=0.3),
    Settings(0.9, top_k=40, repeat=1.3),
)


@pytest.mark.long
def test_sequences_with_settings_of_their_own_draw_as_they_do_alone(device: str, tmp_path: Path) -> None:
    """Weights are halves, so that batches and single steps differ by little; prompts hold what penalties look at."""
    path = tiny_llama.write(tmp_path / "model.gguf", SHAPE, TYPE.F16)
    prompts = [[*TOKENS[at : at + 5], *TOKENS[at : at + 3]] for at in range(len(MIXED))]
    with Gguf.open(path) as file, Engine(file, device=device) as engine:
        alone = []
        for seed, (prompt, settings) in enumerate(zip(prompts, MIXED, strict=True)):
            engine.reset()
            alone.append(list(engine.generate(prompt, settings, 10, seed=seed)))
    with (
        PackedModel.load(path, device) as model,
        Batch(model, slots=5, positions=32, sizes=(8,)) as batch,
    ):
        members = [
            batch.join(prompt, len(prompt) + 9, settings, seed)
            for seed, (prompt, settings) in enumerate(zip(prompts, MIXED, strict=True))
        ]
        while batch.members:
            batch.step()
        assert [member.tokens for member in members] == alone
    assert len({tuple(tokens) for tokens in alone}) == len(MIXED)


@pytest.mark.parametrize(
    ("tokens", "limit", "error", "why"),
    [
        ([900], None, ModelError, "outside of the vocabulary of 301"),
        ([5, -1], None, ModelError, "outside of the vocabulary of 301"),
        ([], None, ModelError, "nothing to continue"),
        ([5], 0, ContextError, "1 tokens does not fit a context of 0"),
        ([5] * 49, 60, ContextError, "49 tokens does not fit a context of 48"),
    ],
)
def test_a_batch_takes_no_sequence_that_it_cannot_continue(
    model: PackedModel, tokens: list[int], limit: int | None, error: type[ModelError], why: str
) -> None:
    with Batch(model, slots=1, positions=48, sizes=(8,)) as batch:
        with pytest.raises(error, match=why):
            batch.join(tokens, limit)
        assert batch.members == ()


OTHERS = {
    "qwen2 Q8_0": (tiny_llama.SHAPES["qwen2"], TYPE.Q8_0, False),
    "qwen3 Q6_K, cache q8_0": (replace(tiny_llama.SHAPES["qwen3"], heads=4), TYPE.Q6_K, True),
    "smollm3 Q8_0": (tiny_llama.SHAPES["smollm3"], TYPE.Q8_0, False),
    "olmo2 Q8_0": (tiny_llama.SHAPES["olmo2"], TYPE.Q8_0, False),
    "olmo3 F16": (tiny_llama.SHAPES["olmo3"], TYPE.F16, False),
    "mistral3 Q8_0": (tiny_llama.SHAPES["mistral3"], TYPE.Q8_0, False),
    "phi3 Q4_0": (tiny_llama.SHAPES["phi3"], TYPE.Q4_0, False),
    "gemma3 Q8_0": (tiny_llama.SHAPES["gemma3"], TYPE.Q8_0, False),
    "gemma2 Q6_K, cache q8_0": (tiny_llama.SHAPES["gemma2"], TYPE.Q6_K, True),
    "gemma4 Q6_K, cache q8_0": (tiny_llama.SHAPES["gemma4"], TYPE.Q6_K, True),
    "gemma4 small Q8_0, cache q8_0": (tiny_llama.SHAPES["gemma4 small"], TYPE.Q8_0, True),
    "gemma4 small F16": (tiny_llama.SHAPES["gemma4 small"], TYPE.F16, False),
    "granite Q8_0": (replace(tiny_llama.SHAPES["granite"], bias=False), TYPE.Q8_0, False),
    "gpt2 F16": (tiny_llama.SHAPES["gpt2"], TYPE.F16, False),
    "starcoder2 F16": (tiny_llama.SHAPES["starcoder2"], TYPE.F16, False),
    "starcoder2 Q4_K": (tiny_llama.SHAPES["starcoder2"], TYPE.Q4_K, False),
    "hunyuan Q8_0": (tiny_llama.SHAPES["hunyuan"], TYPE.Q8_0, False),
    "nemotron Q8_0": (tiny_llama.SHAPES["nemotron"], TYPE.Q8_0, False),
    "cohere2 Q4_K": (tiny_llama.SHAPES["cohere2"], TYPE.Q4_K, False),
    "command-r F16": (tiny_llama.SHAPES["command-r"], TYPE.F16, False),
    "lfm2 Q8_0, cache q8_0": (tiny_llama.SHAPES["lfm2"], TYPE.Q8_0, True),
    "qwen35 Q8_0, cache q8_0": (tiny_llama.SHAPES["qwen35"], TYPE.Q8_0, True),
    "qwen35 F16": (tiny_llama.SHAPES["qwen35"], TYPE.F16, False),
    "lfm2 F16": (tiny_llama.SHAPES["lfm2"], TYPE.F16, False),
    "phi2 Q8_0": (tiny_llama.SHAPES["phi2"], TYPE.Q8_0, False),
    "gptneox Q8_0": (tiny_llama.SHAPES["gptneox"], TYPE.Q8_0, False),
    "stablelm Q8_0": (tiny_llama.SHAPES["stablelm"], TYPE.Q8_0, False),
    "arcee Q4_0": (tiny_llama.SHAPES["arcee"], TYPE.Q4_0, False),
    "gpt2 Q8_0": (tiny_llama.SHAPES["gpt2"], TYPE.Q8_0, False),
    "Q8_0, sixteen to a group": (tiny_llama.SHAPES["sixteen to a group"], TYPE.Q8_0, False),
    "glm4 Q8_0": (tiny_llama.SHAPES["glm4"], TYPE.Q8_0, False),
    "chatglm Q4_0": (tiny_llama.SHAPES["chatglm"], TYPE.Q4_0, False),
    "gemma Q8_0": (tiny_llama.SHAPES["gemma"], TYPE.Q8_0, False),
    "minicpm Q8_0": (tiny_llama.SHAPES["minicpm"], TYPE.Q8_0, False),
    "exaone4 Q8_0": (tiny_llama.SHAPES["exaone4"], TYPE.Q8_0, False),
    "llama Q5_K, biases": (tiny_llama.SHAPES["grouped"], TYPE.Q5_K, False),
}


@pytest.mark.long
@pytest.mark.parametrize(("shape", "kind", "q8"), list(OTHERS.values()), ids=list(OTHERS))
def test_families_and_formats_agree_in_prompts_and_in_batches_of_few_and_of_many(
    device: str, tmp_path: Path, shape: Shape, kind: TYPE, q8: bool
) -> None:
    """40 tokens by the tiles for many tokens, one by those for few; then the last once more, in batches."""
    path = tiny_llama.write(tmp_path / "model.gguf", shape, kind)
    tokens = np.random.default_rng(5).integers(0, shape.vocab, 41).tolist()
    expected = Reference(path).logits(tokens)
    near = 0.04 if q8 else 0.02
    with PackedModel.load(path, device) as model:
        with KvCache(model.device, model.config, 64, q8=q8) as cache, Prefill(model, cache, sizes=(16, 48)) as prefill:
            for first, last in ((0, 40), (40, 41)):
                prefill.run(tokens[first:last], first)
                assert far(floats(model.device, prefill.logits, shape.vocab), expected[last - 1]) < near
        found = []
        with Batch(model, slots=9, positions=64, q8=q8, sizes=(48, 9 * 48)) as batch:  # all prompts before one step
            for count in (2, 9):  # one alone has the step of a conversation
                members = [batch.join(tokens[at:], limit=len(tokens) - at) for at in range(count)]
                while not members[0].finished:
                    batch.step()
                found.append(floats(model.device, batch.logits, shape.vocab))
                for member in batch.members:
                    batch.leave(member)
        assert far(found[0], expected[-1]) < near
        assert far(found[1], found[0]) < 0.01
