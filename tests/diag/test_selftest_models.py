"""The self-test's last stages: a step in one launch beside a second process, and a model of the user's."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tegrad import cli
from tegrad.diag.selftest import beside, llama_bench, your_model
from tegrad.diag.selftest.child import perform
from tegrad.diag.selftest.llama_bench import PeerError
from tegrad.diag.selftest.stage import Asked, Notes, Surprise
from tegrad.diag.selftest.stages import STAGES
from tegrad.diag.selftest.your_model import KNOWN, MANY, ONE, Known, Way, judge, known

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, write

ROWS = {stage.name: stage for stage in STAGES}


def notes() -> tuple[Notes, list[Mapping[str, Any]]]:
    pieces: list[Mapping[str, Any]] = []
    return Notes(pieces.append), pieces


# ---- beside: the second process


def test_a_second_process_does_rounds_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tegrad.nv.exercise.Traffic", Idle)
    with beside.Neighbour() as other:
        assert other.rounds == 0
        other.begin()
        other.check()
        until = time.monotonic() + 60
        while other.rounds < 5 and time.monotonic() < until:
            time.sleep(0.01)
        rounds = other.end()
    assert rounds >= 5


class Idle:
    """Rounds that do nothing, in the process that is forked."""

    def round(self, number: int) -> None:
        time.sleep(0.001)

    def close(self) -> None:
        pass


STRUCK = mmap.mmap(-1, mmap.PAGESIZE)
"""Shared with the process that is forked: whether its third round has begun."""


def third(number: int) -> bool:
    STRUCK[0] = number == 2
    return number == 2


class Wrong(Idle):
    def round(self, number: int) -> None:
        if third(number):
            raise ValueError("byte 7 is wrong")


class Dead(Idle):
    def round(self, number: int) -> None:
        if third(number):
            os.kill(os.getpid(), signal.SIGKILL)


class Deaf(Idle):
    def round(self, number: int) -> None:
        if third(number):
            time.sleep(60)


@pytest.mark.parametrize(
    ("kind", "seen"),
    [(Wrong, "after 2 rounds, in the second process: ValueError: byte 7 is wrong"), (Dead, "death, after 2 rounds"),
     (Deaf, "nothing, after 2 rounds")],
)  # fmt: skip
def test_what_goes_wrong_in_the_second_process_is_told(kind: type, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tegrad.nv.exercise.Traffic", kind)
    STRUCK[0] = 0
    with beside.Neighbour() as other:
        other.begin()
        until = time.monotonic() + 60
        while not STRUCK[0]:
            assert time.monotonic() < until
            time.sleep(0.001)
        if kind is Deaf:
            monkeypatch.setattr(beside, "ROUND_TIMEOUT_S", 0.5)
        with pytest.raises(Surprise, match=seen):
            other.end()
        pid = other._process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(("second", "seen"), [([5, 6, 9, 8], "9"), ([5, 6], "the end")])
def test_a_text_that_changes_beside_the_other_is_a_surprise(second: list[int], seen: str) -> None:
    texts = iter([[5, 6, 7, 8], second])
    told, pieces = notes()
    with pytest.raises(Surprise) as found:
        beside._repeated(told, lambda: iter(next(texts)), [5, 6, 7], 60, "beside")
    assert (found.value.expected, found.value.seen) == (
        "token 7 at 2, as before, beside",
        f"{seen}, of text 1",
    )
    assert pieces == [{"fact": "texts beside", "value": 1}]


# ---- a model of yours: what is known of it

HEADER = {
    "general.architecture": "llama",
    "llama.block_count": 16,
    "llama.embedding_length": 2048,
    "general.file_type": 18,
    "general.name": "Llama 3.2 1B",
}


def test_the_known_model_is_told_by_its_header() -> None:
    row = known(HEADER, 128256)
    assert row is KNOWN[0]
    assert (row.prompt, row.tokens) == ((128000, 9906), (11, 358, 2846, 3411))


@pytest.mark.parametrize(
    ("changes", "vocab"),
    [
        ({"general.architecture": "qwen2"}, 128256),
        ({"llama.block_count": 28}, 128256),
        ({"llama.embedding_length": 3072}, 128256),
        ({"general.file_type": 15}, 128256),
        ({}, 128000),
    ],
)
def test_another_model_is_not_taken_for_it(changes: Mapping[str, Any], vocab: int) -> None:
    assert known({**HEADER, **changes}, vocab) is None


ROW = Known("it", {}, 300, (1, 2), (3, 4))
LOGITS = [np.linspace(-1, 1, 10, dtype=np.float32)[np.random.default_rng(at).permutation(10)] for at in range(3)]
TEXT = [int(row.argmax()) for row in LOGITS]


def far(at: int) -> list[Any]:
    return [row + 0.1 * (row > 0) if index == at else row for index, row in enumerate(LOGITS)]


KNOWN_AND_NOT = Way([3, 5, 0], LOGITS, 1.0), Way([3, 4, 0], LOGITS, 1.0)
MEANT = Way(TEXT, LOGITS, 1.0)
UNLIKELY = Way([TEXT[0], int(LOGITS[1].argmin()), 0], LOGITS, 1.0)


@pytest.mark.parametrize(
    ("row", "one", "many", "expected", "next_step"),
    [
        (ROW, *KNOWN_AND_NOT, "(3, 4) of it after (1, 2) in one launch", "Tiny"),
        (ROW, *KNOWN_AND_NOT[::-1], "(3, 4) of it after (1, 2) in many launches", "Tiny"),
        (None, Way(TEXT, far(1), 1.0), MEANT, "logits within", ""),
        (None, UNLIKELY, MEANT, f"token {TEXT[1]} at 1", ""),
    ],
)
def test_tokens_that_are_not_known_or_not_the_same_are_a_surprise(
    row: Known | None, one: Way, many: Way, expected: str, next_step: str
) -> None:
    with pytest.raises(Surprise) as found:
        judge(notes()[0], row, {ONE: one, MANY: many}, "Tiny")
    assert expected in found.value.expected
    assert next_step in found.value.next_step


def test_ways_may_be_as_far_apart_as_each_may_be_off() -> None:
    deviation = float(LOGITS[1].std())
    apart = [row + 0.05 * deviation * (at == 1) for at, row in enumerate(LOGITS)]
    told, pieces = notes()
    judge(told, None, {ONE: Way(TEXT, apart, 1.0), MANY: MEANT}, "Tiny")
    assert pieces[0]["value"] == pytest.approx(0.05, abs=1e-4)


def test_ways_may_part_where_tokens_are_as_likely() -> None:
    close = [row.copy() for row in LOGITS]
    other = int(close[1].argmin())
    close[1][other] = close[1].max() - 1e-3
    text = [TEXT[0], other, 0]  # after it the texts are not the same
    judge(notes()[0], None, {ONE: Way(text, close, 1.0), MANY: Way(TEXT, close, 1.0)}, "Tiny")


# ---- llama-bench


def row_of(n_prompt: int = 0, n_gen: int = 0, *speeds: float) -> dict[str, Any]:
    """An object as llama-bench prints it, of the fields that are of use and some that are not."""
    return {
        "build_commit": "8cf427ff", "build_number": 5163, "gpu_info": "Orin", "backends": "CUDA", "n_gpu_layers": 99,
        "flash_attn": True, "n_prompt": n_prompt, "n_gen": n_gen, "n_depth": 0, "avg_ts": 1.0, "samples_ts": [*speeds],
    }  # fmt: skip


def program(folder: Path, printed: str, code: int = 0) -> Path:
    """A llama-bench that notes how it was called and prints this."""
    made, out = folder / "llama-bench", folder / "printed"
    out.write_text(printed)
    made.write_text(f'#!/bin/sh\necho "$@" > {folder}/called\ncat {out}\necho no CUDA device >&2\nexit {code}\n')
    made.chmod(0o755)
    return made


def test_llama_bench_is_run_at_its_best_and_its_medians_are_read(tmp_path: Path) -> None:
    printed = json.dumps([row_of(512, 0, 90.0, 110.0, 100.0), row_of(0, 128, 9.0, 11.0, 30.0)])
    found = llama_bench.measure(str(program(tmp_path, printed)), Path("a b.gguf"), 512, 128)
    assert (found.prefill, found.decode, found.backend, found.build) == (100.0, 11.0, "CUDA", "8cf427ff (5163)")
    assert found.flags == "-ngl 99 -fa 1 -p 512 -n 128 -r 5"
    assert (tmp_path / "called").read_text() == f"-m a b.gguf {found.flags} -o json\n"


@pytest.mark.parametrize(
    ("printed", "code", "said"),
    [
        ("[]", 1, "ended with 1: no CUDA device"),
        ("error: out of memory", 0, "printed no result"),
        ("[]", 0, "printed no result"),
        (json.dumps([row_of(512, 0, 1.0)]), 0, "printed no result"),
        (json.dumps([row_of(512, 0), row_of(0, 128, 1.0)]), 0, "printed no result"),
        ('{"n_gen": 128}', 0, "printed no result"),
    ],
)
def test_a_llama_bench_that_gives_no_figure_says_why(printed: str, code: int, said: str, tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=said):
        llama_bench.measure(str(program(tmp_path, printed, code)), Path("a.gguf"), 512, 128)


def test_llama_bench_is_found_or_said_how_to_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PeerError, match="--llama-bench PATH"):
        llama_bench.find("")
    made = str(program(tmp_path, ""))
    assert llama_bench.find("") == made
    assert llama_bench.find("other") == "other"
    with pytest.raises(PeerError, match="does not start"):
        llama_bench.measure(str(tmp_path / "gone"), Path("a.gguf"), 1, 1)


def test_a_llama_bench_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_bench, "TIMEOUT_S", 0.3)
    made = tmp_path / "llama-bench"
    made.write_text("#!/bin/sh\nexec sleep 600.75\n")
    made.chmod(0o755)
    with pytest.raises(PeerError, match="did not end"):
        llama_bench.measure(str(made), Path("a.gguf"), 1, 1)


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--stage", "your-model"), "--model"), (("--model", "none.gguf"), "none.gguf"),
     (("--llama-bench", "none"), "none")],
)  # fmt: skip
def test_a_model_that_is_not_given_or_not_there_is_exit_code_2(
    arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli.build(["selftest"]), ["selftest", *arguments])
    assert done.exit_code == 2
    assert said in done.output
    assert list(tmp_path.iterdir()) == []


# ---- on a board


@pytest.fixture
def a_board(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in (("TEGRAD_BOARD", "agx-orin-64gb:19GiB"), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)
    close()
    yield
    close()


def close() -> None:
    """Close the NV device if one is open."""
    with suppress(ImportError):
        from tegrad.nv import device

        if (opened := device._opened.get("NV")) is not None:
            opened.close()


def sure(path: Path) -> tuple[tuple[int, ...], list[int]]:
    """A prompt, and two tokens after it that the reference is sure of."""
    from tegrad.llm.reference import Reference

    reference = Reference(path)
    for first in range(100):
        prompt, tokens = (first, 17, 130), []
        while len(tokens) < 2:
            logits = reference.logits([*prompt, *tokens])[-1]
            second, best = np.partition(logits, -2)[-2:]
            if best - second < 0.5 * logits.std():
                break
            tokens.append(int(logits.argmax()))
        else:
            return prompt, tokens
    raise AssertionError("no prompt of this model's has sure tokens")


@pytest.mark.board
def test_a_model_runs_both_ways_with_its_known_tokens_beside_llama_bench(
    a_board: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tegrad.nv import device

    path = write(tmp_path / "tiny.gguf", replace(Shape(), extra={"general.file_type": 18}), TYPE.Q6_K)
    prompt, tokens = sure(path)
    row = Known("a tiny model", {"general.file_type": 18, "llama.block_count": 2}, 300, prompt, tuple(tokens))
    monkeypatch.setattr(your_model, "KNOWN", (row,))
    monkeypatch.setattr(your_model, "REPETITIONS", 1)
    peer = program(tmp_path, json.dumps([row_of(8, 0, 100.0), row_of(0, 2, 7.0)]))
    open_beside: list[bool] = []
    real = llama_bench.measure

    def measure(*given: Any, **more: Any) -> Any:
        open_beside.append("NV" in device._opened)
        return real(*given, **more)

    monkeypatch.setattr(llama_bench, "measure", measure)
    pieces: list[Mapping[str, Any]] = []
    perform(ROWS["your-model"], pieces.append, Asked(str(path), str(peer)))
    facts = {piece["fact"]: piece["value"] for piece in pieces if "fact" in piece}
    lines = [piece["line"] for piece in pieces if "line" in piece]
    assert pieces[-1] == {"outcome": "right"}
    assert facts["known as"] == "a tiny model"
    assert facts["one launch: tokens"][:2] == facts["many launches: tokens"][:2] == tokens
    assert facts["llama-bench"]["flags"] == "-ngl 99 -fa 1 -p 8 -n 2 -r 5"
    assert all("-ngl 99 -fa 1" in line and "CUDA" in line for line in lines)
    assert open_beside == [False]
    assert [line.split(":")[0] for line in lines] == ["decode", "prefill of 8"]


BESIDE = """
import json, sys
from tegrad import models
from tegrad.diag.selftest.child import perform
from tegrad.diag.selftest.stages import STAGES
models.SMALL = sys.argv[1]
perform(next(stage for stage in STAGES if stage.name == "beside"), lambda piece: print(json.dumps(piece), flush=True))
"""
"""The stage with a model of ours, in a process that has opened nothing yet."""


@pytest.mark.board
def test_a_step_in_one_launch_runs_beside_a_second_process(a_board: None, tmp_path: Path) -> None:
    path = write(tmp_path / "tiny.gguf", Shape(context=256), TYPE.Q6_K)
    with (tmp_path / "told").open("w") as out:  # a file, not a pipe: a board lingers after its last client
        subprocess.run([sys.executable, "-c", BESIDE, str(path)], stdout=out, check=True, timeout=100)
    pieces = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    facts = {piece["fact"]: piece["value"] for piece in pieces if "fact" in piece}
    assert pieces[-1] == {"outcome": "right"}
    assert facts["texts beside"] >= 1
    assert 0 < facts["rounds of the second process meanwhile"] < facts["rounds of the second process"]
    assert facts["tok/s beside"] > 0
