"""Layers of different sizes, that share keys and values, and that read more of a token than the stream (Gemma 4)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from decode_steps import batch, decoded, far, prompt, steps
from numpy.typing import NDArray
from tiny_llama import SHAPES, TYPE, Shape, rewritten, write

from tegrad.bench.limits import step_bytes
from tegrad.bench.plans import DryDevice
from tegrad.hw.chips import CHIPS
from tegrad.llm.cache import KvCache
from tegrad.llm.config import Config
from tegrad.llm.engine import Engine
from tegrad.llm.errors import GgufError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.network import InputGate
from tegrad.llm.persistent import check_block
from tegrad.llm.reference import Past, Reference
from tegrad.llm.rows import check
from tegrad.nv.gpu import opened

SMALL = replace(SHAPES["gemma4 small"], context=200, vocab=97)
"""Nine layers: the last three take keys and values of the two before them, and have wider feed-forwards."""
LARGE = replace(SHAPES["gemma4"], context=200, vocab=99)
"""Six, of which those without a window have other heads, whose values are keys."""
TOKENS = np.random.default_rng(3).integers(0, 97, 150).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sizes") / "model.gguf", SMALL, TYPE.Q8_0)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("sizes") / "large.gguf", LARGE, TYPE.Q8_0)


@pytest.fixture(scope="module")
def expected(path: Path) -> np.ndarray:
    return Reference(path).logits(TOKENS)


def config(path: Path) -> Config:
    with Gguf.open(path) as file:
        return Config.read(file)


def test_each_layer_has_its_own_sizes(path: Path, large: Path) -> None:
    made = config(path)
    assert [made.at(at).head_dim for at in range(9)] == [256, 256, 512] * 3
    assert [made.at(at).ffn for at in range(9)] == [512] * 6 + [1024] * 3
    assert [op.source for op in made.network.attends] == [None] * 6 + [4, 4, 5]
    assert [len(made.network.project(at).matrices) for at in range(9)] == [3] * 6 + [1] * 3
    assert (made.projected, made.mixed, made.ffn, made.size("inputs")) == (4 * 512 + 2 * 512, 2048, 1024, 9 * 64)
    assert replace(made, forms=tuple(replace(form, source=None) for form in made.forms)).projected == 4 * 512 + 2 * 512
    other = config(large)
    assert [(other.at(at).head_dim, other.at(at).kv_heads) for at in range(6)] == [(64, 4), (64, 4), (128, 2)] * 2
    assert [op.values_are_keys for op in other.network.attends] == [False, False, True] * 2
    assert other.projected == 4 * 64 + 2 * 4 * 64  # of layers within a window: the others' values are keys
    assert not any(isinstance(op, InputGate) for _, op in other.network.operations())
    assert other.network.last_add.scale is not None


def test_layers_of_two_shapes_fit_the_larger_products(tmp_path: Path) -> None:
    made = config(write(tmp_path / "model.gguf", replace(LARGE, local=(128, 2)), TYPE.Q8_0))
    assert made.projected == 4 * 128 + 2 * 2 * 128  # of a layer within a window: the others' values are keys


def test_a_matrix_of_queries_keys_and_values_has_the_values(
    tmp_path: Path, large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp's converter writes them with --fuse-qkv."""
    apart = tiny_llama.weights

    def fused(shape: Shape, seed: int) -> dict[str, np.ndarray]:
        made = apart(shape, seed)
        for at in range(shape.layers):
            queries, keys, values = (made.pop(f"blk.{at}.attn_{side}.weight", None) for side in "qkv")
            assert queries is not None
            assert keys is not None
            made[f"blk.{at}.attn_qkv.weight"] = np.concatenate([queries, keys, keys if values is None else values])
        return made

    monkeypatch.setattr(tiny_llama, "weights", fused)
    path = write(tmp_path / "fused.gguf", LARGE, TYPE.Q8_0)
    assert not any(op.values_are_keys for op in config(path).network.attends)
    assert far(Reference(path).logits(TOKENS[:50]), Reference(large).logits(TOKENS[:50])) < 1e-5


def test_keys_and_values_that_no_layer_takes_do_not_count(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Published files have those of layers that take an earlier one's."""
    apart = tiny_llama.weights

    def more(shape: Shape, seed: int) -> dict[str, np.ndarray]:
        made = apart(shape, seed)
        unread = {name.replace("blk.4", "blk.7"): made[name] for name in made if name.startswith("blk.4.attn_")}
        return {**unread, **made}

    monkeypatch.setattr(tiny_llama, "weights", more)
    larger = write(tmp_path / "larger.gguf", SMALL, TYPE.Q8_0)
    assert larger.stat().st_size > path.stat().st_size
    assert step_bytes(larger) == step_bytes(path)
    assert np.array_equal(Reference(larger).logits(TOKENS[:9]), Reference(path).logits(TOKENS[:9]))


def test_nothing_scales_the_rotation_within_windows(path: Path, tmp_path: Path) -> None:
    """As in llama.cpp, and from a base of 10,000 where a file says none."""
    changes = {"gemma4.rope.freq_base_swa": None, "gemma4.rope.scaling.type": "linear",
               "gemma4.rope.scaling.factor": 4.0}  # fmt: skip
    near, _, far_ = (op.rope for op in config(rewritten(path, tmp_path / "model.gguf", **changes)).network.attends[:3])
    assert (near.base, near.scale, near.divided) == (1e4, 1.0, False)
    assert (far_.base, far_.scale, far_.divided) == (1e6, 0.25, True)


def test_layers_that_share_keys_and_values_have_one_cache(path: Path) -> None:
    device = DryDevice(CHIPS["gh100"])
    with KvCache(device, config(path), 200, ahead=16) as cache:
        found = cache.layers
        assert [layer.rows for layer in found] == [64, 64, 200] * 3
        assert [found[at].keys.va_addr for at in (6, 7, 8)] == [found[at].keys.va_addr for at in (4, 4, 5)]
        assert len({layer.keys.va_addr for layer in found}) == 6
        assert device.taken == 2 * 2 * (4 * 64 * 256 + 2 * 200 * 512)


def test_the_reference_goes_on_after_what_was_said(path: Path, expected: np.ndarray) -> None:
    reference, past = Reference(path), Past()
    found = [reference.logits(TOKENS[first:last], past) for first, last in ((0, 1), (1, 3), (3, 50))]
    np.testing.assert_allclose(np.concatenate(found), expected[:50], atol=2e-3)


@pytest.mark.parametrize(
    "name",
    ["per_layer_token_embd.weight", "per_layer_model_proj.weight", "per_layer_proj_norm.weight",
     "blk.7.inp_gate.weight", "blk.7.proj.weight", "blk.7.post_norm.weight", "blk.7.layer_output_scale.weight",
     "blk.4.attn_v.weight", "blk.5.attn_k.weight"],
)  # fmt: skip
def test_every_tensor_counts(path: Path, expected: np.ndarray, name: str) -> None:
    """So that the other tests are tests of it."""
    reference = Reference(path)
    reference.weights[name][:] *= np.float32(-1 if "proj.weight" in name else 0.3)  # what a norm would undo
    assert far(reference.logits(TOKENS[:50]), expected[:50]) > 0.1


def overlapped(path: Path, device: str, tokens: list[int]) -> NDArray[np.float32]:
    return decoded(path, opened(device), tokens, q8=True, overlap=True)


@pytest.mark.board
@pytest.mark.parametrize("way", [steps, pytest.param(overlapped, marks=pytest.mark.long), prompt, batch])
@pytest.mark.parametrize("name", ["path", pytest.param("large", marks=pytest.mark.long)])
def test_steps_prompts_and_batches_are_the_references(
    name: str, way: Callable[[Path, str, list[int]], NDArray[np.float32]], request: pytest.FixtureRequest, device: str
) -> None:
    path, tokens = request.getfixturevalue(name), TOKENS[:24]
    expected = Reference(path).logits(tokens)
    found = way(path, device, tokens)
    off = (found - expected[-len(found) :]) / expected.std()
    assert np.sqrt((off**2).mean()) < (0.05 if way in (steps, overlapped) else 5e-3)


@pytest.mark.board
@pytest.mark.parametrize("way", [steps, pytest.param(prompt, marks=pytest.mark.long)])
def test_a_stream_that_is_no_whole_runs_has_its_scale_behind_zeros(
    tmp_path: Path, way: Callable[[Path, str, list[int]], NDArray[np.float32]], device: str
) -> None:
    shape = replace(LARGE, dim=288, layers=2, head_dim=64, kv_heads=4)
    path = write(tmp_path / "model.gguf", shape, TYPE.Q8_0)
    expected, found = Reference(path).logits(TOKENS[:6]), way(path, device, TOKENS[:6])
    assert far(found, expected[-len(found) :]) < 0.1


@pytest.mark.board
@pytest.mark.parametrize("kind", [TYPE.Q8_0, TYPE.F16])
def test_what_layers_read_beside_the_stream_is_made_by_any_matrix(tmp_path: Path, device: str, kind: TYPE) -> None:
    """Converters leave it in halves; whoever quantizes it has it quantized."""
    path = write(tmp_path / "model.gguf", SMALL, TYPE.Q8_0, kinds={"per_layer_model_proj": kind})
    found = decoded(path, opened(device), TOKENS[:6])
    assert far(found, Reference(path).logits(TOKENS[:6])) < 0.2


@pytest.mark.board
@pytest.mark.long
def test_a_conversation_goes_on_around_shared_rings(path: Path, device: str, expected: np.ndarray) -> None:
    with Gguf.open(path) as file, Engine(file, 200, device=device, short=8, chunks=(16,)) as engine:
        for first, last in ((0, 100), (100, 103), (103, 140)):
            assert far(engine.feed(TOKENS[first:last]), expected[last - 1]) < 0.2
        engine.reset(20)
        assert far(engine.feed(TOKENS[20:30]), expected[29]) < 0.2


def test_one_launch_takes_heads_of_two_kinds_and_refuses_a_third(path: Path, large: Path) -> None:
    for made in (config(path), config(large)):
        check_block(made)
    made = config(large)
    third = replace(made.forms[0], head_dim=96, rope=replace(made.forms[0].rope, dim=96))
    with pytest.raises(UnsupportedModelError, match="does not run gemma4: its layers differ"):
        check_block(replace(made, forms=(third, *made.forms[1:])))


def test_heads_that_no_kernel_holds_are_refused(tmp_path: Path) -> None:
    wide = replace(SHAPES["plain"], dim=256, heads=2, kv_heads=1)
    with pytest.raises(UnsupportedModelError, match="heads of more than 512 elements"):
        check_block(config(write(tmp_path / "528.gguf", replace(wide, head_dim=528), TYPE.F16)))
    with pytest.raises(UnsupportedModelError, match="heads of more than 512 elements"):
        check_block(config(write(tmp_path / "local.gguf", replace(SMALL, local=(528, 1), head_dim=256), TYPE.F16)))
    file, why = write(tmp_path / "272.gguf", replace(wide, head_dim=272), TYPE.F16), "prompts of heads of 272 elements"
    with Gguf.open(file) as opened_file, pytest.raises(UnsupportedModelError, match=why):
        check(opened_file)


@pytest.mark.parametrize(
    ("name", "why"), [("per_layer_token_embd", None), ("per_layer_model_proj", "batches of F32 matrices are not run")]
)
def test_prompts_multiply_no_floats_but_look_them_up(tmp_path: Path, name: str, why: str | None) -> None:
    path = write(tmp_path / "model.gguf", SMALL, TYPE.Q8_0, kinds={name: TYPE.F32})
    with Gguf.open(path) as file, nullcontext() if why is None else pytest.raises(UnsupportedModelError, match=why):
        check(file)


SHARED = "gemma4.attention.shared_kv_layers"


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({SHARED: 2}, GgufError, f"{SHARED} = 2 of 9 layers"),
        ({SHARED: 8}, GgufError, f"{SHARED} = 8 of 9 layers"),
        ({"gemma4.feed_forward_length": [512] * 8}, GgufError, "for 9 layers"),
        ({"gemma4.feed_forward_length": [512] * 9}, GgufError, "'blk.6.ffn_gate.weight' has the shape"),
        ({"gemma4.attention.head_count_kv": 3}, GgufError, "4 heads, 3 key heads of 256"),
        ({"gemma4.attention.value_length_swa": 128}, UnsupportedModelError, "values of another size than keys"),
        ({"gemma4.rope.dimension_count_swa": 512}, GgufError, "1 key heads of 256, rope over 512"),
        ({"gemma4.embedding_length_per_layer_input": 0}, UnsupportedModelError, "the tensor 'blk.0.post_norm.weight'"),
        ({"gemma4.expert_count": 128}, UnsupportedModelError, "is a mixture of experts"),
        ({"tensor": "per_layer_proj_norm.weight"}, GgufError, "lacks the tensor 'per_layer_proj_norm.weight'"),
        ({"tensor": "blk.5.attn_k.weight"}, GgufError, "lacks the tensor 'blk.5.attn_k.weight'"),
    ],
)
def test_files_that_contradict_themselves_or_ask_for_more_are_refused(
    path: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        config(rewritten(path, tmp_path / "changed.gguf", **changes))


def test_rows_that_are_no_whole_runs_are_refused_by_our_kernels(tmp_path: Path) -> None:
    made = config(write(tmp_path / "model.gguf", replace(LARGE, ffn=96), TYPE.F16))
    with pytest.raises(UnsupportedModelError, match="of different sizes are run where rows of weights are whole runs"):
        made.filled()
