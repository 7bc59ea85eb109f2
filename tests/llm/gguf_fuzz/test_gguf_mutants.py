"""Damaged and hostile GGUF files end in one sentence or run: a slice of the seeded run (gguf_run.py)."""

from pathlib import Path

import gguf_run
import pytest
from gguf_mutants import KINDS, SERVED, SOUND, Mutant, mutant, parts, sound

from tegrad.llm.formats import F32
from tegrad.llm.gguf import Gguf

FIRST, COUNT, FEW = 1, 150, 20
SIGNALLING = b"\x01\x00\x80\x7f"
"""A number that is none, of which every use is an invalid operation."""


def test_the_sound_files_run_through_every_stage(tmp_path: Path) -> None:
    """Else their mutants would show little."""
    worker = gguf_run.Worker(tmp_path)
    for name in SOUND:
        data = sound(name)
        assert parts(data).bytes() == data
        answer = worker.tried(Mutant(name, data, len(data)))
        assert (answer["outcome"], answer["said"]) == ("ran", "")
    worker.close()


def test_weights_that_are_no_numbers_bring_no_warning(tmp_path: Path) -> None:
    """Of every family, in all of its vectors: numpy warns where such a number is multiplied."""
    worker, path = gguf_run.Worker(tmp_path), tmp_path / "sound.gguf"
    for name in SOUND:
        data = bytearray(sound(name))
        path.write_bytes(data)
        with Gguf.open(path) as file:
            for info in file.tensors.values():
                if info.type is F32 and info.rows == 1:
                    data[info.offset : info.offset + info.nbytes] = SIGNALLING * (info.nbytes // 4)
        answer = worker.tried(Mutant(name, bytes(data), len(data)))
        assert answer["outcome"] in ("ran", "refused"), f"{name}: {answer['said']}"
    worker.close()


def test_mutants_are_refused_in_a_sentence_or_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the machine may be busy with other work; the figure's run, which has it alone, keeps to ten seconds."""
    monkeypatch.setattr(gguf_run, "SECONDS", 120.0)
    summary, found = gguf_run.tried(range(FIRST, FIRST + COUNT))
    assert found == []
    assert summary["ran"] > COUNT // 20
    assert summary["refused"] > COUNT // 2


def test_mutants_are_refused_or_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The sound files are served."""
    monkeypatch.setattr(gguf_run, "SERVED_S", 120.0)
    worker = gguf_run.Worker(tmp_path, serve=True)
    for name in SERVED:
        answer = worker.tried(Mutant(name, sound(name), len(sound(name))))
        assert (answer["outcome"], answer["said"]) == ("ran", "")
    worker.close()
    summary, found = gguf_run.tried(range(FIRST, FIRST + FEW), serve=True)
    assert found == []
    assert summary["ran"] > FEW // 5 < summary["refused"]


def test_a_seed_is_a_mutant_and_each_kind_and_file_has_its_turn() -> None:
    names = [mutant(seed).name for seed in range(FIRST, FIRST + COUNT)]
    assert names == [mutant(seed).name for seed in range(FIRST, FIRST + COUNT)]
    for part in (*KINDS, *SOUND):
        assert any(part in name for name in names)


WRONG = {
    "raise RuntimeError('odd')": "RuntimeError: odd",
    "bytes(2 << 30)": "MemoryError",
    "raise GgufError('a' * 1000)": "an error of 1000 characters",
    "raise GgufError('a' + chr(10) + 'b')": "an error that is no line",
    "print('warning', file=sys.stderr)": "on stderr: warning",
    "warnings.warn('odd', RuntimeWarning)": "RuntimeWarning: odd",
    "os._exit(7)": "the process ended with code 7",
    "time.sleep(60)": "took over 2 s",
}


def test_what_must_not_be_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker does what a file says."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        f"import os, sys, time, warnings\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nimport gguf_worker\n"
        "from tegrad.llm.errors import GgufError\n"
        "gguf_worker.opened = lambda path: exec(path.read_text())\ngguf_worker.main(gguf_worker.opened)\n"
    )
    monkeypatch.setattr(gguf_run, "WORKER", worker)
    monkeypatch.setattr(gguf_run, "SECONDS", 2.0)
    made = gguf_run.Worker(tmp_path)
    for code, said in WRONG.items():
        assert made.tried(Mutant("nothing", b"", 0))["outcome"] == "ran"  # also starts the worker
        answer = made.tried(Mutant(code, code.encode(), len(code)))
        assert answer["outcome"] == "found"
        assert said in answer["said"]
    made.close()
