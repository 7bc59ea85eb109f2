"""Small vocabularies of every kind, trained on a text of this repository."""

import json
from pathlib import Path

from tiny_llama import TYPE, Shape, Vocabulary, byte_alphabet, write
from tokenizers import Regex
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Metaspace, Sequence, Split
from tokenizers.trainers import BpeTrainer

from tegrad.llm.cuts import SPLITS
from tegrad.llm.tokenizer import Kind

CORPUS = (
    Path(__file__).parents[2] / "LICENSE"
).read_text() * 2 + " the them then they're we'll I'LL 1234 99 == 漢字 🙂"
CONTROL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
USER = ["<think>", "</think>"]


def trained(size: int, split: object, corpus: str = CORPUS) -> tuple[list[str], list[str]]:
    """Pieces and merges of a BPE trained on a text."""
    engine = Engine(BPE())
    engine.pre_tokenizer = split
    engine.train_from_iterator(
        [corpus], BpeTrainer(vocab_size=size, initial_alphabet=byte_alphabet(), show_progress=False)
    )
    model = json.loads(engine.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return pieces, [" ".join(merge) for merge in model["merges"]]


def byte_level(pre: str) -> Vocabulary:
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


def gemma4() -> Vocabulary:
    """No byte letters, but merges that are listed."""
    pieces, merges = trained(700, Split(Regex(r"[^\n]+|\n+"), "isolated"), CORPUS.replace(" ", "\u2581"))
    pieces = [piece for piece in pieces if len(piece) > 1 or piece in CORPUS or piece == "\u2581"]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    tokens += [token for token in ("\n\n", "\n" * 3, "\n" * 5) if token not in pieces]
    kinds = [*[Kind.CONTROL] * 3, Kind.UNKNOWN, *[Kind.BYTE] * 256, *[Kind.NORMAL] * (len(tokens) - 260)]
    numbers = [*map(int, kinds), *[int(Kind.CONTROL)] * len(CONTROL), *[int(Kind.USER_DEFINED)] * len(USER)]
    return Vocabulary([*tokens, *CONTROL, *USER], numbers, merges, 2, 1, model="gemma4", pre="gemma4")


OTHER_KINDS = {"sentencepiece": sentencepiece, "gemma4": gemma4}


def of_kind(kind: str) -> Vocabulary:
    """A vocabulary by its kind, or by the name of the cut of a byte-level one."""
    return OTHER_KINDS[kind]() if kind in OTHER_KINDS else byte_level(kind)


def write_vocabulary(path: Path, vocabulary: Vocabulary, **extra: str) -> Path:
    shape = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1, vocab=len(vocabulary.tokens), extra=extra)
    return write(path, shape, TYPE.F32, vocabulary=vocabulary)
