"""Layers that convolve (LFM2): kernels in all that run a model, and conversations around the rings that they keep."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from decode_steps import far
from tiny_llama import LARGE_EPS, TYPE, Shape, rewritten, write
from tinygrad import dtypes

from tegrad.bench import plans
from tegrad.bench.plans import DryDevice
from tegrad.hw.chips import CHIPS
from tegrad.llm.batch import Batch
from tegrad.llm.cache import KvCache
from tegrad.llm.config import Config
from tegrad.llm.engine import Engine
from tegrad.llm.errors import GgufError, UnsupportedModelError
from tegrad.llm.footprint import Footprint
from tegrad.llm.formats import F16
from tegrad.llm.gguf import Gguf
from tegrad.llm.model import Model
from tegrad.llm.network import Attend, Convolve
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.reference import Past, Reference
from tegrad.llm.rows import floats
from tegrad.llm.sampling import Settings
from tegrad.llm.session import Session

CONTEXT, CHUNK, ROWS = 200, 16, 64
LFM2 = Shape(
    arch="lfm2", dim=192, ffn=64, heads=3, kv_heads=1, context=CONTEXT, vocab=96, layers=4, taps=4, eps=LARGE_EPS,
    tied=True, extra={"lfm2.shortconv.l_cache": 4},
)  # fmt: skip
"""Layers 0, 2 and 3 convolve 4 positions."""
TOKENS = np.random.default_rng(3).integers(0, LFM2.vocab, CONTEXT).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("convolutions") / "model.gguf", LFM2, TYPE.F16)


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


def test_layers_without_key_heads_convolve(path: Path) -> None:
    net = config(path).network
    assert [type(op) for op in net.mixers] == [Convolve, Attend, Convolve, Convolve]
    assert len(net.attends) == 1
    assert net.convolves
    assert {spec.name for spec in net.of_layer(0)} & {"attn_q", "attn_q_norm", "attn_output"} == set()
    assert {spec.name for spec in net.of_layer(1)} & {"shortconv.conv"} == set()
    assert (config(path).projected, config(path).mixed) == (3 * LFM2.dim, LFM2.dim)


def test_the_reference_goes_on_after_what_was_said(path: Path, expected: np.ndarray) -> None:
    reference, past = Reference(path), Past()
    found = [reference.logits(TOKENS[first:last], past) for first, last in ((0, 1), (1, 3), (3, 50))]
    np.testing.assert_allclose(np.concatenate(found), expected[:50], atol=1e-3)


@pytest.mark.parametrize("tap", range(LFM2.taps))
def test_every_column_of_a_kernel_counts(path: Path, expected: np.ndarray, tap: int) -> None:
    """So that the other tests are tests of it."""
    reference = Reference(path)
    reference.weights["blk.2.shortconv.conv.weight"][:, tap] = 0
    assert far(reference.logits(TOKENS[:50]), expected[:50]) > 0.1


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"lfm2.shortconv.l_cache": None}, GgufError, "lacks the value 'lfm2.shortconv.l_cache'"),
        (
            {"lfm2.shortconv.l_cache": 3},
            GgufError,
            r"blk.0.shortconv.conv.weight' has the shape \(192, 4\), \(192, 3\)",
        ),
        ({"lfm2.shortconv.l_cache": 17}, UnsupportedModelError, r"convolves 17 positions .*, 16 at most are run"),
        ({"lfm2.attention.head_count_kv": [0, 1, 0]}, GgufError, "for 4 layers"),
        ({"lfm2.attention.head_count_kv": [0, 0, 0, 0]}, GgufError, "for 4 layers, of which some attend"),
        ({"lfm2.attention.head_count_kv": [0, 0, 0, 0, 1]}, GgufError, "for 4 layers, of which some attend"),
        ({"lfm2.attention.head_count_kv": [0, 1, 3, 0]}, UnsupportedModelError, "has layers of different"),
        ({"lfm2.attention.head_count_kv": [0, 1, 1, 0]}, UnsupportedModelError, "the tensor 'blk.2.shortconv.in_proj"),
        ({"tensor": "blk.3.shortconv.conv.weight"}, GgufError, "lacks the tensor 'blk.3.shortconv.conv.weight'"),
        ({"lfm2.expert_count": 32}, UnsupportedModelError, "is a mixture of experts"),
    ],
)
def test_files_that_contradict_themselves_or_ask_for_more_are_refused(
    path: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        config(rewritten(path, tmp_path / "changed.gguf", **changes))


def test_a_kernel_that_is_not_of_floats_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tiny_llama

    monkeypatch.setattr(tiny_llama, "FLOATS", ("none", "none"))
    path = write(tmp_path / "model.gguf", LFM2, TYPE.F16, seed=1)
    with pytest.raises(GgufError, match=r"'blk.0.shortconv.conv.weight' is F16 \(192, 4\), F32 \(192, 4\) expected"):
        config(path)


def test_a_ring_of_floats_holds_what_a_kernel_and_a_chunk_read(path: Path) -> None:
    device, sizes = DryDevice(CHIPS["gh100"]), config(path)
    for q8 in (False, True):
        with KvCache(device, sizes, CONTEXT, slots=2, ahead=CHUNK, q8=q8, blocks=8) as cache:
            assert [layer.rows for layer in cache.layers] == [ROWS, CONTEXT, ROWS, ROWS]
            assert cache.layers[0].keys.size == 4 * 2 * ROWS * LFM2.dim
            assert cache.layers[0].table is None
            assert cache.layers[1].table is not None
            assert not cache.shareable
            assert cache.rings.holds(0)
            cache.rings.wrote(150, 1)
            assert [cache.rings.holds(position, 1) for position in (0, 88, 89, 150)] == [False, False, True, True]


def test_what_rings_take_is_part_of_the_footprint(path: Path) -> None:
    with Gguf.open(path) as file:
        footprint = Footprint.of(file)
    more = footprint.at(CONTEXT) - footprint.at(CONTEXT // 2)
    attention = CONTEXT // 2 * (2 * 2 * 64 + 2 * 4 * 64)  # keys and values of a layer, and two tables of angles
    assert more == attention + 3 * 4 * LFM2.dim * (CONTEXT - CONTEXT // 2)  # rings of as many rows as positions
    assert footprint.weights >= path.stat().st_size - (1 << 16)


def test_one_launch_refuses_other_blocks_that_convolve(path: Path) -> None:
    from tegrad.llm.persistent import check_block

    made = config(path)
    check_block(made)
    wide = replace(made, head_dim=128, value_dim=128)
    by_mean = replace(made, arch=replace(made.arch, norm="layer"))
    parallel = replace(made, arch=replace(made.arch, parallel=True))
    for other in (wide, by_mean, parallel):
        with pytest.raises(UnsupportedModelError, match="the persistent step does not run lfm2"):
            check_block(other)


def test_layers_that_convolve_share_a_kernel(path: Path) -> None:
    from tegrad.llm.state import States

    device: Any = DryDevice(CHIPS["gh100"])
    made = plans.model(config(path), F16, device)
    plan = DecodePlan(made, States(device), KvCache(device, made.config, CONTEXT, ahead=CHUNK))
    programs = [named.launch.program for named in plan.named if named.kind == "convolution"]
    assert len(programs) == 3
    assert programs[0] is programs[1] is programs[2]


@pytest.mark.board
def test_a_conversation_goes_on_around_the_rings_and_back_to_what_they_have_lost(
    engine: Engine, expected: np.ndarray
) -> None:
    """Prompts in chunks and steps, to positions that a ring of 64 has twice over; then from where one still has what
    the kernel reads, and from where it has not."""
    engine.reset()
    for first, last in ((0, 1), (1, 100), (100, 103), (103, 150)):
        assert far(engine.feed(TOKENS[first:last]), expected[last - 1]) < 0.02
    for keep, more in ((120, 3), (60, 2), (30, 12), (0, 5)):
        engine.reset(keep)
        assert far(engine.feed(TOKENS[keep : keep + more]), expected[keep + more - 1]) < 0.02
        assert engine.tokens == TOKENS[: keep + more]
    engine.reset()
    engine.feed(TOKENS[:130])
    engine.reset(20)
    assert far(engine.feed_all(TOKENS[20:60]), expected[20:60]) < 0.02


@pytest.mark.board
@pytest.mark.parametrize("plan", [DecodePlan, PersistentPlan])
def test_layers_beside_them_may_all_be_within_a_window(tmp_path: Path, device: str, plan: Any) -> None:
    """A ring of theirs holds less than the context. (test_reference.py compares the reference with llama.cpp.)"""
    whole = replace(LFM2, dim=256, ffn=256, heads=4, kv_heads=2)
    shape = replace(whole, extra={**LFM2.extra, "lfm2.attention.sliding_window": 40})
    path = write(tmp_path / "model.gguf", shape, TYPE.F16)
    sizes = config(path)
    assert [form.window for form in sizes.layer_forms] == [None, 40, None, None]
    assert sizes.longest == CONTEXT
    expected = Reference(path).logits(TOKENS[:150])
    assert far(expected, Reference(write(tmp_path / "whole.gguf", whole, TYPE.F16)).logits(TOKENS[:150])) > 0.1
    with Gguf.open(path) as file, Engine(file, CONTEXT, device=device, short=8, chunks=(CHUNK,), plan=plan) as engine:
        for first, last in ((0, 1), (1, 100), (100, 101), (101, 102), (102, 150)):
            assert far(engine.feed(TOKENS[first:last]), expected[last - 1]) < 0.02
        engine.reset(140)
        assert far(engine.feed(TOKENS[140:143]), expected[142]) < 0.02


@pytest.mark.board
def test_generated_tokens_are_the_likeliest(engine: Engine, path: Path) -> None:
    engine.reset()
    tokens = [*TOKENS[:2], *engine.generate(TOKENS[:2], Settings(), 90)]
    logits = Reference(path).logits(tokens)[1:-1]
    chosen = logits[np.arange(90), tokens[2:]]
    assert (logits.max(axis=1) - chosen <= 0.02 * logits.std()).all()


@pytest.mark.board
@pytest.mark.long
@pytest.mark.parametrize("same", [False, True])
def test_sequences_of_a_batch_go_around_their_rings(path: Path, device: str, expected: np.ndarray, same: bool) -> None:
    """One after the other in the same slot, too, where the ring has the sequence's before."""
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
            logits = floats(model.device, batch.logits, 3 * LFM2.vocab).reshape(3, -1)
            assert far(logits[member.slot], expected[count - 1]) < 0.02


@pytest.mark.board
def test_tinygrads_operations_go_around_their_rings_too(path: Path, device: str, expected: np.ndarray) -> None:
    running = Session(Model.load(path, device), CONTEXT, cache_dtype=dtypes.float32, chunk=CHUNK, short=8)
    assert [layer.shape[1] for layer in running._cache.layers] == [ROWS, CONTEXT + CHUNK, ROWS, ROWS]
    assert far(running.feed_all(TOKENS[:150]), expected[:150]) < 0.02
    for at in range(150, 153):
        assert far(running.feed(TOKENS[at : at + 1]), expected[at]) < 0.02
    for keep, more in ((140, 1), (30, 2), (0, 3)):  # all that is read is there, and is not
        running.reset(keep)
        assert far(running.feed(TOKENS[keep : keep + more]), expected[keep + more - 1]) < 0.02
        assert running.tokens == TOKENS[: keep + more]


@pytest.mark.board
def test_sizes_that_are_filled_up_change_nothing(tmp_path: Path, device: str) -> None:
    """Rows of 96: the kernel, all of a ring and what is made of them have zeros behind."""
    shape = replace(LFM2, dim=96, heads=3, kv_heads=1)
    path = write(tmp_path / "model.gguf", shape, TYPE.F16)
    expected = Reference(path).logits(TOKENS[:40])
    with Gguf.open(path) as file, Engine(file, 64, device=device, short=8, chunks=(CHUNK,)) as engine:
        for first, last in ((0, 30), (30, 31), (31, 40)):
            assert far(engine.feed(TOKENS[first:last]), expected[last - 1]) < 0.02
