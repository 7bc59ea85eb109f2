"""Seeded texts of many scripts, signs, spaces, numbers, code and control tokens, to cut."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

SCRIPTS = (
    "abcdefgh XYZ", "éüßñçøåÉÜ", "漢字中文测试龥", "かなカナー", "한글가힣", "ЖжДяЩ", "αβγΩά", "אבגדא", "العربيةـ٣",
    "हिन्दीक्षि", "ไทยภาษา", "ǅǈƻա", "🙂🏳️‍🌈👩‍👩‍👧🇩🇪", "0123456789", "²½Ⅷ٣१",
    "   \t\n\r\u00a0\u2003\u3000\u200b\u0085\x0b\x0c", ".,!?;:'\"()[]{}<>|\\/@#$%^&*~`_+-=", "，。！？：；「」…—",
    "e\u0301a\u0308\u0304", "\x00\x01\x7f\ufeff\ufffd",
)  # fmt: skip
PIECES = (
    "'s", "'S", "'ll", "'LL", " the", "The", "  ", "\n\n", "\n", " \n", "\r\n", "    ", "\t\t", "don't", "12345678",
    "3.14", "http://x.y/z?a=b", "def f(x):\n    return x", "for (int i = 0; i < n; i++) {", "HelloWorld", " " * 33,
)  # fmt: skip


def texts(seed: int, count: int, marks: Sequence[str] = ()) -> Iterator[str]:
    """So many texts, each mostly of a few scripts; `marks` are a vocabulary's own tokens, which occur in them."""
    draw = random.Random(seed)
    pieces = (*PIECES, *draw.sample(list(marks), min(30, len(marks))))
    for _ in range(count):
        own = draw.sample(SCRIPTS, draw.randint(1, 4))
        parts = []
        for _ in range(draw.randint(0, 24)):
            kind = draw.random()
            if kind < 0.25:
                parts.append(draw.choice(pieces))
            else:
                parts.append(draw.choice(draw.choice(own if kind < 0.9 else SCRIPTS)))
        yield "".join(parts)
