"""Layers that are gated delta nets (Qwen 3.5), and heads whose output is gated: kernels in all that run a model, and
conversations whose state runs along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_steps import far
from networks import Shape as Sizes
from networks import make
from small_tunings import SMALL
from tiny_llama import TYPE, Shape, rewritten, write
from tinygrad import dtypes

from tegrad.bench import plans
from tegrad.bench.plans import DryDevice
from tegrad.hw.chips import CHIPS
from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.config import Config
from tegrad.llm.engine import Engine
from tegrad.llm.errors import GgufError, UnsupportedModelError
from tegrad.llm.families import QWEN3
from tegrad.llm.footprint import Footprint
from tegrad.llm.formats import F16
from tegrad.llm.gguf import Gguf
from tegrad.llm.model import Model
from tegrad.llm.network import Attend, Delta, Spec
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan, check_block
from tegrad.llm.plan import DecodePlan
from tegrad.llm.prefill import Prefill
from tegrad.llm.reference import Past, Reference
from tegrad.llm.rows import check, floats
from tegrad.llm.sampling import Settings
from tegrad.llm.schedule import Op, Program, ScheduleError
from tegrad.llm.schedule_build import build
from tegrad.llm.schedule_proof import validate
from tegrad.llm.session import Session
from tegrad.llm.state import State, States
from tegrad.nv.replay import Recording

CONTEXT, CHUNK = 200, 16
SIZES = {"conv_kernel": 4, "state_size": 64, "time_step_rank": 6, "group_count": 2, "inner_size": 384}
QWEN = Shape(
    arch="qwen35", dim=192, ffn=64, heads=4, kv_heads=2, head_dim=64, rotated=32, context=CONTEXT, vocab=96, layers=4,
    taps=4, delta=(6, 2, 64), eps=1e-2, tied=True,
    extra={
        **{f"qwen35.ssm.{key}": value for key, value in SIZES.items()}, "qwen35.full_attention_interval": 3,
        "qwen35.rope.dimension_sections": [6, 5, 5, 0],
    },
)  # fmt: skip
"""Layers 0, 1 and 3 are delta nets of six heads, of which three share each of two heads of keys."""
TOKENS = np.random.default_rng(3).integers(0, QWEN.vocab, CONTEXT).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("deltas") / "model.gguf", QWEN, TYPE.F16)


@pytest.fixture(scope="module")
def expected(path: Path) -> np.ndarray:
    return Reference(path).logits(TOKENS)


@pytest.fixture(scope="module")
def engine(path: Path, device: str) -> Iterator[Engine]:
    with Gguf.open(path) as file, Engine(file, CONTEXT, device=device, short=8, chunks=(CHUNK,)) as made:
        yield made


def config(path: Path) -> Config:
    with Gguf.open(path) as file:
        return Config.read(file)


def test_three_layers_in_so_many_are_delta_nets_or_those_that_a_list_names(path: Path, tmp_path: Path) -> None:
    made = config(path)
    assert [type(op) for op in made.network.mixers] == [Delta, Delta, Attend, Delta]
    assert made.network.runs_along
    assert (made.projected, made.mixed) == (640 + 384 + 12, 384)
    named = rewritten(path, tmp_path / "named.gguf", **{"qwen35.attention.recurrent_layers": [True, True, False, True]})
    assert config(named).network == made.network


def test_the_reference_goes_on_after_what_was_said(path: Path, expected: np.ndarray) -> None:
    reference, past = Reference(path), Past()
    found = [reference.logits(TOKENS[first:last], past) for first, last in ((0, 1), (1, 3), (3, 50))]
    np.testing.assert_allclose(np.concatenate(found), expected[:50], atol=1e-3)


@pytest.mark.parametrize(
    "name", ["ssm_conv1d.weight", "ssm_dt.bias", "ssm_a", "ssm_norm.weight", "ssm_alpha.weight", "ssm_beta.weight",
             "attn_gate.weight"],
)  # fmt: skip
def test_every_tensor_of_a_delta_net_counts(path: Path, expected: np.ndarray, name: str) -> None:
    """So that the other tests are tests of it."""
    reference = Reference(path)
    reference.weights[f"blk.1.{name}"][:] *= np.float32(6 if name in ("ssm_dt.bias", "ssm_alpha.weight") else 0.3)
    assert far(reference.logits(TOKENS[:50]), expected[:50]) > 0.05


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"qwen35.ssm.state_size": None}, GgufError, "lacks the value 'qwen35.ssm.state_size'"),
        ({"qwen35.ssm.inner_size": 256}, GgufError, "6 heads of 64, 2 of keys"),
        ({"qwen35.ssm.group_count": 4}, GgufError, "6 heads of 64, 4 of keys"),
        ({"qwen35.ssm.conv_kernel": 17}, UnsupportedModelError, r"convolves 17 positions .*, 16 at most are run"),
        ({"qwen35.full_attention_interval": 5}, GgufError, "for 4 layers, of which some attend"),
        ({"qwen35.full_attention_interval": 2}, UnsupportedModelError, "the tensor 'blk.1.ssm_dt.bias"),
        ({"tensor": "blk.3.ssm_a"}, GgufError, "lacks the tensor 'blk.3.ssm_a'"),
        ({"tensor": "blk.3.ssm_dt.bias"}, GgufError, "lacks the tensor 'blk.3.ssm_dt.bias'"),
        ({"qwen35.expert_count": 256}, UnsupportedModelError, "is a mixture of experts"),
    ],
)
def test_files_that_contradict_themselves_or_ask_for_more_are_refused(
    path: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        config(rewritten(path, tmp_path / "changed.gguf", **changes))


def test_one_launch_refuses_other_blocks_and_more_heads_than_ctas(path: Path) -> None:
    made = config(path)
    check_block(replace(made, heads=6, kv_heads=3))
    whole = replace(QWEN3.query_norm or Spec("", ()), shape=("query",))
    others = (
        made,  # whose heads mix fewer elements than its delta nets
        replace(made, heads=6, kv_heads=3, arch=replace(made.arch, norm="layer")),
        replace(made, heads=6, kv_heads=3, arch=replace(made.arch, query_norm=whole)),
    )
    for other in others:
        with pytest.raises(UnsupportedModelError, match="the persistent step does not run qwen35"):
            check_block(other)
    few = make(Sizes(512, 512, 8, 2, 64, 2, 264, qk_norm=True, taps=4, ring=5, delta=(8, 4, 64)))
    with pytest.raises(UnsupportedModelError, match="8 heads of a delta net need as many CTAs, there are 7"):
        build(few.network, 7)


def mix_another_heads_key(program: Program) -> Program:
    ins = next(stage for stage in program.stages if stage.op is Op.DELTA).instructions[1]
    wait = ins.waits[1]
    return program.replaced(ins._replace(waits=(ins.waits[0], wait._replace(span=ins.waits[0].span), *ins.waits[2:])))


def write_another_heads(program: Program) -> Program:
    a, b = next(stage for stage in program.stages if stage.op is Op.DELTA).instructions[:2]
    return program.replaced(a._replace(output=b.output))


def without_its_decay(program: Program) -> Program:
    ins = next(stage for stage in program.stages if stage.op is Op.DELTA).instructions[1]
    return program.replaced(ins._replace(waits=ins.waits[:-1]))


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (mix_another_heads_key, "DELTA of layer 0.* on CTA 1 reads QKV.* does not wait for it"),
        (write_another_heads, r"MIXED\[\d+\] is written more than once|is not written"),
        (without_its_decay, "DELTA of layer 0.* on CTA 1 reads QKV.* does not wait for it"),
    ],
)
def test_the_proof_names_a_mistake_of_a_delta_net(mutant: Callable[[Program], Program], said: str) -> None:
    program = build(make(Sizes(512, 512, 8, 2, 64, 2, 264, qk_norm=True, taps=4, ring=5, delta=(8, 4, 64))).network, 9)
    assert len(validate(program)) == len(program.stages) * program.ctas
    with pytest.raises(ScheduleError, match=said):
        validate(mutant(program))


def test_heads_of_other_sizes_are_refused_by_name(path: Path) -> None:
    device: Any = DryDevice(CHIPS["gh100"])
    sizes = replace(config(path), state=48)
    made = plans.model(sizes, F16, device)
    cache = KvCache(device, made.config, CONTEXT, ahead=CHUNK)
    with pytest.raises(UnsupportedModelError, match="heads of 48 of a delta net are not run: 32, 64, 96"):
        DecodePlan(made, States(device), cache)


def test_a_sequence_goes_on_at_its_end_alone(path: Path) -> None:
    device, sizes = DryDevice(CHIPS["gh100"]), config(path)
    with KvCache(device, sizes, CONTEXT, slots=2, ahead=512, blocks=8) as cache:
        assert [layer.rows for layer in cache.layers] == [5, 5, CONTEXT, 5]
        state = cache.layers[0].state
        assert state is not None
        assert (state.size, cache.layers[2].state) == (2 * 2 * 4 * 6 * 64 * 64, None)
        assert not cache.shareable
        assert cache.rings
        cache.rings.wrote(150, 1)
        assert [cache.rings.holds(position, 1) for position in (0, 148, 149, 150)] == [False, False, True, True]
        cache.rings.begin(1)
        assert cache.rings.holds(0, 1)


def test_states_are_part_of_the_footprint_whatever_the_context(path: Path) -> None:
    with Gguf.open(path) as file:
        footprint = Footprint.of(file)
    attention = 100 * (2 * 2 * 2 * 64 + 2 * 4 * 32)  # keys and values of a layer, and two tables of angles
    assert footprint.at(CONTEXT) - footprint.at(100) == attention
    more = footprint.batch(CONTEXT, 3, 4) - footprint.batch(CONTEXT, 2, 4)
    assert more > 3 * 2 * 4 * 6 * 64 * 64
    assert footprint.weights >= path.stat().st_size - (1 << 16)


@pytest.mark.board
def test_beta_and_decay_of_floats_are_multiplied_as_they_are(tmp_path: Path, device: str) -> None:
    """Files have them in F32 beside other formats; they had neither prompts nor batches."""
    kinds = {"ssm_alpha": TYPE.F32, "ssm_beta": TYPE.F32}
    path = write(tmp_path / "model.gguf", QWEN, TYPE.F16, kinds=kinds)
    expected = Reference(path).logits(TOKENS[:60])
    with Gguf.open(path) as file:
        check(file)
        with Engine(file, CONTEXT, device=device, short=8, chunks=(CHUNK,)) as engine:
            assert far(engine.feed(TOKENS[:37]), expected[36]) < 0.02
            assert not engine._stepped
            assert far(engine.feed(TOKENS[37:38]), expected[37]) < 0.02
    with PackedModel.load(path, device) as model, Batch(model, slots=3, positions=64, sizes=(CHUNK,)) as batch:
        first, *_ = [batch.join(TOKENS[at:60], limit=60 - at) for at in range(3)]
        while not first.finished:
            batch.step()
        assert far(floats(model.device, batch.logits, QWEN.vocab), expected[59]) < 0.02


@pytest.mark.board
def test_a_conversation_goes_on_and_back(engine: Engine, expected: np.ndarray) -> None:
    """Prompts in chunks and steps; then from where its state is no more, and from its last token."""
    engine.reset()
    for first, last in ((0, 1), (1, 60), (60, 63), (63, 92), (92, 93), (93, 111)):
        assert far(engine.feed(TOKENS[first:last]), expected[last - 1]) < 0.02
    for keep, more in ((110, 1), (110, 3), (60, 2), (30, 12), (0, 5)):
        engine.reset(keep)
        assert far(engine.feed(TOKENS[keep : keep + more]), expected[keep + more - 1]) < 0.02
        assert engine.tokens == TOKENS[: keep + more]
    engine.reset()
    engine.feed(TOKENS[:70])
    engine.reset(20)
    assert far(engine.feed_all(TOKENS[20:60]), expected[20:60]) < 0.02
    assert far(engine.feed(TOKENS[60:61]), expected[60]) < 0.02


@pytest.mark.board
@pytest.mark.parametrize(("heads", "keys", "width"), [(6, 2, 96), (6, 2, 128), (3, 1, 64)])
def test_prompts_of_any_length_and_what_follows_them_are_right(
    tmp_path: Path, device: str, heads: int, keys: int, width: int
) -> None:
    """A chunk's tokens go four at a time, sixteen on their way, and the last by itself. With an odd number of heads
    every other token was not where 16 bytes may be copied from."""
    sizes = {"state_size": width, "inner_size": heads * width, "time_step_rank": heads, "group_count": keys}
    extra = {**QWEN.extra, **{f"qwen35.ssm.{key}": value for key, value in sizes.items()}}
    path = write(tmp_path / "model.gguf", replace(QWEN, delta=(heads, keys, width), extra=extra), TYPE.F16)
    expected = Reference(path).logits(TOKENS[:66])
    with Gguf.open(path) as file, Engine(file, 80, device=device, short=8, chunks=(64,)) as engine:
        for length in (1, 2, 3, 5, 6, 9, 17, 18, 20, 34, 50, 64, 65):
            engine.reset()
            assert far(engine.feed(TOKENS[:length]), expected[length - 1]) < 0.02
            engine.reset(length - 1)
            assert far(engine.feed(TOKENS[length - 1 : length + 1]), expected[length]) < 0.02


@pytest.mark.board
def test_a_last_token_is_taken_again_without_those_before(
    engine: Engine, expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole conversation was, at every token whose log-probabilities were asked for."""
    engine.reset()
    engine.feed(TOKENS[:90])
    begun, begin = [], engine._cache.rings.begin
    monkeypatch.setattr(engine._cache.rings, "begin", lambda: begun.append(begin()))
    engine.reset(89)
    assert far(engine.feed(TOKENS[89:90]), expected[89]) < 0.02
    assert len(list(engine.generate(TOKENS[90:92], Settings(logprobs=2), 5))) == 5
    assert begun == []
    engine.reset()
    assert far(engine.feed_all(TOKENS[:30]), expected[:30]) < 0.02
    assert far(engine.feed(TOKENS[30:31]), expected[30]) < 0.02
    assert len(begun) == 1


@pytest.mark.board
def test_generated_tokens_are_the_likeliest_and_a_stream_that_was_left_is_no_part_of_what_follows(
    engine: Engine, path: Path
) -> None:
    """Steps that ran ahead of who reads have moved the state on."""
    engine.reset()
    reference = Reference(path)
    tokens = [*TOKENS[:2], *engine.generate(TOKENS[:2], Settings(), 40)]
    logits = reference.logits(tokens)[1:-1]
    chosen = logits[np.arange(40), tokens[2:]]
    assert (logits.max(axis=1) - chosen <= 0.02 * logits.std()).all()
    engine.reset()
    stream = engine.generate(TOKENS[:2], Settings(), 100)
    begun = [next(stream) for _ in range(5)]
    stream.close()
    said = [*TOKENS[:2], *begun[:-1]]
    assert engine.tokens == said
    assert far(engine.feed(TOKENS[50:53]), reference.logits([*said, *TOKENS[50:53]])[-1]) < 0.02


@pytest.mark.board
def test_four_matrices_of_four_formats_are_multiplied(tmp_path: Path, device: str) -> None:
    """Those of a delta net's products: a launch took three, and garbage came of a fourth."""
    kinds = {"attn_gate": TYPE.Q4_0, "ssm_beta": TYPE.Q5_0, "ssm_alpha": TYPE.Q8_0}
    path = write(tmp_path / "model.gguf", QWEN, TYPE.F16, kinds=kinds)
    wanted = Reference(path).logits(TOKENS[:40])
    with Gguf.open(path) as file, Engine(file, CONTEXT, device=device, short=8, chunks=(CHUNK,)) as engine:
        assert len(engine.model.layers[0].qkv) == 4
        assert far(engine.feed(TOKENS[:7]), wanted[6]) < 0.1
        assert far(engine.feed(TOKENS[7:40]), wanted[39]) < 0.1


@pytest.mark.board
@pytest.mark.parametrize(("launches", "width"), [("many", 64), ("one", 64), ("one", 96)])
def test_a_step_may_be_taken_again(
    path: Path, tmp_path: Path, device: str, expected: np.ndarray, launches: str, width: int
) -> None:
    """As a stopped sequence's are while others go on, and one whose mask is late: also the first step after a chunk,
    and the last token of a chunk."""
    kind: Any = DecodePlan
    if launches == "one":
        sizes = {"time_step_rank": 8, "inner_size": 8 * width, "state_size": width}
        extra = {**QWEN.extra, **{f"qwen35.ssm.{key}": value for key, value in sizes.items()}}
        shape = replace(QWEN, dim=256, ffn=256, heads=8 * width // 64, delta=(8, 2, width), extra=extra)
        path = write(tmp_path / "model.gguf", shape, TYPE.F16)
        expected, kind = Reference(path).logits(TOKENS[:64]), partial(PersistentPlan, tuning=SMALL, ctas=9)
    with (
        PackedModel.load(path, device) as model,
        KvCache(model.device, model.config, 64, ahead=CHUNK) as cache,
        Prefill(model, cache, sizes=(CHUNK,)) as prefill,
    ):
        states = States(model.device)
        with kind(model, states, cache) as plan, Recording(model.device, plan.launches) as step:
            for first, count in ((0, 0), (1, 7), (9, 16), (26, 1)):
                if count:
                    prefill.run(TOKENS[first : first + count], first)
                for at in (first + count - 1, first + count) if count else (0,):
                    for _ in range(3):
                        states.write(0, State(position=at, token=TOKENS[at], limit=64, active=1))
                        step.wait(step.run())
                        assert far(floats(model.device, plan.logits, QWEN.vocab), expected[at]) < 0.02, at
        states.close()


@pytest.mark.board
@pytest.mark.long
@pytest.mark.parametrize("same", [False, True])
def test_sequences_of_a_batch_have_states_of_their_own(
    path: Path, device: str, expected: np.ndarray, same: bool
) -> None:
    """One after the other in the same slot, too, which has the state of the one before."""
    with (
        PackedModel.load(path, device) as model,
        Batch(model, slots=3, positions=CONTEXT, sizes=(CHUNK,), same=same) as batch,
    ):
        other = batch.join(TOKENS[:100])
        for count in (140, 1, 2, 90):
            member = batch.join(TOKENS[:count], limit=count)
            while not member.finished:
                batch.step()
            assert other.tokens
            assert not other.finished
            logits = floats(model.device, batch.logits, 3 * QWEN.vocab).reshape(3, -1)
            assert far(logits[member.slot], expected[count - 1]) < 0.02
        reference = Reference(path)
        logits = reference.logits([*TOKENS[:100], *other.tokens])[99:-1]
        chosen = logits[np.arange(len(other.tokens)), other.tokens]
        assert (logits.max(axis=1) - chosen <= 0.02 * logits.std()).all()


@pytest.mark.board
def test_tinygrads_operations_take_a_token_at_a_time(path: Path, device: str, expected: np.ndarray) -> None:
    running = Session(Model.load(path, device), CONTEXT, cache_dtype=dtypes.float32, chunk=CHUNK, short=8)
    assert far(running.feed_all(TOKENS[:40]), expected[:40]) < 0.02
    for keep, more in ((40, 1), (40, 2), (30, 2), (0, 3)):
        running.reset(keep)
        assert far(running.feed(TOKENS[keep : keep + more]), expected[keep + more - 1]) < 0.02
        assert running.tokens == TOKENS[: keep + more]
