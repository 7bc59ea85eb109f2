"""Vocabularies of published models, which llama.cpp's source has with texts and their tokens.

They come with the source package of llama-cpp-python on PyPI, kept in the cache; without a registry they are skipped.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tegrad.llm.tokenizer import Tokenizer
from tegrad.nv.compilers import cache_dir

PACKAGE = "llama-cpp-python==0.3.36"
BETWEEN = "\n__ggml_vocab_test__\n"
"""Between the texts of a vocabulary's file of them."""
NAMES = (
    *("command-r", "deepseek-coder", "deepseek-llm", "gpt-2", "llama-bpe", "mpt", "qwen2", "refact", "starcoder"),
    *("llama-spm", "phi-3"),
)

pytestmark = pytest.mark.long  # 80 MB to fetch


@pytest.fixture(scope="module")
def folder() -> Path:
    """The vocabularies, fetched once."""
    kept = cache_dir().parent / "tests" / PACKAGE
    if not (kept / "done").exists():
        kept.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(kept)]
        done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            pytest.skip(f"no registry has {PACKAGE}: {done.stderr.strip()[-200:]}")
        (archive,) = kept.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            for member in packed:
                if member.isfile() and "/models/ggml-vocab-" in member.name:
                    source = packed.extractfile(member)
                    assert source is not None
                    (kept / Path(member.name).name).write_bytes(source.read())
        archive.unlink()
        (kept / "done").touch()
    return kept


def expected(vocabulary: Path) -> Iterator[tuple[str, list[int]]]:
    """Texts and their tokens, without a begin token and with control tokens taken for text."""
    texts = vocabulary.with_name(f"{vocabulary.name}.inp").read_bytes().decode().split(BETWEEN)
    tokens = vocabulary.with_name(f"{vocabulary.name}.out").read_text().splitlines()
    yield from ((text, [int(token) for token in line.split()]) for text, line in zip(texts, tokens, strict=False))


@pytest.mark.parametrize("name", NAMES)
def test_texts_have_the_tokens_that_llama_cpp_has_written_down(folder: Path, name: str) -> None:
    vocabulary = folder / f"ggml-vocab-{name}.gguf"
    tokenizer = Tokenizer.load(vocabulary)
    cases = list(expected(vocabulary))
    assert len(cases) > 40
    wrong = [text for text, tokens in cases if tokenizer.encode(text, bos=False, special=False) != tokens]
    assert not wrong
