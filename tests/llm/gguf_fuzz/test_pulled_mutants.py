"""Mutants that `tegrad pull` fetches, `tegrad models` lists and the program serves: each answers or is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path

import httpx
import pytest
from gguf_mutants import SERVED, mutant

sys.path.insert(0, str(Path(__file__).parents[2] / "hub"))
sys.path.insert(0, str(Path(__file__).parents[2] / "serve"))
pytest.importorskip("huggingface_hub")
from hub_server import Repository, Server
from program import serving

pytestmark = [pytest.mark.board, pytest.mark.long]
COUNT, FIRST = 50, 5000
ASKED = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
}


def told(*arguments: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "tegrad", *arguments]
    return subprocess.run(command, capture_output=True, check=True, text=True, timeout=600).stdout


def test_pulled_mutants_are_served_or_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Each is asked for by name; those that are loaded leave when the next one comes."""
    made = (mutant(seed, SERVED) for seed in count(FIRST))
    whole = islice((one for one in made if one.size == len(one.data)), COUNT)
    files = {f"owner/m{at}-GGUF": {f"m{at}-Q8_0.gguf": one.data} for at, one in enumerate(whole)}
    with Server() as hub:
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
        hub.repositories |= {repo: Repository(own) for repo, own in files.items()}
        from tegrad.hub.download import pull

        told("pull", next(iter(files)))
        names = [pull(repo).model.name for repo in files]
    rows = json.loads(told("models", "--fit", "16", "--json"))
    assert {row["name"] for row in rows} == set(names)
    seen = Counter("refused" if row["refused"] else "fits" for row in rows)
    with serving(tmp_path / "log", "--keep-alive", "2", "--slots", "2") as server:
        listed = {one["id"] for one in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]}
        assert listed < set(names)
        for name in names:
            for path, asked in ASKED.items():
                body = {"model": name, "max_tokens": 4, "temperature": 0, **asked}
                answer = httpx.post(f"{server.url}{path}", json=body, timeout=300)
                assert answer.status_code in ((200, 400, 503) if name in listed else (404,)), (name, answer.text)
                if answer.status_code != 200:
                    assert answer.json()["error"]["message"].isprintable(), answer.text
                seen[f"{path} {answer.status_code}"] += 1
        assert server.process.poll() is None
        assert "Traceback" not in server.log.read_text()
    record_property("seen", dict(sorted(seen.items())))
    assert seen["/v1/completions 200"] > COUNT // 10 < seen["/v1/completions 404"]
    assert seen["/v1/chat/completions 200"] > 0  # most have no room for a template's text, or no template
