"""SentencePiece's BPE: of all neighbours that are a piece together, the pair of the best score is joined first, and of
equal scores the leftmost (llama.cpp's llm_tokenizer_spm does the same).

The library `tokenizers` cannot express that, since it gives every pair a rank of its own. A run of spaces, which can be
joined out of many pairs of equal score, was cut differently there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final

SPACE: Final = "\u2581"
"""How SentencePiece writes a space."""
NUMBERS: Final[Mapping[str, int]] = {"bos": 1, "eos": 2}
"""Of a SentencePiece model's tokens in a file that does not tell them: its trainer's own, and llama.cpp's."""
_WORD: Final = re.compile(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+")


class Pieces:
    """Cuts texts into the pieces of a vocabulary."""

    def __init__(
        self, pieces: Iterable[tuple[str, int, float]], letters: Sequence[int | None], unknown: int | None
    ) -> None:
        """`pieces` are texts, their tokens and scores; `letters` tokens of the 256 bytes, for what is no piece.

        `unknown` stands for that where a byte has no token; several in a row are one.
        """
        self._pieces = {text: (-score, token) for text, token, score in pieces}
        self._bytes, self._unknown = letters, unknown
        # Where no piece has a space after another letter, none reaches over the beginning of a word.
        self._whole = any(SPACE in text.lstrip(SPACE) for text in self._pieces)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text whose spaces are SPACE."""
        if self._whole:
            return self._fused(self._word(text)) if text else []
        known: dict[str, list[int]] = {}
        tokens: list[int] = []
        for word in _WORD.findall(text):
            if (found := known.get(word)) is None:
                found = known[word] = self._word(word)
            tokens += found
        return self._fused(tokens)

    def _word(self, word: str) -> list[int]:
        if (piece := self._pieces.get(word)) is not None and len(word) == 1:
            return [piece[1]]
        return [token for part in self._joined(word) for token in self._tokens(part)]

    def _joined(self, word: str) -> Iterator[str]:
        """The parts of a word once nothing is left to join."""
        pieces, count = self._pieces, len(word)
        end = list(range(1, count + 1))  # of the part that begins here; 0 where it was joined to the one before
        before = list(range(-1, count))  # where the part in front of it begins
        found = [
            (piece[0], at, at + 2) for at in range(count - 1) if (piece := pieces.get(word[at : at + 2])) is not None
        ]
        heapify(found)
        while found:
            _, left, last = heappop(found)
            right = end[left]
            if not right or right == count or end[right] != last:
                continue  # one of the two was joined otherwise since
            end[left], end[right] = last, 0
            if last < count:
                before[last] = left
            for start, stop in ((before[left], last), (left, end[last] if last < count else 0)):
                if start >= 0 and stop and (piece := pieces.get(word[start:stop])) is not None:
                    heappush(found, (piece[0], start, stop))
        at = 0
        while at < count:
            yield word[at : end[at]]
            at = end[at]

    def _tokens(self, part: str) -> Sequence[int]:
        """A piece's token, or those of a letter's bytes."""
        if (piece := self._pieces.get(part)) is not None:
            return (piece[1],)
        tokens = [token for byte in part.encode("utf-8", "surrogateescape") if (token := self._bytes[byte]) is not None]
        if len(tokens) == len(part.encode("utf-8", "surrogateescape")):
            return tokens
        return () if self._unknown is None else (self._unknown,)

    def _fused(self, tokens: list[int]) -> list[int]:
        unknown = self._unknown
        if unknown not in tokens:
            return tokens
        return [token for at, token in enumerate(tokens) if token != unknown or not at or tokens[at - 1] != unknown]
