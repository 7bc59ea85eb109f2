"""From the hub into its cache: what a repository has, and a model's files, resumed where an earlier download stopped.

The hub's library drops what it has of a file when it is interrupted. So a file is read by plain HTTP into the name that
its blob has in the cache with `.incomplete` behind it, and the library then finds the whole blob there. What the hub
does not give by plain HTTP, a file above 50 GB, the library fetches.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from tegrad.errors import TegradError
from tegrad.hub import cache
from tegrad.hub.names import REPOSITORY, Model, ModelNameError, chosen, models_of, split

SHA256: Final = re.compile(r"[0-9a-f]{64}")


class DownloadError(TegradError):
    """The hub does not give it, or not now, or there is no room."""


def pull(name: str, revision: str | None = None) -> cache.Kept:
    """Fetch a model, REPO[:QUANT], at a branch, tag or commit; what is there already is not read again.

    ModelNameError, DownloadError, and what the file system says.
    """
    repo, tag = split(name)
    if not REPOSITORY.fullmatch(repo):
        raise ModelNameError(f"{name} is no name on the hub: tegrad pull OWNER/REPO:QUANT")
    cache.check_library()
    from huggingface_hub.errors import OfflineModeIsEnabled

    with _explained(repo, revision):
        try:
            model = chosen(_offered(repo, revision), tag)
        except OfflineModeIsEnabled:
            with suppress(ModelNameError):
                return cache.find(name)
            raise
        sources = [_Source(repo, revision, file) for file in model.files]
        _check_room(model, sources)
        for source in sources:
            source.fetch()
        first, *_ = [source.linked() for source in sources]
        return cache.Kept(model, Path(first))


def _offered(repo: str, revision: str | None) -> list[Model]:
    """The models that a repository on the hub has. ModelNameError where there is none."""
    from huggingface_hub import HfApi

    info = HfApi(endpoint=_endpoint()).model_info(repo, revision=revision, files_metadata=True)
    files = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    if models := models_of(repo, files):
        return models
    raise ModelNameError(
        f"{repo} has no model in GGUF format among its {len(files)} files: look for a repository of GGUF files made "
        "from it, most have GGUF in their names"
    )


def _endpoint() -> str | None:
    """The hub, where it is another than huggingface.co."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


class _Source:
    """A file on the hub, and where it is to lie."""

    def __init__(self, repo: str, revision: str | None, file: str) -> None:
        """Ask for its size and its etag, which names its blob."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url
        from huggingface_hub.utils import build_hf_headers

        self.repo, self.revision, self.file = repo, revision, file
        self.url = hf_hub_url(repo, file, revision=revision, endpoint=_endpoint())
        self.headers = build_hf_headers()
        known = get_hf_file_metadata(self.url, endpoint=_endpoint(), retry_on_errors=True)
        if not known.etag or known.size is None:
            raise DownloadError(f"{self.url} tells no size or no etag: HF_ENDPOINT must be a mirror of the hub")
        self.etag, self.size = known.etag, known.size
        blobs = cache.folder() / f"{cache.PREFIX}{repo.replace('/', '--')}" / "blobs"
        self.blob = blobs / self.etag
        self.part = blobs / f"{self.etag}.incomplete"

    @property
    def missing(self) -> int:
        """Bytes that are still to come."""
        if self.blob.exists():
            return 0
        return self.size - (self.part.stat().st_size if self.part.exists() else 0)

    def fetch(self) -> None:
        """Have the blob in the cache, unless the library must fetch it. One process at a time; others wait for it."""
        from huggingface_hub.constants import MAX_HTTP_DOWNLOAD_SIZE

        if self.blob.exists() or self.size > MAX_HTTP_DOWNLOAD_SIZE:
            return
        self.part.parent.mkdir(parents=True, exist_ok=True)
        with self._locked() as out:
            out.seek(0, os.SEEK_END)
            if self.blob.exists():  # another process has brought it meanwhile
                self.part.unlink(missing_ok=True)
                return
            self._read(out)
            self._check()
            os.replace(self.part, self.blob)

    @contextmanager
    def _locked(self) -> Iterator[BinaryIO]:
        """The part, which no other process writes; one that the process before has taken away is made anew."""
        while True:
            with open(self.part, "ab") as out:
                fcntl.flock(out, fcntl.LOCK_EX)
                there = False
                with suppress(FileNotFoundError):
                    there = os.path.samestat(self.part.stat(), os.fstat(out.fileno()))
                if there or self.blob.exists():
                    yield out
                    return

    def _read(self, out: BinaryIO) -> None:
        """Go on behind what is there, and again where the connection breaks, as long as each brings something.

        The library itself tries five times more where some kinds of break bring nothing.
        """
        from httpx2 import TransportError
        from huggingface_hub.file_download import http_get

        begin = out.tell()
        while begin != self.size:
            try:
                http_get(self.url, out, resume_size=begin, headers=self.headers, expected_size=self.size,
                         displayed_filename=self.file)  # fmt: skip
            except TransportError:
                if out.tell() == begin:
                    raise
            out.flush()
            begin = out.tell()

    def _check(self) -> None:
        """DownloadError, and the part is gone, unless its bytes have the hash that is its etag."""
        if not SHA256.fullmatch(self.etag):
            return
        with open(self.part, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() == self.etag:
                return
        self.part.unlink()
        raise DownloadError(f"{self.file} came with other bytes than the hub has: pull it again")

    def linked(self) -> str:
        """The file's path in the cache, once the library has given the blob its name."""
        from huggingface_hub import hf_hub_download

        return hf_hub_download(
            self.repo, self.file, revision=self.revision, cache_dir=cache.folder(), endpoint=_endpoint()
        )


def _check_room(model: Model, sources: list[_Source]) -> None:
    """DownloadError before anything is read where the disk has no room for what is missing."""
    missing = sum(source.missing for source in sources)
    place = cache.folder()
    while not place.exists():
        place = place.parent
    if missing > (free := shutil.disk_usage(place).free):
        raise DownloadError(
            f"{model.name} needs {missing / 1e9:.1f} GB more, and {place} has {free / 1e9:.1f} GB free: make room "
            "(`tegrad models rm`), or set HF_HOME to a folder on a larger disk"
        )


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """The library's errors as one sentence with the next step. Progress is shown on a terminal only."""
    from httpx2 import TransportError
    from huggingface_hub import errors
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except errors.OfflineModeIsEnabled:
        raise DownloadError(f"HF_HUB_OFFLINE is set, and {repo} is not here: unset it to pull") from None
    except errors.HFValidationError:
        raise ModelNameError(f"{repo} is no name on the hub: tegrad pull OWNER/REPO:QUANT") from None
    except errors.GatedRepoError:
        raise DownloadError(
            f"{repo} is gated: accept its terms on {_page(repo)}, and put a token of yours into HF_TOKEN "
            f"({_page('settings/tokens')})"
        ) from None
    except errors.RevisionNotFoundError:
        raise DownloadError(f"{repo} has no revision {revision}: look at {_page(repo)}/tree/main") from None
    except errors.HfHubHTTPError as error:
        raise DownloadError(_status(repo, error.response.status_code)) from None
    except (TransportError, TimeoutError, errors.LocalEntryNotFoundError) as error:
        raise DownloadError(
            f"cannot reach {_page('')} ({error}): look at the network, or set HF_ENDPOINT to a mirror; "
            "what has come is kept, and the next pull goes on behind it"
        ) from None


def _page(path: str) -> str:
    return f"{_endpoint() or 'https://huggingface.co'}/{path}".rstrip("/")


def _status(repo: str, status: int) -> str:
    """What a server's refusal means; the hub answers 401 for what is private and for what does not exist."""
    match status:
        case 401 | 403 | 404:
            return (
                f"{repo} is not there, or private: check the name on {_page(repo)}; for a private one put a token "
                "that may read it into HF_TOKEN"
            )
        case 429:
            return f"{_page('')} has had too many requests from here: wait some minutes, or set HF_TOKEN"
    return f"{_page('')} answers {status} for {repo}: try again later; what has come is kept"
