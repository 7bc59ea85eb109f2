"""Remedies name what pip can install: where this tegrad came from, never an index that lacks it."""

import json
import re
from pathlib import Path
from shlex import quote
from types import SimpleNamespace
from typing import Any

import pytest

from tegrad import installed

ROOT = Path(__file__).resolve().parents[1]


def test_a_checkout_names_itself() -> None:
    assert installed.pip_install("board", "compilers") == f"pip install -e '{ROOT}[board,compilers]'"
    assert installed.pip_install() == f"pip install -e {ROOT}"


def recorded(monkeypatch: pytest.MonkeyPatch, site: Path, text: str | None) -> str:
    """The remedy of a tegrad in `site`, whose dist-info has this direct_url.json."""
    found = SimpleNamespace(read_text=lambda name: text)
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: found)
    monkeypatch.setattr(installed, "HERE", site / "tegrad")
    return installed.pip_install("board")


def test_what_pip_recorded_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "it's here"
    folder.mkdir()
    gone = tmp_path / "gone.whl"
    cases: list[tuple[dict[str, Any], str]] = [
        ({"url": folder.as_uri(), "dir_info": {}}, f"pip install {quote(f'{folder}[board]')}"),
        ({"url": gone.as_uri(), "archive_info": {}}, f"pip install '{installed.UNKNOWN}[board]'"),
        (
            {"url": "https://host/tegrad-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'tegrad[board] @ https://host/tegrad-0.1.0-py3-none-any.whl'",
        ),
        (
            {"url": "https://host/tegrad.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}},
            "pip install 'tegrad[board] @ git+https://host/tegrad.git@abc123'",
        ),
    ]
    for direct, told in cases:
        assert recorded(monkeypatch, tmp_path, json.dumps(direct)) == told
    for broken in (None, "", "[]", "{"):
        assert recorded(monkeypatch, tmp_path, broken) == f"pip install '{installed.UNKNOWN}[board]'"


def test_no_text_sends_anybody_to_an_index_for_tegrad() -> None:
    texts = [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("tegrad/**/*.py")]
    said = re.compile(r"""pip install (?:-\w+ )*['"]?tegrad\b""")
    found = [path.name for path in texts if path.name != "installed.py" and said.search(path.read_text())]
    assert found == []
