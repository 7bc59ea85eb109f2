"""What the HTTP APIs see of the models: `Models` by name, each a `Model` that answers."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from tegrad.llm.batch import GREEDY
from tegrad.llm.errors import ModelError
from tegrad.llm.grammar import Grammar
from tegrad.llm.sampling import Settings
from tegrad.llm.service import Answer
from tegrad.llm.template import Template
from tegrad.llm.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


LATEST: Final = ":latest"
"""What Ollama and its clients put behind a name without a tag."""


class UnknownModel(ModelError):
    """No model of that name is served."""


@dataclass(frozen=True, slots=True)
class About:
    """A model that may be asked for, loaded or not."""

    name: str
    path: Path
    size: int
    """Bytes of its file."""
    modified: float
    """When its file was written, in seconds since 1970."""
    family: str
    """`general.architecture`."""
    quantization: str
    parameters: int
    context: int
    """Tokens that the model was made for."""
    embeds: bool
    """It makes vectors of texts and nothing else."""
    metadata: dict[str, object]
    """The file's own, without its long arrays."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory."""

    about: About
    bytes: int
    context: int
    """Tokens of prompt and answer together."""
    expires: float | None
    """When it is unloaded if nobody uses it, in seconds since 1970; None is never."""


class Model(Protocol):
    """A model in memory, while it is in use. Any task may ask at any time."""

    about: About
    tokenizer: Tokenizer
    template: Template | None

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together, as it was loaded."""
        ...

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        settings: Settings = GREEDY,
        *,
        stops: Sequence[str] = (),
        seed: int = 0,
        grammar: Grammar | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """As `llm.service.Service.submit`; its text keeps to `grammar`, or a GrammarError ends it."""
        ...

    async def embed(self, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        """A vector of length 1 of each text, (texts, dim). UnsupportedModelError for a model not made for it."""
        ...


class Models(Protocol):
    """All models of a server."""

    def names(self) -> Sequence[About]:
        """Those that may be asked for, the default one first."""
        ...

    def find(self, name: str | None) -> About:
        """The one that a request means by a name; the default one for None. UnknownModel."""
        ...

    def loaded(self) -> Sequence[Loaded]:
        """Those in memory."""
        ...

    def use(self, name: str | None, keep_alive: float | None = None) -> AbstractAsyncContextManager[Model]:
        """A model while it is in use, loaded first if need be, and then others unloaded for it.

        None is the default one. It is kept for `keep_alive` seconds after its last use (as configured if None, for
        ever if infinite). UnknownModel, OutOfMemory, GgufError, UnsupportedModelError.
        """
        ...
