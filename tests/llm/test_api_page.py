"""What docs/api.md shows runs as it stands there, and its tables have every option, field and error that there is."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
from tiny_llama import LARGE_EPS, TYPE, Shape, letters, rewritten, write

import tegrad
from tegrad import models
from tegrad.llm.api import DEFAULTS

PAGE = (Path(__file__).parents[2] / "docs/api.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ROWS = dict(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*) \|$", PAGE, re.MULTILINE))


@pytest.mark.board
def test_every_example_runs(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = Shape(arch="qwen3", dim=64, ffn=64, heads=2, kv_heads=1, layers=1, eps=LARGE_EPS)
    plain = write(tmp_path / "plain.gguf", shape, TYPE.F16, vocabulary=letters(300))
    rewritten(plain, tmp_path / "embedding.gguf", **{"qwen3.pooling_type": 3})
    (tmp_path / "model.gguf").symlink_to(models.SMALL)
    monkeypatch.chdir(tmp_path)
    seen: dict[str, object] = {}
    for example in EXAMPLES:
        exec(compile(example, "docs/api.md", "exec"), seen)
        assert capsys.readouterr().out.strip()
    assert len(EXAMPLES) == 8


def test_the_tables_have_every_option_and_field() -> None:
    told = {name for row in ROWS for name in re.findall(r"\w+", row)}
    assert set(DEFAULTS) <= told
    assert {field.name for field in fields(tegrad.Reply)} <= told


def test_the_table_has_the_defaults() -> None:
    """Each option's row is `name` | default | what it is; a field of a reply may have the same name."""
    for names, rest in ROWS.items():
        for name in set(re.findall(r"\w+", names)) & set(DEFAULTS) if " | " in rest else ():
            told, default = rest.split(" | ")[0], dict(DEFAULTS)[name]
            assert told == ("random" if name == "seed" else "none") or float(told) == default, name
