"""The peer's programs: run with the flags that stand beside its figure, the best settings kept, faults named.

And its library on a GPU, as far as that can be asked without one.
"""

import ctypes
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from tegrad.bench import peers
from tegrad.bench.record import RecordError

FAKE = """#!/bin/sh
echo "$@" >> {log}
case "$*" in
  *"-fa 1"*) echo '[{{"samples_ts": [700, 710, 705]}}]';;
  *"-fa 0"*) echo '[{{"samples_ts": [600, 900, 610]}}]';;
  *jsonl*) echo 'noise'; echo '{{"pl": 8, "speed_tg": 1234.5}}';;
esac
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand-ins for llama.cpp's programs that log their arguments; the log."""
    log = tmp_path / "log"
    for name in ("llama-bench", "llama-batched-bench", "llama-completion"):
        path = tmp_path / name
        path.write_text(FAKE.format(log=log))
        path.chmod(0o755)
    monkeypatch.setenv(peers.LLAMA_FOLDER, str(tmp_path))
    return log


def test_the_faster_setting_is_kept_with_its_flags(programs: Path) -> None:
    side = peers.decode(Path("/models/some.gguf"), depth=4096)
    assert side.samples == [700, 710, 705]
    assert side.command == "llama-bench -m some.gguf -ngl 99 -p 0 -n 128 -d 4096 -fa 1 -r 5 -o json"
    assert len(programs.read_text().splitlines()) == 2


def test_sequences_together_are_measured_by_the_batched_benchmark(programs: Path) -> None:
    side = peers.batch(Path("some.gguf"), 8)
    assert side.samples == [1234.5] * 3
    assert "-npl 8" in side.command


def test_a_prompt_is_tried_at_two_batches(programs: Path) -> None:
    side = peers.prefill(Path("some.gguf"), 512)
    assert side.samples == [700, 710, 705]
    assert [line.split(" -b ")[1].split()[0] for line in programs.read_text().splitlines()] == ["512", "2048"]


def test_a_prompt_is_tried_by_cublas_too_where_that_build_is_there(programs: Path) -> None:
    (programs.parent / "llama-bench").write_text(
        f"""#!/bin/sh
case "$LD_LIBRARY_PATH" in
  {programs.parent}/{peers.CUBLAS}:{programs.parent}:*) echo '[{{"samples_ts": [900]}}]';;
  {programs.parent}:*) echo '[{{"samples_ts": [700]}}]';;
esac
"""
    )
    assert peers.prefill(Path("some.gguf"), 512).samples == [700]
    (programs.parent / peers.CUBLAS).mkdir()
    side = peers.prefill(Path("some.gguf"), 512)
    assert side.samples == [900]
    assert side.command.startswith("LD_LIBRARY_PATH=force-cublas llama-bench -m some.gguf")


def test_the_first_token_is_timed_as_a_process(programs: Path) -> None:
    side = peers.first_token(Path("some.gguf"), "hello")
    assert len(side.samples) == peers.REPETITIONS
    assert all(seconds > 0 for seconds in side.samples)


def test_a_program_that_takes_too_long_is_named(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "LLAMA_TIMEOUT_S", 0.2)
    (programs.parent / "llama-bench").write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(RecordError, match=r"llama-bench .*-d 4096 .* did not end within 0.2 s"):
        peers.decode(Path("some.gguf"), depth=4096)


def test_a_program_that_fails_is_named_with_its_last_words(programs: Path) -> None:
    (programs.parent / "llama-bench").write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    with pytest.raises(RecordError, match=r"llama-bench .* ended with 3: no such model"):
        peers.decode(Path("some.gguf"))


@pytest.mark.parametrize("printed", ["", "[]", "{}", json.dumps([{"samples_ts": None}])])
def test_output_without_a_result_is_an_error(printed: str) -> None:
    with pytest.raises(RecordError, match="printed no result"):
        peers.tests(printed)


def test_without_the_programs_the_error_says_where_they_belong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(peers.LLAMA_FOLDER, raising=False)
    with pytest.raises(RecordError, match=peers.LLAMA_FOLDER):
        peers.program("llama-bench")
    monkeypatch.setenv(peers.LLAMA_FOLDER, os.fspath(tmp_path))
    with pytest.raises(RecordError, match=r"llama-bench is missing"):
        peers.program("llama-bench")


class Library:
    """llama.cpp's library by name, as llama-cpp-python has it: one model of three words, no GPU."""

    def __init__(self, offload: bool, answer: int = 0) -> None:
        self.offload, self.answer, self.freed = offload, answer, list[str]()
        self.llama_log_callback = self.llama_log_set = self.llama_backend_init = lambda *given: given
        self.llama_model_load_from_file = self.llama_init_from_model = lambda *given: "there"
        self.llama_model_get_vocab = lambda model: "vocabulary"
        self.llama_vocab_n_tokens = lambda vocabulary: 3
        self.llama_model_default_params = self.llama_context_default_params = SimpleNamespace

    def llama_supports_gpu_offload(self) -> bool:
        return self.offload

    def llama_batch_init(self, size: int, *_: int) -> SimpleNamespace:
        lists = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        self.batch = SimpleNamespace(**lists, seq_id=[[0] for _ in range(size)])
        return self.batch

    def llama_decode(self, context: object, batch: object) -> int:
        return self.answer

    def llama_get_logits(self, context: object) -> object:
        self.shared_at = np.arange(6, dtype=np.float32)
        return self.shared_at.ctypes.data_as(ctypes.POINTER(ctypes.c_float))

    def __getattr__(self, name: str) -> object:
        assert name.endswith("_free") or name == "llama_free", name
        return lambda what: self.freed.append(name)


def test_a_gpus_llama_cpp_gives_logits_of_every_token_and_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library(offload=True)
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_cpp=library))
    with peers.GpuLlama(Path("file"), 8, peers.F16, peers.Q8_0, at_once=1) as opened:
        assert opened.logits([5, 7]).tolist() == [[0, 1, 2], [3, 4, 5]]
        assert (library.batch.token, library.batch.pos, library.batch.logits) == ([5, 7], [0, 1], [True, True])
        library.answer = 1
        with pytest.raises(RecordError, match="llama_decode returned 1"):
            opened.logits([5])
    assert library.freed == ["llama_batch_free", "llama_free"] * 2 + ["llama_model_free"]
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(llama_cpp=Library(offload=False)))
    with pytest.raises(RecordError, match="built without CUDA"):
        peers.GpuLlama(Path("file"), 8, peers.F16, peers.F16, at_once=1)


def test_what_has_no_llama_cpp_says_so_when_a_model_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("llama_cpp", "cyllama.llama"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError):
        peers.GpuLlama(Path("file"), 8, peers.F16, peers.F16, at_once=1)
    with pytest.raises(ImportError):
        peers.CpuLlama(Path("file"))
