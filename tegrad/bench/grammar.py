"""What it costs to keep an answer to a JSON schema: one sequence of a `Batch` with llguidance's masks, and one without.

    tegrad bench grammar        tokens per second of both, and microseconds of a mask

The host makes a token's mask while the GPU computes its logits, and sampling waits for it. Both take the likeliest
token. The vocabularies of random models have no words in them: masks are those of one that is made here, as large and
of about the bytes that models' have.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from tegrad.bench.gpu import opened
from tegrad.bench.models import provide
from tegrad.bench.prefill import stepped
from tegrad.llm.batch import Batch
from tegrad.llm.grammar import Grammar, Masks
from tegrad.llm.packed import PackedModel
from tegrad.llm.sampler import Mask, Settings
from tegrad.llm.tokenizer import Kind, Tokenizer
from tegrad.models import WORDS

PERSON: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 32},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tribe": {"enum": ["Judah", "Levi", "Dan", "Benjamin"]},
        "sons": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 4},
        "king": {"type": "boolean"},
    },
    "required": ["name", "age", "tribe", "sons", "king"],
    "additionalProperties": False,
}
PEOPLE: Final = Grammar("schema", json.dumps({"type": "array", "items": PERSON, "minItems": 1000}))
"""Longer than any answer here."""
MOST_CONTROLS: Final = 256
"""Control tokens of the vocabulary."""
SIGNS: Final = "{}[]()<>\"':,.;!?-_=+*/\\|&%$#@^~`"
LONGEST_PIECE: Final = 24
REPETITIONS: Final = 10


class Words(Tokenizer):
    """A byte-level vocabulary of `size` tokens: bytes, signs, numbers, words and their parts, other scripts."""

    def __init__(self, size: int) -> None:
        controls = min(MOST_CONTROLS, size // 8)
        plain = size - controls
        pieces = dict.fromkeys(chain(_bytes(), _signs(), _numbers(), _words()))
        more = _scripts()
        while len(pieces) < plain:
            pieces[next(more)] = None
        self._texts = [*list(pieces)[:plain], *(f"<|control {at}|>".encode() for at in range(controls))]
        self._number = {piece: token for token, piece in enumerate(self._texts[:plain])}
        self.tokens = [piece.decode("latin-1") for piece in self._texts]
        self.kinds = [*[Kind.NORMAL] * plain, *[Kind.CONTROL] * controls]
        self.bos, self.eos, self.stops = plain, size - 1, frozenset((size - 1,))

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """As `Tokenizer.piece`."""
        return self._texts[token] if special or self.kinds[token] == Kind.NORMAL else b""

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """The longest token each time."""
        rest, found = text.encode(), list[int]()
        while rest:
            size = next(size for size in range(LONGEST_PIECE, 0, -1) if rest[:size] in self._number)
            found.append(self._number[rest[:size]])
            rest = rest[size:]
        return found


def _bytes() -> Iterator[bytes]:
    yield from (bytes((byte,)) for byte in range(256))


def _signs() -> Iterator[bytes]:
    pairs = ["".join(pair) for size in (2, 3) for pair in product(SIGNS, repeat=size)]
    few = pairs[: len(SIGNS) ** 2] + pairs[len(SIGNS) ** 2 :: 16]
    yield from (
        f"{front}{signs}{after}".encode() for signs in few for front, after in (("", ""), (" ", ""), ("", "\n"))
    )
    for space in (" ", "\n", "\t", "\r\n"):
        yield from ((space * count).encode() for count in range(2, LONGEST_PIECE // 2))


def _numbers() -> Iterator[bytes]:
    yield from (f"{number:0{digits}}".encode() for digits in (1, 2, 3) for number in range(10**digits))


def _words() -> Iterator[bytes]:
    words = WORDS.read_text().split()
    parts = (word[:size] for size in range(2, 7) for word in words)
    for word in chain(words, parts):
        for form in (word, word.lower(), word.capitalize()):
            yield from (text.encode()[:LONGEST_PIECE] for text in (f" {form}", form))


def _scripts() -> Iterator[bytes]:
    rng = np.random.default_rng(6)
    first = ((0x4E00, 20000), (0x400, 96), (0x620, 40), (0xAC00, 11000), (0x3040, 160), (0xC0, 64), (0x900, 100))
    while True:
        begin, count = first[rng.integers(len(first))]
        yield "".join(chr(begin + at) for at in rng.integers(0, count, rng.integers(1, 5))).encode()[:LONGEST_PIECE]


@dataclass(frozen=True, slots=True)
class Speeds:
    """Tokens per second with masks and without, a pair a repetition, and what the masks took."""

    masked: list[float] = field(default_factory=list)
    free: list[float] = field(default_factory=list)
    mask_us: list[float] = field(default_factory=list)
    """Each mask's time on the host."""

    @property
    def shares(self) -> list[float]:
        """Of the free speed, each time."""
        return [masked / free for masked, free in zip(self.masked, self.free, strict=True)]


def speeds(path: Path, tokens: int = 128, repetitions: int = REPETITIONS, **how: Any) -> Speeds:
    """One sequence of a model that keeps to `PEOPLE`, and one that does not, in turn; the first pair does not count.

    `how` is what a `Batch` takes beside the model, its slots and positions. GrammarError for a token that the schema
    forbids.
    """
    found = Speeds()
    with (
        closing(PackedModel.load(path, "NV")) as model,
        Batch(model, slots=1, positions=tokens + 16, **how) as batch,
    ):
        vocab = model.config.vocab
        masks, prompt = Masks(Words(vocab)), np.random.default_rng(3).integers(0, vocab, 8).tolist()
        for repetition in range(repetitions + 1):
            took: list[float] = []
            masked = _speed(batch, prompt, tokens, _timed(masks.mask(PEOPLE), took))
            free = _speed(batch, prompt, tokens)
            if repetition:
                found.masked.append(masked)
                found.free.append(free)
                found.mask_us.extend(took)
    return found


def _speed(batch: Batch, prompt: list[int], tokens: int, mask: Mask | None = None) -> float:
    """Tokens per second after the first one."""
    member = batch.join(prompt, settings=Settings(masked=mask is not None))
    begun = 0.0
    while len(member.tokens) <= tokens:
        if mask is not None:
            batch.mask(member, mask(member.tokens))
        stepped(batch, [member])
        begun = begun or time.perf_counter()
    took = time.perf_counter() - begun
    batch.leave(member)
    return tokens / took


def _timed(mask: Mask, took: list[float]) -> Mask:
    def timed(tokens: Any) -> bytes | memoryview | None:
        begun = time.perf_counter()
        made = mask(tokens)
        took.append(1e6 * (time.perf_counter() - begun))
        return made

    return timed


def show(model: str) -> dict[str, Any]:
    """Print both speeds of a random model on this machine's GPU; them."""
    with opened():
        found = speeds(provide(model))
    slow = sorted(found.mask_us)[int(0.99 * len(found.mask_us))]
    print(
        f"{model}: {median(found.masked):.1f} tok/s of JSON, {median(found.free):.1f} tok/s free, "
        f"{median(found.shares):.3f} of it; a mask takes {median(found.mask_us):.0f} us, 1% over {slow:.0f} us"
    )
    return {"model": model, **asdict(found), "shares": found.shares}
