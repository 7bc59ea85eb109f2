"""The tokenizer gives llama.cpp's tokens for any text, and its stream never splits a character."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_llama import TYPE, Shape, Vocabulary, byte_alphabet, write
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace
from tokenizers.trainers import BpeTrainer

from tegrad.llm.errors import GgufError
from tegrad.llm.gguf import Gguf
from tegrad.llm.tokenizer import BRIEF, SPLITS, Kind, Stream, Tokenizer

CORPUS = (
    Path(__file__).parents[2] / "LICENSE"
).read_text() * 2 + " the them then they're we'll I'LL 1234 99 == 漢字 🙂"
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
USER = ["<think>", "</think>"]
ALPHABET = [
    *"abcABCthe the   \n\n\r\t 0123456789.,!?'s'RE-_éüß漢字かな🙂🏳️‍🌈<>|$^~+=",
    *CONTROL,
    *USER,
    "</s>",
    " the",
    "'ll",
    "'S",
]


def trained(size: int, split: object) -> tuple[list[str], list[str]]:
    """Pieces and merges of a BPE trained on the corpus."""
    engine = Engine(BPE())
    engine.pre_tokenizer = split
    engine.train_from_iterator(
        [CORPUS], BpeTrainer(vocab_size=size, initial_alphabet=byte_alphabet(), show_progress=False)
    )
    model = json.loads(engine.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return pieces, [" ".join(merge) for merge in model["merges"]]


def byte_level(pre: str) -> Vocabulary:
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    cuts = [Split(Regex(pattern), "isolated") for pattern in SPLITS[pre].patterns]
    pieces, merges = trained(700, Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)]))
    kinds = [Kind.NORMAL] * len(pieces) + [Kind.CONTROL] * len(CONTROL) + [Kind.USER_DEFINED] * len(USER)
    first = len(pieces)
    return Vocabulary([*pieces, *CONTROL, *USER], [int(kind) for kind in kinds], merges, first, first + 1, pre=pre)


def sentencepiece() -> Vocabulary:
    pieces, _ = trained(600, Metaspace())
    pieces.sort(key=lambda piece: len(piece) == 1)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|im_start|>", "<think>"]
    kinds = [Kind.UNKNOWN, Kind.CONTROL, Kind.CONTROL, *[Kind.BYTE] * 256, *[Kind.NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(at) for at in range(len(pieces))] + [0.0, 0.0]
    all_kinds = [*(int(kind) for kind in kinds), int(Kind.CONTROL), int(Kind.USER_DEFINED)]
    return Vocabulary(tokens, all_kinds, [], 1, 2, model="llama", pre="default", scores=scores)


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> Path:
    shape = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1, vocab=len(vocabulary.tokens))
    return write(path, shape, TYPE.F32, vocabulary=vocabulary)


def texts(seed: int, count: int) -> Iterator[str]:
    random_ = random.Random(seed)
    for _ in range(count):
        yield "".join(random_.choice(ALPHABET) for _ in range(random_.randint(0, 40)))


@pytest.mark.parametrize("kind", [*SPLITS, "sentencepiece"])
def test_tokens_are_llama_cpps(tmp_path: Path, kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    vocabulary = sentencepiece() if kind == "sentencepiece" else byte_level(kind)
    path = write_vocabulary(tmp_path / "vocabulary.gguf", vocabulary)
    tokenizer = Tokenizer.load(path)
    with llama_cpp.peer(path) as peer:
        for text in texts(1, 300):
            for special in (True, False):
                ours = tokenizer.encode(text, bos=False, special=special)
                assert ours == peer.vocab.tokenize(text, False, special), text


@pytest.mark.parametrize("kind", SPLITS)
def test_a_first_short_text_has_the_tokens_of_any(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_vocabulary(tmp_path / "vocabulary.gguf", byte_level(kind))
    with Gguf.open(path) as file:
        later = Tokenizer(file)
        later.encode("")
        for text in (*texts(3, 60), CORPUS[:BRIEF]):
            for special in (True, False):
                first = Tokenizer(file)
                with monkeypatch.context() as patch:
                    patch.setattr(Tokenizer, "_special", None)
                    patch.setattr(Tokenizer, "_raw", None)
                    tokens = first.encode(text, special=special)
                assert tokens == later.encode(text, special=special), text


def test_merges_of_what_is_no_token_are_refused_when_a_text_meets_them(tmp_path: Path) -> None:
    sound = byte_level("llama-bpe")
    path = write_vocabulary(tmp_path / "v.gguf", replace(sound, merges=["t h", "th zz", *sound.merges]))
    assert Tokenizer.load(path).encode("one") == Tokenizer.load(path).encode("one")
    with pytest.raises(GgufError, match="its vocabulary and merges disagree"):
        Tokenizer.load(path).encode("thzz")
    with pytest.raises(GgufError, match="its vocabulary and merges disagree"):
        Tokenizer.load(path).encode("one" * BRIEF)


@pytest.mark.parametrize("text", ["", "<0x4>", "<0xGG>", "<0x041>", "byte"])
def test_a_byte_token_that_names_no_byte_is_refused_before_any_text(tmp_path: Path, text: str) -> None:
    sound = sentencepiece()
    wrong = replace(sound, tokens=[text if token == "<0x41>" else token for token in sound.tokens])
    with pytest.raises(GgufError, match=f"token 68 stands for a byte and is '{text}'"):
        Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", wrong))
    small = replace(sound, tokens=[token.replace("<0xAB>", "<0xab>") for token in sound.tokens])
    assert Tokenizer.load(write_vocabulary(tmp_path / "v.gguf", small)).piece(3 + 0xAB) == b"\xab"


@pytest.mark.parametrize("kind", [*SPLITS, "sentencepiece"])
def test_a_text_begins_as_llama_cpps_where_the_file_does_not_say(tmp_path: Path, kind: str) -> None:
    llama_cpp = pytest.importorskip("llama_cpp", reason="cyllama is not installed")
    vocabulary = sentencepiece() if kind == "sentencepiece" else byte_level(kind)
    path = write_vocabulary(tmp_path / "vocabulary.gguf", replace(vocabulary, add_bos=None))
    with llama_cpp.peer(path) as peer:
        assert Tokenizer.load(path).encode("the text") == peer.vocab.tokenize("the text", True, True)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "v.gguf", byte_level("llama-bpe")))


def test_a_stream_gives_whole_characters_that_add_up_to_the_text(tokenizer: Tokenizer) -> None:
    for text in texts(2, 200):
        stream = Stream(tokenizer, special=True)
        pieces = [stream.push(token) for token in tokenizer.encode(text, bos=False)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + stream.finish() == text


def test_half_a_character_at_the_end_becomes_one_replacement(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a🙂", bos=False)
    stream = Stream(tokenizer)
    assert "".join(stream.push(token) for token in tokens[:-1]) == "a"
    assert stream.finish() == "\ufffd"


def test_control_tokens_are_shown_only_on_demand(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("<|im_start|>hi<think>", bos=False)
    assert len(tokens) < len("<|im_start|>hi<think>")
    assert tokenizer.decode(tokens) == "hi<think>"
    assert tokenizer.decode(tokens, special=True) == "<|im_start|>hi<think>"


def test_beginning_and_stops_come_from_the_file(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("hi")[0] == tokenizer.bos
    assert tokenizer.encode("hi", bos=False)[0] != tokenizer.bos
    assert {tokenizer.tokens[token] for token in tokenizer.stops} == {"<|im_end|>", "<|endoftext|>"}
