"""The byte-level BPE that the small model reads and writes, its marks and its chat template.

The text is cut before the merges exactly as GPT-2 cuts it, which llama.cpp knows as `tokenizer.ggml.pre = "gpt-2"`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PRE = "gpt-2"
SIZE = 2048

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
TURN, TURN_END = "<|im_start|>", "<|im_end|>"
CONTROL = (BOS, EOS, PAD, TURN, TURN_END)
"""Marks that never show in the output."""
VISIBLE = (
    "<think>", "</think>", "<tools>", "</tools>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>",
)  # fmt: skip
"""Marks of reasoning and of tools: one token each, and part of the text that a client parses."""

TEMPLATE = Path(__file__).with_name("template.jinja").read_text()


def train(texts: Iterable[str]) -> Tokenizer:
    """Learn SIZE - marks tokens from `texts`; the marks come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE - len(CONTROL) - len(VISIBLE),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False) for mark in CONTROL])
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in VISIBLE])
    return tokenizer


@dataclass(frozen=True)
class GgufVocabulary:
    """A tokenizer in GGUF's terms: tokens and types by id, merges by rank."""

    tokens: list[str]
    types: list[int]
    merges: list[str]

    NORMAL = 1
    CONTROL_TYPE = 3
    USER_DEFINED = 4

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> GgufVocabulary:
        """Read out of the tokenizer's own serialisation."""
        model = json.loads(tokenizer.to_str())["model"]
        ids = tokenizer.get_vocab(with_added_tokens=True)
        tokens = sorted(ids, key=ids.__getitem__)
        kinds = dict.fromkeys(CONTROL, cls.CONTROL_TYPE) | dict.fromkeys(VISIBLE, cls.USER_DEFINED)
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
        return cls(tokens, [kinds.get(token, cls.NORMAL) for token in tokens], merges)


@cache
def _template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return environment.from_string(TEMPLATE)


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """A conversation as the chat template writes it."""
    return _template().render(messages=messages, tools=tools, bos_token=BOS)
