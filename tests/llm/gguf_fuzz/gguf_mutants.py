"""Damaged and hostile GGUF files, each out of a seed: a sound file of some family, and what is done to it.

A mutant is bytes and a length, which may be far beyond them: files are sparse. The sound files are those of the tests
(tiny_llama), of every family, vocabulary and format that tegrad reads.
"""

from __future__ import annotations

import math
import random
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[1]))
from tiny_llama import TYPE, Shape, Vocabulary, letters, write

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
CHATML = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content | trim + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)
TOOLS = (
    "{{- bos_token }}{%- set ns = namespace(last=-1) %}{%- if tools %}{{- 'Tools: ' }}{%- for tool in tools %}"
    "{{- tool | tojson(indent=4) }}{%- endfor %}{%- endif %}{%- macro said(m) %}{{ m.content | trim }}{% endmacro %}"
    "{%- for m in messages[::-1] %}{%- if m.role == 'user' and ns.last < 0 %}"
    "{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- if m.role not in ['user', 'assistant', 'system'] %}"
    "{{- raise_exception('roles: ' + m.role) }}{%- endif %}"
    "{{- '[' ~ m.role ~ ']' ~ said(m) ~ eos_token }}{%- if loop.index > 50 %}{%- break %}{%- endif %}{%- endfor %}"
    "{{- strftime_now('%d %b %Y') }}"
)


def pieces(size: int) -> Vocabulary:
    """A small SentencePiece vocabulary."""
    words = ["\u2581", *"etaoinshrdlu", "\u2581t", "he", "\u2581the", "in", "er", "an", "\u2581\u2581", "\u2581a", "th"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    kinds = [2, 3, 3, *[6] * 256, *[1] * len(words)]
    tokens += [f"<|user{at}|>" for at in range(size - len(tokens))]
    kinds += [4] * (size - len(kinds))
    scores = [0.0] * 259 + [-float(at) for at in range(size - 259)]
    return Vocabulary(tokens, kinds, [], 1, 2, model="llama", pre="default", scores=scores)


TINY = Shape(dim=32, ffn=32, heads=2, kv_heads=1, layers=1, vocab=300, context=64)
WIDE = Shape(dim=256, ffn=256, heads=4, kv_heads=2, layers=1, vocab=288, context=64)
WINDOWED = {"attention.sliding_window": 9, "attention.sliding_window_pattern": [True, False, True]}
TEMPERED = {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32}


def _extra(arch: str, **values: object) -> dict[str, Any]:
    return {f"{arch}.{key}": value for key, value in values.items()}


SCALED = _extra("granite", **{"attention.scale": 0.1}, embedding_scale=12.0, residual_scale=0.22, logit_scale=8.0)
SOUND: dict[str, tuple[Shape, TYPE, str, str]] = {
    "llama": (replace(TINY, bias=True, rope_freqs=True), TYPE.F32, "gpt-2", CHATML),
    "llama pieces": (replace(TINY, dim=64, ffn=64, layers=2), TYPE.Q8_0, "pieces", TOOLS),
    "llama yarn": (replace(WIDE, extra=_extra("llama", **YARN)), TYPE.Q4_K, "llama-bpe", TOOLS),
    "qwen2": (replace(TINY, arch="qwen2", kv_heads=2), TYPE.F16, "qwen2", CHATML),
    "qwen2 packed": (replace(WIDE, arch="qwen2", tied=True), TYPE.Q6_K, "qwen2", TOOLS),
    "qwen3": (replace(TINY, arch="qwen3", head_dim=64, layers=2), TYPE.BF16, "tekken", TOOLS),
    "qwen3 packed": (replace(WIDE, arch="qwen3", head_dim=64), TYPE.Q5_K, "smollm", CHATML),
    "gemma3": (
        replace(TINY, arch="gemma3", head_dim=64, layers=3, extra=_extra("gemma3", **WINDOWED)),
        TYPE.F16,
        "pieces",
        "",
    ),
    "gemma2": (replace(WIDE, arch="gemma2", layers=2, tied=True), TYPE.Q6_K, "gpt-2", CHATML),
    "phi3": (replace(TINY, arch="phi3", long_rope=True, rotated=8), TYPE.F16, "gpt-2", CHATML),
    "olmo2": (
        replace(TINY, arch="olmo2", layers=3, extra=_extra("olmo2", **WINDOWED, **YARN)),
        TYPE.F32,
        "gpt-2",
        "",
    ),
    "granite": (replace(WIDE, arch="granite", tied=True, extra=SCALED), TYPE.Q8_0, "gpt-2", CHATML),
    "mistral3": (replace(TINY, arch="mistral3", extra=_extra("mistral3", **TEMPERED, **YARN)), TYPE.F16, "tekken", ""),
    "gpt2": (replace(TINY, arch="gpt2", kv_heads=2), TYPE.F32, "gpt-2", ""),
    "gpt2 wide": (replace(WIDE, arch="gpt2", kv_heads=4, tied=True), TYPE.F16, "default", CHATML),
}
"""Shape, format, vocabulary and template of each sound file."""


@dataclass
class Value:
    """A value of the metadata as it is written; of a list, `entry` is the type of its entries."""

    key: bytes
    kind: int
    value: Any
    entry: int = 0


@dataclass
class Tensor:
    """What the header says of a tensor."""

    name: bytes
    shape: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """A file taken apart."""

    values: list[Value]
    tensors: list[Tensor]
    data: bytearray
    version: int = 3
    counts: dict[str, int] = field(default_factory=dict)
    """Instead of the true ones."""

    def find(self, end: bytes) -> Value | None:
        """The value whose key ends so."""
        return next((value for value in self.values if value.key.endswith(end)), None)

    def bytes(self) -> bytes:
        """The file."""
        tensors = self.counts.get("tensors", len(self.tensors))
        out = [b"GGUF", struct.pack("<IQQ", self.version, tensors, self.counts.get("values", len(self.values)))]
        for value in self.values:
            out += [_text(value.key), struct.pack("<I", value.kind), self._written(value)]
        for tensor in self.tensors:
            out += [_text(tensor.name), struct.pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)]
            out.append(struct.pack("<IQ", tensor.kind, tensor.offset))
        header = b"".join(out)
        return header + bytes(-len(header) % 32) + self.data

    def _written(self, value: Value) -> bytes:
        if value.kind == ARRAY:
            count = struct.pack("<IQ", value.entry, self.counts.get(value.key.decode("latin1"), len(value.value)))
            return count + b"".join(_scalar(value.entry, entry) for entry in value.value)
        return _scalar(value.kind, value.value)


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _scalar(kind: int, value: Any) -> bytes:
    """A value in a type, whether it is of that type or not."""
    if kind == STRING:
        return _text(value if isinstance(value, bytes) else str(value).encode())
    if kind not in SCALARS:
        return struct.pack("<Q", value if isinstance(value, int) and value >= 0 else 0)
    code = "<" + SCALARS[kind]
    if isinstance(value, bytes):
        value = len(value)
    if code[1] in "fd":
        try:
            return struct.pack(code, float(value))
        except OverflowError:
            return struct.pack(code, math.inf)
    size = struct.calcsize(code)
    whole = int(value) if isinstance(value, int) or math.isfinite(value) else 0
    return (whole % (1 << 8 * size)).to_bytes(size, "little")


def parts(data: bytes) -> Parts:
    """A sound file taken apart."""
    at = 8

    def read(code: str) -> Any:
        nonlocal at
        at += struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, data, at - struct.calcsize("<" + code))[0]

    def text() -> bytes:
        nonlocal at
        size = read("Q")
        at += size
        return data[at - size : at]

    def scalar(kind: int) -> Any:
        return text() if kind == STRING else read(SCALARS[kind])

    tensors, values = read("Q"), read("Q")
    kept = []
    for _ in range(values):
        key, kind = text(), read("I")
        entry = read("I") if kind == ARRAY else 0
        value = [scalar(entry) for _ in range(read("Q"))] if kind == ARRAY else scalar(kind)
        kept.append(Value(key, kind, value, entry))
    infos = []
    for _ in range(tensors):
        name, rank = text(), read("I")
        infos.append(Tensor(name, [read("Q") for _ in range(rank)], read("I"), read("Q")))
    return Parts(kept, infos, bytearray(data[-(-at // 32) * 32 :]))


@cache
def sound(name: str) -> bytes:
    """A sound file's bytes."""
    shape, kind, cut, template = SOUND[name]
    vocabulary = pieces(shape.vocab) if cut == "pieces" else replace(letters(shape.vocab), pre=cut)
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "m.gguf", shape, kind, vocabulary=replace(vocabulary, template=template or None))
        return path.read_bytes()


@dataclass(frozen=True)
class Mutant:
    """A file: its first bytes, its length, and what it is."""

    name: str
    data: bytes
    size: int


SERVED = ("llama pieces", "llama yarn", "qwen3", "qwen3 packed", "gemma3")
"""Of three families, whose mutants are served: none in F32, which is not."""


def mutant(seed: int, bases: Sequence[str] = tuple(SOUND)) -> Mutant:
    """The mutant of a seed."""
    draw = random.Random(seed)
    base = draw.choice(bases)
    kind = draw.choice(list(KINDS))
    data, size = KINDS[kind](draw, sound(base))
    return Mutant(f"{seed}: {base}, {kind}", data, size)


# --- what is done to a file -----------------------------------------------------------------------------------------

WHOLE = [0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 255, 256, 4096, 10**6, 10**9, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40,
         2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -32, -(2**31), -(2**63)]  # fmt: skip
FLOATS = [
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-45,
    1e-38,
    1e-30,
    1e-5,
    0.5,
    1e4,
    1e5,
    1e30,
    3.4e38,
    5e-324,
    1e308,
    math.inf,
    -math.inf,
    math.nan,
    1.0000001,
]
TEXTS = [
    b"",
    b"\0",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xf0\x9f",
    "漢字🙂".encode(),
    b"\x1b[31m\r\n",
    b"a" * 3000,
    b" " * 600,
    b"{",
    b"llama",
    b"gpt2",
    b"qwen2",
    b"qwen3",
    b"bert",
    b"t5",
    b"yarn",
    b"linear",
    b"longrope",
    b"none",
    b"model",
    b"gpt-2",
    b"llama-bpe",
    b"default",
    b"<0x41>",
    b"<0x4>",
    b"\xe2\x96\x81",
    "\u2581".encode() * 300,
]
KEYS = [
    b"llama.context_length",
    b"qwen3.context_length",
    b"gpt2.block_count",
    b"general.alignment",
    b"general.type",
    b"split.count",
    b"llama.expert_count",
    b"qwen2.attention.sliding_window",
    b"qwen2.attention.key_length",
    b"llama.attention.value_length",
    b"llama.rope.scaling.factor",
    b"qwen3.rope.scaling.type",
    b"llama.rope.freq_base",
    b"qwen3.rope.dimension_count",
    b"llama.rope.scaling.yarn_beta_fast",
    b"llama.rope.scaling.yarn_beta_slow",
    b"llama.rope.scaling.attn_factor",
    b"tokenizer.ggml.eot_token_id",
    b"tokenizer.ggml.unknown_token_id",
    b"tokenizer.ggml.add_space_prefix",
    b"tokenizer.ggml.pre",
    b"tokenizer.chat_template",
    b"tokenizer.ggml.merges",
    b"tokenizer.ggml.scores",
    b"tokenizer.ggml.token_type",
]


def _header_size(data: bytes) -> int:
    return len(data) - len(parts(data).data)


def _bytes(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """Some bytes of the header."""
    out, end = bytearray(data), _header_size(data)
    for _ in range(draw.randint(1, 8)):
        at = draw.randrange(end)
        out[at] = draw.choice([draw.randrange(256), out[at] ^ 1 << draw.randrange(8), 0, 255])
    return bytes(out), len(out)


def _weights(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """Some bytes of the weights, or a run of them."""
    out, start = bytearray(data), _header_size(data)
    for _ in range(draw.randint(1, 6)):
        at, run = draw.randrange(start, len(out)), draw.choice([1, 2, 4, 64, 512])
        fill = draw.choice([b"\xff", b"\0", b"\x7f", b"\x7c\xff", draw.randbytes(8)])
        out[at : at + run] = (fill * run)[: len(out[at : at + run])]
    return bytes(out), len(out)


def _cut(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """The beginning of it, with nothing, or as if nothing was missing, after it."""
    at = draw.randrange(len(data)) if draw.random() < 0.3 else draw.randrange(_header_size(data))
    return data[:at], draw.choice([at, len(data), 1 << 33, 1 << 42])


def _slices(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """A part of the header left out, doubled, moved or made up."""
    end = _header_size(data)
    start = draw.randrange(end)
    stop = min(end, start + draw.choice([1, 2, 4, 8, 32, 500]))
    to = draw.randrange(end)
    kept = data[:start] + data[stop:]
    out = draw.choice([
        kept, data[:to] + data[start:stop] + data[to:], kept[:to] + data[start:stop] + kept[to:],
        data[:to] + draw.randbytes(stop - start) + data[to:],
    ])  # fmt: skip
    return out, len(out)


def _any_value(draw: random.Random, kind: int) -> Any:
    if kind == STRING:
        return draw.choice(TEXTS)
    return draw.choice(FLOATS if kind in (6, 12) or draw.random() < 0.1 else WHOLE)


def _values(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """Values changed, retyped, left out, doubled, exchanged or added."""
    made = parts(data)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        value = draw.choice(made.values)
        small = [value for value in made.values if value.kind != ARRAY]
        act = draw.randrange(8)
        if act <= 2 and small:
            value = draw.choice(small)
            value.value = _any_value(draw, value.kind)
        elif act == 3:
            kind = draw.choice([*SCALARS, STRING])
            value.kind, value.value = kind, _any_value(draw, kind)
        elif act == 4:
            made.values.remove(value)
        elif act == 5:
            made.values.append(draw.choice([value, Value(value.key, 4, draw.choice(WHOLE))]))
        elif act == 6:
            other = draw.choice(made.values)
            value.key, other.key = other.key, value.key
        else:
            kind = draw.choice([*SCALARS, STRING])
            key, kept = draw.choice(KEYS), made.values
            made.values = [value for value in kept if value.key != key]
            made.values.append(Value(key, kind, _any_value(draw, kind)))
    out = made.bytes()
    return out, len(out)


def _sizes(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """The model's sizes and numbers, in wider types than the file's."""
    made = parts(data)
    arch = next(value.value for value in made.values if value.key == b"general.architecture")
    mine = [value for value in made.values if value.key.startswith(arch + b".")]
    for value in draw.sample(mine, min(len(mine), draw.choice([1, 1, 2, 3]))):
        value.kind = draw.choice([10 if value.kind == ARRAY else value.kind, 10, 11, 12])
        value.value = _any_value(draw, value.kind)
        if draw.random() < 0.2:
            count = draw.choice([0, 1, 2, 5000])
            value.kind, value.entry, value.value = ARRAY, draw.choice([4, 5, 6, 10, 12, STRING]), [value.value] * count
    out = made.bytes()
    return out, len(out)


def _counts(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """Counts that are not true, in a file as long as it is or sparse."""
    made = parts(data)
    lists = [value.key.decode() for value in made.values if value.kind == ARRAY]
    for name in draw.sample(["tensors", "values", *lists], draw.choice([1, 1, 2])):
        made.counts[name] = draw.choice([number for number in WHOLE if number >= 0] + [draw.randrange(1 << 20)])
    out = made.bytes()
    return out, draw.choice([len(out), 1 << 33, 1 << 42])


def _tensors(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """What the header says of tensors."""
    made = parts(data)
    size = len(made.data)
    for _ in range(draw.choice([1, 1, 2])):
        tensor, other = draw.choice(made.tensors), draw.choice(made.tensors)
        act = draw.randrange(8)
        if act == 0:
            tensor.shape[draw.randrange(len(tensor.shape))] = draw.choice(WHOLE) % (1 << 64)
        elif act == 1:
            tensor.kind = draw.choice([*range(40), 2**31, 2**32 - 1])
        elif act == 2:
            tensor.offset = draw.choice([*WHOLE, draw.randrange(size), other.offset]) % (1 << 64)
        elif act == 3:
            tensor.name = draw.choice([other.name, *TEXTS, tensor.name + b".x", tensor.name[:-1]])
        elif act == 4:
            tensor.shape = tensor.shape[: draw.randrange(3)] + [1] * draw.randrange(6)
        elif act == 5:
            made.tensors.remove(tensor)
        elif act == 6:
            made.tensors.insert(0, Tensor(draw.choice([tensor.name, b"rope_freqs.weight", b"output.weight"]),
                                          draw.choice([[32], [16], [1] * 4]), 0, 0))  # fmt: skip
        else:
            tensor.shape, other.shape = other.shape, tensor.shape
        if not made.tensors:
            break
    out = made.bytes()
    return out, draw.choice([len(out), len(out), 1 << 42])


def _vocabulary(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """Tokens, their types and scores, and merges."""
    made = parts(data)
    tokens, kinds = made.find(b"ggml.tokens"), made.find(b"ggml.token_type")
    merges, scores = made.find(b"ggml.merges"), made.find(b"ggml.scores")
    assert tokens is not None
    assert kinds is not None
    letters_ = [b"a", b"e", b" ", "\u2581".encode(), b"\xff", "é".encode()]
    for _ in range(draw.choice([1, 1, 2, 3])):
        act, texts = draw.randrange(12), tokens.value
        some = draw.sample(range(len(texts)), min(len(texts), draw.choice([1, 3, 40, 1000])))
        if act == 0:
            for at in some:
                texts[at] = draw.choice(TEXTS)
        elif act == 1:
            length = draw.choice([200, 2000, 8000])
            for at in some:
                texts[at] = draw.choice(letters_) * (length - at)
        elif act == 2:
            kind = draw.choice([0, 1, 2, 3, 4, 5, 6, 7, -1, 2**31 - 1])
            for at in some:
                kinds.value[at] = kind
        elif act == 3:
            kinds.entry = draw.choice([6, 10, 11, 7, 12])
        elif act == 4:
            draw.shuffle(texts)
        elif act == 5:
            tokens.value = texts[: draw.randrange(len(texts))]
        elif act == 6:
            tokens.value = [*texts, *(draw.choice(letters_) * at for at in range(1, draw.choice([5, 900])))]
            kinds.value = [*kinds.value, *[draw.choice([1, 1, 3, 4])] * (len(tokens.value) - len(kinds.value))]
            if scores is not None:
                scores.value = [*scores.value, *[draw.choice(FLOATS)] * (len(tokens.value) - len(scores.value))]
        elif act == 7 and merges is not None:
            made_up = [b"e e", b"a", b" ", b"", b"  ", b"t h e", b"zz q", b"\xff a", b"a" * 3000 + b" e"]
            for at in draw.sample(range(len(merges.value)), min(3, len(merges.value))):
                merges.value[at] = draw.choice(made_up)
        elif act == 8 and scores is not None:
            for at in some:
                scores.value[min(at, len(scores.value) - 1)] = draw.choice(FLOATS)
        elif act == 9:
            end = draw.choice([b"model", b"pre", b"bos_token_id", b"eos_token_id", b"add_bos_token"])
            if (value := made.find(b"ggml." + end)) is not None:
                value.value = _any_value(draw, value.kind)
        elif act == 10:
            model = made.find(b"tokenizer.ggml.model")
            assert model is not None
            model.value = b"llama" if model.value == b"gpt2" else b"gpt2"
        else:
            for at in some:
                texts[at] = draw.choice(texts)
    out = made.bytes()
    return out, len(out)


HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in [1, 2] %}{% endfor %}{% endfor %}{% endfor %}",
    "{{ 'a' * 10**8 }}",
    "{{ ('a' * (messages | length)) * 10**11 }}",
    "{{ lipsum(n=10**5) }}",
    "{{ '%99999999d' % 1 }}",
    "{% macro m(n) %}{{ m(n + 1) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "{% break %}",
    "{% continue %}",
    "{% endfor %}",
    "{{ 9 ** 9 ** 9 ** 2 }}",
    "{{ " + "(" * 900 + ")" * 900 + " }}",
    "{{ " + "[" * 9000 + " }}",
    "{% if 1 %}" * 999 + "{% endif %}" * 999,
    "{{ 1" + " + 1" * 5000 + " }}",
    "{{ messages | map(attribute='x.y') | list }}",
    "{{ raise_exception('x' * 10**6) }}",
    "{{ strftime_now('%Y' * 10**6) }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'x' %}",
    "{% extends messages %}",
    "{{ self }}",
    "{{ self.x() }}",
    "{{ a.b.c }}",
    "{% block x %}{{ self.x() }}{% endblock %}",
    "{{ range(10**9) | list }}",
    "{{ 1 / 0 }}",
    "{{ 'a' | center(10**10) }}",
    "{{ '\\ud800' }}",
    "{{ '\\x1b[31m\\0' }}",
    "{{ ('ab' * 10**5) | wordwrap(1) | length }}",
    "{{ 'e' * 10**6 }}",
    "{{ 'the ' * 200000 }}",
    "{{ '<|bos|>' * 100000 }}",
    "{{ ' ' * 10**6 }}",
    "{{ tools | tojson(indent=10**8) }}",
    "{% set x = [[]] %}{% for i in range(5000) %}{% set x = [x] %}{% endfor %}{{ x }}",
    "{{ [1] | batch(10**10, 0) | list }}",
]
ODD = [
    "{",
    "}",
    "{{",
    "}}",
    "{%",
    "%}",
    "{#",
    "#}",
    "|",
    "'",
    '"',
    "\\",
    "\n",
    "-%}",
    "{%-",
    "(",
    ")",
    "[",
    "\0",
    "é",
    "\U0001f642",
]


def _template(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """The chat template: a hostile part in it, damaged text, or bytes that are no characters."""
    made = parts(data)
    made.values = [value for value in made.values if value.key != b"tokenizer.chat_template"]
    text, act = draw.choice([CHATML, TOOLS, ""]), draw.randrange(4)
    if act == 0 or not text:
        text = draw.choice([text, ""]) + draw.choice(HOSTILE)
    elif act == 1:
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(ODD) + text[at + draw.choice([0, 1, 5]) :]
    elif act == 2:
        start, stop = sorted(draw.randrange(len(text)) for _ in range(2))
        text = draw.choice([text[:start] + text[stop:], text[:stop] + text[start:]])
    encoded = text.encode()
    if act == 3:
        at = draw.randrange(len(encoded) + 1)
        encoded = encoded[:at] + draw.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", draw.randbytes(3)]) + encoded[at:]
    made.values.append(Value(b"tokenizer.chat_template", STRING, encoded))
    out = made.bytes()
    return out, len(out)


def _several(draw: random.Random, data: bytes) -> tuple[bytes, int]:
    """Two of these, one after the other, where the first leaves a file that can be taken apart."""
    first = draw.choice([_values, _sizes, _tensors, _vocabulary, _template])
    second = draw.choice([_values, _sizes, _tensors, _vocabulary, _bytes, _slices])
    once, _ = first(draw, data)
    try:
        return second(draw, once)
    except (
        struct.error,
        LookupError,
        ValueError,
        TypeError,
        AttributeError,
        AssertionError,
        StopIteration,
        MemoryError,
    ):
        return once, len(once)


KINDS: dict[str, Callable[[random.Random, bytes], tuple[bytes, int]]] = {
    "bytes": _bytes,
    "weights": _weights,
    "cut": _cut,
    "slices": _slices,
    "values": _values,
    "sizes": _sizes,
    "counts": _counts,
    "tensors": _tensors,
    "vocabulary": _vocabulary,
    "template": _template,
    "several": _several,
}
