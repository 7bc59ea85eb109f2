"""Vectors of texts: what a model's last norm leaves of a text's tokens, pooled to one vector of length 1.

Files that are made for it say how to pool (`pooling_type`) and whether a text ends with the end of text
(`add_eos_token`). Others are pooled as causal models are: the last token has seen all before it. Two texts are alike as
far as the product of their vectors is near 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.errors import ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tegrad.llm.engine import Engine
    from tegrad.llm.session import Session


class Pooling(StrEnum):
    """Which tokens' states a text's vector is made of."""

    LAST = "last"
    MEAN = "mean"


_KINDS: Final[Mapping[int, Pooling]] = {0: Pooling.LAST, 1: Pooling.MEAN, 3: Pooling.LAST}
"""By GGUF's number; 0 is none."""
_REFUSED: Final[Mapping[int, str]] = {
    2: "takes the first token's state, which here has seen no other",
    4: "ranks texts",
}


class Described(Protocol):
    """A `Gguf`, or what else has its values."""

    @property
    def metadata(self) -> Mapping[str, object]: ...


def pooling(file: Gguf) -> Pooling:
    """How a file has its tokens' states pooled; UnsupportedModelError where we do not."""
    key = f"{file.metadata.get('general.architecture')}.pooling_type"
    kind: Any = file.metadata.get(key, 0)
    if isinstance(kind, int) and kind in _KINDS:
        return _KINDS[kind]
    what = _REFUSED.get(kind) if isinstance(kind, int) else None
    if what is None:
        raise file.corrupt(f"{key} = {kind!r}"[:80])
    raise UnsupportedModelError(f"{file.path} {what} ({key} = {kind}), which we do not run: choose another model")


def text_tokens(file: Described, tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens as the file wants them for its vector: at least one, or ModelError."""
    tokens = tokenizer.encode(text)
    if file.metadata.get("tokenizer.ggml.add_eos_token") is True and tokenizer.eos is not None:
        tokens.append(tokenizer.eos)
    if not tokens:
        raise ModelError("an empty text has no vector: give some text")
    return tokens


def embed(speaker: Engine | Session, tokens: Sequence[int], kind: Pooling) -> NDArray[np.float32]:
    """The vector (dim,) of a text, of length 1. What the speaker's conversation was about is forgotten.

    ContextError, ModelError, UnsupportedModelError.
    """
    states = speaker.hidden(tokens).astype(np.float64)
    vector = states[-1] if kind is Pooling.LAST else states.mean(axis=0)
    length = float(np.sqrt((vector**2).sum()))
    if not np.isfinite(length) or not length:
        raise ModelError("a text's vector has no length: the model's weights or values are broken")
    made: NDArray[np.float32] = (vector / length).astype(np.float32)
    return made
