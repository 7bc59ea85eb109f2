"""`tegrad serve` as a program, for tests: started, asked, and nothing of it left in the end."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import processes
from processes import patience, running, until
from tiny_llama import Shape

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=4096)
ENDLESS = {"logit_bias": {str(token): -100 for token in range(297, 301)}, "temperature": 0, "max_tokens": 4000}
"""No token ends the text."""


@dataclass
class Server:
    """The program, and what it has written."""

    process: subprocess.Popen[str]
    mark: str
    log: Path
    url: str

    def post(self, **fields: object) -> httpx.Response:
        """A completion."""
        return httpx.post(f"{self.url}/v1/completions", json={"prompt": "abc", **fields}, timeout=patience())

    def stream(self, **fields: object) -> list[str]:
        """The events of a completion, which never ends by itself."""
        body = {"prompt": "abc", "stream": True, **ENDLESS, **fields}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=patience()) as response:
            return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]

    def engine(self) -> int:
        (pid,) = running(self.mark, "tegrad.serve.engine")
        return pid

    def counted(self, name: str) -> float:
        """A figure's value, of all models together."""
        text = httpx.get(f"{self.url}/metrics", timeout=patience()).text
        return sum(float(found) for found in re.findall(rf"^tegrad:{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@contextmanager
def serving(log: Path, *arguments: str, ready: bool = True) -> Iterator[Server]:
    """The program, in a session of its own; nothing of it may be left in the end."""
    command = [sys.executable, "-m", "tegrad", "serve", "--port", "0", *arguments]
    with processes.marked() as mark, log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True)
        assert process.stdout is not None
        try:
            said = process.stdout.readline() if ready else ""
            url = said.removeprefix("serving at ").strip()
            assert url.startswith("http") or not ready, log.read_text()
            yield Server(process, mark, log, url)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
            until(lambda: not running(mark))


PROGRAM = "import tegrad.__main__ as m; m.entry()"


def refused(*arguments: str, program: str = PROGRAM) -> tuple[int, str]:
    """The exit code of a server that does not start, and what it says at last."""
    command = [sys.executable, "-c", f"import sys; {program}", "serve", "--log", "off", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60), check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.splitlines()[-1]
