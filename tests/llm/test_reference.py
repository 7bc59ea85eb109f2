"""The float32 reference agrees with llama.cpp, so that what agrees with the reference does too."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_llama
from gguf import GGUFReader
from gguf.quants import dequantize, quantize
from tiny_llama import GEMMA2, LARGE_EPS, SHAPES, TYPE, Shape, disagreements, rewritten, write

from tegrad.llm import numerics
from tegrad.llm.config import Config
from tegrad.llm.footprint import Footprint
from tegrad.llm.formats import F32, FORMATS
from tegrad.llm.gguf import Gguf
from tegrad.llm.reference import Past, Reference

llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")

MARGIN = 0.1
"""Standard deviations of the logits: llama.cpp rounds activations to 8 bits before each packed matrix, we do not."""


@pytest.mark.parametrize("shape", SHAPES)
def test_float32_logits_are_llama_cpps(tmp_path: Path, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(numerics.ACTIVATIONS, "gelu", llama_cpp.table_gelu)
    path = write(tmp_path / "model.gguf", SHAPES[shape], TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, SHAPES[shape].vocab, 60).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    ours = Reference(path).logits(tokens)
    limit = 1e-4 if SHAPES[shape].layers < 6 else 2e-3  # what one layer rounds, the next one rounds otherwise
    assert np.abs(ours - theirs).max() <= limit * np.abs(theirs).max()


@pytest.mark.parametrize(("shape", "ones"), [("grouped", 1), ("gpt2", 2), ("phi3", 1)])
def test_dimensions_of_one_in_front_are_none(tmp_path: Path, shape: str, ones: int) -> None:
    """Vectors, biases, divisors of ropes and matrices: llama.cpp reads such a file as the one without them."""
    plain = write(tmp_path / "plain.gguf", SHAPES[shape], TYPE.F32)
    path = rewritten(plain, tmp_path / "ones.gguf", ones=ones)
    tokens = np.random.default_rng(1).integers(0, SHAPES[shape].vocab, 12).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    ours = Reference(path).logits(tokens)
    assert np.array_equal(ours, Reference(plain).logits(tokens))
    assert np.abs(ours - theirs).max() <= 1e-3 * np.abs(theirs).max()
    with Gguf.open(path) as file, Gguf.open(plain) as other:
        found, expected = (list(Config.read(one).tensors(one)) for one in (file, other))
        assert [(info.name, info.shape, info.nbytes) for info in found] == [
            (info.name, info.shape, info.nbytes) for info in expected
        ]
        assert Footprint.of(file) == Footprint.of(other)
    assert min(len(tensor.shape) for tensor in GGUFReader(path).tensors) == 1 + ones


WINDOW = {"gemma3.attention.sliding_window": 5}
GEMMAS = {
    "five within the window, then one": Shape(
        arch="gemma3", dim=64, ffn=64, layers=7, extra={**WINDOW, "gemma3.final_logit_softcapping": 2.0}
    ),
    "no window": Shape(arch="gemma3", extra={"gemma3.rope.freq_base": 1e6}),
    "the layers' own base": Shape(arch="gemma2", extra={**GEMMA2, "gemma2.rope.freq_base_swa": 100.0}),
    "scaled as they are": Shape(
        arch="gemma2", extra={**GEMMA2, "gemma2.rope.scaling.type": "linear", "gemma2.rope.scaling.factor": 4.0}
    ),
    "as YaRN's are not": Shape(
        arch="gemma3",
        layers=6,
        extra={
            **WINDOW,
            "gemma3.rope.scaling.type": "yarn",
            "gemma3.rope.scaling.factor": 4.0,
            "gemma3.rope.scaling.original_context_length": 32,
        },
    ),
    "capped as none says": Shape(
        arch="gemma4",
        layers=3,
        local=(64, 2),
        extra={key: value for key, value in SHAPES["gemma4"].extra.items() if not key.endswith("softcapping")},
    ),
    "not capped": Shape(
        arch="gemma4",
        layers=3,
        local=(64, 2),
        extra={**SHAPES["gemma4"].extra, "gemma4.final_logit_softcapping": 0.0},
    ),
    "27 billion": Shape(arch="gemma3", dim=64, ffn=64, heads=4, head_dim=64, layers=62, extra=WINDOW),
    "27 billion of gemma2": Shape(arch="gemma2", dim=64, ffn=64, heads=4, head_dim=64, layers=46, extra=GEMMA2),
}


@pytest.mark.parametrize("name", GEMMAS)
def test_what_a_gemma_says_of_its_layers_is_done_as_llama_cpp_does(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(numerics.ACTIVATIONS, "gelu", llama_cpp.table_gelu)
    shape = replace(GEMMAS[name], eps=LARGE_EPS, tied=True)
    path = write(tmp_path / "model.gguf", shape, TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, shape.vocab, 30).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    # Where many layers follow each other, what halves round in one is rounded otherwise in the next.
    limit = 1e-4 if shape.layers < 6 else 2e-3
    assert np.abs(Reference(path).logits(tokens) - theirs).max() <= limit * np.abs(theirs).max()


def test_an_lfm2_may_attend_within_a_window(tmp_path: Path) -> None:
    window = {**SHAPES["lfm2"].extra, "lfm2.attention.sliding_window": 5}
    path = write(tmp_path / "model.gguf", replace(SHAPES["lfm2"], extra=window), TYPE.F32)
    whole = write(tmp_path / "whole.gguf", SHAPES["lfm2"], TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, SHAPES["lfm2"].vocab, 30).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    largest = np.abs(theirs).max()
    assert np.abs(Reference(path).logits(tokens) - theirs).max() <= 1e-4 * largest
    assert np.abs(Reference(whole).logits(tokens) - theirs).max() > 0.1 * largest


def test_a_glm4_that_reads_images_rotates_other_pairs(tmp_path: Path) -> None:
    """GLM-4.1V's text model, whose queries and keys lie otherwise; for text every part of a head has one position."""
    sections = {"glm4.rope.dimension_sections": [4, 6, 6, 0]}
    path = write(tmp_path / "model.gguf", replace(SHAPES["glm4"], extra=sections), TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, SHAPES["glm4"].vocab, 30).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    assert np.abs(Reference(path).logits(tokens) - theirs).max() <= 1e-4 * np.abs(theirs).max()


SCALES = {"attention.scale": 0.05, "embedding_scale": 0.3, "residual_scale": 3.0, "logit_scale": 0.1}


@pytest.mark.parametrize("scale", SCALES)
def test_each_scale_is_applied_where_llama_cpp_applies_it(tmp_path: Path, scale: str) -> None:
    """The others are 0, which stands for none; llama.cpp must be told the last one."""
    extra = {f"granite.{name}": value if name == scale else 0.0 for name, value in SCALES.items()}
    extra["granite.logit_scale"] = extra["granite.logit_scale"] or 1.0
    path = write(tmp_path / "model.gguf", replace(SHAPES["granite"], extra=extra), TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, SHAPES["granite"].vocab, 20).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    assert np.abs(Reference(path).logits(tokens) - theirs).max() <= 1e-4 * np.abs(theirs).max()


def fused(tensors: dict[str, np.ndarray]) -> None:
    """Queries, keys and values in one tensor, and their biases, as convert_hf_to_gguf.py --fuse-qkv writes them."""
    for name in [name for name in tensors if ".attn_q." in name]:
        tensors[name.replace("attn_q", "attn_qkv")] = np.concatenate(
            [tensors.pop(name.replace("attn_q", f"attn_{part}")) for part in "qkv"]
        )


def apart(tensors: dict[str, np.ndarray]) -> None:
    """In three tensors, of a model of as many of each row."""
    for name in [name for name in tensors if ".attn_qkv." in name]:
        for part, rows in zip("qkv", np.split(tensors.pop(name), 3), strict=True):
            tensors[name.replace("qkv", part)] = rows


def unbiased(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if name.endswith(".bias")]:
        del tensors[name]


def biased(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if name.endswith(tuple(f"attn_{part}.weight" for part in ("q", "k", "v")))]:
        tensors[name.replace("weight", "bias")] = np.linspace(-1, 1, len(tensors[name]), dtype=np.float32)


STORED: dict[str, tuple[str, tuple[Callable[[dict[str, np.ndarray]], None], ...]]] = {
    "llama in one": ("plain", (biased, fused)),
    "qwen2 in one": ("qwen2", (fused,)),
    "gemma3 in one": ("gemma3", (fused,)),
    "phi3 in three": ("phi3", (apart,)),
    "qwen2 without biases, as KORMo": ("qwen2", (unbiased,)),
    "qwen3 with biases": ("qwen3", (biased,)),
    "chatglm without biases, as GLM-Edge": ("chatglm", (unbiased,)),
    "chatglm without biases in three": ("chatglm", (unbiased, apart)),
}


@pytest.mark.parametrize("name", STORED)
def test_queries_keys_and_values_are_found_however_they_are_stored(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(numerics.ACTIVATIONS, "gelu", llama_cpp.table_gelu)
    (family, changes), made = STORED[name], tiny_llama.weights

    def stored(shape: Shape, seed: int) -> dict[str, np.ndarray]:
        tensors = made(shape, seed)
        for change in changes:
            change(tensors)
        return tensors

    monkeypatch.setattr(tiny_llama, "weights", stored)
    shape = replace(SHAPES[family], kv_heads=SHAPES[family].heads)
    path = write(tmp_path / "model.gguf", shape, TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, shape.vocab, 30).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    assert np.abs(Reference(path).logits(tokens) - theirs).max() <= 1e-4 * np.abs(theirs).max()


def test_a_context_beyond_the_trained_one_turns_by_other_divisors(tmp_path: Path) -> None:
    """By the session's context alone, whatever is in it."""
    shape = replace(SHAPES["phi3"], context=1024)
    path = write(tmp_path / "model.gguf", shape, TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, shape.vocab, 40).tolist()
    for context in (256, 512):
        with llama_cpp.peer(path, context) as peer:
            theirs = peer.logits(tokens)
        largest = np.abs(theirs).max()
        assert np.abs(Reference(path, context).logits(tokens) - theirs).max() <= 1e-4 * largest
        assert np.abs(Reference(path, 768 - context).logits(tokens) - theirs).max() > 0.1 * largest


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *(("llama", kind.name) for kind in FORMATS if kind is not F32),
        ("qwen2", "Q4_K"),
        ("qwen3", "Q8_0"),
        ("gpt2", "F16"),
    ],
)
def test_packed_weights_choose_llama_cpps_tokens(tmp_path: Path, shape: str, kind: str) -> None:
    sizes = replace(SHAPES.get(shape, Shape()), dim=256, ffn=256)
    path = write(tmp_path / "model.gguf", sizes, TYPE[kind])
    tokens = np.random.default_rng(4).integers(0, sizes.vocab, 60).tolist()
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
    ours = Reference(path).logits(tokens)
    assert (ours - theirs).std() <= 0.05 * theirs.std()
    # llama.cpp rounds 256 activations by one scale before these: a token lies 0.16 and 0.102 deviations below.
    assert disagreements(ours, theirs, 2 * MARGIN if kind in ("IQ4_XS", "IQ2_XXS") else MARGIN) == []


def test_tokens_fed_piece_by_piece_give_the_same_logits(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, SHAPES["plain"], TYPE.F32)
    model, tokens = Reference(path), list(np.random.default_rng(0).integers(0, SHAPES["plain"].vocab, 20))
    past = Past()
    pieces = [model.logits(tokens[start:end], past) for start, end in ((0, 7), (7, 8), (8, 20))]
    whole = model.logits(tokens)
    assert np.abs(np.concatenate(pieces) - whole).max() <= 1e-5 * np.abs(whole).max()


def test_positions_far_into_the_context_are_rotated_as_llama_cpp_does(tmp_path: Path) -> None:
    """Its angles are products in float32: at 32k they are off by some thousandths, which ours may differ by."""
    for name, divided in (("plain", True), ("qwen3", False)):
        shape = replace(SHAPES[name], context=40960, rope_freqs=divided)
        path = write(tmp_path / f"{name}.gguf", shape, TYPE.F32)
        tokens = np.random.default_rng(1).integers(0, shape.vocab, 40).tolist()
        model = Reference(path)
        with llama_cpp.peer(path) as peer:
            for first, limit in ((100, 1e-4), (4000, 3e-4), (32700, 2e-3)):
                theirs = peer.logits(tokens, first)
                assert np.abs(model.logits(tokens, Past(first=first)) - theirs).max() <= limit * np.abs(theirs).max()


@pytest.mark.parametrize(("kind", "limit"), [("F16", 1e-4), ("Q8_0", 5e-4)])
def test_a_cache_rounds_keys_as_llama_cpps_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, limit: float
) -> None:
    """llama.cpp rounds the queries too, to multiply like with like; otherwise the two differ by keys alone."""
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")  # else it rotates what it rounds, to round it better
    path = write(tmp_path / "model.gguf", SHAPES["qwen3"], TYPE.F32)
    tokens = np.random.default_rng(1).integers(0, SHAPES["qwen3"].vocab, 40).tolist()
    with llama_cpp.peer(path, keys=getattr(llama_cpp, kind)) as peer:
        theirs = peer.logits(tokens)
    model, rounded = Reference(path), numerics.ROUNDINGS[kind]
    exact = model.logits(tokens)

    def rotate(x: np.ndarray, tables: np.ndarray) -> np.ndarray:
        return rounded(numerics._rotate_halves(x, tables))

    monkeypatch.setitem(numerics.ROTATIONS, "halves", rotate)
    largest = np.abs(theirs).max()
    assert np.abs(model.logits(tokens) - theirs).max() <= limit * largest
    assert np.abs(exact - theirs).max() > 3 * np.abs(model.logits(tokens) - theirs).max()


@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_a_cache_gives_back_what_ggmls_blocks_hold(kind: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 3, 2, 64)).astype(np.float32) * 8
    x[0, 0, 0] = 0
    stored = dequantize(quantize(x, TYPE[kind]), TYPE[kind]).astype(np.float32)
    assert np.array_equal(numerics.ROUNDINGS[kind](x), stored)
    kept, values = Past(kind).extend(0, x, 2 * x)
    assert np.array_equal(kept, stored)
    assert np.array_equal(values, 2 * stored)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", numerics.ACTIVATIONS)
def test_far_from_zero_an_activation_is_nothing_or_its_argument_without_a_warning(name: str) -> None:
    """Or its argument's square."""
    ends = numerics.ACTIVATIONS[name](np.array([-1e4, 1e4], np.float32))
    assert ends.tolist() == [0, 1e8 if name == "relu2" else 1e4]
