"""What a model may say: any JSON, JSON of a schema, or a grammar; and the masks that hold it to that, by llguidance."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal

from tegrad.installed import pip_install
from tegrad.llm import trial
from tegrad.llm.errors import ModelError
from tegrad.llm.tokenizer import Kind, Tokenizer

if TYPE_CHECKING:
    from tegrad.llm.service import Mask

MOST_CHARACTERS: Final = 1 << 17
"""Of a grammar's text."""
KEPT: Final = 16
"""Compiled grammars that wait for another request."""
MASK_S: Final = 0.02
"""Seconds that masks of an answer may take on average."""
ALLOWANCE_S: Final = 2.0
"""Seconds that they may take more."""
ERROR_CHARACTERS: Final = 300
SPACES: Final = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between parts of JSON: a bound, as weak models would go on with spaces for ever."""
JOINING: Final = frozenset({"allOf", "not", "if", "dependentSchemas", "unevaluatedProperties"})
"""What has schemas of the same object stand beside each other."""
VALUES: Final = frozenset({"const", "enum", "default", "examples"})
"""What in a schema is none."""
_HALF: Final = re.compile("[\ud800-\udfff]")
APART: Final = (Kind.CONTROL, Kind.UNKNOWN, Kind.UNUSED)
"""Tokens that are no text, and which a grammar allows only where it names them."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is a JSON schema, a grammar in llguidance's Lark dialect, or a regular expression; none for any JSON.

    Or it is the numbers of the tokens of the only answer that there may be.
    """

    kind: Literal["json", "schema", "lark", "regex", "tokens"]
    text: str = ""


class GrammarError(ModelError):
    """A grammar or schema that is not sound, or that asks for what is not supported."""


class Masks:
    """Masks of grammars over a model's vocabulary. From any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab: int | None = None) -> None:
        """`vocab`: the model's logits, where the file has more tokens than these."""
        self._tokenizer, self._lock, self._building = tokenizer, threading.Lock(), threading.Lock()
        self._bytes = -(-(len(tokenizer) if vocab is None else vocab) // 32) * 4
        self._made: OrderedDict[Grammar, Any] = OrderedDict()

    def warm(self) -> None:
        """Build what every grammar takes, so that the first one does not wait for it; nothing where none can be."""
        with suppress(GrammarError):
            if self._special:
                self._vocabulary()

    def check(self, grammar: Grammar) -> None:
        """GrammarError for one that is not sound or not supported, or if llguidance is not installed."""
        self.mask(grammar)

    def mask(self, grammar: Grammar) -> Mask:
        """What may follow the tokens of one answer, for `Service.submit`; its calls come in order. As `check`.

        Tokens that end a text are allowed exactly where the grammar may end.
        """
        if grammar.kind == "tokens":
            return self._exactly([int(token) for token in grammar.text.split()])
        matcher, done, size, spent = self._matcher(grammar), 0, self._bytes, 0.0

        def allowed(tokens: Sequence[int]) -> bytes:
            nonlocal done, spent
            begun = time.perf_counter()
            fresh, done = list(tokens[done:]), len(tokens)
            if not matcher.consume_tokens(fresh):
                raise GrammarError(f"the answer left its grammar: {_said(matcher.get_error())}")
            bits: bytes = matcher.compute_bitmask()
            if matcher.is_error():
                raise GrammarError(f"the grammar cannot be followed: {_said(matcher.get_error())}")
            spent += time.perf_counter() - begun
            if spent > ALLOWANCE_S + MASK_S * len(tokens):  # others wait for it
                raise GrammarError(
                    f"the grammar takes {1e3 * spent / (done + 1):.0f} ms for each token: make it simpler"
                )
            return bits[:size]

        return allowed

    def _exactly(self, tokens: Sequence[int]) -> Mask:
        if not all(0 <= token < 8 * self._bytes for token in tokens):
            raise GrammarError(f"the grammar has token {max(tokens)}: the vocabulary has {8 * self._bytes} at most")

        def allowed(said: Sequence[int]) -> bytes | None:
            if len(said) >= len(tokens):
                return None
            return (1 << tokens[len(said)]).to_bytes(self._bytes, "little")

        return allowed

    def _matcher(self, grammar: Grammar) -> Any:
        """A matcher of its own, at the beginning."""
        with self._lock:
            found = self._made.get(grammar)
        found = found or self._compiled(grammar)  # takes long, and keeps nobody else waiting
        with self._lock:
            self._made[grammar] = found
            self._made.move_to_end(grammar)
            if len(self._made) > KEPT:
                self._made.popitem(last=False)
            return found.deep_copy()

    def _compiled(self, grammar: Grammar) -> Any:
        library, text = _library(), grammar.text
        if len(text) > MOST_CHARACTERS:
            raise GrammarError(f"the grammar has {len(text):,} characters: at most {MOST_CHARACTERS:,} are taken")
        if _HALF.search(text):
            raise GrammarError("the grammar has halves of characters: write whole ones")
        source, special = _source(library, grammar), self._special
        if not special:
            raise GrammarError("the model's vocabulary has no token that ends a text: no grammar can be kept to")
        if not (said := trial.fault(source, len(self._tokenizer), special)):
            limits = library.LLParserLimits(**trial.LIMITS)
            matcher = library.LLMatcher(self._vocabulary(), source, log_level=0, limits=limits)
            said = matcher.get_error()
        if said:
            what = "JSON schema" if grammar.kind == "schema" else "grammar"
            raise GrammarError(f"the {what} is not sound or not supported: {_said(said)}")
        return matcher

    @cached_property
    def _special(self) -> dict[int, str]:
        """Tokens that are no text, with their names; none where nothing ends a text."""
        tokenizer = self._tokenizer
        apart = {token for token, kind in enumerate(tokenizer.kinds) if kind in APART} | tokenizer.stops
        return {token: tokenizer.tokens[token] for token in sorted(apart)} if tokenizer.stops else {}

    def _vocabulary(self) -> Any:
        """The tokenizer as llguidance has it."""
        with self._building:  # once, though several threads may ask
            return self._built

    @cached_property
    def _built(self) -> Any:
        library, wanted = _library(), _Vocabulary(self._tokenizer, self._special)
        return library.LLTokenizer(library.TokenizerWrapper(wanted), eos_token=sorted(self._tokenizer.stops))


class _Vocabulary:
    """What llguidance asks of a tokenizer, by its names."""

    def __init__(self, tokenizer: Tokenizer, special: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id, self.bos_token_id = min(tokenizer.stops), tokenizer.bos
        self.special_token_ids = list(special)
        pieces = [tokenizer.piece(token, special=True) for token in range(len(tokenizer))]
        self.tokens = [piece if len(piece) <= trial.MOST_BYTES else b"" for piece in pieces]
        for token in self.special_token_ids:
            self.tokens[token] = pieces[token][: trial.MOST_BYTES]
        for _ in range(2):  # what encodes any text is built when the second one comes, and no answer shall wait for it
            tokenizer.encode(" ", bos=False, special=False)
        self._single = {piece[0]: token for token, piece in enumerate(self.tokens) if len(piece) == 1}

    def __call__(self, text: str) -> list[int]:
        """Tokens of exactly this text: without the space that some vocabularies begin texts with."""
        wanted = text.encode()
        for front in ("", "\n"):
            tokens = self._tokenizer.encode(front + text, bos=False, special=False)
            for begin in range(min(len(tokens), 3)):
                if b"".join(map(self.tokens.__getitem__, tokens[begin:])) == wanted:
                    return tokens[begin:]
        return [self._single[byte] for byte in wanted if byte in self._single]


def schema_of(grammar: Grammar) -> Any:
    """The prepared schema of a grammar of JSON. GrammarError."""
    try:
        return prepared({"type": "object"} if grammar.kind == "json" else json.loads(grammar.text))
    except ValueError as error:
        raise GrammarError(f"the JSON schema is no JSON: {error}") from error
    except RecursionError:
        raise GrammarError("the JSON schema is nested too deeply: make it flatter") from None


def prepared(schema: Any, **options: Any) -> Any:
    """A schema as llguidance is given it: with bounded spaces, or `options` of its own, unless it says more itself.

    An object that has properties has no others, unless it says something of them: a weak model would never stop.
    """
    if not isinstance(schema, dict):
        return schema
    options, more = options or {"whitespace_pattern": SPACES}, schema.get("x-guidance", {})
    if not isinstance(more, dict):
        raise GrammarError("the JSON schema's x-guidance is no object: leave it out")
    schema = schema if _joined(schema) else _closed(schema)
    return {**schema, "x-guidance": options | more}


def _joined(schema: Any) -> bool:
    """Whether a part of a schema may add properties to those of another one."""
    if isinstance(schema, list):
        return any(map(_joined, schema))
    if not isinstance(schema, dict):
        return False
    both = "properties" in schema and any(name in schema for name in ("anyOf", "oneOf", "$ref"))
    return both or not JOINING.isdisjoint(schema) or any(map(_joined, schema.values()))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, part in schema.items():
        if name in ("properties", "$defs", "definitions") and isinstance(part, dict):
            made[name] = {key: _closed(value) for key, value in part.items()}
        else:
            made[name] = part if name in VALUES else _closed(part)
    if "properties" in made and "additionalProperties" not in made and "patternProperties" not in made:
        made["additionalProperties"] = False
    return made


def _source(library: ModuleType, grammar: Grammar) -> str:
    """A grammar as llguidance takes it."""
    matcher = library.LLMatcher
    if grammar.kind == "lark":
        return str(matcher.grammar_from_lark(grammar.text))
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    try:
        return str(matcher.grammar_from_json_schema(json.dumps(schema_of(grammar))))
    except ValueError as error:
        raise GrammarError(f"the JSON schema is not supported: {_said(str(error))}") from error


def _said(error: str) -> str:
    """llguidance's words on one line, which may have the request's own in them."""
    return " ".join(error.split())[:ERROR_CHARACTERS]


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError:
        raise GrammarError(f"grammars and schemas need llguidance: {pip_install('grammar')}") from None
    return llguidance
