"""Chapters to tokens: the vocabulary is learned, and both parts are encoded for training and for measuring."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from small_model import vocabulary
from small_model.conversations import conversations
from small_model.corpus import Chapter, split
from small_model.data import Data, HeldOut, Tokens
from tegrad.llm.quality import windows

CONTEXT = 512
CONVERSATIONS = 2000
SEED = 20


def build(chapters: Sequence[Chapter], talks: int = CONVERSATIONS) -> tuple[Tokenizer, Data]:
    """Learn the vocabulary on the training part and encode both parts."""
    train, held = split(chapters)
    texts = [vocabulary.render(*talk) for talk in conversations(train, talks, SEED)]
    tokenizer = vocabulary.train([chapter.text for chapter in train] + texts[: talks // 10])
    bos, eos, pad = (tokenizer.token_to_id(mark) for mark in (vocabulary.BOS, vocabulary.EOS, vocabulary.PAD))

    def document(text: str) -> Tokens:
        return np.array([bos, *tokenizer.encode(text).ids, eos], np.int32)

    documents = [(document(chapter.text), True) for chapter in train]
    documents += [(document(text.removeprefix(vocabulary.BOS)), False) for text in texts]
    random.Random(SEED).shuffle(documents)
    newline = tokenizer.token_to_id("Ċ")
    starts, length = [], 0
    for tokens, is_chapter in documents:
        starts.append(length + _starts(tokens, newline if is_chapter else None))
        length += len(tokens)
    stream, begin = np.concatenate([tokens for tokens, _ in documents]), np.concatenate(starts).astype(np.int32)
    text_bytes = sum(len(chapter.text.encode()) for chapter in held)
    held_out = pack([document(chapter.text) for chapter in held], bos, pad, CONTEXT, text_bytes)
    return tokenizer, Data(stream, begin[begin <= len(stream) - CONTEXT], held_out, bos, tokenizer.get_vocab_size())


def _starts(document: Tokens, newline: int | None) -> Tokens:
    """Where a window may begin: after the begin mark, and (given `newline`) at each line that is not empty."""
    begins = np.zeros(len(document), np.bool_)
    begins[1] = True
    if newline is not None:
        ends = document == newline
        begins[1:-1] |= ends[:-2] & ~ends[1:-1]
    return np.flatnonzero(begins)


def pack(documents: Sequence[Tokens], bos: int, pad: int, context: int, text_bytes: int) -> HeldOut:
    """The windows of `tegrad eval`, filled up to equal length."""
    cut = [window for document in documents for window in windows(document.tolist(), bos, context)]
    tokens = np.full((len(cut), context + 1), pad, np.int32)
    counted = np.zeros((len(cut), context), np.bool_)
    for row, window in enumerate(cut):
        tokens[row, : len(window.tokens)] = window.tokens
        counted[row, window.known - 1 : len(window.tokens) - 1] = True
    return HeldOut(tokens[:, :-1], tokens[:, 1:], counted, text_bytes)
