"""Where CPU and GPU share the memory, a context that nobody asked for is one for which memory is free."""

from pathlib import Path

import pytest
from tiny_llama import TYPE, Shape, letters, write

from tegrad import LLM
from tegrad.cli import run
from tegrad.llm import footprint
from tegrad.llm.errors import ContextError, OutOfMemory
from tegrad.llm.footprint import PROCESS, Footprint
from tegrad.llm.gguf import Gguf
from tegrad.nv import memory

pytestmark = pytest.mark.board
LONG = Shape(dim=512, ffn=512, heads=8, kv_heads=8, layers=2, vocab=301, context=8192)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which a thousand tokens take 4 MiB of keys and values."""
    return write(tmp_path_factory.mktemp("long") / "long.gguf", LONG, TYPE.Q8_0, vocabulary=letters(301))


def leave(room: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Linux tell of as much free memory as leaves `room` to a model."""
    place.write_text(f"MemAvailable: {(room + PROCESS + memory.RESERVE_BYTES) >> 10} kB\n")
    monkeypatch.setattr(memory, "MEMINFO", place)


@pytest.mark.parametrize(("fits", "q8"), [(1024, False), (1024, True), (4096, False)])
def test_chat_run_and_programs_take_the_context_that_fits(
    device: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fits: int, q8: bool
) -> None:
    with Gguf.open(path) as file:
        leave(Footprint.of(file, q8=q8).at(fits + 200), tmp_path / "meminfo", monkeypatch)
    with LLM(path, cache="q8_0" if q8 else "f16") as llm:
        assert llm.context == fits
        assert llm.generate("God", max_tokens=2).text is not None
    file, held, *_ = run._opened_file(path, None, q8, lambda file: ("God", False), None)
    file.close()
    assert held == fits
    if not q8 and fits == 1024:
        with pytest.raises(ContextError, match="exceed the context of 1024, for which memory is free: ask for"):
            run._opened_file(path, None, q8, lambda file: ("God " * 1000, False), None)


def test_who_asks_for_a_context_has_it_or_is_told(
    device: str, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Gguf.open(path) as file:
        leave(Footprint.of(file).at(1024), tmp_path / "meminfo", monkeypatch)
    with LLM(path, 2048) as llm:
        assert llm.context == 2048
    leave(-PROCESS, tmp_path / "meminfo", monkeypatch)
    with pytest.raises(OutOfMemory):
        LLM(path)


def test_a_gpu_with_memory_of_its_own_is_not_asked(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(0, tmp_path / "meminfo", monkeypatch)
    monkeypatch.setattr(footprint, "gpu_has_memory", lambda: True)
    with Gguf.open(path) as file:
        assert footprint.positions(file, Footprint.of(file).config, None) == 4096
