"""The second peer runs alone, in its faster form, and its fault or absence is named."""

import json
import os
from pathlib import Path

import pytest

from tegrad.bench import peers
from tegrad.bench.record import RecordError

FAKE = """
import json, os, sys
log = {"env": {k: v for k, v in os.environ.items() if k.startswith(("TEGRAD", "PYTHON", "DEV", "REALIZE"))},
       "arguments": sys.argv[1:]}
open(os.path.join(os.path.dirname(__file__), "log"), "a").write(json.dumps(log) + "\\n")
speed = 30 if os.environ["REALIZE"] == "0" else 100
count = int(sys.argv[sys.argv.index("--benchmark") + 1])
print("using model \\"x\\" with 1 bytes and 1 params")
for at in range(count):
    print(f" 9.50 ms, {1.0 if at < 8 else speed + at % 3:6.2f} tok/s,   80.25 GB/s, 1015/2400 MB  --  12 tok")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "tinygrad" / "llm"
    package.mkdir(parents=True)
    (tmp_path / "tinygrad" / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "cli.py").touch()
    (package / "__main__.py").write_text(FAKE)
    monkeypatch.setenv(peers.TINYGRAD_FOLDER, os.fspath(tmp_path))
    return tmp_path


def test_the_faster_form_is_kept_without_its_first_tokens(folder: Path) -> None:
    side = peers.tinygrad_decode(Path("/models/some.gguf"))
    assert side is not None
    assert len(side.samples) == peers.TINYGRAD_TOKENS
    assert side.median == 101
    assert side.command.startswith("DEV=CUDA REALIZE=1 python -m tinygrad.llm --model some.gguf --benchmark")
    runs = [json.loads(line) for line in (folder / "tinygrad" / "llm" / "log").read_text().splitlines()]
    assert [run["env"]["REALIZE"] for run in runs] == ["0", "1"]
    for run in runs:
        assert run["env"]["PYTHONPATH"] == os.fspath(folder)
        assert {name: value for name, value in run["env"].items() if name.startswith("TEGRAD")} == {"TEGRAD": "0"}


def test_without_a_folder_there_is_no_second_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(peers.TINYGRAD_FOLDER, raising=False)
    assert peers.tinygrad_decode(Path("some.gguf")) is None
    monkeypatch.setenv(peers.TINYGRAD_FOLDER, os.fspath(tmp_path))
    with pytest.raises(RecordError, match="unpack tinygrad"):
        peers.tinygrad_decode(Path("some.gguf"))


def test_its_failure_is_told_in_its_own_words(folder: Path) -> None:
    (folder / "tinygrad" / "llm" / "__main__.py").write_text("raise SystemExit('no CUDA here')")
    with pytest.raises(RecordError, match="no CUDA here"):
        peers.tinygrad_decode(Path("some.gguf"))
    with pytest.raises(RecordError, match="printed no speeds"):
        peers.tinygrad_speeds("using model")
