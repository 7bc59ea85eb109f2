"""Text to tokens and back, from the vocabulary inside a GGUF file.

Three kinds, by `tokenizer.ggml.model`: "gpt2", a byte-level BPE run by Hugging Face's `tokenizers`, whose cuts are
named by `tokenizer.ggml.pre` (`cuts`), "llama", a SentencePiece BPE whose merges follow from the pieces' scores
(`pieces`), and "gemma4", whose pieces are SentencePiece's and whose merges are listed, run by `tokenizers`, too. The
names of tokens that end a text are llama.cpp's (llama-vocab.cpp).
"""

from __future__ import annotations

import codecs
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from functools import cached_property, partial
from itertools import chain, compress, repeat
from operator import mul
from typing import Final, Self, TypeAlias, TypeVar, cast

from tokenizers import AddedToken, Regex
from tokenizers import Tokenizer as Engine
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizers

from tegrad.llm.cuts import SPLITS, Cut
from tegrad.llm.errors import GgufError, UnsupportedModelError
from tegrad.llm.gguf import Gguf, Value, shown
from tegrad.llm.pieces import NUMBERS, SPACE, Pieces

T = TypeVar("T", int, str, bool)
Encode: TypeAlias = Callable[[str], list[int]]


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


BRIEF_CHARACTERS: Final = 500
"""Characters of a first text for which the engine gets only what can occur in it: the whole takes 0.2 s to build."""
BRIEF_TOKEN_LETTERS: Final = 256
"""Letters of the longest token for which that is done: what can occur in a text would be too much."""
MOST_SQUARED_LENGTHS: Final = 1 << 33
"""Of the tokens' lengths, the sum that is cut: a token of each length up to 2,900 letters."""
ERROR_CHARACTERS: Final = 200
"""Characters of the library's errors, which have a file's own texts in them, that ours show."""
ENDS: Final = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
})  # fmt: skip
"""Tokens that end a generation by their names, whatever type the file gives them."""
OBSERVED: Final = "<|observation|>"
"""What a function returned, in ChatGLM 3's conversations and GLM-4's."""
TURNS: Final = frozenset({"<|user|>", OBSERVED})
"""Tokens that end an answer where a vocabulary has OBSERVED: these models end it with whose turn it is. Their own
programs stop at both; a file names one of them at most."""
FILLS: Final[Mapping[str, frozenset[str]]] = {
    "fim_pad": frozenset({"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"}),
    "fim_rep": frozenset({"<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"}),
    "fim_sep": frozenset({"<|file_sep|>"}),
}
"""The same of tokens around code to be filled in, by the value of a file that names one of each instead."""
AROUND: Final = frozenset({
    "<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>",
    "<|code_prefix|>", "<|prefix|>", "<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>",
    "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>", "<|code_suffix|>", "<|suffix|>", "<|fim_middle|>",
    "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>", "<|code_middle|>",
    "<|middle|>",
})  # fmt: skip
"""Those that stand around such code: they end nothing and are control tokens, too."""
_MARKS: Final = ENDS.union(TURNS, AROUND, *FILLS.values())
SHOWN: Final = frozenset({
    "<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<thought>", "</thought>",
    "<tool_call>", "</tool_call>", "<seed:tool_call>", "</seed:tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]",
    "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>", "</function>", "<function_calls>", "</function_calls>",
    "<|python_start|>", "<|python_end|>", "<tools>", "</tools>",
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>',
    "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>",
    "<|tool_call_start|>", "<|tool_call_end|>",
    "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581calls\u2581end\uff5c>",
    "<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>", "<\uff5ctool\u2581sep\uff5c>",
})  # fmt: skip
"""Control tokens that a stream gives the text of: who reads it finds thoughts and tool calls by them (`tools`)."""
STRIPPING: Final = ("phi-3", "phi3")
"""In the name of a SentencePiece model whose tokens that are taken out of a text take the spaces after them along."""
NOT_STRIPPING: Final = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Its tokens that do not."""
_STRIPPED: Final = re.compile(r"[ \t\n\v\f\r]*")
"""Those spaces."""
_LINES: Final = re.compile("[^\n]+|\n+")
_BYTE: Final = re.compile("<0x[0-9A-Fa-f]{2}>")
"""How it writes a byte."""


def _byte_letters() -> dict[str, int]:
    """The letters that stand for bytes in a byte-level vocabulary (GPT-2's bytes_to_unicode, inverted)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


class Tokenizer:
    """A model's vocabulary. Tokens are ints; `stops` end a generation."""

    def __init__(self, file: Gguf) -> None:
        values = _Values(file)
        kind = values.get("tokenizer.ggml.model", str)
        self.tokens: list[str] = values.strings("tokenizer.ggml.tokens")
        self._check_lengths(file)
        self.kinds = values.kinds(len(self.tokens))
        self.bos, self.eos = values.token("bos"), values.token("eos")
        self.stops = self._stops(values)
        self._apart = self._by_kind()
        cut = SPLITS.get(values.cut_name())
        begins = kind == "llama" or (cut is not None and cut.begins)
        self._add_bos = kind == "gemma4" or values.get("tokenizer.ggml.add_bos_token", bool, begins)
        self._bytes = self._byte_level if kind == "gpt2" else self._sentencepiece
        self._letters = _byte_letters()
        if kind not in ("gpt2", "llama", "gemma4"):
            raise UnsupportedModelError(
                f"{file.path} has a {shown(kind)} tokenizer; we run gpt2, llama and gemma4: choose another model"
            )
        if kind == "gpt2":
            self._check_cut(values, cut)
            self._check_letters(file)
            self._build: Callable[[Sequence[int], str | None], Encode] = partial(self._byte_level_encode, values)
        elif kind == "gemma4":
            self._check_letters(file)
            self._check_bytes(file)
            self._build = partial(self._gemma4_encode, values)
        else:
            self._check_bytes(file)
            self._build = partial(self._sentencepiece_encode, values, self._pieces(values))
        self._used = kind == "llama" or max(map(len, self.tokens), default=0) > BRIEF_TOKEN_LETTERS

    @cached_property
    def _special(self) -> Encode:
        """Takes control tokens out of a text, too."""
        return self._taking(special=True)

    @cached_property
    def _raw(self) -> Encode:
        """Takes control tokens for plain text."""
        return self._taking(special=False)

    def _taking(self, text: str | None = None, *, special: bool) -> Encode:
        """Takes some tokens out of a text before anything else; made for one text, if given."""
        kinds = (Kind.USER_DEFINED, Kind.CONTROL, Kind.UNKNOWN) if special else (Kind.USER_DEFINED,)
        taken = sorted(token for kind in kinds for token in self._apart.get(kind, ()) if self.tokens[token])
        return self._build(taken, text)

    def _by_kind(self) -> Mapping[int, Sequence[int]]:
        """The tokens of each kind but the normal one, which nearly all are."""
        found: dict[int, list[int]] = {}
        for token, kind in compress(enumerate(self.kinds), map(int(Kind.NORMAL).__ne__, self.kinds)):
            found.setdefault(kind, []).append(token)
        return found

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """The tokenizer of a GGUF file."""
        with Gguf.open(path) as file:
            return cls(file)

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str, *, bos: bool | None = None, special: bool = True) -> list[int]:
        """Tokens of a text. `bos`: begin with it (None: as the model wants); `special`: control tokens may occur."""
        if not text.isascii():  # what is no character, such as half of one, could not be passed on
            text = text.encode("utf-8", "replace").decode()
        if not self._used and len(text) <= BRIEF_CHARACTERS:
            encode = self._taking(text, special=special)
        else:
            encode = self._special if special else self._raw
        self._used = True
        tokens = encode(text)
        if (self._add_bos if bos is None else bos) and self.bos is not None:
            return [self.bos, *tokens]
        return tokens

    def encode_chat(self, text: str) -> list[int]:
        """Tokens of what a chat template wrote: it begins with the begin token where the model wants that, as in
        llama.cpp, whether the template writes it or leaves it to whoever encodes."""
        tokens = self.encode(text, bos=False)
        begun = not self._add_bos or self.bos is None or tokens[:1] == [self.bos]
        return tokens if begun else [cast("int", self.bos), *tokens]

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """Text of tokens; control tokens are left out unless `special`."""
        return b"".join(self.piece(token, special=special) for token in tokens).decode("utf-8", errors="replace")

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of one token; those of a control token are empty unless `special`."""
        text, kind = self.tokens[token], self.kinds[token]
        if kind in (Kind.CONTROL, Kind.UNKNOWN, Kind.UNUSED):
            return text.encode("utf-8", errors="surrogateescape") if special else b""
        if kind == Kind.USER_DEFINED:
            return text.encode("utf-8", errors="surrogateescape")
        return self._bytes(text, kind)

    def _byte_level(self, text: str, kind: int) -> bytes:
        letters = self._letters
        return b"".join(bytes((letters[c],)) if c in letters else c.encode("utf-8", "surrogateescape") for c in text)

    def _sentencepiece(self, text: str, kind: int) -> bytes:
        if kind == Kind.BYTE:
            return bytes((int(text[3:-1], 16),))
        return text.replace(SPACE, " ").encode("utf-8", errors="surrogateescape")

    def _stops(self, values: _Values) -> frozenset[int]:
        """Tokens that end a text, a turn or a message, by number or by name; those names become control tokens."""
        marks = list(self._numbered(_MARKS))
        found = {text: token for token, text in marks}
        ends = ENDS.union(TURNS) - _no_ends(found)
        given = {name: values.token(name) for name in ("eos", "eot", "eom", *FILLS)}
        for name, texts in FILLS.items():
            if given[name] is None:
                ends |= texts
        for token, text in marks:
            if text not in _no_ends(found):
                self.kinds[token] = Kind.CONTROL
        named = {token for token, text in marks if text in ends}
        numbered = {token for token in given.values() if token is not None}
        return frozenset(named | numbered | values.ends(len(self.tokens)))

    def _numbered(self, texts: AbstractSet[str]) -> Iterator[tuple[int, str]]:
        """The tokens of these texts, with their numbers, at C's speed: each start of a program waits for it."""
        return compress(enumerate(self.tokens), map(texts.__contains__, self.tokens))

    def _check_cut(self, values: _Values, cut: Cut | None) -> None:
        if cut is None:
            raise UnsupportedModelError(
                f"{values.file.path} splits text by {shown(values.cut_name())}, none of the {len(SPLITS)} names that "
                "we know (docs/llm.md): choose another model"
            )

    def _check_lengths(self, file: Gguf) -> None:
        """Refuse tokens that take long to cut: a token that is cut at each letter costs its length's square."""
        lengths = list(map(len, self.tokens))
        if sum(map(mul, lengths, lengths)) > MOST_SQUARED_LENGTHS:
            raise file.corrupt(f"its {len(lengths):,} tokens, the longest of {max(lengths):,} letters, are too long")

    def _check_letters(self, file: Gguf) -> None:
        """Refuse tokens that are no characters, which the library does not take."""
        try:
            "".join(self.tokens).encode()
        except UnicodeEncodeError:
            raise file.corrupt("its tokens are not UTF-8") from None

    def _check_bytes(self, file: Gguf) -> None:
        for token in self._apart.get(Kind.BYTE, ()):
            if not _BYTE.fullmatch(self.tokens[token]):
                raise file.corrupt(f"token {token} stands for a byte and is {shown(self.tokens[token])}, not <0x00>")

    def _byte_level_encode(self, values: _Values, taken: Sequence[int], text: str | None) -> Encode:
        """For a text, of tokens and merges those that make a part of it, which are all that it can meet."""
        split = SPLITS[values.cut_name()]
        spelled = None
        if text is not None:
            letter = {byte: letter for letter, byte in self._letters.items()}
            spelled = "".join(letter[byte] for byte in text.encode("utf-8", "surrogatepass"))
        vocabulary, pairs, parts = self._needed(values, spelled)
        # What no token stands for, a byte or what merges make, keeps its neighbours apart, or is merged further. Of
        # what is there of it at the end its ASCII letters are left, again as in llama.cpp.
        letters = set(self._letters) if parts is None else parts.intersection(self._letters)
        count, absent = len(self.tokens), sorted((letters | _parts_of(pairs)).difference(self.tokens))
        single = {one: at for at, one in vocabulary if len(one) == 1 and one.isascii()} if absent else {}
        instead = {at: [single[one] for one in part if one in single] for at, part in enumerate(absent, count)}
        engine = _engine(values, chain(vocabulary, enumerate(absent, count)), pairs, ignore_merges=split.whole_words)
        cuts = [Split(Regex(pattern), "isolated") for pattern in split.patterns]
        engine.pre_tokenizer = PreTokenizers([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
        engine.add_tokens([AddedToken(self.tokens[token], normalized=False) for token in taken])

        def encode(text: str) -> list[int]:
            # Other threads go on meanwhile, which they do not with `encode`.
            tokens: list[int] = engine.encode_batch_fast([text], add_special_tokens=False)[0].ids
            return [one for token in tokens for one in instead.get(token, (token,))] if absent else tokens

        return encode

    def _needed(
        self, values: _Values, text: str | None
    ) -> tuple[list[tuple[int, str]], dict[tuple[str, str], None], set[str] | None]:
        """The tokens, with their numbers, and merges that can occur in a text, spelled as tokens spell it, and all of
        its parts; without a text, or with very long tokens, all of them, and None."""
        merges, parts = values.strings("tokenizer.ggml.merges"), None
        longest = 0 if text is None else max(map(len, chain(self.tokens, merges)), default=0)
        if text is not None and longest <= BRIEF_TOKEN_LETTERS:
            parts = {
                text[begin:end]
                for begin in range(len(text))
                for end in range(begin + 1, min(begin + longest, len(text)) + 1)
            }
            made_of = map(str.replace, merges, repeat(" "), repeat(""), repeat(1))
            merges = list(compress(merges, map(parts.__contains__, made_of)))
            apart = {self.tokens[token] for tokens in self._apart.values() for token in tokens}
            vocabulary = list(self._numbered(parts | apart))
        else:
            vocabulary = list(enumerate(self.tokens))
        # Of two merges alike the first counts, as in llama.cpp.
        pairs = dict.fromkeys((left, right) for left, _, right in (merge.partition(" ") for merge in merges))
        pairs.pop(("", ""), None)
        return vocabulary, pairs, parts

    def _gemma4_encode(self, values: _Values, taken: Sequence[int], text: str | None) -> Encode:
        """Merges lines, and runs of their ends where these are no tokens; what is no token at the end is its bytes."""
        vocabulary, pairs, _ = self._needed(values, None if text is None else text.replace(" ", SPACE))
        count, byte_tokens = len(self.tokens), self._byte_tokens()
        vocabulary += [(token, self.tokens[token]) for token in byte_tokens if token is not None]
        number = {piece: token for token, piece in vocabulary}
        absent = sorted(_parts_of(pairs).difference(number))
        engine = _engine(
            values, chain(vocabulary, enumerate(absent, count)), pairs, byte_fallback=None not in byte_tokens
        )

        def spelled(token: int) -> Iterable[int]:
            """A token, or the bytes of what is none."""
            if token < count:
                return (token,)
            found = (byte_tokens[byte] for byte in absent[token - count].encode())
            return [one for one in found if one is not None]

        def cut(text: str) -> list[int]:
            words = _LINES.findall(text.replace(" ", SPACE))
            rest = [word for word in words if word[0] != "\n" or word not in number]
            merged = iter(engine.encode_batch_fast(rest, add_special_tokens=False))
            tokens: list[int] = []
            for word in words:
                known = word[0] == "\n" and word in number
                tokens += [number[word]] if known else [one for token in next(merged).ids for one in spelled(token)]
            return tokens

        return self._sentencepiece_encode(values, cut, taken, text)

    def _pieces(self, values: _Values) -> Callable[[str], list[int]]:
        """Cuts what lies between tokens that were taken out of a text."""
        scores = values.scores(len(self.tokens))
        kinds = (Kind.NORMAL, Kind.USER_DEFINED)
        pieces = Pieces(
            ((text, at, scores[at]) for at, text in enumerate(self.tokens) if self.kinds[at] in kinds),
            self._byte_tokens(),
            self._unknown(values),
        )
        front = SPACE if values.get("tokenizer.ggml.add_space_prefix", bool, True) else ""
        return lambda text: pieces.encode(front + text.replace(" ", SPACE))

    def _byte_tokens(self) -> list[int | None]:
        """Each byte's, by their names where the file marks none."""
        found: list[int | None] = [None] * 256
        named = (token for token, text in enumerate(self.tokens) if _BYTE.fullmatch(text))
        for token in self._apart.get(Kind.BYTE, named):
            found[int(self.tokens[token][3:-1], 16)] = token
        return found

    def _unknown(self, values: _Values) -> int | None:
        """What stands for a letter that is no piece; the first token of that kind where the file names none."""
        named = values.token("unknown")
        return next(iter(self._apart.get(Kind.UNKNOWN, ())), None) if named is None else named

    def _sentencepiece_encode(
        self, values: _Values, cut: Callable[[str], list[int]], taken: Sequence[int], _: str | None
    ) -> Encode:
        name = values.get("general.name", str, "").lower()
        strips = any(part in name for part in STRIPPING)
        number = {self.tokens[token]: token for token in taken}
        finder = Engine(BPE())  # finds them in a time that does not grow with their number; a regular expression's does
        finder.add_tokens([AddedToken(token, normalized=False) for token in number if _is_text(token)])

        def encode(text: str) -> list[int]:
            tokens: list[int] = []
            end = 0
            for begin, stop in finder.encode_batch([text], add_special_tokens=False)[0].offsets:
                tokens += cut(text[end:begin]) if end < begin else []
                tokens.append(number[text[begin:stop]])
                end = stop
                if strips and text[begin:stop] not in NOT_STRIPPING and (spaces := _STRIPPED.match(text, stop)):
                    end = spaces.end()
            return tokens + cut(text[end:]) if end < len(text) else tokens

        return encode


def _parts_of(merges: Iterable[tuple[str, str]]) -> set[str]:
    """What merges take and make."""
    return {part for left, right in merges for part in (left, right, left + right)}


def _is_text(token: str) -> bool:
    """Whether a token can occur in a text: what is no UTF-8 in the file cannot."""
    try:
        token.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_ends(names: Iterable[str]) -> frozenset[str]:
    """Names that are no ends in a vocabulary that has some others, Harmony's messages and Gemma's plain "</s>", or that
    lacks one, such as Phi's "<|user|>"."""
    there = set(names)
    calls = {"<|call|>", "<|calls|>"} & there
    harmony = bool(calls) and ("<|return|>" in there or "<|flush|>" in there)
    ends = ["<|end|>"] * harmony + ["</s>"] * ("<|tool_response>" in there)
    return TURNS.union(ends) if OBSERVED not in there else frozenset(ends)


def _engine(
    values: _Values, vocabulary: Iterable[tuple[int, str]], merges: Iterable[tuple[str, str]], **options: object
) -> Engine:
    try:
        return Engine(BPE({text: at for at, text in vocabulary}, list(merges), **options))
    except Exception as error:  # the library raises plain Exception
        said = "".join(letter if letter.isprintable() else "?" for letter in str(error)[:ERROR_CHARACTERS])
        raise values.file.corrupt(f"its vocabulary and merges disagree ({said})") from error


class Stream:
    """Tokens to text as they come: what is returned never ends in the middle of a character.

    Of control tokens it gives those around thoughts and tool calls and, if `special`, all.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes, possibly empty."""
        special = self._special or self._tokenizer.tokens[token] in SHOWN
        return self._decoder.decode(self._tokenizer.piece(token, special=special))

    def finish(self) -> str:
        """What is left: a replacement character where the tokens ended in the middle of one."""
        return self._decoder.decode(b"", final=True)


class _Values:
    """Typed access to a file's vocabulary."""

    def __init__(self, file: Gguf) -> None:
        self.file = file

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        value = self.file.metadata.get(key, default)
        if value is None:
            raise GgufError(f"{self.file.path} lacks the value {key!r}; it has no vocabulary, convert it again")
        if not isinstance(value, kind):
            raise self.file.corrupt(f"{key} = {shown(value)}")
        return value

    def cut_name(self) -> str:
        """The name of how text is cut, which older files lack and some leave empty."""
        return self.get("tokenizer.ggml.pre", str, "") or "default"

    def strings(self, key: str) -> list[str]:
        value = self._list(key)
        if value and not isinstance(value[0], str):
            raise self.file.corrupt(f"{key} is no list of texts")
        return cast("list[str]", value)  # lists of a file are of one type

    def scores(self, size: int) -> list[float]:
        """Of at least all tokens, in numbers of any type; all are alike where the file has none."""
        key = "tokenizer.ggml.scores"
        if key not in self.file.metadata:
            return [0.0] * size
        value = self._list(key)
        if len(value) < size or not all(isinstance(entry, int | float) for entry in value):
            raise self.file.corrupt(f"{key} is no list of {size} numbers")
        return [float(entry) for entry in value]

    def kinds(self, size: int) -> list[int]:
        if "tokenizer.ggml.token_type" not in self.file.metadata:
            return [Kind.NORMAL] * size
        value = self._list("tokenizer.ggml.token_type")
        if len(value) < size:
            raise self.file.corrupt("tokenizer.ggml.token_type is shorter than the tokens")
        return cast("list[int]", value[:size])

    def ends(self, size: int) -> set[int]:
        """Those of so many tokens that a file converted for Ollama lists as its ends."""
        listed = self.file.metadata.get("tokenizer.ggml.eos_token_ids")
        if not isinstance(listed, list):
            return set()
        return {token for token in listed if type(token) is int and 0 <= token < size}

    def token(self, name: str) -> int | None:
        """A token's number by its name; the usual one where the file names none, or one that it does not have."""
        key, count = f"tokenizer.ggml.{name}_token_id", len(self._list("tokenizer.ggml.tokens"))
        usual = NUMBERS.get(name, count) if self.file.metadata.get("tokenizer.ggml.model") == "llama" else count
        token = self.get(key, int, usual)
        return next((one for one in (token, usual) if 0 <= one < count), None)

    def _list(self, key: str) -> list[int] | list[float] | list[bool] | list[str]:
        value: Value | None = self.file.metadata.get(key)
        if not isinstance(value, list):
            raise GgufError(f"{self.file.path} lacks the list {key!r}; it has no vocabulary, convert it again")
        return value
