"""The models among a repository's files, and their names: owner/repo:QUANT.

A file's quantization stands in its name, as programs that convert models write it; where none does, or several files
have the same, a model's tag is its file's name instead.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final

from tegrad.errors import TegradError
from tegrad.llm.parts import PART

USUAL: Final = "Q4_K_M"
"""The quantization that is meant where a name has none."""
NO_MODELS: Final = ("mmproj", "imatrix")
"""What GGUF files have in their names that hold an image encoder, or statistics."""
QUANTIZATION: Final = re.compile(
    r"(?<![A-Za-z0-9])(?:UD-)?(?:(?:I|T)?Q\d(?:_(?:K|P|NL|XXS|XS|S|M|L|XL|\d))*|BF16|FP?16|FP?32|MXFP4(?:_MOE)?)"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class ModelNameError(TegradError):
    """A name that means no model, or more than one."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Model:
    """A model of a repository: a file, or all parts of it."""

    repo: str
    """OWNER/NAME."""
    tag: str
    quantization: str | None
    files: tuple[str, ...]
    """Paths within the repository, a model's first part first."""
    size: int
    """In bytes."""

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.repo}:{self.tag}"

    @property
    def stem(self) -> str:
        """The file's name without its ending and its number."""
        return _stem(self.files[0])

    def is_called(self, tag: str) -> bool:
        """Whether a tag, in letters of either case, means it."""
        return tag.lower() in {self.tag.lower(), self.stem.lower(), (self.quantization or self.tag).lower()}


def split(text: str) -> tuple[str, str | None]:
    """A name's repository and tag."""
    repo, _, tag = text.partition(":")
    return repo, tag or None


def _stem(file: str) -> str:
    return PART.sub("", PurePosixPath(file).name).removesuffix(".gguf")


def quantization(file: str) -> str | None:
    """What stands in a file's name, or its folder's."""
    found = QUANTIZATION.findall(_stem(file)) or QUANTIZATION.findall(PurePosixPath(file).parent.name)
    return re.sub(r"\bFP", "F", found[-1].upper()) if found else None


def models_of(repo: str, files: Mapping[str, int]) -> list[Model]:
    """The models among files, of which each has its bytes; one that lacks a part is none."""
    whole: list[tuple[str, ...]] = []
    for file in sorted(files):
        if not file.lower().endswith(".gguf") or any(word in file.lower() for word in NO_MODELS):
            continue
        if (part := PART.search(file)) is None:
            whole.append((file,))
        elif int(part[1]) == 1:
            stem, count = file[: part.start()], int(part[2])
            parts = tuple(f"{stem}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))
            if all(one in files for one in parts):
                whole.append(parts)
    quantizations = Counter(quantization(parts[0]) for parts in whole)
    stems = Counter(_stem(parts[0]) for parts in whole)
    made = []
    for parts in whole:
        kind, stem = quantization(parts[0]), _stem(parts[0])
        alone = kind is not None and quantizations[kind] == 1
        tag = kind if kind and alone else stem if stems[stem] == 1 else parts[0].removesuffix(".gguf")
        made.append(Model(repo, tag, kind, parts, sum(files[one] for one in parts)))
    return made


def chosen(models: Sequence[Model], tag: str | None, *, usual: bool = True) -> Model:
    """The model of a repository that a tag means; without one the only one, or else (`usual`) the Q4_K_M.

    ModelNameError, with the choice.
    """
    found = [model for model in models if tag is None or model.is_called(tag)]
    if tag is None and usual and len(found) > 1:
        found = [model for model in models if model.is_called(USUAL)] or found
    if len(found) == 1:
        return found[0]
    repo = models[0].repo
    if not found:
        raise ModelNameError(f"{repo} has no {tag}; it has {listed(models)}")
    raise ModelNameError(f"{repo}{f':{tag}' if tag else ''} may be several models: choose one of {listed(found)}")


def listed(models: Iterable[Model]) -> str:
    """Names for an error."""
    return ", ".join(model.name for model in models)
