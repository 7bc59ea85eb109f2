"""`tegrad eval` on a device: our kernels where they run, the reference's bits per byte, refusals by name."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from click.testing import Result
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "nv"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from boards import close_device, use_board
from tiny_llama import TYPE, Shape, letters, write

from tegrad import cli, models
from tegrad.llm.errors import GgufError, UnsupportedModelError
from tegrad.llm.quality import negative_log_likelihood
from tegrad.llm.reference import Reference
from tegrad.llm.tokenizer import Tokenizer

TEXTS = ("And God said, Let there be light: and there was light.\n", "And the evening and the morning.\n")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_text("\f".join(TEXTS))
    return path


@pytest.fixture(autouse=True)
def same_surroundings() -> Iterator[None]:
    """The command chooses a device in the environment and opens it: neither is left to the tests that follow."""
    before = dict(os.environ)
    yield
    close_device()
    os.environ.clear()
    os.environ.update(before)


def evaluate(*arguments: object) -> Result:
    return CliRunner().invoke(cli.build(["eval"]), ["eval", *map(str, arguments)])


def reference_bits(path: Path) -> float:
    """Bits a byte of TEXTS, which fit a window each."""
    reference, tokenizer = Reference(path), Tokenizer.load(path)
    assert tokenizer.bos is not None
    assert tokenizer.eos is not None
    nats = 0.0
    for text in TEXTS:
        tokens = [*tokenizer.encode(text, bos=True, special=False), tokenizer.eos]
        nats += negative_log_likelihood(reference.logits(tokens[:-1]), tokens[1:]).sum()
    return float(nats / np.log(2) / sum(map(len, TEXTS)))


@pytest.mark.board
def test_our_kernels_measure_what_the_reference_does(text: Path) -> None:
    """The loss by the kernels for prompts, which round activations to halves; samples by the decode loop."""
    with use_board("agx-orin-64gb"):
        done = evaluate("--device", "NV", "--text", text, "--tokens", 20, "--seed", 5, "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert (figures["steps"], figures["device"].split(",")[0]) == ("kernels", "NV sm_87")
    assert figures["bits_per_byte"] == pytest.approx(reference_bits(models.SMALL), rel=1e-3)
    assert figures["sampled_tokens"] == 20
    assert figures["known_words_percent"] > 75


def test_what_our_kernels_refuse_is_measured_by_tinygrads_and_said(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    from tegrad.llm import device, engine, model, session, start

    class Even:
        """Every token is as likely as any other."""

        context = 64

        def __init__(self, *given: object) -> None: ...

        def reset(self) -> None: ...

        def feed_all(self, tokens: Sequence[int]) -> np.ndarray:
            return np.zeros((len(tokens), 2048), np.float32)

        def generate(self, prompt: Sequence[int], sampler: object, limit: int, stops: object) -> Iterator[int]:
            return iter([300] * limit)

    class Refusing:
        def __init__(self, *given: object, **more: object) -> None:
            raise UnsupportedModelError("heads of 80 are not run")

    chosen = []
    monkeypatch.setattr(start, "choose_device", chosen.append)
    monkeypatch.setattr(device, "open_device", lambda name: f"{name} sm_00")
    monkeypatch.setattr(engine, "suits_named", lambda name: name == "NV:1")
    monkeypatch.setattr(engine, "Engine", Refusing)
    monkeypatch.setattr(model, "Model", lambda *given, **more: None)
    monkeypatch.setattr(session, "Session", Even)
    done = evaluate("--device", "NV:1", "--text", text, "--tokens", 3, "--json")
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout)
    assert (figures["steps"], chosen) == ("operations", ["NV:1"])
    assert figures["nats_per_token"] == pytest.approx(np.log(2048), abs=1e-3)
    assert "heads of 80 are not run" in done.stderr
    assert done.stderr.count("\n") == 1
    assert "small.gguf on NV:1 sm_00" in (said := evaluate("--device", "NV:1", "--text", text, "--tokens", 3).stdout)
    assert "(operations), " in said


def test_the_reference_says_that_it_ran(text: Path) -> None:
    done = evaluate("--text", text, "--tokens", 0, "--json")
    assert (json.loads(done.stdout)["device"], json.loads(done.stdout)["steps"]) == ("numpy", "numpy")
    assert "small.gguf on numpy, " in evaluate("--text", text, "--tokens", 0).stdout


@pytest.mark.parametrize("device", ["numpy", "NV"])
def test_a_model_that_nothing_runs_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, device: str
) -> None:
    path = tmp_path / "model.gguf"
    data = models.SMALL.read_bytes()
    name = data.index(b"llama", data.index(b"general.architecture"))
    path.write_bytes(data[:name] + b"mamba" + data[name + 5 :])
    done = evaluate(path, "--device", device, "--text", text)
    assert isinstance(done.exception, UnsupportedModelError | GgufError)
    assert "mamba" in str(done.exception)
    assert done.stdout == ""


def test_a_model_that_may_choose_tokens_without_a_text_is_refused(tmp_path: Path, text: Path) -> None:
    shape = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1, vocab=600)
    done = evaluate(write(tmp_path / "few.gguf", shape, TYPE.Q8_0, vocabulary=letters(300)), "--text", text)
    assert isinstance(done.exception, GgufError)
    assert "300 tokens for 600 rows of token_embd" in str(done.exception)
