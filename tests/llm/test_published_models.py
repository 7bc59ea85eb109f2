"""Published models, as PyPI has them, against CPU llama.cpp on the same files: tokens, templates, what they say.

Without a registry they are skipped. What does not take long is done where the files are already in the cache.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import real_models
from scripts import texts

from tegrad.llm.gguf import Gguf
from tegrad.llm.sampler import Sampler
from tegrad.llm.template import Template
from tegrad.llm.tokenizer import Kind, Tokenizer

TEXTS = 5000
CONTEXT = 128
SAID = 40
"""Tokens that each prompt is continued by."""
TIE = 0.05
"""Between llama.cpp's two best logits: either is right."""
TOKENS_A_TIE = 64
"""One tie in so many tokens is let pass."""
WAIT_MS = "600000"
PROMPTS = (
    "What is 2 + 2?",
    "Name three colours of the rainbow.",
    "Once upon a time there was a small robot who",
    "Was ist die Hauptstadt von Frankreich?",
    "Write a Python function that reverses a string.",
)


def tokenizer_of(path: Path) -> tuple[Tokenizer, list[str]]:
    """A model's tokenizer, and the names of what is taken out of a text."""
    tokenizer = Tokenizer.load(path)
    apart = (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
    return tokenizer, [text for text, kind in zip(tokenizer.tokens, tokenizer.kinds, strict=True) if kind in apart]


@pytest.mark.parametrize("name", real_models.NAMES)
def test_texts_have_llama_cpps_tokens(name: str) -> None:
    """Of many scripts, emoji, spaces, code and control tokens, which are taken for themselves, and for plain text."""
    path = real_models.there(name)
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    tokenizer, marks = tokenizer_of(path)
    with llama_cpp.peer(path) as peer:
        assert tokenizer.stops == {token for token in range(len(tokenizer)) if peer.vocab.is_eog(token)}
        for number, text in enumerate(texts(1, TEXTS, marks)):
            special = number % 2 == 0
            assert tokenizer.encode(text, special=special) == peer.vocab.tokenize(text, True, special), text


@pytest.mark.parametrize("name", real_models.NAMES)
def test_tokens_are_the_text_again(name: str) -> None:
    """Of what is all characters; a byte-level vocabulary has every byte, Gemma's a token for each."""
    tokenizer, _ = tokenizer_of(real_models.there(name))
    for text in texts(2, TEXTS // 10):
        tokens = tokenizer.encode(text, bos=False, special=False)
        assert tokenizer.decode(tokens, special=True) == text


def test_smollm2s_template_says_what_it_was_trained_on() -> None:
    with Gguf.open(real_models.there("smollm2")) as file:
        template = Template.of(file)
    assert template is not None
    begin = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert template.render([{"role": "user", "content": "Hi"}]) == (
        f"{begin}<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert template.render(turns, reply=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )
    with Gguf.open(real_models.there("gemma3")) as file:  # not tuned to follow instructions
        assert Template.of(file) is None


def prompted(path: Path, prompt: str) -> list[int]:
    """A prompt's tokens, through the file's own template where it has one."""
    tokenizer = Tokenizer.load(path)
    with Gguf.open(path) as file:
        template = Template.of(file)
    if template is None:
        return tokenizer.encode(prompt)
    return tokenizer.encode(template.render([{"role": "user", "content": prompt}]), bos=False)


@pytest.fixture(scope="module")
def patience() -> Iterator[None]:
    """The board's GPU may take a minute for a kernel, before tinygrad reads for how long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HCQDEV_WAIT_TIMEOUT_MS", WAIT_MS)
        from tinygrad.helpers import getenv

        getenv.cache_clear()
        yield
    getenv.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize("name", real_models.NAMES)
def test_greedy_continuations_are_llama_cpps(name: str, patience: None, device: str) -> None:
    """But for near ties, after which ours goes on from llama.cpp's token."""
    from tegrad.llm.engine import Engine

    path = real_models.fetched(name)
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    stops = Tokenizer.load(path).stops
    ties = count = 0
    with (
        Gguf.open(path) as file,
        Engine(file, CONTEXT, device=device) as engine,
        llama_cpp.peer(path, CONTEXT, llama_cpp.F16, llama_cpp.F16) as peer,
    ):
        for prompt in PROMPTS:
            tokens = prompted(path, prompt)
            theirs = peer.greedy(tokens, SAID)[len(tokens) :]
            end = next((at + 1 for at, token in enumerate(theirs) if token in stops), len(theirs))
            theirs, at = theirs[:end], 0
            while at < len(theirs):
                engine.reset()
                told = [*tokens, *theirs[:at]]
                ours = list(engine.generate(told, Sampler(0.0), len(theirs) - at, stops))
                same = next(
                    (n for n, pair in enumerate(zip(ours, theirs[at:], strict=False)) if len(set(pair)) > 1), None
                )
                if same is None:
                    assert len(ours) == len(theirs) - at
                    break
                logits = peer.logits([*told, *theirs[at : at + same]])[-1]
                gap = float(logits[theirs[at + same]] - logits[ours[same]])
                assert gap <= TIE, f"{prompt!r}: token {at + same} is {ours[same]}, not {theirs[at + same]}"
                ties, at = ties + 1, at + same + 1
            count += len(theirs)
    assert ties * TOKENS_A_TIE <= count, f"{ties} ties in {count} tokens"


def tegrad(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A command on the board, in a process of its own."""
    environment = {**os.environ, "TEGRAD_BOARD": os.environ.get("TEGRAD_BOARD", "agx-orin-64gb"), "DEV": "NV"}
    command = [sys.executable, "-m", "tegrad", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=1800, env=environment)


@pytest.mark.long
@pytest.mark.parametrize("name", real_models.NAMES)
def test_tegrad_run_says_what_llama_cpp_says(name: str) -> None:
    path = real_models.fetched(name)
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    tokenizer, tokens = Tokenizer.load(path), prompted(path, PROMPTS[0])
    with llama_cpp.peer(path, CONTEXT, llama_cpp.F16, llama_cpp.F16) as peer:
        theirs = peer.greedy(tokens, 24)[len(tokens) :]
    end = next((at for at, token in enumerate(theirs) if token in tokenizer.stops), len(theirs))
    said = tegrad("run", str(path), PROMPTS[0], "--temperature", "0", "--max-tokens", "24", "--json")
    answer: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    assert answer["steps"] == "kernels"
    assert answer["text"] == tokenizer.decode(theirs[:end])


@pytest.mark.long
@pytest.mark.parametrize("name", real_models.NAMES)
def test_perplexity_is_no_higher_than_llama_cpps(name: str, tmp_path: Path) -> None:
    """Over 512 tokens; half a percent is what rounding differs by."""
    path = real_models.fetched(name)
    pytest.importorskip("cyllama", reason="cyllama is not installed")
    tegrad("bench", "perplexity", str(path), "--tokens", "512", "--threads", "1", "--out", str(tmp_path))
    (row,) = json.loads((tmp_path / "perplexity.json").read_text())["rows"]
    assert (row["model"], row["tokens"], row["steps"]) == (name, 512, "kernels")
    assert 1 < row["ours"] < row["llama_cpp"] / 0.995
    assert np.isfinite(row["ratio"])
