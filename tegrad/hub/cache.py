"""The models that lie in the hub's cache, as its library leaves them there, whoever fetched them.

Of a repository there are `blobs`, a `snapshots` folder per commit, whose files are links to blobs, and `refs`, which
say what commit a branch was at. Of several commits main's counts, else the newest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tegrad import kept
from tegrad.hub.names import Model, ModelNameError, chosen, listed, models_of, split
from tegrad.installed import pip_install

PREFIX: Final = "models--"
"""What the folder of a repository of models begins with."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A model in the cache, and where its first file is."""

    model: Model
    path: Path


def folder() -> Path:
    """The cache's folder, by the hub library's own variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if named := os.environ.get(name):
            return Path(os.path.expandvars(named)).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(os.path.expandvars(home)).expanduser() if home else kept.cache_folder() / "huggingface") / "hub"


def here() -> list[Kept]:
    """All models in the cache, by name."""
    found: dict[str, Kept] = {}
    for repository in sorted(folder().glob(f"{PREFIX}*")):
        repo = repository.name.removeprefix(PREFIX).replace("--", "/")
        for snapshot in _snapshots(repository):
            for model in models_of(repo, dict(_files(snapshot))):
                found.setdefault(model.name, Kept(model, snapshot / model.files[0]))
    return list(found.values())


def _snapshots(repository: Path) -> list[Path]:
    """Of a repository, main's first and then the newest."""
    main = ""
    with suppress(OSError):
        main = (repository / "refs" / "main").read_text().strip()
    with suppress(OSError):
        places = [place for place in (repository / "snapshots").iterdir() if place.is_dir()]
        return sorted(places, key=lambda place: (place.name != main, -place.stat().st_mtime))
    return []


def _files(snapshot: Path) -> Iterator[tuple[str, int]]:
    """GGUF files within a snapshot and their bytes; a link to nothing is none."""
    for path in snapshot.rglob("*.gguf"):
        with suppress(OSError):
            yield path.relative_to(snapshot).as_posix(), path.stat().st_size


def located(text: str) -> Path:
    """The file that a command's MODEL means: a path, or a model's name in the cache. ModelNameError."""
    path = Path(text)
    if text.endswith(".gguf") or text.startswith(("/", ".")) or path.exists():
        return path
    return find(text).path


def find(text: str, *, usual: bool = True) -> Kept:
    """The model in the cache of a name, which may lack the owner, -GGUF and, where one is meant, the quantization.

    `usual` as in `chosen`. ModelNameError.
    """
    repo, tag = split(text)
    models = [each for each in here() if repo.lower() in _names(each.model.repo)]
    if not models:
        known = "; `tegrad models` lists those that are here" if here() else ""
        pull = f"`tegrad pull {text}` fetches it" if "/" in repo else "`tegrad pull OWNER/REPO:QUANT` fetches one"
        raise ModelNameError(f"{text} is no file, and no model of that name is here: {pull}{known}")
    if len({each.model.repo for each in models}) > 1:
        meant = [each.model for each in models if tag is None or each.model.is_called(tag)]
        raise ModelNameError(f"{text} may be several models: choose one of {listed(meant or _models(models))}")
    model = chosen(_models(models), tag, usual=usual)
    return next(each for each in models if each.model is model)


def _models(many: Sequence[Kept]) -> list[Model]:
    return [each.model for each in many]


def _names(repo: str) -> set[str]:
    """What a repository may be called, in small letters."""
    full = repo.lower()
    short = full.rpartition("/")[2]
    return {full, full.removesuffix("-gguf"), short, short.removesuffix("-gguf")}


def remove(text: str) -> tuple[Model, int]:
    """Remove a model from every snapshot of the cache. Returns it and the bytes that were freed; ModelNameError."""
    model = find(text, usual=False).model
    check_library()
    from huggingface_hub import scan_cache_dir

    info = scan_cache_dir(folder())
    repos = frozenset(repo for repo in info.repos if (repo.repo_type, repo.repo_id) == ("model", model.repo))
    revisions = [own for repo in repos for own in repo.revisions]
    files = {file for own in revisions for file in own.files
             if file.file_path.relative_to(own.snapshot_path).as_posix() in model.files}  # fmt: skip
    if files == {file for own in revisions for file in own.files}:
        # In this repository alone: a copy of it may have the same commit.
        plan = replace(info, repos=repos).delete_revisions(*(own.commit_hash for own in revisions))
    else:
        plan = info.delete_files(*files)
    plan.execute()
    return model, plan.expected_freed_size


def check_library() -> None:
    """ModelNameError where the hub's library is not installed."""
    try:
        import huggingface_hub  # noqa: F401
    except ModuleNotFoundError:
        raise ModelNameError(f"this needs the Hugging Face hub's library: {pip_install('hub')}") from None
