"""Models of random weights have the published sizes, are the same every time, and run in llama.cpp and in ours."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tegrad.bench import models
from tegrad.bench.quality import small
from tegrad.llm.config import Config
from tegrad.llm.gguf import Gguf
from tegrad.llm.reference import Reference
from tegrad.llm.tokenizer import Tokenizer

PUBLISHED = {
    "1b": 1_235_814_400,
    "3b": 3_212_749_824,
    "8b": 8_030_261_248,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "gemma2-2b": 2_614_341_888,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_263_168,
    "phi4-mini": 3_836_021_760,
    "smollm3-3b": 3_075_098_624,
    "granite3.1-2b": 2_533_531_648,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "ministral3-3b": 3_429_006_336,
    "gemma-2b": 2_506_172_416,
    "minicpm-2b": 2_724_880_896,
    "internlm2.5-1.8b": 1_889_110_016,
    "ernie4.5-0.3b": 360_748_032,
    "qwen2.5-vl-3b": 3_085_938_688,
    "qwen3-vl-2b": 1_720_574_976,
    "hunyuan-1.8b": 1_791_080_448,
    "qwen3.5-0.8b": 752_393_024,  # without images, summed up by hand, as the next one
    "qwen3.5-4b": 4_205_751_296,
    "gemma4-e2b": 4_628_569_379,  # with what sees and hears 5.1 and 8 billion
    "gemma4-e4b": 7_463_013_418,
    "gemma4-31b": 30_697_345_340,
    "lfm2-350m": 354_483_968,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-2.6b": 2_569_272_320,
    "seed-oss-36b": 36_151_104_512,
    "exaone3.5-2.4b": 2_405_327_360,
    "exaone3.5-7.8b": 7_818_448_896,
    "exaone4-1.2b": 1_279_391_488,
    "glm4-9b": 9_400_279_040,
    "glm4-9b-2024": 9_399_951_360,
    "starcoder2-3b": 3_030_371_328,
    "nemotron-mini-4b": 4_190_509_056,
    "tiny-aya": 3_349_227_520,
    "command-r7b": 8_028_033_024,
    "aya-expanse-8b": 8_028_033_024,
    "pythia-1b": 1_011_781_632,
    "jais2-8b": 8_090_401_280,
    "phi2": 2_779_683_840,
    "stablelm-3b": 2_795_443_200,
    "afm-4.5b": 4_619_184_640,
    "gpt2": 124_439_808,
}
"""Parameters, as the models' own pages count them."""

ROTATED = {
    "phi4-mini": 48,
    "glm4-9b": 32,
    "glm4-9b-2024": 32,
    "starcoder2-3b": 64,
    "nemotron-mini-4b": 32,
    "tiny-aya": 64,
    "command-r7b": 64,
    "aya-expanse-8b": 64,
    "jais2-8b": 64,
}
SMALL = {
    name: replace(small(shape), vocab=600, context=256)
    if shape.arch == "gemma4"
    else replace(
        shape,
        dim=256,
        ffn=512,
        layers={"gemma3": 6, "smollm3": 4, "cohere2": 4, "lfm2": 3, "qwen35": 4}.get(
            shape.arch, 2
        ),  # llama.cpp wants one that attends to everything
        heads=4,
        kv_heads=4 if name in ("gpt2", "phi2", "pythia-1b", "jais2-8b") else 2,
        head_dim=64,
        vocab=600,
        specials=min(shape.specials, 590),
        context=256,
        own={**shape.own, **({"rope.dimension_count": ROTATED[name]} if name in ROTATED else {})},
    )
    for name, shape in models.SHAPES.items()
}


@pytest.mark.parametrize("name", models.SHAPES)
def test_a_shape_has_the_published_number_of_parameters(name: str) -> None:
    shape = models.SHAPES[name]
    sizes = {
        tensor.name: np.prod(tensor.shape) for tensor in models._tensors(shape, "f16") if "rope" not in tensor.name
    }
    assert sum(sizes.values()) == PUBLISHED[name]


@pytest.mark.parametrize("kind", models.FORMATS)
def test_weights_have_the_deviation_that_keeps_a_products_size(kind: str) -> None:
    from gguf.quants import dequantize

    chosen = {
        tensor.name: tensor for tensor in models._tensors(replace(SMALL["1b"], dim=1024, ffn=1024, layers=1), kind)
    }
    tensor = chosen["blk.0.ffn_up.weight"]
    values = dequantize(tensor.make(), tensor.kind).astype(np.float64)
    assert values.shape == (1024, 1024)
    assert values.std() == pytest.approx(1 / 32, rel=0.06)
    assert abs(values.mean()) < 0.03 * values.std()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("1b", "q6k"), ("mistral-7b", "q4k"), ("qwen2.5-0.5b", "q8_0"), ("qwen3-0.6b", "q5k"), ("gpt2", "f16")),
        *(("1b", "q4km"), ("gemma3-1b", "q4km"), ("phi4-mini", "q4km"), ("smollm3-3b", "f32")),
        *(("gemma2-2b", "q4k"), ("granite3.1-2b", "q4k"), ("olmo2-1b", "q8_0"), ("ministral3-3b", "q4k")),
        *(("gemma-2b", "q4k"), ("minicpm-2b", "q4_0"), ("internlm2.5-1.8b", "q4km"), ("ernie4.5-0.3b", "q8_0")),
        *(("qwen2.5-vl-3b", "q4k"), ("qwen3-vl-2b", "q6k"), ("seed-oss-36b", "q5k"), ("exaone3.5-2.4b", "q4k")),
        *(("exaone4-1.2b", "q4k"), ("glm4-9b", "q4km"), ("glm4-9b-2024", "q4k"), ("starcoder2-3b", "q8_0")),
        *(("nemotron-mini-4b", "q4k"), ("afm-4.5b", "q4k"), ("hunyuan-1.8b", "q4k")),
        *(("tiny-aya", "q4km"), ("command-r7b", "q6k"), ("phi2", "q4km"), ("stablelm-3b", "q4k")),
        *(("aya-expanse-8b", "q4k"), ("pythia-1b", "q8_0"), ("jais2-8b", "q4km")),
        *(("qwen3.5-0.8b", "q8_0"), ("qwen3.5-4b", "q5_0"), ("gemma4-e2b", "q8_0"), ("gemma4-31b", "q4km")),
        *(("lfm2-350m", "q8_0"), ("lfm2-1.2b", "q5_0"), ("lfm2-2.6b", "q6k")),
    ],
)
def test_a_small_one_runs_in_llama_cpp_and_in_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "llm"))
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    path = tmp_path / "model.gguf"
    models.write(path, SMALL[name], kind)
    tokens = np.random.default_rng(0).integers(0, SMALL[name].vocab, 40).tolist()
    ours, text = Reference(path).logits(tokens), "the model's text, 12 words"
    with llama_cpp.peer(path) as peer:
        theirs = peer.logits(tokens)
        assert Tokenizer.load(path).encode(text, bos=False) == peer.vocab.tokenize(text, False, True)
    assert np.isfinite(theirs).all()
    assert (ours - theirs).std() < 0.05 * theirs.std()  # llama.cpp rounds activations to 8 bits
    with Gguf.open(path) as file:
        config = Config.read(file)
    wanted = SMALL[name].config
    assert config.eps == pytest.approx(wanted.eps)
    assert replace(config, eps=wanted.eps) == wanted


def test_a_file_is_written_once_and_always_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.SHAPES, "small", SMALL["1b"])
    first = models.provide("small-q4_0", tmp_path / "a")
    content = first.read_bytes()
    assert models.provide("small-q4_0", tmp_path / "b").read_bytes() == content
    first.write_bytes(b"kept")
    assert models.provide("small-q4_0", tmp_path / "a").read_bytes() == b"kept"
    assert os.listdir(tmp_path / "a") == ["small-q4_0.gguf"]


@pytest.mark.parametrize("name", ["1b", "1b-q1k", "2b-q6k", ""])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(models.ModelNameError, match="give SHAPE-FORMAT"):
        models.parse(name)


def test_a_format_whose_blocks_do_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(models.ModelNameError, match="rows of 896 weights are no multiple of Q6_K's 256"):
        models.provide("qwen2.5-0.5b-q6k", tmp_path)
    assert os.listdir(tmp_path) == []


def test_the_divisors_are_llama_3s() -> None:
    divisors = models.llama3_divisors(32, 5e5, 32.0)
    assert divisors[:15].tolist() == [1.0] * 15
    assert (divisors[-10:] == 32).all()
    assert (np.diff(divisors) >= 0).all()


def test_the_command_prints_the_path(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tegrad.bench.models", "nothing", "--out", str(tmp_path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "SHAPE-FORMAT" in done.stderr
