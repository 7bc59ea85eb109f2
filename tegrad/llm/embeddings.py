"""Vectors of texts: what a model's last norm leaves of a text's tokens, pooled to one vector of length 1.

Files that are made for it say how to pool (`pooling_type`) and whether a text ends with the end of text
(`add_eos_token`), and may have matrices that what is pooled is multiplied by. Others are pooled as causal models are:
the last token has seen all before it. Two texts are alike as far as the product of their vectors is near 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.config import Config
from tegrad.llm.errors import ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.reference import expanded
from tegrad.llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tegrad.llm.engine import Engine
    from tegrad.llm.session import Session


class Pooling(StrEnum):
    """Which tokens' states a text's vector is made of."""

    LAST = "last"
    MEAN = "mean"
    FIRST = "first"


_KINDS: Final[Mapping[int, Pooling]] = {0: Pooling.LAST, 1: Pooling.MEAN, 2: Pooling.FIRST, 3: Pooling.LAST}
"""By GGUF's number; 0 is none."""
_RANKS: Final = 4


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
    if kind == _RANKS:
        raise UnsupportedModelError(f"{file.path} ranks texts ({key} = {kind}), which we do not run: choose another")
    raise file.corrupt(f"{key} = {kind!r}"[:80])


def text_tokens(file: Described, tokenizer: Tokenizer, text: str) -> list[int]:
    """A text's tokens as the file wants them for its vector: at least one, or ModelError."""
    tokens = tokenizer.encode(text)
    if file.metadata.get("tokenizer.ggml.add_eos_token") is True and tokenizer.eos is not None:
        tokens.append(tokenizer.eos)
    if not tokens:
        raise ModelError("an empty text has no vector: give some text")
    return tokens


@dataclass(frozen=True, slots=True)
class Vectors:
    """How a model's vectors are made: its states are pooled, and multiplied by these matrices, one after the other."""

    kind: Pooling
    matrices: tuple[NDArray[np.float32], ...] = ()

    @classmethod
    def of(cls, file: Gguf, config: Config, kind: Pooling | None = None) -> Self:
        """As a file has it, but for another pooling where that is given. GgufError, UnsupportedModelError."""
        infos = [file.tensor(name).shaped(2) for name in config.arch.dense if name in file.tensors]
        sizes = [config.dim, *(info.rows for info in infos)]
        if [info.shape[1] for info in infos] != sizes[:-1] or sizes[-1] != config.dim:
            shapes = ", ".join(f"{info.name!r} {info.shape}" for info in infos)
            raise file.corrupt(f"vectors of {config.dim} are multiplied by {shapes}")
        return cls(kind or pooling(file), tuple(expanded(file, info) for info in infos))

    def made(self, speaker: Engine | Session, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The vector (dim,) of a text, of length 1. What the speaker's conversation was about is forgotten.

        ContextError, ModelError, UnsupportedModelError.
        """
        states = speaker.hidden(tokens).astype(np.float64)
        one = {Pooling.LAST: -1, Pooling.FIRST: 0}.get(self.kind)
        vector = states.mean(axis=0) if one is None else states[one]
        for matrix in self.matrices:
            vector = matrix @ vector
        return _unit(vector)


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float32]:
    """A vector of length 1. ModelError."""
    length = float(np.sqrt((vector**2).sum()))
    if not np.isfinite(length) or not length:
        raise ModelError("a text's vector has no length: the model's weights or values are broken")
    made: NDArray[np.float32] = (vector / length).astype(np.float32)
    return made
