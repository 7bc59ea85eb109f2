"""`tegrad run` as its user meets it: text and figures, one sentence and exit code 2 for bad input, a clean Ctrl-C."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, letters, rewritten, write

from tegrad import cli, models
from tegrad.cli import run as command
from tegrad.llm import start
from tegrad.llm.errors import ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.template import Template
from tegrad.llm.tokenizer import Tokenizer
from tegrad.nv.toolchain import CompilerMissing

MARK = "TEGRAD_TEST_MARK"
"""A variable by which a test finds the processes that it caused."""
TIMEOUT = 240


def environment(**values: str) -> dict[str, str]:
    """This process's environment, without a choice of device unless given."""
    plain = {key: value for key, value in os.environ.items() if key not in ("DEV", "TEGRAD_BOARD")}
    return {**plain, "PYTHONUNBUFFERED": "1", **values}


def tegrad(*words: str, **values: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tegrad", "run", *words],
        env=environment(**values), capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip


def marked(mark: str) -> list[str]:
    """Command lines of the processes that carry a mark."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def until(condition: Iterator[bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if next(condition):
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="module")
def unsound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that cannot be run: cut off, with fewer tokens than the model may choose, with a window of -5."""
    folder, shape = tmp_path_factory.mktemp("unsound"), Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1)
    cut = folder / "cut.gguf"
    cut.write_bytes(models.SMALL.read_bytes()[:-1000])
    few = write(folder / "few.gguf", replace(shape, vocab=600), TYPE.Q8_0, vocabulary=letters(300))
    whole = write(folder / "whole.gguf", shape, TYPE.Q8_0)
    window = rewritten(whole, folder / "window.gguf", **{"llama.attention.sliding_window": -5})
    return {"cut": cut, "few": few, "window": window, "untold": whole}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nowhere/model.gguf", "hi"], "cannot open the model"),
        ([str(Path(__file__).parent), "hi"], "directory"),
        ([__file__, "hi"], "not a GGUF file"),
        (["{cut}", "hi"], "truncated"),
        (["{few}", "hi", "-n", "40", "--temperature", "2"], "300 tokens for 600 rows of token_embd"),
        (["{window}", "hi"], "sliding_window = -5"),
        (["model.gguf"], "a prompt is missing"),
        (["a", "b", "c"], "put the prompt in quotes"),
        (["word " * 5000], "exceed the context"),
        (["hi", "--context", "100000"], "ask for less"),
        (["hi", "--temperature", "-1"], "cannot sample"),
        (["--file", "/nowhere.txt"], "cannot read /nowhere.txt: No such file or directory; give a file"),
        (["{untold}", "hi", "--system", "Be brief."], "has no chat template: leave out --system"),
        (["hi", "--raw", "--system", "Be brief."], "--raw has no chat template: leave out --system"),
        (["hi", "--schema", "{{}}", "--grammar", "a.lark"], "leave out one of them"),
        (["hi", "--schema", "/nowhere.json"], "cannot read /nowhere.json"),
        (["hi", "--schema", '{{"type": 3}}'], "type"),
        *(
            pytest.param(["hi", option, value], "cannot sample", marks=pytest.mark.long)
            for option, value in (("--top-p", "0"), ("--min-p", "2"), ("--repeat-penalty", "0"))
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(
    unsound: dict[str, Path], words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(sys, "argv", ["tegrad", "run", *(word.format(**unsound) for word in words)])
    monkeypatch.setattr(os, "environ", environment(DEV="CPU"))
    monkeypatch.setattr(gc, "freeze", lambda: None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    captured = capsys.readouterr()
    assert (ended.value.code, captured.out) == (2, "")
    assert said in captured.err
    assert captured.err.startswith("tegrad: ")
    assert captured.err.count("\n") == 1


@pytest.mark.board
def test_bad_input_ends_the_program_soon() -> None:
    begun = time.monotonic()
    result = tegrad("hi", "--context", "100000")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines() == [f"tegrad: {result.stderr.removeprefix('tegrad: ').strip()}"]
    assert "ask for less" in result.stderr
    assert time.monotonic() - begun < 30


def test_a_device_that_does_not_open_is_one_sentence() -> None:
    result = tegrad("hi", DEV="NOSUCH")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("tegrad: there is no device NOSUCH: choose (DEV=) one of ")
    assert result.stderr.count("\n") == 1


@pytest.mark.board
def test_a_gpu_that_a_jetson_has_not_is_one_sentence() -> None:
    result = tegrad("hi", DEV=":1+NV")
    assert (result.returncode, result.stdout) == (1, "")
    said = result.stderr.splitlines()[-1]
    assert said == "tegrad: GPU 1 does not exist: a Jetson has one, whose number is 0"


@pytest.mark.board
def test_a_prompt_may_come_from_a_file_alone_or_after_words(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("God created")
    whole = json.loads(tegrad("In the beginning\n\nGod created", "-n", "4", "--json", "--seed", "1").stdout)
    words = ["--file", str(tmp_path / "a.txt"), "-n", "4", "--json", "--seed", "1"]
    parts = json.loads(tegrad(str(models.SMALL), "In the beginning", "--no-template", "--gpu", "0", *words).stdout)
    assert (parts["text"], parts["prompt_tokens"]) == (whole["text"], whole["prompt_tokens"])
    alone = json.loads(tegrad(str(models.SMALL), "--raw", *words).stdout)
    with Gguf.open(models.SMALL) as file:
        assert alone["prompt_tokens"] == len(Tokenizer(file).encode("God created"))


@pytest.mark.board
def test_a_system_prompt_goes_into_the_template() -> None:
    said = json.loads(tegrad("Who?", "--system", "Be brief.", "-n", "1", "--json").stdout)
    with Gguf.open(models.SMALL) as file:
        template = Template.of(file)
        assert template is not None
        text = template.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who?"}])
        template.close()
        assert said["prompt_tokens"] == len(Tokenizer(file).encode(text, bos=False))


SCHEMA = (
    '{"type": "object", "properties": {"name": {"enum": ["Ada"]}}, "required": ["name"], "additionalProperties": false}'
)
GRAMMAR = 'start: "yes" | "no"'


@pytest.mark.board
def test_an_answer_keeps_to_a_schema_or_a_grammar(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(SCHEMA)
    (tmp_path / "g.lark").write_text(GRAMMAR)
    for given in (SCHEMA, str(tmp_path / "s.json")):
        assert json.loads(json.loads(tegrad("Who?", "--schema", given, "--json").stdout)["text"]) == {"name": "Ada"}
    said = json.loads(tegrad("Is it?", "--grammar", str(tmp_path / "g.lark"), "--json", "--temperature", "2").stdout)
    assert (said["text"] in ("yes", "no"), said["ended"]) == (True, "stop")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ":1+NV"), ("NV", ":1+NV"), ("NV:PTX", ":1+NV:PTX"), ("NVK+NV", "NVK:1+NV"), (":0+NV", ":1+NV"),
        ("NVK:0+NV:PTX;CPU", "NVK:1+NV:PTX;CPU"),
    ],
)  # fmt: skip
def test_a_gpus_number_goes_into_the_devices_name(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    for name in ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("DEV", before)
    start.choose_gpu(1)
    assert os.environ["DEV"] == after
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"


@pytest.mark.board
def test_bytes_that_are_no_text_are_a_prompt_all_the_same() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tegrad", "run", "-", "-n", "2"],
        env=environment(), input=b"\xff\xfe hi", capture_output=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert b"2 tokens" in result.stdout


@pytest.mark.parametrize("board", [None, ""])
def test_without_a_gpu_an_emulated_board_is_taken_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], board: str | None
) -> None:
    for name in ("DEV", "TEGRAD_BOARD", "PARALLEL"):
        monkeypatch.setenv(name, "")  # so that what is set below is taken back
        monkeypatch.delenv(name)
    if board is not None:
        monkeypatch.setenv("TEGRAD_BOARD", board)
    monkeypatch.setattr(start, "GPU_FILES", ())
    start.choose_device()
    assert (os.environ["DEV"], os.environ["TEGRAD_BOARD"]) == ("NV", start.EMULATED)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert start.EMULATED in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("variables", "workers"), [({}, "0"), ({"PARALLEL": "3"}, "3"), ({"BEAM": "2"}, None), ({"BEAM": ""}, "0")]
)
def test_kernels_are_compiled_in_this_process_unless_asked_otherwise(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], workers: str | None
) -> None:
    for name in ("DEV", "TEGRAD_BOARD", "PARALLEL", "BEAM"):
        monkeypatch.setenv(name, variables.get(name, ""))
        if name not in variables:
            monkeypatch.delenv(name)
    start.choose_device()
    assert os.environ.get("PARALLEL") == workers


@pytest.mark.parametrize("variables", [{"DEV": "CPU"}, {"TEGRAD_BOARD": "orin-nano-8gb"}, {}])
def test_a_choice_or_a_gpu_is_respected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables: dict[str, str], tmp_path: Path
) -> None:
    for name in ("DEV", "TEGRAD_BOARD", "PARALLEL"):
        monkeypatch.setenv(name, variables.get(name, ""))
        if name not in variables:
            monkeypatch.delenv(name)
    monkeypatch.setattr(start, "GPU_FILES", () if variables else (str(tmp_path),))
    start.choose_device()
    assert os.environ.get("TEGRAD_BOARD") == variables.get("TEGRAD_BOARD")
    assert os.environ["DEV"] == variables.get("DEV", "NV")
    assert capsys.readouterr().err == ""


COUNTED = """
from tegrad.llm.tokenizer import Tokenizer
encode, asked = Tokenizer.encode, []
Tokenizer.encode = lambda self, text, **more: asked.append(text) or encode(self, text, **more)
import sys
from tegrad import cli
words = ["run", "In the beginning God created the heaven and the earth. " * 10, "-n", "1"]
cli.build(words)(words, standalone_mode=False)
assert len(asked) == 1, len(asked)
"""


@pytest.mark.board
def test_a_prompt_whose_tokens_had_to_be_counted_is_encoded_once() -> None:
    """It has more bytes than the context positions; megabytes take long."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], env=environment(), capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_closed_standard_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert command._stream(iter(["a", "b"]), show=True) == "ab"  # type: ignore[arg-type]


@pytest.mark.board
def test_the_shipped_model_streams_text_and_one_line_of_figures() -> None:
    result = tegrad("In the beginning", "-n", "8", "--temperature", "0")
    assert result.returncode == 0, result.stderr
    text, figures = result.stdout.rstrip("\n").rsplit("\n\n", 1)
    assert text.strip()
    assert figures.startswith("[NV ")
    assert "8 tokens, first after " in figures
    assert figures.endswith(" tok/s]")
    assert result.stderr.count("\n") <= 1


@pytest.mark.board
def test_json_tells_text_and_figures_and_a_seed_repeats_them() -> None:
    first, second = (json.loads(tegrad("And he said", "-n", "6", "--seed", "7", "--json").stdout) for _ in range(2))
    assert first["text"] == second["text"] != ""
    assert first["tokens"] == 6
    assert (first["steps"], first["plan"]) == ("kernels", "many launches")
    assert first["ended"] == "limit"
    assert first["model"] == models.SMALL.name
    assert first["seed"] == 7
    assert first["first_token_s"] > 0
    assert first["tok_s"] > 0


@pytest.mark.parametrize(
    ("suits", "refused"),
    [
        (True, None),
        (True, UnsupportedModelError("heads of 80 are not run")),
        (True, CompilerMissing("NVRTC is not here")),
        (False, None),
    ],
)
def test_what_our_kernels_refuse_runs_on_tinygrads_and_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], suits: bool, refused: Exception | None
) -> None:
    from tegrad.llm import engine, model, session

    def ours(*given: object, **more: object) -> str:
        if refused:
            raise refused
        return "ours"

    monkeypatch.setattr(engine, "suits_named", lambda device: suits)
    monkeypatch.setattr(engine, "Engine", ours)
    monkeypatch.setattr(model, "Model", lambda *given, **more: None)
    monkeypatch.setattr(session, "Session", lambda *given: "tinygrad's")
    file = type("File", (), {"path": Path("model.gguf")})()
    expected = ("ours", "kernels") if suits and not refused else ("tinygrad's", "operations")
    assert start.speaker(file, 64) == expected  # type: ignore[arg-type]
    said = capsys.readouterr().err
    assert said == (f"tegrad: {refused}; tinygrad's own kernels run it instead\n" if refused else "")


@pytest.mark.board
def test_the_shipped_model_runs_with_a_q8_0_cache() -> None:
    result = tegrad("And he said", "-n", "2", "--cache", "q8_0", "--json")
    assert result.returncode == 0, result.stderr
    assert (json.loads(result.stdout)["steps"], json.loads(result.stdout)["tokens"]) == ("kernels", 2)


@pytest.mark.parametrize(
    ("suits", "said"),
    [
        (True, "heads of 80 are not run; tinygrad's own kernels have no q8_0 cache: choose f16"),
        (False, "only our own kernels have a q8_0 cache, and they do not run this device: choose f16"),
    ],
)
def test_a_q8_0_cache_is_the_kernels_and_refused_where_they_do_not_run(
    monkeypatch: pytest.MonkeyPatch, suits: bool, said: str
) -> None:
    from tegrad.llm import engine

    def ours(*_: object, q8: bool, **__: object) -> None:
        assert q8
        raise UnsupportedModelError("heads of 80 are not run")

    monkeypatch.setattr(engine, "suits_named", lambda device: suits)
    monkeypatch.setattr(engine, "Engine", ours)
    file = type("File", (), {"path": Path("model.gguf")})()
    with pytest.raises(ModelError) as refused:
        start.speaker(file, 64, q8=True)  # type: ignore[arg-type]
    assert str(refused.value) == said


@pytest.mark.board
def test_a_long_prompt_runs_on_a_model_whose_prompts_are_fed_a_step_each(tmp_path: Path) -> None:
    from tegrad.llm.engine import LONGER_PROMPT_TOKENS

    shape = Shape(dim=288, ffn=576, heads=6, kv_heads=3, vocab=301, layers=1)
    path = write(tmp_path / "model.gguf", shape, TYPE.F16)
    result = tegrad(str(path), "zyx" * 30, "-n", "2", "--json")
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    assert (figures["steps"], figures["tokens"]) == ("kernels", 2)
    assert figures["prompt_tokens"] > LONGER_PROMPT_TOKENS


@pytest.mark.board
def test_ctrl_c_ends_cleanly_and_leaves_no_process() -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "tegrad", "run", "And it came to pass", "-n", "100000"],
        env=environment(**{MARK: mark}), stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(1)  # it is generating
    os.killpg(process.pid, signal.SIGINT)  # a terminal's Ctrl-C reaches the whole foreground group
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"Traceback" not in errors
    assert until(iter(lambda: not marked(mark), None), 60), marked(mark)


@pytest.mark.board
def test_a_home_that_cannot_be_written_is_said_and_not_needed(tmp_path: Path) -> None:
    """Every kernel is compiled while the GPU is waited for: of a model that has few, with patience."""
    path = write(tmp_path / "model.gguf", Shape(dim=32, ffn=32, heads=1, kv_heads=1, vocab=301, layers=1), TYPE.Q8_0)
    words = (str(path), "zyx", "--max-tokens", "2", "--temperature", "0")
    done = tegrad(*words, HOME="/proc/none", XDG_CACHE_HOME="", HCQDEV_WAIT_TIMEOUT_MS="200000")
    assert done.returncode == 0, done.stderr
    assert "cannot be written" in done.stderr


@pytest.mark.board
def test_tokens_are_drawn_as_the_models_file_says_unless_the_command_line_does(tmp_path: Path) -> None:
    """A top-k of 1 takes the likeliest token at any temperature."""
    extra = {"general.sampling.temp": 2.0, "general.sampling.top_k": 1}
    shape = Shape(dim=32, ffn=32, heads=1, kv_heads=1, vocab=301, layers=1, extra=extra)
    path = write(tmp_path / "model.gguf", shape, TYPE.Q8_0)

    def said(*words: str) -> str:
        done = tegrad(str(path), "zyx", "--max-tokens", "6", "--seed", "3", "--json", *words)
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["text"])

    likeliest = said("--temperature", "0")
    assert said() == said("--temperature", "1.5") == likeliest
    assert said("--top-k", "0") != likeliest
