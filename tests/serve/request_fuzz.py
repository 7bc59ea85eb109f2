"""Requests by schemathesis of the server's own document: `python tests/serve/request_fuzz.py --count 10000 --seed 1`.

They go to `tegrad serve` as a program: its own process, and the engines of two small models of random weights on
emulated Orins. One has the shipped model's vocabulary and template, the other makes vectors of texts. Several requests
are under way at once, and beside them those of other clients, whose answers can only be a word that they alone know.
What is found is a status of 500 or more, but for a client's own `timeout`; an answer that the document denies, or that
does not come in time; and a word in an answer to another client. It is printed with what was asked; the last line is
JSON, and the exit code 1 where something was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import secrets
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import hypothesis
import requests
import schemathesis
from gguf import GGUFReader
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

sys.path.insert(0, str(Path(__file__).parents[1] / "llm"))

from processes import patience

from tegrad.llm.gguf import Gguf
from tegrad.models import SMALL
from tegrad.serve.app import document

SECONDS = 60.0
"""That a request may take."""
AT_ONCE, OTHERS = 6, 2
"""Requests of the document that are under way, and other clients beside them."""
ROUND = 100
"""Cases of an operation that hypothesis makes out of one seed."""
WORD = re.compile("witness-[0-9a-f]{12}")
PIECE = re.compile(r'"(?:text|content|response|delta|thinking|reasoning_content)": ?"((?:[^"\\]|\\.)*)"')
FULL = 429
"""The status where as many requests wait as may: its header says when to ask again."""
LATE = "no token came in the time that a request may take"
NAMES = ["small", "vectors"]
ENDS = 8
"""By how much the logit of the token that ends a text is larger, so that answers are short."""


def _named() -> dict[str, Any]:
    """The document, which says besides what the models are called: else nearly every request names none there is."""
    made = document()
    for operation in (one for path in made["paths"].values() for one in path.values() if "requestBody" in one):
        fields = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
        fields["model"] = {"anyOf": [{"enum": NAMES}, {"enum": NAMES[:1]}, fields["model"]]}
    return made


OPERATIONS: dict[str, Any] = {
    found.ok().label: found.ok() for found in schemathesis.openapi.from_dict(_named()).get_all_operations()
}


class Requests:
    """Requests to a server, what came of them, and what was found."""

    def __init__(self, url: str, seconds: float = SECONDS) -> None:
        self.url, self.seconds = url, seconds
        self.found: list[str] = []
        self.statuses: Counter[str] = Counter()
        self.words = 0
        """Answers that other clients had."""
        self.slowest = 0.0
        self._distinct: set[int] = set()
        self._free, self._lock = threading.Semaphore(AT_ONCE), threading.Lock()
        self._ended = threading.Event()

    @property
    def count(self) -> int:
        """Different requests so far."""
        return len(self._distinct)

    def send(self, count: int, seed: int) -> None:
        """So many different ones, and those of other clients meanwhile."""
        with ThreadPoolExecutor(AT_ONCE + OTHERS) as pool:
            others = [pool.submit(self._other) for _ in range(OTHERS)]
            for number in itertools.count(seed):
                for label in OPERATIONS:
                    if self.count < count and (number == seed or _varied(label)):
                        self._round(pool, label, number, count)
                if self.count >= count:
                    break
            self._ended.set()
            for other in others:
                other.result()

    def _round(self, pool: ThreadPoolExecutor, label: str, seed: int, count: int) -> None:
        """Requests of an operation out of a seed, as long as there are too few."""

        @hypothesis.seed(seed)
        @settings(
            max_examples=ROUND, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        @given(_cases(OPERATIONS[label]))
        def each(case: Case) -> None:
            if self.count < count:
                self._free.acquire()
                pool.submit(self._one, case, f"{label}, seed {seed}")

        each()

    def _one(self, case: Case, where: str) -> None:
        begun = time.monotonic()
        try:
            response = case.call(base_url=self.url, timeout=self.seconds)
        except requests.RequestException as error:
            return self._tell(f"{where}: {error!r}\n{case.as_curl_command()[:3000]}")
        finally:
            self._free.release()
        asked = response.request
        with self._lock:
            self.slowest = max(self.slowest, time.monotonic() - begun)
            self._distinct.add(hash((asked.method, asked.url, asked.body, tuple(sorted(asked.headers.items())))))
            self.statuses[str(response.status_code)] += 1
            try:
                case.validate_response(response, checks=[content_type_conformance, status_code_conformance])
                assert response.status_code < 400 or b"error" in response.content, "an error that tells of none"
                late = LATE in response.text and b'"timeout"' in (asked.body or b"")
                assert response.status_code < 500 or late, "the server's fault"
                assert not tells(response.text), "another client's text"
            except (AssertionError, FailureGroup) as error:
                told = error.exceptions if isinstance(error, FailureGroup) else [error]
                self._tell(
                    f"{where}: {'; '.join(map(str, told))}\n{case.as_curl_command()[:3000]}\n{response.text[:1000]}"
                )

    def _tell(self, text: str) -> None:
        self.found.append(text)
        print(text, file=sys.stderr, flush=True)

    def _other(self) -> None:
        """A client, whose answers can only be its word."""
        with httpx.Client(base_url=self.url, timeout=self.seconds) as http:
            while not self._ended.wait(0.2):
                word = f"witness-{secrets.token_hex(6)}"
                stream = self.words % 2 == 1
                body = {"prompt": f"Say {word}", "grammar": {"kind": "regex", "text": word}, "stream": stream}
                said = ""
                try:
                    response = http.post("/v1/completions", json={"model": NAMES[0], **body})
                    said = response.text
                    if response.status_code == FULL:
                        self._ended.wait(float(response.headers["retry-after"]))
                        continue
                    assert _said(said) == word
                except (httpx.HTTPError, ValueError, LookupError, AssertionError) as error:
                    self._tell(f"{word}: {error!r}\n{said[:1000]}")
                with self._lock:
                    self.words += 1


def tells(answer: str) -> bool:
    """Whether a client's word is in an answer, or in the pieces of a stream's text."""
    return bool(WORD.search(answer) or WORD.search("".join(PIECE.findall(answer))))


def _varied(label: str) -> bool:
    """Whether an operation has more than one request."""
    return label.startswith("POST") or "{" in label


def _cases(operation: Any) -> st.SearchStrategy[Case]:
    """Of what the document allows and, where an operation takes anything, of what it does not: two in three and one."""
    kinds = [GenerationMode.POSITIVE] * 2 + [GenerationMode.NEGATIVE] * (operation.method == "post")
    return st.one_of(operation.as_strategy(generation_mode=kind) for kind in kinds)


def _said(answer: str) -> str:
    """The text of a completion, or of a stream of one."""
    lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith(("{", "data: {"))]
    return "".join(choice["text"] for line in lines for choice in json.loads(line)["choices"])


@contextmanager
def program(folder: Path) -> Iterator[Any]:
    """The server, both of its models loaded."""
    from program import serving
    from tiny_llama import LARGE_EPS, TYPE, Shape, Vocabulary, rewritten, write

    with Gguf.open(SMALL) as file:
        own = {key.removeprefix("tokenizer.ggml."): value for key, value in file.metadata.items()}
    words: Any = [own[name] for name in ("tokens", "token_type", "merges", "bos_token_id", "eos_token_id")]
    vocabulary = Vocabulary(*words, pre=str(own["pre"]), template=str(own["tokenizer.chat_template"]))
    shape = Shape(arch="qwen3", dim=64, ffn=64, heads=2, kv_heads=1, layers=1, context=256, eps=LARGE_EPS)
    shape = replace(shape, vocab=len(words[0]))
    plain = write(folder / "small.gguf", shape, TYPE.F16, vocabulary=vocabulary)
    (output,) = (tensor for tensor in GGUFReader(plain, "r+").tensors if tensor.name == "output.weight")
    output.data[vocabulary.eos] *= ENDS
    vectors = rewritten(plain, folder / "vectors.gguf", **{"qwen3.pooling_type": 3})
    with serving(folder / "log", str(plain), str(vectors)) as server:
        made = httpx.post(
            f"{server.url}/v1/embeddings", json={"model": "vectors", "input": "tea"}, timeout=patience(120)
        )
        assert made.status_code == 200, made.text
        yield server


def fuzzed(count: int, seed: int) -> tuple[dict[str, Any], list[str]]:
    """What became of requests to the program, counted, and what was found, a text each."""
    started = time.monotonic()
    with TemporaryDirectory() as folder, program(Path(folder)) as server:
        made = Requests(server.url)
        made.send(count, seed)
        if server.process.poll() is not None or server.counted("requests_processing"):
            made.found.append("the server ended, or still answers")
        if not made.words:
            made.found.append("no other client was answered")
        lines = server.log.read_text().splitlines()
        made.found += [line for line in lines if "Traceback" in line or "the engine of this model ended" in line]
    summary = {
        "requests": made.count, "seed": seed, "statuses": dict(sorted(made.statuses.items())), "others": made.words,
        "found": len(made.found), "slowest_s": round(made.slowest, 2), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip
    return summary, made.found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the others count on from it")
    options = parser.parse_args()
    summary, found = fuzzed(options.count, options.seed)
    print(json.dumps(summary))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
