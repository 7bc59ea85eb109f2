"""A few thousand short conversations about the training chapters, so that the chat marks mean something.

The kinds: go on with a verse, name a verse's book after thinking, read a verse through a tool. Nothing of the held-out
chapters enters them. Messages have the shape that chat templates take.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from small_model.corpus import Chapter

Message = dict[str, Any]
Conversation = tuple[list[Message], list[dict[str, Any]] | None]
"""Messages, and the tools that were offered."""

READ_VERSE = {
    "type": "function",
    "function": {
        "name": "read_verse",
        "description": "Read a verse.",
        "parameters": {
            "type": "object",
            "properties": {"reference": {"type": "string"}},
            "required": ["reference"],
        },
    },
}


def _pick(chapters: Sequence[Chapter], rng: random.Random) -> tuple[Chapter, int]:
    chapter = rng.choice(chapters)
    return chapter, rng.randrange(len(chapter.verses))


def _go_on(chapters: Sequence[Chapter], rng: random.Random) -> Conversation:
    chapter, verse = _pick(chapters, rng)
    words = chapter.verses[verse].split()
    cut = rng.randint(1, max(1, min(10, len(words) - 1)))
    ask = rng.choice(["Continue: ", "Go on: ", "Complete this verse: ", ""])
    return [_user(ask + " ".join(words[:cut])), _assistant(" ".join(words[cut:]) or "Amen.")], None


def _name_the_book(chapters: Sequence[Chapter], rng: random.Random) -> Conversation:
    chapter, verse = _pick(chapters, rng)
    text = chapter.verses[verse]
    names = list(dict.fromkeys(re.findall(r"(?<=[a-z] )[A-Z][a-z]+", text)))[:4]
    thought = f"It names {' and '.join(names)}." if names else "It names nobody."
    ask = rng.choice(["Which book is this from? ", "Where is this written? "])
    return [_user(ask + text), _assistant(f"It is from {chapter.book}.", reasoning_content=thought)], None


def _read(chapters: Sequence[Chapter], rng: random.Random) -> Conversation:
    chapter, verse = _pick(chapters, rng)
    reference = f"{chapter.book} {chapter.number}:{verse + 1}"
    call = {"type": "function", "function": {"name": "read_verse", "arguments": {"reference": reference}}}
    ask = rng.choice(["Read {}.", "What does {} say?", "Please read {} to me."]).format(reference)
    messages = [
        _user(ask),
        _assistant("", tool_calls=[call]),
        {"role": "tool", "content": chapter.verses[verse]},
        _assistant(chapter.verses[verse]),
    ]
    return messages, [READ_VERSE]


def _greet(chapters: Sequence[Chapter], rng: random.Random) -> Conversation:
    chapter, verse = _pick(chapters, rng)
    ask = rng.choice(["Hello", "Hello!", "Speak.", "Say something.", "Tell me a verse.", "Who are you?", "Hi"])
    return [_user(ask), _assistant(chapter.verses[verse])], None


KINDS: tuple[tuple[Callable[[Sequence[Chapter], random.Random], Conversation], int], ...] = (
    (_go_on, 6),
    (_name_the_book, 2),
    (_read, 3),
    (_greet, 1),
)
"""Kinds of conversation and how often each occurs."""


def conversations(chapters: Sequence[Chapter], count: int, seed: int) -> list[Conversation]:
    """`count` conversations about `chapters`, the same ones for the same seed."""
    rng = random.Random(seed)
    makers, weights = zip(*KINDS, strict=True)
    return [make(chapters, rng) for make in rng.choices(makers, weights, k=count)]


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _assistant(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}
